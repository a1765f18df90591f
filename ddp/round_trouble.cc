#include "ddp/round_trouble.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>

namespace farandole::ddp {
namespace {

constexpr std::size_t kMaxNames = 20;  // in one error, and ranks

std::string joinNames(const std::vector<ModelParameter>& parameters, const std::vector<int>& indices) {
  std::string text;
  for (std::size_t i = 0; i < std::min(indices.size(), kMaxNames); ++i) {
    text += (i == 0 ? "'" : ", '") + parameters[indices[i]].name + "'";
  }
  if (indices.size() > kMaxNames) text += " and " + std::to_string(indices.size() - kMaxNames) + " more";
  return text;
}

// "parameter 'a' has <become> since the module was wrapped", and how many more have.
std::string nameFirst(const std::vector<ModelParameter>& parameters, const std::vector<int>& indices,
                      const std::string& become) {
  std::string text = "parameter '" + parameters[indices[0]].name + "' has " + become + " since the module was wrapped";
  if (indices.size() > 1) text += ", as have " + std::to_string(indices.size() - 1) + " more";
  return text;
}

}  // namespace

std::string troubleWith(const ModelParameter& parameter, const at::Tensor& brought) {
  if (at::GradMode::is_enabled()) {
    return "backward(create_graph=True) is not supported: parameter '" + parameter.name +
           "' would get a gradient that is part of a graph";
  }
  if (!brought.defined() || parameter.tensor.grad().defined()) return "";
  return "the gradient of parameter '" + parameter.name + "' was removed by a hook before it could be reduced";
}

std::string describeTwice(const std::string& name) {
  return "parameter '" + name +
         "' got its gradient twice in one backward that synchronizes: is it used by several reentrant checkpoints? Use "
         "checkpoint(..., use_reentrant=False), or, where every backward is alike, static_graph=True or "
         "_set_static_graph()";
}

std::string describeMore(const std::string& name, int counted, bool endsWithBackward) {
  return "parameter '" + name + "' got more gradients than the " + std::to_string(counted) +
         " that it had in the first " +
         (endsWithBackward
              ? "backward that synchronizes: static_graph=True expects every backward to be like that one"
              : "batch that was reduced: overlap_grad_reduce=True expects every batch to be like that one, "
                "in all backwards outside of no_sync()");
}

std::string describeAbandoned(const std::vector<ModelParameter>& parameters, const std::vector<int>& unused,
                              const std::string& ending) {
  if (!ending.empty()) {
    return "a forward began before " + ending + " was called. It was called now, so that other ranks do not wait";
  }
  return "a forward began before the last backward that synchronizes had ended (did it raise?). Without a gradient in "
         "it: " +
         (unused.empty() ? "none" : joinNames(parameters, unused)) +
         ". It was ended now, so that other ranks do not wait; its gradients are not to be used";
}

std::string describeChange(const std::vector<ModelParameter>& parameters, const std::vector<int>& retyped,
                           const std::vector<int>& moved) {
  if (!retyped.empty()) {
    return nameFirst(parameters, retyped, "changed its type or device") +
           " (double(), to(...), set_()): expected the module to be wrapped again after that";
  }
  if (!moved.empty()) {
    return nameFirst(parameters, moved, "got other memory") +
           " (p.data = ...), where its optimizer does not update it: expected values to be copied (p.data.copy_(...))";
  }
  return "";
}

std::string describeUnused(const std::vector<ModelParameter>& parameters, const std::vector<int>& unused,
                           const std::string& remedy) {
  return std::to_string(unused.size()) + " of " + std::to_string(parameters.size()) +
         " parameters got no gradient in a backward that synchronizes: " + joinNames(parameters, unused) +
         ". They counted as zero, or as what had accumulated before, so that no other rank waits. Where this is "
         "meant, " +
         remedy;
}

std::string describeUntrained(const std::vector<std::optional<int>>& byRank, int most, int fewest) {
  std::string text;
  std::size_t named = 0;
  for (std::size_t rank = 0; rank < byRank.size(); ++rank) {
    if (byRank[rank].value_or(fewest) == fewest || ++named > kMaxNames) continue;
    text += (named == 1 ? "rank " : ", rank ") + std::to_string(rank) + (named == 1 ? " of the group" : "") + " had " +
            std::to_string(*byRank[rank]);
  }
  if (named > kMaxNames) text += " and " + std::to_string(named - kMaxNames) + " more had some";
  if (named == 0) text = "a rank of another optimizer instance had " + std::to_string(most);
  return text + ", all others " + std::to_string(fewest) +
         " forwards since the backward before whose outputs need no gradient, though the wrapper was called in "
         "training, outside of torch.no_grad() and no_sync() (what the module does inside itself, as detach(), is not "
         "seen). No backward comes to these, and no average is made where the other ranks make theirs: those of now "
         "may be of different steps, and are not to be used. Where such a forward is not to be trained on (an agent "
         "acts, samples are drawn), expected the wrapper to be called inside torch.no_grad(), or model.module in its "
         "place. Where a batch has nothing to train on, expected outputs that need a gradient (e.g. with "
         "0 * parameter.sum() added), or start_grad_sync() and finish_grad_sync() in the place of the backward";
}

}  // namespace farandole::ddp
