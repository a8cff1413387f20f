"""Mods that are assigned to layers by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fa4flex import variants
from fa4flex.errors import InputError, UnsupportedError
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
    layers.assign_from("0, 1-3 = sliding_window(2); 12-13=sliding_window(3) ;vision.*=sliding_window(4)")
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
        layers.assign_from("alibi")
    with pytest.raises(InputError, match="a path, or"):
        layers.assign_from(["alibi"])


# --- files ----------------------------------------------------------------------------------------------

JSON = """{
  "model.layers.*": {"score_mod": "fa4flex.variants:alibi", "mask": "mods.py:near"},
  "1, 4-5": "softcap(30.0)",
  "*.7.*": {"variant": "alibi, sliding_window(64)"}
}"""
PYTHON = """from mods_of_a_test import far
from fa4flex import variants

LAYERS = {
    "model.layers.*": {"score_mod": variants.alibi, "mask": far},
    range(4, 6): "softcap(30.0)",
    1: variants.softcap(30.0),
    "*.7.*": {"variant": "alibi, sliding_window(64)"},
}
"""
MODS = """def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 9


far = near
"""


def written(folder: Path, name: str, text: str) -> Path:
    (folder / "mods.py").write_text(MODS)
    (folder / "mods_of_a_test.py").write_text(MODS)
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(("name", "text"), [("layers.json", JSON), ("layers.py", PYTHON)])
def test_files_assign(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in them are of variants, of files beside them, and of modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    layers.assign_from(str(written(tmp_path, name, text)), "FA4FLEX_LAYERS")

    def of(number: int) -> dict[str, str]:
        found = layers.assigned(f"model.layers.{number}.self_attn.attn")
        return {role: getattr(mod, "__name__", repr(mod)) for role, mod in found.items()}

    assert of(0) == of(6) == {"score_mod": "alibi", "mask": "near"}
    assert of(1) == of(4) == of(5) == {"score_mod": "softcap(30.0)"}
    assert of(7) == {"score_mod": "alibi", "mask": "sliding_window(64)"}
    q, k, v = torch.randn(3, 1, 4, 12, 16, dtype=torch.float64)
    made = layers.LayerAttention(layers.LayerSettings(0.25)).named("model.layers.0.attn")
    i, j = torch.arange(12).view(-1, 1), torch.arange(12)
    s = q @ k.mT * 0.25 + 2.0 ** -(2.0 * torch.arange(1, 5)).view(4, 1, 1) * (j - i)
    p = s.masked_fill((j > i) | (i - j >= 9), -torch.inf).softmax(-1)
    torch.testing.assert_close(made(q, k, v), p @ v)


WRONG = {
    "syntax": ("layers.json", JSON.replace(': "softcap', ' "softcap'), r"layers\.json: Expecting ':'", 3),
    "twice": ("layers.json", JSON.replace("*.7.*", "1, 4-5"), "'1, 4-5' twice", 4),
    "role": ("layers.json", JSON.replace('"variant"', '"scor_mod"'), "layers '\\*.7.\\*' with 'scor_mod'", 4),
    "name": ("layers.json", JSON.replace("softcap", "sofcap"), "did you mean softcap", 3),
    "file": ("layers.json", JSON.replace("mods.py", "nods.py"), "an existing Python file", 2),
    "function": ("layers.json", JSON.replace(":near", ":nearer"), "has no 'nearer'", 2),
    "module": ("layers.json", JSON.replace("fa4flex.variants:", "fa4flex.variant_s:"), "No module named", 2),
    "mask as score": (
        "layers.json",
        JSON.replace("fa4flex.variants:alibi", "causal"),
        "'causal' as score_mod: it is a mask",
        2,
    ),
    "normaliser": ("layers.json", JSON.replace("softcap(30.0)", "softpick"), "normaliser", 3),
    "number": ("layers.json", JSON.replace('"softcap(30.0)"', "30.0"), "30.0", 3),
    "nothing": ("layers.json", JSON.replace('"softcap(30.0)"', "{}"), "with nothing", 3),
    "list": ("layers.json", "[1]", "LAYERS of list", None),
    "syntax of Python": ("layers.py", PYTHON.replace("LAYERS =", "LAYERS = ="), "SyntaxError", 4),
    "error of Python": (
        "layers.py",
        PYTHON.replace("variants.alibi", "variants.alibis"),
        "AttributeError",
        5,
    ),
    "no LAYERS": ("layers.py", "layers = {}", "no LAYERS", None),
    "name in Python": ("layers.py", PYTHON.replace("alibi, sl", "alibis, sl"), "did you mean alibi", 8),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_in_files_are_told_with_their_lines(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, words, line = WRONG[case]
    monkeypatch.syspath_prepend(str(tmp_path))
    path = written(tmp_path, name, text)
    with pytest.raises((InputError, UnsupportedError), match=words) as error:
        layers.assign_from(str(path))
    assert str(path) in str(error.value)
    where = error.value.where
    assert (where and (where.file, where.line)) == (line and (str(path), line))
    assert not layers.assigned("model.layers.0.attn")


def test_files_have_to_be_there() -> None:
    with pytest.raises(InputError, match=r"FA4FLEX_LAYERS=nowhere\.json: No such file"):
        layers.assign_from("nowhere.json", "FA4FLEX_LAYERS")


@pytest.mark.slow
def test_the_variable_names_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, "layers.json", JSON)
    code = "from fa4flex.integrations import layers; print(layers.assigned('model.layers.4.attn'))"
    environment = {"FA4FLEX_LAYERS": str(path), "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "{'score_mod': softcap(30.0)}"


# --- options of engines ---------------------------------------------------------------------------------

OWN = {"fa4flex": {"layers": {"model.layers.3.*": {"mask": "sliding_window(2)"}}}, "another": 1}


def configured(monkeypatch: pytest.MonkeyPatch, additional: Any, **more: Any) -> Any:
    """Configuration that vLLM's layers find, of a model with layers 0 and 3."""
    names = [f"model.layers.{n}.self_attn.attn" for n in (0, 3)]
    config = SimpleNamespace(
        additional_config=additional,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, **more),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names)),
    )
    module: Any = ModuleType("vllm.config")
    module.get_current_vllm_config_or_none = lambda: config
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    return config


def test_vllm_hands_them_on(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is assigned in the process comes first; other engines' layers have none of it."""
    from vllm_engine import SCALE, Definition, Engine, run

    config = configured(monkeypatch, OWN)
    vllm.MetadataBuilder(None, [], config, torch.device("cpu"))
    engine = Engine(vllm)
    run(engine, Definition(SCALE, window=2))
    layers.assign("sliding_window(3)", layers=3)
    run(engine, Definition(SCALE, window=3))
    layers.clear()
    configured(monkeypatch, {})
    run(Engine(vllm), Definition(SCALE))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"layer": {}}, "additional_config with fa4flex: layer\n"),
        ("alibi", "with fa4flex: 'alibi'"),
        ({"layers": {"*": "sofcap(3)"}}, r"additional_config: layers '\*': VARIANT 'sofcap"),
        ({"layers": "0=alibi; 5=alibi"}, r"additional_config: 5=alibi: no layer fits(.|\n)*model.layers.0"),
        ({"layers": {"model.layer.*": "alibi"}}, "no layer fits"),
    ],
)
def test_mistakes_in_options_of_vllm_are_told_at_start(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, own: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        vllm.MetadataBuilder(None, [], configured(monkeypatch, {"fa4flex": own}), torch.device("cpu"))


def test_sglang_hands_them_on(sglang: ModuleType) -> None:
    from test_refused_at_start import Layer, runner

    def backend(said: Any) -> Any:
        settings = {"json_model_override_args": json.dumps(said)}
        return sglang.Backend(runner(Layer(layer_id=0), Layer(layer_id=3), settings=settings))

    made = backend(OWN)
    assert "sliding_window(2)" in repr(made._attention(Layer(layer_id=3)))
    assert "sliding_window(2)" not in repr(made._attention(Layer(layer_id=0)))
    assert "softcap(9.0)" in repr(
        backend({"fa4flex": {"layers": "layers.3=softcap(9.0)"}})._attention(Layer(layer_id=3))
    )
    with pytest.raises(InputError, match=r"json_model_override_args: 7=alibi: no layer fits"):
        backend({"fa4flex": {"layers": "7=alibi"}})
    backend({"rope_theta": 1e4})
