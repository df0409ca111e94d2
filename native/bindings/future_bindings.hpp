// The base class of IOFuture, through which native code makes and ends futures without calling
// Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "deepnvme/operation.hpp"

// Adds that class to deepnvme._native; called by bind_queue.
void bind_future(pybind11::module_& module);

// The ticket of a future. Throws TypeError for anything else.
const std::shared_ptr<deepnvme::Ticket>& ticket_of(pybind11::handle future);

// A future of the class `kind`, as `kind(waiter, about, memory, loop)` makes it.
pybind11::object make_future(pybind11::handle kind, pybind11::handle waiter, pybind11::handle about,
                             pybind11::handle memory, pybind11::handle loop);

// Ends a future with so many bytes, and returns whether a coroutine awaits it. Nothing where
// something may listen to it: IOFuture's own methods end it then, with its lock.
std::optional<bool> end_unseen(pybind11::handle future, std::uint64_t done);
