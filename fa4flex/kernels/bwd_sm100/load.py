"""The warp that brings keys and values once, then queries and output gradients with their rows' numbers, in
the order of `roles.LOADS`."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from fa4flex.kernels.bwd_sm100.config import Config
from fa4flex.kernels.bwd_sm100.resources import NUMBERS, OF_QUERIES, Products, Shared
from fa4flex.kernels.bwd_sm100.roles import LOADS, Loads
from fa4flex.kernels.common.backward import (
    BackwardArguments,
    BackwardTileScheduler,
    KeyWork,
    query_tile_at,
    rows_of,
)
from fa4flex.kernels.common.barriers import Pipes
from fa4flex.kernels.common.cluster import Cluster
from fa4flex.kernels.common.transfer import States, Tokens, Views, head_of, load_once, load_stage, partition


class Transfers(NamedTuple):
    """q, k, v, dout: (S, D, H, B), or packed (T, D, H); ragged ones as `ending` has them."""

    q: Any
    k: Any
    v: Any
    dout: Any


class Block(NamedTuple):
    """Tensors that a warp loads from and to, the same for all of a block's steps."""

    transfers: Transfers
    shared: Shared
    pipes: Pipes
    products: Products


class Load:
    loads: Loads = LOADS

    def __init__(self, config: Config, scheduler: BackwardTileScheduler, cluster: Cluster) -> None:
        self.config = config
        self.scheduler = scheduler
        self.cluster = cluster

    @cute.jit
    def run(self, arguments: BackwardArguments, work: KeyWork, block: cutlass.Constexpr[Block]) -> None:
        loads = self.loads
        leading, other = self.states()
        waiting = self.scheduler.steps(work, arguments) > 0
        if waiting:
            self.keys(loads.first, work, block)
        for g in cutlass.range(work.group, unroll=1):
            h = work.kv_head * work.group + g
            queries = self.scheduler.queries(work, h, arguments)
            sources = self.sources(arguments, work, h, block)
            for i in cutlass.range(queries.count, unroll=1):
                tile = query_tile_at(queries, i)
                for group in loads.step:
                    for name in group:
                        state = leading if self.leads(name) else other
                        self.stage(name, sources[name], block, state, tile)
                    if const_expr(any(self.leads(name) for name in group)):
                        leading.advance()
                    if const_expr(not all(self.leads(name) for name in group)):
                        other.advance()
                if const_expr(len(loads.late) > 0):  # noqa: SIM102
                    if waiting:
                        self.keys(loads.late, work, block)
                        waiting = Boolean(False)

    def leads(self, name: str) -> bool:
        """True if an operand comes into the stages that a step begins with."""
        return (name in OF_QUERIES) == (self.loads.step[0][0] in OF_QUERIES)

    def states(self) -> States:
        """States of these stages, and of the others."""
        stages = self.config.q_stages, self.config.do_stages
        leading, other = stages if self.leads("q") else reversed(stages)
        kind = pipeline.PipelineUserType.Producer
        return pipeline.make_pipeline_state(kind, leading), pipeline.make_pipeline_state(kind, other)

    def keys(self, names: tuple[str, ...], work: KeyWork, block: Block) -> None:
        """Loads this CTA's part of a tile of keys or values."""
        for name in names:
            to_shared, from_global = self.views(name, work.keys(work.kv_head), block)
            full = getattr(block.pipes, f"{name}_full")
            self.once(
                getattr(block.transfers, name), (to_shared[None, 0], from_global[None, work.tile]), full
            )

    def once(self, transfer: Any, views: Views, full: cute.Pointer) -> None:
        load_once(transfer, views, full)

    def sources(self, arguments: BackwardArguments, work: KeyWork, h: Int32, block: Block) -> dict[str, Any]:
        """Views of a head's tiles, and its rows' numbers, by name."""
        names = {name for group in self.loads.step for name in group}
        tiles = {
            name: self.views(name, work.queries(h), block)
            for name in block.transfers._fields
            if name in names
        }
        return tiles | {name: rows_of(getattr(arguments, name), work, h) for name in NUMBERS}

    def views(self, name: str, tokens: Tokens, block: Block) -> Views:
        """This CTA's part of an operand's tiles, which follow each other along the tokens; of a transpose,
        whose name ends with _t, along its columns."""
        transfer, (product, tile, first) = getattr(block.transfers, name), block.products.operands[name]
        axis = int(name.endswith("_t"))
        whole = head_of(transfer.tma_tensor, self.config.ragged, tokens, axis)
        part = product.get_slice(self.cluster.rank())
        if first:
            tiles = part.partition_A(cute.local_tile(whole, tile[::2], (None, 0)))
        else:
            tiles = part.partition_B(cute.local_tile(whole, tile[1:], (0, None) if axis else (None, 0)))
        return partition(transfer, getattr(block.shared, name), tiles, modes=3)

    def stage(self, name: str, source: Any, block: Block, state: pipeline.PipelineState, tile: Int32) -> None:
        """Loads a tile, or its rows' numbers, into the next stage."""
        if name in NUMBERS:
            self.numbers(name, source, block, state, tile)
        else:
            load_stage(getattr(block.transfers, name), getattr(block.pipes, name), state, source, tile)

    def numbers(
        self, name: str, source: cute.Tensor, block: Block, state: pipeline.PipelineState, tile: Int32
    ) -> None:
        """Loads a number per row of a tile."""
        full, empty = (getattr(block.pipes, f"{name}_{end}") + state.index for end in ("full", "empty"))
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.arch.mbarrier_wait(empty, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * self.config.tile_m)
            one = cute.local_tile(source, (self.config.tile_m,), (tile,))
            cute.copy(atom, one, getattr(block.shared, name)[None, state.index], mbar_ptr=full)
