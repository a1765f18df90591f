#include "examples/cpp/gpt.h"

#include <ATen/CPUGeneratorImpl.h>

namespace example {

BlockImpl::BlockImpl(const Shape& shape)
    : heads_(shape.heads),
      attentionNorm_(torch::nn::LayerNormOptions({shape.width})),
      perceptronNorm_(torch::nn::LayerNormOptions({shape.width})),
      qkv_(shape.width, 3 * shape.width),
      out_(shape.width, shape.width),
      up_(shape.width, 4 * shape.width),
      down_(4 * shape.width, shape.width) {
  register_module("attention_norm", attentionNorm_);
  register_module("perceptron_norm", perceptronNorm_);
  register_module("qkv", qkv_);
  register_module("out", out_);
  register_module("up", up_);
  register_module("down", down_);
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const auto rows = x.size(0), length = x.size(1), width = x.size(2);
  const auto qkv = qkv_(attentionNorm_(x)).view({rows, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const auto attended = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
  const auto middle = x + out_(attended.transpose(1, 2).reshape({rows, length, width}));
  return middle + down_(at::gelu(up_(perceptronNorm_(middle))));
}

GptStage::GptStage(const Shape& shape, int stage, int numStages) {
  if (stage == 0) {
    tokens_ = register_module("tokens", torch::nn::Embedding(shape.vocabulary, shape.width));
    positions_ = register_module("positions", torch::nn::Embedding(shape.length, shape.width));
  }
  const auto begin = shape.layers * stage / numStages, end = shape.layers * (stage + 1) / numStages;
  for (auto i = begin; i < end; ++i) blocks_->push_back(Block(shape));
  register_module("blocks", blocks_);
  if (stage == numStages - 1) {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
    head_ = register_module("head", torch::nn::Linear(shape.width, shape.vocabulary));
  }
  to(at::kDouble);
}

at::Tensor GptStage::forward(const at::Tensor& input) {
  at::Tensor x = input;
  if (tokens_) x = tokens_(x) + positions_->weight.narrow(0, 0, x.size(1));
  if (!blocks_->is_empty()) x = blocks_->forward(x);
  if (head_) x = head_(norm_(x));
  return x;
}

Gpt makeGpt(const Shape& shape, int numStages, std::uint64_t seed) {
  at::manual_seed(seed);
  Gpt stages;
  for (int stage = 0; stage < numStages; ++stage) {
    stages.push_back(std::make_shared<GptStage>(shape, stage, numStages));
  }
  return stages;
}

std::vector<at::Tensor> parametersOf(const Gpt& stages) {
  std::vector<at::Tensor> parameters;
  for (const auto& stage : stages) {
    for (const at::Tensor& parameter : stage->parameters()) parameters.push_back(parameter);
  }
  return parameters;
}

at::Tensor lossOf(const at::Tensor& logits, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), target.flatten());
}

Sample drawSample(const Shape& shape, std::int64_t rows, std::uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<at::Tensor> columns{at::randint(shape.vocabulary, {rows}, generator, at::kLong)};
  while (static_cast<std::int64_t>(columns.size()) <= shape.length) {
    columns.push_back((5 * columns.back() + 3) % shape.vocabulary);
  }
  const auto text = at::stack(columns, 1);
  return {text.narrow(1, 0, shape.length), text.narrow(1, 1, shape.length)};
}

}  // namespace example
