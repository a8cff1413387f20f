"""The command: draw or load tensors, judge every precision on them, print and plot."""

from __future__ import annotations

import argparse
from pathlib import Path

from fa4flex.errors import InputError

TENSORS = ("normal", "outlier", "one sign", "drift", "sink", "needle", "offset channels")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--keys", default="4096", help="numbers of keys, such as 4096,32768 (default 4096)")
    parser.add_argument("--rows", type=int, default=128, help="queries (default 128)")
    parser.add_argument("--heads", type=int, default=2, help="heads (default 2)")
    parser.add_argument("--head-dim", type=int, default=128, help="width of heads (default 128)")
    parser.add_argument("--tensors", help=f"of {', '.join(TENSORS)}, separated by commas (default: all)")
    parser.add_argument("--file", type=Path, help='tensors of your own: torch.save({"q": q, "k": k, "v": v})')
    parser.add_argument("--plot", type=Path, help="write a picture of the errors")
    parser.add_argument("--seed", type=int, help="of the tensors (default: a fresh one, which is printed)")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; returns 0."""
    from fa4flex.accuracy import report
    from fa4flex.accuracy.schemes import SCHEMES
    from fa4flex.accuracy.tensors import Drawn, drawn, loaded

    errors = []
    if arguments.file is not None:
        errors += report.judged(arguments.file.name, loaded(arguments.file, arguments.rows), SCHEMES)
    else:
        seed = report.seeded(arguments.seed)
        print(f"--seed {seed}\n")
        for keys in _numbers(arguments.keys):
            size = Drawn(min(arguments.rows, keys), keys, arguments.heads, arguments.head_dim, seed)
            for name in _names(arguments.tensors):
                errors += report.judged(name, drawn(name, size), SCHEMES)
    print(report.text(errors))
    if arguments.plot is not None:
        report.save(errors, arguments.plot)
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(x) for x in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(f"--keys {text}", "numbers above 0, separated by commas", "e.g. --keys 4096,32768")
    return numbers


def _names(text: str | None) -> list[str]:
    names = list(TENSORS) if text is None else [x.strip() for x in text.split(",")]
    unknown = [name for name in names if name not in TENSORS]
    if unknown:
        raise InputError(f"--tensors {unknown[0]}", f"some of {', '.join(TENSORS)}", "leave it out for all")
    return names
