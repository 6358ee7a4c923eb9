# block status document and inner
"""Block classification: is each 128 x 128 block of the mask empty, partial or full?

One program takes CHUNK blocks of a row. Bounds of mask_mod decide most of them at once; what they cannot decide is evaluated position
by position, tile by tile. One byte a block is kept: no mask is ever in memory.

    Hm, rows, columns     heads of the mask, rows and columns of blocks
    m, n                  query / key positions of a tile [TILE_M, 1] and [1, TILE_N]

Positions past Q_LEN do not count (their rows are never stored); a block that reaches past KV_LEN is never full.
"""

import triton
import triton.language as tl


@triton.jit
def block_verdict(
    z, h, q_block, kv_block, Hm, rows, columns, Q_LEN, KV_LEN,
    zone0_min, zone0_max, zone1_min, zone1_max,
    ptr_ids, size_ids_0,  # captured by mask_mod document_and_inner
):
    """0: no position of the block attends, 2: every one does, 1: bounds alone do not tell. q_block or kv_block may be a vector."""
    q_min = q_block * 128
    q_max = tl.minimum(q_min + 127, Q_LEN - 1)
    kv_min = kv_block * 128
    kv_max = tl.minimum(kv_min + 127, KV_LEN - 1)
    zone0_place = (z * Hm + h).to(tl.int64) * rows + q_block
    zone0_low = tl.load(zone0_min + zone0_place, mask=q_block < rows, other=0)
    zone0_high = tl.load(zone0_max + zone0_place, mask=q_block < rows, other=0)
    zone1_place = (z * Hm + h).to(tl.int64) * columns + kv_block
    zone1_low = tl.load(zone1_min + zone1_place, mask=kv_block < columns, other=0)
    zone1_high = tl.load(zone1_max + zone1_place, mask=kv_block < columns, other=0)
    # ---- bounds of mask_mod: document_and_inner
    # mods/document.py:58: return document(b, h, q_idx, kv_idx) & inner(b, h, q_idx, kv_idx)
    verdict_0 = (zone0_low == zone1_low) & (zone0_low == zone0_high) & (zone1_low == zone1_high) & (q_min >= kv_max)
    verdict = ((zone0_low <= zone1_high) & (zone1_low <= zone0_high) & (q_max >= kv_min)).to(tl.int32) + verdict_0.to(tl.int32)
    # a block that reaches past KV_LEN is never full
    return tl.where((kv_block + 1) * 128 > KV_LEN, tl.minimum(verdict, 1), verdict)


@triton.jit
def evaluate(
    z, h, row, column, Q_LEN, KV_LEN,
    ptr_ids, size_ids_0,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    """The status of one block, by mask_mod itself."""
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
            # ---- mask_mod: document_and_inner
            # mods/document.py:47: return ids[q_idx] == ids[kv_idx]
            mask_0 = tl.load(ptr_ids + m, mask=m < size_ids_0, other=0)
            mask_1 = tl.load(ptr_ids + n, mask=n < size_ids_0, other=0)
            # mods/document.py:58: return document(b, h, q_idx, kv_idx) & inner(b, h, q_idx, kv_idx)
            mask_2 = (mask_0 == mask_1) & (m >= n)
            attends = mask_2 & n_exists
            allowed |= attends & m_counts
            denied |= (attends == 0) & m_counts
    any_allowed = tl.max(tl.max(allowed.to(tl.int32), 1), 0)
    any_denied = tl.max(tl.max(denied.to(tl.int32), 1), 0)
    return any_allowed * (2 - any_denied)


@triton.jit(
    do_not_specialize=[
        "Hm", "rows", "columns", "Q_LEN", "KV_LEN", "size_ids_0"
    ]
)
def block_status(
    status,  # int8 [Zm, Hm, rows, columns]: 0 empty, 1 partial, 2 full; written
    num_blocks,  # int32 [Zm, Hm, rows], zero before: how many are partial
    num_full,  # int32 [Zm, Hm, rows], zero before: how many are full
    Hm, rows, columns, Q_LEN, KV_LEN,
    zone0_min,  # int64 [Zm, Hm, rows], of a part of q_idx
    zone0_max,  # int64 [Zm, Hm, rows], of a part of q_idx
    zone1_min,  # int64 [Zm, Hm, columns], of a part of kv_idx
    zone1_max,  # int64 [Zm, Hm, columns], of a part of kv_idx
    ptr_ids, size_ids_0,  # captured by mask_mod document_and_inner
    CHUNK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
    chunks = tl.cdiv(columns, CHUNK)
    program = tl.program_id(0).to(tl.int64)
    line = program // chunks
    row = (line % rows).to(tl.int32)
    h = (line // rows % Hm).to(tl.int32)
    z = (line // rows // Hm).to(tl.int32)
    column = (program % chunks).to(tl.int32) * CHUNK + tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], dtype=tl.int32) + block_verdict(
        z, h, row, column, Hm, rows, columns, Q_LEN, KV_LEN,
        zone0_min, zone0_max, zone1_min, zone1_max,
        ptr_ids, size_ids_0,
    )
    found = tl.where(column < columns, tl.where(found == 1, 3, found), 0)  # 3: to be evaluated
    for _ in range(0, tl.sum((found == 3).to(tl.int32), 0)):
        at = tl.min(tl.where(found == 3, column, 2147483647), 0)
        block = evaluate(z, h, row, at, Q_LEN, KV_LEN, ptr_ids, size_ids_0, TILE_M, TILE_N)
        found = tl.where(column == at, block, found)
    tl.store(status + line * columns + column, found.to(tl.int8), mask=column < columns)
    tl.atomic_add(num_blocks + line, tl.sum((found == 1).to(tl.int32), 0), sem="relaxed")
    tl.atomic_add(num_full + line, tl.sum((found == 2).to(tl.int32), 0), sem="relaxed")
