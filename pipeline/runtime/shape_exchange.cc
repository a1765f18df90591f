#include "pipeline/runtime/shape_exchange.h"

#include "pipeline/runtime/message_tag.h"

namespace farandole::pipeline {

namespace {

constexpr std::int64_t kPoisoned = -1;

// Flags of a tensor.
constexpr std::int64_t kRequiresGrad = 1, kIsPacket = 2;

std::vector<TensorMeta> withoutPackets(const std::vector<TensorMeta>& metas) {
  std::vector<TensorMeta> tensors;
  for (const TensorMeta& meta : metas) {
    if (!meta.isPacket) tensors.push_back(meta);
  }
  return tensors;
}

}  // namespace

at::Tensor emptyHeader() { return at::zeros({kHeaderLength}, at::kLong); }

at::Tensor poisonedHeader() { return at::full({kHeaderLength}, kPoisoned, at::kLong); }

Result<at::Tensor> encodeHeader(const std::vector<TensorMeta>& metas) {
  std::size_t needed = 1;
  for (const TensorMeta& meta : metas) needed += 3 + meta.sizes.size();
  if (metas.size() > static_cast<std::size_t>(kMaxTensorsPerMessage) || needed > kHeaderLength) {
    return Status::invalidArgument("a stage returned " + std::to_string(metas.size()) +
                                   " tensors whose shapes do not fit a header; expected at most " +
                                   std::to_string(kMaxTensorsPerMessage) + " tensors, and fewer than " +
                                   std::to_string(kHeaderLength) + " numbers to describe them");
  }
  at::Tensor header = emptyHeader();
  std::int64_t* out = header.data_ptr<std::int64_t>();
  *out++ = static_cast<std::int64_t>(metas.size());
  for (const TensorMeta& meta : metas) {
    *out++ = static_cast<std::int64_t>(meta.dtype);
    *out++ = (meta.requiresGrad ? kRequiresGrad : 0) | (meta.isPacket ? kIsPacket : 0);
    *out++ = static_cast<std::int64_t>(meta.sizes.size());
    for (std::int64_t size : meta.sizes) *out++ = size;
  }
  return header;
}

Result<std::optional<std::vector<TensorMeta>>> decodeHeader(const at::Tensor& header) {
  const std::int64_t* in = header.data_ptr<std::int64_t>();
  const std::int64_t* end = in + kHeaderLength;
  const std::int64_t count = *in++;
  if (count == kPoisoned) return std::optional<std::vector<TensorMeta>>();
  const Status broken = Status::internal("a shape header does not hold shapes: is the group used for something else?");
  if (count < 0 || count > kMaxTensorsPerMessage) return broken;
  std::vector<TensorMeta> metas;
  for (std::int64_t i = 0; i < count; ++i) {
    if (end - in < 3) return broken;
    TensorMeta meta;
    const std::int64_t dtype = *in++;
    if (dtype < 0 || dtype >= static_cast<std::int64_t>(at::ScalarType::NumOptions)) return broken;
    meta.dtype = static_cast<at::ScalarType>(dtype);
    meta.requiresGrad = (*in & kRequiresGrad) != 0;
    meta.isPacket = (*in++ & kIsPacket) != 0;
    const std::int64_t dims = *in++;
    if (dims < 0 || dims > end - in) return broken;
    meta.sizes.assign(in, in + dims);
    in += dims;
    if (meta.isPacket && (i + 1 < count || meta.dtype != at::kByte || dims != 1)) return broken;
    metas.push_back(std::move(meta));
  }
  return std::optional(std::move(metas));
}

Status checkDeclared(std::string_view which, const std::vector<TensorMeta>& declared,
                     const std::vector<TensorMeta>& given) {
  const std::vector<TensorMeta> actual = withoutPackets(given);
  bool same = declared.size() == actual.size();
  for (std::size_t i = 0; same && i < declared.size(); ++i) same = declared[i].sameLayout(actual[i]);
  if (same) return Status::ok();
  return Status::invalidArgument("the " + std::string(which) + " are " + toString(given) + ", expected as declared " +
                                 toString(declared));
}

}  // namespace farandole::pipeline
