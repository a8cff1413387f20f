"""Base of all primitives: calling a mod with the context it asks for, families of mods, and copies.

A mod is an ordinary function of FlexAttention: `score_mod(score, b, h, q_idx, kv_idx)` or
`mask_mod(b, h, q_idx, kv_idx)`. It may also take parameters named `q_len`, `kv_len` (lengths of the
sequence at hand) and `num_heads` (query heads); they are passed by keyword to whoever asks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any, ClassVar, Generic, TypeVar

import torch

from fa4flex.errors import InputError, Origin, TraceError, UnsupportedError
from fa4flex.torch_internals import is_dynamo

CONTEXT = ("q_len", "kv_len", "num_heads")


# --- calling a mod --------------------------------------------------------------------------------------


def accepted_context(mod: Callable[..., Any]) -> tuple[str, ...]:
    """Names in CONTEXT that `mod` takes: what it declares as `.context`, else what its parameters are
    named."""
    declared = getattr(mod, "context", None)
    if isinstance(declared, tuple) and all(name in CONTEXT for name in declared):
        return declared
    if isinstance(mod, FunctionType) and not hasattr(mod, "__wrapped__"):
        # The code object tells at once, also where torch.compile traces the construction of a mask.
        code = mod.__code__
        names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return tuple(name for name in CONTEXT if name in names)
    if isinstance(mod, functools.partial) and not mod.args:
        return tuple([name for name in accepted_context(mod.func) if name not in mod.keywords])
    try:
        parameters = inspect.signature(mod).parameters
    except (TypeError, ValueError):
        return ()
    value = bound_keywords(mod)
    return tuple(name for name in CONTEXT if name in parameters and name not in value)


def bound_keywords(mod: Any) -> set[str]:
    """Keyword arguments that a functools.partial already gives."""
    return set(mod.keywords) | bound_keywords(mod.func) if isinstance(mod, functools.partial) else set()


_USUAL_NAMES = {
    "s": "score", "batch": "b", "head": "h", "q": "q_idx", "kv": "kv_idx", "k": "kv_idx", "k_idx": "kv_idx",
}  # fmt: skip


def out_of_order(names: list[str], standard: tuple[str, ...]) -> bool:
    """True if parameters have the standard names, or the usual short ones, but not in the standard order.

    Where other names stand among them, only q_idx and kv_idx are taken at their word.
    """
    if len(names) != len(standard):
        return False
    meant = [_USUAL_NAMES.get(name, name) for name in names]
    if sorted(meant) == sorted(standard):
        return meant != list(standard)
    pairs = zip(names, standard, strict=True)
    return any(name in ("q_idx", "kv_idx") and name != wanted for name, wanted in pairs)


def call_mod(mod: Callable[..., Any], indices: tuple[Any, ...], context: dict[str, Any]) -> Any:
    """`mod(*indices)` with the part of `context` that it declares.

    Raises InputError when the mod needs a length that the caller did not give.
    """
    return call_with(mod, indices, accepted_context(mod), context)


def call_with(
    mod: Callable[..., Any],
    indices: tuple[Any, ...],
    wanted: tuple[str, ...],
    context: dict[str, Any],
    called: object = None,
) -> Any:
    """`mod(*indices)` with the `wanted` entries of `context`. Raises InputError where one is missing, which
    names `called`, the object that the user called, if it is another one than `mod`."""
    for name in wanted:
        if name not in context:
            raise _missing(mod if called is None else called, wanted, context, len(indices))
    return mod(*indices, **{name: context[name] for name in wanted})


def _missing(mod: object, wanted: tuple[str, ...], context: dict[str, Any], indices: int) -> InputError:
    name = getattr(mod, "__name__", repr(mod))
    lengths = ", ".join(f"{n}=..." for n in wanted)
    positions = ", ".join(("score", "b", "h", "q_idx", "kv_idx")[-indices:])
    return InputError(
        f"{name} was called without {', '.join(n for n in wanted if n not in context)}",
        f"{name}({positions}, {lengths})",
        f"pass the lengths, or fix them once: {name}.bind({lengths})",
    )


def positional(*names: str) -> inspect.Signature:
    """The signature of a function of these positional parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def show(value: Any) -> str:
    """A parameter as it stands in a repr: tensors by dtype and shape, functions by name."""
    if isinstance(value, torch.Tensor):
        readable = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
        readable = readable and not torch.compiler.is_compiling()
        if readable and value.layout is torch.strided and value.numel() <= 8:
            return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
        return f"<{str(value.dtype).removeprefix('torch.')}{list(value.shape)}>"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return repr(value)


def kind_of(value: Any) -> str:
    """Kind of `value`, for a message: a tensor's dtype, the type of anything else."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    module = type(value).__module__.partition(".")[0]
    name = type(value).__name__
    return name if module == "builtins" else f"{module}.{name}"


def check_integers(name: str, tensor: Any) -> None:
    """Raise InputError unless `tensor` is a tensor of int32 or int64, as lengths, pages and blocks are."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{name} of {kind_of(tensor)}",
            "an int32 or int64 tensor",
            f"convert: torch.as_tensor({name}, dtype=torch.int32)",
        )


def check_device(name: str, tensor: torch.Tensor, other: str, device: torch.device, fix: str) -> None:
    """Raise InputError unless a tensor is on the device of another one, by their names."""
    if tensor.device != device:
        raise InputError(f"{name} on {tensor.device}, {other} on {device}", "one device", fix)


# --- mods as objects ------------------------------------------------------------------------------------


class Mod:
    """Base of masks, score mods and output functions. `context` names the lengths it needs, `role` the
    argument it is for, `noun` what it is called."""

    context: tuple[str, ...] = ()
    role: ClassVar[str] = ""
    noun: ClassVar[str] = ""
    combined_with: ClassVar[str] = ""

    def __bool__(self) -> bool:
        """Raise TraceError: `and`, `or`, `not` and `if` would silently drop one side."""
        return truth_value(self, self.combined_with)

    @property
    def __name__(self) -> str:
        return repr(self)

    @property
    def parts(self) -> tuple[Mod, ...]:
        """The masks or score mods that this one is composed of, from left to right."""
        return ()


def truth_value(value: Any, operators: str) -> bool:
    """True for Dynamo, which in torch 2.11 asks `if function` of what compiled code calls with `**`; all
    others get a TraceError."""
    compiled = torch.compiler.is_dynamo_compiling()  # this very code is being traced
    if not compiled and is_dynamo(sys._getframe(2)):
        return True
    raise TraceError(
        f"the truth value of {value!r}, as `and`, `or`, `not`, `if` and bool() ask for",
        f"{operators}, which combine every pair of indices",
        f"write {operators}; to test whether one was given, `is not None`",
    )


class Made:
    """The call of a family that made a mod: what its representation, its pickle and its copies come from."""

    __slots__ = ("args", "family", "kwargs")

    family: Family[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    # Tracing looks for captured numbers in plain objects. These have reached the function already: a class
    # with a constructor of its own is passed over.
    def __new__(cls, family: Family[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        self = object.__new__(cls)
        self.family, self.args, self.kwargs = family, args, kwargs
        return self

    def __repr__(self) -> str:
        value = [show(a) for a in self.args] + [f"{k}={show(v)}" for k, v in self.kwargs.items()]
        return f"{self.family!r}({', '.join(value)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Made:
        return Made(self.family, _copied(self.args, memo), _copied(self.kwargs, memo))

    def __reduce__(self) -> Any:
        return Made, (self.family, self.args, self.kwargs)

    def function(self) -> Callable[..., Any]:
        """The function, made anew from the arguments."""
        return self.family.function(*self.args, **self.kwargs)


@dataclass(frozen=True, eq=False, repr=False)
class FunctionMod(Mod):
    """One function as a mask or score mod.

    mod     the function
    label   what its repr prints; empty means the call that made it, or the function's name
    made    the family and the arguments that made the function, or None for a function of the user
    """

    mod: Callable[..., Any]
    label: str = ""
    made: Made | None = None
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", accepted_context(self.mod))

    @property
    def query_heads(self) -> int | None:
        """Number of query heads that the tensors of a named variant are for; None where any number will
        do."""
        return None if self.made is None else getattr(self.mod, "query_heads", None)

    def __repr__(self) -> str:
        if self.label:
            return self.label
        if self.made is not None:
            return repr(self.made)
        # A bound method's repr holds its module's, which may show this mod: it is asked for a name first.
        name = getattr(self.mod, "__name__", None)
        return repr(self.mod) if name is None else str(name)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with tensors of its own: made by its family from copied arguments, or a copied closure."""
        other = object.__new__(type(self))
        memo[id(self)] = other  # before its contents: a module that the function reads may hold this mod
        made = copy.deepcopy(self.made, memo)
        mod = copy_function(self.mod, memo) if made is None else made.function()
        for name, value in {**vars(self), "mod": mod, "made": made}.items():
            object.__setattr__(other, name, value)
        return other

    def __reduce__(self) -> Any:
        if self.made is not None:
            return _remade, (type(self), self.made, self.label)
        function = _not_importable(self.mod)
        if function is not None:
            raise _unpicklable(self, function)
        return type(self), (self.mod, self.label)


def _remade(kind: Callable[..., Any], made: Made, label: str) -> Any:
    return kind(made.function(), label, made)


def functions_of(mod: Mod | None) -> Iterator[FunctionMod]:
    """The single functions that a mask or score mod is composed of, from left to right."""
    if isinstance(mod, FunctionMod):
        yield mod
    elif mod is not None:
        for part in mod.parts:
            yield from functions_of(part)


def _torch_counts_parameters() -> bool:
    """True if the signature that is asked for is to tell torch a mask_mod from a score_mod."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "inspect":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.nn.attention.flex_attention"


P = TypeVar("P")


def _of_defaults(combine: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A family's operator, from both sides: that of its defaults."""
    return (lambda self, other: combine(self(), other)), (lambda self, other: combine(other, self()))


class Family(Generic[P]):
    """A named family of primitives: call it with parameters to get one; bare, it stands for its defaults.

    `sliding_window(1024)` is a mask, and `causal & sliding_window` means `causal() & sliding_window()`.
    """

    def __init__(
        self, make: Callable[..., Callable[..., Any]], wrap: Callable[[Callable[..., Any], str, Made], P]
    ) -> None:
        functools.update_wrapper(self, make)
        self._make, self._wrap = make, wrap

    def __call__(self, *args: Any, **params: Any) -> P:
        return self._wrap(self.function(*args, **params), "", Made(self, args, params))

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of its parameters. Raises InputError for torch, which takes it for that of a mod."""
        if _torch_counts_parameters():
            raise InputError(
                f"{self.__name__} itself, a family of mods, for a function of torch",
                f"one of the family, with the lengths that it depends on: {self.__name__}(...).bind(...)",
                f"pass {self.__name__}().bind(q_len=..., kv_len=...); fa4flex's own functions take "
                f"{self.__name__} as it is",
            )
        return inspect.signature(self._make)

    def function(self, *args: Any, **params: Any) -> Callable[..., Any]:
        """The mod of these parameters, not wrapped. Raises InputError for parameters that do not fit."""
        try:
            return self._make(*args, **params)
        except TypeError:
            self._check_parameters(args, params)
            raise

    def _check_parameters(self, args: tuple[Any, ...], params: dict[str, Any]) -> None:
        try:
            inspect.signature(self._make).bind(*args, **params)
        except TypeError as error:
            signature = f"{self.__name__}{inspect.signature(self._make)}"
            missing = str(error).startswith("missing")
            needed = (
                "without the parameters that it needs" if missing else "with parameters that it does not have"
            )
            raise InputError(
                f"{self.__name__} {needed}: {error}",
                signature.split(" -> ")[0],
                f"call it before composing: {self.__name__}(...)"
                if missing
                else f"its function of indices is {self.__name__}(...), called with its parameters alone",
            ) from None

    def __repr__(self) -> str:
        return str(self.__name__)

    __name__: str

    def __bool__(self) -> bool:
        """Raise TraceError, as the masks and score mods of the family do."""
        return truth_value(self, getattr(self._wrap, "combined_with", "its operators"))

    def __copy__(self) -> Family[P]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Family[P]:
        return self

    def __reduce__(self) -> Any:
        if not importable(self):
            raise _unpicklable(self, self._make)
        return self.__qualname__

    __qualname__: str

    def __invert__(self) -> Any:
        return ~self()  # type: ignore[operator]

    __and__, __rand__ = _of_defaults(operator.and_)
    __or__, __ror__ = _of_defaults(operator.or_)
    __rshift__, __rrshift__ = _of_defaults(operator.rshift)


def settle(value: Any) -> Any:
    """A bare family as the primitive of its defaults; anything else unchanged."""
    return value() if isinstance(value, Family) else value


# --- copies and pickles of functions ----------------------------------------------------------------------


def copy_function(function: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a mod: it reads copies of what `function` captured. `memo` is copy.deepcopy's.

    Closure variables and default arguments are copied, and cells that functions share stay shared; bound
    methods are bound to copies, and functools.partial objects are built anew. Globals are shared, and so are
    functions that a module holds by name and functions that captured nothing: they are returned as they are.
    """
    if id(function) in memo:
        return memo[id(function)]
    if isinstance(function, functools.partial):
        func, *args = (_copied(part, memo) for part in (function.func, *function.args))
        other: Any = type(function)(func, *args, **_copied(function.keywords, memo))
    elif isinstance(function, MethodType):
        other = MethodType(copy_function(function.__func__, memo), copy.deepcopy(function.__self__, memo))
    elif not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)
    elif _held_by_name(function) or not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)
    ):
        return function
    else:
        return _copied_closure(function, memo)
    _remember(function, other, memo)
    return other


def _copied_closure(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    fresh = [cell for cell in function.__closure__ or () if id(cell) not in memo]
    for cell in fresh:
        _remember(cell, CellType(), memo)
    cells = tuple(memo[id(cell)] for cell in function.__closure__ or ())
    other = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    _remember(function, other, memo)  # before its contents: a function may refer to itself
    functools.update_wrapper(other, function, updated=())
    del other.__wrapped__  # type: ignore[attr-defined]
    vars(other).update(_copied(vars(function), memo))
    other.__defaults__ = _copied(function.__defaults__, memo)
    other.__kwdefaults__ = _copied(function.__kwdefaults__, memo)
    for cell in fresh:
        try:
            contents = cell.cell_contents
        except ValueError:  # a variable that the enclosing function has not assigned
            continue
        memo[id(cell)].cell_contents = _copied(contents, memo)
    return other


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """copy.deepcopy, except that functions, also those in containers, are copied with what they captured."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        return copy_function(value, memo)
    if type(value) is tuple:
        return tuple(_copied(item, memo) for item in value)
    if type(value) is list:
        items: list[Any] = []
        _remember(value, items, memo)
        items.extend(_copied(item, memo) for item in value)
        return items
    if type(value) is dict:
        entries: dict[Any, Any] = {}
        _remember(value, entries, memo)
        entries.update((copy.deepcopy(key, memo), _copied(item, memo)) for key, item in value.items())
        return entries
    return copy.deepcopy(value, memo)


def _remember(original: Any, other: Any, memo: dict[int, Any]) -> None:
    """Enter a copy. The original is kept alive, as copy.deepcopy does: the memo knows it by its id."""
    memo[id(original)] = other
    memo.setdefault(id(memo), []).append(original)


def importable(value: Any) -> bool:
    """True if a module holds this very object under its qualified name."""
    result: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in str(getattr(value, "__qualname__", "")).split("."):
        result = getattr(result, name, None)
    return result is value


def _held_by_name(function: FunctionType) -> bool:
    """True for what a module holds, also under a plain name: torch's decorators keep no qualified one."""
    module = sys.modules.get(function.__module__ or "")
    return importable(function) or getattr(module, function.__name__, None) is function


def _not_importable(value: Any) -> FunctionType | None:
    """The first function in `value` that pickle cannot find by its name."""
    if isinstance(value, FunctionType):
        return None if importable(value) else value
    parts: tuple[Any, ...] = ()
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)):
        parts = tuple(value)
    return next((result for part in parts if (result := _not_importable(part)) is not None), None)


def _unpicklable(value: Any, function: Callable[..., Any]) -> UnsupportedError:
    code = getattr(function, "__code__", None)
    where = None if code is None else Origin(code.co_filename, code.co_firstlineno)
    name = getattr(function, "__qualname__", repr(function))
    return UnsupportedError(
        f"pickling {value!r}: its module does not hold {name!r} by name",
        "functions and families at module level, and named variants",
        "define it at module level, and bind its tensors with functools.partial or as a family's parameters",
        where,
    )
