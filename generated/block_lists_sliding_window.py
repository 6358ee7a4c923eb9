# block lists sliding window
"""Block lists: from bounds of mask_mod to the ordered lists that attention kernels walk.

One program compacts one row: the positions of its partial blocks, and of its full ones, in
ascending order.

    Hm, rows, columns   heads of the mask, blocks of queries and of keys      width   of both index lists
"""

import triton
import triton.language as tl


@triton.jit
def block_verdict(
    z, h, q_block, kv_block, Hm, rows, columns, Q_LEN, KV_LEN,
    arg_window,  # captured by mask_mod sliding_window
):
    """0: no position of the block attends, 2: every one does, 1: bounds alone do not tell. q_block or kv_block may be a vector."""
    q_min = q_block * 128
    q_max = tl.minimum(q_min + 127, Q_LEN - 1)
    kv_min = kv_block * 128
    kv_max = tl.minimum(kv_min + 127, KV_LEN - 1)
    # ---- bounds of mask_mod: sliding_window
    # mods/sliding_window.py:46: return (q_idx >= kv_idx) & (q_idx - kv_idx < window)
    verdict = ((q_max >= kv_min) & (q_min - kv_max < arg_window)).to(tl.int32) + ((q_min >= kv_max) & (q_max - kv_min < arg_window)).to(tl.int32)
    # a block that reaches past KV_LEN is never full
    return tl.where((kv_block + 1) * 128 > KV_LEN, tl.minimum(verdict, 1), verdict)


@triton.jit(
    do_not_specialize=[
        "width", "Hm", "rows", "columns", "Q_LEN", "KV_LEN", "arg_window"
    ]
)
def block_lists(
    num_blocks,  # int32 [Zm, Hm, rows]: partial blocks, and undecided ones
    indices,  # int32 [Zm, Hm, rows, width]
    full_num_blocks,  # int32 [Zm, Hm, rows]: full blocks
    full_indices,  # int32 [Zm, Hm, rows, width]
    width, Hm, rows, columns, Q_LEN, KV_LEN,
    arg_window,  # captured by mask_mod sliding_window
    CHUNK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = line % rows
    h = line // rows % Hm
    z = line // rows // Hm
    indices += line * width
    count = tl.zeros([], dtype=tl.int32)
    full_indices += line * width
    full_count = tl.zeros([], dtype=tl.int32)
    for first in range(0, columns, CHUNK):
        column = first + tl.arange(0, CHUNK)
        found = tl.zeros([CHUNK], dtype=tl.int32) + block_verdict(
            z.to(tl.int32), h.to(tl.int32), row.to(tl.int32), column,
            Hm, rows, columns, Q_LEN, KV_LEN,
            arg_window,
        )
        found = tl.where(column < columns, found, 0)
        is_full = (found == 2).to(tl.int32)
        place = full_count + tl.cumsum(is_full, 0) - 1
        tl.store(full_indices + place, column, mask=(is_full != 0) & (place < width))
        full_count += tl.sum(is_full, 0)
        is_listed = (found == 1).to(tl.int32)
        place = count + tl.cumsum(is_listed, 0) - 1
        tl.store(indices + place, column, mask=(is_listed != 0) & (place < width))
        count += tl.sum(is_listed, 0)
    tl.store(num_blocks + line, count)
    tl.store(full_num_blocks + line, full_count)
