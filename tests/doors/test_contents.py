"""Caches of captured tensors' contents: how often they are copied to the host, and that nothing stale is
launched. Kernels are left out; CPU tensors stand for those of a GPU, and are copied as those are."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_gpu_calls import WRITTEN, Recorder, call_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from uncounted import WRITES

import fa4flex
import ptxsim
from fa4flex import Varlen, contents
from fa4flex import lower as lower_module
from fa4flex.contents import VersionedCache, on_host
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.variants import causal, document, learned_bias, sliding_window, softcap

LENGTH = 300


class Copies:
    """Stand-in for the copy to the host: lists the tensors that were copied."""

    def __init__(self) -> None:
        self.of: list[Tensor] = []
        self.made: list[Tensor] = []
        self.copying = False

    def elsewhere(self, x: Tensor) -> bool:
        return not any(x is one for one in self.made)

    def copied(self, x: Tensor) -> Tensor:
        self.of.append(x)
        self.copying = True
        self.made.append(x.detach().clone())
        self.copying = False
        return self.made[-1]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    copies = Copies()
    monkeypatch.setattr(contents, "_elsewhere", copies.elsewhere)
    monkeypatch.setattr(contents, "_copied", copies.copied)
    yield copies


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Launches forward and backward, both of a simulated GPU."""
    recorder = Recorder()
    monkeypatch.setattr(lower_module, "compile_kernel", recorder.compile)
    monkeypatch.setattr(lower_module, "compile_ahead", lambda *given: None)
    monkeypatch.setattr(engine_module, "target_of", lambda device: SM90A)
    with ptxsim.device("sm_90a"):
        yield recorder


class Readers(TorchDispatchMode):
    """Operators that are given memory of one tensor, outside of copies."""

    def __init__(self, x: Tensor, copies: Copies) -> None:
        super().__init__()
        self.memory, self.copies = x.untyped_storage().data_ptr(), copies
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = str(function)
        if not self.copies.copying and "fa4flex" not in name and "detach" not in name:
            self.names += [name for x in given if x.untyped_storage().data_ptr() == self.memory]
        return function(*args, **(kwargs or {}))


def drawn(batch: int = 2) -> Tensor:
    """Documents, int32 [batch, LENGTH]."""
    return torch.randint(0, 9, (batch, LENGTH)).sort(-1).values.to(torch.int32)


def step(attn: Any, *captured: Tensor, **options: Any) -> None:
    shape = (LENGTH, 4, 64) if options else (2, 4, LENGTH, 64)
    qkv = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    torch.autograd.grad(attn(*qkv, **options).sum(), (*qkv, *captured))


def test_a_change_is_not_copied_to_the_host(copies: Copies, recorder: Recorder) -> None:
    """Two programs capture it, forward and backward; the bias, which changes too, decides nothing."""
    ids, bias = drawn(), torch.zeros(4, 127, requires_grad=True)
    programs = [
        fa4flex.compile(score_mod=learned_bias(bias) >> softcap(9.0), mask=causal & document(ids)),
        fa4flex.compile(mask=causal & document(ids) & sliding_window(64)),
    ]
    for attn, learned in zip(programs, ([bias], [])):
        step(attn, *learned)  # the first call of its kind looks at integers
    for _ in range(3):
        ids.copy_(drawn())
        with torch.no_grad():
            bias.add_(1.0)
        recorder.tables.clear()
        with Readers(ids, copies) as readers:
            for _ in range(2):
                step(programs[0], bias)
                step(programs[1])
        assert not copies.of and not readers.names, "the host reads a tensor of the device"
        assert len(recorder.tables) == 8, "each pass has the device look whether tables stand"
    assert len(recorder.launches) == 2 * 2 + 3 * 2 * 2 * 2


def test_what_a_mask_computes_is_asked_once_per_change(copies: Copies, recorder: Recorder) -> None:
    """With gradients too, and after a call in inference mode."""
    offsets = torch.arange(2 * LENGTH).view(2, LENGTH)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        ids = offsets // 50
        return ids[b, q_idx] == ids[b, kv_idx]

    attn = fa4flex.compile(mask=mask)
    with torch.inference_mode():
        attn(*(torch.randn(2, 4, LENGTH, 64, dtype=torch.bfloat16) for _ in range(3)))
    for change in (0, 1, 0):
        offsets.mul_(1 + change)
        for _ in range(2):
            recorder.tables.clear()
            step(attn)
            assert len(recorder.tables) == 2
            assert recorder.tables[-1][0][0] is offsets, "no tensor of what the mask computes is made"
    assert not copies.of


def test_lengths_are_read_from_copies(copies: Copies, recorder: Recorder) -> None:
    attn = fa4flex.compile(mask=causal)
    for _ in range(2):
        cu = torch.tensor([0, *sorted(torch.randint(1, LENGTH, (5,)).tolist()), LENGTH], dtype=torch.int32)
        copies.of.clear()
        varlen = Varlen(cu)
        for _ in range(2):
            step(attn, varlen=varlen)
        assert copies.of and all(x is cu for x in copies.of)


def test_what_changes_is_read(copies: Copies, recorder: Recorder) -> None:
    """In place, through a view of the same memory, as optimisers do it, and by other memory: the device reads
    the tensor as it is at each call. What it finds there: tests/simulator/test_uncounted_changes.py."""
    memory = drawn(4)
    ids = memory[1:3]
    engine, call = call_of(fa4flex.compile(mask=causal & document(ids) & sliding_window(64)))

    def swapped() -> None:
        ids.data = drawn()

    changes = (
        lambda: None,
        lambda: ids.copy_(drawn()),
        lambda: memory.copy_(drawn(4)),
        lambda: memory[2].zero_(),
        lambda: torch._foreach_add_([ids], 1),
        swapped,
    )
    for change in changes:
        change()
        before = len(recorder.tables)
        engine.run(call)
        assert len(recorder.tables) == before + 1
        assert recorder.tables[-1][0][0] is ids
        read = recorder.launches[-1][10]
        assert read.full_tiles.data_ptr() == recorder.tables[-1][WRITTEN].full_tiles.data_ptr()


def test_proofs_run_on_the_host_whatever_the_default_device(copies: Copies, recorder: Recorder) -> None:
    ids = drawn()
    engine, call = call_of(fa4flex.compile(mask=causal & document(ids) & sliding_window(64)))
    with torch.device("meta"):
        engine.run(call)
    assert len(recorder.tables) == 1 and not recorder.launches[-1][10].partial_ptr.is_meta


def test_nothing_keeps_a_tensor_alive(copies: Copies, recorder: Recorder) -> None:
    ids = drawn()
    engine, call = call_of(fa4flex.compile(mask=causal & document(ids)))
    engine.run(call)
    gone = weakref.ref(ids)
    recorder.launches.clear()
    recorder.tables.clear()
    copies.of.clear()
    del ids, call
    gc.collect()
    assert gone() is None


def test_what_is_kept_is_bounded() -> None:
    tensors = [torch.zeros(n + 1) for n in range(9)]
    few: VersionedCache[int] = VersionedCache(3)
    for n, x in enumerate(tensors):
        few.keep("n", [x], n)
    assert len(few) == 3 and [few.get("n", [x]) for x in tensors[-4:]] == [None, 6, 7, 8]
    assert few.get("m", tensors[-1:]) is None
    small: VersionedCache[Tensor] = VersionedCache(99, 40, lambda x: x.nbytes)
    for x in tensors[:5]:
        small.keep(None, [x], x)  # 4, 8, 12, 16, 20 bytes
    assert [small.get(None, [x]) is x for x in tensors[:5]] == [False, False, False, True, True]
    assert small.keep(None, [tensors[0]], torch.zeros(11)).numel() == 11 and len(small) == 2, "too large"
    del x, tensors[3:]
    gc.collect()
    small.keep(None, [tensors[0]], tensors[0])
    few.keep("n", tensors, 5)
    assert len(few) == 1, "what belonged to tensors that are gone is forgotten"
    tensors[1].add_(1)
    assert few.get("n", tensors, "changed") == "changed"


def test_what_is_kept_is_what_a_list_would_keep(seed: int) -> None:
    """Tensors go, change, and are given again. The oldest entries go first, those of tensors that are gone
    before them, and neither number nor weight passes its limit."""
    draw = random.Random(seed)
    cache: VersionedCache[int] = VersionedCache(6, 40, lambda value: value)
    tensors, listed = [torch.zeros(1) for _ in range(9)], []
    names = {id(x): n for n, x in enumerate(tensors)}
    for _ in range(400):
        here = draw.sample(tensors, draw.choice((0, 1, 2)))
        key, value = draw.choice("ab"), draw.randrange(45)
        whole, versions = (key, *[names[id(x)] for x in here]), [x._version for x in here]
        match draw.choice(("keep", "keep", "keep", "get", "change", "go")):
            case "keep":
                assert cache.keep(key, here, value) == value
                if value <= 40:
                    listed = [
                        one for one in listed if one[0] != whole and set(one[0][1:]) <= {*names.values()}
                    ]
                    listed.append((whole, versions, value))
                    while len(listed) > 6 or sum(x for *_, x in listed) > 40:
                        listed.pop(0)
                    assert len(cache) == len(listed)
            case "get":
                found = [x for name, version, x in listed if name == whole and version == versions]
                assert cache.get(key, here, -1) == (found[0] if found else -1)
            case "change" if here:
                here[0].add_(1)
            case "go" if here:
                at = next(i for i, x in enumerate(tensors) if x is here[0])
                gone, new = names.pop(id(here[0])), torch.zeros(1)
                names[id(new)] = gone + 9  # with the number of the first, perhaps, once that is gone
                del here
                tensors[at] = new


def test_keeping_does_not_look_at_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    cache: VersionedCache[int] = VersionedCache(300, 300, lambda value: looked.append(value) or 1)
    tensors = [torch.zeros(1) for _ in range(300)]
    for n, x in enumerate(tensors):
        cache.keep("n", [x], n)
    assert looked == [*range(300)] and len(cache) == 300
    cache.keep("n", tensors[:1], 300)
    assert looked == [*range(301)] and len(cache) == 300
    del x, tensors[:100]
    cache.keep("m", (), 301)
    assert looked == [*range(302)] and len(cache) == 201, "those of 100 that are gone, and room for another"


@pytest.mark.parametrize(
    "data",
    [lambda x: x[:3], lambda x: x[:, :2], lambda x: x.t()],
    ids=["fewer rows", "fewer columns", "transposed"],
)
def test_other_data_in_the_same_memory(data: Callable[[Tensor], Tensor], copies: Copies) -> None:
    """torch counts no change where `.data` becomes a view of the same memory."""
    x = torch.arange(16).view(4, 4)
    first = on_host(x)
    version = x._version
    x.data = data(x.data)
    assert x._version == version and x.data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(on_host(x), x) and on_host(x) is not first


@pytest.mark.parametrize("write", WRITES)
def test_a_copy_is_of_what_there_is_now(write: str, copies: Copies) -> None:
    x = torch.randn(5)
    for _ in range(3):
        assert torch.equal(on_host(x), x)
        WRITES[write](x, torch.randn(5))


def test_threads_that_keep_values_do_not_meet() -> None:
    """Several threads make values of new keys, of which the oldest go: none finds the others' changes."""
    kept: contents.Alike[int] = contents.Alike(4, 2)
    before = sys.getswitchinterval()
    errors: list[BaseException] = []

    def make(first: int) -> None:
        try:
            for key in range(first, first + 3000):
                assert kept.made(key, (), lambda key=key: key) == key
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make, args=(10_000 * i,)) for i in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors and len(kept._found) <= 4
