// The CUDA half of a process group, on simulated devices: its tensors are host memory that says it is on CUDA.
#include "backend/c10d/tensor_checks.h"
#include "tests/backend/c10d/cuda/nccl_groups.h"

namespace farandole::backend {
namespace {

using ::c10d::ReduceOp;
using testing::NcclGroupTest;
using testing::onCuda;
using testing::OpType;
using testing::WorkPtr;
using namespace std::chrono_literals;

// A tensor of small integers, so that every order of reduction gives the same.
at::Tensor randomTensor(at::IntArrayRef sizes, at::ScalarType dtype, std::mt19937_64& rng) {
  at::Tensor tensor = at::empty(sizes, at::kLong);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.mutable_data_ptr<std::int64_t>()[i] =
        static_cast<std::int64_t>(rng() % (dtype == at::kBool ? 2 : 4)) + 1 - (dtype == at::kBool ? 1 : 0);
  }
  return tensor.to(dtype);
}

at::Tensor combined(const ReduceOp& op, const std::vector<at::Tensor>& inputs) {
  const bool isBool = inputs[0].scalar_type() == at::kBool;
  at::Tensor all = at::stack(inputs);
  if (op.op_ == ReduceOp::SUM) return isBool ? all.any(0) : all.sum(0, false, inputs[0].scalar_type());
  if (op.op_ == ReduceOp::AVG) return all.sum(0, false, inputs[0].scalar_type()).div(inputs.size());
  if (op.op_ == ReduceOp::PRODUCT) return isBool ? all.all(0) : all.prod(0, false, inputs[0].scalar_type());
  return op.op_ == ReduceOp::MIN ? all.amin(0) : all.amax(0);
}

TEST_F(NcclGroupTest, AllReduceOfAllKindsIsWhatTorchComputes) {
  std::mt19937_64 rng(seed_);
  struct Case {
    ReduceOp::RedOpType op;
    at::ScalarType dtype;
  };
  std::vector<Case> cases;
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
                           at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX}) {
      if (at::isComplexType(dtype) && op != ReduceOp::SUM) continue;
      cases.push_back({op, dtype});
    }
    if (at::isFloatingType(dtype)) cases.push_back({ReduceOp::AVG, dtype});
  }
  for (const Case& one : cases) {
    const ReduceOp op = one.op;
    SCOPED_TRACE(c10::str(static_cast<int>(one.op), " of ", one.dtype));
    std::vector<at::Tensor> data;
    for (int rank = 0; rank < kSize; ++rank) data.push_back(randomTensor({5, 7}, one.dtype, rng));
    at::Tensor expected = combined(op, data);
    each([&](int rank) {
      const Reducing reducing = CudaGroup::reducing("all_reduce", op, one.dtype);
      collective(rank, {data[rank]}, [&](CollectiveCalls& calls) { calls.allReduce(reducing, sliceOf(data[rank])); });
    });
    for (const at::Tensor& result : data) {
      EXPECT_TRUE(at::allclose(result.to(at::kComplexDouble), expected.to(at::kComplexDouble), 1e-2))
          << result << expected;
    }
    if (HasFailure()) break;
  }
  close();
}

TEST_F(NcclGroupTest, WhatNcclCannotReduceIsRefusedByName) {
  const auto refusal = [&](const ReduceOp& op, at::ScalarType dtype) -> std::string {
    try {
      (void)CudaGroup::reducing("all_reduce", op, dtype);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_NE(refusal(ReduceOp::BAND, at::kInt).find("all_reduce: BAND is not among the reductions of NCCL"),
            std::string::npos);
  EXPECT_NE(refusal(ReduceOp::SUM, at::kShort).find("dtype Short"), std::string::npos);
  EXPECT_NE(refusal(ReduceOp::AVG, at::kBool).find("AVG of bool"), std::string::npos);
  EXPECT_NE(refusal(ReduceOp::MAX, at::kComplexFloat).find("MAX of ComplexFloat"), std::string::npos);
  EXPECT_EQ(refusal(ReduceOp::SUM, at::kFloat8_e4m3fn), "");
  close();
}

TEST_F(NcclGroupTest, AFactorMultipliesEachRanksData) {
  std::mt19937_64 rng(seed_);
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    std::vector<at::Tensor> data;
    at::Tensor expected = at::zeros({11}, at::kDouble);
    for (int rank = 0; rank < kSize; ++rank) {
      data.push_back(randomTensor({11}, dtype, rng));
      expected += data.back().to(at::kDouble) * (0.5 * (rank + 1));
    }
    each([&](int rank) {
      ReduceOp op;
      op.op_ = ReduceOp::PREMUL_SUM;
      op.supplement_ = c10::make_intrusive<::c10d::NCCLPreMulSumSupplement>(0.5 * (rank + 1));
      const Reducing reducing = CudaGroup::reducing("all_reduce", op, dtype);
      collective(rank, {data[rank]}, [&](CollectiveCalls& calls) { calls.allReduce(reducing, sliceOf(data[rank])); });
    });
    for (const at::Tensor& result : data) EXPECT_TRUE(at::equal(result.to(at::kDouble), expected)) << dtype << result;
  }
  EXPECT_EQ(cluster_->live().redOps, 0);
  close();
}

TEST_F(NcclGroupTest, AFactorThatIsATensorIsReadBeforeTheCollectiveIsIssued) {
  std::vector<at::Tensor> data{at::ones({4}), at::ones({4}), at::ones({4})};
  each([&](int rank) {
    const at::Tensor factor = at::full({}, 0.5);
    ReduceOp op;
    op.op_ = ReduceOp::PREMUL_SUM;
    op.supplement_ = c10::make_intrusive<::c10d::NCCLPreMulSumSupplement>(factor);
    const Reducing reducing = CudaGroup::reducing("all_reduce", op, at::kFloat);
    factor.fill_(7);
    collective(rank, {data[rank]}, [&](CollectiveCalls& calls) { calls.allReduce(reducing, sliceOf(data[rank])); });
  });
  for (const at::Tensor& result : data) EXPECT_TRUE(at::equal(result, at::full({4}, 1.5f))) << result;
  close();
}

TEST_F(NcclGroupTest, MoreCollectivesThanNcclTakesInAGroupAreSeveral) {
  constexpr std::int64_t kCount = 5000;
  const ReduceOp sum = ReduceOp::SUM;
  std::vector<at::Tensor> data;
  for (int rank = 0; rank < kSize; ++rank) data.push_back(at::arange(kCount, at::kInt) + rank);
  each([&](int rank) {
    const Reducing reducing = CudaGroup::reducing("all_reduce_coalesced", sum, at::kInt);
    collective(rank, {data[rank]}, [&](CollectiveCalls& calls) {
      for (std::int64_t i = 0; i < kCount; ++i) calls.allReduce(reducing, sliceOf(data[rank][i]));
    });
  });
  for (const at::Tensor& result : data) EXPECT_TRUE(at::equal(result, at::arange(kCount, at::kInt) * 3 + 3));
  close();
}

TEST_F(NcclGroupTest, DataGoesWhereEachCollectiveSaysItDoes) {
  std::mt19937_64 rng(seed_);
  const ReduceOp sum = ReduceOp::SUM;
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const int root = static_cast<int>(rng() % kSize);
    const Layout layout = rng() % 2 == 0 ? Layout::kFlat : Layout::kList;
    const bool isFlat = layout == Layout::kFlat;
    // give[i][j]: what rank i has for rank j.
    std::int64_t sizes[kSize][kSize];
    std::vector<std::vector<at::Tensor>> give(kSize);
    std::vector<std::vector<at::Tensor>> got(kSize);
    std::vector<std::vector<at::Tensor>> gathered(kSize);
    std::vector<at::Tensor> own;
    std::vector<at::Tensor> broadcast;
    std::vector<at::Tensor> scattered;
    std::vector<at::Tensor> reduced;
    const std::int64_t count = 1 + static_cast<std::int64_t>(rng() % 40);
    for (auto& row : sizes) {
      for (auto& size : row) size = static_cast<std::int64_t>(rng() % 30);
    }
    for (int i = 0; i < kSize; ++i) {
      own.push_back(randomTensor({isFlat ? count : count + i}, at::kShort, rng));
      broadcast.push_back(randomTensor({count}, at::kFloat8_e5m2, rng));
      scattered.push_back(at::zeros({count}, at::kInt));
      reduced.push_back(at::zeros({count}, at::kInt));
      const at::Tensor whole = at::zeros({kSize, count}, at::kShort);
      for (int j = 0; j < kSize; ++j) {
        give[i].push_back(randomTensor({sizes[i][j]}, at::kInt, rng));
        got[i].push_back(at::zeros({sizes[j][i]}, at::kInt));
        gathered[i].push_back(isFlat ? whole[j] : at::zeros({count + j}, at::kShort));
      }
    }
    // To be reduced and scattered.
    std::vector<at::Tensor> wholes;
    std::vector<std::vector<at::Tensor>> parts(kSize);
    for (int i = 0; i < kSize; ++i) {
      wholes.push_back(randomTensor({kSize, count}, at::kInt, rng));
      for (int j = 0; j < kSize; ++j) parts[i].push_back(isFlat ? wholes[i][j] : wholes[i][j].clone());
    }
    const at::Tensor fromRoot = broadcast[root].clone();
    const std::vector<at::Tensor> toScatter = parts[root];
    std::vector<at::Tensor> collected;
    for (int j = 0; j < kSize; ++j) collected.push_back(at::zeros({own[j].numel()}, at::kShort));
    each([&](int rank) {
      collective(rank, {broadcast[rank]},
                 [&](CollectiveCalls& calls) { calls.broadcast(root, sliceOf(broadcast[rank])); });
      collective(rank, gathered[rank], [&](CollectiveCalls& calls) {
        calls.allGather(sliceOf(own[rank]), slicesOf(gathered[rank]), layout);
      });
      collective(rank, got[rank],
                 [&](CollectiveCalls& calls) { calls.allToAll(slicesOf(got[rank]), slicesOf(give[rank])); });
      collective(rank, {own[rank]}, [&](CollectiveCalls& calls) {
        calls.gather(root, sliceOf(own[rank]), rank == root ? slicesOf(collected) : std::vector<Slice>{});
      });
      collective(rank, {scattered[rank]}, [&](CollectiveCalls& calls) {
        calls.scatter(root, sliceOf(scattered[rank]), rank == root ? slicesOf(toScatter) : std::vector<Slice>{});
      });
      collective(rank, {reduced[rank]}, [&](CollectiveCalls& calls) {
        calls.reduceScatter(CudaGroup::reducing("reduce_scatter", sum, at::kInt), sliceOf(reduced[rank]),
                            slicesOf(parts[rank]), layout);
      });
    });
    for (int i = 0; i < kSize; ++i) {
      EXPECT_TRUE(at::equal(broadcast[i].view(at::kByte), fromRoot.view(at::kByte)));
      EXPECT_TRUE(at::equal(scattered[i], toScatter[i]));
      EXPECT_TRUE(at::equal(reduced[i], (parts[0][i] + parts[1][i] + parts[2][i]).to(at::kInt)));
      EXPECT_TRUE(at::equal(collected[i], own[i]));
      for (int j = 0; j < kSize; ++j) {
        EXPECT_TRUE(at::equal(gathered[i][j], own[j]));
        EXPECT_TRUE(at::equal(got[i][j], give[j][i]));
      }
    }
    if (HasFailure()) break;
  }
  close();
}

TEST_F(NcclGroupTest, ABatchGivesOneWorkForEachPeer) {
  std::mt19937_64 rng(seed_);
  std::vector<at::Tensor> sent;
  std::vector<std::vector<at::Tensor>> received(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    sent.push_back(randomTensor({100}, at::kFloat, rng));
    received[rank] = {at::zeros({100}), at::zeros({100}), at::zeros({100})};
  }
  each([&](int rank) {
    std::vector<CudaMessage> messages;
    for (int peer = kSize - 1; peer >= 0; --peer) {
      if (peer == rank) continue;
      messages.push_back({true, onCuda(sent[rank], rank), peer, 0});
      messages.push_back({false, onCuda(received[rank][peer], rank), peer, 0});
    }
    auto works = groups_[rank]->post(options(rank, OpType::COALESCED), device(rank), std::move(messages));
    EXPECT_EQ(works.size(), 2u);
    for (auto& [peer, work] : works) {
      EXPECT_TRUE(work->wait());
      EXPECT_EQ(work->result().size(), 1u);
    }
    EXPECT_TRUE(cluster_->synchronize(streams_[rank], 20s));
  });
  for (int rank = 0; rank < kSize; ++rank) {
    for (int peer = 0; peer < kSize; ++peer) {
      const at::Tensor expected = peer == rank ? at::zeros({100}) : sent[peer];
      EXPECT_TRUE(at::equal(received[rank][peer], expected));
    }
  }
  close();
}

TEST_F(NcclGroupTest, TensorsLiveAsLongAsTheDeviceNeedsThemAndNoLonger) {
  std::vector<at::Tensor> data{at::ones({4}), at::ones({4}), at::ones({4})};
  const ReduceOp sum = ReduceOp::SUM;
  const auto issue = [&](int rank) {
    at::Tensor tensor = onCuda(data[rank], rank);
    return groups_[rank]->run(options(rank, OpType::ALLREDUCE), device(rank), true, {}, {std::move(tensor)},
                              [&, slice = sliceOf(data[rank])](CollectiveCalls& calls) {
                                calls.allReduce(CudaGroup::reducing("all_reduce", sum, at::kFloat), slice);
                              });
  };
  std::vector<WorkPtr> works(kSize);
  each([&](int rank) { works[rank] = issue(rank); });
  // Nobody waits: the watch lets go of them.
  for (int rank = 0; rank < kSize; ++rank) {
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (data[rank].use_count() > 1 && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(data[rank].use_count(), 1);
  }
  cluster_->hold(streams_[0]);
  each([&](int rank) { works[rank] = issue(rank); });
  EXPECT_EQ(data[0].use_count(), 2);
  EXPECT_TRUE(works[0]->wait());  // the stream waits: who reuses the memory on it comes later
  EXPECT_EQ(data[0].use_count(), 1);
  EXPECT_FALSE(works[0]->isCompleted());
  cluster_->release(streams_[0]);
  EXPECT_TRUE(cluster_->synchronize(streams_[0], 20s));
  EXPECT_TRUE(works[0]->isCompleted());
  works.clear();
  close();
}

TEST_F(NcclGroupTest, AWaitWithATimeoutBlocksTheHostAndNamesTheOperation) {
  std::vector<at::Tensor> data{at::ones({4}), at::ones({4}), at::ones({4})};
  const ReduceOp sum = ReduceOp::SUM;
  cluster_->hold(streams_[1]);
  std::vector<WorkPtr> works(kSize);
  each([&](int rank) {
    works[rank] =
        groups_[rank]->run(options(rank, OpType::ALLREDUCE, 7), device(rank), true, {onCuda(data[rank], rank)}, {},
                           [&](CollectiveCalls& calls) {
                             calls.allReduce(CudaGroup::reducing("all_reduce", sum, at::kFloat), sliceOf(data[rank]));
                           });
  });
  try {
    works[0]->wait(30ms);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("ALLREDUCE number 7 on rank 0 (16 bytes on CUDA)"), std::string::npos)
        << error.what();
  }
  cluster_->release(streams_[1]);
  EXPECT_TRUE(works[0]->wait(20s));
  EXPECT_TRUE(works[0]->isCompleted());
  close();
}

TEST_F(NcclGroupTest, AWaitForAnEdgeThatIsNotConnectedHasItsTimeoutToo) {
  at::Tensor data = at::zeros({4});
  (void)runtime_.cuda.setDevice(0);
  auto works =
      groups_[0]->post(options(0, OpType::RECV, 3), device(0), {{false, onCuda(data, 0), 1, 0}});  // rank 1 never comes
  const auto start = std::chrono::steady_clock::now();
  try {
    works.at(1)->wait(30ms);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("recv from rank 1 with tag 0 number 3 on rank 0"), std::string::npos)
        << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);  // the group's is 20 s
  works.clear();
  groups_[0]->abort(Status::aborted("the test is over"));
}

TEST_F(NcclGroupTest, ASmallerGroupTakesOverWhatIsConnected) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  const auto talks = testing::TestTalk::all(2, seed_);
  each([&](int rank) {
    EXPECT_TRUE(groups_[rank]->connectedDevices().empty());
    groups_[rank]->connect(device(rank));
    if (rank == 1) return;
    const auto child = make(store, "child", rank / 2, 2, talks[rank / 2]);
    EXPECT_EQ(groups_[rank]->connectedDevices(), std::vector<int>{0});
    child->connectFrom(*groups_[rank], {0}, {1});
    groups_[rank]->close();
    at::Tensor data = at::full({4}, rank + 1.0f);
    const ReduceOp sum = ReduceOp::SUM;
    const Reducing reducing = CudaGroup::reducing("all_reduce", sum, at::kFloat);
    const WorkPtr work = child->run(options(rank / 2, OpType::ALLREDUCE), device(rank), true, {onCuda(data, rank)}, {},
                                    [&](CollectiveCalls& calls) { calls.allReduce(reducing, sliceOf(data)); });
    EXPECT_TRUE(work->wait(20s));
    EXPECT_TRUE(at::equal(data, at::full({4}, 4.0f)));
    child->close();
  });
  EXPECT_EQ(cluster_->callCounts()["ncclCommShrink"], 2);
  groups_[1]->close();
}

TEST_F(NcclGroupTest, AnAbortEndsWhatIsPendingAndWhatComesLater) {
  std::vector<at::Tensor> data{at::ones({4}), at::ones({4}), at::ones({4})};
  const ReduceOp sum = ReduceOp::SUM;
  const auto issue = [&](int rank) {
    return groups_[rank]->run(options(rank, OpType::ALLREDUCE), device(rank), true, {onCuda(data[rank], rank)}, {},
                              [&](CollectiveCalls& calls) {
                                calls.allReduce(CudaGroup::reducing("all_reduce", sum, at::kFloat),
                                                sliceOf(data[rank]));
                              });
  };
  each([&](int rank) { issue(rank)->wait(20s); });
  const WorkPtr alone = issue(0);
  groups_[0]->abort(Status::aborted("the process group was aborted"));
  EXPECT_THROW(alone->wait(), c10::DistBackendError);
  EXPECT_NE(alone->exception(), nullptr);
  EXPECT_FALSE(alone->isSuccess());
  EXPECT_THROW(issue(0), c10::DistBackendError);
  for (int rank = 1; rank < kSize; ++rank) groups_[rank]->abort(Status::aborted("and the others"));
}

}  // namespace
}  // namespace farandole::backend
