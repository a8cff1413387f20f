"""Programs as operators know them: expressions, schedule and precision, and the text that stands for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import SymFloat, SymInt, Tensor

from fa4flex.codegen.analyze.facts import Facts, analyze
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import nodes
from fa4flex.codegen.text import dump, parse
from fa4flex.errors import InputError
from fa4flex.primitives import precision as precisions
from fa4flex.primitives.dropout import refuse_flex
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.weights import SOFTMAX, Weights
from fa4flex.runtime.call import Call
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.variant import Backend

if TYPE_CHECKING:
    from fa4flex.runtime.flex.engine import Engine as FlexEngine

Forward = tuple[Tensor, ...]
"""out, lse, max_scores and total, as cpu.Forward has them. On a GPU `total` is empty, and so is `max_scores`
where it is not asked for. Where one of them is asked for, max_logit [H] and entropy follow, empty where they
are not."""

FORMAT = 2
"""Version of programs' text and of the operators' meaning; exported programs of another one are refused."""


@lru_cache(maxsize=1)
def contract() -> str:
    """A digest of the sources that decide what a compiled model's graph computes.

    torch.compile keeps graphs on disk and knows them by what stands in them. With the digest among that, a
    graph made by other sources is not found again.
    """
    package = Path(__file__).parents[1]
    names = (
        "codegen/trace/*.py", "codegen/*.py", "codegen/analyze/*.py", "runtime/*.py", "runtime/flex/*.py",
        "primitives/*.py",
    )  # fmt: skip
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in package.glob(name)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Published:
    """A program without its tensors and numbers."""

    facts: Facts
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    backend: Backend = "auto"

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each captured number, by slot: "int" or "float"."""
        results = {n.value: n.kind for n in nodes(*self.facts.everything) if n.op == "scalar"}
        return tuple(results[slot] for slot in range(len(results)))

    @cached_property
    def text(self) -> str:
        """The program as an operator's argument: `read` gives it back, in any process."""
        fields = {
            "format": FORMAT,
            "program": dump(
                self.facts.score, self.facts.mask, *(() if self.facts.kept is None else (self.facts.kept,))
            ),
            "schedule": asdict(self.schedule),
            **precisions.told(self.precision),
            "backend": self.backend,
        }
        if not self.facts.softmax:
            fields["weights"] = list(self.facts.weights)
        return json.dumps(fields, separators=(",", ":"))

    @cached_property
    def engine(self) -> Engine:
        """Launcher of this program on NVIDIA GPUs; equal programs share what it keeps."""
        return _engine(self)

    @cached_property
    def flex(self) -> FlexEngine:
        """Caller of torch's flex_attention for this program; equal programs share what it keeps."""
        return _flex_engine(self)

    def numbers(self, scalars: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Captured numbers as operators take them: ints, and floats, of which some may be tensors."""
        pairs = list(zip(scalars, self.kinds, strict=True)) if scalars else []
        ints = tuple(x if type(x) is SymInt else int(x) for x, kind in pairs if kind != "float")
        floats = tuple(
            x if isinstance(x, (SymFloat, Tensor)) else float(x) for x, kind in pairs if kind == "float"
        )
        return ints, floats

    def scalars(self, ints: Sequence[int], floats: Sequence[float]) -> tuple[int | float, ...]:
        """Captured numbers by slot."""
        of_ints, of_floats = iter(ints), iter(floats)
        return tuple([next(of_floats) if kind == "float" else next(of_ints) for kind in self.kinds])

    def captured(self, call: Call) -> Captured:
        """Captured tensors and numbers of a call, these by their kinds."""
        return self.captured_of(call.operands, call.scalars)

    def captured_of(self, operands: tuple[Tensor, ...], scalars: Sequence[Any]) -> Captured:
        """The same of what was captured."""
        if not scalars:
            return Captured(operands, ())
        pairs = zip(scalars, self.kinds, strict=True)
        return Captured(operands, tuple([float(x) if kind == "float" else int(x) for x, kind in pairs]))


@lru_cache(maxsize=4096)
def _engine(program: Published) -> Engine:
    kinds = dict(enumerate(program.kinds))
    return Engine(program.facts, program.schedule, program.precision, kinds)


@lru_cache(maxsize=4096)
def _flex_engine(program: Published) -> FlexEngine:
    from fa4flex.runtime.flex.engine import Engine as FlexEngine  # calls of kernels do not wait for it

    if program.facts.kept is not None:
        raise refuse_flex()
    return FlexEngine(program.facts, program.schedule, program.precision)


def publish(facts: Facts, schedule: Schedule, precision: Precision, backend: Backend = "auto") -> Published:
    """The program of these parts; equal parts give the same object."""
    return _published(facts, schedule, precision, backend)


_published = lru_cache(maxsize=4096)(Published)


@lru_cache(maxsize=4096)
def read(text: str) -> Published:
    """The program that a text stands for. Raises InputError for text of another version, or of none."""
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError("it was written by another version")
        roots, precision = parse(fields["program"]), precisions.read(fields)
        schedule, backend = Schedule(**fields["schedule"]), fields["backend"]
        weights = Weights(*fields.get("weights", SOFTMAX))
        if len(roots) not in (2, 3):
            raise ValueError(f"it has {len(roots)} functions")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unreadable(str(error)) from error
    score, mask, *rest = roots
    return publish(analyze(score, mask, rest[0] if rest else None, weights), schedule, precision, backend)


def _unreadable(why: str) -> InputError:
    return InputError(
        f"a compiled or exported program that cannot be read: {why}",
        "a program of this version of fa4flex",
        "compile or export the model again",
    )
