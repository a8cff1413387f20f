"""The GPU forward against the fp64 oracle: every variant and attention-gym mod, shapes, strides, lengths.

    pytest tests/numeric/test_cuda_forward.py -n 8        compiling the kernels takes most of the time

Every case has an id of its own: `-k "variant and alibi"`, `-k "lengths"`, `-k "gym and natten"`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cuda_gym
import pytest
import torch
from cuda_cases import (
    BF16,
    DEVICE,
    F16,
    FEW,
    ON_A_GPU,
    VARIANTS,
    Draw,
    Sizes,
    check,
    compiled,
    cumulative,
    judge,
    judge_exact_lse,
    mask,
    one_projection,
    oracle_takes,
    plain,
    plain_packed,
    random_map,
    run,
    score,
    shared_keys,
    table,
    transposed,
)
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import fa4flex
from fa4flex import Varlen, reference
from fa4flex import variants as v
from fa4flex.errors import Fa4flexError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.skipif(DEVICE is None, reason="needs a CUDA device of compute capability 9.0"),
]
REPEATS = 200 if ON_A_GPU else 3


# --- variants and attention-gym -----------------------------------------------------------------------------

DRAWS = [
    pytest.param(draw, id=f"{name} {number}")
    for name, draws in VARIANTS.items()
    for number, draw in enumerate(draws)
]


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("draw", DRAWS)
def test_variant(draw: Draw, dim: int) -> None:
    if draw.sizes(Sizes().wide(dim)).dim != dim != 64:
        pytest.skip("this variant has head dimensions of its own")
    draw.check(Sizes().wide(dim))


@cuda_gym.installed
@pytest.mark.parametrize("key", cuda_gym.KEYS, ids=str)
def test_gym(key: cuda_gym.Key) -> None:
    composition, _ = cuda_gym.composed(key)
    check(cuda_gym.sizes_of(key), composition, approximate=cuda_gym.instances()[key].approximate)


# --- head dimensions, dtypes, heads -------------------------------------------------------------------------

SQUARE_DIMS = [(dim, dim) for dim in (8, 40, 64, 72, 96, 128, 192, 256)]
DIMS = [*SQUARE_DIMS, (192, 128), (112, 80)]
BY_NAME = [pytest.param(draw, id=name) for name, draw in FEW.items()]


@pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"d{d[0]}v{d[1]}")
@pytest.mark.parametrize("draw", BY_NAME)
def test_head_dims(draw: Draw, dims: tuple[int, int]) -> None:
    draw.check(Sizes().wide(*dims))


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("draw", BY_NAME)
def test_fp16(draw: Draw, dim: int) -> None:
    draw.check(replace(Sizes().wide(dim), dtype=F16))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (5, 1), (16, 2), (12, 4)], ids=str)
@pytest.mark.parametrize("name", ["causal", "alibi causal", "relative table", "sinks window"])
def test_grouped_heads(name: str, heads: tuple[int, int]) -> None:
    FEW[name].check(Sizes(heads=heads[0], kv_heads=heads[1], q_len=300, kv_len=333))


# --- lengths and strides ------------------------------------------------------------------------------------

LENGTHS = (1, 7, 63, 64, 127, 128, 129, 192, 255, 257, 513)


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("kv_len", LENGTHS, ids=lambda n: f"k{n}")
@pytest.mark.parametrize("name", ["dense", "causal", "softcap window"])
def test_lengths(name: str, kv_len: int, dim: int) -> None:
    for q_len in LENGTHS:
        FEW[name].check(Sizes(1, 2, 1, q_len, kv_len).wide(dim))


@pytest.mark.parametrize("name", ["causal", "alibi causal"])
def test_longer_sequences(name: str) -> None:
    """More tiles than the chip has multiprocessors."""
    FEW[name].check(Sizes(2, 8, 2, 2100, 2177, 128, 128))


def slices(sizes: Sizes) -> list[Tensor]:
    """Every second head, some rows and half of the columns of larger tensors."""
    return [
        torch.randn(sizes.batch, 2 * x.shape[1], x.shape[2] + 9, 2 * x.shape[3], dtype=x.dtype)[
            :, ::2, 5 : 5 + x.shape[2], : x.shape[3]
        ]
        for x in sizes.qkv()
    ]


@pytest.mark.parametrize("form", [transposed, one_projection, slices, shared_keys])
@pytest.mark.parametrize("name", ["causal", "relative table"])
def test_strides(name: str, form: Any) -> None:
    sizes = Sizes(heads=4, kv_heads=4, q_len=330, kv_len=330)
    q, k, v = form(sizes)
    check(sizes, FEW[name].make(sizes), (q, k, v))


def test_strides_without_unit_columns() -> None:
    """Strides that a bulk copy cannot address are computed or refused in words, never computed wrongly."""
    sizes = Sizes(heads=4, kv_heads=4, q_len=200, kv_len=200)
    q, k, v = (x.mT.contiguous().mT for x in sizes.qkv())
    try:
        check(sizes, {"mask": fa4flex.variants.causal}, (q, k, v))
    except Fa4flexError as refused:
        assert "stride" in str(refused) or "contiguous" in str(refused)


@pytest.mark.parametrize("name", ["causal", "alibi causal"])
def test_layout_bshd(name: str) -> None:
    sizes = Sizes()
    composition, qkv = FEW[name].make(sizes), sizes.qkv()
    packed = [x.transpose(1, 2).contiguous() for x in qkv]
    out, lse = run(compiled(**composition, layout="bshd"), packed[0], packed[1], packed[2])
    exact = reference.attention(*qkv, **composition)
    judge((out.transpose(1, 2), lse), exact, plain(*qkv, composition))


# --- rows that see nothing, sinks, block maps ---------------------------------------------------------------


def sparse_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + 3 < kv_idx) & (q_idx % 7 != 2)


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < -1


def late_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (h > 1) & (q_idx > 300) & (kv_idx > 200)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("hidden", [sparse_rows, nothing, late_heads])
def test_rows_that_see_nothing(hidden: Any, dim: int, sinks: bool) -> None:
    """out 0; lse -inf, or the sink."""
    sizes = Sizes().wide(dim)
    composition = {"mask": hidden, **({"sinks": table(sizes.heads)} if sinks else {})}
    check(sizes, composition)
    q, k, v = sizes.qkv()
    out, _ = run(compiled(**composition), q, k, v)
    unseen = ~reference.allowed_pairs(hidden, (*q.shape[:3], k.shape[2])).any(-1)
    assert unseen.any() and out[unseen].eq(0).all()


def test_scores_of_minus_infinity() -> None:
    """A score mod that masks: rows for which it leaves nothing are rows that see nothing."""

    def masked(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx <= q_idx - 5, score, -float("inf"))

    check(Sizes(), {"score_mod": masked})


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
def test_large_scores(dim: int) -> None:
    """Scores in the thousands: one key takes all the weight, and nothing overflows."""
    sizes = Sizes(1, 2, 2, 300, 400).wide(dim)
    q, k, v = sizes.qkv()
    check(sizes, {"mask": fa4flex.variants.causal}, (q * 64, k * 64, v))


@pytest.mark.parametrize("growth", [1, -1], ids=["rising", "falling"])
def test_scores_that_drift(growth: int) -> None:
    """The running maximum moves in every tile, or never again: both sides of conditional rescaling."""

    def drift(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + growth * 0.02 * kv_idx

    check(Sizes(kv_len=1500), {"score_mod": drift})


@pytest.mark.parametrize("name", ["dense", "causal", "alibi causal", "softcap window"])
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0], ids=lambda x: f"sink{x:+.0f}")
def test_sinks(name: str, shift: float) -> None:
    sizes = Sizes()
    composition = {**FEW[name].make(sizes), "sinks": table(sizes.heads) + shift}
    check(sizes, composition, approximate=FEW[name].approximate)


@pytest.mark.parametrize("mod", [None, sparse_rows], ids=["map", "map and mod"])
def test_block_maps(mod: Any) -> None:
    sizes = Sizes()
    check(sizes, {"mask": random_map(sizes, mod)})


def test_a_block_mask_of_torch() -> None:
    sizes = Sizes()
    made = create_block_mask(sparse_rows, sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len, str(DEVICE))
    check(sizes, {"mask": made})


def test_max_scores() -> None:
    sizes = Sizes(heads=4, kv_heads=4)
    q, k, v = sizes.qkv()

    def halved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 0.5 + h

    with torch.no_grad(), torch.device("cpu"):
        _, aux = fa4flex.flex_attention(q, k, v, halved, return_aux=AuxRequest(max_scores=True, lse=True))
    heads = torch.arange(sizes.heads).view(1, -1, 1)
    want = (q.double() @ k.double().mT).amax(-1) * 0.5 / math.sqrt(sizes.dim) + heads
    torch.testing.assert_close(aux.max_scores.double(), want, atol=1e-4, rtol=1e-5)


# --- sequences ----------------------------------------------------------------------------------------------

Q_LENGTHS, K_LENGTHS = (3, 0, 300, 129, 1, 257, 64), (7, 4, 128, 513, 0, 257, 1)
LONGEST = Sizes(batch=7, q_len=300, kv_len=513)
PACKED: dict[str, Draw] = {
    "dense": FEW["dense"],
    "causal": FEW["causal"],
    "alibi causal": FEW["alibi causal"],
    "softcap window": FEW["softcap window"],
    "document": FEW["document"],
    "sinks window": FEW["sinks window"],
    "relative table": FEW["relative table"],
    "prefix per sequence": mask(lambda s: v.prefix_lm(torch.randint(0, s.kv_len, (s.batch,)))),
    "slope per sequence": score(lambda s: v.alibi(torch.rand(s.batch, s.heads) * 0.1), v.causal),
    "bias per query": score(lambda s: v.learned_bias(table(s.batch, s.heads, s.q_len, 1))),
    "top left": mask(lambda s: lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
}
PACKED_DRAWS = [pytest.param(draw, id=name) for name, draw in PACKED.items()]


def packed_qkv(dim: int, dim_v: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    q_rows, k_rows = sum(Q_LENGTHS), sum(K_LENGTHS)
    shapes = (q_rows, LONGEST.heads, dim), (k_rows, LONGEST.kv_heads, dim), (k_rows, LONGEST.kv_heads, dim_v)
    q, k, v = (torch.randn(*shape, dtype=dtype) for shape in shapes)
    return q, k, v


Used = tuple[Tensor | None, Tensor | None]


def check_packed(draw: Draw, qkv: tuple[Tensor, Tensor, Tensor], used: Used = (None, None)) -> None:
    composition = draw.make(LONGEST)
    cu_q, cu_k = cumulative(Q_LENGTHS), cumulative(K_LENGTHS)
    out, lse = run(compiled(**composition), *qkv, varlen=Varlen(cu_q, cu_k, *used))
    ranges = reference.sequence_ranges(cu_q, used[0]), reference.sequence_ranges(cu_k, used[1])
    known = oracle_takes(composition)
    exact = reference.varlen(qkv, ranges, **known)
    judge((out, lse), exact, plain_packed(qkv, ranges, known))
    if not draw.approximate:
        judge_exact_lse(lse, exact[1])


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("draw", PACKED_DRAWS)
def test_packed(draw: Draw, dim: int) -> None:
    check_packed(draw, packed_qkv(dim, dim))


@pytest.mark.parametrize("name", ["causal", "alibi causal"])
def test_packed_mla(name: str) -> None:
    check_packed(PACKED[name], packed_qkv(192, 128))


@pytest.mark.parametrize("name", ["dense", "causal", "alibi causal", "prefix per sequence"])
def test_packed_with_used_lengths(name: str) -> None:
    """Rows past a used length: out 0, lse -inf. Keys past it, here NaN, are never read."""
    used_q = torch.tensor([2, 0, 130, 129, 0, 5, 64], dtype=torch.int32)
    used_k = torch.tensor([7, 0, 100, 200, 0, 1, 1], dtype=torch.int32)
    q, k, v = packed_qkv(128, 128)
    for x, lengths, used in ((q, Q_LENGTHS, used_q), (k, K_LENGTHS, used_k), (v, K_LENGTHS, used_k)):
        for start, length, n in zip(cumulative(lengths).tolist(), lengths, used.tolist()):
            x[start + n : start + length] = math.nan
    # The oracle slices sequences by their used lengths, so it sees no NaN.
    check_packed(PACKED[name], (q, k, v), (used_q, used_k))


@pytest.mark.parametrize("poisoned", [False, True], ids=["", "NaN in the padding"])
@pytest.mark.parametrize("name", ["dense", "causal", "alibi causal", "document", "prefix per sequence"])
def test_padded(name: str, poisoned: bool) -> None:
    """A padded batch is the packed batch of its used rows; what lies behind them is not read."""
    draw, sizes = PACKED[name], LONGEST
    used_q, used_k = (torch.tensor(n, dtype=torch.int32) for n in (Q_LENGTHS, K_LENGTHS))
    q, k, v = sizes.qkv()
    real_q = torch.arange(sizes.q_len) < used_q.view(-1, 1)
    real_k = torch.arange(sizes.kv_len) < used_k.view(-1, 1)
    flat = [x.transpose(1, 2)[real] for x, real in ((q, real_q), (k, real_k), (v, real_k))]
    if poisoned:
        for x, real in ((q, real_q), (k, real_k), (v, real_k)):
            x.transpose(1, 2)[~real] = math.nan
    composition = draw.make(sizes)
    out, lse = run(compiled(**composition), q, k, v, varlen=Varlen(seqused_q=used_q, seqused_k=used_k))
    ranges = tuple(reference.sequence_ranges(cumulative(n)) for n in (Q_LENGTHS, K_LENGTHS))
    packed = flat[0], flat[1], flat[2]
    exact = reference.varlen(packed, (ranges[0], ranges[1]), **composition)
    same = plain_packed(packed, (ranges[0], ranges[1]), composition)
    rows, statistics = out.transpose(1, 2), lse.transpose(1, 2)
    judge((rows[real_q], statistics[real_q].T), exact, same)
    judge_exact_lse(statistics[real_q].T, exact[1])
    assert rows[~real_q].eq(0).all() and statistics[~real_q].eq(-math.inf).all()


def test_used_keys_alone() -> None:
    """Only the keys are padded, as in decoding with a cache of fixed size."""
    sizes = Sizes(batch=4, q_len=5, kv_len=600)
    q, k, v = sizes.qkv()
    used = torch.tensor([600, 1, 257, 128], dtype=torch.int32)
    out, lse = run(compiled(mask=fa4flex.variants.causal), q, k, v, varlen=Varlen(seqused_k=used))
    for n, length in enumerate(used.tolist()):
        one = q[n : n + 1], k[n : n + 1, :, :length], v[n : n + 1, :, :length]
        composition = {"mask": fa4flex.variants.causal}
        judge(
            (out[n : n + 1], lse[n : n + 1]),
            reference.attention(*one, **composition),
            plain(*one, composition),
        )


# --- repeats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("draw", BY_NAME)
def test_repeats_are_bit_equal(draw: Draw, dim: int) -> None:
    sizes = draw.sizes(Sizes().wide(dim))
    (q, k, v), attn = sizes.qkv(), compiled(**draw.make(sizes))
    first = run(attn, q, k, v)
    for turn in range(REPEATS):
        again = run(attn, q, k, v)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1]), f"repeat {turn} differs"


@pytest.mark.parametrize("name", ["causal", "alibi causal", "document"])
def test_packed_repeats_are_bit_equal(name: str) -> None:
    q, k, v = packed_qkv(128, 128)
    attn, lengths = (
        compiled(**PACKED[name].make(LONGEST)),
        Varlen(*map(cumulative, (Q_LENGTHS, K_LENGTHS))),
    )
    first = run(attn, q, k, v, varlen=lengths)
    for turn in range(REPEATS):
        again = run(attn, q, k, v, varlen=lengths)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1]), f"repeat {turn} differs"


def test_the_default_device_may_be_the_gpu() -> None:
    """The default device is set during compilation and calls, as after torch.set_default_device("cuda")."""
    for name in ("alibi causal", "document", "tables"):
        sizes = FEW[name].sizes(Sizes())
        composition, (q, k, v) = FEW[name].make(sizes), sizes.qkv()
        with torch.no_grad():
            found = fa4flex.compile(**composition)(q, k, v, return_lse=True)
        judge(found, reference.attention(q, k, v, **composition), plain(q, k, v, composition))


def test_captured_tensors_are_read_at_each_call() -> None:
    """New contents without compiling anew: results follow the tensor."""
    sizes = Sizes()
    bias = table(sizes.heads, sizes.kv_len)
    (q, k, v), documents = sizes.qkv(), torch.tensor(sizes.offsets(), dtype=torch.int32)

    def by_key(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, kv_idx]

    def early(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < documents[4]

    attn = compiled(score_mod=by_key, mask=early)
    for _ in range(2):
        found, composition = run(attn, q, k, v), {"score_mod": by_key, "mask": early}
        judge(found, reference.attention(q, k, v, **composition), plain(q, k, v, composition))
        bias.normal_()
        documents[4] = 200
