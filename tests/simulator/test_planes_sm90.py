"""Planes on a simulated Hopper: masses of tiles as a CPU finds them, under all timings; outputs within the
tolerance; and tiles that are left out are not read."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from helpers import poisoned
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Planes, Precision
from fa4flex.kernels.planes.config import EVERY, READ
from fa4flex.planes_calls import Reads, _found
from fa4flex.runtime.cpu import planes as on_cpu
from fa4flex.runtime.cuda import planes as on_gpu
from fa4flex.runtime.planes import Masses, needed
from fa4flex.variants import alibi, causal, sliding_window

TIMINGS = ("eager", "late", "random")


def tensors(
    heads: tuple[int, int], rows: int, room: int, width: int, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and lengths. Padding is NaN, as what is behind the keys may hold anything."""
    k, v = torch.randn(batch, heads[1], room, width), torch.randn(batch, heads[1], room, width)
    k[..., random.randrange(width)] += 4
    k[:, :, 17] *= 6
    used = torch.randint(room // 2, room + 1, (batch,), dtype=torch.int32)
    for b in range(batch):
        k[b, :, used[b] :], v[b, :, used[b] :] = math.nan, math.nan
    q = torch.randn(batch, heads[0], rows, width) * random.choice((0.3, 1.0, 4.0))
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), used


def kept(attn: Any, q: Tensor, planes: Planes, where: Any, name: str) -> Any:
    """Result of a function that was called while tiles were chosen."""
    found: list[Any] = []
    of = getattr(where, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, lambda *a: found.append(of(*a)) or found[0])
        _found(attn.variant, q, planes, planes.share.clone())
    return found[0]


def masses_of(found: on_gpu.Bounded, q: Tensor) -> list[Tensor]:
    """Bounds as a CPU has them, [B, Hq, Sq, T]."""
    each = q.shape[1] // found.upper.shape[1] * q.shape[2]
    own = [x[..., :each].unflatten(-1, (-1, q.shape[2])) for x in (found.upper, found.lower)]
    return [x.permute(0, 1, 3, 4, 2).flatten(1, 2) for x in own]


CASES = [
    # heads, rows, room, width, block, mask
    ((4, 2), 1, 512, 64, 128, causal),
    ((4, 1), 2, 320, 128, 64, None),
    ((8, 1), 2, 256, 64, 64, sliding_window(100)),
    ((2, 2), 3, 384, 192, 128, causal),
    ((6, 2), 1, 256, 256, 128, sliding_window(70)),
]


@pytest.mark.parametrize(("heads", "rows", "room", "width", "block", "mask"), CASES)
def test_masses_are_those_of_a_cpu(
    heads: tuple[int, int], rows: int, room: int, width: int, block: int, mask: Any, seed: int
) -> None:
    """And a little wider, as codes of queries round as well; nothing of heads that do not look."""
    q, k, v, used = tensors(heads, rows, room, width)
    k[0, 0, 5, 3] = math.nan
    planes = fa4flex.planes(k, v, seqused_k=used, block=block)
    planes.step.fill_(1)
    planes.share[1, 0] = 0.0
    attn, timing = fa4flex.compile(mask=mask, precision=Precision(tolerance=0.1)), random.choice(TIMINGS)
    wanted: Masses = kept(attn, q, planes, on_cpu, "masses")
    with ptxsim.device("sm_90a", random.randrange(1 << 20), timing, sms=2) as gpu, poisoned():
        found = kept(attn, q, planes, on_gpu, "bounded")
    assert not gpu.findings, f"{timing}: {gpu.report()}"
    upper, lower = masses_of(found, q)
    looks = planes.looks().repeat_interleave(heads[0] // heads[1], 1)
    assert (upper[~looks] == -math.inf).all() and (lower[~looks] == -math.inf).all()
    seen = looks[:, :, None, None] & (wanted.upper > -math.inf)
    bad = looks[:, :, None, None] & wanted.upper.isnan()
    assert (
        torch.equal(upper[looks].isnan(), wanted.upper[looks].isnan())
        and bad.any() == (wanted.visited[0, 0, 0])
    )
    assert ((upper == -math.inf) == (wanted.upper == -math.inf))[looks].all()
    reach, middle = (wanted.upper - wanted.lower) / 2, (wanted.upper + wanted.lower) / 2
    more, other = (upper - lower) / 2 - reach, (upper + lower) / 2
    assert float(more[seen].min()) > -1e-5
    assert ((other - middle).abs() <= more + 1e-4 * (1 + middle.abs()))[seen].all()
    assert (more <= 0.02 * reach + 1e-4)[seen].all()


@pytest.mark.parametrize("tiles", [1, 40, 300, 700])
def test_as_many_tiles_are_left_out_as_the_tolerance_has_room_for(tiles: int, seed: int) -> None:
    """To a threshold's digits; with masses of any size, NaN, and rows of which parts are masked."""
    block, heads, padded, timing = random.choice((64, 128)), 2, random.choice((8, 16)), random.choice(TIMINGS)
    rows, tolerance = random.randint(1, padded), random.choice((1e-3, 0.05, 0.4))
    k = torch.zeros(2, heads, tiles * block, 64, dtype=torch.bfloat16)
    planes = fa4flex.planes(k, k, seqused_k=torch.tensor([tiles * block, tiles * block - 5]), block=block)
    planes.step.fill_(1)
    planes.share[0, 0] = 0.0
    logs = torch.randn(2, heads, tiles, padded) * random.choice((0.1, 3.0, 10.0))
    spans = torch.randint(0, tiles * block + 1, (2, heads, padded, 2), dtype=torch.int32).sort(-1).values
    spans[..., rows:, :] = 0
    spans[1].clamp_(max=tiles * block - 5)
    starts = torch.arange(tiles)[:, None] * block
    first, end = (x.unsqueeze(2) for x in spans.unbind(-1))
    seen = (first < starts + block) & (end > starts) & (first < end)
    logs = logs.masked_fill(~seen, -math.inf)
    spoilt = random.random() < 0.3 and bool(seen[1, 1].any())
    if spoilt:
        logs[1, 1][seen[1, 1]] = math.nan
    shares = planes.share.clone()
    with ptxsim.device("sm_90a", random.randrange(1 << 20), timing, sms=2) as gpu, poisoned():
        found = on_gpu.chosen(on_gpu.Bounded(logs, logs, spans), planes, tolerance, shares)
    assert found is not None and not gpu.findings, f"{timing}: {gpu.report()}"
    visited = seen.any(3)
    masses = Masses(*(x.permute(0, 1, 3, 2).flatten(1, 2).unsqueeze(2) for x in (logs, logs)), visited)
    looks = planes.looks()[:, :, None]
    least = visited & (needed(masses, None, tolerance) | ~looks)
    of_rows = (logs - logs.logsumexp(2, keepdim=True)).double().exp().masked_fill(~seen, 0.0)
    ordered = of_rows.sort(2).values
    limit = ordered.where(ordered.cumsum(2) <= tolerance * 0.999, 0.0).amax(2, keepdim=True) * (1 - 2**-10)
    surely = ((of_rows <= limit) & (of_rows < of_rows.amax(2, keepdim=True))) | ~seen
    most = visited & (~surely.all(3) | ~looks)
    read = found.classes == READ
    assert torch.equal(found.classes > 0, visited) and (read >= least).all() and (read <= most).all()
    assert not spoilt or torch.equal(read[1, 1], visited[1, 1])
    keys = Reads(planes, visited, read, looks).keys
    assert torch.equal(found.counts, (read * keys).sum(-1).int())
    share = 1 - (read * keys).sum(-1) / (visited * keys).sum(-1).clamp(min=1)
    wanted = torch.where(visited.any(-1), share, 0.0)
    assert torch.allclose(shares, torch.where(looks[..., 0], wanted, planes.share), atol=1e-6)
    for b, h in [(b, h) for b in range(2) for h in range(heads)]:
        listed = read[b, h].nonzero().flatten()
        assert torch.equal(found.table[b, h, : len(listed)], (listed + (b * heads + h) * tiles).int())
        held = [int(t) * block + i for t in listed for i in range(block)]
        for place, index in zip(
            found.places[b, h].flatten().tolist(), spans[b, h].flatten().tolist(), strict=True
        ):
            assert place == sum(1 for key in held if key < index)


def local(heads: tuple[int, int], rows: int, room: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries that attend to a few keys near the last ones, but for those of the first head of keys."""
    q, k, v, used = tensors(heads, rows, room, width)
    k[:, :, 17] /= 6  # a large key may matter as well
    for b in range(len(q)):
        for h in range(heads[0]):
            near = k[b, h // (heads[0] // heads[1]), int(used[b]) - 1 - rows - h].float()
            if h >= heads[0] // heads[1]:
                q[b, h] = (near / near.norm() ** 2 * 20 * width**0.5).to(q.dtype)
    return q, k, v, used


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    ("heads", "rows", "room", "width", "block", "mask"),
    [
        ((4, 2), 1, 512, 64, 128, causal),
        ((4, 2), 3, 320, 64, 64, sliding_window(200)),
        ((6, 3), 1, 512, 128, 128, None),
    ],
)
def test_outputs_are_within_the_tolerance_and_what_is_left_out_is_not_read(
    heads: tuple[int, int], rows: int, room: int, width: int, block: int, mask: Any, timing: str, seed: int
) -> None:
    """Tiles that are left out are spoilt behind the plane's back: no output may notice."""
    q, k, v, used = local(heads, rows, room, width)
    tolerance, attn = 0.02, fa4flex.compile(mask=mask, precision=Precision(tolerance=0.02))
    planes = fa4flex.planes(k, v, seqused_k=used, block=block)
    exact = fa4flex.compile(mask=mask, precision=Precision(output=torch.float32))
    wanted, wanted_lse = exact(
        q.float(), k.float(), v.float(), varlen=fa4flex.Varlen(seqused_k=used), return_lse=True
    )
    reads = attn.reads(q, planes)
    assert reads.looked.all() and float(reads.share[:, -1].min()) > 0.3
    span = torch.stack([x[:, :n].float().amax(1) - x[:, :n].float().amin(1)
                        for x, n in zip(v, used.tolist(), strict=True)])  # fmt: skip
    span = span.repeat_interleave(heads[0] // heads[1], 1)[:, :, None]
    left = (reads.visited & ~reads.tiles).repeat_interleave(block, -1)
    k.data[left], v[left] = math.nan, math.nan
    with ptxsim.device("sm_90a", random.randrange(1 << 20), timing, sms=2) as gpu, poisoned():
        out, lse = attn(q, planes, return_lse=True)
        assert torch.equal(planes.share, reads.share) and int(planes.step) == 1
    assert not gpu.findings, gpu.report()
    names = [x.name for x in gpu.results] if hasattr(gpu.results[0], "name") else gpu.report()
    assert "planes" in str(names) and "decode_sm90" in str(names)
    error = (out.float() - wanted).abs()
    assert (error <= tolerance * span + 2**-7 * (1 + wanted.abs())).all(), float((error / span).max())
    lower = wanted_lse - lse
    assert float(lower.min()) > -0.02 and float(lower.max()) <= -math.log1p(-tolerance) + 0.02


def test_flat_heads_read_all_keys_and_no_plane(seed: int) -> None:
    q, k, v, used = tensors((2, 1), 1, 256, 64)
    planes = fa4flex.planes(k, v, seqused_k=used)
    attn = fa4flex.compile(mask=causal, precision=Precision(tolerance=1e-4))
    q = q * 0.05
    with ptxsim.device("sm_90a", 0, random.choice(TIMINGS), sms=2) as gpu:
        first, second = attn(q, planes), None
        assert not planes.share.any() and int(planes.step) == 1
        planes.codes.fill_(-7)  # nobody looks
        second = attn(q, planes)
    assert not gpu.findings and torch.equal(first, second) and int(planes.step) == 2 < EVERY


def refused() -> list[tuple[str, Any, dict[str, Any], tuple[int, int]]]:
    strided = {"layout": "bshd"}
    return [
        ("score mod", alibi(torch.tensor([0.5, 0.5])), {}, (1, 256)),
        ("sinks", None, {"sinks": torch.zeros(2)}, (1, 256)),
        ("single interval", lambda b, h, q, kv: kv % 3 != 0, {}, (1, 256)),
        ("16 rows", None, {}, (9, 256)),
        ("multiple of the block", None, {}, (1, 250)),
        ("multiple of the block", None, strided, (1, 256)),
    ]


@pytest.mark.parametrize("n", range(len(refused())))
def test_calls_that_no_kernel_looks_at_planes_for_read_all(n: int, seed: int) -> None:
    message, mod, more, (rows, room) = refused()[n]
    q, k, v = torch.randn(1, 2, rows, 64), torch.randn(1, 1, room, 64), torch.randn(1, 1, room, 64)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    if "layout" in more:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    planes = fa4flex.planes(k, v, layout=more.get("layout", "bhsd"))
    given = {"score_mod": mod} if message == "score mod" else {"mask": mod}
    attn = fa4flex.compile(**given, **more, precision=Precision(tolerance=0.1))
    with ptxsim.device("sm_90a", 0, "eager", sms=2):
        reads = attn.reads(q, planes)
    assert message in reads.reason and reads.tiles.all() and message in reads.explain()
