// Every home gives the scalar home's bits: every rule and form of the states, every class of float,
// odd sizes, any threads.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "infinity_optim/engine.hpp"
#include "optim_cases.hpp"

namespace {

using namespace infinity_optim;
using optim_cases::filled;
using optim_cases::Memory;

const std::vector<u64> sizes = {0, 1, 7, 15, 16, 17, 63, 1000, 4096, 40'001};

struct Form {
    u32 gradient, parameter, states, flags;
};

[[nodiscard]] std::vector<Form> forms() {
    std::vector<Form> all;
    for (const u32 gradient : {format_fp32, format_bf16, format_fp16}) {
        for (const u32 parameter : {format_none, format_bf16, format_fp16}) {
            all.push_back({gradient, parameter, format_fp32, 0});
        }
        all.push_back({gradient, format_bf16, format_fp32, flag_split_master});
        all.push_back(
            {gradient, format_bf16, format_bf16, flag_split_master | flag_stochastic_moments});
        all.push_back({gradient, format_none, format_bf16, 0});
        all.push_back({gradient, format_none, format_bf16, flag_stochastic_moments});
    }
    return all;
}

[[nodiscard]] ThreadPool threads(std::size_t count) {
    return ThreadPool(std::vector<int>(count, -1));
}

[[nodiscard]] Memory updated(const Memory& before, const Form& form, u32 rule, u32 flags,
                             std::string_view home, ThreadPool& pool) {
    Memory memory = before;
    Segment segment = memory.segment(form.gradient, form.parameter, form.states);
    optim_cases::set_constants(segment, rule, form.flags | flags);
    update({&segment, 1}, pool, kernels_of(home));
    return memory;
}

// A NaN that an update stored is the canonical one.
[[nodiscard]] bool stored_nans_are_canonical(const Memory& memory, const Form& form, u64 states) {
    const auto words = [&](const std::vector<u32>& values) {
        return std::none_of(values.begin() + Memory::shift, values.end(),
                            [](u32 x) { return (x & 0x7fffffff) > 0x7f800000 && x != 0x7fc00000; });
    };
    const auto halves = [&](const u16* values, u32 infinity, u32 canonical) {
        return std::none_of(values, values + memory.numel,
                            [&](u32 x) { return (x & 0x7fff) > infinity && x != canonical; });
    };
    const bool split = form.flags & flag_split_master;
    bool holds = split || words(memory.master);
    if (split || form.parameter == format_bf16)
        holds = holds && halves(memory.parameter.data() + Memory::shift, 0x7f80, 0x7fc0);
    if (form.parameter == format_fp16)
        holds = holds && halves(memory.parameter.data() + Memory::shift, 0x7c00, 0x7e00);
    const std::vector<u32>* all[] = {&memory.first, &memory.second, &memory.third};
    for (u64 k = 0; k < states; ++k) {
        const auto* narrow = reinterpret_cast<const u16*>(all[k]->data() + Memory::shift);
        holds =
            holds && (form.states == format_fp32 ? words(*all[k]) : halves(narrow, 0x7f80, 0x7fc0));
    }
    return holds;
}

void compare_homes(u32 rule, u32 flags) {
    constexpr u64 states[] = {2, 3, 1, 1, 0, 1};
    ThreadPool one = threads(1), three = threads(3);
    u64 seed = 0;
    for (const Form& form : forms()) {
        for (const u64 numel : sizes) {
            const Memory before = filled(numel, ++seed);
            const Memory expected = updated(before, form, rule, flags, "scalar", one);
            CHECK(stored_nans_are_canonical(expected, form, states[rule]));
            for (const std::string_view home : homes()) {
                CHECK(updated(before, form, rule, flags, home, three) == expected);
            }
        }
    }
}

[[nodiscard]] std::string refusal(Segment segment) {
    ThreadPool pool = threads(1);
    try {
        update({&segment, 1}, pool, kernels_of("scalar"));
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "nothing was thrown";
}

}  // namespace

TEST(adam_has_one_result_in_all_homes) {
    compare_homes(rule_adam, flag_coupled_decay);
}
TEST(adamw_has_one_result_in_all_homes) {
    compare_homes(rule_adam, flag_decoupled_decay);
}
TEST(amsgrad_has_one_result_in_all_homes) {
    compare_homes(rule_adam_amsgrad, 0);
}
TEST(lion_has_one_result_in_all_homes) {
    compare_homes(rule_lion, flag_decoupled_decay);
}
TEST(adagrad_has_one_result_in_all_homes) {
    compare_homes(rule_adagrad, flag_coupled_decay);
}
TEST(sgd_has_one_result_in_all_homes) {
    compare_homes(rule_sgd, flag_coupled_decay);
}
TEST(momentum_has_one_result_in_all_homes) {
    compare_homes(rule_sgd_momentum, flag_nesterov);
}
TEST(the_first_momentum_has_one_result_in_all_homes) {
    compare_homes(rule_sgd_momentum, flag_first_step);
}

TEST(a_segment_cut_in_two_gives_what_the_whole_gives) {
    ThreadPool pool = threads(2);
    const u64 numel = 10'000, half = 4096;
    for (const Form& form : forms()) {
        const Memory before = filled(numel, 5);
        const Memory whole = updated(before, form, rule_adam, 0, "scalar", pool);
        Memory parts = before;
        Segment segments[2];
        segments[0] = segments[1] = parts.segment(form.gradient, form.parameter, form.states);
        for (Segment& segment : segments)
            optim_cases::set_constants(segment, rule_adam, form.flags);
        Segment& second = segments[1];
        segments[0].numel = half;
        second.numel -= half;
        second.first_element += half;
        second.gradient += half * (form.gradient == format_fp32 ? 4 : 2);
        second.master += half * 4;
        second.remainder += half * 2;
        second.parameter += half * 2;
        for (u64& state : second.states) state += half * (form.states == format_fp32 ? 4 : 2);
        update(segments, pool, kernels_of(homes().back()));
        CHECK(parts == whole);
    }
}

TEST(chunks_of_any_size_give_the_same_bits) {
    const Memory before = filled(300'001, 9);  // enough for the largest chunks with one thread
    const Form form{format_bf16, format_bf16, format_fp32, 0};
    ThreadPool alone = threads(1);
    const Memory expected = updated(before, form, rule_adam, flag_decoupled_decay, "scalar", alone);
    for (const std::size_t count : {1, 2, 8}) {
        ThreadPool pool = threads(count);
        CHECK(updated(before, form, rule_adam, flag_decoupled_decay, homes().back(), pool) ==
              expected);
    }
}

TEST(an_update_writes_nothing_beside_its_elements) {
    ThreadPool pool = threads(1);
    for (const std::string_view home : homes()) {
        Memory memory = filled(100, 6);
        const Memory before = memory;
        Segment segment = memory.segment(format_bf16, format_bf16, format_fp32);
        optim_cases::set_constants(segment, rule_adam, 0);
        segment.numel = 61;
        update({&segment, 1}, pool, kernels_of(home));
        for (u64 i = 0; i < memory.master.size(); ++i) {
            if (i >= Memory::shift && i < Memory::shift + 61) continue;
            CHECK_EQ(memory.master[i], before.master[i]);
            CHECK_EQ(memory.parameter[i], before.parameter[i]);
            CHECK_EQ(memory.first[i], before.first[i]);
        }
        CHECK(memory.gradient == before.gradient);
    }
}

TEST(a_segment_that_cannot_be_right_is_refused_before_anything_is_changed) {
    Memory memory = filled(10, 7);
    Segment good = memory.segment(format_fp32, format_bf16, format_fp32);
    optim_cases::set_constants(good, rule_adam, 0);
    const auto says = [&](auto change, const std::string& part) {
        Segment bad = good;
        change(bad);
        return refusal(bad).find(part) != std::string::npos;
    };
    CHECK(says([](Segment& s) { s.rule = rule_count; }, "no rule"));
    CHECK(says([](Segment& s) { s.gradient = 0; }, "the gradient must be an address"));
    CHECK(says([](Segment& s) { s.gradient_format = format_none; }, "the gradient has no format"));
    CHECK(says([](Segment& s) { s.master += 2; }, "the master must be an address aligned to 4"));
    CHECK(says([](Segment& s) { s.states[1] = 0; }, "a state"));
    CHECK(says([](Segment& s) { s.state_format = format_fp16; }, "not fp16"));
    CHECK(says([](Segment& s) { s.parameter_format = format_fp32; }, "16 bits"));
    CHECK(says([](Segment& s) { s.parameter_format = format_fp16, s.flags = flag_split_master; },
               "needs a bf16"));
    CHECK_EQ(refusal(good), "nothing was thrown");
}

TEST(an_unknown_home_is_refused_with_those_there_are) {
    CHECK_THROWS(kernels_of("avx1024"), std::invalid_argument);
}

TEST(avx512_gives_the_scalar_bits) {
    const auto all = homes();
    if (std::find(all.begin(), all.end(), "avx512") == all.end())
        SKIP("this CPU has no AVX-512; lanes16 stands in");
    ThreadPool pool = threads(1);
    const Memory before = filled(10'000, 8);
    const Form form{format_bf16, format_bf16, format_fp32, 0};
    CHECK(updated(before, form, rule_adam, 0, "avx512", pool) ==
          updated(before, form, rule_adam, 0, "scalar", pool));
}
