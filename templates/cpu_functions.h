// Operations on numbers and vectors with torch's meaning.
#pragma once

namespace flexpress {

// ---- functions, Sleef's. A number's is that of a vector: what is compared may be one here and the other there

#define FUNCTION(name, accuracy)                                                        \
    extern "C" Float::Native SLEEF(name, accuracy)(Float::Native);                      \
    INLINE Float name(Float x) { return Float(SLEEF(name, accuracy)(x.v)); }              \
    INLINE float name(float x) { return name(Float(x)).v[0]; }
#define FUNCTION_2(name, accuracy)                                                      \
    extern "C" Float::Native SLEEF(name, accuracy)(Float::Native, Float::Native);       \
    template <class A, class B> INLINE Both<A, B> name(A x, B y) {                       \
        const Float found(SLEEF(name, accuracy)(Float(x).v, Float(y).v));                            \
        if constexpr (is_vector<Both<A, B>>) return found;                                        \
        else return found.v[0];                                                                  \
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
FUNCTION(atanh, u10)
FUNCTION(erf, u10)
FUNCTION(erfc, u15)
FUNCTION_2(atan2, u10)
FUNCTION_2(hypot, u05)
FUNCTION_2(pow, u10)
#undef FUNCTION
#undef FUNCTION_2

// Sleef's are inf where the square of x is
extern "C" Float::Native SLEEF(asinh, u10)(Float::Native);
extern "C" Float::Native SLEEF(acosh, u10)(Float::Native);
INLINE Float asinh(Float x) {
    const Float size = where(x < 0.0f, -x, x), far = log(size) + 0.6931471824645996f;
    return where(size < 1e18f, Float(SLEEF(asinh, u10)(x.v)), where(x < 0.0f, -far, far));
}
INLINE Float acosh(Float x) { return where(x < 1e18f, Float(SLEEF(acosh, u10)(x.v)), log(x) + 0.6931471824645996f); }
INLINE float asinh(float x) { return asinh(Float(x)).v[0]; }
INLINE float acosh(float x) { return acosh(Float(x)).v[0]; }

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
INLINE float tanh(float x) { return tanh(Float(x)).v[0]; }
template <class X> INLINE auto sqrt(X x) { return lanewise([](float a) { return __builtin_sqrtf(a); }, x); }
template <class X> INLINE auto rsqrt(X x) { return 1.0f / sqrt(x); }
template <class X> INLINE auto sigmoid(X x) { return 1.0f / (1.0f + exp(-x)); }
template <class X> INLINE auto floor(X x) { return lanewise([](float a) { return __builtin_floorf(a); }, x); }
template <class X> INLINE auto ceil(X x) { return lanewise([](float a) { return __builtin_ceilf(a); }, x); }
template <class X> INLINE auto trunc(X x) { return lanewise([](float a) { return __builtin_truncf(a); }, x); }
template <class X> INLINE auto round(X x) { return lanewise([](float a) { return __builtin_rintf(a); }, x); }  // ties to even
template <class A, class B> INLINE auto fmod(A a, B b) { return lanewise([](float x, float y) { return __builtin_fmodf(x, y); }, a, b); }
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
    } else return lanewise([](T a, T b) { return b == 0 ? T(0) : std::is_signed_v<T> && b == T(-1) ? T(0 - a) : T(a / b); }, x, y);
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
        const float rest = __builtin_fmodf(a, b), quotient = (a - rest) / b - (rest != 0 && (rest < 0) != (b < 0) ? 1.0f : 0.0f);
        const float below = __builtin_floorf(quotient), whole = quotient - below > 0.5f ? below + 1 : below;
        return whole == 0 ? __builtin_copysignf(0.0f, a / b) : whole;
    }, x, y);
}
template <class A, class B> INLINE auto floor_mod_float(A x, B y) {
    return lanewise([](float a, float b) {
        const float rest = __builtin_fmodf(a, b);
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    }, x, y);
}

}  // namespace flexpress
