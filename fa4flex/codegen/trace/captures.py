"""What a traced function reads besides indices: captured tensors and run-time numbers, by slot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.expr import Expr, walk
from fa4flex.codegen.trace.traced import Traced


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """`tree` with every leaf changed; tuples, lists, dictionaries and slices are the branches."""
    if isinstance(tree, tuple):
        items = (map_leaves(item, change) for item in tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map_leaves(item, change) for item in tree]
    if isinstance(tree, dict):
        return {key: map_leaves(item, change) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(item, change) for item in (tree.start, tree.stop, tree.step)))
    return change(tree)


def leaves(tree: Any) -> list[Any]:
    """Every leaf of `tree`, left to right."""
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


@dataclass(frozen=True, eq=False)
class Recipe:
    """A tensor that the mod computed from captured tensors alone, as the call that computes it again.

    Its arguments are captured tensors and other recipes, so an in-place update of a captured tensor is
    seen at the next launch, and autograd carries gradients to it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: int
    grad: bool
    """False where the mod computed it under torch.no_grad()."""

    def run(self) -> Tensor:
        again = [map_leaves(tree, _run_again) for tree in (self.args, dict(self.kwargs))]
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            tensor: Tensor = leaves(self.function(*again[0], **again[1]))[self.output]
        return tensor

    def bases(self) -> Iterator[Tensor]:
        for leaf in leaves((self.args, dict(self.kwargs))):
            if isinstance(leaf, Recipe):
                yield from leaf.bases()
            elif isinstance(leaf, Tensor):
                yield leaf

    def key(self) -> Hashable:
        """Equal for two recipes that do the same to the same tensors."""
        called = getattr(self.function, "__self__", None), getattr(self.function, "__name__", self.function)
        return (
            repr(called),
            repr(map_leaves((self.args, dict(self.kwargs)), _leaf_key)),
            self.output,
            self.grad,
        )


def _run_again(leaf: Any) -> Any:
    return leaf.run() if isinstance(leaf, Recipe) else leaf


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Recipe):
        return leaf.key()
    return ("tensor", id(leaf)) if isinstance(leaf, Tensor) else repr(leaf)


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that a traced function reads: `base`, or what `recipe` computes from captured tensors."""

    name: str
    base: Tensor | None
    recipe: Recipe | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def value(self) -> Tensor:
        """The current tensor, computed anew when it is derived; shape `shape`, dtype `dtype`."""
        if self.base is not None:
            return self.base
        assert self.recipe is not None, "an operand has a base or a recipe"
        return self.recipe.run()

    @property
    def differentiable(self) -> bool:
        """Whether autograd wants a gradient for this tensor."""
        if not self.dtype.is_floating_point:
            return False
        if self.base is not None:
            return self.base.requires_grad
        assert self.recipe is not None, "an operand has a base or a recipe"
        return self.recipe.grad and any(base.requires_grad for base in self.recipe.bases())


@dataclass(frozen=True)
class Mark:
    """How much a Captures held at some moment, so that an abandoned trace can be undone."""

    operands: int
    scalars: int


@dataclass
class Captures:
    """Tensors and run-time numbers by slot; shared between the traces of a score mod and of a mask."""

    operands: tuple[Operand, ...] = ()
    scalars: tuple[int | float, ...] = ()
    scalar_names: tuple[str, ...] = ()
    _keys: list[Hashable] = field(default_factory=list, repr=False)

    def slot(self, source: Tensor | Recipe, name: str, like: Tensor) -> int:
        """The slot of a captured tensor or of a recipe whose result looks like `like`."""
        key = ("tensor", id(source)) if isinstance(source, Tensor) else source.key()
        if key in self._keys:
            return self._keys.index(key)
        base, recipe = (source, None) if isinstance(source, Tensor) else (None, source)
        self.operands += (Operand(name, base, recipe, tuple(like.shape), like.dtype),)
        self._keys.append(key)
        return len(self.operands) - 1

    def scalar_slot(self, name: str, value: int | float) -> int:
        """A new slot for a run-time number."""
        self.scalars += (value,)
        self.scalar_names += (name,)
        return len(self.scalars) - 1

    def mark(self) -> Mark:
        return Mark(len(self.operands), len(self.scalars))

    def rewind(self, mark: Mark) -> None:
        """Forget everything captured since `mark`."""
        self.operands = self.operands[: mark.operands]
        del self._keys[mark.operands :]
        self.scalars = self.scalars[: mark.scalars]
        self.scalar_names = self.scalar_names[: mark.scalars]

    def finish(self, *traced: Traced) -> tuple[Traced, ...]:
        """The traces with slots numbered by first use in their roots, and unused slots dropped.

        Call once, after every trace that shares these captures: two programs that differ only in captured
        numbers, or in numbers and tensors they never read, then have the same roots.
        """
        tensor_slots, scalar_slots = _used_slots([t.root for t in traced])
        self.operands = tuple(self.operands[slot] for slot in tensor_slots)
        self._keys = [self._keys[slot] for slot in tensor_slots]
        self.scalars = tuple(self.scalars[slot] for slot in scalar_slots)
        self.scalar_names = tuple(self.scalar_names[slot] for slot in scalar_slots)
        return tuple(t.renumbered(tensor_slots, scalar_slots) for t in traced)


def _used_slots(roots: Sequence[Expr]) -> tuple[dict[int, int], dict[int, int]]:
    """Old slot -> new slot, for the tensors and for the numbers that `roots` read, in order of first use."""
    tensors: dict[int, int] = {}
    scalars: dict[int, int] = {}
    for node in walk(*roots):
        if node.op == "load":
            tensors.setdefault(node.value, len(tensors))
        elif node.op == "search":
            tensors.setdefault(node.value[0], len(tensors))
        elif node.op == "scalar":
            scalars.setdefault(node.value, len(scalars))
    return tensors, scalars
