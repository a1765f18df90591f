#include "pipeline/runtime/saved_tensor_hooks.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace farandole::pipeline {
namespace {

// Only their presence counts here: nothing that saves a tensor may run while they are there.
class Hooks {
 public:
  Hooks() {
    at::impl::SavedTensorDefaultHooksTLS tls = before_;
    tls.stack.emplace(c10::SafePyObject(nullptr, nullptr), c10::SafePyObject(nullptr, nullptr));
    at::SavedTensorDefaultHooks::set_tls_state(tls);
  }
  ~Hooks() { at::SavedTensorDefaultHooks::set_tls_state(before_); }

 private:
  const at::impl::SavedTensorDefaultHooksTLS before_ = at::SavedTensorDefaultHooks::get_tls_state();
};

bool isNoted(const std::vector<std::uint64_t>& noted, const at::Tensor& result) {
  return std::binary_search(noted.begin(), noted.end(), result.grad_fn()->sequence_nr());
}

TEST(SavedTensorHookWatch, NotesTheNodesThatWereMadeWhileHooksWereThere) {
  const at::Tensor x = at::ones({2}).requires_grad_(true);
  std::vector<std::uint64_t> noted{99};
  at::Tensor before, during, after;
  {
    const SavedTensorHookWatch watch(noted);
    before = x * 2;
    {
      const Hooks hooks;
      during = at::neg(x);  // saves nothing
    }
    after = x * 3;
  }
  const at::Tensor unwatched = x * 4;
  EXPECT_TRUE(isNoted(noted, during));
  for (const at::Tensor& other : {before, after, unwatched}) EXPECT_FALSE(isNoted(noted, other));
  EXPECT_TRUE(std::ranges::is_sorted(noted));
}

}  // namespace
}  // namespace farandole::pipeline
