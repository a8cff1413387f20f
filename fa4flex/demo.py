"""`python -m fa4flex demo`: long context in little memory, and Hugging Face models.

Every number printed is measured in this run, against the dense formula in float64 or against the models'
own attention.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex.primitives.base import call_mod
from fa4flex.variants import alibi, sliding_window

LENGTH, HEADS, HEAD_DIM = 8192, 8, 64
CHECKED_HEADS = (0, 7)
"""The steepest and the flattest ALiBi slope: the whole float64 formula takes seconds per head."""
DENSE_NEEDS_GB = 10
MOST_SECONDS = 60
ROWS_AT_ONCE = 1024


def main() -> int:
    """Run both parts; 0 if every comparison is within its tolerance."""
    started = time.perf_counter()
    passed = [long_context(), hugging_face()]
    _heading(
        f"done in {time.perf_counter() - started:.0f} s: {'all checks passed' if all(passed) else 'FAILED'}"
    )
    return 0 if all(passed) else 1


def _heading(text: str) -> None:
    print(f"\n=== {text} {'=' * max(0, 94 - len(text))}", flush=True)


class Progress:
    """Progress of one step, on standard error: a bar on a terminal, else a line now and then."""

    WIDTH, EVERY = 30, 10.0
    """Characters of a bar; seconds between lines."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit, self.bar = what, total, unit, sys.stderr.isatty()
        self.shown = time.perf_counter()
        if self.bar:
            self.reached(0)

    def reached(self, done: int) -> None:
        """`done` of the total is done."""
        now = time.perf_counter()
        if self.bar:
            full = self.WIDTH * done // self.total
            self._write(f"\r  {'#' * full}{'.' * (self.WIDTH - full)} {self.what}")
        elif now - self.shown >= self.EVERY:
            self.shown = now
            self._write(f"  {self.what}: {done} of {self.total} {self.unit}\n")

    def close(self) -> None:
        """The bar is taken away."""
        if self.bar:
            self._write(f"\r{' ' * (self.WIDTH + len(self.what) + 3)}\r")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


# --- 1. a window with ALiBi at 8192 tokens -----------------------------------------------------------------


def long_context() -> bool:
    """Forward and backward at 8192 tokens: errors, memory, time, picture, explanation."""
    _heading(f"1. ALiBi with a sliding window, {LENGTH} tokens, {HEADS} heads, float32, forward and backward")
    attn = fa4flex.compile(score_mod=alibi, mask=sliding_window)
    print("attn = fa4flex.compile(score_mod=alibi, mask=sliding_window)\n")
    print(attn.mask.draw(LENGTH), "\n")
    print(attn.explain(LENGTH), "\n")
    passed = _errors(attn)
    print("\npeak memory beyond the inputs, and time (each in a process of its own):")
    for name, note in (("fa4flex", "blockwise"), ("dense", f"softmax over {LENGTH} x {LENGTH} matrices")):
        print(f"  {name:<8} {_measured(name):<28} {note}", flush=True)
    return passed


def _inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output, [1, H, S, D]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, LENGTH, HEAD_DIM, generator=generator, dtype=dtype) for _ in range(4)]


def _forward_backward(attention: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    *qkv, d_out = _inputs()
    leaves = [x.requires_grad_() for x in qkv]
    out, lse = attention(*leaves)
    gradients = torch.autograd.grad(out, leaves, d_out)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients)))


def _errors(attn: fa4flex.Attention) -> bool:
    """Largest errors against float64 on CHECKED_HEADS, all rows; True where all are within tolerance."""
    result = _forward_backward(lambda q, k, v: attn(q, k, v, return_lse=True))
    heads = ", ".join(map(str, CHECKED_HEADS))
    print(f"largest error against the dense formula in float64, heads {heads}, every query and key:")
    worst: dict[str, tuple[float, float]] = {}
    progress = Progress("the dense formula in float64", len(CHECKED_HEADS) * LENGTH, "rows")
    for i, head in enumerate(CHECKED_HEADS):
        for name, exact in _exact(head, progress, i * LENGTH).items():
            error = (result[name][0, head].double() - exact).abs().max().item()
            scale = exact.abs().max().item()
            worst[name] = max(worst.get(name, (0.0, 1.0)), (error, scale))
    progress.close()
    # float32 sums over thousands of keys: relative to the largest element, a few hundred roundings.
    tolerance = 256 * torch.finfo(torch.float32).eps
    for name, (error, scale) in worst.items():
        verdict = "ok" if error <= tolerance * scale else "FAILED"
        sizes = f"largest element {scale:.2g}, tolerance {tolerance * scale:.1e}"
        print(f"  {name:<4} {error:.1e}   ({sizes})  {verdict}")
    return all(error <= tolerance * scale for error, scale in worst.values())


def _exact(head: int, progress: Progress, before: int) -> dict[str, Tensor]:
    """out, lse and gradients of one head in float64: autograd through the dense formula, rows at a time.
    `before`: rows of other heads that are done."""
    q, k, v, d_out = (x[0, head].double() for x in _inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs, lses = [], []
    for first in range(0, LENGTH, ROWS_AT_ONCE):
        rows = torch.arange(first, min(first + ROWS_AT_ONCE, LENGTH)).view(-1, 1)
        scores = _scores(q[rows.flatten()] @ k.T / math.sqrt(HEAD_DIM), head, rows)
        out = scores.softmax(-1) @ v
        out.backward(d_out[rows.flatten()])
        outs.append(out.detach())
        lses.append(scores.detach().logsumexp(-1))
        progress.reached(before + first + len(rows))
    gradients = [x.grad for x in leaves if x.grad is not None]
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (torch.cat(outs), torch.cat(lses), *gradients)))


def _scores(products: Tensor, head: int | Tensor, rows: Tensor) -> Tensor:
    """The mods called on index tensors, untraced: masked scores are -inf."""
    context = {"q_len": LENGTH, "kv_len": LENGTH, "num_heads": HEADS}
    indices = (0, head, rows, torch.arange(LENGTH))
    biased = call_mod(alibi(), (products, *indices), context)
    return biased.masked_fill(~call_mod(sliding_window(), indices, context), -torch.inf)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention as one writes it without a fused kernel."""
    heads = torch.arange(HEADS).view(-1, 1, 1)
    scores = _scores(q @ k.mT / math.sqrt(HEAD_DIM), heads, torch.arange(LENGTH).view(-1, 1))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _measured(name: str) -> str:
    """Peak memory and time of forward and backward, measured in a fresh process."""
    free = _memory("/proc/meminfo", "MemAvailable")
    if name == "dense" and free is not None and free < DENSE_NEEDS_GB:
        return f"not run: needs {DENSE_NEEDS_GB} GB, {free:.0f} free"
    code = f"from fa4flex.demo import measure; measure({name!r})"
    progress = Progress(f"{name}, in a process of its own", MOST_SECONDS, "s at most")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        for second in range(MOST_SECONDS + 1):
            progress.reached(second)
            try:
                written, _ = child.communicate(timeout=1)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            child.kill()
            written = ""
    progress.close()
    if not written and child.returncode < 0:
        return f"stopped after {MOST_SECONDS} s"
    if child.returncode:
        return f"did not finish (status {child.returncode})"
    result = json.loads(written)
    return f"{result['gigabytes'] * 1024:>7,.0f} MB   {result['seconds']:>5.1f} s"


def measure(name: str) -> None:
    """Print the peak memory and time of one forward and backward, as JSON; run in a process of its own."""
    attn = fa4flex.compile(score_mod=alibi, mask=sliding_window)
    small = torch.randn(1, HEADS, 64, HEAD_DIM)
    attn(small, small, small)  # first calls import what they need; that is not attention's memory
    before, started = _peak_gigabytes(), time.perf_counter()
    _forward_backward(_dense if name == "dense" else lambda q, k, v: attn(q, k, v, return_lse=True))
    seconds = time.perf_counter() - started
    inputs = 4 * HEADS * LENGTH * HEAD_DIM * 4 / 2**30
    print(json.dumps({"gigabytes": max(_peak_gigabytes() - before - inputs, 0.0), "seconds": seconds}))


def _peak_gigabytes() -> float:
    # VmHWM starts anew with each program; getrusage would inherit the parent's peak.
    peak = _memory("/proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _memory(file: str, key: str) -> float | None:
    """A size in gigabytes from one of Linux's status files; None elsewhere."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    results = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return int(results[0]) / 2**20 if results else None


# --- 2. Hugging Face models --------------------------------------------------------------------------------

VOCABULARY, PROMPT, STEPS = 256, 48, 8
LOGITS_TOLERANCE = 1e-4
"""float32 through two layers, logits up to about 10."""


def _models() -> Iterator[tuple[str, Any, str]]:
    """Small models of real architectures with random weights (no download), and what to compare with."""
    from transformers import Gemma2Config, LlamaConfig, MistralConfig

    common = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "initializer_range": 0.2,  # large enough that attention is far from uniform
    }  # fmt: skip
    yield "Llama (causal, grouped heads)", LlamaConfig(**common), "sdpa"
    yield "Mistral (sliding window 16)", MistralConfig(**common, sliding_window=16), "sdpa"
    gemma = Gemma2Config(
        **common, head_dim=32, query_pre_attn_scalar=32, sliding_window=16, attn_logit_softcapping=50.0
    )
    yield "Gemma-2 (soft cap 50, window 16 in every other layer)", gemma, "eager"  # sdpa has no soft cap


def hugging_face() -> bool:
    """The same weights under attn_implementation="fa4flex" and the library's own: logits and tokens."""
    _heading('2. Hugging Face models, attn_implementation="fa4flex" against sdpa and eager, random weights')
    try:
        import transformers
    except ImportError:
        print("skipped: transformers is not installed (pip install 'fa4flex[transformers]')")
        return True
    from fa4flex.integrations.transformers import register

    transformers.utils.logging.set_verbosity_error()
    register()
    passed = [_model(*described) for described in _models()]
    return all(passed)


def _model(name: str, config: Any, baseline: str) -> bool:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # Each model gets a config of its own: attn_implementation is stored in it.
    theirs, ours = (
        AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=implementation).eval()
        for implementation in (baseline, "fa4flex")
    )
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(1, VOCABULARY, (2, PROMPT))
    padded = torch.ones_like(tokens)
    padded[1, : PROMPT // 3] = 0  # the second sequence is shorter: left padding, as generation has it
    print(f"\n{name}, against {baseline}", flush=True)
    differences = {
        "prefill": _prefill(theirs, ours, tokens, torch.ones_like(tokens)),
        "prefill, left padding": _prefill(theirs, ours, tokens, padded),
        f"{STEPS} cached decoding steps, left padding": _decode(theirs, ours, tokens, padded),
    }
    for what, difference in differences.items():
        verdict = "ok" if difference <= LOGITS_TOLERANCE else "FAILED"
        print(f"  {what:<42} largest logit difference {difference:.1e}  {verdict}")
    options = {"attention_mask": padded, "max_new_tokens": 16, "do_sample": False}
    same = bool(torch.equal(theirs.generate(tokens, **options), ours.generate(tokens, **options)))
    verdict = "equal  ok" if same else "different  FAILED"
    print(f"  {'16 tokens generated greedily, left padding':<42} {verdict}", flush=True)
    return same and max(differences.values()) <= LOGITS_TOLERANCE


@torch.no_grad()
def _prefill(theirs: Any, ours: Any, tokens: Tensor, attended: Tensor) -> float:
    """Largest logit difference where a token is attended: what padding tokens see is never read."""
    difference = [model(tokens, attention_mask=attended).logits for model in (theirs, ours)]
    return float((difference[0] - difference[1])[attended.bool()].abs().max())


@torch.no_grad()
def _decode(theirs: Any, ours: Any, tokens: Tensor, attended: Tensor) -> float:
    """Largest logit difference over cached steps, both models fed the same tokens."""
    # Versions of transformers before 5.24 call it past_key_values, later ones warn of that name.
    name = "cache" if "cache" in inspect.signature(ours.forward).parameters else "past_key_values"
    worst, caches = 0.0, [None, None]
    step = tokens
    for _ in range(STEPS):
        outputs = [
            model(step, attention_mask=attended, use_cache=True, **{name: cache})
            for model, cache in zip((theirs, ours), caches)
        ]
        caches = [getattr(output, name) for output in outputs]
        last = [output.logits[:, -1] for output in outputs]
        worst = max(worst, float((last[0] - last[1]).abs().max()))
        step = last[0].argmax(-1, keepdim=True)
        attended = torch.cat([attended, torch.ones_like(step)], dim=1)
    return worst
