"""fa4flex and what a user would pick instead, behind one protocol."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa4flex.bench.environment import version_of
from fa4flex.bench.suites import BLOCK, Draw, Mod, Mods, Row, build_mods

Run = Callable[[], Tensor | tuple[Tensor, ...]]
"""The output; of a backward row, the gradients of q, k and v."""


@dataclass(frozen=True)
class Problem:
    """A row with its tensors, standard normal, [batch, heads, length, head_dim] each, k and v with their own
    heads, length and width; dout, the gradient of the output, where the row is a backward one."""

    row: Row
    mods: Mods
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [sequences + 1], of rows with packed sequences."""
        result: Tensor = self.mods.mask_mod.cu_seqlens  # type: ignore[union-attr]
        return result

    @property
    def longest(self) -> int:
        """Tokens of the longest packed sequence, as those who call kernels know it."""
        return int(self.cu_seqlens.diff().max())


def make_problem(row: Row, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """Random inputs and captured tensors, drawn on the device. One seed gives one problem."""
    draw = Draw(torch.Generator(device).manual_seed(seed))
    heads, queries = row.heads // row.value_group, (row.batch, row.heads, row.length)
    q = draw.normal(*queries, row.head_dim, dtype=dtype)
    k = draw.normal(row.batch, row.heads // row.group, row.keys, row.head_dim, dtype=dtype)
    v = draw.normal(row.batch, heads, row.keys, row.values, dtype=dtype)
    mods = build_mods(row, draw)
    dout = draw.normal(*queries, row.values, dtype=dtype) if row.backward else None
    return Problem(row, mods, q, k, v, dout)


@dataclass(frozen=True)
class Absent:
    """Reason why a peer has no time in a row."""

    reason: str


class Peer(Protocol):
    """`prepare` builds what a user would build once, and returns the call that is repeated.

    The call returns [batch, heads, length, head_dim]. Peers get contiguous inputs in the layout that their
    interface takes; the copies are made here, outside of what is timed.
    """

    @property
    def name(self) -> str: ...

    def version(self) -> str: ...

    def prepare(self, problem: Problem) -> Run | Absent: ...


def attempt(peer: Peer, problem: Problem) -> Run | Absent:
    """`prepare`, and one call: a peer that cannot do it says why, in its own words."""
    try:
        run = peer.prepare(problem) if problem.dout is None else _backward(peer, problem, problem.dout)
        if isinstance(run, Absent):
            return run
        with torch.no_grad():
            run()
        if problem.q.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        return absent(error)
    return run


def absent(error: Exception) -> Absent:
    """The first line of an error, as a reason."""
    lines = str(error).strip().splitlines() or [""]
    return Absent(f"{type(error).__name__}: {lines[0][:200]}")


def _backward(peer: Peer, problem: Problem, dout: Tensor) -> Run | Absent:
    """The backward pass of one forward pass, again and again."""
    if problem.row.deterministic and not isinstance(peer, Fa4flex):
        return Absent("is not asked for ordered sums")
    leaves = tuple(x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    with torch.enable_grad():
        forward = peer.prepare(replace(problem, q=leaves[0], k=leaves[1], v=leaves[2]))
        if isinstance(forward, Absent):
            return forward
        out = forward()
    assert isinstance(out, Tensor)
    arriving = torch.empty_like(out).copy_(dout)  # in the order of the peer's own output
    return lambda: torch.autograd.grad(out, leaves, arriving, retain_graph=True)


def _version(package: str) -> str:
    version = version_of(package)
    return f"{package} {version}" if version else "not installed"


@dataclass(frozen=True)
class Fa4flex:
    name: str = "fa4flex"

    def version(self) -> str:
        return _version("fa4flex")

    def prepare(self, problem: Problem) -> Run | Absent:
        import fa4flex
        from fa4flex.variants import causal

        row = problem.row
        schedule = fa4flex.Schedule(deterministic=row.deterministic)
        if row.sequences:
            attn = fa4flex.compile(mask=causal, schedule=schedule)
            lengths = fa4flex.Varlen(problem.cu_seqlens, max_seqlen_q=problem.longest)
            tokens = _tokens(problem)
            return lambda: _batched(attn(*tokens, varlen=lengths))
        attn = fa4flex.compile(problem.mods.score_mod, problem.mods.mask_mod, schedule=schedule)
        q, k, v = problem.q, problem.k, problem.v
        return lambda: attn(q, k, v)


@dataclass(frozen=True)
class Flex:
    """torch's flex_attention, compiled for the shape, with its BlockMask made beforehand."""

    name: str = "flex"
    compiled: bool = True

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def prepare(self, problem: Problem) -> Run | Absent:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        row, mods = problem.row, problem.mods
        call: Any = flex_attention
        if self.compiled:
            # Every row compiles anew; past its limit of recompilations Dynamo would fall back to eager.
            torch.compiler.reset()
            call = torch.compile(flex_attention, dynamic=False)
        blocks = None
        if mods.mask_mod is not None:
            batch = row.batch if row.mask_batched else None
            device = str(problem.q.device)
            blocks = create_block_mask(mods.mask_mod, batch, None, row.length, row.keys, device=device)
        q, k, v = problem.q, problem.k, problem.v
        options = {"enable_gqa": True} if row.group > 1 else {}
        return lambda: call(q, k, v, mods.score_mod, blocks, **options)


@dataclass(frozen=True)
class Sdpa:
    """One backend of torch's scaled_dot_product_attention; backend None is torch's own choice."""

    name: str
    backend: SDPBackend | None

    def version(self) -> str:
        if self.backend == SDPBackend.CUDNN_ATTENTION:
            return f"cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}"
        return f"torch {torch.__version__}"

    def prepare(self, problem: Problem) -> Run | Absent:
        row, native = problem.row, problem.row.native
        if native is None or native.window or native.softcap or row.sequences:
            return Absent("takes no mods, windows, soft caps or packed sequences")
        if native.causal and row.keys != row.length:
            return Absent("its causal mask begins with the first key")
        if self.backend is not None and not problem.q.is_cuda:
            return Absent("runs on CUDA only")
        q, k, v = problem.q, problem.k, problem.v
        backend = self.backend
        options: dict[str, Any] = {"is_causal": native.causal, "enable_gqa": row.group > 1}
        if backend is None:
            return lambda: scaled_dot_product_attention(q, k, v, **options)

        def run() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, **options)

        return run


@dataclass(frozen=True)
class FlashAttention:
    """flash_attn_func of a wheel, with its own arguments for masks; its layout is [b, s, h, d]."""

    name: str
    package: str
    module: Callable[[], Any]
    forward_only: bool = False
    """True if there is no backward pass, and no window."""

    def version(self) -> str:
        return _version(self.package)

    def prepare(self, problem: Problem) -> Run | Absent:
        native = problem.row.native
        if native is None or (self.forward_only and native.window):
            needs = "its wheel has no mods and no windows" if self.forward_only else ""
            return Absent(needs or "needs its own device functions for mods")
        if self.forward_only and problem.dout is not None:
            return Absent("its wheel has no backward pass")
        if not problem.q.is_cuda:
            return Absent("runs on CUDA only")
        module = self.module()
        options: dict[str, Any] = {"causal": native.causal, "softcap": native.softcap}
        if not self.forward_only:
            # A window of w keys is the query's own and w - 1 before it; none after.
            options["window_size"] = (native.window - 1, 0) if native.window else (None, None)
        if problem.row.sequences:
            lengths, tokens = _lengths(problem), _tokens(problem)
            return lambda: _batched(_first(module.flash_attn_varlen_func(*tokens, **lengths, **options)))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (problem.q, problem.k, problem.v))
        return lambda: _first(module.flash_attn_func(q, k, v, **options)).transpose(1, 2)


@dataclass(frozen=True)
class CudnnFlex:
    """flex_attention of cuDNN's frontend, for masks: intervals of keys per query, planned beforehand."""

    name: str = "cuDNN-flex"

    def version(self) -> str:
        return _version("nvidia-cudnn-frontend")

    def prepare(self, problem: Problem) -> Run | Absent:
        row, mask_mod = problem.row, problem.mods.mask_mod
        if problem.mods.score_mod is not None or mask_mod is None or row.sequences:
            return Absent("is asked for masks alone")
        if not problem.q.is_cuda:
            return Absent("runs on CUDA only")
        module = importlib.import_module("cudnn.flex_attention")
        q, k, v = (x.transpose(1, 2).contiguous() for x in (problem.q, problem.k, problem.v))
        plan = module.create_mask_plan(interval_ends(row, mask_mod, problem.q.device), q, k, v)
        return lambda: _first(module.flex_attn_func(q, k, v, mask_plan=plan)).transpose(1, 2)


def interval_ends(row: Row, mask_mod: Mod, device: torch.device) -> Tensor:
    """int32 [1, N, batch * length], N odd: query i sees keys [0, F0), [F1, F2), [F3, F4) and so on, in order,
    where F are its numbers. A mask that lets no query see key 0 before others has F0 = 0."""
    entries = range(row.batch) if row.mask_batched else range(1)
    strips = [
        _borders(row, mask_mod, b, queries)
        for b in entries
        for queries in torch.arange(row.length, device=device).split(BLOCK)
    ]
    widest = max(strip.shape[1] for strip in strips)
    ends = torch.cat([torch.nn.functional.pad(x, (0, widest - x.shape[1]), value=row.keys) for x in strips])
    if ends[:, :1].any():  # the first interval of some query begins behind key 0
        ends = torch.nn.functional.pad(ends, (1, 0))
    else:
        ends = ends[:, 1:]
    repeats = 1 if row.mask_batched else row.batch
    return ends.T.repeat(1, repeats).to(torch.int32)[None].contiguous()


def _borders(row: Row, mask_mod: Mod, entry: int, queries: Tensor) -> Tensor:
    """int64 [queries, 2 * intervals]: where each interval of allowed keys begins and ends; intervals that a
    query does not have begin and end behind the last key."""
    device = queries.device
    b, h = (torch.tensor(i, device=device) for i in (entry, 0))
    allowed = mask_mod(b, h, queries[:, None], torch.arange(row.keys, device=device)[None, :])
    allowed = allowed.expand(len(queries), row.keys)
    steps = torch.nn.functional.pad(allowed.to(torch.int8), (1, 1)).diff(dim=1)
    query, place = steps.nonzero(as_tuple=True)
    counts = torch.bincount(query, minlength=len(queries))
    which = torch.arange(len(query), device=device) - (counts.cumsum(0) - counts)[query]
    found = torch.full((len(queries), max(2, int(counts.max()))), row.keys, device=device)
    found[query, which] = place
    return found


def _fa4() -> Any:
    return importlib.import_module("flash_attn.cute")


def _fa3() -> Any:
    """The module, which asks for its settings by a name that its wheel does not have."""
    sys.modules.setdefault("flash_attn_config", importlib.import_module("fa3_fwd_config"))
    return importlib.import_module("fa3_fwd_interface")


def _first(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _tokens(problem: Problem) -> tuple[Tensor, ...]:
    """q, k and v of packed sequences, [tokens, heads, head_dim]."""
    return tuple(x[0].transpose(0, 1).contiguous() for x in (problem.q, problem.k, problem.v))


def _batched(out: Tensor) -> Tensor:
    """[1, heads, tokens, head_dim], as Peer says."""
    return out.transpose(0, 1).unsqueeze(0)


def _lengths(problem: Problem) -> dict[str, Any]:
    """Packed sequences in flash-attn's arguments."""
    results = {f"cu_seqlens_{x}": problem.cu_seqlens for x in "qk"}
    return {**results, **{f"max_seqlen_{x}": problem.longest for x in "qk"}}


_FA4 = FlashAttention("FA4", "flash-attn-4", _fa4)
_FA3 = FlashAttention("FA3", "fa3-fwd", _fa3, forward_only=True)
_CUDNN, _SDPA = Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION), Sdpa("SDPA", None)
PEERS: tuple[Peer, ...] = (
    Fa4flex(), _CUDNN, Sdpa("FA2", SDPBackend.FLASH_ATTENTION), Flex(), _FA4, _FA3, CudnnFlex(),
)  # fmt: skip
SMOKE_PEERS: tuple[Peer, ...] = (Fa4flex(), _CUDNN, _SDPA, Flex(compiled=False), _FA4, _FA3)
HOST_PEERS: tuple[Peer, ...] = (Fa4flex(), _SDPA, Flex(), _FA4)
"""Whose calls are timed on the host: switching SDPA's backend costs more than SDPA, so it chooses freely."""
