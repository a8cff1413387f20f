"""fa4flex: attention variants composed from plain Python functions, run exactly, forward and backward.

    import fa4flex
    from fa4flex.variants import alibi, sliding_window

    attn = fa4flex.compile(score_mod=alibi, mask=sliding_window)
    out = attn(q, k, v)

Names are imported when first used: `import fa4flex` itself loads nothing, and torch its operators' schemas,
once both are imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import fa4flex.nn as nn
    import fa4flex.parallel as parallel
    import fa4flex.reference as reference
    import fa4flex.select as select
    import fa4flex.trees as trees
    import fa4flex.variants as variants
    from fa4flex.api import Attention, attention, compile, synchronize
    from fa4flex.appending import append
    from fa4flex.codegen.trace import register_op
    from fa4flex.drop_in import flex_attention
    from fa4flex.errors import Fa4flexError, InputError, TraceError, UnsupportedError
    from fa4flex.integrations.sdpa import patch_sdpa
    from fa4flex.merging import merge
    from fa4flex.planes_calls import Reads
    from fa4flex.primitives.blocks import BlockMap
    from fa4flex.primitives.kv_scales import KVScales
    from fa4flex.primitives.latent import Latent, LatentFormat
    from fa4flex.primitives.lists import Lists
    from fa4flex.primitives.mask import Mask, as_mask
    from fa4flex.primitives.normalizer import Normalizer
    from fa4flex.primitives.output import OutputMod, as_output
    from fa4flex.primitives.paging import Paging
    from fa4flex.primitives.precision import Precision
    from fa4flex.primitives.qk_norm import QKNorm
    from fa4flex.primitives.rotary import Rotary
    from fa4flex.primitives.schedule import Schedule
    from fa4flex.primitives.score import ScoreMod, as_score
    from fa4flex.primitives.sinks import Sinks
    from fa4flex.primitives.varlen import Varlen
    from fa4flex.quantization.choice import Choice
    from fa4flex.quantization.descales import Descales
    from fa4flex.quantization.planes import Planes, planes
    from fa4flex.quantization.quantize import quantize
    from fa4flex.quantization.quantized import Quantized
    from fa4flex.runtime.auxiliary import Aux
    from fa4flex.weights import key_mass, probabilities

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("Attention", "attention", "compile", "synchronize"), "fa4flex.api"),
    "flex_attention": "fa4flex.drop_in",
    **dict.fromkeys(("Fa4flexError", "InputError", "TraceError", "UnsupportedError"), "fa4flex.errors"),
    "register_op": "fa4flex.codegen.trace",
    "append": "fa4flex.appending",
    "Aux": "fa4flex.runtime.auxiliary",
    "merge": "fa4flex.merging",
    **dict.fromkeys(("key_mass", "probabilities"), "fa4flex.weights"),
    "patch_sdpa": "fa4flex.integrations.sdpa",
    "BlockMap": "fa4flex.primitives.blocks",
    # where masks are told that a block map is one, too
    **dict.fromkeys(("Mask", "as_mask"), "fa4flex.primitives.blocks"),
    "Descales": "fa4flex.quantization.descales",
    "Choice": "fa4flex.quantization.choice",
    "Dropout": "fa4flex.primitives.dropout",
    "KVScales": "fa4flex.primitives.kv_scales",
    **dict.fromkeys(("Latent", "LatentFormat"), "fa4flex.primitives.latent"),
    "Lists": "fa4flex.primitives.lists",
    "Normalizer": "fa4flex.primitives.normalizer",
    **dict.fromkeys(("OutputMod", "as_output"), "fa4flex.primitives.output"),
    "Paging": "fa4flex.primitives.paging",
    **dict.fromkeys(("Planes", "planes"), "fa4flex.quantization.planes"),
    "Precision": "fa4flex.primitives.precision",
    "QKNorm": "fa4flex.primitives.qk_norm",
    "Quantized": "fa4flex.quantization.quantized",
    "Reads": "fa4flex.planes_calls",
    "Rotary": "fa4flex.primitives.rotary",
    "Schedule": "fa4flex.primitives.schedule",
    **dict.fromkeys(("ScoreMod", "as_score"), "fa4flex.primitives.score"),
    "Sinks": "fa4flex.primitives.sinks",
    "Varlen": "fa4flex.primitives.varlen",
    "quantize": "fa4flex.quantization.quantize",
    "nn": "fa4flex.nn",
    "parallel": "fa4flex.parallel",
    "reference": "fa4flex.reference",
    "select": "fa4flex.select",
    # deprecated: among the names below, `from fa4flex import *` would warn of it
    "simulator": "fa4flex.simulator",
    "trees": "fa4flex.trees",
    "variants": "fa4flex.variants",
}

__all__ = [
    "Attention", "Aux", "BlockMap", "Choice", "Descales", "Dropout", "Fa4flexError", "InputError",
    "KVScales", "Latent", "LatentFormat", "Lists", "Mask", "Normalizer", "OutputMod", "Paging", "Planes",
    "Precision", "QKNorm", "Quantized", "Reads", "Rotary", "Schedule", "ScoreMod", "Sinks", "TraceError",
    "UnsupportedError", "Varlen", "append", "as_mask", "as_output", "as_score", "attention", "compile",
    "flex_attention", "key_mass", "merge", "nn", "parallel", "patch_sdpa", "planes", "probabilities",
    "quantize", "reference", "register_op", "select", "synchronize", "trees", "variants",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fa4flex' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"fa4flex.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


# --- operators ----------------------------------------------------------------------------------------------


class _TorchIsImported:
    """Finds torch as others do, and has its operators declared at the end of its import."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not cls]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((result for result in specs if result is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if cls in sys.meta_path:
                sys.meta_path.remove(cls)
            importlib.import_module("fa4flex.operators")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Graphs that were exported are loaded by torch alone, which must know their operators by then.
if "torch" in sys.modules:
    importlib.import_module("fa4flex.operators")
else:
    sys.meta_path.insert(0, _TorchIsImported)
