"""Training on groups of rollouts, each token of a shared prefix once.

    python examples/rollout_trees.py                          2 prompts of 192 tokens, 8 rollouts of 16 to 32
    python examples/rollout_trees.py --prompt 1024 --steps 10

A small random model takes steps of a policy gradient on the same batch twice: on the packed sequences, and
folded by `fa4flex.trees.fold`. Losses and gradients are compared, and tokens, time and memory printed. It
runs on a CPU in float32, and on a GPU in bfloat16 under autocast.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fa4flex
from fa4flex.trees import Folded, fold
from fa4flex.variants import causal

VOCABULARY, HIDDEN, HEADS, KV_HEADS, WIDTH = 512, 256, 4, 2, 64

# --- the model: a transformer that is told how its tokens attend ------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k and v [T, heads, width]."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        parts = self.qkv(self.norms[0](x)).view(len(x), -1, WIDTH).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k, v = rotated(parts[0], positions), rotated(parts[1], positions), parts[2]
        x = x + self.out(attend(q, k, v).flatten(1))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [T, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, width]: only positions tell a folded token from its neighbours."""
    frequencies = 10000.0 ** -(torch.arange(0, WIDTH, 2, device=x.device) / WIDTH)
    angles = (positions[:, None] * frequencies)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


# --- the two ways to compute log-probabilities ------------------------------------------------------------


def packed_log_probs(model: Model, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Log-probability of each token behind those before it, by sequence; 0 for the first."""
    lengths = torch.tensor([len(x) for x in sequences])
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(sequences[0].device)
    attention = fa4flex.compile(mask=causal)
    positions = torch.cat([torch.arange(len(x), device=x.device) for x in sequences])
    varlen = fa4flex.Varlen(starts)
    logits = model(torch.cat(list(sequences)), positions, lambda *qkv: attention(*qkv, varlen=varlen))
    return [log_probs_of(x, y) for x, y in zip(sequences, logits.split(lengths.tolist()), strict=True)]


def log_probs_of(tokens: Tensor, logits: Tensor) -> Tensor:
    found = logits[:-1].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return nn.functional.pad(found, (1, 0))


def folded_log_probs(model: Model, folded: Folded) -> list[Tensor]:
    """The same, of a batch in which a token that sequences share is computed once."""
    attention = fa4flex.compile(mask=folded.mask)

    def attend(*qkv: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
        out: Tensor = attention(*heads_first)
        return out[0].transpose(0, 1)

    return folded.unfold(folded.log_probs(model(folded.tokens, folded.positions, attend)))


def policy_loss(log_probs: Sequence[Tensor], advantages: Tensor, prompt: int) -> Tensor:
    """The mean over rollouts of their mean log-probability, weighted by advantages. A loss is written as for
    sequences: unfolding is what folds its gradients."""
    means = torch.stack([x[prompt:].mean() for x in log_probs])
    return -(advantages * means).mean()


# --- steps ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Time and memory of a number of steps, and loss and gradients of the first."""

    loss: float
    gradients: list[Tensor]
    last: float
    seconds: float
    bytes: int


def train(
    model: Model, log_probs: Callable[[Model], list[Tensor]], loss_of: Callable[..., Tensor], steps: int
) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    losses, gradients, times, kept = [], [], [], 0
    for step in range(steps):
        begin = time.perf_counter()
        counted = Saved()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"), counted.hooks():
            loss = loss_of(log_probs(model))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))  # which waits for the device
        times.append(time.perf_counter() - begin)
        if not step:
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            kept = counted.bytes
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses[0], gradients, losses[-1], min(times), kept)


class Saved:
    """Bytes that the forward pass keeps for the backward pass, each memory once."""

    def __init__(self) -> None:
        self.bytes, self.seen = 0, set[int]()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.count, lambda x: x)

    def count(self, x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in self.seen:
            self.seen.add(memory.data_ptr())
            self.bytes += memory.nbytes()
        return x


def rollouts(groups: int, each: int, prompt: int, response: int, device: str) -> list[Tensor]:
    """Prompts, each with some continuations of different lengths."""
    sequences = []
    for _ in range(groups):
        first = torch.randint(VOCABULARY, (prompt,))
        for _ in range(each):
            length = int(torch.randint(response // 2, response + 1, ()))
            sequences.append(torch.cat([first, torch.randint(VOCABULARY, (length,))]).to(device))
    return sequences


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        "groups": 2,
        "rollouts": 8,
        "prompt": 192,
        "response": 32,
        "layers": 2,
        "steps": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sequences = rollouts(options.groups, options.rollouts, options.prompt, options.response, device)
    advantages = torch.randn(len(sequences), device=device)
    model = Model(options.layers).to(device)
    folded = fold(sequences)
    print(folded.explain())

    def loss_of(log_probs: list[Tensor]) -> Tensor:
        return policy_loss(log_probs, advantages, options.prompt)

    by_packing = train(copy.deepcopy(model), lambda m: packed_log_probs(m, sequences), loss_of, options.steps)
    by_folding = train(copy.deepcopy(model), lambda m: folded_log_probs(m, folded), loss_of, options.steps)
    print(f"{'':10}{'tokens':>10}{'s a step':>10}{'MiB kept':>10}{'loss':>12}{'after':>12}")
    for name, run, tokens in (
        ("packed", by_packing, len(folded.index)),
        ("folded", by_folding, len(folded.tokens)),
    ):
        kept = run.bytes / 2**20
        print(f"{name:10}{tokens:10}{run.seconds:10.3f}{kept:10.1f}{run.loss:12.7f}{run.last:12.7f}")
    worst = max(
        float((a - b).norm() / b.norm())
        for a, b in zip(by_folding.gradients, by_packing.gradients, strict=True)
    )
    allowed = 1e-4 if device == "cpu" else 3e-2
    apart = abs(by_folding.loss - by_packing.loss)
    print(f"gradients differ by at most {worst:.1e} of their norm, losses by {apart:.1e}")
    right = worst < allowed and apart < allowed
    print("the same within rounding" if right else "NOT the same")
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
