# block lists
"""Block lists: from the status of every block to the ordered lists that attention kernels walk.

One program compacts one row: the positions of its partial blocks, and of its full ones, in ascending order.

    status                   int8, 0 empty, 1 partial, 2 full; read through strides, so that a transposed view gives the lists
                             of a backward pass
    num_blocks, indices      [Zm, Hm, rows] and [Zm, Hm, rows, columns] int32: partial blocks
    full_num_blocks, full_indices                              the same for full blocks
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("Hm", "rows", "columns", "stride_z", "stride_h", "stride_row", "stride_column"))
def block_lists(
    status, num_blocks, indices, full_num_blocks, full_indices,
    Hm, rows, columns, stride_z, stride_h, stride_row, stride_column,
    CHUNK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = line % rows
    h = line // rows % Hm
    z = line // rows // Hm
    status += z * stride_z + h * stride_h + row * stride_row
    indices += line * columns
    count = tl.zeros([], dtype=tl.int32)
    full_indices += line * columns
    full_count = tl.zeros([], dtype=tl.int32)
    for first in range(0, columns, CHUNK):
        column = first + tl.arange(0, CHUNK)
        found = tl.load(status + column.to(tl.int64) * stride_column, mask=column < columns, other=0)
        is_full = (found == 2).to(tl.int32)
        tl.store(full_indices + full_count + tl.cumsum(is_full, 0) - 1, column, mask=is_full != 0)
        full_count += tl.sum(is_full, 0)
        is_listed = (found == 1).to(tl.int32)
        tl.store(indices + count + tl.cumsum(is_listed, 0) - 1, column, mask=is_listed != 0)
        count += tl.sum(is_listed, 0)
    tl.store(num_blocks + line, count)
    tl.store(full_num_blocks + line, full_count)
