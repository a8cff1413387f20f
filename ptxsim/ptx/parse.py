"""PTX text -> Module. PTX ISA, sections 4, 5 and 11.

Read and dropped are debug data (.section .debug_*), hints to the assembler (.pragma, .maxnreg)
and what launches must keep to but Kernel has no field for (.maxntid, .explicitcluster, .blocksareclusters).
Functions are skipped: none may be called but vprintf, which the system has. Anything unknown raises PtxError.
"""

from __future__ import annotations

from dataclasses import replace

from ptxsim.ptx.declare import SPACES, parameter, registers, variables
from ptxsim.ptx.lex import END, Tokens, is_name
from ptxsim.ptx.literals import integer
from ptxsim.ptx.nodes import Address, Instruction, Kernel, Module, Symbol, Variable
from ptxsim.ptx.operands import instruction
from ptxsim.ptx.scopes import Names

_LINKAGE = (".extern", ".visible", ".weak", ".common")
_SIZES = (".reqntid", ".maxntid", ".reqnctapercluster")
_LIMITS = (".minnctapersm", ".maxnctapersm", ".maxnreg", ".maxclusterrank")
_MODES = (".explicitcluster", ".blocksareclusters")


def parse(text: str) -> Module:
    """The module that a PTX text holds. Raises PtxError."""
    tokens = Tokens(text)
    version, target = _header(tokens)
    files = _files(tokens)
    kernels: dict[str, Kernel] = {}
    found: dict[str, Variable] = {}
    while tokens.next != END:
        start = tokens.at
        linkage = tokens.take() if tokens.next in _LINKAGE else ""
        if tokens.accept(".entry"):
            kernel = _entry(tokens, files, found)
            if kernel.name in kernels:
                raise tokens.error(f"`{kernel.name}` is already defined", "each kernel once", start)
            kernels[kernel.name] = kernel
        elif tokens.accept(".func"):
            _skip_function(tokens)
        elif tokens.next in SPACES and tokens.next != ".local":
            names = Names({name: Symbol(name) for name in found})
            for variable in variables(tokens, names, tokens.take()[1:], linkage):
                found[variable.name] = variable
        elif linkage:
            raise tokens.error(
                f"{tokens.shown()} after {linkage}", ".entry, .func, .global, .const or .shared"
            )
        else:
            _remark(tokens)
    return Module(version, target, kernels, tuple(found.values()), text)


def _header(tokens: Tokens) -> tuple[str, str]:
    """Reads .version, .target and .address_size. PTX ISA 11.1."""
    tokens.expect(".version", "at the beginning")
    version = tokens.take()
    tokens.expect(".target", "after .version")
    target = tokens.name("a target such as sm_100a")
    while tokens.accept(","):
        at, mode = tokens.at, tokens.take()
        if mode not in ("debug", "texmode_unified", "texmode_independent"):
            raise tokens.error(f"`{mode}` in .target", "debug, texmode_unified or texmode_independent", at)
    tokens.expect(".address_size", "after .target")
    tokens.expect("64", "as .address_size")
    return version, target


def _files(tokens: Tokens) -> dict[str, str]:
    """Numbers and paths of all .file directives, which may come after the code that refers to them."""
    words = tokens.words
    return {
        number: path.strip('"') for word, number, path in zip(words, words[1:], words[2:]) if word == ".file"
    }


def _remark(tokens: Tokens) -> None:
    """Reads a directive that says nothing about what a kernel does. Raises PtxError for any other."""
    if tokens.accept(".pragma"):
        _string(tokens, "a string after .pragma")
        while tokens.accept(","):
            _string(tokens, "a string after .pragma")
        tokens.expect(";", "after .pragma")
    elif tokens.accept(".file"):
        integer(tokens, "the number of a file")
        _string(tokens, "the path of a file")
        while tokens.accept(","):
            integer(tokens, "the time stamp or size of a file")
    elif tokens.accept(".section"):
        if not tokens.next.startswith(".debug_"):
            raise tokens.error(f"the section {tokens.shown()}", "one of debug data, .debug_...")
        tokens.take()
        _skip_braces(tokens)
    else:
        raise tokens.error(
            f"{tokens.shown()} is not known here",
            ".entry, .func, a variable, .pragma, .file or .section .debug_...",
        )


def _string(tokens: Tokens, what: str) -> str:
    if tokens.next[:1] != '"':
        raise tokens.error(f"{tokens.shown()} is not a string", what)
    return tokens.take()[1:-1]


def _skip_function(tokens: Tokens) -> None:
    """Passes over a function: a call of it, which alone would run it, raises PtxError."""
    while tokens.next not in ("{", ";"):
        tokens.take()
    if not tokens.accept(";"):
        _skip_braces(tokens)


def _skip_braces(tokens: Tokens) -> None:
    tokens.expect("{", "before a body")
    depth = 1
    while depth:
        word = tokens.take()
        depth += (word == "{") - (word == "}")


def _entry(tokens: Tokens, files: dict[str, str], found: dict[str, Variable]) -> Kernel:
    """Reads a kernel, after .entry. PTX ISA 11.2 and 11.4 (performance-tuning directives)."""
    name = tokens.name("the name of a kernel")
    names = Names({variable: Symbol(variable) for variable in found})
    names.open()
    parameters = []
    if tokens.accept("(") and not tokens.accept(")"):
        parameters.append(parameter(tokens, names))
        while not tokens.accept(")"):
            tokens.expect(",", "after a parameter")
            parameters.append(parameter(tokens, names))
    sizes: dict[str, tuple[int, int, int]] = {}
    limits: dict[str, int] = {}
    while tokens.next != "{":
        if tokens.next in _SIZES:
            directive = tokens.take()
            sizes[directive] = _size(tokens)
        elif tokens.next in _LIMITS:
            directive = tokens.take()
            limits[directive] = integer(tokens, "a limit")
        elif tokens.next == ".pragma":
            _remark(tokens)
        elif tokens.next in _MODES:
            tokens.take()
        else:
            raise tokens.error(f"{tokens.shown()} before the body", "a directive such as .reqntid, or `{`")
    body = _Body(tokens, names, files)
    body.read()
    return Kernel(
        name,
        tuple(parameters),
        tuple(body.variables),
        names.registers,
        tuple(body.instructions),
        sizes.get(".reqntid"),
        sizes.get(".reqnctapercluster"),
        limits.get(".minnctapersm", 1),
    )


def _size(tokens: Tokens) -> tuple[int, int, int]:
    """Reads one to three positive integers."""
    at = tokens.at
    size = [integer(tokens, "a size")]
    while tokens.accept(","):
        size.append(integer(tokens, "a size"))
    if len(size) > 3 or min(size) < 1:
        raise tokens.error(f"the size {size}", "one to three numbers of at least 1", at)
    x, y, z = [*size, 1, 1][:3]
    return x, y, z


class _Body:
    """Reads { ... }: instructions, and the variables declared between them."""

    def __init__(self, tokens: Tokens, names: Names, files: dict[str, str]) -> None:
        self.tokens, self.names, self.files = tokens, names, files
        self.instructions: list[Instruction] = []
        self.variables: list[Variable] = []
        self._arguments: set[str] = set()
        """Variables in which arguments and results of a call are handed over."""
        self._source: str | None = None
        self._sources: dict[tuple[str, str], str] = {}

    def read(self) -> None:
        tokens, names, body = self.tokens, self.names, self.instructions
        start = tokens.at
        depth = 0
        while True:
            word = tokens.next
            if word == "{":
                tokens.at += 1
                depth += 1
                names.open()
            elif word == "}":
                names.close(body, tokens)
                tokens.at += 1
                depth -= 1
                if depth == 0:
                    break
            elif word == END:
                raise tokens.error("the text ends within a kernel", "a } for each {", start)
            elif word[0] == ".":
                self._directive()
            elif tokens.words[tokens.at + 1] == ":" and is_name(word):
                self._label()
            else:
                body.append(self._own(instruction(tokens, names, len(body), self._source)))
        names.close(body, tokens)

    def _own(self, statement: Instruction) -> Instruction:
        """The statement; where it loads or stores an argument of a call, it does so in local memory, where a
        thread has it (PTX ISA 5.1.6.4)."""
        places = [operand.base for operand in statement.operands if isinstance(operand, Address)]
        if statement.has("param") and any(
            isinstance(place, Symbol) and place.name in self._arguments for place in places
        ):
            return replace(statement, opcode=statement.opcode.replace(".param", ".local"))
        return statement

    def _label(self) -> None:
        """Reads `name:`, alone or before .branchtargets."""
        tokens, at = self.tokens, self.tokens.at
        name = tokens.take()
        tokens.expect(":", "after a label")
        if not tokens.accept(".branchtargets"):
            self.names.label(name, len(self.instructions), tokens, at)
            return
        targets = [tokens.name("a label")]
        while tokens.accept(","):
            targets.append(tokens.name("a label"))
        tokens.expect(";", "after .branchtargets")
        self.names.table(name, targets, tokens, at)

    def _directive(self) -> None:
        tokens = self.tokens
        if tokens.accept(".reg"):
            registers(tokens, self.names)
        elif tokens.accept(".loc"):
            self._location()
        elif tokens.next in SPACES:
            self.variables += variables(tokens, self.names, tokens.take()[1:])
        elif tokens.accept(".param"):
            declared = variables(tokens, self.names, "local")
            self._arguments.update(variable.name for variable in declared)
            self.variables += declared
        elif tokens.next == ".pragma":
            _remark(tokens)
        else:
            raise tokens.error(
                f"{tokens.shown()} is not known in a kernel",
                ".reg, a variable, .loc, .pragma or an instruction",
            )

    def _location(self) -> None:
        """Reads file, line, column, and perhaps where the code was inlined, which is left out. ISA 11.5.3."""
        tokens, at = self.tokens, self.tokens.at
        file, line, _ = tokens.take(), tokens.take(), integer(tokens, "a column")
        if tokens.accept(","):
            tokens.expect("function_name", "after .loc")
            tokens.name("a label of .debug_str")
            if tokens.accept("+"):
                integer(tokens, "an offset")
            tokens.expect(",", "after function_name")
            tokens.expect("inlined_at", "after function_name")
            for what in ("a file", "a line", "a column"):
                integer(tokens, what)
        if file not in self.files or not line.isdigit():
            raise tokens.error(f"the place {file} {line}", "the number of a .file, and a line", at)
        self._source = self._sources.setdefault((file, line), f"{self.files[file]}:{line}")
