"""Lanes: several neighbouring numbers as one value, which the processor adds or compares at once."""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

# LLVM vectorises a loop over single elements only behind a comparison of all its arrays for overlap. A loop over lanes
# is vectorised as it is written and compiles sooner, and a comparison directly gives packed bits.
VECTOR_BYTES = 128  # two of the widest registers for a value; with four, registers do not suffice for all values
_LINE = 64  # bytes of a line of the cache
_L2 = 2  # the number of that cache in a prefetch instruction


class Lanes(types.Type):
    """Numbers of one type, side by side."""

    def __init__(self, element: Any, count: int) -> None:
        self.element = element
        self.count = count
        super().__init__(name=f"Lanes({element} x {count})")


class Flags(types.Type):
    """A comparison's result, per lane."""

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
    one = ir.VectorType(value.type, 1)
    # LLVM makes a broadcast of an insertion and a shuffle.
    first = builder.insert_element(ir.Constant(one, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


def constant_lanes(vector: Any, value: float) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _as_lanes(builder: Any, value: Any, kind: Any, count: int) -> Any:
    return value if isinstance(kind, Lanes) else repeated(builder, value, count)


def _lanes_of(context, number):
    """As many lanes as fill `VECTOR_BYTES`."""
    lanes = Lanes(number, VECTOR_BYTES * 8 // number.bitwidth)
    return lanes(number), lambda context, builder, signature, args: repeated(builder, args[0], lanes.count)


def _lane_of(context, number):
    """A single lane, for elements left over at the end."""
    return Lanes(number, 1)(number), lambda context, builder, signature, args: repeated(builder, args[0], 1)


def _lanes(context, number, size):
    """As many lanes as fill `size` bytes, a literal."""
    if not isinstance(size, types.IntegerLiteral):
        raise TypeError(f"lanes(number, size) takes a literal number of bytes, got {size}")
    kind = Lanes(number, size.literal_value * 8 // number.bitwidth)
    return kind(number, size), lambda context, builder, signature, args: repeated(builder, args[0], kind.count)


def _filled(context, number, like):
    """As many lanes as `like` has."""
    return like(number, like), lambda context, builder, signature, args: repeated(builder, args[0], like.count)


def _count_of(context, lanes):
    return types.int64(lanes), lambda context, builder, signature, args: ir.IntType(64)(lanes.count)


def _address(context: Any, builder: Any, kind: Any, vector: Any, array: Any, row: Any, column: Any, *_: Any) -> Any:
    if kind.ndim != 2 or kind.layout != "C":
        raise TypeError(f"lanes are loaded from contiguous arrays of two dimensions, not from {kind}")
    struct = context.make_array(kind)(context, builder, array)
    line = builder.mul(row, cgutils.unpack_tuple(builder, struct.shape)[1])
    return builder.bitcast(builder.gep(struct.data, [builder.add(line, column)]), vector.as_pointer())


def _load(context, array, row, column, like):
    def generate(context, builder, signature, args):
        vector = context.get_value_type(like)
        place = _address(context, builder, array, vector, *args)
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return like(array, types.intp, types.intp, like), generate


def _store(context, array, row, column, lanes):
    def generate(context, builder, signature, args):
        place = _address(context, builder, array, args[3].type, *args)
        builder.store(args[3], place, align=array.dtype.bitwidth // 8)

    return types.void(array, types.intp, types.intp, lanes), generate


def _stream(context, array, row, column, lanes, past):
    """As `store`; with `past`, whole cache lines bypass the caches.

    Other threads see them after `ordered`.
    """

    def generate(context, builder, signature, args):
        place = _address(context, builder, array, args[3].type, *args)
        align = array.dtype.bitwidth // 8
        if lanes.count * align % _LINE:
            builder.store(args[3], place, align=align)
            return
        offset = builder.and_(builder.ptrtoint(place, ir.IntType(64)), ir.IntType(64)(_LINE - 1))
        # LLVM stores past the caches at aligned addresses only.
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
    """Asks the cache for lanes needed soon. Ignores a single lane, and addresses behind the array."""

    def generate(context, builder, signature, args):
        if like.count == 1:
            return
        place = _address(context, builder, array, ir.IntType(8), *args)
        function = ir.FunctionType(ir.VoidType(), [place.type, *[ir.IntType(32)] * 3])
        prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
        size = like.count * like.element.bitwidth // 8
        for start in range(0, size, _LINE):
            line = builder.gep(place, [ir.IntType(64)(start)])
            for_reading = ir.IntType(32)(0)
            data_cache = ir.IntType(32)(1)
            builder.call(prefetch, [line, for_reading, ir.IntType(32)(_L2), data_cache])

    return types.void(array, types.intp, types.intp, like), generate


def _store_bits(context, array, index, flags):
    """Stores flags as bits from byte ``array[index]`` on, the first one lowest, if they fill whole bytes."""

    def generate(context, builder, signature, args):
        if flags.count % 8:
            return
        number = builder.bitcast(args[2], ir.IntType(flags.count))
        struct = context.make_array(array)(context, builder, args[0])
        place = builder.gep(struct.data, [args[1]])
        builder.store(number, builder.bitcast(place, number.type.as_pointer()), align=1)

    return types.void(array, types.intp, flags), generate


def _put_bits(context, array, start, position, flags):
    """Stores flags as bits from bit `position` behind byte ``array[start]`` on.

    Several flags fill whole bytes. A single one, at a byte's first bit, clears the rest of the byte.
    """

    def generate(context, builder, signature, args):
        struct = context.make_array(array)(context, builder, args[0])
        byte = builder.add(args[1], builder.lshr(args[2], ir.IntType(64)(3)))
        place = builder.gep(struct.data, [byte])
        if flags.count > 1:
            number = builder.bitcast(args[3], ir.IntType(flags.count))
            builder.store(number, builder.bitcast(place, number.type.as_pointer()), align=1)
            return
        shift = builder.trunc(builder.and_(args[2], ir.IntType(64)(7)), ir.IntType(8))
        bit = builder.shl(builder.zext(builder.bitcast(args[3], ir.IntType(1)), ir.IntType(8)), shift)
        is_first = builder.icmp_unsigned("==", shift, ir.IntType(8)(0))
        before = builder.select(is_first, ir.IntType(8)(0), builder.load(place))
        builder.store(builder.or_(before, bit), place)

    return types.void(array, types.intp, types.intp, flags), generate


def _load_bits(context, array, start, position, like):
    """Flags for as many lanes as `like` has, as `put_bits` stored them."""
    kind = Flags(like.count)

    def generate(context, builder, signature, args):
        struct = context.make_array(array)(context, builder, args[0])
        byte = builder.add(args[1], builder.lshr(args[2], ir.IntType(64)(3)))
        place = builder.gep(struct.data, [byte])
        vector = context.get_value_type(kind)
        if like.count > 1:
            number = ir.IntType(like.count)
            return builder.bitcast(builder.load(builder.bitcast(place, number.as_pointer()), align=1), vector)
        shift = builder.trunc(builder.and_(args[2], ir.IntType(64)(7)), ir.IntType(8))
        return builder.bitcast(builder.trunc(builder.lshr(builder.load(place), shift), ir.IntType(1)), vector)

    return kind(array, types.intp, types.intp, like), generate


def _where(context, flags, a, b):
    """Selects `a` in lanes with a set flag, otherwise `b`. Both are lanes, or a number for all lanes."""
    element = a.element if isinstance(a, Lanes) else a
    kind = Lanes(element, flags.count)

    def generate(context, builder, signature, args):
        if_set = _as_lanes(builder, args[1], a, kind.count)
        otherwise = _as_lanes(builder, args[2], b, kind.count)
        return builder.select(args[0], if_set, otherwise)

    return kind(flags, a, b), generate


def call_intrinsic(builder: Any, name: str, *vectors: Any) -> Any:
    kind = vectors[0].type
    function = ir.FunctionType(kind, [kind] * len(vectors))
    # The names of LLVM's intrinsics end in the type, as llvm.fma.v8f32.
    mangled = f"{name}.v{kind.count}{kind.element.intrinsic_name}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, mangled), vectors)


def _multiply_add(context, a, b, c):
    """a * b + c, rounded once. Each is lanes, or a number for all lanes."""
    kinds = (a, b, c)
    kind = next(each for each in kinds if isinstance(each, Lanes))

    def generate(context, builder, signature, args):
        lanes = [_as_lanes(builder, value, each, kind.count) for value, each in zip(args, kinds, strict=True)]
        return call_intrinsic(builder, "llvm.fma", *lanes)

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
put_bits: Any = intrinsic(_put_bits)
load_bits: Any = intrinsic(_load_bits)
where: Any = intrinsic(_where)
multiply_add: Any = intrinsic(_multiply_add)


def _define(operation: Any, arity: int, generate: Any, compares: bool = False) -> None:
    """Defines an operator on lanes, or on lanes and a number for all lanes.

    Args:
        compares: the result is `Flags`, not lanes.
    """

    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            lanes = next((each for each in args if isinstance(each, Lanes)), None)
            if lanes is None or len(args) != arity or any(each not in (lanes, lanes.element) for each in args):
                return None
            result = Flags(lanes.count) if compares else lanes
            return signature(result, *args)

    def lower(context, builder, sig, args):
        count = next(each.count for each in sig.args if isinstance(each, Lanes))
        operands = [_as_lanes(builder, value, kind, count) for value, kind in zip(args, sig.args, strict=True)]
        return generate(builder, *operands)

    infer_global(operation)(Template)
    signatures: list[tuple[Any, ...]] = [(Lanes,)]
    if arity == 2:
        # A number may stand on either side.
        signatures = [(Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)]
    for kinds in signatures:
        lower_builtin(operation, *kinds)(lower)


_define(operator.add, 2, ir.IRBuilder.fadd)
_define(operator.sub, 2, ir.IRBuilder.fsub)
_define(operator.mul, 2, ir.IRBuilder.fmul)
_define(operator.truediv, 2, ir.IRBuilder.fdiv)
_define(operator.neg, 1, ir.IRBuilder.fneg)
_define(abs, 1, lambda builder, a: call_intrinsic(builder, "llvm.fabs", a))
# Ordered comparisons are false for a NaN, as torch's are.
_define(operator.ge, 2, lambda builder, a, b: builder.fcmp_ordered(">=", a, b), compares=True)
_define(operator.lt, 2, lambda builder, a, b: builder.fcmp_ordered("<", a, b), compares=True)
_define(operator.eq, 2, lambda builder, a, b: builder.fcmp_ordered("==", a, b), compares=True)
