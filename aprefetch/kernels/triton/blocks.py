"""Decoders of the file's block encodings, as Triton device functions.

A *column* is eight weights of a row. Every thread owns one column of a tile, for all rows and
tokens of that tile. All values are vectors `[C]` over columns: neighbouring threads load
neighbouring columns, and no value ever moves from one thread to another.

A decoder returns eight codes, a scale and an offset: weight i is `scale * code_i - offset`.

Blocks of 17, 34, 110 or 210 bytes do not start at word boundaries. Bytes are therefore fetched as
32-bit words around them and shifted into place; a word beyond the needed bytes is never touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "BLOCK_TYPES",
    "CODE_FACTOR",
    "HAS_OFFSET",
    "NIBBLE_HALVES",
    "decode_columns",
    "dot_columns",
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

CODE_FACTOR = {39: 32768.0}
"""What decoded codes must be multiplied by, where it is not 1."""


@triton.jit
def _word(words, at, mask):
    """The aligned word at byte `at`."""
    return tl.load(words + (at >> 2), mask=mask, other=0)


@triton.jit
def _funnel(low, high, shift):
    """32 bits from bit `shift` (0, 8, 16 or 24) of two consecutive words."""
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def _one_word(words, at, mask):
    """Four bytes from any byte `at`."""
    shift = ((at & 3) << 3).to(tl.uint32)
    low = tl.load(words + (at >> 2), mask=mask, other=0)
    high = tl.load(words + (at >> 2) + 1, mask=mask & (shift != 0), other=0)
    return _funnel(low, high, shift)


@triton.jit
def _two_words(words, at, mask):
    """Eight bytes from any byte `at`."""
    shift = ((at & 3) << 3).to(tl.uint32)
    a = tl.load(words + (at >> 2), mask=mask, other=0)
    b = tl.load(words + (at >> 2) + 1, mask=mask, other=0)
    c = tl.load(words + (at >> 2) + 2, mask=mask & (shift != 0), other=0)
    return _funnel(a, b, shift), _funnel(b, c, shift)


@triton.jit
def _half(base, at, mask):
    """The half-precision number at the even byte `at`."""
    halves = base.to(tl.pointer_type(tl.float16))
    return tl.load(halves + (at >> 1), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _byte(base, at, mask):
    return tl.load(base + at, mask=mask, other=0).to(tl.int32)


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
def load_columns(row, c, mask, HALVES: tl.constexpr, C: tl.constexpr):
    """The eight inputs of each column: `row` points at a float32 vector."""
    if HALVES:
        first = 32 * (c >> 2) + 4 * (c & 3)
        second = first + 16
    else:
        first = 8 * c
        second = first + 4
    four = tl.arange(0, 4)[None, :]
    a = tl.load(row + first[:, None] + four, mask=mask[:, None], other=0.0)
    b = tl.load(row + second[:, None] + four, mask=mask[:, None], other=0.0)
    x0, x1, x2, x3 = _split_columns(a, C)
    x4, x5, x6, x7 = _split_columns(b, C)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def dot_columns(q, scale, offset, x, FACTOR: tl.constexpr, OFFSET: tl.constexpr):
    """What columns of weights add to the dot product with their inputs.

    `FACTOR`: a power of two that the codes lack (`CODE_FACTOR`). It is not part of the scale, as
    the largest scales have no room for it.
    """
    s = q[0] * x[0]
    s += q[1] * x[1]
    s += q[2] * x[2]
    s += q[3] * x[3]
    s += q[4] * x[4]
    s += q[5] * x[5]
    s += q[6] * x[6]
    s += q[7] * x[7]
    if FACTOR != 1:
        s *= FACTOR
    s *= scale
    if OFFSET:
        s -= offset * (x[0] + x[1] + x[2] + x[3] + x[4] + x[5] + x[6] + x[7])
    return s


@triton.jit
def _mxfp4(base, words, row, c, mask):
    block = row + 17 * (c >> 2)
    w = _one_word(words, block + 1 + 4 * (c & 3), mask)
    # Two codes at a time become halves: sign to bit 15, exponent and mantissa to bits 11..9.
    # That is the code's value times 2^-14, subnormals included.
    low_02 = ((w << 12) & 0x80008000) | ((w << 9) & 0x0E000E00)
    low_13 = ((w << 4) & 0x80008000) | ((w << 1) & 0x0E000E00)
    high_02 = ((w << 8) & 0x80008000) | ((w << 5) & 0x0E000E00)
    high_13 = (w & 0x80008000) | ((w >> 3) & 0x0E000E00)
    q0, q2 = _halves_of(low_02)
    q1, q3 = _halves_of(low_13)
    q4, q6 = _halves_of(high_02)
    q5, q7 = _halves_of(high_13)
    e = _byte(base, block, mask)
    # 2^(e - 128) from its bits: e = 0 and 1 are subnormal numbers.
    bits = tl.where(e >= 2, (e - 1) << 23, 0x200000 * (e + 1))
    return (q0, q1, q2, q3, q4, q5, q6, q7), bits.to(tl.float32, bitcast=True)


@triton.jit
def _signed4(w):
    return _signed(w, 0), _signed(w, 8), _signed(w, 16), _signed(w, 24)


@triton.jit
def _q8_0(base, words, row, c, mask):
    block = row + 34 * (c >> 2)
    a, b = _two_words(words, block + 2 + 8 * (c & 3), mask)
    q0, q1, q2, q3 = _signed4(a)
    q4, q5, q6, q7 = _signed4(b)
    return (q0, q1, q2, q3, q4, q5, q6, q7), _half(base, block, mask)


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
def _q2_k(base, words, row, c, mask):
    block, i = row + 84 * (c >> 5), 8 * (c & 31)
    at = block + 16 + 32 * (i >> 7) + (i & 31)
    shift = (2 * ((i & 127) >> 5)).to(tl.uint32)
    a, b = _word(words, at, mask) >> shift, _word(words, at + 4, mask) >> shift
    scales = _byte(base, block + (i >> 4), mask)
    d = _half(base, block + 80, mask) * (scales & 15).to(tl.float32)
    m = _half(base, block + 82, mask) * (scales >> 4).to(tl.float32)
    return _codes(a, b, 3), d, m


@triton.jit
def _q3_k(base, words, row, c, mask):
    block, i = row + 110 * (c >> 5), 8 * (c & 31)
    n, j, w, g = i >> 7, (i & 127) >> 5, i & 31, i >> 4
    a, b = _two_words(words, block + 32 + 32 * n + w, mask)
    h, k = _two_words(words, block + w, mask)
    low, high = (2 * j).to(tl.uint32), (4 * n + j).to(tl.uint32)
    a = ((a >> low) & 0x03030303) | (((h >> high) & 0x01010101) << 2)
    b = ((b >> low) & 0x03030303) | (((k >> high) & 0x01010101) << 2)
    four = (_byte(base, block + 96 + (g & 7), mask) >> (4 * (g >> 3))) & 15
    two = (_byte(base, block + 104 + (g & 3), mask) >> (2 * (g >> 2))) & 3
    d = _half(base, block + 108, mask) * (four + 16 * two - 32).to(tl.float32)
    return _codes(a, b, 7), d, 4 * d  # a set mask bit means "no minus 4"


@triton.jit
def _six_bits(base, block, g, mask):
    """Scale and min number `g` of the 12 bytes that Q4_K and Q5_K share."""
    t = g & 3
    low = _byte(base, block + 4 + t, mask)
    middle = _byte(base, block + 8 + t, mask)
    high = _byte(base, block + 12 + t, mask)
    sc = tl.where(g < 4, low & 63, (high & 15) | ((low >> 6) << 4))
    mn = tl.where(g < 4, middle & 63, (high >> 4) | ((middle >> 6) << 4))
    d = _half(base, block, mask) * sc.to(tl.float32)
    m = _half(base, block + 2, mask) * mn.to(tl.float32)
    return d, m


@triton.jit
def _q4_k(base, words, row, c, mask):
    block, i = row + 144 * (c >> 5), 8 * (c & 31)
    g = i >> 5
    at = block + 16 + 32 * (i >> 6) + (i & 31)
    shift = (4 * (g & 1)).to(tl.uint32)
    a, b = _word(words, at, mask) >> shift, _word(words, at + 4, mask) >> shift
    d, m = _six_bits(base, block, g, mask)
    return _codes(a, b, 15), d, m


@triton.jit
def _q5_k(base, words, row, c, mask):
    block, i = row + 176 * (c >> 5), 8 * (c & 31)
    g = i >> 5
    at = block + 48 + 32 * (i >> 6) + (i & 31)
    shift = (4 * (g & 1)).to(tl.uint32)
    a, b = _word(words, at, mask) >> shift, _word(words, at + 4, mask) >> shift
    at = block + 16 + (i & 31)
    fifth = g.to(tl.uint32)
    h, k = _word(words, at, mask) >> fifth, _word(words, at + 4, mask) >> fifth
    a = (a & 0x0F0F0F0F) | ((h & 0x01010101) << 4)
    b = (b & 0x0F0F0F0F) | ((k & 0x01010101) << 4)
    d, m = _six_bits(base, block, g, mask)
    return _codes(a, b, 31), d, m


@triton.jit
def _q6_k(base, words, row, c, mask):
    block, i = row + 210 * (c >> 5), 8 * (c & 31)
    n, w = i >> 7, i & 127
    a, b = _two_words(words, block + 64 * n + (w & 63), mask)
    h, k = _two_words(words, block + 128 + 32 * n + (w & 31), mask)
    low, high = (4 * (w >> 6)).to(tl.uint32), (2 * (w >> 5)).to(tl.uint32)
    a = ((a >> low) & 0x0F0F0F0F) | (((h >> high) & 0x03030303) << 4)
    b = ((b >> low) & 0x0F0F0F0F) | (((k >> high) & 0x03030303) << 4)
    scale = _byte(base, block + 192 + (i >> 4), mask)
    scale = tl.where(scale >= 128, scale - 256, scale).to(tl.float32)
    d = _half(base, block + 208, mask) * scale
    return _codes(a, b, 63), d, 32 * d


@triton.jit
def _two_bytes_each(words, row, c, mask, HALF: tl.constexpr, C: tl.constexpr):
    at = (row >> 2) + 4 * c
    four = tl.arange(0, 4)[None, :]
    w = tl.load(words + at[:, None] + four, mask=mask[:, None], other=0)
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
def _f32(words, row, c, mask, C: tl.constexpr):
    floats = words.to(tl.pointer_type(tl.float32))
    at = floats + ((row >> 2) + 8 * c)[:, None] + tl.arange(0, 4)[None, :]
    q0, q1, q2, q3 = _split_columns(tl.load(at, mask=mask[:, None], other=0.0), C)
    q4, q5, q6, q7 = _split_columns(tl.load(at + 4, mask=mask[:, None], other=0.0), C)
    return q0, q1, q2, q3, q4, q5, q6, q7


@triton.jit
def decode_columns(base, row, c, mask, FORMAT: tl.constexpr, C: tl.constexpr):
    """Codes, scale and offset of columns `c [C]` of one row.

    `base` is a uint8 pointer that is a multiple of 4, `row` the row's byte offset from it (a
    scalar), `mask [C]` the columns that exist.
    """
    words = base.to(tl.pointer_type(tl.uint32))
    if FORMAT == MXFP4:
        q, scale = _mxfp4(base, words, row, c, mask)
        offset = scale
    elif FORMAT == Q8_0:
        q, scale = _q8_0(base, words, row, c, mask)
        offset = scale
    elif FORMAT == Q2_K:
        q, scale, offset = _q2_k(base, words, row, c, mask)
    elif FORMAT == Q3_K:
        q, scale, offset = _q3_k(base, words, row, c, mask)
    elif FORMAT == Q4_K:
        q, scale, offset = _q4_k(base, words, row, c, mask)
    elif FORMAT == Q5_K:
        q, scale, offset = _q5_k(base, words, row, c, mask)
    elif FORMAT == Q6_K:
        q, scale, offset = _q6_k(base, words, row, c, mask)
    elif FORMAT == F32:
        q = _f32(words, row, c, mask, C)
        scale, offset = 1.0, 0.0
    elif FORMAT == F16:
        q = _two_bytes_each(words, row, c, mask, True, C)
        scale, offset = 1.0, 0.0
    else:
        tl.static_assert(FORMAT == BF16, "no decoder for this block format")
        q = _two_bytes_each(words, row, c, mask, False, C)
        scale, offset = 1.0, 0.0
    return q, scale, offset
