"""Line of the user's code that is running: fa4flex, torch and the standard library are passed over."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from fa4flex.errors import Origin

_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple(
    str(Path(place)) + "/" for place in (_PACKAGE, Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """True if a file is fa4flex, torch or the standard library, rather than the user's."""
    if "site-packages" in filename:  # lies below the standard library's folder, yet is not part of it
        return "/site-packages/torch/" in filename or filename.startswith(str(_PACKAGE) + "/")
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen")


def user_line(boundary: CodeType | None = None, depth: int = 1) -> Origin | None:
    """The innermost running line of user code, not looking above the frame that runs `boundary`."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code is not boundary:
        if not is_library(frame.f_code.co_filename):
            return Origin(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def raising_line(error: BaseException) -> Origin | None:
    """The innermost user line in the traceback of `error`."""
    result, step = None, error.__traceback__
    while step is not None:
        if not is_library(step.tb_frame.f_code.co_filename):
            result = Origin(step.tb_frame.f_code.co_filename, step.tb_lineno)
        step = step.tb_next
    return result


def definition_line(function: object) -> Origin | None:
    """Line where `function` is defined, if it has Python code; decorators are passed over."""
    for candidate in (function, getattr(function, "func", None), vars(type(function)).get("__call__")):
        code = getattr(candidate, "__code__", None)
        if isinstance(code, CodeType):
            return first_line(code)
    return None


def first_line(code: CodeType) -> Origin:
    """The `def` line of some code."""
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    for number in range(code.co_firstlineno, last + 1):
        if linecache.getline(code.co_filename, number).lstrip().startswith(("def ", "async def ")):
            return Origin(code.co_filename, number)
    return Origin(code.co_filename, code.co_firstlineno)
