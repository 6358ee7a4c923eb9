// Reading captured tensors.
#pragma once

namespace flexpress {

// ---- elements; 0 where not `inside`, and nothing is read there

// offsets of which one index is of 32 bits and another of 64
template <class T, class U> using IfMixed = std::enable_if_t<std::is_integral_v<T> && std::is_integral_v<U> && !std::is_same_v<T, U>, int>;
template <class T, class U, IfMixed<T, U> = 0> INLINE Vec<int64_t> operator+(Vec<T> a, Vec<U> b) { return to_int64(a) + to_int64(b); }
template <class T, class U, IfMixed<T, U> = 0> INLINE Vec<int64_t> operator-(Vec<T> a, Vec<U> b) { return to_int64(a) - to_int64(b); }

template <class T, class I> struct Pointers { const T* base; Vec<I> offset; };
template <class T, class I> INLINE auto operator+(const T* p, Vec<I> offset) {
    if constexpr (sizeof(I) < 4 || std::is_same_v<I, bool>) return Pointers<T, int32_t>{p, to_int32(offset)};
    else return Pointers<T, I>{p, offset};
}
template <class T, class I> INLINE auto operator-(const T* p, Vec<I> offset) { return p + -offset; }
template <class T, class I> INLINE auto operator+(Pointers<T, I> p, int64_t offset) { return Pointers<T, I>{p.base + offset, p.offset}; }
template <class T, class I> INLINE auto operator-(Pointers<T, I> p, int64_t offset) { return p + -offset; }
template <class T, class I, class J> INLINE auto operator+(Pointers<T, I> p, Vec<J> offset) {
    if constexpr (sizeof(I) == 8 || sizeof(J) == 8) return p.base + (to_int64(p.offset) + to_int64(offset));
    else return p.base + (p.offset + to_int32(offset));
}
template <class T, class I, class J> INLINE auto operator-(Pointers<T, I> p, Vec<J> offset) { return p + -offset; }

template <class T> INLINE auto load(const T* p) {
    const auto x = widened(*p);
    if constexpr (is_small<T>) return Vec<T>(x);
    else return x;
}
template <class T> INLINE auto load(const T* p, bool inside) { return inside ? load(p) : decltype(load(p))(0); }
template <class T> INLINE auto load(const T* p, Bool inside) { return where(inside, load(p, any(inside)), decltype(load(p))(0)); }
template <class T, class I> INLINE auto load(Pointers<T, I> p) {
    return lanewise([&](I offset) { return widened(p.base[offset]); }, p.offset);
}
template <class T, class I> INLINE auto load(Pointers<T, I> p, Bool inside) {
    using E = decltype(widened(*p.base));
    return lanewise([&](I offset, bool in) { return in ? widened(p.base[offset]) : E(0); }, p.offset, inside);
}
template <class T, class I> INLINE auto load(Pointers<T, I> p, bool inside) { return load(p, Bool(inside)); }

// ---- rows, as factors of dot products: element k lies at p + k * step

template <class T> struct SharedRow {  // one that all lanes have in common
    const T* p;
    int64_t step;
    bool inside;
    INLINE float operator[](int k) const { return inside ? float(widened(p[k * step])) : 0.0f; }
};
template <int LENGTH> struct Rows {  // one for each lane
    Float elements[LENGTH];
    INLINE Float operator[](int k) const { return elements[k]; }
};
template <int LENGTH, class T> INLINE SharedRow<T> read_row(const T* p, int64_t step, bool inside = true) { return {p, step, inside}; }
template <int LENGTH, class P, class C> INLINE Rows<LENGTH> read_row(P p, int64_t step, C inside) {
    Rows<LENGTH> row;
    for (int k = 0; k < LENGTH; ++k) row.elements[k] = to_float32(load(p + k * step, inside));
    return row;
}
template <int LENGTH, class T, class I> INLINE Rows<LENGTH> read_row(Pointers<T, I> p, int64_t step) { return read_row<LENGTH>(p, step, Bool(true)); }
template <int LENGTH, class A, class B> INLINE auto dot(const A& a, const B& b) {
    auto sum = a[0] * b[0];
    for (int k = 1; k < LENGTH; ++k) sum += a[k] * b[k];
    return sum;
}

}  // namespace flexpress
