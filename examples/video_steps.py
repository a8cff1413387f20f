"""A video model of diffusers whose self-attention is a block map, another one at each step.

    python examples/video_steps.py                      8 frames of 16 x 16 tokens, 4 steps
    python examples/video_steps.py --frames 4 --size 8

The model is a small random Wan. Its tokens attend to the first frame and to frames nearby, the fewer the
later the step: `near` says so block by block. Text is attended to as always. Each step is timed beside the
default attention, and a map that leaves nothing out has to give the default's output. It runs on a CPU in
float32, and on a GPU in bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex.integrations.diffusers import fa4flex_attention

HEADS, WIDTH, LAYERS, TEXT = 4, 64, 2, 32


def model(device: str, dtype: torch.dtype) -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    made = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=WIDTH, in_channels=4,
        out_channels=4, text_dim=64, freq_dim=64, ffn_dim=256, num_layers=LAYERS, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():  # gates of a new model are close to 0, and would hide attention
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.to(device, dtype).eval()


def near(frames: int, tokens: int, radius: int, device: str) -> fa4flex.BlockMap:
    """A map of a video with so many tokens per frame, in blocks of half a frame: those of the first frame and
    of frames that are at most `radius` away are kept."""
    frame = torch.arange(2 * frames, device=device) // 2
    kept = ((frame[:, None] - frame).abs() <= radius) | (frame == 0)
    return fa4flex.BlockMap.from_dense(2 * kept.to(torch.uint8), tokens // 2)  # 2: whole blocks


def milliseconds(call: Callable[[], Tensor], device: str, repeats: int = 3) -> tuple[float, Tensor]:
    """The fastest of some calls, and what they gave."""
    out, times = call(), []
    for _ in range(repeats):
        began = time.perf_counter()
        out = call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times), out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--size", type=int, default=16, help="tokens along the sides of a frame")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    try:
        transformer, tokens = model(device, dtype), options.size**2
    except ImportError as error:
        print(f"{error}: pip install 'fa4flex[diffusers]'")
        return 2
    shape = (1, 4, options.frames, 2 * options.size, 2 * options.size)
    latents = torch.randn(shape, device=device, dtype=dtype)
    text = torch.randn(1, TEXT, 64, device=device, dtype=dtype)
    layers = [block.attn1 for block in transformer.blocks]  # attn2 attends to the text

    @torch.no_grad()
    def step() -> Tensor:
        return transformer(latents, torch.tensor([500], device=device), text, return_dict=False)[0]

    default, expected = milliseconds(step, device)
    print(f"{options.frames * tokens} tokens, {LAYERS} layers; the default attention takes {default:.0f} ms")
    transformer.set_attention_backend("fa4flex")
    with fa4flex_attention(blocks=near(options.frames, tokens, options.frames, device), modules=layers):
        difference = float((step() - expected).abs().max() / expected.abs().max())
    print(f"a map that leaves nothing out: {difference:.1e} off")
    for number in range(options.steps):
        blocks = near(options.frames, tokens, max(1, options.frames >> number), device)
        with fa4flex_attention(blocks=blocks, modules=layers):
            taken, out = milliseconds(step, device)
        share = float((blocks.classes > 0).float().mean())
        change = float((out - expected).norm() / expected.norm())
        print(f"step {number}: {share:4.0%} of the pairs, {taken:.0f} ms; {change:.1e} from the default")
    return 0 if difference < (2e-2 if dtype == torch.bfloat16 else 1e-5) else 1


if __name__ == "__main__":
    raise SystemExit(main())
