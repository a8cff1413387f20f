"""Simulated kernels as bytes, which a later process launches without the compiler.

Kept are a kernel's PTX, and its host code as it was compiled. Where that calls the CUDA runtime, it takes the
address of the stand-in, which is another one in each process, from a word in its data; `filled` writes these
words. Other files in this folder (`IDENTITY`) make kept bytes invalid; who keeps them adds what else a kernel
depends on to their key.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxsim.doors import shim


def identity(folder: Path) -> str:
    """Hash of the Python files of a folder."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


IDENTITY = identity(Path(__file__).parent)
BINARY = "binary"
"""Name of the word that holds the number of the device code; others are named as the functions they call."""
WORD = 8
"""Bytes of a word."""


def word(name: str) -> int:
    """Number in the place of a word until it is filled: nothing else in an object file looks like it."""
    return int.from_bytes(hashlib.sha256(f"ptxsim {name}".encode()).digest()[:WORD]) >> 1


WORDS = shim.Words(BINARY, word)


def filled(code: bytes, names: Sequence[str], binary: int) -> bytes:
    """Host code with its words for this process, and for device code of this number."""
    values = {BINARY: binary} | {name: shim.address_of(name) for name in names}
    for name, value in values.items():
        code = code.replace(word(name).to_bytes(WORD, sys.byteorder), value.to_bytes(WORD, sys.byteorder))
    return code


@dataclass(frozen=True)
class HostCode:
    """Object file with words to fill; names of the runtime's functions that it calls."""

    code: bytes
    names: tuple[str, ...]


def packed(compiled: Any) -> bytes:
    """A function compiled for the simulator, through TVM-FFI, as bytes."""
    host: HostCode = compiled.host_code
    about = {"entry": compiled.function_name, "names": host.names, "ptx": compiled.__ptx__}
    return zlib.compress(json.dumps(about).encode() + b"\0" + host.code, 1)


def loaded(content: bytes) -> Callable[..., Any]:
    """Function that launches what `packed` was given."""
    import tvm_ffi
    from cutlass._mlir._mlir_libs._cutlass_ir._execution_engine import BinaryExecutionEngine
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    head, _, code = zlib.decompress(content).partition(b"\0")
    about = json.loads(head)
    binary = shim.new_binary()
    shim.set_ptx(binary, about["ptx"])
    libraries = [name for name in (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep) if name]
    engine = BinaryExecutionEngine(filled(code, about["names"], binary), libraries, True)
    entry = engine.lookup("__tvm_ffi_" + about["entry"])
    function = tvm_ffi.Function.__from_extern_c__(entry, keep_alive_object=engine)
    return functools.partial(shim.deliver, function)
