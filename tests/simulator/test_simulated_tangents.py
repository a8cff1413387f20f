"""Attention and its tangents by one kernel on a simulated Hopper GPU: at most twice as far from the oracle's
Jacobian-vector product in float64 as the same maths in PyTorch at that dtype, and nothing found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import of_passes
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import reference
from fa4flex.variants import alibi, causal, natten, sliding_window, softcap

NAMES = "out", "lse", "tangent", "tangent of lse"
TIMINGS = (("late", 1), ("eager", 0), ("random", 2), ("random", 3))
SLOPES = torch.rand(8) + 0.5
TABLE = torch.randn(8, 400) / 2


def learned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A derivative that depends on head, row and column."""
    return torch.tanh(score * SLOPES[h]) * TABLE[h, q_idx] + TABLE[h, q_idx - kv_idx + 200]


def hidden(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask in a score mod."""
    return torch.where(kv_idx <= q_idx, score * 1.5, -float("inf"))


def shown(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 1.5


COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(2.0), "mask": causal & sliding_window(60)},
    "alibi, softcap": {"score_mod": alibi >> softcap(3.0)},
    "learned": {"score_mod": learned},
    "hidden": {"score_mod": hidden},
    "window": {"mask": lambda b, h, i, j: (i > 1) & (i - j < 30) & (i >= j)},  # the first rows see nothing
    "tables": {"mask": natten((13, 10), (3, 5))},
}
STAND_IN = {"hidden": {"score_mod": shown, "mask": causal}}
"""Compositions of the oracle, where torch's own derivative of a mod is NaN."""
MANY = {"plain": 170, "causal": 150, "tables": 130}
"""Numbers of queries and keys where these are not 150."""

Heads = tuple[int, int]


def drawn(name: str, width: int | tuple[int, int], heads: Heads, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v."""
    d, dv = width if isinstance(width, tuple) else (width, width)
    keys = MANY.get(name, 150)
    queries = 130 if name == "tables" else 150
    shapes = (heads[0], queries, d), (heads[1], keys, d), (heads[1], keys, dv)
    return [torch.randn(1, *shape).to(dtype) for shape in shapes]


def in_pytorch(composition: dict[str, Any]) -> Any:
    """The formula in the dtype of its arguments, each product rounded."""
    score_mod, mask = (composition.get(name) for name in ("score_mod", "mask"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT).float() / q.shape[-1] ** 0.5
        allowed = reference.allowed_pairs(mask, tuple(scores.shape))  # type: ignore[arg-type]
        scores = reference.modified_scores(scores.double(), allowed, score_mod).float()
        lse = scores.logsumexp(-1)
        weights = torch.where(allowed, (scores - lse.unsqueeze(-1)).exp(), 0).to(q.dtype)
        return weights @ v, lse

    return attend


def pushed(
    attend: Any, qkv: Sequence[Tensor], tangents: Sequence[Tensor], which: Sequence[int]
) -> list[Tensor]:
    """out, lse and their tangents along those of the arguments number `which`."""

    def of_some(*some: Tensor) -> Any:
        every = list(qkv)
        for n, x in zip(which, some, strict=True):
            every[n] = x
        return attend(*every)

    given = (tuple([x[n] for n in which]) for x in (qkv, tangents))
    (out, lse), (tout, tlse) = torch.func.jvp(of_some, *given)
    return [out, lse, tout, tlse]


def near(found: Tensor, plain: Tensor, true: Tensor, what: str) -> None:
    """Worst element and worst row: at most twice those of the same maths in PyTorch. Rows without keys are
    compared by themselves."""
    assert not found.isnan().any(), what
    true = true.nan_to_num(0, posinf=torch.inf, neginf=-torch.inf)
    plain = torch.where(plain.isnan(), true, plain.double())
    assert torch.equal(found.isinf(), true.isinf()), what
    mine, theirs = (torch.where(true.isinf(), 0, x.double() - true).abs() for x in (found, plain))
    floor = 2e-6 * true[~true.isinf()].abs().max().double()
    assert mine.max() <= 2 * theirs.max() + floor, f"{what}: {mine.max()} where PyTorch has {theirs.max()}"
    rows = [x.square().sum(-1).sqrt().max() for x in (mine, theirs)]
    assert rows[0] <= 2 * rows[1] + floor, f"{what}: a row is off by {rows[0]}, PyTorch's by {rows[1]}"


def check(
    name: str,
    width: int | tuple[int, int],
    heads: Heads = (2, 1),
    which: Sequence[int] = (0, 1, 2),
    dtype: torch.dtype = torch.bfloat16,
    timing: tuple[str, int] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    composition = COMPOSED[name]
    qkv = drawn(name, width, heads, dtype)
    tangents = [torch.randn_like(x) for x in qkv]
    attn = fa4flex.compile(**composition, **(options or {}))
    how, seed = timing or random.choice((*TIMINGS, ("random", random.randrange(99))))
    with torch.no_grad(), ptxsim.device("sm_90a", seed, how, sms=2) as gpu:
        found = pushed(lambda *x: attn(*x, return_lse=True), qkv, tangents, which)
    (launch,) = of_passes(gpu)
    assert "jvp_sm90" in launch.kernel and not gpu.findings, f"{how} {seed}: {gpu.report()}"
    judged = STAND_IN.get(name, composition)
    wide = [[x.double() for x in y] for y in (qkv, tangents)]
    true = pushed(lambda *x: reference.attention(*x, **judged), *wide, which)  # type: ignore[arg-type]
    plain = pushed(in_pytorch(judged), qkv, tangents, which)
    for what, mine, theirs, exact in zip(NAMES, found, plain, true, strict=True):
        near(mine, theirs, exact, f"{what} of {name}, {width}, {how} {seed}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width", "heads"), [
    ("plain", 64, (2, 2)),
    ("plain", 128, (4, 1)),
    ("causal", 128, (2, 1)),
    ("causal", (96, 64), (2, 1)),
    ("alibi, causal", 128, (2, 1)),
    ("softcap, window", 64, (2, 1)),
    ("alibi, softcap", 128, (2, 1)),
    ("learned", 64, (7, 1)),
    ("hidden", 96, (2, 1)),
    ("window", 64, (2, 1)),
    ("tables", 128, (2, 1)),
])  # fmt: skip
def test_variant(name: str, width: Any, heads: Heads) -> None:
    check(name, width, heads)


@pytest.mark.parametrize(("maker", "width"), [("device", 64), ("host", 96)])
def test_tables_by_queries(maker: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a table is a tile of queries, whoever makes it. Widths differ, or launches would be found."""
    if maker == "host":
        monkeypatch.setattr("fa4flex.runtime.cuda.tables.block_tables.MOST_BYTES", 0)
    check("tables", width, (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_tangents_of_some(which: tuple[int, ...]) -> None:
    """Products of tangents that there are none of are left out."""
    check("causal", 64, which=which)


@pytest.mark.slow
def test_half_precision() -> None:
    check("alibi, causal", 128, dtype=torch.float16)


@pytest.mark.slow
def test_float32_output() -> None:
    check("causal", 64, options={"precision": fa4flex.Precision(output=torch.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("timing", TIMINGS)
def test_every_timing(timing: tuple[str, int]) -> None:
    check("causal", random.choice((64, 128)), timing=timing)


# --- sequences ----------------------------------------------------------------------------------------------

LENGTHS = [(70, 70), (0, 20), (130, 200), (1, 0), (9, 5)]
USED = [(33, 70), (0, 20), (130, 129), (1, 0), (4, 2)]
SINKS = torch.randn(2)


def vector(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def sequences(x: Tensor, side: int) -> list[Tensor]:
    """Views [1, H, n, D] of what takes part of a packed or padded tensor, by sequence."""
    if x.ndim == 4:
        return [x[n : n + 1, :, : pair[side]] for n, pair in enumerate(USED)]
    starts = [sum(pair[side] for pair in LENGTHS[:n]) for n in range(len(LENGTHS))]
    return [x[s : s + n[side]].transpose(0, 1)[None] for s, n in zip(starts, LENGTHS, strict=True)]


def ragged(padded: bool, width: int) -> tuple[list[list[Tensor]], fa4flex.Varlen]:
    """[q, k, v] and their tangents, NaN where nothing takes part, and the lengths."""
    given: list[list[Tensor]] = [[], []]
    for side, heads in ((0, 2), (1, 1), (1, 1)):
        lengths = [pair[side] for pair in LENGTHS]
        shape = (len(USED), heads, max(lengths), width) if padded else (sum(lengths), heads, width)
        for tensors in given:
            x = torch.full(shape, torch.nan)
            for part in sequences(x, side):
                part.normal_()
            tensors.append(x.bfloat16())
    if padded:
        used = [vector([pair[side] for pair in USED]) for side in (0, 1)]
        return given, fa4flex.Varlen(seqused_q=used[0], seqused_k=used[1])
    cu = [vector([sum(pair[side] for pair in LENGTHS[:n]) for n in range(6)]) for side in (0, 1)]
    return given, fa4flex.Varlen(*cu)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_sequences(padded: bool, sinks: Tensor | None) -> None:
    """Memory past an end is NaN, and never read; rows that no sequence uses are 0."""
    (qkv, tangents), varlen = ragged(padded, random.choice((64, 128)))
    attn = fa4flex.compile(softcap(3.0), causal, sinks=sinks)
    how, seed = random.choice((*TIMINGS, ("random", random.randrange(99))))
    with torch.no_grad(), ptxsim.device("sm_90a", seed, how, sms=2) as gpu:
        out, lse, tout, tlse = pushed(
            lambda *x: attn(*x, varlen=varlen, return_lse=True), qkv, tangents, (0, 1, 2)
        )
    for finding in gpu.findings:  # several warpgroups write the same zeros past an end
        lines = finding.instruction, finding.other
        assert finding.kind == "race" and all(x and x.opcode == "st.shared.b16" for x in lines), str(finding)
    assert len([x for x in of_passes(gpu) if "jvp_sm90" in x.kernel]) == 1
    if padded:
        unused = [x[n, :, q:] for x in (out, tout) for n, (q, _) in enumerate(USED)]
        assert not any(x.count_nonzero() for x in unused)
    rows = [(x if padded else x.T).unsqueeze(-1) for x in (lse, tlse)]
    found = [sequences(x, 0) for x in (out, rows[0], tout, rows[1])]
    for n in (n for n, (q, _) in enumerate(USED if padded else LENGTHS) if q):
        one, moves = ([sequences(x, i > 0)[n].double() for i, x in enumerate(y)] for y in (qkv, tangents))
        compare([x[n] for x in found], one, moves, sinks, f"sequence {n}, {how} {seed}")


def compare(
    found: list[Tensor], one: list[Tensor], moves: list[Tensor], sinks: Tensor | None, where: str
) -> None:
    """Asserts that results of a sequence are as near as bfloat16 has them."""

    def formula(*x: Tensor) -> Any:
        return reference.attention(*x, softcap(3.0), fa4flex.as_mask(causal), sinks=sinks)  # type: ignore[arg-type]

    for what, mine, y in zip(NAMES, found, pushed(formula, one, moves, (0, 1, 2)), strict=True):
        exact = torch.where(y.isnan(), 0, y).view_as(mine)
        assert not mine.isnan().any() and torch.equal(mine.isinf(), exact.isinf()), f"{what} of {where}"
        exact = exact.masked_fill(exact.isinf(), 0)
        error = (mine.double().masked_fill(mine.isinf(), 0) - exact).abs().max()
        assert error <= 2 * 2**-8 * max(exact.abs().max().item(), 1.0), f"{what} of {where}: {error}"
