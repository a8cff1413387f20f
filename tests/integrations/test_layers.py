"""Mods that are assigned to layers by name."""

from __future__ import annotations

import pytest

from fa4flex import variants
from fa4flex.errors import InputError
from fa4flex.integrations import layers


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.0.self_attn.attn", "sliding_window(2)"),
        ("model.layers.12.self_attn.attn", "sliding_window(3)"),
        ("transformer.h.13", "sliding_window(3)"),
        ("model.layers.14.attn", None),
        ("layer1.attn", None),
        ("vision.7", "sliding_window(4)"),
    ],
)
def test_the_last_assignment_that_fits_counts(name: str, found: str | None) -> None:
    layers.assign(mask=variants.sliding_window(5), layers=0)
    layers.assign_text("0, 1-3 = sliding_window(2); 12-13=sliding_window(3) ;vision.*=sliding_window(4)")
    assigned = layers.assigned(name)
    assert (repr(assigned["mask"]) if assigned else None) == found


def test_attention_is_made_anew_after_assignments() -> None:
    layer = layers.LayerAttention(layers.LayerSettings(1.0))
    first = layer.named("layers.3")
    assert layer.named("layers.3") is first
    layers.assign("softcap(3.0)", layers=3)
    second = layer.named("layers.3")
    assert (
        second is not first and "softcap" in repr(second) and "softcap" not in repr(layer.named("layers.4"))
    )
    layers.clear()
    assert "softcap" not in repr(layer.named("layers.3"))


def test_what_is_asked_comes_before_what_is_assigned() -> None:
    settings = layers.LayerSettings(0.5, window=7, softcap=2.0)
    made = settings.attention({"score_mod": variants.alibi, "mask": variants.sliding_window(3)})
    assert repr(made.variant.score_mod) == "(softcap(2.0) >> alibi())"
    assert repr(made.variant.mask) == "(sliding_window(7) & sliding_window(3))"


def test_mistakes_are_told() -> None:
    with pytest.raises(InputError, match="no mod to assign"):
        layers.assign()
    with pytest.raises(InputError, match="one of them"):
        layers.assign("alibi", mask=variants.causal)
    with pytest.raises(InputError, match="did you mean softcap"):
        layers.assign("sofcap(3)")
    with pytest.raises(InputError, match="LAYERS=VARIANT"):
        layers.assign_text("alibi")
