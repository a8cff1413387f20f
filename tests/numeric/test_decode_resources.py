"""Kernels for few query rows, compiled for sm_90a: nothing spills, shared memory is as planned."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.decode_sm90.plan import DecodePlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, lower_forward
from fa4flex.variants import alibi, causal, sliding_window, softcap, tree

USED = {"lengths": "used"}
ROWS_OF_PAGES = {**USED, "keys": in_pages(1)}
"""Copied by warps, 16 bytes a lane."""
CHAIN = range(-1, 15)


def remainders(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No key interval: it is asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 3 != 0


CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "plain 128": ({}, 128, {}),
    "causal 64": ({"mask": causal}, 64, USED),
    "alibi 128": ({"score_mod": alibi, "mask": causal}, 128, USED),
    "soft cap, window 192": ({"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}, 192, {}),
    "alibi 256": ({"score_mod": alibi, "mask": causal}, 256, {}),
    "tree 128": ({"mask": tree(CHAIN)}, 128, USED),
    "tree, soft cap 256": ({"score_mod": softcap(20.0), "mask": tree(CHAIN)}, 256, {}),
    "remainders 64": ({"mask": remainders}, 64, {}),
    "alibi 128, rows of pages": ({"score_mod": alibi, "mask": causal}, 128, ROWS_OF_PAGES),
    "soft cap, window 192, rows of pages": (
        {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
        192,
        ROWS_OF_PAGES,
    ),
    "causal 64, rows of pages": ({"mask": causal}, 64, ROWS_OF_PAGES),
    "alibi 128, skipping": ({"score_mod": alibi, "mask": causal}, 128, {"skip": 1e-3}),
    "soft cap, window 192, skipping": (
        {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
        192,
        {"skip": 1e-3},
    ),
    "causal 64, skipping, used lengths": ({"mask": causal}, 64, {**USED, "skip": 1e-3}),
    "alibi 256, skipping": ({"score_mod": alibi, "mask": causal}, 256, {"skip": 1e-3}),
    "causal 128, float32 output": ({"mask": causal}, 128, {"out_dtype": "float32"}),
}
"""Composition, width of heads, and fields of Inputs."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str) -> None:
    pieces, width, more = CASES[name]
    program = fa4flex.compile(**pieces).program
    tensors = program.captured().operands
    operands = tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors)
    inputs = Inputs(Shape(1, 8, 1, 600), 2, width, width, captured=operands, **more)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), SM90A)
    lowered = lower_forward(given)
    assert isinstance(lowered.plan, DecodePlan)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    signature = Signature(scalars=scalars, given=("seqused_k",) if more == USED else ())
    inspected = inspect(lowered.source, lowered.problem, signature, entry="decode")
    main, merging = inspected.resources, inspected.resources_of("combine")
    for found in (main, merging):
        assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    assert main.registers == 65536 // (256 * lowered.plan.blocks) - 16 * (lowered.plan.blocks == 1)
    assert main != merging, "one kernel's report was taken for another's"
    assert main.shared_bytes == lowered.plan.memory.total
