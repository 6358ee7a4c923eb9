# hopper backward alibi causal d128 bf16
"""Attention backward for Hopper, all three gradients in one pass over Q and dO of every query head that reads a tile of keys.

With S = score_mod(Q K^T * scale) masked and P = softmax(S), recomputed block by block from what the forward pass has found of every row:

    dV = P^T dO,   dP = dO V^T,   dS = P * derivative of score_mod * (dP - delta),   dK = dS^T Q * scale,   dQ = dS K * scale

One program stays on each multiprocessor and computes dK and dV of tiles of 128 keys. Its warps have roles: one warp, the producer,
has the TMA unit copy K, V and blocks of Q and dO to shared memory; two groups of four warps are consumers. Blocks are transposed,
[keys, queries].
Each consumer takes 64 keys, and P^T and dS^T are left operands of the next products as they stand in registers. dQ needs all 128 keys, so
dS^T passes through shared memory, and each consumer computes half of the columns of a block's dQ. It does so one block
late, so that none waits for the other's dS^T: they drift apart, and one computes weights while the other keeps the tensor cores busy. The
TMA unit adds dQ to memory: its last bits depend on the order in which programs do so. dK and dV are the same every time.

A tile, as time goes by. The producer runs ahead until both buffers of Q and its statistics are full, and those of dO.

    producer                    each consumer
    numbers of the tile, K, V   waits for them
    Q, top, share of block 0    starts S^T = K Q^T
    dO, delta of block 0        starts dP^T = V dO^T; waits for S^T: P^T = exp2(S^T - ...) while dP^T runs; starts dV += P^T dO
    the same of block 1         waits for dP^T: dS^T = P^T (dP^T - delta) and to shared memory while dV runs
                                starts its half of dQ = dS K of the block before, and dK += dS^T Q
                                waits for dQ, which the TMA unit adds to DQ_SUM while dK runs; waits for dK, lets go of Q and dO
    ...                         ...
    numbers of the next tile    lets go of K and V; dK and dV to shared memory, from where the TMA unit stores them
    its K, V and block 0        waits until they are in memory
    counts the tile before in DONE; when no tile is left, hands out blocks of dQ that all tiles have added to
    numbers of a block of dQ    finish_dq, half of it

    Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
    HEADS          Zkv * Hkv; HEADS_PER_GROUP of them are worked on at a time, with Q, dO and dQ in the L2 cache
    Q_LEN, KV_LEN  sequence lengths          m, n        query / key positions
    start_m        first query position of a block of BLOCK_M queries; m_before: of the block before, -1 if none is
    tile, turn     number of a key tile, and how many this program has had before
    step           how many blocks this program has had before, over all its tiles: block `step` lies in buffer step & 1
    full, empty    barriers: a buffer's copy has arrived; all that read it have done so
    top, share     [Z, Hq, 2, STATS_LEN]     from backward_delta: P is exp2((score - top) * TO_LOG2 + share).
                   Where scores are not huge, top is 0. Past Q_LEN share is -inf and P 0, so that no row needs a check
    delta          [Z, Hq, 1, STATS_LEN]     from there, too: row sums of O dO
    DQ_SUM         float32 [Z, Hq, Q_LEN, 128], zero before the launch in the first group of heads: dQ, still without scale. Programs
                   that find no tile left finish it, head by head
    DONE           [Zkv, Hkv]                tiles of a head whose dQ has been added; 0 before the launch
    ZEROED         [groups]                  tiles of the group of heads before that have zeroed their share of this one's sums; behind DONE
    COUNTER        [2]                       tickets drawn: for tiles, and then for blocks of dQ to finish; 0 before and after a launch. And
                                             whether `top` is not 0 everywhere, from backward_delta; 0 after a launch
    q_num_blocks   [Zm, Hm, columns]         how many query blocks visit a KV block (Zm, Hm: 1 or Z, Hq)
    q_indices      [Zm, Hm, columns, rows]   which ones. "Partial" blocks need mask_mod, "full" blocks do not
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

# what different Tritons call differently
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
# how many numbers, and which, the producer hands out with a tile. Block -1 is the end, -2 - i a head's ith block of dQ
NUMBERS = gl.constexpr(4)
DQ_ROWS = gl.constexpr(256)  # of a block of dQ, of which each consumer finishes half
BLOCK = gl.constexpr(0)
BATCH = gl.constexpr(1)
HEAD = gl.constexpr(2)
ALL_CHECKED = gl.constexpr(3)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # layout of [64, BLOCK_M] scores
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # layout of [64, 128] dK and dV
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))  # of P and dS, left operands of those with dO and Q
DQ_PART = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # layout of a consumer's [64, 64] of dQ
KEYS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
QUERIES = gl.constexpr(gl.SliceLayout(0, SCORES.value))


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

    tiles: Ring
    q: Ring
    do: Ring
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    start_m: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, q, do, k, v, kv_full, tops, delta, ds, dq, start_m):
        self.tiles = tiles
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.kv_full = kv_full
        self.tops = tops
        self.delta = delta
        self.ds = ds
        self.dq = dq
        self.start_m = start_m


@builtin
def tma_add(desc, coordinates, buffer, _semantic=None):
    """Have the TMA unit add a buffer to memory. Gluon before 3.8 has no name for it, Triton's compiler has."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, buffer.handle)


@gluon.jit
def wait_for_stores():
    """Until all that the TMA unit was given to add or to store is in memory. Gluon's store_wait ends when the buffers have been read."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def quotient(number, by):
    """number // by. A division takes a tenth of a microsecond, for which a program's first tile waits, and is seldom needed: not in
    the first group of heads, nor in the first batch entry."""
    found = number * 0
    if number >= by:
        found = number // by
    return found


@gluon.jit
def place_of(tile, kv_blocks, HEADS, HEADS_PER_GROUP):
    """The key block and the head of a tile: group by group, the first keys first, as most queries see them under a causal mask."""
    group = quotient(tile, kv_blocks * HEADS_PER_GROUP)
    inside = tile - group * kv_blocks * HEADS_PER_GROUP
    heads = gl.minimum(HEADS_PER_GROUP, HEADS - group * HEADS_PER_GROUP)
    return inside // heads, group * HEADS_PER_GROUP + inside % heads


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
    """Block lists: how many query blocks each row visits, and which."""

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
def place_in(lists, z, h, kv_block):
    """Which row of the lists is a tile's."""
    return z.to(gl.int64) * lists.stride_z + h * lists.stride_h + kv_block * BLOCK_N // 128


@gluon.jit
def visits_at(lists, place, num_blocks, num_full_blocks):
    """Row number `place` of the lists."""
    full_indices = lists.full_indices + place * lists.full_width
    return Visits(num_blocks, lists.indices + place * lists.width, num_full_blocks, full_indices)


@gluon.jit
def first_block(visits):
    """The query block of the first step. Both lists are read: to know first which one has it takes longer."""
    full = gl.load(visits.full_indices)
    return gl.where(visits.num_blocks > 0, gl.load(visits.indices), full)


@gluon.jit
def listed_block(step, visits, STEPS: gl.constexpr):
    """The query block of a step: the partial blocks first, then the full ones. Past the end, the last one again."""
    at = step // STEPS
    at = gl.maximum(gl.minimum(at, visits.num_blocks + visits.num_full_blocks - 1), 0)
    return gl.load(gl.where(at < visits.num_blocks, visits.indices + at, visits.full_indices + (at - visits.num_blocks)))


@aggregate
class Rows:
    """A tensor that is written by pointers: its address and strides of batch entries, heads and rows."""

    pointer: gl.tensor
    stride_z: gl.tensor
    stride_h: gl.tensor
    stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, stride_z, stride_h, stride):
        self.pointer = pointer
        self.stride_z = stride_z
        self.stride_h = stride_h
        self.stride = stride


@gluon.jit
def row_offsets(rows, z, h, row):
    """Where rows begin: at multiples of 8 elements, as TMA wants it of every stride."""
    offset = rows.stride_z.to(gl.int64) * z + rows.stride_h.to(gl.int64) * h
    return gl.multiple_of(offset + row.to(gl.int64) * rows.stride, 8)


@gluon.jit
def finish_dq(DQ_SUM, dq_rows, z, h, first_row, Hq, Q_LEN, SM_SCALE):
    """Half of a block of dQ from the sums over all key tiles: times the scale, in its dtype."""
    COLUMNS: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, DQ_ROWS // 2, layout=gl.SliceLayout(1, layout))
    inside = (row < Q_LEN)[:, None]
    sums = DQ_SUM + (((z.to(gl.int64) * Hq + h) * Q_LEN + row) * 128)[:, None]
    written = dq_rows.pointer + row_offsets(dq_rows, z, h, row)[:, None]
    for first in gl.static_range(0, 128, COLUMNS):
        column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
        total = gl.load(sums + column, mask=inside)
        gl.store(written + column, (total * SM_SCALE).to(dq_rows.pointer.dtype.element_ty), mask=inside)


@aggregate
class Heads:
    """How many there are: batch entries, heads, and key/value heads of a group of tiles."""

    Z: gl.tensor
    Zkv: gl.tensor
    Hkv: gl.tensor
    GROUP_SIZE: gl.tensor
    HEADS_PER_GROUP: gl.tensor

    @gluon.constexpr_function
    def __init__(self, Z, Zkv, Hkv, GROUP_SIZE, HEADS_PER_GROUP):
        self.Z = Z
        self.Zkv = Zkv
        self.Hkv = Hkv
        self.GROUP_SIZE = GROUP_SIZE
        self.HEADS_PER_GROUP = HEADS_PER_GROUP


@aggregate
class Place:
    """Of a block of dQ: key/value head, batch entry, query head, and number of the block there."""

    head: gl.tensor
    z: gl.tensor
    h: gl.tensor
    q_block: gl.tensor

    @gluon.constexpr_function
    def __init__(self, head, z, h, q_block):
        self.head = head
        self.z = z
        self.h = h
        self.q_block = q_block


@gluon.jit
def place_in_dq(number, q_blocks, heads):
    """Where a block of dQ lies. Heads have q_blocks of them, and come in the order of tiles."""
    readers = heads.Z // heads.Zkv * heads.GROUP_SIZE
    head = number // (readers * q_blocks)
    reader = number // q_blocks % readers
    z = head // heads.Hkv + reader // heads.GROUP_SIZE * heads.Zkv
    return Place(head, z, head % heads.Hkv * heads.GROUP_SIZE + reader % heads.GROUP_SIZE, number % q_blocks)


@gluon.jit
def wait_for_count(pointer, count):
    """Until the programs together have counted that far."""
    found = gl.atomic_add(pointer, 0, sem="acquire")
    while found < count:
        found = gl.atomic_add(pointer, 0, sem="acquire")


@gluon.jit
def zero_ahead(desc_dq, zeros, tile, tiles, next_group, heads, Q_LEN):
    """Zero a tile's share of the sums of dQ of the next group of heads. `tiles` are in every group but the last."""
    q_blocks = gl.cdiv(Q_LEN, 64)
    per_head = heads.Z // heads.Zkv * heads.GROUP_SIZE * q_blocks
    first = gl.minimum(next_group * heads.HEADS_PER_GROUP, heads.Zkv * heads.Hkv) * per_head
    end = gl.minimum((next_group + 1) * heads.HEADS_PER_GROUP, heads.Zkv * heads.Hkv) * per_head
    share = gl.cdiv(end - first, tiles)
    first += tile % tiles * share
    for number in range(first, gl.minimum(first + share, end)):
        place = place_in_dq(number, q_blocks, heads)
        for column in gl.static_range(0, 128, 64):
            tma_store(desc_dq, [place.z, place.h, place.q_block * 64, column], zeros)


@gluon.jit
def backward_producer(
    desc_q, desc_do, desc_k, desc_v, desc_tops, desc_delta, desc_dq, zeros, DONE, COUNTER, shared,
    heads, Q_LEN, KV_LEN,
    lists,
):
    """Copy the K and V of every tile, and then its blocks of Q and dO with their row statistics. When no tile is left, say which blocks of
    dQ are to be finished."""
    kv_blocks = gl.cdiv(KV_LEN, BLOCK_N)
    tiles = kv_blocks * heads.Zkv * heads.Hkv
    step = 0
    turn = 0
    last_head = 0  # of the tile before, which the consumers may still be at work on
    earlier_head = 0  # and of the one before that, which they are not: they have let go of K and V of the last
    ZEROED = DONE + heads.Zkv * heads.Hkv
    group_tiles = kv_blocks * heads.HEADS_PER_GROUP
    huge = gl.load(COUNTER + 1)
    tile = gl.atomic_add(COUNTER, 1)  # the first one, too: a program that has not started yet keeps none back
    while tile < tiles:
        kv_block, head = place_of(tile, kv_blocks, heads.Zkv * heads.Hkv, heads.HEADS_PER_GROUP)
        z_kv = head // heads.Hkv
        h_kv = head % heads.Hkv
        next_group = tile // group_tiles + 1
        if next_group > 1:
            wait_for_count(ZEROED + next_group - 1, group_tiles)
        zero_ahead(desc_dq, zeros, tile, group_tiles, next_group, heads, Q_LEN)
        told = False  # other programs, what is done
        for reader in range(0, heads.Z // heads.Zkv * heads.GROUP_SIZE):
            z = z_kv + reader // heads.GROUP_SIZE * heads.Zkv
            h = h_kv * heads.GROUP_SIZE + reader % heads.GROUP_SIZE
            # each listed block of 128 queries is walked in steps of BLOCK_M
            place = place_in(lists, z, h, kv_block)
            num_blocks = gl.load(lists.num_blocks + place)
            num_full_blocks = gl.load(lists.full_num_blocks + place)
            steps = (num_blocks + num_full_blocks) * 2
            visits = visits_at(lists, place, num_blocks, num_full_blocks)
            block = first_block(visits)
            if reader == 0:
                hand_out(shared.tiles, turn, BLOCK, kv_block)
                hand_out(shared.tiles, turn, BATCH, z_kv)
                hand_out(shared.tiles, turn, HEAD, h_kv)
                hand_out(shared.tiles, turn, ALL_CHECKED, gl.where((kv_block + 1) * BLOCK_N > KV_LEN, 1, huge))
                mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)
                # the consumers let go of K and V of the tile before when its dK and dV are still to be stored
                mbarrier.wait(shared.tiles.empty, (turn & 1) ^ 1)
                mbarrier.expect(shared.kv_full, desc_k.block_type.nbytes + desc_v.block_type.nbytes)
                tma_load(desc_k, [z_kv, h_kv, kv_block * BLOCK_N, 0], shared.kv_full, shared.k.index(0))
                tma_load(desc_v, [z_kv, h_kv, kv_block * BLOCK_N, 0], shared.kv_full, shared.v.index(0))
            for i in range(0, steps):
                start_m = block * 128 + i % 2 * BLOCK_M
                # a step ahead, so that no copy waits for it
                block = listed_block(i + 1, visits, STEPS=2)
                slot = step & 1
                q_full = shared.q.full.index(slot)
                mbarrier.wait(shared.q.empty.index(slot), ((step >> 1) & 1) ^ 1)
                write_number(shared.start_m.index(slot), start_m)
                mbarrier.arrive(q_full, count=1)
                mbarrier.expect(q_full, desc_q.block_type.nbytes + 2 * desc_tops.block_type.nbytes)
                tma_load(desc_q, [z, h, start_m, 0], q_full, shared.q.buffers.index(slot))
                top_place = [z, h, 0, start_m]
                tma_load(desc_tops, top_place, q_full, shared.tops.index(slot * 2))
                share_place = [z, h, 1, start_m]
                tma_load(desc_tops, share_place, q_full, shared.tops.index(slot * 2 + 1))
                do_full = shared.do.full.index(slot)
                mbarrier.expect(do_full, desc_do.block_type.nbytes + desc_delta.block_type.nbytes)
                tma_load(desc_do, [z, h, start_m, 0], do_full, shared.do.buffers.index(slot))
                tma_load(desc_delta, [z, h, 0, start_m], do_full, shared.delta.index(slot))
                step += 1
                if not told:  # not before: the consumers were waiting
                    if turn > 1:
                        gl.atomic_add(DONE + earlier_head, 1, sem="release")
                    if next_group * heads.HEADS_PER_GROUP < heads.Zkv * heads.Hkv:
                        wait_for_stores()
                        gl.atomic_add(ZEROED + next_group, 1, sem="release")
                    told = True
        if not told:
            if turn > 1:
                gl.atomic_add(DONE + earlier_head, 1, sem="release")
            if next_group * heads.HEADS_PER_GROUP < heads.Zkv * heads.Hkv:
                wait_for_stores()
                gl.atomic_add(ZEROED + next_group, 1, sem="release")
        earlier_head = last_head
        last_head = head
        tile = gl.atomic_add(COUNTER, 1)
        turn += 1

    # no tile is left. Blocks of dQ, of those heads first whose tiles were drawn first; and before them one past the
    # end, with which the consumers say that they have done with the last tile
    q_blocks = gl.cdiv(Q_LEN, DQ_ROWS)
    dq_blocks = heads.Z * heads.Hkv * heads.GROUP_SIZE * q_blocks
    dq_block = tile - tiles
    mbarrier.wait(shared.tiles.empty, (turn & 1) ^ 1)
    if turn > 1:
        gl.atomic_add(DONE + earlier_head, 1, sem="release")
    hand_out(shared.tiles, turn, BLOCK, -2 - q_blocks)
    mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)
    mbarrier.wait(shared.tiles.empty, turn & 1)
    if turn > 0:
        gl.atomic_add(DONE + last_head, 1, sem="release")
    turn += 1
    while dq_block < dq_blocks:
        place = place_in_dq(dq_block, q_blocks, heads)
        wait_for_count(DONE + place.head, kv_blocks)  # other programs may be at work on its tiles
        mbarrier.wait(shared.tiles.empty, (turn & 1) ^ 1)
        hand_out(shared.tiles, turn, BLOCK, -2 - place.q_block)
        hand_out(shared.tiles, turn, BATCH, place.z)
        hand_out(shared.tiles, turn, HEAD, place.h)
        mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)
        dq_block = gl.atomic_add(COUNTER, 1) - tiles
        turn += 1
    if dq_block == dq_blocks + gl.num_programs(0) - 1:  # every program draws one ticket in vain; this is the last
        gl.store(COUNTER, 0)
        gl.store(COUNTER + 1, 0)
    mbarrier.wait(shared.tiles.empty, (turn & 1) ^ 1)
    hand_out(shared.tiles, turn, BLOCK, -1)
    mbarrier.arrive(shared.tiles.full.index(turn & 1), count=1)


@gluon.jit
def meet():
    """A barrier of both consumers. Triton's own barriers have smaller numbers."""
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tell_other(step, CONSUMER: gl.constexpr):
    """Tell the other consumer that dS of block `step` is stored, and dQ of the block before is computed."""
    number = 9 + CONSUMER * 2 + (step & 1)
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_other(step, CONSUMER: gl.constexpr):
    """Wait until the other consumer has told so. There are two barriers each, as it may be a block ahead."""
    number = 9 + (1 - CONSUMER) * 2 + (step & 1)
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_dq(shared, step, CONSUMER: gl.constexpr):
    """Start this consumer's half of dQ of block `step`."""
    k = shared.k.index((step + 1) >> 31).reshape([BLOCK_N, 128])
    ds = shared.ds.index(step & 1)
    zeros = gl.zeros([64, 64], gl.float32, layout=DQ_PART)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(CONSUMER * 64, 64, dim=1), zeros, use_acc=False, is_async=True)


@gluon.jit
def stored_dq(dq, shared, CONSUMER: gl.constexpr, LATER: gl.constexpr):
    """Wait for dQ, and not for LATER products that were started after it; store it to the buffer that the TMA unit adds."""
    tma.store_wait(0)  # it has read what was there of the block before
    barrier()
    dq = warpgroup_mma_wait(LATER, deps=(dq,))
    buffer = shared.dq.index(CONSUMER)
    buffer.reshape([64, 64]).store(dq)
    fence_async_shared()
    barrier()
    return buffer


@gluon.jit
def finish_last_dq(z, h, m_before, desc_dq, shared, step, CONSUMER: gl.constexpr):
    """Half of dQ of the last block of a query head."""
    wait_for_other(step, CONSUMER)
    dq_buffer = stored_dq(start_dq(shared, step, CONSUMER), shared, CONSUMER, LATER=0)
    tma_add(desc_dq, [z, h, m_before, CONSUMER * 64], dq_buffer)


@gluon.jit
def add_query_block(
    dk, dv, m_before, desc_dq, shared, step,
    z, h, n, keys, is_full, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
    ptr_slopes,  # captured by score_mod alibi
    score_0,  # what the mods have read for every key
    CONSUMER: gl.constexpr, EDGE: gl.constexpr,
):
    """Add what one block of BLOCK_M queries contributes to 64 keys, and half of what the tile contributes to dQ.
    EDGE: some pairs may be hidden, and `top` may be another number than 0."""
    dtype: gl.constexpr = shared.ds.dtype
    slot = step & 1
    phase = (step >> 1) & 1
    # the one buffer of K, or of V. If the compiler knew that, it would keep dozens of addresses in it in registers
    zero = step >> 31
    q = shared.q.buffers.index(slot).reshape([BLOCK_M, 128])
    do = shared.do.buffers.index(slot).reshape([BLOCK_M, 128])
    k = shared.k.index(zero).reshape([BLOCK_N, 128])
    v = shared.v.index(zero).reshape([BLOCK_N, 128])
    zeros = gl.zeros([64, BLOCK_M], gl.float32, layout=SCORES)
    mbarrier.wait(shared.q.full.index(slot), phase)
    start_m = read_number(shared.start_m.index(slot))
    qk = warpgroup_mma(k.slice(CONSUMER * 64, 64, dim=0), q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(shared.do.full.index(slot), phase)
    dp = warpgroup_mma(v.slice(CONSUMER * 64, 64, dim=0), do.permute((1, 0)), zeros, use_acc=False, is_async=True)

    # softmax and the derivative of score_mod, while dP is computed
    qk = warpgroup_mma_wait(1, deps=(qk,))
    share = shared.tops.index(slot * 2 + 1).reshape([BLOCK_M]).load(QUERIES)  # no earlier: the mods need the registers
    if EDGE:
        top = shared.tops.index(slot * 2).reshape([BLOCK_M]).load(QUERIES)
    offs_m = start_m + gl.arange(0, BLOCK_M, layout=QUERIES)
    # [1, BLOCK_M]; n is [64, 1], past KV_LEN too: loads that could leave their tensor are masked
    m = gl.minimum(offs_m, Q_LEN - 1)[None, :]
    # ---- score_mod: alibi, which adds to the score
    offs = gl.arange(0, BLOCK_M, layout=QUERIES)[None, :]
    distance = (keys - start_m).to(gl.float32)[:, None] - (offs & 7).to(gl.float32) - (offs & -8).to(gl.float32)
    score = qk * SM_SCALE
    score = gl.fma(distance, score_0, score)
    if EDGE:
        # ---- mask_mod: causal
        # mods/causal.py:26: return q_idx >= kv_idx
        mask_0 = m >= n
        seen = (mask_0 | is_full) & (n < KV_LEN)
        # the difference is exact where it matters, however large scores are. Between it and a product, which would
        # not be rounded, is a choice
        score = gl.where(seen, score, float("-inf")) - top[None, :]
    p = gl.exp2(gl.fma(score, TO_LOG2, share[None, :]))  # [64, BLOCK_M], the softmax itself
    weights = p.to(dtype)
    dv = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), do, dv, is_async=True)

    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = shared.delta.index(slot).reshape([BLOCK_M]).load(QUERIES)
    ds = (p * (dp - delta[None, :])).to(dtype)

    # who has told that its dS of the block before is stored has read the buffer that is next
    if m_before >= 0:
        wait_for_other(step - 1, CONSUMER)
    shared.ds.index(slot).slice(CONSUMER * 64, 64, dim=0).store(ds)
    dq = start_dq(shared, step - 1, CONSUMER)  # of nothing in the first block
    # behind dQ, so that it runs while dQ leaves
    dk = warpgroup_mma(gl.convert_layout(ds, WEIGHTS), q, dk, is_async=True)
    dq_buffer = stored_dq(dq, shared, CONSUMER, LATER=1)
    tell_other(step, CONSUMER)
    if m_before >= 0:
        tma_add(desc_dq, [z, h, m_before, CONSUMER * 64], dq_buffer)  # drops rows past the tensor
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(shared.q.empty.index(slot), count=1)
    return dk, dv, start_m


@gluon.jit
def next_block(tiles, turn):
    """The first of the numbers that are handed out as the `turn`th, when they are there."""
    mbarrier.wait(tiles.full.index(turn & 1), (turn >> 1) & 1)
    return handed_out(tiles, turn, BLOCK)


@gluon.jit
def backward_consumer(
    CONSUMER: gl.constexpr,
    desc_dq, desc_dk, desc_dv, DQ_SUM, dq_rows, shared,
    Z, Zkv, Hq, GROUP_SIZE, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
    lists,
    ptr_slopes,  # captured by score_mod alibi
):
    """dK and dV of 64 keys of every tile, and half of what the tile adds to dQ. And then half of blocks of dQ."""
    # K and V of the next tile arrive while dK and dV leave. These pass through the buffers of dS and dQ, namely through
    # what this consumer alone writes of them: 64 rows of dS, and a buffer of dQ
    dk_buffers = reinterpret(shared.ds, desc_dk.dtype, [1, 1, 1, BLOCK_N, 128], desc_dk.layout)
    dv_buffers = reinterpret(shared.dq, desc_dv.dtype, [2, 1, 1, 64, 128], desc_dv.layout)
    dk_buffer = dk_buffers.index(0)
    dv_buffer = dv_buffers.index(CONSUMER)
    step = 0
    turn = 0
    kv_block = next_block(shared.tiles, turn)
    while kv_block >= 0:
        keys = kv_block * BLOCK_N + CONSUMER * 64 + gl.arange(0, 64, layout=KEYS)
        n = keys[:, None]
        dk = gl.zeros([64, 128], gl.float32, layout=SUMS)
        dv = gl.zeros([64, 128], gl.float32, layout=SUMS)
        # every query head of the group, in every batch entry that shares these keys
        for reader in range(0, Z // Zkv * GROUP_SIZE):
            z_kv = handed_out(shared.tiles, turn, BATCH)
            h_kv = handed_out(shared.tiles, turn, HEAD)
            z = z_kv + reader // GROUP_SIZE * Zkv
            h = h_kv * GROUP_SIZE + reader % GROUP_SIZE
            # each listed block of 128 queries is walked in steps of BLOCK_M
            place = place_in(lists, z, h, kv_block)
            num_blocks = gl.load(lists.num_blocks + place)
            num_full_blocks = gl.load(lists.full_num_blocks + place)
            steps = (num_blocks + num_full_blocks) * 2
            # ---- score_mod: alibi, what it reads by key
            # mods/alibi.py:67: return score + slopes[h] * (kv_idx - q_idx)
            score_0 = gl.load(ptr_slopes + h)
            if reader == 0:
                wait_for_stores()  # of the tile before
                barrier()  # every warp stores a part
                mbarrier.wait(shared.kv_full, turn & 1)
            m_before = -1
            # blocks whose scores are checked, and then the others: two loops, so that neither branches. Checked are
            # partial blocks, and all of them where the keys end or scores are huge
            checked = gl.where(handed_out(shared.tiles, turn, ALL_CHECKED) != 0, steps, num_blocks * 2)
            for i in range(0, checked):
                dk, dv, m_before = add_query_block(
                    dk, dv, m_before, desc_dq, shared, step,
                    z, h, n, keys, i >= num_blocks * 2, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
                    ptr_slopes,
                    score_0,
                    CONSUMER=CONSUMER, EDGE=True,
                )
                step += 1
            for i in range(checked, steps):
                dk, dv, m_before = add_query_block(
                    dk, dv, m_before, desc_dq, shared, step,
                    z, h, n, keys, True, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
                    ptr_slopes,
                    score_0,
                    CONSUMER=CONSUMER, EDGE=False,
                )
                step += 1
            if m_before >= 0:
                finish_last_dq(z, h, m_before, desc_dq, shared, step - 1, CONSUMER)

        # the numbers are read again, so that no register had to hold them
        first_key = handed_out(shared.tiles, turn, BLOCK) * BLOCK_N + CONSUMER * 64
        z_kv = handed_out(shared.tiles, turn, BATCH)
        h_kv = handed_out(shared.tiles, turn, HEAD)
        mbarrier.arrive(shared.tiles.empty, count=1)
        tma.store_wait(0)  # of the last block's dQ
        meet()  # the other consumer has read this one's dS for the last time
        dv_buffer.reshape([64, 128]).store(dv.to(desc_dv.dtype))
        dk_buffer.reshape([BLOCK_N, 128]).slice(CONSUMER * 64, 64, dim=0).store((dk * SM_SCALE).to(desc_dk.dtype))
        fence_async_shared()
        barrier()
        tma_store(desc_dv, [z_kv, h_kv, first_key, 0], dv_buffer)  # drops keys past KV_LEN
        tma_store(desc_dk, [z_kv, h_kv, first_key, 0], dk_buffer.slice(CONSUMER * 64, 64, dim=2))
        turn += 1
        kv_block = next_block(shared.tiles, turn)

    wait_for_stores()
    barrier()
    while kv_block < -1:
        z = handed_out(shared.tiles, turn, BATCH)
        h = handed_out(shared.tiles, turn, HEAD)
        barrier()  # every warp has read the numbers
        mbarrier.arrive(shared.tiles.empty, count=1)
        first_row = (-2 - kv_block) * DQ_ROWS + CONSUMER * (DQ_ROWS // 2)
        finish_dq(DQ_SUM, dq_rows, z, h, first_row, Hq, Q_LEN, SM_SCALE)
        turn += 1
        kv_block = next_block(shared.tiles, turn)


@gluon.jit(
    do_not_specialize=[
        "Z", "Zkv", "Hq", "Hkv", "GROUP_SIZE", "HEADS_PER_GROUP", "Q_LEN", "KV_LEN", "stride_dqz", "stride_dqh",
        "stride_dqm", "SM_SCALE", "TO_LOG2", "mask_stride_z", "mask_stride_h", "mask_rows", "full_mask_rows"
    ]
)
def hopper_backward(
    # TMA descriptors, of blocks of
    desc_q, desc_do,  # [BLOCK_M, 128] in [Z, Hq, Q_LEN, 128]
    desc_k, desc_v,  # [BLOCK_N, 128] in [Zkv, Hkv, KV_LEN, 128]
    desc_tops, desc_delta,  # [1, BLOCK_M] in float32 [Z, Hq, 2, STATS_LEN], [Z, Hq, 1, STATS_LEN]
    desc_dq,  # [64, 64] in DQ_SUM, added to
    desc_dk, desc_dv,  # as K and V, 64 rows, written
    DQ_SUM, DQ,  # float32 as above; as Q, written
    DONE, COUNTER,  # int32, 0
    Z, Zkv, Hq, Hkv, GROUP_SIZE, HEADS_PER_GROUP, Q_LEN, KV_LEN, stride_dqz, stride_dqh, stride_dqm, SM_SCALE,
    TO_LOG2, mask_stride_z, mask_stride_h, mask_rows, full_mask_rows,
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices,
    ptr_slopes,  # captured by score_mod alibi
):
    dtype: gl.constexpr = desc_q.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, 128], desc_q.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, 128], desc_do.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, 128], desc_k.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, 128], desc_v.layout)
    tops = gl.allocate_shared_memory(gl.float32, [4, 1, 1, 1, BLOCK_M], desc_tops.layout)
    delta = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 1, BLOCK_M], desc_delta.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    ds = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], DS_LAYOUT)
    dq = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], desc_dq.layout)
    zeros = gl.allocate_shared_memory(gl.float32, [1, 1, 64, 64], desc_dq.layout)
    ROWS_OF_ZEROS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    zeros.reshape([64, 64]).store(gl.zeros([64, 64], gl.float32, layout=ROWS_OF_ZEROS))
    fence_async_shared()
    start_m = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = Ring(tile_buffers, new_barriers(2, 1), new_barriers(1, 2).index(0))  # empty: K and V, too
    kv_full = new_barriers(1, 1).index(0)
    q = Ring(q_buffers, new_barriers(2, 2), new_barriers(2, 2))
    do = Ring(do_buffers, new_barriers(2, 1), q.empty)  # both have been read
    shared = Shared(tiles, q, do, k, v, kv_full, tops, delta, ds, dq, start_m)
    lists = Lists(
        mask_stride_z, mask_stride_h, mask_rows, full_mask_rows,
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices,
    )
    heads = Heads(Z, Zkv, Hkv, GROUP_SIZE, HEADS_PER_GROUP)
    dq_rows = Rows(DQ, stride_dqz, stride_dqh, stride_dqm)
    gl.warp_specialize([
        (backward_consumer, (
            0,
            desc_dq, desc_dk, desc_dv, DQ_SUM, dq_rows, shared,
            Z, Zkv, Hq, GROUP_SIZE, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
            lists,
            ptr_slopes,
        )),
        (backward_consumer, (
            1,
            desc_dq, desc_dk, desc_dv, DQ_SUM, dq_rows, shared,
            Z, Zkv, Hq, GROUP_SIZE, Q_LEN, KV_LEN, SM_SCALE, TO_LOG2,
            lists,
            ptr_slopes,
        )),
        (backward_producer, (
            desc_q, desc_do, desc_k, desc_v, desc_tops, desc_delta, desc_dq, zeros, DONE, COUNTER, shared,
            heads, Q_LEN, KV_LEN,
            lists,
        )),
    ], [4, 1], [240, 24])
