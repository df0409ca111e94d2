// Where operations are submitted: routes them to one Drive per device, bounds how many are pending,
// collects their outcomes. Any thread may call. Closing waits for what is pending. Refuses to work
// in a forked child.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "deepnvme/drive.hpp"
#include "deepnvme/pool.hpp"

namespace deepnvme {

inline constexpr const char* queue_is_closed =
    "the queue is closed. Submit before close(), or make another queue";

struct QueueOptions {
    std::string backend;  // a name that make_backend knows
    // For drives after the first, where the kernel refuses another backend of that name.
    std::vector<std::string> fallbacks;
    DriveOptions drive;
    std::uint32_t max_pending = 0;   // at least 1
    std::uint32_t max_requests = 0;  // of a drive at once; 0: as many as its bytes in flight allow
    std::optional<FaultPlan> faults;
};

class Queue {
  public:
    // Throws what making the backend throws, before any file is open.
    explicit Queue(QueueOptions options);
    ~Queue();  // closes
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Where this is the first file on its drive, the drive gets the options `drive`, or the queue's
    // without them. Throws FileError, ClosedError, ForkedError; std::invalid_argument as `checked`
    // does.
    [[nodiscard]] std::shared_ptr<OpenFile> open(
        const std::string& path, OpenMode mode, DirectIO direct, unsigned permissions,
        const std::optional<DriveOptions>& drive = std::nullopt);
    // Waits at most `patience` for room. False: max_pending operations are still pending, and the
    // operation was not moved from. `bell` is as in hear(), for an operation with a ticket. The
    // event loop of that bell then submits small operations, several in one call, so the caller
    // sees to it that the loop calls serve_loop soon. Throws ClosedError, ForkedError.
    [[nodiscard]] bool submit(Operation&& operation, std::chrono::nanoseconds patience,
                              const std::shared_ptr<Doorbell>& bell = nullptr);
    // Submits operations from the front of the list, in one go, until the queue is full. Returns
    // how many it took. Waits at most `patience` until it can take one.
    [[nodiscard]] std::size_t submit_many(std::vector<Operation> operations,
                                          std::chrono::nanoseconds patience);

    // Registers the pool's arenas with every ring, beside those of other pools, as soon as nothing
    // is in flight there. forget_pool undoes it.
    void use_pool(const std::shared_ptr<Pool>& pool);
    void forget_pool(const std::shared_ptr<Pool>& pool);
    // Waits for that, at most `patience` for each drive. False: a drive is still at work.
    [[nodiscard]] bool pools_settled(std::chrono::nanoseconds patience);

    // Blocks until operations have ended that no thread in wait_for is about to take, and returns
    // them; empty once the queue is closed and everything was returned. Operations without a ticket
    // and those of hear() are returned at once, others after a grace time, in which a thread may
    // come to wait for them.
    [[nodiscard]] std::vector<Outcome> wait_ended();
    // For an operation that the caller will not wait for: at its end `bell` rings, and take_ended
    // has it; without a bell, wait_ended returns it at once. wait_ended also returns what nothing
    // else took.
    void hear(Ticket& ticket, const std::shared_ptr<Doorbell>& bell);
    // Answers the bell of an event loop: reaps what has completed and issues what is next.
    void serve_loop(Doorbell& bell);
    // Returns what has ended and was not taken yet. Where that is something, the caller calls
    // hand_back.
    [[nodiscard]] std::vector<Outcome> take_ended();
    // Issues no further part of that operation: see Ticket::stop.
    void stop(Ticket& ticket);
    // Blocks until that operation has ended. Returns all that has ended and was not taken yet, with
    // or without that operation; nothing when the time is up, a signal handler has run, or
    // Ticket::release_waiters was called. Leads the drive meanwhile, where no other thread does:
    // see docs/decisions/0032. A caller that got outcomes calls hand_back when they are handled:
    // after close, wait_ended waits for that.
    [[nodiscard]] std::optional<std::vector<Outcome>> wait_for(Ticket& ticket,
                                                               std::chrono::nanoseconds timeout);
    // What wait_for or take_ended returned is handled, but for these: wait_ended returns them.
    void hand_back(std::vector<Outcome> outcomes);

    // Refuses new operations and waits at most `patience` for the pending ones. True: they have
    // ended, and rings and pools are let go of. False: the caller calls again.
    [[nodiscard]] bool close(std::chrono::nanoseconds patience);

    [[nodiscard]] std::map<dev_t, DriveStats> stats() const;
    [[nodiscard]] std::uint64_t pending() const;
    // The name of the backend of that file's drive.
    [[nodiscard]] std::string backend_of(const OpenFile& file) const;
    // Whether this process is a forked child of the one that made the queue. It must neither use
    // nor destroy it.
    [[nodiscard]] bool belongs_to_a_parent() const noexcept;

  private:
    void need_drive_for(const OpenFile& file, const DriveOptions& options);
    [[nodiscard]] std::unique_ptr<Backend> backend_for_another(const DriveOptions& drive) const;
    void refuse_if_forked() const;
    void refuse_if_unusable() const;
    [[nodiscard]] std::size_t take_room(std::size_t wanted, std::chrono::nanoseconds patience);
    void give_room(std::size_t unused);
    [[nodiscard]] std::shared_ptr<Drive> drive_of(const Operation& operation) const;
    [[nodiscard]] std::vector<std::shared_ptr<Arena>> arenas() const;
    void tell_drives_of_arenas();
    void ended(std::vector<Outcome> outcomes);
    [[nodiscard]] std::vector<Outcome> taken();
    void note_end(Ticket& ticket, std::vector<std::shared_ptr<Doorbell>>& bells);
    void wake_listener();
    void wait_for_end(Ticket& ticket, std::chrono::nanoseconds timeout) const;

    const QueueOptions options_;
    const pid_t owner_;
    const std::uint64_t forks_;
    // Made by the constructor, as proof that it works; used by the first drive that it fits.
    std::unique_ptr<Backend> first_backend_;

    mutable std::mutex drives_mutex_;  // taken before mutex_, never after
    // While a thread has the lock, it waits for a drive only to stop it, when that is idle.
    std::map<dev_t, std::shared_ptr<Drive>> drives_;
    std::map<dev_t, DriveStats> final_stats_;
    std::vector<std::shared_ptr<Pool>> pools_;
    std::map<std::string, int> memory_files_;

    mutable std::mutex mutex_;
    std::condition_variable room_;
    std::condition_variable news_;
    std::vector<Outcome> ended_;
    std::uint64_t takes_ = 0;           // how often ended_ was taken
    std::uint64_t urgent_ = 0;          // how many in ended_ wait_ended is to return at once
    bool rests_ = false;                // wait_ended sleeps until it is woken
    std::vector<Outcome> handed_back_;  // for wait_ended alone
    std::uint64_t coming_ = 0;          // waiters that were woken and have not taken ended_ yet
    std::uint64_t settling_ = 0;        // callers that took ended_ and have not called hand_back
    std::uint64_t pending_ = 0;
    bool closed_ = false;
    bool drained_ = false;
};

}  // namespace deepnvme
