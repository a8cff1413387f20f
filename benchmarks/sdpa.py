"""torch's scaled_dot_product_attention on fa4flex's kernels, beside torch's own backends, on a GPU.

    python benchmarks/sdpa.py [--rounds 5] [--rows 4096 gqa]
    python benchmarks/sdpa.py --smoke          # tiny sizes

Twenty shapes in bf16, both passes. A backend is chosen as users choose it: by sdpa_kernel, and fa4flex by
activate_flash_attention_impl. Times are medians of rounds in which backends take turns. Printed are
microseconds, the fastest of torch's backends, and its time over fa4flex's: above 1, fa4flex is faster.
Outputs and gradients are compared with those of torch's math backend in float32, beside the fastest's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fa4flex.integrations.torch
from fa4flex.bench.measure import Call, DeviceClock, interleave

OURS = "fa4flex"
BACKENDS = {
    OURS: SDPBackend.FLASH_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Row:
    """Batch, query heads, KV heads, queries, keys, width of heads."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    width: int
    causal: bool

    @property
    def name(self) -> str:
        shape = f"b{self.batch} h{self.heads}:{self.kv_heads} {self.q_len}x{self.kv_len} d{self.width}"
        return shape + (" causal" if self.causal else "") + (" gqa" if self.heads > self.kv_heads else "")

    def smaller(self) -> Row:
        return Row(1, self.heads // self.kv_heads, 1, 64, 64, self.width, self.causal)

    def tensors(self) -> list[Tensor]:
        shapes = ((self.heads, self.q_len), (self.kv_heads, self.kv_len), (self.kv_heads, self.kv_len))
        return [
            torch.randn(self.batch, n, h, self.width, device="cuda").bfloat16().transpose(1, 2)
            for h, n in shapes
        ]


SELF = (
    (4, 16, 16, 4096, 64),
    (2, 16, 16, 8192, 128),
    (1, 16, 16, 16384, 128),
    (8, 12, 12, 1024, 64),
    (4, 32, 8, 4096, 128),
    (16, 16, 16, 512, 64),
    (1, 24, 24, 4608, 128),
    (2, 16, 4, 2000, 96),
    (64, 12, 12, 197, 64),
)
"""Batch, query heads, KV heads, tokens, width of heads."""
ROWS = (
    *(Row(b, h, hk, s, s, d, causal) for b, h, hk, s, d in SELF for causal in (False, True)),
    Row(1, 12, 12, 32760, 512, 128, False),
    Row(2, 8, 8, 4096, 77, 64, False),
)
"""Language models, ViT at 197 tokens, Flux at 4,608, the cross-attention of Wan and of Stable Diffusion."""


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Calls run on one backend of torch's, or on fa4flex in the place of its flash attention."""
    if name == OURS:
        fa4flex.integrations.torch.activate()
    try:
        with sdpa_kernel(BACKENDS[name]):
            yield
    finally:
        if name == OURS:
            torch.nn.attention.restore_flash_attention_impl()


class OfBackends:
    """Samples of calls, each on the backend that its name says."""

    def __init__(self, names: dict[Call, str]) -> None:
        self.clock, self.names = DeviceClock(), names

    def time(self, call: Call, calls: int) -> float:
        with chosen(self.names[call]):
            return self.clock.time(call, calls)


def attend(x: Sequence[Tensor], row: Row) -> Tensor:
    return scaled_dot_product_attention(
        *x, is_causal=row.causal, enable_gqa=row.heads != row.kv_heads
    )  # causal is aligned top-left, and lengths are equal where it is asked for


def exact(x: list[Tensor], dout: Tensor, row: Row) -> list[Tensor]:
    """Output and gradients of the first batch entry in float32."""
    given = [t[:1].float().detach().requires_grad_() for t in x]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        out = attend(given, row)
        return [out.detach(), *torch.autograd.grad(out, given, dout[:1].float())]


def passes(row: Row) -> tuple[dict[tuple[str, str], Call], dict[str, float]]:
    """Calls by pass and backend, and the largest error of each backend over the exact value's largest."""
    x = [t.requires_grad_() for t in row.tensors()]
    dout = torch.randn_like(x[0])
    true = exact(x, dout, row) if row.q_len * row.kv_len * row.heads < 3e9 else []
    calls: dict[tuple[str, str], Call] = {}
    errors = {}
    for name in BACKENDS:
        try:
            with torch.enable_grad(), chosen(name):
                out = attend(x, row)
                found = [out.detach(), *torch.autograd.grad(out, x, dout, retain_graph=True)]
        except RuntimeError as error:
            print(f"{row.name}: {name}: {str(error).splitlines()[0][:90]}")
            continue
        errors[name] = max(
            (float((f[:1].float() - t).abs().max() / t.abs().max()) for f, t in zip(found, true)), default=0.0
        )
        calls["forward", name] = lambda: attend(x, row)
        calls["backward", name] = lambda out=out: torch.autograd.grad(out, x, dout, retain_graph=True)
    return calls, errors


def ratios(row: Row, rounds: int) -> dict[str, float]:
    """Time of the fastest of torch's backends over fa4flex's, by pass. Prints a line for each."""
    calls, errors = passes(row)
    times = interleave(calls, OfBackends({call: name for (_, name), call in calls.items()}), rounds)
    found = {}
    for kind in ("forward", "backward"):
        of = {name: 1e6 * times[kind, name].median for name in errors}
        best = min((name for name in of if name != OURS), key=of.__getitem__)
        found[kind] = of[best] / of[OURS]
        others = ", ".join(f"{name} {of[name]:.0f}" for name in of)
        print(
            f"{found[kind]:6.3f}  {kind:8} {row.name:36} us: {others}; {best} is the fastest of torch's; "
            f"errors {errors[OURS]:.1e}, {errors[best]:.1e}",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", help="parts of their names")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if not options.rows or any(part in row.name for part in options.rows)]
    found: list[dict[str, Any]] = [
        ratios(row.smaller() if options.smoke else row, options.rounds) for row in rows
    ]
    for kind in ("forward", "backward"):
        of = sorted(each[kind] for each in found)
        print(f"{kind}: {len(of)} rows, least {of[0]:.3f}, median {statistics.median(of):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
