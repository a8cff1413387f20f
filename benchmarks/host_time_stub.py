"""Host time per call without a GPU: everything as on one, but compiled functions return at once.

    python benchmarks/host_time_stub.py [--rounds 15] [--only TEXT]

CPU tensors stand for those of a GPU, and torch's allocations on a CPU for those there. Each row has the
process time of a call in us, the least of the rounds' medians, and what it is over the repeated call's in the
same round, the median of the rounds: a machine that does other things meanwhile changes the ratio less.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fa4flex
from fa4flex import Paging, Varlen, contents, lower
from fa4flex.codegen.plan.target import SM90A
from fa4flex.primitives import paging as paging_module
from fa4flex.primitives import varlen as varlen_module
from fa4flex.runtime import launch
from fa4flex.runtime.cuda import backward, engine, fast_path, paged, ready
from fa4flex.variants import alibi, causal, document, sliding_window

SAMPLES, CALLS = 12, 50
HEADS, KV_HEADS, D, KEYS, BATCH, PAGE = 32, 8, 128, 8192, 4, 64
DTYPE = torch.bfloat16
Call = Callable[[], Any]


class Standin:
    """What stands for compiled kernels: it has their keys, and does nothing."""

    def __init__(self, source: Any, problem: Any, signature: Any, arch: str = "sm_90a") -> None:
        self.key = f"{source.key} {signature}"

    @staticmethod
    def launch(*given: Any) -> None:
        return None


def stand_in() -> None:
    """From now on, calls of CPU tensors go the way of a GPU's, up to the launches and without these."""
    zeros = torch.zeros(2, dtype=torch.int32)
    for module in (ready, backward, fast_path):
        mock.patch.object(module, "counter", lambda device: zeros).start()
    for module in (engine, paged):
        mock.patch.object(module, "target_of", lambda device: SM90A).start()
    for module in (contents, varlen_module, paging_module):
        mock.patch.object(module, "checked_here", lambda x: False).start()
    mock.patch.object(lower, "compile_kernel", Standin).start()
    mock.patch.object(lower, "compile_ahead", lambda *given: None).start()
    mock.patch.object(launch, "_on_gpu", lambda q: True).start()


# --- calls --------------------------------------------------------------------------------------------------


def rotating(call: Callable[..., Any], *given: list[Any]) -> Call:
    """A call with the next of what is given, again and again from the first."""
    turns: Iterator[Any] = itertools.cycle(zip(*given, strict=True))
    return lambda: call(*next(turns))


def heads(batch: int, count: int, length: int) -> Tensor:
    return torch.empty(batch, count, length, D, dtype=DTYPE)


def decoding() -> dict[str, Call]:
    """One query per sequence over a cache; all that changes is made beforehand."""
    attn, steps = fa4flex.compile(mask=causal), range(1000, 1400)
    q, k, v = heads(BATCH, HEADS, 1), heads(BATCH, KV_HEADS, KEYS), heads(BATCH, KV_HEADS, KEYS)
    used = [torch.full((BATCH,), n, dtype=torch.int32) for n in steps]
    grown = [[x[:, :, :n] for n in steps] for x in (k, v)]
    large = heads(64, HEADS, 1), *(heads(64, KV_HEADS, 1000) for _ in range(2))
    batches = [[x[: 1 + n % 64] for n in steps] for x in large]
    attended = [fa4flex.compile(mask=causal) for _ in range(6)]
    of_used, of_lengths, of_batches, of_kinds, _, _ = attended
    prompts = [heads(1, HEADS, 512)[:, :, : 100 + n % 256] for n in steps]
    mixed = [q[:1] if n % 2 else prompt for n, prompt in zip(steps, prompts, strict=True)]
    slots = [(k[:1], v[:1])[i][:, :, :n] for i in (0, 1) for n in steps]
    return {
        "repeated": lambda: attn(q, k, v),
        "one more key per call": rotating(lambda k, v: attn(q, k, v), *grown),
        "the same with seqused, contents as before": (
            lambda lengths: lambda: of_used(q, k, v, varlen=lengths)
        )(Varlen(seqused_k=used[0])),
        "the same with new seqused": rotating(
            lambda x: of_lengths(q, k, v, varlen=Varlen(seqused_k=x)), used
        ),
        "another batch size": rotating(of_batches, *batches),
        "prompts and single queries in turns": rotating(
            of_kinds, mixed, slots[: len(steps)], slots[len(steps) :]
        ),
    }


def pages() -> dict[str, Call]:
    columns = KEYS // PAGE
    q, k, v = heads(BATCH, HEADS, 1), *(torch.empty(600, PAGE, KV_HEADS, D, dtype=DTYPE) for _ in range(2))
    table = torch.zeros(BATCH, columns, dtype=torch.int32)
    used = [torch.full((BATCH,), n, dtype=torch.int32) for n in range(64)]
    tables = [table[:, : 10 + n] for n in range(64)]
    many = [x.expand(256, *x.shape[1:]) for x in (q[:1], table[:1], used[0][:1])]
    fixed, lengths, grown, large = (fa4flex.compile(mask=causal) for _ in range(4))
    kept, kept_large = Paging(table, used[0]), Paging(*many[1:])
    return {
        "pages, repeated": lambda: fixed(q, k, v, paging=kept),
        "pages, batch of 256, repeated": lambda: large(many[0], k, v, paging=kept_large),
        "pages, new lengths": rotating(lambda x: lengths(q, k, v, paging=Paging(table, x)), used),
        "pages, one more column": rotating(lambda x, n: grown(q, k, v, paging=Paging(x, n)), tables, used),
    }


def packed() -> dict[str, Call]:
    attn, mixed = fa4flex.compile(mask=causal), fa4flex.compile(mask=causal)
    tokens = 2048
    q, k, v = (torch.empty(tokens, n, D, dtype=DTYPE) for n in (HEADS, KV_HEADS, KV_HEADS))
    cu = [torch.arange(17, dtype=torch.int32) * (tokens // 16) for _ in range(64)]
    fewer = [tokens - n for n in range(64)]
    kept = Varlen(cu[0])
    return {
        "packed, repeated": lambda: attn(q, k, v, varlen=kept),
        "packed, new cu_seqlens": rotating(lambda x: attn(q, k, v, varlen=Varlen(x)), cu),
        "packed, new cu_seqlens and token count": rotating(
            lambda x, n: mixed(q[:n], k[:n], v[:n], varlen=Varlen(x)), cu, fewer
        ),
    }


class Captured:
    """Tensors that functions read by attribute."""

    def __init__(self, given: Tensor) -> None:
        self.now = given


def captured() -> dict[str, Call]:
    """Captured tensors of new contents are new tensors here, more of them than anything is kept for."""
    q, k, v = (torch.empty(2, 4, 512, 64, dtype=DTYPE) for _ in range(3))
    biases = [torch.zeros(4, 1023) for _ in range(64)]
    ids = [torch.arange(512) // 50 for _ in range(64)]
    of_bias, of_ids = Captured(biases[0]), Captured(ids[0])

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + of_bias.now[h, q_idx - kv_idx + 511]

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (of_ids.now[q_idx] == of_ids.now[kv_idx]) & (q_idx >= kv_idx)

    still, new = fa4flex.compile(relative, causal), fa4flex.compile(relative, causal)
    documents, changing = fa4flex.compile(mask=causal & document(ids[0])), fa4flex.compile(mask=same)

    def biased(x: Tensor) -> Any:
        of_bias.now = x
        return new(q, k, v)

    def assigned(x: Tensor) -> Any:
        of_ids.now = x
        return changing(q, k, v)

    return {
        "captured bias, repeated": lambda: still(q, k, v),
        "captured bias, another tensor": rotating(biased, biases),
        "documents, repeated": lambda: documents(q, k, v),
        "documents, other ids": rotating(assigned, ids),
    }


def training() -> dict[str, Call]:
    attn = fa4flex.compile(score_mod=alibi, mask=causal & sliding_window(128))
    grown, lengths = fa4flex.compile(score_mod=alibi, mask=causal), range(200, 300)
    qkv = [torch.empty(2, 4, 512, 64, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    cut = [[x.detach()[:, :, :n].requires_grad_() for n in lengths] for x in qkv]
    dout = torch.empty(2, 4, 512, 64, dtype=DTYPE)
    of_cut = [dout[:, :, :n] for n in lengths]
    return {
        "with gradients, forward": lambda: attn(*qkv),
        "with gradients, forward, new length": rotating(grown, *cut),
        "forward and backward": lambda: torch.autograd.grad(attn(*qkv), qkv, dout),
        "forward and backward, new length": rotating(
            lambda q, k, v, dout: torch.autograd.grad(grown(q, k, v), (q, k, v), dout), *cut, of_cut
        ),
    }


def rows() -> dict[str, Call]:
    return {**decoding(), **pages(), **packed(), **captured(), **training()}


# --- measuring ----------------------------------------------------------------------------------------------


def microseconds(call: Call) -> float:
    """Median process time per call."""
    found = []
    for _ in range(SAMPLES):
        start = time.process_time_ns()
        for _ in range(CALLS):
            call()
        found.append((time.process_time_ns() - start) / CALLS / 1000)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose names have this text in them")
    arguments = parser.parse_args()
    stand_in()
    torch.set_num_threads(1)
    every = rows()
    repeated = every["repeated"]
    every = {name: call for name, call in every.items() if arguments.only in name}
    for call in (repeated, *every.values()):
        microseconds(call)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
    for _ in range(arguments.rounds):
        for name, call in every.items():
            unit, of_call = microseconds(repeated), microseconds(call)
            found[name].append((of_call, of_call / unit))
    for name, measured in found.items():
        least, ratio = min(x for x, _ in measured), statistics.median(x for _, x in measured)
        print(f"{name:44} {least:7.1f} us   {ratio:5.2f} of a repeated call", flush=True)


if __name__ == "__main__":
    main()
