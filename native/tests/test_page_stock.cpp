// Pages that are used again: nobody shares one with another, what stays idle is limited, and gaps
// lose no room.
#include "deepnvme/page_stock.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "deepnvme/error.hpp"

using namespace deepnvme;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t huge = 2 * mib;
constexpr std::size_t everything = ~std::size_t{0};

void fill(const Pages& pages, std::uint8_t value) {
    std::memset(pages.data(), value, pages.size());
}

[[nodiscard]] bool holds(const Pages& pages, std::uint8_t value) {
    return std::all_of(pages.data(), pages.data() + pages.size(),
                       [=](std::byte byte) { return byte == std::byte{value}; });
}

// Pages of the process that are there, in bytes; 0 where the kernel does not tell.
[[nodiscard]] std::size_t touched(const Pages& pages) {
    constexpr std::size_t page = 4096;
    std::vector<unsigned char> there((pages.size() + page - 1) / page);
    if (::mincore(pages.data(), pages.size(), there.data()) != 0) return 0;
    return page * static_cast<std::size_t>(
                      std::ranges::count_if(there, [](auto each) { return each & 1U; }));
}

}  // namespace

TEST(a_larger_run_is_made_of_the_pages_of_smaller_ones) {
    const auto stock = PageStock::make();
    {
        const auto first = stock->take(3 * huge, everything);
        const auto second = stock->take(huge, everything);
        fill(*first, 7);
        fill(*second, 9);
    }
    CHECK(stock->idle_bytes() == 4 * huge);
    const auto both = stock->take(4 * huge, 0);
    CHECK(stock->idle_bytes() == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(both->data()) % huge == 0);
    CHECK(std::count(both->data(), both->data() + both->size(), std::byte{7}) == 3 * huge);
    CHECK(std::count(both->data(), both->data() + both->size(), std::byte{9}) == huge);
}

TEST(a_smaller_run_leaves_the_rest_idle) {
    const auto stock = PageStock::make();
    fill(*stock->take(4 * huge, 0), 5);
    const auto small = stock->take(huge, everything);
    CHECK(holds(*small, 5));
    CHECK(stock->idle_bytes() == 3 * huge);
    const auto rest = stock->take(3 * huge, 0);
    CHECK(holds(*rest, 5));
}

TEST(what_has_just_gone_back_is_taken_as_it_was) {
    const auto stock = PageStock::make();
    const auto* const data = stock->take(mib + 1, everything)->data();
    CHECK(stock->take(mib + 4096, everything)->data() == data);
}

TEST(a_run_that_ends_within_a_huge_page_has_all_of_its_pages) {
    const auto stock = PageStock::make();
    fill(*stock->take(5 * huge + 4096, 0), 3);
    const auto odd = stock->take(3 * huge + 12'345, everything);
    CHECK(touched(*odd) >= odd->size());
    CHECK(std::count(odd->data(), odd->data() + odd->size(), std::byte{3}) == 3 * huge);
    fill(*odd, 1);
    CHECK(stock->idle_bytes() == 2 * huge + 4096);
}

TEST(at_most_what_was_allowed_stays_idle_the_oldest_goes_first) {
    const auto stock = PageStock::make();
    auto old = stock->take(2 * huge, 0);
    auto young = stock->take(3 * huge, 0);
    fill(*old, 1);
    fill(*young, 2);
    old.reset();
    young.reset();
    stock->keep_at_most(4 * huge);
    CHECK(stock->idle_bytes() == 4 * huge);
    {
        const auto again = stock->take(4 * huge, everything);
        CHECK(std::count(again->data(), again->data() + again->size(), std::byte{2}) == 3 * huge);
        CHECK(std::count(again->data(), again->data() + again->size(), std::byte{1}) == huge);
    }
    stock->keep_at_most(0);
    CHECK(stock->idle_bytes() == 0);
    CHECK(holds(*stock->take(huge, 0), 0));
}

TEST(nothing_stays_idle_once_it_is_closed) {
    const auto stock = PageStock::make();
    auto left = stock->take(huge, 0);
    stock->take(huge, 0).reset();
    CHECK(stock->idle_bytes() == huge);
    stock->close();
    CHECK(stock->idle_bytes() == 0);
    left.reset();
    CHECK(stock->idle_bytes() == 0);
}

TEST(what_is_smaller_than_a_huge_page_is_in_nobodys_way) {
    const auto stock = PageStock::make();
    auto large = stock->take(4 * huge, 0);
    auto small = stock->take(huge / 16, 0);
    fill(*large, 7);
    large.reset();
    small.reset();
    CHECK(holds(*stock->take(3 * huge, everything), 7));
    CHECK(stock->idle_bytes() == 4 * huge + huge / 16);
}

TEST(runs_that_are_made_of_others_are_taken_apart_again) {
    const auto stock = PageStock::make();
    std::vector<std::shared_ptr<Pages>> parts;
    for (std::uint8_t value = 1; value <= 6; ++value) {
        parts.push_back(stock->take(huge, 0));
        fill(*parts.back(), value);
    }
    parts.clear();
    for (const std::size_t count : {6, 4, 5, 3, 6}) {
        const auto run = stock->take(count * huge, everything);
        CHECK(stock->idle_bytes() == (6 - count) * huge);
        for (std::size_t at = 0; at < count; ++at) {
            const std::byte first = run->data()[at * huge];
            CHECK(first != std::byte{0});
            CHECK(std::all_of(run->data() + at * huge, run->data() + (at + 1) * huge,
                              [=](std::byte byte) { return byte == first; }));
        }
    }
}

TEST(nothing_is_no_run_and_neither_is_more_than_there_can_be) {
    const auto stock = PageStock::make();
    CHECK_THROWS((void)stock->take(0, 0), std::invalid_argument);
    for (const std::size_t nbytes : {everything, everything - 4096, everything / 2 + 1})
        CHECK_THROWS((void)stock->take(nbytes, 0), std::bad_alloc);
}

TEST(a_forked_child_has_none_of_it_and_disturbs_nothing) {
    const auto stock = PageStock::make();
    auto pages = stock->take(huge, 0);
    fill(*pages, 4);
    const pid_t child = ::fork();
    if (child == 0) {
        bool refused = false;
        try {
            (void)stock->take(huge, 0);
        } catch (const ForkedError&) {
            refused = true;
        }
        pages.reset();
        stock->keep_at_most(0);
        ::_exit(refused && stock->idle_bytes() == 0 ? 0 : 1);
    }
    int status = 1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(holds(*pages, 4));
}

TEST(any_sizes_in_any_order_share_no_page_and_stay_within_the_limit) {
    std::mt19937_64 random(20'261'123);
    constexpr std::size_t limit = 48 * mib;
    const auto stock = PageStock::make();
    struct Held {
        std::shared_ptr<Pages> pages;
        std::uint8_t value;
    };
    std::vector<Held> held;
    const auto in_use = [&] {
        std::size_t sum = 0;
        for (const Held& each : held) sum += (each.pages->size() + 4095) / 4096 * 4096;
        return sum;
    };
    for (std::uint8_t turn = 1; turn < 200; ++turn) {
        const std::size_t nbytes = 1 + random() % (12 * mib);
        while (in_use() + nbytes + 4096 > limit) {
            const auto at = static_cast<std::ptrdiff_t>(random() % held.size());
            CHECK(holds(*held[at].pages, held[at].value));
            held.erase(held.begin() + at);
        }
        const std::size_t keep = limit - in_use() - (nbytes + 4095) / 4096 * 4096;
        held.push_back({stock->take(nbytes, keep), turn});
        fill(*held.back().pages, turn);
        CHECK(stock->idle_bytes() <= keep);
    }
    for (const Held& each : held) CHECK(holds(*each.pages, each.value));
}

TEST(threads_take_and_give_back_at_once) {
    const auto stock = PageStock::make();
    std::vector<std::thread> threads;
    for (std::uint8_t name = 1; name <= 4; ++name) {
        threads.emplace_back([&stock, name] {
            for (std::size_t turn = 0; turn < 30; ++turn) {
                const auto pages = stock->take((1 + turn % 3) * huge, 4 * huge);
                fill(*pages, name);
                CHECK(holds(*pages, name));
            }
        });
    }
    for (std::thread& each : threads) each.join();
    stock->keep_at_most(0);
    CHECK(stock->idle_bytes() == 0);
}
