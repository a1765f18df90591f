#include "backend/c10d/flight_tensors.h"

#include <algorithm>
#include <array>

namespace farandole::backend {
namespace {

using ::c10d::OpType;
using observe::FlightRecord;
using Tensors = std::vector<at::Tensor>;
using Add = void (*)(FlightRecord&, std::uint8_t, at::IntArrayRef, std::int64_t);

void addInput(FlightRecord& record, std::uint8_t dtype, at::IntArrayRef sizes, std::int64_t parts) {
  record.addInput(dtype, sizes, parts);
}

void addOutput(FlightRecord& record, std::uint8_t dtype, at::IntArrayRef sizes, std::int64_t parts) {
  record.addOutput(dtype, sizes, parts);
}

std::uint8_t dtypeOf(const at::Tensor& tensor) { return static_cast<std::uint8_t>(tensor.scalar_type()); }

void addEach(FlightRecord& record, Add add, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) add(record, dtypeOf(tensor), tensor.sizes(), 0);
}

bool isEven(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.sizes() == tensors[0].sizes(); });
}

void addFlat(FlightRecord& record, Add add, const Tensors& tensors) {
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  add(record, dtypeOf(tensors[0]), at::IntArrayRef(total), 0);
}

void addList(FlightRecord& record, Add add, const Tensors& tensors) {
  if (tensors.empty()) return;  // not the root
  if (isEven(tensors)) {
    add(record, dtypeOf(tensors[0]), tensors[0].sizes(), static_cast<std::int64_t>(tensors.size()));
  } else {
    addFlat(record, add, tensors);
  }
}

// All ranks know the list of all parts, and can be compared by it; their own differ.
bool addUneven(FlightRecord& record, const Tensors& list) {
  record.isUneven = !isEven(list);
  if (!record.isUneven) return false;
  record.isInPlace = true;
  addFlat(record, addInput, list);
  return true;
}

}  // namespace

void recordTensors(FlightRecord& record, OpType type, const Tensors& results, const Tensors& others) {
  switch (type) {
    case OpType::BROADCAST:
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
    case OpType::REDUCE:
      record.isInPlace = true;
      addEach(record, addInput, results);
      return;
    case OpType::ALLGATHER:
      if (addUneven(record, results)) return;
      addEach(record, addInput, others);
      addList(record, addOutput, results);
      return;
    case OpType::REDUCE_SCATTER:
      if (addUneven(record, others)) return;
      addList(record, addInput, others);
      addEach(record, addOutput, results);
      return;
    case OpType::GATHER:
      addEach(record, addInput, others);
      if (results.size() > 1) return addList(record, addOutput, results);
      return addEach(record, addOutput, results);
    case OpType::SCATTER:
      addList(record, addInput, others);
      addEach(record, addOutput, results);
      return;
    case OpType::ALLTOALL:
      addList(record, addInput, others);
      addList(record, addOutput, results);
      return;
    case OpType::BARRIER:
    case OpType::_ALLREDUCE_SPARSE:  // in two rounds, of what is in no tensor of the user's
      return;
    default: addEach(record, addInput, others); addEach(record, addOutput, results);
  }
}

}  // namespace farandole::backend
