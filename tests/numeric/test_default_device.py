"""A default device is the user's: `torch.set_default_device` changes nothing about a call. The meta device
stands for a GPU here: whatever the library makes without a device has no contents then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import Sizes
from helpers import called
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from variant_table import TABLE

import fa4flex
import ptxsim
from fa4flex.default_device import on_the_host
from fa4flex.parallel import plan
from fa4flex.primitives.varlen import Varlen
from fa4flex.variants import alibi, causal, document, sliding_window

SMALL = Sizes(q_len=40, kv_len=56, dim=16, dim_v=16)
IDS = torch.arange(96, dtype=torch.int32).div(40, rounding_mode="floor")
SLOPES = torch.tensor([0.5, 0.25])
STARTS = torch.tensor([0, 30, 96], dtype=torch.int32)
COMPOSED: dict[str, dict[str, Any]] = {
    "alibi, causal": {"score_mod": alibi(SLOPES), "mask": causal},
    "documents": {"mask": causal & document(IDS)},
}


def of_call(attn: Any, given: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and gradients."""
    inputs = [x.detach().requires_grad_() for x in given]
    out, lse = called(attn, *inputs, **options)
    return [out, lse, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def same(composed: dict[str, Any], given: list[Tensor], **options: Any) -> None:
    """Asserts the same bits with a default device as without, on an Attention of its own each time."""
    with torch.device("meta"):
        found = of_call(fa4flex.compile(**composed), given, **options)
    for x, y in zip(found, of_call(fa4flex.compile(**composed), given, **options), strict=True):
        assert x.device == y.device and torch.equal(x, y)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


class Counted(TorchFunctionMode):
    """Counts calls of torch's functions."""

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_only_the_default_device_is_left_out() -> None:
    """Other modes see what they saw, and all are back afterwards, also behind an error."""
    there = torch.empty(2, device="meta")

    def devices(fails: bool) -> list[str]:
        found = [torch.zeros(2).device.type, torch.as_tensor(there).device.type]
        return [found[2]] if fails else found

    with torch.device("meta"), Counted() as counted, torch.device("meta"):
        before = _get_current_function_mode_stack()
        assert on_the_host(devices)(False) == ["cpu", "meta"]
        with pytest.raises(IndexError):
            on_the_host(devices)(True)
        assert _get_current_function_mode_stack() == before and torch.zeros(2).device.type == "meta"
        assert counted.calls >= 5


@pytest.mark.parametrize("name", TABLE)
def test_every_variant_on_a_cpu(name: str) -> None:
    for draw in TABLE[name]:
        case = draw(SMALL)
        learned = [x.detach() for x in case.learned]
        same(case.compose(*learned), [x.detach() for x in case.sizes.qkv()])


@pytest.mark.parametrize("name", COMPOSED)
def test_by_torchs_attention(name: str) -> None:
    same({**COMPOSED[name], "backend": "flex"}, drawn(1, 2, 96, 16))


def test_packed_sequences_on_a_cpu() -> None:
    same({"mask": causal}, drawn(96, 2, 16), varlen=Varlen(STARTS, STARTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_by_kernels(name: str) -> None:
    with ptxsim.device("sm_90a"):
        same(COMPOSED[name], drawn(1, 2, 96, 64, dtype=torch.bfloat16))


@pytest.mark.slow
def test_packed_sequences_by_kernels() -> None:
    """The host makes tables of one of the masks, from the lengths."""
    with ptxsim.device("sm_90a"):
        for mask in (causal, lambda b, h, q, k: (q >= k) & (q % 64 < 40)):
            same({"mask": mask}, drawn(96, 2, 64, dtype=torch.bfloat16), varlen=Varlen(STARTS, STARTS))


def test_in_compiled_code() -> None:
    attn = fa4flex.compile(**COMPOSED["alibi, causal"])
    step = torch.compile(lambda q, k, v: attn(q, k, v), backend="aot_eager", fullgraph=True)
    q, k, v = (x.requires_grad_() for x in drawn(1, 2, 96, 16))
    with torch.device("meta"):
        out = step(q, k, v)
        (dq,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(out, attn(q, k, v))
    torch.testing.assert_close(dq, torch.autograd.grad(attn(q, k, v).sum(), q)[0])


def test_what_is_shown() -> None:
    for composed in COMPOSED.values():
        with torch.device("meta"):
            attn = fa4flex.compile(**composed)
            shown = attn.explain(96), attn.source(), str(attn.mask)
        attn = fa4flex.compile(**composed)
        assert shown == (attn.explain(96), attn.source(), str(attn.mask))


def test_plans_of_context_parallelism() -> None:
    attn = fa4flex.compile(mask=sliding_window(256))
    with torch.device("meta"):
        found = plan(attn, 4096, 4)
    assert found.digest == plan(attn, 4096, 4).digest
