// The choice of a SIMD level, from lists of possible levels and from this CPU.
#include "infinity_optim/simd.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

using infinity_optim::choose_simd;
using infinity_optim::SimdLevel;

const std::vector<SimdLevel> with_avx512 = {SimdLevel::scalar, SimdLevel::avx2, SimdLevel::avx512};
const std::vector<SimdLevel> with_avx2 = {SimdLevel::scalar, SimdLevel::avx2};
const std::vector<SimdLevel> scalar_only = {SimdLevel::scalar};

[[nodiscard]] std::string message_of(const char* wanted, const std::vector<SimdLevel>& possible) {
    try {
        (void)choose_simd(wanted, possible);
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "nothing was thrown";
}

[[nodiscard]] bool mentions(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST(without_a_wish_the_highest_possible_level_is_chosen) {
    CHECK_EQ(choose_simd(nullptr, with_avx512), SimdLevel::avx512);
    CHECK_EQ(choose_simd("", with_avx2), SimdLevel::avx2);
    CHECK_EQ(choose_simd(nullptr, scalar_only), SimdLevel::scalar);
}

TEST(a_wish_can_lower_the_level) {
    CHECK_EQ(choose_simd("avx2", with_avx512), SimdLevel::avx2);
    CHECK_EQ(choose_simd("scalar", with_avx512), SimdLevel::scalar);
}

TEST(a_level_that_the_cpu_lacks_is_refused_with_what_is_possible) {
    const std::string message = message_of("avx512", with_avx2);
    CHECK(mentions(message, "one of: scalar, avx2;"));
    CHECK(mentions(message, "no kernels for this CPU"));
    CHECK(mentions(message_of("neon", with_avx512), "no kernels for this CPU"));
}

TEST(an_unknown_word_is_refused_with_what_is_possible) {
    const std::string message = message_of("AVX2", with_avx2);
    CHECK(mentions(message, "\"AVX2\", which is no SIMD level"));
    CHECK(mentions(message, "one of: scalar, avx2;"));
}

TEST(every_level_answers_to_its_own_name) {
    for (const SimdLevel level : with_avx512) {
        CHECK_EQ(choose_simd(std::string(infinity_optim::name_of(level)).c_str(), with_avx512),
                 level);
    }
}

TEST(scalar_is_possible_everywhere) {
    const std::vector<SimdLevel> possible = infinity_optim::possible_simd();
    CHECK_EQ(possible.front(), SimdLevel::scalar);
    CHECK_EQ(infinity_optim::chosen_simd("scalar"), SimdLevel::scalar);
}

TEST(the_chosen_level_is_the_highest_possible_one) {
    CHECK_EQ(infinity_optim::chosen_simd(nullptr), infinity_optim::possible_simd().back());
}

TEST(a_possible_wide_level_means_that_the_features_it_needs_are_there) {
    const auto features = infinity_optim::cpu_features();
    const auto has = [&](std::string_view name) { return std::ranges::count(features, name) == 1; };
    const SimdLevel level = infinity_optim::possible_simd().back();
    if (level == SimdLevel::scalar) SKIP("this CPU runs the scalar kernels");
    CHECK(has("avx2") && has("fma") && has("f16c"));
    CHECK(level != SimdLevel::avx512 || (has("avx512f") && has("avx512bw") && has("avx512vl")));
}
