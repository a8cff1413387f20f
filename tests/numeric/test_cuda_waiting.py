"""No call waits for the host: every variant and mod of attention-gym, forward and backward, on a GPU where
torch's synchronisations raise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import cuda_gym
import pytest
import torch
from cuda_cases import DEVICE, VARIANTS, Composition, Draw, Sizes, compiled
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("on_the_device"),
    pytest.mark.skipif(
        DEVICE is None or DEVICE.type != "cuda", reason="needs a CUDA device of capability 9.0"
    ),
]
ALL = [pytest.param(d, id=f"{name} {i}") for name, draws in VARIANTS.items() for i, d in enumerate(draws)]


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(sizes: Sizes, composition: Composition, tables: Sequence[Tensor] = ()) -> None:
    """The first call of a kind may wait; later ones, with and without gradients, may not."""
    attn = compiled(**composition)
    dout = torch.randn(*sizes.qkv()[0].shape[:3], sizes.dim_v, dtype=sizes.dtype)
    leaves = [x.requires_grad_() for x in tables]

    def step(qkv: Sequence[Tensor]) -> None:
        with torch.no_grad():
            attn(*qkv)
        inputs = [x.detach().requires_grad_() for x in qkv]
        torch.autograd.grad(attn(*inputs), [*inputs, *leaves], dout, allow_unused=True)

    others = [sizes.qkv() for _ in range(3)]
    step(sizes.qkv())
    with never_waiting():
        for qkv in others:
            step(qkv)


@pytest.mark.parametrize("draw", ALL)
def test_variant(draw: Draw) -> None:
    sizes = draw.sizes(Sizes())
    check(sizes, draw.make(sizes))


@cuda_gym.installed
@pytest.mark.parametrize("key", cuda_gym.KEYS, ids=" ".join)
def test_attention_gym(key: cuda_gym.Key) -> None:
    composition, tables = cuda_gym.composed(key)
    check(cuda_gym.sizes_of(key), composition, tables)


def test_a_wait_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), never_waiting():
        torch.ones(()).item()
