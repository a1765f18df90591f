#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "ddp/reduction.h"

namespace farandole::ddp {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct ModelParameter {
  std::string name;
  at::Tensor tensor;
  bool isExpert = false;           // Megatron's param.allreduce == False
  bool isSharedEmbedding = false;  // Megatron's param.shared_embedding
};

// What a rank brings to a data-parallel group, in registration order.
struct Model {
  std::vector<ModelParameter> parameters;  // frozen ones too
  std::vector<NamedTensor> buffers;
};

// Who holds the same. All ranks are `dense`'s; `experts` are those with the same experts.
struct DataParallelGroups {
  DataParallelGroups(Group group) : dense{group, nullptr}, experts{std::move(group), nullptr} {}  // NOLINT
  DataParallelGroups(Replicas dense, Replicas experts) : dense(std::move(dense)), experts(std::move(experts)) {}

  Replicas dense;
  Replicas experts;
};

// One fact that must be the same on all ranks, e.g. {"parameter 'fc.weight'", "[4, 3] Float, trainable"}.
struct Fact {
  std::string name;
  std::string value;
};

std::vector<Fact> factsOf(const Model& model);

// Compares `facts` over the group: a collective of 16 bytes when they agree.
// Throws on every rank the same ValueError, which names the first fact that differs
// and the first rank that differs in it from rank 0. A rank that cannot take part
// gives a non-empty `refusal`: then every rank throws, naming that rank and it.
void checkAgreement(c10d::ProcessGroup& group, c10::Device device, const std::vector<Fact>& facts,
                    const std::string& refusal = "");

// Why broadcastModel() cannot; empty when it can.
std::string refusalOfBroadcast(const Model& model);

// Overwrites tensors with those of one rank, coalesced by type.
void broadcastTensors(const Group& group, const std::vector<at::Tensor>& tensors, int rank = 0);

// Overwrites parameters and buffers with those of rank 0, experts with those of rank 0 of their own group,
// coalesced by type.
void broadcastModel(const DataParallelGroups& groups, const Model& model);

}  // namespace farandole::ddp
