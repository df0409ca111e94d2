// An operation for a drive, its outcome, and the ticket by which its submitter cancels or awaits
// it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "deepnvme/backend.hpp"
#include "deepnvme/doorbell.hpp"
#include "deepnvme/open_file.hpp"

namespace deepnvme {

class Drive;

enum class AtEndOfFile : std::uint8_t { fails, stops };

// The submitter's handle of an operation: to cancel it before it begins, to stop it, and to wait
// for its end.
class Ticket {
  public:
    // The first of these two calls decides. True: the drive may begin the operation, or the
    // operation is cancelled and never begins.
    [[nodiscard]] bool begin() noexcept { return claim(Claim::begun); }
    [[nodiscard]] bool cancel() noexcept { return claim(Claim::cancelled); }
    // True for the first caller, who alone submits the operation to a queue. take_back() lets
    // another thread do so, where the queue did not take it.
    [[nodiscard]] bool hand_in() noexcept { return !handed_in_.exchange(true); }
    void take_back() noexcept { handed_in_ = false; }
    // Whether a queue took the operation: it then ends, exactly once.
    [[nodiscard]] bool taken() const noexcept { return taken_; }
    // Wakes all threads that wait for the end, and those that will: the operation was cancelled,
    // and the drive may notice that late.
    void release_waiters() noexcept;
    // Whether release_waiters came before the end.
    [[nodiscard]] bool released() const noexcept { return state_ == released_early; }
    // Issues no further part of it. What the kernel has runs to its end. The operation then fails
    // with ECANCELED, unless the kernel had all of it.
    void stop() noexcept { stopped_ = true; }
    [[nodiscard]] bool stopped() const noexcept { return stopped_; }

  private:
    friend class Queue;  // what is not atomic below is guarded by its mutex
    enum class Claim : std::uint8_t { free, begun, cancelled };

    [[nodiscard]] bool claim(Claim wanted) noexcept {
        Claim found = Claim::free;
        return claim_.compare_exchange_strong(found, wanted) || found == wanted;
    }

    std::atomic<Claim> claim_{Claim::free};
    std::atomic<bool> handed_in_ = false;
    std::atomic<bool> taken_ = false;
    std::atomic<bool> stopped_ = false;
    std::weak_ptr<Drive> drive_;      // set before it is taken, and read only after that
    bool heard_ = false;              // wait_ended returns it at its end: see Queue::hear
    std::shared_ptr<Doorbell> bell_;  // rings at its end
    static constexpr std::uint32_t ended = 1;
    static constexpr std::uint32_t released_early = 2;
    std::atomic<std::uint32_t> state_ = 0;  // a futex
    std::atomic<unsigned> sleepers_ = 0;    // threads that sleep on it
    unsigned waiting_ = 0;                  // those, and the waiter that leads the drive
};

// One piece of memory and its place in a file.
struct Piece {
    std::byte* memory = nullptr;
    std::uint64_t length = 0;
    std::uint64_t offset = 0;
};

enum class Priority : std::uint8_t { normal, urgent };

using Clock = std::chrono::steady_clock;

// A read, write or sync: of one piece of memory, or of several in their order. Memory and file stay
// valid until it has ended.
struct Operation {
    std::uint64_t id = 0;
    std::shared_ptr<Ticket> ticket;  // empty: cannot be cancelled, nor waited for alone
    Verb verb = Verb::read;
    AtEndOfFile at_end_of_file = AtEndOfFile::fails;
    std::shared_ptr<OpenFile> file;
    std::byte* memory = nullptr;
    std::uint64_t length = 0;  // of all pieces together, where there are some
    std::uint64_t offset = 0;
    std::vector<Piece> pieces = {};  // empty: one piece, of the three fields above
    Priority priority = Priority::normal;
    Clock::time_point deadline = Clock::time_point::max();  // nothing of it is issued after that
};

enum class Ending : std::uint8_t { succeeded, failed, end_of_file, cancelled };

// How an operation ended. `done` is the length of the prefix that was certainly moved.
struct Outcome {
    std::uint64_t id = 0;
    Ending ending = Ending::succeeded;
    std::uint64_t done = 0;
    int error = 0;
    std::shared_ptr<Ticket> ticket = nullptr;
};

}  // namespace deepnvme
