"""Dot products of quantised blocks with inputs in fixed point, four weights an instruction.

A weight's code is an integer of at most 8 bits. Inputs are taken as integers too: the sixteen of a
*wide column* share a power of two, chosen such that the largest fills 24 bits (what float32 holds),
and are kept as three planes of bytes. A column's dot product is then exact; it is rounded once to
float32 (twice with codes above 15), and the scales and the sums over columns are float32 as in
`blocks`. Converting each weight to float32 instead takes most of the time of an expert.

An input is off by at most 2^-23 of the largest of its column, or 2^-126 if that is more. A column
with an infinity or without a number has a power that is no number, and neither is what it adds to.

Every thread owns one wide column of a tile, for all rows and tokens; values are vectors `[C]`.

Inputs of a column (16 words of 32 bits, see `split_kernel`): the lowest, middle and highest bytes
of its numbers as four words each, the power of two as float32, and the sum of the numbers; the last
two words are not used. The highest bytes are signed, the others are not.

The sum for sixteen inputs, `16 * |code| * 2^23`, fits into 32 bits for codes up to 15 (with a bias:
from -16 to 15); with larger ones the highest bytes are summed apart.

The few instructions that Triton has no name for have a plain form each, for the interpreter.

MXFP4 weights from 2^126 on (no trained weight comes near) are taken as infinite.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from aprefetch.kernels.triton.blocks import _byte, _half, _halves_of, _load, _split_columns, _word

__all__ = [
    "PACKED_TYPES",
    "add_packed",
    "byte_dots",
    "decode_packed",
    "doubled_values",
    "load_split",
    "split_kernel",
    "unbias",
    "windows",
]

Q8_0 = tl.constexpr(8)
Q2_K = tl.constexpr(10)
Q3_K = tl.constexpr(11)
Q4_K = tl.constexpr(12)
Q5_K = tl.constexpr(13)
Q6_K = tl.constexpr(14)
MXFP4 = tl.constexpr(39)

PACKED_TYPES = frozenset({8, 10, 11, 12, 13, 14, 39})
"""GGML type ids that `decode_packed` knows."""

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


# Instructions


@triton.jit
def byte_dots(
    q, x, acc, FIRST: tl.constexpr, SIGNED: tl.constexpr, SIGNED_X: tl.constexpr,
    PLAIN: tl.constexpr = INTERPRETED,
):  # fmt: skip
    """`acc` plus the products of the bytes of `q[:4]` and `x[FIRST : FIRST + 4]` (wraps around)."""
    if PLAIN:
        place = 8 * tl.arange(0, 4)[None, :]
        total = 0
        for i in tl.static_range(4):
            a = (q[i][:, None] >> place) & 255
            b = (x[FIRST + i][:, None] >> place) & 255
            if SIGNED:
                a = (a ^ 128) - 128
            if SIGNED_X:
                b = (b ^ 128) - 128
            total += a * b
        return acc + tl.sum(total, axis=1)
    else:
        kinds: tl.constexpr = (".s32" if SIGNED else ".u32") + (".s32" if SIGNED_X else ".u32")
        for i in tl.static_range(4):
            acc = tl.inline_asm_elementwise(
                "dp4a" + kinds + " $0, $1, $2, $3;", "=r,r,r,r", [q[i], x[FIRST + i], acc],
                tl.int32, True, 1,
            )  # fmt: skip
        return acc


@triton.jit
def windows(w, shift, N: tl.constexpr, PLAIN: tl.constexpr = INTERPRETED):
    """N words that begin `shift` bits (0 to 31) into the N + 1 words `w`."""
    out = ()
    for i in tl.static_range(N):
        if PLAIN:
            s = shift.to(tl.uint32, bitcast=True)
            low = w[i].to(tl.uint32, bitcast=True) >> s
            high = (w[i + 1].to(tl.uint32, bitcast=True) << 1) << (31 - s)
            out = out + ((low | high).to(tl.int32, bitcast=True),)
        else:
            out = out + (
                tl.inline_asm_elementwise(
                    "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [w[i], w[i + 1], shift],
                    tl.int32, True, 1,
                ),
            )  # fmt: skip
    return out


@triton.jit
def doubled_values(w, PLAIN: tl.constexpr = INTERPRETED):
    """The eight MXFP4 codes of a word as bytes, 12 plus twice their values, in two words.

    Compiled, each word is picked from a table of the positive and one of the negative values; a
    code whose highest bit is set picks a 0.
    """
    out = ()
    for half in tl.static_range(2):
        positive, negative = w >> (16 * half), (w ^ -0x77777778) >> (16 * half)
        if PLAIN:
            code = (w[:, None] >> (16 * half + 4 * tl.arange(0, 4)[None, :])) & 15
            size = code & 7
            value = tl.where(size < 5, size, tl.where(size == 7, 12, 2 * size - 4))
            value = tl.where(code < 8, 12 + value, 12 - value)
            out = out + (tl.sum(value << (8 * tl.arange(0, 4)[None, :]), axis=1),)
        else:
            a = tl.inline_asm_elementwise(
                "prmt.b32 $0, 0x0F0E0D0C, 0x18141210, $1;", "=r,r", [positive], tl.int32, True, 1
            )
            b = tl.inline_asm_elementwise(
                "prmt.b32 $0, 0x090A0B0C, 0x00040608, $1;", "=r,r", [negative], tl.int32, True, 1
            )
            out = out + (a | b,)
    return out


@triton.jit
def rounded(x, PLAIN: tl.constexpr = INTERPRETED):
    """The nearest integers, ties to even ones."""
    if PLAIN:
        return ((x.to(tl.float64) + 6755399441055744.0) - 6755399441055744.0).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,r", [x], tl.int32, True, 1)


@triton.jit
def byte_planes(a, b, c, d, PLAIN: tl.constexpr = INTERPRETED):
    """Bytes 0, bytes 1 and bytes 2 of four words, as a word each."""
    if PLAIN:
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
        middle = ((a >> 8) & 255) | (b & 0xFF00) | ((c & 0xFF00) << 8) | ((d & 0xFF00) << 16)
        high = ((a >> 16) & 255) | ((b >> 8) & 0xFF00) | (c & 0xFF0000) | ((d & 0xFF0000) << 8)
        return low, middle, high
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, u, v;
            prmt.b32 s, $3, $4, 0x5140;
            prmt.b32 t, $5, $6, 0x5140;
            prmt.b32 u, $3, $4, 0x0062;
            prmt.b32 v, $5, $6, 0x0062;
            prmt.b32 $0, s, t, 0x5410;
            prmt.b32 $1, s, t, 0x7632;
            prmt.b32 $2, u, v, 0x5410;
            }""",
            "=r,=r,=r,r,r,r,r", [a, b, c, d], (tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip


# Inputs


@triton.jit
def _powers(top):
    """The power of two of columns whose largest size is `top`, and its inverse (float32).

    Numbers are below 2^23, also when rounded. Below 2^-103 the power would leave float32; such
    columns keep fewer bits.
    """
    exponent = ((top.to(tl.uint32, bitcast=True) + 1) >> 23).to(tl.int32)
    bounded = tl.minimum(tl.maximum(exponent, 24), 254)
    power = tl.where(exponent < 255, (bounded - 22) << 23, 0x7FC00000)
    inverse = (276 - bounded) << 23
    return power.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def split_columns(row, c, mask, HALVES: tl.constexpr, C: tl.constexpr):
    """The fourteen words of each wide column: `row` points at a float32 vector.

    Number n of a column stands for `n * power`, with |n| < 2^23. With `HALVES` a column is two
    times eight inputs, 16 apart, in the order in which a word of 4-bit codes holds them: 0, 16, 1,
    17 and so on.
    """
    four = tl.arange(0, 4)[None, :]
    if HALVES:
        first = 32 * (c >> 1) + 8 * (c & 1)
        third = first + 16
    else:
        first = 16 * c
        third = first + 8
    a = _load(row + first[:, None] + four, mask[:, None], True)
    b = _load(row + (first + 4)[:, None] + four, mask[:, None], True)
    d = _load(row + third[:, None] + four, mask[:, None], True)
    e = _load(row + (third + 4)[:, None] + four, mask[:, None], True)
    top = _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(d), tl.abs(e)))
    t = _split_columns(top, C)
    power, inverse = _powers(_larger(_larger(t[0], t[1]), _larger(t[2], t[3])))
    a = _split_columns(rounded(a * inverse[:, None]), C)
    b = _split_columns(rounded(b * inverse[:, None]), C)
    d = _split_columns(rounded(d * inverse[:, None]), C)
    e = _split_columns(rounded(e * inverse[:, None]), C)
    total = ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]))
    total += ((d[0] + d[1]) + (d[2] + d[3])) + ((e[0] + e[1]) + (e[2] + e[3]))
    if HALVES:
        a, b, d, e = (
            (a[0], d[0], a[1], d[1]), (a[2], d[2], a[3], d[3]),
            (b[0], e[0], b[1], e[1]), (b[2], e[2], b[3], e[3]),
        )  # fmt: skip
    l0, m0, h0 = byte_planes(a[0], a[1], a[2], a[3])
    l1, m1, h1 = byte_planes(b[0], b[1], b[2], b[3])
    l2, m2, h2 = byte_planes(d[0], d[1], d[2], d[3])
    l3, m3, h3 = byte_planes(e[0], e[1], e[2], e[3])
    return l0, l1, l2, l3, m0, m1, m2, m3, h0, h1, h2, h3, power, total


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_kernel(x_ptr, out_ptr, N_IN: tl.constexpr, HALVES: tl.constexpr, C: tl.constexpr):
    """`split_columns` of row `program_id(0)`, C columns of 16 words; grid (rows, column tiles)."""
    row = tl.program_id(0).to(tl.int64) * N_IN
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = c < N_IN // 16
    words = split_columns(x_ptr + row, c, inside, HALVES, C)
    out = out_ptr + row + 16 * c
    for i in tl.static_range(14):
        tl.store(out + i, words[i].to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def load_split(row, c, mask, MASKED: tl.constexpr, C: tl.constexpr):
    """The fourteen words of each wide column: `row` points at what `split_kernel` wrote."""
    words = row + 16 * c[:, None] + tl.arange(0, 4)[None, :]
    low = _split_columns(_load(words, mask[:, None], MASKED), C)
    middle = _split_columns(_load(words + 4, mask[:, None], MASKED), C)
    high = _split_columns(_load(words + 8, mask[:, None], MASKED), C)
    rest = row + 16 * c[:, None] + 12 + tl.arange(0, 2)[None, :]
    power, total = tl.split(_load(rest, mask[:, None], MASKED))
    return low + middle + high + (power.to(tl.float32, bitcast=True), total)


@triton.jit
def add_packed(acc, q, scale, offset, x, FORMAT: tl.constexpr, C: tl.constexpr):
    """`acc` plus what wide columns of weights add to the dot product with their inputs."""
    signed: tl.constexpr = FORMAT == Q8_0
    high = byte_dots(q, x, tl.zeros((C,), tl.int32), 8, signed, True)
    if FORMAT == Q8_0 or FORMAT == Q5_K or FORMAT == Q6_K:  # noqa: SIM109  # codes above 15
        low = byte_dots(q, x, tl.zeros((C,), tl.int32), 4, signed, False)
        low = byte_dots(q, x, low * 256, 0, signed, False)
        s = tl.fma(high.to(tl.float32), 65536.0, low.to(tl.float32))
    else:
        # What a bias of the codes adds is taken off before the last plane.
        bias = 0
        if FORMAT == MXFP4:
            bias = x[13] * -12
        elif FORMAT == Q3_K:
            bias = x[13] * -4
        low = byte_dots(q, x, high * 256, 4, signed, False)
        s = byte_dots(q, x, low * 256 + bias, 0, signed, False).to(tl.float32)
    acc = tl.fma(s * x[12], scale, acc)
    if FORMAT == Q2_K or FORMAT == Q4_K or FORMAT == Q5_K or FORMAT == Q6_K:  # noqa: SIM109
        acc = tl.fma(-offset, x[13].to(tl.float32) * x[12], acc)
    return acc


@triton.jit
def unbias(total, FORMAT: tl.constexpr):
    """The dot product from the sum of what `add_packed` added up."""
    if FORMAT == MXFP4:
        return total * 0.25  # see `_mxfp4`
    else:
        return total


# Weights


@triton.jit
def _words(words, at, mask, N: tl.constexpr, MASKED: tl.constexpr):
    """N + 1 words around the 4 N bytes from byte `at`, and the bits that come before them."""
    first, last = words + (at >> 2), words + ((at + 4 * N - 1) >> 2)
    out = ()
    for i in tl.static_range(N + 1):
        address = first + i if i < N else last
        if MASKED:  # noqa: SIM108
            out = out + (tl.load(address, mask=mask, other=0),)
        else:
            out = out + (tl.load(address),)
    return out, (at & 3) << 3


@triton.jit
def _mxfp4(base, words, row, c, mask, MASKED: tl.constexpr):
    block = row + 17 * (c >> 1)
    w, shift = _words(words, block + 1 + 8 * (c & 1), mask, 2, MASKED)
    w = windows(w, shift, 2)
    # The scale is 2^(e - 127), codes are doubled: four times the half of it is a normal number.
    bits = tl.minimum(_byte(base, block, mask, MASKED) + 1, 255) << 23
    return doubled_values(w[0]) + doubled_values(w[1]), bits.to(tl.float32, bitcast=True)


@triton.jit
def _q8_0(base, words, row, c, mask, MASKED: tl.constexpr):
    block = row + 34 * (c >> 1)
    w, shift = _words(words, block + 2 + 16 * (c & 1), mask, 4, MASKED)
    return windows(w, shift, 4), _half(base, block, mask, MASKED)


@triton.jit
def _q2_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, g = row + 84 * (c >> 4), c & 15
    at = block + 16 + 32 * (g >> 3) + 16 * (g & 1)
    q = ()
    for i in tl.static_range(4):
        q = q + ((_word(words, at + 4 * i, mask, MASKED) >> (g & 6)) & 0x03030303,)
    scales = _byte(base, block + g, mask, MASKED)
    d, m = _halves_of(_word(words, block + 80, mask, MASKED).to(tl.uint32, bitcast=True))
    return q, d * (scales & 15).to(tl.float32), m * (scales >> 4).to(tl.float32)


@triton.jit
def _q3_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, g = row + 110 * (c >> 4), c & 15
    w, shift = _words(words, block + 32 + 32 * (g >> 3) + 16 * (g & 1), mask, 4, MASKED)
    h, shift_h = _words(words, block + 16 * (g & 1), mask, 4, MASKED)
    w, h = windows(w, shift + (g & 6), 4), windows(h, shift_h + (g >> 1), 4)
    q = ()
    for i in tl.static_range(4):  # a set mask bit means "no minus 4"
        q = q + ((w[i] & 0x03030303) + (h[i] & 0x01010101) * 4,)
    # Shifted as words, lest the compiler gather bytes of several rows first.
    four = _byte(base, block + 96 + (g & 7), mask, MASKED)
    two = _byte(base, block + 104 + (g & 3), mask, MASKED)
    four = windows((four, four), 4 * (g >> 3), 1)[0] & 15
    two = windows((two, two), (28 + 2 * (g >> 2)) & 31, 1)[0] & 48
    d = _half(base, block + 108, mask, MASKED)
    return q, d * ((four | two) - 32).to(tl.float32)


@triton.jit
def _quads(words, at, mask, MASKED: tl.constexpr, C: tl.constexpr):
    """Sixteen bytes from `at`, a multiple of 4 (of 16, if the row is), as four words."""
    w = _load(words + (at >> 2)[:, None] + tl.arange(0, 4)[None, :], mask[:, None], MASKED)
    return _split_columns(w, C)


@triton.jit
def _six_bits(words, block, g, mask, MASKED: tl.constexpr, C: tl.constexpr):
    """Scale and min number `g` of the 16 bytes with which blocks of Q4_K and Q5_K begin."""
    both, scales, mins, rest = _quads(words, block, mask, MASKED, C)
    shift = 8 * (g & 3)
    low, middle, high = scales >> shift, mins >> shift, rest >> shift
    sc = tl.where(g < 4, low & 63, (high & 15) | ((low >> 2) & 48))
    mn = tl.where(g < 4, middle & 63, ((high >> 4) & 15) | ((middle >> 2) & 48))
    d, m = _halves_of(both.to(tl.uint32, bitcast=True))
    return d * sc.to(tl.float32), m * mn.to(tl.float32)


@triton.jit
def _q4_k(words, row, c, mask, MASKED: tl.constexpr, C: tl.constexpr):
    block, g = row + 144 * (c >> 4), (c >> 1) & 7
    w = _quads(words, block + 16 + 32 * (g >> 1) + 16 * (c & 1), mask, MASKED, C)
    q = ()
    for i in tl.static_range(4):
        q = q + ((w[i] >> (4 * (g & 1))) & 0x0F0F0F0F,)
    d, m = _six_bits(words, block, g, mask, MASKED, C)
    return q, d, m


@triton.jit
def _q5_k(words, row, c, mask, MASKED: tl.constexpr, C: tl.constexpr):
    block, g = row + 176 * (c >> 4), (c >> 1) & 7
    w = _quads(words, block + 48 + 32 * (g >> 1) + 16 * (c & 1), mask, MASKED, C)
    h = _quads(words, block + 16 + 16 * (c & 1), mask, MASKED, C)
    q = ()
    for i in tl.static_range(4):
        low = (w[i] >> (4 * (g & 1))) & 0x0F0F0F0F
        q = q + (low + ((h[i] >> g) & 0x01010101) * 16,)
    d, m = _six_bits(words, block, g, mask, MASKED, C)
    return q, d, m


@triton.jit
def _q6_k(base, words, row, c, mask, MASKED: tl.constexpr):
    block, g = row + 210 * (c >> 4), c & 15
    n, j = g >> 3, g & 7  # weights 128 n + 16 j
    w, shift = _words(words, block + 64 * n + 16 * (j & 3), mask, 4, MASKED)
    h, shift_h = _words(words, block + 128 + 32 * n + 16 * (j & 1), mask, 4, MASKED)
    w, h = windows(w, shift + 4 * (j >> 2), 4), windows(h, shift_h + (j & 6), 4)
    q = ()
    for i in tl.static_range(4):
        q = q + ((w[i] & 0x0F0F0F0F) + (h[i] & 0x03030303) * 16,)
    scale = (_byte(base, block + 192 + g, mask, MASKED) ^ 128) - 128
    d = _half(base, block + 208, mask, MASKED) * scale.to(tl.float32)
    return q, d, 32 * d


@triton.jit
def decode_packed(base, row, c, mask, FORMAT: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """Codes (four words of four), scale and offset of wide columns `c [C]` of one row.

    Arguments as in `blocks.decode_columns`.
    """
    words = base.to(tl.pointer_type(tl.int32))
    if FORMAT == MXFP4:
        q, scale = _mxfp4(base, words, row, c, mask, MASKED)
        offset = scale
    elif FORMAT == Q8_0:
        q, scale = _q8_0(base, words, row, c, mask, MASKED)
        offset = scale
    elif FORMAT == Q2_K:
        q, scale, offset = _q2_k(base, words, row, c, mask, MASKED)
    elif FORMAT == Q3_K:
        q, scale = _q3_k(base, words, row, c, mask, MASKED)
        offset = scale
    elif FORMAT == Q4_K:
        q, scale, offset = _q4_k(words, row, c, mask, MASKED, C)
    elif FORMAT == Q5_K:
        q, scale, offset = _q5_k(words, row, c, mask, MASKED, C)
    else:
        tl.static_assert(FORMAT == Q6_K, "no packed decoder for this block format")
        q, scale, offset = _q6_k(base, words, row, c, mask, MASKED)
    return q, scale, offset
