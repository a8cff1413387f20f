"""Rows that are timed: dense, variants, few queries and backward passes, of the benchmark's kinds."""

from __future__ import annotations

from fa4flex.bench.suites import SUITES, Row

ROUNDS = 5

_DECODE = (
    Row("decode 16 x 8k 32:8", 16, 32, 1, 128, kv_heads=8, kv_length=8192),
    Row("decode 4 x 64k 32:8", 4, 32, 1, 128, kv_heads=8, kv_length=65536),
)
_NAMES = {
    "dense": ("d64 causal 4k", "d128 full 4k", "d128 causal 4k", "d128 causal 16k"),
    "variants": ("alibi+causal", "softcap+causal", "sliding", "document"),
    "backward": ("d64 causal 4k", "d128 full 4k", "d128 causal 4k", "d128 causal 16k"),
}


def _rows() -> dict[str, Row]:
    rows = {f"decode: {row.name}": row for row in _DECODE}
    for suite, names in _NAMES.items():
        chosen = {row.name: row for row in SUITES[suite]}
        rows |= {f"{suite}: {name}": chosen[name] for name in names}
    return rows


ROWS = _rows()
"""Rows by suite and name, in the order in which they are timed."""


def row_named(name: str) -> Row:
    return ROWS[name]
