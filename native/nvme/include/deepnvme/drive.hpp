// One drive: one backend, a budget of bytes in flight, a thread of its own. Cuts operations into
// chunks, and makes their outcomes of what became of these. One thread at a time leads it, which is
// to submit to its backend and reap from it: a caller that submits or waits, or the drive's own
// thread (docs/decisions/0032).
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

// How aligned memory that is in no registered arena travels: as it is, or through bounce memory.
// The caller says, as the drive could only guess which is faster.
enum class UserMemory : std::uint8_t { zero_copy, bounce };

struct DriveOptions {
    std::uint32_t chunk_bytes = 1U << 20;
    std::uint64_t inflight_bytes = 16U << 20;
    UserMemory user_memory = UserMemory::zero_copy;
};

// Returns the options; throws std::invalid_argument where they make no sense.
[[nodiscard]] DriveOptions checked(DriveOptions options);

// When small operations are handed to the kernel, where no thread leads their drive.
enum class Issue : std::uint8_t {
    now,
    // Together with others, by an event loop or a thread that waits; at the latest by the drive's
    // own thread, when it next looks (see docs/decisions/0032).
    soon,
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
    // Through the page cache: partial pages, files without direct I/O.
    std::uint64_t buffered_bytes = 0;
    std::uint64_t retries = 0;  // of chunks: EINTR, EAGAIN or ECANCELED
    std::uint64_t short_transfers = 0;
    // Chunks that got EINVAL on the direct descriptor, and were done through the buffered one.
    std::uint64_t direct_refused = 0;
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
    // Gets the outcomes since the last call. Called on the leading thread; must not throw.
    using Ended = std::function<void(std::vector<Outcome>)>;

    // Throws std::system_error where there is no thread for it or for its backend.
    Drive(std::unique_ptr<Backend> backend, DriveOptions options, Ended ended);
    ~Drive();  // stops
    Drive(const Drive&) = delete;
    Drive& operator=(const Drive&) = delete;

    // Issue::now: where no other thread leads and all are small, they reach the kernel before this
    // returns, in one call.
    void submit(std::span<Operation> operations, Issue when);
    // Leads until `state` is not 0, a signal handler has run or a Wait::briefly brought nothing.
    // False at once where another thread leads: the caller then counts as a follower, until it
    // calls stop_following.
    [[nodiscard]] bool lead_while_zero(const std::atomic<std::uint32_t>& state);
    void stop_following();
    // Lets the drive's own thread lead where no other does, for an operation whose submitter does
    // not wait here.
    void attend();
    // Lets the event loop of `bell` lead, by lead_for_loops: the drive's own thread holds back as
    // long as that bell lives. False: this drive cannot, and the caller needs attend().
    [[nodiscard]] bool serve_loop(const std::shared_ptr<Doorbell>& bell);
    // Reaps what has completed and issues what is next, where no other thread leads. Never waits.
    // True: there is more to do at once, and the loop comes again after its other callbacks.
    [[nodiscard]] bool lead_for_loops();
    // Ends the operations whose ticket was stopped, as far as the kernel does not have them.
    void end_stopped();
    // Registers `arenas` in place of those before, as soon as nothing is in flight.
    void use_arenas(std::vector<std::shared_ptr<Arena>> arenas);
    // Waits for that, at most `patience`. True: it is done, or the drive is stopped or broken.
    [[nodiscard]] bool arenas_settled(std::chrono::nanoseconds patience);
    // Waits for what was submitted, then ends the thread. The caller submits nothing more. Again:
    // does nothing.
    void stop();
    [[nodiscard]] DriveStats stats() const;

  private:
    // An operation under way.
    struct Active {
        Operation operation;
        Clock::time_point submitted;
        std::uint64_t expected_length = 0;  // of the file when it was submitted
        std::uint64_t sequence = 0;
        std::uint64_t issued = 0;                   // bytes for which chunks were made
        std::size_t piece = 0;                      // number of the next chunk's piece
        std::uint64_t piece_start = 0;              // where that piece begins in the operation
        std::uint32_t outstanding = 0;              // chunks not yet ended
        std::uint64_t certain = ~std::uint64_t{0};  // bytes before the first chunk that fell short
        Ending ending = Ending::succeeded;
        int error = 0;
        std::list<Active>* home = nullptr;  // the list that holds it
        std::list<Active>::iterator place;  // in that list
    };

    // One piece of an operation, in the kernel or waiting to be pushed again.
    struct Chunk {
        Active* active = nullptr;
        std::uint64_t position = 0;   // in the operation
        std::uint64_t offset = 0;     // in the file
        std::byte* memory = nullptr;  // the caller's
        std::uint32_t length = 0;
        std::uint32_t moved = 0;
        std::uint32_t lead = 0;   // direct reads: bytes read before the first that is wanted
        std::uint32_t trail = 0;  // and after the last
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
    bool attended_ = false;     // attend() was called since there was last nothing to do
    bool stops_asked_ = false;  // end_stopped() was called
    std::vector<std::weak_ptr<Doorbell>> loops_;
    bool loop_came_in_vain_ = false;  // another thread led when a loop wanted to
    bool watching_ = false;    // the drive's own thread will look again soon, without being woken
    unsigned followers_ = 0;   // threads that wait while another leads
    std::uint64_t turns_ = 0;  // how often callers have led
    int failure_ = 0;  // errno that ended a caller's turn; the drive's own thread handles it
    std::list<Active> inbox_;
    std::vector<std::shared_ptr<Arena>> wanted_arenas_;
    std::uint64_t arenas_asked_ = 0;    // how often use_arenas was called
    std::uint64_t arenas_applied_ = 0;  // which of these calls is in effect
    std::uint64_t next_sequence_ = 0;
    bool stopping_ = false;
    bool sleeping_ = false;  // the leading thread has to be woken for news
    int broken_ = 0;         // errno that broke the backend; every operation ends with it

    // Only the leading thread touches these; where no thread leads, any under mutex_.
    // Operations that are not wholly issued, in order: urgent ones, and the others by their size.
    std::array<std::list<Active>, 4> lanes_;
    std::size_t lane_ = 1;             // the number of the lane that issues now
    std::int64_t credit_ = 0;          // bytes that it may still issue in this turn
    std::list<Active> parked_;         // syncs behind writes
    std::uint64_t with_deadline_ = 0;  // operations that have one
    bool stops_due_ = false;           // a ticket was stopped
    std::list<Active> issued_;
    std::vector<Chunk> chunks_;
    std::vector<std::uint32_t> free_chunks_;
    std::deque<std::uint32_t> repush_;
    BounceMemory bounce_;
    std::vector<std::shared_ptr<Arena>> arenas_;
    // In the order of the ring's indices; empty where the kernel refused them.
    std::vector<std::shared_ptr<Arena>> registered_;
    std::uint64_t arenas_seen_ = 0;
    bool registration_due_ = false;
    std::uint64_t inflight_ = 0;
    std::uint32_t in_kernel_ = 0;
    std::uint32_t direct_in_kernel_ = 0;
    bool full_ = false;              // issue() ended because there was no room
    bool pushed_ = false;            // the backend has requests that it has not submitted yet
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
