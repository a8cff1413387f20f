"""Every refusal says what is wrong and points at the user's line (marked `HERE` in these mods)."""

from __future__ import annotations

import functools
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from fa4flex.codegen.trace import Captures, trace
from fa4flex.errors import TraceError

TABLE = torch.randn(4, 50)
LONG = torch.randn(4, 5000)
ARRAY = numpy.arange(50)
LENGTH = torch.tensor(3)
COUNT = 0
MEMORY: list[Any] = []
SEEN: dict[str, Any] = {}

CASES: list[tuple[str, Callable[..., Any], str]] = []


def bad(kind: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A mod whose trace must fail with `text` in the message."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((kind, fn, text))
        return fn

    return add


@bad("mask", r"branches on .* `3 < q`[\s\S]*torch.where")
def if_on_index(b, h, q_idx, kv_idx):
    if q_idx > 3:  # HERE
        return kv_idx > 2
    return kv_idx > 3


@bad("mask", "& | ~")
def python_and(b, h, q_idx, kv_idx):
    return q_idx > 3 and kv_idx > 3  # HERE


@bad("mask", "branches on")
def python_not(b, h, q_idx, kv_idx):
    return not q_idx > 3  # HERE


@bad("mask", "branches on")
def chained_comparison(b, h, q_idx, kv_idx):
    return 2 < q_idx < kv_idx  # HERE


@bad("score", "torch.minimum")
def builtin_min(score, b, h, q_idx, kv_idx):
    return score + min(q_idx, kv_idx)  # HERE


@bad("score", r"\.item\(\) of `q`")
def item(score, b, h, q_idx, kv_idx):
    return score + TABLE[0, q_idx.item()]  # HERE


@bad("score", "converts to a Python float")
def as_float(score, b, h, q_idx, kv_idx):
    return score * math.sqrt(score)  # HERE


@bad("mask", "converts to a Python int")
def as_int(b, h, q_idx, kv_idx):
    return int(q_idx / 2) > 1  # HERE


@bad("score", "uses as a Python integer")
def loop_to_index(score, b, h, q_idx, kv_idx):
    for _ in range(q_idx):  # HERE
        score = score + 1
    return score


@bad("score", "uses as a Python integer")
def list_index(score, b, h, q_idx, kv_idx):
    return score + [0.1, 0.2][h]  # HERE


@bad("score", "iterates over `q - kv`")
def iterates(score, b, h, q_idx, kv_idx):
    return score + sum(x for x in q_idx - kv_idx)  # HERE


@bad("score", "torch.from_numpy")
def numpy_index(score, b, h, q_idx, kv_idx):
    return score + ARRAY[q_idx]  # HERE


@bad("score", "torch.from_numpy")
def numpy_arithmetic(score, b, h, q_idx, kv_idx):
    return (score + ARRAY)[q_idx]  # HERE


@bad("score", "changes a tensor in place")
def assigns(score, b, h, q_idx, kv_idx):
    TABLE[0, q_idx] = score  # HERE
    return score


@bad("score", r"in place \(add_\)")
def adds_in_place(score, b, h, q_idx, kv_idx):
    TABLE.add_(1)  # HERE
    return score


@bad("score", r"in place \(mul_\)")
def proxy_in_place(score, b, h, q_idx, kv_idx):
    score.mul_(2)  # HERE
    return score


@bad("score", "in place")
def view_in_place(score, b, h, q_idx, kv_idx):
    row = TABLE[0]
    row += 1  # HERE
    return score + row[q_idx]


@bad("score", "the global variable: COUNT")
def global_state(score, b, h, q_idx, kv_idx):
    global COUNT
    COUNT = COUNT + 1  # HERE
    return score


@bad("score", "the list MEMORY")
def list_state(score, b, h, q_idx, kv_idx):  # HERE
    MEMORY.append(score)
    return score


@bad("score", "the dictionary SEEN: last")
def dictionary_state(score, b, h, q_idx, kv_idx):
    SEEN["last"] = score  # HERE
    return score


class Stateful:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, score, b, h, q_idx, kv_idx):
        self.calls += 1  # HERE
        return score

    def method(self, score, b, h, q_idx, kv_idx):
        self.last = score  # HERE too
        return score


def _counter() -> Callable[..., Any]:
    total = 0

    def counts(score, b, h, q_idx, kv_idx):
        nonlocal total
        total += 1  # HERE
        return score

    return counts


CASES.append(("score", Stateful(), "an attribute of the mod: calls"))
CASES.append(("score", _counter(), "the closure variable: total"))


@bad("score", r"torch.* on traced values[\s\S]*register_op")
def unknown_operation(score, b, h, q_idx, kv_idx):
    return torch.special.i0e(score) + torch.digamma(score)  # HERE


@bad("score", "cumsum")
def unknown_method(score, b, h, q_idx, kv_idx):
    return TABLE[h, :5][kv_idx] + TABLE[h].cumsum(0)[q_idx]  # HERE


@bad("score", "no attribute 'colour'")
def unknown_attribute(score, b, h, q_idx, kv_idx):
    return score + q_idx.colour  # HERE


@bad("score", "random operation rand_like")
def random_number(score, b, h, q_idx, kv_idx):
    return score + torch.rand_like(score)  # HERE


@bad("score", "random operation rand ")
def random_tensor(score, b, h, q_idx, kv_idx):
    return score * torch.rand(())  # HERE


@bad("score", "dropout")
def dropped(score, b, h, q_idx, kv_idx):
    return F.dropout(score, 0.1)  # HERE


@bad("score", "a shape that depends on `q`|uses as a Python integer")
def shape_of_index(score, b, h, q_idx, kv_idx):
    return score + score.new_zeros((q_idx,)).sum()  # HERE


@bad("score", "the float `score` as an index")
def float_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[0, score]  # HERE


@bad("score", "the bool `kv < q` as an index")
def bool_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[0, q_idx > kv_idx]  # HERE


@bad("score", "3 indices into a tensor of 2 dimensions")
def too_many_indices(score, b, h, q_idx, kv_idx):
    return score + TABLE[b, h, q_idx]  # HERE


@bad("score", "at most 1024")
def long_reduction(score, b, h, q_idx, kv_idx):
    return score + LONG[h].sum() * LONG[h, q_idx] + (LONG[h] * score).sum()  # HERE


@bad("score", "vectors of 50 and 4 elements")
def mismatched(score, b, h, q_idx, kv_idx):
    return score + (TABLE[h] + TABLE[:, q_idx]).sum()  # HERE


@bad("score", r"float `score`")
def bits_of_float(score, b, h, q_idx, kv_idx):
    return score & 1  # HERE


@bad("mask", r"two bools: `kv < q` and `2 < kv`[\s\S]*use \^")
def subtracts_bools(b, h, q_idx, kv_idx):
    return (q_idx > kv_idx) - (kv_idx > 2)  # HERE


@bad("mask", "reads the value of a captured tensor")
def reads_tensor(b, h, q_idx, kv_idx):
    return q_idx < LENGTH.item()  # HERE


@bad("mask", "reads the value of a captured tensor")
def branches_on_tensor(b, h, q_idx, kv_idx):
    return q_idx < 3 if LENGTH > 2 else q_idx > 3  # HERE


@bad("score", r"integer power[\s\S]*\.float\(\)")
def integer_power(score, b, h, q_idx, kv_idx):
    return score + q_idx**kv_idx  # HERE


@bad("score", "None where a tensor or number is needed")
def none_in_arithmetic(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx > 3, score, torch.add(score, print))  # HERE


CASES.pop()  # a function as an operand fails inside Python, before fa4flex sees it


@bad("score", "torch.cat")
def concatenates(score, b, h, q_idx, kv_idx):
    return torch.cat([TABLE[h], TABLE[0]])[q_idx]  # HERE


@bad("score", "ZeroDivisionError")
def user_exception(score, b, h, q_idx, kv_idx):
    return score + 1 / len(MEMORY)  # HERE


# --- results ------------------------------------------------------------------------------------------


@bad("mask", r"returned an int \(`q - kv`\)[\s\S]*returns a bool; compare")
def int_mask(b, h, q_idx, kv_idx):
    return q_idx - kv_idx  # HERE


@bad("mask", "returned a float")
def float_mask(b, h, q_idx, kv_idx):
    return q_idx / 2  # HERE


@bad("score", "returned a bool")
def bool_score(score, b, h, q_idx, kv_idx):
    return q_idx > kv_idx  # HERE


@bad("score", r"returned None[\s\S]*return statement")
def no_result(score, b, h, q_idx, kv_idx):
    score + 1  # HERE


@bad("score", r"a vector of shape \(50,\)")
def vector_result(score, b, h, q_idx, kv_idx):
    return score + TABLE[h]  # HERE


@bad("mask", "returned a str")
def text_result(b, h, q_idx, kv_idx):
    return "yes"  # HERE


def lines_marked(fn: Any) -> set[tuple[str, int]]:
    source = fn if inspect.isroutine(fn) else type(fn).__call__
    text, start = inspect.getsourcelines(source)
    file = inspect.getsourcefile(source)
    assert file is not None
    return {(file, start + i) for i, line in enumerate(text) if "# HERE" in line}


def name_of(case: tuple[str, Any, str]) -> str:
    return getattr(case[1], "__name__", type(case[1]).__name__)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_error(case: tuple[Any, Any, str]) -> None:
    kind, fn, text = case
    captures = Captures()
    with pytest.raises(TraceError, match=text) as caught:
        trace(fn, kind, captures)
    where = caught.value.where
    assert where is not None and (where.file, where.line) in lines_marked(fn), str(caught.value)
    assert captures == Captures(), "a failed trace leaves nothing behind"
    assert "expected:" in str(caught.value) and "to fix:" in str(caught.value)


def test_a_stateful_method_is_refused_and_left_unchanged() -> None:
    thing = Stateful()
    with pytest.raises(TraceError, match="an attribute of the mod: last") as caught:
        trace(thing.method, "score", Captures())
    assert (
        caught.value.where is not None
        and "HERE too" in Path(__file__).read_text().splitlines()[caught.value.where.line - 1]
    )
    assert not hasattr(thing, "last") and COUNT == 0 and MEMORY == [] and SEEN == {}


def test_the_users_exception_is_the_cause() -> None:
    with pytest.raises(TraceError) as caught:
        trace(user_exception, "score", Captures())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("fn", "kind", "text"),
    [
        (lambda b, h, q, k: q > k, "score", r"takes 4 positional arguments \(b, h, q, k\)[\s\S]*mask_mod"),
        (lambda s, b, h, q, k: s, "mask", r"takes 5 positional[\s\S]*looks like a score_mod"),
        (lambda q, k: q > k, "mask", r"mask_mod\(b, h, q_idx, kv_idx\)"),
        (lambda b, h, q, k, *, window: q > k, "mask", "needs keyword arguments .window."),
        (functools.partial(lambda w, b, h, q, k: q > k), "mask", "takes 5 positional"),
        (3, "mask", "pass a callable"),
    ],
)
def test_signature(fn: Any, kind: Any, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        trace(fn, kind, Captures())


DRAWING = """
import sys
from fa4flex.codegen.trace import Captures, trace
from fa4flex.errors import TraceError

def mask(b, h, q_idx, kv_idx):
    import numpy
    return q_idx - kv_idx < numpy.random.rand()

trace(lambda b, h, q_idx, kv_idx: q_idx > kv_idx, "mask", Captures())
print("numpy.random" in sys.modules)
try:
    trace(mask, "mask", Captures())
except TraceError as error:
    print("draws random numbers" in str(error))
"""


def test_numbers_of_a_generator_that_the_mod_imports_are_noticed() -> None:
    """Tracing imports none itself: that takes as long as a trace."""
    done = subprocess.run([sys.executable, "-c", DRAWING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_proxy_that_escapes_says_so() -> None:
    kept: list[Any] = []
    keep = kept.append  # a builtin: not copied, so the append really happens
    trace(lambda b, h, q, k: (keep(q), q > k)[1], "mask", Captures())
    with pytest.raises(TraceError, match="after its mod returned"):
        kept[0] + 1


def test_vectors_have_no_custom_backward() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 3

    with pytest.raises(TraceError, match=r"Double\.apply on vectors"):
        trace(lambda s, b, h, q, k: s + Double.apply(TABLE[h] * s)[q], "score", Captures())
