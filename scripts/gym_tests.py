"""Run attention-gym's tests on fa4flex.flex_attention, on the CPU.

    pip install attn-gym
    python scripts/gym_tests.py ~/attention-gym --mode eager aot_eager --out results

The argument is a checkout of attention-gym, or test files of it. Calls of flex_attention in its tests and in
the package run on fa4flex; tensors that a test makes on a GPU are made on the CPU. In mode "eager" nothing is
compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foreign_tests import Reason, Suite, arguments, compiled, copies, main

MODES = ("eager", "aot_eager", "inductor")
REASONS = (Reason(r"\nnot applicable: .*requires SM100", "is about a kernel of torch"),)
ON_THE_CPU = {
    '"cuda"': '"cpu"',
    "torch.cuda.is_available()": "True",
    "torch.cuda.get_device_capability()": "(9, 0)",
    ".is_cuda": ".is_cpu",
    "    B=16,\n    H=16,\n    W=128,\n": "    B=1,\n    H=2,\n    W=32,\n",
}
"""Replacements in the tests' text; the last makes 256 heads of 16,384 tokens 2 heads of 1,024."""


calls = [0]


def _count() -> None:
    """Runs when Dynamo compiles a call, or with the call; Dynamo takes its result for a constant."""
    calls[0] += 1


vars(_count).update(_dynamo_marked_constant=True)


class Tests(Suite):
    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.reasons = REASONS

    def prepare(self, mode: str) -> None:
        import torch
        import torch.nn.attention.flex_attention as flex

        import fa4flex

        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            _count()
            return fa4flex.flex_attention(*args, **kwargs)

        flex.flex_attention = flex_attention
        real = torch.compile
        way = (lambda model=None, **_: model or (lambda x: x)) if mode == "eager" else compiled(real, mode)

        def compile(model: Any = None, **options: Any) -> Any:
            name = sys._getframe(1).f_globals.get("__name__", "")
            return (real if name.startswith("torch.") else way)(model, **options)

        torch.compile = compile
        self.files = copies(self.files, _on_the_cpu)

    def attempts(self, case: str) -> Iterator[contextlib.AbstractContextManager[None]]:
        calls[0] = 0
        yield contextlib.nullcontext()

    def called(self) -> bool:
        return calls[0] > 0


def _on_the_cpu(path: Path) -> str:
    """The text of tests with the CPU in place of a GPU of the Hopper generation."""
    text = path.read_text()
    for on_a_gpu, here in ON_THE_CPU.items():
        text = text.replace(on_a_gpu, here)
    return text


def _files(given: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in given:
        tests = [path] if path.is_file() else sorted(path.glob("test/test_*.py"))
        found += [test for test in tests if "flex_attention" in test.read_text()]
    if not found:
        raise SystemExit(f"no test of flex_attention in {', '.join(map(str, given))}")
    return [path.resolve() for path in found]


def run(given: argparse.Namespace) -> int:
    return main("gym_tests", __file__, Tests(_files(given.checkout)), given)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, MODES).parse_args()))
