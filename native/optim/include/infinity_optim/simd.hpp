// Which SIMD kernels run: what the CPU has, and the level chosen from it. Every level gives the
// same bits; INFINITY_SIMD lowers the level to compare or to debug. Callers read the environment
// and pass its value in.
#pragma once

#include <string_view>
#include <vector>

namespace infinity_optim {

// The instruction sets that kernels are written for, lowest first.
enum class SimdLevel { scalar, neon, avx2, avx512 };

[[nodiscard]] std::string_view name_of(SimdLevel level);

// Instruction-set extensions this CPU and system have, of those the kernels use or will use, by
// common name.
[[nodiscard]] std::vector<std::string_view> cpu_features();

// The levels this CPU can run, lowest first. AArch64 lists scalar alone until the NEON kernels are
// written.
[[nodiscard]] std::vector<SimdLevel> possible_simd();

// The level named by `wanted` (the value of INFINITY_SIMD), or the highest of `possible` when it is
// null or empty. Throws std::invalid_argument for a word that is no level and for a level that is
// not possible.
[[nodiscard]] SimdLevel choose_simd(const char* wanted, const std::vector<SimdLevel>& possible);

// choose_simd() among what this CPU can run.
[[nodiscard]] SimdLevel chosen_simd(const char* wanted);

}  // namespace infinity_optim
