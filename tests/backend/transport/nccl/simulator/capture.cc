#include "tests/backend/transport/nccl/simulator/capture.h"

#include <algorithm>

namespace farandole::testing {

std::vector<Stream*> Capture::streams() const {
  std::vector<Stream*> all;
  for (const Item& item : items) {
    if (std::find(all.begin(), all.end(), item.stream) == all.end()) all.push_back(item.stream);
  }
  return all;
}

bool Capture::joined(const Stream& origin) const {
  const auto waitedFor = [this](const Stream* recording, const Moment* moment) {
    return std::any_of(items.begin(), items.end(), [&](const Item& item) {
      const auto* const wait = dynamic_cast<const WaitWork*>(item.work.get());
      return wait != nullptr && item.stream != recording && wait->moment().get() == moment;
    });
  };
  for (const Stream* stream : streams()) {
    if (stream == &origin) continue;
    const auto last =
        std::find_if(items.rbegin(), items.rend(), [stream](const Item& item) { return item.stream == stream; });
    const auto* const record = dynamic_cast<const RecordWork*>(last->work.get());
    if (record == nullptr || !waitedFor(stream, record->moment().get())) return false;
  }
  return true;
}

void Replay::launch(Streams& streams, Stream& stream, const Capture& graph) {
  Replay replay;
  const auto begin = std::make_shared<Moment>();
  streams.put(stream, std::make_shared<RecordWork>(begin));
  std::map<Stream*, std::shared_ptr<Stream>> lanes;
  for (Stream* captured : graph.streams()) {
    lanes[captured] = streams.create(captured->device, Stream::Kind::kReplay);
    streams.put(*lanes[captured], std::make_shared<WaitWork>(begin));
  }
  for (const Capture::Item& item : graph.items) streams.put(*lanes[item.stream], item.work->again(replay));
  for (const auto& [captured, lane] : lanes) {
    const auto end = std::make_shared<Moment>();
    streams.put(*lane, std::make_shared<RecordWork>(end));
    streams.put(stream, std::make_shared<WaitWork>(end));
  }
}

std::shared_ptr<Moment> Replay::momentFor(const std::shared_ptr<Moment>& captured) {
  std::shared_ptr<Moment>& moment = moments_[captured];
  if (moment == nullptr) moment = std::make_shared<Moment>();
  return moment;
}

void beginCapture(Core& core, Stream& stream) {
  if (stream.capture != nullptr) return core.violation("cudaStreamBeginCapture", "the stream is being captured");
  stream.capture = std::make_shared<Capture>();
  stream.capture->thread = std::this_thread::get_id();
  stream.graph = stream.capture;
}

void endCapture(Core& core, Streams& streams, Stream& stream) {
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture == nullptr || stream.graph != capture) {
    return core.violation("cudaStreamEndCapture", "no capture began on this stream");
  }
  if (!capture->joined(stream)) core.violation("cudaStreamEndCapture", "a stream of the capture was not joined");
  capture->ended = true;
  streams.leaveCapture(capture);
}

}  // namespace farandole::testing
