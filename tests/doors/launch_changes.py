"""Calls of kernels that are changed in one respect at a time, and what was launched, compared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_gpu_calls import Recorder
from torch import Tensor

from fa4flex import lower as lower_module
from fa4flex.kernels.plan.arguments import COUNTERS, forward_schema
from fa4flex.kernels.plan.keys import CONTIGUOUS, Codes, eight_bit, in_pages, of_codes
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime import compute, launch, programs
from fa4flex.runtime.call import Call, SequenceLengths
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches import ready as ready_module
from fa4flex.runtime.cuda.launches import ready_backward
from fa4flex.runtime.key_sources import Contiguous

S, HEADS = 300, 4


def recording(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Recorder of compilations and launches, forward and backward, from now on."""
    recorder, zeros = Recorder(), torch.zeros(COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(lower_module, "compile_kernel", recorder.compile)
    monkeypatch.setattr(lower_module, "compile_ahead", lambda *given: None)
    for module in (ready_module, ready_backward):
        monkeypatch.setattr(module, "counters", lambda device: zeros)
    monkeypatch.setattr(engine_module, "target_of", lambda device: SM90A)
    return recorder


def calls_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The same for calls of Attention objects, whose CPU tensors go the way of a GPU's. Nothing is ready from
    other tests, and each Attention has an engine of its own."""
    monkeypatch.setattr(launch, "publish", programs.Published)
    monkeypatch.setattr(programs, "_engine", programs._engine.__wrapped__)
    monkeypatch.setattr(launch, "_prepared", weakref.WeakKeyDictionary())
    monkeypatch.setattr(compute, "on_gpu", lambda q: True)
    monkeypatch.setattr(in_place, "target_of", lambda device: SM90A)
    return recording(monkeypatch)


# --- changes ------------------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor of another device, as far as keys can tell."""

    def get_device(self) -> int:
        return 1


def elsewhere(x: Tensor) -> Tensor:
    return x.as_subclass(Elsewhere)


def shifted(x: Tensor) -> Tensor:
    """The same contents, one element behind an aligned address."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
    assert memory.data_ptr() % 16
    return memory.as_strided(x.shape, x.stride(), memory.storage_offset()).copy_(x)


def strided(x: Tensor) -> Tensor:
    """The same contents, the last dimension but one (or the only one) with other strides."""
    if x.ndim == 1:
        return x.repeat_interleave(2)[::2]
    return x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.ndim > 2 else x.t().contiguous().t()


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": strided,
    "dtype": lambda x: x.half() if x.is_floating_point() else x.long(),
    "alignment": shifted,
    "device": elsewhere,
}
"""Changes of what a tensor looks like. Its shape is changed case by case."""


def crooked(x: Tensor) -> Tensor:
    """The same contents in rows that are no multiple of 16 bytes apart."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


HEADS_LOOKS = {**{name: LOOKS[name] for name in ("dtype", "alignment", "device")}, "rows": crooked}
"""Properties of tensors of heads that a launch depends on: others of their strides and extents it reads
itself."""

ARRAY_LOOKS = {**{name: LOOKS[name] for name in ("strides", "dtype", "device")}}
"""The same of lengths and statistics."""

Change = Callable[[Call], Call]


def field(name: str, change: Callable[[Any], Any]) -> Change:
    def changed(call: Call) -> Call:
        if name in call.kv._fields:
            return call._replace(kv=call.kv._replace(**{name: change(getattr(call.kv, name))}))  # type: ignore[attr-defined]
        return call._replace(**{name: change(getattr(call, name))})

    return changed


def of_tensors(names: tuple[str, ...], looks: dict[str, Callable[[Tensor], Tensor]]) -> dict[str, Change]:
    return {f"{name}: {look}": field(name, looks[look]) for name in names for look in looks}


def of_all(change: Callable[[Tensor], Tensor], **others: Any) -> Change:
    """q, k and v changed together."""
    return lambda call: call._replace(
        q=change(call.q), kv=Contiguous(change(call.kv.k), change(call.kv.v)), **others
    )


def with_length(position: int, change: Callable[[Tensor], Tensor | None]) -> Change:
    def changed(call: Call) -> Call:
        name = SequenceLengths._fields[position]
        changed = {name: change(call.lengths[position])}
        return call._replace(lengths=call.lengths._replace(**changed))

    return changed


TABLE = torch.linspace(-1, 1, 1024).view(2, 512)


def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any = TABLE, slope: Any = 0.5) -> Any:
    return score + slope * table[kv_idx % 2, q_idx]


# --- comparing ----------------------------------------------------------------------------------------


def afresh(engine: Engine) -> Engine:
    return Engine(engine.facts, engine.schedule, engine.precision, engine.kinds)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        return alike and torch.equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def described(recorder: Recorder, results: tuple[int, ...]) -> tuple[Any, ...]:
    """The last launch: what was compiled last, and the arguments; of results what they look like."""
    given = [
        (x.shape, x.stride(), x.dtype) if i in results and x is not None else x
        for i, x in enumerate(recorder.launches[-1])
    ]
    return tuple(given)


RESULTS = (3, 4, 5)


Place = tuple[int, ...]
"""Position of a component in a key: an index into it, into that part of it, and so on."""


def _parts(key: Any) -> tuple[Any, ...]:
    """The parts of a key, or of what a tensor looks like; of others none."""
    looks = (torch.dtype, torch.Size)
    deep = isinstance(key, tuple) and any(isinstance(x, looks) or _parts(x) for x in key)
    return key if deep else ()


def components(key: Any) -> dict[Place, Any]:
    """Components of a key by position; descriptions of tensors are taken apart, too."""
    parts = enumerate(_parts(key))
    found = {(i, *place): x for i, part in parts for place, x in components(part).items()}
    return found or {(): key}


def alone(base: Any, other: Any) -> set[Place]:
    """The components of `base` that differ, if it is one."""
    found = _differing(base, other)
    return found if len(found) == 1 else set()


def _differing(base: Any, other: Any) -> set[Place]:
    parts, others = _parts(base), _parts(other)
    if not parts or len(parts) != len(others):
        return set() if base == other else {()}
    pairs = enumerate(zip(parts, others, strict=True))
    return {(i, *place) for i, (a, b) in pairs for place in _differing(a, b)}


def without(key: Any, place: Place) -> Any:
    """A key that lacks a component."""
    at, *rest = place
    part = (without(key[at], tuple(rest)),) if rest else ()
    return (*key[:at], *part, *key[at + 1 :])


_CODES = of_codes(Codes("int8", "float8_e4m3fn"))
_SCHEMAS = [forward_schema(keys) for keys in (CONTIGUOUS, in_pages(16), eight_bit(16), _CODES)]
NAMES = {len(schema.names): schema.names for schema in _SCHEMAS}
"""Names of the arguments of forward launches, by how many there are."""


def by_name(arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments of a forward launch."""
    return dict(zip(NAMES[len(arguments)], arguments, strict=True))
