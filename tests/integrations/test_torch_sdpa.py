"""scaled_dot_product_attention under patch_sdpa beside torch's own, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SMS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa4flex
import ptxsim
from fa4flex.integrations.sdpa import SERVED

pytestmark = pytest.mark.filterwarnings("ignore:scaled_dot_product_attention runs torch's own function")

OWN = F.scaled_dot_product_attention
B, HEADS, KV_HEADS, Q_LEN, KV_LEN, WIDTH = 2, 4, 2, 5, 7, 8


@pytest.fixture
def finite_masks() -> None:
    """No model is under test."""


def leaves(q_len: int = Q_LEN, kv_len: int = KV_LEN, kv_heads: int = HEADS, **how: Any) -> tuple[Tensor, ...]:
    how = {"dtype": torch.float64, "requires_grad": True} | how
    return (
        torch.randn(B, HEADS, q_len, WIDTH, **how),
        torch.randn(B, kv_heads, kv_len, WIDTH, **how),
        torch.randn(B, kv_heads, kv_len, WIDTH + 4, **how),
    )


def gradients(out: Tensor, inputs: Any) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), inputs)


def check(qkv: tuple[Tensor, ...], mask: Tensor | None = None, **options: Any) -> None:
    """Served calls agree with torch's function, outputs and gradients."""
    inputs = [x for x in (*qkv, mask) if x is not None and x.requires_grad]
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = F.scaled_dot_product_attention(*qkv, mask, **options)
    assert patch.calls == {SERVED: 1}
    expected = OWN(*qkv, mask, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, inputs), gradients(expected, inputs))


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (7, 5), (6, 6)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_without_a_mask_and_causal_top_left(q_len: int, kv_len: int, is_causal: bool) -> None:
    check(leaves(q_len, kv_len), is_causal=is_causal)


@pytest.mark.parametrize("scale", [0.3, -1.5, 0.0])
def test_scale_and_groups_of_heads(scale: float) -> None:
    check(leaves(kv_heads=KV_HEADS), scale=scale, enable_gqa=True, is_causal=True)


SHAPES = [
    tuple(n if keep else 1 for n, keep in zip((B, HEADS, Q_LEN, KV_LEN), kept, strict=True))
    for kept in itertools.product((False, True), repeat=4)
    if any(kept)
]


@pytest.mark.parametrize("shape", [*SHAPES, (HEADS, Q_LEN, KV_LEN), (Q_LEN, KV_LEN), (1, KV_LEN)])
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    """Rows without keys are among them: torch's output there is 0, as ours is."""
    allowed = torch.rand(shape) > 0.4
    allowed[..., 0, :] = False
    check(leaves(), allowed)
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 0, :] = -torch.inf
    check(leaves(), bias.requires_grad_())


def test_repeated_masks_are_read_as_they_lie_in_memory() -> None:
    shape = B, HEADS, Q_LEN, KV_LEN
    padding = torch.rand(B, 1, 1, KV_LEN) > 0.4
    check(leaves(), padding.expand(shape))
    check(leaves(), torch.randn(1, HEADS, 1, KV_LEN, dtype=torch.float64, requires_grad=True).expand(shape))
    check(leaves(), torch.randn(KV_LEN, Q_LEN, dtype=torch.float64, requires_grad=True).mT)


def test_a_mask_that_changes_in_place_is_read_anew() -> None:
    qkv = leaves(requires_grad=False)
    allowed = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)
    with fa4flex.patch_sdpa(cpu=True):
        for key in range(KV_LEN):
            allowed[:, key] = False
            out = F.scaled_dot_product_attention(*qkv, allowed)
            torch.testing.assert_close(out, OWN(*qkv, allowed))


def test_autocast_gives_its_dtype() -> None:
    qkv = leaves(dtype=torch.float32)
    bias = torch.randn(Q_LEN, KV_LEN)
    with torch.autocast("cpu", torch.bfloat16):
        expected = OWN(*qkv, bias)
        with fa4flex.patch_sdpa(cpu=True) as patch:
            out = F.scaled_dot_product_attention(*qkv, bias)
    exact = OWN(*(x.double() for x in qkv), bias.double())
    assert patch.calls == {SERVED: 1} and out.dtype == expected.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2 * (expected - exact).abs().max() + 1e-2


class Wrapped(Tensor):
    pass


def _falls_back(*qkv: Any, **options: Any) -> str:
    """The reason of a call that torch's function has to do, whose results or errors are its own."""
    torch.manual_seed(3)
    try:
        expected: Any = OWN(*qkv, **options)
    except Exception as error:
        expected = error
    torch.manual_seed(3)
    with fa4flex.patch_sdpa(cpu=True) as patch:
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)) as raised:
                F.scaled_dot_product_attention(*qkv, **options)
            assert str(raised.value) == str(expected)
        else:
            got = F.scaled_dot_product_attention(*qkv, **options)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert type(got) is type(expected)
    ((reason, count),) = patch.calls.items()
    assert count == 1
    return reason


@pytest.mark.parametrize("mask", [False, True])
def test_dropout_drops_weights(mask: bool) -> None:
    """Its pairs follow torch's generator; gradients are those of the same pairs."""
    q, k, v = leaves()
    table = torch.rand(Q_LEN, KV_LEN) < 0.7 if mask else None
    state = torch.get_rng_state()
    with fa4flex.patch_sdpa(cpu=True) as patch:
        out = F.scaled_dot_product_attention(q, k, v, table, dropout_p=0.4)
    assert patch.calls == {"fa4flex": 1}
    torch.set_rng_state(state)
    attn = fa4flex.compile(mask=None if table is None else lambda b, h, i, j: table[i, j], dropout=0.4)
    expected = attn(q, k, v)
    torch.testing.assert_close(out, expected)
    for mine, true in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, true)


def test_all_else_is_torchs_own() -> None:
    q, k, v = leaves(requires_grad=False)
    square = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)
    assert _falls_back(q, k, v, attn_mask=square, is_causal=True) == "a mask and is_causal"
    assert "several ranks" in _falls_back(q, k[0], v[0])
    assert "several ranks" in _falls_back(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])
    assert "broadcast" in _falls_back(q[None], k[None, :1], v[None, :1])
    assert "broadcast" in _falls_back(q[None], k[None], v[None], attn_mask=square[None, None, None])
    assert "higher rank" in _falls_back(q[0], k[0], v[0], attn_mask=square[None, None])
    assert "do not fit" in _falls_back(torch.cat((q, q)), k, v)
    assert "heads" in _falls_back(q, k[:, :2], v[:, :2])
    assert "heads" in _falls_back(q[:, :1], k, v)
    assert "heads" in _falls_back(q, k[:, :3], v[:, :3], enable_gqa=True)
    assert "do not fit" in _falls_back(q, k, v[:, :2], enable_gqa=True)
    assert "do not fit" in _falls_back(q, k, v[:, :, :4])
    assert "widths" in _falls_back(q, k[..., :4], v)
    assert "elements" in _falls_back(q[:, :, :0], k, v)
    assert "elements" in _falls_back(q, k[:, :, :0], v[:, :, :0])
    assert "dtypes" in _falls_back(q.float(), k, v)
    assert "plain" in _falls_back(q.as_subclass(Wrapped), k, v)
    assert "one element" in _falls_back(q, k, v, attn_mask=torch.ones(1, 1, dtype=torch.bool))
    assert "shape" in _falls_back(q, k, v, attn_mask=square[:, :3])
    assert "dtype" in _falls_back(q.float(), k.float(), v.float(), attn_mask=square.double())
    assert "dtype" in _falls_back(q, k, v, attn_mask=square.int())
    assert "scale" in _falls_back(q, k, v, scale=torch.inf)
    assert "scale" in _falls_back(q, k, v, scale=torch.tensor(0.5))
    assert "unknown option" in _falls_back(q, k, v, colour="red")
    assert "plain" in _falls_back(torch.ones(2).tolist(), k, v)
    with sdpa_kernel(SDPBackend.MATH):
        assert "sdpa_kernel" in _falls_back(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_what_transforms_or_exports_sees_torchs_function(strict: bool) -> None:
    q, k, v = leaves(requires_grad=False)
    expected = torch.vmap(OWN)(*(x[None] for x in (q, k, v)))
    with fa4flex.patch_sdpa(cpu=True) as patch:
        assert torch.equal(
            torch.vmap(F.scaled_dot_product_attention)(*(x[None] for x in (q, k, v))), expected
        )
        assert SERVED not in patch.calls
        patch.calls.clear()
        graph = torch.export.export(Model(), (q, k, v), strict=strict).graph
        assert not patch.calls
    assert any("scaled_dot_product_attention" in str(node.target) for node in graph.nodes)


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_modes_of_functions_see_the_call_and_a_default_device_does_not_matter() -> None:
    qkv = leaves(requires_grad=False)
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with fa4flex.patch_sdpa(cpu=True) as patch:
        with Watching():
            F.scaled_dot_product_attention(*qkv)
        assert OWN in seen and patch.calls == {"a mode of torch's functions": 1}
        with torch.device("cpu"):
            F.scaled_dot_product_attention(*qkv)
    assert patch.calls[SERVED] == 1


def test_without_cpu_calls_on_a_cpu_are_torchs() -> None:
    qkv = leaves(requires_grad=False)
    with fa4flex.patch_sdpa() as patch:
        assert torch.equal(F.scaled_dot_product_attention(*qkv), OWN(*qkv))
    assert patch.calls == {"no kernels for tensors on cpu, which patch_sdpa(cpu=True) serves": 1}


def test_what_is_unsupported_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise fa4flex.UnsupportedError("a width of 1024", "512", "use less")

    monkeypatch.setattr("fa4flex.integrations.sdpa_calls.attention", refuses)
    qkv, allowed = leaves(requires_grad=False), torch.rand(Q_LEN, KV_LEN) > 0.4
    with fa4flex.patch_sdpa(cpu=True) as patch:
        assert torch.equal(F.scaled_dot_product_attention(*qkv, allowed), OWN(*qkv, allowed))
    assert patch.calls == {"a width of 1024": 1}


def test_patches_end_in_any_order() -> None:
    first, second = fa4flex.patch_sdpa(cpu=True), fa4flex.patch_sdpa()
    qkv = leaves(requires_grad=False)
    F.scaled_dot_product_attention(*qkv)
    first.remove()
    first.remove()
    F.scaled_dot_product_attention(*qkv)
    assert F.scaled_dot_product_attention is not OWN
    second.remove()
    assert F.scaled_dot_product_attention is OWN
    assert not first.calls and second.calls.total() == 2
    with pytest.raises(ZeroDivisionError), fa4flex.patch_sdpa():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is OWN


def test_functions_that_others_put_around_ours_stay() -> None:
    qkv = leaves(requires_grad=False)
    try:
        with fa4flex.patch_sdpa(cpu=True):
            inner = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = lambda *x: inner(*x) * 2
        others = F.scaled_dot_product_attention
        assert torch.equal(others(*qkv), OWN(*qkv) * 2)
        with fa4flex.patch_sdpa(cpu=True) as patch:
            assert F.scaled_dot_product_attention is others
            torch.testing.assert_close(others(*qkv), OWN(*qkv) * 2)
        assert patch.calls == {SERVED: 1} and F.scaled_dot_product_attention is others
        F.scaled_dot_product_attention = OWN
        with fa4flex.patch_sdpa(cpu=True) as patch:
            F.scaled_dot_product_attention(*qkv)
        assert patch.calls == {SERVED: 1}
    finally:
        F.scaled_dot_product_attention = OWN
    fa4flex.patch_sdpa().remove()
    assert F.scaled_dot_product_attention is OWN


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["causal", "padding", "bias"])
def test_on_a_simulated_gpu(kind: str, compiled: bool) -> None:
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16().requires_grad_() for n in (40, 72, 72))
    mask = None
    if kind == "padding":
        mask = torch.arange(72)[None, None, None] < 50
    elif kind == "bias":
        mask = torch.randn(2, 40, 72).bfloat16().requires_grad_()
    inputs = [q, k, v, *([mask] if kind == "bias" else [])]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wide = exact[3] if kind == "bias" else mask
    expected = OWN(*exact[:3], wide, is_causal=kind == "causal")
    dout = torch.randn(expected.shape).bfloat16()

    def attend(*tensors: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=kind == "causal")

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    with fa4flex.patch_sdpa() as patch, ptxsim.device("sm_90a", sms=SMS) as gpu:
        out = run(q, k, v, mask)
        got = torch.autograd.grad(out, inputs, dout)
    assert patch.calls == {SERVED: 1} and not gpu.findings and len(gpu.results) >= 3
    want = torch.autograd.grad(expected, exact, dout.double())
    for x, reference in zip((out, *got), (expected, *want), strict=True):
        torch.testing.assert_close(x.double(), reference, atol=0.05, rtol=0.05)
