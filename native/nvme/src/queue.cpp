#include "deepnvme/queue.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <iterator>
#include <span>
#include <utility>

#include "deepnvme/error.hpp"

namespace deepnvme {

namespace {

// Enough requests for the bytes in flight in pieces of 64 KiB. It bounds smaller operations, before
// the bytes in flight do.
unsigned depth_for(const QueueOptions& options, const DriveOptions& drive) {
    if (options.max_requests > 0) return options.max_requests;
    return static_cast<unsigned>(std::clamp<std::uint64_t>(drive.inflight_bytes / 65536, 32, 1024));
}

std::unique_ptr<Backend> backend_for(const QueueOptions& options, const std::string& name,
                                     const DriveOptions& drive) {
    std::unique_ptr<Backend> backend = make_backend(name, depth_for(options, drive));
    return options.faults ? make_fault_backend(std::move(backend), *options.faults)
                          : std::move(backend);
}

// How many forks there are between the program's first process and this one. Cheaper than getpid(),
// for which each call of a queue would enter the kernel.
std::atomic<std::uint64_t> forks_of_process = 0;
std::uint64_t forks() {
    static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++forks_of_process; });
    (void)registered;
    return forks_of_process;
}

// How long an outcome may wait for a thread in wait_for, before wait_ended takes it.
constexpr std::chrono::milliseconds grace{5};
// How often wait_ended looks whether something has ended, while operations are pending.
constexpr std::chrono::milliseconds look_every{100};
constexpr unsigned looks_before_rest = 20;

// Sleeps until the word is not 0, at most `timeout`. Unlike a condition variable's, the sleep ends
// when a signal handler has run, and costs a thread that wakes to cold caches little.
void sleep_while_zero(std::atomic<std::uint32_t>& word, std::chrono::nanoseconds timeout) {
    if (timeout <= std::chrono::nanoseconds::zero()) return;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    const timespec rest{static_cast<std::time_t>(seconds.count()),
                        static_cast<long>((timeout - seconds).count())};
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &rest, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) noexcept {
    ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void Ticket::release_waiters() noexcept {
    std::uint32_t under_way = 0;
    state_.compare_exchange_strong(under_way, released_early);
    if (sleepers_ > 0) wake_all(state_);
}

Queue::Queue(QueueOptions options)
    : options_(std::move(options)),
      owner_(::getpid()),
      forks_(forks()),
      first_backend_(backend_for(options_, options_.backend, options_.drive)) {
    (void)checked(options_.drive);
    if (options_.max_pending == 0) throw std::invalid_argument("max_pending must be at least 1");
}

Queue::~Queue() {
    while (!close(std::chrono::seconds(1))) continue;
    for (const auto& [name, descriptor] : memory_files_) ::close(descriptor);
}

std::shared_ptr<OpenFile> Queue::open(const std::string& path, OpenMode mode, DirectIO direct,
                                      unsigned permissions,
                                      const std::optional<DriveOptions>& drive) {
    refuse_if_unusable();
    const DriveOptions options = checked(drive.value_or(options_.drive));
    if (options_.backend != "memory") {
        auto file = std::make_shared<OpenFile>(path, mode, direct, permissions);
        need_drive_for(*file, options);
        return file;
    }
    int descriptor = -1;
    {
        const std::lock_guard lock(drives_mutex_);
        const auto known = memory_files_.find(path);
        if (known == memory_files_.end()) {
            if (mode == OpenMode::read || mode == OpenMode::update)
                throw FileError(ENOENT, "open", path);
            descriptor = ::memfd_create("deepnvme", MFD_CLOEXEC);
            if (descriptor < 0) throw FileError(errno, "open in memory", path);
            memory_files_.emplace(path, descriptor);
        } else {
            if (mode == OpenMode::exclusive) throw FileError(EEXIST, "open", path);
            descriptor = known->second;
        }
    }
    auto file = std::make_shared<OpenFile>(path, descriptor, mode);
    need_drive_for(*file, options);
    return file;
}

bool Queue::submit(Operation&& operation, std::chrono::nanoseconds patience,
                   const std::shared_ptr<Doorbell>& bell) {
    refuse_if_forked();
    if (take_room(1, patience) == 0) return false;
    try {
        const std::shared_ptr<Drive> drive = drive_of(operation);
        const std::shared_ptr<Ticket> ticket = operation.ticket;
        if (ticket) {
            ticket->drive_ = drive;
            ticket->bell_ = bell;
        }
        const bool has_loop = bell && drive->serve_loop(bell);
        drive->submit(std::span(&operation, 1), has_loop ? Issue::soon : Issue::now);
        if (bell && !has_loop) drive->attend();
        if (ticket) {
            ticket->taken_ = true;
            // stop() told no drive before that.
            if (ticket->stopped()) drive->end_stopped();
        }
    } catch (...) {
        give_room(1);
        throw;
    }
    return true;
}

std::size_t Queue::submit_many(std::vector<Operation> operations,
                               std::chrono::nanoseconds patience) {
    refuse_if_forked();
    const std::size_t count = take_room(operations.size(), patience);
    std::map<std::shared_ptr<Drive>, std::vector<Operation>> by_drive;
    std::vector<std::shared_ptr<Ticket>> tickets;
    try {
        for (Operation& operation : std::span(operations).first(count)) {
            const std::shared_ptr<Drive> drive = drive_of(operation);
            if (operation.ticket) {
                operation.ticket->drive_ = drive;
                tickets.push_back(operation.ticket);
            }
            by_drive[drive].push_back(std::move(operation));
        }
    } catch (...) {
        give_room(count);
        throw;
    }
    for (auto& [drive, its_operations] : by_drive) drive->submit(its_operations, Issue::now);
    for (const std::shared_ptr<Ticket>& ticket : tickets) {
        ticket->taken_ = true;
        if (!ticket->stopped()) continue;
        // stop() told no drive before that.
        if (const std::shared_ptr<Drive> drive = ticket->drive_.lock()) drive->end_stopped();
    }
    return count;
}

// Counts up to `wanted` operations as pending, as far as there is room; returns how many. Throws
// ClosedError.
std::size_t Queue::take_room(std::size_t wanted, std::chrono::nanoseconds patience) {
    if (wanted == 0) return 0;
    std::unique_lock lock(mutex_);
    const auto is_over = [this] { return pending_ < options_.max_pending || closed_; };
    // Asked here first: wait_for reads the clock in any case.
    if (!is_over() && !room_.wait_for(lock, patience, is_over)) return 0;
    if (closed_) throw ClosedError(queue_is_closed);
    const auto count = std::min<std::uint64_t>(wanted, options_.max_pending - pending_);
    pending_ += count;
    if (std::exchange(rests_, false)) news_.notify_one();
    return count;
}

void Queue::give_room(std::size_t unused) {
    const std::lock_guard lock(mutex_);
    pending_ -= unused;
    room_.notify_all();
}

std::shared_ptr<Drive> Queue::drive_of(const Operation& operation) const {
    const std::lock_guard lock(drives_mutex_);
    const auto known = drives_.find(operation.file->device());
    if (known == drives_.end()) throw ClosedError("the file is of another queue");
    return known->second;
}

std::unique_ptr<Backend> Queue::backend_for_another(const DriveOptions& drive) const {
    try {
        return backend_for(options_, options_.backend, drive);
    } catch (const BackendError&) {
        for (const std::string& name : options_.fallbacks) {
            try {
                return backend_for(options_, name, drive);
            } catch (const BackendError&) {
                continue;
            }
        }
        throw;
    }
}

std::string Queue::backend_of(const OpenFile& file) const {
    if (belongs_to_a_parent()) return options_.backend;
    const std::lock_guard lock(drives_mutex_);
    const auto drive = drives_.find(file.device());
    return drive == drives_.end() ? options_.backend : drive->second->stats().backend;
}

void Queue::need_drive_for(const OpenFile& file, const DriveOptions& options) {
    std::shared_ptr<Drive> drive;
    {
        const std::lock_guard lock(drives_mutex_);
        if (drives_.contains(file.device())) return;
        refuse_if_unusable();  // closed since the file was opened: no call would stop a new drive
        const bool ring = options_.backend == "uring" || options_.backend == "liburing";
        const bool first_fits =
            first_backend_ && first_backend_->capacity() >= depth_for(options_, options);
        auto backend = ring && file.spoiled_by_rings() ? backend_for(options_, "threads", options)
                       : first_fits                    ? std::move(first_backend_)
                                                       : backend_for_another(options);
        drive = std::make_shared<Drive>(
            std::move(backend), options,
            [this](std::vector<Outcome> outcomes) { ended(std::move(outcomes)); });
        if (!pools_.empty()) drive->use_arenas(arenas());
        drives_.emplace(file.device(), drive);
    }
    (void)drive->arenas_settled(std::chrono::seconds(1));  // nothing is in flight there: at once
}

void Queue::use_pool(const std::shared_ptr<Pool>& pool) {
    refuse_if_forked();
    const std::lock_guard lock(drives_mutex_);
    refuse_if_unusable();
    pools_.push_back(pool);
    tell_drives_of_arenas();
}

void Queue::forget_pool(const std::shared_ptr<Pool>& pool) {
    refuse_if_forked();
    const std::lock_guard lock(drives_mutex_);
    std::erase(pools_, pool);
    tell_drives_of_arenas();
}

bool Queue::pools_settled(std::chrono::nanoseconds patience) {
    if (belongs_to_a_parent()) return true;
    std::vector<std::shared_ptr<Drive>> drives;
    {
        const std::lock_guard lock(drives_mutex_);
        for (const auto& [device, drive] : drives_) drives.push_back(drive);
    }
    return std::all_of(drives.begin(), drives.end(),
                       [patience](const auto& drive) { return drive->arenas_settled(patience); });
}

std::vector<std::shared_ptr<Arena>> Queue::arenas() const {
    std::vector<std::shared_ptr<Arena>> all;
    for (const auto& pool : pools_)
        all.insert(all.end(), pool->arenas().begin(), pool->arenas().end());
    return all;
}

void Queue::tell_drives_of_arenas() {
    for (const auto& [device, drive] : drives_) drive->use_arenas(arenas());
}

std::vector<Outcome> Queue::wait_ended() {
    std::unique_lock lock(mutex_);
    unsigned looks_in_vain = 0;
    for (;;) {
        // What a woken waiter is about to take is not waited for here.
        const bool all_taken = drained_ && settling_ == 0 && coming_ == 0;
        if (!handed_back_.empty() || all_taken || (coming_ == 0 && urgent_ > 0)) break;
        if (pending_ == 0 && ended_.empty() && looks_in_vain == looks_before_rest) {
            rests_ = true;
            news_.wait(lock, [this] { return !rests_; });
            looks_in_vain = 0;
            continue;
        }
        const bool has_some = !ended_.empty();
        const std::uint64_t seen = takes_;
        const bool in_vain =
            news_.wait_for(lock, has_some ? grace : look_every) == std::cv_status::timeout;
        if (in_vain && has_some && seen == takes_ && coming_ == 0) break;
        looks_in_vain = pending_ == 0 && ended_.empty() ? looks_in_vain + 1 : 0;
    }
    std::vector<Outcome> all = std::exchange(handed_back_, {});  // these ended first
    std::vector<Outcome> others = taken();
    std::move(others.begin(), others.end(), std::back_inserter(all));
    return all;
}

std::vector<Outcome> Queue::taken() {
    urgent_ = 0;
    ++takes_;
    return std::exchange(ended_, {});
}

std::vector<Outcome> Queue::take_ended() {
    if (belongs_to_a_parent()) return {};
    const std::lock_guard lock(mutex_);
    if (!ended_.empty()) ++settling_;
    return taken();
}

void Queue::hear(Ticket& ticket, const std::shared_ptr<Doorbell>& bell) {
    if (belongs_to_a_parent()) return;
    {
        const std::lock_guard lock(mutex_);
        if (bell) {
            if (ticket.state_ == Ticket::ended) bell->ring();
            ticket.bell_ = bell;
        } else {
            ticket.heard_ = true;
            if (ticket.state_ == Ticket::ended && !ended_.empty()) {
                ++urgent_;
                wake_listener();
            }
        }
    }
    const std::shared_ptr<Drive> drive = ticket.taken() ? ticket.drive_.lock() : nullptr;
    if (drive && !(bell && drive->serve_loop(bell))) drive->attend();
}

void Queue::serve_loop(Doorbell& bell) {
    if (belongs_to_a_parent()) return;
    bell.answer();
    std::vector<std::shared_ptr<Drive>> drives;
    {
        const std::lock_guard lock(drives_mutex_);
        for (const auto& [device, drive] : drives_) drives.push_back(drive);
    }
    bool has_more = false;
    for (const std::shared_ptr<Drive>& drive : drives) has_more |= drive->lead_for_loops();
    // Before the caller takes what has ended: what ends later rings.
    bell.listen();
    if (has_more) bell.ring();
}

void Queue::stop(Ticket& ticket) {
    if (belongs_to_a_parent()) return;
    ticket.stop();
    if (!ticket.taken()) return;
    if (const std::shared_ptr<Drive> drive = ticket.drive_.lock()) drive->end_stopped();
}

std::optional<std::vector<Outcome>> Queue::wait_for(Ticket& ticket,
                                                    std::chrono::nanoseconds timeout) {
    if (belongs_to_a_parent()) return std::vector<Outcome>{};
    std::unique_lock lock(mutex_);
    if (ticket.state_ != Ticket::ended) {
        ++ticket.waiting_;
        lock.unlock();
        wait_for_end(ticket, timeout);
        lock.lock();
        if (ticket.state_ != Ticket::ended) {
            --ticket.waiting_;
            return std::nullopt;
        }
        --coming_;
        if (coming_ == 0 && (urgent_ > 0 || drained_)) wake_listener();
    }
    if (!ended_.empty()) ++settling_;
    return taken();
}

void Queue::wait_for_end(Ticket& ticket, std::chrono::nanoseconds timeout) const {
    const std::shared_ptr<Drive> drive = ticket.taken() ? ticket.drive_.lock() : nullptr;
    const bool may_lead = drive && timeout >= brief;
    if (may_lead && drive->lead_while_zero(ticket.state_)) return;
    ++ticket.sleepers_;
    sleep_while_zero(ticket.state_, timeout);
    --ticket.sleepers_;
    if (may_lead) drive->stop_following();
}

void Queue::wake_listener() {
    rests_ = false;
    news_.notify_one();
}

void Queue::hand_back(std::vector<Outcome> outcomes) {
    const std::lock_guard lock(mutex_);
    std::move(outcomes.begin(), outcomes.end(), std::back_inserter(handed_back_));
    --settling_;
    if (!handed_back_.empty() || drained_) wake_listener();
}

bool Queue::close(std::chrono::nanoseconds patience) {
    if (belongs_to_a_parent()) return true;
    {
        std::unique_lock lock(mutex_);
        closed_ = true;
        room_.notify_all();
        if (!room_.wait_for(lock, patience, [this] { return pending_ == 0; })) return false;
    }
    const std::lock_guard lock(
        drives_mutex_);  // for an instant: the drives are idle, and nothing comes
    for (auto& [device, drive] : drives_) {
        drive->stop();
        final_stats_[device] = drive->stats();
    }
    drives_.clear();
    first_backend_.reset();
    pools_.clear();
    const std::lock_guard ended_lock(mutex_);
    drained_ = true;
    rests_ = false;
    news_.notify_all();
    return true;
}

// Empty in a forked child, in which the thread that holds a lock may not exist.
std::map<dev_t, DriveStats> Queue::stats() const {
    if (belongs_to_a_parent()) return {};
    const std::lock_guard lock(drives_mutex_);
    std::map<dev_t, DriveStats> all = final_stats_;
    for (const auto& [device, drive] : drives_) all[device] = drive->stats();
    return all;
}

std::uint64_t Queue::pending() const {
    if (belongs_to_a_parent()) return 0;
    const std::lock_guard lock(mutex_);
    return pending_;
}

bool Queue::belongs_to_a_parent() const noexcept {
    return forks() != forks_;
}

void Queue::refuse_if_forked() const {
    if (!belongs_to_a_parent()) return;
    throw ForkedError(
        "this queue belongs to process " + std::to_string(owner_) +
        "; a forked child makes its own (multiprocessing: use the spawn start method)");
}

void Queue::refuse_if_unusable() const {
    refuse_if_forked();
    const std::lock_guard lock(mutex_);
    if (closed_) throw ClosedError(queue_is_closed);
}

// A thread in wait_for takes all outcomes, so the one in wait_ended sleeps on. It also sleeps on,
// for the grace time, where a thread is likely to call wait_for soon: each wake-up costs time.
void Queue::ended(std::vector<Outcome> outcomes) {
    std::vector<std::shared_ptr<Doorbell>> bells;
    {
        const std::lock_guard lock(mutex_);
        pending_ -= outcomes.size();
        room_.notify_all();
        for (Outcome& outcome : outcomes) {
            if (!outcome.ticket || outcome.ticket->heard_) ++urgent_;
            if (outcome.ticket) note_end(*outcome.ticket, bells);
            ended_.push_back(std::move(outcome));
        }
        if (coming_ == 0 && urgent_ > 0) wake_listener();
    }
    for (const std::shared_ptr<Doorbell>& bell : bells) bell->ring();
}

// Under mutex_.
void Queue::note_end(Ticket& ticket, std::vector<std::shared_ptr<Doorbell>>& bells) {
    ticket.state_ = Ticket::ended;
    coming_ += std::exchange(ticket.waiting_, 0);
    if (ticket.sleepers_ > 0) wake_all(ticket.state_);
    if (ticket.bell_ && std::find(bells.begin(), bells.end(), ticket.bell_) == bells.end()) {
        bells.push_back(std::move(ticket.bell_));
    }
}

}  // namespace deepnvme
