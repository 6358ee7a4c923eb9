# forward causal d128 bf16
"""Attention forward: O = softmax(score_mod(Q K^T * scale) masked) V, one pass over K and V with a running softmax.

One program computes one tile of BLOCK_M query rows of one head.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims; *_ROUNDED: padded to a power of two
    m, n           query / key positions     start_n     first key position of the current block
    acc            [BLOCK_M, D_V_ROUNDED]    unnormalised output
    m_i            [BLOCK_M]                 running row maximum of the scores, still without scale
    l_i            [BLOCK_M]                 sum of exp2(score in base 2 - shift_i), where shift_i is m_i in base 2 (see limits)
    lse            [Z, Hq, Q_LEN]            natural logarithm of the sum of exp(score), -inf for an empty row
    kv_num_blocks  [Zm, Hm, rows]            how many KV blocks a row of query blocks visits (Zm, Hm: 1 or Z, Hq)
    kv_indices     [Zm, Hm, rows, columns]   which ones, in order. "Partial" blocks need mask_mod, "full" blocks do not
"""

import triton
import triton.language as tl


@triton.jit
def limits(TO_LOG2):
    """HUGE and STEP: scores of a row are multiplied by TO_LOG2, but by the power of two STEP if its largest one is HUGE or more.

    exp2(score * TO_LOG2 - shift) is one multiply-add, of the exact product, while shift = m * TO_LOG2 is rounded. What that is off by, a
    row's weights have in common, and it cancels: up to 2**32. Beyond that, float32 numbers are so far apart
    that all scores but the largest have weight 0 in any base, and m * STEP is exact.
    """
    STEP = (TO_LOG2.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return 1073741824.0 / TO_LOG2, STEP


@triton.jit
def forward_block_mn(
    q, acc, l_i, m_i, shift_i,  # the query tile, its output so far, its softmax so far
    desc_k, desc_v, z_kv, h_kv,
    z, h, m, start_n, is_full, KV_LEN, TO_LOG2, HUGE, STEP,
    BLOCK_N: tl.constexpr,
):
    """Fold one block of BLOCK_N keys into the running softmax."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    # rows past KV_LEN and columns past the head dim arrive as zeros
    k = desc_k.load([z_kv, h_kv, start_n, 0]).reshape(BLOCK_N, 128)
    qk = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N], float32
    score = qk  # TO_LOG2 carries the scale

    # n is [1, BLOCK_N], m [BLOCK_M, 1]. Past KV_LEN too: loads that could leave their tensor are masked
    n = offs_n[None, :]
    if not is_full:  # one branch for the whole tile: full blocks pay nothing for the mask
        end_n = KV_LEN
        # ---- mask_mod: causal
        # mods/causal.py:26: return q_idx >= kv_idx
        mask_0 = n <= tl.minimum(m, end_n - 1)
        score = tl.where(mask_0, score, float("-inf"))

    # running softmax in base 2: exp(s) = exp2(s * log2(e)), and the product folds into one fused multiply-add
    m_new = tl.maximum(m_i, tl.max(score, 1))
    usual = tl.abs(m_new) < HUGE
    factor = tl.where(usual, TO_LOG2, STEP)
    shift = tl.fma(m_new, factor, 0.0)  # no product, which the compiler would put into the difference below unrounded
    shift_safe = tl.where(m_new == float("-inf"), 0.0, shift)  # a row with nothing to attend to yet: avoid inf - inf
    # a sum that was shifted in the other way is of scores that are much smaller
    alpha = tl.exp2(tl.where(usual == (tl.abs(m_i) < HUGE), shift_i - shift_safe, float("-inf")))
    p = tl.exp2(tl.fma(score, factor[:, None], -shift_safe[:, None]))  # [BLOCK_M, BLOCK_N]
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = desc_v.load([z_kv, h_kv, start_n, 0]).reshape(BLOCK_N, 128)
    acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, l_i, m_new, shift


@triton.jit
def listed_block(step, num_blocks, kv_indices, num_full_blocks, full_kv_indices, STEPS: tl.constexpr):
    """The KV block of a step: the partial blocks first, then the full ones. Past the end, the last one again."""
    at = step // STEPS
    at = tl.maximum(tl.minimum(at, num_blocks + num_full_blocks - 1), 0)
    return tl.load(tl.where(at < num_blocks, kv_indices + at, full_kv_indices + (at - num_blocks)))


@triton.jit
def forward_inner(
    q, acc, l_i, m_i, shift_i,
    desc_k, desc_v, z_kv, h_kv,
    z, h, m, KV_LEN, TO_LOG2, HUGE, STEP,
    num_blocks, kv_indices, num_full_blocks, full_kv_indices,
    BLOCK_N: tl.constexpr,
):
    """Visit the listed KV blocks; each one of 128 keys is walked in steps of BLOCK_N."""
    STEPS: tl.constexpr = 128 // BLOCK_N
    steps = (num_blocks + num_full_blocks) * STEPS
    block = listed_block(0, num_blocks, kv_indices, num_full_blocks, full_kv_indices, STEPS)
    for step in range(0, steps):
        start_n = block * 128 + (step % STEPS) * BLOCK_N
        # a step ahead, so that no load of K waits for it
        block = listed_block(step + 1, num_blocks, kv_indices, num_full_blocks, full_kv_indices, STEPS)
        is_full = step >= num_blocks * STEPS
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l_i, m_i, shift_i = forward_block_mn(
            q, acc, l_i, m_i, shift_i,
            desc_k, desc_v, z_kv, h_kv,
            z, h, m, start_n, is_full, KV_LEN, TO_LOG2, HUGE, STEP,
            BLOCK_N,
        )
    return acc, l_i, m_i, shift_i


@triton.jit(
    do_not_specialize=[
        "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "stride_qz", "stride_qh", "stride_qm", "stride_kz", "stride_kh",
        "stride_kn", "stride_vz", "stride_vh", "stride_vn", "stride_oz", "stride_oh", "stride_om", "TO_LOG2",
        "mask_stride_z", "mask_stride_h", "mask_columns", "full_mask_columns"
    ]
)
def forward(
    desc_k,  # [Zkv, Hkv, KV_LEN, D_QK] as TMA descriptor
    desc_v,  # [Zkv, Hkv, KV_LEN, D_V] as TMA descriptor
    Q,  # bfloat16 [Z, Hq, Q_LEN, D_QK]
    O,  # bfloat16 [Z, Hq, Q_LEN, D_V] in any strides, written
    LSE,  # float32 [Z, Hq, Q_LEN], written
    Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_om, TO_LOG2, mask_stride_z, mask_stride_h,
    mask_columns, full_mask_columns,
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # One program a query tile. Tiles of one head follow one another, so its K and V stay in the L2 cache; the last
    # rows come first, because under a causal mask they are the longest.
    q_blocks = tl.cdiv(Q_LEN, BLOCK_M)
    tile = tl.program_id(0)
    q_block = q_blocks - 1 - tile % q_blocks
    z = tile // q_blocks // Hq
    h = tile // q_blocks % Hq
    z_kv = z % Zkv  # K and V may have one batch entry that all queries share
    h_kv = h // GROUP_SIZE

    # these strides come in units of 16 bytes, so that the compiler knows that rows are aligned
    VECTOR: tl.constexpr = 8
    stride_qz, stride_qh = stride_qz.to(tl.int64) * VECTOR, stride_qh.to(tl.int64) * VECTOR
    stride_kz, stride_kh = stride_kz.to(tl.int64) * VECTOR, stride_kh.to(tl.int64) * VECTOR
    stride_vz, stride_vh = stride_vz.to(tl.int64) * VECTOR, stride_vh.to(tl.int64) * VECTOR
    stride_qm, stride_kn, stride_vn = stride_qm * VECTOR, stride_kn * VECTOR, stride_vn * VECTOR

    Q += z.to(tl.int64) * stride_qz + h.to(tl.int64) * stride_qh

    offs_m = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, 128)
    q_ptrs = Q + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_m[:, None] < Q_LEN), other=0.0)

    acc = tl.zeros([BLOCK_M, 128], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    shift_i = m_i
    HUGE, STEP = limits(TO_LOG2)
    m = tl.minimum(offs_m, Q_LEN - 1)[:, None]  # [BLOCK_M, 1]; padding rows repeat the last one and are not stored

    # this tile's row in the block lists
    row = z.to(tl.int64) * mask_stride_z + h * mask_stride_h + q_block * BLOCK_M // 128
    acc, l_i, m_i, shift_i = forward_inner(
        q, acc, l_i, m_i, shift_i,
        desc_k, desc_v, z_kv, h_kv,
        z, h, m, KV_LEN, TO_LOG2, HUGE, STEP,
        tl.load(kv_num_blocks + row), kv_indices + row * mask_columns,
        tl.load(full_kv_num_blocks + row), full_kv_indices + row * full_mask_columns,
        BLOCK_N,
    )

    # an empty row has l_i = 0 and m_i = -inf: output 0, lse -inf
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    # log2 of the weight of a score m_i: of what rounding the shift has left, by l_i
    share = tl.where(empty, 0.0, tl.fma(m_i, tl.where(tl.abs(m_i) < HUGE, TO_LOG2, STEP), -shift_i) - tl.log2(l_i))
    acc = acc / l_i[:, None]
    LN2: tl.constexpr = 0.6931471805599453
    stats = (z.to(tl.int64) * Hq + h) * Q_LEN + offs_m
    tl.store(LSE + stats, m_i * (TO_LOG2 * LN2) - share * LN2, mask=offs_m < Q_LEN)
    offs_dv = tl.arange(0, 128)
    o_ptrs = O + z.to(tl.int64) * stride_oz + h.to(tl.int64) * stride_oh + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv[None, :]
    tl.store(o_ptrs, acc.to(O.dtype.element_ty), mask=(offs_m[:, None] < Q_LEN))
