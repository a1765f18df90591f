#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backend/net/control_channel.h"

namespace farandole::net {

class ControlGroup;

// Per rank what it answered; nothing for those that did not.
using GroupAnswers = std::vector<std::optional<std::string>>;
using GroupAnswersHandler = std::function<void(GroupAnswers)>;

// Questions to all ranks of a group, used when something takes too long: each
// rank passes the question on, and the answers back the way the question came.
// A rank that is stuck answers all the same, since its loop does; one that is
// stopped does not, nor do those that are reached through it only. Loop only; a
// part of its group.
class GroupQuery {
 public:
  GroupQuery(EventLoop& loop, ControlGroup& group) : loop_(loop), group_(group) {}

  // `handler` is called once: when all that are not gone have answered, else after `limit`.
  void ask(std::chrono::milliseconds limit, GroupAnswersHandler handler);
  void question(const ControlChannel::Ptr& from, const AskMessage& message);
  void answer(const AnswerMessage& message);
  // Somebody is gone, and no longer waited for; `all` ends every question with what came so far.
  void finishAnswered(bool all);

 private:
  struct Question {
    GroupAnswers answers;
    GroupAnswersHandler handler;
    boost::asio::steady_timer timer;
  };
  std::string ownReport() const;

  EventLoop& loop_;
  ControlGroup& group_;
  std::uint64_t nextNumber_ = 0;
  std::map<std::uint64_t, Question> questions_;
  // Where an answer goes: the way its question came. By asker, of its latest questions by their numbers.
  std::map<int, std::map<std::uint64_t, std::weak_ptr<ControlChannel>>> routes_;
};

}  // namespace farandole::net
