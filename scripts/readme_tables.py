"""Write the measured tables of docs/benchmarks.md from the files of `python -m fa4flex bench`.

    python -m fa4flex bench --suite dense variants cost latency --out results
    python -m fa4flex bench --suite backward backward-variants --out results
    python scripts/readme_tables.py results

What stands between two markers is replaced, for the passes of which there are files; every number comes from
bench-<suite>.json. README.md's one table is made anew of those of variants, so that both say the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
START, END = "<!-- measured on a GPU, {}: written by scripts/readme_tables.py -->", "<!-- end of {} -->"
OURS = "fa4flex"
WRONG = 10
"""Times plain PyTorch's error at which a result is wrong, and its speed no competition, as in the bench."""

ORDERED = " ordered"
"""Suffix by which the bench names a row with ordered sums, after the row without."""

Row = dict[str, Any]


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("folder", type=Path, help="where bench-*.json lie")
    given = parser.parse_args()
    page = PAGE.read_text()
    for which, body in sections(given.folder).items():
        page = replace_between(page, which, body)
    PAGE.write_text(page)
    README.write_text(replace_between(README.read_text(), "summary", summary(page)))


def replace_between(text: str, which: str, body: str) -> str:
    """`text` with `body` between the markers of a pass, each of which must occur once."""
    start, end = START.format(which), END.format(which)
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected the lines {start!r} and {end!r} once each: put them where tables belong")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{body}\n{end}{after}"


def sections(folder: Path) -> dict[str, str]:
    """Section of each pass: a heading line and a table for each suite that was measured."""
    found = {}
    for which, tables in TABLES.items():
        suites = {
            name: json.loads(path.read_text()) for name in tables if (path := _file(folder, name)).exists()
        }
        if suites:
            parts = [machine(next(iter(suites.values()))["environment"])]
            parts += [f"{TITLES[name]}\n\n{tables[name](data)}" for name, data in suites.items()]
            found[which] = "\n\n".join(parts)
    if not found:
        raise SystemExit(f"no bench-*.json in {folder}: run `python -m fa4flex bench --out {folder}`")
    return found


def _file(folder: Path, suite: str) -> Path:
    return folder / f"bench-{suite}.json"


def machine(about: dict[str, str]) -> str:
    versions = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "cudnn")
    listed = [f"{name} {about[name]}" for name in versions if name in about]
    place = about.get("name", about.get("device", "an unknown device"))
    power = f", power limit {about['power.limit']}" if "power.limit" in about else ""
    return f"One {place}{power}; {', '.join(listed)}; bf16, random inputs, medians of samples taken in turns."


# --- tables -------------------------------------------------------------------------------------------------


def speeds(data: Row) -> str:
    """TFLOP/s of every peer that ran, and fa4flex's speed over the best other one and over flex_attention."""
    rows = data["rows"]
    peers = [name for name in _peers(rows) if any("tflops" in row["peers"].get(name, {}) for row in rows)]
    head = ["", *peers, "over the best other", "over flex"]
    found = table(head, ([row["row"], *(_speed(row, name) for name in peers), *_ratios(row)] for row in rows))
    return "\n\n".join([found, *_absences(rows, peers)])


def _absences(rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    """Reasons for cells without a number, as one sentence."""
    absent = ((name, row["peers"].get(name, {}).get("reason")) for row in rows for name in peers)
    reasons: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(absent):
        if reason:
            reasons.setdefault(reason, []).append(name)
    said = (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return [f"No number: {'; '.join(said)}."] if reasons else []


def _peers(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    return sorted(names, key=lambda name: name != OURS)


def _speed(row: Row, peer: str) -> str:
    measured = row["peers"].get(peer, {})
    if not measured.get("errors", {}).get("over plain", 0) <= WRONG:  # nor is NaN
        return "wrong"
    return f"{measured['tflops']:.0f}" if "tflops" in measured else "-"


def _ratios(row: Row) -> list[str]:
    best, flex = row["ratio to best peer"], row["ratio to flex"]
    return [f"{best:.2f} ({row['best peer']})" if best else "-", f"{flex:.2f}" if flex else "-"]


def ordered(data: Row) -> str:
    """Table of speeds where rows with ordered sums are a peer of those without."""
    rows = {row["row"]: row for row in data["rows"]}
    plain = [row for name, row in rows.items() if not name.endswith(ORDERED)]
    for row in plain:
        same = rows.get(row["row"] + ORDERED)
        if same is not None:
            ours = row["peers"].pop(OURS)
            row["peers"] = {OURS: ours, "the same bits": same["peers"][OURS], **row["peers"]}
    return speeds({"rows": plain})


def costs(data: Row) -> str:
    """Table of times over those of the same mask without a score mod."""
    said = "cost over "
    found = (
        [row["row"], verdict["says"].removeprefix(said), f"{verdict['value']:+.1%}"]
        for row in data["rows"]
        for verdict in row["verdicts"]
        if verdict["says"].startswith(said) and verdict["value"] is not None
    )
    return table(["", "beside", "time"], found)


def latencies(data: Row) -> str:
    host = [
        [f"host time per call, {name}", f"{found['median_us']:.1f} us"]
        for name, found in data["host"].items()
        if "median_us" in found
    ]
    first = [
        [f"{OURS}, {what}", f"{data['first call'][which]['call']:.2f} s"]
        for which, what in (
            ("first", "first call, nothing in the cache"),
            ("second", "first call in a second process"),
        )
        if "call" in data["first call"].get(which, {})
    ]
    return table(["", "time"], [*host, *first])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(page: str) -> str:
    """README's table: fa4flex in both passes of the variants whose tables stand on `page`."""
    passes = [_rows(page, TITLES[suite]) for suite in ("variants", "backward-variants")]
    columns = [
        (OURS, "{}, TFLOP/s"),
        ("over flex", "times flex_attention"),
        ("over the best other", "times the best other"),
    ]
    head = ["", *(label.format(which) for which in ("forward", "backward") for _, label in columns)]
    both = [name for name in passes[0] if name in passes[1]]
    return table(head, ([name, *(rows[name][key] for rows in passes for key, _ in columns)] for name in both))


def _rows(page: str, title: str) -> dict[str, dict[str, str]]:
    """The table below `title` on a page: name of a row -> column -> cell."""
    lines = page.partition(f"{title}\n\n")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


TABLES: dict[str, dict[str, Callable[[Row], str]]] = {
    "forward": {"dense": speeds, "variants": speeds, "cost": costs, "latency": latencies},
    "backward": {"backward": ordered, "backward-variants": speeds},
}
TITLES = {
    "dense": "Forward, plain attention, TFLOP/s; 32,768 tokens, hidden size 2,048:",
    "variants": "Forward, variants, TFLOP/s over the 128 x 128 blocks with allowed pairs:",
    "cost": "Forward, what a score mod of row, key and head terms adds to its mask:",
    "latency": "On the host:",
    "backward": "Backward, plain attention, TFLOP/s; 32,768 tokens, hidden size 2,048:",
    "backward-variants": "Backward, variants, TFLOP/s over the 128 x 128 blocks with allowed pairs:",
}

if __name__ == "__main__":
    main()
