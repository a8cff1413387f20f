"""Kernels that do not fit into shared memory: compiled again with smaller tiles, in words, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from repeated import Held, composed, engines_of_a_test
from test_repeats_with_gradients import learned, leaves
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch.nn.attention import flex_attention

import fa4flex
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.flex import engine as engines
from fa4flex.runtime.flex.fitting import BACKWARD, FORWARD, Options

SAID = (
    "NoTritonConfigsError: No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0 "
    "Required: 299008 Hardware limit:232448 Reducing block sizes or `num_stages` may help."
)

Refused = Callable[[bool, Options], bool]


class Inductor:
    """A stand-in that runs graphs as they were captured, and whose kernels do not fit where `refused` says so
    of a pass (backward?) and the options of its kernel."""

    def __init__(self, refused: Refused, said: str = SAID) -> None:
        self.refused, self.said = refused, said
        self.seen: list[tuple[bool, Options]] = []

    def __call__(self, module: Any, examples: Any, is_backward: bool = False, **_: Any) -> Any:
        calls = [
            x for x in module.graph.nodes if "flex_attention" in str(x.target) and x.op == "call_function"
        ]
        (options,) = [dict(x) for x in calls[0].args if isinstance(x, dict)]
        options = {x: y for x, y in options.items() if x.startswith("BLOCK_") or x == "num_stages"}
        self.seen.append((is_backward, options))
        if self.refused(is_backward, options):
            for node in [x for x in module.graph.nodes if x.op == "output"]:
                module.graph.erase_node(node)  # Inductor leaves behind a graph that it has changed
            raise RuntimeError(self.said)
        return make_boxed_func(module.forward)

    def backend(self, module: Any, examples: Any, inner_compile: Any, **_: Any) -> Any:
        def backward(graph: Any, given: Any) -> Any:
            return inner_compile(graph, given, is_backward=True)

        return aot_autograd(fw_compiler=inner_compile, bw_compiler=backward)(module, examples)


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Inductor], Inductor]]:
    """Put a stand-in in Inductor's place."""
    engines_of_a_test(monkeypatch)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *given: None)
    monkeypatch.setattr(engines, "_attend", lambda made, compiled, on_cpu: made.compiled())

    def put(one: Inductor) -> Inductor:
        monkeypatch.setattr(compile_fx, "compile_fx_inner", one)
        monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: one.backend)
        return one

    torch._dynamo.reset()
    yield put
    torch._dynamo.reset()


def gradients(attn: fa4flex.Attention, given: list[Tensor], held: Held, upstream: Tensor) -> Any:
    out = attn(*given)
    return out, *torch.autograd.grad(out, [*given, held.bias], upstream)


@pytest.mark.parametrize("tries", (1, 4))
def test_a_backward_kernel_is_compiled_again(tries: int, by: Any) -> None:
    """Tries follow each other until it fits; results are the same."""
    fits = BACKWARD[tries - 1]
    inductor = by(Inductor(lambda backward, options: backward and options != fits))
    held, given = learned(), leaves()
    upstream = torch.randn(1, 2, *given[0].shape[2:], dtype=torch.float64)
    attn = composed(held)
    with pytest.warns(UserWarning, match="does not fit into the shared memory.*Required: 299008") as said:
        found = gradients(attn, given, held, upstream)
    torch.testing.assert_close(found, gradients(composed(held, "auto"), given, held, upstream))
    assert inductor.seen == [(False, {}), (True, {}), *((True, x) for x in BACKWARD[:tries])]
    words = [str(x.message) for x in said if "shared memory" in str(x.message)]
    assert len(words) == tries and all(f"{x}={y}" in words[-1] for x, y in fits.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(gradients(attn, given, held, upstream), found)


def test_a_forward_kernel_keeps_the_tile_that_was_asked_for(by: Any) -> None:
    inductor = by(Inductor(lambda backward, options: options.get("num_stages") != 1))
    held, given = Held(), leaves()
    attn = composed(held, schedule=fa4flex.Schedule(tile=(128, 64)))
    with pytest.warns(UserWarning, match="forward kernel does not fit"), torch.no_grad():
        torch.testing.assert_close(attn(*given), composed(held, "auto")(*given))
    asked = {"BLOCK_M": 128, "BLOCK_N": 64}
    seen = [asked, *({**asked, "num_stages": stages} for stages in (2, 1))]
    assert [x for _, x in inductor.seen] == seen
    torch._dynamo.reset()
    inductor = by(Inductor(lambda backward, options: True))
    attn = composed(held, schedule=fa4flex.Schedule(tile=(128, 64)), scale=0.2)
    with pytest.warns(UserWarning), pytest.raises(UnsupportedError, match=r"leave out Schedule\(tile"):
        attn(*given)
    assert [x for _, x in inductor.seen] == seen


@pytest.mark.filterwarnings("ignore:flex_attention's:UserWarning")
def test_what_fits_by_no_means_is_refused_in_words(by: Any) -> None:
    held, given = learned(), leaves()
    inductor = by(Inductor(lambda backward, options: backward))
    out = composed(held)(*given)
    with pytest.raises(UnsupportedError, match=r"backward kernel.*Required: 299008(.|\n)*detach captured"):
        out.sum().backward()
    assert [x for backward, x in inductor.seen if backward] == [{}, *BACKWARD]
    torch._dynamo.reset()
    inductor = by(Inductor(lambda backward, options: True))
    attn = composed(held, scale=0.3)
    with pytest.raises(UnsupportedError, match=r"forward kernel(.|\n)*Schedule\(tile"):
        attn(*given)
    assert [x for _, x in inductor.seen] == [{}, *FORWARD]


def test_other_errors_are_torch_s_own(by: Any) -> None:
    inductor = by(Inductor(lambda backward, options: True, "an error of another kind"))
    with pytest.raises(Exception, match="an error of another kind") as found:
        composed(learned())(*leaves())
    assert not isinstance(found.value, UnsupportedError) and len(inductor.seen) == 1
