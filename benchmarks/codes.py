"""Time and error of attention over codes of 8 bits, beside 16 bits and beside others' 8 bits.

    python benchmarks/codes.py [--smoke] [--rounds 11] [--json FILE]

d64, d128 and d256, full and causal, 4k and 16k keys, as many tokens times channels each, groups of 4 heads.
Rows: our kernels of bfloat16, of int8 and of e4m3 q.k with e4m3 values, with sums of a tile apart ("promote")
or not, and with values as they are; rounding alone; FlashAttention-3 over e4m3 with one scale per head, and
cuDNN with one per tensor, where they can be imported. "error" is relative, over 128 queries of two heads,
against float64 of the bfloat16 tensors; "share" is what rounding takes beside the forward pass. Medians of
samples taken in turns.

--smoke computes tiny sizes on whatever there is: times mean nothing then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import Precision, quantized_kernels
from fa4flex.bench.measure import clock_for, interleave
from fa4flex.variant import changed
from fa4flex.variants import causal

E4M3 = torch.float8_e4m3fn
HIDDEN, TOKENS = 2048, 16384
"""Query heads times their width, and tokens of all sequences of a batch."""
FORMATS = {
    "int8, e4m3": {"qk": "int8"},
    "e4m3, e4m3": {"qk": "float8_e4m3"},
    "int8, bfloat16": {"qk": "int8", "pv": "bfloat16"},
}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """One problem: [batch, heads, length, width], heads // group heads of keys."""

    width: int
    length: int
    causal: bool
    batch: int
    heads: int
    group: int = 4

    @classmethod
    def of(cls, width: int, length: int, is_causal: bool, smoke: bool) -> Setting:
        if smoke:
            return cls(width, length, is_causal, 1, 4)
        return cls(width, length, is_causal, TOKENS // length, HIDDEN // width)

    def tensors(self, device: torch.device) -> list[Tensor]:
        heads = self.heads, self.heads // self.group, self.heads // self.group
        shapes = [(self.batch, n, self.length, self.width) for n in heads]
        return [torch.randn(shape, device=device).bfloat16() for shape in shapes]

    @property
    def operations(self) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * self.width * pairs

    def __str__(self) -> str:
        return f"d{self.width} {self.length} {'causal' if self.causal else 'full'}"


@dataclass
class Row:
    setting: str
    name: str
    milliseconds: float
    tflops: float
    error: float
    note: str = ""


# --- ours ---------------------------------------------------------------------------------------------------


def of_ours(setting: Setting, qkv: list[Tensor]) -> tuple[dict[str, Call], dict[str, Call], dict[str, str]]:
    """Calls whose output is compared, calls that round, and notes by name."""
    attn = fa4flex.compile(mask=causal if setting.causal else None)
    calls: dict[str, Call] = {"ours bfloat16": lambda: attn(*qkv)}
    rounding: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for name, formats in FORMATS.items():
        codes = fa4flex.quantize(*qkv, **formats)  # type: ignore[arg-type]
        pv = formats.get("pv", "float8_e4m3")
        for promote in (True, False) if pv != "bfloat16" else (True,):
            precision = Precision(qk=formats["qk"], pv=pv, promote=promote)
            one = fa4flex.Attention(changed(attn.variant, precision=precision))
            key = f"ours {name}" + ("" if promote else ", one level")
            calls[key] = lambda one=one, codes=codes: one(codes)
            if not _by_kernel(one, codes):
                notes[key] = "no kernel of codes took it: numbers of 16 bits"
        rounding[f"quantize {name}"] = lambda formats=formats: fa4flex.quantize(*qkv, **formats)
    return calls, rounding, notes


def _by_kernel(attn: Any, codes: Any) -> bool:
    try:
        return quantized_kernels.attend(attn.variant, codes, ()) is not None
    except fa4flex.Fa4flexError:
        return False


# --- others -------------------------------------------------------------------------------------------------


def per_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes, and a scale of each sequence and head."""
    scale = x.float().abs().amax((2, 3)) / 448
    return (x.float() / scale[:, :, None, None]).to(E4M3), scale


def of_fa3(setting: Setting, qkv: list[Tensor]) -> Call:
    """FlashAttention-3 over e4m3; ImportError without it."""
    sys.modules.setdefault("flash_attn_config", importlib.import_module("fa3_fwd_config"))
    fa3 = importlib.import_module("fa3_fwd_interface")
    made = [per_head(x) for x in qkv]
    q, k, v = (codes.transpose(1, 2).contiguous() for codes, _ in made)
    # Queries have one scale of each group.
    groups = made[0][1].unflatten(1, (-1, setting.group)).amax(2)
    x = qkv[0].float() / groups.repeat_interleave(setting.group, 1)[:, :, None, None]
    q = x.to(E4M3).transpose(1, 2).contiguous()
    scales = {"q_descale": groups, "k_descale": made[1][1], "v_descale": made[2][1]}

    def call() -> Tensor:
        found = fa3.flash_attn_func(q, k, v, causal=setting.causal, **scales)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


def of_cudnn(setting: Setting, qkv: list[Tensor]) -> Call:
    """cuDNN over e4m3 with one scale per tensor; ImportError without its frontend."""
    cudnn = importlib.import_module("cudnn")
    scales = [x.float().abs().amax() / 448 for x in qkv]
    codes = [(x.float() / s).to(E4M3) for x, s in zip(qkv, scales)]
    device = qkv[0].device
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    places = [graph.tensor_like(x) for x in codes]

    def one(number: float | Tensor) -> tuple[Any, Tensor]:
        held = torch.as_tensor(number, dtype=torch.float32, device=device).reshape(1, 1, 1, 1)
        return graph.tensor_like(held), held

    given = [one(x) for x in (*scales, 1 / 448.0, 448.0, 1.0)]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        q=places[0], k=places[1], v=places[2],
        **{name: place for name, (place, _) in zip(names, given)},
        is_inference=True, attn_scale=setting.width**-0.5, use_causal_mask=setting.causal,
    )  # fmt: skip
    result = torch.empty(qkv[0].shape, dtype=torch.bfloat16, device=device)
    out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
    out.set_data_type(cudnn.data_type.BFLOAT16)
    most = [torch.zeros(1, 1, 1, 1, device=device) for _ in range(2)]
    for place in (amax_s, amax_o):
        place.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
        place.set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A])
    space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    held = dict(zip(places, codes)) | dict(given) | {out: result, amax_s: most[0], amax_o: most[1]}

    def call() -> Tensor:
        graph.execute(held, space)
        return result

    return call


OTHERS = {"FA3 e4m3": of_fa3, "cuDNN e4m3": of_cudnn}


# --- rows ---------------------------------------------------------------------------------------------------


class Exact:
    """Outputs of some queries of the first two heads, in float64."""

    def __init__(self, setting: Setting, qkv: list[Tensor]) -> None:
        q, k, v = (x[:1].double() for x in qkv)
        self.rows = torch.linspace(0, setting.length - 1, min(128, setting.length)).long().to(q.device)
        self.heads = min(2, setting.heads)
        q, k, v = q[:, : self.heads, self.rows], k[:, :1], v[:, :1]
        s = q @ k.mT / math.sqrt(setting.width)
        if setting.causal:
            later = torch.arange(setting.length, device=q.device) > self.rows[:, None]
            s = s.masked_fill(later, -torch.inf)
        self.out = torch.softmax(s, -1) @ v

    def error(self, out: Tensor) -> float:
        found = out[:1, : self.heads, self.rows].double()
        return float((found - self.out).norm() / self.out.norm())


def measured(setting: Setting, device: torch.device, rounds: int) -> list[Row]:
    qkv = setting.tensors(device)
    exact = Exact(setting, qkv)
    rows: list[Row] = []
    with torch.no_grad():
        calls, rounding, notes = of_ours(setting, qkv)
        for name, make in OTHERS.items():
            try:
                call = make(setting, qkv)
                call()
                calls[name] = call
            except Exception as error:  # whatever another library raises is a row that is not there
                words = " ".join(str(error).split())[:100]
                rows.append(
                    Row(str(setting), name, math.nan, math.nan, math.nan, f"{type(error).__name__}: {words}")
                )
        errors = {name: exact.error(call()) for name, call in calls.items()}
        times = interleave({**calls, **rounding}, clock_for(device), rounds)
    for name in calls:
        seconds = times[name].median
        each = setting.operations / seconds / 1e12
        rows.append(Row(str(setting), name, seconds * 1e3, each, errors[name], notes.get(name, "")))
    for name in rounding:
        forward = times["ours " + name.removeprefix("quantize ")].median
        seconds = times[name].median
        rows.append(
            Row(str(setting), name, seconds * 1e3, math.nan, math.nan, f"share {seconds / forward:.1%}")
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widths, lengths = ((64,), (256,)) if given.smoke else ((64, 128, 256), (4096, 16384))
    rows: list[Row] = []
    for width in widths:
        for length in lengths:
            for is_causal in (False, True):
                found = measured(
                    Setting.of(width, length, is_causal, given.smoke),
                    device,
                    1 if given.smoke else given.rounds,
                )
                for row in found:
                    print(
                        f"{row.setting:18} {row.name:28} {row.milliseconds:9.3f} ms {row.tflops:8.1f} TFLOP/s"
                        f"  error {row.error:.4f}  {row.note}",
                        flush=True,
                    )
                rows += found
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
