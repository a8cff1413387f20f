"""Normalisers on simulated GPUs: in kernels where these have such weights, else blockwise on the device;
results and gradients at most twice as far from the oracle as PyTorch at that dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from normalizer_cases import ELEMENTWISE, NORMALIZERS, wild
from output_cases import FUNCTIONS, KINDS, Sizes, in_pytorch, leaves, sizes_of
from test_simulated_outputs import near
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Precision, Schedule
from fa4flex.runtime import blockwise
from fa4flex.variants import causal

CHIPS = ("sm_90a", "sm_100a")
WIDE = Sizes(batch=1, heads=4, kv_heads=2, q_len=130, kv_len=150, dim=64, dim_v=64)
NARROW = Sizes(batch=1, heads=2, kv_heads=1, q_len=70, kv_len=90, dim=64, dim_v=64)
FEW = Sizes(batch=2, heads=4, kv_heads=2, q_len=3, kv_len=200, dim=64, dim_v=64)


class blockwise_calls:
    """Within, a list gets a word for each pass that PyTorch operations compute."""

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.patch = pytest.MonkeyPatch()
        for name in ("forward_on_gpu", "backward_on_gpu"):
            self.patch.setattr(blockwise, name, self._counted(name, getattr(blockwise, name)))
        return self.calls

    def _counted(self, name: str, function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            return function(*arguments)

        return called

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()


def on_a_chip(chip: str, kind: str, name: str, sizes: Sizes, *, by_kernels: bool = True, **more: Any) -> None:
    dtype = more.pop("dtype", torch.bfloat16)
    leaf, sizes = leaves(dtype), sizes_of(kind, sizes)
    make = {**NORMALIZERS, "wild": wild}[name]
    normalizer, _ = make(sizes, leaf)
    composition = {"mask": causal, "output_mod": None, "normalizer": normalizer, **more}
    made = KINDS[kind](sizes, leaf, composition)
    with torch.no_grad(), ptxsim.device(chip, sms=2) as gpu, blockwise_calls() as calls:
        out, _ = made.attend(*made.qkv)
    assert not gpu.findings, gpu.report()
    assert bool(calls) != by_kernels
    near(out, made.oracle(made.qkv, in_pytorch)[0], made.oracle(made.qkv)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ELEMENTWISE, "softmax_plus", "softpick", "wild"])
@pytest.mark.parametrize("chip", CHIPS)
def test_many_rows(chip: str, name: str, seed: int) -> None:
    on_a_chip(chip, "dense", name, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("name", ["biased", "silu", "softpick"])
@pytest.mark.parametrize("chip", CHIPS)
def test_few_rows_and_split_keys(chip: str, name: str, split: int | None, seed: int) -> None:
    """Outputs of splits are added."""
    on_a_chip(chip, "dense", name, FEW, schedule=Schedule(split=split))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "softpick"])
@pytest.mark.parametrize("kind", ["packed", "padded", "paged"])
@pytest.mark.parametrize("chip", CHIPS)
def test_ragged_batches_and_pages(chip: str, kind: str, name: str, seed: int) -> None:
    sizes = Sizes(batch=2, heads=4, kv_heads=2, q_len=11, kv_len=40, dim=64, dim_v=64)
    on_a_chip(chip, kind, name, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["biased", "softpick"])
@pytest.mark.parametrize("kv_heads", [1, 7])
@pytest.mark.parametrize("q_len", [2, 70])
@pytest.mark.parametrize("chip", CHIPS)
def test_groups(chip: str, q_len: int, kv_heads: int, name: str, seed: int) -> None:
    on_a_chip(chip, "dense", name, Sizes(1, 7, kv_heads, q_len, 90, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu", "softpick"])
@pytest.mark.parametrize("q_len", [2, 70])
@pytest.mark.parametrize("chip", CHIPS)
def test_an_output_function_and_queries_without_keys(chip: str, q_len: int, name: str, seed: int) -> None:
    """Weights, and then a function of the output, in one kernel; half of the queries see no key."""

    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any) -> Any:
        return (2 * q_idx >= q_len) & (kv_idx < 80)

    sizes = Sizes(1, 2, 1, q_len, 90, 64, 64)
    mod, _ = FUNCTIONS["rows"](sizes, leaves(torch.bfloat16))
    on_a_chip(chip, "dense", name, sizes, mask=late, output_mod=mod)


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [2, 70])
@pytest.mark.parametrize("chip", CHIPS)
def test_weights_that_half_precision_cannot_hold(chip: str, q_len: int, seed: int) -> None:
    """They saturate, where infinity times 0 would be no number."""
    q, k = (torch.full((1, 1, n, 64), 60.0, dtype=torch.float16) for n in (q_len, 90))
    v = torch.zeros(1, 1, 90, 64, dtype=torch.float16)
    v[:, :, 0] = 1.0
    attn = fa4flex.compile(
        normalizer=fa4flex.Normalizer.elementwise(lambda s, b, h, q_idx, kv_idx: s * s),
        precision=Precision(output=torch.float32),
    )
    with torch.no_grad(), ptxsim.device(chip, sms=2):
        out = attn(q, k, v)
    assert torch.equal(out, torch.full_like(out, 65504.0))


def gradients(made: Any, learned: list[Tensor], weight: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * weight.to(out.dtype)).sum(), [*made.qkv, *learned])


def right_gradients(
    chip: str, kind: str, name: str, sizes: Sizes, *, by_kernels: bool = True, **more: Any
) -> None:
    leaf, sizes = leaves(torch.bfloat16), sizes_of(kind, sizes)
    normalizer, learned = {**NORMALIZERS, "wild": wild}[name](sizes, leaf)
    learned, by = [*learned, *more.pop("learned", [])], more.pop("by", in_pytorch)
    composition = {"mask": causal, "output_mod": None, "normalizer": normalizer, **more}
    made = KINDS[kind](sizes, leaf, composition)
    exact, plain = made.oracle(made.qkv)[0], made.oracle(made.qkv, by)[0]
    weight = torch.randn(exact.shape)
    with ptxsim.device(chip, sms=2) as gpu, blockwise_calls() as calls:
        out, _ = made.attend(*made.qkv)
        found = gradients(made, learned, weight, out)
    assert not gpu.findings, gpu.report()
    assert bool(calls) != by_kernels, calls
    near(out, plain, exact)
    every = found, gradients(made, learned, weight, plain), gradients(made, learned, weight, exact)
    for mine, theirs, true in zip(*every, strict=True):
        near(mine.reshape(-1, 1), theirs.reshape(-1, 1), true.reshape(-1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ELEMENTWISE, "softmax_plus", "wild"])
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients(chip: str, name: str, seed: int) -> None:
    right_gradients(chip, "dense", name, NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients_of_wider_heads(chip: str, dims: tuple[int, int], seed: int) -> None:
    """Kernels that share out products otherwise."""
    right_gradients(chip, "dense", "silu", Sizes(1, 1, 1, 40, 70, *dims))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["sigmoid", "silu", "relu_squared"])
def test_gradients_of_several_tiles_of_keys(name: str, dim: int, seed: int) -> None:
    """Hopper's blocks are persistent, and have long steps, as those of a softmax have."""
    right_gradients("sm_90a", "dense", name, Sizes(1, 2, 1, 170, 270, dim, dim))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients_of_ragged_batches(chip: str, kind: str, seed: int) -> None:
    sizes = Sizes(batch=2, heads=4, kv_heads=2, q_len=11, kv_len=40, dim=64, dim_v=64)
    right_gradients(chip, kind, "sigmoid", sizes)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients_with_sums_in_order(chip: str, seed: int) -> None:
    right_gradients(chip, "dense", "silu", NARROW, schedule=Schedule(deterministic=True))
