"""Print how Hugging Face models on fa4flex agree with `eager`: families of models by kinds of call.

    python scripts/model_families.py                                         # everything, as a Markdown table
    python scripts/model_families.py --families llama,gpt2 --columns prefill,static

Models are random and tiny. A cell is the largest difference of fa4flex's float32 result to eager's in
float64, over that of eager's own float32 result: up to 2 counts as equal. Where a cell says "refused",
fa4flex raised the error below the table; "-" stands where a family has no such call, or fails in it under
eager too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import eager_mask

sys.path.insert(0, str(Path(__file__).resolve().parent))
from model_family_configs import FAMILIES, Family

from fa4flex.errors import UnsupportedError
from fa4flex.integrations import transformers as integration
from fa4flex.integrations.transformers import register

NAME = "fa4flex"
BATCH, PROMPT, ROOM = 2, 23, 40
STEPS, CHUNKS = 4, (7, 9, 6, 1)
ALLOWED = 2.0
Results = list[Tensor]


def column(kinds: str) -> Callable[[Callable[[Call], Results]], Callable[[Call], Results]]:
    """Registers a kind of call for kinds of models."""

    def add(function: Callable[[Call], Results]) -> Callable[[Call], Results]:
        COLUMNS[function.__name__] = function, tuple(kinds.split())
        return function

    return add


COLUMNS: dict[str, tuple[Callable[[Call], Results], tuple[str, ...]]] = {}


@dataclass
class Call:
    """A model in one dtype under one implementation, with its inputs."""

    family: Family
    model: Any
    inputs: dict[str, Tensor]
    outputs: Results = field(default_factory=list)

    @property
    def tokens(self) -> str:
        """The name of the tokens that are fed step by step."""
        return "decoder_input_ids" if "decoder_input_ids" in self.inputs else "input_ids"

    def cache(self, kind: str) -> Any:
        config = self.model.config.get_text_config(decoder=True)
        make = {
            "dynamic": lambda: transformers.DynamicCache(config=config),
            "static": lambda: transformers.StaticCache(config=config, max_cache_len=ROOM),
            "quantized": lambda: transformers.QuantizedCache("fp8", config),
        }[kind]
        if self.family.kind != "seq2seq":
            return make()
        return transformers.EncoderDecoderCache(make(), transformers.DynamicCache(config=config))

    def run(self, **changes: Any) -> Any:
        return self.model(**{**self.inputs, **changes})

    def in_pieces(
        self,
        cache: Any,
        sizes: tuple[int, ...],
        padding: Tensor | None = None,
        start: int = 0,
        model: Any = None,
    ) -> Results:
        """Logits of the prompt from `start` on, fed to a cache in pieces; of real tokens only."""
        made = []
        for size in sizes:
            given = self.piece(start, size)
            if padding is not None:
                given["attention_mask"] = padding[:, : start + size]
            run = self.model if model is None else model
            step = run(**given, past_key_values=cache, use_cache=True)
            made.append(
                step.logits if padding is None else step.logits[padding[:, start : start + size].bool()]
            )
            start += size
        return made

    def piece(self, start: int, size: int) -> dict[str, Any]:
        """Inputs of some of the tokens. Images and their kinds of tokens go with the first."""
        inputs = dict(self.inputs)
        ids, kinds = inputs.pop(self.tokens), inputs.pop("token_type_ids", None)
        if start:
            inputs.pop("pixel_values", None)
        elif kinds is not None:
            inputs["token_type_ids"] = kinds[:, :size]
        return {**inputs, self.tokens: ids[:, start : start + size]}


def finite_eager_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """eager's mask with float32's lowest number. float64's is -inf to the softmax, which eager takes in
    float32: padded tokens then become NaN, and with them what attends to them with weight 0."""
    return eager_mask(*args, **{**kwargs, "dtype": torch.float32})


def one_by_one() -> tuple[int, ...]:
    return (PROMPT - STEPS, *[1] * STEPS)


@column("decoder prefix seq2seq encoder vision")
def prefill(call: Call) -> Results:
    made = call.run(use_cache=False) if call.family.kind in ("decoder", "prefix", "seq2seq") else call.run()
    return [made[name] for name in call.family.read if made.get(name) is not None]


@column("decoder seq2seq encoder prefix")
def padding(call: Call) -> Results:
    """Left padding (right for encoders), in one piece and then in steps."""
    name = "input_ids" if "input_ids" in call.inputs else call.family.padded
    real = torch.ones(call.inputs[name].shape[:2], dtype=torch.long)
    if call.family.kind in ("encoder", "seq2seq"):
        real[0, -5:] = 0
        made = call.run(attention_mask=real)
        logits = made[call.family.read[0]]
        return [logits if call.family.kind == "seq2seq" else logits[real.bool()]]
    real[0, :5] = 0
    return call.in_pieces(call.cache("dynamic"), one_by_one(), real)


@column("decoder seq2seq prefix")
def dynamic(call: Call) -> Results:
    return call.in_pieces(call.cache("dynamic"), one_by_one())


@column("decoder seq2seq prefix")
def static(call: Call) -> Results:
    return call.in_pieces(call.cache("static"), one_by_one())


@column("sliding")
def sliding(call: Call) -> Results:
    """Windows that the prompt outgrows, in caches that keep no more; pieces that cross their ends."""
    sizes = (3, 4, 9, 1, 1, 5)
    return [x for kind in ("dynamic", "static") for x in call.in_pieces(call.cache(kind), sizes)]


@column("decoder")
def quantized(call: Call) -> Results:
    return call.in_pieces(call.cache("quantized"), one_by_one())


@column("decoder seq2seq")
def chunks(call: Call) -> Results:
    return [x for kind in ("dynamic", "static") for x in call.in_pieces(call.cache(kind), CHUNKS)]


@column("decoder seq2seq prefix")
def generate(call: Call) -> Results:
    """Greedy generation with a static cache and left padding."""
    inputs, padded = dict(call.inputs), call.family.kind == "decoder"
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :5] = 0
    if call.family.kind == "seq2seq":
        del inputs["decoder_input_ids"]
    made = call.model.generate(
        **inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, cache_implementation="static",
    )  # fmt: skip
    return [torch.stack(made.logits)]


@column("decoder seq2seq encoder vision prefix")
def compiled(call: Call) -> Results:
    """One graph: with and without padding, with the cache that the model makes by default; and steps with a
    static cache after an eager prompt."""
    return _compiled_or_not(call, torch.compile(call.model, backend="aot_eager", fullgraph=True))


def uncompiled(call: Call) -> Results:
    return _compiled_or_not(call, call.model)


def _compiled_or_not(call: Call, model: Any) -> Results:
    torch._dynamo.reset()
    cached = call.family.kind in ("decoder", "prefix", "seq2seq")
    whole = model(**call.inputs)
    made = [whole[call.family.read[0]]]
    if whole.get("past_key_values") is not None:  # goes on with what the graph put into it
        again = call.piece(PROMPT - 1, 1)
        made.append(call.model(**again, past_key_values=whole.past_key_values, use_cache=True).logits)
    if "input_ids" in call.inputs and call.family.kind != "prefix":
        real = torch.ones_like(call.inputs["input_ids"])
        real[0, slice(-5, None) if call.family.kind == "vision" else slice(5)] = 0
        made.append(model(**{**call.inputs, "attention_mask": real})[call.family.read[0]][1:])
    if cached and "static" not in call.family.without:
        cache = call.cache("static")
        call.in_pieces(cache, (PROMPT - STEPS,))
        made += call.in_pieces(cache, (1,) * STEPS, start=PROMPT - STEPS, model=model)
    return made


@column("decoder seq2seq encoder vision prefix")
def training(call: Call) -> Results:
    """Gradients of all parameters."""
    with torch.enable_grad():
        made = call.run()[call.family.read[0]].double()
        weights = torch.linspace(-1, 1, made[0].numel(), dtype=made.dtype).view(made[0].shape).sin()
        call.model.zero_grad()
        (made * weights).sum().backward()
    return [p.grad for p in call.model.parameters() if p.grad is not None]


# --- cells -----------------------------------------------------------------------------------------------


def applies(family: Family, name: str) -> bool:
    kinds = COLUMNS[name][1]
    return (family.kind in kinds or (family.window and "sliding" in kinds)) and name not in family.without


def cell(family: Family, name: str) -> float:
    """fa4flex's error over eager's own; the median of five draws where the first says too much."""
    first = _draw(family, name, 0)
    return (
        first
        if first <= ALLOWED
        else statistics.median([first, *(_draw(family, name, n) for n in range(1, 5))])
    )


def _draw(family: Family, name: str, seed: int) -> float:
    """Raises what the family raises under fa4flex, and EagerFails with what it raises under eager."""
    function = COLUMNS[name][0]
    # Quantising and choosing tokens are discontinuous: a rounding error is no longer one after them.
    dtype = torch.float64 if name in ("quantized", "generate") else torch.float32
    call = Call(family, family.build(NAME, dtype, seed), family.inputs(dtype, seed))
    eager = {}
    for each in (torch.float64, torch.float32):
        plain = Call(family, family.build("eager", each, seed), family.inputs(each, seed))
        try:
            eager[each] = _detached((uncompiled if function is compiled else function)(plain))
        except Exception as error:
            raise EagerFails from error
    exact, own = eager[torch.float64], eager[torch.float32]
    with _called() as calls:
        try:
            found = _detached(function(call))
        except Exception:
            if name == "compiled":
                _compiles_under_eager(family)
            raise
    if not calls:
        raise AssertionError("fa4flex was not called")
    return _distance(found, exact) / max(_distance(own, exact), 1e-12)


@contextmanager
def _called() -> Iterator[list[None]]:
    """A list that grows with each call of fa4flex by a layer."""
    calls: list[None] = []
    original = integration.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    integration.attention = counted
    try:
        yield calls
    finally:
        integration.attention = original


def _compiles_under_eager(family: Family) -> None:
    try:
        compiled(Call(family, family.build("eager", torch.float32), family.inputs(torch.float32)))
    except Exception as error:
        raise EagerFails from error


class EagerFails(Exception):
    """The family has no such call in transformers."""


def _detached(results: Results) -> Results:
    return [x.detach().double() for x in results]


def _distance(a: Results, b: Results) -> float:
    if [x.shape for x in a] != [x.shape for x in b]:
        raise AssertionError(f"shapes {[list(x.shape) for x in a]} and {[list(x.shape) for x in b]}")
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def rows(families: list[Family], columns: list[str], notes: list[str]) -> Iterator[list[str]]:
    for family in families:
        yield [family.name, *(_shown(family, name, notes) for name in columns)]


def _shown(family: Family, name: str, notes: list[str]) -> str:
    if not applies(family, name):
        return "-"
    try:
        ratio = cell(family, name)
    except EagerFails:
        return "-"
    except (UnsupportedError, transformers.utils.import_utils.OptionalDependencyNotAvailable) as error:
        return f"refused [{_note(notes, error)}]"
    except Exception as error:
        return f"**error** [{_note(notes, error)}]"
    return f"{ratio:.1f}" if ratio <= ALLOWED else f"**{ratio:.3g}**"


def _note(notes: list[str], error: Exception) -> int:
    text = f"{type(error).__name__}: {str(error).strip()}"
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated; default: all")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="comma-separated; default: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    transformers.AttentionMaskInterface.register("eager", finite_eager_mask)
    columns, notes = given.columns.split(","), []
    families = [FAMILIES[name] for name in given.families.split(",")]
    for n, line in enumerate(rows(families, columns, notes)):
        if n == 0:
            print(f"| family | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        print(f"| {' | '.join(line)} |", flush=True)
    print()
    for n, note in enumerate(notes, 1):
        print(f"[{n}] {' '.join(note.split())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
