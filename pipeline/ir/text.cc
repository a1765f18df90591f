#include "pipeline/ir/text.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "pipeline/ir/message.h"

namespace farandole::pipeline {
namespace {

struct KindName {
  ActionKind kind;
  std::string_view name;
};

constexpr KindName kKindNames[] = {
    {ActionKind::kForward, "F"},
    {ActionKind::kBackward, "B"},
    {ActionKind::kBackwardInput, "I"},
    {ActionKind::kBackwardWeight, "W"},
    {ActionKind::kSendF, "SEND_F"},
    {ActionKind::kRecvF, "RECV_F"},
    {ActionKind::kSendB, "SEND_B"},
    {ActionKind::kRecvB, "RECV_B"},
    {ActionKind::kWaitSend, "WAIT_SEND"},
    {ActionKind::kWaitSendF, "WAIT_SEND_F"},
    {ActionKind::kWaitSendB, "WAIT_SEND_B"},
    {ActionKind::kUnshard, "UNSHARD"},
    {ActionKind::kReshard, "RESHARD"},
    {ActionKind::kReduceGrad, "REDUCE_GRAD"},
    {ActionKind::kWaitReduceGrad, "WAIT_REDUCE_GRAD"},
    {ActionKind::kOverlapFB, "OVERLAP_F_B"},
    {ActionKind::kBatchP2p, "BATCH_P2P"},
};

std::optional<ActionKind> kindOf(std::string_view name) {
  for (const KindName& entry : kKindNames) {
    if (entry.name == name) return entry.kind;
  }
  return std::nullopt;
}

std::string_view trim(std::string_view text) {
  const auto isSpace = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && isSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && isSpace(text.back())) text.remove_suffix(1);
  return text;
}

bool isDigit(char c) { return c >= '0' && c <= '9'; }

Status malformed(std::string_view text, std::string_view why) {
  return Status::invalidArgument("action '" + std::string(text) + "': " + std::string(why) +
                                 "; expected [stage][kind][microbatch] like '2F0', or '(2F0;3B1)OVERLAP_F_B'");
}

// Stages and microbatches stay below this, so that one more still fits.
constexpr std::int32_t kMaxIndex = 1 << 30;

// Takes the digits that `text` begins with.
std::optional<std::int32_t> takeNumber(std::string_view& text) {
  std::int32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || number < 0 || number >= kMaxIndex) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

// Where a message goes or comes from, where that is not the chain's neighbour.
char directionSign(ActionKind kind) { return isSend(kind) ? '>' : '<'; }

// Takes the other stage of a send or receive, if `rest` begins with one.
Status takeOther(std::string_view text, std::string_view& rest, Action& action) {
  if (rest.empty() || !isMessage(action.kind) || rest.front() != directionSign(action.kind)) {
    return Status::ok();
  }
  rest.remove_prefix(1);
  const std::optional<std::int32_t> other = takeNumber(rest);
  if (!other) return malformed(text, "the other stage is not a number below 2^30");
  if (*other == neighbourOf(action.kind, action.stage)) {
    return malformed(text, "stage " + std::to_string(*other) + " is the one that is meant where none is named");
  }
  action.other = *other;
  return Status::ok();
}

Result<Action> parsePlain(std::string_view text) {
  std::string_view rest = text;
  if (rest.empty() || !isDigit(rest.front())) return malformed(text, "it does not begin with a stage");
  const std::optional<std::int32_t> stage = takeNumber(rest);
  if (!stage) return malformed(text, "the stage is not below 2^30");
  const auto nameEnd = std::find_if(rest.begin(), rest.end(), isDigit);
  const std::string_view name = rest.substr(0, static_cast<std::size_t>(nameEnd - rest.begin()));
  const std::optional<ActionKind> kind = kindOf(name);
  if (!kind || isComposite(*kind)) return malformed(text, "unknown kind '" + std::string(name) + "'");
  rest.remove_prefix(name.size());
  Action action{*stage, *kind, kNoMicrobatch, {}};
  if (hasMicrobatch(*kind)) {
    if (rest.empty()) return malformed(text, "the microbatch is missing");
    const std::optional<std::int32_t> microbatch = takeNumber(rest);
    if (!microbatch) return malformed(text, "the microbatch is not a number below 2^30");
    action.microbatch = *microbatch;
  }
  FARANDOLE_RETURN_IF_ERROR(takeOther(text, rest, action));
  if (!rest.empty()) return malformed(text, "unexpected '" + std::string(rest) + "' at the end");
  return action;
}

Result<Action> parseComposite(std::string_view text) {
  const std::size_t close = text.find(')');
  if (close == std::string_view::npos) return malformed(text, "')' is missing");
  const std::string_view name = trim(text.substr(close + 1));
  const std::optional<ActionKind> kind = kindOf(name);
  if (!kind || !isComposite(*kind)) {
    return malformed(text, "after ')' stands '" + std::string(name) + "', neither OVERLAP_F_B nor BATCH_P2P");
  }
  std::vector<Action> parts;
  std::string_view inside = text.substr(1, close - 1);
  while (true) {
    const std::size_t semicolon = inside.find(';');
    Result<Action> part = parsePlain(trim(inside.substr(0, semicolon)));
    if (!part) return part.status().wrap("in '" + std::string(text) + "'");
    parts.push_back(std::move(*part));
    if (semicolon == std::string_view::npos) break;
    inside.remove_prefix(semicolon + 1);
  }
  return makeComposite(*kind, std::move(parts));
}

}  // namespace

std::string_view toString(ActionKind kind) {
  for (const KindName& entry : kKindNames) {
    if (entry.kind == kind) return entry.name;
  }
  return "?";
}

std::string toString(const Action& action) {
  std::string text;
  if (isComposite(action.kind)) {
    text = "(";
    for (const Action& part : action.parts) {
      if (text.size() > 1) text += ';';
      text += toString(part);
    }
    text += ')';
    return text += toString(action.kind);
  }
  text = std::to_string(action.stage);
  text += toString(action.kind);
  if (action.microbatch != kNoMicrobatch) text += std::to_string(action.microbatch);
  if (action.other != kNeighbour) text += directionSign(action.kind) + std::to_string(action.other);
  return text;
}

Result<Action> parseAction(std::string_view text) {
  const std::string_view trimmed = trim(text);
  if (trimmed.starts_with('(')) return parseComposite(trimmed);
  return parsePlain(trimmed);
}

}  // namespace farandole::pipeline
