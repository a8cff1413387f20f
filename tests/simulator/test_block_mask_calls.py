"""Calls of flex_attention with one BlockMask again and again, on simulated GPUs: they follow its lists,
whoever wrote these, and what is kept for them serves no call that it does not fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
import ptxsim
from fa4flex.errors import InputError
from fa4flex.mask_calls import NAME, MaskCalls

N, SIZE = 128, 64
QKV = tuple[Tensor, Tensor, Tensor]


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= 0


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def qkv(grad: bool = False) -> QKV:
    q, k, v = (torch.randn(1, 1, N, 64).bfloat16().requires_grad_(grad) for _ in range(3))
    return q, k, v


def masked(second: int = 2, mask_mod: Callable[..., Any] = everything) -> BlockMask:
    """The first block of keys for the first of queries, and so many for the second."""
    counts = torch.tensor([[[1, second]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 7], [1, 0]]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=SIZE, mask_mod=mask_mod, seq_lengths=(N, N))


def exact(given: QKV, blocks: list[list[bool]], scale: float = 0.125) -> Tensor:
    q, k, v = (x.double() for x in given)
    allowed = torch.tensor(blocks).repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)
    return (q @ k.mT * scale).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


BOTH, SECOND = [[True, False], [True, True]], [[True, False], [False, True]]


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, atol=0.02, rtol=0.02)


def kept(mask: BlockMask) -> MaskCalls:
    result: MaskCalls = vars(mask)[NAME]
    return result


def test_each_call_follows_the_lists_in_one_launch() -> None:
    given, mask = qkv(), masked()
    with ptxsim.device("sm_90a") as gpu:
        close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, BOTH))
        (blocks,) = kept(mask).blocks.values()
        mask.kv_num_blocks.data[0, 0, 1] = 1  # torch counts no change
        close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, SECOND))
    launched = ["block_lists" in result.kernel for result in gpu.results]
    assert sum(launched) == 2 and kept(mask).blocks == {(0, 0): blocks}, "memory is used again"
    assert not gpu.findings, gpu.report()


def test_gradients_are_those_of_the_lists_at_the_call() -> None:
    given, mask = qkv(grad=True), masked()
    with ptxsim.device("sm_90a"):
        out = fa4flex.flex_attention(*given, block_mask=mask)
        mask.kv_num_blocks.data[0, 0, 1] = 1
        later = fa4flex.flex_attention(*given, block_mask=mask)
        (dq,) = torch.autograd.grad(out.sum(), given[0])
    assert not kept(mask).blocks
    close(later, exact(given, SECOND))
    (expected,) = torch.autograd.grad(exact(given, BOTH).sum(), given[0])
    close(dq, expected.double())


def test_options_of_calls_are_their_own() -> None:
    given, mask = qkv(), masked()

    def zero(score: Tensor, *place: Any) -> Tensor:
        return score * 0.0

    with ptxsim.device("sm_90a"):
        for scale in (None, 0.5, 0.5, 0.25, None):
            out = fa4flex.flex_attention(*given, block_mask=mask, scale=scale)
            close(out, exact(given, BOTH, scale or 0.125))
        close(fa4flex.flex_attention(*given, zero, block_mask=mask), exact(given, BOTH, 0.0))
        close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, BOTH))


def test_a_changed_block_mask_is_another() -> None:
    given, mask = qkv(), masked()
    with ptxsim.device("sm_90a"):
        fa4flex.flex_attention(*given, block_mask=mask)
        mask.kv_num_blocks = torch.tensor([[[1, 1]]], dtype=torch.int32)
        close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, SECOND))
        mask.mask_mod = causal
        out = fa4flex.flex_attention(*given, block_mask=mask)
        same = fa4flex.flex_attention(*given, block_mask=masked(1, causal))
        assert torch.equal(out, same) and not torch.allclose(out.double(), exact(given, SECOND), atol=0.05)
        mask.kv_num_blocks = torch.tensor([[[1, 1]]], dtype=torch.int16)
        with pytest.raises(InputError, match=r"counts of torch.int16"):
            fa4flex.flex_attention(*given, block_mask=mask)


def test_copies_of_a_block_mask_keep_nothing() -> None:
    given, mask = qkv(), masked()
    with ptxsim.device("sm_90a"):
        fa4flex.flex_attention(*given, block_mask=mask)
        for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
            assert vars(other)[NAME] is None
            other.kv_num_blocks[0, 0, 1] = 1
            close(fa4flex.flex_attention(*given, block_mask=other), exact(given, SECOND))
        close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, BOTH))


def test_what_intercepts_operators_sees_the_call() -> None:
    given, mask, seen = qkv(), masked(), []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with ptxsim.device("sm_90a"):
        fa4flex.flex_attention(*given, block_mask=mask)
        with Seeing():
            close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, BOTH))
    assert any("fa4flex.block_classes" in name for name in seen), seen


def test_on_a_cpu_nothing_is_kept() -> None:
    given, mask = qkv(), masked()
    with ptxsim.device("sm_90a"):
        fa4flex.flex_attention(*given, block_mask=mask)
    mask.kv_num_blocks[0, 0, 1] = 1
    close(fa4flex.flex_attention(*given, block_mask=mask), exact(given, SECOND))
