#include "ddp/gradient_streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace farandole::ddp {

void GradientStreams::note() {
  if (device_.is_cpu()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (std::find(streams_.begin(), streams_.end(), current) == streams_.end()) streams_.push_back(current);
}

void GradientStreams::join() const {
  if (streams_.empty()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  for (const c10::Stream& stream : streams_) {
    if (stream == current) continue;
    c10::Event arrived(device_.type());
    arrived.record(stream);
    arrived.block(current);
  }
}

}  // namespace farandole::ddp
