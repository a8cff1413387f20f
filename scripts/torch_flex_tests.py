"""Run PyTorch's tests of FlexAttention on fa4flex.flex_attention, on a CPU or a GPU.

    pip install expecttest
    python scripts/torch_flex_tests.py ~/pytorch --mode eager aot_eager --out results
    python scripts/torch_flex_tests.py test_flex_attention.py --mode inductor --only causal

The argument is a checkout of PyTorch, of the installed version where possible, or its two files
test/inductor/test_flex_attention.py and test_flex_decoding.py. What a test compiles runs on fa4flex: as it is
in mode "eager", compiled with a backend of torch.compile in the others. What it calls without compiling is
its reference, and runs on torch; where a test compiles nothing, its direct calls run on fa4flex. Tests that
PyTorch skips on a CPU, gradients among them, are run there; those of PyTorch 2.6 and before, which ask for
CUDA in every call, are rewritten for it, with 2 sequences of 2 heads and 512 tokens where 4 have 8 and 2048.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
import types
import unittest
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flex_tests_on_cpu import on_cpu
from foreign_tests import Reason, Suite, arguments, compiled, copies, main, of_tests

MODES = ("eager", "aot_eager", "inductor")
FILES = ("test_flex_attention.py", "test_flex_decoding.py")
ON_A_GPU = ("Requires Triton", "Skip on CPU", "Requires A100")
"""Beginnings of PyTorch's reasons for skipping, on a CPU, tests that fa4flex can run there."""

DEVICES = ("cpu", "cuda")
SKIPPED = r"\nnot applicable: "
REASONS = (
    # what looks at torch itself, or at a GPU
    Reason(r"reads the code that Inductor generates", "reads the code that Inductor generates"),
    Reason(r"reads Dynamo's graphs", "reads Dynamo's graphs", ("eager",)),
    Reason(
        r"gm\.sdpa_score|has no attribute 'sdpa_score0'|test_fw_bw_graph_correctness\n.*class GraphModule",
        "reads the graph of torch's operator",
    ),
    Reason(
        r"as_strided_error|AsStridedErrorTensor|dispatch_order", "registers a class with torch's operator"
    ),
    Reason(SKIPPED + ".*(FP8 is not supp|does not support bf16)", "PyTorch names a GPU's number formats"),
    Reason(SKIPPED + ".*(detected only one GPU|TMA enabled|TMA is not avail)", "needs a CUDA device"),
    Reason(r"CUDAGraph|cuda:1", "needs a CUDA device"),
    Reason(SKIPPED + ".*(FBCODE Triton|Requires TMA|flash-attn|SM100)", "is about a kernel of torch"),
    Reason(SKIPPED + ".*(Too large to run|TODO: Figure out)", "is skipped by PyTorch everywhere"),
    Reason(SKIPPED + ".*issues/162464", "is skipped by PyTorch on Linux"),
    Reason(
        r"disables_internal_compilation.*\n(?!wrong result)",
        "is about a switch of torch's own flex_attention",
    ),
    Reason(r"test_nested_tensor.*\n.*does not support Nested", "expects Dynamo's error", ("eager",)),
    # what torch cannot do, and fa4flex can
    Reason(r"test_captured_reduction.*\n.*Unexpected success", "expects torch's failure: reductions work"),
    Reason(r"test_bw_decoding_fails.*\n.*Unexpected success", "expects torch's failure: decoding trains"),
    Reason(r"none_q_indices.*\n.*not raised", "expects torch's failure: no query index is needed"),
    Reason(
        r"(InductorError|LoweringException) not raised",
        "expects a limit of Inductor, which fa4flex does not have",
    ),
    Reason(r"cant_lower_error.*\n.*not raised", "expects torch's failure: the reduction works"),
    Reason(r"test_invalid_block_size.*\n.*not raised", "expects torch's failure: blocks of 96 work"),
    Reason(
        r"(which_distinct|test_distinct_biases.*float16).*\n(wrong result|failed assertion): ",
        "the exact gradient of a bias of queries is 0, which torch's float64 reference, as it is summed "
        "in float16, misses by more than fa4flex",
    ),
    Reason(
        r"test_head_specific_gate.*float16.*\n.*Tensor: grad_bias",
        "torch's float64 reference sums the gradient of a gate of 16 bits in 16 bits, and misses the exact "
        "gradient by over 10 times as much as fa4flex",
    ),
    Reason(
        r"vs_sdpa_with_learnable_bias\n.*Ref error: \S+e-0[67], Flex eager Error: \S+e-06",
        "the exact gradients are 0: errors of rounding are compared",
    ),
    Reason(r"kernel_options_error.*\n.*not raised", "expects a limit of torch's kernels on their tiles"),
    Reason(
        r"mixed_dtype_backwards_compiled.*\n.*Backward pass with mixed",
        "expects Inductor's error: refused in fa4flex's words",
    ),
    Reason(
        r"stride_ordering_mode_paged.*order3.*\n.*(key block -1 in|BlockMap: a key block outside the map)",
        "reads pages that were never reserved: refused",
    ),
    # what PyTorch has changed since 2.6
    Reason(
        r"test_mixed_dtypes_fails\n.*ValueError not raised", "expects an error that torch raises no longer"
    ),
    Reason(
        r"test_(block_mask_attributes\n.*mismatch: 4 != 3|getitem\n.*Size\(\[1, 2, 4\]\) == \(2, 4\))",
        "expects that an index of a BlockMask drops a dimension, as in torch 2.6",
    ),
    Reason(r"TraceError: .* returned a bool", "a score_mod that returns a bool is refused in words"),
)

OF_DEVICES = {
    "cpu": (
        Reason(r"Testing CPU error message", "expects a limit of torch's kernels for CPUs"),
        Reason(
            r"test_(mixed_device|captured_wrong_device)_error.*\n.*not raised", "puts tensors on two devices"
        ),
        Reason(
            r"test_free_symbol_dynamic\n.*Expected 2 but got 3",
            "Inductor compiles the model's linear layer again for over 4,096 rows, without fa4flex too",
            ("inductor",),
        ),
        Reason(
            r"test_mask_mod_combiners\n.*'28' != '4'", "counts the blocks of 2,048 tokens, here 512 for speed"
        ),
    ),
    "cuda": (
        Reason(
            r"UnsupportedError: torch\.float(32|64) tensors on cuda",
            "GPUs multiply bfloat16 and float16 alone: refused",
        ),
        Reason(r"UnsupportedError: head_dim=\d+: rows are copied", "rows of less than 16 bytes: refused"),
        Reason(SKIPPED + ".*(Requires A100|Testing CPU error)", "is skipped by PyTorch on this GPU"),
        Reason(
            r"test_(local_window|global_tokens)_bias.*float16\n.*Tensor: grad_bias",
            "torch's float64 reference sums the gradient of a bias of 16 bits in 16 bits, and misses the "
            "exact gradient by more than fa4flex",
        ),
        Reason(
            r"test_weird_bias.*float16\n.*Tensor: grad_bias",
            "the exact gradient of a bias of queries is 0: errors of rounding are compared",
        ),
        Reason(
            r"(float16_score_(mask_)?mod5|score_mod5_float16).*\n.*Grad_Value",
            "scores of thousands, of which a float32 log-sum-exp keeps 1e-4: a fifth more than the reference "
            "rounds, whose softmax subtracts a maximum",
        ),
    ),
}


class Switch:
    """Destination of a call of flex_attention in a test."""

    direct = False  # calls that are not compiled run on fa4flex
    inside = False  # within what the test compiled
    calls = 0


def _count() -> None:
    """Runs when Dynamo compiles a call, or with the call; Dynamo takes its result for a constant."""
    Switch.calls += 1


vars(_count).update(_dynamo_marked_constant=True)


class Tests(Suite):
    def __init__(self, files: Sequence[Path], device: str) -> None:
        self.files, self.device = files, device
        self.reasons = (*REASONS, *OF_DEVICES[device])

    def prepare(self, mode: str) -> None:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            raise SystemExit("PyTorch's tests need expecttest: pip install expecttest") from None
        os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
        if self.device == "cpu":
            self.files = copies(self.files, on_cpu)
            _let_cpu_tests_run()
        _replace_flex_attention(self.device)
        _accept_positions_of_one_sequence()
        _replace_compile(mode, self.files)
        _skip_internals(mode)

    def attempts(self, case: str) -> Iterator[contextlib.AbstractContextManager[None]]:
        # what a backward pass computes anew must run where the forward pass ran
        for direct in (True,) if "selective_ac" in case else (False, True):
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
    import torch
    from torch.testing._internal import common_device_type as devices

    # What torch makes where no device is named, BlockMasks among them, would be on a GPU that is there.
    torch.accelerator.current_accelerator = lambda check_available=False: None

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


def _replace_flex_attention(device: str) -> None:
    import torch.nn.attention.flex_attention as flex

    import fa4flex

    reference, apply_options = flex.flex_attention, flex._apply_kernel_options

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        if Switch.inside or Switch.direct:
            _count()
            return fa4flex.flex_attention(*args, **kwargs)
        # Dynamo traces the reference at each call for its gradients alone, and that takes most of the time
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = not _wants_gradients((args, kwargs))
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
    if device == "cpu":
        flex._apply_kernel_options = with_statistics
        flex._validate_device = lambda *_: None  # the reference has gradients on a CPU too, if asked


def _wants_gradients(x: Any) -> bool:
    """True if a tensor requires gradients, among arguments of a call and what their closures hold."""
    if isinstance(x, dict):
        return _wants_gradients(tuple(x.values()))
    if isinstance(x, tuple):
        return any(map(_wants_gradients, x))
    if isinstance(x, functools.partial):
        return _wants_gradients((x.func, x.args, x.keywords))
    if isinstance(x, types.FunctionType):
        return _wants_gradients(tuple(inspect.getclosurevars(x).nonlocals.values()))
    return getattr(x, "requires_grad", False) is True


def _accept_positions_of_one_sequence() -> None:
    """Let pages be filled as in PyTorch 2.6, which gives the positions once for all sequences."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    assign = PagedAttention.assign

    def expanding(self: Any, batch_idx: Any, input_pos: Any, *tensors: Any) -> None:
        if input_pos.dim() == 1:
            input_pos = input_pos.expand(batch_idx.shape[0], -1)
        assign(self, batch_idx, input_pos, *tensors)

    PagedAttention.assign = expanding


def _replace_compile(mode: str, files: Sequence[Path]) -> None:
    import torch

    real = torch.compile
    way = _uncompiled if mode == "eager" else compiled(real, mode)

    def compile(model: Any = None, **options: Any) -> Any:
        if not of_tests(sys._getframe(1).f_globals, files):
            return real(model, **options)
        return _inside(way, options) if model is None else _inside(way, options)(model)

    def compile_module(self: Any, **options: Any) -> None:
        self._compiled_call_impl = _inside(way, options)(self._call_impl)

    torch.compile = compile
    torch.nn.Module.compile = compile_module


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


class _NotCounted:
    """A counter of compilations where nothing is compiled: its count equals any."""

    def __init__(self, backend: str = "") -> None:
        self.frame_count = self

    @property
    def graphs(self) -> Any:
        raise unittest.SkipTest("reads Dynamo's graphs")

    def __eq__(self, other: object) -> bool:
        return True

    def __add__(self, more: object) -> _NotCounted:
        return self

    __hash__ = None  # type: ignore[assignment]


class _NoCounts(Counter[str]):
    """A group of Dynamo's counters, each of which equals any number."""

    def __missing__(self, name: str) -> Any:
        return _NotCounted()

    def most_common(self, n: int | None = None) -> list[tuple[str, int]]:
        return []


def _skip_internals(mode: str) -> None:
    """Make tests that look at what torch generates, or count its compilations, say so."""
    import torch._dynamo.testing
    import torch._dynamo.utils
    import torch._inductor.utils
    import torch.testing

    def skip(words: str) -> Callable[..., Any]:
        def raising(*_: Any, **__: Any) -> Any:
            raise unittest.SkipTest(words)

        return raising

    torch._inductor.utils.run_and_get_code = skip("reads the code that Inductor generates")
    torch.testing.FileCheck = skip("reads the code that Inductor generates")
    if mode == "eager":
        torch._dynamo.testing.CompileCounterWithBackend = _NotCounted
        torch._dynamo.utils.counters = defaultdict(_NoCounts)
        torch._dynamo.testing.EagerAndRecordGraphs = skip("reads Dynamo's graphs")
    else:
        counter = torch._dynamo.testing.CompileCounterWithBackend
        torch._dynamo.testing.CompileCounterWithBackend = lambda _: counter(mode)


def _files(given: Sequence[Path]) -> list[Path]:
    found = []
    for path in given:
        found += [path] if path.is_file() else [path / "test/inductor" / name for name in FILES]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise SystemExit(f"no {', '.join(missing)}: give a checkout of PyTorch, or the files themselves")
    return [path.resolve() for path in found]


def _device(given: str | None) -> str:
    import torch

    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def run(given: argparse.Namespace) -> int:
    device = _device(given.device)
    if device == "cuda":
        given.memory = 0  # CUDA reserves more addresses than any machine has memory
    suite = Tests(_files(given.checkout), device)
    return main("torch_flex_tests", __file__, suite, given, ("--device", device))


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, MODES)
    parser.add_argument("--device", choices=DEVICES, help="where the tests run: on a GPU where there is one")
    return parser


if __name__ == "__main__":
    sys.exit(run(_parser().parse_args()))
