// How rows and columns of tensors, and weights, become factors of products.
#pragma once

namespace flexpress {

// LANES elements that follow one another
template <class T> INLINE Float widened_lanes(const T* p) {
    if constexpr (std::is_same_v<T, BFloat16>) {
        const auto bits = converted<Vec<uint32_t>::Native>(load_lanes(&p->bits).v);
        return bits_of<Float>(bits << 16);
    } else if constexpr (std::is_same_v<T, Float16>) {  // g++ 12 converts such vectors element by element
        const Int bits = to_int32(load_lanes((const uint16_t*)p)), size = bits & 0x7FFF, exponent = bits & 0x7C00;
        const Int usual = (size << 13) + where(exponent == 0x7C00, 224 << 23, 112 << 23);  // infinities and NaN have the largest exponent
        const Int found = where(exponent == 0, bits_of<Int>(to_float32(size) * 0x1p-24f), usual);
        return bits_of<Float>(found | (bits & 0x8000) << 16);
    } else if constexpr (std::is_same_v<T, float>) {
        return load_lanes(p);
    } else {
        Float x;
        for (int i = 0; i < LANES; ++i) x.v[i] = widened(p[i]);
        return x;
    }
}

// the same written, rounded to what is there
template <class T> INLINE void put_lanes(T* p, Float x) {
    if constexpr (std::is_same_v<T, float>) store_lanes(p, x);
    else {
        alignas(64) float found[LANES];
        store_lanes(found, x);
        for (int k = 0; k < LANES; ++k) narrow(found[k], p[k]);
    }
}

// the sum of the products of two rows
template <class T> INLINE float product_of(const T* a, const float* b, int length) {
    Float sums = 0.0f;
    int d = 0;
    for (; d + LANES <= length; d += LANES) sums += widened_lanes(a + d) * load_lanes(b + d);
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += sums.v[i];
    for (; d < length; ++d) sum += widened(a[d]) * b[d];
    return sum;
}

// [count, WIDTH] of a tensor as float32 rows; what is past `columns` is 0
template <int WIDTH, class T>
INLINE void read_rows(float* to, const T* from, int64_t row, int64_t unit, int count, int columns) {
    for (int i = 0; i < count; ++i) {
        if (unit == 1) {
            int d = 0;
            for (; d + LANES <= columns; d += LANES) store_lanes(to + i * WIDTH + d, widened_lanes(from + i * row + d));
            for (; d < columns; ++d) to[i * WIDTH + d] = widened(from[i * row + d]);
        } else for (int d = 0; d < columns; ++d) to[i * WIDTH + d] = widened(from[i * row + d * unit]);
        for (int d = columns; d < WIDTH; ++d) to[i * WIDTH + d] = 0;
    }
}

// The same as pairs along a row
template <int WIDTH>
INLINE void read_rows(Pair* to, const BFloat16* from, int64_t row, int64_t unit, int count, int columns) {
    constexpr int HALF = depths<Pair>(WIDTH);
    for (int i = 0; i < count; ++i, from += row, to += HALF)
        for (int d = 0; d < HALF; ++d)
            to[d] = {2 * d < columns ? from[2 * d * unit] : BFloat16{0}, 2 * d + 1 < columns ? from[(2 * d + 1) * unit] : BFloat16{0}};
}

// [count, WIDTH] of a tensor as factors by rows: the tensor itself where it can be, else a copy. `step`: how many factors later a row begins
template <int WIDTH, class F, class T>
INLINE const F* left_factors(F* copy, const T* from, int64_t row, int64_t unit, int count, int64_t& step) {
    constexpr int EACH = sizeof(F) / sizeof(T);
    if (std::is_same_v<F, Pair> && unit == 1 && WIDTH % EACH == 0 && row % EACH == 0) return step = row / EACH, (const F*)from;
    read_rows<WIDTH>(copy, from, row, unit, count, WIDTH);
    return step = depths<F>(WIDTH), copy;
}

// Two numbers of 16 bits for each lane: from a and b in turn
typedef uint16_t Halves __attribute__((vector_size(LANES * 4)));
template <int... I> INLINE Halves in_turn(Vec<uint16_t> a, Vec<uint16_t> b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a.v, b.v, (I / 2 + I % 2 * LANES)...);
}

// Weights of `count` keys as right factors [depths, BLOCK_M]: weight(i) gives those of key i
template <int BLOCK_M, class W>
INLINE void put_weights(float* to, int count, W weight) {
    for (int i = 0; i < count; ++i) store_lanes(to + i * BLOCK_M, weight(i));
}
template <int BLOCK_M, class W>
INLINE void put_weights(Pair* to, int count, W weight) {
    const auto nearest = [](Float x) {  // bfloat16 in the upper half of each lane; ties to even
        const Int bits = bits_of<Int>(x);
        return bits + 0x7FFF + (bits >> 16 & 1);
    };
    for (int i = 0; i < count; i += 2) {
        const auto first = bits_of<Vec<uint32_t>>(nearest(weight(i))) >> 16;
        const Int second = i + 1 < count ? nearest(weight(i + 1)) & -65536 : Int(0);
        store_lanes((int32_t*)(to + i / 2 * BLOCK_M), bits_of<Int>(first) | second);
    }
}

// LANES elements of a column of a matrix with rows of so many elements
template <class T> INLINE Float column(const T* from, int64_t row) {
    Vec<int32_t> at;
    for (int i = 0; i < LANES; ++i) at.v[i] = i * int32_t(row);
    return load(from + at);
}

// LANES vectors of as many lanes, transposed: quarters off the diagonal change places, in those that are left too
template <int HALF, class V, int... I> INLINE void exchange(V& a, V& b, std::integer_sequence<int, I...>) {
    const V upper = __builtin_shufflevector(a, b, (I & HALF ? LANES + I - HALF : I)...);
    b = __builtin_shufflevector(a, b, (I & HALF ? LANES + I : I + HALF)...);
    a = upper;
}
template <int HALF = LANES / 2, class T> INLINE void transpose(Vec<T> (&rows)[LANES]) {
    if constexpr (HALF > 0) {
        for (int i = 0; i < LANES; ++i)
            if (!(i & HALF)) exchange<HALF>(rows[i].v, rows[i + HALF].v, std::make_integer_sequence<int, LANES>());
        transpose<HALF / 2>(rows);
    }
}

// Pairs of rows that follow one another, [depths, WIDTH]
template <int WIDTH>
INLINE void pair_rows(Pair* to, const BFloat16* from, int64_t row, int64_t unit, int count) {
    for (int i = 0; i < count; i += 2, from += 2 * row, to += WIDTH) {
        int d = 0;
        for (; i + 1 < count && unit == 1 && d + LANES <= WIDTH; d += LANES) {
            const auto one = load_lanes((const uint16_t*)(from + d)), other = load_lanes((const uint16_t*)(from + row + d));
            const Halves both = in_turn(one, other, std::make_integer_sequence<int, 2 * LANES>());
            __builtin_memcpy(to + d, &both, sizeof(both));
        }
        for (; d < WIDTH; ++d) to[d] = {from[d * unit], i + 1 < count ? from[row + d * unit] : BFloat16{0}};
    }
}

// The columns of up to COUNT rows of a tensor as left factors, [WIDTH, depths]
template <class F, int WIDTH, int COUNT> struct ColumnsLie {
    static constexpr int ROW = std::is_same_v<F, Pair> && BY_ROWS ? depths<F>(COUNT) : 1;
    static constexpr int DEPTH = std::is_same_v<F, Pair> && BY_ROWS ? 1 : WIDTH;
};
template <int WIDTH, int COUNT, class T>
INLINE void read_left_columns(float* to, const T* from, int64_t row, int64_t unit, int count) {
    read_rows<WIDTH>(to, from, row, unit, count, WIDTH);
}
template <int WIDTH, int COUNT>
INLINE void read_left_columns(Pair* to, const BFloat16* from, int64_t row, int64_t unit, int count) {
    if (!BY_ROWS) return pair_rows<WIDTH>(to, from, row, unit, count);
    constexpr int ROW = ColumnsLie<Pair, WIDTH, COUNT>::ROW;
    alignas(64) Pair pairs[LANES * WIDTH];
    for (int i = 0; i < count; i += 2 * LANES) {
        const int rows = count - i < 2 * LANES ? count - i : 2 * LANES;
        pair_rows<WIDTH>(pairs, from + i * row, row, unit, rows);
        int d = 0;
        for (; rows == 2 * LANES && d + LANES <= WIDTH; d += LANES) {
            Int found[LANES];
            for (int k = 0; k < LANES; ++k) found[k] = load_lanes((const int32_t*)(pairs + k * WIDTH + d));
            transpose(found);
            for (int k = 0; k < LANES; ++k) store_lanes((int32_t*)(to + (d + k) * ROW + i / 2), found[k]);
        }
        for (; d < WIDTH; ++d)
            for (int k = 0; 2 * k < rows; ++k) to[d * ROW + i / 2 + k] = pairs[k * WIDTH + d];
    }
}

// [count, columns] of a tensor as factors by columns, [depths, WIDTH]; what is past `count` is 0
template <int WIDTH, class T>
INLINE void read_columns(float* to, const T* from, int64_t row, int64_t unit, int count, int columns) {
    const bool near = row < (1 << 26) && row > -(1 << 26);
    for (int i = 0; i < WIDTH; i += LANES, from += LANES * row, to += LANES) {
        const int rows = count - i < 0 ? 0 : count - i < LANES ? count - i : LANES;
        int d = 0;
        for (; rows == LANES && unit == 1 && d + LANES <= columns; d += LANES) {
            Float found[LANES];
            for (int k = 0; k < LANES; ++k) found[k] = widened_lanes(from + k * row + d);
            transpose(found);
            for (int k = 0; k < LANES; ++k) store_lanes(to + (d + k) * WIDTH, found[k]);
        }
        for (; d < columns; ++d) {
            if (rows == LANES && near) store_lanes(to + d * WIDTH, column(from + d * unit, row));
            else for (int k = 0; k < LANES; ++k) to[d * WIDTH + k] = k < rows ? widened(from[k * row + d * unit]) : 0.0f;
        }
    }
}
template <int WIDTH>
INLINE void read_columns(Pair* to, const BFloat16* from, int64_t row, int64_t unit, int count, int columns) {
    for (int i = 0; i < WIDTH; i += LANES, from += LANES * row, to += LANES) {
        const int rows = count - i < 0 ? 0 : count - i < LANES ? count - i : LANES;
        int d = 0;
        for (; rows == LANES && unit == 1 && d + 2 * LANES <= columns; d += 2 * LANES) {
            Int found[LANES];
            for (int k = 0; k < LANES; ++k) found[k] = load_lanes((const int32_t*)(from + k * row + d));
            transpose(found);
            for (int k = 0; k < LANES; ++k) store_lanes((int32_t*)(to + (d / 2 + k) * WIDTH), found[k]);
        }
        for (; d < columns; d += 2)
            for (int k = 0; k < LANES; ++k) {
                const BFloat16* at = from + k * row + d * unit;
                to[d / 2 * WIDTH + k] = k < rows ? Pair{at[0], d + 1 < columns ? at[unit] : BFloat16{0}} : Pair{};
            }
    }
}

// columns past `count` become the last one
template <int WIDTH, class F>
INLINE void repeat_last(F* columns, int depth, int count) {
    for (int d = 0; d < depth; ++d)
        for (int i = count; i < WIDTH; ++i) columns[d * WIDTH + i] = columns[d * WIDTH + count - 1];
}

}  // namespace flexpress
