"""Forward calls on a simulated B200, each with what is exact and what plain PyTorch makes of the same maths.

`GROUPS` names them all; a call is made when it is asked for, with fresh random tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from helpers import called, of_passes
from numeric import cuda_cases
from numeric.cuda_cases import (
    BF16,
    F16,
    FEW,
    VARIANTS,
    Composition,
    Draw,
    Sizes,
    cumulative,
    judge,
    judge_exact_lse,
    mask,
    one_projection,
    oracle_takes,
    plain,
    plain_packed,
    random_map,
    score,
    shared_keys,
    table,
    transposed,
)
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import fa4flex
import ptxsim
from fa4flex import Varlen, reference
from fa4flex import variants as v
from fa4flex.kernels.plan import request, target
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.cuda import engine
from fa4flex.runtime.cuda.launches import ready

TIMINGS = (("eager", 0), *((name, seed) for name in ("late", "random") for seed in range(5)))
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128))
WORKERS = (1, 148, 2, 3)
"""Numbers of SMs for which kernels are planned: with few of them, a CTA takes many work tiles."""

Results = tuple[Tensor, Tensor]
"""out and lse."""


@dataclass(frozen=True, eq=False)
class Call:
    """`seen` takes what is judged from the results of a call; `same` is plain PyTorch's."""

    attn: Callable[..., Results]
    qkv: tuple[Tensor, Tensor, Tensor]
    exact: Results
    same: Results
    approximate: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 148
    rescale: float = 8.0
    seen: Callable[[Tensor, Tensor], Results] = lambda out, lse: (out, lse)

    def run(self, timing: str, seed: int) -> Results:
        """Runs once, into poisoned memory: nothing may be found, and results are as near as they must be."""
        with (
            torch.no_grad(),
            _poisoned(),
            planned(self.workers, self.rescale),
            ptxsim.device("sm_100a", seed, timing) as gpu,
        ):
            found = self.seen(*self.attn(*self.qkv, **self.options))
        (result,) = of_passes(gpu)
        said = [*result.findings, *result.remarks]
        assert not said, "\n".join(map(str, said))
        judge(found, self.exact, self.same)
        if not self.approximate:
            judge_exact_lse(found[1], self.exact[1])
        return found


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Results that are not written are NaN."""
    run = ready.Ready.__call__

    def poisoned(self: ready.Ready, *given: Any) -> Any:
        def launch(call: Any, *arguments: Any) -> None:
            if (
                not self.gaps
            ):  # otherwise rows without keys are there already, and the kernel writes the others
                for x in arguments[:3]:
                    if x is not None:
                        x.fill_(math.nan)
            self.launch(call, *arguments)

        return run(replace(self, launch=launch), *given)

    with patch.object(ready.Ready, "__call__", poisoned):
        yield


@contextlib.contextmanager
def planned(workers: int, rescale: float = 8.0) -> Iterator[None]:
    """Plans kernels for so many SMs and this rescaling threshold; looks of ready launches contain both."""
    chip = replace(target.SM100A, multiprocessors=workers)
    key = engine.Engine.key

    def with_plan(self: engine.Engine, call: Any, *bits: Any) -> Any:
        found = key(self, call, *bits)
        return None if found is None else ((*found[0], workers, rescale), found[1])

    with (
        patch.object(engine, "target_of", lambda device: chip),
        patch.object(request, "RESCALE", rescale),
        patch.object(engine.Engine, "key", with_plan),
    ):
        yield


# --- dense calls --------------------------------------------------------------------------------------------

Form = Callable[[Sizes], tuple[Tensor, Tensor, Tensor]]


def dense(
    sizes: Sizes,
    composition: Composition,
    form: Form = Sizes.qkv,
    approximate: bool = False,
    schedule: Schedule | None = None,
    **how: Any,
) -> Call:
    q, k, v = form(sizes)
    settings = {} if schedule is None else {"schedule": schedule}
    attn = functools.partial(called, fa4flex.compile(**composition, **settings))
    known = oracle_takes(composition)
    exact = reference.attention(q, k, v, **known)
    return Call(attn, (q, k, v), exact, plain(q, k, v, known), approximate, **how)


def drawn(draw: Draw, sizes: Sizes, **how: Any) -> Call:
    with patch.object(cuda_cases, "DEVICE", torch.device("cpu")):
        sizes = draw.sizes(sizes)
        return dense(sizes, draw.make(sizes), approximate=draw.approximate, **how)


SMALL = Sizes(batch=2, heads=2, kv_heads=1, q_len=200, kv_len=300)
Maker = Callable[[], Call]
DRAWS = {"dense": FEW["dense"]} | {
    f"{name} {i}": x for name, xs in VARIANTS.items() for i, x in enumerate(xs)
}
"""Every composition of every variant."""


def _variants() -> Iterator[tuple[str, Maker]]:
    """DRAWS; widths and multiprocessors by turns."""
    turns = zip(DRAWS.items(), itertools.cycle(WIDTHS), itertools.cycle(WORKERS[:3]))
    for (name, draw), width, workers in turns:
        yield name, functools.partial(drawn, draw, SMALL.wide(*width), workers=workers)
    for name, width in itertools.product(("dense", "causal"), WIDTHS):
        how = {"workers": WORKERS[WIDTHS.index(width)]}
        yield f"{name} {width}", functools.partial(drawn, FEW[name], SMALL.wide(*width), **how)


def gym_call(kind: str, name: str, width: tuple[int, int], workers: int) -> Call:
    x = gym()[kind, name]
    sizes = Sizes(x.B, x.H, x.H, x.q_len, x.kv_len).wide(*width)
    return dense(sizes, {kind: x.fn}, approximate=x.approximate, workers=workers)


@functools.lru_cache(maxsize=1)
def gym() -> dict[tuple[str, str], Any]:
    """Every mod of attention-gym by the argument that takes it and its name; none where it is not
    installed."""
    try:
        from gym import instances
    except ImportError:
        return {}
    return instances(scores=200)


def _of_gym() -> Iterator[tuple[str, Maker]]:
    """Every mask_mod and score_mod of attention-gym."""
    for key, width, workers in zip(gym(), itertools.cycle(WIDTHS), itertools.cycle(WORKERS[:3])):
        yield f"gym {key[1]}", functools.partial(gym_call, *key, width, workers)


LENGTHS = (1, 127, 128, 129, 255, 257, 512)


def _lengths() -> Iterator[tuple[str, Maker]]:
    for name, q_len, kv_len in itertools.product(("dense", "causal", "softcap window"), LENGTHS, LENGTHS):
        sizes = Sizes(1, 2, 1, q_len, kv_len).wide(128 if name == "causal" else 64)
        yield f"{name} {q_len} x {kv_len}", functools.partial(drawn, FEW[name], sizes, workers=2)


def _heads() -> Iterator[tuple[str, Maker]]:
    pairs = ((1, 1), (4, 1), (7, 1), (8, 1), (16, 2), (14, 2))
    names = ("dense", "causal", "alibi causal", "relative table", "sinks window")
    for (heads, kv_heads), name in itertools.product(pairs, names):
        sizes = Sizes(1, heads, kv_heads, 150, 190)
        yield f"{name} {heads}:{kv_heads}", functools.partial(drawn, FEW[name], sizes, workers=3)


def _widths() -> Iterator[tuple[str, Maker]]:
    """Head widths, padded ones too, in both dtypes, and outputs that cannot be staged."""
    dims = (*WIDTHS, (8, 8), (40, 40), (72, 72), (112, 80), (128, 64), (64, 128), (160, 128))
    draws = [name for name in FEW if name != "tables"]
    for (i, dim), dtype in itertools.product(enumerate(dims), (BF16, F16)):
        for name in dict.fromkeys(("dense", draws[(i + (dtype is F16)) % len(draws)])):
            sizes = replace(SMALL, batch=1, dtype=dtype).wide(*dim)
            label = f"{name} d{dim[0]}v{dim[1]} {str(dtype)[6:]}"
            yield label, functools.partial(drawn, FEW[name], sizes, workers=1)


# --- how tensors lie ----------------------------------------------------------------------------------------


def among_nans(sizes: Sizes) -> Any:
    """Slices of larger tensors, with NaN or infinity before, behind and beside them."""

    def within(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        larger = torch.full((b, 2 * h, s + 140, 2 * d), math.nan, dtype=x.dtype)
        larger[:, :, ::2] = math.inf
        larger[:, ::2, 5 : 5 + s, :d] = x
        return larger[:, ::2, 5 : 5 + s, :d]

    return [within(x) for x in sizes.qkv()]


def far_columns(sizes: Sizes) -> Any:
    """No unit stride along the heads' width, which bulk copies cannot read."""
    return [x.mT.contiguous().mT for x in sizes.qkv()]


def _strides() -> Iterator[tuple[str, Maker]]:
    sizes = Sizes(2, 2, 2, 190, 190)
    forms = (transposed, one_projection, among_nans, shared_keys, far_columns)
    for form, name in itertools.product(forms, ("causal", "relative table", "dense")):
        yield f"{name} {form.__name__}", functools.partial(drawn, FEW[name], sizes, form=form, workers=2)
    for name in ("causal", "alibi causal"):
        yield f"{name} bshd", functools.partial(bshd, FEW[name])


def bshd(draw: Draw) -> Call:
    call = drawn(draw, SMALL)
    attn = fa4flex.compile(**draw.make(SMALL), layout="bshd")
    q, k, v = (x.transpose(1, 2).contiguous() for x in call.qkv)
    return replace(
        call,
        attn=functools.partial(attn, return_lse=True),
        qkv=(q, k, v),
        seen=lambda out, lse: (out.transpose(1, 2), lse),
    )


# --- rows that see nothing, sinks, maps, magnitudes ---------------------------------------------------------


def sparse_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + 3 < kv_idx) & (q_idx % 7 != 2)


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < -1


def late_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (h > 0) & (q_idx > 150) & (kv_idx > 100)


def no_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(kv_idx <= q_idx - 5, score, -float("inf"))


def rising(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.2 * kv_idx


def falling(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.2 * kv_idx


def waves(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Some rows of a warp raise their maximum in a tile, others do not."""
    return score + 0.05 * ((kv_idx * (q_idx % 5 - 2)) % 600)


def large(sizes: Sizes) -> Any:
    q, k, v = sizes.qkv()
    return [q * 64, k * 64, v]


def _edges() -> Iterator[tuple[str, Maker]]:
    made = functools.partial
    wide = SMALL.wide(128)
    long = Sizes(1, 1, 1, 300, 700)
    for hidden in (sparse_rows, nothing, late_heads):
        yield hidden.__name__, made(dense, wide, {"mask": hidden}, workers=1)
        yield f"{hidden.__name__}, sinks", made(with_sinks, Draw(lambda s, m=hidden: {"mask": m}), wide, 0.0)
    for name, shift in itertools.product(("dense", "causal", "softcap window"), (-5.0, 0.0, 5.0)):
        yield f"{name}, sinks {shift:+.0f}", made(with_sinks, FEW[name], SMALL, shift)
    yield "no score", made(dense, SMALL, {"score_mod": no_score})
    yield "large", made(dense, SMALL, {"mask": v.causal}, form=large)
    for mod, dim, rescale in itertools.product((rising, falling, waves), (64, 128), (8.0, 0.0)):
        how = {"rescale": rescale, "workers": 1}
        yield (
            f"{mod.__name__} {dim}, threshold {rescale}",
            made(dense, long.wide(dim), {"score_mod": mod}, **how),
        )
    for name in ("dense", "causal", "alibi causal"):
        yield f"{name}, threshold 0", made(drawn, FEW[name], SMALL, rescale=0.0)
        yield f"{name}, one query tile", made(one_query_tile, FEW[name], wide)
    for name, dim in (("dense", 128), ("causal", 64), ("relative table", 64), ("alibi causal", 96)):
        yield f"{name}, negative scale", made(rescaled, FEW[name], SMALL.wide(dim), -0.3)
    for name, width in itertools.product(("dense", "relative position"), WIDTHS):  # by pairs of CTAs
        draw = FEW["dense"] if name == "dense" else score(lambda s: v.relative_position(-0.02))
        sizes = Sizes(1, 2, 1, 517, 300).wide(*width)
        yield f"{name} in pairs {width}", made(drawn, draw, sizes, workers=4)
    yield "map", made(mapped, None)
    yield "map and mod", made(mapped, sparse_rows)
    for dim in (64, 128):
        yield f"max_scores {dim}", made(with_maxima, Sizes(2, 2, 2, 200, 300).wide(dim))


def with_sinks(draw: Draw, sizes: Sizes, shift: float) -> Call:
    composition = {**draw.make(sizes), "sinks": table(sizes.heads) + shift}
    return dense(sizes, composition, approximate=draw.approximate, workers=2)


def rescaled(draw: Draw, sizes: Sizes, scale: float) -> Call:
    return dense(sizes, {**draw.make(sizes), "scale": scale}, workers=2)


def one_query_tile(draw: Draw, sizes: Sizes) -> Call:
    return dense(sizes, draw.make(sizes), schedule=Schedule(tile=(128, 128)), workers=2)


def mapped(mod: Any) -> Call:
    return dense(Sizes(2, 2, 1, 400, 500), {"mask": random_map(Sizes(2, 2, 1, 400, 500), mod)}, workers=2)


def with_maxima(sizes: Sizes) -> Call:
    """Call whose largest scores are judged in place of the lse."""

    def halved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 0.5 + h

    def attn(q: Tensor, k: Tensor, v: Tensor) -> Results:
        found = AuxRequest(max_scores=True, lse=True)
        out, aux = fa4flex.flex_attention(q, k, v, halved, return_aux=found)
        return out, aux.max_scores

    call = dense(sizes, {"score_mod": halved}, workers=2)
    q, k, _ = call.qkv
    heads = torch.arange(sizes.heads).view(1, -1, 1)
    largest, rounded = (
        (a @ b.mT).amax(-1) * 0.5 / math.sqrt(sizes.dim) + heads
        for a, b in ((q.double(), k.double()), (q, k))
    )
    return replace(call, attn=attn, exact=(call.exact[0], largest), same=(call.same[0], rounded))


# --- sequences ----------------------------------------------------------------------------------------------

Q_LENGTHS, K_LENGTHS = (3, 0, 300, 129, 1, 257, 64), (7, 4, 128, 390, 0, 257, 1)
USED_Q, USED_K = (2, 0, 130, 129, 0, 5, 64), (7, 0, 100, 200, 0, 1, 1)
LONGEST = Sizes(batch=7, heads=2, kv_heads=1, q_len=300, kv_len=390)
PACKED: dict[str, Draw] = {
    **{name: FEW[name] for name in FEW if name != "tables"},
    "prefix per sequence": mask(lambda s: v.prefix_lm(torch.randint(0, s.kv_len, (s.batch,)))),
    "slope per sequence": score(lambda s: v.alibi(torch.rand(s.batch, s.heads) * 0.1), v.causal),
    "bias per query": score(lambda s: v.learned_bias(table(s.batch, s.heads, s.q_len, 1))),
    "top left": mask(lambda s: lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
}


def _vector(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def packed(
    draw: Draw,
    width: tuple[int, int],
    dtype: torch.dtype,
    used: bool = False,
    schedule: Schedule = Schedule(),
) -> Call:
    """Sequences one after another; with `used`, each has a tail of NaN and infinity."""
    composition = draw.make(LONGEST)
    rows = (
        (sum(Q_LENGTHS), LONGEST.heads, width[0]),
        *((sum(K_LENGTHS), LONGEST.kv_heads, dim) for dim in width),
    )
    qkv = tuple(torch.randn(*shape, dtype=dtype) for shape in rows)
    cu_q, cu_k = cumulative(Q_LENGTHS), cumulative(K_LENGTHS)
    limits = (_vector(USED_Q), _vector(USED_K)) if used else (None, None)
    if used:
        for x, lengths, seen in zip(
            qkv, (Q_LENGTHS, K_LENGTHS, K_LENGTHS), (USED_Q, USED_K, USED_K), strict=True
        ):
            for start, length, n in zip(cumulative(lengths).tolist(), lengths, seen):
                x[start + n : start + length] = math.nan
                x[start + n : start + length : 3] = math.inf
    ranges = reference.sequence_ranges(cu_q, limits[0]), reference.sequence_ranges(cu_k, limits[1])
    known = oracle_takes(composition)
    return Call(
        functools.partial(called, fa4flex.compile(**composition, schedule=schedule)),
        qkv,  # type: ignore[arg-type]
        reference.varlen(qkv, ranges, **known),  # type: ignore[arg-type]
        plain_packed(qkv, ranges, known),  # type: ignore[arg-type]
        draw.approximate,
        {"varlen": Varlen(cu_q, cu_k, *limits)},
        workers=3,
    )


def padded(draw: Draw) -> Call:
    """A padded batch is the packed batch of its used rows; what lies behind them is NaN or infinite."""
    composition, (q, k, v) = draw.make(LONGEST), LONGEST.qkv()
    real_q, real_k = (
        torch.arange(size) < _vector(n).view(-1, 1)
        for size, n in ((LONGEST.q_len, Q_LENGTHS), (LONGEST.kv_len, K_LENGTHS))
    )
    both = (q, real_q), (k, real_k), (v, real_k)
    flat = tuple(x.transpose(1, 2)[real] for x, real in both)
    for x, real in both:
        x.transpose(1, 2)[~real] = math.nan
        x[:, :, ::3].transpose(1, 2)[~real[:, ::3]] = math.inf
    ranges = tuple(reference.sequence_ranges(cumulative(n)) for n in (Q_LENGTHS, K_LENGTHS))

    def seen(out: Tensor, lse: Tensor) -> Results:
        rows, statistics = out.transpose(1, 2), lse.transpose(1, 2)
        assert rows[~real_q].eq(0).all() and statistics[~real_q].eq(-math.inf).all()
        return rows[real_q], statistics[real_q].T

    used = Varlen(seqused_q=_vector(Q_LENGTHS), seqused_k=_vector(K_LENGTHS))
    return Call(
        functools.partial(fa4flex.compile(**composition), return_lse=True),
        (q, k, v),
        reference.varlen(flat, ranges, **composition),  # type: ignore[arg-type]
        plain_packed(flat, ranges, composition),  # type: ignore[arg-type]
        draw.approximate,
        {"varlen": used},
        workers=2,
        seen=seen,
    )


def used_keys(kv_len: int = 600) -> Call:
    """Only the keys are padded, as in decoding with a cache of fixed size."""
    sizes, used = Sizes(4, 2, 1, 5, kv_len), (600, 1, 257, 128)
    composition, (q, k, v) = {"mask": fa4flex.variants.causal}, sizes.qkv()
    exact, same = [], []
    for n, length in enumerate(used):
        one = q[n : n + 1], k[n : n + 1, :, :length], v[n : n + 1, :, :length]
        exact.append(reference.attention(*one, **composition))
        same.append(plain(*one, composition))
        k[n, :, length:], v[n, :, length:] = math.inf, math.nan
    return Call(
        functools.partial(fa4flex.compile(**composition), return_lse=True),
        (q, k, v),
        tuple(map(torch.cat, zip(*exact))),  # type: ignore[arg-type]
        tuple(map(torch.cat, zip(*same))),  # type: ignore[arg-type]
        options={"varlen": Varlen(seqused_k=_vector(used))},
    )


def _sequences() -> Iterator[tuple[str, Maker]]:
    turns = zip(PACKED.items(), itertools.cycle(WIDTHS), itertools.cycle((BF16, BF16, F16)))
    for (name, draw), width, dtype in turns:
        yield f"packed {name}", functools.partial(packed, draw, width, dtype)
    for name in ("dense", "causal", "alibi causal", "prefix per sequence"):
        yield f"packed, used {name}", functools.partial(packed, PACKED[name], (128, 128), BF16, True)
    for name in ("dense", "causal", "alibi causal", "document", "prefix per sequence"):
        yield f"padded {name}", functools.partial(padded, PACKED[name])
    yield "used keys", used_keys


GROUPS: dict[str, dict[str, Maker]] = {
    "variants": dict(_variants()),
    "gym": dict(_of_gym()),
    "lengths": dict(_lengths()),
    "heads": dict(_heads()),
    "widths": dict(_widths()),
    "strides": dict(_strides()),
    "edges": dict(_edges()),
    "sequences": dict(_sequences()),
}
