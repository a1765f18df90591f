// Groups that are made out of a group.
#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/c10d/process_group.h"
#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;
using OptionsPtr = c10::intrusive_ptr<::c10d::Backend::Options>;
using StorePtr = c10::intrusive_ptr<::c10d::Store>;

StorePtr ProcessGroupFarandole::storeForChild(const StorePtr& store) {
  TORCH_CHECK_VALUE(store != nullptr, "farandole: store is None; expected a store that all ranks share");
  std::lock_guard lock(childMutex_);
  lastChildStoreUses_ = lastChildStore_.lock() == store ? lastChildStoreUses_ + 1 : 0;
  lastChildStore_ = store;
  return c10::make_intrusive<::c10d::PrefixStore>("farandole/child/" + std::to_string(lastChildStoreUses_), store);
}

c10::intrusive_ptr<ProcessGroupFarandole> ProcessGroupFarandole::makeChild(const StorePtr& store, int rank, int size,
                                                                           const OptionsPtr& options,
                                                                           const std::vector<int>& ranks) const {
  const std::chrono::milliseconds timeout = options != nullptr ? options->timeout : timeout_.load();
  checkTimeout("split or merge of a group", timeout);
  auto own = c10::make_intrusive<Options>(timeout);
  if (options != nullptr) {
    own->group_name = options->group_name;
    own->global_ranks_in_group = options->global_ranks_in_group;
  }
  // Options may be those of this group.
  const auto& globalRanks = options_->global_ranks_in_group;
  if (!ranks.empty() && globalRanks.size() == static_cast<std::size_t>(size_)) {
    own->global_ranks_in_group.clear();
    for (const int member : ranks) own->global_ranks_in_group.push_back(globalRanks[member]);
  }
  return c10::make_intrusive<ProcessGroupFarandole>(store, rank, size, std::move(own));
}

BackendPtr ProcessGroupFarandole::split(const StorePtr& store, const std::vector<int>& ranks,
                                        const OptionsPtr& options) {
  const StorePtr childStore = storeForChild(store);
  for (const int rank : ranks) checkRank("split", "ranks", rank, size_);
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;
  return makeChild(childStore, static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()), options, ranks);
}

BackendPtr ProcessGroupFarandole::merge(const StorePtr& store, const OptionsPtr& options, const int& rank,
                                        const int& size) {
  return makeChild(storeForChild(store), rank, size, options, {});
}

BackendPtr ProcessGroupFarandole::shrink(const std::vector<std::int64_t>& excluded, int flags,
                                         const OptionsPtr& options) {
  std::vector<bool> stays(size_, true);
  for (const std::int64_t rank : excluded) {
    checkRank("shrink", "ranks_to_exclude", rank, size_);
    stays[rank] = false;
  }
  TORCH_CHECK_VALUE(stays[rank_], "shrink: ranks_to_exclude has this rank, ", rank_,
                    "; expected the call on the ranks that stay");
  std::string name = "farandole/shrink/";
  {
    std::lock_guard lock(childMutex_);
    name += std::to_string(numShrinks_++);
  }
  const auto before = std::count(stays.begin(), stays.begin() + rank_, true);
  std::vector<int> left;
  std::vector<int> without;
  for (int rank = 0; rank < size_; ++rank) (stays[rank] ? left : without).push_back(rank);
  // As with NCCL: what still runs is ended when the caller says that the group is broken.
  constexpr int kShrinkAbort = 1;
  const bool isBroken = (flags & kShrinkAbort) != 0;
  if (isBroken) abort();
  auto child = makeChild(c10::make_intrusive<::c10d::PrefixStore>(name, store_), static_cast<int>(before),
                         static_cast<int>(left.size()), options, left);
  if (!isBroken && !without.empty()) child->connectFrom(*this, without);
  return child;
}

}  // namespace farandole::backend
