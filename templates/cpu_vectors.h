// Vectors of LANES positions on any instruction set: their operators, choices and casts.
#pragma once

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
struct Byte { uint8_t bits; };    // of a bool that is read: torch has some that are neither 0 nor 1, which are true

INLINE float widened(BFloat16 x) { return bits_of<float>(uint32_t(x.bits) << 16); }
INLINE float widened(Float16 x) { return float(x); }
INLINE float widened(Float8 x) {  // with the exponent's place in half precision, whose numbers are 2^8 times smaller then
    if ((x.bits & 0x7F) == 0x7F) return __builtin_nanf("");
    return float(bits_of<Float16>(uint16_t((x.bits & 0x80) << 8 | (x.bits & 0x7F) << 7))) * 256.0f;
}
INLINE float widened(double x) { return float(x); }
INLINE bool widened(Byte x) { return x.bits != 0; }
template <class T> INLINE T widened(T x) { return x; }
INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(float x, double& to) { to = x; }
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

}  // namespace flexpress
