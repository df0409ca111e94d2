// What the backend tests need around a backend: aligned memory, a file, a loop that runs requests
// to their end.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "check.hpp"
#include "deepnvme/backend.hpp"

namespace bench {

using deepnvme::Backend;
using deepnvme::Completion;
using deepnvme::Request;
using deepnvme::Verb;
using deepnvme::Wait;

inline constexpr std::size_t kib = 1024;
inline constexpr std::size_t mib = 1024 * kib;

// Zeroed memory that starts at a multiple of 2 MiB.
class Memory {
  public:
    explicit Memory(std::size_t nbytes) : nbytes_(nbytes), mapped_nbytes_(nbytes + 2 * mib) {
        mapped_ = ::mmap(nullptr, mapped_nbytes_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
        const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
        start_ = static_cast<std::byte*>(mapped_) + ((2 * mib - address % (2 * mib)) % (2 * mib));
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { ::munmap(mapped_, mapped_nbytes_); }

    [[nodiscard]] std::byte* at(std::size_t offset) const { return start_ + offset; }
    [[nodiscard]] std::size_t size() const { return nbytes_; }
    [[nodiscard]] std::span<std::byte> bytes() const { return {start_, nbytes_}; }
    [[nodiscard]] iovec vector() const { return {start_, nbytes_}; }

    void fill(int value) const { std::memset(start_, value, nbytes_); }
    // Bytes that differ between pages and between seeds.
    void fill_with_pattern(std::uint32_t seed) const {
        std::uint32_t state = seed * 2654435761U + 1;
        for (std::byte& one : bytes()) {
            state = state * 1664525U + 1013904223U;
            one = static_cast<std::byte>(state >> 24U);
        }
    }
    [[nodiscard]] bool holds_only(int value) const {
        return std::all_of(start_, start_ + nbytes_,
                           [=](std::byte one) { return one == std::byte(value); });
    }

  private:
    std::size_t nbytes_;
    std::size_t mapped_nbytes_;
    void* mapped_ = nullptr;
    std::byte* start_ = nullptr;
};

// A file of the given content, without a name, open twice: plain, and with O_DIRECT where the file
// system allows.
class TestFile {
  public:
    explicit TestFile(std::span<const std::byte> content = {}) {
        std::string name =
            (std::filesystem::temp_directory_path() / "deepnvme-test-XXXXXX").string();
        plain_ = ::mkostemp(name.data(), O_CLOEXEC);
        if (plain_ < 0) throw std::system_error(errno, std::generic_category(), "mkostemp " + name);
        direct_ = ::open(name.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
        read_only_ = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
        ::unlink(name.c_str());
        std::size_t done = 0;
        while (done < content.size()) {
            const ssize_t count = ::pwrite(plain_, content.data() + done, content.size() - done,
                                           static_cast<off_t>(done));
            if (count <= 0) throw std::system_error(errno, std::generic_category(), "pwrite");
            done += static_cast<std::size_t>(count);
        }
        // What is dirty in the page cache would make direct reads wait for it.
        if (::fdatasync(plain_) != 0)
            throw std::system_error(errno, std::generic_category(), "fdatasync");
    }
    TestFile(const TestFile&) = delete;
    TestFile& operator=(const TestFile&) = delete;
    ~TestFile() {
        ::close(plain_);
        ::close(read_only_);
        if (direct_ >= 0) ::close(direct_);
    }

    [[nodiscard]] int plain() const { return plain_; }
    [[nodiscard]] int read_only() const { return read_only_; }
    [[nodiscard]] bool is_direct() const { return direct_ >= 0; }
    // With O_DIRECT where the file system allows it.
    [[nodiscard]] int fd() const { return is_direct() ? direct_ : plain_; }

  private:
    int plain_ = -1;
    int direct_ = -1;
    int read_only_ = -1;
};

// Pushes all, as there is room, and reaps until all have completed. Returns the results by token; a
// token that is unknown or comes twice is a failure.
inline std::map<std::uint64_t, std::int64_t> run(Backend& backend,
                                                 const std::vector<Request>& requests) {
    std::map<std::uint64_t, std::int64_t> results;
    std::array<Completion, 16> out;
    std::size_t pushed = 0;
    while (results.size() < requests.size()) {
        while (pushed < requests.size() && backend.push(requests[pushed])) ++pushed;
        const std::size_t count = backend.submit_and_reap(out, Wait::some);
        for (const Completion& one : std::span(out).first(count)) {
            const bool known =
                std::any_of(requests.begin(), requests.begin() + static_cast<long>(pushed),
                            [&](const Request& request) { return request.token == one.token; });
            if (!known)
                check::fail(__FILE__, __LINE__, "unknown token " + std::to_string(one.token));
            const bool is_new = results.emplace(one.token, one.result).second;
            if (!is_new)
                check::fail(__FILE__, __LINE__,
                            "token " + std::to_string(one.token) + " came twice");
        }
    }
    return results;
}

inline std::int64_t run_one(Backend& backend, const Request& request) {
    return run(backend, {request}).at(request.token);
}

// Requests that cover `memory` in chunks, at the same offsets of the file; their tokens count from
// 0.
inline std::vector<Request> cover(Verb verb, int fd, const Memory& memory,
                                  std::size_t chunk_nbytes) {
    std::vector<Request> requests;
    for (std::size_t offset = 0; offset < memory.size(); offset += chunk_nbytes) {
        const std::size_t length = std::min(chunk_nbytes, memory.size() - offset);
        requests.push_back({.verb = verb,
                            .fd = fd,
                            .offset = offset,
                            .memory = memory.at(offset),
                            .length = static_cast<std::uint32_t>(length),
                            .token = requests.size()});
    }
    return requests;
}

}  // namespace bench
