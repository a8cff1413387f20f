"""vLLM's platform of CPUs, which serves with the backend that it is told to.

vLLM finds it by the entry point beside this file, in each of its processes. Its own class takes CPU_ATTN
whatever --attention-backend says. FA4FLEX_CPU_OPERATORS names the folder of a release of vLLM that was built
for CPUs, for one that was not: the operators of its layers besides attention are taken from there.
"""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def platform() -> str:
    return f"{__name__}.Platform"


class Platform(CpuPlatform):
    """CPUs."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *arguments: Any, **options: Any
    ) -> str:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *arguments, **options)
        asked = attn_selector_config._asdict()
        reasons = selected_backend.get_class().validate_configuration(device_capability=None, **asked)
        if reasons:  # as the platforms of GPUs do
            raise ValueError(f"CUSTOM is not valid for this configuration: {', '.join(reasons)}")
        return str(selected_backend.get_path())

    @classmethod
    def import_kernels(cls) -> None:
        folder = os.environ.get("FA4FLEX_CPU_OPERATORS")
        if folder is None:
            super().import_kernels()
            return
        vllm.__path__.append(folder)
        super().import_kernels()
        vllm.__path__.remove(folder)
