"""Vectors of 16 lanes for the compiled kernels, as numba types and intrinsics.

Kernels take addresses (int64) and numbers only: unboxing an array costs more than a small matrix
takes to multiply. A vector is LLVM's own portable vector, so the same source becomes AVX-512, AVX2
or NEON code. No fast-math flag is ever set and every fused multiply-add is explicit, so a kernel
does the same roundings in the same order wherever it is inlined: batch invariance rests on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

LANES = 16

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_VF, _VI = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_VB = ir.VectorType(_I8, LANES)


class _Vector(types.Type):
    """A numba type whose values live in vector registers."""

    def __init__(self, name: str, llvm_type: Any) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=name)


class _FloatVector(_Vector):
    pass


class _IntVector(_Vector):
    pass


@register_model(_FloatVector)
@register_model(_IntVector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Vector) -> None:
        super().__init__(manager, kind, kind.llvm_type)  # type: ignore[no-untyped-call]


_vf, _vi = _FloatVector("f32x16", _VF), _IntVector("i32x16", _VI)
_f, _i, _a = types.float32, types.int32, types.int64

Build = Callable[..., Any]


def _define(result: Any, params: Sequence[Any], build: Build) -> Any:
    """An intrinsic `params -> result`; `build(context, builder, *values)` emits its code."""
    signature = result(*params)

    def lower(context: Any, builder: Any, _signature: Any, values: Sequence[Any]) -> Any:
        made = build(context, builder, *values)
        return context.get_dummy_value() if result is types.void else made

    # numba reads the number of arguments off the function, so there is one shape for each.
    if len(params) == 1:

        def typed1(_typing: Any, a: Any) -> Any:
            return signature, lower

        return intrinsic(typed1)
    if len(params) == 2:

        def typed2(_typing: Any, a: Any, b: Any) -> Any:
            return signature, lower

        return intrinsic(typed2)

    def typed3(_typing: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, lower

    return intrinsic(typed3)


def _splat(builder: Any, scalar: Any, vector_type: Any) -> Any:
    one = builder.insert_element(
        ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_I32, 0)
    )
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), zeros)


def _same(vector_type: Any, value: int | float) -> Any:
    return ir.Constant(vector_type, [value] * vector_type.count)


def _has(context: Any, feature: str) -> bool:
    """Whether the code's target has an instruction set; part of numba's cache key."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


def _is_arm(context: Any) -> bool:
    return bool(context.codegen().magic_tuple()[0].startswith(("aarch64", "arm64")))


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    function_type = ir.FunctionType(result, [v.type for v in values])
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, function_type, name)
    return builder.call(function, values)


# ---- memory --------------------------------------------------------------------------------------


def _load(builder: Any, address: Any, value_type: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, value_type.as_pointer()))
    loaded.align = 1  # rows start anywhere
    return loaded


def _loader(result: Any, stored: Any, widen: Callable[[Any, Any, Any], Any]) -> Any:
    def build(context: Any, builder: Any, address: Any) -> Any:
        return widen(context, builder, _load(builder, address, stored))

    return _define(result, [_a], build)


def _storer(kind: Any, stored: Any) -> Any:
    def build(_context: Any, builder: Any, address: Any, value: Any) -> None:
        store = builder.store(value, builder.inttoptr(address, stored.as_pointer()))
        store.align = 1

    return _define(types.void, [_a, kind], build)


def _half(context: Any, builder: Any, bits: Any) -> Any:
    """Half bits (i16 or a vector of them) to float32, exactly."""
    vector = isinstance(bits.type, ir.VectorType)
    half, single = (ir.VectorType(_F16, LANES), _VF) if vector else (_F16, _F32)
    if _is_arm(context) or _has(context, "f16c"):
        return builder.fpext(builder.bitcast(bits, half), single)
    # Elsewhere the conversion would be a call into a runtime library that may not be there.
    wide = _VI if vector else _I32
    number: Callable[[Any, Any], Any] = lambda t, v: _same(t, v) if vector else ir.Constant(t, v)  # noqa: E731
    raw = builder.zext(bits, wide)
    magnitude = builder.and_(raw, number(wide, 0x7FFF))
    moved = builder.shl(magnitude, number(wide, 13))
    scaled = builder.fmul(builder.bitcast(moved, single), number(single, 2.0**112))
    special = builder.or_(moved, number(wide, 0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, number(wide, 0x7C00))
    value = builder.select(is_special, special, builder.bitcast(scaled, wide))
    sign = builder.shl(builder.and_(raw, number(wide, 0x8000)), number(wide, 16))
    return builder.bitcast(builder.or_(value, sign), single)


def _vector_of(scalar: Any) -> Any:
    return ir.VectorType(scalar, LANES)


def _two_rounds(builder: Any, eight: Any) -> Any:
    """Eight bytes -> their low nibbles, then their high ones."""
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [*range(8), *range(8)])
    twice = builder.shuffle_vector(eight, ir.Constant(eight.type, ir.Undefined), lanes)
    shifts = ir.Constant(_VI, [0] * 8 + [4] * 8)
    return builder.and_(builder.lshr(builder.zext(twice, _VI), shifts), _same(_VI, 15))


load16 = _loader(_vf, _VF, lambda _c, _b, v: v)
store16 = _storer(_vf, _VF)
u8_16 = _loader(_vi, _vector_of(_I8), lambda _c, b, v: b.zext(v, _VI))
i8_16 = _loader(_vi, _vector_of(_I8), lambda _c, b, v: b.sext(v, _VI))
f16_16 = _loader(_vf, _vector_of(_I16), _half)
bf16_16 = _loader(
    _vf,
    _vector_of(_I16),
    lambda _c, b, v: b.bitcast(b.shl(b.zext(v, _VI), _same(_VI, 16)), _VF),
)
u8_at = _loader(_i, _I8, lambda _c, b, v: b.zext(v, _I32))
i8_at = _loader(_i, _I8, lambda _c, b, v: b.sext(v, _I32))
i32_at = _loader(_i, _I32, lambda _c, _b, v: v)
nibbles_8x2 = _loader(_vi, ir.VectorType(_I8, 8), lambda _c, b, v: _two_rounds(b, v))
u32_at = _loader(types.int64, _I32, lambda _c, b, v: b.zext(v, _I64))
i64_at = _loader(types.int64, _I64, lambda _c, _b, v: v)
f32_at = _loader(_f, _F32, lambda _c, _b, v: v)
f16_at = _loader(_f, _I16, _half)
bf16_at = _loader(
    _f, _I16, lambda _c, b, v: b.bitcast(b.shl(b.zext(v, _I32), ir.Constant(_I32, 16)), _F32)
)
f32_put = _storer(_f, _F32)
i32_put = _storer(_i, _I32)

# ---- lanes ---------------------------------------------------------------------------------------

splat = _define(_vf, [_f], lambda _c, b, v: _splat(b, v, _VF))
isplat = _define(_vi, [_i], lambda _c, b, v: _splat(b, v, _VI))
add16 = _define(_vf, [_vf, _vf], lambda _c, b, x, y: b.fadd(x, y))
sub16 = _define(_vf, [_vf, _vf], lambda _c, b, x, y: b.fsub(x, y))
mul16 = _define(_vf, [_vf, _vf], lambda _c, b, x, y: b.fmul(x, y))
div16 = _define(_vf, [_vf, _vf], lambda _c, b, x, y: b.fdiv(x, y))
# With NaN in x these give y; x86's own rule, so one instruction.
max16 = _define(_vf, [_vf, _vf], lambda _c, b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
min16 = _define(_vf, [_vf, _vf], lambda _c, b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
iadd = _define(_vi, [_vi, _vi], lambda _c, b, x, y: b.add(x, y))
isub = _define(_vi, [_vi, _vi], lambda _c, b, x, y: b.sub(x, y))
band = _define(_vi, [_vi, _i], lambda _c, b, x, y: b.and_(x, _splat(b, y, _VI)))
bor = _define(_vi, [_vi, _vi], lambda _c, b, x, y: b.or_(x, y))
shr = _define(_vi, [_vi, _i], lambda _c, b, x, y: b.lshr(x, _splat(b, y, _VI)))
shl = _define(_vi, [_vi, _i], lambda _c, b, x, y: b.shl(x, _splat(b, y, _VI)))
lane_bits = _define(
    _vi,
    [_i],
    lambda _c, b, x: b.and_(
        b.lshr(_splat(b, x, _VI), ir.Constant(_VI, list(range(LANES)))), _same(_VI, 1)
    ),
)
"""Bit i of a number in lane i."""
to_f32 = _define(_vf, [_vi], lambda _c, b, x: b.sitofp(x, _VF))
to_i32 = _define(_vi, [_vf], lambda _c, b, x: b.fptosi(x, _VI))
bits_f32 = _define(_vf, [_vi], lambda _c, b, x: b.bitcast(x, _VF))
bits_f32_1 = _define(_f, [_i], lambda _c, b, x: b.bitcast(x, _F32))
first = _define(_f, [_vf], lambda _c, b, x: b.extract_element(x, ir.Constant(_I32, 0)))


def _lane(_context: Any, builder: Any, vector: Any, index: Any) -> Any:
    return _splat(builder, builder.extract_element(vector, index), vector.type)


def _pairs(_context: Any, builder: Any, packed: Any) -> Any:
    """Lane s: byte s % 4 of a 32-bit number, shifted right by twice s // 4."""
    word = _splat(builder, builder.trunc(packed, _I32), _VI)
    shifts = [8 * (s % 4) + 2 * (s // 4) for s in range(LANES)]
    return builder.lshr(word, ir.Constant(_VI, shifts))


lane = _define(_vf, [_vf, _i], _lane)
"""One lane in all places; the index is best known when compiling."""
sixteen_pairs = _define(_vi, [_a], _pairs)


def _fma(context: Any, builder: Any, x: Any, y: Any, z: Any) -> Any:
    if not (_is_arm(context) or _has(context, "fma")):
        return builder.fadd(builder.fmul(x, y), z)  # llvm.fma would be a slow library call
    suffix = "v16f32" if x.type == _VF else "f32"
    return _call(builder, f"llvm.fma.{suffix}", x.type, x, y, z)


fma16 = _define(_vf, [_vf, _vf, _vf], _fma)
fma = _define(_f, [_f, _f, _f], _fma)
round16 = _define(_vf, [_vf], lambda _c, b, x: _call(b, "llvm.rint.v16f32", _VF, x))


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves onto each other until one lane is left: a fixed tree."""
    n = LANES
    while n > 1:
        n //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low = ir.Constant(ir.VectorType(_I32, n), list(range(n)))
        high = ir.Constant(ir.VectorType(_I32, n), list(range(n, 2 * n)))
        vector = combine(
            builder.shuffle_vector(vector, undefined, low),
            builder.shuffle_vector(vector, undefined, high),
        )
    return builder.extract_element(vector, ir.Constant(_I32, 0))


hsum = _define(_f, [_vf], lambda _c, b, v: _fold(b, v, b.fadd))
hmax = _define(
    _f, [_vf], lambda _c, b, v: _fold(b, v, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
)


def _lookup(table: Sequence[int]) -> Build:
    """Lanes' low four bits -> `table` values as float32, by the target's shuffle instruction."""

    def build(context: Any, builder: Any, codes: Any) -> Any:
        if _has(context, "avx512f"):
            values = ir.Constant(_VF, [float(v) for v in table])
            return _call(builder, "llvm.x86.avx512.permvar.sf.512", _VF, values, codes)
        if _is_arm(context) or _has(context, "ssse3"):
            name = (
                "llvm.aarch64.neon.tbl1.v16i8" if _is_arm(context) else "llvm.x86.ssse3.pshuf.b.128"
            )
            narrow = builder.and_(builder.trunc(codes, _VB), _same(_VB, 15))
            values = ir.Constant(_VB, [v & 255 for v in table])
            found = _call(builder, name, _VB, values, narrow)
            return builder.sitofp(builder.sext(found, _VI), _VF)
        codes = builder.and_(codes, _same(_VI, 15))
        result = _same(_VF, float(table[0]))
        for code in range(1, len(table)):
            hit = builder.icmp_unsigned("==", codes, _same(_VI, code))
            result = builder.select(hit, _same(_VF, float(table[code])), result)
        return result

    return build


def lookup_of(table: Sequence[int]) -> Any:
    """An intrinsic that maps 16 four-bit codes through 16 small integers."""
    return _define(_vf, [_vi], _lookup(table))
