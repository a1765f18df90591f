#include "backend/net/group_query.h"

#include <algorithm>
#include <utility>

#include "backend/common/text.h"
#include "backend/net/control_group.h"

namespace farandole::net {
namespace {

constexpr std::size_t kMaxRoutes = 128;

}  // namespace

std::string GroupQuery::ownReport() const {
  const auto listener = group_.listener();
  return listener != nullptr ? std::string(cutText(listener->report(), kMaxAnswer)) : std::string();
}

void GroupQuery::ask(std::chrono::milliseconds limit, GroupAnswersHandler handler) {
  const std::uint64_t number = nextNumber_++;
  GroupAnswers answers(static_cast<std::size_t>(group_.size()));
  answers[static_cast<std::size_t>(group_.rank())] = ownReport();
  boost::asio::steady_timer timer(loop_.context());
  Question& question =
      questions_.emplace(number, Question{std::move(answers), std::move(handler), std::move(timer)}).first->second;
  question.timer.expires_after(limit);
  question.timer.async_wait([this, weak = group_.weak_from_this(), number](const boost::system::error_code& error) {
    const auto group = weak.lock();
    if (error || group == nullptr) return;
    auto late = questions_.extract(number);
    if (!late.empty()) late.mapped().handler(std::move(late.mapped().answers));
  });
  const std::string payload = AskMessage{group_.key(), group_.rank(), number}.encode();
  for (const ControlChannel::Ptr& neighbour : group_.neighbours()) neighbour->send(FrameType::kAsk, payload);
  finishAnswered(false);
}

void GroupQuery::question(const ControlChannel::Ptr& from, const AskMessage& message) {
  const bool seen = std::any_of(routes_.begin(), routes_.end(), [&](const Route& route) {
    return route.asker == message.asker && route.number == message.number;
  });
  if (seen || message.asker == group_.rank()) return;
  routes_.push_back({message.asker, message.number, from});
  if (routes_.size() > kMaxRoutes) routes_.pop_front();
  for (const ControlChannel::Ptr& neighbour : group_.neighbours()) {
    if (neighbour != from) neighbour->send(FrameType::kAsk, message.encode());
  }
  from->send(FrameType::kAnswer,
             AnswerMessage{group_.key(), message.asker, message.number, group_.rank(), ownReport()}.encode());
}

void GroupQuery::answer(const AnswerMessage& message) {
  if (message.asker == group_.rank()) {
    const auto question = questions_.find(message.number);
    if (question == questions_.end() || message.rank >= group_.size()) return;
    question->second.answers[static_cast<std::size_t>(message.rank)] = message.text;
    return finishAnswered(false);
  }
  const auto route = std::find_if(routes_.begin(), routes_.end(), [&](const Route& candidate) {
    return candidate.asker == message.asker && candidate.number == message.number;
  });
  if (route == routes_.end()) return;
  if (const auto back = route->back.lock()) back->send(FrameType::kAnswer, message.encode());
}

void GroupQuery::finishAnswered(bool all) {
  for (auto it = questions_.begin(); it != questions_.end();) {
    const GroupAnswers& answers = it->second.answers;
    bool complete = true;
    for (int rank = 0; rank < group_.size(); ++rank) {
      complete = complete && (answers[static_cast<std::size_t>(rank)].has_value() || group_.isGone(rank));
    }
    if (!complete && !all) {
      ++it;
      continue;
    }
    auto done = questions_.extract(it++);
    done.mapped().handler(std::move(done.mapped().answers));
  }
}

}  // namespace farandole::net
