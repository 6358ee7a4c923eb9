# block mask causal
"""Block classification: is each 128 x 128 block of the mask empty, partial or full?

One program evaluates mask_mod on one block, tile by tile, and keeps one byte: no mask is ever in memory.

    Hm, rows, columns  heads of the mask, rows and columns of blocks
    m, n               query / key positions of a tile [TILE_M, 1] and [1, TILE_N]
    status             [Zm, Hm, rows, columns] int8: 0 empty, 1 partial, 2 full

Positions past Q_LEN do not count (their rows are never stored); a block that reaches past KV_LEN is never full.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "Hm", "rows", "columns", "Q_LEN", "KV_LEN"
    ]
)
def block_mask(
    status,
    Hm, rows, columns, Q_LEN, KV_LEN,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    column = (block % columns).to(tl.int32)
    row = (block // columns % rows).to(tl.int32)
    z = (block // columns // rows // Hm).to(tl.int32)
    h = (block // columns // rows % Hm).to(tl.int32)
    # does any position of the block attend, and is any denied? Kept per element of a tile, reduced once at the end
    allowed = tl.zeros([TILE_M, TILE_N], dtype=tl.int1)
    denied = tl.zeros([TILE_M, TILE_N], dtype=tl.int1)
    for tile_m in range(0, 128, TILE_M):
        offs_m = tile_m + tl.arange(0, TILE_M)
        row_m = row * 128 + offs_m
        m_counts = (row_m < Q_LEN)[:, None]
        for tile_n in range(0, 128, TILE_N):
            offs_n = tile_n + tl.arange(0, TILE_N)
            column_n = column * 128 + offs_n
            n_exists = (column_n < KV_LEN)[None, :]
            m = tl.minimum(row_m, Q_LEN - 1)[:, None]
            n = tl.minimum(column_n, KV_LEN - 1)[None, :]
            # ---- mask_mod: causal
            # mods/causal.py:26: return q_idx >= kv_idx
            mask_0 = m >= n
            attends = mask_0 & n_exists
            counts = m_counts
            allowed |= attends & counts
            denied |= (attends == 0) & counts
    any_allowed = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
    any_denied = tl.max(tl.max(denied.to(tl.int32), 1), 0) > 0
    all_allowed = any_allowed & (any_denied == 0)
    tl.store(status + block, any_allowed.to(tl.int8) + all_allowed.to(tl.int8))
