"""The command line: `python -m fa4flex {doctor,demo,draw,show,explain,check,plan-parallel,bench,simulate}`.

Only bench needs a GPU.

VARIANT names what to look at:
  sliding_window                     a name in fa4flex.variants, with its defaults
  "causal & sliding_window(256)"     names combined with & | ~ (masks) and >> (score mods), with parameters
  "alibi, causal"                    a score mod and a mask
  path/to/file.py:function           any FlexAttention score_mod or mask_mod
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import operator
import platform
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fa4flex
from fa4flex.bench.options import add_options
from fa4flex.errors import Fa4flexError, InputError
from fa4flex.simulator.doors.command import add_options as add_simulator_options

if TYPE_CHECKING:
    from fa4flex.api import Attention

Selection = dict[str, Any]
"""Keyword arguments of fa4flex.compile: `score_mod`, `mask`, or both."""

# --- VARIANT: from text to what fa4flex.compile takes ------------------------------------------------------

_FILE = re.compile(r"(?P<path>[^\s,&|~>()]+\.py):(?P<function>\w+)")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.RShift: operator.rshift,
    ast.Invert: operator.invert,
}


def select(text: str, parameters: dict[str, Any] | None = None) -> Selection:
    """VARIANT -> arguments of compile. `parameters` go to the family that `text` names.

    Raises InputError for names that do not exist and for syntax beyond the operators.
    """
    found: dict[str, Any] = {}

    def placeholder(match: re.Match[str]) -> str:
        name = f"_file_{len(found)}"
        found[name] = _from_file(Path(match["path"]), match["function"])
        return name

    source = _FILE.sub(placeholder, text.strip())
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise _not_a_variant(text, "it is not an expression") from error
    parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    values = [_value(part, found, text) for part in parts]
    if parameters:
        values = [_with_parameters(values, parameters, text)]
    selection: Selection = {}
    for value in values:
        role = _role(value)
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
        'a name, names combined with & | ~ >>, "score, mask", or path/to/file.py:function',
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
    """A value that `&`, `|`, `~` and `>>` work on: plain functions become masks or score mods."""
    from fa4flex.primitives.mask import as_mask
    from fa4flex.primitives.score import as_score

    value = _value(node, files, text)
    return as_mask(value) if _role(value) == "mask" else as_score(value)


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


def _role(value: Any) -> str:
    """`mask` or `score_mod`, by type, or by how many positional parameters a plain function has."""
    from fa4flex.primitives.base import Family
    from fa4flex.primitives.mask import Mask
    from fa4flex.primitives.score import ScoreMod

    settled = _made(value) if isinstance(value, Family) else value
    if isinstance(settled, (Mask, ScoreMod)):
        return "mask" if isinstance(settled, Mask) else "score_mod"
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
            "mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx)",
            "give the function one of these signatures",
        )
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


def _parameters(extra: Sequence[str]) -> dict[str, Any]:
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


def compiled(arguments: argparse.Namespace) -> Attention:
    """The attention that the command line names."""
    return fa4flex.compile(**select(arguments.variant, _parameters(arguments.extra)))


# --- commands: each prints, and returns the exit status ----------------------------------------------------


def doctor(arguments: argparse.Namespace) -> int:
    """Installed packages, and what runs here."""
    import torch

    from fa4flex.view.backend import choice_lines

    print(f"fa4flex       {_version('fa4flex')}")
    print(f"python        {platform.python_version()} on {platform.machine()}")
    print(f"torch         {torch.__version__}, {torch.get_num_threads()} threads")
    for name, purpose in (
        ("sympy", "algebra of masks"), ("networkx", "hoisting"), ("matplotlib", "attn.mask.plot"),
        ("transformers", 'attn_implementation="fa4flex"'), ("attn_gym", "tests against its catalogue"),
        ("nbclient", "running the notebooks"),
    ):  # fmt: skip
        found = _version(name)
        print(f"{name:<13} {found}" if found else f"{name:<13} not installed (only needed for: {purpose})")
    print()
    for line in choice_lines():
        device, _, words = line.partition(": ")
        print(f"{device:<13} {words}")
    if not torch.cuda.is_available():
        print("GPU           none visible; kernels for sm_90a and sm_100a compile here, and run simulated")
    print('any device    torch\'s flex_attention, by fa4flex.compile(..., backend="flex")')
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def demo(arguments: argparse.Namespace) -> int:
    """Long context in little memory, and Hugging Face models; about a minute."""
    from fa4flex.demo import main as run

    return run()


def draw(arguments: argparse.Namespace) -> int:
    """The mask as text: # full, + partial, . empty."""
    if arguments.tile is not None and len(arguments.tile) > 2:
        given = f"--tile {' '.join(map(str, arguments.tile))}"
        raise InputError(given, "one or two numbers (queries, keys)", "e.g. --tile 64 128")
    tile = None if arguments.tile is None else (arguments.tile[0], arguments.tile[-1])
    print(compiled(arguments).mask.draw(arguments.size, arguments.kv_len, tile))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """The program at one stage, each line with the user's line it came from."""
    print(compiled(arguments).source(arguments.stage))
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """In words: what was composed, what was proved, what is evaluated and why."""
    from fa4flex.view.explain import explain as described

    q_len, kv_len = arguments.q_len, arguments.kv_len
    print(described(compiled(arguments).program, q_len, kv_len or q_len, arguments.arch))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Forward and backward on random inputs against the dense float64 formula; status 1 on disagreement."""
    from fa4flex.check import check as compare

    report = compare(compiled(arguments), arguments.q_len, arguments.kv_len, arguments.seed)
    print(report)
    return 0 if report.passed else 1


def plan_parallel(arguments: argparse.Namespace) -> int:
    """Estimated traffic and time of a sequence spread over many GPUs."""
    from fa4flex.parallel.predict import Machine, Model, count_of, ranks_of, report

    machine = Machine(arguments.tflops * 1e12, arguments.link * 1e9)
    model = Model(arguments.heads, arguments.kv_heads, arguments.head_dim)
    print(report(compiled(arguments), count_of(arguments.tokens), ranks_of(arguments.ranks), machine, model))
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """Times and errors beside every installed peer, on a GPU; status 1 where a target is missed."""
    from fa4flex.bench.command import run

    return run(arguments)


def simulate(arguments: argparse.Namespace) -> int:
    """The GPU kernel of a variant, run on the CPU; status 1 where it is wrong, races or hangs."""
    from fa4flex.simulator.doors.command import run

    return run(compiled(arguments), arguments)


# --- the parser --------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fa4flex", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"fa4flex {fa4flex.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = functools.partial(_command, commands)
    add(doctor, variant=False)
    add(demo, variant=False)
    size: dict[str, Any]
    size, same = {"type": int, "metavar": "N"}, "keys (default: as many as queries)"
    drawing = add(draw)
    drawing.add_argument("--size", **size, help="queries (default: what the variant implies, or 2048)")
    drawing.add_argument("--kv-len", **size, help=same)
    drawing.add_argument("--tile", **size, nargs="+", help="queries and keys per character")
    stages = "trace (default), facts, gradient, flex; of GPU kernels plan, forward or ptx"
    add(show).add_argument("--stage", default="trace", help=stages)
    explaining, checking = add(explain), add(check)
    explaining.add_argument("--q-len", **size, default=4096, help="queries (default 4096)")
    explaining.add_argument("--kv-len", **size, help=same)
    explaining.add_argument("--arch", help="describe the kernel of a GPU: sm_90a, sm_100a, ...")
    checking.add_argument("--q-len", **size, default=200, help="queries (default 200)")
    checking.add_argument("--kv-len", **size, help=same)
    checking.add_argument("--seed", **size, default=0, help="of the random inputs (default 0)")
    planning = add(plan_parallel)
    planning.add_argument("--ranks", default="8", help="8, 8,64 or 8..1024 (default 8)")
    planning.add_argument(
        "--tokens", default="128k", help="queries, and keys: 65536, 64k or 1M (default 128k)"
    )
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        planning.add_argument(f"--{name}", **size, default=default, help=f"(default {default})")
    planning.add_argument(
        "--tflops", type=float, default=570.0, help="of a kernel, in 1e12 / s (default 570)"
    )
    planning.add_argument(
        "--link", type=float, default=281.0, help="into a rank, in 1e9 bytes / s (default 281)"
    )
    add_options(add(bench, variant=False))
    add_simulator_options(add(simulate))
    return parser


def _command(
    commands: Any, function: Callable[[argparse.Namespace], int], variant: bool = True
) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").strip()
    epilog = (
        "Parameters of a named family are passed as options: draw sliding_window --window 3"
        if variant
        else None
    )
    parser: argparse.ArgumentParser = commands.add_parser(
        function.__name__.replace("_", "-"),
        help=summary,
        description=summary,
        epilog=epilog,
        allow_abbrev=False,
    )
    parser.set_defaults(run=function)
    if variant:
        parser.add_argument("variant", metavar="VARIANT", help="see python -m fa4flex --help")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 well, 1 a check failed, 2 the request does not fit."""
    parser = _parser()
    arguments, arguments_extra = parser.parse_known_args(argv)
    arguments.extra = arguments_extra
    try:
        if arguments_extra and not hasattr(arguments, "variant"):
            raise InputError(f"arguments {' '.join(arguments_extra)!r}", "none", "see --help")
        return int(arguments.run(arguments))
    except Fa4flexError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
