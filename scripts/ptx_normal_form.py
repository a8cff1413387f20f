"""PTX without what may differ where the code is the same: names, numbers of registers, comments, debug
information, the producer's header."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

WITHOUT_MEANING = (
    re.compile(r"^[ \t]*\.(?:file|loc)\b[^\n]*$", re.MULTILINE),
    re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL),
    re.compile(r"^[ \t]*\.section\b[^{]*\{[^}]*\}", re.MULTILINE),
)
"""In this order: names of files may hold what begins comments, and those in sections what ends these."""

HEADER = (".version", ".target", ".address_size")
ENTRY = re.compile(r"\.entry ([\w$]+)")
FUNCTION = re.compile(r"\.func (?:\([^)]*\) ?)?([\w$]+)")
VARIABLE = re.compile(r"\.\w+ ([\w$]+) ?(?:\[[^]]*\] ?)*[=;]")
WORD = re.compile(r"[A-Za-z_$%][\w$]*")
PARAMETER = re.compile(r"([\w$]+)(_param_\d+)")
NUMBERED = re.compile(r"(\$L__BB|__local_depot)\d+")
"""Names made of their function's place in the file."""
DECLARED = re.compile(r"(\.reg \.\w+ %[A-Za-z]+)<\d+>")
"""Virtual registers of a function, by type: of how many, some numbers are used."""
REGISTER = re.compile(r"(%[A-Za-z]+)(\d+)\b")


def kernels(ptx: str) -> dict[str, str]:
    """Text of each kernel with all in the file that it refers to, by symbol in the order of the file."""
    for pattern in WITHOUT_MEANING:
        ptx = pattern.sub("", ptx)
    header, items = [], {}
    for item in _items(ptx):
        if item.startswith(HEADER):
            header.append(item)
        else:
            items[_symbol(item)] = item
    found = {name: item for name, item in items.items() if ENTRY.search(item.partition("(")[0])}
    return {name: "\n".join([*header, _closed(name, items)]) for name in found}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _items(text: str) -> Iterator[str]:
    """Header lines, declarations and bodies, without what separates words."""
    lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        words = " ".join(line.split())
        if not words:
            continue
        lines.append(words)
        depth += words.count("{") - words.count("}")
        if depth == 0 and (words.endswith((";", "}")) or words.startswith(HEADER)):
            yield "\n".join(lines)
            lines = []
    if lines:
        raise ValueError(f"PTX that ends within what begins with {lines[0]!r}")


def _symbol(item: str) -> str:
    for kind in (ENTRY, FUNCTION, VARIABLE):
        found = kind.search(item)
        if found is not None:
            return found[1]
    raise ValueError(f"PTX that declares no symbol: {item.splitlines()[0]!r}")


def _closed(entry: str, items: dict[str, str]) -> str:
    """The entry, then what it names, what that names, and so on, all renamed in this order."""
    names = {entry: "symbol0"}

    def renamed(match: re.Match[str]) -> str:
        parameter = PARAMETER.fullmatch(match[0])
        name, rest = (parameter[1], parameter[2]) if parameter and parameter[1] in items else (match[0], "")
        if name not in items:
            return name + rest
        return names.setdefault(name, f"symbol{len(names)}") + rest

    texts: list[str] = []
    while len(texts) < len(names):
        text = items[list(names)[len(texts)]]
        texts.append(_numbered_by_use(NUMBERED.sub(r"\1", WORD.sub(renamed, text))))
    return "\n".join(texts)


def _numbered_by_use(function: str) -> str:
    """The same function, its virtual registers of each type numbered in the order of their first use."""
    kinds = {declared[0].rpartition(" ")[2].partition("<")[0] for declared in DECLARED.finditer(function)}
    numbers: dict[str, dict[str, int]] = {kind: {} for kind in kinds}

    def renamed(match: re.Match[str]) -> str:
        kind, number = match.groups()
        if kind not in numbers:  # a special register, as %envreg0
            return match[0]
        return f"{kind}{numbers[kind].setdefault(number, len(numbers[kind]))}"

    return REGISTER.sub(renamed, DECLARED.sub(r"\1<>", function))
