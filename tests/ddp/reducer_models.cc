#include "tests/ddp/reducer_models.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <numeric>

namespace farandole::ddp {

at::Tensor parameter(int64_t numel, double value) {
  return at::full({numel}, value, at::kDouble).set_requires_grad(true);
}

Model modelOf(const std::vector<at::Tensor>& tensors) {
  Model model;
  for (size_t i = 0; i < tensors.size(); ++i)
    model.parameters.push_back({std::string("p").append(std::to_string(i)), tensors[i]});
  return model;
}

at::Tensor lossOf(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& order, double scale) {
  at::AutoGradMode recordsAlsoInsideABackward(true);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i : order) loss = loss + (tensors[i] * scale).sum();
  return loss;
}

void backward(const at::Tensor& loss) {
  torch::autograd::Engine::get_default_engine().execute({{loss.grad_fn(), static_cast<uint32_t>(loss.output_nr())}},
                                                        {at::ones_like(loss)},
                                                        /*keep_graph=*/false, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, /*outputs=*/{});
}

std::vector<size_t> allOf(const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

bool isEverywhere(const at::Tensor& tensor, double value) {
  return tensor.defined() && tensor.eq(value).all().item<bool>();
}

std::string errorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

size_t countOf(const std::vector<std::string>& events, const std::string& event) {
  return std::count(events.begin(), events.end(), event);
}

}  // namespace farandole::ddp
