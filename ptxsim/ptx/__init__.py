"""PTX text -> Module: `parse`."""

from ptxsim.ptx.lex import PtxError
from ptxsim.ptx.parse import parse

__all__ = ["PtxError", "parse"]
