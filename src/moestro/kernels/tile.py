"""The register tiles that all matrix work is made of, as Numba intrinsics.

They are written as LLVM vectors because the loop vectoriser, given the same loops in Python, chooses other widths and
interleavings from one shape to the next.

R weight rows, M activation rows, K the length of a dot product.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from moestro.kernels.jit import VECTOR_WIDTH, WIDE_REGISTERS, device, literal_intrinsic
from moestro.kernels.memory import BYTES, F32, I32, I64, broadcast, item_size, load_values, shaped

# Rows of weights and of activations a tile keeps in registers: R * M sums and R weights fit 32, or 16 on AVX2.
TILE_R = 4
TILE_M = 6 if WIDE_REGISTERS else 2

# Few activation rows wait for memory, and memory is fastest read in one stream: long rows of weights come at 26 GB/s
# on one core one after the other, at 12 four beside each other (1024 x 1024 bfloat16, Zen 4), while the activations, so
# many values, stay in the first cache. Of short rows (keys of one head) the sums cost more than that.
LONG_ROW = 256
ONE_STREAM_VALUES = 4096

VECTOR = VECTOR_WIDTH


def _add_up(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each vector's numbers, as a vector whose first lanes are these sums, for one vector or four.

    Halves are added to halves, in one order however many vectors there are. Four together take 14 instructions, one by
    one 32, which for heads of 64 numbers is more than the products themselves.
    """
    width = VECTOR
    while len(vectors) > 1:
        width //= 2
        vectors = [_add_halves(builder, a, b, width) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    (vector,) = vectors
    while width > 1:
        width //= 2
        vector = _add_halves(builder, vector, vector, width)
    return vector


def _add_halves(builder: Any, a: Any, b: Any, half: int) -> Any:
    """Of two vectors of groups of 2 * half numbers, each group's lower half plus its upper half; those of `a` first."""
    lanes = [lane for start in range(0, 2 * VECTOR, 2 * half) for lane in range(start, start + half)]
    indices = ir.VectorType(I32, VECTOR)
    low, high = (
        builder.shuffle_vector(a, b, ir.Constant(indices, [lane + offset for lane in lanes])) for offset in (0, half)
    )
    return builder.fadd(low, high)


@literal_intrinsic
def _dot_tile(
    typingctx: Any,
    tag: Any,
    w: Any,
    w_stride: Any,
    x: Any,
    x_stride: Any,
    y: Any,
    y_stride: Any,
    K: Any,
    R: Any,
    M: Any,
) -> Any:
    """y[m, r] = sum over k of w[r, k] * x[m, k] for R rows in the tag's format and M float32 rows, R and M literal.

    Each of the R * M sums has vector registers of its own, so a sum is the same whatever R and M: a result does
    not depend on what else is in the batch. Addresses and strides are int64, strides in elements.
    """
    num_r, num_m = R.literal_value, M.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tag = signature.args[0]
        _, w, w_stride, x, x_stride, y, y_stride, K = args[:8]
        w_rows = [builder.add(w, builder.mul(w_stride, I64(r * BYTES[tag]))) for r in range(num_r)]
        x_rows = [builder.add(x, builder.mul(x_stride, I64(m * 4))) for m in range(num_m)]
        cells = [(m, r) for m in range(num_m) for r in range(num_r)]
        sums = {cell: cgutils.alloca_once(builder, shaped(F32, VECTOR)) for cell in cells}
        for cell in cells:
            builder.store(ir.Constant(shaped(F32, VECTOR), [0.0] * VECTOR), sums[cell])

        def add_products(k: Any, rest: Any) -> None:
            w_values = [load_values(builder, row, k, tag, VECTOR, rest) for row in w_rows]
            for m, x_row in enumerate(x_rows):
                x_value = load_values(builder, x_row, k, types.float32, VECTOR, rest)
                for r, w_value in enumerate(w_values):
                    product = builder.fmul(w_value, x_value, flags=("contract",))
                    total = builder.fadd(builder.load(sums[m, r]), product, flags=("contract",))
                    builder.store(total, sums[m, r])

        whole = builder.and_(K, I64(-VECTOR))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(VECTOR), I64) as (k, _):
            add_products(k, None)
        with builder.if_then(builder.icmp_signed("!=", whole, K), likely=False):
            add_products(whole, builder.sub(K, whole))
        first_lanes = ir.Constant(ir.VectorType(I32, num_r), list(range(num_r)))
        for m in range(num_m):
            totals = _add_up(builder, [builder.load(sums[m, r]) for r in range(num_r)])
            totals = builder.shuffle_vector(totals, totals, first_lanes)
            row = builder.gep(builder.inttoptr(y, F32.as_pointer()), [builder.mul(y_stride, I64(m))])
            builder.store(totals, builder.bitcast(row, totals.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 7, R, M), codegen


@literal_intrinsic
def _mix_tile(
    typingctx: Any,
    tag: Any,
    v: Any,
    v_stride: Any,
    p: Any,
    p_stride: Any,
    acc: Any,
    acc_stride: Any,
    count: Any,
    M: Any,
    columns: Any,
    width: Any,
) -> Any:
    """acc[m, :] += sum over j of p[m, j] * v[j, :] for M rows, `columns` vectors of `width` values, all literal.

    p and acc are float32, v has the tag's format; addresses and strides are int64, strides in elements.
    """
    num_m, num_c, size = M.literal_value, columns.literal_value, width.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tag = signature.args[0]
        _, v, v_stride, p, p_stride, acc, acc_stride, count = args[:8]
        cells = [(m, c) for m in range(num_m) for c in range(num_c)]
        acc_rows = [builder.add(acc, builder.mul(acc_stride, I64(m * 4))) for m in range(num_m)]
        p_rows = [builder.add(p, builder.mul(p_stride, I64(m * 4))) for m in range(num_m)]
        sums = {}
        for m, c in cells:
            sums[m, c] = cgutils.alloca_once(builder, shaped(F32, size))
            builder.store(load_values(builder, acc_rows[m], I64(c * size), types.float32, size), sums[m, c])
        with cgutils.for_range(builder, count, intp=I64) as loop:
            row = builder.mul(loop.index, v_stride)
            values = [load_values(builder, v, builder.add(row, I64(c * size)), tag, size) for c in range(num_c)]
            for m in range(num_m):
                weight = load_values(builder, p_rows[m], loop.index, types.float32, 1)
                if size > 1:
                    weight = broadcast(builder, weight, size)
                for c in range(num_c):
                    product = builder.fmul(weight, values[c], flags=("contract",))
                    builder.store(builder.fadd(builder.load(sums[m, c]), product, flags=("contract",)), sums[m, c])
        for m, c in cells:
            pointer = builder.gep(builder.inttoptr(acc_rows[m], F32.as_pointer()), [I64(c * size)])
            if size > 1:
                pointer = builder.bitcast(pointer, shaped(F32, size).as_pointer())
            builder.store(builder.load(sums[m, c]), pointer, align=4)
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 7, M, columns, width), codegen


@device
def dot_rows(
    tag: Any,
    w: int,
    w_stride: int,
    R: int,
    x: int,
    x_stride: int,
    M: int,
    y: int,
    y_stride: int,
    K: int,
) -> None:
    """y[m, r] = w[r] . x[m] for R <= TILE_R rows in the tag's format and M <= TILE_M float32 rows."""
    if R < TILE_R or (K >= LONG_ROW and (M == 1 or (M <= 4 and M * K <= ONE_STREAM_VALUES))):
        for r in range(R):
            w_row = w + r * w_stride * item_size(tag)
            _dot_row(tag, w_row, w_stride, x, x_stride, M, y + r * 4, y_stride, K)
    elif M == 1:
        _dot_tile(tag, w, w_stride, x, x_stride, y, y_stride, K, TILE_R, 1)
    elif M == 2:
        _dot_tile(tag, w, w_stride, x, x_stride, y, y_stride, K, TILE_R, 2)
    elif TILE_M > 2:
        if M == 3:
            _dot_tile(tag, w, w_stride, x, x_stride, y, y_stride, K, TILE_R, 3)
        elif M == 4:
            _dot_tile(tag, w, w_stride, x, x_stride, y, y_stride, K, TILE_R, 4)
        elif M == 5:
            _dot_tile(tag, w, w_stride, x, x_stride, y, y_stride, K, TILE_R, 5)
        else:
            _dot_tile(tag, w, w_stride, x, x_stride, y, y_stride, K, TILE_R, 6)


@device
def _dot_row(tag: Any, w: int, w_stride: int, x: int, x_stride: int, M: int, y: int, y_stride: int, K: int) -> None:
    """dot_rows for one weight row."""
    m = 0
    while M - m >= 2:
        x_rows, y_cells = x + m * x_stride * 4, y + m * y_stride * 4
        if TILE_M > 2 and M - m >= 4:
            _dot_tile(tag, w, w_stride, x_rows, x_stride, y_cells, y_stride, K, 1, 4)
            m += 4
        elif TILE_M > 2 and M - m == 3:
            _dot_tile(tag, w, w_stride, x_rows, x_stride, y_cells, y_stride, K, 1, 3)
            m += 3
        else:
            _dot_tile(tag, w, w_stride, x_rows, x_stride, y_cells, y_stride, K, 1, 2)
            m += 2
    if m < M:
        _dot_tile(tag, w, w_stride, x + m * x_stride * 4, x_stride, y + m * y_stride * 4, y_stride, K, 1, 1)


@device
def mix_rows(
    tag: Any, v: int, v_stride: int, count: int, p: int, p_stride: int, M: int, acc: int, acc_stride: int, width: int
) -> None:
    """acc[m] += sum over j < count of p[m, j] * v[j] for M <= TILE_M rows of `width` values."""
    size = item_size(tag)
    column = 0
    while column + 2 * VECTOR <= width:
        v_part, acc_part = v + column * size, acc + column * 4
        if M == 1:
            _mix_tile(tag, v_part, v_stride, p, p_stride, acc_part, acc_stride, count, 1, 2, VECTOR)
        elif M == 2:
            _mix_tile(tag, v_part, v_stride, p, p_stride, acc_part, acc_stride, count, 2, 2, VECTOR)
        elif TILE_M > 2:
            if M == 3:
                _mix_tile(tag, v_part, v_stride, p, p_stride, acc_part, acc_stride, count, 3, 2, VECTOR)
            elif M == 4:
                _mix_tile(tag, v_part, v_stride, p, p_stride, acc_part, acc_stride, count, 4, 2, VECTOR)
            elif M == 5:
                _mix_tile(tag, v_part, v_stride, p, p_stride, acc_part, acc_stride, count, 5, 2, VECTOR)
            else:
                _mix_tile(tag, v_part, v_stride, p, p_stride, acc_part, acc_stride, count, 6, 2, VECTOR)
        column += 2 * VECTOR
    for m in range(M):
        p_row, acc_row = p + m * p_stride * 4, acc + m * acc_stride * 4
        for rest in range(column, width):
            _mix_tile(tag, v + rest * size, v_stride, p_row, p_stride, acc_row + rest * 4, acc_stride, count, 1, 1, 1)
