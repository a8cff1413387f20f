"""The names that integer and floating-point instructions share: add sub mul mad div abs neg min max."""

from __future__ import annotations

from ptxsim.isa.floating import floating
from ptxsim.isa.integer import integer
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, translates
from ptxsim.ptx.nodes import Instruction

_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}


@translates("add", "sub", "mul", "mad", "div", "abs", "neg", "min", "max")
def arithmetic(ins: Instruction, form: Form) -> Step | Act:
    """Translate by floating.py or integer.py, as the type says."""
    return floating(ins, form) if form.type in _FLOATS else integer(ins, form)
