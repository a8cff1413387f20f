"""Variants by name: from the text VARIANT to what fa4flex.compile takes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fa4flex.errors import InputError

NAMING = """VARIANT names what to look at:
  sliding_window                     a name in fa4flex.variants, with its defaults
  "causal & sliding_window(256)"     names combined with & | ~ (masks) and >> (score mods), with parameters
  "alibi, causal"                    a score mod and a mask; an output function may stand beside them
  path/to/file.py:function           any FlexAttention score_mod or mask_mod
  package.module:function            the same, of a module that can be imported
"""

Selection = dict[str, Any]
"""Keyword arguments of fa4flex.compile: `score_mod`, `mask`, `output_mod`, `normalizer`, or some of them."""

_FILE = re.compile(r"(?P<path>[^\s,&|~>()]+\.py):(?P<function>\w+)")
_MODULE = re.compile(r"(?<![\w./\"'])(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.RShift: operator.rshift,
    ast.Invert: operator.invert,
}


def select(text: str, parameters: dict[str, Any] | None = None, folder: Path = Path()) -> Selection:
    """VARIANT -> arguments of compile. `parameters` go to the family that `text` names; paths of files count
    from `folder`.

    Raises InputError for names that do not exist and for syntax beyond the operators.
    """
    results: dict[str, Any] = {}

    def placeholder(value: Any) -> str:
        name = f"_file_{len(results)}"
        results[name] = value
        return name

    source = _FILE.sub(
        lambda found: placeholder(_from_file(folder / found["path"], found["function"])), text.strip()
    )
    source = _MODULE.sub(lambda found: placeholder(_from_module(found["module"], found["name"])), source)
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise _not_a_variant(text, "it is not an expression") from error
    parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    values = [_value(part, results, text) for part in parts]
    if parameters:
        values = [_with_parameters(values, parameters, text)]
    selection: Selection = {}
    for value in values:
        role = role_of(value)
        if role in selection:
            raise _not_a_variant(text, f"it gives two {role}s")
        selection[role] = value
    return selection


def _not_a_variant(text: str, why: str, name: str = "") -> InputError:
    """`name` is what was taken for a variant's name; the nearest one is suggested."""
    names = variant_names()
    near = get_close_matches(name.lower(), names, 1)
    return InputError(
        f"VARIANT {text!r}: {why}",
        'a name, names combined with & | ~ >>, "score, mask", path/to/file.py:function, or module:function',
        f"{f'did you mean {near[0]}? ' if near else ''}names: {', '.join(names)}",
    )


def _value(node: ast.AST, files: dict[str, Any], text: str) -> Any:
    """The value of the few kinds of syntax that describe a variant; nothing else is evaluated."""
    match node:
        case ast.Name(id=name) if name in files:
            return files[name]
        case ast.Name(id=name):
            return _named(name, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_operand(left, files, text), _operand(right, files, text))
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return operator.invert(_operand(inner, files, text))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            parameters = {str(k.arg): _literal(k.value) for k in keywords}
            return _made(_named(name, text), *map(_literal, args), **parameters)
    raise _not_a_variant(text, f"{ast.unparse(node)!r} is not understood")


def _operand(node: ast.AST, files: dict[str, Any], text: str) -> Any:
    """A value that `&`, `|`, `~` and `>>` work on: plain functions become masks, score mods or output
    functions."""
    from fa4flex.primitives.mask import as_mask
    from fa4flex.primitives.normalizer import as_normalizer
    from fa4flex.primitives.output import as_output
    from fa4flex.primitives.score import as_score

    value = _value(node, files, text)
    kinds = {"mask": as_mask, "score_mod": as_score, "output_mod": as_output, "normalizer": as_normalizer}
    return kinds[role_of(value)](value)


def _made(family: Any, *args: Any, **parameters: Any) -> Any:
    """One member of a family; parameters that do not fit its signature are an InputError."""
    try:
        inspect.signature(family).bind(*args, **parameters)
    except TypeError as error:
        raise InputError(
            f"{family!r}: {error}",
            f"{family!r}{inspect.signature(family)}",
            f'give its parameters, as in "{family!r}(...)"; tensors need a file: path/to/file.py:function',
        ) from error
    return family(*args, **parameters)


def _literal(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise InputError(
            f"parameter {ast.unparse(node)!r}", "a number, a string, or a tuple of them", "write it out"
        ) from error


def variant_names() -> list[str]:
    """Every variant that the command line knows by name."""
    from fa4flex import variants
    from fa4flex.primitives.base import Family

    return sorted(name for name in variants.__all__ if isinstance(getattr(variants, name), Family))


def _named(name: str, text: str) -> Any:
    from fa4flex import variants

    if name not in variant_names():
        raise _not_a_variant(text, f"there is no variant {name!r}", name)
    return getattr(variants, name)


def _from_file(path: Path, function: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path}:{function}", "an existing Python file", "check the path")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"{path} raised {type(error).__name__}: {error}",
            "a file that can be imported",
            f"run python {path}",
        ) from error
    if not hasattr(module, function):
        raise InputError(
            f"{path} has no {function!r}", "a function or a fa4flex mask or score mod", "check the name"
        )
    return getattr(module, function)


def _from_module(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise InputError(
            f"{module}:{name}: {error}", "a module that can be imported", "check its name and PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise InputError(
            f"{module} has no {name!r}", "a function or a fa4flex mask or score mod", "check the name"
        ) from error


def role_of(value: Any) -> str:
    """Argument that a mod is for, by type, or by the positional parameters of a plain function."""
    from fa4flex.primitives.base import Family, Mod

    settled = _made(value) if isinstance(value, Family) else value
    if isinstance(settled, Mod):
        return settled.role
    if not callable(settled):
        raise InputError(
            f"what was named is a {type(settled).__name__}",
            "a function, a fa4flex mask or a fa4flex score mod",
            "name a mask_mod or a score_mod",
        )
    parameters = inspect.signature(settled).parameters.values()
    positional = [
        p for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        and p.name not in ("q_len", "kv_len", "num_heads")
    ]  # fmt: skip
    if len(positional) not in (4, 5):
        raise InputError(
            f"{value!r} takes {len(positional)} parameters",
            "mask_mod(b, h, q_idx, kv_idx), score_mod(score, b, h, q_idx, kv_idx) or"
            " output_mod(out, b, h, q_idx, d_idx)",
            "give the function one of these signatures",
        )
    if len(positional) == 5 and positional[0].name == "out":
        return "output_mod"
    return "mask" if len(positional) == 4 else "score_mod"


def _with_parameters(values: list[Any], parameters: dict[str, Any], text: str) -> Any:
    from fa4flex.primitives.base import Family

    if len(values) != 1 or not isinstance(values[0], Family):
        options = " ".join(f"--{name}" for name in parameters)
        written = ", ".join(f"{name}={value}" for name, value in parameters.items())
        raise InputError(
            f"{options} with VARIANT {text!r}",
            "parameters beside the name of one family",
            f'write them into the expression: "sliding_window({written})"',
        )
    return _made(values[0], **parameters)


def parameters_of(extra: Sequence[str]) -> dict[str, Any]:
    """`--window 3 --slope 0.5` -> {"window": 3, "slope": 0.5}."""
    parsed: dict[str, Any] = {}
    rest = [piece for word in extra for piece in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        name, *rest = rest
        if not name.startswith("--") or not rest or rest[0].startswith("--"):
            raise InputError(f"argument {name!r}", "--parameter value", "see --help")
        text, *rest = rest
        try:
            parsed[name[2:].replace("-", "_")] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            parsed[name[2:].replace("-", "_")] = text
    return parsed
