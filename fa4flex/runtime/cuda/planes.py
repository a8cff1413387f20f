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
from fa4flex.kernels.planes.config import GROUP, LOW, MOST_GROUPS, RUN, WIDEST, Config
from fa4flex.quantization.planes import LARGEST, Planes
from fa4flex.runtime.cuda.device.device import target_of
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels
from fa4flex.runtime.planes import Masses

MOST = 65535
"""Largest extents of a grid, but for the first."""

FAMILY = "sm90"


class Rows(NamedTuple):
    """Queries of a call: q [B, Hq, Sq, D], the factor of q.k, captured values, and what the mask says."""

    q: Tensor
    scale: float
    captured: Captured
    facts: Facts


def refusal(facts: Facts, q: Tensor, planes: Planes) -> str:
    """Why no kernel bounds the masses of a call's tiles; "" where one does. q with heads first."""
    if target_of(q.device).family != FAMILY:
        return "kernels that read planes are for Hopper"
    if facts.score is not SCORE:
        return "no kernel reads planes under a score mod yet"
    keys = key_intervals(facts.mask)
    if facts.mask is not TRUE and (keys is None or len(keys.spans) != 1 or not keys.certain):
        return "the mask is no single interval of keys for each query, which the kernel for planes asks for"
    (batch, heads, q_len, width), kv_heads = q.shape, planes.share.shape[1]
    if heads // kv_heads * q_len > MOST_GROUPS * GROUP:
        return f"more than {MOST_GROUPS * GROUP} rows share a head of keys"
    if width % RUN or width > WIDEST:
        return f"heads of {width}: the kernel for planes reads those of {RUN}, 128, 192 and {WIDEST} channels"
    if planes.layout != "bhsd" or not planes.pages:
        return "keys have to lie as [B, Hkv, S, D] in memory, S a multiple of the block"
    if not planes.codes.numel() or not q.numel() or max(batch, kv_heads) > MOST:
        return "there is nothing to launch"
    return ""


def masses(rows: Rows, planes: Planes, looks: Tensor) -> Masses | None:
    """Masses of all tiles of a call that `refusal` has nothing against; None while a CUDA graph is captured,
    before the first call of its kind. looks: heads whose plane is read, bool [B, Hkv]; those of others are
    -inf."""
    q, tiles = rows.q, planes.tiles
    (batch, heads, q_len, width), kv_heads = q.shape, planes.share.shape[1]
    each = heads // kv_heads * q_len
    config = Config(width, planes.block, -(-each // GROUP))
    if _kernels.must_wait(config, q):
        return None
    kernel = _kernels.of(config, q, partial(_compiled, config))
    codes, numbers = _operands(rows, planes, config)
    spans = _spans(rows, planes)
    padded = config.groups * GROUP
    upper, lower = (
        torch.empty(batch, kv_heads, tiles, padded, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    kernel.launch(
        planes.codes.view(torch.int32), codes, numbers, _filled(spans, config), planes.scale, planes.error,
        planes.size, planes.offset.norm(dim=-1), looks.to(torch.int32), upper, lower,
    )  # fmt: skip
    own = [
        x[..., :each].unflatten(-1, (-1, q_len)).permute(0, 1, 3, 4, 2).flatten(1, 2) for x in (upper, lower)
    ]
    return Masses(own[0], own[1], _visited(spans, planes), spans)


def _operands(rows: Rows, planes: Planes, config: Config) -> tuple[Tensor, Tensor]:
    """Codes of queries and numbers of rows, as the kernel reads them."""
    q = rows.q.float() * rows.scale
    of_heads = planes.offset.shape[1]
    q = q.unflatten(1, (of_heads, -1)).flatten(2, 3)  # [B, Hkv, rows, D]
    turned = planes.turned(q)
    unit = (turned.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    high = (turned / unit).round()
    low = ((turned / unit - high) * LOW).round()
    own = (turned - (high + low / LOW) * unit).norm(dim=-1)  # of a NaN: NaN
    shift = (turned * planes.offset[:, :, None]).sum(-1)
    numbers = torch.stack([unit.squeeze(-1), shift, q.norm(dim=-1), own], -1)
    codes = torch.stack([_filled(x.nan_to_num(0.0).to(torch.int8), config) for x in (high, low)], 3)
    by_group = codes.unflatten(2, (config.groups, GROUP)).transpose(3, 4).flatten(2, 4)
    return by_group.contiguous().view(torch.int32), _filled(numbers, config)


def _filled(x: Tensor, config: Config) -> Tensor:
    """x [B, Hkv, rows, ...] with zeros for rows that fill up the last group; contiguous."""
    return pad(x, (0, 0, 0, config.groups * GROUP - x.shape[2])).contiguous()


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
    both = [torch.as_tensor(x, device=device).expand(batch, heads, q_len) for x in (first, end)]
    clipped = torch.stack([both[0].clamp(min=0), torch.minimum(both[1], used)], -1)
    return clipped.to(torch.int32).unflatten(1, (planes.offset.shape[1], -1)).flatten(2, 3)


def _visited(spans: Tensor, planes: Planes) -> Tensor:
    """Tiles that a row sees keys of, bool [B, Hkv, T]."""
    starts = torch.arange(planes.tiles, device=spans.device) * planes.block
    first, end = (x[..., None] for x in spans.unbind(-1))
    inside = (first < starts + planes.block) & (end > starts) & (first < end)
    return inside.any(2)


_kernels = KeptKernels()


def _compiled(config: Config, arch: str) -> Kernel:
    text = (
        '"""Bounds masses of tiles of keys by a plane of 8 bits."""\n\n'
        "from fa4flex.kernels.planes.config import Config\n"
        "from fa4flex.kernels.planes.kernel import Masses\n\n"
        f"kernel = Masses({config!r})\n"
    )
    return compile_kernel(Source("planes", text), Problem(64, 64), Signature(), arch)
