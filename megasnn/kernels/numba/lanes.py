"""Several neighbouring numbers as one value, which the processor adds or compares at once.

A loop over single elements that has many arrays is vectorised only after comparing all of their places, in code of its
own. With lanes it is vectorised as it is written, compiles sooner, and what a comparison gives are packed bits already.

The exponential of a surrogate gradient is written out here: the mathematical library's takes one number at a time. It
multiplies and adds with one rounding, which is faster and has the same bits on every processor.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, overload, register_model

VECTOR_BYTES = 128  # of a value: two of the widest registers; with four, there are not enough of these for all values
_LINE = 64  # bytes that come into a cache together
_L2 = 2  # as the instruction names that cache


class Lanes(types.Type):
    """Numbers of one type, side by side."""

    def __init__(self, element: Any, count: int) -> None:
        self.element, self.count = element, count
        super().__init__(name=f"Lanes({element} x {count})")


class Flags(types.Type):
    """Result of a comparison of lanes."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Flags({count})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Lanes) -> None:
        element = dmm.lookup(fe_type.element).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, fe_type.count))


@register_model(Flags)
class _FlagsModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Flags) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ir.IntType(1), fe_type.count))


def repeated(builder: Any, value: Any, count: int) -> Any:
    """A number in each of so many lanes."""
    one = ir.VectorType(value.type, 1)
    first = builder.insert_element(ir.Constant(one, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


def constant_lanes(vector: Any, value: float) -> Any:
    """A number that is known in each lane of an LLVM vector type."""
    return ir.Constant(vector, [value] * vector.count)


def _as_lanes(builder: Any, value: Any, kind: Any, count: int) -> Any:
    return value if isinstance(kind, Lanes) else repeated(builder, value, count)


# --- making them, loading and storing


def _lanes_of(context, number):
    """A number in each of as many lanes as are computed at once."""
    lanes = Lanes(number, VECTOR_BYTES * 8 // number.bitwidth)
    return lanes(number), lambda context, builder, signature, args: repeated(builder, args[0], lanes.count)


def _lane_of(context, number):
    """A number in a single lane, for what is left at the end."""
    return Lanes(number, 1)(number), lambda context, builder, signature, args: repeated(builder, args[0], 1)


def _lanes(context, number, size):
    """A number in each of the lanes of so many bytes, which are written as a number."""
    if not isinstance(size, types.IntegerLiteral):
        raise TypeError(f"how many bytes lanes have is written as a number, not as {size}")
    kind = Lanes(number, size.literal_value * 8 // number.bitwidth)
    return kind(number, size), lambda context, builder, signature, args: repeated(builder, args[0], kind.count)


def _filled(context, number, like):
    """A number in each of as many lanes as in `like`."""
    return like(number, like), lambda context, builder, signature, args: repeated(builder, args[0], like.count)


def _count_of(context, lanes):
    """Number of flags that are set."""
    return types.int64(lanes), lambda context, builder, signature, args: ir.IntType(64)(lanes.count)


def _address(context: Any, builder: Any, kind: Any, vector: Any, array: Any, row: Any, column: Any, *_: Any) -> Any:
    """Address at which lanes begin, as that of such a vector; from the array on, what an intrinsic was called with."""
    if kind.ndim != 2 or kind.layout != "C":
        raise TypeError(f"lanes are loaded from contiguous arrays of two dimensions, not from {kind}")
    struct = context.make_array(kind)(context, builder, array)
    line = builder.mul(row, cgutils.unpack_tuple(builder, struct.shape)[1])
    return builder.bitcast(builder.gep(struct.data, [builder.add(line, column)]), vector.as_pointer())


def _load(context, array, row, column, like):
    """Lanes as in `like`, which begin at ``array[row, column]``."""

    def generate(context, builder, signature, args):
        vector = context.get_value_type(like)
        place = _address(context, builder, array, vector, *args)
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return like(array, types.intp, types.intp, like), generate


def _store(context, array, row, column, lanes):
    """Lanes, to where they begin in ``array[row, column]``."""

    def generate(context, builder, signature, args):
        place = _address(context, builder, array, args[3].type, *args)
        builder.store(args[3], place, align=array.dtype.bitwidth // 8)

    return types.void(array, types.intp, types.intp, lanes), generate


def _stream(context, array, row, column, lanes, past):
    """As `store`; with `past`, whole lines of the cache go past it to memory, which then need not be read first.

    Other threads see them after `ordered`.
    """

    def generate(context, builder, signature, args):
        place = _address(context, builder, array, args[3].type, *args)
        align = array.dtype.bitwidth // 8
        if lanes.count * align % _LINE:
            builder.store(args[3], place, align=align)
            return
        offset = builder.and_(builder.ptrtoint(place, ir.IntType(64)), ir.IntType(64)(_LINE - 1))
        whole = builder.icmp_unsigned("==", offset, ir.IntType(64)(0))
        with builder.if_else(builder.and_(whole, args[4])) as (then, otherwise):
            with then:
                stored = builder.store(args[3], place, align=_LINE)
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            with otherwise:
                builder.store(args[3], place, align=align)

    return types.void(array, types.intp, types.intp, lanes, types.boolean), generate


def _ordered(context):
    """Fence: other threads see earlier stores before later ones."""

    def generate(context, builder, signature, args):
        builder.fence("seq_cst")

    return types.void(), generate


def _prefetch(context, array, row, column, like):
    """Asks for lanes that are loaded soon; not for a single one. Behind an array's end nothing happens."""

    def generate(context, builder, signature, args):
        if like.count == 1:
            return
        place = _address(context, builder, array, ir.IntType(8), *args)
        function = ir.FunctionType(ir.VoidType(), [place.type, *[ir.IntType(32)] * 3])
        prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        size = like.count * like.element.bitwidth // 8
        for start in range(0, size, _LINE):
            line = builder.gep(place, [ir.IntType(64)(start)])
            builder.call(prefetch, [line, *map(ir.IntType(32), (0, _L2, 1))])

    return types.void(array, types.intp, types.intp, like), generate


def _store_bits(context, array, index, flags):
    """Flags as bits from byte ``array[index]`` on, the first one lowest; nothing where they fill no whole bytes."""

    def generate(context, builder, signature, args):
        if flags.count % 8:
            return
        number = builder.bitcast(args[2], ir.IntType(flags.count))
        struct = context.make_array(array)(context, builder, args[0])
        place = builder.gep(struct.data, [args[1]])
        builder.store(number, builder.bitcast(place, number.type.as_pointer()), align=1)

    return types.void(array, types.intp, flags), generate


# --- computing with them


def _where(context, flags, a, b):
    """Selects `a` in each lane whose flag is set, otherwise `b`; both are lanes, or a number for all."""
    kind = a if isinstance(a, Lanes) else b if isinstance(b, Lanes) else Lanes(a, flags.count)

    def generate(context, builder, signature, args):
        choices = [_as_lanes(builder, each, of, kind.count) for each, of in zip(args[1:], (a, b), strict=True)]
        return builder.select(args[0], *choices)

    return kind(flags, a, b), generate


def of_lanes(builder: Any, name: str, *vectors: Any) -> Any:
    """Applies a function of LLVM's to vectors of a type."""
    kind = vectors[0].type
    function = ir.FunctionType(kind, [kind] * len(vectors))
    mangled = f"{name}.v{kind.count}{kind.element.intrinsic_name}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, mangled), vectors)


def _multiply_add(context, a, b, c):
    """a * b + c, rounded once; each is lanes, or a number for all."""
    kinds = a, b, c
    kind = next(each for each in kinds if isinstance(each, Lanes))

    def generate(context, builder, signature, args):
        lanes = [_as_lanes(builder, each, of, kind.count) for each, of in zip(args, kinds, strict=True)]
        return of_lanes(builder, "llvm.fma", *lanes)

    return kind(a, b, c), generate


lanes_of: Any = intrinsic(_lanes_of)
lane_of: Any = intrinsic(_lane_of)
lanes: Any = intrinsic(prefer_literal=True)(_lanes)
filled: Any = intrinsic(_filled)
count_of: Any = intrinsic(_count_of)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
stream: Any = intrinsic(_stream)
ordered: Any = intrinsic(_ordered)
prefetch: Any = intrinsic(_prefetch)
store_bits: Any = intrinsic(_store_bits)
where: Any = intrinsic(_where)
multiply_add: Any = intrinsic(_multiply_add)


def _define(operation: Any, arity: int, result: Any, generate: Any) -> None:
    """An operator of lanes, or of lanes and a number for all."""

    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            lanes = next((each for each in args if isinstance(each, Lanes)), None)
            if lanes is None or len(args) != arity or any(each not in (lanes, lanes.element) for each in args):
                return None
            return signature(result(lanes), *args)

    def lower(context, builder, sig, args):
        count = next(each.count for each in sig.args if isinstance(each, Lanes))
        return generate(builder, *(_as_lanes(builder, *each, count) for each in zip(args, sig.args, strict=True)))

    infer_global(operation)(Template)
    for kinds in ((Lanes,),) if arity == 1 else ((Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)):
        lower_builtin(operation, *kinds)(lower)


def _same(lanes: Lanes) -> Lanes:
    return lanes


def _flags(lanes: Lanes) -> Flags:
    return Flags(lanes.count)


_define(operator.add, 2, _same, ir.IRBuilder.fadd)
_define(operator.sub, 2, _same, ir.IRBuilder.fsub)
_define(operator.mul, 2, _same, ir.IRBuilder.fmul)
_define(operator.truediv, 2, _same, ir.IRBuilder.fdiv)
_define(operator.neg, 1, _same, ir.IRBuilder.fneg)
_define(abs, 1, _same, lambda builder, a: of_lanes(builder, "llvm.fabs", a))
_define(operator.ge, 2, _flags, lambda builder, a, b: builder.fcmp_ordered(">=", a, b))
_define(operator.lt, 2, _flags, lambda builder, a, b: builder.fcmp_ordered("<", a, b))


def _power_of_two(context, t):
    """2^k from ``t = k + 1.5 * 2^mantissa_bits``: the low bits of such a number hold k, which becomes the exponent."""
    width, exponent_bias, mantissa_bits = (32, 127, 23) if t.element == types.float32 else (64, 1023, 52)

    def generate(context, builder, signature, args):
        integers = ir.VectorType(ir.IntType(width), t.count)
        bits = builder.add(builder.bitcast(args[0], integers), constant_lanes(integers, exponent_bias))
        return builder.bitcast(builder.shl(bits, constant_lanes(integers, mantissa_bits)), args[0].type)

    return t(t), generate


def _exponential_series(context, r):
    """The Taylor polynomial of exp(r), of a degree that is enough for |r| <= ln 2 / 2."""
    number: Any
    degree, number = (7, np.float32) if r.element == types.float32 else (13, np.float64)

    def generate(context, builder, signature, args):
        vector = args[0].type
        terms = [constant_lanes(vector, float(number(1.0 / math.factorial(k)))) for k in range(degree, -1, -1)]
        result = terms[0]
        for term in terms[1:]:
            result = of_lanes(builder, "llvm.fma", result, args[0], term)
        return result

    return r(r), generate


power_of_two: Any = intrinsic(_power_of_two)
exponential_series: Any = intrinsic(_exponential_series)


def exp_negative(x):
    """exp(x) for x <= 0, to about one unit in the last place; below the smallest normal number it stays there.

    x = k ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial for exp(r), and the exponent set to k.
    """


@overload(exp_negative, inline="always")
def _exp_negative(x):
    double = x.element == types.float64
    number: Any = np.float64 if double else np.float32
    lowest = number(-708.0 if double else -87.0)
    magic = number(1.5 * 2.0 ** (52 if double else 23))
    # ln 2 in two parts, the first with so few bits that its product with k is exact
    high = number(0.6931471803691238 if double else 0.693359375)
    low = number(1.9082149292705877e-10 if double else -2.1219444005469057e-4)
    per_ln2 = number(1.0 / math.log(2.0))

    def implementation(x):
        x = where(x < lowest, lowest, x)  # a NaN stays one
        shifted = multiply_add(x, per_ln2, magic)
        k = shifted - magic
        r = multiply_add(k, -low, multiply_add(k, -high, x))
        return exponential_series(r) * power_of_two(shifted)

    return implementation
