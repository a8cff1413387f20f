"""Serving by continuous batching: a small random model, each of whose layers has other mods, over pages.

    python examples/serve.py                 64 requests
    python examples/serve.py --requests 8

Requests are admitted while there are pages for them, prefilled in chunks beside those that decode, and
retired when they are done. At the end, eager attention in plain PyTorch checks every token of every request.
It runs on a CPU in float32, and on a GPU in bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fa4flex
from fa4flex.integrations import paged_cache
from fa4flex.integrations.paged_cache import Batch, write
from fa4flex.variants import causal, sliding_window, softcap

VOCABULARY, HIDDEN, HEADS, KV_HEADS, WIDTH = 512, 256, 8, 2, 32
WINDOW, CAP, PAGE_SIZE, MOST_TOKENS = 48, 5.0, 16, 256

# --- the model --------------------------------------------------------------------------------------------

KINDS = ("sliding", "full", "softcap", "sinks")
"""Kinds of layers, in turn. Those with sinks also have the window, as in gpt-oss."""


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.sinks = nn.Parameter(torch.linspace(-1, 2, HEADS)) if kind == "sinks" else None
        self.attention = fa4flex.compile(
            score_mod=softcap(CAP) if kind == "softcap" else None,
            mask=sliding_window(WINDOW) if kind in ("sliding", "sinks") else causal,
        )

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """x [T, hidden]; attend(layer, q [T, heads, width], k, v) says what the tokens see."""
        parts = self.qkv(self.norms[0](x)).view(len(x), -1, WIDTH).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k, v = rotated(parts[0], positions), rotated(parts[1], positions), parts[2]
        x = x + self.out(attend(self, q, k, v).flatten(1))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(KINDS[i % len(KINDS)]) for i in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for parameter in self.parameters():  # initial weights would give nearly uniform attention
            parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Hidden states [T, hidden]: what `head` makes logits of."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.norm(x)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of [T, heads, width]."""
    rates = 10_000.0 ** (-torch.arange(0, WIDTH, 2, device=x.device) / WIDTH)
    angles = (positions[:, None] * rates)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def eager(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The layer's attention over one whole sequence, by definition."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
    if layer.kind == "softcap":
        scores = CAP * torch.tanh(scores / CAP)
    i, j = (torch.arange(len(q), device=q.device).view(shape) for shape in ((-1, 1), (1, -1)))
    hidden = (j > i) | (j <= i - WINDOW) if layer.kind in ("sliding", "sinks") else j > i
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


# --- serving ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    prompt: list[int]
    wanted: int
    """Number of tokens to generate."""
    generated: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens whose keys and values are in the cache."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def waiting(self) -> int:
        """Tokens that are known and not yet in the cache: one while decoding."""
        return len(self.prompt) + len(self.generated) - self.cached


class Server:
    """One paged cache per layer and one table of pages for all of them."""

    def __init__(self, model: Model, pages: int) -> None:
        weight = model.head.weight
        shape = pages, PAGE_SIZE, KV_HEADS, WIDTH
        self.model, self.device = model, weight.device
        self.caches = {layer: (weight.new_zeros(shape), weight.new_zeros(shape)) for layer in model.layers}
        self.free = list(range(pages))

    def serve(self, requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
        """Steps until all requests are done; each gives (tokens computed, requests done)."""
        queue, running, done = deque(requests), [], 0
        while queue or running:
            while queue and pages_of(queue[0]) <= len(self.free):
                request = queue.popleft()
                request.pages = [self.free.pop() for _ in range(pages_of(request))]
                running.append(request)
            if not running:
                raise ValueError(f"a request of {pages_of(queue[0])} pages for a cache of {len(self.free)}")
            chunks = scheduled(running)
            self.step(chunks)
            for request in [r for r in running if len(r.generated) == r.wanted]:
                running.remove(request)
                self.free += request.pages
                done += 1
            yield sum(chunks.values()), done

    def step(self, chunks: dict[Request, int]) -> None:
        """Compute so many waiting tokens of each request; those that decode stand first."""
        spans = [(r, r.cached, r.cached + n) for r, n in chunks.items()]
        most = max(len(r.pages) for r in chunks)
        table = self.integers([r.pages + [0] * (most - len(r.pages)) for r in chunks])
        lengths = self.integers([stop for _, _, stop in spans])
        starts = torch.tensor([0, *chunks.values()], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = Batch.of_starts(table, lengths, starts.to(self.device), starts)
        places = [(r.pages[t // PAGE_SIZE], t % PAGE_SIZE, t) for r, a, b in spans for t in range(a, b)]
        slots = self.integers([page * PAGE_SIZE + place for page, place, _ in places])

        def attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.caches[layer]
            write(cache, (k, v), slots)
            return paged_cache.attend(layer.attention, q, cache, batch, sinks=layer.sinks)

        tokens = self.integers([token for r, a, b in spans for token in r.tokens[a:b]])
        hidden = self.model(tokens, self.integers([t for *_, t in places]), attend)
        last = self.integers([*chunks.values()]).cumsum(0) - 1
        chosen = self.model.head(hidden[last]).argmax(-1).tolist()
        for (request, _, stop), token in zip(spans, chosen, strict=True):
            request.cached = stop
            if not request.waiting:
                request.generated.append(token)

    def integers(self, numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


def pages_of(request: Request) -> int:
    return -(-(len(request.prompt) + request.wanted) // PAGE_SIZE)


def scheduled(running: list[Request]) -> dict[Request, int]:
    """Tokens of the next step: one of each request that decodes, then chunks of prompts, oldest first."""
    chunks: dict[Request, int] = {}
    budget = MOST_TOKENS
    for request in sorted(running, key=lambda r: r.waiting > 1):
        chunks[request] = min(request.waiting, budget)
        budget -= chunks[request]
        if not budget:
            break
    return dict(sorted(chunks.items(), key=lambda item: item[1] > 1))


# --- the check, and the command line ----------------------------------------------------------------------


def is_eagers(model: Model, request: Request) -> bool:
    """True if each generated token is the one that eager attention chooses after those before it. In 16 bits,
    logits that differ by no more than twice what eager itself rounds count as equal."""
    tokens = torch.tensor(request.tokens, device=model.head.weight.device)
    positions, first = torch.arange(len(tokens), device=tokens.device), len(request.prompt)
    logits = model.head(model(tokens, positions, eager))[first - 1 : -1].float()
    margin: float | Tensor = 0.0
    if model.head.weight.dtype != torch.float32:
        exact = Model(len(model.layers)).to(tokens.device)
        exact.load_state_dict(model.state_dict())
        rounded, logits = logits, exact.head(exact(tokens, positions, eager))[first - 1 : -1]
        margin = 2 * (rounded - logits).abs().max()
    chosen = logits.gather(1, tokens[first:, None])[:, 0]
    return bool((logits.amax(1) - chosen <= margin).all())


def show(done: int, count: int, tokens: int, seconds: float) -> None:
    bar = "#" * (30 * done // count)
    line = f"\r[{bar:<30}] {done:>3} of {count} requests, {tokens / seconds:7.0f} tokens/s"
    print(line, end="", flush=True)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Number of requests whose tokens are not eager's."""
    parser = argparse.ArgumentParser(description="Continuous batching over a paged cache.")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pages", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    torch.manual_seed(given.seed)
    on_gpu = torch.cuda.is_available()
    model = Model(given.layers).to("cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32)
    lengths = (8 * 2 ** (4.6 * torch.rand(given.requests))).int().tolist()  # 8 to 194
    requests = [
        Request(torch.randint(VOCABULARY, (n,)).tolist(), int(torch.randint(8, 33, ()))) for n in lengths
    ]
    computed, start = 0, time.perf_counter()
    for tokens, done in Server(model, given.pages).serve(requests):
        computed += tokens
        show(done, len(requests), computed, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    made = sum(len(request.generated) for request in requests)
    print(
        f"\n{made} tokens generated, {computed} computed in {seconds:.1f} s: {made / seconds:.0f} per second"
    )
    wrong = sum(not is_eagers(model, request) for request in requests)
    print(f"tokens equal to eager's, one by one: {len(requests) - wrong} of {len(requests)} requests")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
