"""Run PyTorch's tests of FlexAttention on fa4flex.flex_attention, on the CPU.

    pip install expecttest
    python scripts/torch_flex_tests.py ~/pytorch --mode eager aot_eager --out results
    python scripts/torch_flex_tests.py test_flex_attention.py --mode inductor --only causal

The argument is a checkout of PyTorch, of the installed version where possible, or its two files
test/inductor/test_flex_attention.py and test_flex_decoding.py. What a test compiles runs on fa4flex: as it is in
mode "eager", compiled with a backend of torch.compile in the others. What it calls without compiling is its
reference, and runs on torch; where a test compiles nothing, its direct calls run on fa4flex. Tests that PyTorch
skips on the CPU, gradients among them, are run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from foreign_tests import Reason, Suite, arguments, compiled, main, of_tests

MODES = ("eager", "aot_eager", "inductor")
FILES = ("test_flex_attention.py", "test_flex_decoding.py")
ON_A_GPU = ("Requires Triton", "Skip on CPU", "Requires A100")
"""How PyTorch's reasons begin for skipping, on a CPU, tests that fa4flex can run there."""

REASONS: tuple[Reason, ...] = ()


class Switch:
    """Where a call of flex_attention in a test goes."""

    direct = False  # calls that are not compiled run on fa4flex
    inside = False  # within what the test compiled
    calls = 0


def _count() -> None:
    """Runs when Dynamo compiles a call, or with the call; Dynamo takes its result for a constant."""
    Switch.calls += 1


vars(_count).update(_dynamo_marked_constant=True)


class Tests(Suite):
    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.reasons = REASONS

    def prepare(self, mode: str) -> None:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            raise SystemExit("PyTorch's tests need expecttest: pip install expecttest") from None
        _let_cpu_tests_run()
        _replace_flex_attention()
        _replace_compile(mode, self.files)
        _skip_internals(mode)

    def attempts(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        for direct in (False, True):
            yield _attempt(direct)

    def called(self) -> bool:
        return Switch.calls > 0


@contextlib.contextmanager
def _attempt(direct: bool) -> Iterator[None]:
    Switch.direct, Switch.inside, Switch.calls = direct, False, 0
    for module in list(sys.modules.values()):
        names = vars(module)
        if "DEVICE_SUPPORTS_BACKWARDS" in names:
            names["DEVICE_SUPPORTS_BACKWARDS"].items.add("cpu")
        if "TestFlexDecodingCPU" in names:
            _with_gradients(names["TestFlexDecodingCPU"])
    yield


def _with_gradients(case: Any) -> None:
    """Make tests of decoding ask for gradients and the LSE, as they do on a GPU."""
    if vars(case).get("with_gradients"):
        return
    set_up = case.setUp

    def setUp(self: Any) -> None:
        set_up(self)
        self.test_inference_only = False

    case.setUp, case.with_gradients = setUp, True


def _let_cpu_tests_run() -> None:
    from torch.testing._internal import common_device_type as devices

    def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    for name in ("skipIf", "skipUnless"):
        real = getattr(unittest, name)
        setattr(unittest, name, functools.partial(_skip, real, as_it_is))
    devices.skipCPUIf = as_it_is
    devices.largeTensorTest = as_it_is
    devices.flex_attention_supported_platform = lambda test: test
    instantiate = devices.instantiate_device_type_tests

    def on_cpu(case: type, scope: dict[str, Any], **_: Any) -> None:
        instantiate(case, scope, only_for=("cpu",))

    devices.instantiate_device_type_tests = on_cpu


def _skip(real: Any, as_it_is: Any, condition: Any, reason: str) -> Any:
    return as_it_is() if reason.startswith(ON_A_GPU) else real(condition, reason)


def _replace_flex_attention() -> None:
    import torch.nn.attention.flex_attention as flex

    import fa4flex

    reference, apply_options = flex.flex_attention, flex._apply_kernel_options

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if Switch.inside or Switch.direct:
            _count()
            return fa4flex.flex_attention(*args, **kwargs)
        return reference(*args, **kwargs)

    def with_statistics(*args: Any, return_aux: Any = None, **kwargs: Any) -> Any:
        """Options for which torch's reference returns the largest scores also on a CPU."""
        if return_aux is None and len(args) > 5:
            *args, return_aux = args
        asked = return_aux is not None and return_aux.max_scores
        given = return_aux._replace(max_scores=False) if asked else return_aux
        options = apply_options(*args, return_aux=given, **kwargs)
        return {**options, "OUTPUT_MAX": True} if asked else options

    flex.flex_attention = flex_attention
    flex._apply_kernel_options = with_statistics
    flex._validate_device = lambda *_: None  # the reference has gradients on a CPU too, if asked


def _replace_compile(mode: str, files: Sequence[Path]) -> None:
    import torch

    real = torch.compile
    way = _uncompiled if mode == "eager" else compiled(real, mode)

    def compile(model: Any = None, **options: Any) -> Any:
        if not of_tests(sys._getframe(1).f_globals, files):
            return real(model, **options)
        return _inside(way, options) if model is None else _inside(way, options)(model)

    torch.compile = compile


def _uncompiled(model: Any, **_: Any) -> Any:
    return model


def _inside(way: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    def decorate(model: Any) -> Any:
        function = way(model, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            before, Switch.inside = Switch.inside, True
            try:
                return function(*args, **kwargs)
            finally:
                Switch.inside = before

        return functools.wraps(model)(call) if hasattr(model, "__name__") else call

    return decorate


def _skip_internals(mode: str) -> None:
    """Make tests that look at what torch generates, or count its compilations, say so."""
    import torch._dynamo.testing
    import torch._higher_order_ops.flex_attention
    import torch._inductor.utils
    import torch.nn.attention.flex_attention as flex
    import torch.testing

    def skip(words: str) -> Callable[..., Any]:
        def raising(*_: Any, **__: Any) -> Any:
            raise unittest.SkipTest(words)

        return raising

    torch._inductor.utils.run_and_get_code = skip("reads the code that Inductor generates")
    torch.testing.FileCheck = skip("reads the code that Inductor generates")
    if mode == "eager":
        torch._dynamo.testing.CompileCounterWithBackend = skip("counts compilations")
        torch._dynamo.testing.EagerAndRecordGraphs = skip("reads Dynamo's graphs")
    real = flex.flex_attention_hop
    flex.flex_attention_hop = real


def _files(given: Sequence[Path]) -> list[Path]:
    found = []
    for path in given:
        found += [path] if path.is_file() else [path / "test/inductor" / name for name in FILES]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise SystemExit(f"no {', '.join(missing)}: give a checkout of PyTorch, or the files themselves")
    return [path.resolve() for path in found]


def run(given: argparse.Namespace) -> int:
    return main("torch_flex_tests", __file__, Tests(_files(given.checkout)), given)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, MODES).parse_args()))
