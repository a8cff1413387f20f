"""Changes between calls: each is a function under a decorator, and applies itself to what it is drawn for."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .brought import LISTS, Map, Ragged, draw_classes, draw_lengths
from .oracle import Failure
from .pool import Skip, Subject, World, of_module, of_net
from .values import Value

Write = Callable[[World, Tensor, Tensor], None]


@dataclass(frozen=True)
class Way:
    """A way to write new contents into a tensor. `counted`: torch's version counter tells of it."""

    write: Write
    counted: bool
    gpu: bool | None


WAYS: dict[str, Way] = {}
"""Ways to write contents in place, by name. `gpu`: True for a GPU alone, False for a CPU alone."""

REPLACEMENTS: dict[str, Callable[[World, Value], None]] = {}
"""Ways to put another object in the place of a value."""

OTHERS: dict[str, tuple[float, Callable[[World], None]]] = {}
"""Other changes, and how often they are drawn."""


def way(counted: bool, gpu: bool | None = None) -> Callable[[Write], Write]:
    def register(function: Write) -> Write:
        WAYS[function.__name__] = Way(function, counted, gpu)
        return function

    return register


def replacement(function: Callable[[World, Value], None]) -> Callable[[World, Value], None]:
    REPLACEMENTS[function.__name__] = function
    return function


def other(weight: float) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def register(function: Callable[[World], None]) -> Callable[[World], None]:
        OTHERS[function.__name__] = weight, function
        return function

    return register


def write_some_way(world: World, x: Tensor, new: Tensor) -> str:
    """Write contents by a way that is drawn, of those that can; its name."""
    names = [n for n, w in WAYS.items() if w.gpu is None or w.gpu == (x.device.type == "cuda")]
    world.rng.shuffle(names)
    if not x.numel():
        return "nothing"
    for name in names:
        try:
            with torch.no_grad():
                WAYS[name].write(world, x, new.to(x.device, x.dtype))
            return name
        except Skip:
            continue
    raise AssertionError("no way to write")


# --- contents ---------------------------------------------------------------------------------------------


@way(counted=True)
def copied(world: World, x: Tensor, new: Tensor) -> None:
    x.copy_(new)


@way(counted=True)
def indexed(world: World, x: Tensor, new: Tensor) -> None:
    x[...] = new


@way(counted=True)
def in_part(world: World, x: Tensor, new: Tensor) -> None:
    """Writes one element after the other into a view."""
    if x.ndim == 0 or x.shape[0] > 8:
        raise Skip
    for i in range(x.shape[0]):
        x[i].copy_(new[i])


@way(counted=True)
def by_arithmetic(world: World, x: Tensor, new: Tensor) -> None:
    if not x.is_floating_point():
        raise Skip
    x.mul_(0.5).add_(new.float().mul(0.5).to(x.dtype))


@way(counted=True)
def by_a_view(world: World, x: Tensor, new: Tensor) -> None:
    x.view(x.shape).copy_(new) if x.ndim else x.unsqueeze(0).copy_(new)


@way(counted=True)
def foreach(world: World, x: Tensor, new: Tensor) -> None:
    torch._foreach_copy_([x], [new])


@way(counted=False)
def by_data(world: World, x: Tensor, new: Tensor) -> None:
    x.data.copy_(new)


@way(counted=False)
def by_data_in_part(world: World, x: Tensor, new: Tensor) -> None:
    """Weight averaging: arithmetic on .data; integers are written in two parts."""
    if x.is_floating_point():
        x.data.mul_(0.1).add_(new, alpha=0.9)
    else:
        for mine, its in (
            zip(x.data.tensor_split(2, -1), new.tensor_split(2, -1)) if x.ndim else [(x.data, new)]
        ):
            mine.copy_(its)


@way(counted=False)
def past_the_counter(world: World, x: Tensor, new: Tensor) -> None:
    """The way of FSDP2's unsharding."""
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.copy_(new)


@way(counted=False, gpu=False)
def by_numpy(world: World, x: Tensor, new: Tensor) -> None:
    if x.dtype == torch.bfloat16:
        raise Skip
    x.detach().numpy()[...] = new.detach().numpy()


@way(counted=False, gpu=False)
def by_address(world: World, x: Tensor, new: Tensor) -> None:
    if not x.is_contiguous():
        raise Skip
    new = new.contiguous()
    ctypes.memmove(x.data_ptr(), new.data_ptr(), new.numel() * new.element_size())


@way(counted=False)
def by_dlpack(world: World, x: Tensor, new: Tensor) -> None:
    if x.dtype == torch.bool:
        raise Skip
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach())).copy_(new)


@way(counted=False, gpu=True)
def by_a_replayed_graph(world: World, x: Tensor, new: Tensor) -> None:
    """A CUDA graph, captured once for an address, copies from a buffer; it is kept with the memory."""
    key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
    if key not in world.graphs:
        source = new.clone()
        torch.cuda.synchronize()
        graph, memory = torch.cuda.CUDAGraph(), x.detach()
        with torch.cuda.graph(graph):
            memory.data.copy_(source)
        world.graphs[key] = memory, source, graph
    _, source, graph = world.graphs[key]
    source.copy_(new)
    graph.replay()


@way(counted=False, gpu=True)
def by_triton(world: World, x: Tensor, new: Tensor) -> None:
    kernel = _triton_copy()
    if kernel is None or not x.is_contiguous() or x.dtype == torch.bool:
        raise Skip
    kernel[(-(-x.numel() // 256),)](x.detach(), new.contiguous(), x.numel(), BLOCK=256)


def _triton_copy() -> Any:
    try:
        from . import triton_copy
    except ImportError:
        return None
    return triton_copy.copy


# --- objects ----------------------------------------------------------------------------------------------


def _tensor(value: Value) -> Tensor:
    x = value.read()
    if not isinstance(x, Tensor):
        raise Skip
    return x


def _put(value: Value, x: Any) -> None:
    if value.write is None:
        raise Skip
    value.write(x)


@replacement
def rebound(world: World, value: Value) -> None:
    x, new = value.read(), value.drawn(world.rng)
    if isinstance(x, Tensor):
        new.requires_grad_(x.requires_grad)
    _put(value, new)


@replacement
def rebound_learning_or_not(world: World, value: Value) -> None:
    if not value.kind.learns:
        raise Skip
    _put(value, value.drawn(world.rng).requires_grad_(not _tensor(value).requires_grad))


@replacement
def learns_or_not(world: World, value: Value) -> None:
    x = _tensor(value)
    if not value.kind.learns or not x.is_leaf:
        raise Skip
    x.requires_grad_(not x.requires_grad)


@replacement
def rebound_of_another_dtype(world: World, value: Value) -> None:
    x, new = _tensor(value), value.drawn(world.rng)
    if x.is_floating_point():
        new = new.to(world.rng.choice((torch.float32, torch.float64, torch.bfloat16))).requires_grad_(
            x.requires_grad
        )
    elif x.dtype != torch.bool:
        new = new.to(torch.int64 if x.dtype == torch.int32 else torch.int32)
    _put(value, new)


@replacement
def rebound_strided(world: World, value: Value) -> None:
    x, new = _tensor(value), value.drawn(world.rng)
    if not x.ndim:
        raise Skip
    new = (
        new.repeat_interleave(2, -1)[..., ::2]
        if world.rng.random() < 0.5
        else new.mT.contiguous().mT
        if x.ndim > 1
        else new
    )
    _put(value, new.requires_grad_(x.requires_grad))


@replacement
def rebound_longer(world: World, value: Value) -> None:
    """Another extent: mods read but the first elements."""
    x, new = _tensor(value), value.drawn(world.rng)
    if value.fixed or not x.ndim:
        raise Skip
    more = new.flip(-1)[..., : world.rng.randint(1, 3)]
    _put(value, torch.cat([new, more], -1).requires_grad_(x.requires_grad))


@replacement
def data_twice(world: World, value: Value) -> None:
    """`x.data = new` twice: the second may lie where the first one did."""
    x = _tensor(value)
    shape = x.shape
    for _ in range(2):
        x.data = value.drawn(world.rng)
    assert x.shape == shape


@replacement
def swapped(world: World, value: Value) -> None:
    x = _tensor(value)
    new = value.drawn(world.rng)
    new = (
        nn.Parameter(new, x.requires_grad)
        if isinstance(x, nn.Parameter)
        else new.requires_grad_(x.requires_grad)
    )
    if not x.is_leaf:
        raise Skip
    torch.utils.swap_tensors(x, new)


@replacement
def loaded(world: World, value: Value) -> None:
    """load_state_dict of the module that owns it."""
    if value.owner is None or not isinstance(value.read(), Tensor):
        raise Skip
    state = {name: x.detach().clone() for name, x in value.owner.state_dict().items()}
    state[value.key] = value.drawn(world.rng)
    value.owner.load_state_dict(state, assign=world.rng.random() < 0.5)


@replacement
def moved(world: World, value: Value) -> None:
    """Module.to(dtype), with swapped tensors half of the time."""
    if value.owner is None:
        raise Skip
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(world.rng.random() < 0.5)
    try:
        value.owner.to(world.rng.choice((torch.float64, torch.float32)))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@replacement
def shared(world: World, value: Value) -> None:
    """The same object as another value."""
    x = _tensor(value)
    others = [
        v for v in world.values()
        if v is not value and v.kind.name == value.kind.name and isinstance(y := v.read(), Tensor)
        and y is not x and y.shape == x.shape and v.kind.draw is value.kind.draw
    ]  # fmt: skip
    if not others:
        raise Skip
    _put(value, world.rng.choice(others).read())


# --- steps ------------------------------------------------------------------------------------------------


def change_value(world: World, value: Value) -> str:
    """Write other contents into a value, or put another in its place."""
    number = not isinstance(value.read(), Tensor)
    if not number and world.rng.random() < 0.55:
        return write_some_way(world, value.read(), value.drawn(world.rng))
    name = "rebound" if number else world.rng.choice(list(REPLACEMENTS))
    REPLACEMENTS[name](world, value)
    return name


def change_map(world: World, chosen: Map) -> str:
    """Write other blocks into a map, or put other lists in the place of a BlockMask's."""
    if chosen.copied:
        raise Skip
    contents = chosen.contents(draw_classes(world.rng, chosen.shape, world.device))
    if any(x.shape != new.shape for x, new in zip(chosen.tensors, contents)):
        raise Skip
    if len(chosen.tensors) > 1 and world.rng.random() < 0.25:
        names = [x for x in LISTS if getattr(chosen.given, x) is not None]
        for name, new in zip(names, contents):
            setattr(chosen.given, name, new)
        return "map: rebound"
    return write_map(world, chosen, contents)


def write_map(world: World, chosen: Map, contents: list[Tensor] | None = None) -> str:
    """Write other blocks into a map."""
    if contents is None:
        contents = chosen.contents(draw_classes(world.rng, chosen.shape, world.device))
    if any(x.shape != new.shape for x, new in zip(chosen.tensors, contents)):
        raise Skip
    ways = [write_some_way(world, x, new) for x, new in zip(chosen.tensors, contents)]
    return f"map: {' '.join(ways)}"


def change_lengths(world: World, chosen: Ragged) -> str:
    """Write other lengths, and other pages."""
    ways = [write_some_way(world, x, new) for x, new in zip(chosen.tensors, draw_lengths(chosen, world.rng))]
    return f"lengths: {' '.join(ways)}"


def in_torchs_words(change: Callable[[], str]) -> str:
    """Words of a change. Skips what torch refuses because a graph is waiting for its backward pass; raises
    Failure where something of a call is in the way of a swap."""
    try:
        return change()
    except RuntimeError as error:
        words = f"{error} {error.__cause__}"
        if "weakref" in words:
            raise Failure("raw error", "change", words) from error
        if "use_count" in words or "AccumulateGrad" in words or "gradient edge" in words:
            raise Skip from error
        raise


@other(10)
def change_a_value(world: World) -> str:
    values = [x for x in world.values() if x.kind.name not in ("switch", "pinned")]
    if not values:
        raise Skip
    return change_value(world, world.rng.choice(values))


@other(3)
def change_a_map(world: World) -> str:
    if not world.maps:
        raise Skip
    return change_map(world, world.rng.choice(world.maps))


@other(3)
def change_some_lengths(world: World) -> str:
    if not world.ragged:
        raise Skip
    return change_lengths(world, world.rng.choice(world.ragged))


@other(1)
def set_deterministic(world: World) -> str:
    if world.on_gpu and world.rng.random() < 0.8:  # kernels of their own, which take time to compile
        raise Skip
    now = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not now, warn_only=True)
    return f"to {not now}"


@other(0.7)
def set_default_dtype(world: World) -> str:
    new = torch.float32 if torch.get_default_dtype() == torch.float64 else torch.float64
    torch.set_default_dtype(new)
    return f"to {new}"


@other(1)
def copy_an_attention(world: World) -> str:
    """A copy joins the pool: of the same values, or of values of its own."""
    subject = world.pick()
    how = world.rng.choice(("copy", "deepcopy", "pickle"))
    if subject.door in ("compile", "flex") and how == "copy":
        world.subjects.append(_like(subject, copy.copy(subject.holder), subject.score, subject.mask))
    elif subject.door in ("compile", "flex") and how == "deepcopy":
        _deep_copy_of_compiled(world, subject)
    elif subject.door == "module" and how != "copy":
        world.subjects.append(_module_copied(world, subject, copy.deepcopy(subject.holder)))
    elif subject.door.startswith("methods") and how == "deepcopy":
        net = copy.deepcopy(subject.holder)
        world.subjects.append(of_net(world, net, subject.own["mods"], subject.heads_first))
    elif subject.door == "named":
        _copy_of_named(world, subject, how)
    else:
        raise Skip
    return f"{subject.door} by {how}"


def _like(subject: Subject, attention: Any, score: Any, mask: Any) -> Subject:
    return Subject(
        subject.door, attention, score, mask, subject.blocks, subject.sinks, subject.scale,
        subject.heads_first, attention, subject.heads, subject.own,
    )  # fmt: skip


def _deep_copy_of_compiled(world: World, subject: Subject) -> None:
    if subject.sinks is not None or subject.blocks is not None:
        raise Skip
    other = copy.deepcopy(subject.holder)
    score, mask = (
        None if old is None else old.copied(new.mod)
        for old, new in ((subject.score, other.variant.score_mod), (subject.mask, other.variant.mask))
    )
    world.subjects.append(_like(subject, other, score, mask))


def _module_copied(world: World, subject: Subject, made: Any) -> Subject:
    return of_module(world, made, subject.own["functions"], subject.heads, subject.heads_first)


def _copy_of_named(world: World, subject: Subject, how: str) -> None:
    """Values of a copy that is not the object itself are where nobody else reaches them."""
    if how == "copy":
        world.subjects.append(_like(subject, copy.copy(subject.holder), subject.score, subject.mask))
        return
    made = copy.deepcopy(subject.holder) if how == "deepcopy" else pickle.loads(pickle.dumps(subject.holder))
    found = []
    for function in (subject.score, subject.mask):
        if function is None or isinstance(function, _Held):  # a copy of a copy has the values of its first
            found.append(function)
            continue
        held = {
            name: x.read().detach().clone() if isinstance(x.read(), Tensor) else x.read()
            for name, x in function.values.items()
        }
        found.append(_Held(function, held))
    world.subjects.append(_like(subject, made, *found))


class _Held:
    """A function whose values nobody changes any more."""

    def __init__(self, function: Any, held: dict[str, Any]) -> None:
        self.mod, self.held, self.values = function.mod, held, {}

    def formula(self) -> Any:
        from .oracle import Formula

        return Formula(self.mod.text, self.held)


@other(0.3)
def forget_an_attention(world: World) -> str:
    """One leaves the pool: what was kept for it may be found by another in its place."""
    if len(world.subjects) < 2:
        raise Skip
    world.subjects.remove(world.rng.choice(world.subjects))
    world.last = None
    return ""


@other(0.5)
def forget_tensors(world: World) -> str:
    world.tensors.clear()
    return ""
