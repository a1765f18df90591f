#include "backend/net/group_query.h"

#include <utility>

#include "backend/common/text.h"
#include "backend/net/control_group.h"

namespace farandole::net {
namespace {

constexpr std::size_t kRoutesPerAsker = 8;

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
  if (message.asker < 0 || message.asker >= group_.size() || message.asker == group_.rank()) return;
  auto& routes = routes_[message.asker];
  const bool isOld = routes.size() == kRoutesPerAsker && message.number < routes.begin()->first;
  if (isOld || !routes.emplace(message.number, from).second) return;  // it has been here
  if (routes.size() > kRoutesPerAsker) routes.erase(routes.begin());
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
  const auto routes = routes_.find(message.asker);
  if (routes == routes_.end()) return;
  const auto route = routes->second.find(message.number);
  if (route == routes->second.end()) return;
  if (const auto back = route->second.lock()) back->send(FrameType::kAnswer, message.encode());
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
