# backward dkv softcap causal d128 bf16
"""Attention backward, keys and values: dV = P^T dO and dK = dS^T Q * scale, one pass over Q and dO of every query head that reads them.

With S = score_mod(Q K^T * scale) masked and P = softmax(S), recomputed tile by tile from what the forward pass has found of every row:

    dP = dO V^T,   grad = P (dP - delta) = d loss / d S,   dS = grad through the derivative of score_mod

One program computes one tile of BLOCK_N keys of one key/value head. All tiles are transposed, [keys, queries], so that P^T and
dS^T are operands of the next product as they stand.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims; *_ROUNDED: padded to a power of two
    m, n           query / key positions     start_m     first query position of the current block
    top, share     [Z, Hq, 2, STATS_LEN]     from backward_delta: a row's largest score, log2 of its weight
    delta          [Z, Hq, STATS_LEN]        from there, too: row sums of O dO
    q_num_blocks   [Zm, Hm, columns]         how many query blocks visit a KV block (Zm, Hm: 1 or Z, Hq)
    q_indices      [Zm, Hm, columns, rows]   which ones. "Partial" blocks need mask_mod, "full" blocks do not
"""

import triton
import triton.language as tl


@triton.jit
def tanh_approx(x):
    # one instruction, relative error at most 2**-11 (PTX ISA, tanh.approx.f32)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def dkv_block_mn(
    k, v, dk, dv,
    desc_q, desc_do, TOPS, DELTA, STATS_LEN,
    z, h, n, start_m, is_full: tl.constexpr, Q_LEN, SM_SCALE, TO_LOG2,
    arg_cap_reciprocal, arg_cap,  # captured by score_mod softcap
    BLOCK_M: tl.constexpr,
):
    """Add what one block of BLOCK_M queries contributes."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # rows past Q_LEN and columns past the head dim arrive as zeros
    q = desc_q.load([z, h, start_m, 0]).reshape(BLOCK_M, 128)
    do = desc_do.load([z, h, start_m, 0]).reshape(BLOCK_M, 128)
    top = tl.load(TOPS + offs_m)  # +inf past Q_LEN: p is 0 there
    share = tl.load(TOPS + STATS_LEN + offs_m)
    qk = tl.dot(k, tl.trans(q))  # [BLOCK_N, BLOCK_M], float32
    dp = tl.dot(v, tl.trans(do))
    qk *= SM_SCALE
    m = offs_m[None, :]  # [1, BLOCK_M]; n is [BLOCK_N, 1]
    # ---- score_mod: softcap
    # mods/softcap.py:42: return cap * torch.tanh(score * (1.0 / cap))  # a product is cheaper than a division at every position
    score_0 = tanh_approx(qk * arg_cap_reciprocal)
    score = arg_cap * score_0
    if not is_full:  # full blocks pay nothing for the mask
        # ---- mask_mod: causal
        # mods/causal.py:26: return q_idx >= kv_idx
        mask_0 = m >= n
        score = tl.where(mask_0, score, float("-inf"))

    # [BLOCK_N, BLOCK_M], the softmax itself. The difference first: exact where it matters, however large scores are
    # it is at most `top` anyway. But the compiler must not take the difference from a product before that is rounded
    score = tl.minimum(score, top[None, :])
    p = tl.exp2(tl.fma(score - top[None, :], TO_LOG2, share[None, :]))
    delta = tl.load(DELTA + offs_m)
    grad = p * (dp - delta[None, :])  # d loss / d score_mod
    # ---- derivative of score_mod: softcap
    ds = grad * arg_cap * (1.0 - score_0 * score_0) * arg_cap_reciprocal
    # both products at the end: p and dS are needed no longer in float32, which saves registers
    dv = tl.dot(p.to(do.dtype), do, dv)
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def listed_block(step, num_blocks, q_indices, num_full_blocks, full_q_indices, STEPS: tl.constexpr):
    """The query block of a step: the partial blocks first, then the full ones. Past the end, the last one again."""
    at = step // STEPS
    at = tl.maximum(tl.minimum(at, num_blocks + num_full_blocks - 1), 0)
    return tl.load(tl.where(at < num_blocks, q_indices + at, full_q_indices + (at - num_blocks)))


@triton.jit(
    do_not_specialize=[
        "Z", "Zkv", "Hkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "STATS_LEN", "stride_qz", "stride_qh", "stride_qm",
        "stride_kz", "stride_kh", "stride_kn", "stride_vz", "stride_vh", "stride_vn", "stride_doz",
        "stride_doh", "stride_dom", "stride_dkz", "stride_dkh", "stride_dkn", "stride_dvz", "stride_dvh",
        "stride_dvn", "SM_SCALE", "TO_LOG2", "mask_stride_z", "mask_stride_h", "mask_rows", "full_mask_rows",
        "arg_cap_reciprocal", "arg_cap"
    ]
)
def backward_dkv(
    desc_q,  # [Z, Hq, Q_LEN, D_QK] as TMA descriptor
    desc_do,  # [Z, Hq, Q_LEN, D_V] as TMA descriptor
    K,  # bfloat16 [Zkv, Hkv, KV_LEN, D_QK]
    V,  # bfloat16 [Zkv, Hkv, KV_LEN, D_V]
    TOPS,  # float32 [Z, Hq, 2, STATS_LEN]: top and share
    DELTA,  # float32 [Z, Hq, STATS_LEN]
    DK,  # bfloat16 written: as K
    DV,  # bfloat16 written: as V
    Z, Zkv, Hkv, GROUP_SIZE, Q_LEN, KV_LEN, STATS_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh,
    stride_kn, stride_vz, stride_vh, stride_vn, stride_doz, stride_doh, stride_dom, stride_dkz, stride_dkh,
    stride_dkn, stride_dvz, stride_dvh, stride_dvn, SM_SCALE, TO_LOG2, mask_stride_z, mask_stride_h, mask_rows,
    full_mask_rows,
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices,
    arg_cap_reciprocal, arg_cap,  # captured by score_mod softcap
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # One program a key tile, the first keys first: under a causal mask most queries see them.
    kv_blocks = tl.cdiv(KV_LEN, BLOCK_N)
    tile = tl.program_id(0)
    kv_block = tile % kv_blocks
    z_kv = tile // kv_blocks // Hkv
    h_kv = tile // kv_blocks % Hkv

    # these strides come in units of 16 bytes, so that the compiler knows that rows are aligned
    VECTOR: tl.constexpr = 8
    stride_qz, stride_qh = stride_qz.to(tl.int64) * VECTOR, stride_qh.to(tl.int64) * VECTOR
    stride_kz, stride_kh = stride_kz.to(tl.int64) * VECTOR, stride_kh.to(tl.int64) * VECTOR
    stride_vz, stride_vh = stride_vz.to(tl.int64) * VECTOR, stride_vh.to(tl.int64) * VECTOR
    stride_doz, stride_doh = stride_doz.to(tl.int64) * VECTOR, stride_doh.to(tl.int64) * VECTOR
    stride_qm, stride_kn, stride_vn = stride_qm * VECTOR, stride_kn * VECTOR, stride_vn * VECTOR
    stride_dom = stride_dom * VECTOR

    offs_n = kv_block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = offs_n.to(tl.int64)[:, None]
    offs_d = tl.arange(0, 128)
    offs_dv = tl.arange(0, 128)
    k_mask = (offs_n[:, None] < KV_LEN)
    v_mask = (offs_n[:, None] < KV_LEN)
    k_ptrs = K + z_kv.to(tl.int64) * stride_kz + h_kv.to(tl.int64) * stride_kh + rows * stride_kn + offs_d[None, :]
    k = tl.load(k_ptrs, mask=k_mask, other=0.0)
    v_ptrs = V + z_kv.to(tl.int64) * stride_vz + h_kv.to(tl.int64) * stride_vh + rows * stride_vn + offs_dv[None, :]
    v = tl.load(v_ptrs, mask=v_mask, other=0.0)
    dk = tl.zeros([BLOCK_N, 128], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, 128], dtype=tl.float32)
    n = offs_n[:, None]  # [BLOCK_N, 1]; rows past KV_LEN are not stored

    # every query head of the group, in every batch entry that shares these keys
    for reader in range(0, Z // Zkv * GROUP_SIZE):
        z = z_kv + reader // GROUP_SIZE * Zkv
        h = h_kv * GROUP_SIZE + reader % GROUP_SIZE
        stats = (z.to(tl.int64) * (Hkv * GROUP_SIZE) + h) * STATS_LEN
        # this tile's row in the transposed lists; each listed block of 128 queries is walked in steps of BLOCK_M
        row = z.to(tl.int64) * mask_stride_z + h * mask_stride_h + kv_block * BLOCK_N // 128
        num_blocks = tl.load(q_num_blocks + row)
        indices = q_indices + row * mask_rows
        num_full_blocks = tl.load(full_q_num_blocks + row)
        full_indices = full_q_indices + row * full_mask_rows
        STEPS: tl.constexpr = 128 // BLOCK_M
        partial_steps = num_blocks * STEPS
        steps = (num_blocks + num_full_blocks) * STEPS
        block = listed_block(0, num_blocks, indices, num_full_blocks, full_indices, STEPS)
        for step in range(0, partial_steps):
            start_m = block * 128 + (step % STEPS) * BLOCK_M
            # a step ahead, so that no load of Q waits for it
            block = listed_block(step + 1, num_blocks, indices, num_full_blocks, full_indices, STEPS)
            start_m = tl.multiple_of(start_m, BLOCK_M)
            dk, dv = dkv_block_mn(
                k, v, dk, dv,
                desc_q, desc_do, TOPS + 2 * stats, DELTA + stats, STATS_LEN,
                z, h, n, start_m, False, Q_LEN, SM_SCALE, TO_LOG2,
                arg_cap_reciprocal, arg_cap,
                BLOCK_M,
            )
        for step in range(partial_steps, steps):
            start_m = block * 128 + (step % STEPS) * BLOCK_M
            # a step ahead, so that no load of Q waits for it
            block = listed_block(step + 1, num_blocks, indices, num_full_blocks, full_indices, STEPS)
            start_m = tl.multiple_of(start_m, BLOCK_M)
            dk, dv = dkv_block_mn(
                k, v, dk, dv,
                desc_q, desc_do, TOPS + 2 * stats, DELTA + stats, STATS_LEN,
                z, h, n, start_m, True, Q_LEN, SM_SCALE, TO_LOG2,
                arg_cap_reciprocal, arg_cap,
                BLOCK_M,
            )

    dk *= SM_SCALE
    dk_ptrs = DK + z_kv.to(tl.int64) * stride_dkz + h_kv.to(tl.int64) * stride_dkh + rows * stride_dkn + offs_d[None, :]
    tl.store(dk_ptrs, dk.to(DK.dtype.element_ty), mask=k_mask)
    dv_ptrs = DV + z_kv.to(tl.int64) * stride_dvz + h_kv.to(tl.int64) * stride_dvh + rows * stride_dvn + offs_dv[None, :]
    tl.store(dv_ptrs, dv.to(DV.dtype.element_ty), mask=v_mask)
