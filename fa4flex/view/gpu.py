"""What a GPU would run for a program: plan, generated source and PTX. None of it needs a GPU."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch

from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.build import Program
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.view.names import Names, name_of
from fa4flex.view.sizes import setting

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.codegen.plan import Plan, Size
    from fa4flex.codegen.plan.problem import Problem
    from fa4flex.codegen.plan.target import Target

HEAD_DIM = 128
ARCH = "sm_90a"


def problem_of(
    program: Program, q_len: int | None = None, kv_len: int | None = None, **changes: Any
) -> Problem:
    """The problem at these lengths: bfloat16 heads of 128, where `changes` (fields of Problem, and `arch`)
    agree."""
    from fa4flex.codegen.plan import Problem
    from fa4flex.runtime.cuda.choose import prove

    shape = setting(program, q_len, kv_len).shape
    target = target_named(changes.pop("arch", ARCH))
    proved = prove(program.facts, shape, program.captured())
    width = changes.pop("head_dim", HEAD_DIM)
    given: dict[str, Any] = {
        "head_dim": width,
        "head_dim_v": width,
        "mask_form": proved.mask_form,
        "wide_index": proved.wide_index,
        "in_range": proved.in_range,
        "sinks": program.variant.sinks is not None,
        "few_queries": shape.q_len <= target.few_queries,
        "many_queries": 0 < target.many_queries < shape.q_len,
        "positive_scale": program.variant.scale is None or program.variant.scale > 0,
        "operands": tuple((str(o.dtype).removeprefix("torch."), len(o.shape)) for o in program.operands),
    }
    return Problem(**given | changes)


def check_names(changes: dict[str, Any]) -> None:
    """Raise InputError unless `changes` names fields of Problem, lengths, and arch."""
    from fa4flex.codegen.plan import Problem

    known = ["arch", "q_len", "kv_len", *(field.name for field in fields(Problem))]
    for name, value in changes.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise InputError(
                f"{name}={value!r}",
                f"some of {', '.join(known)}",
                f"did you mean {near[0]}?" if near else f"leave {name} out",
            )


def target_named(arch: str) -> Target:
    from fa4flex.codegen.plan.target import TARGETS

    found = next((target for target in TARGETS if target.name == arch), None)
    if found is None:
        names = ", ".join(target.name for target in TARGETS)
        raise UnsupportedError(f"arch={arch!r}", f"one of {names}", f"pass arch={ARCH!r}")
    return found


def plan_of(program: Program, problem: Problem, arch: str = ARCH) -> Plan:
    from fa4flex.codegen.plan import plan_forward

    return plan_forward(program.facts, problem, target_named(arch), program.variant.schedule)


def source_of(program: Program, plan: Plan) -> Source:
    """The generated module, under the names of the user's code and with the lines that it comes from."""
    from fa4flex.codegen.emit import emit_forward
    from fa4flex.codegen.emit.module import Captions

    names = Names.of(program)
    traced = [t for t in (program.score, program.mask) if t is not None]
    origins = {node: origin for t in traced for node, origin in t.origins.items()}
    variant = program.variant
    mods = [name_of(mod) for mod in (variant.score_mod, variant.mask) if mod is not None]
    captions = Captions(" with ".join(mods) or "attention", names.tensors, names.numbers)
    return emit_forward(program.facts, plan, captions, origins)


def plan_stage(program: Program, q_len: int | None = None, kv_len: int | None = None, **changes: Any) -> str:
    """Tiles, warp roles, registers, memory map, pipeline and expected bound."""
    shape = setting(program, q_len, kv_len).shape
    plan = plan_of(program, problem_of(program, q_len, kv_len, **changes), changes.get("arch", ARCH))
    return plan.explain(_size(shape))


_TOLD = ("forward kernel", "tile:", "softmax:", "order:", "bound:")
_MASKS = {
    "none": "every tile of keys is full: no mask code",
    "spans": "the kernel computes each row's keys itself: no block table, no mask code in full tiles",
    "tables": "block tables are made at the first call; the mask runs in partial tiles only",
}


def headline(program: Program, q_len: int, kv_len: int, arch: str = ARCH) -> str:
    """One line: which kernel it would be."""
    shape = setting(program, q_len, kv_len).shape
    plan = plan_of(program, problem_of(program, shape.q_len, shape.kv_len, arch=arch), arch)
    return plan.explain(_size(shape)).splitlines()[0]


def arch_here() -> str | None:
    """The kernels' target of the GPU that this machine has; None without one that kernels are made for."""
    if not torch.cuda.is_available():
        return None
    return {9: "sm_90a", 10: "sm_100a"}.get(torch.cuda.get_device_capability()[0])


def summary(
    program: Program, q_len: int | None = None, kv_len: int | None = None, arch: str = ARCH
) -> list[str]:
    """The plan's headlines, and what was proved for it."""
    shape = setting(program, q_len, kv_len).shape
    problem = problem_of(program, shape.q_len, shape.kv_len, arch=arch)
    lines = plan_of(program, problem, arch).explain(_size(shape)).splitlines()
    proved = [f"mask: {_MASKS[problem.mask_form]}"]
    if problem.operands:
        proved.append(
            "captured tensors: every index is proved to lie within them"
            if problem.in_range
            else "captured tensors: not every index is proved to lie within them, so indices are wrapped"
        )
    return [*(line for line in lines if line.startswith(_TOLD)), *proved]


def _size(shape: Shape) -> Size:
    from fa4flex.codegen.plan import Size

    return Size(shape.batch, shape.heads, shape.q_len, shape.kv_len)


def forward_stage(
    program: Program, q_len: int | None = None, kv_len: int | None = None, **changes: Any
) -> str:
    """The generated module of the forward kernel."""
    plan = plan_of(program, problem_of(program, q_len, kv_len, **changes), changes.get("arch", ARCH))
    return source_of(program, plan).text


def ptx_stage(program: Program, q_len: int | None = None, kv_len: int | None = None, **changes: Any) -> str:
    """The PTX of the forward kernel, compiled now."""
    from fa4flex.codegen.expr import walk
    from fa4flex.runtime.cuda.call import Signature
    from fa4flex.runtime.cuda.inspect import inspect

    problem = problem_of(program, q_len, kv_len, **changes)
    arch = changes.get("arch", ARCH)
    source = source_of(program, plan_of(program, problem, arch))
    nodes = walk(program.facts.score, program.facts.mask)
    kinds = {node.value: node.kind for node in nodes if node.op == "scalar"}
    scalars = tuple(kinds[slot] for slot in range(len(program.scalars)))
    return inspect(source, problem, Signature(scalars=scalars), arch).ptx
