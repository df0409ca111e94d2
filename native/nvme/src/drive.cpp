#include "deepnvme/drive.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace deepnvme {

namespace {

constexpr std::uint8_t max_attempts = 100;
constexpr std::uint32_t chunk_unit = 65536;  // no device asks for a larger offset alignment
constexpr std::size_t completions_per_call = 64;

bool is_sync(Verb verb) {
    return verb == Verb::sync_data || verb == Verb::sync_all;
}

// What becomes of an operation that cannot be carried out any more, unless its caller took it back
// before.
Outcome broken_outcome(const Operation& operation, int error) {
    if (operation.ticket && !operation.ticket->begin()) {
        return {operation.id, Ending::cancelled, 0, ECANCELED};
    }
    return {operation.id, Ending::failed, 0, error};
}

// Signals are for the threads of the program; a handler that ran here would interrupt the ring for
// nothing.
void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

DriveOptions checked(DriveOptions options) {
    if (options.chunk_bytes == 0 || options.chunk_bytes % chunk_unit != 0 ||
        options.chunk_bytes > Arena::max_bytes) {
        throw std::invalid_argument("chunk must be a positive multiple of 65536 bytes, at most " +
                                    std::to_string(Arena::max_bytes) + ", got " +
                                    std::to_string(options.chunk_bytes));
    }
    if (options.inflight_bytes < options.chunk_bytes) {
        throw std::invalid_argument("the in-flight budget must hold one chunk of " +
                                    std::to_string(options.chunk_bytes) + " bytes, got " +
                                    std::to_string(options.inflight_bytes));
    }
    return options;
}

Drive::Drive(std::unique_ptr<Backend> backend, DriveOptions options, Ended ended)
    : backend_(std::move(backend)),
      backend_name_(backend_->name()),
      options_(checked(options)),
      ended_(std::move(ended)),
      chunks_(backend_->capacity()) {
    for (std::uint32_t index = 0; index < chunks_.size(); ++index) free_chunks_.push_back(index);
    std::promise<void> attached;
    std::future<void> ready = attached.get_future();
    thread_ = std::thread([this, &attached] { run(attached); });
    try {
        ready.get();
    } catch (...) {
        thread_.join();
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
        if (std::exchange(sleeping_, false)) backend_->wake();
    }
    thread_.join();
}

void Drive::submit(Operation operation) {
    std::list<Active> one(1);
    one.front().operation = std::move(operation);
    one.front().submitted = Clock::now();
    const std::lock_guard lock(mutex_);
    one.front().sequence = next_sequence_++;
    inbox_.splice(inbox_.end(), one);
    if (broken_ != 0) changed_.notify_all();
    if (std::exchange(sleeping_, false)) backend_->wake();
}

void Drive::use_arenas(std::vector<std::shared_ptr<Arena>> arenas) {
    const std::lock_guard lock(mutex_);
    wanted_arenas_ = std::move(arenas);
    ++arenas_asked_;
    if (std::exchange(sleeping_, false)) backend_->wake();
}

bool Drive::arenas_settled(std::chrono::nanoseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this, asked = arenas_asked_] {
        return arenas_applied_ >= asked || broken_ != 0 || stopping_;
    });
}

DriveStats Drive::stats() const {
    DriveStats stats;
    stats.backend = backend_name_;
    stats.operations = counters_.operations;
    stats.failed = counters_.failed;
    stats.chunks = counters_.chunks;
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

// --- the drive's thread
// ------------------------------------------------------------------------------------------

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
    std::array<Completion, completions_per_call> completions;
    while (take_inbox()) {
        issue();
        report();
        const std::size_t count = backend_->submit_and_reap(completions, how_to_wait());
        for (std::size_t i = 0; i < count; ++i) complete(completions[i]);
    }
    report();
}

// False: asked to stop, and nothing is left to do.
bool Drive::take_inbox() {
    const std::lock_guard lock(mutex_);
    sleeping_ = false;
    for (auto place = inbox_.begin(); place != inbox_.end(); ++place) {
        place->home = &waiting_;
        place->place = place;
    }
    waiting_.splice(waiting_.end(), inbox_);
    if (arenas_seen_ != arenas_asked_) {
        arenas_seen_ = arenas_asked_;
        arenas_ = wanted_arenas_;
        registration_due_ = true;
    }
    return !stopping_ || !waiting_.empty() || !parked_.empty() || !issued_.empty() ||
           registration_due_;
}

// Sleeping is declared under the lock that submit takes: an operation is either seen here or wakes
// the backend. While others wait for room it could not begin, and the completion that makes room is
// enough.
Wait Drive::how_to_wait() {
    const std::lock_guard lock(mutex_);
    const bool idle = waiting_.empty() && parked_.empty() && issued_.empty();
    if (!inbox_.empty() || arenas_seen_ != arenas_asked_ || (stopping_ && idle)) return Wait::none;
    const bool full =
        !waiting_.empty() && in_kernel_ > 0;  // the drive has all that it has room for
    sleeping_ = !full;
    return full ? Wait::several : Wait::some;
}

// Registered buffers can change only while nothing is in flight; issue() waits for that.
void Drive::register_arenas() {
    std::vector<std::shared_ptr<Arena>> arenas = arenas_;
    if (bounce_) arenas.push_back(bounce_);
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

// --- from operations to chunks
// ------------------------------------------------------------------------------------------

void Drive::issue() {
    if (registration_due_) {
        if (in_kernel_ > 0) return;
        register_arenas();
    }
    while (!repush_.empty()) {
        if (in_kernel_ == chunks_.size() || shares_page_in_kernel(chunks_[repush_.front()])) return;
        push(repush_.front());
        repush_.pop_front();
    }
    while (!waiting_.empty()) {
        Active& active = waiting_.front();
        const Chunk chunk = next_chunk(active);
        if (!has_room(chunk) || shares_page_in_kernel(chunk)) return;
        if (!begin(active)) continue;
        if (needs_bounce(chunk) && !bounce_ && !make_bounce_slots()) {
            active.ending = Ending::failed;  // begin() lets it end
            active.error = ENOMEM;
            continue;
        }
        issue_chunk(chunk);
    }
}

// False: it has left the front of the queue without a further chunk, ended or parked. Claimed only
// when a chunk of it is issued next: until then its caller can take it back.
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
    return !needs_bounce(chunk) || !bounce_ || !free_slots_.empty();
}

// The last chunk of an operation moves it to issued_.
void Drive::issue_chunk(Chunk chunk) {
    Active& active = *chunk.active;
    if (needs_bounce(chunk)) {
        chunk.slot = free_slots_.back();
        free_slots_.pop_back();
        if (active.operation.verb == Verb::write) {
            std::memcpy(slot_memory(chunk), user_memory(chunk), chunk.length);
        }
        counters_.bounced_bytes += chunk.length;
    }
    if (!chunk.direct) counters_.buffered_bytes += chunk.length;
    const std::uint32_t index = free_chunks_.back();
    free_chunks_.pop_back();
    chunks_[index] = chunk;
    active.issued += chunk.length;
    ++active.outstanding;
    inflight_ += chunk.length;
    counters_.chunks += 1;
    counters_.inflight_bytes = inflight_;
    if (inflight_ > counters_.peak_inflight_bytes) counters_.peak_inflight_bytes = inflight_;
    if (active.issued == active.operation.length || is_sync(active.operation.verb))
        move_to(issued_, active);
    push(index);
}

Drive::Chunk Drive::next_chunk(Active& active) const {
    const Operation& operation = active.operation;
    Chunk chunk;
    chunk.active = &active;
    chunk.position = active.issued;
    if (is_sync(operation.verb)) return chunk;
    const std::uint64_t rest = operation.length - active.issued;
    const std::uint64_t longest = std::min<std::uint64_t>(rest, options_.chunk_bytes);
    if (operation.file->direct_descriptor() < 0) {
        chunk.length = static_cast<std::uint32_t>(longest);
        return chunk;
    }
    const std::uint64_t unit = operation.file->offset_alignment();
    const std::uint64_t into_unit = (operation.offset + active.issued) % unit;
    chunk.direct = into_unit == 0 && longest >= unit;
    chunk.length =
        static_cast<std::uint32_t>(chunk.direct     ? longest / unit * unit
                                   : into_unit == 0 ? longest
                                                    : std::min(longest, unit - into_unit));
    return chunk;
}

bool Drive::needs_bounce(const Chunk& chunk) const {
    if (!chunk.direct) return false;
    const std::byte* const memory = user_memory(chunk);
    if (reinterpret_cast<std::uintptr_t>(memory) %
            chunk.active->operation.file->memory_alignment() !=
        0)
        return true;
    if (options_.user_memory == UserMemory::zero_copy) return false;
    // Its first byte and its last: a chunk may lie across two arenas of one pool, and then is the
    // pool's as well.
    const auto is_pooled = [&](const std::byte* byte) {
        return std::any_of(arenas_.begin(), arenas_.end(),
                           [&](const auto& arena) { return arena->holds(byte, 1); });
    };
    return !is_pooled(memory) || !is_pooled(memory + chunk.length - 1);
}

// False: there is no memory for them now.
bool Drive::make_bounce_slots() {
    // As many as chunks can be in flight, and no more than one arena holds.
    const std::uint64_t most =
        std::min<std::uint64_t>(options_.inflight_bytes, Arena::max_bytes) / options_.chunk_bytes;
    const auto count = static_cast<std::int32_t>(std::min<std::uint64_t>(most, chunks_.size()));
    try {
        free_slots_.reserve(static_cast<std::size_t>(count));
        bounce_ = std::make_shared<Arena>(static_cast<std::size_t>(count) * options_.chunk_bytes);
    } catch (const std::bad_alloc&) {
        return false;
    }
    for (std::int32_t slot = 0; slot < count; ++slot) free_slots_.push_back(slot);
    counters_.own_bytes = bounce_->size();
    registration_due_ = true;  // used unregistered until the next quiet moment
    return true;
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
        request.offset = operation.offset + chunk.position + chunk.moved;
        request.length = chunk.length - chunk.moved;
        request.memory = (chunk.slot >= 0 ? slot_memory(chunk) : user_memory(chunk)) + chunk.moved;
        request.buffer = registered_index(request.memory, request.length);
    }
    if (!backend_->push(request))
        throw std::system_error(EBUSY, std::generic_category(),
                                "more chunks than the backend has room for");
    chunks_[index].in_kernel = true;
    ++in_kernel_;
    if (chunk.direct) ++direct_in_kernel_;
}

// The page cache writes whole pages: a chunk that goes through it would take what a direct chunk
// writes to the same page at the same time back to what it was. So the later of the two waits for
// the end of the other.
bool Drive::shares_page_in_kernel(const Chunk& chunk) const {
    const std::uint32_t other_way =
        chunk.direct ? in_kernel_ - direct_in_kernel_ : direct_in_kernel_;
    if (other_way == 0) return false;
    const PageRange pages = pages_of(chunk);
    return std::any_of(chunks_.begin(), chunks_.end(), [&](const Chunk& other) {
        if (!other.in_kernel || other.direct == chunk.direct) return false;
        const Operation& mine = chunk.active->operation;
        const Operation& others = other.active->operation;
        if (mine.verb != Verb::write && others.verb != Verb::write) return false;
        return mine.file->is_same_file_as(*others.file) && pages.overlaps(pages_of(other));
    });
}

Drive::PageRange Drive::pages_of(const Chunk& chunk) {
    const Operation& operation = chunk.active->operation;
    const std::uint64_t unit = operation.file->offset_alignment();
    const std::uint64_t start = operation.offset + chunk.position;
    return {start / unit * unit, (start + chunk.length + unit - 1) / unit * unit};
}

bool Drive::earlier_write_pending(const Active& sync) const {
    return std::any_of(issued_.begin(), issued_.end(), [&](const Active& other) {
        return other.operation.verb == Verb::write && other.sequence < sync.sequence &&
               other.operation.file->is_same_file_as(*sync.operation.file);
    });
}

void Drive::unpark_syncs() {
    for (auto place = parked_.begin(); place != parked_.end();) {
        Active& sync = *place++;
        if (earlier_write_pending(sync)) continue;
        waiting_.splice(waiting_.begin(), parked_, sync.place);
        sync.home = &waiting_;
    }
}

// --- what became of a chunk
// ------------------------------------------------------------------------------------------

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
    if ((error == EINTR || error == EAGAIN) && ++chunk.attempts <= max_attempts) {
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
    chunk.moved += nbytes;
    chunk.attempts = 0;
    if (chunk.moved < chunk.length) {
        counters_.short_transfers += 1;
        const OpenFile& file = *chunk.active->operation.file;
        const auto address = reinterpret_cast<std::uintptr_t>(user_memory(chunk)) + chunk.moved;
        const bool aligned = chunk.moved % file.offset_alignment() == 0 &&
                             (chunk.slot >= 0 || address % file.memory_alignment() == 0);
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
    const Chunk& chunk = chunks_[index];
    Active& active = *chunk.active;
    if (chunk.slot >= 0) {
        if (active.operation.verb == Verb::read && chunk.moved > 0) {
            std::memcpy(user_memory(chunk), slot_memory(chunk), chunk.moved);
        }
        free_slots_.push_back(chunk.slot);
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
    if (active.ending == Ending::succeeded && active.home == &waiting_)
        return;  // more chunks to come
    Outcome outcome{operation.id, active.ending, std::min(active.certain, active.issued),
                    active.error};
    if (outcome.ending == Ending::end_of_file && operation.at_end_of_file == AtEndOfFile::stops &&
        operation.offset + outcome.done >= operation.file->expected_length()) {
        outcome.ending = Ending::succeeded;
    }
    end(active, std::move(outcome));
}

void Drive::end(Active& active, Outcome outcome) {
    Operation& operation = active.operation;
    const bool wrote = operation.verb == Verb::write;
    if (wrote) {
        if (outcome.done > 0) operation.file->wrote_until(operation.offset + outcome.done);
        counters_.written_bytes += outcome.done;
    } else if (operation.verb == Verb::read) {
        counters_.read_bytes += outcome.done;
    }
    counters_.operations += 1;
    if (outcome.ending != Ending::succeeded) counters_.failed += 1;
    latencies_.add(Clock::now() - active.submitted);
    outcome.ticket = std::move(operation.ticket);
    outcomes_.push_back(std::move(outcome));
    active.home->erase(active.place);
    if (wrote) unpark_syncs();
}

// Several at a time: whoever waits for them is woken once.
void Drive::report() {
    if (!outcomes_.empty()) ended_(std::exchange(outcomes_, {}));
}

void Drive::move_to(std::list<Active>& home, Active& active) {
    home.splice(home.end(), *active.home, active.place);
    active.home = &home;
}

// The backend is broken as a whole. It is destroyed first: only then does the kernel surely touch
// no memory any more. That may last, and callers need not wait for it: with `sleeping_` false none
// of them wakes it.
void Drive::fail_everything(int error) {
    {
        const std::lock_guard lock(mutex_);
        broken_ = error;
        sleeping_ = false;
        changed_.notify_all();
    }
    backend_.reset();
    for (std::list<Active>* list : {&issued_, &parked_, &waiting_}) {
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

std::byte* Drive::user_memory(const Chunk& chunk) const {
    return chunk.active->operation.memory + chunk.position;
}

std::byte* Drive::slot_memory(const Chunk& chunk) const {
    return bounce_->data() + static_cast<std::size_t>(chunk.slot) * options_.chunk_bytes;
}

// Arenas are registered in the order of their addresses.
std::int32_t Drive::registered_index(const std::byte* memory, std::size_t nbytes) const {
    const auto after =
        std::upper_bound(registered_.begin(), registered_.end(), memory,
                         [](const std::byte* at, const auto& arena) { return at < arena->data(); });
    if (after == registered_.begin() || !(*std::prev(after))->holds(memory, nbytes)) return -1;
    return static_cast<std::int32_t>(std::prev(after) - registered_.begin());
}

// --- latencies
// ------------------------------------------------------------------------------------------

// Four buckets per power of two of nanoseconds.
void Drive::Histogram::add(std::chrono::nanoseconds latency) noexcept {
    const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(latency.count(), 4));
    const auto power = static_cast<unsigned>(std::bit_width(ns)) - 1;
    counts_[power * 4 + ((ns >> (power - 2)) & 3)].fetch_add(1, std::memory_order_relaxed);
}

double Drive::Histogram::quantile_us(double share) const noexcept {
    std::uint64_t total = 0;
    for (const auto& count : counts_) total += count.load(std::memory_order_relaxed);
    if (total == 0) return 0.0;
    auto left = static_cast<std::uint64_t>(share * static_cast<double>(total - 1)) + 1;
    for (std::size_t bucket = 0; bucket < counts_.size(); ++bucket) {
        const std::uint64_t count = counts_[bucket].load(std::memory_order_relaxed);
        if (count >= left) {
            const double low = std::exp2(static_cast<double>(bucket / 4));
            return low * (1.0 + (static_cast<double>(bucket % 4) + 0.5) / 4.0) / 1e3;
        }
        left -= count;
    }
    return 0.0;
}

}  // namespace deepnvme
