#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ddp/model_agreement.h"

namespace farandole::ddp {

// What is wrong with a round on one rank, for people. `unused`: the parameters, by index, that got no gradient.

// A gradient that came cannot count; empty where it can, or where it is for its place to see.
std::string troubleWith(const ModelParameter& parameter, const at::Tensor& brought);

// More gradients came to a parameter in a round than one, or than the round that has counted them had.
std::string describeTwice(const std::string& name);
std::string describeMore(const std::string& name, int counted, bool endsWithBackward);

// A forward came before its end: that of the backward, or, by the wrapper's name, of the call that ends it.
std::string describeAbandoned(const std::vector<ModelParameter>& parameters, const std::vector<int>& unused,
                              const std::string& ending);

// Parameters are not what they were; empty where both are. `retyped` lost the hook that tells of their gradients,
// `moved` are not where their optimizer updates them.
std::string describeChange(const std::vector<ModelParameter>& parameters, const std::vector<int>& retyped,
                           const std::vector<int>& moved);

// It has some, and that is an error. `remedy`: what to do where it is meant.
std::string describeUnused(const std::vector<ModelParameter>& parameters, const std::vector<int>& unused,
                           const std::string& remedy);

// Ranks have had unlike numbers of forwards, since the last round, that were to be trained on and gave outputs that
// need no gradient: so many each, by rank of the group, where one has such a number; `most` and `fewest` of all ranks.
std::string describeUntrained(const std::vector<std::optional<int>>& byRank, int most, int fewest);

}  // namespace farandole::ddp
