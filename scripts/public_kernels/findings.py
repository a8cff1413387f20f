"""Explanations of the simulator's findings in public kernels: by kernel, kind and instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """`kernel`, `kind` and `text` are patterns that are searched in the kernel's name and in the finding."""

    kernel: str
    kind: str
    text: str
    why: str


EXPLANATIONS = (
    Explanation(
        r"flash-attn-4, Blackwell|quack, Blackwell|CUTLASS",
        r"missing wait",
        r"tcgen05\.ld",
        "a register is used before tcgen05.wait::ld says that it is loaded, which the ISA forbids; hardware"
        " holds the instruction back, and the numbers are right",
    ),
    Explanation(
        r"CUTLASS: attention backward",
        r"race|tensor memory",
        r"tcgen05",
        "the warps that compute free tensor memory behind a barrier of their own; nothing tells them that"
        " the warps which add up dQ have read theirs",
    ),
    Explanation(
        r"CUTLASS: mixed-input attention, width 256",
        r"race|tensor memory",
        r"tcgen05",
        "the warps that correct free tensor memory when they are done; nothing tells them that the others'"
        " loads from it are over",
    ),
    Explanation(
        r"CUTLASS: mixed-input attention, decode",
        r"missing fence",
        r"mbarrier\.init",
        "mbarriers are initialised, and then there is a bar.sync, but no fence.mbarrier_init before TMA"
        " signals them",
    ),
    Explanation(
        r"CUTLASS: mixed-input attention, decode",
        r"race",
        r"atom\.shared",
        "four warps gather the maxima of a tile in shared memory, meet, load them and go on to the next tile;"
        " nothing keeps a fast one from adding that one's before a slow one has loaded. The slow one's"
        " probabilities then have another scale: the results are wrong",
    ),
    Explanation(
        r"CUTLASS: mixed-input attention, decode",
        r"race|uninitialised",
        r"tcgen05",
        "O is set to zero by tcgen05.st; P is handed to the products that add to O without a"
        " tcgen05.wait::st in between",
    ),
    Explanation(
        r"CUTLASS: mixed-input attention, decode",
        r"unfinished|exited",
        r"cp\.async\.bulk\.tensor",
        "the warp that stores O exits without cp.async.bulk.wait_group, and shared memory, which the stores"
        " may still read, goes with the CTA",
    ),
    Explanation(
        r"CUTLASS: Hopper attention",
        r"unfinished|exited",
        r"cp\.async\.bulk\.tensor",
        "the warp that stores O exits without cp.async.bulk.wait_group for its last stores, and shared"
        " memory, which they may still read, goes with the CTA",
    ),
    Explanation(
        r"CUTLASS: Hopper GEMM, fp8, two accumulators",
        r"missing fence",
        r"wgmma",
        "partial sums are read from the accumulators' registers, and no wgmma.fence stands between that"
        " and the next wgmma on them (PTX ISA, wgmma.fence)",
    ),
    Explanation(
        r"CUTLASS: TMA, multicast",
        r"race|unfinished",
        r"multicast::cluster",
        "one CTA waits for the mbarrier and tells the other by barrier.cluster.arrive.relaxed, which releases"
        " nothing",
    ),
    Explanation(
        r"CUTLASS: TMA, a pipeline in one warp",
        r"race",
        r"cp\.async\.bulk\.tensor",
        "the next tile is loaded into the buffer of the last one before a barrier has told that the other"
        " warps have read it: what they store may be the next tile",
    ),
    Explanation(
        r"CUTLASS: sums of a cluster, tensor memory",
        r"race|unfinished|uninitialised|exited|tensor memory",
        r"tcgen05|st\.shared|shared::cluster",
        "tcgen05.cp is waited for by tcgen05.wait::st, which is for tcgen05.st: it takes a commit to an"
        " mbarrier; all warps store the same rows; and arrivals at the cluster's barrier are relaxed",
    ),
    Explanation(
        r"CUTLASS: tcgen05, multicast, clusters of pairs",
        r"exited",
        r"tcgen05\.commit",
        "the last commits arrive at mbarriers of other CTAs of the cluster, and no barrier of the cluster"
        " keeps these from having exited",
    ),
    Explanation(
        r"CUTLASS: tcgen05, A in tensor memory",
        r"tensor memory",
        r"accesses lane 0",
        "all warps are given the address of lane 0, of which the ISA lets warp 0 alone make use; the numbers"
        " are those of each warp's own lanes",
    ),
    Explanation(
        r"flash-attn-4.*(pages of|chosen keys)|quack.*gathered|CUTLASS: tcgen05, K in slices",
        r"missing proxy fence",
        r"cp\.async\.c[ag]\.shared\.global",
        "cp.async writes by the generic proxy, wgmma and tcgen05.mma read by the async proxy; the"
        " mbarrier that cp.async signals is no proxy fence, and there is none behind it",
    ),
    Explanation(
        r"flash-attn-4.*lists of blocks",
        r"race",
        r"shared\.b8",
        "for each tile, warps write what they found into shared memory, meet, and warp 0 reads it; no second"
        " barrier keeps a fast one from writing for the next tile before that",
    ),
    Explanation(
        r"flash-attn-4, Blackwell: split keys",
        r"unfinished",
        r"cp\.async",
        "where the last part has no keys, threads of the kernel that combines skip the turns in which they"
        " would wait for its copies to shared memory, and exit with cp.async under way",
    ),
    Explanation(
        r"flash-attn-4.*combine, packed",
        r"uninitialised",
        r"ld\.shared\.b32",
        "in the last tile of a packed sequence, log-sum-exps of rows past its end are not copied to shared"
        " memory, yet each row's are loaded from there; what comes of these rows is stored nowhere",
    ),
    Explanation(
        r"flash-attn-4, Blackwell: latent",
        r"barrier",
        r"again before it has waited",
        "warps arrive at their cluster's barrier twice before they wait for it once; the ISA allows one"
        " arrival of a thread before the barrier completes",
    ),
    Explanation(
        r"flash-attn-4, Blackwell: latent vectors of chosen keys.*backward",
        r"unfinished|exited",
        r"cp\.async\.bulk\.tensor",
        "the warp that stores P (forward) or dS (backward) waits for one only before the next, and exits"
        " without cp.async.bulk.wait_group for the last",
    ),
    Explanation(
        r"flash-attn-4, Blackwell: backward",
        r"unfinished|exited",
        r"cp\.reduce\.async\.bulk",
        "the warps that add dQ exit without cp.async.bulk.wait_group for their last reductions, whose source"
        " is shared memory of the CTA",
    ),
)


def explanation(kernel: str, kind: str, text: str) -> str:
    """Reason why the finding is true, or "" where nobody has explained it."""
    for known in EXPLANATIONS:
        if re.search(known.kernel, kernel) and re.search(known.kind, kind) and re.search(known.text, text):
            return known.why
    return ""
