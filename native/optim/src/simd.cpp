#include "infinity_optim/simd.hpp"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace infinity_optim {
namespace {

constexpr SimdLevel every_level[] = {SimdLevel::scalar, SimdLevel::neon, SimdLevel::avx2,
                                     SimdLevel::avx512};

[[nodiscard]] std::string joined_names(const std::vector<SimdLevel>& levels) {
    std::string names;
    for (const SimdLevel level : levels) {
        if (!names.empty()) names += ", ";
        names += name_of(level);
    }
    return names;
}

}  // namespace

std::string_view name_of(SimdLevel level) {
    switch (level) {
        case SimdLevel::scalar:
            return "scalar";
        case SimdLevel::neon:
            return "neon";
        case SimdLevel::avx2:
            return "avx2";
        case SimdLevel::avx512:
            return "avx512";
    }
    throw std::invalid_argument("no such SIMD level: " + std::to_string(static_cast<int>(level)));
}

#if defined(__x86_64__)

// __builtin_cpu_supports also asks whether the system saves the wide registers (XGETBV).
std::vector<std::string_view> cpu_features() {
    __builtin_cpu_init();
    std::vector<std::string_view> found;
    if (__builtin_cpu_supports("sse4.2")) found.push_back("sse4_2");
    if (__builtin_cpu_supports("avx2")) found.push_back("avx2");
    if (__builtin_cpu_supports("fma")) found.push_back("fma");
    if (__builtin_cpu_supports("f16c")) found.push_back("f16c");
    if (__builtin_cpu_supports("avx512f")) found.push_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) found.push_back("avx512bw");
    if (__builtin_cpu_supports("avx512dq")) found.push_back("avx512dq");
    if (__builtin_cpu_supports("avx512vl")) found.push_back("avx512vl");
    if (__builtin_cpu_supports("avx512bf16")) found.push_back("avx512_bf16");
    return found;
}

std::vector<SimdLevel> possible_simd() {
    const std::vector<std::string_view> features = cpu_features();
    const auto has = [&](std::initializer_list<std::string_view> names) {
        return std::ranges::all_of(
            names, [&](auto name) { return std::ranges::count(features, name) == 1; });
    };
    std::vector<SimdLevel> levels = {SimdLevel::scalar};
    if (!has({"avx2", "fma", "f16c"})) return levels;
    levels.push_back(SimdLevel::avx2);
    if (has({"avx512f", "avx512bw", "avx512dq", "avx512vl"})) levels.push_back(SimdLevel::avx512);
    return levels;
}

#else

std::vector<std::string_view> cpu_features() {
#if defined(__aarch64__)
    return {"neon"};  // part of the architecture's base
#else
    return {};
#endif
}

std::vector<SimdLevel> possible_simd() {
    return {SimdLevel::scalar};
}

#endif

SimdLevel choose_simd(const char* wanted, const std::vector<SimdLevel>& possible) {
    if (wanted == nullptr || *wanted == '\0') return possible.back();
    const auto named = [&](SimdLevel level) { return name_of(level) == wanted; };
    if (const auto found = std::ranges::find_if(possible, named); found != possible.end())
        return *found;
    const bool known = std::ranges::any_of(every_level, named);
    throw std::invalid_argument(
        "INFINITY_SIMD must be one of: " + joined_names(possible) + "; got \"" + wanted +
        (known ? "\", which has no kernels for this CPU" : "\", which is no SIMD level") +
        "; unset it to use " + std::string(name_of(possible.back())));
}

SimdLevel chosen_simd(const char* wanted) {
    return choose_simd(wanted, possible_simd());
}

}  // namespace infinity_optim
