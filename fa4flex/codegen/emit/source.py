"""Source: the text of a generated module, its identity, and how it becomes code."""

from __future__ import annotations

import ast
import hashlib
import linecache
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Source:
    """A generated module. `key` is the identity of its code: comments and docstring are no part of it."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def key(self) -> str:
        """sha256 of the code. The user's lines stand in comments: moving one compiles nothing."""
        module = ast.parse(self.text)
        if ast.get_docstring(module) is not None:
            del module.body[0]
        return hashlib.sha256(ast.unparse(module).encode()).hexdigest()

    @property
    def filename(self) -> str:
        """File name of the text for tracebacks and debuggers: an entry of linecache, not a file."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.name)
        return f"<fa4flex {name} {hashlib.sha256(self.text.encode()).hexdigest()[:16]}>"

    def namespace(self) -> dict[str, Any]:
        """The module's globals, executed anew. Imports cutlass."""
        # Without a modification time linecache never looks for a file of that name.
        linecache.cache[self.filename] = (
            len(self.text),
            None,
            self.text.splitlines(keepends=True),
            self.filename,
        )
        names: dict[str, Any] = {"__name__": f"fa4flex_{self.key[:16]}", "__file__": self.filename}
        exec(compile(self.text, self.filename, "exec"), names)
        return names

    def load(self) -> Any:
        """The module's `kernel`."""
        return self.namespace()["kernel"]
