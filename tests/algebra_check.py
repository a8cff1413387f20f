"""Results of draws (algebra_draws.py) beside the oracle: outputs, statistics and gradients, within twice the
error of the same maths in PyTorch at that dtype, and within what skipping may cost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from algebra_draws import Draw
from sequences.oracle import Wrong, judge, units
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import reference
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import call_mod, settle
from fa4flex.primitives.normalizer import Normalizer

STATISTICS = ("lse", "max_scores", "max_logit", "entropy")
DIFFERENTIABLE = ("out", "lse", "entropy")
FLOAT64_UNIT = 1e-11
"""Error of float64 results that needs no measurement, of elements around 1."""


@dataclass
class Outcome:
    """Result of a draw. kind: "right", "refused", or what is wrong with it."""

    kind: str
    words: str = ""

    @property
    def fine(self) -> bool:
        return self.kind in ("right", "refused")


CHIPS = ("sm_90a", "sm_100a")
"""Names of simulated GPUs, which stand for a device."""


def outcome_of(draw: Draw, device: str = "cpu", dtype: str = "float64") -> Outcome:
    """Run a draw and compare."""
    given = Given.of(draw.made(device="cpu" if device in CHIPS else device, dtype=dtype))
    right = Outcome("right", "+".join(draw.conflicts))
    return judged(
        lambda: Ours.of(given), lambda ours: compare(draw, given, ours, dtype), device, draw.conflicts, right
    )


Results = TypeVar("Results")


def judged(
    call: Callable[[], Results],
    check: Callable[[Results], None],
    device: str,
    conflicts: Sequence[str],
    right: Outcome,
) -> Outcome:
    """Outcome of a call on a device, or on a simulated one by its name.

    check: raises Wrong for results that are not right; conflicts: what the call may be refused for
    """
    try:
        with ptxsim.device(device, sms=2) if device in CHIPS else contextlib.nullcontext() as gpu:
            found = call()
        if gpu is not None and gpu.findings:
            return Outcome("finding", gpu.report())
    except (UnsupportedError, InputError) as error:
        words = " ".join(str(error).split())
        if conflicts and len(words) > 40:
            return Outcome("refused", f"{'+'.join(conflicts)}: {words[:160]}")
        return Outcome("refused without a reason to expect it", f"{type(error).__name__}: {words[:600]}")
    except Exception as error:  # any other is a fault, whatever it is
        return Outcome("raw error", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    try:
        check(found)
    except Wrong as wrong:
        return Outcome("wrong", str(wrong))
    return right


@dataclass
class Given:
    """Tensors and arguments that a draw's code made."""

    qkv: tuple[Tensor, Tensor, Tensor]
    learned: list[Tensor]
    composition: dict[str, Any]
    call: dict[str, Any]
    classes: Tensor | None
    paging: Any
    varlen: Any

    @staticmethod
    def of(names: dict[str, Any]) -> Given:
        call = dict(names["call"])
        return Given(
            (names["q"], names["k"], names["v"]), names["learned"], dict(names["composition"]), call,
            names.get("classes"), call.get("paging"), call.get("varlen"),
        )  # fmt: skip

    def option(self, name: str) -> Any:
        """An argument of the call, or else of the composition."""
        return self.call[name] if name in self.call else self.composition.get(name)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a call in place of q, k and v."""
        return self.qkv

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.qkv, *self.learned]

    @property
    def swapped(self) -> bool:
        return self.composition.get("layout") == "bshd"


def total(results: dict[str, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    """Loss whose gradients are compared; rows of an lse that are -inf carry none."""
    terms = []
    for name, g in upstream.items():
        r = results[name]
        terms.append((torch.where(r.isfinite(), r, 0) * g.to(r.device, r.dtype)).sum())
    return torch.stack([x.double().cpu() for x in terms]).sum()


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = (
        torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    )
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


@dataclass
class Ours:
    """The library's results, once with gradients and once without."""

    results: dict[str, Tensor]
    alone: dict[str, Tensor]
    upstream: dict[str, Tensor]
    gradients: list[Tensor]

    @staticmethod
    def of(given: Given) -> Ours:
        attn = fa4flex.compile(**given.composition)
        results = named(attn(*given.arguments, **given.call), given)
        upstream = {
            name: torch.randn(results[name].shape, dtype=torch.float64).to(results[name].dtype)
            for name in DIFFERENTIABLE
            if name in results
        }
        found = gradients(total(results, upstream), given.leaves)
        with torch.no_grad():
            alone = named(attn(*given.arguments, **given.call), given)
        return Ours(results, alone, upstream, found)


def named(returned: Any, given: Given) -> dict[str, Tensor]:
    """Results by name; heads before rows, but packed outputs."""
    out, aux = returned if "return_aux" in given.call else (returned, None)
    results = {"out": out.transpose(1, 2) if given.swapped else out}
    for name in given.call.get("return_aux", ()):
        results[name] = getattr(aux, name)
    return results


def compare(draw: Draw, given: Given, ours: Ours, dtype: str) -> None:
    """Raise Wrong unless all results are near those of the oracle."""
    exact = Dense(Given.of(draw.made(device="cpu", dtype=dtype, wide="float64")), exactly, draw.skip)
    plain: list[Dense] = []

    def measured(name: str, at: int | None = None) -> Tensor:
        if not plain:
            plain.append(Dense(Given.of(draw.made(device="cpu", dtype=dtype)), in_pytorch, 0.0))
        return plain[0].results[name] if at is None else plain[0].gradients(ours.upstream)[at]

    kind = getattr(torch, dtype)
    unit = FLOAT64_UNIT if kind == torch.float64 else units(kind)
    for found in (ours.results, ours.alone):
        for name, x in found.items():
            nearer = within(x.detach().cpu(), exact.results[name].detach(), exact.slack.get(name))
            judge(name, nearer, exact.results[name].detach(), lambda name=name: measured(name).detach(), unit)
    slack = exact.slack_of_gradients(ours.upstream)
    for at, g in enumerate(exact.gradients(ours.upstream)):
        what = f"gradient of {('q', 'k', 'v')[at] if at < 3 else f'captured tensor {at - 3}'}"
        judge(what, within(ours.gradients[at].cpu(), g, slack), g, lambda at=at: measured("", at), unit)


def within(found: Tensor, exact: Tensor, slack: Tensor | float | None) -> Tensor:
    """`found`, moved towards `exact` by as much as it may differ."""
    if slack is None or found.shape != exact.shape:
        return found
    difference = found.double() - exact.double()
    finite = exact.isfinite() & found.isfinite()
    moved = exact.double() + difference.sign() * (difference.abs() - slack).clamp(min=0)
    return torch.where(finite, moved, found.double())


# --- the formula, sequence by sequence ----------------------------------------------------------------------


@dataclass
class One:
    """A dense call, or one sequence of a batch. n: its number, None for a batch of dense ones."""

    qkv: tuple[Tensor, Tensor, Tensor]
    n: int | None
    given: Given
    skip: float
    slack: dict[str, Tensor] = field(default_factory=dict)

    def mod(self, name: str, position: int) -> Any:
        mod = self.given.composition.get(name)
        return mod if mod is None or self.n is None else reference.of_sequence(mod, self.n, position)

    @property
    def mask(self) -> Any:
        mask, classes = self.given.composition.get("mask"), self.given.classes
        if mask is not None:
            mask = fa4flex.as_mask(mask)
            mask = mask if self.n is None else reference.of_sequence(mask, self.n, 0)
        blocks = self.given.option("blocks")
        return mask if blocks is None else mapped(mask, classes, blocks.block_size)

    @property
    def normalizer(self) -> Normalizer | None:
        normalizer = settle(self.given.composition.get("normalizer"))
        return normalizer if self.n is None else reference.normalizer_of_sequence(normalizer, self.n)

    @property
    def options(self) -> dict[str, Any]:
        given = self.given
        return {
            **{name: given.option(name) for name in ("scale", "sinks", "dropout")},
            "first": self.n or 0,
            "normalizer": self.normalizer,
        }


def mapped(mask: Any, classes: Tensor | None, size: Any) -> Any:
    """The mask of a block map: full blocks, and what the mask allows in partial ones."""
    assert classes is not None
    rows, keys = (size, size) if isinstance(size, int) else size

    def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any, num_heads: Any) -> Any:
        here = (b, h) if classes.ndim == 4 else ()
        block = classes[(*here, q_idx // rows, kv_idx // keys)]
        context = {"q_len": q_len, "kv_len": kv_len, "num_heads": num_heads}
        inner = True if mask is None else call_mod(settle(mask), (b, h, q_idx, kv_idx), context)
        return (block == 2) | ((block == 1) & inner)

    return allowed


Made = dict[str, Tensor]


class Dense:
    """Results of a draw by a dense formula, in the layout of the library's."""

    def __init__(self, given: Given, by: Callable[[One], Made], skip: float) -> None:
        self.given, self.skip = given, skip
        self.parts = [One(qkv, n, given, skip) for n, qkv in sequences(given)]
        made = [by(one) for one in self.parts]
        self.results = self.joined(made)
        self.slack = self.joined([one.slack for one in self.parts]) if skip else {}
        self._gradients: list[Tensor] | None = None

    def joined(self, made: list[Made]) -> Made:
        """Results of sequences as those of a batch."""
        given, found = self.given, {}
        for name in made[0]:
            parts = [one[name] for one in made]
            if name == "max_logit":
                found[name] = torch.stack(parts).amax(0)
            elif self.parts[0].n is None:
                found[name] = parts[0]
            elif given.varlen is not None and given.varlen.packed:
                of_rows = [x[0].transpose(0, 1) if name == "out" else x[0] for x in parts]
                found[name] = torch.cat(of_rows, 0 if name == "out" else 1)
            else:
                rows = given.qkv[0].shape[2]
                found[name] = torch.cat([padded(name, x, rows) for x in parts])
        return found

    def gradients(self, upstream: Made) -> list[Tensor]:
        if self._gradients is None:
            self._gradients = gradients(total(self.results, upstream), self.given.leaves)
        return self._gradients

    def slack_of_gradients(self, upstream: Made) -> float | None:
        """A coarse bound of what skipping may cost elements of gradients. docs/primitives.md has gradients
        of a row's scores off by about twice the skipped share of the range of dO . v, of the lse's gradient,
        and of that of the entropy times its logarithms; functions around the softmax are at most this steep.
        """
        if not self.skip:
            return None
        q, k, v = (float(x.detach().abs().max()) if x.numel() else 0.0 for x in self.given.qkv)
        dropout = self.given.option("dropout")
        grown = 1.0 if dropout is None else 1 / max(1 - dropout.rate, 1e-9) if dropout.rate < 1 else 0.0
        reads = max([1.0, *(float(x.detach().abs().max()) for x in self.given.learned)])
        scores = 10 + 3 * q * k * math.sqrt(self.given.qkv[0].shape[-1]) * reads + 50 * reads**2
        of_rows = sum(
            float(g.double().abs().sum()) * (60 if n == "entropy" else 1) for n, g in upstream.items()
        )
        of_out = float(upstream["out"].double().abs().sum())
        return 8 * self.skip * (of_rows + of_out * v * (1 + grown)) * scores * reads**2 * max(q, k, 1.0)


def padded(name: str, x: Tensor, rows: int) -> Tensor:
    """Results of a sequence [1, H, used, ...], of rows of no sequence too."""
    value = -math.inf if name in ("lse", "max_scores") else 0.0
    short = rows - x.shape[2]
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim == 4) + (0, short), value=value)


def sequences(given: Given) -> list[tuple[int | None, tuple[Tensor, Tensor, Tensor]]]:
    """q, k, v of each sequence [1, heads, rows, ...], or of a dense batch with None."""
    q, k, v = given.qkv
    if given.paging is not None:
        found: list[Any] = []
        for n, length in enumerate(given.paging.seqused_k.tolist()):
            table = given.paging.page_table[n].long()
            keys = (x[table].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v))
            found.append((n, (q[n : n + 1], *keys)))
        return found
    varlen = given.varlen
    if varlen is None:
        qkv = tuple(x.transpose(1, 2) for x in given.qkv) if given.swapped else given.qkv
        return [(None, qkv)]  # type: ignore[list-item]
    if not varlen.packed:
        return [
            (
                n,
                (
                    q[n : n + 1, :, : q.shape[2] if varlen.seqused_q is None else int(varlen.seqused_q[n])],
                    *(x[n : n + 1, :, : int(varlen.seqused_k[n])] for x in (k, v)),
                ),
            )
            for n in range(q.shape[0])
        ]  # type: ignore[misc]
    of_q, of_k = varlen.cu_seqlens_q.tolist(), varlen.cu_k.tolist()
    found = []
    for n in range(len(of_q) - 1):
        rows, keys = slice(of_q[n], of_q[n + 1]), slice(of_k[n], of_k[n + 1])
        found.append((n, tuple(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))))
    return found


def exactly(one: One) -> Made:
    """The oracle's results, and bounds of what skipping costs."""
    q, k, v = one.qkv
    statistics: Made = {}
    score, mask, output = one.mod("score_mod", 1), one.mask, one.mod("output_mod", 1)
    core, lse = reference.attention(q, k, v, score, mask, **one.options, statistics=statistics)
    if one.skip:
        _bound(one, core.detach(), mask, output)
    return {"out": reference.modified_output(core, output), "lse": lse, **statistics}


def _bound(one: One, core: Tensor, mask: Any, output: Any) -> None:
    q, k, v = one.qkv
    options, skip = one.options, one.skip
    plus = options["normalizer"] is not None and options["normalizer"].plus
    allowed = reference.allowed_pairs(mask, (*q.shape[:3], k.shape[2]))
    with_sinks = options["sinks"] is not None or bool(plus)
    bound = torch.zeros_like(core)
    if k.shape[2]:
        more = {"dropout": options["dropout"], "first": options["first"]}
        bound = reference.skip_bound(skip, v.detach(), allowed, with_sinks, **more)
    at, low, high = (
        reference.modified_output(x, output).detach() for x in (core, core - bound, core + bound)
    )
    nothing = torch.zeros(q.shape[:3], dtype=torch.float64)
    mixed = -skip * math.log(skip) - (1 - skip) * math.log1p(-skip)
    one.slack |= {
        "out": torch.maximum((at - low).abs(), (at - high).abs()), "lse": nothing - math.log1p(-skip),
        "entropy": nothing + skip * math.log(k.shape[2] + 1) + mixed, "max_scores": nothing,
        "max_logit": torch.zeros(q.shape[1], dtype=torch.float64),
    }  # fmt: skip


SIGNS = torch.Generator()


def in_pytorch(one: One) -> Made:
    """The same maths in PyTorch: products and sums in float32 at least, weights and outputs rounded."""
    q, k, v = one.qkv
    heads, rows, width = q.shape[1:]
    keys, wide = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    options = one.options
    scale = width**-0.5 if options["scale"] is None else options["scale"]
    s = (q.to(wide) @ k.to(wide).mT) * scale
    places = tuple(
        torch.arange(n).view(tuple(-1 if i == at else 1 for i in range(4))) for at, n in enumerate(s.shape)
    )
    context = {"q_len": rows, "kv_len": keys, "num_heads": heads}

    def modified(mod: Any, x: Tensor) -> Tensor:
        return x if mod is None else call_mod(settle(mod), (x, *places), context).to(wide).expand(x.shape)

    allowed = reference.allowed_pairs(one.mask, tuple(s.shape))  # type: ignore[arg-type]
    s = modified(one.mod("score_mod", 1), s)
    normalizer = Normalizer() if one.normalizer is None else one.normalizer
    weights, sums, beside = _weights(s, allowed, normalizer, options["sinks"], modified)
    if options["dropout"] is not None:
        weights = weights * reference._factors(options["dropout"], tuple(s.shape), options["first"]).to(wide)
    out = (weights.to(v.dtype) @ v).to(q.dtype)
    if sums is not None and q.dtype.itemsize < 8:
        # Backward passes have the rounded output: what it is off by comes into each score's gradient, which
        # is nothing else where there is one key.
        half = q.dtype.itemsize == 2
        error = (weights.detach() @ v.to(wide) - out if half else torch.finfo(q.dtype).eps * out).detach()
        signs = torch.randint(2, sums.shape, generator=SIGNS) * 2 - 1
        out = out + ((sums - sums.detach()) * signs * error).to(out.dtype)
    output = one.mod("output_mod", 1)
    if output is not None:
        places = tuple(
            torch.arange(n).view(tuple(-1 if i == at else 1 for i in range(4)))
            for at, n in enumerate(out.shape)
        )
        out = modified(output, out.to(wide)).to(q.dtype)
    return {"out": out, **beside}


def _weights(
    s: Tensor, allowed: Tensor, normalizer: Normalizer, sinks: Tensor | None, modified: Any
) -> tuple[Tensor, Tensor | None, Made]:
    """Weights, the logarithms of their sums [..., 1], and statistics."""
    zeros = s.new_zeros(s.shape[:3])
    if normalizer.kind == "elementwise":
        return torch.where(allowed, modified(normalizer.function, s), 0), None, {"lse": zeros}
    if normalizer.kind == "softpick":
        weights = reference.normalised(torch.where(allowed, s, -math.inf), allowed, normalizer)
        kept = torch.where(allowed, s, 0)
        sums = (torch.expm1(kept).abs().sum(-1, keepdim=True) + normalizer.eps).log()
        return weights, sums, {"lse": zeros}
    sink = s.new_full((s.shape[1],), -math.inf) if sinks is None else sinks.to(s.dtype)
    if normalizer.plus:
        sink = torch.logaddexp(sink, sink.new_full((), math.log(normalizer.plus)))
    column = sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
    logits = torch.cat([torch.where(allowed, s, -math.inf), column], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    lse = torch.where(empty, 0, logits).logsumexp(-1, keepdim=True)
    weights = torch.where(logits == -math.inf, 0, torch.where(empty, 0, logits - lse).exp())
    statistics = reference.statistics_of(logits)
    return weights[..., :-1], lse, {"lse": torch.where(empty, -math.inf, lse).squeeze(-1), **statistics}
