"""A module, kernel, instruction or operand as PTX text, which parses to the same but for line numbers."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from ptxsim.ptx.lex import PtxError, Tokens
from ptxsim.ptx.nodes import (
    WIDTHS,
    Address,
    Discard,
    Imm,
    Instruction,
    Kernel,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    Variable,
    Vector,
)


def module(module: Module) -> str:
    files = {file: number for number, file in enumerate(_files(module), 1)}
    parts = [f".version {module.version}\n.target {module.target}\n.address_size 64"]
    parts += [_variable(v) for v in module.variables]
    parts += [kernel(k, files) for k in module.kernels.values()]
    parts += [f'.file {number} "{file}"' for file, number in files.items()]
    return "\n".join(parts) + "\n"


def kernel(kernel: Kernel, files: dict[str, int] | None = None) -> str:
    """`files` numbers the files of .loc; without it there is none."""
    lines = [f".visible .entry {kernel.name}("]
    lines += [",\n".join(_declared(p) for p in kernel.parameters) + ")"]
    lines += [f".{name} {x}, {y}, {z}" for name, (x, y, z) in _sizes(kernel)]
    lines += [f".minnctapersm {kernel.resident}"] if kernel.resident > 1 else []
    lines += ["{", *(_variable(v) for v in kernel.variables), *_registers(kernel)]
    labels = _labels(kernel)
    source = None
    for index, statement in enumerate(kernel.body):
        if files is not None and statement.source != source and statement.source is not None:
            source = statement.source
            file, _, line = source.rpartition(":")
            lines.append(f".loc {files[file]} {line} 0")
        lines += [f"{name}:" for name in labels.get(index, ())]
        lines.append("\t" + instruction(statement))
    lines += [f"{name}:" for name in labels.get(len(kernel.body), ())]
    return "\n".join([*lines, "}"])


def instruction(instruction: Instruction) -> str:
    """The statement with its semicolon."""
    wide = "f64" in instruction.parts or "b64" in instruction.parts
    guard = ""
    if instruction.guard is not None:
        guard = f"@{'!' if instruction.unless else ''}{instruction.guard.name} "
    if instruction.name == "brx":
        register, table = instruction.operands
        assert isinstance(table, Vector)
        labels = ", ".join(operand(label) for label in table.items)
        return f"{{ _to_: .branchtargets {labels}; {guard}{instruction.opcode} {operand(register)}, _to_; }}"
    if instruction.name == "call":
        results, function, given = (
            operand(o).replace("{", "(").replace("}", ")") for o in instruction.operands
        )
        results = "" if results == "()" else f"{results}, "
        return f"{guard}{instruction.opcode} {results}{function}, {given};"
    operands = ", ".join(operand(o, wide) for o in instruction.operands)
    return f"{guard}{instruction.opcode}{' ' if operands else ''}{operands};"


def operand(value: Operand, wide: bool = False) -> str:
    """`wide` has floats written with 64 bits; without it only those that fp32 does not hold."""
    match value:
        case Reg(name) | Special(name) | Label(name):
            return name
        case Imm(number):
            return str(number) if isinstance(number, int) else _float(number, wide)
        case Symbol(name, offset):
            return f"{name}+{offset}" if offset else name
        case Address(base, offset, coords):
            place = operand(base) + (f"+{offset}" if offset else "")
            return f"[{place}, {operand(Vector(coords))}]" if coords else f"[{place}]"
        case Vector(items):
            return "{" + ", ".join(operand(item, wide) for item in items) + "}"
        case Pair(first, second):
            return f"{operand(first)}|{operand(second)}"
        case Negated(register):
            return f"!{register.name}"
        case Discard():
            return "_"


def without(text: str, line: int) -> str:
    """The text with one line left empty, so that the others keep their numbers. The line, from 1, must hold
    one whole statement: raises PtxError where it does not."""
    lines = text.split("\n")
    words = Tokens(lines[line - 1]).words[:-1]
    whole = words[-1:] == [";"] and words.count(";") == 1 and words.count("{") == words.count("}")
    if not whole or words[0] == "{":
        raise PtxError("not one whole statement", "one line with one statement", line, lines[line - 1])
    lines[line - 1] = ""
    return "\n".join(lines)


def _float(number: float, wide: bool) -> str:
    bits = struct.pack(">d", number)
    try:
        narrow = struct.pack(">f", number)
    except OverflowError:
        wide = True
    if not wide and struct.pack(">d", struct.unpack(">f", narrow)[0]) == bits:
        return f"0f{narrow.hex().upper()}"
    return f"0d{bits.hex().upper()}"


def _sizes(kernel: Kernel) -> list[tuple[str, tuple[int, int, int]]]:
    sizes = (("reqntid", kernel.threads), ("reqnctapercluster", kernel.cluster))
    return [(name, size) for name, size in sizes if size is not None]


def _variable(variable: Variable) -> str:
    if variable.space == "shared" and variable.size == 0:
        return f".extern .shared .align {variable.align} .b8 {variable.name}[];"
    values = f" = {{{', '.join(str(b) for b in variable.initial)}}}" if variable.initial else ""
    return f"{_declared(variable)}{values};"


def _declared(variable: Variable) -> str:
    return f".{variable.space} .align {variable.align} .b8 {variable.name}[{variable.size}]"


def _files(module: Module) -> list[str]:
    sources = (i.source for k in module.kernels.values() for i in k.body if i.source is not None)
    return list(dict.fromkeys(source.rpartition(":")[0] for source in sources))


def _labels(kernel: Kernel) -> dict[int, list[str]]:
    """The names of labels at each index."""
    found: dict[int, list[str]] = {}
    for statement in kernel.body:
        for value in statement.operands:
            for label in value.items if isinstance(value, Vector) else (value,):
                if isinstance(label, Label) and label.name not in found.setdefault(label.target, []):
                    found[label.target].append(label.name)
    return found


# --- declarations of registers ------------------------------------------------------------------------------


def _registers(kernel: Kernel) -> Iterator[str]:
    """Declarations that give every register its index again."""
    used: dict[int, dict[int, Reg]] = {file: {} for file in kernel.registers}
    names = set()
    for statement in kernel.body:
        for reg in [r for o in (*statement.operands, statement.guard) for r in _in(o)]:
            used[reg.file][reg.index] = reg
            names.add(reg.name)
    for file, count in kernel.registers.items():
        yield from _file(file, count, used[file], names)


def _file(file: int, count: int, used: dict[int, Reg], taken: set[str]) -> Iterator[str]:
    """Declarations of one file's registers, `%r<10>` where their names are numbered as they are. Those that
    no instruction uses get names that are not `taken`."""
    at = 0
    while at < count:
        first = next((i for i in range(at, count) if i in used), None)
        if first is None:
            type = next(t for t, width in WIDTHS.items() if width == file)
            yield f".reg .{type} _rest{file}_<{count - at}>;"
            return
        prefix, stop = _family(used, at, first, taken)
        if stop is not None:
            yield f".reg .{used[first].type} {prefix}<{stop - at}>;"
            at = stop
            continue
        if at < first:
            yield f".reg .{used[first].type} _gap{file}_{at}_<{first - at}>;"
        yield f".reg .{used[first].type} {used[first].name};"
        at = first + 1


def _family(used: dict[int, Reg], at: int, first: int, taken: set[str]) -> tuple[str, int | None]:
    """Prefix and end of the longest run of registers named prefix0, prefix1 ... from index `at`, of which
    `first` is the first in use; the end is None where it is not named so."""
    match = re.fullmatch(r"(.*?)(0|[1-9][0-9]*)", used[first].name)
    if match is None or int(match[2]) != first - at:
        return "", None
    prefix, type, stop, index = match[1], used[first].type, None, at
    last = max(used)
    while index <= last:
        name = f"{prefix}{index - at}"
        if index in used:
            if (used[index].name, used[index].type) != (name, type):
                break
            stop = index + 1
        elif name in taken:
            break
        index += 1
    return prefix, stop if stop is not None and stop > first else None


def _in(value: Operand | None) -> list[Reg]:
    """The registers of an operand."""
    match value:
        case Reg():
            return [value]
        case Address(base, _, coords):
            return [*_in(base), *(reg for c in coords for reg in _in(c))]
        case Vector(items):
            return [reg for item in items for reg in _in(item)]
        case Pair(first, second):
            return [*_in(first), *_in(second)]
        case Negated(register):
            return [register]
    return []
