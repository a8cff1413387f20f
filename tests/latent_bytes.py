"""Columns of a latent row, of its bytes: each format's layout, written down once more."""

from __future__ import annotations

import struct


def e4m3(byte: int) -> float:
    """The number of an e4m3 byte: a sign, four bits of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


def bf16(raw: bytes) -> float:
    number: float = struct.unpack("<f", b"\0\0" + raw)[0]
    return number


def row_of(name: str, data: bytes, scales: bytes) -> list[float]:
    """Columns of a key, of the bytes of its row and those of its scales."""
    if name == "v3.2":
        factors = struct.unpack("<4f", data[512:528])
        rope = [bf16(data[i : i + 2]) for i in range(528, 656, 2)]
        return [e4m3(x) * factors[i // 128] for i, x in enumerate(data[:512])] + rope
    if name == "v4":
        rope = [bf16(data[i : i + 2]) for i in range(448, 576, 2)]
        return [e4m3(x) * 2.0 ** (scales[i // 64] - 127) for i, x in enumerate(data[:448])] + rope
    return [e4m3(x) for x in data]
