// Many copies in one call: each is equal, summed as crc32c says, and touches nothing around it.
#include "deepnvme/copy.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"
#include "deepnvme/arena.hpp"
#include "deepnvme/crc32c.hpp"

#include <sys/mman.h>

using namespace deepnvme;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t guard = 64;
constexpr std::byte untouched{0xA5};

[[nodiscard]] Bytes random_bytes(std::size_t nbytes) {
    std::mt19937_64 random(20'261'122);
    Bytes made(nbytes);
    std::ranges::generate(made, [&] { return static_cast<std::byte>(random()); });
    return made;
}

// Around where large copies begin to go past the caches, whole lines and not.
[[nodiscard]] std::vector<std::size_t> sizes() {
    constexpr std::size_t large = std::size_t{32} << 10;
    return {
        0, 1, 63, 64, 4096, large - 1, large, large + 1, large + 63, 2 * large, 3 * large + 12'345};
}

// Every size, from and to every alignment within a line that shows a difference.
struct Layout {
    Bytes source = random_bytes(std::size_t{512} << 10);
    Bytes room = Bytes(std::size_t{32} << 20, untouched);
    std::vector<Copy> copies;

    Layout() {
        std::size_t at = guard;
        for (const std::size_t nbytes : sizes()) {
            for (const std::size_t alignment : {0, 1, 8, 16, 63}) {
                copies.push_back(
                    {room.data() + at + alignment, source.data() + (alignment * 5) % 64, nbytes});
                at += alignment + nbytes + guard;
                CHECK(at < room.size());
            }
        }
    }

    void check() const {
        const std::byte* end = room.data();
        for (const Copy& piece : copies) {
            CHECK(std::all_of(end, static_cast<const std::byte*>(piece.destination),
                              [](std::byte byte) { return byte == untouched; }));
            CHECK(std::equal(piece.source, piece.source + piece.nbytes, piece.destination));
            end = piece.destination + piece.nbytes;
        }
        CHECK(std::all_of(end, room.data() + room.size(),
                          [](std::byte byte) { return byte == untouched; }));
    }
};

}  // namespace

TEST(each_copy_is_equal_and_touches_nothing_around_it) {
    Layout layout;
    copy_each(layout.copies);
    layout.check();
}

TEST(strided_copies_take_every_so_many_bytes_and_touch_nothing_between) {
    const Bytes source = random_bytes(1000);
    Bytes room(1000, untouched);
    copy_strided({{room.data() + 10, source.data() + 3, 4}, 50, 7, 11});
    Bytes expected(1000, untouched);
    for (std::size_t i = 0; i < 50; ++i)
        std::copy_n(source.data() + 3 + 11 * i, 4, expected.data() + 10 + 7 * i);
    CHECK(room == expected);
    copy_strided({{room.data(), source.data(), 5}, 200, 5, 0});  // one source for all
    for (std::size_t i = 0; i < 1000; ++i) CHECK(room[i] == source[i % 5]);
}

TEST(copies_that_are_summed_are_the_same_copies_and_each_has_its_own_sum) {
    Layout layout;
    std::vector<std::uint32_t> sums(layout.copies.size());
    copy_each(layout.copies, sums);
    layout.check();
    for (std::size_t i = 0; i < sums.size(); ++i) {
        CHECK_EQ(sums[i], crc32c(0, layout.copies[i].source, layout.copies[i].nbytes));
    }
}

TEST(no_copies_are_no_work) {
    copy_each({});
    copy_each({}, {});
    copy({nullptr, nullptr, 0});
}

TEST(new_memory_that_was_populated_is_there_and_zeros) {
    constexpr std::size_t page = 4096;
    constexpr std::size_t pages = 100;
    void* const raw =
        ::mmap(nullptr, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(raw != MAP_FAILED);
    auto* const memory = static_cast<std::byte*>(raw);
    populate(memory, (pages - 1) * page - 100);
    std::vector<unsigned char> resident(pages);
    CHECK_EQ(::mincore(raw, pages * page, resident.data()), 0);
    CHECK_EQ(std::ranges::count_if(resident, [](unsigned char state) { return (state & 1) != 0; }),
             99);
    CHECK(std::all_of(memory, memory + pages * page,
                      [](std::byte byte) { return byte == std::byte{0}; }));
    ::munmap(raw, pages * page);
}
