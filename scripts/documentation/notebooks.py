"""Notebooks as pages: cells, and what they show when they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat

TIMEOUT = 120
RICHEST = ("text/html", "image/svg+xml", "image/png", "text/plain")
"""Forms of a result, in the order in which a page prefers them."""


def write(folder: Path, target: Path, run: bool) -> None:
    """Write a page to `target` for each notebook in `folder`; `run` executes it from a fresh kernel first."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if run:
            client = nbclient.NotebookClient(
                notebook,
                timeout=TIMEOUT,
                resources={"metadata": {"path": str(folder)}},
                extra_arguments=["--log-level=ERROR"],
            )
            client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        cells = "\n\n".join(_cell(cell) for cell in notebook.cells)
        (target / f"{path.stem}.md").write_text(cells + f"\n\n[The notebook]({path.name})\n")


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return str(cell.source)
    shown = [_output(output) for output in cell.get("outputs", [])]
    return "\n\n".join([f"```python\n{cell.source}\n```", *filter(None, shown)])


def _output(output: Any) -> str:
    """One output as it stands on a page; a traceback's last line for an error that a cell shows."""
    if output.output_type == "stream":
        return _verbatim(output.text)
    if output.output_type == "error":
        return _verbatim(f"{output.ename}: {output.evalue}")
    for form in RICHEST:
        if form in output.data:
            return _shown(form, output.data[form])
    return ""


def _shown(form: str, data: str) -> str:
    if form == "text/plain":
        return _verbatim(data)
    if form == "image/png":
        data = f'<img alt="result of the cell above" src="data:image/png;base64,{"".join(data.split())}">'
    return _html(data)


def _html(text: str) -> str:
    """A block of HTML: a blank line in it would end it."""
    lines = (line for line in text.splitlines() if line.strip())
    return '<div class="output">\n' + "\n".join(lines) + "\n</div>"


def _verbatim(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
