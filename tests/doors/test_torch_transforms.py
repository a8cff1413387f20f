"""Functions of attention under what torch does to functions: batched gradients, tracers, block masks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.variants import alibi, causal, sliding_window

HEADS, LENGTH = 2, 6
Q, K, V = torch.randn(3, 1, HEADS, LENGTH, 4, dtype=torch.float64)
BIAS = torch.randn(HEADS, dtype=torch.float64)
ATTENTION = fa4flex.compile(lambda s, b, h, i, j: s + BIAS[h] * j, lambda b, h, i, j: i >= j)


def ours(q: Tensor) -> Tensor:
    k, v = (x[:, :, :1].expand(-1, -1, q.shape[2], -1) * q for x in (K, V))
    out: Tensor = ATTENTION(q, k, v)
    return out


def formula(q: Tensor) -> Tensor:
    k, v = (x[:, :, :1].expand(-1, -1, q.shape[2], -1) * q for x in (K, V))
    places = torch.arange(q.shape[2])
    scores = q @ k.transpose(2, 3) / 2 + BIAS[:, None, None] * places
    return scores.masked_fill(places[:, None] < places, -torch.inf).softmax(-1) @ v


def batched(function: Callable[..., Tensor]) -> Tensor:
    x = Q.clone().requires_grad_()
    upstream = torch.stack([Q, Q.sin(), Q * 3])
    return torch.autograd.grad(function(x), x, upstream, is_grads_batched=True)[0]


def mapped(function: Callable[..., Tensor]) -> Tensor:
    x = Q.clone().requires_grad_()
    out = function(x)
    one = lambda g: torch.autograd.grad(out, x, g, retain_graph=True)[0]  # noqa: E731
    return torch.func.vmap(one, in_dims=1, out_dims=2)(torch.stack([Q, Q.sin(), Q * 3], 1))


def jacobian(function: Callable[..., Tensor]) -> Tensor:
    found: Any = torch.autograd.functional.jacobian(function, Q, vectorize=True)
    return found


def jacobian_of_both(function: Callable[..., Tensor]) -> Tensor:
    """Gradients of out and the log-sum-exp, whose upstream gradients come together."""

    def both(q: Tensor) -> tuple[Tensor, Tensor]:
        if function is ours:
            out, lse = ATTENTION(q, q, q, return_lse=True)
            return out, lse
        places = torch.arange(LENGTH)
        scores = q @ q.transpose(2, 3) / 2 + BIAS[:, None, None] * places
        scores = scores.masked_fill(places[:, None] < places, -torch.inf)
        return scores.softmax(-1) @ q, scores.logsumexp(-1)

    found: Any = torch.autograd.functional.jacobian(both, Q, vectorize=True)
    return torch.cat([x.flatten() for x in found])


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def functional(function: Callable[..., Tensor]) -> Tensor:
    scale = {"scale": torch.tensor(0.5, dtype=torch.float64)}
    found: Tensor = torch.func.functional_call(Model(function), scale, (Q,))
    return found


def checkpointed(function: Callable[..., Tensor]) -> Tensor:
    x = Q.clone().requires_grad_()
    return torch.autograd.grad(checkpoint(function, x, use_reentrant=False).sin().sum(), x)[0]


def traced(function: Callable[..., Tensor]) -> Tensor:
    return make_fx(function)(Q)(Q)


def deep_copied(function: Callable[..., Tensor]) -> Tensor:
    return copy.deepcopy(ATTENTION)(Q, Q, Q) if function is ours else ATTENTION(Q, Q, Q)


def pickled(function: Callable[..., Tensor]) -> Tensor:
    attn = fa4flex.compile(alibi, causal)
    return pickle.loads(pickle.dumps(attn))(Q, K, V) if function is ours else attn(Q, K, V)


TRANSFORMS = [
    batched, mapped, jacobian, jacobian_of_both, functional, checkpointed, traced, deep_copied, pickled,
]  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_transforms_of_torch(transform: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(transform(ours), transform(formula))


def dynamic(function: Callable[..., Tensor], strict: bool) -> Any:
    shapes = {"x": {2: torch.export.Dim("n", min=2, max=64)}}
    return torch.export.export(Model(function), (Q,), dynamic_shapes=shapes, strict=strict).module()


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_a_length_that_varies(strict: bool) -> None:
    found = dynamic(ours, strict)
    for length in (LENGTH, 9):
        x = torch.randn(1, HEADS, length, 4, dtype=torch.float64)
        torch.testing.assert_close(found(x), Model(formula)(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_by_torch_jit() -> None:
    ATTENTION(Q, K, V)  # what is kept of earlier calls is not for a tracer
    found, file = torch.jit.trace(Model(ours), (Q,)), io.BytesIO()
    torch.jit.save(found, file)
    file.seek(0)
    for run in (found, torch.jit.load(file)):
        for length in (LENGTH, 9):
            x = torch.randn(1, HEADS, length, 4, dtype=torch.float64)
            torch.testing.assert_close(run(x), Model(formula)(x))


def number(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: function(x).sin().sum()


BY_FUNC: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "func.grad": lambda f: torch.func.grad(number(f))(Q),
    "func.jacrev": lambda f: torch.func.jacrev(f)(Q),
    "func.jacfwd": lambda f: torch.func.jacfwd(f)(Q),
    "func.hessian": lambda f: torch.func.hessian(number(f))(Q),
    "func.vmap": lambda f: torch.func.vmap(f)(torch.stack([Q, Q.sin()])),
    "func.linearize": lambda f: torch.func.linearize(f, Q)[1](Q),
    "functional.jvp": lambda f: torch.autograd.functional.jvp(f, Q, Q),
    "functional.hvp": lambda f: torch.autograd.functional.hvp(number(f), Q, Q),
    "functional.hessian": lambda f: torch.autograd.functional.hessian(number(f), Q),
    "vectorized hessian": lambda f: torch.autograd.functional.hessian(number(f), Q, vectorize=True),
    "forward mode": lambda f: torch.autograd.functional.jacobian(
        f, Q, vectorize=True, strategy="forward-mode"
    ),
    "make_fx of jvp": lambda f: make_fx(lambda x: torch.func.jvp(f, (x,), (x,))[1])(Q)(Q.sin()),
    "per-sample gradients": lambda f: torch.func.vmap(torch.func.grad(number(f)))(torch.stack([Q, Q.sin()])),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_FUNC)
def test_derivatives_by_torch_func(name: str) -> None:
    torch.testing.assert_close(BY_FUNC[name](ours), BY_FUNC[name](formula))


def second(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(number(ours)(x), x, create_graph=True)
    return torch.autograd.grad(number(torch.clone)(first), x)[0]


REFUSED: dict[str, Callable[[], Any]] = {
    "func.functionalize": lambda: torch.func.functionalize(ours)(Q),
    "a second derivative that is traced": lambda: make_fx(second)(Q),
}


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError):
        REFUSED[name]()


def test_symbolic_tracing_is_refused_with_advice_that_works() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)q is a torch.fx.Proxy.*torch.fx.wrap"):
        torch.fx.symbolic_trace(lambda q: ATTENTION(q, q, q))
    with pytest.raises(UnsupportedError, match=r"(?s)q is a torch.fx.Proxy.*torch.export"):
        torch.fx.symbolic_trace(lambda q: fa4flex.flex_attention(q, q, q))
    found = torch.fx.symbolic_trace(lambda q: whole(q) * 2)
    torch.testing.assert_close(found(Q), ours(Q) * 2)


@torch.fx.wrap
def whole(q: Tensor) -> Tensor:
    return ours(q)


@pytest.mark.parametrize("make", [create_block_mask, create_mask], ids=lambda f: f.__name__)
def test_block_masks_of_variants(make: Callable[..., Any]) -> None:
    sizes = {"B": 1, "H": 1, "Q_LEN": 128, "KV_LEN": 128, "device": "cpu"}
    for family in (causal, sliding_window):
        with pytest.raises(InputError, match=rf"pass {family.__name__}\(\)\.bind\(q_len=\.\.\., kv_len="):
            make(family, **sizes)
    with pytest.raises(InputError, match=r"fix them once: causal\(\)\.bind\(q_len=\.\.\., kv_len=\.\.\.\)"):
        make(causal(), **sizes)
    made = make(causal().bind(q_len=128, kv_len=128), **sizes)
    whole = made.to_dense() if hasattr(made, "to_dense") else made
    assert whole.sum() == (1 if made is not whole else 128 * 129 / 2)
