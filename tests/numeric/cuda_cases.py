"""Cases of the GPU tests: problems, every variant at some hundred tokens, and how errors are judged.

`FA4FLEX_GPU_TESTS_ON=cpu` runs the same tests through the CPU executor: a check of the tests themselves.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers import called, worst
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from variant_files import cases_of

import fa4flex
from fa4flex import reference
from fa4flex import variants as v
from fa4flex.primitives.base import call_mod, settle
from fa4flex.variants import _cases

BF16, F16 = torch.bfloat16, torch.float16
Composition = dict[str, Any]


def device_of_tests() -> torch.device | None:
    """Device of the GPU tests; None where there is nothing to test on."""
    forced = os.environ.get("FA4FLEX_GPU_TESTS_ON")
    if forced:
        return torch.device(forced)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return torch.device("cuda") if hopper else None


DEVICE = device_of_tests()
ON_A_GPU = DEVICE is not None and DEVICE.type == "cuda"

# --- problems -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes(_cases.Sizes):
    """q [batch, heads, q_len, dim], k [batch, kv_heads, kv_len, dim], v [batch, kv_heads, kv_len, dim_v].

    The lengths are no multiples of any tile. There are more tiles of 128 keys than half of Hopper's
    multiprocessors: few ones have backward kernels of their own.
    """

    batch: int = 2
    heads: int = 6
    kv_heads: int = 3
    q_len: int = 517
    kv_len: int = 700
    dim: int = 64
    dim_v: int = 64
    dtype: torch.dtype = BF16
    scale: float = field(default=1.0, kw_only=True)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (
            (self.heads, self.q_len, self.dim),
            (self.kv_heads, self.kv_len, self.dim),
            (self.kv_heads, self.kv_len, self.dim_v),
        )
        q, k, v = (torch.randn(self.batch, *shape, dtype=self.dtype) for shape in shapes)
        return q, k, v

    def wide(self, dim: int, dim_v: int | None = None) -> Sizes:
        return replace(self, dim=dim, dim_v=dim if dim_v is None else dim_v)


@dataclass(frozen=True)
class Draw:
    """`make(sizes)` draws a composition on the default device; what a variant fixes overrides sizes."""

    make: Callable[[Sizes], Composition]
    sizes: Callable[[Sizes], Sizes] = lambda given: given
    approximate: bool = False  # the mod has functions that a GPU approximates, such as tanh

    def check(self, given: Sizes) -> None:
        sizes = self.sizes(given)
        check(sizes, self.make(sizes), approximate=self.approximate)


def of_lengths(q_len: int, kv_len: int) -> Callable[[Sizes], Sizes]:
    """`sizes` of a Draw that fixes its lengths."""
    return lambda given: replace(given, q_len=q_len, kv_len=kv_len)


def mask(make: Callable[[Sizes], Any]) -> Draw:
    return Draw(lambda s: {"mask": make(s)})


def score(make: Callable[[Sizes], Any], mask: Any = None, approximate: bool = False) -> Draw:
    rest = {} if mask is None else {"mask": mask}
    return Draw(lambda s: {"score_mod": make(s), **rest}, approximate=approximate)


def table(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def _of_variant(case: _cases.Case) -> Draw:

    def sizes(given: Sizes) -> Sizes:
        drawn = case.draw(given)
        dim, dim_v = drawn.dims or (given.dim, given.dim_v)
        return replace(given, q_len=drawn.q_len, kv_len=drawn.kv_len, dim=dim, dim_v=dim_v)

    def make(s: Sizes) -> Composition:
        drawn = case.draw(s)
        return drawn.compose(*drawn.learned)

    return Draw(make, sizes, case.approximate)


VARIANTS: dict[str, tuple[Draw, ...]] = {
    name: tuple(_of_variant(case) for case in cases_of(name) if case.compiled)
    for name in v.__all__
    if any(case.kernels for case in cases_of(name))
}
"""Every variant of fa4flex.variants, by the cases of its file that are compiled for GPUs."""

FEW: dict[str, Draw] = {
    "dense": Draw(lambda s: {}),
    "causal": VARIANTS["causal"][0],
    "alibi causal": VARIANTS["alibi"][0],
    "softcap window": VARIANTS["softcap"][1],
    "document": VARIANTS["document"][1],
    "relative table": VARIANTS["learned_bias"][0],
    "sinks window": VARIANTS["gpt_oss_sinks"][0],
    "tables": VARIANTS["bigbird"][0],
}
"""Compositions, one for each kind of code: no mods, spans, row terms, elementwise, ids, tables by diagonal,
block tables."""

# --- how tensors lie ----------------------------------------------------------------------------------------


def transposed(sizes: Sizes) -> list[Tensor]:
    """[b, h, s, d] views of contiguous [b, s, h, d]."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sizes.qkv()]


def one_projection(sizes: Sizes) -> list[Tensor]:
    """q, k and v as slices of one tensor [b, s, 3, h, d]."""
    fused = torch.randn(sizes.batch, sizes.q_len, 3, sizes.heads, sizes.dim, dtype=sizes.dtype)
    return [x.transpose(1, 2) for x in fused.unbind(2)]


def shared_keys(sizes: Sizes) -> list[Tensor]:
    """Keys and values expanded over the batch: stride 0."""
    q, k, v = sizes.qkv()
    return [q, k[:1].expand_as(k), v[:1].expand_as(v)]


def random_map(sizes: Sizes, mask_mod: Any = None) -> BlockMask:
    rows, columns = -(-sizes.q_len // 128), -(-sizes.kv_len // 128)
    counts = torch.randint(0, columns + 1, (sizes.batch, 1, rows), dtype=torch.int32)
    order = torch.rand(sizes.batch, 1, rows, columns).argsort(-1).to(torch.int32)
    lengths = (sizes.q_len, sizes.kv_len)
    return BlockMask.from_kv_blocks(
        counts, order, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=lengths, compute_q_blocks=False
    )


# --- the same maths by plain PyTorch ------------------------------------------------------------------------


class PlainGather(TorchFunctionMode):
    """Indexing by 0-d tensors as a gather that vmap can batch, in the table's own dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], [torch.as_tensor(i).long() for i in index])
        return function(*args, **(kwargs or {}))


def plain(q: Tensor, k: Tensor, v: Tensor, composition: Composition) -> tuple[Tensor, Tensor]:
    """out and lse from the whole score matrix, every operation in the inputs' own dtype."""
    heads, (k, v) = q.shape[1], (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * composition.get("scale", 1 / math.sqrt(q.shape[-1]))
    allowed = reference.allowed_pairs(composition.get("mask"), tuple(scores.shape))  # type: ignore[arg-type]
    scores = scores.masked_fill(~allowed, -math.inf)
    if composition.get("score_mod") is not None:
        mod, pairs = settle(composition["score_mod"]), allowed.nonzero().unbind(-1)
        context = {"q_len": q.shape[2], "kv_len": k.shape[2], "num_heads": heads}
        with PlainGather():
            values = torch.vmap(lambda *point: torch.as_tensor(call_mod(mod, point, context)))(
                scores[pairs], *pairs
            )
        scores = scores.index_put(pairs, values.to(scores.dtype))
    sinks, normalizer = composition.get("sinks"), composition.get("normalizer")
    if normalizer is not None and normalizer.kind == "elementwise":
        pairs, mod = allowed.nonzero().unbind(-1), settle(normalizer.function)
        context = {"q_len": q.shape[2], "kv_len": k.shape[2], "num_heads": heads}
        with PlainGather():
            values = torch.vmap(lambda *point: torch.as_tensor(call_mod(mod, point, context)))(
                scores[pairs], *pairs
            )
        weights = torch.zeros_like(scores).index_put(pairs, values.to(scores.dtype))
        return weights @ v, scores.new_zeros(scores.shape[:3])
    if normalizer is not None:
        sinks = scores.new_full((heads,), math.log(normalizer.plus))
    if sinks is not None:
        column = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., : k.shape[2]]
    return weights @ v, scores.logsumexp(-1)


def oracle_takes(composition: Composition) -> Composition:
    """The composition for the oracle and for `plain`, which know sinks as their logits only."""
    sinks = composition.get("sinks")
    if sinks is None or isinstance(sinks, Tensor):
        return composition
    return {**composition, "sinks": sinks.logits}


# --- judging ------------------------------------------------------------------------------------------------


def judge(found: Sequence[Tensor], exact: Sequence[Tensor], same: Sequence[Tensor]) -> None:
    """Asserts at most twice plain PyTorch's error of out and lse, in the worst element and in the worst row.

    Where plain PyTorch happens to be exact, one rounding of the largest result is allowed.
    """
    (out, lse), (true_out, true_lse), (plain_out, plain_lse) = found, exact, same
    assert out.dtype == plain_out.dtype and lse.dtype == torch.float32
    assert out.shape == true_out.shape and lse.shape == true_lse.shape
    assert not out.isnan().any(), f"NaN in {int(out.isnan().sum())} of {out.numel()} elements of out"
    unseen = true_lse.isinf()
    assert torch.equal(lse.isinf(), unseen) and not lse.isnan().any(), "lse: -inf where rows see nothing"
    rounding = torch.finfo(out.dtype).eps / 2
    largest = true_out.abs().max().item(), true_out.norm(dim=-1).max().item()
    for what, error, budget, size in zip(
        ("element", "row"), worst(out, true_out), worst(plain_out, true_out), largest
    ):
        limit = max(2 * budget, rounding * size)
        assert error <= limit, f"out: worst {what} off by {error:.3e}, limit {limit:.3e}"
    seen = ~unseen
    error, budget = worst(lse[seen], true_lse[seen])[0], worst(plain_lse[seen], true_lse[seen])[0]
    assert error <= 2 * budget + 1e-5, f"lse off by {error:.3e}, limit {2 * budget:.3e}"


def judge_exact_lse(lse: Tensor, true_lse: Tensor) -> None:
    """Without approximate functions in the mod, lse is float32 arithmetic on exact products.

    Far tighter than twice bf16's error: one key too many among some hundred shows here, and nowhere else.
    """
    seen = true_lse.isfinite()
    error = worst(lse[seen], true_lse[seen])[0]
    limit = 1e-4 * max(1.0, true_lse[seen].abs().max().item() if seen.any() else 1.0)
    assert error <= limit, f"lse off by {error:.3e}, limit {limit:.3e}"


def poison(*like: Tensor) -> None:
    """NaN in freed memory of these sizes, which the caching allocator hands to the outputs that follow.

    An element that the kernel leaves unwritten is then NaN, not what an earlier call put there.
    """
    held = [torch.full_like(x, math.nan, memory_format=torch.contiguous_format) for x in like for _ in (1, 2)]
    del held


def compiled(**composition: Any) -> fa4flex.Attention:
    """`fa4flex.compile` where the default device is the CPU, as it is for most users."""
    with torch.device("cpu"):
        return fa4flex.compile(**composition)


def run(attn: fa4flex.Attention, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a call into poisoned memory."""
    rows = q.shape[:-1]
    poison(q.new_empty(*rows, v.shape[-1]), q.new_empty(rows, dtype=torch.float32))
    with torch.no_grad(), torch.device("cpu"):
        out, lse = called(attn, q, k, v, **options)
    return out, lse


def check(
    sizes: Sizes,
    composition: Composition,
    qkv: tuple[Tensor, Tensor, Tensor] | None = None,
    approximate: bool = False,
) -> None:
    """One call against the oracle; the composition's tensors are on DEVICE, which is the default device."""
    q, k, v = sizes.qkv() if qkv is None else qkv
    found = run(compiled(**composition), q, k, v)
    known = oracle_takes(composition)
    exact = reference.attention(q, k, v, **known)
    judge(found, exact, plain(q, k, v, known))
    if not approximate:
        judge_exact_lse(found[1], exact[1])


# --- gradients ----------------------------------------------------------------------------------------------

ROUNDING = 2.0**-9
"""Relative error of rounding to bfloat16: what gradients may have where plain PyTorch is exact by chance."""

HERE: AbstractContextManager[Any] = contextlib.nullcontext()


def gradients(
    forward: Callable[..., tuple[Tensor, Tensor]],
    qkv: Sequence[Tensor],
    upstream: tuple[Tensor, Tensor],
    within: AbstractContextManager[Any] = HERE,
) -> list[Tensor]:
    """Gradients of q, k and v, through the output and the log-sum-exp of rows that see something.

    within: the context in which the backward pass runs."""
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    out, lse = forward(*inputs)
    dout, dlse = upstream
    seen = torch.where(lse.isinf(), 0.0, lse)
    total = (out * dout.to(out.dtype)).sum() + (seen * dlse.to(lse.dtype)).sum()
    with within:
        return list(torch.autograd.grad(total, inputs))


def check_gradients(
    sizes: Sizes, composition: Composition, within: AbstractContextManager[Any] = HERE
) -> None:
    """Asserts at most twice plain PyTorch's error of gradients, in the worst element and in the worst row."""
    qkv = sizes.qkv()
    shape = qkv[0].shape[:3]
    upstream = torch.randn(*shape, sizes.dim_v, dtype=sizes.dtype), torch.randn(shape)
    attn, known = compiled(**composition), oracle_takes(composition)
    found = gradients(lambda *x: called(attn, *x), qkv, upstream, within)
    wide = [x.double() for x in qkv]
    exact = gradients(lambda *x: reference.attention(*x, **known), wide, upstream)
    judge_gradients(found, exact, gradients(lambda *x: plain(*x, known), qkv, upstream))


def judge_gradients(found: Sequence[Tensor], exact: Sequence[Tensor], same: Sequence[Tensor]) -> None:
    for name, got, true, by_torch in zip(("dq", "dk", "dv"), found, exact, same, strict=True):
        assert not got.isnan().any(), f"NaN in {name}"
        largest = true.abs().max().item(), true.norm(dim=-1).max().item()
        errors, budgets = worst(got, true), worst(by_torch, true)
        for what, error, budget, size in zip(("element", "row"), errors, budgets, largest, strict=True):
            limit = max(2 * budget, ROUNDING * size)
            assert error <= limit, f"{name}: worst {what} off by {error:.3e}, limit {limit:.3e}"


# --- packed sequences ---------------------------------------------------------------------------------------


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def of_sequence(mod: Any, n: int, position: int) -> Any:
    """`mod` with b, its argument at `position`, fixed to n."""
    if mod is None:
        return None
    mod = settle(mod)

    def fixed(*point: Any, **context: int) -> Any:
        return mod(*point[:position], torch.full_like(point[position], n), *point[position + 1 :], **context)

    fixed.context = fa4flex.primitives.base.accepted_context(mod)  # type: ignore[attr-defined]
    return fixed


def plain_packed(
    qkv: tuple[Tensor, Tensor, Tensor], ranges: tuple[Any, Any], composition: Composition
) -> tuple[Tensor, Tensor]:
    """`plain` of one sequence after the other: out [Tq, H, Dv], lse [H, Tq]."""
    q, k, v = qkv
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -math.inf)
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(*ranges, strict=True)):
        if q0 == q1 or k0 == k1:
            continue
        one = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        mods = {"score_mod": of_sequence(composition.get("score_mod"), n, 1)}
        mods["mask"] = of_sequence(composition.get("mask"), n, 0)
        o, s = plain(one[0], one[1], one[2], {**composition, **mods})
        out[q0:q1], lse[q0:q1] = o[0].transpose(0, 1), s[0].transpose(0, 1)
    return out, lse.transpose(0, 1)


# --- moving what functions captured -------------------------------------------------------------------------

NOTHING: Mapping[int, Tensor] = types.MappingProxyType({})


def on_device(value: Any, device: torch.device, known: Mapping[int, Tensor] = NOTHING) -> Any:
    """A function, or what it captured, with every captured tensor moved; the code is the same. What a tensor
    is there may be known by its id."""
    if isinstance(value, Tensor):
        return known[id(value)] if id(value) in known else value.detach().to(device)

    def move(part: Any) -> Any:
        return on_device(part, device, known)

    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(move, value))
    if isinstance(value, functools.partial):
        moved = {name: move(x) for name, x in value.keywords.items()}
        return functools.partial(move(value.func), *move(value.args), **moved)
    if not isinstance(value, types.FunctionType):
        return value
    cells = tuple(types.CellType(move(c.cell_contents)) for c in value.__closure__ or ())
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, move(value.__defaults__), cells
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__dict__.update(value.__dict__)
    return copy
