#pragma once

#include "backend/c10d/work.h"

namespace farandole::backend {

// Messages that are pending from launch() on, for timeouts, aborts and deaths, and are posted once their gate is open.
class GatedMessages : public MessagesOperation {
 public:
  // Posts them, unless they have ended. Once, with the transport held.
  void open() {
    isOpen_ = true;
    resume();
  }
  // Whether it is to be posted after `earlier`, which was launched before.
  bool mustFollow(const GatedMessages& earlier) const;

 protected:
  using MessagesOperation::MessagesOperation;
  std::string describe() const override;
  bool postNext() override { return !isOpen_ || MessagesOperation::postNext(); }
  bool isBlocked() const override { return !isOpen_; }

 private:
  bool has(bool isSend) const;

  bool isOpen_ = false;
};

class GatedMessagesWork final : public WorkOf<GatedMessages> {
 public:
  using WorkOf::WorkOf;
  int sourceRank() const override { return messages_.empty() ? items_[0].peer : messages_[0].peer; }
};

}  // namespace farandole::backend
