// The update rules, written once for every home. V is float or a vector of floats; order and kind
// of each operation are those of docs/decisions/0006-optimizer-kernels.md, and of torch's CPU
// kernels. A rule gets the parameter after decoupled decay and the gradient after its factor and
// coupled decay.
#pragma once

#include "infinity_optim/shared/arithmetic.hpp"

namespace infinity_optim::INFINITY_HOME {

// Either operand's NaN wins.
template <class V>
INFINITY_FN V max_(V a, V b) {
    return select_(a > b, a, select_(a != a, a, b));
}

template <class V>
INFINITY_FN V sign_(V x) {
    const V zero = splat_<V>(0.0f);
    const V positive = select_(x > zero, splat_<V>(1.0f), select_(x != x, x, zero));
    return select_(x < zero, splat_<V>(-1.0f), positive);
}

template <bool amsgrad>
struct Adam {
    static constexpr u32 states = amsgrad ? 3 : 2;

    template <class V>
    INFINITY_FN static void step(const Segment& c, V& p, V g, V (&state)[states]) {
        V& m = state[0];
        V& v = state[1];
        const V difference = sub_(g, m);
        // No branch: the same for all elements, it would still cost every one of them.
        const V take = splat_<V>(c.take1);
        const auto is_small = take < splat_<V>(0.5f);
        m = fma_(select_(is_small, take, sub_(take, splat_<V>(1.0f))), difference,
                 select_(is_small, m, g));
        v = fma_(mul_(splat_<V>(c.take2), g), g, mul_(v, splat_<V>(c.keep2)));
        V largest = v;
        if constexpr (amsgrad) largest = state[2] = max_(state[2], v);
        const V spread = add_(div_(sqrt_(largest), splat_<V>(c.root)), splat_<V>(c.eps));
        p = add_(p, div_(mul_(splat_<V>(c.step), m), spread));
    }
};

struct Lion {
    static constexpr u32 states = 1;

    template <class V>
    INFINITY_FN static void step(const Segment& c, V& p, V g, V (&state)[states]) {
        V& m = state[0];
        const V direction = fma_(g, splat_<V>(c.take1), mul_(m, splat_<V>(c.keep1)));
        p = fma_(sign_(direction), splat_<V>(c.step), p);
        m = fma_(g, splat_<V>(c.take2), mul_(m, splat_<V>(c.keep2)));
    }
};

struct Adagrad {
    static constexpr u32 states = 1;

    template <class V>
    INFINITY_FN static void step(const Segment& c, V& p, V g, V (&state)[states]) {
        V& sum = state[0];
        sum = fma_(g, g, sum);
        const V spread = add_(sqrt_(sum), splat_<V>(c.eps));
        p = add_(p, div_(mul_(splat_<V>(c.step), g), spread));
    }
};

struct Sgd {
    static constexpr u32 states = 0;

    template <class V>
    INFINITY_FN static void step(const Segment& c, V& p, V g, V (&)[1]) {
        p = fma_(g, splat_<V>(c.step), p);
    }
};

struct SgdMomentum {
    static constexpr u32 states = 1;

    template <class V>
    INFINITY_FN static void step(const Segment& c, V& p, V g, V (&state)[states]) {
        V& m = state[0];
        m = c.flags & flag_first_step ? g
                                      : fma_(g, splat_<V>(c.take1), mul_(m, splat_<V>(c.keep1)));
        const V direction = c.flags & flag_nesterov ? fma_(m, splat_<V>(c.keep1), g) : m;
        p = fma_(direction, splat_<V>(c.step), p);
    }
};

}  // namespace infinity_optim::INFINITY_HOME
