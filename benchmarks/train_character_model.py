"""Train a small language model whose attention nobody wrote a kernel for, beside PyTorch in float32.

    python benchmarks/train_character_model.py [--steps 200] [--length 2048] [--batch 8] [--device cuda]
    python benchmarks/train_character_model.py --kinds bfloat16 int8 --steps 1000 --length 128 --batch 2

Two layers, characters of documents made here (sums and their results). Attention is a composition:
documents, a causal window, a learned bias per distance and a soft cap, with gradients to the bias. The same
model starts from the same weights several times and sees the same batches: dense attention in float32, then
on a GPU fa4flex, compiled flex_attention and, for what rounding alone does, dense attention, all in
bfloat16 (on a CPU fa4flex in float32). Kind "int8" rounds q and k to int8 and v to e4m3 in the forward
pass, of bfloat16 tensors, and multiplies 16 bits in the backward pass; "bfloat16" is the same without
rounding. Printed are losses, the largest distance of a curve from the first one, milliseconds per step and
peak memory of a GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fa4flex
from fa4flex import Precision
from fa4flex.variants import causal, document, learned_bias, sliding_window, softcap

ALPHABET = "0123456789+=;"
HEADS, HEAD_DIM, LAYERS = 4, 64, 2
CAP = 20.0
RATE, WARM_STEPS = 3e-4, 20
"""Learning rate and warm-up steps. Gradients are clipped, too: where training is not stable, at 1e-3 without
either, curves of dense attention itself part by 0.3 when it rounds to bfloat16."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, H, S, D] and the bias [H, 2 W - 1] -> [B, H, S, D]."""


@dataclass(frozen=True)
class Sizes:
    batch: int
    length: int
    window: int

    @property
    def tokens(self) -> int:
        """Characters of a row, the last of which is only predicted."""
        return self.length + 1


def a_document(rng: random.Random) -> str:
    """A few sums, each right."""
    found = ""
    for _ in range(rng.randint(3, 40)):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        found += f"{a}+{b}={a + b};"
    return found


def batches(sizes: Sizes, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(characters, document numbers), both integer [batch, length + 1]."""
    rng = random.Random(seed)
    while True:
        texts, numbers = [], []
        for _ in range(sizes.batch):
            text: list[int] = []
            number: list[int] = []
            while len(text) < sizes.tokens:
                more = a_document(rng)
                number += [number[-1] + 1 if number else 0] * len(more)
                text += [ALPHABET.index(c) for c in more]
            texts.append(text[: sizes.tokens])
            numbers.append(number[: sizes.tokens])
        yield torch.tensor(texts, device=device), torch.tensor(numbers, dtype=torch.int32, device=device)


class Layer(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.zeros(HEADS, 2 * window - 1))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        split = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v, self.bias).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Layer(sizes.window) for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * HEAD_DIM, len(ALPHABET))

    def forward(self, text: Tensor, attends: list[Attend]) -> Tensor:
        """The mean loss of predicting each next character."""
        x = self.embedding(text[:, :-1])
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), text[:, 1:].flatten())


# --- attention, three ways --------------------------------------------------------------------------------


def by_fa4flex(
    sizes: Sizes, ids: Tensor, bias: Tensor, dtype: torch.dtype, precision: Precision | None = None
) -> Attend:
    """Captures the bias and the document numbers: both may change in place between steps."""
    attn = fa4flex.compile(
        score_mod=learned_bias(bias) >> softcap(CAP),
        mask=causal & document(ids) & sliding_window(sizes.window),
        precision=precision or Precision(),
    )
    return lambda q, k, v, _: attn(q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)


def rounded(sizes: Sizes, ids: Tensor, bias: Tensor, dtype: torch.dtype) -> Attend:
    return by_fa4flex(sizes, ids, bias, dtype, Precision(qk="int8", pv="float8_e4m3"))


def by_flex(sizes: Sizes, ids: Tensor, bias: Tensor, dtype: torch.dtype) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)
    far = sizes.window - 1

    def allowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= far) & (ids[b, q] == ids[b, k])

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return CAP * torch.tanh((s + bias[h, torch.clamp(q - k, -far, far) + far]) / CAP)

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        mask = masks(allowed, sizes.batch, None, sizes.length, sizes.length, device=q.device)
        return compiled(q.to(dtype), k.to(dtype), v.to(dtype), score_mod=score, block_mask=mask).to(q.dtype)

    return attend


def by_hand(sizes: Sizes, ids: Tensor, bias: Tensor, dtype: torch.dtype) -> Attend:
    """Dense attention as the formulas stand; `dtype` is that of products."""
    places = torch.arange(sizes.length, device=ids.device)
    behind, far = places[:, None] - places, sizes.window - 1

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(HEAD_DIM)
        scores = scores + bias[:, behind.clamp(-far, far) + far]
        row = ids[:, :-1]
        allowed = (behind >= 0) & (behind <= far) & (row[:, :, None] == row[:, None])
        scores = (CAP * torch.tanh(scores / CAP)).masked_fill(~allowed[:, None], -math.inf)
        return (scores.softmax(-1).to(dtype) @ v.to(dtype)).to(q.dtype)

    return attend


KINDS = {
    "float32": by_hand, "fa4flex": by_fa4flex, "flex_attention": by_flex, "dense": by_hand,
    "bfloat16": by_fa4flex, "int8": rounded,
}  # fmt: skip
"""Implementations by name; all but the first run in bfloat16 on a GPU, the last two everywhere."""


# --- training ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    losses: list[float]
    milliseconds: float
    peak_bytes: int
    model: Model


def train(kind: str, sizes: Sizes, steps: int, device: str, seed: int = 0) -> Run:
    """From the weights and over the batches that the seed gives."""
    torch.manual_seed(seed)
    model = Model(sizes).to(device)
    ids = torch.zeros(sizes.batch, sizes.tokens, dtype=torch.int32, device=device)
    half = kind in ("bfloat16", "int8") or (device == "cuda" and kind != "float32")
    dtype = torch.bfloat16 if half else torch.float32
    attends = [KINDS[kind](sizes, ids, layer.bias, dtype) for layer in model.layers]
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LinearLR(optimiser, 1 / WARM_STEPS, total_iters=WARM_STEPS)
    losses: list[float] = []
    times: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    drawn = batches(sizes, seed, device)
    for _ in range(steps):
        text, numbers = next(drawn)
        ids.copy_(numbers)
        start = time.perf_counter()
        loss = model(text, attends)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        warm.step()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Run(losses, 1e3 * statistics.median(times), peak, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, help="the first is what others are compared with"
    )
    given = parser.parse_args()
    sizes = Sizes(given.batch, given.length, given.window)
    exact: Run | None = None
    on_device = list(KINDS) if given.device == "cuda" else ["float32", "fa4flex"]
    for kind in given.kinds or on_device:
        try:
            run = train(kind, sizes, given.steps, given.device)
        except RuntimeError as error:  # a peer's compiler, which may not have a kernel for this
            if kind != "flex_attention":
                raise
            print(f"{kind:15} fails: {str(error).splitlines()[0]}")
            continue
        exact = exact or run
        apart = max(abs(a - b) for a, b in zip(run.losses, exact.losses, strict=True))
        shown = " ".join(f"{x:.3f}" for x in run.losses[:: max(1, given.steps // 8)])
        last = statistics.mean(run.losses[-given.steps // 10 :])
        print(
            f"{kind:15} loss {shown} -> {last:.4f} (mean of a tenth); at most {apart:.1e} from the first;"
            f" {run.milliseconds:.1f} ms per step, {run.peak_bytes / 2**30:.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
