"""Weight rows to float32, one function per block format, and the dispatch between them.

`decode_row(kind, w, n, out)` reads a row of `n` weights at address `w` and writes them to `out`.
The values are those of `aprefetch.quant`: each is rounded at most once (formats with a minimum).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aprefetch.kernels.cpu.jit import inner
from aprefetch.kernels.cpu.simd import (
    band,
    bf16_16,
    bf16_at,
    bits_f32_1,
    bor,
    f16_16,
    f16_at,
    f32_at,
    f32_put,
    fma16,
    i8_16,
    i8_at,
    i32_at,
    isplat,
    isub,
    lane,
    lane_bits,
    lookup_of,
    mul16,
    nibbles_8x2,
    shl,
    shr,
    sixteen_pairs,
    splat,
    store16,
    to_f32,
    u8_16,
    u8_at,
    u32_at,
)
from aprefetch.quant.fp4 import CODE_VALUES
from aprefetch.quant.small_blocks import IQ4_NL_VALUES

__all__ = [
    "BF16",
    "F16",
    "F32",
    "MXFP4",
    "Q8_0",
    "decode_row",
    "fp4_values",
    "mxfp4_scale",
]

# GGML type ids; names in lower case below are the formats' own.
F32, F16, BF16 = 0, 1, 30
Q4_0, Q5_0, Q8_0, IQ4_NL = 2, 6, 8, 20
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 10, 11, 12, 13, 14
MXFP4, NVFP4 = 39, 40

fp4_values = lookup_of(CODE_VALUES)
_iq4_values = lookup_of(IQ4_NL_VALUES)
_single = np.float32


@inner
def mxfp4_scale(e: Any) -> Any:
    """2 ** (e - 128), subnormals for 0 and 1."""
    return bits_f32_1((e - 1) << 23 if e >= 2 else 0x200000 << e)


@inner
def _f32(w: Any, n: Any, out: Any) -> None:
    for i in range(n):
        f32_put(out + 4 * i, f32_at(w + 4 * i))


@inner
def _f16(w: Any, n: Any, out: Any) -> None:
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        store16(out + 4 * i, f16_16(w + 2 * i))
    for i in range(whole, n):
        f32_put(out + 4 * i, f16_at(w + 2 * i))


@inner
def _bf16(w: Any, n: Any, out: Any) -> None:
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        store16(out + 4 * i, bf16_16(w + 2 * i))
    for i in range(whole, n):
        f32_put(out + 4 * i, bf16_at(w + 2 * i))


@inner
def _q8_0(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 32):
        scale = splat(f16_at(w))
        store16(out, mul16(scale, to_f32(i8_16(w + 2))))
        store16(out + 64, mul16(scale, to_f32(i8_16(w + 18))))
        w += 34
        out += 128


@inner
def _q4_0(w: Any, n: Any, out: Any) -> None:
    eight = isplat(8)
    for _ in range(n // 32):
        scale = splat(f16_at(w))
        codes = u8_16(w + 2)
        store16(out, mul16(scale, to_f32(isub(band(codes, 15), eight))))
        store16(out + 64, mul16(scale, to_f32(isub(shr(codes, 4), eight))))
        w += 18
        out += 128


@inner
def _q5_0(w: Any, n: Any, out: Any) -> None:
    sixteen = isplat(16)
    for _ in range(n // 32):
        scale = splat(f16_at(w))
        high = i32_at(w + 2)
        codes = u8_16(w + 6)
        low = bor(band(codes, 15), shl(lane_bits(high), 4))
        store16(out, mul16(scale, to_f32(isub(low, sixteen))))
        # The number is signed: shifting drags its sign along, above the bits that are taken.
        upper = bor(shr(codes, 4), shl(lane_bits(high >> 16), 4))
        store16(out + 64, mul16(scale, to_f32(isub(upper, sixteen))))
        w += 22
        out += 128


@inner
def _iq4_nl(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 32):
        scale = splat(f16_at(w))
        codes = u8_16(w + 2)
        store16(out, mul16(scale, _iq4_values(codes)))
        store16(out + 64, mul16(scale, _iq4_values(shr(codes, 4))))
        w += 18
        out += 128


@inner
def _mxfp4(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 32):
        scale = splat(mxfp4_scale(u8_at(w)))
        codes = u8_16(w + 1)
        store16(out, mul16(scale, fp4_values(codes)))
        store16(out + 64, mul16(scale, fp4_values(shr(codes, 4))))
        w += 17
        out += 128


@inner
def _nvfp4_scale(e: Any) -> Any:
    """Half of an unsigned E4M3 number."""
    exponent, mantissa = (e >> 3) & 15, e & 7
    if e == 0x7F:
        return _single(0.0)
    if exponent == 0:
        return _single(mantissa) * _single(2.0**-10)
    return bits_f32_1(((exponent + 119) << 23) | (mantissa << 20))


@inner
def _nvfp4(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 64):
        for group in range(4):
            scale = splat(_nvfp4_scale(u8_at(w + group)))
            codes = nibbles_8x2(w + 4 + 8 * group)
            store16(out + 64 * group, mul16(scale, fp4_values(codes)))
        w += 36
        out += 256


@inner
def _q2_k(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 256):
        packed = u8_16(w)
        scales = mul16(splat(f16_at(w + 80)), to_f32(band(packed, 15)))
        offsets = mul16(splat(-f16_at(w + 82)), to_f32(shr(packed, 4)))
        for half in range(2):
            # Code bytes a and b hold weights 16 * (0, 2, 4, 6) and 16 * (1, 3, 5, 7) of the half.
            a, b = u8_16(w + 16 + 32 * half), u8_16(w + 32 + 32 * half)
            for j in range(4):
                to, s = out + 512 * half + 128 * j, 8 * half + 2 * j
                low, high = to_f32(band(shr(a, 2 * j), 3)), to_f32(band(shr(b, 2 * j), 3))
                store16(to, fma16(lane(scales, s), low, lane(offsets, s)))
                store16(to + 64, fma16(lane(scales, s + 1), high, lane(offsets, s + 1)))
        w += 84
        out += 1024


@inner
def _q3_k(w: Any, n: Any, out: Any) -> None:
    four, bias = isplat(4), isplat(32)
    for _ in range(n // 256):
        # The low nibbles of bytes 96.. are scales 0..7, the high ones 8..15; two bits of
        # byte 104 + s % 4 go on top of each.
        high = band(sixteen_pairs(u32_at(w + 104)), 3)
        six_bits = isub(bor(nibbles_8x2(w + 96), shl(high, 4)), bias)
        scales = mul16(splat(f16_at(w + 108)), to_f32(six_bits))
        mask_a, mask_b = u8_16(w), u8_16(w + 16)
        for half in range(2):
            a, b = u8_16(w + 32 + 32 * half), u8_16(w + 48 + 32 * half)
            for j in range(4):
                to, s, bit = out + 512 * half + 128 * j, 8 * half + 2 * j, 4 * half + j
                low = bor(band(shr(a, 2 * j), 3), shl(band(shr(mask_a, bit), 1), 2))
                store16(to, mul16(lane(scales, s), to_f32(isub(low, four))))
                low = bor(band(shr(b, 2 * j), 3), shl(band(shr(mask_b, bit), 1), 2))
                store16(to + 64, mul16(lane(scales, s + 1), to_f32(isub(low, four))))
        w += 110
        out += 1024


@inner
def _six_bit_scales(packed: Any) -> Any:
    """The eight scales in the 12 bytes at `packed`, one per byte of an integer."""
    low, high = u32_at(packed), u32_at(packed + 8)
    first = low & 0x3F3F3F3F
    return first | (((high & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)) << 32)


@inner
def _six_bit_mins(packed: Any) -> Any:
    middle, high = u32_at(packed + 4), u32_at(packed + 8)
    first = middle & 0x3F3F3F3F
    return first | ((((high >> 4) & 0x0F0F0F0F) | ((middle >> 2) & 0x30303030)) << 32)


@inner
def _q4_k(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 256):
        d, d_min = f16_at(w), f16_at(w + 2)
        scales, mins = _six_bit_scales(w + 4), _six_bit_mins(w + 4)
        for s in range(8):
            scale = splat(d * _single((scales >> (8 * s)) & 63))
            offset = splat(-(d_min * _single((mins >> (8 * s)) & 63)))
            for half in range(2):
                codes = u8_16(w + 16 + 32 * (s >> 1) + 16 * half)
                values = to_f32(band(shr(codes, 4 * (s & 1)), 15))
                store16(out + 128 * s + 64 * half, fma16(scale, values, offset))
        w += 144
        out += 1024


@inner
def _q5_k(w: Any, n: Any, out: Any) -> None:
    for _ in range(n // 256):
        d, d_min = f16_at(w), f16_at(w + 2)
        scales, mins = _six_bit_scales(w + 4), _six_bit_mins(w + 4)
        for s in range(8):
            scale = splat(d * _single((scales >> (8 * s)) & 63))
            offset = splat(-(d_min * _single((mins >> (8 * s)) & 63)))
            for half in range(2):
                codes = u8_16(w + 48 + 32 * (s >> 1) + 16 * half)
                fifth = band(shr(u8_16(w + 16 + 16 * half), s), 1)
                values = to_f32(bor(band(shr(codes, 4 * (s & 1)), 15), shl(fifth, 4)))
                store16(out + 128 * s + 64 * half, fma16(scale, values, offset))
        w += 176
        out += 1024


@inner
def _q6_k(w: Any, n: Any, out: Any) -> None:
    offset = isplat(32)
    for _ in range(n // 256):
        d = f16_at(w + 208)
        for s in range(16):
            scale = splat(d * _single(i8_at(w + 192 + s)))
            half, group = s >> 3, s & 7
            low = band(shr(u8_16(w + 64 * half + 16 * (group & 3)), 4 * (group >> 2)), 15)
            high = band(shr(u8_16(w + 128 + 32 * half + 16 * (group & 1)), group & 6), 3)
            values = isub(bor(low, shl(high, 4)), offset)
            store16(out + 64 * s, mul16(scale, to_f32(values)))
        w += 210
        out += 1024


@inner
def _decode_common(kind: Any, w: Any, n: Any, out: Any) -> None:
    if kind == F32:
        _f32(w, n, out)
    elif kind == F16:
        _f16(w, n, out)
    elif kind == BF16:
        _bf16(w, n, out)
    elif kind == Q8_0:
        _q8_0(w, n, out)
    elif kind == MXFP4:
        _mxfp4(w, n, out)
    elif kind == NVFP4:
        _nvfp4(w, n, out)
    elif kind == Q4_0:
        _q4_0(w, n, out)
    elif kind == Q5_0:
        _q5_0(w, n, out)
    elif kind == IQ4_NL:
        _iq4_nl(w, n, out)


@inner
def decode_row(kind: Any, w: Any, n: Any, out: Any) -> None:
    """Decode the row at address `w` to float32 at address `out`; `kind` is a supported type id."""
    if kind == Q2_K:
        _q2_k(w, n, out)
    elif kind == Q3_K:
        _q3_k(w, n, out)
    elif kind == Q4_K:
        _q4_k(w, n, out)
    elif kind == Q5_K:
        _q5_k(w, n, out)
    elif kind == Q6_K:
        _q6_k(w, n, out)
    else:
        _decode_common(kind, w, n, out)
