#include "deepnvme/drive.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "deepnvme/error.hpp"

namespace deepnvme {

namespace {

constexpr std::uint8_t max_attempts = 100;
constexpr std::size_t completions_per_call = 64;
// How many requests of this length are handed to the kernel together where operations stood waiting
// for room. A drive that completes together what came together rests while a group is prepared. So
// a group takes no longer to prepare than the drive takes for one of its requests: a drive moves
// some 8 KiB while the next request is prepared (docs/decisions/0039).
constexpr std::size_t refilled_together(std::uint32_t length) {
    return std::max<std::size_t>(2, length / (8 << 10));
}
// Larger operations keep the caller that issues them too long.
constexpr std::uint64_t inline_bytes = 64 << 10;
constexpr std::uint64_t medium_chunks = 16;  // of the largest operation in the middle lane
// How often the drive's own thread looks whether callers have left something, and for how long.
constexpr Clock::duration shortest_watch = std::chrono::microseconds(150);
constexpr Clock::duration longest_watch = std::chrono::microseconds(1000);
constexpr Clock::duration loops_watch = std::chrono::milliseconds(10);
constexpr unsigned looks_before_rest = 3;
// A drive that is always busy would keep an event loop from its other callbacks.
constexpr unsigned steps_for_loops = 8;

bool is_sync(Verb verb) {
    return verb == Verb::sync_data || verb == Verb::sync_all;
}

// Where in the file the first `done` bytes of an operation end: of several pieces, the furthest.
std::uint64_t end_of_prefix(const Operation& operation, std::uint64_t done) {
    if (operation.pieces.empty()) return operation.offset + done;
    std::uint64_t end = 0;
    for (const Piece& piece : operation.pieces) {
        const std::uint64_t part = std::min(piece.length, done);
        if (part == 0) continue;
        end = std::max(end, piece.offset + part);
        done -= part;
    }
    return end;
}

// The outcome of an operation that cannot be carried out any more: cancelled, where its caller
// cancelled it before.
Outcome broken_outcome(const Operation& operation, int error) {
    if (operation.ticket && !operation.ticket->begin()) {
        return {operation.id, Ending::cancelled, 0, ECANCELED};
    }
    return {operation.id, Ending::failed, 0, error};
}

// The program's own threads handle signals: a handler that ran here would only interrupt the ring.
void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

DriveOptions checked(DriveOptions options) {
    if (options.chunk_bytes == 0 || options.chunk_bytes % largest_offset_alignment != 0 ||
        options.chunk_bytes > Arena::max_bytes) {
        throw std::invalid_argument("chunk_bytes must be a positive multiple of " +
                                    std::to_string(largest_offset_alignment) + ", at most " +
                                    std::to_string(Arena::max_bytes) + ", got " +
                                    std::to_string(options.chunk_bytes));
    }
    if (options.inflight_bytes < options.chunk_bytes) {
        throw std::invalid_argument("inflight_bytes must hold one chunk of " +
                                    std::to_string(options.chunk_bytes) + " bytes, got " +
                                    std::to_string(options.inflight_bytes));
    }
    return options;
}

Drive::Drive(std::unique_ptr<Backend> backend, DriveOptions options, Ended ended)
    : backend_(std::move(backend)),
      backend_name_(backend_->name()),
      any_thread_(backend_->serves_any_thread()),
      options_(checked(options)),
      ended_(std::move(ended)),
      chunks_(backend_->capacity()),
      bounce_(options.chunk_bytes, options.inflight_bytes, backend_->capacity()) {
    for (std::uint32_t index = 0; index < chunks_.size(); ++index) free_chunks_.push_back(index);
    std::promise<void> attached;
    std::future<void> ready = attached.get_future();
    try {
        thread_ = std::thread([this, &attached] { run(attached); });
        ready.get();
    } catch (const std::system_error& refusal) {
        if (thread_.joinable()) thread_.join();
        throw std::system_error(refusal.code(),
                                "no thread for a drive: allow more (ulimit -u, or the container's "
                                "limit on processes)");
    } catch (...) {
        if (thread_.joinable()) thread_.join();
        throw;
    }
}

Drive::~Drive() {
    stop();
}

void Drive::stop() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
        call_leader();
    }
    thread_.join();
}

void Drive::submit(std::span<Operation> operations, Issue when) {
    std::list<Active> fresh(operations.size());
    const Clock::time_point now = Clock::now();
    bool all_small = true;
    std::size_t number = 0;
    for (Active& active : fresh) {
        active.operation = std::move(operations[number++]);
        active.submitted = now;
        active.expected_length = active.operation.file->expected_length();
        all_small = all_small && is_inline(active.operation);
    }
    {
        const std::lock_guard lock(mutex_);
        for (Active& active : fresh) active.sequence = next_sequence_++;
        inbox_.splice(inbox_.end(), fresh);
        if (broken_ != 0) changed_.notify_all();
        if (!may_lead() || !all_small) return call_leader();
        if (when == Issue::soon) {
            if (!watching_) turn_.notify_one();  // it looks from now on, until nothing is left
            return;
        }
        if (has_waiting()) return call_leader();
        led_ = true;
        ++turns_;
    }
    try {
        (void)step(Wait::none);
    } catch (...) {
        return break_off(std::current_exception());
    }
    end_turn(false);
}

void Drive::use_arenas(std::vector<std::shared_ptr<Arena>> arenas) {
    const std::lock_guard lock(mutex_);
    wanted_arenas_ = std::move(arenas);
    ++arenas_asked_;
    call_leader();
}

bool Drive::arenas_settled(std::chrono::nanoseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this, asked = arenas_asked_] {
        return arenas_applied_ >= asked || broken_ != 0 || stopping_;
    });
}

void Drive::attend() {
    const std::lock_guard lock(mutex_);
    attended_ = true;
    if (!led_) call_leader();
}

bool Drive::serve_loop(const std::shared_ptr<Doorbell>& bell) {
    const std::lock_guard lock(mutex_);
    if (!any_thread_ || !backend_ || stopping_) return false;
    for (const std::weak_ptr<Doorbell>& known : loops_) {
        if (known.lock() == bell) return true;
    }
    const int descriptor = backend_->completion_descriptor();
    if (descriptor < 0) return false;
    bell->watch(descriptor);
    bell->ring();  // for what has completed before
    loops_.push_back(bell);
    return true;
}

bool Drive::lead_for_loops() {
    {
        const std::lock_guard lock(mutex_);
        if (!may_lead()) {
            loop_came_in_vain_ = true;
            return false;
        }
        led_ = true;
        ++turns_;
    }
    bool has_more = true;
    try {
        for (unsigned i = 0; has_more && i < steps_for_loops; ++i) has_more = step(Wait::none);
    } catch (...) {
        break_off(std::current_exception());
        return false;
    }
    end_turn(false);
    return has_more;
}

// These two: under mutex_.

// Whether event loops can do all there is to do. Forgets the loops that are gone.
bool Drive::is_for_loops() {
    std::erase_if(loops_, [](const auto& bell) { return bell.expired(); });
    return !loops_.empty() && !attended_ && !stopping_ && followers_ == 0 && inbox_.empty() &&
           !has_waiting() && !registration_due_ && repush_.empty();
}

void Drive::call_loops() {
    loop_came_in_vain_ = false;
    for (const std::weak_ptr<Doorbell>& known : loops_) {
        if (const std::shared_ptr<Doorbell> bell = known.lock()) bell->ring();
    }
}

void Drive::end_stopped() {
    const std::lock_guard lock(mutex_);
    stops_asked_ = true;
    call_leader();
}

bool Drive::lead_while_zero(const std::atomic<std::uint32_t>& state) {
    {
        const std::lock_guard lock(mutex_);
        if (!may_lead()) {
            ++followers_;
            return false;
        }
        led_ = true;
        ++turns_;
    }
    try {
        while (state == 0 && step(Wait::briefly)) continue;
    } catch (...) {
        break_off(std::current_exception());
        return true;
    }
    end_turn(true);
    return true;
}

void Drive::stop_following() {
    const std::lock_guard lock(mutex_);
    --followers_;
}

DriveStats Drive::stats() const {
    DriveStats stats;
    stats.backend = backend_name_;
    stats.operations = counters_.operations;
    stats.failed = counters_.failed;
    stats.chunks = counters_.chunks;
    stats.submissions = counters_.submissions;
    stats.read_bytes = counters_.read_bytes;
    stats.written_bytes = counters_.written_bytes;
    stats.bounced_bytes = counters_.bounced_bytes;
    stats.buffered_bytes = counters_.buffered_bytes;
    stats.retries = counters_.retries;
    stats.short_transfers = counters_.short_transfers;
    stats.direct_refused = counters_.direct_refused;
    stats.inflight_bytes = counters_.inflight_bytes;
    stats.peak_inflight_bytes = counters_.peak_inflight_bytes;
    stats.registered_bytes = counters_.registered_bytes;
    stats.own_bytes = counters_.own_bytes;
    stats.registration_error = counters_.registration_error;
    stats.p50_us = latencies_.quantile_us(0.50);
    stats.p99_us = latencies_.quantile_us(0.99);
    return stats;
}

// --- who leads ----------------------------------------------------------------------------------

void Drive::run(std::promise<void>& attached) {
    block_signals();
    pthread_setname_np(pthread_self(), "deepnvme-io");
    try {
        backend_->attach();
    } catch (...) {
        attached.set_exception(std::current_exception());
        return;
    }
    attached.set_value();
    try {
        serve();
        // Here and not in the destructor: a ring answers only the thread that drove it, and its
        // wake-up still stands in it.
        const std::lock_guard lock(mutex_);
        backend_.reset();
    } catch (const std::system_error& error) {
        fail_everything(error.code().value());
    } catch (const std::bad_alloc&) {
        fail_everything(ENOMEM);
    } catch (const std::exception&) {
        fail_everything(EIO);  // a mistake of ours, but not the end of the program
    }
}

void Drive::serve() {
    std::unique_lock lock(mutex_);
    while (wait_for_turn(lock)) {
        // It hands over only to a loop that wanted to lead: one that is busy or gone would do
        // nothing.
        while (has_work() && !(loop_came_in_vain_ && is_for_loops())) {
            lock.unlock();
            (void)step(Wait::some);
            lock.lock();
        }
        led_ = false;
        if (has_work()) {
            call_loops();
        } else {
            attended_ = false;
        }
    }
}

// Where the drive's own thread sleeps while a caller leads, or nothing is to be done. It leads when
// it is asked to, and when callers have left something in the kernel and none has led for a while.
// While callers come and go it looks again by itself, so that they need not wake it each time.
// False: asked to stop, and nothing is left to do.
bool Drive::wait_for_turn(std::unique_lock<std::mutex>& lock) {
    Clock::duration pause = shortest_watch;
    unsigned looks_without_news = 0;
    bool left_alone = false;
    for (;;) {
        if (!led_) {
            if (failure_ != 0) throw std::system_error(failure_, std::generic_category());
            if (stopping_ && !has_work()) return false;
            const bool asked = wants_own_thread_ || stopping_ || attended_ || !any_thread_;
            if (has_work() && (asked || left_alone)) break;
            if (!has_work()) wants_own_thread_ = attended_ = false;
            if (is_for_loops()) pause = loops_watch;
        }
        const std::uint64_t seen = turns_;
        const bool is_left = !led_ && has_work();
        if (!is_left && looks_without_news == looks_before_rest) {
            turn_.wait(lock);
            looks_without_news = 0;
            pause = loops_.empty() ? shortest_watch : longest_watch;
            left_alone = false;
            continue;
        }
        watching_ = true;
        const bool in_vain = turn_.wait_for(lock, pause) == std::cv_status::timeout;
        watching_ = false;
        left_alone = in_vain && is_left && turns_ == seen;
        looks_without_news = turns_ != seen || is_left ? 0 : looks_without_news + 1;
        pause = turns_ != seen ? std::min(2 * pause, longest_watch) : shortest_watch;
        // One turn of an event loop submits for longer than that.
        if (!loops_.empty()) pause = longest_watch;
    }
    led_ = true;
    wants_own_thread_ = false;
    return true;
}

// These four: under mutex_.

bool Drive::may_lead() const {
    return !led_ && any_thread_ && !stopping_ && broken_ == 0 && failure_ == 0;
}

// Wakes the thread that can do what was just asked for.
void Drive::call_leader() {
    if (led_) {
        if (std::exchange(sleeping_, false)) backend_->wake();
    } else {
        wants_own_thread_ = true;
        turn_.notify_one();
    }
}

bool Drive::has_waiting() const {
    return std::any_of(lanes_.begin(), lanes_.end(),
                       [](const auto& lane) { return !lane.empty(); });
}

bool Drive::has_work() const {
    return !inbox_.empty() || arenas_seen_ != arenas_asked_ || registration_due_ || has_waiting() ||
           !parked_.empty() || !issued_.empty();
}

// Whether the caller that submits an operation may issue it itself.
bool Drive::is_inline(const Operation& operation) const {
    const std::uint64_t pieces = std::max<std::uint64_t>(operation.pieces.size(), 1);
    return !is_sync(operation.verb) && operation.length / pieces <= inline_bytes;
}

// False: nothing has completed and nothing new was asked for, so that the wait was over.
bool Drive::step(Wait longest) {
    take_inbox();
    issue();
    report();
    std::array<Completion, completions_per_call> completions;
    if (std::exchange(pushed_, false)) counters_.submissions += 1;
    const std::size_t count = backend_->submit_and_reap(completions, how_to_wait(longest));
    for (std::size_t i = 0; i < count; ++i) complete(completions[i]);
    report();
    if (count > 0) return true;
    const std::lock_guard lock(mutex_);
    return !inbox_.empty() || arenas_seen_ != arenas_asked_ || stops_asked_;
}

// What a caller leaves in the kernel, the next caller reaps, or the drive's own thread.
void Drive::end_turn(bool leaves_others) {
    const std::lock_guard lock(mutex_);
    led_ = false;
    const bool left = has_work();
    if (left && loop_came_in_vain_) call_loops();
    if (!left && !stopping_) return;
    const bool at_once = stopping_ || attended_ || !inbox_.empty() ||
                         (leaves_others && (followers_ > 0 || has_waiting()));
    if (at_once) wants_own_thread_ = true;
    if (at_once || !watching_) turn_.notify_one();
}

// The backend broke in a caller's turn.
void Drive::break_off(const std::exception_ptr& reason) {
    int error = EIO;
    try {
        std::rethrow_exception(reason);
    } catch (const std::system_error& known) {
        error = known.code().value();
    } catch (const std::bad_alloc&) {
        error = ENOMEM;
    } catch (const std::exception&) {
        error = EIO;  // a mistake of ours, but not the end of the program
    }
    const std::lock_guard lock(mutex_);
    led_ = false;
    failure_ = error;
    turn_.notify_one();
}

void Drive::take_inbox() {
    const std::lock_guard lock(mutex_);
    sleeping_ = false;
    while (!inbox_.empty()) {
        Active& active = inbox_.front();
        std::list<Active>& lane = lane_of(active.operation);
        active.home = &lane;
        active.place = inbox_.begin();
        if (active.operation.deadline != Clock::time_point::max()) ++with_deadline_;
        lane.splice(lane.end(), inbox_, inbox_.begin());
    }
    if (std::exchange(stops_asked_, false)) stops_due_ = true;
    if (arenas_seen_ != arenas_asked_) {
        arenas_seen_ = arenas_asked_;
        arenas_ = wanted_arenas_;
        registration_due_ = true;
    }
}

// `sleeping_` is set under the lock that submit takes: a new operation is either seen here or wakes
// the backend. While others wait for room a new one could not begin, so it need not wake it: the
// completion that makes room does. A deadline that passes and a stop are seen after `brief` then.
Wait Drive::how_to_wait(Wait longest) {
    const std::lock_guard lock(mutex_);
    const bool news = !inbox_.empty() || arenas_seen_ != arenas_asked_ || stops_asked_;
    if (longest == Wait::none || in_kernel_ == 0 || news) return Wait::none;
    const bool full = has_waiting();  // the drive has all that it has room for
    sleeping_ = !full;
    return full ? Wait::several_briefly : longest;
}

// Registered buffers can change only while nothing is in flight; issue() waits for that.
void Drive::register_arenas() {
    std::vector<std::shared_ptr<Arena>> arenas = arenas_;
    for (std::shared_ptr<Arena>& arena : bounce_.arenas()) arenas.push_back(std::move(arena));
    std::sort(arenas.begin(), arenas.end(),
              [](const auto& a, const auto& b) { return a->data() < b->data(); });
    std::vector<iovec> buffers;
    std::uint64_t total = 0;
    for (const auto& arena : arenas) {
        buffers.push_back({arena->data(), arena->size()});
        total += arena->size();
    }
    const int error = backend_->register_buffers(buffers);
    registered_ = error == 0 ? std::move(arenas) : std::vector<std::shared_ptr<Arena>>{};
    counters_.registration_error = error;
    counters_.registered_bytes = error == 0 ? total : 0;
    registration_due_ = false;
    const std::lock_guard lock(mutex_);
    arenas_applied_ = arenas_seen_;
    changed_.notify_all();
}

// --- from operations to chunks ------------------------------------------------------------------

// Operations that waited for room go to the kernel in groups; the caller submits the last group.
void Drive::issue() {
    if (with_deadline_ > 0 || std::exchange(stops_due_, false)) end_what_is_late();
    if (registration_due_) {
        if (in_kernel_ > 0) return;
        register_arenas();
    }
    while (!repush_.empty()) {
        if (in_kernel_ == chunks_.size() || shares_page_in_kernel(chunks_[repush_.front()])) return;
        push(repush_.front());
        repush_.pop_front();
    }
    const bool refills = std::exchange(full_, false);
    std::size_t issued = 0;
    while (std::list<Active>* lane = lane_in_turn()) {
        Active& active = lane->front();
        Chunk chunk = next_chunk(active);
        full_ = !has_room(chunk);
        if (full_ || shares_page_in_kernel(chunk)) return;
        if (!begin(active)) continue;
        if (needs_bounce(chunk) && !take_bounce_memory(chunk)) {
            active.ending = Ending::failed;  // begin() lets it end
            active.error = ENOMEM;
            continue;
        }
        if (refills && issued >= refilled_together(chunk.length)) {
            backend_->submit();
            counters_.submissions += 1;
            issued = 0;
        }
        credit_ -= chunk.length;
        issue_chunk(std::move(chunk));
        ++issued;
    }
}

// Urgent operations go first. The other lanes take turns (deficit round robin) of equally many
// bytes, so that an operation waits for others of its size, and hardly for much larger ones.
std::list<Drive::Active>* Drive::lane_in_turn() {
    if (!lanes_.front().empty()) return &lanes_.front();
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        if (credit_ > 0 && !lanes_[lane_].empty()) return &lanes_[lane_];
        lane_ = lane_ + 1 == lanes_.size() ? 1 : lane_ + 1;
        credit_ = options_.chunk_bytes;
    }
    return nullptr;
}

std::list<Drive::Active>& Drive::lane_of(const Operation& operation) {
    if (operation.priority == Priority::urgent) return lanes_[0];
    if (operation.length <= options_.chunk_bytes) return lanes_[1];
    if (operation.length <= medium_chunks * options_.chunk_bytes) return lanes_[2];
    return lanes_[3];
}

void Drive::end_what_is_late() {
    const Clock::time_point now = Clock::now();
    for (std::list<Active>& lane : lanes_) {
        for (auto place = lane.begin(); place != lane.end();) end_if_late(*place++, now);
    }
    for (auto place = parked_.begin(); place != parked_.end();) end_if_late(*place++, now);
}

void Drive::end_if_late(Active& active, Clock::time_point now) {
    const Operation& operation = active.operation;
    const bool stopped = operation.ticket && operation.ticket->stopped();
    if (active.ending != Ending::succeeded || (!stopped && now < operation.deadline)) return;
    if (active.issued == 0 && operation.ticket && !operation.ticket->begin()) {
        return end(active, {operation.id, Ending::cancelled, 0, ECANCELED});
    }
    active.ending = Ending::failed;
    active.error = stopped ? ECANCELED : ETIMEDOUT;
    move_to(issued_, active);
    end_if_finished(active);
}

// False: the operation has left the front of its lane, ended or parked, and no chunk of it is to be
// issued. Its ticket is claimed only when its first chunk is issued next: until then its caller can
// cancel it.
bool Drive::begin(Active& active) {
    const Operation& operation = active.operation;
    if (active.ending != Ending::succeeded) {  // a chunk of it failed: no further one is issued
        move_to(issued_, active);
        end_if_finished(active);
        return false;
    }
    if (is_sync(operation.verb) && earlier_write_pending(active)) {
        move_to(parked_, active);
        return false;
    }
    if (active.issued == 0 && operation.ticket && !operation.ticket->begin()) {
        end(active, {operation.id, Ending::cancelled, 0, ECANCELED});
        return false;
    }
    if (operation.length == 0 && !is_sync(operation.verb)) {
        end(active, {operation.id, Ending::succeeded, 0, 0});
        return false;
    }
    return true;
}

bool Drive::has_room(const Chunk& chunk) const {
    if (free_chunks_.empty()) return false;
    if (inflight_ > 0 && inflight_ + chunk.length > options_.inflight_bytes) return false;
    return !needs_bounce(chunk) || bounce_.has_room(bytes_to_bounce(chunk));
}

// The last chunk of an operation moves it to issued_.
void Drive::issue_chunk(Chunk chunk) {
    Active& active = *chunk.active;
    const Operation& operation = active.operation;
    if (chunk.bounce) {
        if (operation.verb == Verb::write) {
            std::memcpy(chunk.bounce.data, chunk.memory, chunk.length);
        }
        counters_.bounced_bytes += chunk.length;
    }
    if (!chunk.direct) counters_.buffered_bytes += chunk.length;
    active.issued += chunk.length;
    while (active.piece < operation.pieces.size() &&
           active.issued - active.piece_start >= operation.pieces[active.piece].length) {
        active.piece_start += operation.pieces[active.piece++].length;
    }
    ++active.outstanding;
    inflight_ += chunk.length;
    counters_.chunks += 1;
    counters_.inflight_bytes = inflight_;
    if (inflight_ > counters_.peak_inflight_bytes) counters_.peak_inflight_bytes = inflight_;
    if (active.issued == operation.length || is_sync(operation.verb)) move_to(issued_, active);
    const std::uint32_t index = free_chunks_.back();
    free_chunks_.pop_back();
    chunks_[index] = std::move(chunk);
    push(index);
}

Piece Drive::rest_of_piece(const Active& active) {
    const Operation& operation = active.operation;
    const std::uint64_t done = active.issued - active.piece_start;
    const Piece piece = active.piece < operation.pieces.size()
                            ? operation.pieces[active.piece]
                            : Piece{operation.memory, operation.length, operation.offset};
    return {piece.memory + done, piece.length - done, piece.offset + done};
}

Drive::Chunk Drive::next_chunk(Active& active) const {
    const Operation& operation = active.operation;
    Chunk chunk;
    chunk.active = &active;
    chunk.position = active.issued;
    if (is_sync(operation.verb) || active.issued == operation.length) return chunk;
    const Piece rest = rest_of_piece(active);
    chunk.offset = rest.offset;
    chunk.memory = rest.memory;
    const std::uint64_t longest = std::min<std::uint64_t>(rest.length, options_.chunk_bytes);
    chunk.length = static_cast<std::uint32_t>(longest);
    if (operation.file->direct_descriptor() < 0) return chunk;
    const std::uint64_t unit = operation.file->offset_alignment();
    const std::uint64_t into_unit = rest.offset % unit;
    chunk.direct = into_unit == 0 && longest >= unit;
    if (chunk.direct) {
        chunk.length = static_cast<std::uint32_t>(longest / unit * unit);
    } else if (into_unit != 0) {
        chunk.length = static_cast<std::uint32_t>(std::min(longest, unit - into_unit));
    }
    if (operation.verb == Verb::read) widen_to_pages(chunk, rest.length);
    return chunk;
}

// A read may ask for more than is wanted: for whole pages, into bounce memory. A small unaligned
// read is then one request. Of a large one, the part of a page at either end is read so.
void Drive::widen_to_pages(Chunk& chunk, std::uint64_t rest) const {
    if (!bounce_.has_blocks()) return;
    const std::uint64_t unit = chunk.active->operation.file->offset_alignment();
    const std::uint64_t lead = chunk.offset % unit;
    const auto outer = [&](std::uint64_t length) {
        return (lead + length + unit - 1) / unit * unit;
    };
    if (lead == 0 && rest % unit == 0) return;
    if (outer(rest) <= BounceMemory::largest_block) {
        chunk.length = static_cast<std::uint32_t>(rest);
    } else if (chunk.direct) {
        return;
    }
    chunk.direct = true;
    chunk.lead = static_cast<std::uint32_t>(lead);
    chunk.trail = static_cast<std::uint32_t>(outer(chunk.length) - lead - chunk.length);
}

bool Drive::is_widened(const Chunk& chunk) {
    return chunk.lead > 0 || chunk.trail > 0;
}

bool Drive::needs_bounce(const Chunk& chunk) const {
    if (!chunk.direct) return false;
    if (is_widened(chunk)) return true;
    const std::byte* const memory = chunk.memory;
    if (reinterpret_cast<std::uintptr_t>(memory) %
            chunk.active->operation.file->memory_alignment() !=
        0)
        return true;
    if (options_.user_memory == UserMemory::zero_copy) return false;
    // The first byte and the last: a chunk may lie across two arenas of one pool.
    const auto is_pooled = [&](const std::byte* byte) {
        return std::any_of(arenas_.begin(), arenas_.end(),
                           [&](const auto& arena) { return arena->holds(byte, 1); });
    };
    return !is_pooled(memory) || !is_pooled(memory + chunk.length - 1);
}

// False: the system has no memory for it now.
bool Drive::take_bounce_memory(Chunk& chunk) {
    try {
        chunk.bounce = bounce_.take(bytes_to_bounce(chunk));
    } catch (const std::bad_alloc&) {
        return false;
    }
    if (counters_.own_bytes != bounce_.bytes()) {
        counters_.own_bytes = bounce_.bytes();
        registration_due_ = true;  // used unregistered until the next quiet moment
    }
    return true;
}

std::size_t Drive::bytes_to_bounce(const Chunk& chunk) {
    return std::size_t{chunk.lead} + chunk.length + chunk.trail;
}

// Only the first attempt of a widened chunk asks for the bytes before it.
std::uint32_t Drive::lead_of(const Chunk& chunk) {
    return chunk.direct && chunk.moved == 0 ? chunk.lead : 0;
}

void Drive::push(std::uint32_t index) {
    const Chunk& chunk = chunks_[index];
    const Operation& operation = chunk.active->operation;
    const OpenFile& file = *operation.file;
    Request request;
    request.verb = operation.verb;
    request.fd = chunk.direct ? file.direct_descriptor() : file.descriptor();
    request.token = index;
    if (!is_sync(operation.verb)) {
        const std::uint32_t lead = lead_of(chunk);
        std::byte* const first = chunk.bounce ? chunk.bounce.data + chunk.lead : chunk.memory;
        request.offset = chunk.offset + chunk.moved - lead;
        request.length = lead + chunk.length - chunk.moved + (chunk.direct ? chunk.trail : 0);
        request.memory = first + chunk.moved - lead;
        request.buffer = registered_index(request.memory, request.length);
    }
    if (!backend_->push(request))
        throw std::system_error(EBUSY, std::generic_category(),
                                "more chunks than the backend has room for");
    chunks_[index].in_kernel = true;
    pushed_ = true;
    ++in_kernel_;
    if (chunk.direct) ++direct_in_kernel_;
}

// The page cache writes whole pages: a chunk that goes through it would overwrite what a direct
// chunk writes to the same page meanwhile with the old bytes. So the later of the two waits for the
// other.
bool Drive::shares_page_in_kernel(const Chunk& chunk) const {
    const std::uint32_t other_way =
        chunk.direct ? in_kernel_ - direct_in_kernel_ : direct_in_kernel_;
    if (other_way == 0) return false;
    const PageRange pages = pages_of(chunk);
    const PageRange cleared = page_cleared_by(chunk);
    return std::any_of(chunks_.begin(), chunks_.end(), [&](const Chunk& other) {
        if (!other.in_kernel || other.direct == chunk.direct) return false;
        const Operation& mine = chunk.active->operation;
        const Operation& others = other.active->operation;
        if (mine.verb != Verb::write && others.verb != Verb::write) return false;
        if (!mine.file->is_same_file_as(*others.file)) return false;
        return pages.overlaps(pages_of(other)) || cleared.overlaps(pages_of(other)) ||
               pages.overlaps(page_cleared_by(other));
    });
}

Drive::PageRange Drive::pages_of(const Chunk& chunk) {
    const Operation& operation = chunk.active->operation;
    const std::uint64_t unit = operation.file->offset_alignment();
    const std::uint64_t start = chunk.offset;
    return {start / unit * unit, (start + chunk.length + unit - 1) / unit * unit};
}

// The page in which the file ends, where the chunk is a buffered write that begins after that end:
// the kernel then clears the rest of that page, through the page cache.
Drive::PageRange Drive::page_cleared_by(const Chunk& chunk) {
    const Operation& operation = chunk.active->operation;
    const std::uint64_t unit = operation.file->offset_alignment();
    const std::uint64_t end = operation.file->expected_length();
    if (chunk.direct || operation.verb != Verb::write || end % unit == 0 || chunk.offset <= end)
        return {0, 0};
    return {end / unit * unit, end / unit * unit + unit};
}

bool Drive::earlier_write_pending(const Active& sync) const {
    const auto is_one = [&](const Active& other) {
        return other.operation.verb == Verb::write && other.sequence < sync.sequence &&
               other.operation.file->is_same_file_as(*sync.operation.file);
    };
    return std::any_of(issued_.begin(), issued_.end(), is_one) ||
           std::any_of(lanes_.begin(), lanes_.end(), [&](const std::list<Active>& lane) {
               return std::any_of(lane.begin(), lane.end(), is_one);
           });
}

void Drive::unpark_syncs() {
    for (auto place = parked_.begin(); place != parked_.end();) {
        Active& sync = *place++;
        if (earlier_write_pending(sync)) continue;
        std::list<Active>& lane = lane_of(sync.operation);
        lane.splice(lane.begin(), parked_, sync.place);
        sync.home = &lane;
    }
}

// --- what became of a chunk ---------------------------------------------------------------------

void Drive::complete(const Completion& completion) {
    const auto index = static_cast<std::uint32_t>(completion.token);
    Chunk& chunk = chunks_[index];
    const Verb verb = chunk.active->operation.verb;
    chunk.in_kernel = false;
    --in_kernel_;
    if (chunk.direct) --direct_in_kernel_;
    if (completion.result > 0) return moved(index, static_cast<std::uint32_t>(completion.result));
    if (completion.result == 0) {
        if (is_sync(verb)) return end_chunk(index);
        if (verb == Verb::read) return fell_short(index, Ending::end_of_file, 0);
        return fell_short(index, Ending::failed, EIO);
    }
    const int error = static_cast<int>(-completion.result);
    // ECANCELED: the thread that gave it to the kernel has ended before the kernel began with it.
    if ((error == EINTR || error == EAGAIN || error == ECANCELED) &&
        ++chunk.attempts <= max_attempts) {
        counters_.retries += 1;
        return again(index);
    }
    if (error == EINVAL && chunk.direct) {
        counters_.direct_refused += 1;
        counters_.buffered_bytes += chunk.length - chunk.moved;
        chunk.direct = false;
        return again(index);
    }
    fell_short(index, Ending::failed, error);
}

void Drive::moved(std::uint32_t index, std::uint32_t nbytes) {
    Chunk& chunk = chunks_[index];
    const std::uint32_t lead = lead_of(chunk);
    const std::uint32_t wanted =
        std::min(nbytes - std::min(nbytes, lead), chunk.length - chunk.moved);
    chunk.moved += wanted;
    chunk.attempts = 0;
    if (chunk.moved < chunk.length) {
        counters_.short_transfers += 1;
        const OpenFile& file = *chunk.active->operation.file;
        const auto address = reinterpret_cast<std::uintptr_t>(chunk.memory) + chunk.moved;
        const bool aligned = wanted > 0 &&
                             (chunk.offset + chunk.moved) % file.offset_alignment() == 0 &&
                             (chunk.bounce || address % file.memory_alignment() == 0);
        if (chunk.direct && !aligned) {
            chunk.direct = false;
            counters_.buffered_bytes += chunk.length - chunk.moved;
        }
        return again(index);
    }
    end_chunk(index);
}

void Drive::again(std::uint32_t index) {
    const Chunk& chunk = chunks_[index];
    const Active& active = *chunk.active;
    // The end of the file, found by a later chunk, says nothing of the bytes before it.
    const bool before_end =
        active.ending == Ending::end_of_file && chunk.position + chunk.moved < active.certain;
    if (active.ending == Ending::succeeded || before_end) {
        repush_.push_back(index);
    } else {
        fell_short(index, active.ending, active.error);
    }
}

// The first error wins; an end of file gives way to an error.
void Drive::fell_short(std::uint32_t index, Ending ending, int error) {
    const Chunk& chunk = chunks_[index];
    Active& active = *chunk.active;
    active.certain = std::min(active.certain, chunk.position + chunk.moved);
    if (active.ending == Ending::succeeded ||
        (active.ending == Ending::end_of_file && ending == Ending::failed)) {
        active.ending = ending;
        active.error = error;
    }
    end_chunk(index);
}

void Drive::end_chunk(std::uint32_t index) {
    Chunk& chunk = chunks_[index];
    Active& active = *chunk.active;
    if (chunk.bounce) {
        if (active.operation.verb == Verb::read && chunk.moved > 0) {
            std::memcpy(chunk.memory, chunk.bounce.data + chunk.lead, chunk.moved);
        }
        bounce_.give_back(std::exchange(chunk.bounce, {}));
    }
    inflight_ -= chunk.length;
    counters_.inflight_bytes = inflight_;
    free_chunks_.push_back(index);
    --active.outstanding;
    end_if_finished(active);
}

void Drive::end_if_finished(Active& active) {
    const Operation& operation = active.operation;
    if (active.outstanding > 0) return;
    if (active.ending == Ending::succeeded && active.home != &issued_)
        return;  // more chunks to come
    Outcome outcome{operation.id, active.ending, std::min(active.certain, active.issued),
                    active.error};
    // Neither what was written behind it meanwhile nor what was cut off makes a read too short.
    const std::uint64_t expected =
        std::min(active.expected_length, operation.file->expected_length());
    if (outcome.ending == Ending::end_of_file && operation.at_end_of_file == AtEndOfFile::stops &&
        operation.offset + outcome.done >= expected) {
        outcome.ending = Ending::succeeded;
    }
    end(active, std::move(outcome));
}

void Drive::end(Active& active, Outcome outcome) {
    Operation& operation = active.operation;
    const bool wrote = operation.verb == Verb::write;
    if (wrote) {
        if (outcome.done > 0) operation.file->wrote_until(end_of_prefix(operation, outcome.done));
        counters_.written_bytes += outcome.done;
    } else if (operation.verb == Verb::read) {
        counters_.read_bytes += outcome.done;
    }
    if (operation.deadline != Clock::time_point::max()) --with_deadline_;
    counters_.operations += 1;
    if (outcome.ending != Ending::succeeded) counters_.failed += 1;
    latencies_.add(Clock::now() - active.submitted);
    outcome.ticket = std::move(operation.ticket);
    outcomes_.push_back(std::move(outcome));
    active.home->erase(active.place);
    if (wrote) unpark_syncs();
}

// Several outcomes at a time: a thread that waits for them is woken once.
void Drive::report() {
    if (!outcomes_.empty()) ended_(std::exchange(outcomes_, {}));
}

void Drive::move_to(std::list<Active>& home, Active& active) {
    home.splice(home.end(), *active.home, active.place);
    active.home = &home;
}

// The backend is broken as a whole. It is destroyed first: only then is it certain that the kernel
// touches no memory any more. That may take long, and callers go on meanwhile: with `sleeping_`
// false none of them wakes the backend, and none finds it.
void Drive::fail_everything(int error) {
    std::unique_ptr<Backend> backend;
    {
        const std::lock_guard lock(mutex_);
        broken_ = error;
        sleeping_ = false;
        backend = std::move(backend_);
        changed_.notify_all();
    }
    backend.reset();
    for (std::list<Active>* list :
         {&issued_, &parked_, &lanes_[0], &lanes_[1], &lanes_[2], &lanes_[3]}) {
        while (!list->empty()) {
            Active& active = list->front();
            end(active, broken_outcome(active.operation, error));
        }
    }
    counters_.inflight_bytes = 0;
    report();
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopping_ || !inbox_.empty(); });
        std::list<Active> late;
        late.splice(late.end(), inbox_);
        if (late.empty()) return;
        lock.unlock();
        for (Active& active : late) {
            outcomes_.push_back(broken_outcome(active.operation, error));
            outcomes_.back().ticket = std::move(active.operation.ticket);
        }
        report();
        late.clear();
        lock.lock();
    }
}

// Arenas are registered in the order of their addresses.
std::int32_t Drive::registered_index(const std::byte* memory, std::size_t nbytes) const {
    const auto after =
        std::upper_bound(registered_.begin(), registered_.end(), memory,
                         [](const std::byte* at, const auto& arena) { return at < arena->data(); });
    if (after == registered_.begin() || !(*std::prev(after))->holds(memory, nbytes)) return -1;
    return static_cast<std::int32_t>(std::prev(after) - registered_.begin());
}

}  // namespace deepnvme
