"""torch's flex_attention as a backend: errors of every variant, block masks of long sequences, host time.

    python benchmarks/flex_backend.py [--device cuda] [--length 512] [--long 131072] [--rounds 11]

Errors  every variant of tests/numeric/variant_table.py in bf16 with backend="flex", out and gradients of q,
        k, v and learned tensors, over those of the same maths by PyTorch operations in bf16; both against
        float64. The worse of the largest element and the largest row, means of three draws; at most 2 is
        asked
Masks   seconds and peak bytes of a new block mask, beside torch's create_block_mask where that fits
Host    microseconds of a repeated call, beside compiled flex_attention with a BlockMask; with gradients, and
        with documents that are new at each call, of which torch makes a BlockMask

`--device cpu` runs all of it at small sizes, through torch's reference; its host times say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fa4flex
from fa4flex import reference
from fa4flex import variants as v
from fa4flex.bench.environment import environment
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.primitives.base import call_mod
from fa4flex.primitives.mask import as_mask
from fa4flex.runtime.flex.block_mask import Blocks, blocks_of, classifier_of, finder

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("", "numeric")]
import variant_table  # noqa: E402
from variant_table import Case, Sizes  # noqa: E402

DRAWS = 3
WIDTH = 64
EPSILON = 2.0**-9
"""Largest error of rounding 1 to bf16. Smaller ones are none where PyTorch has none: a window of one key."""
DOCUMENTS = 40
"""Captured tensors that take turns: more than block masks are kept for."""
MOST_DENSE = 1 << 15
"""Tokens up to which torch's create_block_mask is measured: it takes 10 bytes per pair."""


# --- errors -----------------------------------------------------------------------------------------------


def plain(qkv: Sequence[Tensor], composition: dict[str, Any], scale: float | None) -> Tensor:
    """The same maths by PyTorch operations in the inputs' own dtype, with the whole score matrix."""
    q, k, value = qkv
    k, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, value))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    sizes = scores.shape
    index = tuple(torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate(sizes))
    context = {"q_len": sizes[2], "kv_len": sizes[3], "num_heads": sizes[1]}
    variant = fa4flex.compile(**composition).variant
    if variant.score_mod is not None:
        scores = torch.as_tensor(call_mod(variant.score_mod, (scores, *index), context)).to(q.dtype)
    if variant.mask is not None:
        scores = scores.masked_fill(~torch.as_tensor(call_mod(variant.mask, index, context)), -torch.inf)
    if variant.sinks is not None:
        sink = variant.sinks.now().to(q.dtype).view(1, -1, 1, 1).expand(*sizes[:3], 1)
        return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1]).nan_to_num(0.0) @ value
    return scores.softmax(-1).nan_to_num(0.0) @ value


def worst(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Largest error of an element and of a row, of each result."""
    pairs = [((a.double() - b).abs(), b) for a, b in zip(found, exact, strict=True)]
    return [
        (e.max().item(), e.reshape(-1, e.shape[-1] if e.ndim else 1).norm(dim=-1).max().item())
        for e, _ in pairs
    ]


def results(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, leaves, dout.to(out))]


def oracle(composition: dict[str, Any]) -> dict[str, Any]:
    sinks = composition.get("sinks")
    return composition if sinks is None else {**composition, "sinks": sinks.logits}


Pairs = list[tuple[float, float]]
"""Our errors, and PyTorch's: of the worst element and the worst row of out and of each gradient."""


def ratio(found: list[Pairs]) -> float:
    """Our error over PyTorch's, each the mean of draws, of the worst of all pairs: one draw's largest error
    alone is as much chance as kernel."""
    means = [[sum(x) for x in zip(*pairs, strict=True)] for pairs in zip(*found, strict=True)]
    return max(a / b if b else (1.0 if a < EPSILON else float("inf")) for a, b in means)


def errors_of(case: Case, device: torch.device) -> Pairs:
    """Errors of one draw, whose tensors lie on the device."""
    qkv = [x.detach().to(device, torch.bfloat16) for x in case.sizes.qkv()]
    learned = [x.detach().to(device, torch.float32) for x in case.learned]

    def fresh(dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor]]:
        made = [[x.to(dtype or x.dtype, copy=True).requires_grad_() for x in part] for part in (qkv, learned)]
        return made[0], made[1]

    with device:
        inputs, tables = fresh(torch.float64)
        exact, _ = reference.attention(*inputs, **oracle(case.compose(*tables)))
        dout = torch.randn_like(exact)
        truth = [x.detach() for x in results(exact, [*inputs, *tables], dout)]

        inputs, tables = fresh()
        composition = case.compose(*tables)
        out = plain(inputs, composition, composition.get("scale"))
        theirs = worst(results(out, [*inputs, *tables], dout), truth)

        inputs, tables = fresh()
        attn = fa4flex.compile(**case.compose(*tables), backend="flex")
        ours = worst(results(attn(*inputs), [*inputs, *tables], dout), truth)
    return [
        (a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)
    ]


def words_of(error: Exception) -> str:
    """Class and first lines of an error: compilers name their backend first, and then what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:160]}"


def errors(device: torch.device, length: int) -> None:
    """A line per variant: ratios of errors, and what was refused."""
    sizes = replace(Sizes(), q_len=length, kv_len=length + length // 2, dim=WIDTH, dim_v=WIDTH)
    print("errors over those of PyTorch operations in bf16, out and gradients, means of draws")
    for name, draws in variant_table.TABLE.items():
        for number, draw in enumerate(draws):
            torch._dynamo.reset()
            try:
                with device:  # what variants capture lies there
                    cases = [draw(sizes) for _ in range(DRAWS)]
                found = ratio([errors_of(case, device) for case in cases])
                said = f"{found:6.2f}" + ("" if found <= 2 else "   more than 2")
            except Exception as error:
                said = words_of(error)
            print(f"  {name + ' ' + str(number):<22} {said}", flush=True)


# --- block masks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak: int | None

    def __str__(self) -> str:
        peak = "" if self.peak is None else f", peak {self.peak / 1e6:.1f} MB"
        return f"{1e3 * self.seconds:.2f} ms{peak}"


def cost(make: Callable[[], Any], device: torch.device, rounds: int) -> Cost:
    """Median seconds of a call, and the most bytes that it held at once, its result included."""
    make()
    taken, peak = [], None
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        kept = make()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = max(peak or 0, torch.cuda.max_memory_allocated() - before)
        taken.append(time.perf_counter() - start)
        del kept
    return Cost(statistics.median(taken), peak)


def block_masks(device: torch.device, length: int, rounds: int) -> None:
    """New block masks of `length` tokens, of lengths and numbers alone and of captured tensors."""
    ids = (torch.arange(length, device=device) // 5000).to(torch.int32)
    shuffled = ids[torch.randperm(length, device=device)]
    masks = {
        "causal": v.causal,
        "sliding_window(4096)": v.sliding_window(4096),
        "causal & document": v.causal & v.document(ids),
        "document, shuffled": v.document(shuffled),
    }
    print(f"a new block mask of {length} tokens")
    for name, mask in masks.items():
        program = fa4flex.compile(mask=mask).program
        shape, captured = Shape(1, 8, length, length), program.captured()
        classify, find = classifier_of(program.facts.mask, captured), finder(shape, captured, device)

        def ours(classify: Any = classify, find: Any = find, shape: Shape = shape) -> Blocks:
            with torch.no_grad():
                return blocks_of(classify.classes(shape, find, device))

        print(f"  {name:<22} fa4flex {cost(ours, device, rounds)}", flush=True)
        if length > MOST_DENSE:
            continue

        def theirs(mask: Any = as_mask(mask)) -> Any:
            context = {"q_len": length, "kv_len": length, "num_heads": 8}
            mod = lambda b, h, q_idx, kv_idx: call_mod(mask, (b, h, q_idx, kv_idx), context)  # noqa: E731
            return create_block_mask(mod, None, None, length, length, device=device)

        print(f"  {'':<22} torch   {cost(theirs, device, 1)}", flush=True)


# --- host time --------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], Any], device: torch.device, rounds: int, calls: int) -> float:
    """Median microseconds of host time per call; a GPU is kept busy meanwhile."""
    found = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(40_000_000)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(found[2:])


@dataclass(frozen=True)
class Row:
    """A call of ours, the same by torch, and how many are timed at once: few where each makes a mask."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    calls: int
    gradients: bool = False


def host_rows(device: torch.device) -> list[Row]:
    """Repeated calls beside compiled flex_attention with the same mods and a BlockMask that is at hand; and a
    mask whose captured tensor is another one at each call, of which torch makes a BlockMask each time."""
    on_cpu = device.type == "cpu"
    batch, heads, kv_heads, length, width = (1, 2, 1, 64, 16) if on_cpu else (2, 8, 2, 512, 64)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    q, k, value = (
        torch.randn(batch, n, length, width, dtype=dtype, device=device) for n in (heads, kv_heads, kv_heads)
    )
    learned = [x.clone().requires_grad_() for x in (q, k, value)]
    slopes = torch.rand(heads, device=device)
    documents = [torch.arange(length, device=device) // n for n in range(5, 5 + DOCUMENTS)]
    held, ours, theirs = [documents[0]], itertools.cycle(documents), itertools.cycle(documents)
    compiled = torch.compile(flex_attention)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + slopes[h] * (kv_idx - q_idx)

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (held[0][q_idx] == held[0][kv_idx]) & (q_idx >= kv_idx)

    def masked(mask: Callable[..., Any]) -> Any:
        return create_block_mask(mask, None, None, length, length, device=device)

    block_mask = masked(causal)
    plain, sloped, changing = (
        fa4flex.compile(*mods, backend="flex") for mods in ((None, causal), (score, causal), (None, same))
    )

    def ours_by_new_documents() -> Tensor:
        held[0] = next(ours)
        found: Tensor = changing(q, k, value)
        return found

    def theirs_by_new_documents() -> Tensor:
        held[0] = next(theirs)
        found: Tensor = compiled(q, k, value, None, masked(same), enable_gqa=True)
        return found

    def by_torch(mod: Any, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        q, k, value = inputs
        return lambda: compiled(q, k, value, mod, block_mask, enable_gqa=True)

    qkv, many, few = (q, k, value), 3 if on_cpu else 60, 3 if on_cpu else 10
    rows = [
        Row("causal", lambda: plain(*qkv), by_torch(None, qkv), many),
        Row("causal, slopes", lambda: sloped(*qkv), by_torch(score, qkv), many),
        Row("documents, new ids", ours_by_new_documents, theirs_by_new_documents, few),
    ]
    if on_cpu:  # torch compiles no gradients there
        return rows
    return [
        *rows,
        Row("causal, gradients", lambda: plain(*learned), by_torch(None, learned), many, True),
        Row("slopes, gradients", lambda: sloped(*learned), by_torch(score, learned), many, True),
    ]


def host_time(device: torch.device, rounds: int) -> None:
    """Host time of each row; with gradients, of the forward pass. The two results are compared first."""
    print("host time of a call")
    if device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for one another would be most of what is measured
    for row in host_rows(device):
        with torch.set_grad_enabled(row.gradients):
            (*_, ours), (*_, theirs) = ([call() for _ in range(5)] for call in (row.ours, row.theirs))
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
            taken = [microseconds(call, device, rounds, row.calls) for call in (row.ours, row.theirs)]
        print(
            f"  {row.name:<22} fa4flex {taken[0]:8.1f} us   torch {taken[1]:8.1f} us   "
            f"{taken[0] / taken[1]:.2f} times",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, help="queries of the errors (512; 24 on a CPU)")
    parser.add_argument("--long", type=int, help="tokens of the block masks (131072; 2048 on a CPU)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=("errors", "masks", "host"), help="one part alone")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    small = device.type == "cpu"
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))
    torch.manual_seed(0)
    if chosen.only in (None, "errors"):
        errors(device, chosen.length or (24 if small else 512))
    if chosen.only in (None, "masks"):
        block_masks(device, chosen.long or (2048 if small else 1 << 17), chosen.rounds)
    if chosen.only in (None, "host"):
        host_time(device, chosen.rounds)


if __name__ == "__main__":
    main()
