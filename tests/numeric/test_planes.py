"""Planes: no output is off by more than the tolerance, tiles are bounded by their plane; steps, appends."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, Planes, Precision, UnsupportedError
from fa4flex.accuracy.tensors import DISTRIBUTIONS, Drawn
from fa4flex.kernels.planes.config import EVERY, SLACK
from fa4flex.planes_calls import NO_SLOPE, _found_by
from fa4flex.runtime import launch
from fa4flex.runtime.cpu import planes as by_plane
from fa4flex.runtime.planes import Masses, needed
from fa4flex.variants import alibi, causal, sliding_window, softcap

CASES = int(os.environ.get("FA4FLEX_RANDOM_PLANES", "40"))


def masked(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A mask that is no interval of keys."""
    return (kv + h + q) % 5 != 0


def steep(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return -1.5 * score + 0.01 * kv


def jumps(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(score > 0.0, score + 1.0, score)


def drawn(name: str, rows: int, keys: int, heads: tuple[int, int], width: int) -> list[Tensor]:
    """q, k and v of a distribution of `fa4flex accuracy`."""
    size = Drawn(rows, keys, heads[0], width, random.randrange(1 << 30))
    q, k, v = DISTRIBUTIONS[name](size, torch.Generator().manual_seed(size.seed))
    return [q, k[:, : heads[1]].contiguous(), v[:, : heads[1]].contiguous()]


def local(slope: float, heads: int) -> Any:
    return alibi(torch.full((heads,), slope))


def case(n: int) -> tuple[list[Tensor], dict[str, Any], Tensor | None, int]:
    """Tensors, arguments of a variant, lengths of sequences, and the block of a random case."""
    heads = random.choice(((4, 1), (4, 2), (2, 2)))
    rows, keys = random.choice((1, 1, 1, 3)), random.choice((3, 70, 500, 1500))
    width, batch = random.choice((32, 64, 96)), random.choice((1, 2))
    names = list(DISTRIBUTIONS)
    parts = [drawn(names[n % len(names)], min(rows, keys), keys, heads, width) for _ in range(batch)]
    x = [torch.cat(one) for one in zip(*parts, strict=True)]
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    if random.random() < 0.3:
        x[0] *= random.choice((0.2, 3.0))
    if random.random() < 0.2:  # neighbouring keys are alike, as where positions are embedded
        x[1] = x[1] + 3 * torch.randn_like(x[1][:, :, :1]) * torch.linspace(0, 1, keys)[:, None]
    mod = random.choice((None, None, softcap(2.0), steep, *[local(s, heads[0]) for s in (0.5, 0.05, 0.01)]))
    mask = random.choice((None, causal, causal, sliding_window(300), masked))
    variant = {"score_mod": mod, "mask": mask, "scale": random.choice((None, None, 0.5))}
    if random.random() < 0.2:
        variant["sinks"] = torch.randn(heads[0]) + random.choice((0.0, 8.0))
    used = None
    if random.random() < 0.4:
        used = torch.randint(x[0].shape[2], keys + 1, (batch,), dtype=torch.int32)
        for b in range(batch):  # padding is never read
            x[1][b, :, int(used[b]) :] = math.nan
    return [t.to(dtype) for t in x], variant, used, random.choice((64, 128))


def exactly(
    x: list[Tensor], variant: dict[str, Any], used: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(out, lse, range of the values by channel) of each sequence in float64."""
    found = []
    sinks = variant.get("sinks")
    options = {name: variant[name] for name in ("score_mod", "mask", "scale")}
    for b in range(len(x[0])):
        length = x[1].shape[2] if used is None else int(used[b])
        q, k, v = x[0][b : b + 1].double(), *(t[b : b + 1, :, :length].double() for t in x[1:])
        found_sinks = None if sinks is None else sinks.double()
        result = fa4flex.reference.attention(q, k, v, sinks=found_sinks, **options)
        low, high = v.amin(2), v.amax(2)
        if sinks is not None:
            low, high = low.clamp(max=0), high.clamp(min=0)
        span = (high - low).repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None]
        found.append((result[0], result[1], span))
    return found


def test_no_output_is_off_by_more_than_the_tolerance(seed: int) -> None:
    """Whatever tensors, masks and mods are; and the log-sum-exp is lower by what was left out, at most."""
    left = []
    for n in range(CASES):
        x, variant, used, block = case(n)
        tolerance = random.choice((1e-3, 1e-2, 0.1, 0.5))
        planes = fa4flex.planes(x[1], x[2], seqused_k=used, block=block)
        precision = Precision(tolerance=tolerance, output=torch.float32)
        attn = fa4flex.compile(**variant, precision=precision)
        reads = attn.reads(x[0], planes)
        out, lse = attn(x[0], planes, return_lse=True)
        left.append(float(reads.share.mean()))
        assert torch.equal(planes.share, torch.where(reads.looked, reads.share, planes.share))
        for b, (exact, exact_lse, span) in enumerate(exactly(x, variant, used)):
            floor = 1e-5 * (1 + float(exact.abs().max()))
            error = (out[b].double() - exact).abs()
            assert (error <= tolerance * span + floor).all(), (
                n,
                variant,
                float((error - tolerance * span).max()),
            )
            lower = (exact_lse - lse[b].double()).nan_to_num(0.0)  # -inf where a row has no keys
            rounded = 1e-4 * (1 + float(exact_lse.nan_to_num(neginf=0.0).abs().max()))
            assert -rounded <= float(lower.min()) and float(lower.max()) <= -math.log1p(-tolerance) + rounded
    assert CASES < 40 or max(left) > 0.5, "nothing was ever left out"


def masses_of(variant: dict[str, Any], q: Tensor, planes: Planes) -> Masses:
    now = launch.calling(fa4flex.compile(**variant, precision=Precision(tolerance=0.0)).variant, None)
    kept = by_plane.masses
    found: list[Masses] = []

    def keep(*args: Any) -> Masses:
        found.append(kept(*args))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_plane, "masses", keep)
        _found_by(now, q, planes, 0.5, planes.share.clone())
    return found[0]


def test_masses_of_tiles_are_within_their_bounds(seed: int) -> None:
    """Queries along the error of a key come near them: a bound that was a tenth smaller would be passed."""
    nearest = 0.0
    for n in range(12):
        k, v = torch.randn(1, 2, 300, 64).mul(random.choice((0.3, 3.0))), torch.randn(1, 2, 300, 64)
        if n % 3 == 0:
            k[..., 5] += 20
        planes = fa4flex.planes(k, v, block=64)
        stands = (
            planes.codes.float() * planes.scale.repeat_interleave(64, -1)[..., None]
            + planes.offset[:, :, None]
        )
        off = (planes.rotation.undone(stands)[:, :, :300] - k)[0]
        key = random.randrange(300)
        # a tile that has one key alone: its mass is the score of it
        variant = {"mask": lambda b, h, q, kv, at=key: kv == at, "scale": 1.0}
        q = torch.nn.functional.normalize(off[:, key], dim=-1)[None, :, None] * random.choice(
            (1.0, -1.0, 30.0)
        )
        found = masses_of(variant, q, planes)
        exact = (q[0, :, 0].double() * k[0, :, key].double()).sum(-1)
        tile = key // 64
        lower, upper = (x[0, :, 0, tile].double() for x in (found.lower, found.upper))
        assert (lower <= exact).all() and (exact <= upper).all()
        middle, reach = (upper + lower) / 2, (upper - lower) / 2
        nearest = max(nearest, float(((exact - middle).abs() / reach).max()))
        assert (found.upper[0, :, 0].isinf() == ~found.visited[0]).all() and found.visited[0, :, tile].all()
        span = planes.error[0, :, tile] * q.norm(dim=-1)[0, :, 0]
        assert (reach >= span.double() * (1 - 1e-6)).all()
    assert nearest > 0.75


def test_rows_lose_as_many_tiles_as_the_tolerance_has_room_for(seed: int) -> None:
    """One row loses the lightest ones, several lose those that all of them lose."""
    for _ in range(50):
        tiles, tolerance = random.randint(1, 12), random.choice((1e-3, 0.05, 0.4))
        logs = torch.randn(1, 2, 3, tiles) * random.choice((0.1, 3.0, 10.0))
        if random.random() < 0.5:
            logs[torch.rand_like(logs) < 0.3] = -math.inf
        visited = (logs > -math.inf).any(2).any(1, keepdim=True)
        sinks = torch.randn(2) + 3 if random.random() < 0.3 else None
        read = needed(Masses(logs, logs, visited), sinks, tolerance)
        weights = logs.double().exp()
        total = weights.sum(-1, keepdim=True) + (
            0 if sinks is None else sinks.double().exp().view(1, 2, 1, 1)
        )
        share = (weights / total).nan_to_num(0.0)
        assert ((share * ~read.unsqueeze(2)).sum(-1) <= tolerance).all()
        lost = torch.zeros(1, 2, 3, tiles, dtype=torch.bool)
        for h, r in [(h, r) for h in range(2) for r in range(3)]:
            room, row = tolerance / SLACK, share[0, h, r]
            order = row.argsort().tolist()
            for place, t in enumerate(order):
                room -= float(row[t])
                largest = place == tiles - 1 and bool(logs[0, h, r, t] > -math.inf)
                if room < 0 or largest:
                    break
                lost[0, h, r, t] = True
        wanted = visited & ~lost.all(2).all(1, keepdim=True)
        close = (share - tolerance).abs().min() < 1e-6 * tolerance
        assert close or torch.equal(read, wanted)


def test_tiles_of_nan_and_infinity_are_read(seed: int) -> None:
    q, k, v = drawn("normal", 1, 1000, (2, 2), 64)
    attn = fa4flex.compile(local(0.5, 2), causal, precision=Precision(tolerance=0.01))
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = k.clone()
        spoilt[0, 0, 200, 7] = bad
        planes = fa4flex.planes(spoilt, v)
        reads = attn.reads(q, planes)
        assert bool(reads.tiles[0, 0, 1]) and not bool(reads.tiles[0, 1, 1])
        exact = fa4flex.attention(q, spoilt, v, score_mod=local(0.5, 2), mask=causal)
        assert torch.allclose(attn(q, planes), exact, atol=0.05, equal_nan=True)


# --- appends and steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_appended_tokens_are_rounded_as_if_they_had_been_there(layout: Any, seed: int) -> None:
    def laid(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if layout == "bshd" else x

    for block in (64, 128):
        room, batch = random.choice((400, 512)), 3
        k, v = torch.randn(batch, 2, room, 32).bfloat16(), torch.randn(batch, 2, room, 16).bfloat16()
        used = torch.randint(0, 200, (batch,), dtype=torch.int32)
        k_cache, v_cache = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
        for b in range(batch):
            k_cache[b, :, : used[b]], v_cache[b, :, : used[b]] = k[b, :, : used[b]], v[b, :, : used[b]]
        planes = fa4flex.planes(laid(k_cache), laid(v_cache), seqused_k=used, block=block, layout=layout)
        for _ in range(4):
            count = random.choice((1, 1, 2, 50))
            new = [torch.stack([x[b, :, used[b] : used[b] + count] for b in range(batch)]) for x in (k, v)]
            planes.append(*(laid(x) for x in new))
            used += count
        assert torch.equal(planes.seqused_k, used)
        whole = replace(
            fa4flex.planes(laid(k), laid(v), seqused_k=used, block=block, layout=layout), offset=planes.offset
        )
        whole._round(torch.arange(whole.tiles).expand(batch, -1))
        for name in ("codes", "scale", "error", "size"):
            assert torch.equal(getattr(planes, name), getattr(whole, name)), name
        q = torch.randn(batch, 4, 1, 32).bfloat16()
        attn = fa4flex.compile(mask=causal, layout=layout, precision=Precision(tolerance=0.02))
        out = attn(laid(q), planes)
        exact = fa4flex.attention(
            laid(q), laid(k), laid(v), mask=causal, layout=layout, varlen=fa4flex.Varlen(seqused_k=used)
        )
        assert (out.float() - exact.float()).abs().max() <= 0.02 * float(v.max() - v.min()) + 0.02


def test_appends_that_do_not_fit_are_refused() -> None:
    k, v = torch.randn(1, 2, 100, 32), torch.randn(1, 2, 100, 32)
    planes = fa4flex.planes(k, v, seqused_k=torch.tensor([98]))
    planes.append(k[:, :, :2], v[:, :, :2])
    before = planes.k.clone()
    with pytest.raises(InputError, match="room for 100"):
        planes.append(k[:, :, :1], v[:, :, :1])
    assert torch.equal(planes.k, before) and int(planes.seqused_k) == 100
    with pytest.raises(InputError, match="as many sequences and heads"):
        planes.append(k[:, :1, :1], v[:, :, :1])


def test_keys_that_were_written_to_are_noticed() -> None:
    q, k, v = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 200, 32), torch.randn(1, 2, 200, 32)
    planes, attn = fa4flex.planes(k, v, seqused_k=torch.tensor([150])), fa4flex.compile()
    near = fa4flex.compile(precision=Precision(tolerance=0.01))
    planes.append(k[:, :, :3].clone(), v[:, :, :3].clone())
    near(q, planes)
    v[:, :, 3] = 0.0  # values have no plane
    near(q, planes)
    k[:, :, 3] = 0.0
    for call in (near, near.reads):
        with pytest.raises(InputError, match="written to since"):
            call(q, planes)
    with pytest.raises(InputError, match="written to since"):
        planes.append(k[:, :, :1], v[:, :, :1])
    attn(q, planes)
    near(q, fa4flex.planes(k, v))


def test_flat_heads_go_back_to_one_plane_and_look_again(seed: int) -> None:
    """One head's queries are flat, and then those of a needle; the other head has one all along."""
    k, v = torch.randn(1, 2, 2048, 64) / 8, torch.randn(1, 2, 2048, 64)
    flat, sharp = torch.randn(1, 2, 1, 64), 40 * torch.nn.functional.normalize(k[:, :, 700:701], dim=-1)
    sharp = sharp / sharp.norm(dim=-1, keepdim=True) * 400
    attn = fa4flex.compile(precision=Precision(tolerance=0.01))
    planes, total, whole = fa4flex.planes(k, v), 0, 0
    q = torch.cat([flat[:, :1], sharp[:, 1:]], 1)
    for step in range(EVERY):
        reads = attn.reads(q, planes)
        assert reads.looked.tolist() == [[step == 0, True]]
        assert bool(reads.tiles[0, 0].all()) and float(reads.share[0, 1]) > 0.8
        total, whole = total + reads.bytes, whole + reads.whole_bytes
        attn(q, planes)
    assert reads.bytes < 0.75 * reads.whole_bytes and int(planes.step) == EVERY
    for _ in range(3):
        reads = attn.reads(sharp, planes)
        assert reads.looked.all() and float(reads.share.min()) > 0.8
        attn(sharp, planes)
    planes.share.zero_()
    reads = attn.reads(sharp, planes)
    assert not reads.looked.any() and reads.bytes == reads.whole_bytes


def test_a_flat_head_costs_little() -> None:
    """All bytes of as many steps as go by between two looks."""
    k, v = torch.randn(1, 1, 1024, 64).bfloat16(), torch.randn(1, 1, 1024, 64).bfloat16()
    attn, planes = fa4flex.compile(precision=Precision(tolerance=0.01)), fa4flex.planes(k, v)
    q, found, whole = torch.randn(1, 4, 1, 64).bfloat16() / 4, 0, 0
    for _ in range(EVERY):
        reads = attn.reads(q, planes)
        found, whole = found + reads.bytes, whole + reads.whole_bytes
        attn(q, planes)
    assert whole < found <= 1.01 * whole


# --- what is said and refused -------------------------------------------------------------------------------


def test_without_a_tolerance_all_is_read(seed: int) -> None:
    q, k, v = drawn("normal", 1, 700, (4, 2), 32)
    planes = fa4flex.planes(k, v)
    attn = fa4flex.compile(mask=sliding_window(100))
    assert torch.equal(attn(q, planes), attn(q, k, v)) and int(planes.step) == 0
    reads = attn.reads(q, planes)
    assert (
        reads.tiles.sum() == reads.visited.sum() < reads.visited.numel() and reads.bytes == reads.whole_bytes
    )
    assert "no tolerance" in reads.explain()


def test_scores_without_a_bound_are_read(seed: int) -> None:
    q, k, v = drawn("needle", 1, 700, (2, 2), 32)
    planes = fa4flex.planes(k, v)
    attn = fa4flex.compile(jumps, precision=Precision(tolerance=0.1))
    reads = attn.reads(q, planes)
    assert reads.reason == NO_SLOPE and NO_SLOPE in reads.explain() and not reads.looked.any()
    assert torch.equal(attn(q, planes), fa4flex.attention(q, k, v, score_mod=jumps))


def test_reads_say_tiles_and_bytes() -> None:
    q, k, v = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)
    planes = fa4flex.planes(k.bfloat16(), v.bfloat16())
    reads = fa4flex.compile(local(1.0, 2), causal, precision=Precision(tolerance=0.01)).reads(
        q.bfloat16(), planes
    )
    assert reads.tiles.sum(-1).tolist() == [[1, 1]] and reads.visited.all()
    last = 1000 - 7 * 128
    assert reads.whole_bytes == 2 * 1000 * 256
    assert reads.bytes == 2 * (1000 * 64 + 8 * 12 + last * 256)
    assert torch.allclose(reads.share, torch.full((1, 2), 1 - last / 1000))
    assert reads.explain().splitlines() == [
        "tiles   2 of 16 of 128 keys are read with 16 bits, 14 by their plane alone",
        "heads   2 of 2 heads of keys look at their plane of 8 bits",
        f"bytes   {reads.bytes} of 512000 without planes ({reads.bytes / 512000:.2f})",
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "with dropout"),
    ({"normalizer": fa4flex.Normalizer.softpick()}, "with a normaliser"),
    ({"output_mod": lambda out, b, h, q, d: out * 2}, "with an output function"),
    (
        {"blocks": fa4flex.BlockMap.from_dense(torch.ones(1, 2, dtype=torch.bool), (1, 64), 1, 100)},
        "mask=blocks",
    ),
    ({"precision": Precision(tolerance=0.1, skip=0.1)}, "with skip"),
]


@pytest.mark.parametrize(("variant", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_has_no_bound_is_refused(variant: dict[str, Any], message: str) -> None:
    q, k = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 100, 32)
    attn = fa4flex.compile(**{"precision": Precision(tolerance=0.1), **variant})
    for call in (attn, attn.reads):
        with pytest.raises(UnsupportedError, match=message):
            call(q, fa4flex.planes(k, k))


def test_calls_that_do_not_fit_are_refused() -> None:
    q, k = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 100, 32)
    planes, attn = fa4flex.planes(k, k), fa4flex.compile(precision=Precision(tolerance=0.1))
    with pytest.raises(InputError, match="varlen= beside Planes"):
        attn(q, planes, varlen=fa4flex.Varlen(seqused_k=torch.tensor([3])))
    with pytest.raises(InputError, match="layout"):
        fa4flex.compile(layout="bshd")(q, planes)
    with pytest.raises(InputError, match="planes have codes"):
        fa4flex.compile(precision=Precision(qk="int8", pv="float8_e4m3"))(q, planes)
    with pytest.raises(UnsupportedError, match="gradients"):
        attn(q.requires_grad_(), planes)
    with torch.no_grad():
        attn(q, planes)
    with pytest.raises(InputError, match=r"width|dim"):
        attn(torch.randn(1, 2, 1, 16), planes)
    slopes = torch.randn(2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="gradients"):
        fa4flex.compile(alibi(slopes), precision=Precision(tolerance=0.1))(q.detach(), planes)


def test_tensors_that_make_no_planes_are_refused() -> None:
    k = torch.randn(1, 2, 100, 32)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ((k, k[:, :, :50]), {}, "as many sequences"),
        ((k, k.bfloat16()), {}, "both alike"),
        ((k.double(), k.double()), {}, "bfloat16"),
        ((k, k), {"block": 32}, "tiles of 64 or 128"),
        ((k, k), {"seqused_k": torch.tensor([101])}, "101"),
        ((k, k), {"seqused_k": torch.tensor([1.0])}, "int32 or int64"),
        ((3, k), {}, "torch.Tensor"),
    ]
    for tensors, options, message in wrong:
        with pytest.raises(InputError, match=message):
            fa4flex.planes(*tensors, **options)
    with pytest.raises(UnsupportedError, match="require gradients"):
        fa4flex.planes(k.clone().requires_grad_(), k)
