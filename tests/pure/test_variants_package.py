"""The package of variants: names, representations, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fa4flex import variants as v
from fa4flex.errors import InputError
from fa4flex.primitives.base import Family
from fa4flex.variants._cases import Sizes, allowed, check, masked, modified

ids = torch.tensor([0, 0, 1])
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: v.sliding_window(0),
        r"sliding_window\(window=0\)\n  expected: an int >= 1\n  to fix: .*Python int",
    ),
    (lambda: v.sliding_window(2.0), r"sliding_window\(window=2.0\)"),
    (lambda: v.sliding_window(True), r"sliding_window\(window=True\)"),
    (lambda: v.sliding_window("3"), r"sliding_window\(window='3'\)"),
    (lambda: v.symmetric_window(-1), r"symmetric_window\(window=-1\)"),
    (lambda: v.prefix_lm(-1), r"prefix_lm\(prefix=-1\)\n  expected: an int >= 0"),
    (lambda: v.prefix_lm(torch.ones(2, 2).long()), r"prefix_lm\(prefix=<\[2, 2\]>\)\n  expected: \[B\]"),
    (
        lambda: v.prefix_lm(torch.ones(2)),
        r"prefix_lm\(prefix=<torch.float32>\)\n  expected: an integer tensor",
    ),
    (lambda: v.document(), r"document\(\) with nothing\n  expected: one of ids"),
    (lambda: v.document(ids, offsets=ids), "document.. with ids and offsets"),
    (lambda: v.document(q_ids=ids), "document.. with q_ids\n"),
    (lambda: v.document(q_ids=ids, kv_ids=ids[None]), "kv_ids=<.1, 3.>.*\n  expected: of the rank of q_ids"),
    (lambda: v.document(ids.float()), "ids=<torch.float32>"),
    (lambda: v.document([0, 1]), "ids=<list>.*\n  expected: an integer tensor .S. or .B, S."),
    (
        lambda: v.document(offsets=torch.tensor([1, 3])),
        r"offsets=\[1, 3\].*\n  expected: N \+ 1 entries that start at 0",
    ),
    (lambda: v.document(cu_seqlens=torch.tensor([0, 3, 2])), r"cu_seqlens=\[0, 3, 2\]"),
    (lambda: v.dilated_window(4, 0), r"dilated_window\(dilation=0\)"),
    (lambda: v.global_window(2, -1), r"global_window\(tokens=-1\)"),
    (lambda: v.global_window(2, ids), r"global_window\(tokens=<torch.int64>\)\n  expected: a bool tensor"),
    (lambda: v.bigbird(64, window=4), r"bigbird\(window=4\)\n  expected: an odd number of blocks"),
    (lambda: v.bigbird(64, random_blocks=-1), r"bigbird\(random_blocks=-1\)"),
    (lambda: v.streaming_llm(-1), r"streaming_llm\(sinks=-1\)"),
    (lambda: v.streaming_llm(1, 0), r"streaming_llm\(window=0\)"),
    (lambda: v.chunked_local(0), r"chunked_local\(chunk=0\)"),
    (lambda: v.checkerboard(0), r"checkerboard\(block=0\)"),
    (lambda: v.natten(12, 4), r"natten\(kernel=4\)\n  expected: an odd kernel\n  to fix:   use 5"),
    (lambda: v.natten(4, 5), "kernel 5 . dilation 1 on an axis of 4"),
    (lambda: v.natten((4, 4), (3, 3, 3)), r"natten\(kernel=\(3, 3, 3\)\)"),
    (lambda: v.natten((4,) * 4, 3), "1 to 3 entries"),
    (lambda: v.natten((4, 4), 3, 1, (True,)), r"natten\(causal=\(True,\)\)"),
    (lambda: v.sliding_tile((4, 5), (2, 2), (2, 2)), "canvas 5, kernel 2, tile 2"),
    (
        lambda: v.sliding_tile((4, 4), (6, 2), (2, 2)),
        "canvas 4, kernel 6, tile 2.*\n  expected: .*kernel <= canvas",
    ),
    (lambda: v.sliding_tile((4,), (2,), (2,)), "three tuples of 2 or of 3"),
    (lambda: v.block_diffusion(0, 2), r"block_diffusion\(seq_len=0\)"),
    (lambda: v.shared_prefix(torch.tensor([0, 2, 4]), torch.tensor([1, 0])), "is its own prefix"),
    (lambda: v.shared_prefix(torch.tensor([0, 2, 4]), torch.tensor([0, 5])), "for 2 documents"),
    (lambda: v.shared_prefix(torch.tensor([0, 2, 4]), torch.tensor([0])), "for 2 documents"),
    (lambda: v.tree(), "tree.. with parents and ancestors, or neither"),
    (lambda: v.tree([-1, 2, 0]), "node 1 has parent 2\n  expected: a smaller node number"),
    (lambda: v.tree(ancestors=torch.ones(2, 3).bool()), "square matrix"),
    (lambda: v.tree([-1], -2), r"tree\(prefix_len=-2\)"),
    (lambda: v.vision_cross(torch.ones(2, 3).long(), 2), r"\[images, 2\]"),
    (lambda: v.vision_cross(torch.ones(2, 2).long(), 0), "tokens_per_image=0"),
    (lambda: v.softcap(float("nan")), r"softcap\(cap=nan\)\n  expected: a finite number above 0"),
    (lambda: v.softcap(0), r"softcap\(cap=0\)"),
    (lambda: v.softcap(float("inf")), r"softcap\(cap=inf\)"),
    (lambda: v.relative_position(math.inf), r"relative_position\(slope=inf\)"),
    (lambda: v.alibi(torch.ones(2, 2, 2)), r"alibi\(slopes=<\[2, 2, 2\]>\)\n  expected: \[H\] or \[B, H\]"),
    (lambda: v.alibi(ids), "slopes=<torch.int64>.*\n  expected: a floating tensor"),
    (lambda: v.t5_bias(torch.ones(8)), r"t5_bias\(bias=<\[8\]>\)"),
    (lambda: v.t5_bias(torch.ones(3, 2), True), "3 buckets"),
    (lambda: v.t5_bias(torch.ones(32, 2), max_distance=10), r"max_distance=10\)\n  expected: an int >= 17"),
    (lambda: v.t5_bias(torch.ones(32, 2), axes="hb"), "axes='hb'"),
    (lambda: v.learned_bias(torch.ones(3, 4)), "odd number of distances"),
    (lambda: v.learned_bias(torch.ones(3)), r"learned_bias\(bias=<\[3\]>\)"),
    (
        lambda: v.graphormer(torch.ones(2, 3), torch.full((1, 4, 4), 3)),
        "distances from 3 to 3 with a table of 3",
    ),
    (lambda: v.graphormer(torch.ones(2, 3), torch.full((4, 4), 1)), r"distances=<\[4, 4\]>"),
    (lambda: v.sandwich(8, 3), r"sandwich\(d_bar=3\)"),
    (lambda: v.gpt_oss_sinks(0), r"gpt_oss_sinks\(logits=0\)"),
    (lambda: v.gpt_oss_sinks(torch.ones(2, 2)), "sinks of shape"),
    (lambda: v.mla(rope=0), r"mla\(rope=0\)"),
    (lambda: v.mla(mscale=-1.0), r"mla\(mscale=-1.0\)"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, text = ERRORS[number]
    with pytest.raises(InputError, match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)


# --- the package ----------------------------------------------------------------------------------------


def test_bare_families_stand_for_their_defaults() -> None:
    for name in (
        "causal",
        "sliding_window",
        "symmetric_window",
        "dilated_window",
        "global_window",
        "streaming_llm",
    ):
        family = getattr(v, name)
        assert isinstance(family, Family) and repr(family()) == f"{name}()"
    assert repr(v.causal & v.sliding_window(8)) == "(causal() & sliding_window(8))"
    assert repr(v.alibi >> v.softcap(30.0)) == "(alibi() >> softcap(30.0))"


def test_repr_evaluates_back() -> None:
    names = {name: getattr(v, name) for name in v.__all__}
    for mask in (
        v.sliding_window(5) & v.natten((3, 3), 3) | ~v.chunked_local(chunk=4),
        v.streaming_llm(1, 3),
    ):
        again = eval(repr(mask), dict(names))
        assert repr(again) == repr(mask)
        assert torch.equal(allowed(again, 9, 9), allowed(mask, 9, 9))


def test_a_wrong_definition_is_noticed() -> None:
    s = Sizes(q_len=3, kv_len=3)
    with pytest.raises(AssertionError, match=r"causal\(\) at \[0, 0, 1\]: False, by definition True"):
        check(s, masked(s, v.causal, lambda q, kv: True))
    with pytest.raises(AssertionError, match="softcap"):
        check(s, modified(s, lambda: v.softcap(1.0), lambda score, b, h, q, kv: score))
