# forward d64 fp32
"""Attention forward: O = softmax(score_mod(Q K^T * scale) masked) V, one pass over K and V with a running softmax.

One program computes one tile of BLOCK_M query rows of one head.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims; *_ROUNDED: padded to a power of two
    m, n           query / key positions     start_n     first key position of the current block
    acc            [BLOCK_M, D_V_ROUNDED]    unnormalised output
    m_i            [BLOCK_M]                 running row maximum of the scores, still without scale
    l_i            [BLOCK_M]                 sum of exp2(score in base 2 - shift_i), where shift_i is m_i in base 2 (see limits)
    lse            [Z, Hq, Q_LEN]            natural logarithm of the sum of exp(score), -inf for an empty row
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
    K, V, stride_kn, stride_vn,
    z, h, m, start_n, KV_LEN, TO_LOG2, HUGE, STEP,
    BLOCK_N: tl.constexpr,
):
    """Fold one block of BLOCK_N keys into the running softmax."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_N, D_QK_ROUNDED]; the block starts at a 64-bit offset, inside it 32 bits suffice
    offs_d = tl.arange(0, 64)
    in_block = tl.arange(0, BLOCK_N)[:, None]
    k_ptrs = K + start_n.to(tl.int64) * stride_kn + (in_block * stride_kn + offs_d[None, :])
    k = tl.load(k_ptrs, mask=(offs_n[:, None] < KV_LEN), other=0.0)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N], float32
    score = qk  # TO_LOG2 carries the scale

    if start_n + BLOCK_N > KV_LEN:  # the tail block
        score = tl.where((offs_n < KV_LEN)[None, :], score, float("-inf"))

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
    offs_dv = tl.arange(0, 64)
    v_ptrs = V + start_n.to(tl.int64) * stride_vn + (in_block * stride_vn + offs_dv[None, :])
    v = tl.load(v_ptrs, mask=(offs_n[:, None] < KV_LEN), other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, l_i, m_new, shift


@triton.jit
def forward_inner(
    q, acc, l_i, m_i, shift_i,
    K, V, stride_kn, stride_vn,
    z, h, m, KV_LEN, TO_LOG2, HUGE, STEP,
    BLOCK_N: tl.constexpr,
):
    """Visit all KV blocks of BLOCK_N keys."""
    for step in range(0, tl.cdiv(KV_LEN, BLOCK_N)):
        start_n = step * BLOCK_N
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l_i, m_i, shift_i = forward_block_mn(
            q, acc, l_i, m_i, shift_i,
            K, V, stride_kn, stride_vn,
            z, h, m, start_n, KV_LEN, TO_LOG2, HUGE, STEP,
            BLOCK_N,
        )
    return acc, l_i, m_i, shift_i


@triton.jit(
    do_not_specialize=[
        "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "stride_qz", "stride_qh", "stride_qm", "stride_kz", "stride_kh",
        "stride_kn", "stride_vz", "stride_vh", "stride_vn", "stride_oz", "stride_oh", "stride_om", "TO_LOG2"
    ]
)
def forward(
    K,  # float32 [Zkv, Hkv, KV_LEN, D_QK]
    V,  # float32 [Zkv, Hkv, KV_LEN, D_V]
    Q,  # float32 [Z, Hq, Q_LEN, D_QK]
    O,  # float32 [Z, Hq, Q_LEN, D_V] in any strides, written
    LSE,  # float32 [Z, Hq, Q_LEN], written
    Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_om, TO_LOG2,
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
    VECTOR: tl.constexpr = 4
    stride_qz, stride_qh = stride_qz.to(tl.int64) * VECTOR, stride_qh.to(tl.int64) * VECTOR
    stride_kz, stride_kh = stride_kz.to(tl.int64) * VECTOR, stride_kh.to(tl.int64) * VECTOR
    stride_vz, stride_vh = stride_vz.to(tl.int64) * VECTOR, stride_vh.to(tl.int64) * VECTOR
    stride_qm, stride_kn, stride_vn = stride_qm * VECTOR, stride_kn * VECTOR, stride_vn * VECTOR

    Q += z.to(tl.int64) * stride_qz + h.to(tl.int64) * stride_qh
    K += z_kv.to(tl.int64) * stride_kz + h_kv.to(tl.int64) * stride_kh
    V += z_kv.to(tl.int64) * stride_vz + h_kv.to(tl.int64) * stride_vh

    offs_m = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, 64)
    q_ptrs = Q + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_m[:, None] < Q_LEN), other=0.0)

    acc = tl.zeros([BLOCK_M, 64], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    shift_i = m_i
    HUGE, STEP = limits(TO_LOG2)
    m = tl.minimum(offs_m, Q_LEN - 1)[:, None]  # [BLOCK_M, 1]; padding rows repeat the last one and are not stored

    acc, l_i, m_i, shift_i = forward_inner(
        q, acc, l_i, m_i, shift_i,
        K, V, stride_kn, stride_vn,
        z, h, m, KV_LEN, TO_LOG2, HUGE, STEP,
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
    offs_dv = tl.arange(0, 64)
    o_ptrs = O + z.to(tl.int64) * stride_oz + h.to(tl.int64) * stride_oh + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv[None, :]
    tl.store(o_ptrs, acc.to(O.dtype.element_ty), mask=(offs_m[:, None] < Q_LEN))
