// cpu forward alibi causal d64 fp32
//
// Attention forward: O = softmax(score_mod(Q K^T * scale) masked) V, one pass over K and V with a running softmax.
//
// A thread computes one tile of BLOCK_M queries of one head after another. Tiles are transposed: a query is a lane, so what is summed or
// compared over keys needs no lane of another's.
//
//     Z, Hq, Hkv     batch size, query heads, key/value heads (GROUP_SIZE = Hq / Hkv query heads share one)
//     Q_LEN, KV_LEN  sequence lengths          D_QK, D_V   head dims
//     m, n           query / key positions: LANES queries, one key
//     q, s, acc      [D_QK, BLOCK_M] the tile's queries, [BLOCK_N, BLOCK_M] scores and then weights, [D_V, BLOCK_M] unnormalised output
//     m_i            [BLOCK_M]                 running maximum of a query's scores
//     l_i            [BLOCK_M]                 sum of exp2(score in base 2 - shift_i), where shift_i is m_i in base 2
//     lse            [Z, Hq, Q_LEN]            natural logarithm of the sum of exp(score), -inf for an empty row
//     kv_num_blocks  [Zm, Hm, rows]            how many KV blocks a row of query blocks visits (Zm, Hm: 1 or Z, Hq)
//     kv_indices     [Zm, Hm, rows, columns]   which ones, in order. "Partial" blocks need mask_mod, "full" blocks do not
#include "cpu.h"
#include "cpu_tiles.h"

namespace flexpress {

constexpr int D_QK = 64, D_V = 64;
constexpr int BLOCK_M = 64, BLOCK_N = 128;
constexpr int Q_BLOCK = 128;  // queries that have one row of the lists
constexpr int TILES = (Q_BLOCK + BLOCK_M - 1) / BLOCK_M;  // of them
constexpr float INF = __builtin_inff();
constexpr float LN2 = 0.6931471805599453f;

struct Tile {
    alignas(64) float q[D_QK * BLOCK_M], s[BLOCK_N * BLOCK_M], acc[D_V * BLOCK_M];
    alignas(64) float m_i[BLOCK_M], shift_i[BLOCK_M], l_i[BLOCK_M];
    alignas(64) int32_t m[BLOCK_M];
};

struct Forward {
    const float* Q;  // [Z, Hq, Q_LEN, D_QK]
    const float* K;  // [Zkv, Hkv, KV_LEN, D_QK]
    const float* V;  // [Zkv, Hkv, KV_LEN, D_V]
    float* O;  // [Z, Hq, Q_LEN, D_V] in any strides, written
    float* LSE;  // [Z, Hq, Q_LEN], written
    int64_t Z, Hq, Zkv, GROUP_SIZE, Q_LEN, KV_LEN, stride_qz, stride_qh, stride_qm, stride_kz, stride_kh, stride_kn;
    int64_t stride_vz, stride_vh, stride_vn, stride_oz, stride_oh, stride_om;
    float SM_SCALE, TO_LOG2;
    int64_t mask_stride_z, mask_stride_h, mask_columns, full_mask_columns;
    const int32_t* kv_num_blocks;
    const int32_t* kv_indices;
    const int32_t* full_kv_num_blocks;
    const int32_t* full_kv_indices;
    const float* ptr_slopes;  // captured by score_mod alibi

    // exp2(score * TO_LOG2 - shift) is one multiply-add, of the exact product, while shift = m_i * TO_LOG2 is rounded. What that is off by, a
    // row's weights have in common, and it cancels: up to 2^32. Scores of a row whose largest one is HUGE or more are multiplied by the power
    // of two STEP instead: float32 numbers are so far apart there that all scores but the largest have weight 0 in any base.
    float huge() const { return 1073741824.0f / TO_LOG2; }
    float step() const { return bits_of<float>(bits_of<int32_t>(TO_LOG2) & 0x7F800000); }

    // What a running softmax is multiplied by when its largest score becomes m_new, and how weights are computed from then on
    struct Turn { Float factor, shift, safe, alpha; };
    Turn turned(Float m_new, Float m_i, Float shift_i) const {
        const Bool usual = abs(m_new) < huge();
        const Float factor = where(usual, TO_LOG2, step()), shift = rounded(m_new * factor);
        const Float safe = where(m_new == -INF, 0.0f, shift);  // a row with nothing to attend to yet: avoid inf - inf
        // a sum that was shifted in the other way is of scores that are much smaller
        return {factor, shift, safe, fast_exp2(where(usual == (abs(m_i) < huge()), shift_i - safe, -INF))};
    }

    // log2 of the weight of a score m_i in the softmax of a row with sum l_i; 0 for an empty row
    float share_of(float m_i, float shift_i, float l_i) const {
        return l_i == 0 ? 0.0f : m_i * (abs(m_i) < huge() ? TO_LOG2 : step()) - shift_i - log2(l_i);
    }

    // The largest score of LANES queries is m_new
    void move_on(Tile& t, int j, Float m_new, const Turn& turn) const {
        store_lanes(t.m_i + j, m_new);
        store_lanes(t.shift_i + j, turn.shift);
        for (int d = 0; d < D_V; ++d) store_lanes(t.acc + d * BLOCK_M + j, load_lanes(t.acc + d * BLOCK_M + j) * turn.alpha);
    }

    // Of `count` keys from start_n on, those between the first and the last one to which a query of the tile attends
    Range attended(const Tile& t, int32_t z, int32_t h, int64_t start_n, int count) const {
        Range found{count, 0};
        for (int j = BLOCK_M - LANES; j >= 0; j -= LANES) {
            const Int m = load_lanes(t.m + j);
            const auto is_attended = [&](int i) {
                const int32_t n = int32_t(start_n) + i;
                // ---- mask_mod: causal
                // mods/causal.py:26: return q_idx >= kv_idx
                const auto mask_0 = m >= n;
                return any(Bool(mask_0));
            };
            int begin = 0, end = count;
            while (end > found.end && !is_attended(end - 1)) --end;
            while (begin < found.begin && !is_attended(begin)) ++begin;
            found = {begin, end};
        }
        return found.begin < found.end ? whole(found, count) : found;
    }

    // Fold `count` keys from start_n on into a tile's running softmax
    template <bool IS_FULL>
    void fold(Tile& t, const float* K, const float* V, int32_t z, int32_t h, int64_t start_n, int count) const {
        if constexpr (!IS_FULL) {
            const Range keys = attended(t, z, h, start_n, count);
            if (keys.begin >= keys.end) return;
            start_n += keys.begin;
            count = keys.end - keys.begin;
        }
        multiply<BLOCK_M, false>(count, D_QK, K + start_n * stride_kn, stride_kn, 1, t.q, BLOCK_M, t.s, BLOCK_M);
        for (int j = 0; j < BLOCK_M; j += LANES) {
            const Int m = load_lanes(t.m + j);
            const Float m_i = load_lanes(t.m_i + j), shift_i = load_lanes(t.shift_i + j);
            Float m_new = m_i;
            // ---- score_mod: alibi, what it reads by the query
            // mods/alibi.py:67: return score + slopes[h] * (kv_idx - q_idx)
            const auto score_0 = load(ptr_slopes + h);
            for (int i = 0; i < count; ++i) {
                Float score = load_lanes(t.s + i * BLOCK_M + j) * SM_SCALE;
                const int32_t n = int32_t(start_n) + i;
                // ---- score_mod: alibi
                // mods/alibi.py:67: return score + slopes[h] * (kv_idx - q_idx)
                const auto score_1 = score + score_0 * float_difference(n, m);
                score = score_1;
                if constexpr (!IS_FULL) {
                    // ---- mask_mod: causal
                    // mods/causal.py:26: return q_idx >= kv_idx
                    const auto mask_0 = m >= n;
                    score = where(mask_0, score, -INF);
                }
                store_lanes(t.s + i * BLOCK_M + j, score);
                m_new = where(score > m_new, score, m_new);
            }

            // running softmax in base 2: exp(s) = exp2(s * log2(e)), and the product folds into one fused multiply-add
            const Turn turn = turned(m_new, m_i, shift_i);
            Float sum = 0.0f;
            for (int i = 0; i < count; ++i) {
                const Float p = fast_exp2(load_lanes(t.s + i * BLOCK_M + j) * turn.factor - turn.safe);
                sum += p;
                store_lanes(t.s + i * BLOCK_M + j, p);
            }
            store_lanes(t.l_i + j, load_lanes(t.l_i + j) * turn.alpha + sum);
            move_on(t, j, m_new, turn);
        }
        multiply<BLOCK_M, true>(D_V, count, V + start_n * stride_vn, 1, stride_vn, t.s, BLOCK_M, t.acc, BLOCK_M);
    }

    // The `rows` queries from `first` on of head h of batch entry z; `block` is their row in the block lists
    void attend(Tile& t, int32_t z, int32_t h, int64_t block, int64_t first, int rows) const {
        read_columns<BLOCK_M>(t.q, Q + z * stride_qz + h * stride_qh + first * stride_qm, stride_qm, 1, rows, D_QK);
        for (int i = 0; i < BLOCK_M; ++i) {  // padding repeats the last query and is not stored
            t.m[i] = int32_t(first) + (i < rows ? i : rows - 1);
            t.m_i[i] = t.shift_i[i] = -INF;
            t.l_i[i] = 0;
        }
        for (float& x : t.acc) x = 0;

        const float* k = K + z % Zkv * stride_kz + h / GROUP_SIZE * stride_kh;  // K and V may have one batch entry that all queries share
        const float* v = V + z % Zkv * stride_vz + h / GROUP_SIZE * stride_vh;
        const int64_t row = z * mask_stride_z + h * mask_stride_h + block;
        auto visit = [&](auto is_full, int64_t index) {
            const int64_t begin = index * 128, end = begin + 128 < KV_LEN ? begin + 128 : KV_LEN;
            for (int64_t n = begin; n < end; n += BLOCK_N)
                fold<is_full.value>(t, k, v, z, h, n, int(end - n < BLOCK_N ? end - n : BLOCK_N));
        };
        for (int32_t i = 0; i < kv_num_blocks[row]; ++i) visit(std::false_type(), kv_indices[row * mask_columns + i]);
        for (int32_t i = 0; i < full_kv_num_blocks[row]; ++i) visit(std::true_type(), full_kv_indices[row * full_mask_columns + i]);

        float* out = O + z * stride_oz + h * stride_oh + first * stride_om;
        const int64_t stats = (int64_t(z) * Hq + h) * Q_LEN + first;
        for (int j = 0; j < rows; ++j) {
            const float m_i = t.m_i[j];
            const float l_i = t.l_i[j] == 0 ? 1.0f : t.l_i[j];  // an empty row: output 0, lse -inf
            const float share = share_of(m_i, t.shift_i[j], t.l_i[j]);
            LSE[stats + j] = m_i - share * LN2;
            t.l_i[j] = l_i;
        }
        for (int d = 0; d < D_V; ++d)
            for (int j = 0; j < rows; j += LANES) {
                float* acc = t.acc + d * BLOCK_M + j;
                store_lanes(acc, load_lanes(acc) / load_lanes(t.l_i + j));
            }
        write_columns<BLOCK_M>(out, stride_om, t.acc, rows, D_V);
    }
};

}  // namespace flexpress

extern "C" void cpu_forward(const flexpress::Forward* call, int threads) {
    using namespace flexpress;
    const int64_t blocks = (call->Q_LEN + Q_BLOCK - 1) / Q_BLOCK, tiles = blocks * TILES;
#pragma omp parallel num_threads(threads)
    {
        Owned<Tile> tile;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < call->Z * call->Hq * tiles; ++task) {
            // tiles of one head follow one another, so its K and V stay in the cache; the last ones come first: they are the longest
            const int64_t at = tiles - 1 - task % tiles, head = task / tiles;
            const int64_t block = at / TILES;
            const int64_t first = block * Q_BLOCK + at % TILES * BLOCK_M, whole = (block + 1) * Q_BLOCK;
            const int64_t end = whole < call->Q_LEN ? whole : call->Q_LEN;
            const int rows = int(end - first < BLOCK_M ? end - first : BLOCK_M);
            if (rows > 0) call->attend(*tile.at, int32_t(head / call->Hq), int32_t(head % call->Hq), block, first, rows);
        }
    }
}
