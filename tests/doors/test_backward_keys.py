"""Keys of backward passes, each component changed alone, and the form that their masks take."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch_changes import (
    ARRAY_LOOKS,
    HEADS,
    HEADS_LOOKS,
    TABLE,
    S,
    afresh,
    alone,
    components,
    described,
    field,
    recording,
    same,
    shifted,
)
from test_gpu_calls import WRITTEN, Recorder, call_of

import fa4flex
from fa4flex.kernels.plan.arguments import SCHEMAS
from fa4flex.runtime.call import Call, SequenceLengths
from fa4flex.runtime.cuda.backward import run_backward
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.known import MOST_KNOWN, Known
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.variants import causal, document
from ptxsim import active as simulated


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


def learned(s: Any, b: Any, h: Any, q: Any, kv: Any, bias: Any = TABLE, gain: Any = TABLE[0]) -> Any:
    return s * gain[q] + bias[kv % 2, q]


def training() -> tuple[Engine, Call, Saved, tuple[int, ...]]:
    """An engine, a call, what its backward pass is given, and whose gradients are wanted."""
    engine, call = call_of(fa4flex.compile(learned, causal))
    lse = torch.randn(2, HEADS, S)
    of_rows = [torch.randn_like(lse) for _ in range(3)]
    saved = Saved(torch.randn_like(call.q), lse, torch.randn_like(call.q), *of_rows)
    return engine, call, saved, (0,)


Step = tuple[Call, Saved, tuple[int, ...]]


def of_saved(saved: Saved, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Saved:
    return saved._replace(**{name: change(getattr(saved, name))})


def sparse(x: torch.Tensor) -> torch.Tensor:
    """The same contents, every other element of a row."""
    return x.repeat_interleave(2, -1)[..., ::2]


SAVED_LOOKS = {
    **dict.fromkeys(("out", "dout"), HEADS_LOOKS),
    **{name: {**ARRAY_LOOKS, "strides": sparse} for name in ("lse", "dlse", "dentropy", "entropy")},
}
BACKWARD: dict[str, Callable[[Step], Step]] = {
    **{
        f"{name}: {look}": lambda x, name=name, look=look: (field(name, HEADS_LOOKS[look])(x[0]), *x[1:])
        for name in ("q", "k", "v")
        for look in HEADS_LOOKS
    },
    **{
        f"{name}: {look}": lambda x, name=name, f=f: (x[0], of_saved(x[1], name, f), x[2])
        for name in Saved._fields
        for look, f in {**SAVED_LOOKS[name], "dtype": lambda x: x.half()}.items()
    },
    "no dlse": lambda x: (x[0], x[1]._replace(dlse=None), x[2]),
    "no entropy": lambda x: (x[0], x[1]._replace(dentropy=None, entropy=None), x[2]),
    "needs nothing": lambda x: (*x[:2], ()),
    "needs the other": lambda x: (*x[:2], (1,)),
    "needs both": lambda x: (*x[:2], (0, 1)),
    "needs both, the other way round": lambda x: (*x[:2], (1, 0)),
}
NAMES = SCHEMAS["backward"].names
FOUND = (*range(NAMES.index("pulled"), NAMES.index("dv_parts") + 1), NAMES.index("cleared"))
"""Positions of the results and workspaces among the arguments; gradients of captured tensors are at SUMS."""
SUMS, TABLES, TURNS, OPERANDS = (NAMES.index(x) for x in ("gradients", "tables", "turns", "operands"))


def described_backward(recorder: Recorder) -> tuple[Any, ...]:
    given = list(described(recorder, FOUND))
    given[SUMS] = [(x.shape, x.stride(), x.dtype) for x in given[SUMS] or ()]
    return tuple(given)


@pytest.mark.parametrize("name", BACKWARD)
def test_each_component_leads_to_another_backward_pass(recorder: Recorder, name: str) -> None:
    engine, *step = training()
    first = run_backward(engine, *step)
    changed = BACKWARD[name](tuple(step))
    run_backward(engine, *step)
    assert first is not None and len(recorder.problems) == len(engine.backward) == 1
    got = run_backward(engine, *changed)
    assert len(engine.backward) == 2 and got is not None
    launched, compiled = described_backward(recorder), (recorder.problems[-1], recorder.signatures[-1])
    assert len(recorder.launches[-1]) == len(SCHEMAS["backward"].names)
    assert [x.shape for x in got.captured] == [changed[0].operands[slot].shape for slot in changed[2]]
    assert ("dlse" in recorder.signatures[-1].given) == (changed[1].dlse is not None)
    assert tuple(slot for slot, _ in recorder.problems[-1].gradients) == changed[2]
    run_backward(engine, *step)
    assert len(engine.backward) == 2, "both are kept"
    run_backward(afresh(engine), *changed)
    assert compiled == (recorder.problems[-1], recorder.signatures[-1])
    assert same(launched, described_backward(recorder))


class Keys:
    """Stand-in for an engine's cache of backward launches: collects the keys that are asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def find(self, key: Any, extents: Any) -> None:
        self.asked.append(key)


def test_every_component_of_a_backward_key_is_changed_alone() -> None:
    """(the forward key, what was saved, needs, deterministic)"""
    engine, *step = training()
    engine.backward = keys = Keys()  # type: ignore[assignment]
    for change in (lambda x: x, *BACKWARD.values()):
        run_backward(engine, *change(tuple(step)))
    torch.use_deterministic_algorithms(True)
    try:
        run_backward(engine, *step)
    finally:
        torch.use_deterministic_algorithms(False)
    base, *others = keys.asked
    found = {tuple(i for i, (a, b) in enumerate(zip(base, other)) if a != b) for other in others}
    assert found == {(i,) for i in range(len(base))}
    assert set(components(base[1])) <= set().union(*(alone(base[1], other[1]) for other in others))


# --- the backward pass of the last call -------------------------------------------------------------------

REPEATED: dict[str, Callable[[Step], Step]] = {
    **{
        name: change for name, change in BACKWARD.items() if not name.startswith("dlse") and name != "no dlse"
    },
    **{
        f"{name}: shape": lambda x, name=name: (field(name, lambda t: t[:, :, :200])(x[0]), *x[1:])
        for name in ("k", "v")
    },
    "past what was proved": lambda x: (x[0]._replace(q=torch.cat([x[0].q] * 20, 2)), *x[1:]),
    "an operand: shape": lambda x: (field("operands", lambda t: (t[0][:400], t[1]))(x[0]), *x[1:]),
    "an operand: alignment": lambda x: (field("operands", lambda t: (t[0], shifted(t[1])))(x[0]), *x[1:]),
    "a number": lambda x: (x[0]._replace(scalars=(2.0,)), *x[1:]),
    "a scale": lambda x: (x[0]._replace(scale=-x[0].scale), *x[1:]),
    "a layout": lambda x: (x[0]._replace(heads_first=False), *x[1:]),
    "statistics": lambda x: (x[0]._replace(statistics=("lse", "max_scores")), *x[1:]),
    "sinks": lambda x: (x[0]._replace(sinks=torch.randn(HEADS)), *x[1:]),
    "lengths": lambda x: (x[0]._replace(lengths=SequenceLengths(seqused_q=torch.tensor([S, 7]))), *x[1:]),
    "dlse": lambda x: (x[0], x[1]._replace(dlse=torch.randn(2, HEADS, S)), x[2]),
}


def repeated() -> tuple[Engine, Call, Saved, tuple[int, ...]]:
    engine, call, saved, needs = training()
    saved = saved._replace(dlse=None)
    for _ in range(3):
        run_backward(engine, call, saved, needs)
    return engine, call, saved, needs


def served(
    engine: Engine, call: Call, saved: Saved, needs: tuple[int, ...] = (), narrow: bool | None = None
) -> bool:
    """True if such a backward pass is launched without a look for its key: by a launch known for all extents,
    by one known for one call's, or by either."""
    kept, found, keys = engine.known_backward.kept, [], engine.backward
    engine.known_backward.kept = tuple(x for x in kept if narrow is None or narrow == (x.valid is None))
    engine.backward = Keys()  # type: ignore[assignment]
    try:
        run_backward(engine, call, saved, needs)
        found = engine.backward.asked  # type: ignore[attr-defined]
    finally:
        engine.backward, engine.known_backward.kept = keys, kept
    return not found


@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("name", REPEATED)
def test_only_what_looks_like_an_earlier_backward_pass_is_one(
    recorder: Recorder, name: str, narrow: bool
) -> None:
    engine, call, saved, needs = repeated()
    assert sorted(one.valid is None for one in engine.known_backward.kept) == [False, True]
    again = (
        call._replace(q=call.q.clone(), kv=Contiguous(call.kv.k.clone(), call.kv.v)),
        saved._replace(dout=saved.dout.clone()),
    )
    assert served(engine, *again, needs, narrow)
    call, saved, needs = REPEATED[name]((call, saved, needs))
    assert not served(engine, call, saved, needs, narrow)
    torch.use_deterministic_algorithms(True)
    try:
        assert not served(engine, *again, needs, narrow)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_other_lengths_and_strides_have_the_prepared_backward_pass(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, layout: str, seed: int
) -> None:
    """They launch what an engine that has seen nothing launches for them."""
    draw, engine = random.Random(seed), None
    either = draw.choice(((1, 128), (129, 300)))  # keys that fit one tile have another program
    for n in range(8):
        batch, q_len, keys = draw.randint(17, 20), draw.randint(1, 300), draw.randint(*either)
        q, k, v, out = (
            torch.randn(batch, heads, length, 64, dtype=torch.bfloat16)
            for heads, length in ((HEADS, q_len), (2, keys), (2, keys), (HEADS, q_len))
        )
        if draw.random() < 0.5:
            k, v = torch.cat((k, v), -1).split(64, -1)
        if layout == "bshd":
            q, k, v, out = (x.transpose(1, 2).contiguous() for x in (q, k, v, out))
        if engine is None:
            attn = fa4flex.compile(mask=causal)
            engine, call = call_of(attn, (q, k, v), heads_first=layout == "bhsd")
        call = call._replace(q=q, kv=Contiguous(k, v))
        saved = Saved(out, torch.randn(batch, HEADS, q_len), torch.randn_like(out), None)
        assert served(engine, call, saved) == (n >= 2)
        run_backward(engine, call, saved)
        launched = described_backward(recorder)
        run_backward(afresh(engine), call, saved)
        assert same(launched, described_backward(recorder))


def test_gradients_that_are_converted_are_repeated_at_their_own_lengths(recorder: Recorder) -> None:
    """A gradient of a sum has strides of 0; it is copied at each launch."""
    engine, call, saved, needs = training()
    saved = saved._replace(dlse=None, dout=saved.dout[:1, :1, :1, :1].expand_as(saved.dout))
    for n in range(4):
        assert served(engine, call, saved, needs) == (n >= 2)
        run_backward(engine, call, saved, needs)
    shorter = call._replace(kv=Contiguous(call.kv.k[:, :, :200], call.kv.v[:, :, :200]))
    assert not served(engine, shorter, saved, needs)


def test_a_simulated_gpu_repeats_its_own_backward_pass(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, call, saved, needs = repeated()
    assert served(engine, call, saved, needs)
    monkeypatch.setattr(simulated, "gpu", lambda: ("simulated sm_90a", None))
    assert not served(engine, call, saved, needs)


def test_large_integers_are_differentiated_by_another_backward_pass(recorder: Recorder) -> None:
    """The repeated one computes with 32 bits."""
    steps = torch.arange(512)
    engine, call = call_of(fa4flex.compile(lambda s, b, h, q, kv: s * (steps[q] + steps[kv]), causal))
    for _ in range(3):
        backward_of(engine, call)
    steps[3] = 1 << 35
    engine.look_at(call)  # as the first forward pass of another look does
    backward_of(engine, call)
    assert [problem.wide_index for problem in recorder.problems] == [False, True]


def test_a_repeated_backward_pass_launches_the_same(recorder: Recorder) -> None:
    engine, call, saved, needs = training()
    saved = saved._replace(dlse=None)
    launched = []
    for n in range(4):
        run_backward(engine, call, saved, needs)
        launched.append(described_backward(recorder))
        assert len(engine.known_backward.kept) == min(n, 2)
    assert all(same(launched[0], other) for other in launched) and len(recorder.problems) == 1


def test_a_repeated_backward_pass_has_tables_of_what_is_there_now(recorder: Recorder) -> None:
    numbers = ids.clone()
    engine, call = call_of(fa4flex.compile(mask=document(numbers)))
    for made in range(1, 9):
        numbers.add_(made // 3)
        backward_of(engine, call)
        assert len(recorder.tables) == made
    assert engine.known_backward.kept


def test_a_backward_pass_of_changing_lengths_is_not_prepared_again_and_again(recorder: Recorder) -> None:
    engine, call = call_of(fa4flex.compile(mask=causal))
    made: list[Known] = []
    for n in range(200, 230):
        backward_of(engine, call._replace(q=call.q[:, :, :n]))
        made += [one for one in engine.known_backward.kept if one not in made]
    assert len(made) < MOST_KNOWN and len(recorder.problems) == 1


def test_packed_sequences_of_other_lengths_have_the_prepared_backward_pass(recorder: Recorder) -> None:
    """They launch what an engine that has seen nothing launches for them."""
    engine = None
    for n in range(5):
        tokens = 200 + 10 * n
        cu = torch.tensor([0, 100 + n, 150, tokens], dtype=torch.int32)
        q, k, v, out = (torch.randn(tokens, x, 64, dtype=torch.bfloat16) for x in (HEADS, 2, 2, HEADS))
        if engine is None:
            engine, call = call_of(fa4flex.compile(mask=causal), (q, k, v), (cu, cu, None, None))  # type: ignore[arg-type]
        call = call._replace(q=q, kv=Contiguous(k, v), lengths=SequenceLengths(cu, cu))
        saved = Saved(out, torch.randn(HEADS, tokens), torch.randn_like(out), None)
        assert served(engine, call, saved) == (n >= 2)
        apart = call._replace(lengths=SequenceLengths(cu, cu.clone()))
        assert not served(engine, apart, saved)
        run_backward(engine, call, saved)
        launched = described_backward(recorder)
        run_backward(afresh(engine), call, saved)
        assert same(launched, described_backward(recorder))


def test_a_prepared_backward_pass_keeps_no_tensor_alive(recorder: Recorder) -> None:
    engine, call, saved, needs = repeated()
    gone = [weakref.ref(x) for x in (call.q, call.kv.k, call.kv.v, *saved[:3])]
    recorder.launches.clear()
    assert len(engine.known_backward.kept) == 2
    del call, saved, needs
    gc.collect()
    assert [x() for x in gone] == [None] * 6


def test_ordered_sums_are_another_backward_pass(recorder: Recorder) -> None:
    engine, call, saved, _ = training()
    run_backward(engine, call, saved)
    torch.use_deterministic_algorithms(True)
    try:
        run_backward(engine, call, saved)
    finally:
        torch.use_deterministic_algorithms(False)
    run_backward(engine, call, saved)
    assert [given[TURNS] is not None for given in recorder.launches] == [False, True, False]
    assert [problem.deterministic for problem in recorder.problems] == [False, True]


# --- masks of backward passes ---------------------------------------------------------------------------

ids = torch.arange(S) // 50
reach = torch.arange(S) * 2


def mixed(b: Any, h: Any, q: Any, kv: Any, step: Any = 1) -> Any:
    """Queries from some one on: -(-kv // step), if step is positive."""
    return q * step >= kv


MASKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no mask": (None, {}, "none"),
    "causal": (causal, {}, "queries"),
    "a row by key": (lambda b, h, q, kv, t=reach: q >= t[kv], {}, "queries"),
    "by number": (mixed, {}, "queries"),
    "by number, not proved": (mixed, {"scalars": (-1,)}, "spans"),
    "every third": (lambda b, h, q, kv: (q - kv) % 3 == 0, {}, "tables"),
    "documents": (document(ids), {}, "tables"),
    "documents in no order": (document(ids), {"operands": (ids.flip(0),)}, "tables"),
}


def backward_of(engine: Engine, call: Call) -> None:
    packed = call.lengths[0] is not None
    lse = torch.randn(HEADS, S) if packed else torch.randn(2, HEADS, S)
    run_backward(engine, call, Saved(torch.randn_like(call.q), lse, torch.randn_like(call.q), None))


@pytest.mark.parametrize("name", MASKS)
def test_backward_masks_have_the_form_that_is_proved(recorder: Recorder, name: str) -> None:
    """Query intervals where kernels can compute them; else block tables, which the device makes."""
    mask, changes, form = MASKS[name]
    engine, call = call_of(fa4flex.compile(mask=mask), **changes)
    backward_of(engine, call)
    problem, launched = recorder.problems[-1], recorder.launches[-1]
    assert problem.mask_form == form
    assert (launched[TABLES] is not None) == (form in ("spans", "tables"))
    assert len(problem.operands) == len(launched[OPERANDS] or ()) == len(call.operands)
    assert len(recorder.tables) == (launched[TABLES] is not None)
    if launched[TABLES] is not None:
        assert launched[TABLES].full_tiles.data_ptr() == recorder.tables[-1][WRITTEN].full_tiles.data_ptr()


@pytest.mark.parametrize("name", ("causal", "every third", "by number, not proved"))
def test_lengths_decide_where_query_intervals_do_not(recorder: Recorder, name: str) -> None:
    """A mask of query intervals that are certain needs nothing anew for other lengths; tables are made."""
    cu = torch.tensor([0, 100, 200, S], dtype=torch.int32)
    qkv = tuple(torch.randn(S, heads, 64, dtype=torch.bfloat16) for heads in (HEADS, 2, 2))
    engine, call = call_of(fa4flex.compile(mask=MASKS[name][0]), qkv, (cu, cu, None, None), **MASKS[name][1])  # type: ignore[arg-type]
    backward_of(engine, call)
    cu.copy_(torch.tensor([0, 10, 290, S]))
    backward_of(engine, call)
    assert len(recorder.launches) == 2
    before, after = (given[TABLES] for given in recorder.launches)
    assert before is after
    assert len(recorder.tables) == (0 if name == "causal" else 2)
    assert (after is None) == (name == "causal")
