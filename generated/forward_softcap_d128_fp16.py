# forward softcap d128 fp16
"""Attention forward: O = softmax(score_mod(Q K^T * scale) masked) V, one pass over K and V with a running softmax.

One program computes one tile of BLOCK_M query rows of one head.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims; *_ROUNDED: padded to a power of two
    m, n           query / key positions     start_n     first key position of the current block
    acc            [BLOCK_M, D_V_ROUNDED]    unnormalised output
    m_i, l_i       [BLOCK_M]                 running row maximum (base 2) and sum of exp2(score - m_i)
    lse            [Z, Hq, Q_LEN]            natural logarithm of the sum of exp(score), -inf for an empty row
"""

import triton
import triton.language as tl


@triton.jit
def tanh_by_exp2(x):
    # tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|) in (0, 1], which cannot overflow. Near zero 1 - e has lost its
    # digits, and the series has them.
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    t = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333333333 + x2 * 0.13333333333333333))
    return tl.where(x2 < 0.01, series, tl.where(x < 0.0, -t, t))

@triton.jit
def forward_block_mn(
    q, acc, l_i, m_i,  # the query tile, its output so far, its softmax so far
    K, V, stride_kn, stride_vn,
    z, h, m, start_n, KV_LEN, SM_SCALE, TO_LOG2,
    arg_cap,  # captured by score_mod softcap
    BLOCK_N: tl.constexpr, IS_TAIL: tl.constexpr,
):
    """Fold one block of BLOCK_N keys into the running softmax."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    # [BLOCK_N, D_QK_ROUNDED]; the block starts at a 64-bit offset, inside it 32 bits suffice
    offs_d = tl.arange(0, 128)
    in_block = tl.arange(0, BLOCK_N)[:, None]
    k_ptrs = K + start_n.to(tl.int64) * stride_kn + (in_block * stride_kn + offs_d[None, :])
    k = tl.load(k_ptrs, mask=(offs_n[:, None] < KV_LEN), other=0.0)
    qk = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N], float32
    score = qk * SM_SCALE

    n = offs_n[None, :]  # [1, BLOCK_N]; m is [BLOCK_M, 1]. Past KV_LEN too: loads that could leave their tensor are masked
    # ---- score_mod: softcap
    # mods/softcap.py:40: return cap * torch.tanh(score / cap)
    score_0 = arg_cap * tanh_by_exp2(score / arg_cap)
    score = score_0
    if IS_TAIL:
        score = tl.where((offs_n < KV_LEN)[None, :], score, float("-inf"))

    # running softmax in base 2: exp(s) = exp2(s * log2(e)), and the product folds into one fused multiply-add
    m_new = tl.maximum(m_i, tl.max(score, 1) * TO_LOG2)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row with nothing to attend to yet: avoid inf - inf
    alpha = tl.exp2(m_i - m_safe)
    p = tl.exp2(score * TO_LOG2 - m_safe[:, None])  # [BLOCK_M, BLOCK_N]
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    offs_dv = tl.arange(0, 128)
    v_ptrs = V + start_n.to(tl.int64) * stride_vn + (in_block * stride_vn + offs_dv[None, :])
    v = tl.load(v_ptrs, mask=(offs_n[:, None] < KV_LEN), other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, l_i, m_new


@triton.jit
def forward_inner(
    q, acc, l_i, m_i,
    K, V, stride_kn, stride_vn,
    z, h, m, KV_LEN, SM_SCALE, TO_LOG2,
    arg_cap,  # captured by score_mod softcap
    BLOCK_N: tl.constexpr,
):
    """Visit the whole KV blocks of BLOCK_N keys; what is left over is the caller's."""
    for step in range(0, KV_LEN // BLOCK_N):
        start_n = step * BLOCK_N
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l_i, m_i = forward_block_mn(
            q, acc, l_i, m_i,
            K, V, stride_kn, stride_vn,
            z, h, m, start_n, KV_LEN, SM_SCALE, TO_LOG2,
            arg_cap,
            BLOCK_N, IS_TAIL=False,
        )
    return acc, l_i, m_i


@triton.jit(
    do_not_specialize=[
        "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "stride_qz", "stride_qh", "stride_qm", "stride_kz", "stride_kh",
        "stride_kn", "stride_vz", "stride_vh", "stride_vn", "stride_oz", "stride_oh", "stride_om", "SM_SCALE",
        "TO_LOG2", "arg_cap"
    ]
)
def forward(
    K, V,  # [Zkv, Hkv, KV_LEN, D_QK], [Zkv, Hkv, KV_LEN, D_V]
    Q,  # [Z, Hq, Q_LEN, D_QK]
    O, LSE,  # [Z, Hq, Q_LEN, D_V] in any strides; float32 [Z, Hq, Q_LEN]
    Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_om, SM_SCALE, TO_LOG2,
    arg_cap,  # captured by score_mod softcap
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

    # these strides come in units of 16 bytes, so that the compiler knows rows are aligned and loads them 16 bytes at a time
    stride_qz *= 8
    stride_qh *= 8
    stride_qm *= 8
    stride_kz *= 8
    stride_kh *= 8
    stride_kn *= 8
    stride_vz *= 8
    stride_vh *= 8
    stride_vn *= 8

    Q += z.to(tl.int64) * stride_qz + h.to(tl.int64) * stride_qh
    K += z_kv.to(tl.int64) * stride_kz + h_kv.to(tl.int64) * stride_kh
    V += z_kv.to(tl.int64) * stride_vz + h_kv.to(tl.int64) * stride_vh

    offs_m = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, 128)
    q_ptrs = Q + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_m[:, None] < Q_LEN), other=0.0)

    acc = tl.zeros([BLOCK_M, 128], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    m = tl.minimum(offs_m, Q_LEN - 1)[:, None]  # [BLOCK_M, 1]; padding rows repeat the last one and are not stored

    acc, l_i, m_i = forward_inner(
        q, acc, l_i, m_i,
        K, V, stride_kn, stride_vn,
        z, h, m, KV_LEN, SM_SCALE, TO_LOG2,
        arg_cap,
        BLOCK_N,
    )
    if KV_LEN % BLOCK_N != 0:  # on its own, so that the loop above needs no check
        acc, l_i, m_i = forward_block_mn(
            q, acc, l_i, m_i,
            K, V, stride_kn, stride_vn,
            z, h, m, KV_LEN // BLOCK_N * BLOCK_N, KV_LEN, SM_SCALE, TO_LOG2,
            arg_cap,
            BLOCK_N, IS_TAIL=True,
        )

    # an empty row has l_i = 0 and m_i = -inf: output 0, lse -inf
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / l_i[:, None]
    LN2: tl.constexpr = 0.6931471805599453
    stats = (z.to(tl.int64) * Hq + h) * Q_LEN + offs_m
    tl.store(LSE + stats, (m_i + tl.log2(l_i)) * LN2, mask=offs_m < Q_LEN)
    offs_dv = tl.arange(0, 128)
    o_ptrs = O + z.to(tl.int64) * stride_oz + h.to(tl.int64) * stride_oh + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv[None, :]
    tl.store(o_ptrs, acc.to(O.dtype.element_ty), mask=(offs_m[:, None] < Q_LEN))
