"""Keys of what is kept between launches: a change of each component alone leads to another entry, which
launches what an engine that has seen nothing else launches. Kernels are left out: see test_gpu_calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from launch_changes import (
    ARRAY_LOOKS,
    HEADS,
    HEADS_LOOKS,
    LOOKS,
    Change,
    S,
    afresh,
    alone,
    components,
    described,
    field,
    mod,
    of_all,
    of_tensors,
    recording,
    same,
    shifted,
    strided,
    with_length,
    without,
)
from test_gpu_calls import Recorder, call_of
from torch import Tensor

import fa4flex
from fa4flex.runtime.call import Call, SequenceLengths
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda.calls.launch_cache import MISSING, key_of
from fa4flex.runtime.cuda.calls.looks import array_look
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.key_sources import Contiguous, EightBit
from ptxsim import active as simulated


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


# --- one change at a time -----------------------------------------------------------------------------

DENSE: dict[str, Change] = {
    **of_tensors(("q", "k", "v"), HEADS_LOOKS),
    **of_tensors(("sinks",), {**LOOKS, "shape": lambda x: x[:3]}),
    "k: shape": field("k", lambda x: x[:, :, :200]),
    "fewer heads": field("q", lambda x: x[:, :2]),
    **{f"operand: {look}": field("operands", lambda x, f=f: (f(x[0]),)) for look, f in LOOKS.items()},
    "operand: shape": field("operands", lambda x: (x[0][:, :400],)),
    "no sinks": lambda call: call._replace(sinks=None),
    "number": lambda call: call._replace(scalars=(call.scalars[0] + 1, *call.scalars[1:])),
    "another number": lambda call: call._replace(scalars=(*call.scalars[:-1], call.scalars[-1] + 1)),
    "negative scale": lambda call: call._replace(scale=-call.scale),
    "scale 0": lambda call: call._replace(scale=0.0),
    "layout": of_all(lambda x: x.transpose(1, 2), heads_first=False),
    "no statistics": lambda call: call._replace(statistics=()),
    "maximum": lambda call: call._replace(statistics=("lse", "max_scores")),
    "queries used": field("lengths", lambda x: x._replace(seqused_q=torch.tensor([S, 7], dtype=torch.int32))),
    "keys used": field("lengths", lambda x: x._replace(seqused_k=torch.tensor([S, 7], dtype=torch.int32))),
}


class Alike(Contiguous):
    """Source of the same fields, which kernels read in another way, as far as a key knows."""


DENSE["source"] = lambda call: call._replace(kv=Alike(*call.kv))


def with_scale(name: str, change: Callable[[Any], Any]) -> Change:
    return field("kv", lambda x: x._replace(**{name: change(getattr(x, name))}))


SCALED = {
    f"{name}: {look}": with_scale(name, LOOKS[look])
    for name in ("k_scale", "v_scale")
    for look in ("dtype", "device")
}
SCALED |= {f"{name}: page": with_scale(name, lambda x: "page") for name in ("k_per", "v_per")}


class Another(EightBit):
    """Source of the same fields, which kernels read in another way."""


SCALED["no scales of keys"] = lambda call: call._replace(kv=call.kv._replace(k_scale=None, k_per=""))
SCALED["source"] = lambda call: call._replace(kv=Another(*call.kv))
USED = {
    f"{name}: {look}": with_length(at, change)
    for at, name in ((2, "seqused_q"), (3, "seqused_k"))
    for look, change in {**ARRAY_LOOKS, "none": lambda x: None}.items()
}
PACKED = {
    f"{name}: {look}": with_length(at, change)
    for at, name in ((0, "cu_seqlens_q"), (1, "cu_seqlens_k"))
    for look, change in ARRAY_LOOKS.items()
}


def packed_fewer(call: Call) -> Call:
    return call._replace(
        lengths=SequenceLengths(*(None if x is None else x[[0, 1, 3]] for x in call.lengths))
    )


def attention(window: int = 70) -> fa4flex.Attention:
    return fa4flex.compile(mod, lambda b, h, q, kv: q - kv < window, sinks=torch.randn(HEADS))


def dense() -> tuple[Engine, Call]:
    return call_of(attention())


def used() -> tuple[Engine, Call]:
    lengths = torch.tensor([S, 7], dtype=torch.int32), torch.tensor([200, S], dtype=torch.int32)
    return call_of(attention(), lengths=(None, None, *lengths))


def packed() -> tuple[Engine, Call]:
    q, k, v = (torch.randn(S, heads, 64, dtype=torch.bfloat16) for heads in (HEADS, 2, 2))
    cu = [torch.tensor([0, n, 200, S], dtype=torch.int32) for n in (100, 150)]
    return call_of(attention(), (q, k, v), (*cu, None, None))


def scaled() -> tuple[Engine, Call]:
    """Few queries over an e4m3 cache."""
    shapes = (2, HEADS, 1, 64), (2, 2, S, 64), (2, 2, S, 64)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    engine, call = call_of(attention(), (q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)))
    return engine, call._replace(kv=EightBit(*call.kv, torch.ones(2, 2), torch.ones(2, 2), "head", "head"))


CASES: dict[str, tuple[Callable[[], tuple[Engine, Call]], Change]] = {
    **{f"dense, {name}": (dense, change) for name, change in DENSE.items()},
    **{f"used, {name}": (used, change) for name, change in USED.items()},
    **{f"packed, {name}": (packed, change) for name, change in PACKED.items()},
    **{f"scaled, {name}": (scaled, change) for name, change in SCALED.items()},
}

SHARED: dict[str, tuple[Callable[[], tuple[Engine, Call]], Change]] = {
    **{f"dense, {name}: strides": (dense, field(name, strided)) for name in ("q", "k", "v")},
    "dense, queries": (dense, field("q", lambda x: x[:, :, :280])),
    "dense, keys": (dense, lambda call: call._replace(kv=Contiguous(*(x[:, :, :99] for x in call.kv)))),
    "dense, batch": (dense, of_all(lambda x: x[:1])),
    "packed, fewer sequences": (packed, packed_fewer),
    "scaled, strides": (scaled, with_scale("k_scale", strided)),
    "scaled, alignment": (scaled, with_scale("v_scale", shifted)),
    **{f"used, {name}: alignment": (used, with_length(at, shifted)) for at, name in ((2, "q"), (3, "k"))},
    **{f"packed, {name}: alignment": (packed, with_length(at, shifted)) for at, name in ((0, "q"), (1, "k"))},
}
"""Changes of what a launch reads from its tensors."""


RESULTS = (3, 4, 5)


def assert_launched_as_alone(recorder: Recorder, engine: Engine, call: Call) -> None:
    """The last launch is what this call gets from an engine that knows no other."""
    compiled, launched = (recorder.problems[-1], recorder.signatures[-1]), described(recorder, RESULTS)
    afresh(engine).run(call)
    assert compiled == (recorder.problems[-1], recorder.signatures[-1])
    assert same(launched, described(recorder, RESULTS))


@pytest.mark.parametrize("name", CASES)
def test_each_component_leads_to_another_launch(recorder: Recorder, name: str) -> None:
    make, change = CASES[name]
    engine, call = make()
    engine.run(call)
    first, changed = engine.find(call), change(call)
    assert first is not MISSING and engine.find(changed) is MISSING, "an entry of another call is found"
    engine.run(changed)
    assert engine.find(call) is first and engine.find(changed) not in (MISSING, first)
    assert_launched_as_alone(recorder, engine, changed)


@pytest.mark.parametrize("name", SHARED)
def test_what_a_launch_reads_itself_leads_to_the_same(recorder: Recorder, name: str) -> None:
    make, change = SHARED[name]
    engine, call = make()
    engine.run(call)
    first, changed = engine.find(call), change(call)
    assert first is not MISSING and engine.find(changed) is first
    engine.run(changed)
    assert len(recorder.problems) == 1, "nothing is compiled"
    assert_launched_as_alone(recorder, engine, changed)


TABLES = {
    "dense": (dense, DENSE),
    "used": (used, USED),
    "packed": (packed, PACKED),
    "scaled": (scaled, SCALED),
}


LENGTHS, SCALES = 2, 3
"""Positions of the lengths and of scales in a look."""


def look(call: Call) -> Any:
    found = key_of(call)
    assert found is not None
    return found[0]


def test_large_integers_are_launched_by_others(recorder: Recorder) -> None:
    engine, call = dense()
    engine.run(call)
    engine.bits = ((0, 40),)  # it was seen to hold large integers
    assert engine.find(call) is MISSING


@pytest.mark.parametrize("kind", TABLES)
def test_every_component_is_changed_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases above are complete: whichever component were left out of the key, one of them would fail."""
    make, table = TABLES[kind]
    call = make()[1]
    base = look(call)
    assert kind in ("dense", "scaled") or base[LENGTHS] == tuple(
        None if x is None else array_look(x) for x in call.lengths
    )
    found = set().union(*(alone(base, look(change(call))) for change in table.values()))
    whole = components(base)
    if kind == "dense":
        monkeypatch.setattr(simulated, "gpu", lambda: ("simulated sm_90a", None))
        found |= alone(base, look(call))
        expected = set(whole)
    else:
        # Both kinds need all that is given.
        given = {place for place in whole if place[0] == (SCALES if kind == "scaled" else LENGTHS)}
        expected = {x for x in given if whole[x] is not None}
    assert expected <= found


@pytest.mark.parametrize("kind", TABLES)
def test_a_key_without_a_component_finds_what_is_stale(
    recorder: Recorder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stale entries that the cases look for would be seen."""
    make, table = TABLES[kind]
    engine, call = make()

    def blind(call: Call, place: Any) -> Any:
        found = key_of(call)
        return found and (without(found[0], place), found[1])

    for name, change in table.items():
        for place in alone(look(call), look(change(call))):
            with monkeypatch.context() as patch:
                patch.setattr(engine_module, "key_of", partial(blind, place=place))
                other = afresh(engine)
                other.run(call)
                assert other.find(change(call)) is other.find(call) is not MISSING, name


def test_a_simulated_gpu_has_launches_of_its_own(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, call = dense()
    engine.run(call)
    monkeypatch.setattr(simulated, "gpu", lambda: ("simulated sm_90a", None))
    assert engine.find(call) is MISSING
    engine.run(call)
    assert len(recorder.problems) == 2


def test_a_number_that_equals_another_is_another(recorder: Recorder) -> None:
    """0.0 and -0.0 are equal, and their inverses are not."""
    engine, call = call_of(fa4flex.compile(lambda s, b, h, q, kv, c=0.0: s + 1 / (c * (q + 1))))
    engine.run(call)
    engine.run(call._replace(scalars=(-0.0,)))
    assert [repr(tuple(given[13])) for given in recorder.launches] == ["(0.0,)", "(-0.0,)"]


# --- how captured tensors are read ----------------------------------------------------------------------


def pairs_of(x: Tensor) -> bool:
    """True if, by addresses, elements 2 i and 2 i + 1 of every row are neighbours in one aligned word."""
    size, places = x.element_size(), torch.arange(x.untyped_storage().nbytes() // x.element_size())
    if x.ndim == 0:
        return False
    at = places.as_strided(x.shape, x.stride(), x.storage_offset()) * size + x.untyped_storage().data_ptr()
    rows = at.reshape(-1, x.shape[-1])
    first, second = rows[:, 0 : x.shape[-1] // 2 * 2 : 2], rows[:, 1::2]
    return bool((first % (2 * size) == 0).all() and (second - first == size).all())


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x[:192].view(4, 6, 8),
    "one element later": lambda x: x[1:].as_strided((4, 6, 8), (48, 8, 1), 1),
    "two elements later": lambda x: x.as_strided((4, 6, 8), (48, 8, 1), 2),
    "odd rows": lambda x: x.as_strided((4, 6, 8), (54, 9, 1)),
    "odd matrices": lambda x: x.as_strided((4, 6, 8), (49, 8, 1)),
    "even, with gaps": lambda x: x.as_strided((4, 6, 8), (60, 10, 1)),
    "every other element": lambda x: x.as_strided((4, 6, 8), (96, 16, 2)),
    "columns": lambda x: x.as_strided((4, 6, 8), (48, 1, 6)),
    "one row": lambda x: x[:8],
    "one odd row": lambda x: x[1:9],
    "one number": lambda x: x[0],
}


def reading(table: Tensor) -> fa4flex.Attention:
    """Variant that reads a table of 0, 1 or 3 dimensions."""

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        index: tuple[Any, ...] = {0: (), 1: (kv % 8,), 3: (h, q % 6, kv % 8)}[table.ndim]
        return s + (table[index] if index else table)

    return fa4flex.compile(mod)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.int64), ids=str)
@pytest.mark.parametrize("name", READ)
def test_how_a_captured_tensor_is_read_follows_its_layout(
    recorder: Recorder, name: str, dtype: torch.dtype
) -> None:
    """Alone, and after one of the same size that can be read in pairs."""
    memory = torch.arange(512).to(dtype)
    table = READ[name](memory)
    engine, call = call_of(reading(table))
    engine.run(call._replace(operands=(table.contiguous().clone(),)))
    assert recorder.signatures[-1].even_rows == (table.ndim > 0,)
    engine.run(call)
    assert recorder.signatures[-1].even_rows == (pairs_of(table),)
    assert recorder.signatures[-1].unit_strides == (table.ndim == 0 or table.stride(-1) == 1,)
