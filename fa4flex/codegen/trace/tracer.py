"""trace(): call the user's function once on proxies, and read the expression off what it returns."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch

from fa4flex.codegen.expr import CONTEXT, Expr, sym, to_float
from fa4flex.codegen.trace.build import coerce, from_tensor
from fa4flex.codegen.trace.captures import Captures
from fa4flex.codegen.trace.closure import Lifter
from fa4flex.codegen.trace.dispatch import Tracing
from fa4flex.codegen.trace.functions import intercepting
from fa4flex.codegen.trace.graph import GraphFunction, GraphLifting
from fa4flex.codegen.trace.origin import definition_line, raising_line
from fa4flex.codegen.trace.paths import Path, root
from fa4flex.codegen.trace.questions import asking_types
from fa4flex.codegen.trace.state import State, running
from fa4flex.codegen.trace.traced import SIGNATURES, ModKind, Pinned, Traced
from fa4flex.codegen.trace.value import Value, is_number, is_real
from fa4flex.errors import Fa4flexError, Origin, TraceError
from fa4flex.primitives.base import FunctionMod, Mod, accepted_context, out_of_order

_SYMBOLS = {
    "score": "score", "b": "b", "h": "h", "q_idx": "q", "kv_idx": "kv", "out": "score", "d_idx": "kv",
}  # fmt: skip
"""Symbols of the parameters. An output function has those of a score mod: what is known of expressions of a
value and four indices, derivatives and index patterns, holds for both."""


@dataclass(frozen=True)
class _Mod:
    """A mod that is traced, names of lengths that it asks for, and what all attempts share: `called` are the
    modules that it calls, by id."""

    fn: Callable[..., Any]
    kind: ModKind
    captures: Captures
    context: tuple[str, ...]
    called: set[int]


class _Restart(Exception):
    """The attempt needs these numbers as constants, or calls a module that it had not known of."""

    def __init__(self, looked_at: dict[str, tuple[int | float, Origin | None]]) -> None:
        super().__init__(*looked_at)
        self.looked_at = looked_at


def trace(fn: Callable[..., Any], kind: ModKind, captures: Captures) -> Traced:
    """The expression of a FlexAttention mod.

    fn(score, b, h, q_idx, kv_idx) -> float for kind "score", fn(b, h, q_idx, kv_idx) -> bool for kind "mask",
    fn(out, b, h, q_idx, d_idx) -> float for kind "output"; each may also take parameters named q_len, kv_len
    (no output function) and num_heads. Captured tensors and numbers get slots
    in `captures`; call `captures.finish(...)` after the last trace. Raises TraceError, with the user's line.
    """
    if not callable(fn):
        raise TraceError(f"{fn!r} as a {kind}_mod", f"a function {_form(kind)}", "pass a callable")
    for part in _users_functions(fn):
        _check_signature(part, kind)
    context = _check_signature(fn, kind)
    mark, before = captures.mark(), _random_state()
    traced = _trace(_Mod(fn, kind, captures, context, {id(fn)}))
    if _random_state() != before:  # another thread may have drawn, too: only a different result tells
        captures.rewind(mark)
        again = _trace(_Mod(fn, kind, captures, context, {id(fn)}))
        if again.root is not traced.root:
            raise _random(fn)
    return traced


def _random_state() -> tuple[Any, ...]:
    """State of Python's and numpy's global generators; torch's random operations are refused one by one.

    A numpy.random that nobody has imported has none, and takes as long to import as a mod to trace. A mod
    that imports it is run again, as if it had drawn.
    """
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if get_state is None:
        return random.getstate(), None
    _, keys, *rest = get_state(legacy=True)
    return random.getstate(), bytes(keys), tuple(rest)


def _random(fn: Callable[..., Any]) -> TraceError:
    return TraceError(
        f"{_name(fn)} draws random numbers",
        "a mod that gives the same result every time it runs (it runs once per compile)",
        "draw the numbers outside the mod, into a tensor that the mod indexes",
        _defined(fn),
    )


def _trace(mod: _Mod) -> Traced:
    constants: dict[str, Pinned] = {}
    mark = mod.captures.mark()
    while True:
        try:
            return _attempt(mod, constants)
        except _Restart as restart:
            mod.captures.rewind(mark)
            constants.update((n, Pinned(n, value, line)) for n, (value, line) in restart.looked_at.items())
        except BaseException as error:
            mod.captures.rewind(mark)
            if not isinstance(error, Exception):
                raise
            return _retry_with_constants(mod)


def _retry_with_constants(mod: _Mod) -> Traced:
    """The mod may fail on proxies for its numbers only (a C extension wants a real int): now none is one."""
    mark = mod.captures.mark()
    try:
        return _attempt(mod, {}, freeze=True)
    except Fa4flexError as error:
        mod.captures.rewind(mark)
        raise error.with_traceback(None) from error.__cause__
    except Exception as error:
        mod.captures.rewind(mark)
        raise TraceError(
            given=f"{_name(mod.fn)} raised {type(error).__name__}: {error}",
            expected=f"a {mod.kind}_mod that runs on traced values",
            fix="see the exception above; the mod is called once, on stand-ins for 0-d tensors",
            where=raising_line(error) or _defined(mod.fn),
        ) from error


def _attempt(mod: _Mod, constants: dict[str, Pinned], freeze: bool = False) -> Traced:
    fn, kind, called = mod.fn, mod.kind, mod.called
    known = len(called)
    lifter, lifted = _lifted(mod, set(constants), freeze)
    device = lifter.device or torch.device("cpu")
    state = State(mod.captures, _call.__code__, device, lifter.tensors, lifter.numbers)
    state.constant, state.freeze = constants, freeze
    with running(state):
        with asking_types(lifter.asking):
            result = _call(lifted, mod, state, lifter.grad_mode)
        _restart_if_looked(state, constants)
        if len(called) > known:
            state.opaque = state.opaque or "a call of a module"
            if not freeze:
                raise _Restart({})
        lifter.check_unchanged()
        root = _root(result, kind, fn)
        _restart_if_looked(state, constants)
    pinned = tuple(constants.values())
    if freeze:
        pinned = tuple(Pinned(n, value, _defined(fn)) for n, (value, _) in lifter.numbers.items())
    mod.captures.depend(lifter.guards, lifter.tensors, state.seen, lifter.opaque or state.opaque)
    return Traced(_name(fn), kind, root, MappingProxyType(state.origins), pinned)


def _restart_if_looked(state: State, constants: dict[str, Pinned]) -> None:
    if state.looked_at.keys() - constants.keys():
        raise _Restart(state.looked_at)


def _lifted(mod: _Mod, constant: set[str], freeze: bool) -> tuple[Lifter | GraphLifting, Callable[..., Any]]:
    """The lifted function, which knows all names that its code mentions."""
    if isinstance(mod.fn, GraphFunction):
        graph = mod.fn.lift(constant, freeze)
        return graph, graph.run
    names: frozenset[str] = frozenset()
    while True:
        lifter = Lifter(constant, freeze, names, mod.called)
        lifted = _callable(lifter, mod.fn, root(mod.kind))
        if lifter.mentioned <= names:
            return lifter, lifted
        names |= lifter.mentioned


def _callable(lifter: Lifter, fn: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """The lifted function; for a callable instance, its __call__ lifted as well."""
    lifted = lifter.lift(fn, "mod", path)
    method = next((vars(c)["__call__"] for c in type(fn).__mro__ if "__call__" in vars(c)), None)
    if lifted is not fn and isinstance(method, FunctionType) and not isinstance(fn, torch.nn.Module):
        return MethodType(lifter.lift(method, "mod", Path(None, "constant", method)), lifted)
    return lifted


def _call(lifted: Callable[..., Any], mod: _Mod, state: State, grad_mode: bool) -> Any:
    """The user's code runs below this frame: with gradients, unless it asks whether there are."""
    dtypes = {"score": torch.float32, "out": torch.float32}
    args = [_symbol(_SYMBOLS[p], dtypes.get(p, torch.int64)) for p in SIGNATURES[mod.kind]]
    extra = {name: _symbol(name, torch.int64) for name in mod.context}
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled() or not grad_mode), intercepting(), Tracing():
            result = lifted(*args, **extra)
    except Exception as error:
        if state.looked_at:
            raise _Restart(state.looked_at) from None
        if state.first_error is not None and error is not state.first_error:
            raise state.first_error from error
        raise
    if state.first_error is not None:  # torch turns a TypeError inside `+=` into a plain addition
        raise state.first_error
    return result


def _symbol(name: str, dtype: torch.dtype) -> Value:
    return Value(sym(name), (), dtype)


# --- signatures -------------------------------------------------------------------------------------


def _form(kind: ModKind) -> str:
    return f"{kind}_mod({', '.join(SIGNATURES[kind])})"


def _users_functions(fn: Any) -> list[Any]:
    """Functions in a composition: the mods under fa4flex's masks and score mods, in order."""
    if isinstance(fn, FunctionMod):
        return [fn.mod]
    parts = [getattr(fn, part.name) for part in fields(fn)] if is_dataclass(fn) else []
    inner = [part for part in parts if isinstance(part, Mod)]
    if not isinstance(fn, Mod) or not inner:
        return [fn]
    return [function for part in inner for function in _users_functions(part)]


def _defined(fn: Any) -> Origin | None:
    """Line where the one function behind a mod is defined; None for a composition of several."""
    functions = _users_functions(fn)
    return definition_line(functions[0]) if len(functions) == 1 else None


def _check_signature(fn: Callable[..., Any], kind: ModKind) -> tuple[str, ...]:
    """Names of the context (q_len, kv_len, num_heads) that `fn` asks for; raises if it takes no indices."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature: calling it will tell
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    indices = [
        p for p in parameters if p.kind in positional and p.default is p.empty and p.name not in CONTEXT
    ]
    needed = len(SIGNATURES[kind])
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    stuck = [
        p.name
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in CONTEXT
    ]
    names = [p.name for p in indices]
    arity = len(names) > needed or (len(names) < needed and not takes_any)
    if stuck or arity or out_of_order(names, SIGNATURES[kind]):
        raise _wrong_arity(fn, kind, names, stuck)
    return accepted_context(fn)


def _wrong_arity(fn: Callable[..., Any], kind: ModKind, given: list[str], stuck: list[str]) -> TraceError:
    other: ModKind = "score" if kind == "mask" else "mask"
    if not stuck and out_of_order(given, SIGNATURES[kind]):
        return TraceError(
            given=f"{_name(fn)} takes ({', '.join(given)})",
            expected=f"{_form(kind)}: arguments are passed by position, whatever they are called",
            fix="put the parameters in this order",
            where=_defined(fn),
        )
    fix = "bind other arguments with functools.partial, a closure or defaults"
    if len(given) == len(SIGNATURES[other]) and not stuck:
        fix = f"this looks like a {other}_mod: pass it as one"
    keyword = f" and needs keyword arguments ({', '.join(stuck)})" if stuck else ""
    return TraceError(
        given=f"{_name(fn)} takes {len(given)} positional arguments ({', '.join(given)}){keyword}",
        expected=_form(kind),
        fix=fix,
        where=_defined(fn),
    )


def _name(fn: Any) -> str:
    return str(
        getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", type(fn).__name__)
    )


# --- results ----------------------------------------------------------------------------------------


def _root(result: Any, kind: ModKind, fn: Callable[..., Any]) -> Expr:
    """The expression that the mod returned, checked to be one bool or one float."""
    value = _as_value(result, kind, fn)
    if value.dims:
        extents = tuple(d.extent for d in value.dims)
        raise _bad_result(
            f"a vector of shape {extents}", kind, fn, "index it, or reduce it with sum, any, ..."
        )
    outcome = value.expr.kind
    if kind == "mask" and outcome != "bool":
        argument = f"{_article(outcome)} (`{value.expr}`)"
        raise _bad_result(argument, kind, fn, "a mask_mod returns a bool; compare, as in `x > 0` or `x != 0`")
    if kind != "mask" and outcome == "bool":
        argument = f"a bool (`{value.expr}`)"
        fix = "use torch.where(condition, out, 0)"
        if kind == "score":
            fix = "pass it as a mask_mod, or use torch.where(condition, score, -inf)"
        raise _bad_result(argument, kind, fn, fix)
    return value.expr if kind == "mask" else to_float(value.expr)


def _as_value(result: Any, kind: ModKind, fn: Callable[..., Any]) -> Value:
    if is_real(result):
        return from_tensor(result)
    if isinstance(result, (Value, bool, int, float)) or is_number(result):
        return coerce(result)
    fix = "add a return statement" if result is None else "return one value"
    raise _bad_result("None" if result is None else f"a {type(result).__name__}", kind, fn, fix)


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "int" else f"a {kind}"


def _bad_result(given: str, kind: ModKind, fn: Callable[..., Any], fix: str) -> TraceError:
    expected = "one bool" if kind == "mask" else "one floating value"
    author = _users_functions(fn)
    where = _return_line(author[0]) if len(author) == 1 else None
    return TraceError(f"{_name(fn)} returned {given}", expected, fix, where)


def _return_line(fn: Callable[..., Any]) -> Origin | None:
    """The line of the last return statement, where there is Python code to look at."""
    import dis

    place = _defined(fn)
    code = getattr(fn, "__code__", None)
    lines = list(_lines(dis.get_instructions(code))) if code is not None else []
    return Origin(place.file, lines[-1]) if place and lines else place


def _lines(steps: Iterator[Any]) -> Iterator[int]:
    line = 0
    for step in steps:
        line = step.starts_line or line
        if step.opname.startswith("RETURN_"):  # RETURN_CONST from Python 3.12 on
            yield line
