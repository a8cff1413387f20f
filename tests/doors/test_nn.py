"""`fa4flex.nn.Attention`: a module that owns what its functions learn, used as any other module."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex import InputError, UnsupportedError
from fa4flex.variants import causal, softcap

B, H, S, D = 2, 4, 12, 8


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Any) -> Any:
    return score + bias[h, q_idx - kv_idx + S]


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any, ids: Any) -> Any:
    return ids[b, q_idx] == ids[b, kv_idx]


def in_order(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


def by_name() -> fa4flex.nn.Attention:
    """Functions of this module, which receive the tensors by keyword."""
    return fa4flex.nn.Attention(
        fa4flex.as_score(relative) >> softcap(5.0),
        fa4flex.as_mask(in_order) & same_document,
        parameters={"bias": torch.randn(H, 2 * S)},
        buffers={"ids": torch.randint(2, (B, S))},
        sinks=torch.randn(H),
    )


class Relative(fa4flex.nn.Attention):
    """Methods that read what the module registered."""

    def __init__(self) -> None:
        super().__init__(sinks=torch.randn(H))
        self.bias = nn.Parameter(torch.randn(H, 2 * S))
        self.register_buffer("ids", torch.randint(2, (B, S)))

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:  # type: ignore[override]
        return torch.tanh((score + self.bias[h, q_idx - kv_idx + S]) / 5.0) * 5.0

    def mask_mod(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:  # type: ignore[override]
        return (kv_idx <= q_idx) & (self.ids[b, q_idx] == self.ids[b, kv_idx])


MAKERS = (by_name, Relative)
KINDS = pytest.mark.parametrize("make", MAKERS)


def qkv(length: int = S) -> list[Tensor]:
    return [torch.randn(B, H, length, D, requires_grad=True) for _ in range(3)]


def truth(tensors: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The dense formula, with these tensors of the module."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None, :]
    scores = q @ k.mT / D**0.5 + tensors["bias"][:, i - j + S].to(q.dtype)
    scores = torch.tanh(scores / 5.0) * 5.0
    ids = tensors["ids"][:, None, : q.shape[2]]
    allowed = (j <= i) & (ids[..., :, None] == ids[..., None, :])
    scores = torch.where(allowed, scores, -torch.inf)
    sinks = tensors["sinks"].to(q.dtype)[None, :, None, None].expand(B, H, q.shape[2], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def check(module: Any, tensors: dict[str, Tensor] | None = None, call: Any = None) -> None:
    """Results and gradients by the module's tensors (or by `tensors`) are those of the dense formula."""
    tensors = (
        {**dict(module.named_parameters()), **dict(module.named_buffers())} if tensors is None else tensors
    )
    inputs = qkv()
    wanted = truth(tensors, *inputs)
    found = (module if call is None else call)(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    leaves = [*inputs, tensors["bias"], tensors["sinks"]]
    leaves = [x for x in leaves if x.requires_grad]
    upstream = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(out, leaves, upstream) for out in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


# --- a module like any other --------------------------------------------------------------------------------


@KINDS
def test_it_computes_the_formula_and_learns(make: Any) -> None:
    module = make()
    assert {name for name, _ in module.named_parameters()} == {"bias", "sinks"}
    assert {name for name, _ in module.named_buffers()} == {"ids"}
    check(module)
    check(module)


@KINDS
def test_state_dicts(make: Any) -> None:
    module, other = make(), make()
    check(module)
    module.load_state_dict(other.state_dict())
    check(module)
    third = make()
    module.load_state_dict(third.state_dict(), assign=True)
    assert module.bias.data_ptr() == third.bias.data_ptr()
    check(module)


@KINDS
def test_a_replaced_parameter(make: Any) -> None:
    module = make()
    check(module)
    module.bias = nn.Parameter(torch.randn(H, 2 * S))
    module.sinks = nn.Parameter(torch.randn(H))
    module.ids = torch.randint(2, (B, S))
    check(module)


@KINDS
def test_a_deep_copy_learns_on_its_own(make: Any) -> None:
    module = make()
    check(module)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    other = copy.deepcopy(module)
    for x in other.parameters():
        nn.init.normal_(x)
    check(other)
    check(module)
    torch.testing.assert_close(dict(module.state_dict()), before)


@KINDS
def test_an_average_of_weights(make: Any) -> None:
    module = make()
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    first = module.bias.detach().clone()
    for _ in range(2):
        averaged.update_parameters(module)
        nn.init.normal_(module.bias)
        check(averaged.module)
        check(module)
    assert not torch.equal(averaged.module.bias, first)


@KINDS
def test_functional_call(make: Any) -> None:
    module = make()
    tensors = {name: torch.randn_like(x, requires_grad=True) for name, x in module.named_parameters()}
    tensors["ids"] = torch.randint(2, (B, S))
    check(module, tensors, lambda *x: torch.func.functional_call(module, tensors, x))
    check(module)


@KINDS
def test_construction_without_data(make: Any) -> None:
    source = make()
    with torch.device("meta"):
        module = make()
    assert module.bias.is_meta and module.ids.is_meta
    module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    check(module)


@KINDS
def test_other_dtypes(make: Any) -> None:
    module = make().to(torch.float64)
    check(module, call=lambda *x: module(*(y.double() for y in x)).float())
    assert module.to(torch.bfloat16).bias.dtype is torch.bfloat16
    q, k, v = (x.detach().bfloat16() for x in qkv())
    assert module(q, k, v).dtype is torch.bfloat16


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@KINDS
def test_a_parametrized_parameter(make: Any) -> None:
    module = make()
    check(module)
    parametrize.register_parametrization(module, "bias", Doubled())
    inputs = qkv()
    tensors = {"bias": module.bias, "sinks": module.sinks, "ids": module.ids}
    torch.testing.assert_close(module(*inputs), truth(tensors, *inputs), rtol=1e-4, atol=1e-5)


@KINDS
def test_pickle(make: Any) -> None:
    module = make()
    check(module)
    other = pickle.loads(pickle.dumps(module))
    check(other)
    torch.testing.assert_close(dict(other.state_dict()), dict(module.state_dict()))


@KINDS
def test_checkpointed(make: Any) -> None:
    module = make()
    check(module, call=lambda *x: checkpoint(module, *x, use_reentrant=False))


@KINDS
def test_compiled(make: Any) -> None:
    module = make()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    check(module, call=compiled)
    module.load_state_dict(make().state_dict(), assign=True)
    check(module, call=compiled)


LOADED = """
import sys, traceback, torch, fa4flex.nn
for folder in sys.argv[1:]:
    try:
        program = torch.export.load(f"{folder}/program.pt2")
        given, truth = torch.load(f"{folder}/tensors.pt")
        torch.testing.assert_close(program.module()(*given), truth)
        loaded = {"cutlass", "sympy.core"} & set(sys.modules)
        print(folder, "equal", *sorted(loaded), file=open(f"{folder}/said", "w"))
    except Exception:
        traceback.print_exc(file=open(f"{folder}/said", "w"))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, bool], str]:
    """Output of one new process on programs of each kind: to start it takes longer than to load them all."""
    torch.manual_seed(0)
    folders = {}
    for make, strict in itertools.product(MAKERS, (False, True)):
        folders[make, strict] = folder = tmp_path_factory.mktemp("exported")
        module, given = make(), tuple(x.detach() for x in qkv())
        program = torch.export.export(module, given, strict=strict)
        assert {"bias", "sinks"} <= set(program.state_dict)
        torch.export.save(program, folder / "program.pt2")
        torch.save((given, module(*given).detach()), folder / "tensors.pt")
    command = [sys.executable, "-c", LOADED, *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {key: (folder / "said").read_text() for key, folder in folders.items()}


@pytest.mark.parametrize("strict", [False, True])
@KINDS
def test_an_exported_program_loads_in_a_new_process(
    make: Any, strict: bool, exported: dict[tuple[Any, bool], str]
) -> None:
    assert exported[make, strict].split()[1] == "equal", exported[make, strict]


# --- declaring ----------------------------------------------------------------------------------------------


def test_shapes_declare_zeros() -> None:
    module = fa4flex.nn.Attention(relative, causal, parameters={"bias": (H, 2 * S)}, sinks=H)
    assert module.bias.shape == (H, 2 * S) and module.sinks.shape == (H,)
    for x in module.parameters():
        nn.init.normal_(x)
    module.reset_parameters()
    assert not any(x.any() for x in module.parameters())
    with pytest.raises(UnsupportedError, match="given as tensors"):
        by_name().reset_parameters()


def test_call_time_arguments_and_what_it_shows() -> None:
    module = fa4flex.nn.Attention(relative, causal, parameters={"bias": torch.randn(H, 2 * S)}, sinks=H)
    q, k, v = qkv()
    out, lse = module(q, k, v, scale=0.5, return_lse=True)
    bias = module.bias
    plain = fa4flex.compile(lambda s, b, h, i, j: s + bias[h, i - j + S], causal, scale=0.5)
    wanted = plain(q, k, v, sinks=module.sinks, return_lse=True)
    torch.testing.assert_close((out, lse), wanted)
    assert "bias" in str(module.compiled().source()) and "relative" in repr(module)
    packed = fa4flex.Varlen(torch.tensor([0, 5, S], dtype=torch.int32))
    assert module(*(x[0].transpose(0, 1) for x in (q, k, v)), varlen=packed).shape == (S, H, D)


def test_what_does_not_fit_is_refused() -> None:
    table = torch.randn(H, 2 * S)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parameters": {"gain": table}}, "no function"),
        ({"parameters": {"q_len": table}}, "taken"),
        ({"parameters": {"forward": table}}, "taken"),
        ({"parameters": {"bias": table}, "buffers": {"bias": table}}, "both among"),
        ({"parameters": {"bias": table.long()}}, "buffers="),
        ({"parameters": {"bias": table}, "sinks": lambda: table[:, 0]}, "a floating tensor, or its shape"),
    ]
    for given, said in cases:
        with pytest.raises(InputError, match=said):
            fa4flex.nn.Attention(relative, **given)
    with pytest.raises(InputError, match="one of them"):

        class Both(fa4flex.nn.Attention):
            def score_mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # type: ignore[override]
                return s

        Both(relative)
