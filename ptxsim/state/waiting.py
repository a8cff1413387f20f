"""The clusters of a launch that have not started: they start one after another, or are cancelled."""

from __future__ import annotations

from collections.abc import Callable

from ptxsim.state.cta import Cluster, Grid, Triple


class Waiting:
    """Clusters by number, x fastest. `choose` says which of so many waiting clusters a request cancels, or
    None where it is refused; `made` are those that have started."""

    def __init__(self, launch: Grid, choose: Callable[[int], int | None]) -> None:
        self.launch, self._choose = launch, choose
        self._counts = [n // c for n, c in zip(launch.grid, launch.cluster)]
        x, y, z = self._counts
        self._left = list(range(x * y * z - 1, -1, -1))
        """The next to start is the last."""
        self.made: list[Cluster] = []

    def start(self) -> Cluster | None:
        """The next cluster; None after the last."""
        if not self._left:
            return None
        number = self._left.pop()
        corner, (x, y, z) = self._corner(number), self.launch.cluster
        indices = [
            (corner[0] + i, corner[1] + j, corner[2] + k)
            for k in range(z)
            for j in range(y)
            for i in range(x)
        ]
        self.made.append(Cluster(self.launch, number, indices))
        return self.made[-1]

    def cancel(self) -> Triple | None:
        """Index of the first CTA of a cluster that will not start any more; None where there is none left, or
        the request is refused: hardware may want to run something else next."""
        chosen = self._choose(len(self._left)) if self._left else None
        return None if chosen is None else self._corner(self._left.pop(-1 - chosen))

    def _corner(self, number: int) -> Triple:
        x, y, _ = self._counts
        (a, b, c), place = self.launch.cluster, (number % x, number // x % y, number // (x * y))
        return a * place[0], b * place[1], c * place[2]
