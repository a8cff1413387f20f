"""Rewrite PyTorch's tests of FlexAttention that ask for a GPU so that a CPU runs them.

Up to PyTorch 2.6 the tests name the device "cuda" in each call, and skip where there is none. Newer ones are
instantiated for a device, and need no change. What is replaced is found in the syntax tree, and each kind of
replacement must be found in its file: where one is not, the file is another one than this module knows.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SIZES = {"test_flex_attention.py": {"B": (4, 2), "H": (8, 2), "S": (2048, 512)}}
"""Sizes of most tests, in their file and here: a million scores in place of 134 million, some in float64."""

DYNAMIC = ("run_dynamic_test", "run_automatic_dynamic_test")
DYNAMIC_SIZES = {"H": 4, "S": 1024}
"""Sizes of tests that count compilations, and halve S twice. Dynamo would compile again where as many heads
as sequences become fewer, and where a single block of 128 is left."""

DEVICE_STRINGS = ("cuda", "cuda:0")
CALLS = {"is_available": True, "has_triton": True, "get_device_capability": (9, 0)}
"""Results of calls that ask about the GPU: as on a GPU, or the tests would skip, or test less."""

EXPECTED = {
    "test_flex_attention.py": {
        *("device", "cuda()", "is_cuda", "inference only", "supports bfloat16"),
        *("is_available()", "has_triton()", "get_device_capability()", "B", "H", "S", *DYNAMIC),
    },
    "test_flex_decoding.py": {
        *("device", "device of pages", "supports bfloat16"),
        *("is_available()", "has_triton()", "get_device_capability()"),
    },
}


class UnknownTests(Exception):
    """A test file lacks what is to be replaced."""


class _OnCpu(ast.NodeTransformer):
    """Replaces what asks for a GPU, and counts the replacements by kind."""

    def __init__(self, sizes: dict[str, tuple[int, int]]) -> None:
        self.sizes = sizes
        self.found: Counter[str] = Counter()

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self._replaced("device", node, "cpu") if node.value in DEVICE_STRINGS else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == "PLATFORM_SUPPORTS_BF16" and isinstance(node.ctx, ast.Load):
            return self._replaced("supports bfloat16", node, True)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "is_cuda":
            self.found["is_cuda"] += 1
            node.attr = "is_cpu"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        if name in CALLS and (called.startswith("torch.cuda.") or name == "has_triton"):
            return self._replaced(f"{name}()", node, CALLS[name])
        self.generic_visit(node)
        if called == "PagedAttention" and all(keyword.arg != "device" for keyword in node.keywords):
            self.found["device of pages"] += 1  # torch's default is a GPU
            node.keywords.append(ast.keyword("device", ast.Constant("cpu")))
        if isinstance(node.func, ast.Attribute) and name == "cuda" and not node.args:
            self.found["cuda()"] += 1
            node.func.attr = "cpu"
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if ast.unparse(node) == "self.device == 'cpu'":
            # torch has no backward pass and no LSE on a CPU: the tests leave them out there
            return self._replaced("inference only", node, False)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        for i, default in enumerate(node.args.defaults):
            if node.name in DYNAMIC and ast.unparse(default) in DYNAMIC_SIZES:
                self.found[node.name] += 1
                node.args.defaults[i] = ast.Constant(DYNAMIC_SIZES[ast.unparse(default)])
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = ast.unparse(node.targets[0])
        if node.col_offset == 0 and target in self.sizes:
            theirs, here = self.sizes[target]
            if ast.unparse(node.value) == str(theirs):
                self.found[target] += 1
                node.value = ast.Constant(here)
        self.generic_visit(node)
        return node

    def _replaced(self, kind: str, node: ast.AST, value: object) -> ast.AST:
        self.found[kind] += 1
        return ast.copy_location(ast.parse(repr(value), mode="eval").body, node)


def needs_a_gpu(text: str) -> bool:
    """True if tests are written for one device that they name, and not instantiated for any."""
    return "instantiate_device_type_tests" not in text


def on_cpu(path: Path) -> str:
    """The text of a file of tests, for a CPU."""
    text = path.read_text()
    if not needs_a_gpu(text):
        return text
    rewriting = _OnCpu(SIZES.get(path.name, {}))
    tree = rewriting.visit(ast.parse(text))
    missing = EXPECTED.get(path.name, {"device"}) - set(rewriting.found)
    if missing:
        raise UnknownTests(f"{path} has nothing to replace for: {', '.join(sorted(missing))}")
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
