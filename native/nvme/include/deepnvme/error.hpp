// Errors of calls that queued no I/O. How a read or write failed is in its Outcome (operation.hpp).
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace deepnvme {

// A call on a path failed before any I/O was queued: open, stat, preallocate, truncate.
class FileError : public std::system_error {
  public:
    FileError(int error, std::string call, std::string path)
        : std::system_error(error, std::generic_category(), call + " " + path),
          call_(std::move(call)),
          path_(std::move(path)) {}

    [[nodiscard]] const std::string& call() const noexcept { return call_; }
    [[nodiscard]] const std::string& path() const noexcept { return path_; }

  private:
    std::string call_;
    std::string path_;
};

// The kernel or this process refuses a backend: another one may work. Another std::system_error of
// a queue, a lack of descriptors or threads, says nothing of the backend.
class BackendError : public std::system_error {
  public:
    explicit BackendError(const std::system_error& refusal) : std::system_error(refusal) {}
};

// The queue is closed, or the file is of another queue.
class ClosedError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The queue was made by another process: this one is its forked child and shares its ring.
class ForkedError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace deepnvme
