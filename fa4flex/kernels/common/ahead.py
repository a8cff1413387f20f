"""Elements of captured tensors that are read a tile before a hook uses them.

They are long on their way. Read where a hook uses them, or read early and used in the same breath, as the
compiler likes to place what a hook computes of them, they keep the products waiting. So the hook is called
twice: once to read, where nothing but what it reads is kept, and a tile later to compute, where it finds that
in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import BFloat16, cute


class Held:
    """Elements that a hook reads for a tile, in the order in which it does, which is always the same."""

    def __init__(self) -> None:
        self.elements: list[cute.Tensor] = []
        self.next = 0

    def put(self, value: Any) -> None:
        """Keep the next element."""
        if self.next == len(self.elements):
            self.elements.append(cute.make_rmem_tensor((1,), type(value)))
        self.elements[self.next][0] = value
        self.next += 1

    def take(self) -> Any:
        """The next element."""
        self.next += 1
        return self.elements[self.next - 1][0]


class HeldTable:
    """A captured tensor, of which elements are held: it `reads` them, or has them from before."""

    def __init__(self, table: cute.Tensor, held: Held, reads: bool) -> None:
        self.table, self.held, self.reads = table, held, reads
        self.shape = table.shape

    def element(self, load: Callable[[cute.Tensor, bool], Any]) -> Any:
        """load(table, pairs): an element as it is in memory. pairs: neighbours may be loaded at once."""
        if not self.reads:
            return self.held.take()
        # Of a word with two bfloat16, one would be taken out at once.
        value = load(self.table, self.table.element_type is not BFloat16)
        self.held.put(value)
        return value


def holding(operands: tuple[Any, ...], held: Held, reads: bool) -> tuple[Any, ...]:
    """Captured tensors whose elements are held; the first one follows."""
    held.next = 0
    return tuple(HeldTable(table, held, reads) for table in operands)
