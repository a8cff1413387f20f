"""PTX text -> Module: `parse`."""

from fa4flex.simulator.ptx.lex import PtxError
from fa4flex.simulator.ptx.parse import parse

__all__ = ["PtxError", "parse"]
