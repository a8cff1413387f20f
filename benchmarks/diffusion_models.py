"""Random Flux-like and Wan-like models of diffusers on fa4flex, beside their default attention, on a GPU.

    python benchmarks/diffusion_models.py [--models Flux] [--attention native fa4flex] [--rounds 5] [--smoke]

A model's forward pass, and its forward and backward passes, in bf16: Flux at 1024 x 1024 with 512 tokens of
text (4,608 tokens, 24 heads of 128), Wan at 480p and 81 frames (32,760 tokens, 12 heads of 128), each with
few of its layers. Times are medians of rounds in which all named attentions take turns, the first of which
others are compared with. The outputs' relative distance is printed. Names are diffusers': native,
_native_flash, _native_cudnn and others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fa4flex.integrations.diffusers  # noqa: F401  (makes the name known)
from fa4flex.bench.measure import Call, DeviceClock, interleave

KINDS = ("forward", "forward + backward")


def flux(smoke: bool) -> tuple[Any, Callable[[Any], Tensor]]:
    """A model, and its forward pass."""
    from diffusers import FluxTransformer2DModel

    side, text = (8, 16) if smoke else (64, 512)
    heads = 2 if smoke else 24
    model = FluxTransformer2DModel(
        num_layers=2, num_single_layers=4, num_attention_heads=heads, joint_attention_dim=512,
        pooled_projection_dim=256,
    )  # fmt: skip
    image = torch.randn(1, side * side, 64, device="cuda").bfloat16()
    words, pooled = torch.randn(1, text, 512, device="cuda").bfloat16(), torch.randn(1, 256, device="cuda")
    places = torch.zeros(side, side, 3, device="cuda")
    places[..., 1] += torch.arange(side, device="cuda")[:, None]
    places[..., 2] += torch.arange(side, device="cuda")

    def step(model: Any) -> Tensor:
        return model(
            image, words, pooled.bfloat16(), torch.full((1,), 0.5, device="cuda").bfloat16(),
            places.flatten(0, 1), torch.zeros(text, 3, device="cuda"), return_dict=False,
        )[0]  # fmt: skip

    return model, step


def wan(smoke: bool) -> tuple[Any, Callable[[Any], Tensor]]:
    """A model, and its forward pass."""
    from diffusers import WanTransformer3DModel

    frames, height, width = (2, 16, 16) if smoke else (21, 60, 104)
    heads = 2 if smoke else 12
    model = WanTransformer3DModel(
        num_attention_heads=heads, text_dim=512, ffn_dim=64 if smoke else 8960, num_layers=2 if smoke else 4
    )
    video = torch.randn(1, 16, frames, height, width, device="cuda").bfloat16()
    words = torch.randn(1, 512, 512, device="cuda").bfloat16()

    def step(model: Any) -> Tensor:
        return model(video, torch.tensor([500], device="cuda"), words, return_dict=False)[0]

    return model, step


MODELS = {"Flux": flux, "Wan": wan}


class OfAttentions:
    """Samples of calls, each with the model's attention that its name says."""

    def __init__(self, model: Any, names: dict[Call, str]) -> None:
        self.clock, self.model, self.names = DeviceClock(), model, names

    def time(self, call: Call, calls: int) -> float:
        self.model.set_attention_backend(self.names[call])
        return self.clock.time(call, calls)


def measure(
    name: str, made: tuple[Any, Callable[[Any], Tensor]], attentions: Sequence[str], rounds: int
) -> None:
    model, step = made[0].to("cuda", torch.bfloat16), made[1]
    with torch.no_grad():
        for parameter in model.parameters():  # gates of a new model are close to 0, and would hide attention
            parameter.add_(0.02 * torch.randn_like(parameter))

    def train() -> None:
        with torch.enable_grad():
            step(model).sum().backward()

    outs, calls, names = {}, {}, {}
    for attention in attentions:
        model.set_attention_backend(attention)
        with torch.no_grad():
            outs[attention] = step(model).float()
        for kind, call in zip(KINDS, (lambda: step(model), lambda: train())):  # calls of their own, as keys
            calls[kind, attention], names[call] = call, attention
    times = interleave(calls, OfAttentions(model, names), rounds, seconds=0.1)
    first = attentions[0]
    for kind, attention in calls:
        taken = times[kind, attention].median
        change = float((outs[attention] - outs[first]).norm() / outs[first].norm())
        print(
            f"{name:5} {kind:19} {attention:15} {1e3 * taken:8.2f} ms, "
            f"{times[kind, first].median / taken:.3f}x of {first}'s speed; outputs {change:.1e} apart",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--attention", nargs="+", default=["native", "fa4flex"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    for name in options.models:
        measure(name, MODELS[name](options.smoke), options.attention, options.rounds)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
