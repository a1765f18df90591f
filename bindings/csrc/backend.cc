#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/c10d/errors.h"
#include "backend/c10d/flight_log.h"
#include "backend/c10d/process_group.h"
#include "bindings/csrc/layers.h"
#ifdef FARANDOLE_HAS_NCCL
#include "backend/transport/nccl/nccl_api.h"
#endif

namespace farandole::python {
namespace py = pybind11;
namespace {

using backend::BatchEntry;
using backend::ProcessGroupFarandole;
using Handle = c10::intrusive_ptr<ProcessGroupFarandole>;

c10::intrusive_ptr<ProcessGroupFarandole::Options> ownOptions(const ::c10d::DistributedBackendOptions& options) {
  auto own = c10::make_intrusive<ProcessGroupFarandole::Options>(
      std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout));
  own->group_name = options.group_id;
  for (const std::int64_t rank : options.global_ranks_in_group) own->global_ranks_in_group.push_back(rank);
  // torch names none for the default group.
  for (int rank = 0; options.global_ranks_in_group.empty() && rank < options.group_size; ++rank) {
    own->global_ranks_in_group.push_back(rank);
  }
  return own;
}

Handle create(const ::c10d::DistributedBackendOptions& options) {
  return c10::make_intrusive<ProcessGroupFarandole>(options.store, options.group_rank, options.group_size,
                                                    ownOptions(options));
}

void refuse(const ::c10d::DistributedBackendOptions& options, const std::string& reason) {
  ProcessGroupFarandole::refuse(options.store, options.group_rank, options.group_size, *ownOptions(options), reason);
}

// torch.cuda.MemPool: its classes in C++ differ between versions, its id does not.
backend::CudaPoolId poolId(const py::object& pool) {
  const auto id = pool.attr("id").cast<std::pair<std::uint64_t, std::uint64_t>>();
  return {id.first, id.second};
}

void registerMemPool(ProcessGroupFarandole& group, const py::object& pool, bool symm) {
  const backend::CudaPoolId id = poolId(pool);
  std::shared_ptr<void> keeper(new py::object(pool), [](py::object* kept) {
    if (!Py_IsInitialized()) return;  // it went with the interpreter
    py::gil_scoped_acquire gil;
    delete kept;
  });
  py::gil_scoped_release noGil;
  group.registerMemPool(id, symm, std::move(keeper));
}

void deregisterMemPool(ProcessGroupFarandole& group, const py::object& pool) {
  const backend::CudaPoolId id = poolId(pool);
  py::gil_scoped_release noGil;
  group.deregisterMemPool(id);
}

std::map<int, backend::WorkPtr> batchP2p(ProcessGroupFarandole& group, const std::vector<py::tuple>& ops,
                                         const std::string& label) {
  std::vector<BatchEntry> entries;
  entries.reserve(ops.size());
  for (const py::tuple& op : ops) {
    entries.push_back({op[0].cast<bool>() ? p2p::Direction::kSend : p2p::Direction::kRecv, op[1].cast<at::Tensor>(),
                       op[2].cast<int>(), op[3].cast<int>()});
  }
  py::gil_scoped_release noGil;
  return group.batchP2p(std::move(entries), label);
}

backend::FlightLog& flightLog() {
  auto log = backend::FlightLog::acquire();
  backend::throwIfError(log.status());
  return **log;
}

py::bytes pickleFlightLog() {
  std::string pickle;
  {
    py::gil_scoped_release noGil;
    pickle = flightLog().pickle();
  }
  return py::bytes(pickle);
}

std::string dumpFlightLog(const std::string& path) {
  auto written = flightLog().dump(path);
  backend::throwIfError(written.status());
  return *written;
}

// "2.30.7", or why there is none.
std::string ncclStatus() {
#ifdef FARANDOLE_HAS_NCCL
  const auto api = transport::NcclApi::load();
  if (!api) return api.status().toString();
  const auto version = api->version();
  return version ? *version : version.status().toString();
#else
  return "built without NCCL's headers (FARANDOLE_CUDA)";
#endif
}

}  // namespace

void bindBackend(py::module_& module) {
  // The Python classes of what is inherited and returned are torch's.
  py::module_::import("torch._C._distributed_c10d");
  const py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");

  using Options = ProcessGroupFarandole::Options;
  py::class_<ProcessGroupFarandole, Handle> group(module, "ProcessGroupFarandole", base,
                                                  "The c10d backend; made by init_process_group(\"farandole\").");
  py::class_<Options, c10::intrusive_ptr<Options>>(group, "Options", base.attr("Options"))
      .def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      // torch 2.11's split_group copies the parent's.
      .def("__copy__", [](const Options& self) { return c10::make_intrusive<Options>(self); })
      .def(
          "__deepcopy__", [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); },
          py::arg("memo"));
  group
      // torch 2.11 binds none for a backend; a copy, as getBackendOptions is.
      .def_property_readonly("options", &ProcessGroupFarandole::copyOptions)
      .def("batch_p2p", &batchP2p, py::arg("ops"), py::arg("label"))
      .def("connect_edges", &ProcessGroupFarandole::connectEdges, py::arg("device"), py::arg("send_to"),
           py::arg("recv_from"), py::call_guard<py::gil_scoped_release>())
      // torch 2.11 binds no way to set it.
      .def("set_timeout", &ProcessGroupFarandole::setTimeout, py::arg("timeout"))
      // torch has those do it that are not in a new group, where NCCL's communicator is split: here members only meet.
      .def(
          "perform_nocolor_split", [](const ProcessGroupFarandole&, const py::object&) {}, py::arg("device"))
      .def("register_mem_pool", &registerMemPool, py::arg("pool"), py::arg("symm") = false,
           "Lets NCCL use the memory that this torch.cuda.MemPool has now without a copy, in collectives on CUDA. "
           "symm: as symmetric memory, which all ranks register together.")
      .def("deregister_mem_pool", &deregisterMemPool, py::arg("pool"),
           "Undoes register_mem_pool, once nothing that uses the pool's memory is under way.")
      // torch 2.15 binds it for every backend, 2.11 for none.
      .def("memory_stats", &ProcessGroupFarandole::getMemoryStats, py::call_guard<py::gil_scoped_release>(),
           "What NCCL has allocated for this group, by ncclCommMemStats: bytes in \"total\", \"persist\" and "
           "\"suspend\", and whether it is \"suspended\".")
      .def("transport_of", &ProcessGroupFarandole::transportOf, py::arg("rank"),
           py::call_guard<py::gil_scoped_release>())
      .def("algorithms", &ProcessGroupFarandole::algorithms);

  module.def("nccl_status", &ncclStatus, "The version of the NCCL that torch has loaded, or why it cannot be used.");
  module.def("leave", &backend::ProcessContext::leaveAtExit, py::call_guard<py::gil_scoped_release>(),
             "Says goodbye to the peers and ends the background work; for the end of the process.");
  module.def("flight_recorder_keeper", [] { return flightLog().keeper(); });
  module.def("flight_recorder_pickle", &pickleFlightLog);
  module.def("dump_flight_recorder", &dumpFlightLog, py::arg("path"), py::call_guard<py::gil_scoped_release>());
  module.def("create_backend", &create, py::arg("options"), py::call_guard<py::gil_scoped_release>());
  module.def("refuse_backend", &refuse, py::arg("options"), py::arg("reason"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace farandole::python
