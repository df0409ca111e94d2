// Inputs for the update kernels: every class of float, streams that keep their memory, and segments
// over them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

#include "infinity_optim/shared/layout.hpp"

namespace optim_cases {

using namespace infinity_optim;

// Zeros, subnormals, the smallest and largest normal numbers, ones, infinities, and NaN of several
// payloads.
inline constexpr std::array<u32, 18> special = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x807fffff,
    0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800000, 0xbf800000, 0x7f800000,
    0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0x7fffffff, 0x00400000};

class Floats {
  public:
    explicit Floats(std::uint64_t seed) : random_(seed) {}

    // One in four special, one in four any bits, the rest of a size that trainings see.
    [[nodiscard]] u32 any() {
        const std::uint64_t r = random_();
        if (r % 4 == 0) return special[(r >> 8) % special.size()];
        if (r % 4 == 1) return static_cast<u32>(r >> 32);
        return ordinary();
    }

    // Of magnitude 2^-16 to 2^4.
    [[nodiscard]] u32 ordinary() {
        const std::uint64_t r = random_();
        return static_cast<u32>((r & 0x80000000) | ((111 + (r >> 40) % 20) << 23) | (r & 0x7fffff));
    }

    [[nodiscard]] std::uint64_t bits() { return random_(); }

  private:
    std::mt19937_64 random_;
};

// Everything an update reads and writes, `shift` elements from an aligned place.
struct Memory {
    static constexpr u64 shift = 3;

    explicit Memory(u64 numel) : numel(numel) {
        for (auto* words : {&gradient, &master, &first, &second, &third})
            words->resize(numel + shift);
        for (auto* halves : {&remainder, &parameter}) halves->resize(numel + shift);
    }

    u64 numel;
    std::vector<u32> gradient, master, first, second,
        third;  // the gradient and states may hold 16-bit values
    std::vector<u16> remainder, parameter;

    [[nodiscard]] Segment segment(u32 gradient_format, u32 parameter_format, u32 state_format) {
        const auto at = [](auto& values) { return reinterpret_cast<u64>(values.data() + shift); };
        Segment s{};
        s.numel = numel;
        s.gradient = at(gradient);
        s.master = at(master);
        s.remainder = at(remainder);
        s.parameter = at(parameter);
        s.states[0] = at(first), s.states[1] = at(second), s.states[2] = at(third);
        s.gradient_format = gradient_format;
        s.parameter_format = parameter_format;
        s.state_format = state_format;
        return s;
    }

    [[nodiscard]] bool operator==(const Memory&) const = default;
};

[[nodiscard]] inline Memory filled(u64 numel, std::uint64_t seed) {
    Memory memory(numel);
    Floats floats(seed);
    for (auto* words :
         {&memory.gradient, &memory.master, &memory.first, &memory.second, &memory.third}) {
        for (u32& word : *words) word = floats.any();
    }
    for (auto* halves : {&memory.remainder, &memory.parameter}) {
        for (u16& half : *halves) half = static_cast<u16>(floats.any() >> 16);
    }
    return memory;
}

// The constants of step 7 of an ordinary training.
inline void set_constants(Segment& s, u32 rule, u32 flags) {
    s.rule = rule;
    s.flags = flags;
    s.gradient_factor = 0.37f;
    s.weight_decay = 0.01f;
    s.decay = 0.99999f;
    s.step = -0.0019f;
    s.keep1 = 0.9f;
    s.take1 = 0.1f;
    s.keep2 = 0.999f;
    s.take2 = 0.001f;
    s.root = 0.0835459f;
    s.eps = 1e-8f;
    s.key = 0x0123456789abcdef;
    s.first_element = 0xfffffff0;  // the counter of stochastic rounding passes 2^32
}

}  // namespace optim_cases
