"""Online softmax of products of codes: they are brought to scale where maxima and exponents are taken, and
probabilities fill the range of e4m3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cutlass import Float32, cute, select_

from fa4flex.kernels.common.softmax import Finished, LaneSoftmax, OnlineSoftmax


@dataclass(frozen=True)
class CodeSoftmax(OnlineSoftmax):
    """Softmax in which y of a row is lift * score, of the tile of keys at hand: by row, what a consumer says;
    None: y is the score. late: function that gives what is added to all y of each row, when these are done;
    None: 0. headroom: logarithm of base 2 of the largest probability."""

    headroom: float = field(default=0.0)
    lift: cute.Tensor | None = field(default=None)
    late: Callable[[], tuple[Float32, ...]] | None = field(default=None)

    def maxima(self, scores: cute.Tensor) -> list[Float32]:
        if self.lift is None:
            return super().maxima(scores)
        found = [x * self.lift[r] for r, x in enumerate(self.largest(scores))]
        self.note(found)
        return found

    def shift_of(self, largest: Float32) -> Float32:
        return largest * self.factor - self.headroom if self.headroom else largest * self.factor

    def exponents(self, r: int) -> tuple[Float32, Float32]:
        if self.lift is None:
            return self.factor, self.state.shift[r]
        return self.factor * self.lift[r], self.state.shift[r]

    def finish(self, sink: Float32 | None) -> list[Finished]:
        state = self.state
        for r, of_row in enumerate(() if self.late is None else self.late()):
            # A row without keys has none of it, and may be NaN.
            more = select_(state.largest[r] == -Float32.inf, Float32(0.0), of_row)
            state.largest[r] = state.largest[r] + more
            state.shift[r] = state.shift[r] + more * self.factor
            if state.seen is not None:
                state.seen[r] = state.seen[r] + more
        return super().finish(sink)


class LaneCodeSoftmax(CodeSoftmax, LaneSoftmax):
    """The same of one row that a lane has to itself."""
