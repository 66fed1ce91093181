// bitsparse._C: what Python needs beyond the operators that loading the library registers. No tensor crosses this
// module, so it needs no torch headers of Python's and compiles in seconds.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bitsparse/arena.h"
#include "bitsparse/build_info.h"
#include "bitsparse/saved_tensor_hooks.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

py::dict to_dict(const bitsparse::MemoryStats& stats) {
  return py::dict("capacity"_a = stats.capacity, "in_use"_a = stats.in_use, "high_water"_a = stats.high_water,
                  "spilled"_a = stats.spilled, "live_leases"_a = stats.live_leases, "dense_bytes"_a = stats.dense_bytes,
                  "payload_bytes"_a = stats.payload_bytes, "payload_ratio"_a = stats.payload_ratio,
                  "waits"_a = stats.waits, "growths"_a = stats.growths, "failures"_a = stats.failures,
                  "leases_total"_a = stats.leases_total);
}

// Waiting for the device must not hold up other Python threads.
bitsparse::MemoryStats stats_without_gil(bitsparse::Arena& arena, bool synchronize) {
  py::gil_scoped_release release;
  return arena.memory_stats(synchronize);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Binding of libbitsparse; see the package bitsparse";

  // Local: exceptions of the operators are PyTorch's to translate.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const c10::OutOfMemoryError& e) {
      py::set_error(py::module_::import("torch").attr("OutOfMemoryError"), e.what_without_backtrace());
    } catch (const c10::ValueError& e) {
      py::set_error(PyExc_ValueError, e.what_without_backtrace());
    } catch (const c10::TypeError& e) {
      py::set_error(PyExc_TypeError, e.what_without_backtrace());
    } catch (const c10::Error& e) {
      py::set_error(PyExc_RuntimeError, e.what_without_backtrace());
    }
  });

  m.def("version", [] { return bitsparse::build_info().version; });
  m.def("build_info", [] {
    const bitsparse::BuildInfo& info = bitsparse::build_info();
    return py::dict("version"_a = info.version, "torch"_a = info.torch,
                    "cuda"_a = info.cuda.empty() ? py::object(py::none()) : py::object(py::str(info.cuda)),
                    "architectures"_a = info.architectures, "compiler"_a = info.compiler);
  });

  py::class_<bitsparse::Arena, std::shared_ptr<bitsparse::Arena>>(m, "Arena")
      .def(py::init([](const std::string& device, std::optional<std::int64_t> capacity,
                       std::optional<double> density_bound, bool worst_case, std::int64_t spill_bytes) {
             bitsparse::ArenaOptions options;
             options.capacity = capacity;
             options.density_bound = density_bound;
             options.worst_case = worst_case;
             options.spill_bytes = spill_bytes;
             return bitsparse::Arena::create(c10::Device(device), options);
           }),
           "device"_a, py::kw_only(), "capacity"_a = py::none(), "density_bound"_a = py::none(), "worst_case"_a = false,
           "spill_bytes"_a = bitsparse::ArenaOptions{}.spill_bytes)
      .def_property_readonly("device", [](const bitsparse::Arena& arena) { return arena.device().str(); })
      .def(
          "memory_stats",
          [](bitsparse::Arena& arena, bool synchronize) { return to_dict(stats_without_gil(arena, synchronize)); },
          "synchronize"_a = false)
      .def("reset_peak_memory_stats", &bitsparse::Arena::reset_peak_memory_stats,
           py::call_guard<py::gil_scoped_release>())
      .def("trim", &bitsparse::Arena::trim, py::call_guard<py::gil_scoped_release>())
      .def("use", [](std::shared_ptr<bitsparse::Arena> arena) { bitsparse::push_arena(std::move(arena)); })
      .def("unuse", [](const bitsparse::Arena& arena) { bitsparse::pop_arena(arena); });

  m.def("set_hooks_keep_tensors", &bitsparse::set_hooks_keep_tensors, "keep"_a);

  m.def(
      "default_arena", [](const std::string& device) { return bitsparse::default_arena(c10::Device(device)); },
      "device"_a);
  m.def(
      "has_default_arena", [](const std::string& device) { return bitsparse::has_default_arena(c10::Device(device)); },
      "device"_a);
}
