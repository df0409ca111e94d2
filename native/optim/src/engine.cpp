#include "infinity_optim/engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "infinity_optim/simd.hpp"
#include "kernels.hpp"

namespace infinity_optim {
namespace {

// Elements that a thread takes at once. In the middle of a chunk the memory's prefetchers know what
// comes next, at its beginning they do not; of few elements each thread shall still get several
// chunks.
constexpr u64 smallest_chunk = 16384, largest_chunk = 65536, chunks_per_thread = 4;
constexpr u64 block = norm_block;
constexpr u64 blocks_at_once = 4;
// Elements that are summed, updated and summed again before the next: their streams fit the second
// cache of any core.
constexpr u64 summed_at_once = 8192;

struct Named {
    std::string_view name;
    const Kernels* kernels;
};

[[nodiscard]] std::vector<Named> runnable() {
    std::vector<Named> found = {{"scalar", &scalar_kernels}, {"lanes16", &lanes16_kernels}};
#if defined(__x86_64__)
    for (const SimdLevel level : possible_simd()) {
        if (level == SimdLevel::avx2) found.push_back({name_of(level), &avx2_kernels});
        if (level == SimdLevel::avx512) found.push_back({name_of(level), &avx512_kernels});
    }
#endif
    return found;
}

[[noreturn]] void refuse(std::size_t number, const std::string& what) {
    throw std::invalid_argument("segment " + std::to_string(number) + ": " + what);
}

[[nodiscard]] u64 size_of(u32 format) {
    return format == format_fp32 ? 4 : 2;
}

[[nodiscard]] u32 states_of(u32 rule) {
    constexpr u32 states[] = {2, 3, 1, 1, 0, 1};
    static_assert(std::size(states) == rule_count);
    return states[rule];
}

void check_stream(std::size_t number, const char* name, u64 address, u32 format) {
    if (format <= format_none || format >= format_count) {
        refuse(number,
               std::string(name) + " has no format of that number: " + std::to_string(format));
    }
    if (address == 0 || address % size_of(format) != 0) {
        refuse(number, std::string(name) + " must be an address aligned to " +
                           std::to_string(size_of(format)) + " bytes, got " +
                           std::to_string(address));
    }
}

void check(const Segment& s, std::size_t number) {
    if (s.rule >= rule_count)
        refuse(number, "there is no rule of number " + std::to_string(s.rule));
    check_stream(number, "the gradient", s.gradient, s.gradient_format);
    if (s.flags & flag_split_master) {
        if (s.parameter_format != format_bf16)
            refuse(number, "a split master needs a bf16 parameter");
        check_stream(number, "the parameter", s.parameter, format_bf16);
        check_stream(number, "the remainder", s.remainder, format_bf16);
    } else {
        check_stream(number, "the master", s.master, format_fp32);
        if (s.parameter_format == format_fp32)
            refuse(number, "the parameter's copy has 16 bits, or there is none");
        if (s.parameter_format != format_none) {
            check_stream(number, "the parameter", s.parameter, s.parameter_format);
        }
    }
    if (s.state_format == format_fp16) refuse(number, "states are fp32 or bf16, not fp16");
    for (u32 k = 0; k < states_of(s.rule); ++k)
        check_stream(number, "a state", s.states[k], s.state_format);
}

struct Chunk {
    const Segment* segment;
    u64 begin;
    u64 end;
};

[[nodiscard]] std::vector<Chunk> cut(std::span<const Segment> segments, std::size_t threads) {
    u64 numel = 0;
    for (const Segment& segment : segments) numel += segment.numel;
    const u64 share = numel / (threads * chunks_per_thread) / block * block;
    const u64 chunk = std::clamp(share, smallest_chunk, largest_chunk);
    std::vector<Chunk> chunks;
    for (const Segment& segment : segments) {
        for (u64 begin = 0; begin < segment.numel; begin += chunk)
            chunks.push_back({&segment, begin, std::min(begin + chunk, segment.numel)});
    }
    return chunks;
}

void check(const Gradient& gradient, std::span<double> sums) {
    check_stream(0, "the gradient", gradient.address, gradient.format);
    if (sums.size() != block_count(gradient.numel)) {
        throw std::invalid_argument("a gradient of " + std::to_string(gradient.numel) +
                                    " elements has " + std::to_string(block_count(gradient.numel)) +
                                    " block sums, got room for " + std::to_string(sums.size()));
    }
}

void check(std::span<const Summed> summed) {
    u64 free = 0;
    for (const Summed& one : summed) {
        if (one.block == 0 || one.block % 4 != 0 || one.address % 4 != 0 || one.address < free) {
            throw std::invalid_argument(
                "memory that is summed is sorted by address, does not overlap, and begins, as its "
                "blocks do, at a multiple of 4 bytes");
        }
        free = one.address + one.nbytes;
    }
}

// Calls sum(begin, end) for every block, on the pool, and keeps what it returns.
template <class Sum>
void for_blocks(u64 numel, std::span<double> sums, ThreadPool& pool, const Sum& sum) {
    pool.run((sums.size() + blocks_at_once - 1) / blocks_at_once, [&](u64 number) {
        const u64 last = std::min<u64>((number + 1) * blocks_at_once, sums.size());
        for (u64 b = number * blocks_at_once; b < last; ++b)
            sums[b] = sum(b * block, std::min((b + 1) * block, numel));
    });
}

}  // namespace

std::vector<std::string_view> homes() {
    std::vector<std::string_view> names;
    for (const Named& home : runnable()) names.push_back(home.name);
    return names;
}

const Kernels& kernels_of(std::string_view home) {
    std::string names;
    for (const Named& one : runnable()) {
        if (one.name == home) return *one.kernels;
        names += (names.empty() ? "" : ", ") + std::string(one.name);
    }
    throw std::invalid_argument("a home of the update rules on this CPU is one of: " + names +
                                "; got \"" + std::string(home) + "\"");
}

u64 block_count(u64 numel) {
    return (numel + block - 1) / block;
}

void update(std::span<const Segment> segments, ThreadPool& pool, const Kernels& kernels) {
    for (std::size_t i = 0; i < segments.size(); ++i) check(segments[i], i);
    const std::vector<Chunk> chunks = cut(segments, pool.size());
    pool.run(chunks.size(), [&](u64 number) {
        const Chunk& one = chunks[number];
        kernels.update[one.segment->rule](*one.segment, one.begin, one.end);
    });
}

void update(std::span<const Segment> segments, std::span<Summed> summed, ThreadPool& pool,
            const Kernels& kernels) {
    for (std::size_t i = 0; i < segments.size(); ++i) check(segments[i], i);
    check(summed);
    const std::vector<Chunk> chunks = cut(segments, pool.size());
    // All memory is allocated here: what the pool's threads do must not throw.
    std::vector<Piece> pieces;
    std::vector<std::size_t> ends;
    for (const Chunk& one : chunks) {
        add_pieces(pieces, summed, *one.segment, one.begin, one.end);
        ends.push_back(pieces.size());
    }
    pool.run(chunks.size(), [&](u64 number) {
        const Chunk& one = chunks[number];
        const std::span<Piece> own(pieces.begin() + (number == 0 ? 0 : ends[number - 1]),
                                   pieces.begin() + ends[number]);
        for (u64 begin = one.begin; begin < one.end; begin += summed_at_once) {
            const u64 end = std::min(begin + summed_at_once, one.end);
            for (Piece& piece : own) piece.sum_before(begin, end);
            kernels.update[one.segment->rule](*one.segment, begin, end);
            for (Piece& piece : own) piece.sum_after(begin, end);
        }
    });
    join(summed, pieces);
}

void block_sums(const Gradient& gradient, std::span<double> sums, ThreadPool& pool,
                const Kernels& kernels) {
    check(gradient, sums);
    for_blocks(gradient.numel, sums, pool, [&](u64 begin, u64 end) {
        return kernels.block_sum(gradient.address, gradient.format, begin, end);
    });
}

void accumulate(u64 into, const Gradient& gradient, Sum sum, std::span<double> sums,
                ThreadPool& pool, const Kernels& kernels) {
    check(gradient, sums);
    check_stream(0, "the sum of gradients", into, format_fp32);
    for_blocks(gradient.numel, sums, pool, [&](u64 begin, u64 end) {
        return kernels.accumulate(into, gradient.address, gradient.format, sum == Sum::begins,
                                  begin, end);
    });
}

double tree_sum(std::span<double> sums) {
    if (sums.empty()) return 0.0;
    for (std::size_t count = sums.size(); count > 1; count = (count + 1) / 2) {
        for (std::size_t i = 0; i < count / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
        if (count % 2 == 1) sums[count / 2] = sums[count - 1];
    }
    return sums[0];
}

void sweep(std::span<const Segment> segments, ThreadPool& pool, const Kernels& kernels) {
    for (std::size_t i = 0; i < segments.size(); ++i) {
        check(segments[i], i);
        const Segment& s = segments[i];
        const bool plain = states_of(s.rule) >= 2 && s.state_format == format_fp32;
        if (!plain || s.gradient_format == format_fp16 || (s.flags & flag_split_master))
            refuse(i,
                   "a sweep is over Adam's streams: fp32 states, an fp32 or bf16 gradient, a whole "
                   "master");
    }
    const std::vector<Chunk> chunks = cut(segments, pool.size());
    pool.run(chunks.size(), [&](u64 number) {
        kernels.sweep(*chunks[number].segment, chunks[number].begin, chunks[number].end);
    });
}

}  // namespace infinity_optim
