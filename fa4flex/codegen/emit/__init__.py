"""Plan + expressions -> the source of a small module: hooks, and the kernel they go into."""

from fa4flex.codegen.emit.block_tables import emit_tables
from fa4flex.codegen.emit.module import (
    emit_backward,
    emit_forward,
    emit_mass,
    emit_sequences,
    emit_tangents,
)
from fa4flex.codegen.emit.output_function import emit_output
from fa4flex.codegen.emit.source import Source

__all__ = [
    "Source", "emit_backward", "emit_forward", "emit_mass", "emit_output", "emit_sequences", "emit_tables",
    "emit_tangents",
]  # fmt: skip
