"""Report of a simulated launch: findings and cost, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ptxsim.run.counts import cycles, roles, shared_memory
from ptxsim.run.launch import Result
from ptxsim.watch.findings import Place

NAME = 48
"""Letters of a kernel's name that are shown."""


def text(result: Result, told: Collection[Place] = ()) -> str:
    """Findings first, then each role's instructions and how busy each unit would be. Those that were `told`
    of an earlier launch of the kernel are counted alone."""
    grid, block, cluster = (
        "x".join(map(str, x)) for x in (result.shape.grid, result.shape.block, result.shape.cluster)
    )
    lines = [
        f"{result.kernel[:NAME]} on {result.arch}: grid {grid}, block {block}, cluster {cluster}, "
        f"{result.seconds:.2f} s"
    ]
    new = [finding for finding in result.findings if finding.place not in told]
    lines += [f"  {line}" for finding in new for line in str(finding).splitlines()]
    again = (
        f", {len(result.findings) - len(new)} of them as before" if len(new) < len(result.findings) else ""
    )
    lines.append(f"  findings: {len(result.findings) or 'none'}{again}")
    if result.remarks:
        lines += [f"  remark: {line}" for line in str(result.remarks[0]).splitlines()]
        lines.append(f"  remarks: {len(result.remarks)}, the first of them above")
    for role in roles(result):
        warps = f"warps {role.warps[0]}-{role.warps[-1]}" if len(role.warps) > 1 else f"warp {role.warps[0]}"
        lines.append(f"  {role.name}, {warps}: {_most(role.counts)}")
    busy = ", ".join(f"{unit} {clocks:,.0f}" for unit, clocks in cycles(result).items())
    lines.append(f"  clocks of one multiprocessor: {busy}")
    moved = [f"{what} {clocks:,.0f}" for what, clocks in shared_memory(result).items() if clocks]
    if moved:
        lines.append(f"  of shared memory: {', '.join(moved)}")
    return "\n".join(lines)


def _most(counts: Counter[str]) -> str:
    kept = [(kind, number) for kind, number in counts.most_common() if kind != "other"]
    return ", ".join(f"{kind} {number:,}" for kind, number in kept[:6])
