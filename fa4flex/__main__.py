"""The command line: `python -m fa4flex {doctor,demo,draw,show,explain,check,accuracy,plan-parallel,bench,
simulate,first-light}`.

Only bench and first-light need a GPU.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import fa4flex
from fa4flex.accuracy.command import add_options as add_accuracy_options
from fa4flex.bench.options import add_options
from fa4flex.errors import Fa4flexError, InputError
from fa4flex.first_light.command import add_options as add_first_light_options
from fa4flex.selection import NAMING, parameters_of, select
from fa4flex.simulate import add_options as add_simulator_options

if TYPE_CHECKING:
    from fa4flex.api import Attention


def compiled(arguments: argparse.Namespace) -> Attention:
    """The attention that the command line names."""
    return fa4flex.compile(**select(arguments.variant, parameters_of(arguments.extra)))


# --- commands: each prints, and returns the exit status ----------------------------------------------------


def doctor(arguments: argparse.Namespace) -> int:
    """Facts for a bug report: versions, what runs here and why, cache, variables, and a self-check."""
    import torch

    from fa4flex.bench.environment import version_of
    from fa4flex.doctor import devices, kept_kernels, run_self_checks, variables

    print(f"fa4flex       {version_of('fa4flex')}")
    print(f"python        {platform.python_version()} on {platform.platform()}")
    print(f"torch         {torch.__version__}, {torch.get_num_threads()} threads")
    compiler = {
        name: version_of(name) or "not installed" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    }
    print(f"compiler      {', '.join(f'{name} {result}' for name, result in compiler.items())}")
    for name, purpose in (
        ("sympy", "algebra of masks"), ("networkx", "hoisting"), ("matplotlib", "attn.mask.plot"),
        ("transformers", 'attn_implementation="fa4flex"'), ("attn_gym", "tests against its catalogue"),
        ("nbclient", "running the notebooks"),
    ):  # fmt: skip
        result = version_of(name)
        print(f"{name:<13} {result}" if result else f"{name:<13} not installed (only needed for: {purpose})")
    print()
    for line in devices():
        print(line)
    print(f"cache         {kept_kernels()}")
    print(f"variables     {', '.join(variables()) or 'none set'}\n")
    return 0 if run_self_checks() else 1


def demo(arguments: argparse.Namespace) -> int:
    """Long context in little memory, and Hugging Face models; two minutes on two cores."""
    from fa4flex.demo import main as run

    return run()


def draw(arguments: argparse.Namespace) -> int:
    """The mask as text: # full, + partial, . empty."""
    if arguments.tile is not None and len(arguments.tile) > 2:
        value = f"--tile {' '.join(map(str, arguments.tile))}"
        raise InputError(value, "one or two numbers (queries, keys)", "e.g. --tile 64 128")
    tile = None if arguments.tile is None else (arguments.tile[0], arguments.tile[-1])
    print(compiled(arguments).mask.draw(arguments.size, arguments.kv_len, tile))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """The program at one stage, each line with the user's line it came from."""
    print(compiled(arguments).source(arguments.stage))
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """In words: what was composed, what was proved, what is evaluated and why."""
    from fa4flex.view.explain import explain as described

    q_len, kv_len = arguments.q_len, arguments.kv_len
    width = {} if arguments.head_dim is None else {"head_dim": arguments.head_dim}
    print(described(compiled(arguments).program, q_len, kv_len or q_len, arguments.arch, **width))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Forward and backward on random inputs against the dense float64 formula; status 1 on disagreement."""
    from fa4flex.check import check as compare

    report = compare(compiled(arguments), arguments.q_len, arguments.kv_len, arguments.seed)
    print(report)
    return 0 if report.passed else 1


def accuracy(arguments: argparse.Namespace) -> int:
    """Errors of 16, 8 and 4 bits on tensors that are hard for them, or on yours, against float64."""
    from fa4flex.accuracy.command import run

    return run(arguments)


def plan_parallel(arguments: argparse.Namespace) -> int:
    """Estimated traffic and time of a sequence spread over many GPUs."""
    from fa4flex.parallel.predict import Machine, count_of, ranks_of, report
    from fa4flex.parallel.traffic import Model

    if arguments.heads % arguments.kv_heads:
        value = f"--heads {arguments.heads} --kv-heads {arguments.kv_heads}"
        raise InputError(value, "query heads a multiple of KV heads", "e.g. --heads 32 --kv-heads 8")
    machine = Machine(arguments.tflops * 1e12, arguments.link * 1e9)
    model = Model(arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.head_dim)
    print(report(compiled(arguments), count_of(arguments.tokens), ranks_of(arguments.ranks), machine, model))
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """Times and errors beside every installed peer, on a GPU; status 1 where a target is missed."""
    if "random" in arguments.suite:
        from fa4flex.bench.random_suite import run
    else:
        from fa4flex.bench.command import run

    return run(arguments)


def simulate(arguments: argparse.Namespace) -> int:
    """The GPU kernel of a variant, run on the CPU; status 1 where it is wrong, races or hangs."""
    from fa4flex.simulate import run

    return run(compiled(arguments), arguments)


def first_light(arguments: argparse.Namespace) -> int:
    """All kernels checked and timed on this GPU, in ten minutes; one report to attach to an issue."""
    from fa4flex.first_light.command import run

    return run(arguments)


# --- the parser --------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fa4flex", description=f"{__doc__}\n{NAMING}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fa4flex {fa4flex.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = functools.partial(_command, commands)
    add(doctor, variant=False)
    add(demo, variant=False)
    size: dict[str, Any]
    size, same = {"type": int, "action": Positive, "metavar": "N"}, "keys (default: as many as queries)"
    drawing = add(draw)
    drawing.add_argument("--size", **size, help="queries (default: what the variant implies, or 2048)")
    drawing.add_argument("--kv-len", **size, help=same)
    drawing.add_argument("--tile", **size, nargs="+", help="queries and keys per character")
    stages = "trace (default), facts, gradient, flex; of GPU kernels plan, forward, backward or ptx"
    add(show).add_argument("--stage", default="trace", help=stages)
    explaining, checking = add(explain), add(check)
    explaining.add_argument("--q-len", **size, default=4096, help="queries (default 4096)")
    explaining.add_argument("--kv-len", **size, help=same)
    explaining.add_argument("--arch", help="describe the kernel of a GPU: sm_90a, sm_100a, ...")
    explaining.add_argument("--head-dim", **size, help="of that kernel (default 128)")
    checking.add_argument("--q-len", **size, default=200, help="queries (default 200)")
    checking.add_argument("--kv-len", **size, help=same)
    seed = "of the random inputs (default 0)"
    checking.add_argument("--seed", type=int, metavar="N", default=0, help=seed)
    add_accuracy_options(add(accuracy, variant=False))
    planning = add(plan_parallel)
    planning.add_argument("--ranks", default="8", help="8, 8,64 or 8..1024 (default 8)")
    planning.add_argument(
        "--tokens", default="128k", help="queries, and keys: 65536, 64k or 1M (default 128k)"
    )
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        planning.add_argument(f"--{name}", **size, default=default, help=f"(default {default})")
    planning.add_argument(
        "--tflops", type=float, action=Positive, default=570.0, help="of a kernel, in 1e12 / s (default 570)"
    )
    planning.add_argument(
        "--link",
        type=float,
        action=Positive,
        default=281.0,
        help="into a rank, in GB/s (default 281)",
    )
    add_options(add(bench, variant=False))
    add_simulator_options(add(simulate))
    add_first_light_options(add(first_light, variant=False))
    return parser


class Positive(argparse.Action):
    """A size or a rate, which is above 0."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        for value in values if isinstance(values, list) else [values]:
            if not 0 < value < math.inf:
                argument = f"{option} {value:g}"
                raise InputError(argument, "a positive number", f"leave {option} out, or give another one")
        setattr(namespace, self.dest, values)


def _command(
    commands: Any, function: Callable[[argparse.Namespace], int], variant: bool = True
) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").strip()
    epilog = (
        "Parameters of a named family are passed as options: draw sliding_window --window 3"
        if variant
        else None
    )
    parser: argparse.ArgumentParser = commands.add_parser(
        function.__name__.replace("_", "-"),
        help=summary,
        description=summary,
        epilog=epilog,
        allow_abbrev=False,
    )
    parser.set_defaults(run=function)
    if variant:
        parser.add_argument("variant", metavar="VARIANT", help="see python -m fa4flex --help")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 well, 1 a check failed, 2 the request does not fit."""
    parser = _parser()
    try:
        arguments, arguments_extra = parser.parse_known_args(argv)
        arguments.extra = arguments_extra
        if arguments_extra and not hasattr(arguments, "variant"):
            raise InputError(f"arguments {' '.join(arguments_extra)!r}", "none", "see --help")
        return int(arguments.run(arguments))
    except Fa4flexError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
