// Tiles: small float32 matrices in a thread's own memory, their products, and how they are read and written.
#pragma once

namespace flexpress {

// x rounded: no product that the compiler could put unrounded into a sum
INLINE Float rounded(Float x) {
    asm("" : "+" REGISTER(x.v));
    return x;
}

// ROWS rows and VECTORS vectors of C = A B, with ADD of C += A B, in registers
template <int ROWS, int VECTORS, bool ADD>
INLINE void product(int depth, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row) {
    Float sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = ADD ? load_lanes(c + i * c_row + j * LANES) : Float(0.0f);
    for (int k = 0; k < depth; ++k) {
        Float right[VECTORS];
        for (int j = 0; j < VECTORS; ++j) right[j] = load_lanes(b + k * b_row + j * LANES);
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < VECTORS; ++j) sum[i][j] += a[i * a_row + k * a_depth] * right[j];
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) store_lanes(c + i * c_row + j * LANES, sum[i][j]);
}

// the last rows, fewer than 2 ROWS: each power of two once
template <int ROWS, int VECTORS, bool ADD>
INLINE void last_rows(int rows, int depth, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row) {
    if constexpr (ROWS > 0) {
        const int done = rows & ROWS;
        if (done) product<ROWS, VECTORS, ADD>(depth, a, a_row, a_depth, b, b_row, c, c_row);
        last_rows<ROWS / 2, VECTORS, ADD>(rows, depth, a + done * a_row, a_row, a_depth, b, b_row, c + done * c_row, c_row);
    }
}

template <int VECTORS, bool ADD>
INLINE void product_of_rows(int rows, int depth, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row) {
    constexpr int ROWS = VECTORS == 1 ? NARROW_ROWS : PRODUCT_ROWS;
    int i = 0;
    for (; i + ROWS <= rows; i += ROWS) product<ROWS, VECTORS, ADD>(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row);
    last_rows<(ROWS > 8 ? 8 : 4), VECTORS, ADD>(rows - i, depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row);
}

// C [rows, COLUMNS] = A B, with ADD of C += A B. A [rows, depth] has elements a[i * a_row + k * a_depth]
template <int COLUMNS, bool ADD>
__attribute__((noinline)) void multiply(
    int rows, int depth, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row) {
    constexpr int WIDTH = PRODUCT_VECTORS * LANES, REST = COLUMNS % WIDTH / LANES;
    for (int j = 0; j + WIDTH <= COLUMNS; j += WIDTH) product_of_rows<PRODUCT_VECTORS, ADD>(rows, depth, a, a_row, a_depth, b + j, b_row, c + j, c_row);
    constexpr int LAST = COLUMNS - COLUMNS % WIDTH;
    if constexpr (REST > 0) product_of_rows<REST, ADD>(rows, depth, a, a_row, a_depth, b + LAST, b_row, c + LAST, c_row);
}

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

// LANES elements of a column of a matrix with rows of so many elements
template <class T> INLINE Float column(const T* from, int64_t row) {
    Vec<int32_t> at;
    for (int i = 0; i < LANES; ++i) at.v[i] = i * int32_t(row);
    return load(from + at);
}

// the same transposed, [columns, WIDTH]; what is past `count` is 0
template <int WIDTH, class T>
INLINE void read_columns(float* to, const T* from, int64_t row, int64_t unit, int count, int columns) {
    const bool near = row < (1 << 26) && row > -(1 << 26);
    for (int d = 0; d < columns; ++d) {
        int i = 0;
        for (; near && i + LANES <= count; i += LANES) store_lanes(to + d * WIDTH + i, column(from + i * row + d * unit, row));
        for (; i < count; ++i) to[d * WIDTH + i] = widened(from[i * row + d * unit]);
        for (; i < WIDTH; ++i) to[d * WIDTH + i] = 0;
    }
}

// `count` rows of so many columns, of their transpose [columns, WIDTH]
template <int WIDTH, class T>
INLINE void write_columns(T* to, int64_t row, const float* from, int count, int columns) {
    for (int i = 0; i < count; ++i) {
        int d = 0;
        for (; d + LANES <= columns; d += LANES) {
            alignas(64) float found[LANES];
            store_lanes(found, column(from + d * WIDTH + i, WIDTH));
            for (int k = 0; k < LANES; ++k) narrow(found[k], to[i * row + d + k]);
        }
        for (; d < columns; ++d) narrow(from[d * WIDTH + i], to[i * row + d]);
    }
}

// the gradient of a captured tensor, `value` at each position, into its element: added up, or stored where no other has the same
template <class T> INLINE void put(T* to, float value, bool adds) { narrow(adds ? widened(*to) + value : value, *to); }
template <bool ADD, class T, class O, class C, class X>
INLINE void scatter(T* to, O offset, C inside, X value, int count) {
    for (int i = 0; i < LANES && i < count; ++i)
        if (lane(inside, i)) put(to + lane(offset, i), lane(value, i), ADD);
}
template <class X> INLINE float sum_of_lanes(X x, int count) {
    float sum = 0;
    for (int i = 0; i < LANES && i < count; ++i) sum += lane(x, i);
    return sum;
}

// the sum of all lanes, and the largest, which all lanes get: half with half
template <int FIRST, class V, int... I> INLINE auto some_lanes(V v, std::integer_sequence<int, I...>) { return __builtin_shufflevector(v, v, (FIRST + I)...); }
template <int COUNT = LANES, class V>
INLINE float total_of(V v) {
    if constexpr (COUNT == 1) return v[0];
    else {
        using Half = std::make_integer_sequence<int, COUNT / 2>;
        return total_of<COUNT / 2>(some_lanes<0>(v, Half()) + some_lanes<COUNT / 2>(v, Half()));
    }
}
INLINE float total(Float x) { return total_of(x.v); }
INLINE Float largest_of(Float x) {
    float found = x.v[0];
    for (int i = 1; i < LANES; ++i) found = x.v[i] > found ? x.v[i] : found;
    return found;
}

// memory of a thread's own
template <class T>
struct Owned {
    T* const at = new (std::align_val_t(64)) T;
    ~Owned() { operator delete(at, std::align_val_t(64)); }
    T* operator->() const { return at; }
};

}  // namespace flexpress
