"""The API reference: signature and docstring of every public name, a page for each module.

Names come from tests/golden/test_public_names.txt, which is what is public.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from variant_tables import module_of

NAMES = Path(__file__).parents[2] / "tests" / "golden" / "test_public_names.txt"
ITEM = re.compile(r"(?P<names>\S(?:.*?\S)?) {2,}(?P<meaning>\S.*)")
"""A line of a docstring that describes parameters: their names, two blanks or more, what they are."""

Names = dict[str, dict[str, list[str]]]
"""Module -> public name -> public attributes of it; "()" among them if it is listed with parameters."""


def write(folder: Path) -> None:
    """Write a page for each public module to `folder`, and index.md, which lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    modules, rows = public(), []
    for module, names in modules.items():
        about = markdown(inspect.getdoc(importlib.import_module(module)) or "")
        entries = [entry(module, name, attributes) for name, attributes in names.items()]
        page = [f"# {module}", f"```{{py:module}} {module}\n```", about, *entries]
        (folder / f"{module}.md").write_text("\n\n".join(page) + "\n")
        listed = ", ".join(f"[`{name}`](#{module}.{name})" for name in names)
        rows.append(f"[{module}]({module}.md)\n: {listed}")
    listing = "\n\n".join(rows)
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *modules, "```"])
    (folder / "index.md").write_text(f"{HEAD}\n\n{listing}\n\n{toctree}\n")


HEAD = """# API reference

Public names and their docstrings. [What is public, and how it changes](../docs/stability.md); guides:
[API](../docs/api.md), [variants](../docs/variants.md)."""


def public() -> Names:
    """All public names, in the order of the list; a module that is a name has a page of its own."""
    found: Names = {}
    for line in NAMES.read_text().splitlines():
        module, *rest = split(line.partition("(")[0])
        names = found.setdefault(module, {})
        if len(rest) == 2:
            names[rest[0]].append(rest[1])
        elif rest:
            names[rest[0]] = ["()"] if "(" in line else []
    return {module: names for module, names in found.items() if names}


def split(path: str) -> tuple[str, ...]:
    """`a.b.C.d` -> ("a.b", "C", "d"): as much as is a module, and what is looked up in it.

    A name hides a module of the same path, as the variants of `fa4flex.variants` do.
    """
    module, *rest = path.split(".")
    while rest:
        value = getattr(importlib.import_module(module), rest[0], None)
        if not isinstance(value, ModuleType) and not (
            value is None and importlib.util.find_spec(f"{module}.{rest[0]}")
        ):
            break
        module = f"{module}.{rest.pop(0)}"
    return (module, *rest)


def entry(module: str, name: str, attributes: list[str]) -> str:
    """The part of a page about one public name."""
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, ModuleType):
        return f"## {name}\n\nSee [{value.__name__}]({value.__name__}.md)."
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    signature = _signature(value) if "()" in attributes else ""
    members = [_member(value, attribute) for attribute in attributes if attribute != "()"]
    stated, picture = _of_variant(module, name)
    body = [stated, markdown(inspect.getdoc(value) or ""), picture, *members]
    return f"## {name}\n\n{_directive(kind, f'{name}{signature}', body, module)}"


def _of_variant(module: str, name: str) -> tuple[str, str]:
    """Formula and source of a variant, which its file states, and its picture in the gallery, if any."""
    if module != "fa4flex.variants":
        return "", ""
    file = importlib.util.find_spec(f"{module}.{name}")
    assert file is not None and file.origin is not None
    stated = ast.get_docstring(ast.parse(Path(file.origin).read_text())) or ""
    return markdown(stated), "" if module_of(name).PICTURE is None else f"![{name}](../gallery/{name}.png)"


def _member(owner: Any, name: str) -> str:
    static = inspect.getattr_static(owner, name)
    function = static.__func__ if isinstance(static, (classmethod, staticmethod)) else static
    if inspect.isfunction(function):
        bound = _signature(function, drop_first=not isinstance(static, staticmethod))
        return _directive("method", f"{name}{bound}", [markdown(inspect.getdoc(function) or "")])
    described = inspect.getdoc(static) if isinstance(static, property) or hasattr(static, "func") else ""
    return _directive("attribute", name, [markdown(described or "")])


class _Written:
    """An annotation as it stands in the source, without quotation marks around it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(value: Any, drop_first: bool = False) -> str:
    """Signature with annotations; of a class without the result, "" for what is no callable."""
    if not callable(value):
        return ""
    found = inspect.signature(value)
    given = list(found.parameters.values())[drop_first:]
    result = found.empty if inspect.isclass(value) else _written(found.return_annotation)
    return str(
        inspect.Signature(
            [p.replace(annotation=_written(p.annotation)) for p in given], return_annotation=result
        )
    )


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def _directive(kind: str, signature: str, body: list[str], module: str = "") -> str:
    """A description in Sphinx's Python domain; the fence is longer than those within it."""
    text = "\n\n".join(part for part in body if part)
    fence = ":" * (4 if module else 3)
    options = f":module: {module}\n\n" if module else ""
    return f"{fence}{{py:{kind}}} {signature}\n{options}{text}\n{fence}"


# --- docstrings to Markdown ---------------------------------------------------------------------------------


def markdown(text: str) -> str:
    """A docstring as Markdown: aligned descriptions become a list, indented lines become code."""
    blocks: list[str] = []
    for block in filter(str.strip, re.split(r"\n\s*\n", text)):
        if blocks and _is_code(block) and _is_code(blocks[-1]):
            blocks[-1] += f"\n\n{block}"
        else:
            blocks.append(block)
    return "\n\n".join(map(_block, blocks))


def _is_code(block: str) -> bool:
    return all(line.startswith("    ") or not line for line in block.splitlines())


def _block(block: str) -> str:
    lines = block.splitlines()
    if _is_code(block):
        code = "\n".join(line[4:] for line in lines)
        return f"```{_language(code)}\n{code}\n```"
    if ITEM.fullmatch(lines[0]):
        return "\n".join(_items(lines))
    first = next((i for i, line in enumerate(lines) if i and line.startswith("    ")), len(lines))
    if first < len(lines) and not ITEM.fullmatch(lines[first - 1]):
        return f"{_text(lines[:first])}\n\n{_block(chr(10).join(lines[first:]))}"
    return _text(lines)


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def _items(lines: list[str]) -> Iterator[str]:
    """List items of the aligned lines `names  meaning`; lines that are indented continue the one before."""
    for line in lines:
        found = ITEM.fullmatch(line)
        if found:
            yield f"- `{found['names']}`: {_escaped(found['meaning'])}"
        else:
            yield f"  {_escaped(line.strip())}"


def _text(lines: list[str]) -> str:
    return "\n".join(_escaped(line.strip()) for line in lines)


def _escaped(line: str) -> str:
    """`line` with what Markdown would take for markup escaped, except in code."""
    parts = line.split("`")
    return "`".join(part if i % 2 else re.sub(r"([*<\[\]|_])", r"\\\1", part) for i, part in enumerate(parts))
