"""Memory by address for Numba kernels: number formats, integers, atomics; LLVM code for what Python cannot spell."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from moestro.kernels.jit import intrinsic

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
STORAGE: dict[Any, Any] = {types.float32: F32, types.uint16: I16, types.int16: ir.HalfType()}
BYTES: dict[Any, int] = {types.float32: 4, types.uint16: 2, types.int16: 2}


def shaped(scalar: Any, width: int) -> Any:
    return scalar if width == 1 else ir.VectorType(scalar, width)


def broadcast(builder: Any, value: Any, width: int) -> Any:
    vector = ir.VectorType(value.type, width)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, width), [0] * width)
    )


def load_values(builder: Any, address: Any, index: Any, tag: Any, width: int, rest: Any = None) -> Any:
    """Load `width` values from element `index` behind an address, as float32.

    rest: load only so many, and 0 for the others, without touching memory behind them.
    """
    storage = STORAGE[tag]
    pointer = builder.gep(builder.inttoptr(address, storage.as_pointer()), [index])
    if width > 1:
        pointer = builder.bitcast(pointer, shaped(storage, width).as_pointer())
    if rest is None:
        value = builder.load(pointer, align=BYTES[tag])
    else:
        value = _load_masked(builder, pointer, shaped(storage, width), BYTES[tag], rest)
    if tag == types.int16:
        return builder.fpext(value, shaped(F32, width))
    if tag == types.uint16:
        wide = shaped(I32, width)
        sixteen = I32(16) if width == 1 else ir.Constant(wide, [16] * width)
        return builder.bitcast(builder.shl(builder.zext(value, wide), sixteen), shaped(F32, width))
    return value


def _load_masked(builder: Any, pointer: Any, vector: Any, align: int, count: Any) -> Any:
    width = vector.count
    lanes = ir.Constant(ir.VectorType(I64, width), list(range(width)))
    mask = builder.icmp_signed("<", lanes, broadcast(builder, count, width))
    storage = {F32: "f32", I16: "i16", ir.HalfType(): "f16"}[vector.element]
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [pointer.type, I32, mask.type, vector]),
        f"llvm.masked.load.v{width}{storage}.p0",
    )
    zero = ir.Constant(vector, [0] * width if vector.element == I16 else [0.0] * width)
    return builder.call(function, [pointer, I32(align), mask, zero])


@intrinsic
def load(typingctx: Any, tag: Any, address: Any, index: Any) -> Any:
    """The float32 value of element `index` behind an address, in the format of the tag."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_values(builder, args[1], args[2], signature.args[0], 1)

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic
def store(typingctx: Any, tag: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a float32 as element `index` behind an address, rounded to nearest even into the format of the tag."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, address, index, value = args
        tag = signature.args[0]
        pointer = builder.gep(builder.inttoptr(address, STORAGE[tag].as_pointer()), [index])
        if tag == types.uint16:
            bits = builder.bitcast(value, I32)
            odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
            rounded = builder.add(builder.add(bits, I32(0x7FFF)), odd)
            # A NaN whose payload rounds up would turn into an infinity.
            kept = builder.select(builder.fcmp_unordered("uno", value, value), I32(0x7FC00000), rounded)
            value = builder.trunc(builder.lshr(kept, I32(16)), I16)
        elif tag == types.int16:
            value = builder.fptrunc(value, ir.HalfType())
        builder.store(value, pointer, align=BYTES[tag])
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.float32), codegen


@intrinsic
def load_int32(typingctx: Any, address: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], I32.as_pointer()), [args[1]])
        return builder.sext(builder.load(pointer), I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store_int32(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(builder.inttoptr(args[0], I32.as_pointer()), [args[1]])
        builder.store(builder.trunc(args[2], I32), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def load_int64(typingctx: Any, address: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(builder.inttoptr(args[0], I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store_int64(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(builder.inttoptr(args[0], I64.as_pointer()), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2^exponent in float32, for a whole float32 exponent in -126..127. In Python the int32 sums would become int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], I32), I32(127))
        return builder.bitcast(builder.shl(biased, I32(23)), F32)

    return types.float32(types.float32), codegen


@intrinsic
def item_size(typingctx: Any, tag: Any) -> Any:
    """Bytes of a value in the format of the tag."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return I64(BYTES[signature.args[0]])

    return types.int64(tag), codegen


@intrinsic
def new_counter(typingctx: Any) -> Any:
    """Address of an int64 with value 0 that lives until the calling kernel returns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cell = cgutils.alloca_once(builder, I64)
        builder.store(I64(0), cell)
        return builder.ptrtoint(cell, I64)

    return types.int64(), codegen


@intrinsic
def keep_alive(typingctx: Any, array: Any) -> Any:
    """Nothing, but a use of the array: Numba frees an array after its last use, and its address is not one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def address_of(typingctx: Any, array: Any) -> Any:
    """Address of an array's first element; see keep_alive. Numba would not cache a kernel with `array.ctypes.data`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 behind an address, as one step among threads; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen
