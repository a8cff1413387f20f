"""Arguments of the kernel for sums per key."""

from __future__ import annotations

from typing import Any, ClassVar

from fa4flex.kernels.common.arguments import named
from fa4flex.kernels.plan.arguments import MASS

_Arguments: Any = named("_MassArguments", MASS.read_by("kernel"))


class MassArguments(_Arguments):
    """q, k [B, S, H, D], or packed [T, H, D]; any strides whose last is 1.
    lse2 float32 [B, H, R], R being S padded to ROW_BLOCK: log-sum-exp in log2 units; rows without keys, and
    those past the end, have inf. Packed, [H, R]: rows of a sequence begin at `first_row` of it.
    mass float32 [B, H, Skv], or packed [H, Tk]: keys of no sequence stay as they are.
    tables: by tile of keys, the tiles of queries to visit; pointers [B, H, key tiles, 2].

    To what walks tiles of keys in backward passes it looks like theirs, with sums of each query head.
    """

    turns: ClassVar[None] = None
    counters: ClassVar[None] = None

    @property
    def v(self) -> Any:
        """Values as wide as keys, which the size of sections follows from."""
        return self.k

    @property
    def dk_parts(self) -> Any:
        """Tensor with as many heads as have sums of their own."""
        return self.q
