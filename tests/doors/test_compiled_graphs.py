"""Mods inside torch.compile: captured values are inputs of the graph, and what changes does not recompile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import graph_programs
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fa4flex
from fa4flex.errors import InputError
from fa4flex.variants import alibi, causal, document, sliding_window, softcap

H, S, D, BLOCK = 2, 64, 16, 16
CALLS = 6

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def qkv(length: int = S) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, H, length, D, requires_grad=True) for _ in range(3))
    return q, k, v


def ids(length: int = S) -> Tensor:
    return torch.randint(0, 4, (length,)).sort().values


def blocks_of(ids: Tensor) -> BlockMask:
    n = len(ids)
    return create_block_mask(
        lambda b, h, q, k: ids[q] == ids[k], None, None, n, n, device="cpu", BLOCK_SIZE=BLOCK
    )


def classes(length: int = S) -> Tensor:
    return torch.randint(0, 3, (-(-length // BLOCK),) * 2, dtype=torch.uint8)


def agree(
    function: Callable[..., Tensor], calls: list[tuple[Any, ...]], backend: str, dynamic: bool | None
) -> int:
    """Check that compiled equals eager at each call, with gradients; returns the number of compilations."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for given in calls:
        leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        found, truth = compiled(*given), function(*given)
        torch.testing.assert_close(found, truth, atol=2e-5, rtol=2e-5)
        got, wanted = (torch.autograd.grad(x.sin().sum(), leaves, allow_unused=True) for x in (found, truth))
        for g, w in zip(got, wanted, strict=True):
            torch.testing.assert_close(g, w, atol=2e-4, rtol=2e-4)
    return int(counter.frame_count)


# --- what changes from call to call, and in how many compilations at most -----------------------------------


def tensor_closure(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    return fa4flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j))


def float_closure(q: Tensor, k: Tensor, v: Tensor, slope: float) -> Any:
    return fa4flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slope * (i - j))


def int_closure(q: Tensor, k: Tensor, v: Tensor, window: int) -> Any:
    return fa4flex.attention(q, k, v, mask=lambda b, h, i, j: (i - j < window) & (i >= j))


def mask_in_graph(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ids[i] == ids[j]

    mask = create_block_mask(same, None, None, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    out = fa4flex.flex_attention(q, k, v, block_mask=mask)
    return fa4flex.flex_attention(out, k, v, block_mask=mask)


def block_mask(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Any:
    return fa4flex.flex_attention(q, k, v, block_mask=mask)


def block_map(q: Tensor, k: Tensor, v: Tensor, classes: Tensor) -> Any:
    return fa4flex.attention(q, k, v, blocks=fa4flex.BlockMap.from_dense(classes, BLOCK))


def families(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, window: int) -> Any:
    attn = fa4flex.compile(alibi >> softcap(20.0), causal & document(ids) & sliding_window(window))
    return attn(q, k, v)


def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    return fa4flex.flex_attention(q, k, v, scale=scale)


def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return fa4flex.attention(q, k, v, mask=causal, varlen=fa4flex.Varlen(starts))


CACHE = torch.randn(20, 16, H, D)


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Any:
    return fa4flex.attention(q, CACHE, CACHE, mask=causal, paging=fa4flex.Paging(table, used))


ATTENTION = fa4flex.compile(mask=causal & sliding_window(9))


def at_the_call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> Any:
    return ATTENTION(q, k, v, sinks=sinks, scale=scale)


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], int]] = {
    "tensor closure": (tensor_closure, lambda i: (torch.randn(H, requires_grad=True),), 1),
    "float closure": (float_closure, lambda i: (0.1 * i,), 3),
    "int closure": (int_closure, lambda i: (5 + i,), 2),
    "mask made in the graph": (mask_in_graph, lambda i: (ids(),), 1),
    "BlockMask": (block_mask, lambda i: (blocks_of(ids()),), 1),
    "BlockMap": (block_map, lambda i: (classes(),), 1),
    "named variants": (families, lambda i: (ids(), 5 + i), 2),
    "scale": (scaled, lambda i: (0.1 + 0.1 * i,), 2),
    "Varlen": (packed, lambda i: (torch.tensor([0, 9 + i, 50, 2 * S], dtype=torch.int32),), 1),
    "Paging": (
        paged,
        lambda i: (torch.randperm(20)[:8].view(2, 4).int(), torch.tensor([S, 30 + i], dtype=torch.int32)),
        1,
    ),
    "sinks and scale of a call": (at_the_call, lambda i: (torch.randn(H), 0.1 + 0.1 * i), 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_inputs_of_the_graph(name: str) -> None:
    function, draw, most = CHANGES[name]
    compilations = agree(function, [(*qkv(), *draw(i)) for i in range(CALLS)], "aot_eager", None)
    assert compilations <= most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor closure", "float closure", "BlockMask", "named variants"])
def test_changes_under_inductor(name: str) -> None:
    function, draw, most = CHANGES[name]
    assert agree(function, [(*qkv(), *draw(i)) for i in range(3)], "inductor", None) <= most


@pytest.mark.parametrize("name", ["tensor closure", "int closure", "BlockMask"])
def test_changes_under_dynamic_shapes(name: str) -> None:
    function, draw, _ = CHANGES[name]
    assert agree(function, [(*qkv(), *draw(i)) for i in range(3)], "aot_eager", True) <= 1


def test_lengths_are_inputs_of_the_graph() -> None:
    calls = [(*qkv(n), torch.randn(H)) for n in (64, 63, 50, 40, 33)]
    assert agree(tensor_closure, calls, "aot_eager", None) <= 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)
        self.bias = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor, ids: Tensor, mask: BlockMask, scale: float, blocks: Any) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + self.bias[h] * (i - j)

        def same(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (ids[i] == ids[j]) & (i >= j)

        out = fa4flex.flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=scale)
        out = out + fa4flex.attention(q, k, v, score_mod=score, mask=same, scale=scale)
        out = out + fa4flex.attention(q, k, v, blocks=blocks)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, ids: Tensor, mask: BlockMask, scale: float, classes: Tensor) -> Tensor:
        blocks = fa4flex.BlockMap.from_dense(classes, BLOCK, x.shape[1], x.shape[1])
        for layer in self.layers:
            x = layer(x, ids, mask, scale, blocks)
        return x


@pytest.mark.slow
def test_a_model_through_masks_lengths_maps_and_scales_compiles_five_times_at_most() -> None:
    """13 masks, 5 scales, 10 block maps, 20 lengths; no kind of change recompiles after it was seen twice."""
    model, counter = Model(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    at: dict[str, Any] = {
        "x": torch.randn(2, S, H * D),
        "ids": ids(),
        "mask": blocks_of(ids()),
        "scale": 0.3,
        "classes": classes(),
    }
    changes: dict[str, list[dict[str, Any]]] = {
        "masks": [{"ids": ids(), "mask": blocks_of(ids())} for _ in range(13)],
        "scales": [{"scale": 0.1 + 0.1 * i} for i in range(5)],
        "maps": [{"classes": classes()} for _ in range(10)],
        "lengths": [
            {"x": torch.randn(2, n, H * D), "ids": ids(n), "mask": blocks_of(ids(n)), "classes": classes(n)}
            for n in range(48, 148, 5)
        ],
    }
    for kind, steps in changes.items():
        for i, step in enumerate(steps):
            at |= step
            before = counter.frame_count
            torch.testing.assert_close(compiled(**at), model(**at), atol=1e-5, rtol=1e-5)
            assert i < 2 or counter.frame_count == before, f"{kind}, change {i} compiled again"
    assert counter.frame_count <= 5


# --- programs at random -------------------------------------------------------------------------------------


def check_program(backend: str, dynamic: bool | None) -> None:
    model = graph_programs.draw()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(3):
        values = graph_programs.change(model)
        given = [
            torch.randn(1, H, graph_programs.LENGTH, graph_programs.WIDTH, requires_grad=True) for _ in "qkv"
        ]
        leaves = [*given, model.bias]
        results = [function(*given, values) for function in (compiled, model)]
        torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)
        found, truth = (torch.autograd.grad(x.sin().sum(), leaves, allow_unused=True) for x in results)
        for f, t in zip(found, truth, strict=True):
            torch.testing.assert_close(f, t, atol=2e-4, rtol=2e-4)


SETTINGS = [("aot_eager", None), ("inductor", None), ("aot_eager", True), ("inductor", True)]


@pytest.mark.parametrize("draw", range(4))
def test_random_programs(draw: int) -> None:
    check_program(*SETTINGS[draw])


@pytest.mark.exhaustive
@pytest.mark.parametrize("draw", range(200))
def test_two_hundred_random_programs(draw: int) -> None:
    check_program(*SETTINGS[draw % 4])


# --- export -------------------------------------------------------------------------------------------------

LOADED = """
import sys, torch, fa4flex.runtime.ops
for name in sys.argv[1:]:
    program = torch.export.load(name)
    given, truth = torch.load(name + ".tensors")
    torch.testing.assert_close(program.module()(*given), truth)
    print("equal")
"""


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H))
        self.attention = fa4flex.compile(self.score, causal)

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.bias[h] * (i - j)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.attention(q, k, v)
        return out


def test_exported_programs_load_in_a_new_process(tmp_path: Path) -> None:
    model, given, names = Exported(), tuple(x.detach() for x in qkv()), []
    for strict in (False, True):
        names.append(str(tmp_path / f"strict_{strict}.pt2"))
        torch.export.save(torch.export.export(model, given, strict=strict), names[-1])
        torch.save((given, model(*given).detach()), names[-1] + ".tensors")
    command = [sys.executable, "-c", LOADED, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["equal", "equal"], done.stderr


# --- errors -------------------------------------------------------------------------------------------------


class Tilted(torch.autograd.Function):
    """A product and its logarithm, with gradients that are not theirs."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.tanh(x) * y
        return product, torch.log1p(product * product)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, by_product: Tensor, by_logarithm: Tensor) -> tuple[Tensor, Tensor]:
        x, y, product = ctx.saved_tensors
        return by_product * y * 3 + by_logarithm, (by_logarithm - by_product) * x * product

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        return Tilted.forward(x, y), (0, 0)


def test_a_custom_backward_is_honoured_in_compiled_code() -> None:
    """Compiled equals eager, whose gradients are the function's own."""

    def tilted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            product, logarithm = Tilted.apply(s / 5, 1 + bias[h])
            return 5 * product + logarithm

        return fa4flex.flex_attention(q, k, v, score_mod=mod)

    given = (*qkv(), torch.rand(H, requires_grad=True))
    assert agree(tilted, [given], "aot_eager", None) == 1


def test_data_that_steers_a_mod_is_refused_in_words() -> None:
    def branching(q: Tensor) -> Any:
        return fa4flex.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s if i > 3 else s * 2)

    with pytest.raises(Exception, match=r"(?i)data-dependent|branch"):
        torch.compile(branching, backend="aot_eager", fullgraph=True)(qkv()[0])


def test_pages_that_do_not_exist_are_noticed_when_the_graph_runs() -> None:
    compiled = torch.compile(paged, backend="aot_eager", fullgraph=True)
    table, used = torch.randperm(20)[:8].view(2, 4).int(), torch.tensor([S, 40], dtype=torch.int32)
    compiled(*qkv(), table, used)
    for bad in (-1, 20):
        wrong = table.clone()
        wrong[1, 0] = bad
        with pytest.raises(RuntimeError, match="page of page_table does not exist"):
            compiled(*qkv(), wrong, used)
    with pytest.raises(RuntimeError, match="seqused_k exceeds"):
        compiled(*qkv(), table, used + 1)


def test_block_maps_are_checked_when_the_graph_runs() -> None:
    compiled = torch.compile(block_map, backend="aot_eager", fullgraph=True)
    compiled(*qkv(), classes())
    with pytest.raises(fa4flex.errors.InputError, match="class above 2"):
        compiled(*qkv(), classes() + 3)

    def listed(q: Tensor, counts: Tensor, indices: Tensor) -> Any:
        return fa4flex.attention(q, q, q, blocks=fa4flex.BlockMap.from_counts(counts, indices, BLOCK, S, S))

    compiled = torch.compile(listed, backend="aot_eager", fullgraph=True)
    q, counts = qkv()[0], torch.full((1, 1, 4), 2, dtype=torch.int32)
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4).contiguous()
    torch.testing.assert_close(compiled(q, counts, indices), listed(q, counts, indices))
    for bad, words in (
        ((counts + 3, indices), "counts from 5 to 5"),
        ((counts, indices + 3), "key block 4 in"),
    ):
        with pytest.raises(fa4flex.errors.InputError, match=words):
            compiled(q, *bad)


def test_a_block_mask_enters_a_graph_as_one_operator() -> None:
    """Dynamo and Inductor see one operator: a first compile takes its time for what they see."""
    record = EagerAndRecordGraphs()
    compiled = torch.compile(block_mask, backend=record, fullgraph=True)
    q, k, v = qkv()
    mask = blocks_of(ids())
    torch.testing.assert_close(compiled(q, k, v, mask), block_mask(q, k, v, mask))
    (graph,) = record.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    made = [
        name for name in called if "getitem" not in name and " zeros " not in name
    ]  # lengths that mods read
    assert made == ["fa4flex.block_classes", "fa4flex_flex_attention"]


def test_lists_of_blocks_are_compared_in_compiled_code() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, full: Tensor) -> Tensor:
        listed = counts, indices, BLOCK, S, S, full, indices
        return fa4flex.attention(q, k, v, mask=fa4flex.BlockMap.from_counts(*listed))

    rows = S // BLOCK
    counts, indices = torch.ones(1, 1, rows, dtype=torch.int32), torch.zeros(1, 1, rows, 1, dtype=torch.int32)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="counts of torch"):
        compiled(*qkv(), counts.float(), indices, torch.zeros_like(counts))
    with pytest.raises(InputError, match="both partial and full"):
        compiled(*qkv(), counts, indices, counts.clone())


def test_shapes_are_checked_in_compiled_code() -> None:
    for sinks in (torch.randn(H + 1), torch.randn(H, 1)):
        with pytest.raises(Exception, match="sinks"):
            torch.compile(at_the_call, backend="aot_eager", fullgraph=True)(*qkv(), sinks, 0.5)
    told = torch.__version__ >= (2, 12)  # earlier ones name the exception that code raises, not its words
    with pytest.raises(Exception, match="table of 3 heads" if told else "InputError"):
        torch.compile(
            lambda q: fa4flex.attention(q, q, q, score_mod=alibi(torch.rand(3))),
            backend="aot_eager",
            fullgraph=True,
        )(qkv()[0])


def test_graphs_have_the_whole_schedule() -> None:
    schedule = fa4flex.Schedule((32, 32), True, "row_major", "counter", 512, 3, "counted")
    assert all(getattr(schedule, x.name) != x.default for x in fields(schedule))
    attn, found = fa4flex.compile(mask=causal, schedule=schedule), EagerAndRecordGraphs()
    torch.compile(lambda q, k, v: attn(q, k, v), backend=found, fullgraph=True)(*qkv())
    (options,) = (x for node in found.graphs[0].graph.nodes for x in node.args if isinstance(x, dict))
    assert fa4flex.Schedule(**options["schedule"]) == schedule
