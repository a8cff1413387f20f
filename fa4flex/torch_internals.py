"""Names that torch keeps to itself: all that the package uses of them, and what is lost without each.

torch promises nothing about names with an underscore, nor about `torch._dynamo` and `torch._inductor`. The
rest of the package takes them from here. A name that this torch lacks is in `absent` after the import, and
something else stands in its place: a slower way with the same results, or an error in words at its first use.
Names of Dynamo and Inductor, which take seconds to import, are looked up where they are used.

Two attributes are read where they stand, since they change: `forward_ad._current_level`, with the
`forward_ad` of this module, and `Tensor._version`, where COUNTS_CHANGES.

Patches of torch are here as well: `no_default_device`, `calls_of_functions` and `capture_mods`. Each says
what it changes and for how long.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

absent: dict[str, str] = {}
"""Names that this torch lacks, dotted below `torch`, and what is lost without each."""


class MissingInternalError(NotImplementedError):
    """A call needs something that this version of torch lacks."""


def _private(name: str, lost: str, otherwise: Any = None) -> Any:
    """Value of a dotted name below torch; without it `otherwise`, and an entry of `absent`."""
    try:
        return reduce(getattr, name.split("."), torch)
    except AttributeError:  # its module may not have been imported yet
        try:
            return pkgutil.resolve_name(f"torch.{name}")
        except (ImportError, AttributeError):
            absent[name] = lost
            return otherwise


def _missing(name: str, lost: str) -> NoReturn:
    raise MissingInternalError(
        f"torch {torch.__version__} has no torch.{name}, without which there is no {lost}. "
        "Use a version of torch for which fa4flex is tested: docs/installing.md lists them."
    )


def _needed(name: str, lost: str) -> Any:
    """Value of a dotted name below torch; without it an entry of `absent`, and a function that raises."""
    return _private(name, lost, lambda *_, **__: _missing(name, lost))


def _imported(module: str, name: str, lost: str) -> Any:
    """Value of a name of a module that is slow to import; without it an entry of `absent`, and None."""
    try:
        __import__(module)
        return getattr(sys.modules[module], name)
    except (ImportError, AttributeError):
        absent[f"{module}.{name}".removeprefix("torch.")] = lost
        return None


# --- what intercepts, transforms or records a call: a few dozen nanoseconds each, asked at every call -------

any_autocast: Callable[[], bool] = _private(
    "_C._is_any_autocast_enabled", "time: each call asks for autocast of its device", lambda: True
)
"""True in an autocast region of some device."""

dispatch_modes: Callable[[], int] = _private(
    "_C._len_torch_dispatch_stack", "time: every call goes by torch's operators", lambda: 1
)
"""Number of modes that intercept operators."""

function_modes: Callable[[], int] = _private(
    "_C._len_torch_function_stack", "time: repeated calls compiled by Inductor enter by Dynamo", lambda: 1
)
"""Number of modes that intercept torch's functions, the default device among them."""

backward_pass: Callable[[], int] = _private(
    "_C._current_graph_task_id",
    "an error in words: checkpointed layers of diffusers run again without their composition",
    lambda: -1,
)
"""Number of the backward pass that this thread is in, -1 outside of all."""

is_tracing: Callable[[], bool] = _private("_C._is_tracing", "a few nanoseconds", torch.jit.is_tracing)
"""True while torch.jit.trace records."""

transform_level: Callable[[], int | None] = _private(
    "_C._functorch.maybe_current_level",
    "time: every call goes by torch's operators, and nothing is kept of contents of captured tensors",
    lambda: 0,
)
"""Level of the innermost transform of torch.func, None outside of all."""


_innermost: Callable[[], Any] | None = _private(
    "_C._functorch.peek_interpreter_stack",
    "time: tangents within torch.func are computed by PyTorch operations",
)


def pushes_alone() -> bool:
    """True if torch.func.jvp is the one transform of torch.func that there is. False where this torch does
    not tell."""
    if _innermost is None or transform_level() != 1:
        return False
    return str(_innermost().key()).endswith("Jvp")


single_level: Callable[[], AbstractContextManager[Any]] | None = _private(
    "_functorch.utils.enable_single_level_autograd_function",
    "time: tangents within torch.func of tensors with gradients are computed by PyTorch operations",
)
"""Within, functions of autograd take tensors outside of transforms by the C++ class alone."""


def _has_no_storage(x: Tensor) -> bool:
    try:
        x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


is_wrapped: Callable[[Tensor], bool] = _private(
    "_C._functorch.is_functorch_wrapped_tensor",
    "a distinction: sparse tensors count as tensors of a transform",
    _has_no_storage,
)
"""True for tensors that mean something within a transform of torch.func alone."""

is_functional: Callable[[Tensor], bool] = _private(
    "_is_functional_tensor", "a refusal in words: torch.func.functionalize fails in torch", lambda x: False
)
"""True for tensors of torch.func.functionalize."""

forward_ad: Any = _private("autograd.forward_ad", "forward-mode levels")
"""torch.autograd.forward_ad. Its `_current_level` is -1 outside of all levels of forward-mode derivatives."""
if not hasattr(forward_ad, "_current_level"):
    absent["autograd.forward_ad._current_level"] = "time: every call goes by torch's operators"
    forward_ad = SimpleNamespace(_current_level=0)

COUNTS_CHANGES = hasattr(Tensor, "_version")
"""True if tensors count how often they were changed in place, in `_version`."""
if not COUNTS_CHANGES:
    absent["Tensor._version"] = "time: nothing is kept that follows from contents of captured tensors"

_saved_tensor_hooks: Callable[[bool], Any] | None = _private(
    "_C._autograd._top_saved_tensors_default_hooks",
    "time: repeated calls compiled by Inductor enter by Dynamo, and uncompiled ones run twice for gradients",
)


def saving_by_hooks() -> bool:
    """True within checkpoints and the like, where hooks say what is saved for a backward pass. True where
    this torch does not tell."""
    return _saved_tensor_hooks is None or _saved_tensor_hooks(False) is not None


def saving_by_graphs() -> bool:
    """True where these hooks are graphs, which AOTAutograd writes into what it compiles meanwhile. Functions
    are called whenever a tensor is saved. True where this torch does not tell."""
    if _saved_tensor_hooks is None:
        return True
    hooks = _saved_tensor_hooks(True)
    return hooks is not None and any(isinstance(x, torch.fx.GraphModule) for x in hooks)


# --- looks of tensors, and global state, compared at once ---------------------------------------------------

TensorGuards: Any = _private("_C._dynamo.guards.TensorGuards", "time: repeated calls are compared in Python")
"""Class that compares types, dtypes, devices, shapes, strides and dispatch of tensors; None without it."""

GlobalStateGuard: Any = _private(
    "_C._dynamo.guards.GlobalStateGuard", "time: repeated calls compiled by Inductor enter by Dynamo"
)
"""Class that compares grad mode, autocast, determinism and the like; None without it."""

# --- operators: what is below, and what is outside ----------------------------------------------------------


class _NoOperator:
    def __init__(self, *_: Any, **__: Any) -> None:
        _missing("_ops.HigherOrderOperator", "attention in graphs of torch.compile")


HigherOrderOperator: Any = _private(
    "_ops.HigherOrderOperator", "attention in graphs of torch.compile", _NoOperator
)
"""Class of operators whose arguments are functions."""

below_autograd: Callable[[], AbstractContextManager[Any]] = _needed(
    "_C._AutoDispatchBelowAutograd", "gradient of attention as an operator"
)
"""Within, operators are called below autograd: an operator's own autograd calls it again so."""

without_transforms: Callable[[], AbstractContextManager[Any]] = _private(
    "_C._DisableFuncTorch", "torch.compile within transforms of torch.func", contextlib.nullcontext
)
"""Within, transforms of torch.func see nothing."""

without_functions: Callable[[], AbstractContextManager[Any]] = _private(
    "_C.DisableTorchFunction",
    "mods under modes that intercept torch's functions",
    getattr(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext),
)
"""Within, neither modes nor subclasses intercept torch's functions."""

without_modes: Callable[[], AbstractContextManager[Any]] = _private(
    "utils._python_dispatch._disable_current_modes",
    "tensor subclasses while modules are imported",
    getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext),
)
"""Within, no mode intercepts operators."""

modes_of_dispatch: Callable[[], Sequence[Any]] = _private(
    "utils._python_dispatch._get_current_dispatch_mode_stack",
    "FLOPs of attention in a counter that counted before the first call",
    tuple,
)
"""Modes that intercept operators, from the outermost."""

assert_async: Callable[[Tensor, str], None] = _needed(
    "_assert_async", "check of contents in code that is compiled, or captured in a CUDA graph"
)
"""Assert on the tensor's device, without waiting for it, that the tensor is true."""

custom_op_name: Callable[[Any], str] = _private(
    "library.CustomOpDef._qualname",
    "nothing: the representation of such a function has its name",
    property(lambda function: repr(function).removeprefix("<CustomOpDef(").removesuffix(")>")),
).fget
"""Name, "namespace::name", of a function under torch.library.custom_op."""


_OF_FLEX = "gradient of attention by flex_attention as an operator"


def _dispatch_keys() -> tuple[Any, Any] | None:
    """Dispatch keys that are included and excluded outside of operators: where this module is imported."""
    names = [f"_C._dispatch_tls_local_{kind}_set" for kind in ("include", "exclude")]
    keys = [_private(name, _OF_FLEX, lambda: None) for name in names]
    with torch.inference_mode(False):
        included, excluded = (read() for read in keys)
    return None if included is None or excluded is None else (included, excluded)


_force_keys = _needed("_C._ForceDispatchKeyGuard", _OF_FLEX)
_KEYS = _dispatch_keys()


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside one of a transform of torch.func; another as it is."""
    if not is_wrapped(x):
        return x
    inner: Tensor = _torch.unwrapped(x)
    return inner


def outside_operators() -> AbstractContextManager[Any]:
    """Within, torch dispatches as outside of the operator at hand, except for inference mode."""
    if _KEYS is None:
        _missing("_C._dispatch_tls_local_include_set", _OF_FLEX)
    result: AbstractContextManager[Any] = _force_keys(*_KEYS)
    return result


# --- dimensions that torch maps over ------------------------------------------------------------------------

_MAPPED = {
    name: _private(path, "gradients of a batch of upstream gradients (is_grads_batched=True, vmap)")
    for name, path in {
        "is_batched": "_C._functorch.is_batchedtensor",
        "level": "_C._functorch.maybe_get_level",
        "unwrapped": "_C._functorch.get_unwrapped",
        "dimension": "_C._functorch.maybe_get_bdim",
        "add": "_C._functorch._add_batch_dim",
        "is_legacy": "_C._functorch.is_legacy_batchedtensor",
        "enter_legacy": "_C._vmapmode_increment_nesting",
        "leave_legacy": "_C._vmapmode_decrement_nesting",
        "add_legacy": "_add_batch_dim",
        "remove_legacy": "_remove_batch_dim",
    }.items()
}
_torch = SimpleNamespace(**_MAPPED)
_can_map = None not in _MAPPED.values()


class MappedDimension(NamedTuple):
    """A dimension that torch maps over; `legacy`: by the vmap that torch.autograd has of its own."""

    legacy: bool
    level: int
    size: int

    @classmethod
    def of(cls, x: Tensor) -> MappedDimension | None:
        """The innermost one of `x`. Raises MissingInternalError where this torch does not tell."""
        if not _can_map:
            if _has_no_storage(x):
                _missing("_C._functorch.is_batchedtensor or its like", "gradient of a batch of gradients")
            return None
        if _torch.is_batched(x):
            return cls(False, _torch.level(x), _torch.unwrapped(x).shape[_torch.dimension(x)])
        if not _torch.is_legacy(x):
            return None
        level = _torch.enter_legacy() - 1
        _torch.leave_legacy()
        return cls(True, level, cls._first(x, level).shape[0])

    def rows(self, x: Tensor) -> Sequence[Tensor]:
        """Parts of `x` along this dimension; `x` itself for each, where it has none."""
        if self.legacy and _torch.is_legacy(x):
            return self._first(x, self.level).unbind()
        if not self.legacy and _torch.is_batched(x) and _torch.level(x) == self.level:
            parts: Sequence[Tensor] = _torch.unwrapped(x).unbind(_torch.dimension(x))
            return parts
        return [x] * self.size

    def stacked(self, rows: Sequence[Tensor]) -> Tensor:
        """The tensor whose parts along this dimension are `rows`."""
        add: Callable[..., Tensor] = _torch.add_legacy if self.legacy else _torch.add
        return add(torch.stack(list(rows)), 0, self.level)

    @staticmethod
    def _first(x: Tensor, level: int) -> Tensor:
        """`x` of the vmap of torch.autograd with its mapped dimension first."""
        result: Tensor = _torch.remove_legacy(x, level, 0, 0)
        return result


# --- kernels, streams and devices ---------------------------------------------------------------------------

fused_kernel: Callable[..., tuple[Tensor, Tensor]] | None = _private(
    "_scaled_dot_product_flash_attention_for_cpu",
    "time: calls on a CPU are computed in parts",
)
"""Attention on a CPU, as (out, lse), 2 us faster than the same by torch.ops; None without it."""

current_stream: Callable[[int], int] = _private(
    "_C._cuda_getCurrentRawStream",  # absent in builds for CPUs
    "a microsecond per launch",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)
"""Handle of the current stream by device index; torch.cuda.current_stream makes an object first, at several
times the cost."""

sleep_on_gpu: Callable[[int], None] = _needed("cuda._sleep", "benchmark on a GPU: its queue is not kept full")
"""Keep the GPU busy for a number of cycles."""


def on_stream_of_graph_trees(device: int, stream: int) -> bool:
    """True if torch.compile runs or captures code on this stream for CUDA graphs of its own, as with
    mode="reduce-overhead". Memory that is made there is given back behind Python's back, but for outputs.
    True where this torch does not tell: nothing is kept then."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device, create_if_none_exists=False)
        return manager is not None and manager.stream.cuda_stream == stream
    except AssertionError:  # older versions of torch know of no graphs in other threads than the compiler's
        return False
    except (AttributeError, TypeError):
        absent["_inductor.cudagraph_trees.get_manager"] = "time: memory of launches is made for each of them"
        return True


# --- modes of torch's functions, the default device among them ----------------------------------------------

_OF_MODES = "attention under a default device other than the CPU"
_pop_mode = _private("overrides._pop_mode", _OF_MODES)
_push_mode = _private("overrides._push_mode", _OF_MODES)
_DefaultDevice = _private("utils._device.DeviceContext", _OF_MODES)
_can_exchange_modes = None not in (_pop_mode, _push_mode, _DefaultDevice)


@contextlib.contextmanager
def no_default_device() -> Iterator[None]:
    """Within, no default device is set in this thread; other modes of torch's functions stay, in their order.
    Raises MissingInternalError if one is set that cannot be taken away."""
    if not _can_exchange_modes or "_C._len_torch_function_stack" in absent:
        if torch.get_default_device().type != "cpu":
            _missing("overrides._pop_mode or its like", _OF_MODES)
        yield
        return
    modes = _taken_modes()
    for mode in modes:
        if not isinstance(mode, _DefaultDevice):
            _push_mode(mode)
    try:
        yield
    finally:
        _taken_modes()
        for mode in modes:
            _push_mode(mode)


def _taken_modes() -> list[object]:
    """All modes of torch's functions, taken from their stack; the first one is the lowest."""
    return [_pop_mode() for _ in range(function_modes())][::-1]


# --- torch.autograd.Function --------------------------------------------------------------------------------

_APPLY = torch.autograd.Function.__dict__["apply"]  # a classmethod; from torch 2.15 on a C function
_applying = threading.RLock()


def apply_of(cls: Any) -> Callable[..., Any]:
    """`cls.apply` as torch has it, whatever stands in for it."""
    bound: Callable[..., Any] = _APPLY.__get__(None, cls)
    return bound


@contextlib.contextmanager
def calls_of_functions(substitute: Callable[..., Any]) -> Iterator[None]:
    """Within, `SomeFunction.apply(...)` calls `substitute(SomeFunction, ...)`, in all threads; threads that
    come here wait for each other."""
    with _applying:
        replaced = classmethod(lambda cls, *args, **kwargs: substitute(cls, *args, **kwargs))
        setattr(torch.autograd.Function, "apply", replaced)  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.autograd.Function, "apply", _APPLY)  # noqa: B010


# --- Dynamo and Inductor ------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])

_DYNAMO = "torch._dynamo."


def constant_in_graphs(function: Function) -> Function:
    """`function`, which Dynamo calls once, while it compiles, and does not trace.

    torch.compiler.assume_constant_result does the same, and imports Dynamo. Without the attribute that it
    sets the function would be traced; a test compares the two.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_dynamo(frame: FrameType) -> bool:
    """True for a frame of Dynamo's own code."""
    return str(frame.f_globals.get("__name__", "")).startswith(_DYNAMO)


def stance() -> Any:
    """Value that torch.compiler.set_stance set last; another one each time where this torch does not tell."""
    result = getattr(torch._dynamo.eval_frame, "_stance", None)
    if result is None:
        absent["_dynamo.eval_frame._stance"] = "time: repeated calls compiled by Inductor enter by Dynamo"
        return object()
    return result


def inductor() -> Callable[..., Any]:
    """Inductor as a backend of Dynamo's."""
    lookup = _imported("torch._dynamo", "lookup_backend", "nothing: Inductor has a second name")
    if lookup is not None:
        backend: Callable[..., Any] = lookup("inductor")
        return backend
    result = _imported("torch._inductor.compile_fx", "compile_fx", "flex_attention under torch.compile")
    return result or _missing("_inductor.compile_fx.compile_fx", "flex_attention under torch.compile")


def inductor_of_one_graph() -> Callable[..., Any]:
    """Compiler of one graph, which Inductor calls for the forward and for the backward pass."""
    lost = "flex_attention under torch.compile"
    result = _imported("torch._inductor.compile_fx", "compile_fx_inner", lost)
    return result or _missing("_inductor.compile_fx.compile_fx_inner", lost)


def past_dynamo(graph: Callable[..., Any]) -> Callable[..., Any]:
    """The function around which Dynamo put a guard of its own; `graph` itself where there is none."""
    result: Callable[..., Any] = getattr(graph, "_torchdynamo_orig_callable", graph)
    return result


def fake_tensors() -> Any:
    """Mode in which tensors have no data; those that have are allowed."""
    lost = "attention in graphs of torch.compile"
    mode = _imported("torch._subclasses.fake_tensor", "FakeTensorMode", lost)
    return (mode or _missing("_subclasses.fake_tensor.FakeTensorMode", lost))(allow_non_fake_inputs=True)


LeftOut = Callable[[Exception], tuple[str, Exception]]
"""Words for a call that cannot be captured, and their cause."""


def capture_mods(name: str, left_out: LeftOut) -> Callable[[], None]:
    """Have Dynamo capture calls of the higher-order operator `name` as it does those of flex_attention: its
    functions become graphs. Returns what undoes it.

    Dynamo's table of such operators gets an entry. While a mod is captured, `VariableBuilder.wrap_symfloat`
    is another function, and the record of side effects is kept: in the thread that compiles, of which Dynamo
    has one at a time. Without the table there is no entry, and Dynamo leaves calls out of its graphs.
    """
    lost = "attention in graphs of torch.compile: calls run between two graphs"
    path = "torch._dynamo.variables.higher_order_ops"
    table = _imported(path, "_hop_name_to_variable_class", lost)
    flex = _imported(path, "FlexAttentionHigherOrderVariable", lost)
    exc = _imported("torch._dynamo", "exc", lost)
    if None in (exc, flex) or table is None:
        return lambda: None

    class Variable(flex):  # type: ignore[misc, valid-type]
        _HOP_NAME = f"torch.ops.higher_order.{name}"

        def _call_function(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super()._call_function(*args, **kwargs)
            except (exc.RestartAnalysis, exc.SkipFrame):  # Dynamo's control flow
                raise
            except Exception as error:
                words, cause = left_out(error)
                raise exc.Unsupported(words, real_stack=getattr(error, "real_stack", None)) from cause

        def create_wrapped_node(self, tx: Any, *args: Any, **kwargs: Any) -> Any:
            with _floats_of_the_whole_graph(), _side_effects_in_place(tx.output):
                return super().create_wrapped_node(tx, *args, **kwargs)

    if table.setdefault(name, Variable) is not Variable:
        return lambda: None
    return lambda: table.pop(name)


@contextlib.contextmanager
def _floats_of_the_whole_graph() -> Iterator[None]:
    """Within, Dynamo unpacks a captured float in the model's graph rather than in that of the mod.

    Dynamo remembers what it unpacked for the rest of the model, and a second mod that reads the same float
    could not reach into the graph of the first.
    """
    lost = "a float that two mods read: their call runs between two graphs"
    builder = _imported("torch._dynamo.variables.builder", "VariableBuilder", lost)
    wrap = getattr(builder, "wrap_symfloat", None)
    if wrap is None:
        absent["_dynamo.variables.builder.VariableBuilder.wrap_symfloat"] = lost
        yield
        return

    def wrap_at_the_root(self: Any, value: float) -> Any:
        output = self.tx.output
        tracers = output.tracers
        output.tracers = tracers[:1]
        try:
            return wrap(self, value)
        finally:
            output.tracers = tracers

    builder.wrap_symfloat = wrap_at_the_root
    try:
        yield
    finally:
        builder.wrap_symfloat = wrap


@contextlib.contextmanager
def _side_effects_in_place(output: Any) -> Iterator[None]:
    """Within, Dynamo captures a mod; its record of side effects is the same object afterwards.

    Dynamo discards what a mod did to Python objects by going on with a copy of its record, made before.
    Dictionaries of objects that were made in the graph by then hold the record itself: attributes that are
    set afterwards would be written to it and be lost.
    """
    record = output.side_effects
    yield
    copied = output.side_effects
    for name in inspect.signature(type(record)).parameters.keys() & vars(record).keys():
        setattr(record, name, getattr(copied, name))
    output.side_effects = record


# --- trees of tensors, process groups, warnings -------------------------------------------------------------

_OF_TREES = "gradient of uncompiled flex_attention within checkpoints and beside threads"

flattened: Callable[[Any], tuple[list[Any], Any]] = _needed("utils._pytree.tree_flatten", _OF_TREES)
"""Leaves of nested tuples, and what `unflattened` puts them together by."""

unflattened: Callable[[Sequence[Any], Any], Any] = _needed("utils._pytree.tree_unflatten", _OF_TREES)
"""Nested tuples of leaves and what `flattened` gave beside them."""


def group_store(group: Any) -> Any:
    """Key-value store of a process group. Raises RuntimeError where this torch does not give it."""
    result = getattr(torch.distributed.distributed_c10d, "_get_process_group_store", None)
    if result is None:
        raise RuntimeError(f"torch {torch.__version__} does not give it")
    return result(group)


def implicit_replication(dtensor: Any) -> bool:
    """True within torch's implicit_replication(), where plain tensors among DTensors count as replicated.
    False where this torch does not tell."""
    dispatcher = getattr(dtensor, "_op_dispatcher", None)
    return bool(getattr(dispatcher, "_allow_implicit_replication", False))


_shown: set[str] = set()


def flex_warnings_shown(flex_attention: Any) -> set[str]:
    """Names of warnings that torch's module of flex_attention has given in this process; a set of its own
    where torch keeps none."""
    results: set[str] = getattr(flex_attention, "_WARNINGS_SHOWN", _shown)
    return results
