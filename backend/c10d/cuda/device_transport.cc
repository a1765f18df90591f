#include "backend/c10d/cuda/device_transport.h"

namespace farandole::backend {

using transport::DeviceVisit;
using transport::PeerId;
using transport::Request;

DeviceTransport::~DeviceTransport() {
  const DeviceVisit visit(cuda_, device_);
  inner_.reset();
}

Result<PeerId> DeviceTransport::connect(std::string_view address) {
  const DeviceVisit visit(cuda_, device_);
  return inner_->connect(address);
}

void DeviceTransport::send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) {
  const DeviceVisit visit(cuda_, device_);
  inner_->send(peer, tag, data, bytes, request);
}

void DeviceTransport::recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                           Request& request) {
  const DeviceVisit visit(cuda_, device_);
  inner_->recv(from, tag, mask, data, bytes, request);
}

bool DeviceTransport::recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                                  Request& request) {
  const DeviceVisit visit(cuda_, device_);
  return inner_->recvIfThere(tag, mask, data, bytes, request);
}

void DeviceTransport::noteReceived(PeerId from, std::size_t bytes) {
  const DeviceVisit visit(cuda_, device_);
  inner_->noteReceived(from, bytes);
}

void DeviceTransport::cancel(Request& request) {
  const DeviceVisit visit(cuda_, device_);
  inner_->cancel(request);
}

void DeviceTransport::drop(PeerId peer, const Status& why) {
  const DeviceVisit visit(cuda_, device_);
  inner_->drop(peer, why);
}

void DeviceTransport::closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) {
  const DeviceVisit visit(cuda_, device_);
  inner_->closeGroup(group, members);
}

void DeviceTransport::openGroup(std::uint32_t group) {
  const DeviceVisit visit(cuda_, device_);
  inner_->openGroup(group);
}

void DeviceTransport::look(std::chrono::steady_clock::time_point now) {
  const DeviceVisit visit(cuda_, device_);
  inner_->look(now);
}

void DeviceTransport::leave() {
  const DeviceVisit visit(cuda_, device_);
  inner_->leave();
}

bool DeviceTransport::progress() {
  const DeviceVisit visit(cuda_, device_);
  return inner_->progress();
}

bool DeviceTransport::arm() {
  const DeviceVisit visit(cuda_, device_);
  return inner_->arm();
}

}  // namespace farandole::backend
