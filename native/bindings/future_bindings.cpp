#include "future_bindings.hpp"

#include <structmember.h>

#include <cstddef>
#include <new>
#include <utility>

namespace py = pybind11;
using deepnvme::Ticket;

namespace {

// All pointers own what they point to.
struct FutureBase {
    PyObject_HEAD;
    PyObject* waiter;
    PyObject* about;
    PyObject* memory;
    PyObject* loop;
    PyObject* awaiting;  // a list
    PyObject* state;
    PyObject* result;
    PyObject* exception;
    char seen;  // its lock, callbacks or waiters were looked at
    char told;  // its callbacks and waiters were called, or are about to be
    std::shared_ptr<Ticket> ticket;
};

PyTypeObject* future_type = nullptr;
// The names of Future's states.
PyObject* pending = nullptr;
PyObject* finished = nullptr;

FutureBase* base_of(PyObject* object) {
    return reinterpret_cast<FutureBase*>(object);
}

bool is_future(py::handle object) {
    return PyObject_TypeCheck(object.ptr(), future_type) != 0;
}

void keep(PyObject*& place, PyObject* value) {
    PyObject* before = place;
    place = Py_NewRef(value);
    Py_XDECREF(before);
}

PyObject* new_future(PyTypeObject* type, PyObject* /*arguments*/, PyObject* /*names*/) {
    PyObject* object = type->tp_alloc(type, 0);  // all zeros
    if (object == nullptr) return nullptr;
    FutureBase* future = base_of(object);
    new (&future->ticket) std::shared_ptr<Ticket>();
    for (PyObject** place : {&future->waiter, &future->about, &future->memory, &future->loop,
                             &future->result, &future->exception})
        *place = Py_NewRef(Py_None);
    future->state = Py_NewRef(pending);
    future->awaiting = PyList_New(0);
    try {
        future->ticket = std::make_shared<Ticket>();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    if (future->awaiting == nullptr || !future->ticket) {
        Py_DECREF(object);
        return nullptr;
    }
    return object;
}

int init_future(PyObject* self, PyObject* arguments, PyObject* names) {
    PyObject *waiter = nullptr, *about = nullptr, *memory = Py_None, *loop = Py_None;
    static const char* const known[] = {"waiter", "about", "memory", "loop", nullptr};
    if (PyArg_ParseTupleAndKeywords(arguments, names, "OO|OO:IOFuture", const_cast<char**>(known),
                                    &waiter, &about, &memory, &loop) == 0)
        return -1;
    FutureBase* future = base_of(self);
    keep(future->waiter, waiter);
    keep(future->about, about);
    keep(future->memory, memory);
    keep(future->loop, loop);
    return 0;
}

int traverse_future(PyObject* self, visitproc visit, void* arg) {
    const FutureBase* future = base_of(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(future->waiter);
    Py_VISIT(future->about);
    Py_VISIT(future->memory);
    Py_VISIT(future->loop);
    Py_VISIT(future->awaiting);
    Py_VISIT(future->result);
    Py_VISIT(future->exception);
    return 0;
}

int clear_future(PyObject* self) {
    FutureBase* future = base_of(self);
    Py_CLEAR(future->waiter);
    Py_CLEAR(future->about);
    Py_CLEAR(future->memory);
    Py_CLEAR(future->loop);
    Py_CLEAR(future->awaiting);
    Py_CLEAR(future->result);
    Py_CLEAR(future->exception);
    return 0;
}

void free_future(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_future(self);
    FutureBase* future = base_of(self);
    Py_CLEAR(future->state);
    future->ticket.~shared_ptr();
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* cancel_ticket(PyObject* self, PyObject* /*none*/) {
    return PyBool_FromLong(base_of(self)->ticket->cancel() ? 1 : 0);
}

PyObject* release_waiters(PyObject* self, PyObject* /*none*/) {
    base_of(self)->ticket->release_waiters();
    Py_RETURN_NONE;
}

PyObject* is_taken(PyObject* self, void* /*none*/) {
    return PyBool_FromLong(base_of(self)->ticket->taken() ? 1 : 0);
}

// Ends it, unless it was looked at.
bool end(FutureBase* future, PyObject* result, PyObject* exception) {
    // Before the future ends: a thread that it wakes may resize or reuse the memory at once. What
    // held the memory may run Python at its end, so the future is looked at after that.
    keep(future->memory, Py_None);
    // From here on nothing lets go of the GIL, also until the caller has looked at `awaiting`: a
    // thread that sets `seen`, or a coroutine that adds itself, does so before or finds the end.
    if (future->seen != 0) return false;
    keep(future->result, result);
    keep(future->exception, exception);
    keep(future->state, finished);
    return true;
}

PyObject* end_unseen_method(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "expected a result and an error, got %zd arguments", count);
        return nullptr;
    }
    return PyBool_FromLong(end(base_of(self), arguments[0], arguments[1]) ? 1 : 0);
}

}  // namespace

const std::shared_ptr<Ticket>& ticket_of(py::handle future) {
    if (!is_future(future)) throw py::type_error("expected an IOFuture");
    return base_of(future.ptr())->ticket;
}

py::object make_future(py::handle kind, py::handle waiter, py::handle about, py::handle memory,
                       py::handle loop) {
    auto* type = reinterpret_cast<PyTypeObject*>(kind.ptr());
    if (PyType_Check(kind.ptr()) == 0 || PyType_IsSubtype(type, future_type) == 0)
        throw py::type_error("expected a class of futures");
    auto made = py::reinterpret_steal<py::object>(new_future(type, nullptr, nullptr));
    if (!made) throw py::error_already_set();
    FutureBase* future = base_of(made.ptr());
    keep(future->waiter, waiter.ptr());
    keep(future->about, about.ptr());
    keep(future->memory, memory.ptr());
    keep(future->loop, loop.ptr());
    return made;
}

std::optional<bool> end_unseen(py::handle future, std::uint64_t done) {
    const py::int_ result(done);
    FutureBase* base = base_of(future.ptr());
    if (!end(base, result.ptr(), Py_None)) return std::nullopt;
    return PyList_GET_SIZE(base->awaiting) > 0;
}

void bind_future(py::module_& module) {
    // T_OBJECT_EX is the kind that CPython reads fastest.
    static PyMemberDef members[] = {
        {"_waiter", T_OBJECT_EX, offsetof(FutureBase, waiter), READONLY, nullptr},
        {"_about", T_OBJECT_EX, offsetof(FutureBase, about), READONLY, nullptr},
        {"_memory", T_OBJECT_EX, offsetof(FutureBase, memory), 0, nullptr},
        {"_loop", T_OBJECT_EX, offsetof(FutureBase, loop), READONLY, nullptr},
        {"_awaiting", T_OBJECT_EX, offsetof(FutureBase, awaiting), READONLY, nullptr},
        {"_state", T_OBJECT_EX, offsetof(FutureBase, state), 0, nullptr},
        {"_result", T_OBJECT_EX, offsetof(FutureBase, result), 0, nullptr},
        {"_exception", T_OBJECT_EX, offsetof(FutureBase, exception), 0, nullptr},
        {"_seen", T_BOOL, offsetof(FutureBase, seen), 0, nullptr},
        {"_is_told", T_BOOL, offsetof(FutureBase, told), 0, nullptr},
        {nullptr, 0, 0, 0, nullptr},
    };
    static PyMethodDef methods[] = {
        {"_cancel_ticket", &cancel_ticket, METH_NOARGS, nullptr},
        {"_release_waiters", &release_waiters, METH_NOARGS, nullptr},
        {"_end_unseen",
         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&end_unseen_method)),
         METH_FASTCALL, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyGetSetDef properties[] = {
        {"_is_taken", &is_taken, nullptr, nullptr, nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(&new_future)},
        {Py_tp_init, reinterpret_cast<void*>(&init_future)},
        {Py_tp_dealloc, reinterpret_cast<void*>(&free_future)},
        {Py_tp_traverse, reinterpret_cast<void*>(&traverse_future)},
        {Py_tp_clear, reinterpret_cast<void*>(&clear_future)},
        {Py_tp_members, members},
        {Py_tp_methods, methods},
        {Py_tp_getset, properties},
        {0, nullptr},
    };
    static PyType_Spec spec = {"deepnvme._native.FutureBase", sizeof(FutureBase), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                               slots};
    pending = PyUnicode_InternFromString("PENDING");
    finished = PyUnicode_InternFromString("FINISHED");
    const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
    if (!type || pending == nullptr || finished == nullptr) throw py::error_already_set();
    future_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.ptr()));
    module.attr("FutureBase") = type;
}
