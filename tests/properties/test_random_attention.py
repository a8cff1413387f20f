"""Attention composed at random: score mod, mask, block map, sinks and output function, each or none of them,
are together what the formula in float64 gives, with all gradients.

FA4FLEX_RANDOM_ATTENTION: how many are drawn.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from helpers import agree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from output_cases import FUNCTIONS, Sizes, leaves
from test_compositions import MASKS
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.primitives.mask import Mask
from fa4flex.primitives.output import as_output
from fa4flex.variants import alibi, softcap

DRAWS = int(os.environ.get("FA4FLEX_RANDOM_ATTENTION", "40"))
BLOCK = 16
BATCH = 2
HEADS = (2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 1, 2), (6, 3, 2)
"""Heads of queries, of keys and of values."""


def bias(table: Tensor) -> Any:
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (q_idx - kv_idx) % table.shape[1]]


def score_of(name: str, learned: list[Tensor], heads: int) -> Any:
    if name == "bias":
        learned.append(leaves(torch.float64)(heads, 5))
        return bias(learned[-1])
    return {"alibi": alibi(), "softcap": softcap(3.0), "both": alibi() >> softcap(5.0)}[name]


def output_of(names: list[str], learned: list[Tensor], sizes: Sizes) -> Any:
    mods = []
    for name in names:
        mod, more = FUNCTIONS[name](sizes, leaves(torch.float64))
        mods.append(as_output(mod))
        learned += more
    return mods[0] if len(mods) == 1 else mods[0] >> mods[1]


def mapped(mask: Mask | None, classes: Tensor) -> Any:
    """The oracle's mask of a block map: full blocks, and what the mask allows in partial ones."""

    def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        block = classes[q_idx // BLOCK, kv_idx // BLOCK]
        lengths = {"q_len": q_len, "kv_len": kv_len}
        inner = True
        if mask is not None:
            inner = mask(b, h, q_idx, kv_idx, **{name: lengths[name] for name in mask.context})
        return (block == 2) | ((block == 1) & inner)

    return allowed


@settings(max_examples=DRAWS, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    mask=st.none() | MASKS,
    score=st.sampled_from(["", "alibi", "softcap", "both", "bias"]),
    outputs=st.lists(st.sampled_from(sorted(FUNCTIONS)), max_size=2),
    heads=st.sampled_from(HEADS),
    extents=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    flags=st.tuples(st.booleans(), st.booleans(), st.sampled_from(["bhsd", "bshd"])),
    seed=st.integers(0, 2**31),
)
def test_compositions(
    mask: Mask | None,
    score: str,
    outputs: list[str],
    heads: tuple[int, int, int],
    extents: tuple[int, int],
    flags: tuple[bool, bool, str],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    (q_len, kv_len), (with_sinks, with_map, layout) = extents, flags
    sizes, leaf, learned = Sizes(BATCH, heads[0], heads[1], q_len, kv_len, 4, 6), leaves(torch.float64), []
    composition: dict[str, Any] = {"mask": mask}
    exact: dict[str, Any] = {"mask": mask}
    if score:
        composition["score_mod"] = exact["score_mod"] = score_of(score, learned, sizes.heads)
    if outputs:
        composition["output_mod"] = exact["output_mod"] = output_of(outputs, learned, sizes)
    if with_sinks:
        composition["sinks"] = exact["sinks"] = leaf(sizes.heads)
        learned.append(exact["sinks"])
    if with_map:
        rows, columns = -(-q_len // BLOCK), -(-kv_len // BLOCK)
        classes = torch.randint(0, 3, (rows, columns), dtype=torch.uint8)
        composition["blocks"] = fa4flex.BlockMap.from_dense(classes, BLOCK, q_len=q_len, kv_len=kv_len)
        exact["mask"] = mapped(mask, classes)
    q = leaf(BATCH, sizes.heads, q_len, 4)
    k, v = leaf(BATCH, heads[1], kv_len, 4), leaf(BATCH, heads[2], kv_len, 6)
    turned = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bshd" else [q, k, v]
    out, lse = fa4flex.compile(**composition, layout=layout)(*turned, return_lse=True)
    found = out.transpose(1, 2) if layout == "bshd" else out, lse
    wanted, sums = reference.attention(q, k, v, **exact)
    nothing = sum(0 * x.sum() for x in learned)  # where no pair is allowed, the formula reads none of these
    agree(found, (wanted + nothing, sums), [q, k, v, *learned])
