"""Instructions of the consumer's inner loops: reads of bytes, e4m3 in float16, and the tensor core's
product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutlass import Float32, Int32, cute

Words = list[Int32]


def read_words(address: Int32, offset: int, count: int) -> Words:
    """1, 2 or 4 words of shared memory next to each other."""
    if count == 1:
        text = f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];"
    else:
        into = ", ".join(f"{{$w{i}}}" for i in range(count))
        text = f"ld.shared.v{count}.b32 {{{into}}}, [{{$r0}}+{offset}];"
    found = cute.arch.inline_ptx(text, write_only_types=[Int32] * count, read_only_args=[address])
    return [found] if count == 1 else list(found)


def write_words(address: Int32, offset: int, words: Words) -> None:
    """4 words next to each other."""
    cute.arch.inline_ptx(
        f"st.shared.v4.b32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def widened(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 numbers as two pairs of float16: exact, and NaN is NaN."""
    low, high = cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )
    return low, high


def interleaved(first: Words, second: Words) -> Iterator[Int32]:
    """Bytes of two rows as pairs of float16, one of each row, column by column."""
    for a, b in zip(first, second, strict=True):
        for selector in (0x5140, 0x7362):
            mixed = cute.arch.inline_ptx(
                f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};",
                write_only_types=[Int32],
                read_only_args=[a, b],
            )
            yield from widened(mixed)


def multiply(acc: Sequence[Float32], a: Sequence[Int32], b: tuple[Int32, Int32]) -> list[Float32]:
    """acc + a b: 16 rows x 16, times 16 x 8 columns (PTX ISA, fragments of mma.m16n8k16)."""
    return list(
        cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
            " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )
