#include "backend/c10d/gated_messages.h"

#include <algorithm>

namespace farandole::backend {

std::string GatedMessages::describe() const {
  return MessagesOperation::describe() + (isOpen_ ? " of CUDA tensors" : " of CUDA tensors, held up by a stream");
}

bool GatedMessages::has(bool isSend) const {
  return std::ranges::any_of(items_, [isSend](const Item& item) { return item.isSend == isSend; });
}

// What goes the other way may overtake: it matches something else.
bool GatedMessages::mustFollow(const GatedMessages& earlier) const {
  if (communicator_ != earlier.communicator_) return false;
  const int peer = items_[0].peer;
  const int other = earlier.items_[0].peer;
  const bool fromAny = peer == collective::kAnySource || other == collective::kAnySource;
  if ((fromAny || peer == other) && has(false) && earlier.has(false)) return true;
  return peer == other && has(true) && earlier.has(true);
}

}  // namespace farandole::backend
