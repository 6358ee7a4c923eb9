// Products of tiles, and the factors that they take.
#pragma once

#if defined(__AVX512BF16__) && defined(BRGEMM)  // oneDNN's products, inside libtorch_cpu: by AMX, where the CPU has it
namespace c10 { struct BFloat16; }
namespace at::native::cpublas {
void brgemm(
    int64_t rows, int64_t columns, int64_t depth, int64_t a_row, int64_t b_row, int64_t c_row, bool add, const c10::BFloat16* a,
    const c10::BFloat16* b, float* c, bool b_is_pairs);
void brgemm_release(bool);
}  // namespace at::native::cpublas
#endif

namespace flexpress {

// x rounded: no product that the compiler could put unrounded into a sum
INLINE Float rounded(Float x) {
    asm("" : "+" REGISTER(x.v));
    return x;
}

// Factors of products are float32, or, of bfloat16 tensors where the CPU multiplies these faster, pairs of them that follow one another in the
// sum: two products and two sums are one instruction then. A matrix [rows, depth] has `depths` factors in a row.
struct Pair { BFloat16 first, second; };
template <class F> constexpr int depths(int depth) { return std::is_same_v<F, Pair> ? (depth + 1) / 2 : depth; }
#if defined(__AVX512BF16__) && defined(FAST_BFLOAT16)
template <class T> using FactorOf = std::conditional_t<std::is_same_v<T, BFloat16>, Pair, float>;
#else
template <class T> using FactorOf = float;
#endif

// Does a left factor lie row by row, as brgemm has it? Kernels read columns of keys so then.
#if defined(__AVX512BF16__) && defined(BRGEMM)
constexpr bool BY_ROWS = true;
constexpr int ROWS_AT_ONCE = 32;  // it compiles a kernel for every size, and other rows are multiplied here
#else
constexpr bool BY_ROWS = false;
constexpr int ROWS_AT_ONCE = 1;
#endif

// Some of the keys of a block, and the same with all that are multiplied with these: forward and backward pass must find the same scores
struct Range { int begin, end; };
INLINE Range whole(Range keys, int count) {
    const int end = (keys.end + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    return {keys.begin / ROWS_AT_ONCE * ROWS_AT_ONCE, end < count ? end : count};
}

// a left factor for all lanes, one for each, and what they add to a sum
INLINE float spread(float x) { return x; }
INLINE Int spread(Pair x) { return bits_of<int32_t>(x); }
INLINE Float factors(const float* p) { return load_lanes(p); }
INLINE Int factors(const Pair* p) { return load_lanes((const int32_t*)p); }
INLINE void add_product(Float& sum, float a, Float b) { sum += a * b; }
INLINE void add_product(Float& sum, Int a, Int b) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
#endif
}

// ROWS rows and VECTORS vectors of C = A B, with ADD of C += A B, in registers
template <int ROWS, int VECTORS, bool ADD, class F>
INLINE void product(int depth, const F* a, int64_t a_row, int64_t a_depth, const F* b, int64_t b_row, float* c, int64_t c_row) {
    Float sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = ADD ? load_lanes(c + i * c_row + j * LANES) : Float(0.0f);
    for (int k = 0; k < depth; ++k) {
        decltype(factors(b)) right[VECTORS];
        for (int j = 0; j < VECTORS; ++j) right[j] = factors(b + k * b_row + j * LANES);
        for (int i = 0; i < ROWS; ++i) {
            const auto left = spread(a[i * a_row + k * a_depth]);
            for (int j = 0; j < VECTORS; ++j) add_product(sum[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) store_lanes(c + i * c_row + j * LANES, sum[i][j]);
}

// the last rows, fewer than 2 ROWS: each power of two once
template <int ROWS, int VECTORS, bool ADD, class F>
INLINE void last_rows(int rows, int depth, const F* a, int64_t a_row, int64_t a_depth, const F* b, int64_t b_row, float* c, int64_t c_row) {
    if constexpr (ROWS > 0) {
        const int done = rows & ROWS;
        if (done) product<ROWS, VECTORS, ADD>(depth, a, a_row, a_depth, b, b_row, c, c_row);
        last_rows<ROWS / 2, VECTORS, ADD>(rows, depth, a + done * a_row, a_row, a_depth, b, b_row, c + done * c_row, c_row);
    }
}

template <int VECTORS, bool ADD, class F>
INLINE void product_of_rows(int rows, int depth, const F* a, int64_t a_row, int64_t a_depth, const F* b, int64_t b_row, float* c, int64_t c_row) {
    constexpr int ROWS = VECTORS == 1 ? NARROW_ROWS : PRODUCT_ROWS;
    int i = 0;
    for (; i + ROWS <= rows; i += ROWS) product<ROWS, VECTORS, ADD>(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row);
    last_rows<(ROWS > 8 ? 8 : 4), VECTORS, ADD>(rows - i, depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row);
}

// C [rows, COLUMNS] = A B, with ADD of C += A B. A [rows, depth] has factors a[i * a_row + k * a_depth]
template <int COLUMNS, bool ADD, class F>
__attribute__((noinline)) void multiply(
    int rows, int depth, const F* a, int64_t a_row, int64_t a_depth, const F* b, int64_t b_row, float* c, int64_t c_row) {
#if defined(__AVX512BF16__) && defined(BRGEMM)
    if (const int whole = rows & -ROWS_AT_ONCE; std::is_same_v<F, Pair> && a_depth == 1 && whole > 0 && depth % 16 == 0) {
        const auto *left = (const c10::BFloat16*)a, *right = (const c10::BFloat16*)b;
        at::native::cpublas::brgemm(whole, COLUMNS, 2 * depth, 2 * a_row, b_row, c_row, ADD, left, right, c, true);
        rows -= whole, a += whole * a_row, c += whole * c_row;
    }
#endif
    constexpr int WIDTH = PRODUCT_VECTORS * LANES, REST = COLUMNS % WIDTH / LANES;
    for (int j = 0; j + WIDTH <= COLUMNS; j += WIDTH) product_of_rows<PRODUCT_VECTORS, ADD>(rows, depth, a, a_row, a_depth, b + j, b_row, c + j, c_row);
    constexpr int LAST = COLUMNS - COLUMNS % WIDTH;
    if constexpr (REST > 0) product_of_rows<REST, ADD>(rows, depth, a, a_row, a_depth, b + LAST, b_row, c + LAST, c_row);
}

}  // namespace flexpress
