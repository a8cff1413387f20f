"""Names that torch keeps to itself: which of them this torch lacks, and what happens without each."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex import contents, torch_internals
from fa4flex.torch_internals import MissingInternalError
from fa4flex.variants import alibi, causal

PACKAGE = Path(fa4flex.__file__).parent
SOURCE = ast.parse(Path(torch_internals.__file__).read_text())

WENT_AWAY: dict[str, set[str]] = {"2.11": set(), "2.12": set(), "2.13": set(), "2.14": set(), "2.15": set()}
"""Names that each version of torch lacks that pyproject.toml allows."""
OF_CUDA = "_C._cuda_getCurrentRawStream"
"""Name that builds for CPUs lack."""


# --- which names there are ----------------------------------------------------------------------------------

LOOKED_UP = """
import json
import torch
import torch._dynamo
from fa4flex import torch_internals as internals
internals._imported("torch._dynamo", "lookup_backend", "inductor")
internals.fake_tensors(), internals.stance()
internals.capture_mods("absent_names", lambda error: (str(error), error))()
with internals._floats_of_the_whole_graph():
    pass
print(json.dumps(internals.absent))
"""


def test_no_name_went_away() -> None:
    """In a process of its own: tests remove names."""
    said = subprocess.run(
        [sys.executable, "-c", LOOKED_UP], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(said.splitlines()[-1])
    if not torch.backends.cuda.is_built():
        found.pop(OF_CUDA, None)
    version = ".".join(torch.__version__.split(".")[:2])
    assert found.keys() == WENT_AWAY[version], f"torch {version} lacks {found}"


def test_each_supported_version_is_listed() -> None:
    allowed = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (PACKAGE.parent / "pyproject.toml").read_text())
    assert allowed is not None
    assert WENT_AWAY.keys() == {f"2.{minor}" for minor in range(int(allowed[1]), int(allowed[2]))}


def test_the_rest_of_the_package_uses_no_private_name() -> None:
    files = [x for x in PACKAGE.rglob("*.py") if x != Path(torch_internals.__file__)]
    found = {f"{x.relative_to(PACKAGE)}: {name}" for x in files for name in private_names(x.read_text())}
    assert not found


CHANGING = "_current_level", "_version"
"""Attributes that are read where they stand, as the module says."""


def private_names(text: str) -> Iterator[str]:
    """Private names of torch that a module imports or reads: `torch._C`, `from torch.x import _y`."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names = [node.value]
        for name in names:
            parts = name.split(".")
            private = [x for x in parts if re.match(r"_[a-zA-Z]", x) and x not in CHANGING]
            if (parts[0] == "torch" and private) or parts[-1] == "_dynamo_marked_constant":
                yield name


@pytest.mark.parametrize(
    "text",
    (
        "import torch._dynamo", "from torch._C import x", "from torch.utils import _pytree", "torch._C.x()",
        "y = sys.modules['torch._inductor']", "torch.cuda._sleep(3)",
    ),
)  # fmt: skip
def test_private_names_are_noticed(text: str) -> None:
    assert list(private_names(text))


# --- a torch without a name ---------------------------------------------------------------------------------


def names_of(function: str) -> set[str]:
    """Names that the module asks for by a function of its own, as literals."""
    calls = [x for x in ast.walk(SOURCE) if isinstance(x, ast.Call) and ast.unparse(x.func) == function]
    return {x.args[0].value for x in calls if isinstance(x.args[0], ast.Constant)}


OF_BATCHES = {
    "_C._functorch.is_batchedtensor", "_C._functorch.maybe_get_level", "_C._functorch.get_unwrapped",
    "_C._functorch.maybe_get_bdim", "_C._functorch._add_batch_dim", "_C._functorch.is_legacy_batchedtensor",
    "_C._vmapmode_increment_nesting", "_C._vmapmode_decrement_nesting", "_add_batch_dim", "_remove_batch_dim",
}  # fmt: skip
OF_MODES = {"overrides._pop_mode", "overrides._push_mode", "utils._device.DeviceContext"}
OF_KEYS = {f"_C._dispatch_tls_local_{kind}_set" for kind in ("include", "exclude")}


def without(name: str) -> ModuleType:
    """The module as it is in a torch without a name."""
    path, _, last = name.rpartition(".")
    owner = pkgutil.resolve_name(f"torch.{path}".rstrip("."))
    spec = importlib.util.spec_from_file_location("fa4flex_in_another_torch", torch_internals.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(owner, last, raising=name != OF_CUDA)
        spec.loader.exec_module(module)
    vars(module)["MissingInternalError"] = MissingInternalError
    assert module.absent.keys() - {OF_CUDA} == {name} - {OF_CUDA} and name in module.absent
    return module


@contextmanager
def in_place(module: ModuleType) -> Iterator[None]:
    """Within, the package has what another torch gives it."""
    given = {name: x for name, x in vars(torch_internals).items() if not name.startswith("__")}
    with pytest.MonkeyPatch.context() as patch:
        for each in [x for name, x in sys.modules.items() if name.startswith("fa4flex.")]:
            for name in given.keys() & vars(each).keys():
                if getattr(each, name) is given[name]:
                    patch.setattr(each, name, getattr(module, name))
        yield


# --- what is computed in any torch --------------------------------------------------------------------------

Results = list[Tensor]


def trained(backend: str = "auto") -> Results:
    """Gradients, a captured tensor that changes in place, and a checkpoint."""
    torch.manual_seed(1)
    bias, (q, k, v) = torch.randn(2), torch.randn(3, 1, 2, 8, 4)
    attn = fa4flex.compile(lambda s, b, h, i, j: s + bias[h] * j, causal, backend=backend)  # type: ignore[arg-type]
    leaf, found = q.clone().requires_grad_(), []
    for _ in range(3):
        out = attn(leaf, k, v)
        found += [out.detach(), *torch.autograd.grad(out.sum(), leaf)]
        bias.add_(1)
    out = checkpoint(lambda x: attn(x, k, v), leaf, use_reentrant=False)
    return [*found, *torch.autograd.grad(out.sum(), leaf)]


def by_flex() -> Results:
    return trained("flex")


def in_autocast() -> Results:
    q = torch.ones(1, 1, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        return [fa4flex.compile(mask=causal)(q, q, q)]


def decoded() -> Results:
    torch.manual_seed(2)
    q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 9, 8)
    return [fa4flex.compile(mask=causal)(q, k, v)]


def on_default_device() -> Results:
    """Tensors of the library's own are for the host, and modes of the user's stay."""
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 8, 4, device="cpu")
    table = torch.arange(8, device="cpu")
    with torch.device("meta"):
        attn = fa4flex.compile(alibi, lambda b, h, i, j: table[i] >= table[j])
        found = attn(q, k, v)
        assert torch.ones(()).device.type == "meta"
    return [found]


def in_a_trace() -> Results:
    torch.manual_seed(4)
    q = torch.randn(1, 2, 8, 4)
    attn = fa4flex.compile(alibi, causal)

    class Model(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attn(q, q, q)

    return [torch.jit.trace(Model(), (q,))(q + 1)]


def in_a_graph() -> Results:
    """Two mods that read one float, under torch.compile."""
    torch.manual_seed(5)
    torch._dynamo.reset()
    q, slope = torch.randn(1, 2, 8, 4), 0.5
    attn = fa4flex.compile(lambda s, b, h, i, j: s * slope, lambda b, h, i, j: j * slope <= i)
    return [torch.compile(lambda x, y: attn(x, x, x) + y, backend="eager")(q, slope)]


def derived() -> Results:
    """Transforms of torch.func, and forward-mode derivatives."""
    torch.manual_seed(6)
    attn, q = fa4flex.compile(mask=causal), torch.randn(2, 1, 1, 4, 8)
    mapped = torch.func.vmap(lambda x: attn(x, x, x))(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q[0], q[1])
        pushed = torch.autograd.forward_ad.unpack_dual(attn(dual, q[0], q[0])).tangent
    return [mapped, pushed]


def by_operator() -> Results:
    """A counter of FLOPs sees an operator of this library's."""
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.ones(1, 1, 4, 8)
    with FlopCounterMode(display=False):
        return [fa4flex.compile(mask=causal)(q, q, q)]


def in_diffusers() -> Results:
    """A call of a layer of diffusers."""
    from fa4flex.integrations.composed import attend

    q = torch.ones(1, 4, 1, 8)
    return [attend((q, q, q), None, {})]


SLOWER: dict[str, tuple[Callable[[], Results], ...]] = {
    "_C._is_any_autocast_enabled": (trained, in_autocast),
    "_C._len_torch_dispatch_stack": (trained, by_flex, by_operator),
    "_C._len_torch_function_stack": (trained, by_flex),
    "_C._is_tracing": (trained, in_a_trace),
    "_C._functorch.maybe_current_level": (trained, by_flex, derived),
    "_C._functorch.is_functorch_wrapped_tensor": (trained, derived),
    "autograd.forward_ad._current_level": (trained, by_flex, derived),
    "_is_functional_tensor": (derived,),
    "_C._functorch.peek_interpreter_stack": (derived,),
    "_functorch.utils.enable_single_level_autograd_function": (derived,),
    "_C._autograd._top_saved_tensors_default_hooks": (trained, by_flex),
    "_C._dynamo.guards.TensorGuards": (trained, by_flex),
    "_C._dynamo.guards.GlobalStateGuard": (trained, by_flex),
    "_C._DisableFuncTorch": (in_a_graph,),
    "_C.DisableTorchFunction": (trained, in_a_graph),
    "utils._python_dispatch._disable_current_modes": (trained, in_a_graph),
    "utils._python_dispatch._get_current_dispatch_mode_stack": (by_operator,),
    "_scaled_dot_product_flash_attention_for_cpu": (decoded,),
    "_C._current_graph_task_id": (in_diffusers,),
    **dict.fromkeys(OF_BATCHES | OF_MODES, (trained,)),
}
"""Names in whose place something slower stands, and what is computed with that."""


@pytest.mark.parametrize("name", sorted(SLOWER))
def test_results_without_a_name(name: str) -> None:
    if name == "autograd.forward_ad._current_level":
        module = without_level()
    else:
        module = without(name)
    for scenario in SLOWER[name]:
        expected = scenario()
        with in_place(module):
            found = scenario()
        torch.testing.assert_close(found, expected)


def without_level() -> ModuleType:
    """Torch itself reads this one."""
    found = ModuleType("fa4flex_in_another_torch")
    vars(found).update(vars(torch_internals), forward_ad=SimpleNamespace(_current_level=0))
    return found


def test_results_without_counts_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained()
    monkeypatch.setattr(contents, "COUNTS_CHANGES", False)
    cache, x = contents.VersionedCache[int](4), torch.ones(2)
    assert cache.keep("key", (x,), 3) == 3 and cache.get("key", (x,)) is None
    torch.testing.assert_close(trained(), expected)


# --- errors in words ----------------------------------------------------------------------------------------

IN_WORDS: dict[str, Callable[[Any], Any]] = {
    "_ops.HigherOrderOperator": lambda module: type("Operator", (module.HigherOrderOperator,), {})("name"),
    "_C._AutoDispatchBelowAutograd": lambda module: module.below_autograd(),
    "_assert_async": lambda module: module.assert_async(torch.ones(()), "message"),
    "_C._ForceDispatchKeyGuard": lambda module: module.outside_operators(),
    "cuda._sleep": lambda module: module.sleep_on_gpu(100),
    "utils._pytree.tree_flatten": lambda module: module.flattened(()),
    "utils._pytree.tree_unflatten": lambda module: module.unflattened([], None),
    **dict.fromkeys(OF_KEYS, lambda module: module.outside_operators()),
}


@pytest.mark.parametrize("name", sorted(IN_WORDS))
def test_an_error_in_words(name: str) -> None:
    with pytest.raises(MissingInternalError) as told:
        IN_WORDS[name](without(name))
    words = str(told.value)
    assert words.startswith(f"torch {torch.__version__} has no torch.") and "docs/installing.md" in words
    assert name in words or name in OF_KEYS


@pytest.mark.parametrize("name", sorted(OF_BATCHES))
def test_batches_of_gradients_without_a_name(name: str) -> None:
    attn, q = fa4flex.compile(mask=causal), torch.ones(1, 1, 4, 8).requires_grad_()
    with in_place(without(name)), pytest.raises(MissingInternalError, match="batch of gradients"):
        torch.autograd.grad(attn(q, q, q), q, torch.ones(3, 1, 1, 4, 8), is_grads_batched=True)


@pytest.mark.parametrize("name", (*sorted(OF_MODES), "_C._len_torch_function_stack"))
def test_a_default_device_without_a_name(name: str) -> None:
    assert on_default_device()[0].device.type == "cpu"
    with in_place(without(name)), pytest.raises(MissingInternalError, match="a default device"):
        on_default_device()


def test_the_name_of_an_operator_of_the_users() -> None:
    @torch.library.custom_op("fa4flex_tests::named", mutates_args=())
    def named(x: Tensor) -> Tensor:
        return x.clone()

    assert torch_internals.custom_op_name(named) == "fa4flex_tests::named"
    assert without("library.CustomOpDef._qualname").custom_op_name(named) == "fa4flex_tests::named"


def test_the_stream_of_the_public_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device))
    assert without(OF_CUDA).current_stream(7) == 77


def test_each_name_has_a_test() -> None:
    covered = SLOWER.keys() | IN_WORDS.keys() | OF_BATCHES | {OF_CUDA, "library.CustomOpDef._qualname"}
    assert names_of("_private") | names_of("_needed") <= covered | {"autograd.forward_ad"}


# --- Dynamo and Inductor ------------------------------------------------------------------------------------


def test_inductor_by_its_second_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.compile_fx import compile_fx

    monkeypatch.setattr(torch_internals, "absent", {})
    monkeypatch.delattr(torch._dynamo, "lookup_backend")
    assert torch_internals.inductor() is compile_fx
    assert set(torch_internals.absent) == {"_dynamo.lookup_backend"}


@pytest.mark.parametrize(
    ("name", "call"),
    (
        ("_inductor.compile_fx.compile_fx_inner", torch_internals.inductor_of_one_graph),
        ("_subclasses.fake_tensor.FakeTensorMode", torch_internals.fake_tensors),
    ),
)
def test_parts_of_the_compiler(name: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(call()) or call() is not None
    monkeypatch.setattr(torch_internals, "absent", {})
    monkeypatch.delattr(f"torch.{name}")
    with pytest.raises(MissingInternalError, match=re.escape(name)):
        call()
    assert set(torch_internals.absent) == {name}


def test_a_stance_that_is_not_told_never_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_internals.stance() is torch_internals.stance()
    monkeypatch.setattr(torch_internals, "absent", {})
    monkeypatch.delattr(torch._dynamo.eval_frame, "_stance")
    assert torch_internals.stance() is not torch_internals.stance()


def test_trees_of_graphs_that_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "absent", {})
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace())
    assert torch_internals.on_stream_of_graph_trees(0, 77)


@pytest.mark.parametrize("name", ("_hop_name_to_variable_class", "FlexAttentionHigherOrderVariable"))
def test_a_graph_breaks_where_mods_cannot_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables import higher_order_ops as operators

    from fa4flex.runtime import graphs

    expected, imported = in_a_graph(), torch_internals._imported
    operators._hop_name_to_variable_class.pop(graphs.NAME, None)  # type: ignore[arg-type]

    def found(module: str, asked: str, lost: str) -> Any:
        return None if asked == name else imported(module, asked, lost)

    monkeypatch.setattr(torch_internals, "_imported", found)
    torch.testing.assert_close(in_a_graph(), expected)
    assert graphs.NAME not in operators._hop_name_to_variable_class


def test_a_float_of_two_mods_where_dynamo_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, imported = in_a_graph(), torch_internals._imported

    def found(module: str, asked: str, lost: str) -> Any:
        return None if asked == "VariableBuilder" else imported(module, asked, lost)

    monkeypatch.setattr(torch_internals, "_imported", found)
    monkeypatch.setattr(torch_internals, "absent", {})
    torch.testing.assert_close(in_a_graph(), expected)
    assert set(torch_internals.absent) == {"_dynamo.variables.builder.VariableBuilder.wrap_symfloat"}


# --- what is patched is undone ------------------------------------------------------------------------------


def test_patches_of_dynamo_are_undone() -> None:
    from torch._dynamo.variables import higher_order_ops as operators
    from torch._dynamo.variables.builder import VariableBuilder

    before, wrap = dict(operators._hop_name_to_variable_class), VariableBuilder.wrap_symfloat
    undo = torch_internals.capture_mods("fa4flex_tests", lambda error: (str(error), error))
    assert "fa4flex_tests" in operators._hop_name_to_variable_class
    again = torch_internals.capture_mods("fa4flex_tests", lambda error: (str(error), error))
    again()
    assert "fa4flex_tests" in operators._hop_name_to_variable_class  # the first one's
    undo()
    assert before == operators._hop_name_to_variable_class
    with pytest.raises(ZeroDivisionError), torch_internals._floats_of_the_whole_graph():
        assert VariableBuilder.wrap_symfloat is not wrap
        raise ZeroDivisionError
    assert VariableBuilder.wrap_symfloat is wrap


def test_the_patch_of_functions_is_undone() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(ZeroDivisionError), torch_internals.calls_of_functions(lambda cls: cls):
        assert torch.autograd.Function.apply() is torch.autograd.Function
        raise ZeroDivisionError
    assert torch.autograd.Function.__dict__["apply"] is before


def test_constants_are_marked_as_torch_marks_them() -> None:
    def mine() -> None: ...

    def theirs() -> None: ...

    torch_internals.constant_in_graphs(mine)
    torch.compiler.assume_constant_result(theirs)
    assert vars(mine) == vars(theirs) != {}


def test_what_torch_does_not_give() -> None:
    assert torch_internals.implicit_replication(object) is False
    assert torch_internals.flex_warnings_shown(SimpleNamespace()) is torch_internals._shown


def test_a_store_that_torch_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_process_group_store")
    with pytest.raises(RuntimeError, match="does not give it"):
        torch_internals.group_store(None)
