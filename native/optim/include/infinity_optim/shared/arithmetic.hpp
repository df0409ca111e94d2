// The operations that rules are made of, for one fp32 value: each is one IEEE operation, rounded to
// nearest even. A SIMD home declares the same names for its vectors before it includes the rules.
#pragma once

#include "infinity_optim/shared/layout.hpp"

#if defined(__CUDACC__)
#define INFINITY_HOME cuda
#define INFINITY_FN __device__ __forceinline__
#else
#ifndef INFINITY_HOME
#error \
    "define INFINITY_HOME, the namespace of this home's code: inline functions of two homes must not be merged"
#endif
#define INFINITY_FN [[gnu::always_inline]] inline
#endif

namespace infinity_optim::INFINITY_HOME {

// How many values a V holds, and the type of their bits.
template <class V>
struct Lanes;
template <>
struct Lanes<float> {
    static constexpr u32 count = 1;
    using Bits = u32;
};

#if defined(__CUDACC__)

INFINITY_FN u32 bits_(float x) {
    return __float_as_uint(x);
}
INFINITY_FN float float_(u32 x) {
    return __uint_as_float(x);
}
INFINITY_FN float add_(float a, float b) {
    return __fadd_rn(a, b);
}
INFINITY_FN float sub_(float a, float b) {
    return __fsub_rn(a, b);
}
INFINITY_FN float mul_(float a, float b) {
    return __fmul_rn(a, b);
}
INFINITY_FN float div_(float a, float b) {
    return __fdiv_rn(a, b);
}
INFINITY_FN float sqrt_(float a) {
    return __fsqrt_rn(a);
}
INFINITY_FN float fma_(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
INFINITY_FN double add_square_(double sum, float x) {
    return __dadd_rn(sum, __dmul_rn(x, x));
}
INFINITY_FN double add_(double a, double b) {
    return __dadd_rn(a, b);
}
INFINITY_FN double double_(u64 x) {
    return __longlong_as_double(static_cast<long long>(x));
}

#else

INFINITY_FN u32 bits_(float x) {
    return __builtin_bit_cast(u32, x);
}
INFINITY_FN float float_(u32 x) {
    return __builtin_bit_cast(float, x);
}
INFINITY_FN float add_(float a, float b) {
    return a + b;
}
INFINITY_FN float sub_(float a, float b) {
    return a - b;
}
INFINITY_FN float mul_(float a, float b) {
    return a * b;
}
INFINITY_FN float div_(float a, float b) {
    return a / b;
}
INFINITY_FN float sqrt_(float a) {
    return __builtin_sqrtf(a);
}
INFINITY_FN double add_square_(double sum, float x) {
    return sum + double(x) * double(x);
}
INFINITY_FN double add_(double a, double b) {
    return a + b;
}
INFINITY_FN double double_(u64 x) {
    return __builtin_bit_cast(double, x);
}

// fma without the instruction. The product is exact in double; the sum is rounded to odd, which a
// second rounding, to fp32, cannot falsify: it has more than two bits to spare, also where the
// result is subnormal.
INFINITY_FN float fma_by_parts(float a, float b, float c) {
    const double product = double(a) * double(b);
    const double sum = product + double(c);
    const double added = sum - product;
    const double error =
        (product - (sum - added)) + (double(c) - added);  // NaN where the sum is not finite
    u64 bits = __builtin_bit_cast(u64, sum);
    if ((error < 0 || error > 0) && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : ~0ULL;
    return float(double_(bits));
}

INFINITY_FN float fma_(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return fma_by_parts(a, b, c);
#endif
}

#endif

// Where either is NaN.
INFINITY_FN bool unordered_(float a, float b) {
    return a != a || b != b;
}

INFINITY_FN bool any_(bool condition) {
    return condition;
}

template <class T>
INFINITY_FN T select_(bool condition, T yes, T no) {
    return condition ? yes : no;
}

template <class V>
INFINITY_FN V splat_(float x);
template <>
INFINITY_FN float splat_<float>(float x) {
    return x;
}

template <class U>
INFINITY_FN U splat_bits_(u32 x);
template <>
INFINITY_FN u32 splat_bits_<u32>(u32 x) {
    return x;
}

// The numbers lo, lo + 1, ..., one for each lane.
template <class U>
INFINITY_FN U counting_(u32 lo);
template <>
INFINITY_FN u32 counting_<u32>(u32 lo) {
    return lo;
}

}  // namespace infinity_optim::INFINITY_HOME
