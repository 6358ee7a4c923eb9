# backward dq relative bias d64 fp32
"""Attention backward, queries: dQ = dS K * scale, one pass over K and V.

With S = score_mod(Q K^T * scale) masked and P = softmax(S), recomputed tile by tile from what the forward pass has found of every row:

    dP = dO V^T,   grad = P (dP - delta) = d loss / d S,   dS = grad through the derivative of score_mod

One program computes one tile of BLOCK_M query rows of one head.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims; *_ROUNDED: padded to a power of two
    m, n           query / key positions     start_n     first key position of the current block
    top, share     [Z, Hq, 2, STATS_LEN]     from backward_delta: a row's largest score, log2 of its weight
    delta          [Z, Hq, STATS_LEN]        from there, too: row sums of O dO
"""

import triton
import triton.language as tl


@triton.jit
def read_32_bits(pointer):
    # tl.load, as an instruction that the compiler neither moves to an earlier step of the loop nor lays out otherwise
    LOAD: tl.constexpr = "ld.global.nc.b32 $0, [$1];"
    found = tl.inline_asm_elementwise(LOAD, "=r,l", [pointer], dtype=tl.int32, is_pure=True, pack=1)
    return found.to(pointer.dtype.element_ty, bitcast=True)


@triton.jit
def dq_block_mn(
    q, do, top, share, delta, dq,
    K, V, stride_kn, stride_vn,
    z, h, m, start_n, offs_m, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
    ptr_table, stride_table_0, arg_table_shape_1_floordiv_2,  # captured by score_mod relative_bias
    grad_table_0,
    BLOCK_N: tl.constexpr,
):
    """Add what one block of BLOCK_N keys contributes."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_N, D_QK_ROUNDED], [BLOCK_N, D_V_ROUNDED]; blocks start at a 64-bit offset, inside them 32 bits suffice
    in_block = tl.arange(0, BLOCK_N)[:, None]
    offs_d = tl.arange(0, 64)
    k_ptrs = K + start_n.to(tl.int64) * stride_kn + (in_block * stride_kn + offs_d[None, :])
    k = tl.load(k_ptrs, mask=(offs_n[:, None] < KV_LEN), other=0.0)
    offs_dv = tl.arange(0, 64)
    v_ptrs = V + start_n.to(tl.int64) * stride_vn + (in_block * stride_vn + offs_dv[None, :])
    v = tl.load(v_ptrs, mask=(offs_n[:, None] < KV_LEN), other=0.0)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N], float32
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    qk *= SM_SCALE
    n = offs_n[None, :]  # [1, BLOCK_N]; m is [BLOCK_M, 1]
    # ---- score_mod: relative_bias
    # mods/relative_bias.py:53: return score + table[h, kv_idx - q_idx + zero]
    score_0 = read_32_bits(ptr_table + h * stride_table_0 + arg_table_shape_1_floordiv_2 + n - m)
    score = qk + score_0

    # [BLOCK_M, BLOCK_N], the softmax itself. The difference first: exact where it matters, however large scores are
    p = tl.exp2(tl.fma(score - top[:, None], TO_LOG2, share[:, None]))
    grad = p * (dp - delta[:, None])  # d loss / d score_mod
    # ---- derivative of score_mod: relative_bias
    d_table_0 = grad
    ds = grad
    d_table_0_place = grad_table_0 + h * stride_table_0 + arg_table_shape_1_floordiv_2 + n - m
    tl.atomic_add(d_table_0_place, d_table_0, sem="relaxed")
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(
    do_not_specialize=[
        "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "STATS_LEN", "stride_qz", "stride_qh", "stride_qm", "stride_kz",
        "stride_kh", "stride_kn", "stride_vz", "stride_vh", "stride_vn", "stride_doz", "stride_doh",
        "stride_dom", "stride_dqz", "stride_dqh", "stride_dqm", "SM_SCALE", "TO_LOG2", "stride_table_0",
        "arg_table_shape_1_floordiv_2"
    ]
)
def backward_dq(
    K,  # float32 [Zkv, Hkv, KV_LEN, D_QK]
    V,  # float32 [Zkv, Hkv, KV_LEN, D_V]
    Q,  # float32 [Z, Hq, Q_LEN, D_QK]
    DO,  # float32 [Z, Hq, Q_LEN, D_V]
    TOPS,  # float32 [Z, Hq, 2, STATS_LEN]: top and share
    DELTA,  # float32 [Z, Hq, STATS_LEN]
    DQ,  # float32 written: as Q
    Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, STATS_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh,
    stride_kn, stride_vz, stride_vh, stride_vn, stride_doz, stride_doh, stride_dom, stride_dqz, stride_dqh,
    stride_dqm, SM_SCALE, TO_LOG2,
    ptr_table, stride_table_0, arg_table_shape_1_floordiv_2,  # captured by score_mod relative_bias
    grad_table_0,  # float32 gradient of table, positions share elements and add up
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # One program a query tile, the last rows first: under a causal mask they are the longest.
    q_blocks = tl.cdiv(Q_LEN, BLOCK_M)
    tile = tl.program_id(0)
    q_block = q_blocks - 1 - tile % q_blocks
    z = tile // q_blocks // Hq
    h = tile // q_blocks % Hq
    z_kv = z % Zkv  # K and V may have one batch entry that all queries share
    h_kv = h // GROUP_SIZE

    # these strides come in units of 16 bytes, so that the compiler knows that rows are aligned
    VECTOR: tl.constexpr = 4
    stride_qz, stride_qh = stride_qz.to(tl.int64) * VECTOR, stride_qh.to(tl.int64) * VECTOR
    stride_kz, stride_kh = stride_kz.to(tl.int64) * VECTOR, stride_kh.to(tl.int64) * VECTOR
    stride_vz, stride_vh = stride_vz.to(tl.int64) * VECTOR, stride_vh.to(tl.int64) * VECTOR
    stride_doz, stride_doh = stride_doz.to(tl.int64) * VECTOR, stride_doh.to(tl.int64) * VECTOR
    stride_qm, stride_kn, stride_vn = stride_qm * VECTOR, stride_kn * VECTOR, stride_vn * VECTOR
    stride_dom = stride_dom * VECTOR
    K += z_kv.to(tl.int64) * stride_kz + h_kv.to(tl.int64) * stride_kh
    V += z_kv.to(tl.int64) * stride_vz + h_kv.to(tl.int64) * stride_vh

    offs_m = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = offs_m.to(tl.int64)[:, None]
    offs_d = tl.arange(0, 64)
    offs_dv = tl.arange(0, 64)
    q_mask = (offs_m[:, None] < Q_LEN)
    do_mask = (offs_m[:, None] < Q_LEN)
    q_ptrs = Q + z.to(tl.int64) * stride_qz + h.to(tl.int64) * stride_qh + rows * stride_qm + offs_d[None, :]
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)
    do_ptrs = DO + z.to(tl.int64) * stride_doz + h.to(tl.int64) * stride_doh + rows * stride_dom + offs_dv[None, :]
    do = tl.load(do_ptrs, mask=do_mask, other=0.0)
    stats = (z.to(tl.int64) * Hq + h) * STATS_LEN
    top = tl.load(TOPS + 2 * stats + offs_m)
    share = tl.load(TOPS + 2 * stats + STATS_LEN + offs_m)
    delta = tl.load(DELTA + stats + offs_m)

    dq = tl.zeros([BLOCK_M, 64], dtype=tl.float32)
    m = offs_m[:, None]  # [BLOCK_M, 1]

    for step in range(0, tl.cdiv(KV_LEN, BLOCK_N)):
        start_n = step * BLOCK_N
        start_n = tl.multiple_of(start_n, BLOCK_N)
        dq = dq_block_mn(
            q, do, top, share, delta, dq,
            K, V, stride_kn, stride_vn,
            z, h, m, start_n, offs_m, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
            ptr_table, stride_table_0, arg_table_shape_1_floordiv_2,
            grad_table_0,
            BLOCK_N,
        )

    dq *= SM_SCALE
    dq_ptrs = DQ + z.to(tl.int64) * stride_dqz + h.to(tl.int64) * stride_dqh + rows * stride_dqm + offs_d[None, :]
    tl.store(dq_ptrs, dq.to(DQ.dtype.element_ty), mask=q_mask)
