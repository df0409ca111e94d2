// Pool, Queue and OpenFile for Python: converts arguments, drops the GIL, translates errors. Makes
// and ends futures of usual operations.
#include "queue_bindings.hpp"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "deepnvme/arena.hpp"
#include "deepnvme/error.hpp"
#include "deepnvme/page_stock.hpp"
#include "deepnvme/queue.hpp"
#include "future_bindings.hpp"

namespace py = pybind11;
using namespace deepnvme;  // NOLINT(google-build-using-namespace): this file is about nothing else

namespace {

// The memory of an object with the buffer protocol, which cannot be resized as long as this lives.
class BufferView {
  public:
    BufferView(const py::object& object, bool writable) {
        const int flags = PyBUF_ND | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    [[nodiscard]] std::uintptr_t address() const {
        return reinterpret_cast<std::uintptr_t>(view_.buf);
    }
    [[nodiscard]] py::ssize_t nbytes() const { return view_.len; }

  private:
    Py_buffer view_ = {};
};

// Another view of a memoryview's memory, which keeps it in place. None for anything else, and where
// the memory cannot be used: it is not contiguous, read-only, released, or holds Python objects.
py::object own_view(const py::handle& view, bool writable) {
    if (PyMemoryView_Check(view.ptr()) == 0) return py::none();
    auto own = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(view.ptr()));
    if (!own) {
        if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) throw py::error_already_set();
        PyErr_Clear();
        return py::none();
    }
    const Py_buffer& memory = *PyMemoryView_GET_BUFFER(own.ptr());
    const bool is_usable = PyBuffer_IsContiguous(&memory, 'C') != 0 &&
                           !(writable && memory.readonly != 0) &&
                           (memory.format == nullptr || std::strchr(memory.format, 'O') == nullptr);
    return is_usable ? own : py::none();
}

// The address and the bytes of a memoryview's memory, and what keeps it in place; None as above.
py::object held(const py::handle& view, bool writable) {
    py::object own = own_view(view, writable);
    if (own.is_none()) return own;
    const Py_buffer& memory = *PyMemoryView_GET_BUFFER(own.ptr());
    return py::make_tuple(reinterpret_cast<std::uintptr_t>(memory.buf), memory.len, own);
}

// Views that keep memory in place. Python's garbage collector does not see them: it would go
// through thousands of them again and again while drives are at work. A cycle through them is not
// collected. It ends with the operation, when `IOFuture._memory` is cleared; only a caller that
// stores the traceback of a refused call in its own buffer keeps one.
class HeldViews {
  public:
    HeldViews() = default;
    HeldViews(const HeldViews&) = delete;
    HeldViews& operator=(const HeldViews&) = delete;
    HeldViews(HeldViews&&) = default;
    HeldViews& operator=(HeldViews&&) = delete;
    ~HeldViews() {
        for (py::object& view : views_) {
            PyObject_GC_Track(view.ptr());  // what a view expects at its end
        }
    }

    void reserve(std::size_t count) { views_.reserve(count); }
    void add(py::object view) {
        PyObject_GC_UnTrack(view.ptr());
        views_.push_back(std::move(view));
    }

  private:
    std::vector<py::object> views_;
};

// Bytes of the largest file that the kernel knows.
constexpr std::uint64_t largest_file = (std::uint64_t{1} << 63) - 1;

// What keeps the memory of several memoryviews in place, and the bytes of all. Their addresses,
// bytes and offsets become the three numbers of each. None where one of them is something else or
// cannot be used: the caller then looks at each.
py::object held_each(const py::sequence& views, const py::list& offsets, const py::buffer& numbers,
                     bool writable) {
    const py::buffer_info info = numbers.request(true);
    auto* number = static_cast<std::uint64_t*>(info.ptr);
    const std::size_t count = views.size();
    if (static_cast<std::size_t>(info.size) != 3 * count || info.itemsize != sizeof(*number) ||
        offsets.size() != count)
        throw std::invalid_argument("expected an offset and three numbers for each view");
    HeldViews holder;
    holder.reserve(count);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count; ++i) {
        py::object own = own_view(views[i], writable);
        if (own.is_none()) return own;
        const Py_buffer& memory = *PyMemoryView_GET_BUFFER(own.ptr());
        const auto nbytes = static_cast<std::uint64_t>(memory.len);
        const long long offset =
            PyLong_AsLongLong(PyList_GET_ITEM(offsets.ptr(), static_cast<py::ssize_t>(i)));
        if (PyErr_Occurred() != nullptr) {
            if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) throw py::error_already_set();
            PyErr_Clear();  // an offset of more than 63 bits
            return py::none();
        }
        if (offset < 0 || nbytes > largest_file - static_cast<std::uint64_t>(offset))
            return py::none();
        number[3 * i] = reinterpret_cast<std::uintptr_t>(memory.buf);
        number[3 * i + 1] = nbytes;
        number[3 * i + 2] = static_cast<std::uint64_t>(offset);
        total += nbytes;
        holder.add(std::move(own));
    }
    return py::make_tuple(std::move(holder), total);
}

// In a forked child the threads of a queue are gone, and a lock that one of them held stays locked:
// the queue is not destroyed there.
struct UnlessForked {
    void operator()(Queue* queue) const {
        if (!queue->belongs_to_a_parent()) delete queue;
    }
};

constexpr double longest_deadline_s = 1e9;

std::chrono::nanoseconds nanoseconds(double seconds) {
    return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

// `verb`, `at_end` and `priority` arrive as plain numbers, as the members of Python's IntEnum are:
// converting an enum.Enum costs more than the rest of this call.
Operation operation_of(std::uint64_t id, int verb, std::shared_ptr<OpenFile> file,
                       std::uintptr_t address, std::uint64_t length, std::uint64_t offset,
                       int at_end, std::shared_ptr<Ticket> ticket, int priority,
                       double deadline_s) {
    Operation operation;
    operation.id = id;
    operation.ticket = std::move(ticket);
    operation.verb = static_cast<Verb>(verb);
    operation.at_end_of_file = static_cast<AtEndOfFile>(at_end);
    operation.file = std::move(file);
    operation.memory = reinterpret_cast<std::byte*>(address);
    operation.length = length;
    operation.offset = offset;
    operation.priority = static_cast<Priority>(priority);
    if (deadline_s < longest_deadline_s)
        operation.deadline = Clock::now() + nanoseconds(deadline_s);
    return operation;
}

// `numbers` has address, bytes and offset of one piece after the other. Empty pieces are left out.
std::vector<Piece> pieces_of(const py::buffer& numbers) {
    const py::buffer_info info = numbers.request();
    const auto* number = static_cast<const std::uint64_t*>(info.ptr);
    std::vector<Piece> pieces;
    pieces.reserve(static_cast<std::size_t>(info.size) / 3);
    for (py::ssize_t i = 0; i + 2 < info.size; i += 3) {
        if (number[i + 1] == 0) continue;
        pieces.push_back({reinterpret_cast<std::byte*>(number[i]), number[i + 1], number[i + 2]});
    }
    return pieces;
}

// Has the futures of all operations of a queue that have not ended, by number.
using Futures = py::dict;

// The number of an operation: no other one of this process has it.
std::uint64_t next_number() {
    static std::uint64_t last = 0;  // the GIL guards it
    return ++last;
}

void enter(const Futures& futures, const py::int_& number, const py::handle& future) {
    if (PyDict_SetItem(futures.ptr(), number.ptr(), future.ptr()) != 0)
        throw py::error_already_set();
}

void remove(const Futures& futures, const py::int_& number) {
    if (PyDict_DelItem(futures.ptr(), number.ptr()) == 0) return;
    if (PyErr_ExceptionMatches(PyExc_KeyError) == 0) throw py::error_already_set();
    PyErr_Clear();  // another thread was faster
}

// pybind11 raises and drops an AttributeError for each None that it is to convert itself.
std::shared_ptr<Doorbell> bell_of(const py::handle& bell) {
    return bell.is_none() ? nullptr : bell.cast<std::shared_ptr<Doorbell>>();
}

// Submits the operation of a future. None for `patience_s`: waits for ever, and handlers of signals
// run meanwhile. False: there was no room in time.
bool submit_for(Queue& queue, const Futures& futures, const py::object& future, Operation operation,
                const py::object& patience_s, const std::shared_ptr<Doorbell>& bell = nullptr) {
    const bool for_ever = patience_s.is_none();
    const std::chrono::nanoseconds patience =
        for_ever ? std::chrono::nanoseconds(brief) : nanoseconds(patience_s.cast<double>());
    const py::int_ number(operation.id);
    const std::shared_ptr<Ticket> ticket = operation.ticket;
    // First: it may have ended before this call returns.
    enter(futures, number, future);
    try {
        for (;;) {
            bool taken = false;
            {
                const py::gil_scoped_release unlocked;
                taken = queue.submit(std::move(operation), patience, bell);  // moves what it takes
            }
            if (taken) return true;
            if (!for_ever) break;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
    } catch (...) {
        if (!ticket->taken()) remove(futures, number);  // else a drive may be at work
        throw;
    }
    remove(futures, number);
    return false;
}

// Submits an operation; returns its future, of the class `kind`, or None where there is no room in
// time. `memory` is None, or what `held` returns.
py::object submit(Queue& queue, const Futures& futures, const py::handle& kind,
                  const py::handle& waiter, const py::handle& verb, std::shared_ptr<OpenFile> file,
                  const py::handle& path, const py::object& memory, std::uint64_t offset,
                  const py::handle& at_end, const py::object& patience_s, int priority,
                  double deadline_s, const py::handle& loop, const py::handle& bell) {
    std::uintptr_t address = 0;
    std::uint64_t length = 0;
    if (!memory.is_none()) {
        const auto fields = py::reinterpret_borrow<py::tuple>(memory);
        address = fields[0].cast<std::uintptr_t>();
        length = fields[1].cast<std::uint64_t>();
    }
    py::object future =
        make_future(kind, waiter, py::make_tuple(verb, path, offset, length, at_end), memory, loop);
    Operation operation =
        operation_of(next_number(), verb.cast<int>(), std::move(file), address, length, offset,
                     at_end.cast<int>(), ticket_of(future), priority, deadline_s);
    if (!submit_for(queue, futures, future, std::move(operation), patience_s, bell_of(bell)))
        return py::none();
    return future;
}

// As `submit`, for a future that is there, on several pieces of memory: `numbers` are those of
// `pieces_of`. False: there is no room in time.
bool submit_pieces(Queue& queue, const Futures& futures, const py::object& future, int verb,
                   std::shared_ptr<OpenFile> file, const py::buffer& numbers,
                   const py::object& patience_s, int priority, double deadline_s) {
    Operation operation = operation_of(next_number(), verb, std::move(file), 0, 0, 0, 0,
                                       ticket_of(future), priority, deadline_s);
    operation.pieces = pieces_of(numbers);
    for (const Piece& piece : operation.pieces) operation.length += piece.length;
    return submit_for(queue, futures, future, std::move(operation), patience_s);
}

// Submits operations together, each a tuple of the arguments of operation_of, with the future
// instead of its ticket, but for those that another thread is submitting. False: there was no room
// for all in time; the caller may try again.
bool submit_many(Queue& queue, const py::list& operations, double patience_s) {
    std::vector<Operation> fresh;
    std::vector<std::shared_ptr<Ticket>> tickets;
    std::size_t taken = 0;
    const auto take_back = [&] {
        for (std::size_t i = taken; i < tickets.size(); ++i) tickets[i]->take_back();
    };
    try {
        for (const py::handle item : operations) {
            const auto fields = py::reinterpret_borrow<py::tuple>(item);
            const std::shared_ptr<Ticket>& ticket = ticket_of(fields[7]);
            if (!ticket->hand_in()) continue;
            tickets.push_back(ticket);
            fresh.push_back(operation_of(
                fields[0].cast<std::uint64_t>(), fields[1].cast<int>(),
                fields[2].cast<std::shared_ptr<OpenFile>>(), fields[3].cast<std::uintptr_t>(),
                fields[4].cast<std::uint64_t>(), fields[5].cast<std::uint64_t>(),
                fields[6].cast<int>(), ticket, fields[8].cast<int>(), fields[9].cast<double>()));
        }
        const py::gil_scoped_release unlocked;
        taken = queue.submit_many(std::move(fresh), nanoseconds(patience_s));
    } catch (...) {
        take_back();
        throw;
    }
    take_back();
    return taken == tickets.size();
}

py::list list_of(const std::vector<Outcome>& ended) {
    py::list list(ended.size());
    for (std::size_t i = 0; i < ended.size(); ++i) {
        list[i] = py::make_tuple(ended[i].id, static_cast<int>(ended[i].ending), ended[i].done,
                                 ended[i].error);
    }
    return list;
}

// Ends the futures of these outcomes. What is usual ends here: it succeeded, nothing listens, and
// the list `want_room`, of those who wait for room, is empty. `complete` gets the other outcomes,
// and the ended futures that coroutines await. wait_ended returns the outcomes that it declines, by
// their places in the list; and all of them where it is interrupted, by an exception of a signal's
// handler: no outcome is lost, and ending a future again does nothing.
void complete_each(Queue& queue, std::vector<Outcome> ended, const Futures& futures,
                   const py::list& want_room, const py::function& complete) {
    if (ended.empty()) return;
    std::vector<Outcome> declined;
    std::exception_ptr interruption;
    // These end here. They are let go of last: what runs in Python then may wait for the others.
    std::vector<py::object> over;
    std::vector<py::int_> numbers;
    try {
        std::vector<Outcome> others;
        py::list awaited;
        for (const Outcome& outcome : ended) {
            py::int_ number(outcome.id);
            auto future = py::reinterpret_borrow<py::object>(
                PyDict_GetItemWithError(futures.ptr(), number.ptr()));
            if (!future) continue;  // ended by a call that was interrupted then
            std::optional<bool> is_awaited;
            if (outcome.ending == Ending::succeeded && want_room.empty())
                is_awaited = end_unseen(future, outcome.done);
            if (!is_awaited) {
                others.push_back(outcome);
                continue;
            }
            if (*is_awaited) awaited.append(future);
            over.push_back(std::move(future));
            numbers.push_back(std::move(number));
        }
        if (!others.empty() || !awaited.empty()) {
            for (const py::handle place : complete(list_of(others), awaited)) {
                declined.push_back(others.at(place.cast<std::size_t>()));
            }
        }
    } catch (...) {
        interruption = std::current_exception();
        declined = std::move(ended);
    }
    queue.hand_back(std::move(declined));
    if (interruption) std::rethrow_exception(interruption);
    for (const py::int_& number : numbers) remove(futures, number);
}

// Waits until the operation of that future has ended, and ends all futures so far as complete_each
// does. False: the time is up, or waiters were released. Handlers of signals run meanwhile, at the
// latest after `brief`.
bool wait_for(Queue& queue, const py::handle& future, double timeout_s, const Futures& futures,
              const py::list& want_room, const py::function& complete) {
    const std::shared_ptr<Ticket> ticket = ticket_of(future);
    const Clock::time_point until = Clock::now() + nanoseconds(timeout_s);
    std::optional<std::vector<Outcome>> ended;
    for (;;) {
        {
            const py::gil_scoped_release unlocked;
            const auto left = std::max<std::chrono::nanoseconds>(until - Clock::now(), {});
            ended = queue.wait_for(*ticket, std::min<std::chrono::nanoseconds>(left, brief));
        }
        if (ended) break;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (Clock::now() >= until || ticket->released()) return false;
    }
    complete_each(queue, std::move(*ended), futures, want_room, complete);
    return true;
}

py::dict stats_of(const DriveStats& stats) {
    py::dict dict;
    dict["backend"] = stats.backend;
    dict["operations"] = stats.operations;
    dict["failed"] = stats.failed;
    dict["chunks"] = stats.chunks;
    dict["submissions"] = stats.submissions;
    dict["read_bytes"] = stats.read_bytes;
    dict["written_bytes"] = stats.written_bytes;
    dict["bounced_bytes"] = stats.bounced_bytes;
    dict["buffered_bytes"] = stats.buffered_bytes;
    dict["retries"] = stats.retries;
    dict["short_transfers"] = stats.short_transfers;
    dict["direct_refused"] = stats.direct_refused;
    dict["inflight_bytes"] = stats.inflight_bytes;
    dict["peak_inflight_bytes"] = stats.peak_inflight_bytes;
    dict["registered_bytes"] = stats.registered_bytes;
    dict["own_bytes"] = stats.own_bytes;
    dict["registration_error"] = stats.registration_error;
    dict["p50_us"] = stats.p50_us;
    dict["p99_us"] = stats.p99_us;
    return dict;
}

// Raises deepnvme.errors.<name>(arguments...), so that the exception classes are Python's own.
template <typename... Arguments>
void raise_ours(const char* name, Arguments&&... arguments) {
    const py::object maker = py::module_::import("deepnvme.errors").attr(name);
    const py::object value = maker(std::forward<Arguments>(arguments)...);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
}

void translate(std::exception_ptr pointer) {
    if (!pointer) return;
    try {
        std::rethrow_exception(pointer);
    } catch (const FileError& error) {
        raise_ours("file_error", error.code().value(), error.call(), error.path());
    } catch (const ClosedError& error) {
        raise_ours("ClosedError", error.what());
    } catch (const ForkedError& error) {
        raise_ours("ForkedError", error.what());
    } catch (const PoolExhausted& error) {
        raise_ours("PoolExhaustedError", error.what());
    } catch (const BackendError& error) {
        raise_ours("BackendUnavailableError", error.code().value(), error.what());
    } catch (const std::system_error& error) {
        const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

void bind_enums(py::module_& module) {
    py::native_enum<Verb>(module, "Verb", "enum.IntEnum")
        .value("READ", Verb::read)
        .value("WRITE", Verb::write)
        .value("SYNC_DATA", Verb::sync_data)
        .value("SYNC_ALL", Verb::sync_all)
        .finalize();
    py::native_enum<OpenMode>(module, "OpenMode", "enum.Enum")
        .value("READ", OpenMode::read)
        .value("UPDATE", OpenMode::update)
        .value("CREATE", OpenMode::create)
        .value("EXCLUSIVE", OpenMode::exclusive)
        .finalize();
    py::native_enum<DirectIO>(module, "DirectIO", "enum.Enum")
        .value("AUTOMATIC", DirectIO::automatic)
        .value("NEVER", DirectIO::never)
        .value("REQUIRED", DirectIO::required)
        .finalize();
    py::native_enum<AtEndOfFile>(module, "AtEndOfFile", "enum.IntEnum")
        .value("FAILS", AtEndOfFile::fails)
        .value("STOPS", AtEndOfFile::stops)
        .finalize();
    py::native_enum<UserMemory>(module, "UserMemory", "enum.Enum")
        .value("ZERO_COPY", UserMemory::zero_copy)
        .value("BOUNCE", UserMemory::bounce)
        .finalize();
    py::native_enum<Ending>(module, "Ending", "enum.IntEnum")
        .value("SUCCEEDED", Ending::succeeded)
        .value("FAILED", Ending::failed)
        .value("END_OF_FILE", Ending::end_of_file)
        .value("CANCELLED", Ending::cancelled)
        .finalize();
    py::native_enum<FaultRule::Kind>(module, "FaultKind", "enum.Enum")
        .value("FAIL", FaultRule::Kind::fail)
        .value("SHORTEN", FaultRule::Kind::shorten)
        .value("DELAY", FaultRule::Kind::delay)
        .value("REORDER", FaultRule::Kind::reorder)
        .value("THROTTLE", FaultRule::Kind::throttle)
        .finalize();
}

void bind_memory(py::module_& module) {
    py::class_<BufferView>(module, "BufferView")
        .def(py::init<const py::object&, bool>(), py::arg("object"), py::kw_only(),
             py::arg("writable"))
        .def_property_readonly("address", &BufferView::address)
        .def_property_readonly("nbytes", &BufferView::nbytes);
    module.def("held", &held, py::arg("view"), py::arg("writable"));
    py::class_<HeldViews>(module, "HeldViews");
    module.def("held_each", &held_each, py::arg("views"), py::arg("offsets"), py::arg("numbers"),
               py::arg("writable"));
    py::class_<Block, std::shared_ptr<Block>>(module, "Block", py::buffer_protocol())
        .def_property_readonly(
            "address",
            [](const Block& block) { return reinterpret_cast<std::uintptr_t>(block.data()); })
        .def_property_readonly("nbytes", &Block::size)
        .def_buffer([](Block& block) {
            return py::buffer_info(block.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                                   1, {block.size()}, {1});
        });
    module.def(
        "populate",
        [](std::uintptr_t address, std::size_t nbytes) {
            populate(reinterpret_cast<std::byte*>(address), nbytes);
        },
        py::arg("address"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>());
    py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
        // Not a call_guard, which would let go of the GIL while pybind11 enters the new object in
        // its table of instances.
        .def(py::init([](std::size_t nbytes, std::optional<unsigned> numa_node) {
                 const py::gil_scoped_release unlocked;
                 return Pool::make(nbytes, numa_node);
             }),
             py::arg("nbytes"), py::arg("numa_node"))
        .def("take", &Pool::take, py::arg("nbytes"))
        .def("take_at", &Pool::take_at, py::arg("offset"), py::arg("nbytes"))
        .def(
            "pin_with_cuda",
            [](Pool& pool, bool demanded) {
                const auto when = demanded ? CudaHost::When::demanded : CudaHost::When::in_use;
                if (const std::shared_ptr<CudaHost> cuda = CudaHost::open(when))
                    pool.pin_with(cuda);
            },
            py::kw_only(), py::arg("demanded"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("pinned", &Pool::pinned)
        .def_property_readonly("capacity", &Pool::capacity)
        .def_property_readonly("free_bytes", &Pool::free_bytes)
        .def_property_readonly("largest_free", &Pool::largest_free)
        .def_property_readonly("peak_bytes", &Pool::peak_bytes);
}

void bind_page_stock(py::module_& module) {
    py::class_<Pages, std::shared_ptr<Pages>>(module, "Pages", py::buffer_protocol())
        .def_buffer([](Pages& pages) {
            return py::buffer_info(pages.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                                   1, {pages.size()}, {1});
        });
    py::class_<PageStock, std::shared_ptr<PageStock>>(module, "PageStock")
        .def(py::init(&PageStock::make))
        .def("take", &PageStock::take, py::arg("nbytes"), py::arg("keep"),
             py::call_guard<py::gil_scoped_release>())
        .def("keep_at_most", &PageStock::keep_at_most, py::arg("nbytes"),
             py::call_guard<py::gil_scoped_release>())
        .def("close", &PageStock::close, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("idle_bytes", &PageStock::idle_bytes);
}

void bind_faults(py::module_& module) {
    py::class_<FaultPlan>(module, "FaultPlan")
        .def(py::init([](std::uint64_t seed) { return FaultPlan{seed, {}}; }), py::arg("seed"))
        .def(
            "add",
            [](FaultPlan& plan, FaultRule::Kind kind, std::vector<Verb> verbs, std::uint64_t nth,
               std::uint64_t every, double probability, int error, std::uint32_t length,
               std::uint32_t delay_us, std::uint32_t hold, double bytes_per_s) {
                FaultRule rule;
                rule.kind = kind;
                rule.verbs = std::move(verbs);
                rule.nth = nth;
                rule.every = every;
                rule.probability = probability;
                rule.error = error;
                rule.length = length;
                rule.delay_us = delay_us;
                rule.hold = hold;
                rule.bytes_per_s = bytes_per_s;
                plan.rules.push_back(std::move(rule));
            },
            py::arg("kind"), py::kw_only(), py::arg("verbs"), py::arg("nth"), py::arg("every"),
            py::arg("probability"), py::arg("error"), py::arg("length"), py::arg("delay_us"),
            py::arg("hold"), py::arg("bytes_per_s"));
}

void bind_files(py::module_& module) {
    py::class_<OpenFile, std::shared_ptr<OpenFile>>(module, "OpenFile")
        .def_property_readonly("path", &OpenFile::path)
        .def("show_as", &OpenFile::show_as, py::arg("name"))
        .def_property_readonly("writable", &OpenFile::writable)
        .def_property_readonly("direct",
                               [](const OpenFile& file) { return file.direct_descriptor() >= 0; })
        .def_property_readonly("memory_alignment", &OpenFile::memory_alignment)
        .def_property_readonly("offset_alignment", &OpenFile::offset_alignment)
        .def_property_readonly("device", &OpenFile::device)
        .def_property_readonly("on_fuse", &OpenFile::spoiled_by_rings)
        .def("length", &OpenFile::length, py::call_guard<py::gil_scoped_release>())
        .def("preallocate", &OpenFile::preallocate, py::arg("nbytes"),
             py::call_guard<py::gil_scoped_release>())
        .def("truncate", &OpenFile::truncate, py::arg("nbytes"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_queue(py::module_& module) {
    module.attr("QUEUE_IS_CLOSED") = queue_is_closed;
    py::register_local_exception_translator(&translate);
    bind_enums(module);
    bind_future(module);
    bind_memory(module);
    bind_page_stock(module);
    bind_faults(module);
    bind_files(module);
    py::class_<DriveOptions>(module, "DriveOptions")
        .def(py::init<>())
        .def(py::init([](std::uint32_t chunk_bytes, std::uint64_t inflight_bytes,
                         UserMemory user_memory) {
                 return checked({chunk_bytes, inflight_bytes, user_memory});
             }),
             py::kw_only(), py::arg("chunk_bytes"), py::arg("inflight_bytes"),
             py::arg("user_memory"))
        .def_readonly("chunk_bytes", &DriveOptions::chunk_bytes)
        .def_readonly("inflight_bytes", &DriveOptions::inflight_bytes)
        .def_readonly("user_memory", &DriveOptions::user_memory);
    py::class_<Doorbell, std::shared_ptr<Doorbell>>(module, "Doorbell")
        .def(py::init<>())
        .def_property_readonly("descriptor", &Doorbell::descriptor);
    module.def("next_number", &next_number);
    module.def("set_liburing_path", &set_liburing_path, py::arg("path"));
    module.def("on_fuse", &on_fuse, py::arg("path"), py::call_guard<py::gil_scoped_release>());
    module.def(
        "try_backend", [](const std::string& name) { (void)make_backend(name, 1); },
        py::arg("name"), py::call_guard<py::gil_scoped_release>());

    py::class_<Queue, std::unique_ptr<Queue, UnlessForked>>(module, "Queue")
        .def(py::init([](std::string backend, std::vector<std::string> fallbacks,
                         const DriveOptions& drive, std::uint32_t max_pending,
                         std::uint32_t max_requests, std::optional<FaultPlan> faults) {
                 QueueOptions options;
                 options.backend = std::move(backend);
                 options.fallbacks = std::move(fallbacks);
                 options.drive = drive;
                 options.max_pending = max_pending;
                 options.max_requests = max_requests;
                 options.faults = std::move(faults);
                 return std::unique_ptr<Queue, UnlessForked>(new Queue(std::move(options)));
             }),
             py::kw_only(), py::arg("backend"), py::arg("fallbacks"), py::arg("drive"),
             py::arg("max_pending"), py::arg("max_requests"), py::arg("faults"))
        .def("open", &Queue::open, py::arg("path"), py::arg("mode"), py::arg("direct"),
             py::arg("permissions"), py::arg("drive"), py::call_guard<py::gil_scoped_release>())
        .def("submit", &submit, py::arg("futures"), py::arg("kind"), py::arg("waiter"),
             py::arg("verb"), py::arg("file"), py::arg("path"), py::arg("memory"),
             py::arg("offset"), py::arg("at_end"), py::arg("patience_s"), py::arg("priority"),
             py::arg("deadline_s"), py::arg("loop"), py::arg("bell"))
        .def("submit_many", &submit_many, py::arg("operations"), py::arg("patience_s"))
        .def("submit_pieces", &submit_pieces, py::arg("futures"), py::arg("future"),
             py::arg("verb"), py::arg("file"), py::arg("numbers"), py::arg("patience_s"),
             py::arg("priority"), py::arg("deadline_s"))
        .def(
            "hear",
            [](Queue& queue, const py::handle& future, const py::handle& bell) {
                const std::shared_ptr<Ticket> ticket = ticket_of(future);
                const std::shared_ptr<Doorbell> rung = bell_of(bell);
                const py::gil_scoped_release unlocked;
                queue.hear(*ticket, rung);
            },
            py::arg("future"), py::arg("bell"))
        .def(
            "serve_loop",
            [](Queue& queue, Doorbell& bell, const Futures& futures, const py::list& want_room,
               const py::function& complete) {
                {
                    const py::gil_scoped_release unlocked;
                    queue.serve_loop(bell);
                }
                std::vector<Outcome> ended = queue.take_ended();
                const bool has_some = !ended.empty();
                complete_each(queue, std::move(ended), futures, want_room, complete);
                return has_some;
            },
            py::arg("bell"), py::arg("futures"), py::arg("want_room"), py::arg("complete"))
        .def(
            "stop",
            [](Queue& queue, const py::handle& future) {
                const std::shared_ptr<Ticket> ticket = ticket_of(future);
                const py::gil_scoped_release unlocked;
                queue.stop(*ticket);
            },
            py::arg("future"))
        .def("use_pool", &Queue::use_pool, py::arg("pool"),
             py::call_guard<py::gil_scoped_release>())
        .def("forget_pool", &Queue::forget_pool, py::arg("pool"),
             py::call_guard<py::gil_scoped_release>())
        .def(
            "pools_settled",
            [](Queue& queue, double patience_s) {
                return queue.pools_settled(nanoseconds(patience_s));
            },
            py::arg("patience_s"), py::call_guard<py::gil_scoped_release>())
        .def("wait_ended",
             [](Queue& queue) {
                 std::vector<Outcome> ended;
                 {
                     const py::gil_scoped_release unlocked;
                     ended = queue.wait_ended();
                 }
                 return list_of(ended);
             })
        .def("wait_for", &wait_for, py::arg("future"), py::arg("timeout_s"), py::arg("futures"),
             py::arg("want_room"), py::arg("complete"))
        .def(
            "close",
            [](Queue& queue, double patience_s) { return queue.close(nanoseconds(patience_s)); },
            py::arg("patience_s"), py::call_guard<py::gil_scoped_release>())
        .def("stats",
             [](const Queue& queue) {
                 std::map<dev_t, DriveStats> all;
                 {
                     const py::gil_scoped_release unlocked;
                     all = queue.stats();
                 }
                 py::dict dict;
                 for (const auto& [device, stats] : all) dict[py::int_(device)] = stats_of(stats);
                 return dict;
             })
        .def("backend_of", &Queue::backend_of, py::arg("file"),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("pending", &Queue::pending);
}
