"""Small kernels in PTX text, right as they stand, each with one way to spoil it and what is found then."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ptxsim import Result, Shape, launch
from ptxsim.run.timing import Timing

WORDS = 64
HEADER = """.version 9.0
.target {arch}
.address_size 64
.visible .entry planted(.param .u64 out)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    .shared .align 128 .b8 buffer[1024];
    .shared .align 8 .b8 bar[8];
    ld.param.b64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, buffer;
    add.s32 %r4, %r3, %r2;
    setp.eq.u32 %p1, %r1, 0;
    setp.lt.u32 %p2, %r1, 32;
"""
"""The body begins with %rd1 = out, %r1 = %tid.x, %r2 = 4 %r1, %r3 = buffer, %r4 = buffer + 4 %r1, %p1 where
thread 0, %p2 where warp 0."""
START = HEADER.count("\n") + 1
"""The line on which a body begins."""


def text(body: str, arch: str = "sm_90a") -> str:
    return f"{HEADER.format(arch=arch)}{body.strip()}\n    ret;\n}}\n"


def run(body: str, arch: str = "sm_90a", threads: int = 64, timing: str = "eager") -> tuple[Result, Tensor]:
    """The result, and the 64 words to which %rd1 points, -1 before."""
    out = torch.full((WORDS,), -1, dtype=torch.int32)
    shape, parameters = Shape((1, 1, 1), (threads, 1, 1)), struct.pack("<Q", out.data_ptr())
    timing_of = Timing(timing, int(torch.randint(1000, ())))
    return launch(text(body, arch), "planted", shape, parameters, timing=timing_of), out


@dataclass(frozen=True)
class Fault:
    """Replacing `right` by `wrong` in `body` gives findings of `kinds` (with eager timing just these), one of
    which says `says` and was noticed at an instruction that begins with `at`."""

    name: str
    kinds: frozenset[str]
    body: str
    right: str
    wrong: str = ""
    says: str = ""
    at: str = ""
    arch: str = "sm_90a"
    threads: int = 64

    @property
    def spoilt(self) -> str:
        assert self.body.count(self.right) == 1, f"{self.name}: {self.right!r} must stand there once"
        return self.body.replace(self.right, self.wrong)


def kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


EXCHANGE = """
    st.shared.b32 [%r4], %r1;
    bar.sync 0;
    xor.b32 %r5, %r4, 128;
    ld.shared.b32 %r6, [%r5];
"""
CLUSTER = EXCHANGE.replace(
    "bar.sync 0;", "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;"
)
STORE = """
    st.shared.b32 [%r4], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
"""
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;\n    @!%p3 bra WAIT;\n"
LOAD = """
    @!%p1 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 256, [bar];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r6, [%r4];
"""
ARRIVE = """
    @%p1 mbarrier.init.shared::cta.b64 [bar], 32;
    bar.sync 0;
    @%p2 mbarrier.arrive.shared::cta.b64 _, [bar];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
    @!%p3 bra WAIT;
"""
FLAG = """
    @%p2 bra SET;
LOOK:
    ld.acquire.gpu.global.b32 %r5, [%rd1];
    setp.ne.s32 %p3, %r5, 7;
    @%p3 bra LOOK;
    bra END;
SET:
    @%p1 st.release.gpu.global.b32 [%rd1], 7;
END:
"""
BRANCHES = """
    setp.lt.u32 %p3, %r1, 16;
    selp.b32 %r7, 0x0000ffff, 0xffff0000, %p3;
    @%p3 bra LOW;
    shfl.sync.idx.b32 %r6, %r1, 16, 31, %r7;
    bra END;
LOW:
    bar.warp.sync %r7;
END:
"""
TENSOR = """
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [bar], 32;
    ld.shared.b32 %r5, [bar];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r1};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r5];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
"""
USED = "    xor.b32 %r7, %r6, %r1;\n"
"""Instruction that uses what TENSOR loads."""
WAITED = "    tcgen05.wait::ld.sync.aligned;\n"
BLACKWELL = "sm_100a"

FAULTS = (
    Fault("no bar.sync", kinds("race", "uninitialised"), EXCHANGE, "    bar.sync 0;\n", at="ld.shared"),
    Fault("other count", kinds("barrier"), EXCHANGE, "bar.sync 0;", "@%p2 bar.sync 0;\n bar.sync 0, 96;"),
    Fault(
        "nobody came",
        kinds("barrier"),
        CLUSTER,
        "    barrier.cluster.arrive.aligned;\n",
        says="waits for its cluster without having arrived",
        at="barrier.cluster.wait",
    ),
    Fault("nobody wrote", kinds("uninitialised"), EXCHANGE, "[%r4], %r1;", "[%r4+512], %r1;", at="ld.shared"),
    Fault("outside", kinds("out of bounds"), EXCHANGE, "[%r4],", "[%r4+4096],", "CTA 0", "st.shared"),
    Fault("askew", kinds("misaligned"), EXCHANGE, "[%r4],", "[%r4+2],", "CTA 0", "st.shared"),
    Fault(
        "no proxy fence", kinds("missing proxy fence"), STORE, "fence.proxy.async.shared::cta;", at="cp.async"
    ),
    Fault("store under way", kinds("unfinished"), STORE, "cp.async.bulk.wait_group.read 0;", at="cp.async"),
    Fault(
        "init not announced",
        kinds("missing fence"),
        LOAD,
        "fence.mbarrier_init.release.cluster;",
        says="the mbarrier at",
    ),
    Fault("load not waited for", kinds("race", "unfinished"), LOAD, WAIT, "", "reads too early", "ld.shared"),
    Fault("fewer bytes", kinds("hang"), LOAD, "[bar], 256;\n    cp", "[bar], 260;\n    cp", "and 4 bytes"),
    Fault(
        "one too many",
        kinds("barrier"),
        ARRIVE,
        "[bar], 32;",
        "[bar], 31;",
        "32 arrivals where 31",
        "mbarrier",
    ),
    Fault("nobody arrives", kinds("hang"), ARRIVE, "@%p2 mbarrier.arrive.shared::cta.b64 _, [bar];"),
    Fault("no flag", kinds("hang"), FLAG, "@%p1 st.release.gpu.global.b32 [%rd1], 7;", says="to change"),
    Fault(
        "apart",
        kinds("divergence"),
        BRANCHES,
        "selp.b32 %r7, 0x0000ffff, 0xffff0000, %p3;",
        "mov.b32 %r7, 0xffffffff;",
        "16 lanes",
        threads=32,
    ),
    Fault(
        "never freed",
        kinds("leak"),
        TENSOR,
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;",
        says=f"PTX line {START}",
        arch=BLACKWELL,
        threads=32,
    ),
    Fault(
        "not allocated",
        kinds("tensor memory"),
        TENSOR,
        "[%r5], {%r1}",
        "[%r5+64], {%r1}",
        "columns 64 to 65",
        "tcgen05.st",
        BLACKWELL,
        32,
    ),
    Fault(
        "store not waited for",
        kinds("race"),
        TENSOR,
        "tcgen05.wait::st.sync.aligned;",
        at="tcgen05.ld",
        arch=BLACKWELL,
        threads=32,
    ),
    Fault(
        "load from tensor memory not waited for",
        kinds("race"),
        TENSOR,
        WAITED,
        at="tcgen05.dealloc",
        says="a tcgen05.ld of warp 0",
        arch=BLACKWELL,
        threads=32,
    ),
    Fault(
        "used before it is loaded",
        kinds("missing wait"),
        TENSOR.replace(WAITED, WAITED + USED),
        WAITED + USED,
        USED + WAITED,
        at="xor",
        arch=BLACKWELL,
        threads=32,
    ),
    Fault(
        "used, and nowhere waited for",
        kinds("no waits"),
        TENSOR.replace(WAITED, WAITED + USED),
        WAITED + USED,
        USED,
        at="xor",
        arch=BLACKWELL,
        threads=32,
    ),
    Fault(
        "moved, and used before it is loaded",
        kinds("missing wait"),
        TENSOR.replace(WAITED, f"    mov.b32 %r8, %r6;\n{WAITED}    xor.b32 %r7, %r8, %r1;\n"),
        f"{WAITED}    xor.b32 %r7, %r8, %r1;\n",
        f"    xor.b32 %r7, %r8, %r1;\n{WAITED}",
        at="xor",
        arch=BLACKWELL,
        threads=32,
    ),
    Fault(
        "more registers than there are",
        kinds("registers"),
        "setmaxnreg.inc.sync.aligned.u32 224;",
        "224",
        "232",
        says="66816 registers",
        at="setmaxnreg",
        threads=288,
    ),
    Fault(
        "store over an mbarrier",
        kinds("mbarrier"),
        LOAD.replace("READY:", "st.shared.b32 [%r3+1020], %r1;\nREADY:", 1),
        "[%r3+1020]",
        "[bar+4]",
        says="writes over an mbarrier",
        at="st.shared",
    ),
    Fault(
        "copy over an mbarrier",
        kinds("mbarrier", "uninitialised", "missing proxy fence"),
        LOAD.replace("[%r3], [%rd1], 256", "[%r3+768], [%rd1], 256").replace("[%r4]", "[%r4+768]"),
        "[%r3+768], [%rd1], 256",
        "[%r3+784], [%rd1], 256",
        says="writes over an mbarrier",
        at="cp.async.bulk",
    ),
    Fault(
        "copy over a store without a proxy fence",
        kinds("missing proxy fence"),
        "    st.shared.b32 [%r4], %r1;\n    fence.proxy.async.shared::cta;\n    bar.sync 0;\n" + LOAD,
        "    fence.proxy.async.shared::cta;\n",
        says="overwrites generic writes",
        at="cp.async.bulk",
    ),
    Fault(
        "initialised twice",
        kinds("mbarrier"),
        LOAD.replace(
            "fence.mbar",
            "mbarrier.inval.shared::cta.b64 [bar];\n"
            "    mbarrier.init.shared::cta.b64 [bar], 1;\n    fence.mbar",
        ),
        "    mbarrier.inval.shared::cta.b64 [bar];\n",
        says="writes over an mbarrier",
        at="mbarrier.init",
    ),
    Fault(
        "trap",
        kinds("trap"),
        "@!%p1 bra END;\n setp.eq.u32 %p3, %r1, 1;\n@%p3 trap;\nEND:",
        "%r1, 1;",
        "%r1, 0;",
    ),
)
