"""Host time of a call on a GPU: repeated, with gradients, and where something changes at each call.

    python benchmarks/host_time.py [--rounds 40]

bf16 [2, 4, 512, 64]; medians of samples of 60 calls, the device kept busy meanwhile. Beside them torch's
scaled_dot_product_attention on the same tensors; then the calls of host_calls.py, which host_time_stub.py
measures without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from host_calls import rows
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
from fa4flex.variants import alibi, causal, sliding_window

CALLS = 60
BUSY_CYCLES = 40_000_000
Call = Callable[[int], Any]
"""A call, given its number."""


def microseconds(call: Call, rounds: int) -> tuple[float, float]:
    """Median and least microseconds of host time per call."""
    found = []
    for sample in range(rounds + 2):
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        start = time.perf_counter()
        for i in range(CALLS):
            call(sample * CALLS + i)
        found.append(1e6 * (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return statistics.median(found[2:]), min(found[2:])


def both(attend: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> Call:
    return lambda i: torch.autograd.grad(attend(*leaves), leaves, dout)


def calls() -> dict[str, Call]:
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    bias = torch.randn(4, 1023, device="cuda")

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, q_idx - kv_idx + 511]

    window = fa4flex.compile(score_mod=alibi, mask=causal & sliding_window(128))
    captured, bare = fa4flex.compile(relative, causal), fa4flex.compile(score_mod=alibi)
    k_cache, v_cache = (torch.randn(2, 4, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one, plain = q[:, :, :1], fa4flex.compile(mask=causal)

    def decode(i: int) -> Tensor:
        return plain(one, k_cache[:, :, : 513 + i], v_cache[:, :, : 513 + i])

    def sdpa(*x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*x, is_causal=True)

    def quietly(attend: Callable[..., Any]) -> Call:
        def call(i: int) -> Any:
            with torch.no_grad():
                return attend(q, k, v)

        return call

    return {
        "repeated, ALiBi and a window": quietly(window),
        "repeated, a captured bias": quietly(captured),
        "repeated, SDPA": quietly(sdpa),
        "one more key per call": decode,
        "with gradients, forward, ALiBi and a window": lambda i: window(*leaves),
        "with gradients, forward, ALiBi alone": lambda i: bare(*leaves),
        "with gradients, forward, a captured bias": lambda i: captured(*leaves),
        "with gradients, forward, SDPA": lambda i: sdpa(*leaves),
        "forward and backward, ALiBi and a window": both(window, leaves, dout),
        "forward and backward, a captured bias": both(captured, leaves, dout),
        "forward and backward, SDPA": both(sdpa, leaves, dout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    measured = calls()
    with torch.device("cuda"):
        measured |= {name: lambda i, call=call: call() for name, call in rows().items()}  # type: ignore[misc]
    for name, call in measured.items():
        median, least = microseconds(call, arguments.rounds)
        print(f"{name:46} {median:7.1f} us (least {least:.1f})", flush=True)


if __name__ == "__main__":
    main()
