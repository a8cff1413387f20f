"""A kernel launch as data, and how it is read from what host code hands to the CUDA runtime."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ptxsim.errors import InputError, UnsupportedError
from ptxsim.ptx.nodes import WIDTHS

Dim3 = tuple[int, int, int]

MOST_THREADS = 1024
MOST_CTAS = 16
"""Per cluster, the non-portable size."""
MOST_SHARED_BYTES = 232448
"""Dynamic shared memory that a CTA may opt in to, on sm_90 and on sm_100."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    kernel        name of the entry in `ptx`
    ptx           text of the module that the entry stands in
    grid, block   CTAs, and threads of a CTA
    cluster       CTAs of a cluster; (1, 1, 1) where there are none
    shared_bytes  dynamic shared memory of a CTA
    params        the kernel's parameters in order, each at its declared alignment: the .param space.
                  Padding within structs is what lay on the host's stack
    attributes    further launch attributes by name, as the int that they hold; all are hints, but for
                  whether the launch may begin before the one before it is over (EARLY)

    Raises InputError for shapes that a GPU refuses to launch.
    """

    kernel: str
    ptx: str = field(repr=False)
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    params: bytes
    attributes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        threads = self.block[0] * self.block[1] * self.block[2]
        ctas = self.cluster[0] * self.cluster[1] * self.cluster[2]
        directives = directives_of(self.ptx, self.kernel)
        required, largest = directives.get("reqntid"), directives.get("maxntid")
        shape = f"grid {self.grid}, block {self.block}, cluster {self.cluster} of {self.kernel}"
        for wrong, rule in (
            (0 in (*self.grid, *self.block, *self.cluster), "no extent of 0"),
            (threads > MOST_THREADS, f"at most {MOST_THREADS} threads in a block"),
            (required is not None and self.block != required, f"the kernel's .reqntid {required}"),
            (largest is not None and threads > largest[0] * largest[1] * largest[2], f".maxntid {largest}"),
            (ctas > MOST_CTAS, f"at most {MOST_CTAS} CTAs in a cluster"),
            (any(g % c for g, c in zip(self.grid, self.cluster)), "a grid of whole clusters"),
            (self.shared_bytes > MOST_SHARED_BYTES, f"at most {MOST_SHARED_BYTES} bytes of shared memory"),
        ):
            if wrong:
                given = f"a launch with {shape} and {self.shared_bytes} bytes of shared memory"
                raise InputError(given, rule, "launch it as the kernel was compiled; a GPU refuses this too")


# --- what a PTX entry declares ------------------------------------------------------------------------------

_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)"
    r"(?:\s+\.ptr(?:\s+\.\w+)*?(?:\s+\.align\s+\d+)?)?\s+(?P<name>[\w$%]+)(?:\[(?P<count>\d+)\])?"
)
_DIRECTIVE = re.compile(r"\.(reqntid|maxntid|reqnctapercluster)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_SHARED = re.compile(
    r"^[ \t]*(?:\.visible\s+|\.weak\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+[\w$%]+((?:\[\d+\])*)",
    re.MULTILINE,
)


@functools.lru_cache(maxsize=64)
def _header(ptx: str, kernel: str) -> tuple[str, str]:
    """Header of an entry: the text of its parameters, and of the directives in front of its body."""
    found = re.search(rf"\.entry\s+{re.escape(kernel)}\s*(?:\(([^)]*)\))?([^{{;]*){{", ptx)
    if found is None:
        names = ", ".join(re.findall(r"\.entry\s+([\w$]+)", ptx)) or "none"
        raise InputError(f"kernel {kernel}", f"an entry of the PTX ({names})", "name one of these")
    return found[1] or "", found[2]


def parameters_of(ptx: str, kernel: str) -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of each parameter of an entry.

    They lie one after another, each at a multiple of its alignment, which is that of its type where none is
    declared (PTX ISA, "Kernel Function Parameters"). Raises UnsupportedError for textures and samplers.
    """
    text, places, end = _header(ptx, kernel)[0], [], 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        found = _PARAMETER.fullmatch(declaration)
        if found is None or found["type"] not in WIDTHS:
            raise UnsupportedError(
                f"parameter `{declaration}` of {kernel}",
                ".param, perhaps .align, a type, a name and perhaps one extent",
                "pass scalars, tensors and structs, as CuTe DSL does",
            )
        width = WIDTHS[found["type"]] // 8
        align, size = int(found["align"] or width), width * int(found["count"] or 1)
        start = -(-end // align) * align
        places.append((start, size))
        end = start + size
    return tuple(places)


def directives_of(ptx: str, kernel: str) -> dict[str, Dim3]:
    """.reqntid, .maxntid and .reqnctapercluster of an entry, missing extents as 1."""
    text = _header(ptx, kernel)[1]
    return {name: (int(x), int(y or 1), int(z or 1)) for name, x, y, z in _DIRECTIVE.findall(text)}


def target_of(ptx: str) -> str:
    """The target in the .target directive, which stands in front of everything else: sm_90a, say."""
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return found[1] if found else "no target"


@functools.lru_cache(maxsize=64)
def static_shared_bytes(ptx: str) -> int:
    """Shared memory that the module's variables take; extern arrays take none, the launch decides."""
    end = 0
    for align, kind, extents in _SHARED.findall(ptx):
        size = WIDTHS[kind] // 8
        start = -(-end // int(align or size)) * int(align or size)
        for extent in re.findall(r"\d+", extents):
            size *= int(extent)
        end = start + size
    return end


# --- what host code passes to cudaLaunchKernelExC -----------------------------------------------------------


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute: its id, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


CLUSTER = 4
"""cudaLaunchAttributeClusterDimension"""

EARLY = "programmatic_stream_serialization"
"""Attribute of a launch that may begin before the one before it is over."""
_HINTS = {2: "cooperative", 5: "cluster_scheduling", 6: EARLY}
_HINTS |= {8: "priority", 10: "memory_sync_domain", 14: "preferred_shared_carveout"}
"""Attributes that change nothing for launches that run one after another, by cudaLaunchAttributeID."""


def read_config(kernel: str, ptx: str, config: int, values: int) -> Launch:
    """The launch that a cudaLaunchConfig_t at address `config`, and the array at address `values` of pointers
    to the parameters' values, describe. Raises UnsupportedError for attributes that would change its meaning.
    """
    given = _Config.from_address(config)
    cluster: Dim3 | None = None
    attributes: dict[str, int] = {}
    for attribute in given.attributes[: given.count]:
        if attribute.id == CLUSTER:
            cluster = (attribute.value[0], attribute.value[1], attribute.value[2])
        elif attribute.id in _HINTS:
            attributes[_HINTS[attribute.id]] = attribute.value[0]
        elif attribute.id != 0 and any(attribute.value):
            raise UnsupportedError(
                f"launch attribute {attribute.id} (cudaLaunchAttributeID) of {kernel}",
                f"cluster dimensions ({CLUSTER}) or one of {sorted(_HINTS)}",
                "launch without it",
            )
    declared = directives_of(ptx, kernel).get("reqnctapercluster")
    grid, block = given.grid, given.block
    return Launch(
        kernel,
        ptx,
        (grid[0], grid[1], grid[2]),
        (block[0], block[1], block[2]),
        cluster or declared or (1, 1, 1),
        given.shared_bytes,
        read_parameters(ptx, kernel, values),
        attributes,
    )


def read_parameters(ptx: str, kernel: str, values: int) -> bytes:
    """The .param space, from the address of an array of pointers to the parameters' values."""
    places = parameters_of(ptx, kernel)
    pointers = (ctypes.c_void_p * len(places)).from_address(values) if places else ()
    block = bytearray(places[-1][0] + places[-1][1] if places else 0)
    for (start, size), pointer in zip(places, pointers, strict=True):
        block[start : start + size] = ctypes.string_at(pointer, size)
    return bytes(block)
