"""Ragged batches as dense ones: mods that look the sequence and the place in it up in tables of tokens.

A packed batch becomes one sequence whose mask also asks whether query and key are of the same sequence; that
of a padded one asks whether they lie before its end. The tables are made on the device of the lengths, whose
contents the host does not read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts, analyze
from fa4flex.codegen.expr import Expr, apply, load, substitute, sym
from fa4flex.runtime.call import SequenceLengths

B, Q, KV, Q_LEN, KV_LEN = (sym(name) for name in ("b", "q", "kv", "q_len", "kv_len"))


class Tokens(NamedTuple):
    """int32 tables of a packed batch: the sequence of each query and of each key, -1 and -2 for those of
    none; their places in it; the sequence of each query clamped to those that there are, and its lengths."""

    sequence_q: Tensor
    sequence_k: Tensor
    place_q: Tensor
    place_k: Tensor
    batch: Tensor
    q_len: Tensor
    kv_len: Tensor


class Ends(NamedTuple):
    """int32 [B] lengths of a padded batch."""

    q_len: Tensor
    kv_len: Tensor


# --- expressions ------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def packed_facts(facts: Facts, first: int) -> Facts:
    """The same over the tokens of a packed batch; `Tokens` are the captured tensors from slot `first` on."""
    names = enumerate(Tokens._fields, first)
    slots = {name: load(slot, (KV if name.endswith("_k") else Q,), "int") for slot, name in names}
    within = ("batch", B), ("place_q", Q), ("place_k", KV), ("q_len", Q_LEN), ("kv_len", KV_LEN)
    replacement = {symbol: slots[name] for name, symbol in within}
    same = apply("eq", slots["sequence_q"], slots["sequence_k"])
    return _replaced(facts, replacement, same)


@lru_cache(maxsize=256)
def padded_facts(facts: Facts, first: int) -> Facts:
    """The same over a padded batch; `Ends` are the captured tensors from slot `first` on."""
    q_len, kv_len = (load(first + i, (B,), "int") for i in range(2))
    inside = apply("and_", apply("lt", Q, q_len), apply("lt", KV, kv_len))
    return _replaced(facts, {Q_LEN: q_len, KV_LEN: kv_len}, inside)


def _replaced(facts: Facts, replacement: dict[Expr, Expr], also: Expr) -> Facts:
    score, mask = (substitute(root, replacement) for root in (facts.score, facts.mask))
    return analyze(score, apply("and_", also, mask))


# --- tables -----------------------------------------------------------------------------------------------


def tokens_of(lengths: SequenceLengths, q_tokens: int, k_tokens: int) -> Tokens:
    """cu_seqlens [N + 1] of queries and keys, and lengths used of each [N] or None, as tables of tokens."""
    cu_q, cu_k, used_q, used_k = lengths
    assert cu_q is not None and cu_k is not None
    sequence_q, batch, place_q, q_len = _side(cu_q, used_q, q_tokens)
    sequence_k, _, place_k, kv_len = _side(cu_k, used_k, k_tokens)
    lengths_of_query = q_len[batch.long()], kv_len[batch.long()]
    absent = torch.where(sequence_k < 0, -2, sequence_k)
    return Tokens(sequence_q, absent, place_q, place_k, batch, *lengths_of_query)


def _side(cu: Tensor, used: Tensor | None, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence of each token (-1: of none), the same clamped, place in it, and lengths [N]; int32."""
    starts = cu.long()
    token = torch.arange(tokens, device=cu.device)
    batch = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=len(starts) - 2)
    lengths = starts.diff() if used is None else used.long()
    place = token - starts[batch]
    inside = (place >= 0) & (place < lengths[batch]) & (token < starts[batch + 1])
    sequence = torch.where(inside, batch, -1)
    # Tokens of no sequence are masked; their places index tables nevertheless.
    place = torch.where(inside, place, 0)
    results = sequence, batch, place, lengths
    return tuple(x.to(torch.int32) for x in results)  # type: ignore[return-value]


def ends_of(lengths: SequenceLengths, batch: int, q_len: int, kv_len: int) -> Ends:
    """Lengths used of each sequence of a padded batch; all of them where not given."""
    _, _, used_q, used_k = lengths
    value = used_q if used_q is not None else used_k
    assert value is not None

    def whole(length: int) -> Tensor:
        return torch.full((batch,), length, dtype=torch.int32, device=value.device)

    return Ends(
        whole(q_len) if used_q is None else used_q.to(torch.int32).clamp(max=q_len),
        whole(kv_len) if used_k is None else used_k.to(torch.int32).clamp(max=kv_len),
    )
