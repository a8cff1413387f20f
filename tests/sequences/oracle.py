"""Attention in float64 by the formula, from the values of this moment, and how results are judged.

Nothing here calls fa4flex. What a mod means is its text, evaluated by PyTorch on whole matrices of scores;
the same in the dtype of a call says how far its results may be from the exact ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAMES = {"torch": torch, "F": torch.nn.functional, "math": math}
"""Names that texts of mods may use beside their arguments and values."""


@dataclass(frozen=True)
class Formula:
    """Text of a mod, and the values that it reads, by name."""

    text: str
    values: Mapping[str, Any]

    def __call__(self, leaf: Any, **given: Any) -> Tensor:
        values = {name: leaf(x) if isinstance(x, Tensor) else x for name, x in self.values.items()}
        return torch.as_tensor(eval(self.text, dict(NAMES), {**values, **given}))


@dataclass(frozen=True)
class Blocks:
    """Classes uint8 [B or 1, H or 1, R, C] (0 empty, 1 partial, 2 full) and the size of a block."""

    classes: Tensor
    size: tuple[int, int]

    def of_pairs(self, q_len: int, kv_len: int) -> Tensor:
        rows = torch.arange(q_len, device=self.classes.device) // self.size[0]
        keys = torch.arange(kv_len, device=self.classes.device) // self.size[1]
        return self.classes[:, :, rows][..., keys]


@dataclass(frozen=True)
class Sequences:
    """Lengths of a ragged call, as tensors; and pages of its keys."""

    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    table: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_q is not None


@dataclass(frozen=True)
class Scales:
    """Scales of an 8-bit cache, [Hkv]."""

    k: Tensor
    v: Tensor


@dataclass
class Problem:
    """One call as data. Tensors are held as they were given; `freeze` copies what they hold."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Formula | None = None
    mask: Formula | None = None
    blocks: Blocks | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    heads_first: bool = True
    sequences: Sequences | None = None
    scales: Scales | None = None
    times: int = 1
    """Number of calls whose output is the query of the next one."""
    frozen: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    """torch's counts of changes when it was frozen."""
    alive: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """Every tensor that the result depends on, each once."""
        found = [self.q, self.k, self.v, self.sinks]
        for formula in (self.score, self.mask):
            found += [] if formula is None else list(formula.values.values())
        found += [] if self.blocks is None else [self.blocks.classes]
        for group in (self.sequences, self.scales):
            found += [] if group is None else list(vars(group).values())
        return list({id(x): x for x in found if isinstance(x, Tensor)}.values())

    def learns(self) -> list[Tensor]:
        """Tensors that receive gradients."""
        return [x for x in self.tensors() if x.requires_grad]

    def freeze(self) -> Problem:
        self.alive = self.tensors()
        self.frozen = {id(x): x.detach().clone() for x in self.alive}
        self.counts = {id(x): x._version for x in self.alive if not x.is_inference()}
        return self

    def changed(self) -> bool:
        """True if some tensor no longer holds what the call was given."""
        return any(not _same(x, self.frozen[id(x)]) for x in self.alive)

    def counted(self) -> bool:
        """True if torch counted a change of some tensor, for which backward passes refuse to run."""
        return any(x._version != self.counts[id(x)] for x in self.alive if not x.is_inference())


def _same(x: Tensor, before: Tensor) -> bool:
    alike = x.dtype == before.dtype and x.shape == before.shape
    return alike and (x.dtype == torch.float8_e4m3fn or torch.equal(x.detach(), before))


@contextlib.contextmanager
def settings(wide: bool = False) -> Iterator[None]:
    """Settings in which the formula is computed, whatever those of the call are; `wide`: in float64."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    torch.use_deterministic_algorithms(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


@dataclass
class Exact:
    """Results of a problem in one dtype, and gradients by id of tensor."""

    out: Tensor
    lse: Tensor
    gradients: dict[int, Tensor]
    cotangents: tuple[Tensor, Tensor]


def solve(
    problem: Problem,
    wide: bool = True,
    cotangents: tuple[Tensor, Tensor] | None = None,
    gradients: bool = True,
    with_lse: bool = True,
) -> Exact:
    """The problem in float64, or with `wide` off in the dtypes of its tensors."""
    with settings(wide):
        leaves: dict[int, Tensor] = {}
        learns = {id(x) for x in problem.learns()}

        def leaf(x: Tensor) -> Tensor:
            if id(x) not in leaves:
                now = problem.frozen[id(x)]
                if now.dtype == torch.float8_e4m3fn:
                    now = now.to(problem.q.dtype)
                floating = now.is_floating_point()
                leaves[id(x)] = now.to(torch.float64 if wide and floating else now.dtype)
                if id(x) in learns:
                    leaves[id(x)] = leaves[id(x)].detach().clone().requires_grad_()
            return leaves[id(x)]

        q, k, v = leaf(problem.q), leaf(problem.k), leaf(problem.v)
        for _ in range(problem.times):
            out, lse = _attention(problem, q, k, v, leaf)
            q = out
        if cotangents is None:
            cotangents = torch.randn_like(out), torch.randn_like(lse)
        seen = lse > -torch.inf
        pairs = [(out, cotangents[0].to(out.dtype))]
        if with_lse:
            pairs.append((torch.where(seen, lse, 0.0), torch.where(seen, cotangents[1], 0.0).to(lse.dtype)))
        given: dict[int, Tensor] = {}
        if gradients and learns:
            wanted = [x for x in problem.learns() if id(x) in leaves]
            pairs = [(x, g) for x, g in pairs if x.requires_grad]
            found = [None] * len(wanted)
            if pairs:
                found = torch.autograd.grad(
                    [x for x, _ in pairs], [leaves[id(x)] for x in wanted], [g for _, g in pairs],
                    allow_unused=True,
                )  # fmt: skip
            for x, g in zip(wanted, found):
                given[id(x)] = torch.zeros_like(leaves[id(x)]) if g is None else g
        return Exact(out.detach(), lse.detach(), given, cotangents)


# --- the formula ------------------------------------------------------------------------------------------


def _attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor, leaf: Any) -> tuple[Tensor, Tensor]:
    lengths = problem.sequences
    swapped = not problem.heads_first and q.ndim == 4
    if problem.scales is not None:
        k, v = _scaled(k, leaf(problem.scales.k), problem), _scaled(v, leaf(problem.scales.v), problem)
    if lengths is None:
        q, k, v = (x.transpose(1, 2) if swapped else x for x in (q, k, v))
        out, lse = _dense(problem, q, k, v, leaf, None)
        return (out.transpose(1, 2) if swapped else out), lse
    if lengths.table is not None:
        return _paged(problem, q, k, v, leaf)
    if lengths.packed:
        return _packed(problem, q, k, v, leaf)
    q, k, v = (x.transpose(1, 2) if swapped else x for x in (q, k, v))
    out, lse = _padded(problem, q, k, v, leaf)
    return (out.transpose(1, 2) if swapped else out), lse


def _scaled(x: Tensor, scale: Tensor, problem: Problem) -> Tensor:
    return (x * (scale[:, None, None] if problem.heads_first else scale[:, None])).to(x.dtype)


def _list(x: Tensor | None, problem: Problem) -> list[int] | None:
    return None if x is None else problem.frozen[id(x)].tolist()


def _padded(problem: Problem, q: Tensor, k: Tensor, v: Tensor, leaf: Any) -> tuple[Tensor, Tensor]:
    assert problem.sequences is not None
    used_q, used_k = (_list(x, problem) for x in (problem.sequences.used_q, problem.sequences.used_k))
    rows = []
    for n in range(q.shape[0]):
        a = q.shape[2] if used_q is None else used_q[n]
        c = k.shape[2] if used_k is None else used_k[n]
        out, lse = _dense(problem, q[n : n + 1, :, :a], k[n : n + 1, :, :c], v[n : n + 1, :, :c], leaf, n)
        pad = q.shape[2] - a
        rows.append((
            torch.nn.functional.pad(out, (0, 0, 0, pad)),
            torch.nn.functional.pad(lse, (0, pad), value=-math.inf),
        ))  # fmt: skip
    return torch.cat([x for x, _ in rows]), torch.cat([x for _, x in rows])


def _packed(problem: Problem, q: Tensor, k: Tensor, v: Tensor, leaf: Any) -> tuple[Tensor, Tensor]:
    assert problem.sequences is not None
    lengths = problem.sequences
    cu_q, used_q, used_k = (_list(x, problem) for x in (lengths.cu_q, lengths.used_q, lengths.used_k))
    cu_k = cu_q if lengths.cu_k is None else _list(lengths.cu_k, problem)
    assert cu_q is not None and cu_k is not None
    spans = []
    for n in range(len(cu_q) - 1):
        c = cu_k[n + 1] - cu_k[n] if used_k is None else used_k[n]
        keys = slice(cu_k[n], cu_k[n] + c)
        spans.append((k[keys], v[keys]))
    return _each(problem, q, cu_q, used_q, spans, leaf)


def _each(
    problem: Problem, q: Tensor, cu_q: list[int], used_q: list[int] | None, keys: list[Any], leaf: Any
) -> tuple[Tensor, Tensor]:
    """Sequences one by one: q [T, H, D], keys and values [t, Hkv, D] of each."""
    outs, lses = [], []
    for n, (k, v) in enumerate(keys):
        length = cu_q[n + 1] - cu_q[n]
        a = length if used_q is None else used_q[n]
        given = [x.transpose(0, 1)[None] for x in (q[cu_q[n] : cu_q[n] + a], k, v)]
        out, lse = _dense(problem, *given, leaf, n)
        outs.append(torch.nn.functional.pad(out[0].transpose(0, 1), (0, 0, 0, 0, 0, length - a)))
        lses.append(torch.nn.functional.pad(lse[0], (0, length - a), value=-math.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def _paged(problem: Problem, q: Tensor, k: Tensor, v: Tensor, leaf: Any) -> tuple[Tensor, Tensor]:
    assert problem.sequences is not None and problem.sequences.table is not None
    table, used = _list(problem.sequences.table, problem), _list(problem.sequences.used_k, problem)
    assert table is not None and used is not None
    size, keys = k.shape[1], []
    for row, count in zip(table, used):
        places = [(row[t // size], t % size) for t in range(count)]
        index = tuple(torch.tensor([p[i] for p in places], dtype=torch.long, device=k.device) for i in (0, 1))
        keys.append((k[index], v[index]))
    if problem.sequences.packed:
        cu_q = _list(problem.sequences.cu_q, problem)
        assert cu_q is not None
        return _each(problem, q, cu_q, _list(problem.sequences.used_q, problem), keys, leaf)
    outs, lses = [], []
    rows = q.transpose(1, 2) if not problem.heads_first else q
    for n, pair in enumerate(keys):
        given = [x.transpose(0, 1)[None] for x in pair]
        out, lse = _dense(problem, rows[n : n + 1], *given, leaf, n)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs)
    return (out if problem.heads_first else out.transpose(1, 2)), torch.cat(lses)


def _dense(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, leaf: Any, sequence: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, Dv] and lse [B, H, Sq]. `sequence` is what mods see as b, None for the batch's own."""
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT) * (1 / math.sqrt(dim) if problem.scale is None else problem.scale)
    device = q.device
    given = {
        "b": torch.arange(batch, device=device).view(-1, 1, 1, 1) + (sequence or 0),
        "h": torch.arange(heads, device=device).view(1, -1, 1, 1),
        "q_idx": torch.arange(q_len, device=device).view(1, 1, -1, 1),
        "kv_idx": torch.arange(kv_len, device=device).view(1, 1, 1, -1),
        "q_len": q_len,
        "kv_len": kv_len,
        "num_heads": heads,
    }
    allowed = torch.ones(s.shape, dtype=torch.bool, device=device)
    if problem.mask is not None:
        allowed = problem.mask(leaf, **given).bool().expand(s.shape)
    if problem.blocks is not None:
        blocks = Blocks(problem.frozen[id(problem.blocks.classes)], problem.blocks.size)
        classes = blocks.of_pairs(q_len, kv_len)
        allowed = (classes == 2) | ((classes == 1) & allowed)
    if problem.score is not None:
        s = problem.score(leaf, score=s, **given).expand(s.shape)
    s = torch.where(allowed, s, -math.inf)
    if problem.sinks is not None:
        column = leaf(problem.sinks).to(s.dtype).view(1, -1, 1, 1).expand(batch, heads, q_len, 1)
        s = torch.cat([s, column], -1)
    else:
        s = torch.cat([s, s.new_full((batch, heads, q_len, 1), -math.inf)], -1)
    largest = s.detach().amax(-1, keepdim=True)
    largest = torch.where(largest == -math.inf, 0, largest)
    weights = torch.exp(s - largest)
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, -math.inf, largest + safe.log()).squeeze(-1)
    out = (weights[..., :-1] / safe).to(v.dtype) @ v
    return (_as_from_the_output(out, weights, safe, v) if v.dtype.itemsize == 2 else out), lse


_SIGNS = torch.Generator()
"""Draws that leave those of a sequence as they are."""


def _as_from_the_output(out: Tensor, weights: Tensor, total: Tensor, v: Tensor) -> Tensor:
    """`out`, whose gradients are those of a backward pass that has the output in 16 bits: its
    ds = p (dp - do . out) leaves p (do . error of out) in each row, which sums of ds have instead of zeros.
    Signs of rows are drawn, lest their sum be small by luck each time."""
    error = ((weights[..., :-1] / total).float() @ v.float() - out.float()).detach()
    signs = torch.randint(2, total.shape, generator=_SIGNS).to(total.device) * 2 - 1
    log = total.log()
    return out + ((log - log.detach()) * signs * error).to(out.dtype)


# --- judging ----------------------------------------------------------------------------------------------

FLOOR = 64
"""Errors below so many units in the last place of the largest element (at least 1) need no measurement."""


MANY = 1000
"""Elements among which the worst errors of two ways are of one size; among fewer, one may be lucky."""


class Wrong(AssertionError):
    """A result that is not the formula's."""


class Failure(Exception):
    """A result or error that should not be. kind: "wrong", "raw error" or "accepted"."""

    def __init__(self, kind: str, where: str, words: str) -> None:
        super().__init__(f"{kind}: {where}: {words}")
        self.kind, self.where, self.words = kind, where, words


def words_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def judge(what: str, found: Tensor | None, exact: Tensor, plain: Any, unit: float) -> None:
    """Raise Wrong unless `found` is as near as twice the error of `plain()`, and some units; of few elements,
    eight times the worst of four."""
    if found is None:
        found = torch.zeros_like(exact)
    if found.shape != exact.shape:
        raise Wrong(f"{what}: shape {list(found.shape)}, expected {list(exact.shape)}")
    found = found.detach().double()
    unseen = exact == -math.inf
    if not torch.equal(found == -math.inf, unseen):
        raise Wrong(f"{what}: -inf in other places than expected")
    found, exact = found.masked_fill(unseen, 0), exact.double().masked_fill(unseen, 0)
    if exact.numel() == 0:
        return
    error, size = float((found - exact).abs().max()), max(1.0, float(exact.abs().max()))
    floor = unit * size
    if error <= floor:
        return
    many = exact.numel() >= MANY
    others = [plain().double().masked_fill(unseen, 0) for _ in range(1 if many else 4)]
    measured = max(float((other - exact).abs().max()) for other in others)
    limit = (2 if many else 8) * measured + floor
    if not error <= limit:
        raise Wrong(f"{what}: off by {error:.2e}, limit {limit:.2e}")


def units(*dtypes: torch.dtype) -> float:
    """Error that is not worth a measurement, of elements around 1, in the coarsest of these dtypes."""
    known = [torch.finfo(x) for x in dtypes if x.is_floating_point and torch.finfo(x).bits >= 16]
    return max(x.eps * (FLOOR if x.bits >= 32 else 2) for x in known)
