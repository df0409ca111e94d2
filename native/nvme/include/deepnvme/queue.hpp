// Where work is submitted: routes operations to one Drive per device, bounds how many are pending,
// collects the ended. Any thread may call; closing drains. Refuses to work in a forked child.
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
    std::string backend;  // one that make_backend knows
    std::vector<std::string>
        fallbacks;  // for a drive after the first, where the kernel refuses another of it
    DriveOptions drive;
    std::uint32_t max_pending = 1024;
    std::uint32_t max_requests = 0;  // that a drive works on at once; 0: as many as bytes allow
    std::optional<FaultPlan> faults;
};

class Queue {
  public:
    // Throws what making the backend throws, before any file is open.
    explicit Queue(QueueOptions options);
    ~Queue();  // closes
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // `drive` are the options of the file's drive where this is the first file on it; without them
    // it gets the queue's. Throws FileError, ClosedError, ForkedError; std::invalid_argument as
    // `checked` does.
    [[nodiscard]] std::shared_ptr<OpenFile> open(
        const std::string& path, OpenMode mode, DirectIO direct, unsigned permissions,
        const std::optional<DriveOptions>& drive = std::nullopt);
    // Waits at most `patience` for room. False: max_pending operations are still pending. `bell` is
    // as in hear(), for an operation with a ticket; its event loop then issues small operations as
    // well, which it does together: the caller lets it call serve_loop soon. Throws ClosedError,
    // ForkedError.
    [[nodiscard]] bool submit(Operation operation, std::chrono::nanoseconds patience,
                              const std::shared_ptr<Doorbell>& bell = nullptr);
    // Submits as many of them as there is room for, in their order, together; returns how many.
    // Waits at most `patience` for room for the first.
    [[nodiscard]] std::size_t submit_many(std::vector<Operation> operations,
                                          std::chrono::nanoseconds patience);

    // Lets the pool's arenas be registered with every ring, beside those of other pools, as soon as
    // nothing is in flight there; lets them be forgotten again.
    void use_pool(const std::shared_ptr<Pool>& pool);
    void forget_pool(const std::shared_ptr<Pool>& pool);
    // Waits for that, at most `patience` for each drive. False: a drive is still at work.
    [[nodiscard]] bool pools_settled(std::chrono::nanoseconds patience);

    // Blocks until operations have ended that no waiter of wait_for is about to take, and returns
    // them; empty once the queue is closed and everything was returned. What has a ticket that was
    // not heard may come a little later: a waiting thread may be about to take it.
    [[nodiscard]] std::vector<Outcome> wait_ended();
    // Lets wait_ended return that operation at its end, or `bell` ring then: the caller will not
    // wait for it. What has rung is taken with take_ended; what is not taken, wait_ended returns.
    void hear(Ticket& ticket, const std::shared_ptr<Doorbell>& bell);
    // Answers the bell of an event loop: takes what has completed and issues what is next.
    void serve_loop(Doorbell& bell);
    // What has ended and was not taken yet. Where that is something, the caller calls hand_back.
    [[nodiscard]] std::vector<Outcome> take_ended();
    // Lets no further part of that operation be issued: see Ticket::stop.
    void stop(Ticket& ticket);
    // Blocks until that operation has ended and returns whatever has ended and was not taken yet,
    // itself among it or not; nothing when the time is up, a signal handler has run, or
    // Ticket::release_waiters was called. Leads the drive meanwhile, where no other thread does:
    // see docs/decisions/0032. A caller that takes outcomes here calls hand_back when they are
    // dealt with: wait_ended does not end before.
    [[nodiscard]] std::optional<std::vector<Outcome>> wait_for(Ticket& ticket,
                                                               std::chrono::nanoseconds timeout);
    // What wait_for returned is dealt with, but for these, which are for wait_ended() after all.
    void hand_back(std::vector<Outcome> outcomes);

    // Refuses new work and waits at most `patience` for the end of what was submitted. True: it has
    // ended, and rings and pools are let go of. False: to be called again, as often as it takes.
    [[nodiscard]] bool close(std::chrono::nanoseconds patience);

    [[nodiscard]] std::map<dev_t, DriveStats> stats() const;
    [[nodiscard]] std::uint64_t pending() const;
    // The name of what the drive with that file runs on.
    [[nodiscard]] std::string backend_of(const OpenFile& file) const;
    // This process is a forked child of the one that made it: it must neither be used nor destroyed
    // here.
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
    std::unique_ptr<Backend>
        first_backend_;  // made by the constructor as proof that it works, used by the first drive

    mutable std::mutex drives_mutex_;  // taken before mutex_, never after
    std::map<dev_t, std::shared_ptr<Drive>>
        drives_;  // stopped under the lock, when idle; else never waited for
    std::map<dev_t, DriveStats> final_stats_;
    std::vector<std::shared_ptr<Pool>> pools_;
    std::map<std::string, int> memory_files_;

    mutable std::mutex mutex_;
    std::condition_variable room_;
    std::condition_variable news_;
    std::vector<Outcome> ended_;
    std::uint64_t takes_ = 0;           // how often they were taken
    std::uint64_t urgent_ = 0;          // of these, what wait_ended is to return at once
    bool rests_ = false;                // wait_ended sleeps until it is woken
    std::vector<Outcome> handed_back_;  // only for wait_ended
    std::uint64_t coming_ = 0;          // waiters that were woken and have not yet taken
    std::uint64_t settling_ = 0;        // waiters that took and have not yet handed back
    std::uint64_t pending_ = 0;
    bool closed_ = false;
    bool drained_ = false;
};

}  // namespace deepnvme
