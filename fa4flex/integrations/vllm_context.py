"""vLLM's decode context parallelism: the keys of a sequence are spread over ranks, token by token.

Each rank attends with the queries of all ranks to the earlier keys that it holds. vLLM combines these results
by their log-sum-exps and gives each rank those of its own heads; attention among the new tokens is merged
last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.layers import LayerSettings, assigned
from fa4flex.integrations.paged_cache import Caches
from fa4flex.merging import merge
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen

Parts = tuple[Tensor, Tensor]
"""Output [T, H, Dv] and natural log-sum-exp [H, T] of packed queries over some of their keys."""


def local_lengths(lengths: Tensor, ranks: int, rank: int, interleave: int) -> Tensor:
    """Number of the first `lengths` tokens of each sequence that a rank holds: `interleave` tokens next to
    each other are on one rank, and the next as many on the next rank."""
    each = interleave * ranks
    return lengths // each * interleave + (lengths % each - rank * interleave).clamp(0, interleave)


class OverRanks:
    """Attention of a layer whose earlier keys are spread over so many ranks, of which this is one."""

    def __init__(self, settings: LayerSettings, ranks: int, rank: int, config: Any) -> None:
        parallel = getattr(config, "parallel_config", None)
        plain = LayerSettings(settings.scale, softcap=settings.softcap)
        self.ranks, self.rank = ranks, rank
        self.interleave = int(getattr(parallel, "cp_kv_cache_interleave_size", 1))
        self.by_all_to_all = getattr(parallel, "dcp_comm_backend", "") == "a2a"
        self._context, self._new = replace(plain, causal=False).attention({}), plain.attention({})

    def over_context(self, q: Tensor, caches: Caches, metadata: Any) -> Parts:
        """Results over the earlier keys of each sequence that this rank holds, all of which all queries see.
        q [T, heads of all ranks, D]."""
        earlier = metadata.batch.lengths - metadata.starts.diff()
        held = local_lengths(earlier, self.ranks, self.rank, self.interleave)
        paging = Paging(metadata.batch.table, held)
        out, lse = self._context(q, *caches, varlen=Varlen(metadata.starts), paging=paging, return_lse=True)
        return out, lse

    def among_new(self, qkv: tuple[Tensor, Tensor, Tensor], metadata: Any) -> Parts:
        """Results over the new tokens of this step, which every rank has."""
        out, lse = self._new(*qkv, varlen=Varlen(metadata.starts), return_lse=True)
        return out, lse

    def __call__(
        self, qkv: tuple[Tensor, Tensor, Tensor], caches: Caches, metadata: Any, rows: Tensor, name: str
    ) -> None:
        """Write the output of this rank's heads to `rows` [T, Hq, Dv]; rows of padding become zeros. name:
        of the layer. All ranks call it together."""
        if not metadata.causal or assigned(name):
            raise UnsupportedError(
                "decode_context_parallel_size with "
                + ("mods of layers" if metadata.causal else "a batch that is not causal"),
                "causal layers without these",
                "set decode_context_parallel_size to 1",
            )
        group, combine = _collectives(self.by_all_to_all)
        tokens = metadata.batch.tokens
        q, k, v = (x[:tokens] for x in qkv)
        out, lse = self.over_context(group.all_gather(q.contiguous(), dim=1), caches, metadata)
        out, lse = combine(out, lse.transpose(0, 1), group, return_lse=True)
        own = self.among_new((q, k, v), metadata)
        merged, _ = merge([out, own[0]], [lse.transpose(0, 1), own[1]])
        rows[:tokens].copy_(merged)
        rows[tokens:].zero_()


def _collectives(by_all_to_all: bool) -> tuple[Any, Any]:
    """The group of ranks, and what combines their results by natural log-sum-exps."""
    from vllm.distributed.parallel_state import get_dcp_group

    try:
        from vllm.v1.attention.ops import dcp as operators
    except ImportError:  # its place in older releases
        from vllm.v1.attention.ops import common as operators
    name = "dcp_a2a_lse_reduce" if by_all_to_all else "cp_lse_ag_out_rs"
    return get_dcp_group(), getattr(operators, name)
