"""What the decoder's loops say to LLVM themselves: looks at unaligned bits, and rows of a stage in vectors.

A compiler that has to find the vectors in a loop over bytes misses most of them here; each of these is a few
instructions where the processor has the width, and a few times as many where it has not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba import njit, types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numpy.typing import NDArray

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_ROW = 64  # words of a stage in a row


@intrinsic
def load64(typing: Any, array: types.Array, byte: types.Integer) -> Any:
    """The eight bytes of ``array`` from ``byte`` on as a number, wherever they lie."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: list[Value]) -> Value:
        return _load(context, builder, signature.args[0], arguments[0], arguments[1], _I64)

    return types.uint64(array, types.uint64), generate


@njit(nogil=True, inline="always")
def load_bits(array: NDArray[np.uint32], position: int) -> int:
    """At least 57 bits of ``array`` from bit ``position`` on."""
    bits: int = load64(array, position >> np.uint64(3)) >> (position & np.uint64(7))
    return bits


@intrinsic
def store32(typing: Any, array: types.Array, byte: types.Integer, value: types.Integer) -> Any:
    """Write the lower half of ``value`` to the four bytes of ``array`` from ``byte`` on."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: list[Value]) -> Value:
        place = _place(context, builder, signature.args[0], arguments[0], arguments[1], _I32)
        builder.store(builder.trunc(arguments[2], _I32), place, align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate


@intrinsic
def join_quad_row(
    typing: Any, output: types.Array, out: types.Integer, tops: types.Array, top: types.Integer, planes: types.Array,
    raw: types.Integer, sign: types.Integer, turn: types.Integer, change: types.Integer,
) -> Any:  # fmt: skip
    """One row of a stage of the quad code, 64 words (FORMAT.md section 5), to ``output``.

    Args:
        out, top, raw, sign: where the row begins in the array before it, or in ``planes``: bytes.
        turn: 4 (s & 1) for stage s (FORMAT.md 5.2).
        change: what each exponent that is not zero gets, modulo 256, in its place in a word.
    """

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: list[Value]) -> Value:
        output, out, tops, top, planes, raw, sign, turn, change = arguments
        tops_type, planes_type = signature.args[2], signature.args[4]
        quads = _load(context, builder, tops_type, tops, top, _vector(_I32, 16))
        lows = _load(context, builder, planes_type, planes, raw, _vector(_I8, _ROW))
        signs = _load(context, builder, planes_type, planes, sign, _vector(_I32, 4))
        signs = builder.shl(signs, _all(builder, _I32, 4, turn))
        signs = _take(builder, signs, [lane for lane in range(4) for _ in range(4)])
        signs = builder.shl(signs, _constant(_I32, [step for _ in range(4) for step in range(4)]))
        signs = builder.and_(signs, _constant(_I32, [0x80808080] * 16))
        highs = builder.bitcast(builder.or_(quads, signs), _vector(_I8, _ROW))
        words = builder.or_(_wide(builder, lows), _shifted(builder, _wide(builder, highs), 8))
        _finish_row(context, builder, signature.args[0], output, out, words, change)
        return context.get_dummy_value()

    return types.void(output, types.uint64, tops, types.uint64, planes, types.uint64, types.uint64, types.uint32,
                      types.uint16), generate  # fmt: skip


@intrinsic
def join_single_row(
    typing: Any, output: types.Array, out: types.Integer, tops: types.Array, top: types.Integer, planes: types.Array,
    raw: types.Integer, change: types.Integer,
) -> Any:  # fmt: skip
    """As join_quad_row for the single code, where ``tops`` holds exponents."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: list[Value]) -> Value:
        output, out, tops, top, planes, raw, change = arguments
        exponents = _load(context, builder, signature.args[2], tops, top, _vector(_I8, _ROW))
        lows = _wide(builder, _load(context, builder, signature.args[4], planes, raw, _vector(_I8, _ROW)))
        mantissas = builder.and_(lows, _constant(_I16, [0x7F] * _ROW))
        signs = _shifted(builder, builder.and_(lows, _constant(_I16, [0x80] * _ROW)), 8)
        words = builder.or_(builder.or_(mantissas, signs), _shifted(builder, _wide(builder, exponents), 7))
        _finish_row(context, builder, signature.args[0], output, out, words, change)
        return context.get_dummy_value()

    return types.void(output, types.uint64, tops, types.uint64, planes, types.uint64, types.uint16), generate


def _finish_row(
    context: BaseContext, builder: IRBuilder, output_type: types.Array, output: Value, out: Value, words: Value,
    change: Value,
) -> None:  # fmt: skip
    """Take the row's shift off (FORMAT.md 4.3), put its quads in the order of columns, write it."""
    field, rest, zero = (_constant(_I16, [value] * _ROW) for value in (0x7F80, 0x807F, 0))
    exponents = builder.and_(words, field)
    changes = builder.select(builder.icmp_unsigned("!=", exponents, zero), _all(builder, _I16, _ROW, change), zero)
    moved = builder.and_(builder.add(exponents, changes), field)
    quads = builder.bitcast(builder.or_(builder.and_(words, rest), moved), _vector(_I64, 16))
    quads = _take(builder, quads, [4 * lane + step for step in range(4) for lane in range(4)])
    builder.store(quads, _place(context, builder, output_type, output, out, quads.type), align=1)


def _vector(kind: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(kind, count)


def _constant(kind: ir.Type, values: list[int]) -> ir.Constant:
    return ir.Constant(_vector(kind, len(values)), values)


def _place(
    context: BaseContext, builder: IRBuilder, kind: types.Array, array: Value, byte: Value, of: ir.Type
) -> Value:
    """Where in an array, with no look at its bounds."""
    data = builder.bitcast(context.make_array(kind)(context, builder, array).data, _I8.as_pointer())
    return builder.bitcast(builder.gep(data, [byte]), of.as_pointer())


def _load(context: BaseContext, builder: IRBuilder, kind: types.Array, array: Value, byte: Value, of: ir.Type) -> Value:
    return builder.load(_place(context, builder, kind, array, byte, of), align=1)


def _take(builder: IRBuilder, vector: Value, order: list[int]) -> Value:
    return builder.shuffle_vector(vector, vector, _constant(_I32, order))


def _all(builder: IRBuilder, kind: ir.Type, count: int, value: Value) -> Value:
    """A vector of one value."""
    one = builder.insert_element(ir.Constant(_vector(kind, count), ir.Undefined), value, ir.Constant(_I32, 0))
    return _take(builder, one, [0] * count)


def _wide(builder: IRBuilder, row: Value) -> Value:
    return builder.zext(row, _vector(_I16, _ROW))


def _shifted(builder: IRBuilder, row: Value, bits: int) -> Value:
    return builder.shl(row, _constant(_I16, [bits] * _ROW))
