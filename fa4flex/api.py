"""Entry points: compile() and attention(); flex_attention() is in drop_in.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fa4flex import calls, planes_calls, quantized_calls
from fa4flex.codegen.build import Bound, Program, Trace
from fa4flex.compiler import background
from fa4flex.default_device import on_the_host
from fa4flex.drop_in import flex_attention
from fa4flex.errors import Fa4flexError
from fa4flex.planes_calls import Reads
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.dropout import Dropout
from fa4flex.primitives.kv_scales import KVScales
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.lists import Lists, lists_kept
from fa4flex.primitives.normalizer import Normalizer
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.sinks import Sinks
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.choice import Choice
from fa4flex.quantization.planes import Planes
from fa4flex.quantization.quantized import Quantized
from fa4flex.runtime import launch
from fa4flex.runtime.auxiliary import aux_of, statistics_of
from fa4flex.runtime.call import LSE, Results, Statistics
from fa4flex.runtime.cuda.device import faults
from fa4flex.variant import Backend, Layout, Variant, at_call, compose
from fa4flex.weights import Rows, key_mass_of, probabilities_of, refuse_sources

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fa4flex.parallel import ContextParallel
    from fa4flex.view.explain import Explanation
    from fa4flex.view.mask import MaskView

__all__ = ["Attention", "attention", "compile", "flex_attention", "synchronize"]


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    """A compiled variant: `attn(q, k, v)`. Differentiable; one object serves every length and device.

    Captured tensors, numbers, attributes and globals are looked up again at each call.
    """

    variant: Variant
    _caller: launch.Caller | None = None
    _last: Variant | None = field(default=None, init=False)

    @property
    def program(self) -> Program:
        """The variant traced and analysed, with what it captured as it is now."""
        return Program(self.variant, self._calling().bound, self._output())

    @on_the_host
    def _output(self) -> Bound | None:
        """The same of its output function, if it has one."""
        return None if self.variant.output_mod is None else launch.bound_for(self.variant, self._caller)

    @property
    def trace(self) -> Trace:
        """Trace of its functions, which other variants of the same code share."""
        return self._calling().bound.trace

    @property
    def prepared(self) -> launch.Prepared:
        """Program and memory that calls of this variant share."""
        return self._calling().prepared

    @on_the_host
    def _calling(self) -> launch.Calling:
        return launch.calling(self.variant.shown, self._caller)

    def __call__(
        self,
        q: Tensor | Quantized | Choice,
        k: Tensor | Latent | Planes | None = None,
        v: Tensor | None = None,
        *,
        varlen: Varlen | None = None,
        paging: Paging | None = None,
        kv_scales: KVScales | None = None,
        blocks: BlockMap | BlockMask | Lists | None = None,
        scale: float | None = None,
        sinks: Tensor | Sinks | None = None,
        dropout: Dropout | float | None = None,
        return_lse: bool = False,
        return_aux: Sequence[str] | None = None,
    ) -> Any:
        """output_mod(softmax(score_mod(scale * q k^T)) v) over the allowed keys.

        q [B, Hq, Sq, D], k [B, Hk, Skv, D], v [B, Hv, Skv, Dv] (layout "bhsd"; "bshd" swaps dimensions 1
        and 2), Hq a multiple of Hk and of Hv; dtype bfloat16, float16, float32 or float64. With `varlen` they
        are packed: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hv, Dv]. With `paging` k and v are caches
        [pages, page_size, Hk or Hv, D]. k and v may be caches of float8_e4m3fn, whatever q is: they stand for
        k * kv_scales.k and v * kv_scales.v, or for themselves without scales. Nested tensors of layout
        torch.jagged, q [B, Hq, ragged, D] or as `layout` has it, give a nested out and lse [B, Hq, ragged].
        In place of q, k and v, one fa4flex.Quantized: attention over what its codes stand for; or a
        fa4flex.Choice, as `choose` makes it. In place of k
        and v, a fa4flex.Latent: rows of multi-head latent attention; or fa4flex.Planes, of which
        `Precision(tolerance=x)` leaves out tiles of keys: outputs are off by at most x times the range of v.

        blocks, scale, sinks [Hq] and dropout override those of `compile` for this call: dropout=0.0 drops
        nothing.

        Returns out in q's dtype and layout, or (out, lse) with lse [B, Hq, Sq] ([Hq, Tq] packed), the
        natural logarithm of the softmax's denominator, in float32 (float64 for float64 inputs). A query
        without allowed keys gives out 0 (before an output function), lse -inf and zero gradients. Both carry
        gradients. lse is of the weights before dropout. Of normalisers the softmax plus a constant has an
        lse, which includes the constant; with others return_lse is refused. With `return_aux`, names out of
        "lse", "max_scores", "max_logit" and "entropy", the call gives (out, aux), with these as attributes:
        see fa4flex.Aux.
        """
        statistics: Statistics
        if return_aux is None:
            statistics = LSE if return_lse else ()
        else:
            statistics = statistics_of(return_aux, return_lse)
        if blocks is None and self.variant.blocks is not None:
            blocks = lists_kept(self.variant.blocks)
        if isinstance(blocks, Lists):
            from fa4flex import listed_calls  # other calls do not wait for it

            others, described = (None, scale, sinks, dropout), (varlen, paging, kv_scales)
            same = all(x is None for x in others)
            plain = self.variant if same else at_call(self.variant, *others)
            found = listed_calls.attend(plain, self._caller, blocks, (q, k, v), described, statistics)
            if found is not None:
                return _returned(found, statistics, return_aux, return_lse)
        changed = blocks is not None or scale is not None or sinks is not None
        variant = self._at_call(blocks, scale, sinks) if changed else self.variant
        if dropout is not None:
            variant = at_call(variant, dropout=dropout)
        if isinstance(q, (Quantized, Choice)):
            quantized_calls.alone(q, k=k, v=v, varlen=varlen, paging=paging, kv_scales=kv_scales)
            results = calls.run_codes(variant, self._caller, q, statistics)
        elif isinstance(k, Planes):
            planes_calls.alone(k, v=v, varlen=varlen, paging=paging, kv_scales=kv_scales)
            results = planes_calls.attend(variant, self._caller, q, k, statistics)
        else:
            qkv: Any = (q, k, v)
            results = calls.run(variant, self._caller, qkv, varlen, paging, statistics, kv_scales)
        return _returned(results, statistics, return_aux, return_lse)

    @on_the_host
    def choose(
        self, q: Tensor, k: Tensor, v: Tensor, *, tolerance: float = 0.1, varlen: Varlen | None = None
    ) -> Choice:
        """Formats of each head, as fast as errors allow: int8 q.k with e4m3 values or with values as they are
        where each output is surely off by at most `tolerance` times the largest range of its head's values,
        16 bits elsewhere.

        q, k, v and varlen as in a call. attn(choice) attends with them, choice.explain() says which head got
        which, and choice.certificate how far each row may be off. Nothing waits for the device until the
        choice is asked. Raises InputError and UnsupportedError as a call of `Precision(qk="int8")`.
        """
        try:
            return quantized_calls.choice_of(self.variant, (q, k, v), varlen, tolerance)
        except Fa4flexError as error:
            launch.dress(error, self.variant, None)
            raise

    @on_the_host
    def reads(self, q: Tensor, planes: Planes) -> Reads:
        """Tiles of keys that the next call of planes reads, heads that look at their plane, and bytes.

        q as in a call. `reads.share` is the share of the keys that is left out [B, Hkv], `reads.explain()`
        says all in words. Leaves the planes as they are. Raises InputError and UnsupportedError as the call
        does.
        """
        return planes_calls.reads(self.variant, q, planes)

    def key_mass(
        self, q: Tensor, k: Tensor, lse: Tensor, *, varlen: Varlen | None = None, **options: Any
    ) -> Tensor:
        """Sums of this attention's probabilities over the queries, per key: see fa4flex.key_mass.

        options: reduce, and blocks and scale of this call
        """
        reduce, variant = options.pop("reduce", None), self._at_call(**refuse_sources(options))
        return key_mass_of(variant, self._caller, (q, k, lse), varlen, reduce)

    def probabilities(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        rows: Rows = None,
        *,
        varlen: Varlen | None = None,
        **options: Any,
    ) -> Tensor:
        """Probabilities of chosen queries under this attention: see fa4flex.probabilities.

        options: reduce, and blocks and scale of this call
        """
        chosen, variant = (rows, options.pop("reduce", None)), self._at_call(**refuse_sources(options))
        return probabilities_of(variant, self._caller, (q, k, lse), varlen, chosen)

    @on_the_host
    def skipped(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        varlen: Varlen | None = None,
        blocks: BlockMap | BlockMask | Lists | None = None,
        scale: float | None = None,
        sinks: Tensor | Sinks | None = None,
    ) -> Tensor:
        """Share of the keys of each query's tiles that a call leaves out by `Precision(skip=...)`.

        Arguments are those of a call, of tensors on a CPU. Returns float32 [B, Hq, Sq], or [Hq, Tq] packed,
        from 0 to 1; 0 for a query whose tiles are all empty, and without skip. This is a forward pass of its
        own. Raises UnsupportedError for tensors on a GPU, whose kernels do not count.
        """
        from fa4flex.runtime.skipped import skipped

        changed = blocks is not None or scale is not None or sinks is not None
        variant = self._at_call(blocks, scale, sinks) if changed else self.variant
        variant = calls.in_pairs(variant, q, varlen, None)
        return skipped(variant, self._caller, (q, k, v), varlen)

    def _at_call(
        self,
        blocks: BlockMap | BlockMask | Lists | None = None,
        scale: float | None = None,
        sinks: Tensor | Sinks | None = None,
    ) -> Variant:
        """Variant of a call that overrides something; of one with a map alone, that of the last such call."""
        if not isinstance(blocks, BlockMap) or scale is not None or sinks is not None:
            return at_call(self.variant, blocks, scale, sinks)
        if torch.compiler.is_compiling():
            return at_call(self.variant, blocks)
        variant = self._last
        if variant is None or variant.blocks is not blocks:
            variant = at_call(self.variant, blocks)
            object.__setattr__(self, "_last", variant)
        return variant

    def parallel(self, mesh: DeviceMesh | ProcessGroup, dim: str = "cp", **options: Any) -> ContextParallel:
        """This attention with its sequence spread over the ranks of one dimension of `mesh`, or of a group.

        options: see fa4flex.parallel.parallel
        """
        from fa4flex.parallel import parallel

        return parallel(self.variant, mesh, dim, **options)

    def __repr__(self) -> str:
        return f"Attention({self.variant!r})"

    def __copy__(self) -> Attention:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        """A copy whose functions read copies of what they captured, as `copy.deepcopy` made them.

        A module that owns an Attention and the parameters that it reads is thus copied whole. Globals are
        shared.
        """
        other = object.__new__(Attention)
        memo[id(self)] = other  # before its contents: a module that a function reads may hold this object
        object.__setattr__(other, "variant", copy.deepcopy(self.variant, memo))
        object.__setattr__(other, "_caller", launch.Caller())
        return other

    def __reduce__(self) -> Any:
        return _loaded, (self.variant,)

    @on_the_host
    def explain(
        self, q_len: int = 4096, kv_len: int | None = None, arch: str | None = None, **problem: Any
    ) -> Explanation:
        """Explanation: what was composed, what was proved and what is evaluated, and why, at these lengths.

        arch     a GPU whose kernel is described ("sm_90a", "sm_100a"), on any machine
        problem  of that kernel, as `source` takes it: head_dim (default 128), batch, heads, kv_heads,
                 v_heads (default kv_heads), ...
        """
        from fa4flex.view.explain import explain

        kv_len = q_len if kv_len is None else kv_len
        return explain(self.program, q_len, kv_len, arch, self.prepared.engine.serving(), **problem)

    @on_the_host
    def source(self, stage: str = "trace", **problem: Any) -> str:
        """The program at a stage as readable text, each line with the user's line that it came from.

        "trace", "facts" and "gradient" hold for every call; "flex" is what torch's flex_attention is given.
        "plan", "forward" (the generated kernel module; "backward", "tangents" and "mass" likewise) and
        "ptx" are those of a GPU, at a head_dim of 128 in bfloat16 unless `problem` says otherwise:
        attn.source("forward", head_dim=64, dtype="float16").
        """
        from fa4flex.view.source import source

        return source(self.program, stage, **problem)

    @property
    def mask(self) -> MaskView:
        """The mask's picture: `attn.mask.plot(256, 256)`, `print(attn.mask)`."""
        from fa4flex.view.mask import MaskView

        return MaskView(self.program)

    def _repr_html_(self) -> str:
        return self.mask._repr_html_()


def _loaded(variant: Variant) -> Attention:
    return Attention(variant, launch.Caller())


def compile(
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | BlockMask | BlockMap | Lists | None = None,
    *,
    blocks: BlockMap | BlockMask | Lists | None = None,
    sinks: Tensor | Callable[[], Tensor] | Sinks | None = None,
    scale: float | None = None,
    output_mod: Callable[..., Any] | None = None,
    dropout: Dropout | float | None = None,
    normalizer: Normalizer | Callable[..., Normalizer] | None = None,
    layout: Layout = "bhsd",
    backend: Backend = "auto",
    **data: Precision | Schedule,
) -> Attention:
    """Specialise attention to a variant.

    score_mod  any FlexAttention score_mod, a fa4flex score mod, or a chain of them with `>>`
    mask       any FlexAttention mask_mod, fa4flex masks combined with `&`, `|`, `~`, or a torch BlockMask
    blocks     a block-sparse map (fa4flex.BlockMap or BlockMask): a full block is allowed whatever `mask`
               says, which decides in partial blocks only (`blocks & mask` is what both allow). Or
               fa4flex.Lists, in all of which `mask` decides. Indices are each sequence's own where these are
               packed or paged
    sinks      [Hq] floating tensor: a learnable logit per head in the softmax's denominator; or a function
               that returns it, called at each call
    scale      multiplies q.k; default 1 / sqrt(head_dim)
    output_mod  output_mod(out, b, h, q_idx, d_idx): a function of each element of the normalised output,
               applied once, in float32; such functions chain with `>>`. A query without allowed keys gives
               output_mod(0, ...)
    dropout    a fa4flex.Dropout of the normalised weights, or its p: applied by every call, in evaluation
               too. Compile without it for that, or call with dropout=0.0; fa4flex.nn.Attention knows its mode
    normalizer  a fa4flex.Normalizer in place of the softmax: softmax plus a constant, softpick, or any
               elementwise function of the score
    layout     "bhsd" (PyTorch) or "bshd" (FlashAttention)
    backend    "auto": generated kernels on GPUs that have some, torch's flex_attention on others, PyTorch
               operations on a CPU; or "flex": torch's flex_attention on any. explain() says which, and why
    precision, schedule   see fa4flex.Precision and fa4flex.Schedule

    Captured values (closure variables, globals, attributes, default arguments) are looked up again at each
    call. Captured tensors receive gradients.
    Raises TraceError, InputError or UnsupportedError; nothing is ignored.
    """
    options: dict[str, Any] = {"backend": backend, **data}
    options |= {"sinks": sinks, "scale": scale, "layout": layout, "output_mod": output_mod}
    options |= {"dropout": dropout, "normalizer": normalizer}
    variant = compose(score_mod, mask, blocks=blocks, **options)
    if torch.compiler.is_dynamo_compiling():
        return Attention(variant)
    made = Attention(variant, launch.Caller())
    made._calling()  # errors of the functions belong here
    made._output()
    return made


def attention(
    q: Tensor | Quantized | Choice,
    k: Tensor | Latent | Planes | None = None,
    v: Tensor | None = None,
    *,
    varlen: Varlen | None = None,
    paging: Paging | None = None,
    kv_scales: KVScales | None = None,
    return_lse: bool = False,
    return_aux: Sequence[str] | None = None,
    sinks: Tensor | Callable[[], Tensor] | Sinks | None = None,
    **composition: Any,
) -> Any:
    """compile(**composition) and call it, once. Functions with the same code share one trace."""
    wanted: dict[str, Any] = {"return_lse": return_lse, "return_aux": return_aux}
    if isinstance(composition.get("blocks"), Lists):
        wanted["blocks"] = composition.pop("blocks")
    variant = compose(**composition)
    if sinks is not None:
        variant = at_call(variant, sinks=sinks)
    return Attention(variant)(q, k, v, varlen=varlen, paging=paging, kv_scales=kv_scales, **wanted)


def _returned(results: Results, statistics: Statistics, return_aux: Any, return_lse: bool) -> Any:
    """Result of a call, as it was asked for."""
    if return_aux is not None:
        return results[0], aux_of(results, statistics)
    return (results[0], results[1]) if return_lse else results[0]


def synchronize(kernels: bool = False) -> None:
    """Wait for all work on all devices, then raise InputError if a kernel has found a fault.

    kernels   wait for kernels that are compiled in the background as well: calls after it run the best ones,
              as whoever times or captures them wants
    """
    if kernels:
        background.wait()
    faults.synchronize()
