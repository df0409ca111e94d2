// From 16 bits to fp32 and back, by integers: exact one way, to nearest even or by given random
// bits the other way. What is rounded holds no NaN but the canonical one, which becomes that of the
// 16 bits. U is the type of a value's bits, u32 or a vector of them.
#pragma once

#include "infinity_optim/shared/arithmetic.hpp"

namespace infinity_optim::INFINITY_HOME {

inline constexpr u32 fp32_nan = 0x7fc00000, bf16_nan = 0x7fc0, fp16_nan = 0x7e00;

template <class V>
INFINITY_FN V canonical_(V x) {
    return select_(x != x, float_(splat_bits_<typename Lanes<V>::Bits>(fp32_nan)), x);
}

template <class U>
INFINITY_FN auto is_nan_(U bits) {
    return (bits & 0x7fffffffu) > splat_bits_<U>(0x7f800000u);
}

template <class U>
INFINITY_FN U from_bf16_(U x) {
    return x << 16;
}

template <class U>
INFINITY_FN U to_bf16_(U x) {
    return (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
}

// Adds `random`, 16 bits, below the bits that stay: away from zero with the probability of what is
// cut off.
template <class U>
INFINITY_FN U to_bf16_stochastic_(U x, U random) {
    return (x + random) >> 16;
}

template <class U>
INFINITY_FN U from_fp16_(U x) {
    const U sign = (x & 0x8000u) << 16;
    const U magnitude = (x & 0x7fffu) << 13;
    const U normal = magnitude + (112u << 23);
    const U special = magnitude + (224u << 23);  // infinities and NaN
    // 2^-14 * (1 + fraction) - 2^-14: exact, and normal numbers on the way
    const U subnormal =
        bits_(sub_(float_(magnitude + (113u << 23)), float_(splat_bits_<U>(113u << 23))));
    const U finite = select_(magnitude < splat_bits_<U>(0x400u << 13), subnormal, normal);
    return sign | select_(magnitude < splat_bits_<U>(0x7c00u << 13), finite, special);
}

template <class U>
INFINITY_FN U to_fp16_(U x) {
    const U sign = (x >> 16) & 0x8000u;
    const U magnitude = x & 0x7fffffffu;
    const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14, adding 0.5 leaves multiples of fp16's smallest subnormal, rounded to nearest
    // even.
    const U subnormal =
        bits_(add_(float_(magnitude), float_(splat_bits_<U>(0x3f000000u)))) - 0x3f000000u;
    const U finite = select_(magnitude < splat_bits_<U>(113u << 23), subnormal, normal);
    const U rounded =
        select_(magnitude < splat_bits_<U>(143u << 23), finite, splat_bits_<U>(0x7c00u));
    return select_(is_nan_(x), splat_bits_<U>(fp16_nan), sign | rounded);
}

// The bf16 half of a split master: to nearest, ties away from zero; what it leaves is one signed
// 16-bit number.
template <class U>
INFINITY_FN U split_high_(U x) {
    return (x + 0x8000u) >> 16;
}

template <class U>
INFINITY_FN U split_low_(U x) {
    return x & 0xffffu;  // of x - (high << 16), whose lower half is that of x
}

template <class U>
INFINITY_FN U split_join_(U high, U low) {
    return (high << 16) + ((low ^ 0x8000u) - 0x8000u);
}

template <class U>
INFINITY_FN U mix_(U x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

// 32 random bits for each of the elements `index`, `index` + 1, ... of a parameter.
template <class U>
INFINITY_FN U random_(u64 key, u64 index) {
    const U lo = counting_<U>(u32(index));
    const U carry =
        select_(lo < splat_bits_<U>(u32(index)), splat_bits_<U>(1u), splat_bits_<U>(0u));
    const U hi = splat_bits_<U>(u32(index >> 32)) + carry;
    return mix_(lo * 0x9e3779b1u + u32(key) + mix_(hi * 0x85ebca77u + u32(key >> 32)));
}

}  // namespace infinity_optim::INFINITY_HOME
