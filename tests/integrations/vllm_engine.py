"""vLLM's engine as far as its backend meets it: a scheduler's steps over one cache."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from engines import Definition, History
from torch import Tensor

SCALE = 0.4
NAME = "model.layers.3.self_attn.attn"
BLOCKS, BLOCK_SIZE, MOST_BLOCKS = 40, 8, 6
STEPS = [{0: 11, 1: 3}, {0: 1, 1: 5, 2: 17}, {2: 1, 0: 1, 1: 1}, {1: 2, 0: 1}, {0: 1, 1: 1, 2: 1}]
"""New tokens of sequences, in the order of the batch: chunks, mixed, all decoding, a decoding one behind."""


LAYOUTS = ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]
"""Orders in memory of layers, blocks, heads, places in a block, and keys with values: from vLLM 0.29 on."""

APART = ["B2NHD", "2BNHD", "B2HND", "2BHND"]
"""Shapes of caches of one layer with keys and values apart."""

TOGETHER = "BNHC"
"""Shape with places before heads, and keys and values side by side."""


def new_cache(history: History, layout: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Cache of one of three layers, [blocks, Hkv, block_size, D + Dv], or of one layer in another shape."""
    sizes = {"L": 3, "B": BLOCKS, "H": history.kv_heads, "N": BLOCK_SIZE, "C": 2 * history.width}
    sizes |= {"2": 2, "D": history.width}
    shape = [sizes[axis] for axis in layout]
    unwritten = torch.nan if dtype.is_floating_point else 0x7F  # NaN of e4m3
    buffer = torch.full(shape, unwritten, dtype=dtype)
    if "L" not in layout:
        return buffer
    return buffer.permute([layout.index(axis) for axis in "LBHNC"])[1]


class Engine:
    """Scheduler and cache: a table of blocks in random order, and slots of new tokens. The cache is laid out
    by its name, or as the backend says. `layer` has what the layer has besides its name."""

    def __init__(
        self,
        vllm: ModuleType,
        layout: str | None = LAYOUTS[0],
        history: History | None = None,
        dtype: torch.dtype = torch.float64,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        backend, self.history, self.causal = vllm.Backend, history or History(), True
        h, self.layer = self.history, SimpleNamespace(layer_name=NAME, **(layer or {}))
        shape = backend.get_kv_cache_shape(BLOCKS, BLOCK_SIZE, h.kv_heads, h.width)
        own = torch.full(shape, torch.nan, dtype=torch.float64)
        self.cache = own if layout is None else new_cache(h, layout, dtype)
        self.table = torch.randperm(BLOCKS)[: 3 * MOST_BLOCKS].view(3, MOST_BLOCKS).int()
        self.builder = backend.get_builder_cls()(None, [NAME], None, torch.device("cpu"))
        self.impl = backend.get_impl_cls()(h.heads, h.width, SCALE, h.kv_heads, **options)

    def common(self, counts: dict[int, int], padded: int) -> Any:
        """`padded` requests and tokens follow the real ones."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *counts.values(), *[0] * padded]).cumsum(0).int()
        lengths = [self.history.length(n) for n in counts]
        slots = [
            int(self.table[n, t // BLOCK_SIZE]) * BLOCK_SIZE + t % BLOCK_SIZE
            for n, length in zip(counts, lengths, strict=True)
            for t in range(length - counts[n], length)
        ]
        used = [-(-length // BLOCK_SIZE) for length in lengths]
        table = torch.full((len(counts) + padded, MOST_BLOCKS), 10**6, dtype=torch.int32)
        for row, n in enumerate(counts):
            table[row, : used[row]] = self.table[n, : used[row]]
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*lengths, *[0] * padded]).int(), num_reqs=len(lengths) + padded,
            num_actual_tokens=len(slots) + padded, max_query_len=max(counts.values()),
            max_seq_len=max(lengths), block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padded), causal=self.causal,
        )  # fmt: skip

    def step(self, counts: dict[int, int], padded: int = 0) -> tuple[Tensor, Tensor]:
        """(output of the engine, its queries)"""
        q, k, v = self.history.grow(counts)
        padded_qkv = [torch.cat([x, x.new_full((padded, *x.shape[1:]), 7.0)]) for x in (q, k, v)]
        metadata = self.builder.build(0, self.common(counts, padded))
        layer = self.layer
        self.impl.do_kv_cache_update(layer, *padded_qkv[1:], self.cache, metadata.slot_mapping)
        output = torch.full((len(q) + padded, q.shape[1] * q.shape[2]), torch.nan, dtype=q.dtype)
        assert self.impl.forward(layer, *padded_qkv, self.cache, metadata, output) is output
        return output.view(padded_qkv[0].shape), q


def run(engine: Engine, definition: Definition) -> None:
    for number, counts in enumerate(STEPS):
        found, q = engine.step(counts, padded=number % 2 * 3)
        torch.testing.assert_close(found[: len(q)], engine.history.expected(definition, q, counts))
        assert not found[len(q) :].any()
