"""Block tables that a pass of a program reads, made by its device or by the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.tiles import TileMap, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.contents import on_host
from fa4flex.kernels.block_tables.config import PIECE
from fa4flex.kernels.plan.arguments import BLOCK_TABLES
from fa4flex.kernels.plan.pipeline import BY_KEYS
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.arguments import conversions_of, launch_function
from fa4flex.runtime.cuda.calls.signatures import Kinds, numbers_of, signature_of
from fa4flex.runtime.cuda.tables.block_tables import PARAMETERS, DeviceTables, HostTables, Tables
from fa4flex.runtime.cuda.tables.host_tables import BlockTables, ragged_maps, to_device, turns_to_device
from fa4flex.runtime.cuda.tables.lengths import check_lengths

if TYPE_CHECKING:
    from fa4flex.compiler.signature import Signature
    from fa4flex.kernels.block_tables.plan import TablesPlan
    from fa4flex.lower import Lowered

READ_BY = {
    "forward": ("tables",), "tangents": ("tables",),
    "backward": ("spans", "tables"), "mass": ("spans", "tables"),
}  # fmt: skip
"""Forms of masks for which a pass reads tables."""


def tables_of(
    kinds: Kinds, call: Call, lowered: Lowered, captured: Captured, counted: bool
) -> DeviceTables | None:
    """The device makes the tables, the host those of more tiles than there is room for. `counted`: torch's
    count of changes decides if contents are new."""
    asked = tables_kernel(kinds, call, lowered, captured)
    if asked is None:
        return None
    result, signature = asked
    kernel, plan = result.compile(signature), result.plan
    on_host = HostTables(lambda later: on_the_host(later, lowered, numbers_of(kinds, later)), plan.read)
    constants = {"scalars": numbers_of(kinds, call) or None}
    conversions = conversions_of(BLOCK_TABLES, call=call._replace(lengths=NO_LENGTHS))
    launch = launch_function(BLOCK_TABLES, kernel.launch, PARAMETERS, constants, conversions)
    return DeviceTables(launch, plan, pieces_of(plan, call), on_host, counted)


def tables_kernel(
    kinds: Kinds, call: Call, lowered: Lowered, captured: Captured
) -> tuple[Lowered, Signature] | None:
    """The kernel by which the device makes the tables of a pass; None where it reads none."""
    from fa4flex.lower import lower_tables

    if lowered.problem.mask_form not in READ_BY[lowered.direction]:
        return None
    return lower_tables(lowered, captured), signature_of(kinds, call)


def pieces_of(plan: TablesPlan, call: Call) -> int:
    """Pieces in which the elements that have to be sorted are compared; 0 where there are none."""
    longest = max((call.operands[slot].shape[-1] for slot in plan.config().searched), default=None)
    return 0 if longest is None else max(-(-longest // PIECE), 1)


# --- on the host ------------------------------------------------------------------------------------------


def on_the_host(call: Call, lowered: Lowered, numbers: tuple[int | float, ...]) -> Tables:
    """The tables of a call, of contents as they are now. Raises InputError for wrong lengths."""
    check_lengths(call)
    shape, tile, captured = call.extents(), lowered.plan.tile, Captured(call.operands, numbers)
    maps = maps_of(call, lowered, captured)
    if lowered.direction not in BY_KEYS:
        # A padded batch has tiles that no sequence uses, and whose pointers are read like any others.
        made = to_device(maps, shape, call.q.device, 1 if call.packed else -(-shape.q_len // tile[0]))
        return _without_ends(made, lowered.problem.row_ends, shape)
    make = turns_to_device if lowered.problem.deterministic else to_device
    return make([one.transposed() for one in maps], shape, call.q.device)


def _without_ends(made: BlockTables, spans: int, shape: Shape) -> BlockTables:
    """The same for kernels that read ends of so many spans: there are none that hold."""
    if not spans:
        return made
    maps, none = (shape.batch, shape.heads), made.partial_ptr.new_zeros(max(shape.q_len, 1))
    ends = none[: shape.q_len].expand(2 * spans, *maps, -1)
    return made._replace(row_ends=ends, in_order=none[:1].expand(maps))


def maps_of(call: Call, lowered: Lowered, captured: Captured) -> list[TileMap]:
    """The tiles of the mask: a map for the whole batch, or one per sequence of a ragged one."""
    facts, tile, shape = lowered.facts, lowered.plan.tile, call.extents()
    if lowered.problem.lengths == "dense":
        return [tile_map(facts.mask, facts.keys, shape, captured, tile)]
    lengths = _sequence_lengths(call, 0, shape.q_len), _sequence_lengths(call, 1, shape.kv_len)
    return ragged_maps(facts, shape.heads, captured, tile, lengths)


def _sequence_lengths(call: Call, side: int, length: int) -> Tensor:
    """The used length of every sequence on the host, int64 [sequences]."""
    cu, used, cached = call.lengths[side], call.lengths[side + 2], call.kv.seqused_k
    if used is not None:
        return on_host(used).long()
    if side and cached is not None:
        return cached.detach().cpu().long().clamp(0, length)
    return torch.full((call.q.shape[0],), length) if cu is None else on_host(cu).long().diff()
