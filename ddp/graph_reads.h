#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace farandole::ddp {

// What the autograd graph of a forward tells of when it has read parameters, by numbers of operations: of those that
// are differentiated each has the next one of its thread.
class GraphReads {
 public:
  // `groups`: by parameter; these outlive it.
  GraphReads(const std::vector<at::Tensor>& parameters, const std::vector<int>& groups);

  // The parameter that `outputs` depend on which was read first, of those that were before their time; -1: none was.
  // What ran before `began` is another forward's, excepted views of parameters, which are read by what takes them.
  // `since`: by group, the operation from which on its parameters may be read; -1: they may not.
  int tooEarly(const std::vector<at::Tensor>& outputs, std::uint64_t began,
               const std::vector<std::int64_t>& since) const;

 private:
  struct Parameter {
    int index;
    int group;
  };
  std::unordered_map<const at::TensorImpl*, Parameter> parameters_;
};

}  // namespace farandole::ddp
