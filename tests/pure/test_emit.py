"""Work of generated hooks per score, and the promises of their text."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.build import build
from fa4flex.codegen.emit import Source, emit_forward
from fa4flex.codegen.emit.printer import functions, words
from fa4flex.codegen.expr import apply, const, load, reduce, scalar, sym, to_float
from fa4flex.codegen.ops import OPS
from fa4flex.errors import InputError
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.variant import compose
from fa4flex.variants import alibi, causal, learned_bias, softcap

SCORE = sym("score")


def emitted(facts: Facts, mask_form: str = "none", **problem: Any) -> Source:
    given = {"in_range": True, "wide_index": False, "positive_scale": True, "mask_form": mask_form, **problem}
    return emit_forward(
        facts,
        SimpleNamespace(
            problem=SimpleNamespace(**given),
            target=SimpleNamespace(name="sm_90a"),
            module="fa4flex.kernels.fwd_sm90",
            config=lambda: Config(128, 128, 128, 128),
        ),
    )


def facts_of(**composition: Any) -> Facts:
    return build(compose(**composition)).facts


def body(source: Source, function: str) -> list[str]:
    """Lines of a function that compute: not those that unpack what slower hooks returned."""
    found = re.search(rf"^def {function}\(at\):\n((?:    .*\n)+)", source.text, re.MULTILINE)
    assert found is not None, f"no {function} in\n{source.text}"
    lines = [line.split("  #")[0].strip() for line in found[1].splitlines()]
    return [line for line in lines if not re.search(r"= at\.(uniform|row|column|diagonal|pair)$", line)]


def test_alibi_costs_one_multiply_add_per_diagonal_and_nothing_per_score() -> None:
    """The score starts from it. All that depends on the tile is in parentheses, and the step is a number."""
    source = emitted(facts_of(score_mod=alibi(torch.ones(4))))
    assert body(source, "start_diagonal")[0] == (
        "diagonal_term = at.offset_step * coefficient + (at.offset_base_float * coefficient + coefficient_2)"
    )
    assert body(source, "start") == ["return diagonal_term"]
    assert "def score(" not in source.text and "def factor(" not in source.text


def test_softcap_costs_a_product_and_a_tanh_per_score() -> None:
    lines = body(emitted(facts_of(score_mod=softcap(30.0))), "score")
    assert len(lines) == 2
    assert re.fullmatch(r"product = at\.score \* \w+", lines[0]) and lines[1] == "return tanh(product)"


def test_a_constant_cap_is_the_factor() -> None:
    facts = Facts(apply("mul", const(30.0), apply("tanh", apply("div", SCORE, const(30.0)))))
    (line,) = body(emitted(facts), "factor")
    assert float(re.findall(r"[\d.]+", line.replace("Float32", ""))[0]) == pytest.approx(
        30 / 0.6931471805599453
    )


@pytest.mark.parametrize("op", [row.name for row in OPS.values() if row.slow and row.arity == 1])
def test_slow_functions_of_pairs_are_ready_before_their_scores(op: str) -> None:
    pair = to_float(apply("mul", sym("q"), sym("kv")))
    cheap, slow = (emitted(Facts(apply("mul", SCORE, x))).text for x in (pair, apply(op, pair)))
    assert "def score_pair(" in slow and "def score_pair(" not in cheap


def test_a_relative_table_is_read_once_per_diagonal() -> None:
    source = emitted(facts_of(score_mod=learned_bias(torch.zeros(4, 15))))
    assert "load" in "".join(body(source, "start_diagonal"))
    assert not body(source, "start")[0].count("(")


def test_what_is_added_inside_a_function_waits_for_the_score_in_a_register() -> None:
    """A load needs no score and is done before; a comparison of what is there anyway is not kept."""
    bias = load(0, (sym("q"), sym("kv")), "float")
    near = apply("where", apply("le", sym("kv"), apply("mul", sym("q"), sym("q"))), SCORE, const(0.0))
    source = emitted(Facts(apply("tanh", apply("add", near, bias))))
    assert sum("load" in line for line in body(source, "score_pair")) == 1
    assert "<=" not in "".join(body(source, "score_pair"))
    assert "load" not in "".join(body(source, "score"))
    assert "<=" in "".join(body(source, "score"))


def test_nothing_starts_from_a_sum_with_a_negative_scale() -> None:
    facts = facts_of(score_mod=alibi(torch.ones(4)))
    assert "def start(" not in emitted(facts, positive_scale=False).text


def test_a_load_takes_steps_from_what_a_tile_shares() -> None:
    """Its index at the base, and how far the element lies from there; `even` where the key is the index."""
    q, kv, h = sym("q"), sym("kv"), sym("h")
    two = const(2)
    distance = apply("sub", q, kv)
    cases = {
        (h, q, kv): "t0, (at.h, at.q, at.kv_base), at.guard, (0, 0, at.kv_step), even=True",
        (kv, q): "t0, (at.kv_base, at.q), at.guard, (at.kv_step, 0)",
        (kv, kv): "t0, (at.kv_base, at.kv_base), at.guard, (at.kv_step, at.kv_step)",
        (apply("mul", kv, two),): "at.guard, (2 * at.kv_step,)",
        (h, distance): "at.guard, (0, -at.offset_step)",
        (apply("minimum", distance, two),): "at.guard",
        (apply("bitand", kv, two),): "at.guard",
        (h, q): "t0, (at.h, at.q), at.guard",
    }
    for index, wanted in cases.items():
        text = emitted(Facts(apply("add", SCORE, load(0, index, "float")))).text
        assert f"{wanted})" in text, f"{index}: no {wanted} in\n{text}"


@pytest.mark.parametrize("factor", [2.0, -2.0, scalar(0, "float")])
def test_the_factor_is_positive(factor: Any) -> None:
    """A multiple of the score is left to the softmax only if its factor is known to be positive."""
    by = factor if not isinstance(factor, float) else const(factor)
    source = emitted(Facts(apply("mul", SCORE, by)))
    known = factor == 2.0
    assert ("def score(" in source.text) != known
    assert body(source, "factor") != ["return Float32(1.0)"] if known else True


def test_a_negative_scale_is_in_no_factor() -> None:
    for score in (SCORE, apply("mul", SCORE, const(2.0)), apply("log", apply("abs", SCORE))):
        source = emitted(Facts(score), positive_scale=False)
        assert "at.scale" not in "".join(body(source, "factor"))
        assert "at.score" in "".join(body(source, "score"))


def test_no_hooks_for_plain_attention() -> None:
    text = emitted(Facts()).text
    assert "def " not in text and "HOOKS = Hooks()" in text


def test_indices_are_converted_to_float_by_the_kernel_only() -> None:
    """Float32(...) of an integer appears once per work tile at most."""
    distance = apply("abs", apply("sub", sym("q"), apply("mul", sym("kv"), const(2))))
    skewed = apply("mul", to_float(distance), load(0, (sym("h"),), "float"))
    source = emitted(Facts(apply("add", SCORE, skewed)))
    found = re.findall(r"^def (\w+)\(", source.text, re.MULTILINE)
    assert "start" in found
    for function in found:
        assert function == "uniform" or "Float32(" not in "".join(body(source, function))


def test_the_key_ignores_comments_and_titles() -> None:
    text = emitted(Facts(apply("tanh", SCORE))).text
    commented = text.replace("def score(at):", "def score(at):  # mod.py:7: return torch.tanh(score)")
    assert Source("a", text).key == Source("b", commented.replace("attention:", "other:")).key
    assert Source("a", text).key != Source("a", text.replace("tanh", "sin")).key


def test_wide_indices_are_64_bit() -> None:
    source = emitted(facts_of(mask=causal), "tables", wide_index=True)
    assert "Int64(at.kv_len)" in source.text and "Int32(" not in source.text


def test_indices_are_wrapped_unless_proved() -> None:
    facts = Facts(apply("add", SCORE, load(0, (apply("sub", sym("kv"), sym("q")),), "float")))
    assert "wrapped(" in emitted(facts, in_range=False).text
    assert "wrapped(" not in emitted(facts, in_range=True).text


def test_long_reductions_are_loops_of_the_kernel() -> None:
    """The text is as long for many terms as for few."""
    term = to_float(apply("mul", sym("r"), sym("kv")))
    texts = [emitted(Facts(apply("mul", SCORE, reduce("sum", "r", n, term)))).text for n in (65, 4000)]
    assert len(texts[1].splitlines()) == len(texts[0].splitlines())


def test_spans_need_intervals() -> None:
    odd = apply("eq", apply("mod", apply("mul", sym("q"), sym("kv")), const(2)), const(0))
    with pytest.raises(InputError, match="no union of key intervals"):
        emitted(Facts(mask=odd), "spans")


def test_values_do_not_hide_the_functions_they_are_computed_by() -> None:
    assert not functions() & words()


def test_emitting_does_not_import_the_compiler() -> None:
    code = "import sys, fa4flex.codegen.emit; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
