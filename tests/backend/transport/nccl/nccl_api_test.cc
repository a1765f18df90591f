#include "backend/transport/nccl/nccl_api.h"

#include <gtest/gtest.h>

namespace farandole::transport {
namespace {

TEST(NcclApi, WithoutALoadedNcclItIsUnavailableAndSaysWhy) {
  // This program links no NCCL; that the table is right with one is tested from Python, beside torch's.
  const Result<NcclApi> api = NcclApi::load();
  ASSERT_FALSE(api);
  EXPECT_EQ(api.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(api.status().toString().find("no NCCL is loaded"), std::string::npos);
}

TEST(NcclApi, AFailedCallCarriesNcclsTextAndItsLastError) {
  NcclApi api;
  api.getErrorString = [](ncclResult_t result) { return result == ncclRemoteError ? "remote" : "other"; };
  api.getLastError = [](ncclComm_t) { return "socket closed"; };
  EXPECT_TRUE(api.check(ncclSuccess, "ncclSend"));
  const Status status = api.check(ncclRemoteError, "ncclSend");
  EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
  EXPECT_EQ(status.toString(), "ncclSend: remote (socket closed)");
}

}  // namespace
}  // namespace farandole::transport
