"""Attention of public kernels and of this library on a simulated GPU, and what it should be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from struct import unpack_from

import peers
import torch
from torch import Tensor

from ptxsim.doors.launch import Launch
from ptxsim.run.launch import Result, Shape, execute, module_of, program_of
from ptxsim.run.program import Program
from ptxsim.run.timing import Timing


@dataclass(frozen=True)
class Size:
    """q [batch, q_len, heads, dim], k and v [batch, kv_len, heads, dim], bf16."""

    batch: int = 1
    heads: int = 1
    q_len: int = 256
    kv_len: int = 512
    dim: int = 128


@dataclass(frozen=True, eq=False)
class Captured:
    """A launch with its tensors, which can be run again and again."""

    launch: Launch
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    causal: bool

    @property
    def program(self) -> Program:
        return program_of(self.launch.ptx, self.launch.kernel)

    def run(self, timing: str, seed: int, program: Program | None = None) -> Result:
        """Runs the launch once more, into poisoned outputs."""
        self.out.fill_(math.nan)
        at = self.launch
        shape = Shape(at.grid, at.block, at.cluster, at.shared_bytes)
        module = module_of(at.ptx)
        return execute(module, program or self.program, shape, at.params, None, Timing(timing, seed))

    def draw(self) -> None:
        """Draws other inputs."""
        for x in (self.q, self.k, self.v):
            x.normal_()

    @property
    def expected(self) -> Tensor:
        """float64 attention, aligned at the bottom right where causal."""
        q, k, v = (x.double().transpose(1, 2) for x in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            rows, columns = scores.shape[-2:]
            hidden = torch.ones(rows, columns).triu(columns - rows + 1).bool()
            scores = scores.masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    @property
    def plain_error(self) -> float:
        """Error of bf16 PyTorch in the worst element."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        same = torch.nn.functional.scaled_dot_product_attention
        mask = None
        if self.causal:
            rows, columns = q.shape[-2], k.shape[-2]
            mask = torch.ones(rows, columns).tril(columns - rows).bool()
        plain = same(q, k, v, mask).transpose(1, 2)
        return (plain.double() - self.expected).abs().max().item()

    @property
    def error(self) -> float:
        """Error of the worst element; infinite where the output has a NaN."""
        error = (self.out.double() - self.expected).abs().max().item()
        return math.inf if math.isnan(error) else error


@lru_cache
def fa4_forward(arch: str, size: Size, causal: bool, sms: int = 2) -> Captured:
    """flash-attn-4's forward kernel, compiled here, with random inputs."""
    q = torch.randn(size.batch, size.q_len, size.heads, size.dim).bfloat16()
    k, v = (torch.randn(size.batch, size.kv_len, size.heads, size.dim).bfloat16() for _ in range(2))
    seen: list[Launch] = []
    with peers.flash_attention(arch, seen.append, sms) as fa4, torch.no_grad():
        out, _ = fa4.flash_attn_func(q, k, v, causal=causal)
    (launch,) = seen
    assert out.data_ptr() in unpack_from(f"<{len(launch.params) // 8}Q", launch.params)
    return Captured(launch, q, k, v, out, causal)
