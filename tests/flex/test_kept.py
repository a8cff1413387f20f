"""State kept between calls through torch's flex_attention, and each change that makes it stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import cumulative
from repeated import engines_of_a_test
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from uncounted import WRITES

import fa4flex
from fa4flex import Varlen
from fa4flex import variants as v
from fa4flex.contents import VersionedCache
from fa4flex.runtime.flex import engine as engines
from fa4flex.runtime.flex.attend import Module
from fa4flex.runtime.flex.block_mask import Classifier
from fa4flex.runtime.programs import publish

Call = Callable[..., Any]


def qkv(length: int = 300, batch: int = 1, keys: int | None = None) -> list[Tensor]:
    keys = length if keys is None else keys
    return [torch.randn(batch, n, size, 16) for n, size in ((2, length), (1, keys), (1, keys))]


@pytest.fixture(autouse=True)
def engines_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    engines_of_a_test(monkeypatch)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Block masks that were made."""
    made: list[Any] = []
    classes = Classifier.classes

    def counted(self: Classifier, *given: Any) -> Tensor:
        made.append(classes(self, *given))
        return made[-1]

    monkeypatch.setattr(Classifier, "classes", counted)
    return made


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Graphs that Dynamo captured of modules; they run as they are, as torch's reference."""
    counter = CompileCounter()
    compiled = torch.compile

    def counting(function: Any, **options: Any) -> Any:
        assert options.pop("fullgraph") is True
        return compiled(function, backend=counter, fullgraph=True)

    monkeypatch.setattr(torch, "compile", counting)
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def right(attn: fa4flex.Attention, given: list[Tensor], **call: Any) -> None:
    variant = attn.variant
    plain = fa4flex.compile(variant.score_mod, variant.mask, blocks=variant.blocks, sinks=variant.sinks)
    torch.testing.assert_close(attn(*given, **call), plain(*given, **call))


# --- block masks ------------------------------------------------------------------------------------------


def test_a_block_mask_is_made_once(masks: list[Any]) -> None:
    attn = fa4flex.compile(v.alibi, v.causal & v.sliding_window(100), backend="flex")
    for _ in range(3):
        right(attn, qkv(), return_lse=True)
        right(attn, qkv(), return_lse=True)
    assert len(masks) == 1


def test_other_lengths_have_other_block_masks(masks: list[Any]) -> None:
    attn = fa4flex.compile(mask=v.causal, backend="flex")
    for length, keys in ((300, 300), (290, 300), (300, 290), (300, 300)):
        right(attn, qkv(length, keys=keys), return_lse=True)
    assert len(masks) == 3


def test_a_batch_makes_no_difference_to_a_mask_that_reads_none(masks: list[Any]) -> None:
    attn = fa4flex.compile(mask=v.causal, backend="flex")
    right(attn, qkv(batch=1), return_lse=True)
    right(attn, qkv(batch=2), return_lse=True)
    assert len(masks) <= 2 and all(x.shape[0] == 1 for x in masks)


@pytest.mark.parametrize("write", [name for name in WRITES if name != "average"])
def test_contents_of_captured_tensors_are_read_again(write: str, masks: list[Any]) -> None:
    ids = torch.zeros(300, dtype=torch.int32)
    attn = fa4flex.compile(mask=v.document(ids), backend="flex")
    given = qkv()
    right(attn, given, return_lse=True)
    WRITES[write](ids, (torch.arange(300) >= 150).to(torch.int32))
    right(attn, given, return_lse=True)
    assert len(masks) == 2 and not torch.equal(*masks)
    attn(*given, return_lse=True)
    assert len(masks) == 2


def test_another_tensor_is_read(masks: list[Any]) -> None:
    held = [torch.zeros(300, dtype=torch.int32)]
    attn = fa4flex.compile(mask=lambda b, h, q, kv: held[0][q] == held[0][kv], backend="flex")
    given = qkv()
    right(attn, given, return_lse=True)
    held[0] = torch.arange(300, dtype=torch.int32) // 128
    right(attn, given, return_lse=True)
    assert len(masks) == 2 and not torch.equal(*masks)


def test_numbers_of_the_mask_are_looked_at(masks: list[Any], compilations: CompileCounter) -> None:
    """A new window is another block mask, and no compilation."""
    window, cap = 200, 30.0
    score = lambda s, b, h, q_idx, kv_idx: cap * torch.tanh(s / cap)  # noqa: E731
    attn = fa4flex.compile(score, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window, backend="flex")
    given = qkv()
    right(attn, given)
    window = 20
    right(attn, given)
    assert len(masks) == 2 and not torch.equal(*masks)
    cap = 0.5
    right(attn, given)
    assert len(masks) == 2, "the mask reads no cap"
    assert compilations.frame_count == 1


def test_lengths_of_packed_sequences_are_read_again(masks: list[Any]) -> None:
    cu = cumulative([100, 200])
    attn = fa4flex.compile(mask=v.causal, backend="flex")
    given = [torch.randn(300, n, 16) for n in (2, 1, 1)]
    right(attn, given, varlen=Varlen(cu), return_lse=True)
    attn(*given, varlen=Varlen(cu), return_lse=True)
    assert len(masks) == 1
    cu[1] = 250  # in place
    right(attn, given, varlen=Varlen(cu), return_lse=True)
    right(attn, given, varlen=Varlen(cumulative([5, 295])), return_lse=True)
    assert len(masks) == 3


def test_inference_tensors_are_never_remembered(masks: list[Any]) -> None:
    """torch counts no changes of theirs."""
    with torch.inference_mode():
        ids = torch.zeros(300, dtype=torch.int32)
        attn = fa4flex.compile(mask=v.document(ids), backend="flex")
        given = qkv()
        right(attn, given, return_lse=True)
        ids[150:] = 1
        right(attn, given, return_lse=True)
    assert not torch.equal(masks[0], masks[-1])


# --- compiled functions -----------------------------------------------------------------------------------


def test_contents_compile_nothing_and_lengths_twice(compilations: CompileCounter) -> None:
    """The second length makes lengths dynamic, as torch does; the first with another number of blocks, these;
    no further one compiles."""
    table, ids = torch.randn(2, 4000), torch.zeros(4000, dtype=torch.int32)
    score = lambda s, b, h, q_idx, kv_idx: s + table[h, kv_idx]  # noqa: E731
    attn = fa4flex.compile(score, v.causal & v.document(ids), backend="flex")
    for _ in range(3):
        ids[torch.randint(0, 150, ()) :] = 1
        table.normal_()
        right(attn, qkv())
    assert compilations.frame_count == 1
    for length in (310, 520, 150, 777):
        right(attn, qkv(length))
    assert compilations.frame_count == 3


def test_what_a_function_is_compiled_for(compilations: CompileCounter) -> None:
    """Dtypes, heads and scales have functions of their own, whose recompilations torch counts apart."""
    attn = fa4flex.compile(mask=v.causal, backend="flex")
    right(attn, qkv())
    attn(*[x.bfloat16() for x in qkv()])
    attn(*[torch.randn(1, n, 300, 16) for n in (4, 2, 2)])
    attn(*qkv(), scale=0.5)
    assert compilations.frame_count == 4
    right(attn, qkv())
    attn(*qkv(), scale=0.5)
    assert compilations.frame_count == 4


def test_narrow_heads_are_padded(compilations: CompileCounter) -> None:
    """torch's kernels have heads of 16 and more."""
    seen: list[tuple[int, ...]] = []
    attn = fa4flex.compile(v.alibi, v.causal, backend="flex")
    given = [torch.randn(1, n, 40, width) for n, width in ((2, 6), (1, 6), (1, 5))]
    engine = attn._calling().prepared.program.flex
    right(attn, given)
    ((_, ready, _),) = engine._ready._found.values()
    inner = ready.attend

    def attend(*arguments: Any) -> Any:
        seen.extend(x.shape[-1:] for x in arguments[:3])
        return inner(*arguments)

    object.__setattr__(ready, "attend", attend)
    right(attn, given)
    assert seen == [(16,)] * 3 and attn(*given).shape == (1, 2, 40, 5)


def test_gradients_are_noticed() -> None:
    """The same tensors without gradients, then with some, and again without."""
    bias = torch.randn(2, 300)
    attn = fa4flex.compile(lambda s, b, h, q, kv: s + bias[h, kv], backend="flex")
    given = qkv()
    assert not attn(*given, return_lse=True)[0].requires_grad
    bias.requires_grad_()
    out, _ = attn(*given, return_lse=True)
    assert torch.autograd.grad(out.sum(), bias)[0].abs().max() > 0
    with torch.no_grad():
        assert not attn(*given, return_lse=True)[0].requires_grad


# --- numbers ----------------------------------------------------------------------------------------------


def test_numbers_are_told_apart() -> None:
    """0.0 from -0.0, True from 1, 1 from 1.0, and by dtype; an equal one is the very tensor."""
    like = torch.zeros(1)
    given = [
        (0.0, torch.float32),
        (-0.0, torch.float32),
        (1, torch.int32),
        (1, torch.int64),
        (1.0, torch.float32),
    ]
    made = [engines._number_of(value, dtype, like) for value, dtype in given]
    assert len({id(x) for x in made}) == len(made)
    assert [engines._number_of(value, dtype, like) for value, dtype in given] == made
    assert torch.signbit(made[1]) and not torch.signbit(made[0])


def test_equal_programs_share_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    attn = fa4flex.compile(mask=v.causal, backend="flex")
    program = attn._calling().prepared.program
    again = fa4flex.compile(mask=v.causal, backend="flex")._calling().prepared.program
    plain = publish(program.facts, program.schedule, program.precision)
    assert again.flex is program.flex and plain is not program and program.backend == "flex"


def test_kept_values_are_few() -> None:
    kept: VersionedCache[int] = VersionedCache(2)
    for i in range(3):
        kept.keep(i, (), i)
    assert kept.get(0, ()) is None and kept.get(2, ()) == 2


# --- the captured module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("composed", ["score and mask", "sinks", "map", "copies", "nothing"])
def test_dynamo_captures_the_module_whole(composed: str, compilations: CompileCounter) -> None:
    """One graph, which a GPU compiles; it runs here as torch's reference."""
    sinks, bias = torch.randn(2), torch.randn(2, 300)
    chosen: dict[str, Any] = {
        "score and mask": {"score_mod": v.alibi, "mask": v.causal},
        "sinks": {"sinks": lambda: sinks, "mask": v.causal},
        "map": {"blocks": fa4flex.BlockMap.from_dense(torch.rand(5, 5) < 0.5, 64, 300, 300)},
        "copies": {"score_mod": lambda s, b, h, q, kv: s + bias[h, q] * bias[h, kv] * bias[0, 0]},
        "nothing": {},
    }[composed]
    program = fa4flex.compile(**chosen, backend="flex")._calling().prepared.program
    made: list[Module] = []
    uncompiled = Module.uncompiled

    def both(module: Module) -> Any:
        reference, captured = uncompiled(module), module.compiled()
        made.append(module)

        def attend(*given: Any) -> Any:
            found, wanted = captured(*given), reference(*given)
            torch.testing.assert_close(found, wanted)
            return wanted

        return attend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "uncompiled", both)
        patch.setattr(engines, "places_of", lambda facts, slots: frozenset([0]) if slots else slots)
        attn = fa4flex.compile(**chosen, backend="flex")
        assert attn._calling().prepared.program.flex is program.flex
        right(attn, qkv(), return_lse=True)
    assert compilations.frame_count == 1 and len(made) == 1
