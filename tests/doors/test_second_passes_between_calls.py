"""Sums per key, and probabilities, follow changes between calls of one attention: each field of a variant
and what a call brings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from test_between_calls import FIELDS, ORDER, PLAIN, QKV, block_map, exact, other_fields, turned
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.runtime.launch import Caller
from fa4flex.variant import Variant, at_call, changed, compose


def check(attn: fa4flex.Attention, variant: Variant, **options: Any) -> None:
    """variant: with the options."""
    (q, k, _), (given_q, given_k, _) = QKV, turned(attn.variant, PLAIN)
    lse = exact(variant, PLAIN)[1]
    true = reference.probabilities(q, k, lse, variant.score_mod, variant.allowed, scale=variant.scale)
    found = attn.key_mass(given_q, given_k, lse, **options)
    rows = attn.probabilities(given_q, given_k, lse, slice(None, None, 9), **options)
    torch.testing.assert_close(found, true.sum(2), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(rows, true[:, :, ::9], atol=1e-12, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_one_attention_change(name: str) -> None:
    for others in other_fields(name):
        base = compose(**others)
        value = getattr(compose(**{name: FIELDS[name]}), name)
        pair, caller = (base, changed(base, **{name: value})), Caller()
        for which in ORDER:
            variant = pair[which]
            check(fa4flex.Attention(variant, caller), variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"scale": 0.75}, {"blocks": block_map(3)}, {"sinks": torch.ones(2)}], ids=str
)
def test_what_a_call_brings_changes(options: dict[str, Any]) -> None:
    for others in other_fields(next(iter(options))):
        attn = fa4flex.Attention(compose(**others), Caller())
        for which in ORDER:
            given = options if which else {}
            check(attn, at_call(attn.variant, **given), **given)


def test_captured_values_change() -> None:
    table, slope = torch.zeros(64), 1.0

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        found: Tensor = s * slope + table[kv_idx]
        return found

    attn = fa4flex.compile(score_mod=score)
    for _ in range(3):
        table.normal_()
        slope *= 0.5
        check(attn, attn.variant)
        table = table.clone()
        check(attn, attn.variant)


DTENSORS = """
import torch, torch.distributed as dist, fa4flex
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
tensors = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8), torch.zeros(1, 2, 4)
given = [distribute_tensor(x, mesh, [Replicate()]) for x in tensors]
for function in (fa4flex.key_mass, fa4flex.probabilities):
    try:
        function(*given)
    except fa4flex.UnsupportedError as error:
        assert "of DTensors" in str(error), error
    else:
        raise AssertionError("not refused")
"""


@pytest.mark.slow
def test_dtensors_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", DTENSORS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
