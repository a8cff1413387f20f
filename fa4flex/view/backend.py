"""The backend of a program's calls, in words: which runs on the devices of this machine, why, and how."""

from __future__ import annotations

import torch

from fa4flex.codegen.build import Program
from fa4flex.errors import Fa4flexError
from fa4flex.primitives.blocks import FULL, PARTIAL
from fa4flex.runtime.flex.attend import Module, Wanted, module
from fa4flex.runtime.flex.block_mask import BLOCK, classes_of
from fa4flex.runtime.flex.choice import Choice, choose
from fa4flex.runtime.flex.mods import Setting
from fa4flex.variant import Backend, default_scale
from fa4flex.view.sizes import Setting as Sizes

_NAMES = {
    "kernels": "generated kernels",
    "cpu": "PyTorch operations, block by block",
    "flex": "torch's flex_attention",
}
_WIDTH = 128
"""Head width of a listing; it takes part in the default scale alone."""


def devices_here() -> list[torch.device]:
    """The CPU, and the current GPU if there is one."""
    results = [torch.device("cpu")]
    if torch.cuda.is_available():
        results.append(torch.device("cuda", torch.cuda.current_device()))
    if torch.xpu.is_available():
        results.append(torch.device("xpu", torch.xpu.current_device()))
    return results


def choices_here(asked: Backend = "auto") -> list[tuple[torch.device, Choice]]:
    """Backend of calls on each device of this machine."""
    return [(device, choose(asked, device)) for device in devices_here()]


def choice_lines(asked: Backend = "auto") -> list[str]:
    """A line per device of this machine: the backend, and why."""
    return [f"{device.type}: {in_words(choice)}" for device, choice in choices_here(asked)]


def in_words(choice: Choice) -> str:
    """The backend, and why."""
    return f"{_NAMES[choice.name]} ({choice.why})"


def summary(program: Program, chosen: Sizes) -> list[str]:
    """The backends, and how torch's flex_attention would run the program where one of them is that."""
    asked = program.variant.backend
    lines = choice_lines(asked)
    if all(choice.name != "flex" for _, choice in choices_here(asked)):
        return lines
    try:
        _module(program)
    except Fa4flexError as error:
        return [*lines, f"flex_attention cannot express it: {error.given}"]
    lines += [
        "compiled by torch.compile; on a CPU that is so for outputs alone, and gradients and the log-sum-exp"
        " come from torch's dense reference",
    ]
    if program.mask is not None:
        classes = classes_of(program.facts.mask, chosen.shape, program.captured())
        full, partial = (int((classes == kind).sum()) for kind in (FULL, PARTIAL))
        lines.append(
            f"BlockMask of {BLOCK[0]} x {BLOCK[1]} blocks, bounded on the device: {full} full, {partial}"
            f" partial, {classes.numel() - full - partial} empty of {classes.numel()}"
        )
    return lines


def flex_stage(program: Program) -> str:
    """The generated module that torch.compile compiles for flex_attention."""
    return _module(program).text


def _module(program: Program) -> Module:
    variant = program.variant
    scale = default_scale(_WIDTH) if variant.scale is None else variant.scale
    sizes = tuple(tuple(x.shape) for x in program.tensors())
    wanted = Wanted(scale, True, False, variant.has_sinks, variant.schedule.tile)
    return module(program.facts, Setting(sizes=sizes), wanted)
