"""Modules that Inductor compiles for a CPU: what a GPU compiles, but for the template around the mods."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from repeated import graph_of

import fa4flex
from fa4flex import variants as v
from fa4flex.runtime.flex.attend import Module

pytestmark = pytest.mark.exhaustive  # each compiles for half a minute and more


def intricate() -> dict[str, Any]:
    """Reads at constant and computed indices, integers of Python, roundings, and numbers alone."""
    bias, table = torch.randn(4, 64), torch.randint(0, 64, (400,))
    place = torch.rand(2, 400)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        least = torch.minimum(kv_idx - q_idx, torch.tensor(5)) // 3
        x = s + bias[h, 0] * 0.1 + bias[h, table[kv_idx] % 64] + (q_idx >> 1) * 0.01
        x = torch.clamp(x + torch.where(kv_idx > q_idx, 1, 2), max=8.0)
        return x + least + place[b, kv_idx].bfloat16() + torch.exp(-torch.abs(s))

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((q_idx // 7) % 3 == (kv_idx // 7) % 3) | (kv_idx < 5) | (table[q_idx] == table[kv_idx])

    return {"score_mod": score, "mask": mask}


COMPOSED = {
    "intricate": intricate,
    "a map alone": lambda: {"blocks": fa4flex.BlockMap.from_dense(torch.rand(5, 7) < 0.5, 64, 300, 400)},
    "alibi, causal": lambda: {"score_mod": v.alibi, "mask": v.causal},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_inductor_compiles_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables take part here, which torch's reference does not look at."""
    monkeypatch.delattr(Module, "uncompiled")
    composed = COMPOSED[name]()
    attn, plain = fa4flex.compile(**composed, backend="flex"), fa4flex.compile(**composed)
    for _ in range(4):  # the last ones by the graph that Inductor compiled
        q, k, value = torch.randn(2, 4, 300, 32), torch.randn(2, 2, 400, 32), torch.randn(2, 2, 400, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = attn(q, k, value)
        torch.testing.assert_close(found, plain(q, k, value), rtol=1e-5, atol=1e-5)
    recent = attn._caller.recent  # type: ignore[union-attr]
    assert recent is not None and graph_of(recent.known.kept[0]) is not None
