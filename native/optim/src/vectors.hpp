// The operations of shared/arithmetic.hpp and the memory of shared/update.hpp for INFINITY_LANES
// values at once, in the vector types of gcc and clang. Included by the kernels_*.cpp files alone,
// between arithmetic.hpp and the rules.
#pragma once

#include "infinity_optim/shared/arithmetic.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace infinity_optim::INFINITY_HOME {

using Floats = float __attribute__((vector_size(4 * INFINITY_LANES)));
using Words = u32 __attribute__((vector_size(4 * INFINITY_LANES)));
using Halves = u16 __attribute__((vector_size(2 * INFINITY_LANES)));
using Mask = int __attribute__((vector_size(4 * INFINITY_LANES)));

template <>
struct Lanes<Floats> {
    static constexpr u32 count = INFINITY_LANES;
    using Bits = Words;
};

INFINITY_FN Words bits_(Floats x) {
    return __builtin_bit_cast(Words, x);
}
INFINITY_FN Floats float_(Words x) {
    return __builtin_bit_cast(Floats, x);
}
INFINITY_FN Floats add_(Floats a, Floats b) {
    return a + b;
}
INFINITY_FN Floats sub_(Floats a, Floats b) {
    return a - b;
}
INFINITY_FN Floats mul_(Floats a, Floats b) {
    return a * b;
}
INFINITY_FN Floats div_(Floats a, Floats b) {
    return a / b;
}

INFINITY_FN Floats select_(Mask mask, Floats yes, Floats no) {
    return mask ? yes : no;
}
INFINITY_FN Words select_(Mask mask, Words yes, Words no) {
    return mask ? yes : no;
}

template <>
INFINITY_FN Words splat_bits_<Words>(u32 x) {
    return x - Words{};
}
template <>
INFINITY_FN Floats splat_<Floats>(float x) {
    return float_(splat_bits_<Words>(bits_(x)));
}
template <>
INFINITY_FN Words counting_<Words>(u32 lo) {
    Words lanes;
    for (u32 k = 0; k < INFINITY_LANES; ++k) lanes[k] = k;
    return lanes + lo;
}

// Doubles, as many as there are lanes, in two registers or an array.
#if defined(__AVX512F__) && INFINITY_LANES == 16

INFINITY_FN Floats fma_(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
}
INFINITY_FN Floats sqrt_(Floats a) {
    return _mm512_sqrt_ps(a);
}
INFINITY_FN __mmask16 unordered_(Floats a, Floats b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}
INFINITY_FN bool any_(__mmask16 lanes) {
    return lanes != 0;
}
INFINITY_FN Halves narrow_(Words x) {
    return __builtin_bit_cast(Halves, _mm512_cvtepi32_epi16((__m512i)x));
}
INFINITY_FN Words widen_(Halves x) {
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
}

struct Doubles {
    __m512d low, high;
};
INFINITY_FN void add_squares_(Doubles& sums, Floats x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high =
        _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    sums.low = _mm512_fmadd_pd(low, low, sums.low);
    sums.high = _mm512_fmadd_pd(high, high, sums.high);
}

#elif defined(__AVX2__) && defined(__FMA__) && INFINITY_LANES == 8

INFINITY_FN Floats fma_(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
}
INFINITY_FN Floats sqrt_(Floats a) {
    return _mm256_sqrt_ps(a);
}
INFINITY_FN Mask unordered_(Floats a, Floats b) {
    return (Mask)_mm256_cmp_ps(a, b, _CMP_UNORD_Q);
}
INFINITY_FN bool any_(Mask lanes) {
    return _mm256_movemask_ps((__m256)lanes) != 0;
}
INFINITY_FN Words widen_(Halves x) {
    return (Words)_mm256_cvtepu16_epi32((__m128i)x);
}
// Of numbers that fit 16 bits.
INFINITY_FN Halves narrow_(Words x) {
    const __m256i pairs = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return __builtin_bit_cast(Halves,
                              _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
}

struct Doubles {
    __m256d low, high;
};
INFINITY_FN void add_squares_(Doubles& sums, Floats x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums.low = _mm256_fmadd_pd(low, low, sums.low);
    sums.high = _mm256_fmadd_pd(high, high, sums.high);
}

#else

INFINITY_FN Floats fma_(Floats a, Floats b, Floats c) {
    Floats result;
    for (u32 k = 0; k < INFINITY_LANES; ++k)
        result[k] = fma_(float(a[k]), float(b[k]), float(c[k]));
    return result;
}
INFINITY_FN Floats sqrt_(Floats a) {
    Floats result;
    for (u32 k = 0; k < INFINITY_LANES; ++k) result[k] = sqrt_(float(a[k]));
    return result;
}

INFINITY_FN Mask unordered_(Floats a, Floats b) {
    return (a != a) | (b != b);
}
INFINITY_FN bool any_(Mask lanes) {
    int found = 0;
    for (u32 k = 0; k < INFINITY_LANES; ++k) found |= lanes[k];
    return found != 0;
}
INFINITY_FN Halves narrow_(Words x) {
    return __builtin_convertvector(x, Halves);
}
INFINITY_FN Words widen_(Halves x) {
    return __builtin_convertvector(x, Words);
}

struct Doubles {
    double lanes[INFINITY_LANES];
};
INFINITY_FN void add_squares_(Doubles& sums, Floats x) {
    for (u32 k = 0; k < INFINITY_LANES; ++k) sums.lanes[k] = add_square_(sums.lanes[k], x[k]);
}

#endif

// Addresses of a segment are aligned to its values, not to vectors.
template <class T>
INFINITY_FN T read_(u64 address, u64 i, u32 nbytes_each) {
    T value;
    __builtin_memcpy(&value, reinterpret_cast<const void*>(address + i * nbytes_each),
                     sizeof value);
    return value;
}

}  // namespace infinity_optim::INFINITY_HOME

#include "infinity_optim/shared/update.hpp"

namespace infinity_optim::INFINITY_HOME {

template <>
INFINITY_FN Floats load32_<Floats>(u64 address, u64 i) {
    return read_<Floats>(address, i, 4);
}
template <>
INFINITY_FN Words load16_<Words>(u64 address, u64 i) {
    return widen_(read_<Halves>(address, i, 2));
}
template <>
INFINITY_FN void store32_<Floats>(u64 address, u64 i, Floats value) {
    __builtin_memcpy(reinterpret_cast<void*>(address + i * 4), &value, sizeof value);
}
template <>
INFINITY_FN void store16_<Words>(u64 address, u64 i, Words value) {
    const Halves halves = narrow_(value);
    __builtin_memcpy(reinterpret_cast<void*>(address + i * 2), &halves, sizeof halves);
}

}  // namespace infinity_optim::INFINITY_HOME
