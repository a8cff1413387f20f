"""Assignments of mods to layers, as functions, text, dictionaries and files say them.

A file is JSON, or Python that defines LAYERS. Both map layers to mods:

    {"model.layers.*": {"score_mod": "fa4flex.variants:alibi", "mask": "mods.py:blocks"},
     "0,2-4": "softcap(30.0)"}
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fa4flex.errors import Fa4flexError, InputError, Origin, UnsupportedError
from fa4flex.selection import Selection, role_of, select

ROLES = ("score_mod", "mask")
EXAMPLE = '{"model.layers.*": {"score_mod": "fa4flex.variants:alibi", "mask": "sliding_window(64)"}}'


@dataclass(frozen=True)
class Assignment:
    """Mods of the layers of these numbers, or whose names match a pattern. said: what they were given as."""

    layers: frozenset[int] | str
    selection: Selection
    said: str = ""

    def fits(self, name: str) -> bool:
        """True for the name of such a layer; its number is the first one in its name."""
        if isinstance(self.layers, str):
            return fnmatchcase(name, self.layers)
        digits = re.search(r"(?<![^.])\d+(?![^.])", name)
        return digits is not None and int(digits[0]) in self.layers


def last_of(assignments: list[Assignment], *names: str) -> Selection | None:
    """Selection that the layer of these names was given last."""
    return next((each.selection for each in reversed(assignments) if any(map(each.fits, names))), None)


def check_all_fit(assignments: list[Assignment], names: Iterable[str]) -> None:
    """Raise InputError for an assignment that fits no layer, given the names of all."""
    known = list(names)
    for each in assignments:
        if not any(map(each.fits, known)):
            some = ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")
            raise InputError(
                f"{each.said}: no layer fits", f"numbers or names of layers: {some}", "correct the pattern"
            )


def selected(variant: str | None, score_mod: Any, mask: Any, folder: Path = Path()) -> Selection:
    """Mods of a layer: functions, or in their place a VARIANT, whose files are in `folder`.

    Raises InputError, and UnsupportedError for normalisers and output functions.
    """
    selection: Selection = {"score_mod": score_mod, "mask": mask}
    if variant is not None:
        if score_mod is not None or mask is not None:
            raise InputError(
                f"both {variant!r} and functions", "one of them", "pass the functions as score_mod= and mask="
            )
        selection = select(variant, folder=folder)
    chosen = {role: mod for role, mod in selection.items() if mod is not None}
    if "normalizer" in chosen:
        raise UnsupportedError(
            f"the normaliser {chosen['normalizer']!r} of an engine's layers",
            "score mods and masks: engines merge parts of their own by log-sum-exps of the softmax",
            "attend with fa4flex.compile(normalizer=...) in the model",
        )
    if "output_mod" in chosen:
        raise UnsupportedError(
            f"the output function {chosen['output_mod']!r} of an engine's layers",
            "score mods and masks: an engine's model gates its attention's output itself",
            "apply it in the model, after the layer",
        )
    if not chosen:
        raise InputError("no mod to assign", "a score_mod, a mask, or a VARIANT", "e.g. assign('alibi')")
    return chosen


def layers_of(layers: Any) -> frozenset[int] | str:
    """Numbers of layers, as a number, numbers or "0,2-4"; or the pattern itself."""
    if not isinstance(layers, str):
        return frozenset([layers] if isinstance(layers, int) else layers)
    if not re.fullmatch(r"\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*", layers):
        return layers
    bounds = [[int(x) for x in each.split("-")] for each in layers.split(",")]
    return frozenset(number for each in bounds for number in range(each[0], each[-1] + 1))


def of_engine(settings: Any, by: str) -> list[Assignment]:
    """Assignments of an engine's own option, {"fa4flex": {"layers": ...}}, where it has that; ... as in
    `assignments_of`. by: the option. Raises InputError, for unknown settings too."""
    mine = settings.get("fa4flex") if isinstance(settings, Mapping) else None
    if mine is None:
        return []
    if not isinstance(mine, Mapping) or set(mine) - {"layers"}:
        given = ", ".join(sorted(set(mine) - {"layers"})) if isinstance(mine, Mapping) else repr(mine)
        raise InputError(
            f"{by} with fa4flex: {given}", '{"fa4flex": {"layers": ...}}', f"e.g. {EXAMPLE} as its layers"
        )
    return assignments_of(mine.get("layers", {}), by)


# --- text, dictionaries and files -------------------------------------------------------------------------


def assignments_of(said: Any, by: str) -> list[Assignment]:
    """Assignments that were said as "LAYERS=VARIANT; ...", where LAYERS are as in "0,2-4" or a pattern of
    names; as the path of a .json or .py file; or as what such a file holds. by: who says so, for errors.

    Raises InputError, with the file's line where that is known, and UnsupportedError.
    """
    if isinstance(said, Mapping):
        return _Document(by).assignments(said)
    if not isinstance(said, str):
        raise InputError(f"{by} of {type(said).__name__}", f"a path, or e.g. {EXAMPLE}", "write it so")
    text = said.strip()
    if text.endswith((".json", ".py")) and not re.search(r"[;=]", text):
        return _of_file(Path(text), by)
    return list(_of_text(text, by))


def _of_text(text: str, by: str) -> Iterable[Assignment]:
    for part in filter(None, map(str.strip, text.split(";"))):
        layers, equals, variant = part.partition("=")
        if not equals or not variant.strip():
            raise InputError(
                f"{by} with {part!r}",
                "LAYERS=VARIANT; ..., or the path of a .json or .py file",
                'e.g. "0,2-4=softcap(30.0); *=alibi"',
            )
        yield Assignment(layers_of(layers.strip()), selected(variant.strip(), None, None), f"{by}: {part}")


def _of_file(path: Path, by: str) -> list[Assignment]:
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(
            f"{by}={path}: {error.strerror}", "a file that can be read", "check the path"
        ) from error
    document = _Document(str(path), text, path.parent)
    made = document.parsed() if path.suffix == ".json" else document.executed()
    return document.assignments(made)


@dataclass(frozen=True)
class _Document:
    """Layers and their mods, as a file or an engine's option says them. folder: that of files it names."""

    name: str
    text: str = ""
    folder: Path = Path()

    def error(self, given: str, expected: str, fix: str, *words: str, line: int | None = None) -> InputError:
        return InputError(f"{self.name}: {given}", expected, fix, self.at(*words, line=line))

    def at(self, *words: str, line: int | None = None) -> Origin | None:
        """Line of the last of these quoted words, each of which stands behind the one before it."""
        place = 0
        for word in words:
            found = re.compile(rf"""(["']){re.escape(word)}\1""").search(self.text, place)
            if found is not None:
                place, line = found.end(), self.text.count("\n", 0, found.start()) + 1
        return None if line is None else Origin(self.name, line)

    def parsed(self) -> Any:
        """What a JSON file holds. Names that stand twice are an error: JSON would keep the last one."""

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            for at, (name, _) in enumerate(pairs):
                if any(name == other for other, _ in pairs[:at]):
                    raise self.error(f"{name!r} twice", "each once", "put its mods together", name, name)
            return dict(pairs)

        try:
            return json.loads(self.text, object_pairs_hook=unique)
        except json.JSONDecodeError as error:
            raise self.error(error.msg, f"JSON, e.g. {EXAMPLE}", "correct it", line=error.lineno) from error

    def executed(self) -> Any:
        """LAYERS of a Python file."""
        names: dict[str, Any] = {"__name__": Path(self.name).stem, "__file__": self.name}
        try:
            exec(compile(self.text, self.name, "exec"), names)
        except Exception as error:
            mine = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.name]
            line = error.lineno if isinstance(error, SyntaxError) else mine[-1] if mine else None
            said = f"{type(error).__name__}: {error}"
            raise self.error(said, "a file that runs", f"run python {self.name}", line=line) from error
        if "LAYERS" not in names:
            raise self.error("no LAYERS", f"LAYERS = {EXAMPLE}", "define it")
        return names["LAYERS"]

    def assignments(self, found: Any) -> list[Assignment]:
        if not isinstance(found, Mapping):
            expected = f"layers and their mods, e.g. {EXAMPLE}"
            raise self.error(f"LAYERS of {type(found).__name__}", expected, "write it so")
        return [self._assignment(layers, mods) for layers, mods in found.items()]

    def _assignment(self, layers: Any, mods: Any) -> Assignment:
        name = [layers] if isinstance(layers, str) else []
        words, alone = name, not isinstance(mods, Mapping)
        if alone:
            mods = {role_of(mods) if callable(mods) else "variant": mods}
        unknown = [name for name in mods if name not in (*ROLES, "variant")]
        if unknown or not mods:
            given = f"layers {layers!r} with {', '.join(map(repr, unknown)) or 'nothing'}"
            raise self.error(given, "a score_mod, a mask, or a variant", "leave it out", *name, *unknown[:1])
        try:
            chosen: dict[str, Any] = {}
            for role, mod in mods.items():
                words = name if alone else [*name, role]
                chosen[role] = self._mod(role, mod)
            score_mod, mask = map(chosen.get, ROLES)
            selection = selected(chosen.get("variant"), score_mod, mask, self.folder)
        except Fa4flexError as error:
            given = f"{self.name}: layers {layers!r}: {error.given}"
            raise type(error)(given, error.expected, error.fix, self.at(*words)) from error
        return Assignment(layers_of(layers), selection, f"{self.name}: layers {layers!r}")

    def _mod(self, role: str, mod: Any) -> Any:
        """A function, or what its name stands for, which has to be for this argument."""
        if role == "variant":
            if not isinstance(mod, str):
                raise InputError(f"{mod!r}", 'a VARIANT, e.g. "softcap(30.0)"', 'write {"score_mod": ...}')
            return mod
        if isinstance(mod, str):
            return _only(role, select(mod, folder=self.folder), mod)
        if not callable(mod):
            raise InputError(
                f"a {role} of {type(mod).__name__}", 'a name, e.g. "module:function"', "write it so"
            )
        return _only(role, {role_of(mod): mod}, repr(mod))


def _only(role: str, selection: Selection, said: str) -> Any:
    if list(selection) != [role]:
        raise InputError(
            f"{said!r} as {role}: it is a {' and a '.join(selection)}", f"a {role}", "name it so"
        )
    return selection[role]
