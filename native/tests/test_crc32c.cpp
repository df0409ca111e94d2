// crc32c against its bitwise definition: every kernel that this CPU can run, each length and
// alignment.
#include "deepnvme/crc32c.hpp"

#include <algorithm>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "../nvme/src/crc32c_kernels.hpp"
#include "check.hpp"

using namespace deepnvme;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t longest = 4096;
// What a kernel does differently from some size on begins well below this.
constexpr std::size_t large = 3 * crc32c_streaming_bytes + 12'345;

[[nodiscard]] std::uint32_t bitwise(std::uint32_t crc, std::span<const std::byte> data) {
    std::uint32_t state = ~crc;
    for (const std::byte byte : data) {
        state ^= std::to_integer<std::uint32_t>(byte);
        for (int bit = 0; bit < 8; ++bit)
            state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78U : 0U);
    }
    return ~state;
}

[[nodiscard]] Bytes random_bytes(std::size_t nbytes) {
    std::mt19937_64 random(20'261'121);
    Bytes made(nbytes);
    std::ranges::generate(made, [&] { return static_cast<std::byte>(random()); });
    return made;
}

void on_every_kernel(const std::function<void(const Crc32cKernel&)>& body) {
    for (const Crc32cKernel& kernel : crc32c_kernels()) {
        try {
            body(kernel);
        } catch (const check::Failed& failure) {
            throw check::Failed(std::string(kernel.name) + ": " + failure.what());
        }
    }
}

// Copies source[from, from + nbytes) to an address that is `alignment` past a whole line; looks at
// everything around it.
void check_copy(const Crc32cKernel& kernel, const Bytes& source, std::size_t from,
                std::size_t nbytes, std::size_t alignment) {
    constexpr std::size_t guard = 128;
    constexpr std::byte untouched{0xA5};
    Bytes room(guard + 2 * 64 + nbytes + guard, untouched);
    const std::size_t at =
        guard + alignment + (-reinterpret_cast<std::uintptr_t>(room.data() + guard)) % 64;
    const std::span<const std::byte> piece(source.data() + from, nbytes);
    const std::uint32_t crc = kernel.copy(7, room.data() + at, piece.data(), nbytes);
    CHECK_EQ(crc, kernel.sum(7, piece.data(), nbytes));
    const std::span<const std::byte> written(room.data() + at, nbytes);
    CHECK(std::ranges::equal(written, piece));
    const auto is_untouched = [&](std::byte byte) { return byte == untouched; };
    CHECK(std::ranges::all_of(std::span(room).first(at), is_untouched));
    CHECK(std::ranges::all_of(std::span(room).subspan(at + nbytes), is_untouched));
}

}  // namespace

TEST(the_published_vectors_come_out) {
    Bytes ascending(32);
    for (std::size_t i = 0; i < ascending.size(); ++i) ascending[i] = static_cast<std::byte>(i);
    const Bytes descending(ascending.rbegin(), ascending.rend());
    const Bytes zeros(32, std::byte{0});
    const Bytes ones(32, std::byte{0xFF});
    const std::string digits = "123456789";
    on_every_kernel([&](const Crc32cKernel& kernel) {
        CHECK_EQ(kernel.sum(0, reinterpret_cast<const std::byte*>(digits.data()), digits.size()),
                 0xE3069283U);
        CHECK_EQ(kernel.sum(0, zeros.data(), zeros.size()), 0x8A9136AAU);
        CHECK_EQ(kernel.sum(0, ones.data(), ones.size()), 0x62A8AB43U);
        CHECK_EQ(kernel.sum(0, ascending.data(), ascending.size()), 0x46DD794EU);
        CHECK_EQ(kernel.sum(0, descending.data(), descending.size()), 0x113FDB5CU);
    });
}

TEST(every_length_at_every_alignment_agrees_with_the_bitwise_definition) {
    const Bytes data = random_bytes(longest + 16);
    for (std::size_t alignment = 0; alignment < 16; ++alignment) {
        std::uint32_t expected = 0;
        for (std::size_t nbytes = 0; nbytes <= longest; ++nbytes) {
            on_every_kernel([&](const Crc32cKernel& kernel) {
                CHECK_EQ(kernel.sum(0, data.data() + alignment, nbytes), expected);
            });
            if (nbytes < longest)
                expected = bitwise(expected, {data.data() + alignment + nbytes, 1});
        }
    }
}

TEST(a_large_piece_agrees_with_the_bitwise_definition_whatever_its_end) {
    const Bytes data = random_bytes(large);
    std::uint32_t expected = bitwise(0, std::span(data).first(large - 8200));
    for (std::size_t nbytes = large - 8200;; ++nbytes) {
        on_every_kernel([&](const Crc32cKernel& kernel) {
            CHECK_EQ(kernel.sum(0, data.data(), nbytes), expected);
        });
        if (nbytes == large) break;
        expected = bitwise(expected, {data.data() + nbytes, 1});
    }
}

TEST(a_piece_split_anywhere_sums_to_the_whole) {
    const Bytes data = random_bytes(2 * longest);
    const std::uint32_t whole = bitwise(0, data);
    on_every_kernel([&](const Crc32cKernel& kernel) {
        for (std::size_t cut = 0; cut <= data.size(); ++cut) {
            const std::uint32_t first = kernel.sum(0, data.data(), cut);
            CHECK_EQ(kernel.sum(first, data.data() + cut, data.size() - cut), whole);
        }
    });
}

TEST(crcs_of_two_neighbours_join_to_the_whole) {
    const Bytes data = random_bytes(2 * longest);
    const std::uint32_t whole = bitwise(0, data);
    for (std::size_t cut = 0; cut <= data.size(); ++cut) {
        const std::uint32_t first = crc32c(0, data.data(), cut);
        const std::uint32_t second = crc32c(0, data.data() + cut, data.size() - cut);
        CHECK_EQ(crc32c_joined(first, second, data.size() - cut), whole);
    }
}

TEST(no_bytes_change_no_crc) {
    on_every_kernel([](const Crc32cKernel& kernel) {
        CHECK_EQ(kernel.sum(0x12345678, nullptr, 0), 0x12345678U);
        CHECK_EQ(kernel.copy(0x12345678, nullptr, nullptr, 0), 0x12345678U);
    });
}

TEST(a_copy_is_equal_and_touches_nothing_around_it) {
    const Bytes source = random_bytes(longest + 16);
    on_every_kernel([&](const Crc32cKernel& kernel) {
        for (std::size_t nbytes = 0; nbytes <= longest; nbytes += 1 + nbytes / 16) {
            for (std::size_t alignment = 0; alignment < 16; ++alignment) {
                check_copy(kernel, source, (alignment * 5) % 16, nbytes, alignment);
            }
        }
    });
}

TEST(a_copy_past_the_caches_is_equal_and_touches_nothing_around_it) {
    const Bytes source = random_bytes(large + 16);
    on_every_kernel([&](const Crc32cKernel& kernel) {
        for (const std::size_t nbytes : {crc32c_streaming_bytes - 1, crc32c_streaming_bytes,
                                         crc32c_streaming_bytes + 1, large}) {
            for (std::size_t alignment = 0; alignment < 64; ++alignment) {
                check_copy(kernel, source, alignment % 16, nbytes, alignment);
            }
        }
    });
}

TEST(the_table_kernel_is_always_there_and_any_in_use_agrees_bit_by_bit) {
    const Bytes data = random_bytes(1000);
    CHECK_EQ(crc32c_kernels().front().name, "tables");
    Bytes copied(data.size());
    CHECK_EQ(crc32c(0, data.data(), data.size()), bitwise(0, data));
    CHECK_EQ(crc32c_copy(0, copied.data(), data.data(), data.size()), bitwise(0, data));
    CHECK(copied == data);
}

#if defined(__x86_64__)
TEST(a_cpu_with_sse42_does_not_fall_back_to_tables) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2")) SKIP("this CPU has no SSE4.2");
    CHECK_EQ(crc32c_kernels()[1].name, "sse4.2");
}

TEST(a_cpu_that_multiplies_in_wide_vectors_does_so_in_the_widest) {
    __builtin_cpu_init();
    const bool wide =
        __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
    if (!wide) SKIP("this CPU has no VPCLMULQDQ");
    const bool wider = __builtin_cpu_supports("avx512f") != 0;
    CHECK_EQ(crc32c_kernels().back().name, wider ? "avx512" : "avx2");
}
#endif
