"""Operators as torch knows them: schemas that saved files rely on, and calls of compiled packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.operators import NAMESPACE, OPERATORS, called
from fa4flex.primitives.precision import Precision
from fa4flex.runtime.call import SequenceLengths
from fa4flex.runtime.output import program_of
from fa4flex.variants import causal

SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize("name", OPERATORS)
def test_functions_of_operators_exist(name: str) -> None:
    operator = OPERATORS[name]
    module = pytest.importorskip(operator.module)
    assert all(callable(getattr(module, found)) for found in {*operator.functions.values(), operator.fake})
    assert str(getattr(torch.ops.fa4flex, name).default._schema) == f"{NAMESPACE}::{name}{operator.schema}"


# --- empty lists --------------------------------------------------------------------------------------------


def plain_program() -> tuple[str, float]:
    attn = fa4flex.compile(mask=causal, scale=0.5)
    return attn.prepared.program.text, 0.5


def arguments(name: str) -> tuple[Any, ...]:
    """Arguments of a call whose lists are empty, where that means something."""
    q, k, v = (torch.arange(3 * 64) * 0.7).sin().view(3, 1, 2, 4, 8)
    text, scale = plain_program()
    if name == "attention":
        return q, k, v, [], None, None, None, None, None, text, [], [], scale, True
    if name in ("attention_gradients", "attention_backward"):
        saved = torch.ops.fa4flex.attention(*arguments("attention"))
        lengths = list(SequenceLengths())
        return [torch.ones_like(q)], list(saved), q, k, v, [], None, lengths, text, [], [], scale, []
    pools = [torch.randn(3, 4, 2, 8) for _ in range(2)]
    table, used = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    if name == "attention_in_pages":
        return q, *pools, table, used, None, None, [], None, text, [], [], scale, True, False
    if name == "attention_with_statistics":
        return *arguments("attention"), True, True
    if name == "attention_in_pages_with_statistics":
        return *arguments("attention_in_pages")[:-1], True, True, True
    if name.startswith("output_function"):
        function = fa4flex.compile(output_mod=lambda out, b, h, q_idx, d_idx: out * out + h)
        bound = function.program.output
        assert bound is not None
        text = program_of(bound, Precision()).text
        rest = [], None, None, None, text, [], [], [4, 0, 2], True
        return (q, *rest) if name == "output_function" else (k, q, *rest, [])
    if name.startswith("second_pass"):
        lse = torch.zeros(1, 2, 4)
        rest = q, k, lse, torch.tensor([1, -1]), [], None, None, None, None, text, [], [], scale
        return rest if name == "second_pass" else (torch.ones(1, 2, 2, 4), *rest, [])
    if name == "append":
        return k, v, *pools, table, used, None, None, None, None, False, None
    if name == "append_latent":
        rows, cache = k[:, :1], pools[0][:, :, :1].clone()
        rest = None, None, None, None, False, None, None, None, None, torch.ones(4), 1e-6, False, 4, 4
        return rows, cache, table, used, *rest, None, None
    if name == "block_classes":
        return torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]]), None, None, 2
    if name == "pool":
        return q, 3, "mean"
    if name == "scores":
        return q, k, 0.5
    if name == "listed_units":
        return torch.tensor([[[[0, 3], [-1, 0]]]]), None, 4
    if name == "topk":
        return torch.randn(1, 2, 3, 9), 4, []
    assert name == "required", "a new operator needs a call here"
    return q, torch.tensor(True), "it is true"


def copies(given: tuple[Any, ...]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in given]


@pytest.mark.parametrize("name", OPERATORS)
def test_lists_may_come_as_none(name: str) -> None:
    """AOTInductor's packages hand over empty ones so."""
    given, operator = arguments(name), OPERATORS[name]
    without = tuple([None if x == [] and isinstance(x, list) else x for x in given])
    functions: dict[str, Callable[..., Any]] = {"CPU": called(name, operator.compute)}
    functions["fake"] = called(name, operator.fake)
    if operator.gradients is not None:
        functions["Autograd"] = called(name, operator.gradients)
    for key, function in functions.items():
        given_too = given if key == "Autograd" and name.endswith("_backward") else without
        found, truth = function(*copies(given_too)), getattr(torch.ops.fa4flex, name)(*copies(given))
        found, truth = ([x] if isinstance(x, Tensor) else list(x) for x in (found, truth))
        assert len(found) == len(truth), key
        for f, t in zip(found, truth, strict=True):
            assert (f.shape, f.dtype) == (t.shape, t.dtype), key
            if key != "fake":
                torch.testing.assert_close(f, t)


PACKAGE = """
import sys, fa4flex, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
given, truth = torch.load(sys.argv[1] + ".tensors")
torch.testing.assert_close(run(*given), truth)
"""


@pytest.mark.slow
def test_a_package_of_aotinductor_runs_in_a_new_process(tmp_path: Path) -> None:
    """Calls of every operator, in a process that has only imported torch and fa4flex."""
    sys.path.insert(0, str(SAVED))
    from every_operator import EveryOperator, inputs

    model, given, name = EveryOperator(), inputs(), str(tmp_path / "model.pt2")
    with torch.no_grad():
        exported = torch.export.export(model, given, strict=True)
        torch._inductor.aoti_compile_and_package(exported, package_path=name)
        torch.save((given, model(*given)), name + ".tensors")
    done = subprocess.run([sys.executable, "-c", PACKAGE, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention_gradients", "attention_backward"])
def test_gradients_lie_in_memory_as_their_inputs_or_are_contiguous(name: str) -> None:
    """Heads that are made by a transposition; real tensors and fake ones."""
    upstream, saved, q, k, v, *rest = arguments(name)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    given = upstream, saved, q, k, v, *rest
    operator = getattr(torch.ops.fa4flex, name).default
    like = [x.stride() if name == "attention_gradients" else x.contiguous().stride() for x in (q, k, v)]
    assert [x.stride() for x in operator(*given)] == like and like[2] == v.stride()
    assert (like[0] == v.stride()) == (name == "attention_backward")
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


# --- saved files --------------------------------------------------------------------------------------------

SCHEMAS = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] operands, Tensor? sinks, Tensor? cu_seqlens_q, Tensor?"
    " cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, str program, SymInt[] ints, Tensor[] floats, float?"
    " scale, bool max_scores) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_backward(Tensor[] upstream, Tensor[] saved, Tensor q, Tensor k, Tensor v, Tensor[] operands,"
    " Tensor? sinks, Tensor?[] lengths, str program, SymInt[] ints, Tensor[] floats, float? scale, int[]"
    " needs) -> Tensor[]",
    "attention_in_pages(Tensor q, Tensor k, Tensor v, Tensor page_table, Tensor paged_keys, Tensor?"
    " cu_seqlens_q, Tensor? seqused_q, Tensor[] operands, Tensor? sinks, str program, SymInt[] ints, Tensor[]"
    " floats, float? scale, bool heads_first, bool max_scores) -> (Tensor, Tensor, Tensor)",
    "append(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor page_table, Tensor seqused_k,"
    " Tensor? cu_seqlens, Tensor? seqused, Tensor? cos, Tensor? sin, bool interleaved, Tensor? q) -> (Tensor,"
    " Tensor)",
    "output_function(Tensor out, Tensor[] operands, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor?"
    " positions, str program, SymInt[] ints, Tensor[] floats, SymInt[] whole, bool heads_first) -> Tensor",
    "output_function_backward(Tensor dout, Tensor out, Tensor[] operands, Tensor? cu_seqlens_q, Tensor?"
    " seqused_q, Tensor? positions, str program, SymInt[] ints, Tensor[] floats, SymInt[] whole, bool"
    " heads_first, int[] needs) -> Tensor[]",
    "second_pass(Tensor q, Tensor k, Tensor lse, Tensor? rows, Tensor[] operands, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, str program, SymInt[] ints,"
    " Tensor[] floats, float? scale) -> Tensor",
    "second_pass_backward(Tensor upstream, Tensor q, Tensor k, Tensor lse, Tensor? rows, Tensor[] operands,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, str program, SymInt[]"
    " ints, Tensor[] floats, float? scale, int[] needs) -> Tensor[]",
    "required(Tensor x, Tensor condition, str message) -> Tensor",
    "block_classes(Tensor counts, Tensor indices, Tensor? full_counts, Tensor? full_indices, SymInt columns)"
    " -> Tensor",
)
"""Schemas of version 0.1.0, with which files were saved."""


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda x: x.partition("(")[0])
def test_calls_of_earlier_versions_are_accepted(schema: str) -> None:
    name = schema.partition("(")[0]
    old = torch._C.parse_schema(f"{NAMESPACE}::{schema}")
    assert getattr(torch.ops.fa4flex, name).default._schema.is_backward_compatible_with(old)


LOADED = """
import sys, {first}, {second}
assert not [m for m in sys.modules if m.startswith("fa4flex.") and m not in {known}]
program = torch.export.load({saved!r} + "/{file}.pt2")
sys.path.insert(0, {saved!r})
with torch.no_grad():
    from {file} import {model}, inputs
    torch.testing.assert_close(program.module()(*inputs()), {model}()(*inputs()))
"""


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="it was saved by torch 2.13")
@pytest.mark.parametrize(("first", "second"), [("fa4flex", "torch"), ("torch", "fa4flex")])
@pytest.mark.parametrize(("file", "model"), [("every_operator", "EveryOperator"), ("pages", "OverPages")])
def test_a_file_of_an_earlier_version_loads(first: str, second: str, file: str, model: str) -> None:
    """In a process that has only imported both. The files are from version 0.1.0: they are not
    made anew."""
    known = "fa4flex.operators", "fa4flex.torch_internals"
    names = {"first": first, "second": second, "file": file, "model": model}
    code = LOADED.format(saved=str(SAVED), known=known, **names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_that_is_looked_for_and_imported_later_is_as_always() -> None:
    code = (
        "import sys; before = list(sys.meta_path); import fa4flex; assert 'torch' not in sys.modules;"
        "import importlib.util; assert importlib.util.find_spec('torch'); assert 'torch' not in sys.modules;"
        "import torch; assert torch.ops.fa4flex.attention.default;"
        "assert sys.meta_path[-len(before):] == before;"
        "assert not [x for x in sys.meta_path if getattr(x, '__module__', '') == 'fa4flex'];"
        "import inspect; assert inspect.getsource(torch) and torch.__spec__.loader is torch.__loader__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
