"""Launches of attention, this package's and a public one's, taken on a machine without a GPU."""

from __future__ import annotations

import os
import struct

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from peers import flash_attention

import fa4flex
from ptxsim.active import simulated
from ptxsim.doors.capture import capturing
from ptxsim.doors.launch import Launch


def test_attention_of_this_package_reaches_the_launch() -> None:
    q, k, v = (torch.randn(2, 3, 128, 64).bfloat16() for _ in range(3))
    seen: list[Launch] = []
    with capturing("sm_90a", seen.append), simulated("sm_90a"):
        out = fa4flex.compile()(q, k, v)
    (found,) = seen
    assert found.block[0] >= 256 and found.shared_bytes > 0
    for x in (q, k, v, out):
        assert struct.pack("<Q", x.data_ptr()) in found.params


def test_flash_attention_reaches_the_launch() -> None:
    seen: list[Launch] = []
    q, k, v = (torch.randn(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    for _ in range(2):  # the second time, with what was compiled the first time
        with flash_attention("sm_90a", seen.append) as fa4:
            out, _ = fa4.flash_attn_func(q, k, v, causal=True)
        for x in (q, k, v, out):
            assert struct.pack("<Q", x.data_ptr()) in seen[-1].params
    assert seen[0].ptx is seen[1].ptx and seen[0].block == seen[1].block
    assert not torch.empty(0).is_cuda and "FLASH_ATTENTION_ARCH" not in os.environ
