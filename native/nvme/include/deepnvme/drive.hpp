// One drive: one backend, a budget of bytes in flight, a thread of its own. Turns operations into
// chunks and chunks into an outcome. One thread at a time leads it: a caller that submits or waits,
// or the drive's own thread (docs/decisions/0032).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "deepnvme/arena.hpp"
#include "deepnvme/backend.hpp"
#include "deepnvme/bounce_memory.hpp"
#include "deepnvme/doorbell.hpp"
#include "deepnvme/latencies.hpp"
#include "deepnvme/operation.hpp"

namespace deepnvme {

// What to do with aligned memory that is in no registered arena: the drive's own decision would be
// a guess, so the caller says.
enum class UserMemory : std::uint8_t { zero_copy, bounce };

struct DriveOptions {
    std::uint32_t chunk_bytes = 1U << 20;
    std::uint64_t inflight_bytes = 16U << 20;
    UserMemory user_memory = UserMemory::zero_copy;
};

// Returns them as they are; throws std::invalid_argument where they make no sense together.
[[nodiscard]] DriveOptions checked(DriveOptions options);

// When small operations are handed to the kernel, where no thread leads their drive.
enum class Issue : std::uint8_t {
    now,
    soon,  // with others, by an event loop or a thread that waits; else by the drive's own thread,
           // when it looks for what was left (see docs/decisions/0032)
};

struct DriveStats {
    std::string backend;
    std::uint64_t operations = 0;
    std::uint64_t failed = 0;
    std::uint64_t chunks = 0;
    std::uint64_t submissions = 0;  // times that requests were handed to the kernel
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    std::uint64_t bounced_bytes = 0;  // copied through the drive's own memory
    std::uint64_t buffered_bytes =
        0;                      // through the page cache: partial pages, files without direct I/O
    std::uint64_t retries = 0;  // EINTR and EAGAIN of a chunk
    std::uint64_t short_transfers = 0;
    std::uint64_t direct_refused =
        0;  // EINVAL on the direct descriptor, done through the buffered one
    std::uint64_t inflight_bytes = 0;
    std::uint64_t peak_inflight_bytes = 0;
    std::uint64_t registered_bytes = 0;
    std::uint64_t own_bytes = 0;  // memory that the drive took to copy through
    int registration_error = 0;   // errno of the last registration; ENOMEM: the memlock limit
    double p50_us = 0.0;          // from submission to end of an operation
    double p99_us = 0.0;
};

class Drive {
  public:
    // Takes what has ended since the last call; called on the leading thread, must not throw.
    using Ended = std::function<void(std::vector<Outcome>)>;

    // Throws what Backend::attach throws.
    Drive(std::unique_ptr<Backend> backend, DriveOptions options, Ended ended);
    ~Drive();  // stops
    Drive(const Drive&) = delete;
    Drive& operator=(const Drive&) = delete;

    // Issue::now: where no other thread leads and all are small, they reach the kernel before it
    // returns, in one call.
    void submit(std::span<Operation> operations, Issue when);
    // Leads until `state` is not 0, a signal handler has run or Wait::briefly is over. False at
    // once where another thread leads: the caller then counts as one that waits, until
    // stop_following.
    [[nodiscard]] bool lead_while_zero(const std::atomic<std::uint32_t>& state);
    void stop_following();
    // Lets the drive's own thread lead where no other does: the end of something is heard
    // elsewhere.
    void attend();
    // Lets the loop behind `bell` lead by lead_for: as long as it lives, the drive's own thread
    // holds back. False: this drive cannot, and attend() is needed.
    [[nodiscard]] bool serve_loop(const std::shared_ptr<Doorbell>& bell);
    // Takes what has completed and issues what is next, where no other thread leads. Never waits.
    void lead_for_loops();
    // Lets operations whose ticket is stopped end.
    void end_stopped();
    // Lets `arenas` be registered in place of those before, as soon as nothing is in flight.
    void use_arenas(std::vector<std::shared_ptr<Arena>> arenas);
    // Waits at most `patience` for that. True: those asked for last are in use, or never will be.
    [[nodiscard]] bool arenas_settled(std::chrono::nanoseconds patience);
    // Drains what was submitted, then ends the thread. Nothing may be submitted after. Again: does
    // nothing.
    void stop();
    [[nodiscard]] DriveStats stats() const;

  private:
    // An operation under way.
    struct Active {
        Operation operation;
        Clock::time_point submitted;
        std::uint64_t expected_length = 0;  // of the file, then
        std::uint64_t sequence = 0;
        std::uint64_t issued = 0;                   // bytes for which chunks were made
        std::size_t piece = 0;                      // the one that the next chunk is of
        std::uint64_t piece_start = 0;              // where that begins in the operation
        std::uint32_t outstanding = 0;              // chunks not yet ended
        std::uint64_t certain = ~std::uint64_t{0};  // bytes before the first chunk that fell short
        Ending ending = Ending::succeeded;
        int error = 0;
        std::list<Active>* home = nullptr;  // the list that holds it, and where
        std::list<Active>::iterator place;
    };

    // One piece of an operation, in the kernel or waiting to be pushed again.
    struct Chunk {
        Active* active = nullptr;
        std::uint64_t position = 0;   // in the operation
        std::uint64_t offset = 0;     // in the file
        std::byte* memory = nullptr;  // the caller's
        std::uint32_t length = 0;
        std::uint32_t moved = 0;
        std::uint32_t lead = 0;   // direct reads: bytes asked for before the first that is wanted
        std::uint32_t trail = 0;  // and behind the last
        BounceMemory::Place bounce = {};  // empty: the caller's memory is used as it is
        bool direct = false;
        bool in_kernel = false;
        std::uint8_t attempts = 0;
    };

    // The bytes from `start` to `end` of a file, in whole pages.
    struct PageRange {
        std::uint64_t start;
        std::uint64_t end;
        [[nodiscard]] bool overlaps(const PageRange& other) const noexcept {
            return start < other.end && other.start < end;
        }
    };

    void run(std::promise<void>& attached);
    void serve();
    [[nodiscard]] bool wait_for_turn(std::unique_lock<std::mutex>& lock);
    [[nodiscard]] bool may_lead() const;
    [[nodiscard]] bool step(Wait longest);
    void call_leader();
    void end_turn(bool leaves_others);
    [[nodiscard]] bool is_for_loops();
    void call_loops();
    void break_off(const std::exception_ptr& reason);
    [[nodiscard]] bool is_inline(const Operation& operation) const;
    [[nodiscard]] bool has_waiting() const;
    [[nodiscard]] bool has_work() const;
    void take_inbox();
    [[nodiscard]] Wait how_to_wait(Wait longest);
    void register_arenas();

    void issue();
    [[nodiscard]] std::list<Active>* lane_in_turn();
    [[nodiscard]] std::list<Active>& lane_of(const Operation& operation);
    void end_what_is_late();
    void end_if_late(Active& active, Clock::time_point now);
    [[nodiscard]] bool begin(Active& active);
    [[nodiscard]] bool has_room(const Chunk& chunk) const;
    void issue_chunk(Chunk chunk);
    [[nodiscard]] Chunk next_chunk(Active& active) const;
    [[nodiscard]] static Piece rest_of_piece(const Active& active);
    void widen_to_pages(Chunk& chunk, std::uint64_t rest) const;
    [[nodiscard]] bool needs_bounce(const Chunk& chunk) const;
    [[nodiscard]] static bool is_widened(const Chunk& chunk);
    [[nodiscard]] bool take_bounce_memory(Chunk& chunk);
    [[nodiscard]] static std::size_t bytes_to_bounce(const Chunk& chunk);
    [[nodiscard]] static std::uint32_t lead_of(const Chunk& chunk);
    void push(std::uint32_t index);
    [[nodiscard]] bool shares_page_in_kernel(const Chunk& chunk) const;
    [[nodiscard]] static PageRange pages_of(const Chunk& chunk);
    [[nodiscard]] static PageRange page_cleared_by(const Chunk& chunk);
    [[nodiscard]] bool earlier_write_pending(const Active& sync) const;
    void unpark_syncs();

    void complete(const Completion& completion);
    void moved(std::uint32_t index, std::uint32_t nbytes);
    void again(std::uint32_t index);
    void fell_short(std::uint32_t index, Ending ending, int error);
    void end_chunk(std::uint32_t index);
    void end_if_finished(Active& active);
    void end(Active& active, Outcome outcome);
    void report();
    void move_to(std::list<Active>& home, Active& active);
    void fail_everything(int error);

    [[nodiscard]] std::int32_t registered_index(const std::byte* memory, std::size_t nbytes) const;

    std::unique_ptr<Backend> backend_;
    const std::string backend_name_;
    const bool any_thread_;
    const DriveOptions options_;
    const Ended ended_;

    // Shared with callers, under mutex_.
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable turn_;  // for the drive's own thread
    bool led_ = false;              // a thread leads: it alone touches what is below
    bool wants_own_thread_ = false;
    bool attended_ = false;     // see attend(), until nothing is left to do
    bool stops_asked_ = false;  // see end_stopped()
    std::vector<std::weak_ptr<Doorbell>> loops_;
    bool loop_came_in_vain_ = false;
    bool watching_ = false;    // the drive's own thread will look again soon, by itself
    unsigned followers_ = 0;   // threads that wait while another leads
    std::uint64_t turns_ = 0;  // of callers
    int failure_ = 0;  // errno that ended a caller's turn; the drive's own thread deals with it
    std::list<Active> inbox_;
    std::vector<std::shared_ptr<Arena>> wanted_arenas_;
    std::uint64_t arenas_asked_ =
        0;  // how often use_arenas was called, and which call is in effect
    std::uint64_t arenas_applied_ = 0;
    std::uint64_t next_sequence_ = 0;
    bool stopping_ = false;
    bool sleeping_ = false;
    int broken_ = 0;  // errno that broke the backend; every operation ends with it

    // The leading thread's only; under mutex_ where none leads.
    // Not wholly issued, each lane in order: urgent ones, and the others by their size.
    std::array<std::list<Active>, 4> lanes_;
    std::size_t lane_ = 1;             // the one that may issue
    std::int64_t credit_ = 0;          // so many bytes more, until it is the turn of the next
    std::list<Active> parked_;         // syncs behind writes
    std::uint64_t with_deadline_ = 0;  // operations that have one
    bool stops_due_ = false;           // a ticket was stopped
    std::list<Active> issued_;
    std::vector<Chunk> chunks_;
    std::vector<std::uint32_t> free_chunks_;
    std::deque<std::uint32_t> repush_;
    BounceMemory bounce_;
    std::vector<std::shared_ptr<Arena>> arenas_;
    std::vector<std::shared_ptr<Arena>>
        registered_;  // index in the ring; empty when the kernel refused
    std::uint64_t arenas_seen_ = 0;
    bool registration_due_ = false;
    std::uint64_t inflight_ = 0;
    std::uint32_t in_kernel_ = 0;
    std::uint32_t direct_in_kernel_ = 0;
    bool full_ = false;              // issue() ended for want of room
    bool pushed_ = false;            // requests that the backend did not hand on yet
    std::vector<Outcome> outcomes_;  // not yet reported

    struct Counters {
        std::atomic<std::uint64_t> operations{0}, failed{0}, chunks{0}, submissions{0},
            read_bytes{0}, written_bytes{0}, bounced_bytes{0}, buffered_bytes{0}, retries{0},
            short_transfers{0}, direct_refused{0}, inflight_bytes{0}, peak_inflight_bytes{0},
            registered_bytes{0}, own_bytes{0};
        std::atomic<int> registration_error{0};
    };
    Counters counters_;
    Latencies latencies_;

    std::thread thread_;
};

}  // namespace deepnvme
