"""Options of `python -m fa4flex bench`. Loads nothing else: every command's parser reads it."""

from __future__ import annotations

import argparse
from pathlib import Path

SUITE_NAMES = (
    "dense", "variants", "cost", "backward", "backward-variants", "shapes", "backward-shapes", "latency",
    "random", "sparse",
)  # fmt: skip
ROUNDS = 11


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suite", nargs="+", choices=SUITE_NAMES, default=["dense"], help="default: dense")
    add(
        "--rows",
        default="",
        metavar="A,B",
        help="only these rows: names, patterns or parts of names; of random rows, how many of each kind",
    )
    add("--kind", default="", metavar="A,B", help="of random rows: dense (default), packed, masks")
    add("--widths", default="", metavar="A,B", help="of random rows: 96,192:128 and so on (default: 64,128)")
    add("--only", default="", metavar="A,B", help="only these random rows: numbers, patterns, parts of names")
    add("--peers", default="", metavar="A,B", help="only these peers, beside fa4flex (default: all)")
    add("--rounds", type=int, metavar="N", help=f"samples per peer and row (default {ROUNDS})")
    add("--seed", type=int, metavar="N", help="of random inputs and rows (default: fresh, and printed)")
    add("--time-limit", type=float, metavar="SECONDS", help="start no row that would not fit")
    add("--minutes", type=float, metavar="N", help="the same in minutes (default of --suite random: 20)")
    add("--device", default="cuda", choices=["cuda", "cpu"], help="default: cuda")
    add(
        "--smoke",
        action="store_true",
        help="tiny sizes, times not judged: a dry run, also on a CPU",
    )
    add("--out", type=Path, default=Path(), metavar="FOLDER", help="for JSON and plot (default: here)")
    add("--format", default="svg", choices=["svg", "png"], help="of the plot (default: svg)")
