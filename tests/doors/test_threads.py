"""Threads that call one attention at the same time: each result is that of its call."""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # torch cannot be imported by several threads at once
import torch._inductor.compile_fx
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, later, reference
from fa4flex.contents import Alike, VersionedCache
from fa4flex.errors import EarlierError
from fa4flex.runtime.flex.compiled import Compiled

S, HEADS, THREADS = 64, 2, 4


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    """Threads take turns every 10 us."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], count: int = THREADS) -> None:
    """`work` of each number in a thread of its own, all at once. Raises what the first one raised."""
    gate, raised = threading.Barrier(count), list[BaseException]()

    def run(n: int) -> None:
        gate.wait()
        try:
            work(n)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def fresh(n: int) -> Callable[..., Any]:
    """A mask whose code nothing has seen."""
    space: dict[str, Any] = {}
    exec(f"def mask(b, h, q, kv): return q + {n} > kv * {n % 5 + 1}", space)
    return space["mask"]  # type: ignore[no-any-return]


def kinds_of_calls(mask: Any, seed: int) -> list[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Keyword arguments of calls; mask and options of the same for the formula."""
    made = torch.Generator().manual_seed(seed)
    maps = [
        BlockMap.from_dense(torch.randint(0, 3, (1, heads, 4, 4), generator=made).to(torch.uint8), 16)
        for heads in (1, HEADS)
    ]
    sinks = torch.randn(HEADS, generator=made)
    return [
        ({}, mask, {}),
        *(({"blocks": x}, x.mask(mask), {}) for x in maps),
        ({"scale": 0.7, "sinks": sinks}, mask, {"scale": 0.7, "sinks": sinks}),
    ]


@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_calls_of_threads_do_not_mix(backend: Any, seed: int) -> None:
    """New attentions for some seconds: what is kept is made while others look for it."""
    q, k, v = (torch.randn(1, HEADS, S, 16, dtype=torch.float64) for _ in "qkv")
    end, found, n = time.monotonic() + 6, collections.Counter[str](), seed % 1000
    while time.monotonic() < end and set(found) <= {"right"}:
        n += 1
        attn = fa4flex.compile(mask=fresh(n), backend=backend)
        calls = kinds_of_calls(attn.variant.mask, n)
        wanted = [reference.attention(q, k, v, None, mask, **more)[0] for _, mask, more in calls]

        def work(thread: int, attn: Any = attn, calls: Any = calls, wanted: Any = wanted) -> None:
            for which in range(thread, thread + 8):
                options, exact = calls[which % len(calls)][0], wanted[which % len(calls)]
                close = (attn(q, k, v, **options) - exact).abs().max() < 1e-9
                found["right" if close else "wrong"] += 1

        together(work)
    assert set(found) == {"right"}, f"program {n}: {found}"


def test_gradients_of_threads_do_not_mix() -> None:
    attn = fa4flex.compile(mask=fresh(5000))
    calls = kinds_of_calls(attn.variant.mask, 0)

    def gradients(attend: Callable[..., Any]) -> list[Tensor]:
        qkv = [x.clone().requires_grad_() for x in given]
        return list(torch.autograd.grad(attend(*qkv).sin().sum(), qkv))

    given = [torch.randn(1, HEADS, S, 16, dtype=torch.float64) for _ in "qkv"]
    wanted = [
        gradients(lambda q, k, v, m=mask, more=more: reference.attention(q, k, v, None, m, **more)[0])
        for _, mask, more in calls
    ]

    def work(thread: int) -> None:
        for which in range(thread, thread + 8):
            options = calls[which % len(calls)][0]
            found = gradients(lambda q, k, v, options=options: attn(q, k, v, **options))
            torch.testing.assert_close(found, wanted[which % len(calls)])

    together(work)


def test_conditions_are_told_once_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not arrived is not taken for one that did not hold, and no other one is dropped."""
    arrived = [torch.full((), later.HELD, dtype=torch.uint8) for _ in range(400)]
    for n in range(0, 400, 7):
        arrived[n].fill_(0)
    monkeypatch.setattr(
        later, "awaited", collections.deque((x, f"condition {n}", None) for n, x in enumerate(arrived))
    )
    told: list[str] = []

    def work(thread: int) -> None:
        while later.awaited:
            try:
                later.check()
            except EarlierError as error:
                told.append(str(error).split(",")[0])

    together(work)
    assert sorted(told) == sorted(f"condition {n}" for n in range(0, 400, 7))


def test_a_function_that_does_not_compile_is_replaced_for_all_threads() -> None:
    def function(x: Any) -> Any:
        torch._dynamo.graph_break()
        return x

    made = Compiled(function, None, lambda: lambda x: (x, None, None))
    results: list[Any] = []
    with pytest.warns(UserWarning, match="could not compile"):
        together(lambda n: results.append(made(n)))
    assert sorted(x[0] for x in results) == list(range(THREADS))


def test_caches_give_what_belongs_to_a_key() -> None:
    counted, alike = VersionedCache[int](8), Alike[int](8, 2)
    tensors = [torch.tensor([n]) for n in range(12)]

    def work(thread: int) -> None:
        for n in range(thread, 2000):
            x = tensors[n % 12]
            assert counted.made(n % 3, (x,), lambda n=n: n % 12 * 3 + n % 3) == n % 12 * 3 + n % 3
            assert alike.made(n % 3, (x,), lambda n=n: n % 12 * 3 + n % 3) == n % 12 * 3 + n % 3

    together(work)
