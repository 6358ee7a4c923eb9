// What printed kernels for CPUs compute with: vectors of LANES positions on any instruction set, and torch's meaning of operations on them.
// For g++ 12 and clang++ 15 or newer. Functions come from Sleef, which libtorch_cpu has.
//
//   float, int32_t, int64_t, bool   a value that all lanes share          Float, Int, Bool, Vec<T>   one for each lane
//
// Operators take either, and give a vector where one is a vector. Integers wrap around (-fwrapv). Those of 8 and 16 bits are always vectors.
#pragma once

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "-ffast-math, -Ofast and -ffinite-math-only are not for these kernels: hidden keys have scores of -infinity"
#endif
#if defined(__x86_64__) && !(defined(__AVX2__) && defined(__FMA__))
#error "these kernels are for CPUs with AVX2 and FMA: shifts of huge scores cancel in one multiply-add alone"
#endif

#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

// instead of <cmath>, which takes the compiler a fifth of a small kernel's time
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

#include "cpu_vectors.h"
#include "cpu_captured.h"
#include "cpu_functions.h"
