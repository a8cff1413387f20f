"""PTX text cut into tokens, and the error that every reader of them raises. PTX ISA, sections 4.1 to 4.5.

A token is a string; its first character tells its kind. An opcode with all its modifiers is one token
("ld.shared::cta.b32"), and so is a special register ("%tid.x").
"""

from __future__ import annotations

import re
from bisect import bisect_right

from ptxsim.errors import InputError

_TOKEN = re.compile(
    r"""(?:\s+ | //[^\n]* | /\*.*?\*/)*                               # white space and comments
    (?:( [%$_a-zA-Z][\w$]*(?:(?:\.|::)[\w$]+)*                        # name, opcode
       | \.[a-zA-Z_]\w*(?:::\w+)*                                     # directive, type
       | 0[xXbBfFdD][0-9a-fA-F]+U?                                    # number in another base
       | (?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?U?           # decimal number
       | "[^"\n]*" | << | >> | [][{}()<>,;:|!@+\-*/%&^~=]
       ) | (\S))?""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)

_NAME = re.compile(r"[a-zA-Z][\w$]*|[_$%][\w$]+", re.ASCII)

END = ""
"""The token after the last."""


class PtxError(InputError):
    """PTX that the front cannot read: `line` (from 1) is where, and the message quotes it."""

    def __init__(self, what: str, expected: str, line: int, text: str) -> None:
        self.line = line
        super().__init__(
            f"PTX line {line}: {text.strip()}\n  problem:  {what}",
            expected,
            "correct the PTX; if a compiler wrote it, add what is missing to ptxsim/ptx",
        )


class Tokens:
    """The tokens of a text, and how far they are read: `at` is the index of the next one."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.words: list[str] = []
        self._ends: list[int] = []
        self._breaks = [m.start() for m in re.finditer("\n", text)]
        for match in _TOKEN.finditer(text):
            word = match[1]
            if word is None:
                if match[2] is not None:
                    raise self._error_at(match.start(2), f"the character {match[2]!r}", "PTX")
                break
            self.words.append(word)
            self._ends.append(match.end())
        self.words.append(END)
        self._ends.append(len(text.rstrip()))

    @property
    def next(self) -> str:
        return self.words[self.at]

    def take(self) -> str:
        word = self.words[self.at]
        if word == END:
            raise self.error("the text ends here", "more PTX: is a ; or } missing?")
        self.at += 1
        return word

    def accept(self, word: str) -> bool:
        """Takes the next token if it is `word`; whether it was."""
        if self.words[self.at] != word:
            return False
        self.at += 1
        return True

    def expect(self, word: str, where: str) -> None:
        """Takes `word`; `where` says to people what it stands in ("after .reg")."""
        if not self.accept(word):
            raise self.error(f"{self.shown()} {where}", f"`{word}`")

    def name(self, what: str) -> str:
        """Takes an identifier without dots. Raises PtxError that expects `what`."""
        word = self.take()
        if not is_name(word):
            self.at -= 1
            raise self.error(f"{self.shown()} is not a name", what)
        return word

    def shown(self) -> str:
        """The next token, for a message."""
        return "the end of the text" if self.next == END else f"`{self.next}`"

    def line(self, at: int) -> int:
        """The line, from 1, of the token with this index."""
        return bisect_right(self._breaks, self._ends[at] - 1) + 1

    def error(self, what: str, expected: str, at: int | None = None) -> PtxError:
        """The error at a token, the next one by default."""
        return self._error_at(self._ends[self.at if at is None else at] - 1, what, expected)

    def _error_at(self, position: int, what: str, expected: str) -> PtxError:
        line = bisect_right(self._breaks, max(position, 0)) + 1
        return PtxError(what, expected, line, self.text.split("\n")[line - 1])


def is_name(word: str) -> bool:
    """True if a token can name a register, label or variable. PTX ISA 4.4."""
    return _NAME.fullmatch(word) is not None
