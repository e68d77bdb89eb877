"""Decoders of the file's block encodings, as Triton device functions.

A *column* is eight weights of a row. Every thread owns one column of a tile, for all rows and
tokens of that tile. All values are vectors `[C]` over columns: neighbouring threads load
neighbouring columns, and no value ever moves from one thread to another.

A decoder returns eight codes, a scale and an offset: weight i is `scale * code_i - offset`.

Blocks of 17, 34, 110 or 210 bytes do not start at word boundaries. Bytes are therefore fetched as
32-bit words around them and shifted into place; a word beyond the needed bytes is never touched.

MXFP4 scales above 2^65 (no trained weight comes near) are taken as infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "BLOCK_TYPES",
    "HAS_OFFSET",
    "NIBBLE_HALVES",
    "UNSCALED",
    "add_columns",
    "decode_columns",
    "load_columns",
]

F32 = tl.constexpr(0)
F16 = tl.constexpr(1)
Q8_0 = tl.constexpr(8)
Q2_K = tl.constexpr(10)
Q3_K = tl.constexpr(11)
Q4_K = tl.constexpr(12)
Q5_K = tl.constexpr(13)
Q6_K = tl.constexpr(14)
BF16 = tl.constexpr(30)
MXFP4 = tl.constexpr(39)

NIBBLE_HALVES = frozenset({39})
"""Types whose code byte j holds weights j and j + 16: a column is 4 + 4 weights, 16 apart."""

BLOCK_TYPES = frozenset({0, 1, 8, 10, 11, 12, 13, 14, 30, 39})
"""GGML type ids that `decode_columns` knows."""

HAS_OFFSET = frozenset({10, 11, 12, 13, 14})
"""Types whose weights have an offset beside the scale."""

UNSCALED = frozenset({0, 1, 30})
"""Types whose weights are the codes themselves."""


@triton.jit
def _load(at, mask, MASKED: tl.constexpr):
    """A load that costs no predicate where every element exists."""
    if MASKED:
        return tl.load(at, mask=mask, other=0)
    else:
        return tl.load(at)


@triton.jit
def _word(words, at, mask, MASKED: tl.constexpr):
    """The aligned word at byte `at`."""
    return _load(words + (at >> 2), mask, MASKED)


@triton.jit
def _funnel(low, high, shift):
    """32 bits from bit `shift` (0, 8, 16 or 24) of two consecutive words."""
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def _one_word(words, at, mask, MASKED: tl.constexpr):
    """Four bytes from any byte `at`: the words of the first and of the last of them."""
    shift = ((at & 3) << 3).to(tl.uint32)
    low = _load(words + (at >> 2), mask, MASKED)
    high = _load(words + ((at + 3) >> 2), mask, MASKED)
    return _funnel(low, high, shift)


@triton.jit
def _two_words(words, at, mask, MASKED: tl.constexpr):
    """Eight bytes from any byte `at`."""
    shift = ((at & 3) << 3).to(tl.uint32)
    a = _load(words + (at >> 2), mask, MASKED)
    b = _load(words + (at >> 2) + 1, mask, MASKED)
    c = _load(words + ((at + 7) >> 2), mask, MASKED)
    return _funnel(a, b, shift), _funnel(b, c, shift)


@triton.jit
def _half(base, at, mask, MASKED: tl.constexpr):
    """The half-precision number at the even byte `at`."""
    halves = base.to(tl.pointer_type(tl.float16))
    return _load(halves + (at >> 1), mask, MASKED).to(tl.float32)


@triton.jit
def _byte(base, at, mask, MASKED: tl.constexpr):
    return _load(base + at, mask, MASKED).to(tl.int32)


@triton.jit
def _signed(word, shift: tl.constexpr):
    """Byte `shift / 8` of a word as a signed number."""
    return ((word << (24 - shift)).to(tl.int32, bitcast=True) >> 24).to(tl.float32)


@triton.jit
def _bits(word, shift, mask: tl.constexpr):
    return ((word >> shift) & mask).to(tl.float32)


@triton.jit
def _halves_of(word):
    """The two half-precision numbers of a word, as float32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _brains_of(word):
    """The two bfloat16 numbers of a word, as float32."""
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _split_columns(x, C: tl.constexpr):
    """`[C, 4]` -> four `[C]`."""
    even, odd = tl.split(tl.reshape(x, (C, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def load_columns(row, c, mask, HALVES: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """The eight inputs of each column: `row` points at a float32 vector."""
    if HALVES:
        first = 32 * (c >> 2) + 4 * (c & 3)
        second = first + 16
    else:
        first = 8 * c
        second = first + 4
    four = tl.arange(0, 4)[None, :]
    a = _load(row + first[:, None] + four, mask[:, None], MASKED)
    b = _load(row + second[:, None] + four, mask[:, None], MASKED)
    if HALVES:  # see `_mxfp4`
        a *= 18446744073709551616.0
        b *= 18446744073709551616.0
    x0, x1, x2, x3 = _split_columns(a, C)
    x4, x5, x6, x7 = _split_columns(b, C)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def add_columns(acc, q, scale, offset, x, SCALED: tl.constexpr, OFFSET: tl.constexpr):
    """`acc` plus what columns of weights add to the dot product with their inputs.

    Every product is fused with its sum by name: left to the compiler, the choice would differ from
    kernel to kernel, and with it the last bits.
    """
    s = tl.fma(q[7], x[7], tl.fma(q[6], x[6], tl.fma(q[5], x[5], tl.fma(q[4], x[4], tl.fma(
        q[3], x[3], tl.fma(q[2], x[2], tl.fma(q[1], x[1], q[0] * x[0]))))))
    )  # fmt: skip
    if SCALED:  # noqa: SIM108  # decided when compiling
        acc = tl.fma(s, scale, acc)
    else:
        acc = acc + s
    if OFFSET:
        total = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))
        acc = tl.fma(-offset, total, acc)
    return acc


@triton.jit
def _mxfp4(base, words, row, c, mask, MASKED: tl.constexpr):
    block = row + 17 * (c >> 2)
    w = _one_word(words, block + 1 + 4 * (c & 3), mask, MASKED)
    # Two codes at a time, as the upper halves of floats: sign to bit 15, exponent and mantissa to
    # bits 8..6. Seen as float32 that is the code's value times 2^-126, subnormals included;
    # `load_columns` made up for 2^64 of it.
    low_02 = ((w << 12) & 0x80008000) | ((w << 6) & 0x01C001C0)
    low_13 = ((w << 4) & 0x80008000) | ((w >> 2) & 0x01C001C0)
    high_02 = ((w << 8) & 0x80008000) | ((w << 2) & 0x01C001C0)
    high_13 = (w & 0x80008000) | ((w >> 6) & 0x01C001C0)
    q0, q2 = _brains_of(low_02)
    q1, q3 = _brains_of(low_13)
    q4, q6 = _brains_of(high_02)
    q5, q7 = _brains_of(high_13)
    # The block's 2^(e - 127) and the missing 2^62 together, from their bits.
    bits = tl.minimum(_byte(base, block, mask, MASKED) + 62, 255) << 23
    return (q0, q1, q2, q3, q4, q5, q6, q7), bits.to(tl.float32, bitcast=True)


@triton.jit
def _signed4(w):
    return _signed(w, 0), _signed(w, 8), _signed(w, 16), _signed(w, 24)


@triton.jit
def _q8_0(base, words, row, c, mask, MASKED: tl.constexpr):
    block = row + 34 * (c >> 2)
    a, b = _two_words(words, block + 2 + 8 * (c & 3), mask, MASKED)
    q0, q1, q2, q3 = _signed4(a)
    q4, q5, q6, q7 = _signed4(b)
    return (q0, q1, q2, q3, q4, q5, q6, q7), _half(base, block, mask, MASKED)


@triton.jit
def _codes(a, b, MASK: tl.constexpr):
    """Codes in the low bits of each byte of two words."""
    return (
        _bits(a, 0, MASK),
        _bits(a, 8, MASK),
        _bits(a, 16, MASK),
        _bits(a, 24, MASK),
        _bits(b, 0, MASK),
        _bits(b, 8, MASK),
        _bits(b, 16, MASK),
        _bits(b, 24, MASK),
    )


@triton.jit
def _q2_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, i = row + 84 * (c >> 5), 8 * (c & 31)
    at = block + 16 + 32 * (i >> 7) + (i & 31)
    shift = (2 * ((i & 127) >> 5)).to(tl.uint32)
    a, b = _word(words, at, mask, MASKED) >> shift, _word(words, at + 4, mask, MASKED) >> shift
    scales = _byte(base, block + (i >> 4), mask, MASKED)
    d = _half(base, block + 80, mask, MASKED) * (scales & 15).to(tl.float32)
    m = _half(base, block + 82, mask, MASKED) * (scales >> 4).to(tl.float32)
    return _codes(a, b, 3), d, m


@triton.jit
def _q3_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, i = row + 110 * (c >> 5), 8 * (c & 31)
    n, j, w, g = i >> 7, (i & 127) >> 5, i & 31, i >> 4
    a, b = _two_words(words, block + 32 + 32 * n + w, mask, MASKED)
    h, k = _two_words(words, block + w, mask, MASKED)
    low, high = (2 * j).to(tl.uint32), (4 * n + j).to(tl.uint32)
    a = ((a >> low) & 0x03030303) | (((h >> high) & 0x01010101) << 2)
    b = ((b >> low) & 0x03030303) | (((k >> high) & 0x01010101) << 2)
    four = (_byte(base, block + 96 + (g & 7), mask, MASKED) >> (4 * (g >> 3))) & 15
    two = (_byte(base, block + 104 + (g & 3), mask, MASKED) >> (2 * (g >> 2))) & 3
    d = _half(base, block + 108, mask, MASKED) * (four + 16 * two - 32).to(tl.float32)
    return _codes(a, b, 7), d, 4 * d  # a set mask bit means "no minus 4"


@triton.jit
def _six_bits(base, block, g, mask, MASKED: tl.constexpr):
    """Scale and min number `g` of the 12 bytes that Q4_K and Q5_K share."""
    t = g & 3
    low = _byte(base, block + 4 + t, mask, MASKED)
    middle = _byte(base, block + 8 + t, mask, MASKED)
    high = _byte(base, block + 12 + t, mask, MASKED)
    sc = tl.where(g < 4, low & 63, (high & 15) | ((low >> 6) << 4))
    mn = tl.where(g < 4, middle & 63, (high >> 4) | ((middle >> 6) << 4))
    d = _half(base, block, mask, MASKED) * sc.to(tl.float32)
    m = _half(base, block + 2, mask, MASKED) * mn.to(tl.float32)
    return d, m


@triton.jit
def _q4_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, i = row + 144 * (c >> 5), 8 * (c & 31)
    g = i >> 5
    at = block + 16 + 32 * (i >> 6) + (i & 31)
    shift = (4 * (g & 1)).to(tl.uint32)
    a, b = _word(words, at, mask, MASKED) >> shift, _word(words, at + 4, mask, MASKED) >> shift
    d, m = _six_bits(base, block, g, mask, MASKED)
    return _codes(a, b, 15), d, m


@triton.jit
def _q5_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, i = row + 176 * (c >> 5), 8 * (c & 31)
    g = i >> 5
    at = block + 48 + 32 * (i >> 6) + (i & 31)
    shift = (4 * (g & 1)).to(tl.uint32)
    a, b = _word(words, at, mask, MASKED) >> shift, _word(words, at + 4, mask, MASKED) >> shift
    at = block + 16 + (i & 31)
    fifth = g.to(tl.uint32)
    h, k = _word(words, at, mask, MASKED) >> fifth, _word(words, at + 4, mask, MASKED) >> fifth
    a = (a & 0x0F0F0F0F) | ((h & 0x01010101) << 4)
    b = (b & 0x0F0F0F0F) | ((k & 0x01010101) << 4)
    d, m = _six_bits(base, block, g, mask, MASKED)
    return _codes(a, b, 31), d, m


@triton.jit
def _q6_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, i = row + 210 * (c >> 5), 8 * (c & 31)
    n, w = i >> 7, i & 127
    a, b = _two_words(words, block + 64 * n + (w & 63), mask, MASKED)
    h, k = _two_words(words, block + 128 + 32 * n + (w & 31), mask, MASKED)
    low, high = (4 * (w >> 6)).to(tl.uint32), (2 * (w >> 5)).to(tl.uint32)
    a = ((a >> low) & 0x0F0F0F0F) | (((h >> high) & 0x03030303) << 4)
    b = ((b >> low) & 0x0F0F0F0F) | (((k >> high) & 0x03030303) << 4)
    scale = _byte(base, block + 192 + (i >> 4), mask, MASKED)
    scale = tl.where(scale >= 128, scale - 256, scale).to(tl.float32)
    d = _half(base, block + 208, mask, MASKED) * scale
    return _codes(a, b, 63), d, 32 * d


@triton.jit
def _two_bytes_each(words, row, c, mask, HALF: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    at = (row >> 2) + 4 * c
    four = tl.arange(0, 4)[None, :]
    w = _load(words + at[:, None] + four, mask[:, None], MASKED)
    a, b, d, e = _split_columns(w, C)
    if HALF:
        q0, q1 = _halves_of(a)
        q2, q3 = _halves_of(b)
        q4, q5 = _halves_of(d)
        q6, q7 = _halves_of(e)
    else:
        q0, q1 = _brains_of(a)
        q2, q3 = _brains_of(b)
        q4, q5 = _brains_of(d)
        q6, q7 = _brains_of(e)
    return q0, q1, q2, q3, q4, q5, q6, q7


@triton.jit
def _f32(words, row, c, mask, MASKED: tl.constexpr, C: tl.constexpr):
    floats = words.to(tl.pointer_type(tl.float32))
    at = floats + ((row >> 2) + 8 * c)[:, None] + tl.arange(0, 4)[None, :]
    q0, q1, q2, q3 = _split_columns(_load(at, mask[:, None], MASKED), C)
    q4, q5, q6, q7 = _split_columns(_load(at + 4, mask[:, None], MASKED), C)
    return q0, q1, q2, q3, q4, q5, q6, q7


@triton.jit
def decode_columns(base, row, c, mask, FORMAT: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """Codes, scale and offset of columns `c [C]` of one row.

    `base` is a uint8 pointer that is a multiple of 4, `row` the row's byte offset from it (a
    scalar), `mask [C]` the columns that exist (looked at if `MASKED`).
    """
    words = base.to(tl.pointer_type(tl.uint32))
    if FORMAT == MXFP4:
        q, scale = _mxfp4(base, words, row, c, mask, MASKED)
        offset = scale
    elif FORMAT == Q8_0:
        q, scale = _q8_0(base, words, row, c, mask, MASKED)
        offset = scale
    elif FORMAT == Q2_K:
        q, scale, offset = _q2_k(base, words, row, c, mask, MASKED)
    elif FORMAT == Q3_K:
        q, scale, offset = _q3_k(base, words, row, c, mask, MASKED)
    elif FORMAT == Q4_K:
        q, scale, offset = _q4_k(base, words, row, c, mask, MASKED)
    elif FORMAT == Q5_K:
        q, scale, offset = _q5_k(base, words, row, c, mask, MASKED)
    elif FORMAT == Q6_K:
        q, scale, offset = _q6_k(base, words, row, c, mask, MASKED)
    elif FORMAT == F32:
        q = _f32(words, row, c, mask, MASKED, C)
        scale, offset = 1.0, 0.0
    elif FORMAT == F16:
        q = _two_bytes_each(words, row, c, mask, True, MASKED, C)
        scale, offset = 1.0, 0.0
    else:
        tl.static_assert(FORMAT == BF16, "no decoder for this block format")
        q = _two_bytes_each(words, row, c, mask, False, MASKED, C)
        scale, offset = 1.0, 0.0
    return q, scale, offset
