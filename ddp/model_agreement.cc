#include "ddp/model_agreement.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "backend/common/digest.h"

namespace farandole::ddp {
namespace {

constexpr size_t kBroadcastBytes = size_t{250} << 20;
constexpr char kFactEnd = '\x1e';
constexpr char kNameEnd = '\x1f';
constexpr std::string_view kRefusal = "\x1d";  // starts a table that is a refusal; no fact starts so

std::string valueOf(const at::Tensor& tensor) {
  std::ostringstream text;
  if (tensor.is_nested()) return "nested";
  text << tensor.sizes() << " " << tensor.scalar_type() << " on " << tensor.device().type();
  // Gradients lie in buffers as their parameters do in memory.
  if (tensor.layout() == at::kStrided && !tensor.is_contiguous()) text << " with strides " << tensor.strides();
  if (tensor.is_conj()) text << ", conjugated";
  if (tensor.is_neg()) text << ", negated";
  return text.str();
}

std::string serialize(const std::vector<Fact>& facts, const std::string& refusal) {
  if (!refusal.empty()) return std::string(kRefusal) + refusal;
  std::string table;
  for (const Fact& fact : facts) table += fact.name + kNameEnd + fact.value + kFactEnd;
  return table;
}

std::vector<Fact> parse(std::string_view table) {
  std::vector<Fact> facts;
  while (!table.empty()) {
    const size_t nameEnd = table.find(kNameEnd);
    const size_t factEnd = table.find(kFactEnd, nameEnd);
    facts.push_back(
        {std::string(table.substr(0, nameEnd)), std::string(table.substr(nameEnd + 1, factEnd - nameEnd - 1))});
    table.remove_prefix(factEnd + 1);
  }
  return facts;
}

// What is in memory, whatever it stands for there: alike on all ranks. Complex numbers no backend knows, float8 not
// every one.
at::Tensor inKnownType(at::Tensor data) {
  if (data.is_conj()) data = data.conj();
  if (data.is_neg()) data = data._neg_view();
  if (data.is_complex()) return at::view_as_real(data);
  return c10::isFloat8Type(data.scalar_type()) ? data.view(at::kByte) : data;
}

// Why it cannot be overwritten with another rank's; empty where it can.
std::string refusalOf(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "is nested";
  if (tensor.layout() != at::kStrided) return c10::str("has the layout ", tensor.layout());
  if (tensor.is_quantized()) return "is quantized";
  if (tensor._is_zerotensor()) return "has no memory of its own";
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) return "has elements that share memory (expand())";
  return "";
}

int64_t digestOf(std::string_view text) {
  Digest digest;
  digest.add(text);
  return static_cast<int64_t>(digest.value());
}

// The first index at which the two differ; nothing when they are equal.
std::optional<size_t> firstDifference(const std::vector<Fact>& left, const std::vector<Fact>& right) {
  const size_t common = std::min(left.size(), right.size());
  for (size_t i = 0; i < common; ++i) {
    if (left[i].name != right[i].name || left[i].value != right[i].value) return i;
  }
  if (left.size() == right.size()) return std::nullopt;
  return common;
}

std::string factAt(const std::vector<Fact>& facts, size_t index) {
  if (index >= facts.size()) return "nothing more";
  return facts[index].name + ": " + facts[index].value;
}

[[noreturn]] void throwDifference(const std::vector<std::string>& tables) {
  const std::vector<Fact> first = parse(tables[0]);
  size_t index = std::string::npos;
  size_t rank = 0;
  for (size_t other = 1; other < tables.size(); ++other) {
    const auto difference = firstDifference(first, parse(tables[other]));
    if (difference && *difference < index) {
      index = *difference;
      rank = other;
    }
  }
  TORCH_CHECK(rank != 0, "farandole.ddp: ranks disagree on the hash of equal models");
  TORCH_CHECK_VALUE(false, "farandole.ddp: the model must be the same on all ranks; first difference: rank 0 has ",
                    factAt(first, index), "; rank ", rank, " has ", factAt(parse(tables[rank]), index));
}

}  // namespace

std::vector<Fact> factsOf(const Model& model) {
  std::vector<Fact> facts;
  for (const ModelParameter& parameter : model.parameters) {
    facts.push_back({"parameter '" + parameter.name + "'",
                     valueOf(parameter.tensor) + (parameter.tensor.requires_grad() ? ", trainable" : ", frozen") +
                         (parameter.isExpert ? ", expert" : "") +
                         (parameter.isSharedEmbedding ? ", shared embedding" : "")});
  }
  for (const auto& [name, tensor] : model.buffers) facts.push_back({"buffer '" + name + "'", valueOf(tensor)});
  return facts;
}

std::string refusalOfBroadcast(const Model& model) {
  const auto describe = [](const std::string& name, const at::Tensor& tensor) {
    const std::string refusal = refusalOf(tensor);
    return refusal.empty() ? ""
                           : name + "' " + refusal +
                                 ", which other ranks' cannot be copied to: expected a dense one with memory, or one "
                                 "that _set_params_and_buffers_to_ignore_for_model leaves alone";
  };
  for (const ModelParameter& parameter : model.parameters) {
    std::string refusal = describe("parameter '" + parameter.name, parameter.tensor);
    if (!refusal.empty()) return refusal;
  }
  for (const auto& [name, tensor] : model.buffers) {
    std::string refusal = describe("buffer '" + name, tensor);
    if (!refusal.empty()) return refusal;
  }
  return "";
}

void checkAgreement(c10d::ProcessGroup& group, c10::Device device, const std::vector<Fact>& facts,
                    const std::string& refusal) {
  const std::string table = serialize(facts, refusal);
  at::Tensor digest = at::empty({2}, at::kLong);
  digest.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(table.size());
  digest.mutable_data_ptr<int64_t>()[1] = digestOf(table);
  bool agree = refusal.empty();
  for (const at::Tensor& theirs : gatherTensors(group, digest, device)) agree = agree && theirs.equal(digest);
  // All ranks see the same digests; only when all refuse alike does `refusal` decide, and then on every rank.
  if (agree) return;
  const std::vector<std::string> tables = gatherTexts(group, table, device);
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    const std::string_view theirs = tables[rank];
    if (theirs.starts_with(kRefusal)) {
      TORCH_CHECK_VALUE(false, "farandole.ddp: rank ", rank, ": ", theirs.substr(kRefusal.size()));
    }
  }
  throwDifference(tables);
}

void broadcastTensors(const Group& group, const std::vector<at::Tensor>& tensors, int rank) {
  std::vector<at::Tensor> real;
  for (const at::Tensor& tensor : tensors) {
    // With a version of its own: buffers change between a forward and its backward, as under torch's DDP.
    const at::Tensor data = tensor.variable_data();
    if (data.numel() > 0) real.push_back(inKnownType(data));
  }
  if (group && group->getSize() > 1 && !real.empty()) c10d::broadcast_coalesced(group, real, kBroadcastBytes, rank);
}

void broadcastModel(const DataParallelGroups& groups, const Model& model) {
  std::vector<at::Tensor> dense;
  std::vector<at::Tensor> experts;
  for (const ModelParameter& parameter : model.parameters) {
    (parameter.isExpert ? experts : dense).push_back(parameter.tensor);
  }
  for (const auto& [name, tensor] : model.buffers) dense.push_back(tensor);
  // First to rank 0 of every instance, then within each.
  for (const Group& group : {groups.dense.instances, groups.dense.group}) broadcastTensors(group, dense);
  for (const Group& group : {groups.experts.instances, groups.experts.group}) broadcastTensors(group, experts);
}

}  // namespace farandole::ddp
