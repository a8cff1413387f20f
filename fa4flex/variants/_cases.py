"""Cases that a variant's file declares beside its definition, and the file as a program that checks them.

CASES    compositions of the variant at any sizes, each with its definition: compared with brute force, run
         and differentiated on a CPU, through torch's flex_attention and on ranks, compiled for GPUs
PICTURE  code of the picture in the gallery, or None for what changes neither a mask nor a score
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from fa4flex.primitives.base import call_mod, settle

Composition = dict[str, Any]
"""Keyword arguments of fa4flex.compile."""

Pairs = Callable[[int, int, int], bool]
"""(b, q, kv) -> whether the pair takes part."""

Scores = Callable[[float, int, int, int, int], float]
"""(score, b, h, q, kv) -> the modified score; (out, b, h, q, d) -> the function of the output."""


Rows = Callable[[list[float]], list[float]]
"""A row of scores -> its weights, where a normaliser sums over the row."""


@dataclass(frozen=True)
class Sizes:
    """Sizes to draw a case at.

    dim_v  head width of v
    scale  numbers of tokens in a case are those of some hundred keys, times this
    rng    source of random numbers for brute force; None: the case's own numbers, in order
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    q_len: int = 8
    kv_len: int = 12
    dim_v: int = field(default=4, kw_only=True)
    scale: float = field(default=0.03, kw_only=True)
    rng: random.Random | None = field(default=None, kw_only=True)

    def of(self, tokens: int, least: int = 1) -> int:
        """A number of tokens, at this scale."""
        scaled = max(least, round(tokens * self.scale))
        return scaled if self.rng is None else self.rng.randint(least, max(least, 2 * scaled))

    def some(self, number: int, least: int = 1) -> int:
        """A number that does not depend on the scale; at random, `least` to `number`."""
        return number if self.rng is None else self.rng.randint(least, number)

    def offsets(self) -> list[int]:
        """Cumulative lengths of five documents, 640 tokens; at smaller scales some are empty."""
        if self.rng is not None:
            return [0, *sorted(self.rng.randint(0, 12) for _ in range(4)), 12]
        return [round(end * self.scale) for end in (0, 130, 131, 300, 555, 640)]

    def ids(self, *shape: int) -> Tensor:
        """int32: documents of tokens, one after the other; at random in any order."""
        drawn = torch.randint(0, 6, shape, dtype=torch.int32)
        return drawn if self.rng is not None else drawn.sort(-1).values

    def square(self, length: int) -> Self:
        """Sizes of a case that fixes its length, of queries and keys alike."""
        return replace(self, q_len=length, kv_len=length)

    def learned(self, values: Tensor) -> Tensor:
        """Initial values of a learned tensor as the tensor itself; tests of gradients override it."""
        return values


@dataclass(frozen=True)
class Drawn:
    """A case at some sizes: `compose(*learned)` is what fa4flex.compile takes.

    definition  for a mask Pairs, for a score mod, an output function or an elementwise normaliser Scores, for
                another one Rows; None where the file's main() checks the variant
    dims        head widths of q and k, and of v, where the variant fixes them
    """

    compose: Callable[..., Composition]
    definition: Pairs | Scores | Rows | None
    q_len: int
    kv_len: int
    learned: tuple[Tensor, ...] = ()
    dims: tuple[int, int] | None = None


@dataclass(frozen=True)
class Case:
    """One composition of a variant.

    approximate  it has functions that a GPU approximates, such as tanh
    compiled     tests of GPUs take it in; leave it out where another case has the same kind of code
    kernels      kernels compute it; where none does, GPUs compute it tile by tile in PyTorch operations
    """

    draw: Callable[[Sizes], Drawn]
    approximate: bool = False
    compiled: bool = True
    kernels: bool = True


@dataclass(frozen=True)
class Picture:
    """A mask at q_len queries and kv_len keys, or what a score mod adds to scores of 0; `curve`: new scores
    over old ones. `code` may use torch and all variants."""

    code: str
    q_len: int = 128
    kv_len: int = 128
    curve: bool = False


def masked(s: Sizes, mask: Any, definition: Callable[..., bool], *parameters: Any) -> Drawn:
    """A case that is a mask, of which definition(q, kv, *parameters) says which pairs take part."""
    return masked_by_batch(s, mask, lambda b, q, kv: definition(q, kv, *parameters))


def member(s: Sizes, family: Any, definition: Callable[..., bool], *parameters: Any) -> Drawn:
    """The mask of a family with these parameters, which its definition takes, too, and lengths if it has
    parameters for them."""
    lengths = (s.q_len, s.kv_len) if "q_len" in inspect.signature(definition).parameters else ()
    return masked(s, family(*parameters), definition, *parameters, *lengths)


def masked_by_batch(s: Sizes, mask: Any, definition: Pairs) -> Drawn:
    """A case that is a mask, which may differ between entries of the batch."""
    return Drawn(lambda: {"mask": mask}, definition, s.q_len, s.kv_len)


def modified(s: Sizes, make: Callable[..., Any], definition: Scores, *learned: Tensor, **rest: Any) -> Drawn:
    """A case that is a score mod, of tensors that may be learned; `rest`: what else is composed."""
    return Drawn(
        lambda *tensors: {"score_mod": make(*tensors), **rest}, definition, s.q_len, s.kv_len, learned
    )


def applied(s: Sizes, make: Callable[..., Any], definition: Scores, *learned: Tensor, **rest: Any) -> Drawn:
    """The same of an output function; `rest` may hold a score mod and a mask."""
    return Drawn(
        lambda *tensors: {"output_mod": make(*tensors), **rest}, definition, s.q_len, s.kv_len, learned
    )


def weighed(s: Sizes, normalizer: Any, definition: Any, **rest: Any) -> Drawn:
    """A case that is a normaliser: an elementwise one with a definition as a score mod has, another with the
    weights of a row of scores."""
    return Drawn(lambda: {"normalizer": normalizer, **rest}, definition, s.q_len, s.kv_len)


def tokens(s: Sizes, heads: int = 1, width: int = 4) -> tuple[Tensor, Tensor]:
    """Queries [1, heads, q_len, width] and keys [1, 1, kv_len, width] of which a case selects, float64."""
    q = torch.randn(1, heads, s.q_len, width, dtype=torch.float64)
    return q, torch.randn(1, 1, s.kv_len, width, dtype=torch.float64)


def selected(
    s: Sizes, mask: Callable[..., Any], definition: Callable[..., list[set[int]]], top: int
) -> Drawn:
    """A case that is the causal mask(q, k, block, top), of which definition(q, k, block, top) says which
    blocks each query has. There are as many keys as queries, or more."""
    s = s if s.q_len <= s.kv_len else s.square(s.kv_len)
    (q, k), block, offset = tokens(s), s.of(64, least=2), s.kv_len - s.q_len
    wanted = definition(q[0, 0].tolist(), k[0, 0].tolist(), block, top)
    seen = lambda i, j: j <= i + offset and j // block in wanted[i]  # noqa: E731
    return masked(s, mask(q, k, block, top), seen)


# --- checking -------------------------------------------------------------------------------------------


def allowed(mask: Any, q_len: int, kv_len: int, batch: int = 1) -> Tensor:
    """bool [batch, q_len, kv_len]: the mask in head 0, by one call on index tensors."""
    b = torch.arange(batch)[:, None, None]
    q, kv = torch.arange(q_len)[None, :, None], torch.arange(kv_len)[None, None, :]
    context = {"q_len": q_len, "kv_len": kv_len, "num_heads": 1}
    result = torch.as_tensor(call_mod(mask, (b, torch.tensor(0), q, kv), context))
    return result.expand(batch, q_len, kv_len)


def scored(mod: Any, scores: Tensor) -> Tensor:
    """Scores [.., H, Q, KV] through the score mod, or outputs [.., H, Q, D] through the output function."""
    whole = scores.reshape(-1, *scores.shape[-3:])
    indices = torch.meshgrid(*(torch.arange(n) for n in whole.shape), indexing="ij")
    context = dict(zip(("num_heads", "q_len", "kv_len"), whole.shape[1:], strict=True))
    result: Tensor = call_mod(mod, (whole, *indices), context)
    return result.reshape(scores.shape)


def check(s: Sizes, drawn: Drawn) -> Tensor:
    """The values of a case: of its mask, or of its score mod on random scores, [batch, .., Q, KV]; of its
    output function on random outputs [batch, H, Q, D]; weights of random scores.

    Raises AssertionError where one is not that of the definition.
    """
    composition, definition = drawn.compose(*drawn.learned), drawn.definition
    assert definition is not None
    role = role_of(composition)
    mod = settle(composition[role])
    if role == "mask":
        values = allowed(mod, drawn.q_len, drawn.kv_len, s.batch)
        wanted = [definition(*index) for index in _places(values)]  # type: ignore[arg-type]
        right = values.flatten() == torch.tensor(wanted)
    else:
        columns = s.dim_v if role == "output_mod" else drawn.kv_len
        scores = 3 * torch.randn(s.batch, s.heads, drawn.q_len, columns, dtype=torch.float64)
        values = scored(mod, scores) if role != "normalizer" else normalised(mod, scores)
        if role == "normalizer" and mod.weights.summed:
            definition = _in_rows(scores, definition)  # type: ignore[arg-type]
        olds = scores.flatten().tolist()
        wanted = [definition(old, *at) for old, at in zip(olds, _places(values), strict=True)]
        right = torch.isclose(values.double().flatten(), torch.tensor(wanted).double(), 1e-5, 1e-5)
    if not right.all():
        at = int(right.int().argmin())
        raise AssertionError(
            f"{mod!r} at {_places(values)[at]}: {values.flatten()[at].item()}, by definition {wanted[at]}"
        )
    return values


def normalised(normalizer: Any, scores: Tensor) -> Tensor:
    """Weights that a normaliser makes of scores [.., H, Q, KV]."""
    if not normalizer.weights.summed:
        return scored(normalizer.function, scores)
    if normalizer.weights.kind == "softmax":
        return scores.exp() / (scores.exp().sum(-1, keepdim=True) + normalizer.plus)
    grown = torch.expm1(scores)
    return grown.clamp(min=0) / (grown.abs().sum(-1, keepdim=True) + normalizer.eps)


def _in_rows(scores: Tensor, definition: Rows) -> Scores:
    """A definition by rows as one by pairs."""
    wanted = torch.tensor([definition(row) for row in scores.flatten(0, -2).tolist()]).view(scores.shape)
    return lambda _, b, h, q, kv: wanted[b, h, q, kv].item()


def role_of(composition: Composition) -> str:
    """Argument that a case is about: its normaliser, its output function, its score mod, or its mask."""
    return next(role for role in ("normalizer", "output_mod", "score_mod", "mask") if role in composition)


def _places(values: Tensor) -> list[list[int]]:
    places: list[list[int]] = torch.ones_like(values, dtype=torch.bool).nonzero().tolist()
    return places


def show(cases: Sequence[Case]) -> None:
    """Print masks, queries down and keys across, scores of head 0, functions of outputs of 1, and weights of
    scores from -3 to 3; compare them with definitions."""
    for case in cases:
        s = Sizes()
        drawn = case.draw(s)
        values = check(s, drawn)
        composition = drawn.compose(*drawn.learned)
        role = role_of(composition)
        mod = settle(composition[role])
        if role != "mask":
            print(mod)
            start = torch.full((s.batch, s.heads, drawn.q_len, drawn.kv_len), 0.0)
            if role == "output_mod":
                start = torch.ones(s.batch, s.heads, drawn.q_len, s.dim_v)
            if role == "normalizer":
                start = torch.linspace(-3, 3, drawn.kv_len).expand(start.shape)
            shown = normalised if role == "normalizer" else scored
            for row in shown(mod, start)[0, 0].tolist():
                print(" ".join(f"{value:7.3f}" for value in row))
        else:
            print(mod)
            print("\n".join("".join("#" if pair else "." for pair in row) for row in values[0].tolist()))
        print(f"{math.prod(values.shape)} values agree with the definition\n")


def show_table(rows: list[tuple[Any, ...]]) -> None:
    """Print rows of numbers and words in columns."""
    for row in rows:
        print("  ".join(f"{cell:>10.4f}" if isinstance(cell, float) else f"{cell!s:>10}" for cell in row))
