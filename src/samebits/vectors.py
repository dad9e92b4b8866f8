"""What compiled loops say to LLVM themselves: looks at unaligned bits, and rows of 64 words in vectors.

A compiler that has to find the vectors in a loop over bytes misses most of them here; each of these is a few
instructions where the processor has the width, and a few times as many where it has not. They look at no bounds.
Places in arrays are given in bytes, counted from an array's first one, whatever it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba import njit, types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

ROW = 64  # words
DIGESTED = 64  # 64-bit words
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # FORMAT.md 2.3
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BYTE, _FIELD = types.uint64, types.uint16  # a place; a word's part
# From a row's quads as lanes have them, 4 lane + step, to the order of columns; and back, which is the same.
_TRANSPOSED = [4 * (i % 4) + i // 4 for i in range(16)]


@dataclass(frozen=True)
class _Code:
    """The function that is being made."""

    context: BaseContext
    builder: IRBuilder
    kinds: tuple[types.Type, ...]
    arguments: Sequence[Value]

    def load(self, array: int, byte: Value, kind: ir.Type, count: int = 1) -> Value:
        """``count`` items from a place in an argument."""
        return self.builder.load(self._place(array, byte, kind, count), align=1)

    def store(self, value: Value, array: int, byte: Value) -> None:
        self.builder.store(value, self._place(array, byte, value.type), align=1)

    def _place(self, array: int, byte: Value, kind: ir.Type, count: int = 1) -> Value:
        whole = self.context.make_array(self.kinds[array])(self.context, self.builder, self.arguments[array])
        place = self.builder.gep(self.builder.bitcast(whole.data, _I8.as_pointer()), [byte])
        return self.builder.bitcast(place, (kind if count == 1 else ir.VectorType(kind, count)).as_pointer())

    def constant(self, kind: ir.Type, values: Sequence[int]) -> Value:
        return ir.Constant(ir.VectorType(kind, len(values)), list(values))

    def fill(self, like: Value, value: Value | int) -> Value:
        """A vector of one value."""
        if isinstance(value, int):
            return self.constant(like.type.element, [value] * like.type.count)
        one = self.builder.insert_element(ir.Constant(like.type, ir.Undefined), value, ir.Constant(_I32, 0))
        return self.take(one, [0] * like.type.count)

    def take(self, vector: Value, order: Sequence[int]) -> Value:
        return self.builder.shuffle_vector(vector, vector, self.constant(_I32, order))

    def seen_as(self, vector: Value, kind: ir.Type, count: int) -> Value:
        """The same bits."""
        return self.builder.bitcast(vector, ir.VectorType(kind, count))

    def widened(self, vector: Value, kind: ir.Type) -> Value:
        return self.builder.zext(vector, ir.VectorType(kind, vector.type.count))

    def narrowed(self, vector: Value, kind: ir.Type) -> Value:
        return self.builder.trunc(vector, ir.VectorType(kind, vector.type.count))

    def both(self, vector: Value, mask: int) -> Value:
        return self.builder.and_(vector, self.fill(vector, mask))

    def left(self, vector: Value, bits: int) -> Value:
        return self.builder.shl(vector, self.fill(vector, bits))

    def right(self, vector: Value, bits: int) -> Value:
        return self.builder.lshr(vector, self.fill(vector, bits))

    def where(self, condition: Value, vector: Value, otherwise: int) -> Value:
        return self.builder.select(condition, vector, self.fill(vector, otherwise))

    def is_set(self, vector: Value) -> Value:
        """Which items are not 0."""
        return self.builder.icmp_unsigned("!=", vector, self.fill(vector, 0))

    def any_of(self, vectors: Sequence[Value]) -> Value:
        result = vectors[0]
        for vector in vectors[1:]:
            result = self.builder.or_(result, vector)
        return result

    def shifted_row(self, words: int, word: Value, change: Value) -> Value:
        """FORMAT.md 4.1: 64 words, and ``change`` where one has its exponent added to all but zeros."""
        row = self.load(words, word, _I16, ROW)
        return self.builder.add(row, self.where(self.is_set(self.both(row, 0x7FFF)), self.fill(row, change), 0))

    def by_lanes(self, bytes_of_row: Value) -> Value:
        """A row's bytes, in fours, in the order of lanes instead of columns."""
        return self.take(self.seen_as(bytes_of_row, _I32, 16), _TRANSPOSED)


def _function(
    kinds: tuple[types.Type, ...], make: Callable[[_Code], Value | None], result: types.Type = types.void
) -> Any:
    """What a numba intrinsic returns: its types, and what makes its code."""

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, arguments: list[Value]) -> Value:
        made = make(_Code(context, builder, signature.args, arguments))
        return context.get_dummy_value() if made is None else made

    return result(*kinds), generate


# -- Bits --


@intrinsic
def load64(typing: Any, array: types.Array, byte: types.Integer) -> Any:
    """The eight bytes of ``array`` from ``byte`` on as a number, wherever they lie."""
    return _function((array, _BYTE), lambda code: code.load(0, code.arguments[1], _I64), types.uint64)


@njit(nogil=True, inline="always")
def load_bits(array: NDArray[np.uint32], position: int) -> int:
    """At least 57 bits of ``array`` from bit ``position`` on."""
    bits: int = load64(array, position >> np.uint64(3)) >> (position & np.uint64(7))
    return bits


@intrinsic
def store32(typing: Any, array: types.Array, byte: types.Integer, value: types.Integer) -> Any:
    """Write the lower half of ``value`` to the four bytes of ``array`` from ``byte`` on."""

    def make(code: _Code) -> None:
        _, byte, value = code.arguments
        code.store(code.builder.trunc(value, _I32), 0, byte)

    return _function((array, _BYTE, types.uint64), make)


@intrinsic
def store64(typing: Any, array: types.Array, byte: types.Integer, value: types.Integer) -> Any:
    """Write ``value`` to the eight bytes of ``array`` from ``byte`` on."""

    def make(code: _Code) -> None:
        _, byte, value = code.arguments
        code.store(value, 0, byte)

    return _function((array, _BYTE, types.uint64), make)


@intrinsic
def mix_words(typing: Any, words: types.Array, first: types.Integer) -> Any:
    """What DIGESTED words from ``first`` on add to the digest of ``words`` (FORMAT.md 2.3)."""

    def make(code: _Code) -> Value:
        builder, (_, first) = code.builder, code.arguments
        z = code.load(0, builder.mul(first, ir.Constant(_I64, 8)), _I64, DIGESTED)
        places = builder.mul(first, ir.Constant(_I64, GOLDEN))
        z = builder.add(z, code.constant(_I64, [(i + 1) * GOLDEN % (1 << 64) for i in range(DIGESTED)]))
        z = builder.add(z, code.fill(z, places))
        for bits, factor in ((30, FIRST), (27, SECOND)):
            z = builder.mul(builder.xor(z, code.right(z, bits)), code.fill(z, factor))
        z = builder.xor(z, code.right(z, 31))
        while z.type.count > 1:
            half = z.type.count // 2
            z = builder.add(code.take(z, range(half)), code.take(z, range(half, 2 * half)))
        return builder.extract_element(z, ir.Constant(_I32, 0))

    return _function((words, types.uint64), make, types.uint64)


# -- Rows of a stage, FORMAT.md section 5: 64 words --


@intrinsic
def join_quad_row(
    typing: Any, output: types.Array, out: types.Integer, tops: types.Array, top: types.Integer, planes: types.Array,
    raw: types.Integer, sign: types.Integer, turn: types.Integer, change: types.Integer,
) -> Any:  # fmt: skip
    """Decode a row of the quad code to ``output``.

    Args:
        out, top, raw, sign: where the row begins: in the array before it, or in ``planes``.
        turn: 4 (s & 1) for stage s (FORMAT.md 5.2).
        change: what each exponent that is not zero gets, modulo 256, where a word has it.
    """

    def make(code: _Code) -> None:
        builder, (_, out, _, top, _, raw, sign, turn, change) = code.builder, code.arguments
        signs = code.load(4, sign, _I32, 4)
        signs = code.take(builder.shl(signs, code.fill(signs, turn)), [lane for lane in range(4) for _ in range(4)])
        signs = code.both(builder.shl(signs, code.constant(_I32, [*range(4)] * 4)), 0x80808080)
        highs = code.seen_as(builder.or_(code.load(2, top, _I32, 16), signs), _I8, ROW)
        lows = code.widened(code.load(4, raw, _I8, ROW), _I16)
        _finish_row(code, out, builder.or_(lows, code.left(code.widened(highs, _I16), 8)), change)

    return _function((output, _BYTE, tops, _BYTE, planes, _BYTE, _BYTE, types.uint32, _FIELD), make)


@intrinsic
def join_single_row(
    typing: Any, output: types.Array, out: types.Integer, tops: types.Array, top: types.Integer, planes: types.Array,
    raw: types.Integer, change: types.Integer,
) -> Any:  # fmt: skip
    """As join_quad_row for the single code, where ``tops`` holds exponents."""

    def make(code: _Code) -> None:
        _, out, _, top, _, raw, change = code.arguments
        lows = code.widened(code.load(4, raw, _I8, ROW), _I16)
        exponents = code.left(code.widened(code.load(2, top, _I8, ROW), _I16), 7)
        signs = code.left(code.both(lows, 0x80), 8)
        _finish_row(code, out, code.any_of([code.both(lows, 0x7F), signs, exponents]), change)

    return _function((output, _BYTE, tops, _BYTE, planes, _BYTE, _FIELD), make)


def _finish_row(code: _Code, out: Value, words: Value, change: Value) -> None:
    """Take the row's shift off (FORMAT.md 4.3), put its quads in the order of columns, write it."""
    exponents = code.both(words, 0x7F80)
    changes = code.where(code.is_set(exponents), code.fill(exponents, change), 0)
    moved = code.both(code.builder.add(exponents, changes), 0x7F80)
    row = code.seen_as(code.builder.or_(code.both(words, 0x807F), moved), _I64, 16)
    code.store(code.take(row, _TRANSPOSED), 0, out)


@intrinsic
def quad_symbols_of_row(
    typing: Any, symbols: types.Array, symbol: types.Integer, words: types.Array, word: types.Integer,
    change: types.Integer, window: types.Integer, outside: types.Integer,
) -> Any:  # fmt: skip
    """The symbols of a row's 16 quads (FORMAT.md 3.4) in the order of lanes, ``4 lane + step``, uint16.

    Args:
        symbol, word: where they begin in the array before them.
        change: the row's shift where a word has its exponent, modulo 2^16.
        outside: what stands for a quad of which a word has no class.
    """

    def make(code: _Code) -> None:
        builder, (_, symbol, _, word, change, window, outside) = code.builder, code.arguments
        tops = code.both(code.right(code.shifted_row(2, word, change), 8), 0x7F)
        quads = code.seen_as(builder.sub(tops, code.fill(tops, window)), _I64, 16)
        joined = code.any_of([quads, *(code.right(quads, 13 * i) for i in (1, 2, 3))])
        found = code.narrowed(code.both(joined, 0xFFF), _I16)
        beyond = code.is_set(code.both(quads, 0xFFF8FFF8FFF8FFF8))
        code.store(code.take(builder.select(beyond, code.fill(found, outside), found), _TRANSPOSED), 0, symbol)

    return _function((symbols, _BYTE, words, _BYTE, _FIELD, _FIELD, _FIELD), make)


@intrinsic
def exponents_of_row(
    typing: Any, exponents: types.Array, exponent: types.Integer, words: types.Array, word: types.Integer,
    change: types.Integer,
) -> Any:  # fmt: skip
    """A row's shifted exponents, a byte each, four words in the place that quad_symbols_of_row gives a quad."""

    def make(code: _Code) -> None:
        _, exponent, _, word, change = code.arguments
        row = code.shifted_row(2, word, change)
        code.store(code.by_lanes(code.narrowed(code.right(row, 7), _I8)), 0, exponent)

    return _function((exponents, _BYTE, words, _BYTE, _FIELD), make)


@intrinsic
def split_quad_row(
    typing: Any, planes: types.Array, raw: types.Integer, sign: types.Integer, turn: types.Integer, words: types.Array,
    word: types.Integer, change: types.Integer,
) -> Any:  # fmt: skip
    """The inverse of join_quad_row for ``planes``; with a ``turn`` of 4 the sign words have the stage's before."""

    def make(code: _Code) -> None:
        builder, (_, raw, sign, turn, _, word, change) = code.builder, code.arguments
        row = code.shifted_row(4, word, change)
        code.store(code.by_lanes(code.narrowed(row, _I8)), 0, raw)
        signs = code.both(code.by_lanes(code.narrowed(code.right(row, 8), _I8)), 0x80808080)
        signs = builder.lshr(signs, code.constant(_I32, [*range(4)] * 4))
        signs = code.any_of([code.take(signs, range(step, 16, 4)) for step in range(4)])
        signs = builder.lshr(signs, code.fill(signs, turn))
        before = code.load(0, sign, _I32, 4)
        is_first = builder.icmp_unsigned("==", code.fill(before, turn), code.fill(before, 0))
        before = builder.select(is_first, code.fill(before, 0), before)
        code.store(builder.or_(before, signs), 0, sign)

    return _function((planes, _BYTE, _BYTE, types.uint32, words, _BYTE, _FIELD), make)


@intrinsic
def split_single_row(
    typing: Any, planes: types.Array, raw: types.Integer, words: types.Array, word: types.Integer,
    change: types.Integer,
) -> Any:  # fmt: skip
    """The inverse of join_single_row for ``planes``."""

    def make(code: _Code) -> None:
        _, raw, _, word, change = code.arguments
        row = code.shifted_row(2, word, change)
        lows = code.builder.or_(code.both(row, 0x7F), code.both(code.right(row, 8), 0x80))
        code.store(code.by_lanes(code.narrowed(lows, _I8)), 0, raw)

    return _function((planes, _BYTE, words, _BYTE, _FIELD), make)
