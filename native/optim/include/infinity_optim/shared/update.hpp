// One visit to memory: everything that an update reads, computes and writes at element i and the V's lanes
// after it. load_state and store_state alone know how a state is stored: where 8-bit moments will come in.
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

// Whether some of the values to be stored may be NaN. Where none is, nothing needs to be made canonical.
enum class Nan { possible, none };

template <Nan nan, class V>
INFINITY_FN void store_parameter_(const Segment& s, u64 i, V p) {
    using U = typename Lanes<V>::Bits;
    if constexpr (nan == Nan::possible) p = canonical_(p);
    const U bits = bits_(p);
    if (s.flags & flag_split_master) {
        store16_<U>(s.parameter, i, split_high_(bits));
        store16_<U>(s.remainder, i, split_low_(bits));
        return;
    }
    store32_<V>(s.master, i, p);
    if (s.parameter_format == format_none) return;
    if (s.parameter_format == format_fp16) {
        store16_<U>(s.parameter, i, to_fp16_(bits));
    } else if constexpr (nan == Nan::possible) {
        store16_<U>(s.parameter, i, to_bf16_(bits));
    } else {
        store16_<U>(s.parameter, i, number_to_bf16_(bits));
    }
}

template <class V>
INFINITY_FN V load_state_(const Segment& s, u32 which, u64 i) {
    return load_float_<V>(s.states[which], s.state_format, i);
}

template <Nan nan, class V, class U>
INFINITY_FN void store_state_(const Segment& s, u32 which, u64 i, V value, U random) {
    if constexpr (nan == Nan::possible) value = canonical_(value);
    if (s.state_format == format_fp32) {
        store32_<V>(s.states[which], i, value);
    } else if (s.flags & flag_stochastic_moments) {
        const U mine = which == 0 ? random & 0xffffu : random >> 16;
        store16_<U>(s.states[which], i, to_bf16_stochastic_(bits_(value), mine));
    } else {
        store16_<U>(s.states[which], i, to_bf16_(bits_(value)));
    }
}

template <class R, Nan nan, class V, u32 count>
INFINITY_FN void store_all_(const Segment& s, u64 i, V p, const V (&state)[count]) {
    using U = typename Lanes<V>::Bits;
    U random = splat_bits_<U>(0);
    if (s.flags & flag_stochastic_moments) random = random_<U>(s.key, s.first_element + i);
    for (u32 k = 0; k < R::states; ++k) store_state_<nan, V, U>(s, k, i, state[k], random);
    store_parameter_<nan, V>(s, i, p);
}

template <class R, class V>
INFINITY_FN void update_at_(const Segment& s, u64 i) {
    V p = load_master_<V>(s, i);
    V g = mul_(load_float_<V>(s.gradient, s.gradient_format, i), splat_<V>(s.gradient_factor));
    if (s.flags & flag_coupled_decay) g = fma_(p, splat_<V>(s.weight_decay), g);
    if (s.flags & flag_decoupled_decay) p = mul_(p, splat_<V>(s.decay));
    V state[R::states == 0 ? 1 : R::states];
    state[0] = p;
    for (u32 k = 0; k < R::states; ++k) state[k] = load_state_<V>(s, k, i);
    R::step(s, p, g, state);
    // A rule's parameter and first state show every NaN: where another state holds one, the parameter became
    // one.
    if (!any_nan_(p, R::states == 0 ? p : state[0])) {
        store_all_<R, Nan::none>(s, i, p, state);
    } else if constexpr (Lanes<V>::count == 1) {
        store_all_<R, Nan::possible>(s, i, p, state);
    } else {
        // Nothing has been stored yet: the lanes are done again, one by one.
        for (u32 k = 0; k < Lanes<V>::count; ++k) update_at_<R, float>(s, i + k);
    }
}

}  // namespace infinity_optim::INFINITY_HOME
