"""Output functions at every door: composition, words, torch.compile, export, modules, other backends."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import agree, close
from output_cases import FUNCTIONS, KINDS, Sizes, dense, leaves, sizes_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex.codegen.build import bind, bind_output
from fa4flex.errors import InputError, TraceError, UnsupportedError
from fa4flex.integrations.layers import assign
from fa4flex.primitives.precision import Precision
from fa4flex.runtime.call import NO_LENGTHS
from fa4flex.runtime.output import by_operator, program_of
from fa4flex.runtime.output_values import OutputCall
from fa4flex.selection import select
from fa4flex.variants import alibi, causal, gated, head_scale


def doubled(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
    return 2 * out


def shifted(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
    return out + d_idx


# --- composition --------------------------------------------------------------------------------------------


def test_chains_apply_from_left_to_right() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    plain = fa4flex.attention(q, k, v)
    d = torch.arange(4)
    for mod, wanted in (
        (fa4flex.as_output(doubled) >> shifted, 2 * plain + d),
        (fa4flex.as_output(shifted) >> doubled, 2 * (plain + d)),
        (doubled >> fa4flex.as_output(shifted), 2 * plain + d),
    ):
        torch.testing.assert_close(fa4flex.attention(q, k, v, output_mod=mod), wanted)


def test_repr_evaluates_back() -> None:
    mod = head_scale(torch.tensor([1.0, 2.0])) >> gated(torch.zeros(2))
    again = eval(repr(mod), {"torch": torch, "head_scale": head_scale, "gated": gated})
    assert repr(again) == repr(mod)
    variant = fa4flex.compile(output_mod=mod).variant
    assert f"output_mod={mod!r}" in repr(variant)
    core = variant.core
    assert core.output_mod is None and core.core is core
    assert repr(fa4flex.compile().variant) == "Variant()"


def test_copies_and_pickles_keep_it() -> None:
    attn = fa4flex.compile(output_mod=head_scale(torch.tensor([1.0, 2.0])))
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        torch.testing.assert_close(other(q, k, v), attn(q, k, v))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: fa4flex.compile(output_mod=causal), InputError, "pass it as mask="),
        (lambda: fa4flex.compile(output_mod=alibi), InputError, "pass it as score_mod="),
        (lambda: fa4flex.compile(output_mod=torch.zeros(2)), InputError, "capture a gate in a function"),
        (lambda: fa4flex.compile(head_scale(torch.ones(2))), InputError, "pass it as output_mod="),
        (lambda: fa4flex.compile(mask=head_scale(torch.ones(2))), InputError, "pass it as output_mod="),
        (lambda: fa4flex.compile(output_mod=lambda out, b, h, q, d: out > 0), TraceError, "returned a bool"),
        (lambda: fa4flex.compile(output_mod=lambda b, h, q, d: b), TraceError, "takes 4 positional"),
        (lambda: fa4flex.compile(output_mod=lambda out, b, h, q, d, kv_len: out), UnsupportedError, "kv_len"),
        (lambda: fa4flex.compile(output_mod=lambda s, b, h, q_idx, kv_idx: s), TraceError, "in this order"),
        (lambda: bind(fa4flex.compile(output_mod=doubled).variant), UnsupportedError, "does not apply it"),
    ],
)
def test_refusals(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_layers_of_engines_refuse_it(tmp_path: Path) -> None:
    file = tmp_path / "mods.py"
    file.write_text("def halved(out, b, h, q_idx, d_idx):\n    return out / 2\n")
    assert set(select(f"causal, {file}:halved")) == {"mask", "output_mod"}
    with pytest.raises(UnsupportedError, match="output function"):
        assign(f"{file}:halved")


def test_a_table_of_other_heads_is_refused() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    with pytest.raises(InputError, match="a table of 3 heads"):
        fa4flex.attention(q, k, v, output_mod=head_scale(torch.ones(3)))


def test_a_read_past_the_end_names_gate_and_line() -> None:
    gate = torch.zeros(2, 4)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    attn = fa4flex.compile(output_mod=lambda out, b, h, q_idx, d_idx: out * gate[h, q_idx])
    with pytest.raises(InputError, match=r"the captured tensor gate[\s\S]*test_output_mods.py"):
        attn(q, k, v)


def test_explanations_and_listings() -> None:
    gate = torch.zeros(1, 2, 16, 32, requires_grad=True)
    attn = fa4flex.compile(mask=causal, output_mod=gated(gate))
    said = str(attn.explain(16))
    for words in (
        "output_mod  gated(", "out' = out * sigmoid(gate[b, h, q, d])", "d out'/d gate[b, h, q, d] =",
        "of a query without allowed keys: of out = 0", "kept for the backward pass",
    ):  # fmt: skip
        assert words in said, said
    assert "def output(out, b, h, q, d)" in attn.source("trace")
    assert "def d_out(out, b, h, q, d)" in attn.source("gradient")
    assert "output    out * sigmoid(gate[b, h, q, d])" in attn.source("facts")
    assert "output" not in str(fa4flex.compile(mask=causal).explain(16))


# --- derivatives --------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused(seed: int) -> None:
    gate = torch.randn(2, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    out = fa4flex.attention(q, k, v, output_mod=head_scale(gate))
    (first,) = torch.autograd.grad(out.square().sum(), gate, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        first.sum().backward()


def test_batches_of_upstream_gradients(seed: int) -> None:
    gate = torch.randn(2, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3))
    jacobian = torch.autograd.functional.jacobian(
        lambda x: fa4flex.attention(q, k, v, output_mod=head_scale(x)), gate, vectorize=True
    )
    plain = fa4flex.attention(q, k, v)
    wanted = plain.unsqueeze(-1) * torch.eye(2, dtype=torch.float64).view(1, 2, 1, 1, 2)
    torch.testing.assert_close(jacobian, wanted)


# --- modules ------------------------------------------------------------------------------------------------


def test_a_module_owns_its_gate(seed: int) -> None:
    def open_gate(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, gate: Any) -> Any:
        return out * torch.sigmoid(gate[h])

    module = fa4flex.nn.Attention(mask=causal, output_mod=open_gate, parameters={"gate": torch.ones(2)})

    class Own(fa4flex.nn.Attention):
        def __init__(self) -> None:
            super().__init__(mask=causal)
            self.gate = nn.Parameter(torch.ones(2))

        def output_mod(self, out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
            return out * torch.sigmoid(self.gate[h])

    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    plain = fa4flex.attention(q, k, v, mask=causal)
    for each in (module, Own()):
        with torch.no_grad():
            each.gate.copy_(torch.tensor([0.5, -2.0]))
        out = each(q, k, v)
        torch.testing.assert_close(out, plain * torch.sigmoid(each.gate).view(1, 2, 1, 1))
        out.sum().backward()
        slope = torch.sigmoid(each.gate) * (1 - torch.sigmoid(each.gate))
        torch.testing.assert_close(each.gate.grad, plain.sum((0, 2, 3)) * slope.detach())


# --- torch.compile and export -------------------------------------------------------------------------------


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_calls_of_every_kind(kind: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, Sizes())
    mod, learned = FUNCTIONS["chained"](sizes, leaf)
    made = KINDS[kind](sizes, leaf, {"mask": causal, "output_mod": mod})
    agree(made.attend(*made.qkv, wrap=compiled), made.oracle(made.qkv), [*made.qkv, *learned])


def test_compiled_with_other_lengths_and_contents(seed: int) -> None:
    """One graph serves gates of other shapes and contents, which are inputs of it."""
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    @torch.compile(fullgraph=True, backend=counting, dynamic=True)
    def call(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, power: float) -> Tensor:
        def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
            return out * torch.sigmoid(gate[b, h, q_idx, d_idx]) + power

        return fa4flex.attention(q, k, v, mask=causal, output_mod=mod)

    for length in (7, 9, 16):
        q, k, v, gate = (torch.randn(2, 2, length, 4) for _ in range(4))
        for power in (0.5, 1.5):
            gate.normal_()
            wanted = fa4flex.attention(q, k, v, mask=causal) * torch.sigmoid(gate) + power
            torch.testing.assert_close(call(q, k, v, gate, power), wanted)
    assert graphs <= 2


def test_compiled_by_inductor(seed: int) -> None:
    leaf, sizes = leaves(torch.float32), Sizes()
    mod, learned = FUNCTIONS["full"](sizes, leaf)
    made = dense(sizes, leaf, {"mask": causal, "output_mod": mod})
    own = made.attend(*made.qkv)
    other = made.attend(*made.qkv, wrap=lambda f: torch.compile(f, fullgraph=True))
    assert close(other[0], own[0], 1e-6)
    found, wanted = (torch.autograd.grad(x[0].sum(), [*made.qkv, *learned]) for x in (other, own))
    for mine, theirs in zip(found, wanted, strict=True):
        assert close(mine, theirs, 1e-5)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.attn = fa4flex.compile(mask=causal, output_mod=self.output)

    def output(self, out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
        return out * self.scale[h]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = self.attn(q, k, v)
        return result


def test_exported(tmp_path: Path, seed: int) -> None:
    module = Gated()
    qkv = tuple(torch.randn(1, 2, 6, 4) for _ in range(3))
    exported = torch.export.export(module, qkv, strict=True)
    torch.export.save(exported, tmp_path / "gated.pt2")
    loaded = torch.export.load(tmp_path / "gated.pt2")
    torch.testing.assert_close(loaded.module()(*qkv), module(*qkv))
    assert "output_function" in str(loaded.graph)


def test_the_operators_are_as_torch_wants_them(seed: int) -> None:
    gate = torch.randn(2, requires_grad=True)
    bound = bind_output(head_scale(gate))
    out = torch.randn(1, 2, 5, 4, requires_grad=True)
    call = OutputCall(out, (gate,), NO_LENGTHS, None, (5, 0, 2), (), True)
    seen: list[Any] = []
    original = torch.ops.fa4flex.output_function.default

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is original:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    with Spy():
        by_operator(program_of(bound, Precision()), call)
    (arguments,) = seen
    tensors = [out, [gate], *arguments[2:]]
    torch.library.opcheck(original, tuple(tensors))


# --- backends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["full", "heads"])
def test_through_flex_attention(function: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float32), Sizes(dim=16, dim_v=16)
    mod, _ = FUNCTIONS[function](sizes, leaf)
    made = dense(sizes, leaf, {"mask": causal, "output_mod": mod})
    attn = fa4flex.compile(mask=causal, output_mod=mod, backend="flex")
    assert close(attn(*made.qkv).double(), made.oracle(made.qkv)[0], 1e-5)


def test_autocast_and_default_devices(seed: int) -> None:
    gate = torch.randn(2, requires_grad=True)
    attn = fa4flex.compile(output_mod=head_scale(gate))
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert gate.grad is not None
    wanted = attn(q, k, v)
    with torch.device("meta"):
        torch.testing.assert_close(attn(q, k, v), wanted)
