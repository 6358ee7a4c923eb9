# decode alibi d128 bf16
"""Attention of few queries: O = softmax(score_mod(Q K^T * scale) masked) V, with the keys split among programs (flash decoding).

One program takes one tile of rows and one part of their keys, of up to SPLITS parts of MIN_SHARE keys at least, and leaves a normalised
partial output and its lse; combine_splits adds the parts up.
All sequences together have about PARTS parts, as equal as their lengths allow.

A row is one query of one head: row i * PACK + g of a tile is query i of the tile's head g, so that K and V, which the heads of a group
share, are read once for all of them.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    QUERIES, PACK  queries and heads in a tile; PACK divides GROUP_SIZE, and is 1 where every head has block lists of its own
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims; *_ROUNDED: padded to a power of two
    h, m           [BLOCK_M, 1]              head and query position of every row
    n, start_n     key positions, the first one of a block
    acc            [BLOCK_M, D_V_ROUNDED]    unnormalised output
    m_i            [BLOCK_M]                 running row maximum of the scores
    l_i            [BLOCK_M]                 sum of exp2(score in base 2 - shift_i), where shift_i is m_i in base 2 (see limits)
    lse            [Z, Hq, Q_LEN]            natural logarithm of the sum of exp(score), -inf for an empty row
"""

import triton
import triton.language as tl


@triton.jit
def float_difference(a, b):
    # float(a - b) of indices from 0 to 2**23 - 1, exactly and without a conversion, which takes a GPU 8 times as long
    # as an addition: an index added to the bits of 2.0**23 becomes the end of its mantissa
    BITS: tl.constexpr = 0x4B000000
    return (a + BITS).to(tl.float32, bitcast=True) - (b + BITS).to(tl.float32, bitcast=True)


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
def decode_block_mn(
    q, acc, l_i, m_i, shift_i,  # the rows, their output so far, their softmax so far
    K, PAGES, Zkv, stride_kz, stride_kn, V, stride_vz, stride_vn,
    z, h, m, start_n, KV_LEN, SM_SCALE, TO_LOG2, HUGE, STEP,
    ptr_slopes,  # captured by score_mod alibi
    BLOCK_N: tl.constexpr,
):
    """Fold one block of BLOCK_N keys into the running softmax."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, 128)
    in_block = tl.arange(0, BLOCK_N)[:, None]
    if 16 % BLOCK_N == 0:  # the block lies in one page
        page = tl.load(PAGES + start_n // 16, mask=start_n < KV_LEN, other=-1)
        in_page = start_n % 16 + in_block
    else:
        page = tl.load(PAGES + offs_n // 16, mask=offs_n < KV_LEN, other=-1)[:, None]
        in_page = (offs_n % 16)[:, None]
    inside = (page >= 0) & (page < Zkv) & (offs_n[:, None] < KV_LEN)
    page = page.to(tl.int64)
    k_ptrs = K + page * stride_kz + (in_page * stride_kn + offs_d[None, :])  # [BLOCK_N, D_QK_ROUNDED]
    k = tl.load(k_ptrs, mask=inside, other=0.0)
    qk = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N], float32
    score = qk * SM_SCALE
    n = offs_n[None, :]  # [1, BLOCK_N]. Past KV_LEN too: loads that could leave their tensor are masked
    # ---- score_mod: alibi
    # mods/alibi.py:67: return score + slopes[h] * (kv_idx - q_idx)
    score_0 = tl.load(ptr_slopes + h)
    score = score + score_0 * float_difference(n, m)
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
    offs_dv = tl.arange(0, 128)
    v_ptrs = V + page * stride_vz + (in_page * stride_vn + offs_dv[None, :])
    v = tl.load(v_ptrs, mask=inside, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, l_i, m_new, shift


@triton.jit
def steps_of(z, KV_LENS, Z, KV_LEN, BLOCK_N: tl.constexpr):
    """Blocks of keys of the sequences z; none past the last one."""
    return tl.cdiv(tl.maximum(tl.minimum(KV_LEN, tl.load(KV_LENS + z, mask=z < Z, other=0)), 0), BLOCK_N)


@triton.jit
def part_of(part, KV_LENS, Z, KV_LEN, PARTS, SPLITS, least, BLOCK_N: tl.constexpr):
    """The sequence z that has part number `part` when the parts of all sequences are counted through, which of its parts that is, and how
    many it has, of `least` steps at least. z is Z if there are fewer parts."""
    total = 0
    for first in range(0, Z, 128):
        total += tl.sum(steps_of(first + tl.arange(0, 128), KV_LENS, Z, KV_LEN, BLOCK_N))
    share = tl.maximum(tl.cdiv(total, PARTS), least)  # so there are at most PARTS + Z parts
    z, before, upto = 0, 0, 0
    for first in range(0, Z, 128):
        offs_z = first + tl.arange(0, 128)
        parts = tl.minimum(tl.cdiv(steps_of(offs_z, KV_LENS, Z, KV_LEN, BLOCK_N), share), SPLITS)
        ends = upto + tl.cumsum(tl.where(offs_z < Z, tl.maximum(parts, 1), 0), 0)  # an empty sequence has one, too
        z += tl.sum(((ends <= part) & (offs_z < Z)).to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(ends <= part, ends, 0)))
        upto = tl.max(ends)
    return z, part - before, tl.maximum(tl.minimum(tl.cdiv(steps_of(z, KV_LENS, Z, KV_LEN, BLOCK_N), share), SPLITS), 1)


@triton.jit(
    do_not_specialize=[
        "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "stride_qz", "stride_qh", "stride_qm", "stride_kz", "stride_kh",
        "stride_kn", "stride_vz", "stride_vh", "stride_vn", "stride_oz", "stride_oh", "stride_om", "SM_SCALE",
        "TO_LOG2", "QUERIES", "PACK", "SPLITS", "MIN_SHARE", "Z", "PARTS", "stride_pages"
    ]
)
def decode(
    K,  # bfloat16 [pages, Hkv, 16, D_QK]
    V,  # bfloat16 [pages, Hkv, 16, D_V]
    Q,  # bfloat16 [Z, Hq, Q_LEN, D_QK]
    PART,  # float32 [Z, Hq, Q_LEN, SPLITS, D_V]: outputs of the parts
    PART_SHARE,  # float32 [Z, Hq, Q_LEN, SPLITS]: log2 of the weight of PART_MAX in the part
    PART_MAX,  # float32 [Z, Hq, Q_LEN, SPLITS]: the largest scores of the parts
    PART_COUNT,  # int32 [Z, Hq, Q_LEN]: how many parts there are
    KV_LENS,  # int32 [Z]: keys of each sequence, at most KV_LEN
    PAGES,  # int32 [Z, pages]: which of Zkv pages of 16 keys hold the sequence's keys, in order; another holds zeros
    Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh, stride_kn,
    stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_om, SM_SCALE, TO_LOG2, QUERIES, PACK, SPLITS,
    MIN_SHARE, Z, PARTS, stride_pages,
    ptr_slopes,  # captured by score_mod alibi
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    tiles = tl.cdiv(Q_LEN, QUERIES)
    first_head = tl.program_id(0) // tiles % (Hq // PACK) * PACK
    z, split, parts = part_of(tl.program_id(1), KV_LENS, Z, KV_LEN, PARTS, SPLITS, MIN_SHARE // BLOCK_N, BLOCK_N)
    if z >= Z:
        return
    PAGES += z.to(tl.int64) * stride_pages
    KV_LEN = tl.minimum(KV_LEN, tl.load(KV_LENS + z))
    h_kv = first_head // GROUP_SIZE

    # these strides come in units of 16 bytes, so that the compiler knows that rows are aligned
    VECTOR: tl.constexpr = 8
    stride_qz, stride_qh = stride_qz.to(tl.int64) * VECTOR, stride_qh.to(tl.int64) * VECTOR
    stride_kz, stride_kh = stride_kz.to(tl.int64) * VECTOR, stride_kh.to(tl.int64) * VECTOR
    stride_vz, stride_vh = stride_vz.to(tl.int64) * VECTOR, stride_vh.to(tl.int64) * VECTOR
    stride_qm, stride_kn, stride_vn = stride_qm * VECTOR, stride_kn * VECTOR, stride_vn * VECTOR
    K += h_kv.to(tl.int64) * stride_kh
    V += h_kv.to(tl.int64) * stride_vh

    first_query = tl.program_id(0) % tiles * QUERIES
    Q += z.to(tl.int64) * stride_qz
    row = tl.arange(0, BLOCK_M)
    offs_m = first_query + row // PACK
    inside = (row < QUERIES * PACK) & (offs_m < Q_LEN)  # padding rows repeat the last query and are not stored
    m = tl.minimum(offs_m, Q_LEN - 1)[:, None]
    h = (first_head + row % PACK)[:, None]
    offs_d = tl.arange(0, 128)[None, :]
    q_ptrs = Q + h.to(tl.int64) * stride_qh + m.to(tl.int64) * stride_qm + offs_d
    q = tl.load(q_ptrs)

    acc = tl.zeros([BLOCK_M, 128], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    shift_i = m_i
    HUGE, STEP = limits(TO_LOG2)
    steps = tl.cdiv(KV_LEN, BLOCK_N)
    share = tl.maximum(tl.cdiv(steps, parts), MIN_SHARE // BLOCK_N)
    parts = tl.cdiv(steps, share)  # none of an empty sequence
    first = split * share
    steps = tl.minimum(first + share, steps)
    for step in range(first, steps):
        start_n = step * BLOCK_N
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l_i, m_i, shift_i = decode_block_mn(
            q, acc, l_i, m_i, shift_i,
            K, PAGES, Zkv, stride_kz, stride_kn, V, stride_vz, stride_vn,
            z, h, m, start_n, KV_LEN, SM_SCALE, TO_LOG2, HUGE, STEP,
            ptr_slopes,
            BLOCK_N,
        )

    # an empty row has l_i = 0 and m_i = -inf: output 0, lse -inf
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    # log2 of the weight of a score m_i: of what rounding the shift has left, by l_i
    share = tl.where(empty, 0.0, tl.fma(m_i, tl.where(tl.abs(m_i) < HUGE, TO_LOG2, STEP), -shift_i) - tl.log2(l_i))
    acc = acc / l_i[:, None]
    place = (z.to(tl.int64) * Hq + first_head + row % PACK) * Q_LEN + offs_m
    offs_dv = tl.arange(0, 128)[None, :]
    if split == 0:
        tl.store(PART_COUNT + place, parts, mask=inside)
    if first < steps:
        place = place * SPLITS + split
        tl.store(PART_SHARE + place, share, mask=inside)
        tl.store(PART_MAX + place, m_i, mask=inside)
        tl.store(PART + place[:, None] * 128 + offs_dv, acc, mask=inside[:, None])
