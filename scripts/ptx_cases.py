"""The calls whose kernels ptx_digests.py compiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import captured_cases
import torch
from cuda_cases import FEW, VARIANTS, Composition, Draw, Sizes, of_lengths
from kernel_programs import GYM, Cache, Kind, Width

from fa4flex import BlockMap, Precision, Schedule

CHIPS, PASSES = ("sm_90a", "sm_100a"), ("forward", "backward")
WIDTHS: tuple[Width, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
USUAL: tuple[Width, ...] = ((128, 128),)
SOME: dict[str, tuple[Width, ...]] = {
    "forward": ((64, 64), (128, 128)),
    "backward": ((64, 64), (128, 128), (192, 128)),
}
"""Head widths by pass, one for each kind of pipeline."""


@dataclass(frozen=True)
class Case:
    chip: str
    direction: str
    composition: str
    width: Width
    how: str
    kind: Kind

    @property
    def name(self) -> str:
        heads = "/".join(map(str, dict.fromkeys(self.width)))
        return f"{self.chip} {self.direction} {self.composition} d{heads} {self.how}"


# --- compositions -----------------------------------------------------------------------------------------


def _far(sizes: Sizes) -> Composition:
    """A score whose index arithmetic passes 2^31."""
    return {"score_mod": lambda s, b, h, q, k: s + 1e-12 * ((q + 1) * 50_000_000 + k)}


def _mapped(**more: Any) -> Draw:
    def make(s: Sizes) -> Composition:
        listed = torch.rand(s.batch, 1, -(-s.q_len // 128), -(-s.kv_len // 128)) < 0.6
        return {"blocks": BlockMap.from_dense(listed, 128, s.q_len, s.kv_len), **more}

    return Draw(make)


def _learned(make: captured_cases.Make) -> Draw:
    """A score of tensors that ask for gradients."""
    return Draw(
        lambda s: make(captured_cases.Grid(s.batch, s.heads, s.q_len, s.kv_len))[0], of_lengths(517, 701)
    )


PLAIN = {"plain": FEW["dense"]} | {
    f"{name} {number}" if number > 1 else name: draw
    for name, draws in VARIANTS.items()
    for number, draw in enumerate(draws, 1)
}
OTHER = {
    "far": Draw(_far),
    "block map": _mapped(),
    "block map and mask": _mapped(mask=lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != 0),
}
LEARNED = {f"learned {name}": _learned(make) for name, make in captured_cases.CASES.items()}
DRAWS = PLAIN | OTHER | LEARNED
RAGGED = (
    "plain", "causal", "alibi", "softcap 2", "document 2", "learned_bias", "gpt_oss_sinks", "bigbird",
)  # fmt: skip
"""Compositions for ragged batches, one for each kind of code, as cuda_cases.FEW."""

# --- how they are called ----------------------------------------------------------------------------------

Calls = Mapping[str, Mapping[str, Any]]
"""Fields of Kind besides its draw, by the words of a line for them."""

LENGTHS = ("dense", "packed", "used")
PER = "", "head", "page", "token"


def _at_lengths(how: str, **call: Any) -> Calls:
    return {f"{lengths}, {how}": {"lengths": lengths, **call} for lengths in LENGTHS}


def _scheduled(**schedule: Any) -> dict[str, Any]:
    return {"options": {"schedule": Schedule(**schedule)}}


DENSE: Calls = {"dense": {}}
OF_LENGTHS: Calls = {lengths: {"lengths": lengths} for lengths in LENGTHS[1:]}
EITHER: Calls = {
    "float16": {"sizes": Sizes(dtype=torch.float16)},
    "tokens before heads": {"heads_first": False},
    "negative scale": {"options": {"scale": -0.125}},
    "used queries": {"lengths": "used queries"},
    "used both": {"lengths": "used both"},
    "packed, used both": {"lengths": "packed, used both"},
}
BY_WORK = _at_lengths("longest first", **_scheduled(order="longest_first"))
FORWARD: Calls = {
    "float16 output": {"options": {"precision": Precision(output=torch.float16)}},
    "float32 output": {"options": {"precision": Precision(output=torch.float32)}},
    "with maxima": {"statistics": ("lse", "max_scores")},
    "maxima alone": {"statistics": ("max_scores",)},
    "no statistics": {"statistics": ()},
    "100 queries": {"sizes": Sizes(q_len=100)},
    "200 queries": {"sizes": Sizes(q_len=200)},
    "tile 64": _scheduled(tile=(64, 64)),
    "tile 128": _scheduled(tile=(128, 128)),
    **_at_lengths("row major", **_scheduled(order="row_major")),
    **BY_WORK,
    **_at_lengths("in turn", **_scheduled(next_tile="in_turn")),
    **_at_lengths("counter", **_scheduled(next_tile="counter")),
    **_at_lengths("launch control", **_scheduled(next_tile="launch_control")),
}
FEW_QUERIES = Sizes(q_len=2, kv_len=2300)
CACHED: Calls = {
    "few queries": {"sizes": FEW_QUERIES},
    **{
        f"{words}, pages of {size}": {"cache": Cache(size), **call}
        for size in (1, 16, 128)
        for words, call in {
            "few queries": {"sizes": FEW_QUERIES},
            "many queries": {},
            "packed": {"lengths": "packed", "sizes": Sizes(heads=8, kv_heads=2)},
        }.items()
    },
    **{
        f"few queries, e4m3 by {per or 'none'}": {"sizes": FEW_QUERIES, "cache": Cache(0, True, per)}
        for per in PER[:2]
    },
    **{
        f"few queries, e4m3 by {per}, pages of {size}": {
            "sizes": FEW_QUERIES,
            "cache": Cache(size, True, per),
        }
        for per, size in zip(PER[1:], (1, 16, 64), strict=True)
    },
}
"""Calls of serving, one for each loader of each pipeline."""

LONG = Sizes(kv_len=2300)
"""So many keys that pairs of CTAs pay, also on average of two packed sequences."""

MANY_KEYS = _at_lengths("many keys", sizes=LONG)
BACKWARD: Calls = {
    **_at_lengths("lse too", dlse=True),
    **MANY_KEYS,
    "dense, many keys, lse too": {"sizes": LONG, "dlse": True},
    "dense, few tiles": {"sizes": Sizes(batch=1, heads=4, kv_heads=2)},
    "dense, many keys, deterministic": {"sizes": LONG, **_scheduled(deterministic=True)},
}
DETERMINISTIC = _at_lengths("deterministic", **_scheduled(deterministic=True))

# --- which of them are compiled ---------------------------------------------------------------------------

Chosen = Iterator[tuple[str, Width, str, Kind]]


def _called(names: Iterable[str], calls: Calls, widths: Iterable[Width]) -> Chosen:
    for name, (how, call), width in product(names, calls.items(), widths):
        yield name, width, how, Kind(DRAWS[name], **call)


def _either(some: tuple[Width, ...]) -> Chosen:
    """Cases of both passes, some of them at these widths."""
    yield from _called(PLAIN, DENSE, WIDTHS)
    yield from _called(RAGGED, OF_LENGTHS, WIDTHS)
    yield from _called((name for name in VARIANTS if name not in RAGGED), OF_LENGTHS, USUAL)
    yield from _called(("causal", "document 2"), EITHER, some)
    yield from _called(OTHER, DENSE, some)
    yield from ((name, width, "dense", kind) for (name, kind), width in product(GYM.items(), USUAL))


def _forward() -> Chosen:
    some = SOME["forward"]
    yield from _either(some)
    yield from _called(("plain", "causal"), FORWARD, some)
    yield from _called(("causal",), CACHED, some)
    yield from _called(("plain", "alibi", "document 2"), {"few queries": CACHED["few queries"]}, USUAL)
    yield from _called(("gpt_oss_sinks",), {"no statistics": FORWARD["no statistics"]}, USUAL)
    yield from _called(("alibi", "softcap 2", "document 2"), BY_WORK, USUAL)
    yield from _called(("learned strided", "learned by distance, from the end"), DENSE, USUAL)


def _backward() -> Chosen:
    some = SOME["backward"]
    yield from _either(some)
    yield from _called(("plain", "causal", "gpt_oss_sinks"), BACKWARD, some)
    yield from _called(("alibi", "prefix_lm"), MANY_KEYS, USUAL)
    yield from _called(("plain", "causal", "learned slopes"), DETERMINISTIC, WIDTHS)
    yield from _called((name for name in RAGGED if name not in ("plain", "causal")), DETERMINISTIC, some)
    yield from _called(LEARNED, DENSE, some)


@cache
def cases() -> dict[str, Case]:
    """All cases by name."""
    found: dict[str, Case] = {}
    for direction, chosen in zip(PASSES, (_forward, _backward), strict=True):
        for (*which, kind), chip in product(chosen(), CHIPS):
            case = Case(chip, direction, *which, kind)
            if case.name in found:
                raise ValueError(f"two cases are {case.name!r}")
            found[case.name] = case
    return found
