"""Cost of captured tensors' gradients in a backward pass on a GPU, beside compiled flex_attention.

    python benchmarks/captured_gradients.py [--length 4096] [--dim 128] [--rounds 11]

Batch 2, 16 heads, causal, bf16: a slope per head, a table [heads, 2 * length] by distance, a bias
[batch, heads, length, length], and for comparison numbers per key, per query and T5's buckets. Times are of
the backward pass alone, medians of samples taken in turns; "without" is the same score mod on a tensor that
requires no gradient. Peers that fail stand there with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fa4flex
from fa4flex.bench.measure import DeviceClock, interleave

BATCH, HEADS = 2, 16
Mod = Callable[..., Any]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def mods(n: int) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Mod]]]:
    """Shape of the captured tensor and the score mod that reads it, by name."""
    distance = torch.arange(n, device="cuda").clamp(min=1).float()
    far = 16 + (torch.log(distance / 16) / torch.log(torch.tensor(8.0)) * 16).clamp(0, 15)
    bucket = torch.where(distance < 16, torch.arange(n, device="cuda"), far.long()).to(torch.int32)
    return {
        "slopes[h]": ((HEADS,), lambda t: lambda s, b, h, q, k: s + t[h] * (k - q)),
        "table[h, q - kv + n]": ((HEADS, 2 * n), lambda t: lambda s, b, h, q, k: s + t[h, q - k + n]),
        "bias[b, h, q, kv]": ((BATCH, HEADS, n, n), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
        "bias[b, kv]": ((BATCH, n), lambda t: lambda s, b, h, q, k: s + t[b, k]),
        "bias[h, q]": ((HEADS, n), lambda t: lambda s, b, h, q, k: s + t[h, q]),
        "t5[bucket[q - kv], h]": (
            (32, HEADS),
            lambda t: lambda s, b, h, q, k: s + t[bucket[torch.clamp(q - k, min=0)], h],
        ),
    }


def backward_of(forward: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> Callable[[], Any]:
    """The backward pass of one forward pass, again and again."""
    with torch.enable_grad():
        out = forward(*leaves[:3])

    def call() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return call


def calls_of(
    make: Callable[[Tensor], Mod], table: Tensor, qkv: list[Tensor], dout: Tensor
) -> dict[str, Callable[[], Any] | str]:
    length = qkv[0].shape[2]
    block_mask = create_block_mask(causal, None, None, length, length)
    found: dict[str, Callable[[], Any] | str] = {}
    for name in ("fa4flex", "flex"):
        for what in ("without", "with"):
            torch._dynamo.reset()
            mine = table.detach().clone().requires_grad_(what == "with")
            mod = make(mine)
            leaves = [x.detach().clone().requires_grad_() for x in qkv] + [mine] * (what == "with")
            try:
                if name == "fa4flex":
                    attn = fa4flex.compile(score_mod=mod, mask=causal)
                else:
                    compiled = torch.compile(flex_attention, dynamic=False)

                    def attn(q: Tensor, k: Tensor, v: Tensor, c: Any = compiled, m: Mod = mod) -> Any:
                        return c(q, k, v, score_mod=m, block_mask=block_mask)

                found[f"{name} {what}"] = backward_of(attn, leaves, dout)  # type: ignore[arg-type]
                found[f"{name} {what}"]()  # type: ignore[operator]
            except Exception as error:
                found[f"{name} {what}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="a part of a row's name")
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        qkv = [torch.randn(BATCH, HEADS, given.length, given.dim, dtype=torch.bfloat16) for _ in range(3)]
        dout = torch.randn_like(qkv[0])
        for name, (shape, make) in mods(given.length).items():
            if given.only not in name:
                continue
            table = (torch.randn(shape, dtype=torch.bfloat16) if len(shape) > 1 else torch.rand(shape)) * 0.1
            report(name, calls_of(make, table, qkv, dout), given.rounds)


def report(name: str, calls: dict[str, Callable[[], Any] | str], rounds: int) -> None:
    timed = {key: call for key, call in calls.items() if callable(call)}
    times = interleave(timed, DeviceClock(), rounds)
    parts = [
        f"{key} {times[key].median * 1e3:.3f} ms" if key in times else f"{key}: {calls[key]}" for key in calls
    ]
    print(f"{name:24} " + " | ".join(parts), flush=True)
    if {"fa4flex with", "fa4flex without"} <= times.keys():
        ratio = times["fa4flex with"].median / times["fa4flex without"].median
        against = times["flex with"].median / times["fa4flex with"].median if "flex with" in times else None
        print(
            f"{'':24} the gradient costs {ratio:.2f}x; over flex {against and f'{against:.1f}x'}", flush=True
        )


if __name__ == "__main__":
    main()
