"""This library's generated Hopper kernels on the simulated GPU: right, and nothing found."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import drawn_timing, of_passes

import fa4flex
import ptxsim
from fa4flex.__main__ import main
from fa4flex.primitives.varlen import Varlen
from fa4flex.variants import alibi, causal, document, sliding_window, softcap

IDS = torch.arange(200) // 70
TABLE = torch.randn(2, 400) / 2


def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + TABLE[h, q_idx - kv_idx + 200]


COMPOSED = {
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(60)},
    "documents": {"mask": document(IDS) & causal},
    "captured table": {"score_mod": relative},
}


def attend(attn: fa4flex.Attention, *qkv: torch.Tensor) -> torch.Tensor:
    """Runs on the simulated GPU, under a random timing; nothing may be found."""
    timing, seed = drawn_timing()
    with torch.no_grad(), ptxsim.device("sm_90a", seed, timing) as gpu:
        out = attn(*qkv)
    assert len(of_passes(gpu)) == 1 and not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    return out  # type: ignore[return-value]


@pytest.mark.parametrize("name", COMPOSED)
def test_variant(name: str) -> None:
    """Grouped heads and a length that is no multiple of the tile; at most twice bf16 PyTorch's error."""
    attn = fa4flex.compile(**COMPOSED[name])  # type: ignore[arg-type]
    q, k, v = (torch.randn(1, heads, 200, 64).bfloat16() for heads in (2, 1, 1))
    exact = attn(q.double(), k.double(), v.double())
    # The CPU executor computes in fp32 what is given in bf16; bf16 PyTorch rounds products as well.
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    dense = fa4flex.compile()(q.double(), k.double(), v.double())
    allowed = 2 * max((plain.double() - dense).abs().max().item(), 2**-8 * exact.abs().max().item())
    assert (attend(attn, q, k, v).double() - exact).abs().max().item() <= allowed


def test_packed_sequences() -> None:
    """Past a sequence's end every warpgroup writes zeros over the same values, unordered: whichever is first,
    each reads zeros, since it wrote them itself. Two-byte stores to shared memory are only there for that."""
    attn = fa4flex.compile(mask=causal)
    ends = torch.tensor([0, 40, 41, 190], dtype=torch.int32)
    q, k, v = (torch.randn(190, 2, 64).bfloat16() for _ in range(3))
    with torch.no_grad(), ptxsim.device("sm_90a", random.randrange(99), "random") as gpu:
        out = attn(q, k, v, varlen=Varlen(ends, ends))
    for finding in gpu.findings:
        lines = (finding.instruction, finding.other)
        assert finding.kind == "race" and all(x and x.opcode == "st.shared.b16" for x in lines), str(finding)
    exact = attn(q.double(), k.double(), v.double(), varlen=Varlen(ends, ends))
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()


def test_each_chip_has_its_own_kernel() -> None:
    """One program is called on one chip and then on another."""
    q, k, v = (torch.randn(1, 1, 64, 64).bfloat16() for _ in range(3))
    attn, found = fa4flex.compile(mask=causal), []
    for arch in ("sm_90a", "sm_100a", "sm_90a"):
        with torch.no_grad(), ptxsim.device(arch) as gpu:
            found.append(attn(q, k, v))
        assert len(of_passes(gpu)) == 1 and not gpu.findings, gpu.report()
    assert (
        torch.equal(found[0], found[2]) and (found[0] - found[1]).abs().max() <= 2**-7 * found[0].abs().max()
    )


def test_outside_of_the_device_nothing_changed() -> None:
    q, k, v = (torch.randn(1, 1, 64, 64).bfloat16() for _ in range(3))
    attn = fa4flex.compile(mask=causal)
    before = attn(q, k, v)
    attend(attn, q, k, v)
    assert torch.equal(attn(q, k, v), before)


def test_command(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    picture = tmp_path / "warps.svg"
    options = "--unexecuted", "--timeline", str(picture)
    assert main(["simulate", "causal", "--q-len", "128", *options]) == 0
    printed = capsys.readouterr().out
    assert "never executed: " in printed
    assert "findings: none" in printed and "largest error against float64" in printed
    assert picture.read_text().startswith("<svg")
    assert main(["simulate", "causal", "--timing", "slow"]) == 2
