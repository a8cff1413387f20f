"""Inputs of a traced function besides indices: captured tensors and run-time numbers, by slot."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.expr import READS, Expr, slot_of, walk
from fa4flex.codegen.trace.paths import Guard, Path
from fa4flex.codegen.trace.snapshot import Opaque, snapshot
from fa4flex.codegen.trace.traced import Traced

Seen = Literal["element", "device", "grad", "all"] | int
"""Dependence on a captured tensor: "element" (one is read), its device, whether it requires a gradient, "all"
(but contents), or a dimension's extent."""


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
    results: list[Any] = []
    map_leaves(tree, results.append)
    return results


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

    def bases(self, kind: type = Tensor) -> Iterator[Any]:
        """Tensors, or places of tensors, that it is computed from."""
        for leaf in leaves((self.args, dict(self.kwargs))):
            if isinstance(leaf, Recipe):
                yield from leaf.bases(kind)
            elif isinstance(leaf, kind):
                yield leaf

    def key(self) -> Hashable:
        """Equal for two recipes that do the same to the same tensors."""
        owner = getattr(self.function, "__self__", None)
        called = (
            id(owner) if owner is not None else None,
            getattr(self.function, "__name__", id(self.function)),
        )
        value = map_leaves((self.args, dict(self.kwargs)), _leaf_key)
        return called, _hashable(value), self.output, self.grad

    def exchanged(self, kind: type, other: Callable[[Any], Any]) -> Recipe:
        """The same recipe with `other(leaf)` for each of its leaves of that kind."""

        def exchange(leaf: Any) -> Any:
            if isinstance(leaf, Recipe):
                return leaf.exchanged(kind, other)
            return other(leaf) if isinstance(leaf, kind) else leaf

        args, kwargs = map_leaves((self.args, dict(self.kwargs)), exchange)
        return replace(self, args=args, kwargs=kwargs)


def _run_again(leaf: Any) -> Any:
    return leaf.run() if isinstance(leaf, Recipe) else leaf


def _leaf_key(leaf: Any) -> Hashable:
    """Equal only for equal leaves: what has no snapshot is told apart by its identity."""
    if isinstance(leaf, Recipe):
        return leaf.key()
    try:
        return ("object", id(leaf)) if isinstance(leaf, Tensor) else ("value", snapshot(leaf))
    except Opaque:
        return "object", id(leaf)


def _hashable(tree: Any) -> Hashable:
    """A tree whose leaves are hashable, as tuples."""
    if isinstance(tree, dict):
        return "dict", tuple((key, _hashable(item)) for key, item in tree.items())
    if isinstance(tree, slice):
        return "slice", tree.start, tree.stop, tree.step
    return (type(tree).__name__, *map(_hashable, tree)) if isinstance(tree, (list, tuple)) else tree


@dataclass(frozen=True)
class Place:
    """The position of a tensor among those that a trace reads."""

    position: int


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that a traced function reads: `base`, or what `recipe` computes from captured tensors."""

    name: str
    base: Tensor | Place | None
    recipe: Recipe | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def value(self) -> Tensor:
        """The current tensor, computed anew when it is derived; shape `shape`, dtype `dtype`."""
        if isinstance(self.base, Tensor):
            return self.base
        assert self.recipe is not None, "an operand has a base or a recipe"
        return self.recipe.run()

    def at(self, bases: Sequence[Tensor]) -> Operand:
        """The same operand with positions in `bases` in place of its tensors: it holds none of them."""
        places = {id(x): Place(i) for i, x in enumerate(bases)}
        recipe = (
            None if self.recipe is None else self.recipe.exchanged(Tensor, lambda x: places.get(id(x), x))
        )
        return replace(self, base=None if self.base is None else places[id(self.base)], recipe=recipe)

    def of(self, bases: Sequence[Tensor]) -> Operand:
        """The operand of tensors in place of positions: its shape and dtype are theirs."""
        if self.recipe is not None:
            return replace(self, recipe=self.recipe.exchanged(Place, lambda place: bases[place.position]))
        assert isinstance(self.base, Place), "an operand has a base or a recipe"
        base = bases[self.base.position]
        return replace(self, base=base, shape=tuple(base.shape))

    def moved(self, by: int) -> Operand:
        """The operand of positions, counted from `by` on."""

        def there(place: Place) -> Place:
            return Place(place.position + by)

        recipe = None if self.recipe is None else self.recipe.exchanged(Place, there)
        return replace(self, base=there(self.base) if isinstance(self.base, Place) else None, recipe=recipe)

    @property
    def differentiable(self) -> bool:
        """True if autograd wants a gradient for this tensor."""
        if not self.dtype.is_floating_point:
            return False
        if isinstance(self.base, Tensor):
            return self.base.requires_grad
        assert self.recipe is not None, "an operand has a base or a recipe"
        return self.recipe.grad and any(base.requires_grad for base in self.recipe.bases())


_LIMITS = {int: "int64", float: "finite"}
"""Beyond these, a number is part of the program rather than one that varies."""


class CapturedNumber(NamedTuple):
    """A run-time number, with what the user would call it, and where it is read."""

    name: str
    value: int | float
    path: Path


@dataclass
class Captures:
    """Tensors and run-time numbers by slot; shared between the traces of a score mod and of a mask."""

    operands: tuple[Operand, ...] = ()
    numbers: tuple[CapturedNumber, ...] = ()
    paths: dict[int, Path] = field(default_factory=dict)
    """Path to each captured tensor that the traces read, by id."""
    guards: tuple[Guard, ...] = ()
    """Conditions under which the traces hold for another call."""
    opaque: str | None = None
    """Something that the traces may depend on and that no guard can watch: they serve one call."""
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

    def scalar_slot(self, name: str, value: int | float, path: Path) -> int:
        """A new slot for a run-time number, which was found at `path`."""
        self.numbers += (CapturedNumber(name, value, path),)
        return len(self.numbers) - 1

    def depend(
        self,
        guards: Sequence[Guard],
        results: Mapping[int, tuple[Tensor, str, Path]],
        seen: Mapping[int, set[Seen]],
        opaque: str | None,
    ) -> None:
        """Note what a finished trace depends on: guards, and what was `seen` of tensors that were `found`."""
        self.guards += tuple(guards)
        self.opaque = self.opaque or opaque
        for key, (tensor, _, path) in results.items():
            self.guards += tuple(_guards_of(tensor, path, seen.get(key, set())))
            if key in seen and self.paths.setdefault(key, path) is not path:
                self.guards += (Guard("same", path, self.paths[key]),)

    def bases(self) -> tuple[Tensor, ...]:
        """The captured tensors that operands are, or are computed from."""
        results: dict[int, Tensor] = {}
        for operand in self.operands:
            own = [operand.base] if isinstance(operand.base, Tensor) else []
            of_recipe = [] if operand.recipe is None else operand.recipe.bases()
            results |= {id(x): x for x in (*own, *of_recipe) if id(x) in self.paths or own}
        return tuple(results.values())

    @property
    def scalars(self) -> tuple[int | float, ...]:
        return tuple([number.value for number in self.numbers])

    def mark(self) -> tuple[int, int]:
        """Numbers of operands and of numbers, to `rewind` an abandoned trace to."""
        return len(self.operands), len(self.numbers)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget everything captured since `mark`."""
        self.operands, self.numbers = self.operands[: mark[0]], self.numbers[: mark[1]]
        del self._keys[mark[0] :]

    def finish(self, *traced: Traced) -> tuple[Traced, ...]:
        """The traces with slots numbered by first use in their roots, and unused slots dropped.

        Call once, after every trace that shares these captures: two programs that differ only in captured
        numbers, or in numbers and tensors they never read, then have the same roots.
        """
        tensor_slots, scalar_slots = _used_slots([t.root for t in traced])
        self.operands = tuple(self.operands[slot] for slot in tensor_slots)
        self._keys = [self._keys[slot] for slot in tensor_slots]
        self.numbers = tuple(self.numbers[slot] for slot in scalar_slots)
        self.guards += tuple(
            Guard(_LIMITS[type(x.value)], x.path)
            for x in self.numbers
            if type(x.value) in _LIMITS and x.path.kind != "extent"
        )
        return tuple(t.renumbered(tensor_slots, scalar_slots) for t in traced)


def _guards_of(tensor: Tensor, path: Path, seen: set[Seen]) -> Iterator[Guard]:
    """Guards on what must stay as it is of a captured tensor."""
    yield Guard("tensor", path, type(tensor))
    if seen:
        yield Guard("dtype", path, tensor.dtype)
        yield Guard("rank", path, tensor.dim())
    for dimension in sorted(what for what in seen if isinstance(what, int)):
        yield Guard("extent", path, (dimension, int(tensor.shape[dimension])))
    if "all" in seen:
        yield Guard("layout", path, tuple(tensor.shape))
    if not seen.isdisjoint(("all", "device")):
        yield Guard("device", path, tensor.device)
    if not seen.isdisjoint(("all", "grad")):
        yield Guard("grad", path, tensor.requires_grad)


def _used_slots(roots: Sequence[Expr]) -> tuple[dict[int, int], dict[int, int]]:
    """Old slot -> new slot, for the tensors and for the numbers that `roots` read, in order of first use."""
    tensors: dict[int, int] = {}
    scalars: dict[int, int] = {}
    for node in walk(*roots):
        if node.op in READS:
            tensors.setdefault(slot_of(node), len(tensors))
        elif node.op == "scalar":
            scalars.setdefault(node.value, len(scalars))
    return tensors, scalars
