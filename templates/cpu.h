// What printed kernels for CPUs compute with: vectors of LANES positions on any instruction set, torch's meaning of operations on them, and
// products of small matrices. For g++ 12 and clang++ 15 or newer. Functions come from Sleef, which libtorch_cpu has.
//
//   float, int32_t, int64_t, bool   a value that all lanes share          Float, Int, Bool, Vec<T>   one for each lane
//
// Operators take either, and give a vector where one is a vector. Integers wrap around (-fwrapv). Those of 8 and 16 bits are always vectors.
#pragma once

#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#define INLINE inline __attribute__((always_inline))

namespace flexpress {

#if defined(__AVX512F__)
constexpr int LANES = 16, PRODUCT_ROWS = 6, PRODUCT_VECTORS = 4, NARROW_ROWS = 16;  // registers: 32
#define SLEEF(name, accuracy) Sleef_##name##f16_##accuracy
#define REGISTER "v"
#elif defined(__AVX2__)
constexpr int LANES = 8, PRODUCT_ROWS = 6, PRODUCT_VECTORS = 2, NARROW_ROWS = 8;  // registers: 16
#define SLEEF(name, accuracy) Sleef_##name##f8_##accuracy
#define REGISTER "x"
#elif defined(__aarch64__)
constexpr int LANES = 4, PRODUCT_ROWS = 6, PRODUCT_VECTORS = 4, NARROW_ROWS = 16;
#define SLEEF(name, accuracy) Sleef_##name##f4_##accuracy
#define REGISTER "w"
#else
constexpr int LANES = 4, PRODUCT_ROWS = 4, PRODUCT_VECTORS = 2, NARROW_ROWS = 8;
#define SLEEF(name, accuracy) Sleef_##name##f4_##accuracy
#define REGISTER "x"
#endif

// ---- vectors

template <class T>
struct Vec {
    using Element = std::conditional_t<std::is_same_v<T, bool>, int32_t, T>;  // of a bool 0 or -1
    typedef Element Native __attribute__((vector_size(LANES * sizeof(Element))));
    Native v;

    Vec() = default;
    INLINE Vec(Native native) : v(native) {}
    INLINE Vec(T x) : v((std::is_same_v<T, bool> ? Element(-Element(x)) : Element(x)) - Native{}) {}
};
using Float = Vec<float>;
using Int = Vec<int32_t>;
using Bool = Vec<bool>;

template <class X> struct LaneOf { using Type = X; static constexpr bool IS_VECTOR = false; };
template <class T> struct LaneOf<Vec<T>> { using Type = T; static constexpr bool IS_VECTOR = true; };
template <class X> using Lane = typename LaneOf<X>::Type;
template <class X> constexpr bool is_vector = LaneOf<X>::IS_VECTOR;
template <class X> constexpr bool is_small = std::is_integral_v<X> && sizeof(X) < 4 && !std::is_same_v<X, bool>;

// what two operands have in common: a number takes the type of a vector
template <class A, class B>
using Common = std::conditional_t<is_vector<A>, Lane<A>, std::conditional_t<is_vector<B>, Lane<B>, std::common_type_t<Lane<A>, Lane<B>>>>;
template <class A, class B>
using Both = std::conditional_t<is_vector<A> || is_vector<B>, Vec<Common<A, B>>, Common<A, B>>;
template <class S> using IfNumber = std::enable_if_t<std::is_arithmetic_v<S>, int>;

template <class To, class From>
INLINE To converted(From native) {
    return __builtin_convertvector(native, To);
}
template <class T>
INLINE Bool as_mask(T native) {
    if constexpr (sizeof(native) == sizeof(Int::Native)) return Bool((Bool::Native)native);
    else return Bool(converted<Bool::Native>(native));
}

#define OPERATOR(op)                                                                                        \
    template <class T> INLINE Vec<T> operator op(Vec<T> a, Vec<T> b) { return Vec<T>(a.v op b.v); }            \
    template <class T, class S, IfNumber<S> = 0> INLINE Vec<T> operator op(Vec<T> a, S b) { return a op Vec<T>(T(b)); } \
    template <class T, class S, IfNumber<S> = 0> INLINE Vec<T> operator op(S a, Vec<T> b) { return Vec<T>(T(a)) op b; }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(&)
OPERATOR(|)
OPERATOR(^)
OPERATOR(<<)
OPERATOR(>>)
#undef OPERATOR

template <class T> INLINE Vec<T> operator-(Vec<T> a) { return Vec<T>(-a.v); }
template <class T> INLINE Vec<T> operator~(Vec<T> a) { return Vec<T>(~a.v); }
template <class T> INLINE Vec<T>& operator+=(Vec<T>& a, Vec<T> b) { return a = a + b; }
template <class T> INLINE Vec<T>& operator*=(Vec<T>& a, Vec<T> b) { return a = a * b; }

// a number in the type that it is compared with; a size beyond that is larger than any index
template <class T, class S>
INLINE T beside(S x) {
    if constexpr (std::is_same_v<T, int32_t> && std::is_same_v<S, int64_t>) return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : T(x);
    else return T(x);
}
#define COMPARISON(op)                                                                                      \
    template <class T> INLINE Bool operator op(Vec<T> a, Vec<T> b) {                                         \
        if constexpr (std::is_same_v<T, bool>) return as_mask(-a.v op -b.v);                                \
        else return as_mask(a.v op b.v);                                                                    \
    }                                                                                                       \
    template <class T, class S, IfNumber<S> = 0> INLINE Bool operator op(Vec<T> a, S b) { return a op Vec<T>(beside<T>(b)); } \
    template <class T, class S, IfNumber<S> = 0> INLINE Bool operator op(S a, Vec<T> b) { return Vec<T>(beside<T>(a)) op b; }
COMPARISON(==)
COMPARISON(!=)
COMPARISON(<)
COMPARISON(<=)
COMPARISON(>)
COMPARISON(>=)
#undef COMPARISON

// one of two values, lane by lane
template <class C, class A, class B>
INLINE auto where(C condition, A yes, B no) {
    using T = Common<A, B>;
    if constexpr (is_vector<C>) {
        const Vec<T> a(yes), b(no);
        if constexpr (sizeof(a.v) == sizeof(condition.v)) return Vec<T>(condition.v ? a.v : b.v);
        else {
            typedef std::conditional_t<sizeof(T) == 8, int64_t, std::conditional_t<sizeof(T) == 2, int16_t, int8_t>> Same;
            return Vec<T>(converted<typename Vec<Same>::Native>(condition.v) ? a.v : b.v);
        }
    } else return condition ? Both<A, B>(yes) : Both<A, B>(no);
}

INLINE bool any(Bool x) {
    bool found = false;
    for (int i = 0; i < LANES; ++i) found |= x.v[i] != 0;
    return found;
}

// a function of numbers, lane by lane
template <class X>
INLINE Lane<X> lane(X x, int i) {
    if constexpr (is_vector<X>) return Lane<X>(x.v[i]);
    else return x;
}
template <class F, class... A>
INLINE auto lanewise(F function, A... a) {
    if constexpr ((is_vector<A> || ...)) {
        using T = decltype(function(lane(a, 0)...));
        Vec<T> result;
        for (int i = 0; i < LANES; ++i) {
            const typename Vec<T>::Element found = function(lane(a, i)...);
            result.v[i] = std::is_same_v<T, bool> ? -found : found;
        }
        return result;
    } else return function(a...);
}

// ---- casts

template <class To, class X>
INLINE auto cast(X x) {
    using T = Lane<X>;
    if constexpr (!is_vector<X> && !is_small<To>) return To(x);
    else if constexpr (!is_vector<X>) return Vec<To>(To(std::conditional_t<std::is_floating_point_v<X>, int32_t, X>(x)));
    else if constexpr (std::is_same_v<T, To>) return x;
    else if constexpr (std::is_same_v<To, bool>) return x != T(0);
    else if constexpr (std::is_same_v<T, bool>) return cast<To>(Int(x.v & 1));
    else if constexpr (std::is_same_v<T, float> && is_small<To>) return cast<To>(cast<int32_t>(x));
    else return Vec<To>(converted<typename Vec<To>::Native>(x.v));
}
template <class X> INLINE auto to_float32(X x) { return cast<float>(x); }
template <class X> INLINE auto to_int64(X x) { return cast<int64_t>(x); }
template <class X> INLINE auto to_int32(X x) { return cast<int32_t>(x); }
template <class X> INLINE auto to_int16(X x) { return cast<int16_t>(x); }
template <class X> INLINE auto to_int8(X x) { return cast<int8_t>(x); }
template <class X> INLINE auto to_uint8(X x) { return cast<uint8_t>(x); }
template <class X> INLINE auto to_int1(X x) { return cast<bool>(x); }
template <class A, class B> INLINE auto float_difference(A a, B b) { return to_float32(a - b); }

template <class To, class From> INLINE To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &x, sizeof(to));
    return to;
}
template <class T> INLINE Vec<T> load_lanes(const T* p) {
    Vec<T> x;
    __builtin_memcpy(&x.v, p, sizeof(x.v));
    return x;
}
template <class T> INLINE void store_lanes(T* p, Vec<T> x) { __builtin_memcpy(p, &x.v, sizeof(x.v)); }

struct BFloat16 { uint16_t bits; };
using Float16 = _Float16;
struct Float8 { uint8_t bits; };  // float8_e4m3fn

INLINE float widened(BFloat16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }
INLINE float widened(Float16 x) { return float(x); }
INLINE float widened(Float8 x) {  // with the exponent's place in half precision, whose numbers are 2^8 times smaller then
    if ((x.bits & 0x7F) == 0x7F) return __builtin_nanf("");
    return float(bits_of<Float16>(uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7F) << 7))) * 256.0f;
}
INLINE float widened(double x) { return float(x); }
template <class T> INLINE T widened(T x) { return x; }
INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(float x, Float16& to) { to = Float16(x); }
INLINE void narrow(float x, BFloat16& to) {  // to nearest, ties to even
    const uint32_t b = bits_of<uint32_t>(x);
    to.bits = x != x ? 0x7FC0 : (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
}
INLINE void narrow(float x, Float8& to) {  // the same; what is larger than all numbers becomes the largest one
    const uint32_t b = bits_of<uint32_t>(x), size = b & 0x7FFFFFFF;
    uint32_t found = size > 0x7F800000 ? 0x7F : uint32_t(__builtin_rintf(__builtin_fminf(__builtin_fabsf(x), 1.0f) * 512.0f));
    if (size >= 121u << 23 && size <= 0x7F800000) found = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3);  // from 2^-6 on
    to.bits = uint8_t((b >> 31) << 7 | (found > 0x7E && size <= 0x7F800000 ? 0x7E : found));
}
template <class X> INLINE auto to_bfloat16(X x) { return lanewise([](float a) { BFloat16 b; narrow(a, b); return widened(b); }, x); }
template <class X> INLINE auto to_float16(X x) { return lanewise([](float a) { return float(Float16(a)); }, x); }

// ---- elements of captured tensors; 0 where not `inside`, and nothing is read there

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

// ---- rows of captured tensors, as factors of dot products: element k lies at p + k * step

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

// ---- functions. Those of Float are Sleef's, those of float the system's

#define FUNCTION(name, accuracy)                                                        \
    extern "C" Float::Native SLEEF(name, accuracy)(Float::Native);                      \
    INLINE Float name(Float x) { return Float(SLEEF(name, accuracy)(x.v)); }              \
    INLINE float name(float x) { return std::name(x); }
#define FUNCTION_2(name, accuracy)                                                      \
    extern "C" Float::Native SLEEF(name, accuracy)(Float::Native, Float::Native);       \
    template <class A, class B> INLINE Both<A, B> name(A x, B y) {                       \
        if constexpr (is_vector<Both<A, B>>) return Float(SLEEF(name, accuracy)(Float(x).v, Float(y).v)); \
        else return std::name(x, y);                                                    \
    }
FUNCTION(exp, u10)
FUNCTION(exp2, u10)
FUNCTION(expm1, u10)
FUNCTION(log, u10)
FUNCTION(log2, u10)
FUNCTION(log10, u10)
FUNCTION(log1p, u10)
FUNCTION(sin, u10)
FUNCTION(cos, u10)
FUNCTION(tan, u10)
FUNCTION(atan, u10)
FUNCTION(asin, u10)
FUNCTION(acos, u10)
FUNCTION(sinh, u10)
FUNCTION(cosh, u10)
FUNCTION(asinh, u10)
FUNCTION(acosh, u10)
FUNCTION(atanh, u10)
FUNCTION(erf, u10)
FUNCTION_2(atan2, u10)
FUNCTION_2(hypot, u05)
FUNCTION_2(pow, u10)
#undef FUNCTION
#undef FUNCTION_2

// 2 to the power of x <= 127, to float32's rounding; 0 below 2^-126. A tenth of what Sleef's takes
INLINE Float fast_exp2(Float x) {
    x = where(x < -127.0f, -127.0f, x);
    const Float shifted = x + 12582912.0f;  // 1.5 * 2^23: the nearest whole number is the end of the mantissa
    const Float r = x - (shifted - 12582912.0f);
    Float p = 0.00015461447765119374f * r + 0.0013390866806730628f;  // (2^r - 1) / r for |r| <= 1/2, off by 5e-9
    p = p * r + 0.009618056938052177f;
    p = p * r + 0.055503569543361664f;
    p = p * r + 0.24022650718688965f;
    p = p * r + 0.6931471824645996f;
    p = p * r + 1.0f;
    return p * bits_of<Float>((bits_of<Int>(shifted) << 23) + 0x3F800000);
}

// tanh to 2 roundings: a polynomial near 0, where 1 - 2 / (exp(2 |x|) + 1) has lost its digits. A third of what Sleef's takes
INLINE Float tanh(Float x) {
    const Float z = x * x;
    Float p = -0.0061049615032970905f * z + 0.02100365236401558f;
    p = p * z + -0.05385250225663185f;
    p = p * z + 0.13332782685756683f;
    p = p * z + -0.333333283662796f;
    const Float size = where(x < 0.0f, -x, x);
    const Float far = 1.0f - 2.0f / (fast_exp2(where(size > 20.0f, 20.0f, size) * 2.8853900817779268f) + 1.0f);
    return where(size < 0.625f, x + x * z * p, where(x < 0.0f, -far, far));
}
INLINE float tanh(float x) { return std::tanh(x); }
template <class X> INLINE auto sqrt(X x) { return lanewise([](float a) { return __builtin_sqrtf(a); }, x); }
template <class X> INLINE auto rsqrt(X x) { return 1.0f / sqrt(x); }
template <class X> INLINE auto sigmoid(X x) { return 1.0f / (1.0f + exp(-x)); }
template <class X> INLINE auto floor(X x) { return lanewise([](float a) { return __builtin_floorf(a); }, x); }
template <class X> INLINE auto ceil(X x) { return lanewise([](float a) { return __builtin_ceilf(a); }, x); }
template <class X> INLINE auto trunc(X x) { return lanewise([](float a) { return __builtin_truncf(a); }, x); }
template <class X> INLINE auto round(X x) { return lanewise([](float a) { return __builtin_rintf(a); }, x); }  // ties to even
template <class A, class B> INLINE auto fmod(A a, B b) { return lanewise([](float x, float y) { return std::fmod(x, y); }, a, b); }
template <class X> INLINE X abs(X x) {
    if constexpr (std::is_same_v<Lane<X>, float>) return lanewise([](float a) { return __builtin_fabsf(a); }, x);
    else return where(x < 0, -x, x);
}
template <class X> INLINE auto sign(X x) {
    using T = Lane<X>;
    return where(x > 0, T(1), T(0)) - where(x < 0, T(1), T(0));
}

template <class X> INLINE auto zeros_like(X) { return Lane<X>(0); }

// NaN where one is
template <class A, class B> INLINE auto minimum(A a, B b) { return where((a < b) | (a != a), a, b); }
template <class A, class B> INLINE auto maximum(A a, B b) { return where((a > b) | (a != a), a, b); }

// ---- integers as torch has them. What a divisor of 0 gives is nobody's, but padding may have one

template <class A, class B> INLINE Both<A, B> quotient(A x, B y) {  // rounded towards zero
    using T = Common<A, B>;
    if constexpr (std::is_same_v<Both<A, B>, Int>) {  // by doubles, which have bits to spare
        typedef double Wide __attribute__((vector_size(LANES * 8)));
        const Int a(x), b(where(Int(y) == 0, 1, Int(y)));
        return Int(converted<Int::Native>(converted<Wide>(a.v) / converted<Wide>(b.v)));
    } else return lanewise([](T a, T b) { return b == 0 ? T(0) : b == T(-1) ? T(0 - a) : T(a / b); }, x, y);
}
template <class A, class B> INLINE Both<A, B> fmod_int(A x, B y) { return x - quotient(x, y) * y; }
template <class A, class B> INLINE Both<A, B> floor_div_int(A x, B y) {
    const auto whole = quotient(x, y), rest = x - whole * y;
    return whole - where((rest != 0) & ((rest < 0) != (y < 0)), Common<A, B>(1), Common<A, B>(0));
}
template <class A, class B> INLINE Both<A, B> floor_mod_int(A x, B y) {
    const Both<A, B> rest = fmod_int(x, y);
    return where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest);
}
template <class A, class B> INLINE auto int_pow(A x, B y) {  // a negative exponent leaves 1, -1 or 0
    using T = Common<A, B>;
    return lanewise([](T base, T exponent) {
        if (exponent < 0) return T(base == 1 ? 1 : base == T(-1) ? (exponent & 1 ? -1 : 1) : 0);
        T result = 1;
        for (uint64_t e = uint64_t(exponent); e; e >>= 1, base = T(base * base)) result = e & 1 ? T(result * base) : result;
        return result;
    }, x, y);
}
template <class A, class B> INLINE auto shift_left(A x, B y) {  // by a negative number or by all bits: 0
    using T = Common<A, B>;
    return lanewise([](T a, T n) { return n < 0 || n >= T(8 * sizeof(T)) ? T(0) : T(a << n); }, x, y);
}
template <class A, class B> INLINE auto shift_right(A x, B y) {  // the same: 0 or -1
    using T = Common<A, B>;
    return lanewise([](T a, T n) { return n < 0 || n >= T(8 * sizeof(T)) ? T(a < 0 ? -1 : 0) : T(a >> n); }, x, y);
}

// ---- the same of floats

template <class A, class B> INLINE auto floor_div_float(A x, B y) {
    return lanewise([](float a, float b) {
        if (b == 0) return a / b;
        const float rest = std::fmod(a, b), quotient = (a - rest) / b - (rest != 0 && (rest < 0) != (b < 0) ? 1.0f : 0.0f);
        const float whole = __builtin_floorf(quotient);
        return quotient - whole > 0.5f ? whole + 1 : whole;
    }, x, y);
}
template <class A, class B> INLINE auto floor_mod_float(A x, B y) {
    return lanewise([](float a, float b) {
        const float rest = std::fmod(a, b);
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }, x, y);
}

}  // namespace flexpress
