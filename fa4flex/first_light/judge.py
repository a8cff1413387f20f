"""Results of a case beside the formula in float64, and beside the bits that the simulator had."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex import reference
from fa4flex.bench.accuracy import poison
from fa4flex.bench.suites import MOST_ERROR
from fa4flex.first_light.cases import Trial

SAMPLES = 64
"""Elements of each result that are kept beside the digest of all."""


@dataclass(frozen=True)
class Judged:
    """One result: its largest error, that of PyTorch's operations, and its bits."""

    name: str
    error: float
    usual: float
    digest: str
    sample: tuple[float, ...]

    @property
    def right(self) -> bool:
        return self.error <= MOST_ERROR * self.usual  # False for NaN


def judge(trial: Trial, gradients: bool, generator: torch.Generator) -> list[Judged]:
    """The output, and the gradients of leaves, of one call whose output memory held NaN before."""
    leaves = [x.detach().requires_grad_(gradients) for x in trial.leaves]
    poison(leaves[0])
    with torch.set_grad_enabled(gradients):
        out = trial.attend(*leaves)
    results, cotangents = {"out": trial.outputs(out)}, []
    if gradients:
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in results["out"]]
        poison(leaves[0])
        taken = torch.autograd.grad(results["out"], leaves, cotangents)
        results |= {f"d{name}": [x] for name, x in zip("qkv", taken)}
    exact = dict(formula(trial, torch.float64, cotangents))
    plain = dict(formula(trial, out.dtype, cotangents))
    return [_judged(name, results[name], exact[name], plain[name]) for name in results]


def formula(
    trial: Trial, dtype: torch.dtype, cotangents: Sequence[Tensor]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Names and results of the dense formula in `dtype`, on the host: mods are asked in float64."""
    leaves = [x.detach().to(dtype).requires_grad_(bool(cotangents)) for x in trial.leaves]
    outs = [_dense(trial, n, *qkv) for n, qkv in enumerate(trial.sequences(*leaves))]
    yield "out", [out.detach() for out in outs]
    if cotangents:
        taken = torch.autograd.grad(outs, leaves, [g.to(out.dtype) for g, out in zip(cotangents, outs)])
        yield from ((f"d{name}", [x]) for name, x in zip("qkv", taken))


def _dense(trial: Trial, n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H, Sq, Dv] of sequence n."""
    (_, heads, q_len, dim), kv_len = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    with torch.device(q.device):
        allowed = reference.allowed_pairs(reference.of_sequence(trial.mask, n, 0), (1, heads, q_len, kv_len))
        scores = (q @ k.mT) / math.sqrt(dim)
        score_mod = reference.of_sequence(trial.score_mod, n, 1)
        scores = reference.modified_scores(scores.double(), allowed, score_mod).to(q.dtype)
    if trial.sinks is not None:
        sink = trial.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(1, heads, q_len, 1)
        return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v)[0]
    # A row without keys gives 0, and no gradient.
    seen = allowed.any(-1, keepdim=True)
    scores = torch.where(seen, scores, torch.zeros_like(scores))
    return (torch.where(seen, scores.softmax(-1), 0).to(v.dtype) @ v)[0]


def _judged(name: str, results: list[Tensor], exact: list[Tensor], plain: list[Tensor]) -> Judged:
    pairs = list(zip(results, exact, plain, strict=True))
    errors = [(a.double() - b).abs().max().item() for a, b, _ in pairs]
    usual = [(c.double() - b).abs().max().item() for _, b, c in pairs]
    flat = torch.cat([x.detach().cpu().flatten() for x in results])
    places = torch.linspace(0, flat.numel() - 1, SAMPLES).long()
    digest = hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    worst = max(errors, key=lambda x: math.inf if math.isnan(x) else x)
    return Judged(name, worst, max(usual), digest, tuple(flat[places].double().tolist()))
