"""The table of grammar: each row is translated, what no row has is refused, and docs/simulator.md has all."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from machine import at, execute, instruction, machine, reg, vector, written

from ptxsim.isa import grammar, syntax, table
from ptxsim.isa.table import Act, Unmodelled, translate
from ptxsim.ptx.nodes import Address, Discard, Imm, Negated, Operand, Pair, Symbol, Vector
from ptxsim.units.fragments import accumulator, multiplicand_a, multiplicand_b

TEXTS = [text for section in grammar.ROWS.values() for text in syntax.rows(section)]
LEGAL = [text for text in TEXTS if "  ! " not in text]
PIECE = re.compile(r"\[\.[^\]]+\]|\.?\([^)]+\)|\.?<\w+>|\.?[\w:]+")
"""A piece of an opcode in the table, read here once more and independently."""


@cache
def pieces(text: str) -> list[tuple[bool, list[list[str]]]]:
    """(required, the words to choose from for each modifier that goes with it) of an opcode in the table."""
    found = []
    for piece in PIECE.findall(text.lstrip("*").partition("  ")[0]):
        required, bare = piece[0] != "[", piece.strip("[]")
        if "|" in bare and not required:
            bare = f"({bare[1:]})"
        choices = [choice_of(part) for part in PIECE.findall(bare)]
        found.append((required, choices))
    return found


def choice_of(piece: str) -> list[str]:
    bare = piece.lstrip(".")
    if bare[0] == "<":
        return grammar.SETS[bare[1:-1]].split()
    return bare.strip("()").split("|")


def drawn(text: str) -> list[str]:
    """Words of an opcode that the row allows."""
    return [
        random.choice(choice)
        for required, choices in pieces(text)
        if required or random.random() < 0.4
        for choice in choices
    ]


def allows(text: str, words: list[str], head: int) -> bool:
    """True if a row allows an opcode: by trying all ways to say which piece each word is."""
    free, (first, *_), parts = text[0] == "*", pieces(text), pieces(text)
    options = [[choices] if required else [choices, []] for required, choices in parts]
    if words[0] not in first[1][0]:
        return False
    for chosen in itertools.product(*options):
        places = [place for some in chosen for place in some]
        if len(places) != len(words):
            continue
        if all(word in place for word, place in zip(words, places)):
            return True
        if free and _assigned(words, places, head):
            return True
    return False


def _assigned(words: list[str], places: list[list[str]], head: int) -> bool:
    if not all(word in place for word, place in zip(words[:head], places[:head])):
        return False
    rest = list(range(head, len(places)))

    def fill(at: int, left: list[int], last: dict[str, int]) -> bool:
        if at == len(words):
            return True
        for place in left:
            kind = _kind(places[place][0])
            if words[at] in places[place] and place > last.get(kind, -1):
                known = {**last, kind: place} if kind else last
                if fill(at + 1, [p for p in left if p != place], known):
                    return True
        return False

    return fill(head, rest, {})


def _kind(word: str) -> str:
    return "type" if word in syntax.TYPES else "space" if word in syntax.SPACES else ""


# --- operands of a row --------------------------------------------------------------------------------------


def operands(text: str, words: list[str]) -> list[Operand]:
    """Operands that the row allows: results left out, sources literals wherever it does not say otherwise."""
    bare = text.partition("  ")[2].strip()
    found: list[Operand] = []
    for place in re.split(r", (?!\{\}\])", bare) if bare else []:
        kind, _, group = place.removesuffix("?").partition("@")
        name = group.partition("*")[0]
        modifier = next((w for w in words if name and w in grammar.SETS[name].split()), "")
        if kind[0] != "{" and name and not modifier:
            continue
        if place.endswith("?") and random.random() < 0.5 and not kind.startswith("pred"):
            continue
        kind = random.choice(kind.split("/"))
        count = 1
        if modifier and kind[0] == "{":
            count = int(modifier.lstrip("xv")) * int(group.partition("*")[2] or 1)
        found.append(operand(kind, count, words, len(found)))
    return found


def operand(kind: str, count: int, words: list[str], position: int) -> Operand:
    simple: dict[str, Operand] = {
        "d": Discard(),
        "p": Discard(),
        "r": reg("b64" if "b64" in words else "b32" if "b32" in words else "b16", 1),
        "a": Imm(1),
        "b32": Imm(1),
        "b64": Imm(1),
        "imm": Imm(0 if "tensormap" in words else 24 if "setmaxnreg" in words else 1),
        "pred": random.choice((Negated(reg("pred", 1)), reg("pred", 1), Imm(1))),
        "policy": reg("b64", 2),
        "[a]": at(reg("b64", 1)),
        "[a, {}]": Address(reg("b64", 1), 0, (reg("b32", 1), reg("b32", 2))),
    }
    if words[0] == "call" and kind == "a":
        return Symbol("vprintf")
    if kind in simple:
        return simple[kind]
    if kind[0].isdigit():
        return Imm(int(random.choice(kind.split("|"))))
    if kind[0] == "{":
        count = int(kind[3:] or 0) or (length(words, position) if words[0] == "mma" else count)
        return Vector(tuple(item(kind, words) for _ in range(count)))
    return Pair(Discard(), Discard())


def item(kind: str, words: list[str]) -> Operand:
    if words[0] == "call":
        return Symbol("place")
    return Discard() if kind[1] == "d" else reg("b32", 1) if kind[1] in "rs" else Imm(1)


def length(words: list[str], position: int) -> int:
    """Registers of a matrix, which its shape says."""
    depth, types = int(words[3].partition("k")[2]), [w for w in words if w in syntax.TYPES]
    widths = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32}
    d, a, b, c = (widths.get(name, 8) for name in types)
    matrices = accumulator(8, d), multiplicand_a(depth, a), multiplicand_b(depth, b), accumulator(8, c)
    return matrices[position].registers


@pytest.mark.parametrize("text", LEGAL)
def test_each_row_is_translated(text: str) -> None:
    made = 0
    for _ in range(60):
        words = drawn(text)
        given = operands(text, words)
        try:
            made += callable(translate(instruction(".".join(words), *given))) or 1
        except Unmodelled as error:
            known = ("nothing can overflow", "bits and is used", "cannot be written", "operands", "width of")
            assert any(reason in str(error) for reason in known), error
    assert made > 0


# --- what is refused ----------------------------------------------------------------------------------------


def mutations(words: list[str], head: int) -> Iterator[list[str]]:
    """Words with one modifier more, less, another, twice, or two of them exchanged."""
    rows = [pieces(text) for text in TEXTS if words[0] in pieces(text)[0][1][0]]
    same = [word for row in rows for _, choices in row for choice in choices for word in choice]
    every = [word for names in grammar.SETS.values() for word in names.split()]
    place = random.randrange(head, len(words) + 1)
    other = random.choice(same if random.random() < 0.7 else every)
    yield [*words[:place], other, *words[place:]]
    if place < len(words):
        yield [*words[:place], *words[place + 1 :]]
        yield [*words[:place], other, *words[place + 1 :]]
        yield [*words[:place], words[place], *words[place:]]
        second = random.randrange(head, len(words))
        swapped = list(words)
        swapped[place], swapped[second] = swapped[second], swapped[place]
        yield swapped


@pytest.mark.parametrize("text", LEGAL)
def test_a_mutation_of_a_legal_opcode_is_legal_or_refused(text: str) -> None:
    for _ in range(12):
        words = drawn(text)
        head = table._name(words).count(".") + 1
        for mutant in mutations(words, head):
            name = table._name(mutant)
            size = name.count(".") + 1
            rows = {row.text for row in table.rows_of(name)}
            legal = any(allows(row, mutant, size) for row in rows)
            assert bool(table._fitting(".".join(mutant))) == legal, ".".join(mutant)


def test_the_refusal_names_the_modifier_and_the_rows() -> None:
    with pytest.raises(Unmodelled, match=r"modifiers \.bogus\n.*\n +shl\.<word>|modifiers \.bogus"):
        translate(instruction("shl.bogus.b32", reg("b32", 1), reg("b32", 2), Imm(1)))
    with pytest.raises(Unmodelled, match=r"(?s)do not go together.*\*\(add\|sub\)\.sat\.s32  d, a, a"):
        translate(instruction("add.sat.u32", reg("b32", 1), reg("b32", 2), Imm(1)))
    with pytest.raises(Unmodelled, match=r"(?s)operands\n.*\*shl\.<word>  d, a, a"):
        translate(instruction("shl.b32", reg("b32", 1), reg("b32", 2)))
    with pytest.raises(Unmodelled, match="64 bits and is used as u32"):
        translate(instruction("shl.b32", reg("b32", 1), reg("b64", 2), Imm(1)))


@pytest.mark.parametrize("count", (1, 2))
def test_registers_of_128_bits_are_loaded(count: int) -> None:
    cluster = machine()
    written(cluster)
    warp = cluster.ctas[0].warps[0]
    content = np.random.randint(0, 1 << 63, (32, 2 * count), np.uint64)
    cluster.ctas[0].shared.data[: content.nbytes] = content.reshape(-1).view(np.uint8)
    warp.u32[1] = np.arange(32) * 16 * count
    modifier = f"v{count}.b128" if count > 1 else "b128"
    execute(warp, f"ld.shared.{modifier}", vector("b128", *range(count)), at(reg("b32", 1)))
    for index in range(count):
        assert (warp.u128[index] == content[:, 2 * index : 2 * index + 2]).all()


def test_every_translator_has_rows_and_every_row_a_translator() -> None:
    assert all(table.rows_of(name) for name in table.registered())
    reached = {row.text for name in table.registered() for row in table.rows_of(name)}
    assert {text for text in TEXTS if text not in reached} == {text for text in TEXTS if "  ! " in text}


def test_the_documentation_lists_the_instructions() -> None:
    page = Path(__file__).parents[2] / "docs/simulator.md"
    assert table.listing() in page.read_text()
    assert isinstance(translate(instruction("bar.sync", Imm(0))), Act)
