#pragma once

#include <torch/nn.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace example {

struct Shape {
  std::int64_t layers = 4;
  std::int64_t width = 32;  // of the residual stream
  std::int64_t heads = 4;
  std::int64_t length = 16;  // tokens of context
  std::int64_t vocabulary = 32;
};

// Causal self-attention and a two-layer perceptron, both with the norm before them.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Shape& shape);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::int64_t heads_;
  torch::nn::LayerNorm attentionNorm_, perceptronNorm_;
  torch::nn::Linear qkv_, out_, up_, down_;
};
TORCH_MODULE(Block);

// A part of a GPT: some of its blocks, the embedding before the first and the head after the last. In double precision,
// so that a comparison with plain training shows more than rounding.
class GptStage : public torch::nn::Module {
 public:
  GptStage(const Shape& shape, int stage, int numStages);

  // int64 [rows, length] into the first stage, [rows, length, vocabulary] out of the last one, and between them
  // [rows, length, width].
  at::Tensor forward(const at::Tensor& input);

 private:
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  torch::nn::Sequential blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

using Gpt = std::vector<std::shared_ptr<GptStage>>;

// All stages of the model; the same for the same seed.
Gpt makeGpt(const Shape& shape, int numStages, std::uint64_t seed);

std::vector<at::Tensor> parametersOf(const Gpt& stages);

// Mean cross entropy of the next tokens.
at::Tensor lossOf(const at::Tensor& logits, const at::Tensor& target);

// Rows of a language in which each token but the first follows from the one before.
struct Sample {
  at::Tensor input, target;  // int64 [rows, length]
};
Sample drawSample(const Shape& shape, std::int64_t rows, std::uint64_t seed);

}  // namespace example
