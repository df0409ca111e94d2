// One behaviour for all backends: every TEST runs on each that this kernel allows, and is skipped,
// after that, when it refused one. liburing needs an interpreter around it and passes the same in
// the Python suite.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend_bench.hpp"
#include "check.hpp"
#include "deepnvme/backend.hpp"
#include "deepnvme/uring_functions.hpp"

using namespace bench;
using namespace std::chrono_literals;

namespace {

// Makes backends of one kind.
class Make {
  public:
    explicit Make(std::string name) : name_(std::move(name)) {}

    [[nodiscard]] std::unique_ptr<Backend> unattached(unsigned depth) const {
        auto backend = deepnvme::make_backend(name_, depth);
        CHECK_EQ(backend->name(), name_);
        return backend;
    }

    [[nodiscard]] std::unique_ptr<Backend> operator()(unsigned depth) const {
        auto backend = unattached(depth);
        backend->attach();
        return backend;
    }

  private:
    std::string name_;
};

// Of the kernel, or of the container's filter.
bool is_refusal(const std::system_error& error) {
    return error.code().value() == ENOSYS || error.code().value() == EPERM;
}

void on_every_backend(const std::function<void(const Make&)>& body) {
    std::string refused;
    for (const std::string name : {"uring", "aio", "threads", "memory"}) {
        try {
            body(Make(name));
        } catch (const check::Failed& failure) {
            throw check::Failed(name + ": " + failure.what());
        } catch (const std::system_error& error) {
            if (!is_refusal(error)) throw;
            refused += std::string(refused.empty() ? "" : ", ") + error.what();
        }
    }
    if (!refused.empty()) SKIP("the others passed, but this kernel refuses " + refused);
}

// Runs `body` in a child process, whose limits and rights it may spoil.
void in_a_child(const std::function<void()>& body) {
    std::array<int, 2> ends{};
    CHECK_EQ(::pipe(ends.data()), 0);
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::string failure;
        try {
            body();
        } catch (const std::exception& error) {
            failure = error.what();
        }
        [[maybe_unused]] const ssize_t count = ::write(ends[1], failure.data(), failure.size());
        ::_exit(failure.empty() ? 0 : 1);
    }
    ::close(ends[1]);
    std::string failure(4096, '\0');
    const ssize_t count = ::read(ends[0], failure.data(), failure.size());
    ::close(ends[0]);
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    failure.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    if (!failure.empty()) throw check::Failed("in the child: " + failure);
    CHECK_EQ(status, 0);
}

void limit(__rlimit_resource resource, rlim_t value) {
    const rlimit limits{value, value};
    CHECK_EQ(::setrlimit(resource, &limits), 0);
}

}  // namespace

// ---- results
// ------------------------------------------------------------------------------------------

TEST(many_chunks_written_out_of_order_are_read_back) {
    on_every_backend([](const Make& make) {
        const Memory source(8 * mib);
        source.fill_with_pattern(1);
        const Memory target(source.size());
        const TestFile file;
        const auto backend = make(16);
        std::mt19937 shuffler(7);

        auto writes = cover(Verb::write, file.fd(), source, 64 * kib);
        std::shuffle(writes.begin(), writes.end(), shuffler);
        for (const auto& [token, result] : run(*backend, writes)) CHECK_EQ(result, 64 * kib);
        auto reads = cover(Verb::read, file.fd(), target, 128 * kib);
        std::shuffle(reads.begin(), reads.end(), shuffler);
        for (const auto& [token, result] : run(*backend, reads)) CHECK_EQ(result, 128 * kib);

        CHECK_EQ(std::memcmp(source.at(0), target.at(0), source.size()), 0);
    });
}

TEST(unaligned_pieces_of_a_buffered_file_are_written_and_read_back) {
    on_every_backend([](const Make& make) {
        const Memory source(100'000);
        source.fill_with_pattern(2);
        const Memory target(source.size());
        const TestFile file;
        const auto backend = make(4);

        for (const auto& [token, result] :
             run(*backend, cover(Verb::write, file.plain(), source, 777))) {
            const std::size_t expected = std::min<std::size_t>(777, source.size() - token * 777);
            CHECK_EQ(result, expected);
        }
        (void)run(*backend, cover(Verb::read, file.plain(), target, 1001));

        CHECK_EQ(std::memcmp(source.at(0), target.at(0), source.size()), 0);
    });
}

TEST(tokens_of_any_value_come_back_as_they_were) {
    on_every_backend([](const Make& make) {
        const Memory memory(64 * kib);
        const TestFile file(memory.bytes());
        const auto backend = make(8);
        std::vector<Request> requests;
        for (const std::uint64_t token :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 63U,
              Backend::reserved_token - 1, std::uint64_t{0xDEADBEEF}}) {
            std::byte* place = memory.at(requests.size() * 4096);
            requests.push_back({.fd = file.fd(), .memory = place, .length = 4096, .token = token});
        }

        const auto results = run(*backend, requests);

        CHECK_EQ(results.size(), requests.size());
    });
}

TEST(a_read_over_the_end_gives_the_true_count) {
    on_every_backend([](const Make& make) {
        const Memory content(10'000);
        content.fill_with_pattern(3);
        const TestFile file(content.bytes());
        const Memory target(64 * kib);
        const auto backend = make(2);

        const auto whole =
            run_one(*backend, {.fd = file.fd(), .memory = target.at(0), .length = 64 * kib});
        const auto rest = run_one(
            *backend,
            {.fd = file.fd(), .offset = 8192, .memory = target.at(16 * kib), .length = 4096});

        CHECK_EQ(whole, 10'000);
        CHECK_EQ(rest, 10'000 - 8192);
        CHECK_EQ(std::memcmp(target.at(0), content.at(0), 10'000), 0);
    });
}

TEST(a_read_at_or_behind_the_end_gives_zero) {
    on_every_backend([](const Make& make) {
        const Memory memory(8192);
        const TestFile file(memory.bytes());
        const auto backend = make(2);

        for (const std::uint64_t offset : {8192, 1 << 20}) {
            const Request request{
                .fd = file.fd(), .offset = offset, .memory = memory.at(0), .length = 4096};
            CHECK_EQ(run_one(*backend, request), 0);
        }
    });
}

TEST(a_bad_descriptor_is_a_completion_and_its_neighbours_are_unharmed) {
    on_every_backend([](const Make& make) {
        const Memory memory(64 * kib);
        const TestFile file(memory.bytes());
        const auto backend = make(16);
        std::vector<Request> requests;
        for (std::uint64_t token = 0; token < 12; ++token) {
            const std::array verbs = {Verb::read, Verb::write, Verb::sync_data, Verb::sync_all};
            requests.push_back({.verb = verbs[token % 4],
                                .fd = token % 3 == 0 ? 100'000 : file.fd(),
                                .memory = memory.at(token * 4096),
                                .length = 4096,
                                .token = token});
        }

        for (const auto& [token, result] : run(*backend, requests)) {
            CHECK_EQ(result, token % 3 == 0 ? -EBADF : token % 4 < 2 ? 4096 : 0);
        }
    });
}

TEST(a_write_to_a_read_only_descriptor_is_refused) {
    on_every_backend([](const Make& make) {
        const Memory memory(4096);
        const TestFile file(memory.bytes());
        const auto backend = make(2);

        const auto result = run_one(
            *backend,
            {.verb = Verb::write, .fd = file.read_only(), .memory = memory.at(0), .length = 4096});

        CHECK_EQ(result, -EBADF);
    });
}

TEST(memory_that_is_not_mapped_is_a_completion_with_efault) {
    on_every_backend([](const Make& make) {
        const Memory content(4096);
        const TestFile file(content.bytes());
        const auto backend = make(2);

        const auto result = run_one(
            *backend,
            {.fd = file.fd(), .memory = reinterpret_cast<std::byte*>(4096), .length = 4096});

        CHECK_EQ(result, -EFAULT);
    });
}

TEST(unaligned_direct_requests_are_refused) {
    on_every_backend([](const Make& make) {
        const Memory memory(64 * kib);
        const TestFile file(memory.bytes());
        if (!file.is_direct() || ::pread(file.fd(), memory.at(1), 4096, 0) >= 0) {
            SKIP("the temporary directory's file system asks no alignment of direct I/O");
        }
        const auto backend = make(4);

        const auto results = run(
            *backend,
            {{.fd = file.fd(), .memory = memory.at(1), .length = 4096, .token = 0},
             {.fd = file.fd(), .offset = 100, .memory = memory.at(0), .length = 4096, .token = 1},
             {.verb = Verb::write,
              .fd = file.fd(),
              .memory = memory.at(0),
              .length = 100,
              .token = 2}});

        for (const auto& [token, result] : results) CHECK_EQ(result, -EINVAL);
    });
}

TEST(both_syncs_complete_with_zero_and_fail_where_there_is_nothing_to_sync) {
    on_every_backend([](const Make& make) {
        const TestFile file;
        std::array<int, 2> ends{};
        CHECK_EQ(::pipe(ends.data()), 0);
        const auto backend = make(4);

        const auto results = run(*backend, {{.verb = Verb::sync_data, .fd = file.fd(), .token = 0},
                                            {.verb = Verb::sync_all, .fd = file.fd(), .token = 1},
                                            {.verb = Verb::sync_data, .fd = ends[0], .token = 2},
                                            {.verb = Verb::sync_all, .fd = ends[0], .token = 3}});
        ::close(ends[0]);
        ::close(ends[1]);

        CHECK_EQ(results.at(0), 0);
        CHECK_EQ(results.at(1), 0);
        CHECK_EQ(results.at(2), -EINVAL);
        CHECK_EQ(results.at(3), -EINVAL);
    });
}

TEST(a_write_over_the_file_size_limit_is_short_and_then_efbig) {
    on_every_backend([](const Make& make) {
        (void)make(2);  // a refusal is told here, not in the child
        in_a_child([&] {
            const Memory memory(128 * kib);
            const TestFile file;
            ::signal(SIGXFSZ, SIG_IGN);
            limit(RLIMIT_FSIZE, 64 * kib);
            const auto backend = make(2);

            Request request{
                .verb = Verb::write, .fd = file.fd(), .memory = memory.at(0), .length = 128 * kib};
            CHECK_EQ(run_one(*backend, request), 64 * kib);
            request.offset = 64 * kib;
            request.length = 64 * kib;
            CHECK_EQ(run_one(*backend, request), -EFBIG);
        });
    });
}

// ---- room
// ------------------------------------------------------------------------------------------

TEST(a_full_backend_refuses_a_push_until_something_is_reaped_and_loses_nothing) {
    on_every_backend([](const Make& make) {
        const Memory memory(256 * kib);
        const TestFile file(memory.bytes());
        for (const unsigned depth : {1U, 3U, 4U, 32U}) {
            const auto backend = make(depth);
            CHECK_EQ(backend->capacity(), depth);
            const std::vector<Request> requests = cover(Verb::read, file.fd(), memory, 4096);
            for (unsigned i = 0; i < depth; ++i) CHECK(backend->push(requests[i]));
            CHECK(!backend->push(requests[depth]));

            std::array<Completion, 1> out;
            std::set<std::uint64_t> seen;
            CHECK_EQ(backend->submit_and_reap(out, Wait::some), 1);
            seen.insert(out[0].token);
            CHECK(backend->push(requests[depth]));
            CHECK(!backend->push(requests[depth + 1]));
            while (seen.size() < depth + 1) {
                CHECK_EQ(backend->submit_and_reap(out, Wait::some), 1);
                CHECK(seen.insert(out[0].token).second);
            }
            CHECK_EQ(*seen.rbegin(), depth);
            CHECK_EQ(backend->submit_and_reap(out, Wait::none), 0);
        }
    });
}

TEST(requests_in_the_kernel_count_as_pending_until_they_are_reaped) {
    on_every_backend([](const Make& make) {
        const Memory memory(64 * kib);
        const TestFile file(memory.bytes());
        const auto backend = make(2);
        const std::vector<Request> requests = cover(Verb::read, file.fd(), memory, 4096);
        std::array<Completion, 2> out;

        CHECK(backend->push(requests[0]));
        const std::size_t at_once = backend->submit_and_reap(out, Wait::none);
        CHECK(backend->push(requests[1]));
        CHECK_EQ(backend->push(requests[2]), at_once > 0);

        std::size_t reaped = at_once;
        while (reaped < 2 + at_once) reaped += backend->submit_and_reap(out, Wait::some);
        CHECK_EQ(reaped, 2 + at_once);
    });
}

// ---- wake
// ------------------------------------------------------------------------------------------

TEST(a_wake_from_another_thread_unblocks) {
    on_every_backend([](const Make& make) {
        const auto backend = make(4);
        std::array<Completion, 4> out;
        std::atomic<bool> called = false;
        const std::jthread other([&] {
            std::this_thread::sleep_for(20ms);
            called = true;
            backend->wake();
        });

        const std::size_t count = backend->submit_and_reap(out, Wait::some);

        CHECK_EQ(count, 0);
        CHECK(called);
    });
}

TEST(a_wake_before_the_wait_is_not_lost) {
    on_every_backend([](const Make& make) {
        const auto backend = make(4);
        std::array<Completion, 4> out;

        for (int i = 0; i < 3; ++i) {
            backend->wake();
            CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
        }
    });
}

TEST(a_wake_is_kept_over_calls_that_do_not_wait) {
    on_every_backend([](const Make& make) {
        const auto backend = make(4);
        std::array<Completion, 4> out;

        backend->wake();
        for (int i = 0; i < 5; ++i) CHECK_EQ(backend->submit_and_reap(out, Wait::none), 0);

        CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
    });
}

TEST(a_wake_before_attach_is_not_lost) {
    on_every_backend([](const Make& make) {
        const auto backend = make.unattached(4);
        std::array<Completion, 4> out;

        backend->wake();
        backend->attach();

        CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
    });
}

TEST(thousands_of_wakes_become_a_few_returns) {
    on_every_backend([](const Make& make) {
        const auto backend = make(4);
        std::array<Completion, 4> out;
        for (int i = 0; i < 5000; ++i) backend->wake();
        std::atomic<bool> last = false;
        const std::jthread other([&] {
            std::this_thread::sleep_for(20ms);
            last = true;
            backend->wake();
        });

        int returns = 0;
        bool after_the_last = false;
        while (!after_the_last) {
            CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
            after_the_last = last;
            ++returns;
        }

        CHECK(returns <= 4);
    });
}

TEST(a_signal_does_not_end_a_wait) {
    on_every_backend([](const Make& make) {
        const auto backend = make(4);
        std::array<Completion, 4> out;
        struct sigaction action{};
        action.sa_handler = [](int) {};  // without SA_RESTART: calls that block end with EINTR
        CHECK_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
        std::atomic<bool> called = false;
        const std::jthread other([&, waiting = ::pthread_self()] {
            for (int i = 0; i < 5; ++i) {
                std::this_thread::sleep_for(5ms);
                ::pthread_kill(waiting, SIGUSR1);
            }
            called = true;
            backend->wake();
        });

        const std::size_t count = backend->submit_and_reap(out, Wait::some);

        CHECK_EQ(count, 0);
        CHECK(called);
    });
}

TEST(wakes_from_many_threads_disturb_no_request) {
    on_every_backend([](const Make& make) {
        const Memory memory(256 * kib);
        const TestFile file(memory.bytes());
        const auto backend = make(3);
        std::atomic<bool> stop = false;
        std::vector<std::thread> others;
        for (int i = 0; i < 3; ++i) {
            others.emplace_back([&] {
                while (!stop) {
                    backend->wake();
                    std::this_thread::yield();
                }
            });
        }

        std::map<std::uint64_t, std::int64_t> results;
        std::string failure;
        try {
            for (int round = 0; round < 20; ++round) {
                results = run(*backend, cover(Verb::read, file.fd(), memory, 4096));
            }
        } catch (const std::exception& error) {
            failure = error.what();
        }
        stop = true;
        for (std::thread& other : others) other.join();

        CHECK_EQ(failure, "");
        for (const auto& [token, result] : results) CHECK_EQ(result, 4096);
    });
}

// ---- registered buffers
// -----------------------------------------------------------------------------------------

TEST(registered_buffers_are_used_and_other_indexes_are_refused) {
    on_every_backend([](const Make& make) {
        const Memory first(2 * mib);
        const Memory second(64 * kib);
        first.fill_with_pattern(4);
        const TestFile file;
        const auto backend = make(4);
        std::array<Completion, 4> out;
        (void)backend->submit_and_reap(
            out, Wait::none);  // registering must not need a backend never used
        const std::array buffers = {first.vector(), second.vector()};
        const auto move = [&](Verb verb, std::byte* memory, std::int32_t buffer) {
            return run_one(*backend, {.verb = verb,
                                      .fd = file.fd(),
                                      .memory = memory,
                                      .length = 64 * kib,
                                      .buffer = buffer});
        };

        const int error = backend->register_buffers(buffers);
        if (error == ENOMEM) SKIP("the memlock limit does not allow registering 2 MiB");
        if (error != 0) {
            CHECK_EQ(error, EOPNOTSUPP);
            CHECK_EQ(move(Verb::read, first.at(0), 0), -EFAULT);
            CHECK_EQ(backend->register_buffers({}), 0);
            return;
        }

        CHECK_EQ(move(Verb::write, first.at(mib), 0), 64 * kib);
        CHECK_EQ(move(Verb::read, second.at(0), 1), 64 * kib);
        CHECK_EQ(std::memcmp(first.at(mib), second.at(0), 64 * kib), 0);
        CHECK_EQ(move(Verb::read, second.at(0), 0), -EFAULT);  // not inside that buffer
        CHECK_EQ(move(Verb::read, second.at(0), 2), -EFAULT);
        CHECK_EQ(move(Verb::read, second.at(0), std::numeric_limits<std::int32_t>::max()), -EFAULT);
    });
}

TEST(registering_again_replaces_and_registering_nothing_forgets) {
    on_every_backend([](const Make& make) {
        const Memory first(64 * kib);
        const Memory second(64 * kib);
        const TestFile file(first.bytes());
        const auto backend = make(4);
        const std::array one = {first.vector()};
        const std::array other = {second.vector()};
        const auto read = [&](const Memory& memory, std::int32_t buffer) {
            return run_one(
                *backend,
                {.fd = file.fd(), .memory = memory.at(0), .length = 4096, .buffer = buffer});
        };
        if (backend->register_buffers(one) != 0) return;  // the test before this one says why

        CHECK_EQ(read(first, 0), 4096);
        CHECK_EQ(backend->register_buffers(other), 0);
        CHECK_EQ(read(first, 0), -EFAULT);
        CHECK_EQ(read(second, 0), 4096);
        CHECK_EQ(backend->register_buffers({}), 0);
        CHECK_EQ(read(second, 0), -EFAULT);
        CHECK_EQ(read(second, -1), 4096);
    });
}

TEST(a_registration_that_the_kernel_refuses_leaves_the_backend_usable) {
    on_every_backend([](const Make& make) {
        const std::size_t nbytes =
            2048 * mib;  // more than the kernel takes in one buffer; never touched
        void* reserved = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(reserved != MAP_FAILED);
        const Memory memory(64 * kib);
        const TestFile file(memory.bytes());
        const auto backend = make(4);
        const std::array too_large = {iovec{reserved, nbytes}};

        const int error = backend->register_buffers(too_large);
        ::munmap(reserved, nbytes);
        const Request request{.fd = file.fd(), .memory = memory.at(0), .length = 4096};
        Request with_index = request;
        with_index.buffer = 0;

        CHECK(error == EFAULT || error == EOPNOTSUPP);
        CHECK_EQ(run_one(*backend, request), 4096);
        CHECK_EQ(run_one(*backend, with_index), -EFAULT);
    });
}

TEST(the_memlock_limit_is_an_errno_and_leaves_the_backend_usable) {
    const Memory memory(4 * mib);
    const TestFile file(memory.bytes());
    in_a_child([&] {
        limit(RLIMIT_MEMLOCK, 64 * kib);
        if (::getuid() == 0) CHECK_EQ(::setuid(65534), 0);
        std::unique_ptr<Backend> backend;
        try {
            backend = deepnvme::make_backend("uring", 4);
        } catch (const std::system_error& error) {
            if (is_refusal(error)) return;  // no ring to register with; the other tests say so
            throw;
        }
        backend->attach();
        const std::array buffers = {memory.vector()};

        CHECK_EQ(backend->register_buffers(buffers), ENOMEM);
        CHECK_EQ(run_one(*backend, {.fd = file.fd(), .memory = memory.at(0), .length = 4096}),
                 4096);
    });
}

// ---- the end
// ------------------------------------------------------------------------------------------

TEST(after_destruction_with_requests_in_flight_the_kernel_touches_no_memory) {
    on_every_backend([](const Make& make) {
        const Memory memory(16 * mib);
        const TestFile file(memory.bytes());
        auto backend = make(16);
        for (const Request& request : cover(Verb::read, file.fd(), memory, mib))
            CHECK(backend->push(request));
        std::array<Completion, 1> out;
        (void)backend->submit_and_reap(out, Wait::none);

        backend.reset();
        memory.fill(0x5A);
        std::this_thread::sleep_for(50ms);

        CHECK(memory.holds_only(0x5A));
    });
}

TEST(what_was_pushed_and_never_submitted_is_not_done) {
    on_every_backend([](const Make& make) {
        const Memory memory(64 * kib);
        memory.fill(0x11);
        const TestFile file(memory.bytes());
        memory.fill(0x22);
        auto backend = make(16);
        for (const Request& request : cover(Verb::write, file.fd(), memory, 4096))
            CHECK(backend->push(request));

        backend.reset();

        CHECK_EQ(::pread(file.plain(), memory.at(0), memory.size(), 0), memory.size());
        CHECK(memory.holds_only(0x11));
    });
}

TEST(a_backend_never_attached_can_go) {
    on_every_backend([](const Make& make) { CHECK_EQ(make.unattached(64)->capacity(), 64); });
}

// ---- making
// ------------------------------------------------------------------------------------------

TEST(an_unknown_name_or_no_room_is_an_invalid_argument) {
    CHECK_THROWS(deepnvme::make_backend("libaio", 4), std::invalid_argument);
    CHECK_THROWS(deepnvme::make_backend("", 4), std::invalid_argument);
    CHECK_THROWS(deepnvme::make_backend("threads", 0), std::invalid_argument);
}

TEST(liburing_that_is_not_loaded_or_lacks_a_function_is_refused_by_name) {
    const auto refusal = [](const std::string& path) -> std::string {
        deepnvme::set_liburing_path(path);
        try {
            (void)deepnvme::make_backend("liburing", 4);
        } catch (const std::system_error& error) {
            CHECK_EQ(error.code().value(), ENOENT);
            return error.what();
        }
        return "";
    };

    const std::string without_path = refusal("");
    const std::string not_loaded = refusal("/nowhere/liburing.so");
    const std::string another_library = refusal("libc.so.6");
    deepnvme::set_liburing_path("");

    CHECK(without_path.find("not imported") != std::string::npos);
    CHECK(not_loaded.find("/nowhere/liburing.so is not loaded") != std::string::npos);
    CHECK(another_library.find("io_uring_queue_init_params") != std::string::npos);
}

TEST(a_kernel_that_forbids_io_uring_is_an_error_with_its_errno) {
    for (const int error : {EPERM, ENOSYS}) {
        in_a_child([&] {
            std::array filter = {
                sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, deepnvme::uring::syscall_setup, 0,
                                     1),
                sock_filter BPF_STMT(BPF_RET | BPF_K,
                                     SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
                sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
            };
            const sock_fprog program{filter.size(), filter.data()};
            CHECK_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            CHECK_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);

            int got = 0;
            try {
                (void)deepnvme::make_backend("uring", 4);
            } catch (const std::system_error& refusal) {
                got = refusal.code().value();
            }
            CHECK_EQ(got, error);
        });
    }
}

// ---- refusals of the ring's own calls, put between a RingBackend and the kernel
// ------------------------------------

namespace {

struct Refusals {
    deepnvme::UringFunctions real = deepnvme::own_ring_functions();
    int submit_error = 0;
    int submits_refused = 0;          // the next so many
    std::uint32_t unknown_flags = 0;  // of setup, as an older kernel would
    std::uint32_t hidden_features = 0;
    std::uint32_t flags_accepted = 0;
};

Refusals* refusals = nullptr;  // the table's functions are plain ones

deepnvme::UringFunctions refusing_functions() {
    deepnvme::UringFunctions functions = deepnvme::own_ring_functions();
    functions.submit_and_wait = [](deepnvme::RingBlock* ring, unsigned wait_nr) {
        if (refusals->submits_refused > 0) {
            --refusals->submits_refused;
            return -refusals->submit_error;
        }
        return refusals->real.submit_and_wait(ring, wait_nr);
    };
    functions.submit_and_wait_timeout = [](deepnvme::RingBlock* ring, deepnvme::uring::Cqe** cqe,
                                           unsigned wait_nr, deepnvme::uring::Timespec* patience,
                                           sigset_t* mask) {
        if (refusals->submits_refused > 0) {
            --refusals->submits_refused;
            return -refusals->submit_error;
        }
        return refusals->real.submit_and_wait_timeout(ring, cqe, wait_nr, patience, mask);
    };
    functions.queue_init_params = [](unsigned entries, deepnvme::RingBlock* ring,
                                     deepnvme::uring::Params* params) {
        if ((params->flags & refusals->unknown_flags) != 0) return -EINVAL;
        refusals->flags_accepted = params->flags;
        const int result = refusals->real.queue_init_params(entries, ring, params);
        params->features &= ~refusals->hidden_features;
        return result;
    };
    return functions;
}

std::unique_ptr<Backend> make_refusing(unsigned depth) {
    try {
        auto backend = deepnvme::make_ring_backend(refusing_functions(), depth);
        backend->attach();
        return backend;
    } catch (const std::system_error& error) {
        if (!is_refusal(error) || refusals->hidden_features != 0) throw;
        SKIP(error.what());
    }
}

}  // namespace

TEST(a_ring_interrupted_or_out_of_room_tries_again_and_loses_nothing) {
    const Memory memory(256 * kib);
    const TestFile file(memory.bytes());
    for (const int error : {EINTR, EAGAIN, EBUSY}) {
        Refusals state{.submit_error = error};
        refusals = &state;
        const auto backend = make_refusing(8);
        for (int round = 0; round < 4; ++round) {
            state.submits_refused = 3;
            for (const auto& [token, result] :
                 run(*backend, cover(Verb::read, file.fd(), memory, 16 * kib))) {
                CHECK_EQ(result, 16 * kib);
            }
            CHECK_EQ(state.submits_refused, 0);
        }
    }
}

TEST(a_ring_out_of_room_does_not_block_a_call_that_does_not_wait) {
    const Memory memory(4096);
    const TestFile file(memory.bytes());
    Refusals state{.submit_error = EAGAIN};
    refusals = &state;
    const auto backend = make_refusing(8);
    std::array<Completion, 4> out;
    CHECK(backend->push({.fd = file.fd(), .memory = memory.at(0), .length = 4096, .token = 5}));

    state.submits_refused = std::numeric_limits<int>::max();
    CHECK_EQ(backend->submit_and_reap(out, Wait::none), 0);
    state.submits_refused = 0;

    CHECK_EQ(backend->submit_and_reap(out, Wait::some), 1);
    CHECK_EQ(out[0].token, 5);
    CHECK_EQ(out[0].result, 4096);
}

TEST(a_ring_out_of_room_gives_a_brief_wait_back) {
    const Memory memory(4096);
    const TestFile file(memory.bytes());
    Refusals state{.submit_error = EAGAIN};
    refusals = &state;
    const auto backend = make_refusing(8);
    std::array<Completion, 4> out;
    CHECK(backend->push({.fd = file.fd(), .memory = memory.at(0), .length = 4096, .token = 5}));

    for (const Wait wait : {Wait::briefly, Wait::several_briefly}) {
        state.submits_refused = 1000;
        CHECK_EQ(backend->submit_and_reap(out, wait), 0);
        CHECK(state.submits_refused > 0);
    }
    state.submits_refused = 0;

    CHECK_EQ(backend->submit_and_reap(out, Wait::some), 1);
    CHECK_EQ(out[0].token, 5);
    CHECK_EQ(out[0].result, 4096);
}

TEST(a_broken_ring_throws_and_is_drained_when_it_goes) {
    const Memory memory(8 * mib);
    const TestFile file(memory.bytes());
    Refusals state{.submit_error = EIO};
    refusals = &state;
    auto backend = make_refusing(16);
    std::array<Completion, 1> out;
    for (const Request& request : cover(Verb::read, file.fd(), memory, mib))
        CHECK(backend->push(request));
    (void)backend->submit_and_reap(out, Wait::none);

    state.submits_refused = std::numeric_limits<int>::max();
    CHECK_THROWS(backend->submit_and_reap(out, Wait::some), std::system_error);
    backend.reset();
    memory.fill(0x5A);
    std::this_thread::sleep_for(50ms);

    CHECK(memory.holds_only(0x5A));
}

TEST(a_flag_that_an_older_kernel_does_not_know_is_left_out) {
    namespace uring = deepnvme::uring;
    const Memory memory(256 * kib);
    const TestFile file(memory.bytes());
    for (const std::uint32_t unknown : {0U, uring::setup_submit_all}) {
        Refusals state{.unknown_flags = unknown};
        refusals = &state;
        const auto backend = make_refusing(8);

        CHECK_EQ(state.flags_accepted & unknown, 0);
        for (const auto& [token, result] :
             run(*backend, cover(Verb::read, file.fd(), memory, 16 * kib))) {
            CHECK_EQ(result, 16 * kib);
        }
        backend->wake();
        std::array<Completion, 4> out;
        CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
    }
}

TEST(a_kernel_too_old_for_buffers_beside_a_standing_read_is_refused) {
    Refusals state{.hidden_features = deepnvme::uring::feature_rsrc_tags};
    refusals = &state;

    int got = 0;
    try {
        (void)make_refusing(8);
    } catch (const std::system_error& error) {
        got = error.code().value();
    }

    CHECK(got == ENOSYS || got == EPERM);
}
