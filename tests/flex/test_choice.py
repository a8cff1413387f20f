"""Choice of the backend, what is said of it, and refusals of what torch's flex_attention has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import agree, leaf

import fa4flex
from fa4flex import Precision, Schedule, doctor, reference
from fa4flex import variants as v
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.schedule import Order
from fa4flex.runtime import checks, compute, cpu, launch, ops
from fa4flex.runtime.flex import choice, refusals
from fa4flex.runtime.flex.mods import MOST_TERMS
from fa4flex.view import backend as view
from ptxsim import device

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
GUIDE = Path(__file__).parents[2] / "docs" / "flex_backend.md"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make torch say that there is a GPU of some capability."""

    def says(name: str, capability: tuple[int, int], hip: str | None = None) -> None:
        choice._known.clear()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "hip", hip)

    yield says  # type: ignore[misc]
    choice._known.clear()


@pytest.mark.parametrize("name, capability, hip, backend, why", [
    ("H200", (9, 0), None, "kernels", "capability 9.0"),
    ("B200", (10, 0), None, "kernels", "capability 10.0"),
    ("A100", (8, 0), None, "flex", "generated kernels are for 9.0, 10.0, 10.3"),
    ("RTX 5090", (12, 0), None, "flex", "capability 12.0"),
    ("MI300X", (9, 4), "6.4", "flex", "for NVIDIA GPUs"),
])  # fmt: skip
def test_backends_of_gpus(
    gpu: Callable[..., None], name: str, capability: Any, hip: Any, backend: str, why: str
) -> None:
    gpu(name, capability, hip)
    chosen = choice.choose("auto", CUDA)
    assert chosen.name == backend and why in chosen.why and name in chosen.why
    assert choice._without_kernels(CUDA) is (backend == "flex")
    assert choice.choose("flex", CUDA).name == "flex"


def test_dynamo_asks_the_device_once(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph: what asks a GPU is not traced."""
    gpu("A100", (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # or Dynamo saves states of this one
    torch._dynamo.reset()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if choice._without_kernels(CUDA) else x

    x = torch.ones(3)
    assert torch.equal(torch.compile(doubled, backend="eager", fullgraph=True)(x), 2 * x)


def test_backends_of_other_devices() -> None:
    assert choice.choose("auto", CPU).name == "cpu"
    assert choice.choose("flex", CPU).name == "flex"
    assert choice.choose("auto", torch.device("xpu", 0)).name == "flex"
    with pytest.raises(UnsupportedError, match="tensors on mps"):
        choice.choose("auto", torch.device("mps"))
    with device("sm_90a"):
        assert choice.choose("auto", CPU).name == "kernels"


def test_devices_without_kernels_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="auto" where there are no kernels: eager, with gradients, in a compiled model, the drop-in."""
    attn = fa4flex.compile(v.alibi, v.causal)
    qkv = leaf(2, 4, 14, 6), leaf(2, 2, 21, 6), leaf(2, 2, 21, 5)
    wanted = attn(*qkv, return_lse=True)
    for module in (compute, ops, launch, checks):
        monkeypatch.setattr(module, "by_flex", lambda asked, q: True)
    for name in ("forward", "single_queries"):
        monkeypatch.delattr(cpu, name)
    agree(attn(*qkv, return_lse=True), wanted, qkv)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attn(*x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv), wanted[0])
    out = fa4flex.flex_attention(*qkv, v.alibi, enable_gqa=True)
    torch.testing.assert_close(out, reference.attention(*qkv, v.alibi)[0])


def test_explain_and_doctor_say_which_and_why(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = str(fa4flex.compile(mask=v.causal, backend="flex").explain(1024))
    assert "torch's flex_attention" in asked and 'backend="flex" asks for it' in asked
    assert "28 full, 8 partial, 28 empty of 64" in " ".join(asked.split())
    assert "\n\non a CPU " not in asked, "nothing is said of an executor that does not run"
    plain = str(fa4flex.compile(mask=v.causal).explain(1024))
    assert "cpu: PyTorch operations" in " ".join(plain.split())
    gpu("A100", (8, 0))
    there = " ".join(str(fa4flex.compile(mask=v.causal).explain(1024)).split())
    assert "cuda: torch's flex_attention (A100 has compute capability 8.0" in there
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "environment", lambda device: {})
    said = "\n".join(doctor.devices())
    assert "A100 has compute capability 8.0" in said and 'backend="flex"' in said


def test_a_program_that_torch_cannot_express_is_explained() -> None:
    text = str(fa4flex.compile(score_mod=searching, backend="flex").explain(64))
    assert "cannot express it: torch.searchsorted" in " ".join(text.split())


def test_backends_are_part_of_a_variant() -> None:
    variant = fa4flex.compile(mask=v.causal, backend="flex").variant
    assert "backend='flex'" in repr(variant) and "backend" not in repr(fa4flex.compile().variant)
    with pytest.raises(InputError, match="backend='triton'"):
        fa4flex.compile(backend="triton")  # type: ignore[arg-type]


def test_the_listing_of_what_torch_is_given() -> None:
    text = fa4flex.compile(v.softcap(20.0), v.causal).source("flex")
    assert "def score_mod(score, b, h, q_idx, kv_idx, n" in text and "torch.tanh" in text
    compile(text, "generated", "exec")


# --- refusals ---------------------------------------------------------------------------------------------

EDGES = torch.arange(5)


def searching(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + torch.searchsorted(EDGES, kv_idx)


def summing(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, t: Any = torch.ones(40, MOST_TERMS + 1)) -> Any:
    return s + t[kv_idx].sum()


def called(device: str = "cpu", dtype: torch.dtype = torch.float32, **composed: Any) -> Any:
    q = torch.randn(1, 2, 8, 16, dtype=dtype, device=device)
    return fa4flex.compile(**composed, backend="flex")(q, q, q, return_lse=True)


REFUSED: dict[str, Callable[[], Any]] = {
    "Schedule(split=": lambda: called(schedule=Schedule(split=2048)),
    "Schedule(next_tile=": lambda: called(schedule=Schedule(next_tile="counter")),
    "Schedule(deterministic=True)": lambda: refusals.refuse_schedule(
        Schedule(deterministic=True), False, True
    ),
    "Precision(compute=": lambda: called(precision=Precision(compute="float64")),
    "Precision(skip=": lambda: called(precision=Precision(skip=1e-3)),
    "Precision(output=": lambda: called(dtype=torch.bfloat16, precision=Precision(output=torch.float32)),
    "float64 tensors on a GPU": lambda: refusals.refuse_precision(Precision(), torch.float64, False),
    "torch.searchsorted": lambda: called(score_mod=searching),
    "elements in a mod": lambda: called(score_mod=summing),
    "is uint64": lambda: called(
        mask=lambda b, h, q, kv, t=torch.zeros(40, dtype=torch.uint64): t[q] == t[kv]
    ),
    "places of a score mod": lambda: refusals.places_of(
        fa4flex.compile(v.alibi() >> many_places).program.facts, frozenset([0])
    ),
    "over several ranks": lambda: fa4flex.compile(backend="flex").parallel(None),  # type: ignore[arg-type]
}
"""The words of each refusal, and a call that is refused."""


def many_places(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, t: Any = torch.ones(99)) -> Any:
    return s + sum(t[kv_idx + i] for i in range(refusals.MOST_PLACES + 1))


@pytest.mark.parametrize("words", REFUSED)
def test_what_torch_cannot_express_is_refused_in_words(words: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        REFUSED[words]()
    assert words in error.value.given and error.value.expected and error.value.fix


def test_the_guide_lists_every_refusal() -> None:
    listed = GUIDE.read_text().split("## What is not supported")[1].split("\n## ")[0]
    rows = [line for line in listed.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(REFUSED)
    told = {"elements in a mod": "256 elements in a mod", "is uint64": "that is uint64"}
    assert [words for words in REFUSED if told.get(words, words) not in listed] == []


def test_what_cannot_change_results_is_taken() -> None:
    orders: tuple[Order, ...] = ("row_major", "longest_first")
    for schedule in (
        *(Schedule(order=x) for x in orders),
        Schedule(tile=(64, 64)),
        Schedule(deterministic=True),
    ):
        called(schedule=schedule)
    called(dtype=torch.float64, precision=Precision(output=torch.bfloat16))
    assert view.choices_here("flex")[0][1].name == "flex"
