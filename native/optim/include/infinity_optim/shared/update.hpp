// What an update reads, computes and writes from element i on. Only load_state_ and store_state_
// know how a state is stored: the place for 8-bit moments.
#pragma once

#include "infinity_optim/shared/rounding.hpp"
#include "infinity_optim/shared/rules.hpp"

namespace infinity_optim::INFINITY_HOME {

// How a home touches memory; SIMD homes specialise them for their vectors.
template <class V>
INFINITY_FN V load32_(u64 address, u64 i);
template <class U>
INFINITY_FN U load16_(u64 address, u64 i);
template <class V>
INFINITY_FN void store32_(u64 address, u64 i, V value);
template <class U>
INFINITY_FN void store16_(u64 address, u64 i, U value);

template <>
INFINITY_FN float load32_<float>(u64 address, u64 i) {
    return reinterpret_cast<const float*>(address)[i];
}
template <>
INFINITY_FN u32 load16_<u32>(u64 address, u64 i) {
    return reinterpret_cast<const u16*>(address)[i];
}
template <>
INFINITY_FN void store32_<float>(u64 address, u64 i, float value) {
    reinterpret_cast<float*>(address)[i] = value;
}
template <>
INFINITY_FN void store16_<u32>(u64 address, u64 i, u32 value) {
    reinterpret_cast<u16*>(address)[i] = u16(value);
}

template <class V>
INFINITY_FN V load_float_(u64 address, u32 format, u64 i) {
    using U = typename Lanes<V>::Bits;
    if (format == format_fp32) return load32_<V>(address, i);
    const U bits = load16_<U>(address, i);
    return float_(format == format_bf16 ? from_bf16_(bits) : from_fp16_(bits));
}

template <class V>
INFINITY_FN V load_master_(const Segment& s, u64 i) {
    using U = typename Lanes<V>::Bits;
    if ((s.flags & flag_split_master) == 0) return load32_<V>(s.master, i);
    return float_(split_join_(load16_<U>(s.parameter, i), load16_<U>(s.remainder, i)));
}

template <class V>
INFINITY_FN void store_parameter_(const Segment& s, u64 i, V p) {
    using U = typename Lanes<V>::Bits;
    const U bits = bits_(p);
    if (s.flags & flag_split_master) {
        store16_<U>(s.parameter, i, split_high_(bits));
        store16_<U>(s.remainder, i, split_low_(bits));
        return;
    }
    store32_<V>(s.master, i, p);
    if (s.parameter_format == format_none) return;
    store16_<U>(s.parameter, i,
                s.parameter_format == format_bf16 ? to_bf16_(bits) : to_fp16_(bits));
}

template <class V>
INFINITY_FN V load_state_(const Segment& s, u32 which, u64 i) {
    return load_float_<V>(s.states[which], s.state_format, i);
}

template <class V, class U>
INFINITY_FN void store_state_(const Segment& s, u32 which, u64 i, V value, U random) {
    if (s.state_format == format_fp32) {
        store32_<V>(s.states[which], i, value);
    } else if (s.flags & flag_stochastic_moments) {
        const U mine = which == 0 ? random & 0xffffu : random >> 16;
        store16_<U>(s.states[which], i, to_bf16_stochastic_(bits_(value), mine));
    } else {
        store16_<U>(s.states[which], i, to_bf16_(bits_(value)));
    }
}

// What a rule has computed, before it is stored.
template <class R, class V>
struct Updated {
    V p;
    V state[R::states == 0 ? 1 : R::states];
};

template <class R, class V>
INFINITY_FN Updated<R, V> updated_(const Segment& s, u64 i) {
    Updated<R, V> values;
    V p = load_master_<V>(s, i);
    V g = mul_(load_float_<V>(s.gradient, s.gradient_format, i), splat_<V>(s.gradient_factor));
    if (s.flags & flag_coupled_decay) g = fma_(p, splat_<V>(s.weight_decay), g);
    if (s.flags & flag_decoupled_decay) p = mul_(p, splat_<V>(s.decay));
    values.state[0] = p;
    for (u32 k = 0; k < R::states; ++k) values.state[k] = load_state_<V>(s, k, i);
    R::step(s, p, g, values.state);
    values.p = p;
    return values;
}

// Where a value is NaN. A rule's parameter and first state show it: where another state holds one,
// the parameter became one.
template <class R, class V>
INFINITY_FN auto nan_in_(const Updated<R, V>& values) {
    return unordered_(values.p, R::states == 0 ? values.p : values.state[0]);
}

template <class R, class V>
INFINITY_FN void make_canonical_(Updated<R, V>& values) {
    values.p = canonical_(values.p);
    for (u32 k = 0; k < R::states; ++k) values.state[k] = canonical_(values.state[k]);
}

template <class R, class V>
INFINITY_FN void store_updated_(const Segment& s, u64 i, const Updated<R, V>& values) {
    using U = typename Lanes<V>::Bits;
    U random = splat_bits_<U>(0);
    if (s.flags & flag_stochastic_moments) random = random_<U>(s.key, s.first_element + i);
    for (u32 k = 0; k < R::states; ++k) store_state_<V, U>(s, k, i, values.state[k], random);
    store_parameter_<V>(s, i, values.p);
}

// Updates `count` Vs, one behind another: one question for NaN is enough for all of them.
template <class R, class V, u32 count>
INFINITY_FN void update_at_(const Segment& s, u64 i) {
    constexpr u32 lanes = Lanes<V>::count;
    Updated<R, V> values[count];
    for (u32 k = 0; k < count; ++k) values[k] = updated_<R, V>(s, i + k * lanes);
    auto nan = nan_in_(values[0]);
    for (u32 k = 1; k < count; ++k) nan = nan | nan_in_(values[k]);
    if (any_(nan)) {
        for (u32 k = 0; k < count; ++k) make_canonical_(values[k]);
    }
    for (u32 k = 0; k < count; ++k) store_updated_(s, i + k * lanes, values[k]);
}

}  // namespace infinity_optim::INFINITY_HOME
