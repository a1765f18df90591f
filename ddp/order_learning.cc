#include "ddp/order_learning.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace farandole::ddp {
namespace {

std::vector<int> latestOf(std::vector<int> places, const std::vector<int>& others) {
  std::transform(places.begin(), places.end(), others.begin(), places.begin(),
                 [](int a, int b) { return std::max(a, b); });
  return places;
}

}  // namespace

OrderLearning::OrderLearning(std::size_t groups) : recent_(groups, -1), told_(groups, -1), agreed_(groups, -1) {}

void OrderLearning::note(const std::vector<int>& places) { recent_ = latestOf(std::move(recent_), places); }

bool OrderLearning::departs() const {
  if (isWindowOver()) return recent_ != told_;
  return orderOf(latestOf(agreed_, recent_)) != orderOf(agreed_);
}

std::vector<int> OrderLearning::tell() {
  told_ = isWindowOver() ? recent_ : latestOf(told_, recent_);
  return told_;
}

void OrderLearning::endRound() {
  if (isWindowOver()) std::fill(recent_.begin(), recent_.end(), -1);
  rounds_ = (rounds_ + 1) % kWindow;
}

std::vector<std::size_t> OrderLearning::orderOf(const std::vector<int>& places) {
  std::vector<std::size_t> order(places.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return places[a] < places[b]; });
  return order;
}

}  // namespace farandole::ddp
