"""Public kernels on the simulated GPU: flash-attn-4's public interface, called with CPU tensors.

Needs the pre-release `flash-attn-4` and what it depends on, installed or in a folder that FA4FLEX_PEERS names
(pip install --target FOLDER --pre flash-attn-4).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ptxsim.doors.capture import DEVICES, capturing
from ptxsim.doors.launch import Launch

_compiled: dict[tuple[str, int], dict[str, dict[Any, Any]]] = {}
"""Kernels that FA4 has compiled here, by target and number of SMs, then by the function that caches them."""


def interface() -> ModuleType:
    """flash_attn.cute.interface; the test is skipped where it cannot be imported."""
    folder = os.environ.get("FA4FLEX_PEERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    return pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4", exc_type=ImportError)


@contextlib.contextmanager
def flash_attention(
    arch: str, on_launch: Callable[[Launch], None], sms: int | None = None
) -> Iterator[ModuleType]:
    """flash_attn.cute.interface, whose functions take CPU tensors within and launch on a GPU of `arch`.

    `sms` decides how many CTAs its persistent kernels are launched with.
    """
    fa4 = interface()
    count = sms or DEVICES[arch].sms
    environment = {"FLASH_ATTENTION_ARCH": arch.rstrip("a"), "FLASH_ATTENTION_NUM_SMS": str(count)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(capturing(arch, on_launch, count))
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", True, create=True))
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # about its own use of the DSL
        stack.enter_context(_own_caches(fa4, _compiled.setdefault((arch, count), {})))
        yield fa4


@contextlib.contextmanager
def _own_caches(fa4: ModuleType, compiled: dict[str, dict[Any, Any]]) -> Iterator[None]:
    """FA4's compiled functions are those for the simulator, and what it remembers of the device is forgotten
    before and after."""
    with contextlib.ExitStack() as stack:
        for name, function in vars(fa4).items():
            cache = getattr(function, "compile_cache", None)
            if cache is not None:
                stack.enter_context(patch.object(cache, "cache", compiled.setdefault(name, {})))
        _forget_device(fa4)
        stack.callback(_forget_device, fa4)
        yield


def _forget_device(fa4: ModuleType) -> None:
    utils = importlib.import_module("flash_attn.cute.cute_dsl_utils")
    for remembered in (
        fa4._get_device_arch,
        utils.get_device_capacity,
        utils.get_max_active_clusters,
        utils._get_device_arch_and_num_sms,
    ):
        remembered.cache_clear()
