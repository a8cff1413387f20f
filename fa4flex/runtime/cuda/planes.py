"""Masses of tiles of keys by the plane of a cache on a GPU: a kernel, and a few operations on rows before it.
The host reads no contents.

What the kernel does not have (score mods, masks that are no interval of keys for each row, many rows) is
computed without a look at planes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.analyze.intervals import key_intervals
from fa4flex.codegen.emit.source import Source
from fa4flex.codegen.evaluate import Captured, Value, evaluate
from fa4flex.codegen.expr import TRUE
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.planes.config import (
    GROUP,
    MOST_GROUPS,
    RUN,
    TILES,
    WIDEST,
    ChooseConfig,
    Config,
    QueriesConfig,
)
from fa4flex.quantization.planes import Planes
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.calls.conversions import compact, tma_able
from fa4flex.runtime.cuda.device.device import target_of
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels

MOST = 65535
"""Largest extents of a grid, but for the first."""

FAMILY = "sm90"


class Rows(NamedTuple):
    """Queries of a call: q [B, Hq, Sq, D], the factor of q.k, captured values, what the mask says, and
    whether there are sinks."""

    q: Tensor
    scale: float
    captured: Captured
    facts: Facts
    sinks: bool


def refusal(rows: Rows, planes: Planes) -> str:
    """Reason that no kernel bounds the masses of a call's tiles; "" where one does."""
    facts, q = rows.facts, rows.q
    if target_of(q.device).family != FAMILY:
        return "kernels that read planes are for Hopper"
    if facts.score is not SCORE:
        return "no kernel reads planes under a score mod yet"
    if rows.sinks:
        return "no kernel reads planes beside sinks yet"
    keys = key_intervals(facts.mask)
    if facts.mask is not TRUE and (keys is None or len(keys.spans) != 1 or not keys.certain):
        return "the mask is no single interval of keys for each query, which the kernel for planes asks for"
    (batch, heads, q_len, width), kv_heads = q.shape, planes.share.shape[1]
    if heads // kv_heads * q_len > MOST_GROUPS * GROUP:
        return f"more than {MOST_GROUPS * GROUP} rows share a head of keys"
    if width % RUN or width > WIDEST:
        return f"heads of {width}: the kernel for planes reads those of {RUN}, 128, 192 and {WIDEST} channels"
    if q.dtype.itemsize != 2:
        return f"queries of {q.dtype}, which are no 16 bits"
    if planes.layout != "bhsd" or not planes.pages:
        return "keys have to lie as [B, Hkv, S, D] in memory, S a multiple of the block"
    if planes.tiles > TILES[-1]:
        return f"more than {TILES[-1]} tiles"
    if not planes.codes.numel() or not q.numel() or max(batch, kv_heads) > MOST:
        return "there is nothing to launch"
    return ""


class Bounded(NamedTuple):
    """Bounds of masses as the kernel writes them, float32 [B, Hkv, T, rows], of rows in whole groups; and the
    keys that these see, int32 [B, Hkv, rows, 2]."""

    upper: Tensor
    lower: Tensor
    spans: Tensor


class Pages(NamedTuple):
    """Tiles that are read, as pages of the keys of each head: [B, Hkv, T], in order; their keys [B, Hkv];
    what rows see of these, [B, Hkv, rows, 2]; and classes of all tiles [B, Hkv, T]. All int32."""

    table: Tensor
    counts: Tensor
    places: Tensor
    classes: Tensor


def bounded(rows: Rows, planes: Planes) -> Bounded | None:
    """Masses of all tiles of a call that `refusal` has nothing against; None while a CUDA graph is captured,
    before the first call of its kind."""
    q = rows.q
    config = Config(q.shape[3], planes.block, _groups(q, planes))
    before = QueriesConfig(name_of(q.dtype), config.width, config.groups)
    if _kernels.must_wait(config, q) or _kernels.must_wait(before, q):
        return None
    first, kernel = (_kernels.of(one, q, partial(_compiled, one)) for one in (before, config))
    (batch, heads, tiles), padded = planes.scale.shape, config.groups * GROUP

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, heads, *shape, dtype=dtype, device=q.device)

    codes, numbers = empty(2 * padded, config.width // 4, dtype=torch.int32), empty(padded, 4)
    q = q.detach() if tma_able(q) else compact(q.detach())
    first.launch(q, planes.rotation.signs(q.device), planes.offset, rows.scale, codes, numbers)
    spans = _filled(_spans(rows, planes), config.groups)
    upper, lower = empty(tiles, padded), empty(tiles, padded)
    kernel.launch(
        planes.codes.view(torch.int32), codes, numbers, spans, planes.scale, planes.error, planes.size,
        planes.norms, planes.share, planes.step, planes.worth, upper, lower,
    )  # fmt: skip
    return Bounded(upper, lower, spans)


def chosen(found: Bounded, planes: Planes, tolerance: float, shares: Tensor) -> Pages | None:
    """Tiles that are read; None as of `bounded`. shares [B, Hkv]: where shares of keys that are left out are
    written, by heads that look; perhaps those of the planes."""
    upper, lower, spans = found
    batch, heads, tiles, padded = upper.shape
    config = ChooseConfig(next(n for n in TILES if n >= tiles), planes.block, padded // GROUP)
    if _kernels.must_wait(config, upper):
        return None
    pages, classes = (torch.empty(batch, heads, tiles, dtype=torch.int32, device=upper.device) for _ in "pc")
    counts, places = torch.empty_like(pages[..., 0]), torch.empty_like(spans)
    kernel = _kernels.of(config, upper, partial(_compiled, config))
    kernel.launch(
        upper, lower, spans, planes.seqused_k, planes.share, planes.step, planes.worth, tolerance, pages,
        counts, places, classes, shares,
    )  # fmt: skip
    return Pages(pages, counts, places, classes)


def _groups(q: Tensor, planes: Planes) -> int:
    """Groups of rows that share a head of keys."""
    return -(-(q.shape[1] // planes.share.shape[1] * q.shape[2]) // GROUP)


def _filled(x: Tensor, groups: int) -> Tensor:
    """x [B, Hkv, rows, ...] with zeros for rows that fill up the last group; contiguous."""
    return pad(x, (0, 0, 0, groups * GROUP - x.shape[2])).contiguous()


def _spans(rows: Rows, planes: Planes) -> Tensor:
    """First key that each row sees, and the one past the last: int32 [B, Hkv, rows, 2]."""
    q, device = rows.q, rows.q.device
    batch, heads, q_len, _ = q.shape
    used = planes.seqused_k.long().view(-1, 1, 1)
    first: Value = 0
    end: Value = used
    keys = None if rows.facts.mask is TRUE else key_intervals(rows.facts.mask)
    if keys is not None:
        symbols: dict[str, Value] = {
            "b": torch.arange(batch, device=device).view(-1, 1, 1),
            "h": torch.arange(heads, device=device).view(-1, 1),
            "q": torch.arange(q_len, device=device),
            "q_len": q_len, "kv_len": used, "num_heads": heads,
        }  # fmt: skip
        first, end = evaluate(keys.spans[0], symbols, rows.captured)
    both = [
        (x if isinstance(x, Tensor) else torch.full((), int(x), device=device)).expand(batch, heads, q_len)
        for x in (first, end)
    ]
    clipped = torch.stack([both[0].clamp(min=0), torch.minimum(both[1], used)], -1)
    return clipped.to(torch.int32).unflatten(1, (planes.offset.shape[1], -1)).flatten(2, 3)


_kernels = KeptKernels()


_HOMES = {
    QueriesConfig: ("queries", "Queries"),
    Config: ("masses", "Masses"),
    ChooseConfig: ("choose", "Choose"),
}
"""Kernels of configurations, by module and name."""


def _compiled(config: Config | ChooseConfig | QueriesConfig, arch: str) -> Kernel:
    module, name = _HOMES[type(config)]
    text = (
        '"""Tiles of keys that a plane of 8 bits tells of."""\n\n'
        f"from fa4flex.kernels.planes.config import {type(config).__name__}\n"
        f"from fa4flex.kernels.planes.{module} import {name}\n\n"
        f"kernel = {name}({config!r})\n"
    )
    return compile_kernel(Source("planes", text), Problem(64, 64), Signature(), arch)
