"""Pages under torch.compile without gradients: an operator of their own, which reads them in place where a
kernel does; the same results as without torch.compile, also where everything changes between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fa4flex
import ptxsim
from fa4flex import InputError, Paging, Varlen
from fa4flex.variants import alibi, causal

pytestmark = pytest.mark.slow
PAGE, PAGES, COLUMNS, BATCH, HEADS, KV_HEADS, D = 16, 30, 9, 2, 4, 2, 64
OPERATOR = "fa4flex::attention_in_pages"

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


Drawn = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


def drawn(kind: str, dtype: torch.dtype) -> Drawn:
    """q, caches of keys and values, table, lengths, and cu_seqlens of packed queries."""
    q_len = int(torch.randint(2, 40, ()))  # torch compiles a length of 1 for itself
    k, v = (torch.randn(PAGES, PAGE, KV_HEADS, D).to(dtype) for _ in range(2))
    table = torch.randperm(PAGES)[: BATCH * COLUMNS].view(BATCH, COLUMNS).int()
    used = torch.randint(0, COLUMNS * PAGE + 1, (BATCH,), dtype=torch.int32)
    shapes = {"bhsd": (BATCH, HEADS, q_len, D), "bshd": (BATCH, q_len, HEADS, D), "packed": (40, HEADS, D)}
    cu = torch.tensor([0, q_len, 40], dtype=torch.int32) if kind == "packed" else None
    return torch.randn(shapes[kind]).to(dtype), k, v, table, used, cu


def attending(kind: str, variant: dict[str, Any]) -> Callable[..., Any]:
    attn = fa4flex.compile(layout="bshd" if kind == "bshd" else "bhsd", **variant)

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor, cu: Tensor | None) -> Any:
        varlen = None if cu is None else Varlen(cu)
        return attn(q, k, v, paging=Paging(table, used), varlen=varlen, return_lse=True)

    return attend


SLOPES, IDS = torch.rand(HEADS), torch.randint(0, 3, (BATCH, COLUMNS * PAGE))
VARIANTS: dict[str, dict[str, Any]] = {
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "captured": {
        "score_mod": lambda score, b, h, q, kv: score - SLOPES[h] * (q - kv).abs(),
        "mask": lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) | (q >= kv),
    },
    "sinks": {"mask": causal, "sinks": fa4flex.Sinks(torch.randn(HEADS))},
}


@contextmanager
def operators() -> Iterator[list[str]]:
    """Names of the operators that run within, when it ends."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    names += [event.name for event in profile.events() or () if event.name.startswith("fa4flex::")]


@pytest.mark.parametrize("kind", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_code_has_the_results_of_eager_code(name: str, kind: str) -> None:
    attend, calls = attending(kind, VARIANTS[name]), [drawn(kind, torch.float64) for _ in range(4)]
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counted, fullgraph=True, dynamic=True)
    with torch.no_grad(), operators() as names:
        for given in calls:
            for found, expected in zip(compiled(*given), attend(*given), strict=True):
                torch.testing.assert_close(found, expected)
    assert counted.frame_count <= 2 and OPERATOR in names


@pytest.mark.parametrize("kind", ["bhsd", "packed"])
@pytest.mark.parametrize("name", ["alibi, causal", "captured"])
def test_a_kernel_reads_the_pages(name: str, kind: str) -> None:
    """On a simulated GPU no page is copied; what a page holds, and which pages are whose, may change."""
    attend, calls = attending(kind, VARIANTS[name]), [drawn(kind, torch.bfloat16) for _ in range(2)]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    never = patch.object(Paging, "spread", side_effect=AssertionError("pages were copied"))
    for given in calls:
        with torch.no_grad(), never, ptxsim.device("sm_90a") as gpu:
            out, lse = compiled(*given)
        assert gpu.results
        exact, exact_lse = attend(
            *(x.double() if x is not None and x.is_floating_point() else x for x in given)
        )
        assert (out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


def test_gradients_go_by_the_operator_that_has_some() -> None:
    attend, given = attending("bhsd", VARIANTS["alibi, causal"]), drawn("bhsd", torch.float64)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q = given[0].requires_grad_()
    with operators() as names:
        (found,) = torch.autograd.grad(compiled(*given)[0].sum(), q)
    (expected,) = torch.autograd.grad(attend(*given)[0].sum(), q)
    torch.testing.assert_close(found, expected)
    assert OPERATOR not in names


def test_tensors_that_do_not_fit_are_refused() -> None:
    attend, (q, k, v, table, used, cu) = attending("bhsd", {"mask": causal}), drawn("bhsd", torch.float64)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    told = InputError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.TorchRuntimeError
    with torch.no_grad(), pytest.raises(told, match="2 sequences of queries, 1 in the page table"):
        compiled(q, k, v, table[:1], used[:1], cu)
    with torch.no_grad(), pytest.raises(told, match="head"):
        compiled(q[..., :32], k, v, table, used, cu)


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "no such page": (lambda table, used: table.__setitem__((1, 0), PAGES), f"page {PAGES} in the page table"),
    "negative page": (lambda table, used: table.__setitem__((1, 0), -1), "page -1 in the page table"),
    "too long": (lambda table, used: used.__setitem__(0, COLUMNS * PAGE + 1), "seqused_k of 145 tokens"),
    "negative length": (lambda table, used: used.__setitem__(0, -3), "seqused_k of -3"),
}


@pytest.mark.parametrize("checked", [False, True], ids=["on a CPU", "on a device, checked"])
@pytest.mark.parametrize("what", WRONG)
def test_contents_that_do_not_fit_are_refused(
    what: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call itself raises, in the words of code that is not compiled."""
    attend = attending("bhsd", {"mask": causal})
    q, k, v, table, used, cu = drawn("bhsd", torch.bfloat16 if checked else torch.float64)
    spoil, words = WRONG[what]
    used.fill_(PAGE)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr("fa4flex.contents.VALIDATE", checked)
    with torch.no_grad(), ptxsim.device("sm_90a") if checked else nullcontext():
        compiled(q, k, v, table, used, cu)
        spoil(table, used)
        with pytest.raises(InputError, match=words):
            compiled(q, k, v, table, used, cu)


def test_the_next_call_tells_of_contents_on_a_device() -> None:
    """Nor does the graph assert anything: torch's assertion ends a process's use of its GPU."""
    graphs: list[torch.fx.GraphModule] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    attend, (q, k, v, table, used, cu) = attending("bhsd", {"mask": causal}), drawn("bhsd", torch.bfloat16)
    compiled = torch.compile(attend, backend=noted, fullgraph=True)
    used.fill_(PAGE)
    with torch.no_grad(), ptxsim.device("sm_90a"):
        compiled(q, k, v, table, used, cu)
        table[1, 0] = PAGES
        compiled(q, k, v, table, used, cu)
        with pytest.raises(InputError, match=f"page {PAGES} "):
            compiled(q, k, v, table, used, cu)
    assert graphs and not [graph for graph in graphs if "_assert" in graph.code]


@pytest.mark.parametrize("kind", ["bhsd", "bshd", "packed"])
def test_the_operator_keeps_what_it_promises(kind: str) -> None:
    seen: list[Any] = []

    def noted(*given: Any) -> Any:
        seen.append(given)
        return operator(*given)

    operator = torch.ops.fa4flex.attention_in_pages
    with torch.no_grad(), patch.object(torch.ops.fa4flex, "attention_in_pages", noted):
        compiled = torch.compile(attending(kind, VARIANTS["captured"]), backend="eager", fullgraph=True)
        compiled(*drawn(kind, torch.float64))
    real = [given for given in seen if type(given[0]) is Tensor]
    assert real
    torch.library.opcheck(operator.default, real[-1], test_utils=("test_schema", "test_faketensor"))
