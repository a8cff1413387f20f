"""Output functions in kernels on simulated GPUs: applied once, before the output is rounded, at most twice as
far from the oracle as PyTorch at that dtype; with gradients by a launch of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from output_cases import FUNCTIONS, KINDS, Sizes, dense, in_pytorch, leaves, sizes_of
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Precision, Schedule
from fa4flex.runtime import output_values
from fa4flex.variants import causal, gated, head_scale

CHIPS = ("sm_90a", "sm_100a")
WIDE = Sizes(batch=1, heads=4, kv_heads=2, q_len=130, kv_len=150, dim=64, dim_v=64)
FEW = Sizes(batch=2, heads=4, kv_heads=2, q_len=3, kv_len=200, dim=64, dim_v=64)


def near(found: Tensor, plain: Tensor, true: Tensor) -> None:
    """Worst element and worst row: at most twice those of the same maths in PyTorch.

    Gradients of a few numbers may be off by one unit in the last place more, where the truth is rounded, too:
    PyTorch's are often the very same numbers.
    """
    mine, theirs = ((x.double() - true.double()).abs() for x in (found, plain))
    assert not found.isnan().any()
    floor = true.abs().max().double() * (torch.finfo(true.dtype).eps if true.numel() <= 64 else 1e-6)
    assert mine.max() <= 2 * theirs.max() + floor, f"{mine.max()} where PyTorch has {theirs.max()}"
    rows = [x.square().sum(-1).sqrt().max() for x in (mine, theirs)]
    assert rows[0] <= 2 * rows[1] + floor, f"a row is off by {rows[0]} where PyTorch's are by {rows[1]}"


def in_kernels(
    chip: str, kind: str, function: str, sizes: Sizes, *, launches_of_its_own: bool = False, **more: Any
) -> None:
    leaf, sizes = leaves(torch.bfloat16), sizes_of(kind, sizes)
    mod, _ = FUNCTIONS[function](sizes, leaf)
    made = KINDS[kind](sizes, leaf, {"mask": causal, "output_mod": mod, **more})
    with torch.no_grad(), ptxsim.device(chip, sms=2) as gpu, counted() as applications:
        out, lse = made.attend(*made.qkv)
    assert not gpu.findings, gpu.report()
    assert applications == [1] * launches_of_its_own
    exact, plain = made.oracle(made.qkv), made.oracle(made.qkv, in_pytorch)
    near(out, plain[0], exact[0])
    torch.testing.assert_close(lse.double(), exact[1], atol=1e-4, rtol=1e-4)


class counted:
    """Within, a list gets a 1 for each output function that PyTorch operations apply."""

    def __enter__(self) -> list[int]:
        self.calls: list[int] = []
        self.before = output_values.forward

        def forward(*arguments: Any) -> Tensor:
            self.calls.append(1)
            return self.before(*arguments)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("fa4flex.runtime.output.forward", forward)
        return self.calls

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("function", ["full", "chained"])
@pytest.mark.parametrize("chip", CHIPS)
def test_many_rows(chip: str, function: str, seed: int) -> None:
    in_kernels(chip, "dense", function, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("chip", CHIPS)
def test_few_rows_and_split_keys(chip: str, split: int | None, seed: int) -> None:
    """The launch that merges splits of the keys applies it, once."""
    in_kernels(chip, "dense", "scattered", FEW, schedule=Schedule(split=split))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded", "paged"])
@pytest.mark.parametrize("chip", CHIPS)
def test_ragged_batches_and_pages(chip: str, kind: str, seed: int) -> None:
    sizes = Sizes(batch=2, heads=4, kv_heads=2, q_len=11, kv_len=40, dim=64, dim_v=64)
    in_kernels(chip, kind, "full", sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 7])
@pytest.mark.parametrize("q_len", [2, 70])
@pytest.mark.parametrize("chip", CHIPS)
def test_groups(chip: str, q_len: int, kv_heads: int, seed: int) -> None:
    in_kernels(chip, "dense", "full", Sizes(1, 7, kv_heads, q_len, 90, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_narrow_values(chip: str, seed: int) -> None:
    """Channels end within a tile's: there is no gate for those past the last."""
    in_kernels(chip, "dense", "full", Sizes(1, 2, 1, 70, 90, 64, 40))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_before_it_is_rounded(chip: str, seed: int) -> None:
    """An output that is not rounded shows that the function's argument was not, either."""
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (70, 90, 90))
    scale = torch.tensor([1024.0, 0.5])
    wide = Precision(output=torch.float32)
    with torch.no_grad(), ptxsim.device(chip, sms=2):
        plain = fa4flex.compile(mask=causal, precision=wide)(q, k, v)
        out = fa4flex.compile(mask=causal, precision=wide, output_mod=head_scale(scale))(q, k, v)
    assert torch.equal(out, plain * scale.view(1, 2, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_gradients(chip: str, seed: int) -> None:
    leaf, sizes = leaves(torch.bfloat16), WIDE
    mod, learned = FUNCTIONS["chained"](sizes, leaf)
    made = dense(sizes, leaf, {"mask": causal, "output_mod": mod})
    weight, wanted = torch.randn(1, sizes.heads, sizes.q_len, 64), [*made.qkv, *learned]

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * weight.to(out.dtype)).sum(), wanted)

    with ptxsim.device(chip, sms=2) as gpu:
        out, _ = made.attend(*made.qkv)
        found = gradients(out)
    assert not gpu.findings, gpu.report()
    exact, plain = made.oracle(made.qkv)[0], made.oracle(made.qkv, in_pytorch)[0]
    near(out, plain, exact)
    for mine, theirs, true in zip(found, gradients(plain), gradients(exact), strict=True):
        near(mine.reshape(-1, 1), theirs.reshape(-1, 1), true.reshape(-1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_contents_of_a_gate_change_between_launches(chip: str, seed: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (3, 90, 90))
    gate = torch.randn(1, 2, 3, 64)
    attn = fa4flex.compile(mask=causal, output_mod=gated(gate), precision=Precision(output=torch.float32))
    with torch.no_grad(), ptxsim.device(chip, sms=2):
        plain = fa4flex.compile(mask=causal, precision=Precision(output=torch.float32))(q, k, v)
        for _ in range(2):
            gate.normal_()
            torch.testing.assert_close(attn(q, k, v), plain * torch.sigmoid(gate), atol=1e-6, rtol=1e-5)
