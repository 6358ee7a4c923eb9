// What becomes of tiles: output and gradients as tensors have them, and sums of lanes.
#pragma once

namespace flexpress {

// `count` rows of so many columns, of their transpose [columns, WIDTH]
template <int WIDTH, class T>
INLINE void write_columns(T* to, int64_t row, const float* from, int count, int columns) {
    for (int i = 0; i < count; i += LANES) {
        int d = 0;
        for (; d + LANES <= columns; d += LANES) {
            Float found[LANES];
            for (int k = 0; k < LANES; ++k) found[k] = load_lanes(from + (d + k) * WIDTH + i);
            transpose(found);
            for (int k = 0; k < LANES && i + k < count; ++k) put_lanes(to + (i + k) * row + d, found[k]);
        }
        for (; d < columns; ++d)
            for (int k = i; k < count && k < i + LANES; ++k) narrow(from[d * WIDTH + k], to[k * row + d]);
    }
}

// a row of so many columns, times `scale`: the sum of rows that lie `step` elements apart
template <int COLUMNS, class T>
INLINE void add_rows(T* to, const float* from, int64_t step, int64_t count, float scale) {
    int d = 0;
    for (; d + LANES <= COLUMNS; d += LANES) {
        Float sum = load_lanes(from + d);
        for (int64_t i = 1; i < count; ++i) sum += load_lanes(from + i * step + d);
        put_lanes(to + d, sum * scale);
    }
    for (; d < COLUMNS; ++d) {
        float sum = from[d];
        for (int64_t i = 1; i < count; ++i) sum += from[i * step + d];
        narrow(sum * scale, to[d]);
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
    ~Owned() {
#if defined(__AVX512BF16__) && defined(BRGEMM)
        at::native::cpublas::brgemm_release(true);
#endif
        operator delete(at, std::align_val_t(64));
    }
    T* operator->() const { return at; }
};

}  // namespace flexpress
