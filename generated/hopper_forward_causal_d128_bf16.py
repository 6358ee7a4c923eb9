# hopper forward causal d128 bf16
"""Attention forward for Hopper: O = softmax(score_mod(Q K^T * scale) masked) V, one pass over K and V with a running softmax.

One program stays on each multiprocessor and computes tiles of 2 x 64 query rows of one head. Its warps have roles: one warp, the
producer, has the TMA unit copy Q, K and V to shared memory; 2 groups of four warps, the consumers, compute 64 rows each. They meet
at barriers in shared memory: a buffer is "full" when its copy has arrived, "empty" when all that read it have done so.

A tile, as time goes by. The producer runs ahead until all 2 buffers of K, or of V, are full.

    producer                    each consumer
    K of block 0
    numbers of the tile, and Q  waits for them; S = Q K^T; waits for it and lets go of K; softmax: P = exp2(S - maximum), which begins acc
    V of block 0, K of block 1  starts the next S = Q K^T, and beside it acc += P V
    V of block 1, K of block 2  waits for S and lets go of K; softmax, while P V may still run
                                waits for acc, lets go of V, scales acc to the new maximum; starts the next S and acc += P V
    ...                         ...
    K of the next tile          has started its last S: lets go of Q; acc += P V, the last one
    its numbers, and Q          lets go of V; acc / l_i to shared memory, from where the TMA unit stores it, and lse; lets go of the numbers

Partial blocks, which mask_mod must see, come first, and nothing runs beside their softmax: the loop over full blocks has no trace of a
mask.

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    HEADS          Z * Hq; HEADS_PER_GROUP of them are worked on at a time: few, so that memory is read all the time
    Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims, here padded to 128 and 128: TMA fills with zeros
    m, n           query / key positions     start_n     first key position of a block of BLOCK_N keys
    tile, turn     number of a query tile, and how many this program has had before
    step           how many blocks of K and V this program has had before: block `step` lies in buffer step % STAGES
    acc            [64, 128]   unnormalised output
    m_i            [64]        running row maximum of the scores, still without scale
    l_i            [64]        sum of exp2(score in base 2 - shift_i), where shift_i is m_i in base 2 (see limits)
    lse            [Z, Hq, Q_LEN]            natural logarithm of the sum of exp(score), -inf for an empty row
    COUNTER        [1]                       tiles handed out beyond every program's first; 0 before and after a launch
    kv_num_blocks  [Zm, Hm, rows]            how many KV blocks a row of query blocks visits (Zm, Hm: 1 or Z, Hq)
    kv_indices     [Zm, Hm, rows, columns]   which ones, in order. "Partial" blocks need mask_mod, "full" blocks do not
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

# what different Tritons call differently
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

CONSUMERS = gl.constexpr(2)
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
# how many numbers, and which, the producer hands out with a tile; a negative query block is the end
NUMBERS = gl.constexpr(5)
Q_BLOCK = gl.constexpr(0)
BATCH = gl.constexpr(1)
HEAD = gl.constexpr(2)
BLOCKS = gl.constexpr(3)
FULL_BLOCKS = gl.constexpr(4)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # layout of [64, BLOCK_N] scores
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # layout of [64, 128] outputs
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))  # of softmax weights, left operand of that with V
QUERIES = gl.constexpr(gl.SliceLayout(1, SCORES.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, SCORES.value))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))


@aggregate
class Ring:
    """Buffers in shared memory that are filled and read in turn, with barriers for each: it is full, and all have read it."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty):
        self.buffers = buffers
        self.full = full
        self.empty = empty


@gluon.jit
def new_barriers(SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Barriers at each of which COUNT arrive."""
    barriers = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@aggregate
class Shared:
    """What the producer and the consumers share."""

    q: Ring
    k: Ring
    v: Ring
    tiles: Ring
    output: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, tiles, output):
        self.q = q
        self.k = k
        self.v = v
        self.tiles = tiles
        self.output = output


@gluon.jit
def quotient(number, by):
    """number // by. A division takes a tenth of a microsecond, for which a program's first tile waits, and is seldom needed: not in
    the first group of heads, nor in the first batch entry."""
    found = number * 0
    if number >= by:
        found = number // by
    return found


@gluon.jit
def place_of(tile, q_blocks, HEADS, HEADS_PER_GROUP):
    """The query block and the head of a tile: group by group, the last rows first, as they are the longest under a causal mask."""
    group = quotient(tile, q_blocks * HEADS_PER_GROUP)
    inside = tile - group * q_blocks * HEADS_PER_GROUP
    heads = gl.minimum(HEADS_PER_GROUP, HEADS - group * HEADS_PER_GROUP)
    return q_blocks - 1 - inside // heads, group * HEADS_PER_GROUP + inside % heads


@gluon.jit
def write_number(buffer, value):
    """The producer, one warp, writes a number for the consumers."""
    buffer.store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_number(buffer):
    """A consumer, four warps, reads it."""
    return gl.max(buffer.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def hand_out(tiles, turn, number: gl.constexpr, value):
    """The producer, which draws the tiles and walks the block lists, tells the consumers one of the numbers that describe a tile."""
    write_number(tiles.buffers.index((turn & 1) * NUMBERS + number), value)


@gluon.jit
def handed_out(tiles, turn, number: gl.constexpr):
    """One of these numbers, read by a consumer."""
    return read_number(tiles.buffers.index((turn & 1) * NUMBERS + number))


@aggregate
class Lists:
    """Block lists: how many KV blocks each row visits, and which."""

    stride_z: gl.tensor
    stride_h: gl.tensor
    width: gl.tensor
    full_width: gl.tensor
    num_blocks: gl.tensor
    indices: gl.tensor
    full_num_blocks: gl.tensor
    full_indices: gl.tensor

    @gluon.constexpr_function
    def __init__(self, stride_z, stride_h, width, full_width, num_blocks, indices, full_num_blocks, full_indices):
        self.stride_z = stride_z
        self.stride_h = stride_h
        self.width = width
        self.full_width = full_width
        self.num_blocks = num_blocks
        self.indices = indices
        self.full_num_blocks = full_num_blocks
        self.full_indices = full_indices


@aggregate
class Visits:
    """What a tile visits: one row of the lists."""

    num_blocks: gl.tensor
    indices: gl.tensor
    num_full_blocks: gl.tensor
    full_indices: gl.tensor

    @gluon.constexpr_function
    def __init__(self, num_blocks, indices, num_full_blocks, full_indices):
        self.num_blocks = num_blocks
        self.indices = indices
        self.num_full_blocks = num_full_blocks
        self.full_indices = full_indices


@gluon.jit
def place_in(lists, z, h, q_block):
    """Which row of the lists is a tile's."""
    return z.to(gl.int64) * lists.stride_z + h * lists.stride_h + q_block * BLOCK_M // 128


@gluon.jit
def visits_at(lists, place, num_blocks, num_full_blocks):
    """Row number `place` of the lists."""
    full_indices = lists.full_indices + place * lists.full_width
    return Visits(num_blocks, lists.indices + place * lists.width, num_full_blocks, full_indices)


@gluon.jit
def first_block(visits):
    """The KV block of the first step. Both lists are read: to know first which one has it takes longer."""
    full = gl.load(visits.full_indices)
    return gl.where(visits.num_blocks > 0, gl.load(visits.indices), full)


@gluon.jit
def listed_block(step, visits, STEPS: gl.constexpr):
    """The KV block of a step: the partial blocks first, then the full ones. Past the end, the last one again."""
    at = step // STEPS
    at = gl.maximum(gl.minimum(at, visits.num_blocks + visits.num_full_blocks - 1), 0)
    return gl.load(gl.where(at < visits.num_blocks, visits.indices + at, visits.full_indices + (at - visits.num_blocks)))


@gluon.jit
def limits(TO_LOG2):
    """HUGE and STEP: scores of a row are multiplied by TO_LOG2, but by the power of two STEP if its largest one is HUGE or more.

    exp2(score * TO_LOG2 - shift) is one multiply-add, of the exact product, while shift = m * TO_LOG2 is rounded. What that is off by, a
    row's weights have in common, and it cancels: up to 2**32. Beyond that, float32 numbers are so far apart
    that all scores but the largest have weight 0 in any base, and m * STEP is exact.
    """
    STEP = (TO_LOG2.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    return 1073741824.0 / TO_LOG2, STEP


@gluon.jit
def fold_scores(
    qk, m_i, shift_i, l_i,  # products of a block, softmax so far
    z, h, m, start_n, is_full, KV_LEN, TO_LOG2, HUGE, STEP,
    EDGE: gl.constexpr,
):
    """Weights of one block of BLOCK_N keys, the factor for what was summed before, and the softmax after. EDGE: some keys may be hidden."""
    offs_n = start_n + gl.arange(0, BLOCK_N, layout=COLUMNS)
    score = qk  # TO_LOG2 carries the scale
    n = offs_n[None, :]  # [1, BLOCK_N]; m is [64, 1]. Past KV_LEN too: loads that could leave their tensor are masked
    if EDGE:
        if not is_full:
            # ---- mask_mod: causal
            # mods/causal.py:26: return q_idx >= kv_idx
            mask_0 = m >= n
            score = gl.where(mask_0, score, float("-inf"))
        if start_n + BLOCK_N > KV_LEN:
            score = gl.where((offs_n < KV_LEN)[None, :], score, float("-inf"))

    # running softmax in base 2: exp(s) = exp2(s * log2(e)), and the product folds into one fused multiply-add
    m_new = gl.maximum(m_i, gl.max(score, 1))
    usual = gl.abs(m_new) < HUGE
    factor = gl.where(usual, TO_LOG2, STEP)
    shift = gl.fma(m_new, factor, 0.0)  # no product, which the compiler would put into the difference below unrounded
    shift_safe = gl.where(m_new == float("-inf"), 0.0, shift)  # a row with nothing to attend to yet: avoid inf - inf
    # a sum that was shifted in the other way is of scores that are much smaller
    alpha = gl.exp2(gl.where(usual == (gl.abs(m_i) < HUGE), shift_i - shift_safe, float("-inf")))
    p = gl.exp2(gl.fma(score, factor[:, None], -shift_safe[:, None]))  # [64, BLOCK_N]
    return p, alpha, m_new, shift, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def forward_producer(
    desc_q, desc_k, desc_v, COUNTER, shared,
    Hq, Zkv, GROUP_SIZE, HEADS, HEADS_PER_GROUP, Q_LEN, KV_LEN,
    lists,
):
    """Copy what the consumers need, in the order in which they need it."""
    q_blocks = gl.cdiv(Q_LEN, BLOCK_M)
    tiles = q_blocks * HEADS
    step = 0
    turn = 0
    q_turn = 0  # tiles that had something to visit
    tile = gl.program_id(0)
    while tile < tiles:
        q_block, head = place_of(tile, q_blocks, HEADS, HEADS_PER_GROUP)
        z = quotient(head, Hq)
        h = head - z * Hq
        z_kv = z - quotient(z, Zkv) * Zkv  # K and V may have one batch entry that all queries share
        h_kv = h
        if GROUP_SIZE > 1:
            h_kv = h // GROUP_SIZE
        place = place_in(lists, z, h, q_block)
        num_blocks = gl.load(lists.num_blocks + place)
        num_full_blocks = gl.load(lists.full_num_blocks + place)
        visits = visits_at(lists, place, num_blocks, num_full_blocks)
        steps = num_blocks + num_full_blocks
        block = first_block(visits)
        ticket = tile
        for i in range(0, steps):
            start_n = block * 128
            # a step ahead, so that no copy waits for it
            block = listed_block(i + 1, visits, STEPS=1)
            slot = step % STAGES
            free = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(shared.k.empty.index(slot), free)
            mbarrier.expect(shared.k.full.index(slot), desc_k.block_type.nbytes)
            tma_load(desc_k, [z_kv, h_kv, start_n, 0], shared.k.full.index(slot), shared.k.buffers.index(slot))
            if i == 0:
                mbarrier.wait(shared.tiles.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
                hand_out(shared.tiles, turn, Q_BLOCK, q_block)
                hand_out(shared.tiles, turn, BATCH, z)
                hand_out(shared.tiles, turn, HEAD, h)
                hand_out(shared.tiles, turn, BLOCKS, num_blocks)
                hand_out(shared.tiles, turn, FULL_BLOCKS, num_full_blocks)
                mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)
                for c in gl.static_range(CONSUMERS):
                    q_full = shared.q.full.index(c)
                    mbarrier.wait(shared.q.empty.index(c), (q_turn & 1) ^ 1)
                    mbarrier.expect(q_full, desc_q.block_type.nbytes)
                    tma_load(desc_q, [z, h, q_block * BLOCK_M + c * 64, 0], q_full, shared.q.buffers.index(c))
                q_turn += 1
            mbarrier.wait(shared.v.empty.index(slot), free)
            mbarrier.expect(shared.v.full.index(slot), desc_v.block_type.nbytes)
            tma_load(desc_v, [z_kv, h_kv, start_n, 0], shared.v.full.index(slot), shared.v.buffers.index(slot))
            step += 1
            if i == gl.maximum(steps - 4, 0):  # late, so that whoever is done first draws first, yet in time
                ticket = gl.atomic_add(COUNTER, 1)
        if steps == 0:
            mbarrier.wait(shared.tiles.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
            hand_out(shared.tiles, turn, Q_BLOCK, q_block)
            hand_out(shared.tiles, turn, BATCH, z)
            hand_out(shared.tiles, turn, HEAD, h)
            hand_out(shared.tiles, turn, BLOCKS, num_blocks)
            hand_out(shared.tiles, turn, FULL_BLOCKS, num_full_blocks)
            mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)
            ticket = gl.atomic_add(COUNTER, 1)
        turn += 1
        if ticket == tiles - 1:  # the last, as every tile takes one: nobody comes after it
            gl.store(COUNTER, 0)
        tile = ticket + gl.num_programs(0)
    mbarrier.wait(shared.tiles.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    hand_out(shared.tiles, turn, Q_BLOCK, -1)
    mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)


@gluon.jit
def forward_consumer(
    CONSUMER: gl.constexpr,
    desc_o, LSE, shared,
    Hq, Q_LEN, KV_LEN, TO_LOG2,
    lists,
):
    """Compute 64 rows of every tile. The product with K of a block runs before that with V of the block before it has ended."""
    q = shared.q.buffers.index(CONSUMER).reshape([64, 128])
    o_buffer = shared.output.index(CONSUMER)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=SCORES)
    HUGE, STEP = limits(TO_LOG2)
    step = 0
    turn = 0
    q_turn = 0
    mbarrier.wait(shared.tiles.full.index(0), 0)
    q_block = handed_out(shared.tiles, 0, Q_BLOCK)
    while q_block >= 0:
        z = handed_out(shared.tiles, turn, BATCH)
        h = handed_out(shared.tiles, turn, HEAD)
        offs_m = q_block * BLOCK_M + CONSUMER * 64 + gl.arange(0, 64, layout=QUERIES)
        m = gl.minimum(offs_m, Q_LEN - 1)[:, None]  # [64, 1]; padding rows repeat the last one and are not stored
        acc = gl.zeros([64, 128], gl.float32, layout=OUTPUT)
        m_i = gl.full([64], float("-inf"), gl.float32, layout=QUERIES)
        shift_i = m_i
        l_i = gl.full([64], 0.0, gl.float32, layout=QUERIES)
        num_blocks = handed_out(shared.tiles, turn, BLOCKS)
        num_full_blocks = handed_out(shared.tiles, turn, FULL_BLOCKS)
        visits = visits_at(lists, place_in(lists, z, h, q_block), num_blocks, num_full_blocks)
        steps = num_blocks + num_full_blocks
        if steps > 0:
            mbarrier.wait(shared.q.full.index(CONSUMER), q_turn & 1)
            block = listed_block(0, visits, STEPS=1)

            # partial blocks but the last, one after another
            first = gl.maximum(num_blocks - 1, 0)
            for i in range(0, first):
                start_n = block * 128
                block = listed_block(i + 1, visits, STEPS=1)
                slot = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(shared.k.full.index(slot), phase)
                k = shared.k.buffers.index(slot).reshape([BLOCK_N, 128])
                qk = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                qk = warpgroup_mma_wait(0, deps=(qk,))
                mbarrier.arrive(shared.k.empty.index(slot), count=1)
                p, alpha, m_i, shift_i, l_i = fold_scores(
                    qk, m_i, shift_i, l_i, z, h, m, start_n, False, KV_LEN, TO_LOG2, HUGE, STEP,
                    EDGE=True,
                )
                acc = acc * gl.convert_layout(alpha, OUTPUT_ROWS)[:, None]
                weights = gl.convert_layout(p.to(desc_o.dtype), WEIGHTS)
                mbarrier.wait(shared.v.full.index(slot), phase)
                v = shared.v.buffers.index(slot).reshape([BLOCK_N, 128])
                acc = warpgroup_mma(weights, v, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(shared.v.empty.index(slot), count=1)
                step += 1

            # the block that fills the pipeline: the last partial one, or a full one if there is none
            start_n = block * 128
            block = listed_block(first + 1, visits, STEPS=1)
            slot = step % STAGES
            mbarrier.wait(shared.k.full.index(slot), (step // STAGES) & 1)
            k = shared.k.buffers.index(slot).reshape([BLOCK_N, 128])
            qk = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            qk = warpgroup_mma_wait(0, deps=(qk,))
            mbarrier.arrive(shared.k.empty.index(slot), count=1)
            p, alpha, m_i, shift_i, l_i = fold_scores(
                qk, m_i, shift_i, l_i, z, h, m, start_n, num_blocks == 0, KV_LEN, TO_LOG2, HUGE, STEP,
                EDGE=True,
            )
            acc = acc * gl.convert_layout(alpha, OUTPUT_ROWS)[:, None]
            weights = gl.convert_layout(p.to(desc_o.dtype), WEIGHTS)

            for i in range(first + 1, steps):
                start_n = block * 128
                block = listed_block(i + 1, visits, STEPS=1)
                v_slot = step % STAGES
                v_phase = (step // STAGES) & 1
                step += 1
                slot = step % STAGES
                mbarrier.wait(shared.k.full.index(slot), (step // STAGES) & 1)
                k = shared.k.buffers.index(slot).reshape([BLOCK_N, 128])
                qk = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(shared.v.full.index(v_slot), v_phase)
                v = shared.v.buffers.index(v_slot).reshape([BLOCK_N, 128])
                acc = warpgroup_mma(weights, v, acc, is_async=True)
                qk = warpgroup_mma_wait(1, deps=(qk,))
                mbarrier.arrive(shared.k.empty.index(slot), count=1)
                p, alpha, m_i, shift_i, l_i = fold_scores(
                    qk, m_i, shift_i, l_i, z, h, m, start_n, True, KV_LEN, TO_LOG2, HUGE, STEP,
                    EDGE=False,
                )
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(shared.v.empty.index(v_slot), count=1)
                acc = acc * gl.convert_layout(alpha, OUTPUT_ROWS)[:, None]
                weights = gl.convert_layout(p.to(desc_o.dtype), WEIGHTS)

            mbarrier.arrive(shared.q.empty.index(CONSUMER), count=1)
            q_turn += 1
            slot = step % STAGES
            mbarrier.wait(shared.v.full.index(slot), (step // STAGES) & 1)
            v = shared.v.buffers.index(slot).reshape([BLOCK_N, 128])
            acc = warpgroup_mma(weights, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(shared.v.empty.index(slot), count=1)
            step += 1

        # an empty row has l_i = 0 and m_i = -inf: output 0, lse -inf
        empty = l_i == 0.0
        l_i = gl.where(empty, 1.0, l_i)
        # log2 of the weight of a score m_i: of what rounding the shift has left, by l_i
        share = gl.where(empty, 0.0, gl.fma(m_i, gl.where(gl.abs(m_i) < HUGE, TO_LOG2, STEP), -shift_i) - gl.log2(l_i))
        acc = acc * gl.convert_layout(1.0 / l_i, OUTPUT_ROWS)[:, None]
        # the numbers are read again, so that no register had to hold them
        q_block = handed_out(shared.tiles, turn, Q_BLOCK)
        z = handed_out(shared.tiles, turn, BATCH)
        h = handed_out(shared.tiles, turn, HEAD)
        first_row = q_block * BLOCK_M + CONSUMER * 64
        offs_m = first_row + gl.arange(0, 64, layout=QUERIES)
        tma.store_wait(0)  # of the tile before
        barrier()
        o_buffer.reshape([64, 128]).store(acc.to(desc_o.dtype))
        fence_async_shared()
        barrier()
        tma_store(desc_o, [z, h, first_row, 0], o_buffer)  # drops rows past Q_LEN
        LN2: gl.constexpr = 0.6931471805599453
        stats = (z.to(gl.int64) * Hq + h) * Q_LEN + offs_m
        gl.store(LSE + stats, m_i * (TO_LOG2 * LN2) - share * LN2, mask=offs_m < Q_LEN)

        mbarrier.arrive(shared.tiles.empty.index(turn & 1), count=1)
        turn += 1
        mbarrier.wait(shared.tiles.full.index(turn & 1), (turn >> 1) & 1)
        q_block = handed_out(shared.tiles, turn, Q_BLOCK)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "Hq", "Zkv", "GROUP_SIZE", "Q_LEN", "KV_LEN", "HEADS", "HEADS_PER_GROUP", "TO_LOG2", "mask_stride_z",
        "mask_stride_h", "mask_columns", "full_mask_columns"
    ]
)
def hopper_forward(
    # TMA descriptors of [Zkv, Hkv, KV_LEN, D_QK], ... D_V], [Z, Hq, Q_LEN, D_QK], ... D_V]
    desc_k, desc_v, desc_q, desc_o,
    LSE, COUNTER,  # float32 [Z, Hq, Q_LEN]; int32 [1], 0
    Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, HEADS, HEADS_PER_GROUP, TO_LOG2, mask_stride_z, mask_stride_h,
    mask_columns, full_mask_columns,
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
):
    q_buffers = gl.allocate_shared_memory(desc_q.dtype, [CONSUMERS, 1, 1, 64, 128], desc_q.layout)
    k_buffers = gl.allocate_shared_memory(desc_k.dtype, [STAGES, 1, 1, BLOCK_N, 128], desc_k.layout)
    v_buffers = gl.allocate_shared_memory(desc_v.dtype, [STAGES, 1, 1, BLOCK_N, 128], desc_v.layout)
    output = gl.allocate_shared_memory(desc_o.dtype, [CONSUMERS, 1, 1, 64, 128], desc_o.layout)
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q = Ring(q_buffers, new_barriers(CONSUMERS, 1), new_barriers(CONSUMERS, 1))
    k = Ring(k_buffers, new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS))
    v = Ring(v_buffers, new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS))
    tiles = Ring(tile_buffers, new_barriers(2, 1), new_barriers(2, CONSUMERS))
    shared = Shared(q, k, v, tiles, output)
    lists = Lists(
        mask_stride_z, mask_stride_h, mask_columns, full_mask_columns,
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
    )
    gl.warp_specialize([
        (forward_consumer, (
            0,
            desc_o, LSE, shared,
            Hq, Q_LEN, KV_LEN, TO_LOG2,
            lists,
        )),
        (forward_consumer, (
            1,
            desc_o, LSE, shared,
            Hq, Q_LEN, KV_LEN, TO_LOG2,
            lists,
        )),
        (forward_producer, (
            desc_q, desc_k, desc_v, COUNTER, shared,
            Hq, Zkv, GROUP_SIZE, HEADS, HEADS_PER_GROUP, Q_LEN, KV_LEN,
            lists,
        )),
    ], [4, 1], [240, 24])
