#include "pipeline/ir/draw.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

constexpr char kIdle = '.';

std::string secondsText(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", seconds);
  return text;
}

// What fits `width` characters: "F12", else the letter alone. Forwards are
// filled with '-', backwards with '=', so that phases show at any scale.
std::string blockText(const Action& action, std::size_t width) {
  const Action& leaf = leaves(action).front();
  const std::string letter = action.kind == ActionKind::kOverlapFB ? "O" : std::string(toString(leaf.kind));
  std::string text = letter + std::to_string(leaf.microbatch);
  if (text.size() > width) text = letter.substr(0, width);
  return text + std::string(width - text.size(), isForward(action.kind) ? '-' : '=');
}

std::string drawRow(const RankTimeline& timeline, double makespan, std::size_t columns) {
  std::string row(columns, kIdle);
  if (makespan <= 0) return row;
  const auto column = [&](double seconds) {
    return static_cast<std::size_t>(std::lround(seconds / makespan * static_cast<double>(columns)));
  };
  for (const TimedAction& timed : timeline.actions) {
    if (!isCompute(timed.action.kind)) continue;
    const std::size_t begin = std::min(column(timed.start), columns);
    const std::size_t end = std::min(column(timed.end), columns);
    row.replace(begin, end - begin, blockText(timed.action, end - begin));
  }
  return row;
}

}  // namespace

std::string drawTimeline(const SimulationResult& result, int columns) {
  const auto width = static_cast<std::size_t>(std::max(columns, 1));
  std::string text =
      "step " + secondsText(result.makespan) + " s, bubble " + secondsText(100 * result.bubble()) + "%\n";
  const std::size_t labelWidth = std::to_string(result.ranks.size()).size();
  for (std::size_t rank = 0; rank < result.ranks.size(); ++rank) {
    const RankTimeline& timeline = result.ranks[rank];
    const std::string label = std::to_string(rank);
    text += "rank " + std::string(labelWidth - label.size(), ' ') + label + " |" +
            drawRow(timeline, result.makespan, width) + "| busy " + secondsText(100 * (1 - timeline.bubble)) +
            "%, live " + std::to_string(timeline.peakLiveActivations) + "\n";
  }
  return text;
}

}  // namespace farandole::pipeline
