"""Attention over many ranks as a style of torch's `parallelize_module`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from fa4flex.errors import UnsupportedError
from fa4flex.parallel.context import ContextParallel, parallel
from fa4flex.parallel.pieces import SEQUENCE
from fa4flex.runtime.auxiliary import aux_of, lse_alone
from fa4flex.variant import Variant

Layouts = Placement | tuple[Placement, ...]
"""Placement along the sequence's dimension of a mesh, or along each of its dimensions."""


class SequenceParallelAttention(ParallelStyle):
    """Style for modules that call attention: q, k and v are sharded by sequence, and so is the result.

    It applies to a `fa4flex.nn.Attention`, and to modules that have `fa4flex.compile(...)` as an attribute:
    these then call it in parallel. q, k and v are DTensors, which are redistributed where they are sharded
    otherwise, or plain tensors.

    dim            the mesh's dimension for the sequence; may be left out where it has one only
    input_layouts  how plain tensors lie, as for torch's styles: Replicate() for whole ones, the default, or
                   Shard(2) for equal parts of the sequence; one per dimension of the mesh where it has
                   several. Shard(1) along another than the sequence's: heads of tensor parallelism
    output_layouts how results lie, by default sharded by sequence
    use_local_output   whether results are local tensors
    options        those of fa4flex.parallel.parallel
    """

    def __init__(
        self,
        dim: str | None = None,
        *,
        input_layouts: Layouts | None = None,
        output_layouts: Layouts | None = None,
        use_local_output: bool = True,
        **options: Any,
    ) -> None:
        self.dim, self.options = dim, options
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if _is_attention(module):
            # Its tensors may be others at each call, when a state dict or FSDP has put them there.
            owner: Any = module
            owner.forward = self._spread(lambda: owner.variant, device_mesh)
            return module
        results = [(name, x) for name, x in vars(module).items() if _is_attention(x)]
        if not results:
            raise UnsupportedError(
                f"{type(self).__name__} for {type(module).__name__}",
                "a fa4flex.nn.Attention, or a module that has fa4flex.compile(...) as an attribute",
                "name the module that calls attention in the plan",
            )
        for name, x in results:
            setattr(module, name, self._spread(_always(x.variant), device_mesh))
        return module

    def _spread(self, variant: Callable[[], Variant], mesh: DeviceMesh) -> Spread:
        names = mesh.mesh_dim_names or ("cp",)
        dim = self.dim or names[0]
        if self.dim is None and mesh.ndim > 1:
            raise UnsupportedError(
                f"a mesh with dimensions {list(names)}", "one dimension, or dim=", "name the sequence's"
            )
        group: Any = mesh if mesh.mesh_dim_names else mesh.get_group()
        call = parallel(variant(), group, dim, **self.options)
        at, sequence = names.index(dim), 1 if call.variant.layout == "bshd" else SEQUENCE

        def all_of(layouts: Layouts | None, usual: Placement) -> tuple[Placement, ...]:
            layouts = usual if layouts is None else layouts
            if isinstance(layouts, tuple):
                return layouts
            return tuple(layouts if i == at else Replicate() for i in range(mesh.ndim))

        inputs = all_of(self.input_layouts, Replicate())
        computed = tuple(Shard(sequence) if i == at else x for i, x in enumerate(inputs))
        outputs = computed if self.output_layouts is None else all_of(self.output_layouts, Replicate())
        return Spread(call, variant, mesh, (inputs, computed, outputs), self.use_local_output)


def _is_attention(x: object) -> bool:
    """True for fa4flex.nn.Attention, and for what fa4flex.compile returns: both have a variant."""
    return isinstance(getattr(x, "variant", None), Variant)


def _always(variant: Variant) -> Callable[[], Variant]:
    return lambda: variant


@dataclass(frozen=True, eq=False)
class Spread:
    """Call of attention whose inputs are sharded before it. layouts: of plain inputs, of what is computed,
    and of results."""

    call: ContextParallel
    variant: Callable[[], Variant]
    mesh: DeviceMesh
    layouts: tuple[tuple[Placement, ...], tuple[Placement, ...], tuple[Placement, ...]]
    local: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_aux: Any = None
    ) -> Any:
        """Attention as one process computes it, of tensors as the style says that they lie."""
        if return_aux is not None:
            statistics = lse_alone(return_aux, return_lse, "of tensors that are spread over ranks")
            out, lse = self(q, k, v, return_lse=True)
            return out, aux_of((out, lse, None), statistics)
        inputs, computed, outputs = self.layouts
        arguments = [
            x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, inputs, run_check=False)
            for x in (q, k, v)
        ]
        call = replace(self.call, variant=self.variant())
        out, lse = call(*(x.redistribute(placements=computed) for x in arguments), return_lse=True)
        out = self._result(out, outputs)
        return (out, self._result(lse, tuple(map(self._of_lse, outputs)))) if return_lse else out

    def _result(self, x: Any, layout: tuple[Placement, ...]) -> Any:
        x = x.redistribute(placements=layout)
        return x.to_local() if self.local else x

    def _of_lse(self, placement: Placement) -> Placement:
        """The placement of log-sum-exps [B, H, S] for one of outputs."""
        if self.call.variant.layout == "bshd" and isinstance(placement, Shard) and placement.dim in (1, 2):
            return Shard(3 - placement.dim)
        return placement
