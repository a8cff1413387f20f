"""Object files as shared libraries: those load in a millisecond and without importing the compiler."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

LINKERS = ("ld", "ld.lld", "ld.bfd")


def shared_library(content: bytes, libraries: Sequence[str]) -> bytes | None:
    """The object file `content` linked against `libraries`, or None where no linker is installed.

    The libraries are found again by their full paths, which the result holds.
    """
    with tempfile.TemporaryDirectory(prefix="fa4flex-") as folder:
        source, target = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        source.write_bytes(content)
        for linker in filter(None, map(shutil.which, LINKERS)):
            command = [linker, "-shared", "-z", "noexecstack", "-o", str(target), str(source), *libraries]
            for library in libraries:
                command += ["-rpath", str(Path(library).parent)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return target.read_bytes()
    return None
