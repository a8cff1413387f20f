"""Attention of folded sequences: that of each sequence alone, in every way in which attention is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fa4flex
from fa4flex.reference import attention as reference
from fa4flex.trees import Folded, fold
from fa4flex.variants import alibi, causal, sliding_window, softcap


def rollouts() -> Folded:
    """A prompt with five rollouts, one of which goes on twice; and a sequence of its own."""
    prompt, turn = [1] * 9, [2] * 6
    turns = [[*prompt, *turn, 4], [*prompt, *turn, 5, 5], [6] * 3]
    return fold([[*prompt, n, *([3] * n)] for n in range(5, 9)] + turns)


def alone(folded: Folded, qkv: tuple[Tensor, ...], **composition: Any) -> Tensor:
    """Results of each sequence on its own in dense float64, at the places of its last token's path."""
    rows = zip(*(folded.unfold(x.double(), dim=2) for x in qkv), strict=True)
    return torch.cat([reference(*row, **composition)[0] for row in rows], 2)


COMPOSED: dict[str, Any] = {
    "causal": lambda f: ({"mask": f.mask}, {"mask": causal}),
    "window": lambda f: (
        {"mask": f.mask & f.at_positions(sliding_window(4))},
        {"mask": causal & sliding_window(4)},
    ),
    "alibi and softcap": lambda f: (
        {"score_mod": f.at_positions(alibi) >> softcap(5.0), "mask": f.mask},
        {"score_mod": alibi >> softcap(5.0), "mask": causal},
    ),
    "functions": lambda f: (
        {"score_mod": f.at_positions(_near), "mask": f.mask & f.at_positions(_not_third)},
        {"score_mod": _near, "mask": causal & _not_third},
    ),
}


def _near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * (q_idx - kv_idx)


def _not_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 3 != 1) | (q_idx == kv_idx)


@pytest.mark.parametrize("name", COMPOSED)
def test_results_and_gradients_are_those_of_sequences(name: str) -> None:
    folded = rollouts()
    of_tree, of_each = COMPOSED[name](folded)
    size = len(folded.tokens)
    qkv = tuple([torch.randn(2, h, size, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)])
    out = fa4flex.compile(**of_tree)(*qkv)
    found, wanted = torch.cat(folded.unfold(out, dim=2), 2), alone(folded, qkv, **of_each)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    of_found, of_wanted = (torch.autograd.grad(x, qkv, upstream, retain_graph=True) for x in (found, wanted))
    torch.testing.assert_close(of_found, of_wanted)


def test_trees_of_a_batch_differ() -> None:
    """leave [B, S]: a forest per row; behind its end, rows attend nothing."""
    first, second = rollouts(), fold([[1, 2], [1, 3], [1, 2, 4]])
    size = len(first.tokens)
    leave = torch.stack(
        [torch.nn.functional.pad(x.leave, (0, size - len(x.tokens))) for x in (first, second)]
    )
    qkv = [torch.randn(2, 2, size, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = fa4flex.attention(*qkv, mask=fa4flex.variants.prefix_tree(leave))
    for row, folded in enumerate((first, second)):
        n = len(folded.tokens)
        own = tuple([x[row : row + 1, :, :n] for x in qkv])
        wanted = alone(folded, own, mask=causal)
        torch.testing.assert_close(torch.cat(folded.unfold(out[row : row + 1, :, :n], dim=2), 2), wanted)
    assert not out[1, :, 4:].any()
    gradients = torch.autograd.grad(out.sin().sum(), qkv)
    assert not any(x[1, :, 4:].any() for x in gradients) and all(x.isfinite().all() for x in gradients)


def attend(q: Tensor, k: Tensor, v: Tensor, folded: Folded) -> Any:
    window = folded.at_positions(sliding_window(3))
    return fa4flex.attention(q, k, v, score_mod=folded.at_positions(alibi), mask=folded.mask & window)


@pytest.mark.parametrize("dynamic", [True, None])
def test_other_trees_compile_nothing_anew(dynamic: bool | None) -> None:
    """The first number of tokens is a constant to torch by default, and the second any number."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=dynamic)
    trees: dict[int, Folded] = {}  # two with as many tokens would make these a constant once more
    while len(trees) < 5:
        folded = fold(torch.randint(0, 2, (4, 7 + len(trees))))
        trees.setdefault(len(folded.tokens), folded)
    for folded in trees.values():
        qkv = [torch.randn(1, 2, len(folded.tokens), 8) for _ in range(3)]
        torch.testing.assert_close(compiled(*qkv, folded), attend(*qkv, folded))
    assert counter.frame_count == (1 if dynamic else 2)


def test_new_contents_of_as_many_tokens() -> None:
    """A compiled attention reads what its functions captured at each call."""
    trees = [fold([[1, 2, 3], [1, 4, 5]]), fold([[1, 2, 3, 4], [5]]), fold([[1], [2], [3], [4], [5]])]
    leave = trees[0].leave.clone()
    attn = fa4flex.compile(mask=fa4flex.variants.prefix_tree(leave))
    qkv = tuple([torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3)])
    for folded in trees:
        leave.copy_(folded.leave)
        found = torch.cat(folded.unfold(attn(*qkv), dim=2), 2)
        torch.testing.assert_close(found, alone(folded, qkv, mask=causal))


def test_shown_in_words() -> None:
    folded = fold([[1, 2, 3], [1, 2, 4]])
    assert repr(folded) == "<Folded: 2 sequences, 4 of 6 tokens>"
    assert folded.explain() == (
        "2 sequences of 6 tokens in 1 tree of 4: 1.50x fewer tokens, 1.33x fewer pairs of a query and a key"
    )
    moved = folded.to("cpu")
    assert torch.equal(moved.tokens, folded.tokens) and moved.lengths == folded.lengths
