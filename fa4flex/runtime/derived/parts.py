"""Functions of a call's tensors that are computed piece by piece, and their derivatives, which are such, too.

Let f take parts of tensors to parts of results, for each piece; results are written side by side, or added
up. Its vector-Jacobian product takes the same parts, and those of upstream gradients, to parts of gradients:
`Pull(f)`. Its Jacobian-vector product takes parts of tensors and tangents to parts of tangents: `Push(f)`.
Both are computed again from the tensors, piece by piece, and have derivatives of their own by the same rules.
So no derivative, of whatever order, keeps more than the tensors.

Source of the second rule: J t is the gradient of <J^T u, t> by u (Townsend, "A new trick for calculating
Jacobian vector products", 2017).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fa4flex.runtime import compute
from fa4flex.runtime.blockwise import inputs_of_call, sequences_of_call
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.derived.pieces import Kind, Piece, attend, pieces
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.programs import Published
from fa4flex.torch_internals import MappedDimension


@dataclass(frozen=True, eq=False)
class Recipe:
    """A call without the tensors that it can be differentiated by.

    `tensors` of a call are q, k, v [B, H, S, D], of packed sequences [1, H, T, D]; sinks if it has them;
    operands."""

    program: Published
    scalars: tuple[Any, ...]
    scale: float
    sinks: bool
    lengths: SequenceLengths

    @property
    def packed(self) -> bool:
        return self.lengths.cu_seqlens_q is not None

    def kinds(self, count: int) -> tuple[Kind, ...]:
        """The ways in which `count` tensors of the call are cut."""
        fixed: list[Kind] = ["queries", "keys", "keys"]
        if self.sinks:
            fixed.append("heads")
        while len(fixed) < count:
            fixed.append("whole")
        return tuple(fixed)

    def call(self, tensors: Sequence[Tensor]) -> Call:
        """The call, of packed tensors where it has such."""
        q, k, v, *rest = tensors
        sinks = rest.pop(0) if self.sinks else None
        if self.packed:
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        kv = Contiguous(k, v)
        return Call(q, kv, tuple(rest), sinks, self.lengths, self.scalars, self.scale, True, ("lse",))

    def pieces(self, tensors: Sequence[Tensor]) -> Iterator[Piece]:
        """The pieces of the call, of tensors with contents."""
        call = self.call(tensors)
        sequences = None if self.lengths is NO_LENGTHS else sequences_of_call(call)
        with _default_device(torch.device("cpu")):
            inputs = inputs_of_call(self.program, call)
            found = list(pieces(self.program.facts, inputs, sequences))
        yield from found


def laid(x: Tensor, packed: bool) -> Tensor:
    """Packed tokens [T, H, D] as [1, H, T, D]."""
    return x.transpose(0, 1).unsqueeze(0) if packed else x


def laid_rows(x: Tensor, packed: bool) -> Tensor:
    """Packed rows [H, T] as [1, H, T]."""
    return x.unsqueeze(0) if packed else x


class Like(NamedTuple):
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Level(Protocol):
    """A function of parts of tensors, which are cut as `kinds` say, to parts of results."""

    @property
    def kinds(self) -> tuple[Kind, ...]: ...

    @property
    def of_results(self) -> tuple[Kind, ...]: ...

    def results(self, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Like]:
        """Shapes of the results."""
        ...

    def part(self, piece: Piece, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Results of a piece, of its parts of the tensors."""
        ...

    def at_once(self, recipe: Recipe, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Results by something faster than pieces, if there is some."""
        ...


@dataclass(frozen=True)
class Attention:
    """out and lse of a call, whose tensors are cut as `kinds` say."""

    kinds: tuple[Kind, ...]
    of_results: ClassVar[tuple[Kind, ...]] = ("queries", "rows")

    def results(self, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Like]:
        """Shapes of the results."""
        q, _, v = tensors[:3]
        rows, precision = tuple(q.shape[:3]), recipe.program.precision
        out = Like((*rows, v.shape[-1]), precision.output_dtype(q.dtype))
        return [out, Like(rows, precision.compute_dtype(q.dtype))]

    def part(self, piece: Piece, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Results of a piece, of its parts of the tensors."""
        return attend(piece, *tensors)

    def at_once(self, recipe: Recipe, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Results by a forward pass."""
        out, lse, *_ = compute.forward(recipe.program, recipe.call(tensors))
        if recipe.packed:  # copies: what is given a tangent may not be a view
            return torch.stack([out.transpose(0, 1)]), torch.stack([lse])
        return out, lse


@dataclass(frozen=True)
class Pull:
    """The vector-Jacobian product of `of` by its tensors number `needs`: of its tensors, and of an upstream
    gradient for each of its results."""

    of: Level
    needs: tuple[int, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (*self.of.kinds, *self.of.of_results)

    @property
    def of_results(self) -> tuple[Kind, ...]:
        return tuple([self.of.kinds[n] for n in self.needs])

    def results(self, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Like]:
        """Shapes of the results: those of what is differentiated by."""
        return [Like(tuple(tensors[n].shape), tensors[n].dtype) for n in self.needs]

    def part(self, piece: Piece, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Results of a piece, of its parts of the tensors."""
        create, inner = torch.is_grad_enabled(), len(self.of.kinds)
        with torch.enable_grad():
            own = _leaves(tensors[:inner], self.needs)
            found = self.of.part(piece, own)
            return _gradients(found, [own[n] for n in self.needs], tensors[inner:], create)

    def at_once(self, recipe: Recipe, tensors: Sequence[Tensor]) -> None:
        """None: pieces are all there is."""


@dataclass(frozen=True)
class Push:
    """The Jacobian-vector product of `of`: of its tensors, and of a tangent for each of those number
    `moved`."""

    of: Level
    moved: tuple[int, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (*self.of.kinds, *[self.of.kinds[n] for n in self.moved])

    @property
    def of_results(self) -> tuple[Kind, ...]:
        return self.of.of_results

    def results(self, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Like]:
        """Shapes of the results: those of what has tangents."""
        return self.of.results(recipe, tensors[: len(self.of.kinds)])

    def part(self, piece: Piece, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Results of a piece, of its parts of the tensors."""
        create, inner = torch.is_grad_enabled(), len(self.of.kinds)
        with torch.enable_grad():
            own = _leaves(tensors[:inner], self.moved)
            found = self.of.part(piece, own)
            units = [torch.zeros_like(x).requires_grad_() for x in found]
            pulled = _gradients(found, [own[n] for n in self.moved], units, True)
            return _gradients(pulled, units, tensors[inner:], create)

    def at_once(self, recipe: Recipe, tensors: Sequence[Tensor]) -> None:
        """None: pieces are all there is."""


def _leaves(tensors: Sequence[Tensor], needs: Sequence[int]) -> list[Tensor]:
    """The tensors, those number `needs` such that gradients by them can be asked for."""
    return [
        x.detach().requires_grad_() if n in needs and not x.requires_grad else x
        for n, x in enumerate(tensors)
    ]


def _gradients(
    of: Sequence[Tensor], by: Sequence[Tensor], above: Sequence[Tensor], create: bool
) -> list[Tensor]:
    """Gradients, with a graph if `create`; zeros where nothing depends on anything."""
    pairs = [(x, up) for x, up in zip(of, above, strict=True) if x.requires_grad]
    if not pairs or not by:
        return [torch.zeros_like(x) for x in by]
    found, upstream = zip(*pairs, strict=True)
    return list(
        torch.autograd.grad(
            found, by, upstream, create_graph=create, allow_unused=True, materialize_grads=True
        )
    )


def _default_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within, tensors are made on the device. The mode that sees to it takes time in every operation."""
    return contextlib.nullcontext() if torch.empty(0).device == device else device


# --- all pieces -------------------------------------------------------------------------------------------


class Parts(torch.autograd.Function):
    """Results of a function of a call's tensors, with derivatives of any kind and order."""

    @staticmethod
    def forward(level: Level, recipe: Recipe, *tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = tuple([x.detach() for x in tensors])
        made = level.at_once(recipe, tensors)
        if made is not None:
            return made
        dtype = recipe.program.precision.compute_dtype(tensors[0].dtype)
        likes, kinds = level.results(recipe, tensors), level.of_results
        totals = [
            torch.zeros(
                like.shape,
                dtype=torch.float64 if kind in ("heads", "whole") else dtype,
                device=tensors[0].device,
            )
            for like, kind in zip(likes, kinds, strict=True)
        ]  # elements of captured tensors may be sums of a term per pair
        wide = [
            x.to(dtype) if kind == "whole" and x.is_floating_point() else x
            for x, kind in zip(tensors, level.kinds, strict=True)
        ]
        with _default_device(tensors[0].device):
            for piece in recipe.pieces(tensors):
                cut = [piece.cut(x, kind) for x, kind in zip(wide, level.kinds, strict=True)]
                cut = [x.to(dtype) if x.is_floating_point() else x for x in cut]
                found = level.part(piece, cut)
                totals = [
                    piece.add(total, kind, part.detach())
                    for total, kind, part in zip(totals, kinds, found, strict=True)
                ]
        return tuple([x.to(like.dtype) for x, like in zip(totals, likes, strict=True)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.level, ctx.recipe, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        needs = tuple([n for n, wanted in enumerate(ctx.needs_input_grad[2:]) if wanted])
        found = applied(Pull(ctx.level, needs), ctx.recipe, *tensors, *upstream)
        placed: list[Tensor | None] = [None] * len(tensors)
        for n, gradient in zip(needs, found, strict=True):
            placed[n] = gradient
        return None, None, *placed

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        given = tangents[2:]
        moved = tuple([n for n, x in enumerate(given) if x is not None])
        primals = [unpack_dual(x).primal for x in ctx.saved_tensors]
        return applied(Push(ctx.level, moved), ctx.recipe, *primals, *[x for x in given if x is not None])

    @staticmethod
    def vmap(info: Any, in_dims: Any, level: Level, recipe: Recipe, *tensors: Tensor) -> Any:
        dims = in_dims[2:]
        if _folds(level, recipe, dims):
            results = _folded(info.batch_size, dims, level, recipe, tensors)
        else:
            rows = [
                Parts.apply(
                    level,
                    recipe,
                    *[x if d is None else x.select(d, i) for x, d in zip(tensors, dims, strict=True)],
                )
                for i in range(info.batch_size)
            ]
            results = tuple([torch.stack(row) for row in zip(*rows, strict=True)])
        return results, (0,) * len(results)


def applied(level: Level, recipe: Recipe, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Results of a function of a call's tensors. Where torch.autograd maps some by the vmap that it has of
    its own (vectorize=True, is_grads_batched=True), of one after another."""
    mapped = (MappedDimension.of(x) for x in tensors)
    batch = next((x for x in mapped if x is not None and x.legacy), None)
    if batch is None:
        results: tuple[Tensor, ...] = Parts.apply(level, recipe, *tensors)
        return results
    rows = zip(*[batch.rows(x) for x in tensors], strict=True)
    each = [applied(level, recipe, *row) for row in rows]
    return tuple([batch.stacked(result) for result in zip(*each, strict=True)])


_BATCHED = ("queries", "keys", "columns", "rows")


def _folds(level: Level, recipe: Recipe, dims: Sequence[int | None]) -> bool:
    """True if a mapped dimension can be one with that of the batch: no function asks for the entry, and
    nothing that all entries share is mapped, or a result."""
    facts = recipe.program.facts
    if recipe.lengths is not NO_LENGTHS or any("b" in root.free for root in facts.everything):
        return False
    shared = any(d is not None and kind not in _BATCHED for d, kind in zip(dims, level.kinds, strict=True))
    return not shared and all(kind in _BATCHED for kind in level.of_results)


def _folded(
    size: int, dims: Sequence[int | None], level: Level, recipe: Recipe, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Results of all mapped entries at once, [size, B, ..]."""
    given = []
    for x, d, kind in zip(tensors, dims, level.kinds, strict=True):
        if kind in _BATCHED:
            first = x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            x = first.flatten(0, 1)
        given.append(x)
    results = Parts.apply(level, recipe, *given)
    return tuple([x.unflatten(0, (size, x.shape[0] // size)) for x in results])
