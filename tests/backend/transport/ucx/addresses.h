// What two processes tell each other over a socket of theirs before they connect.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string>

namespace farandole::transport {

inline void tell(int socket, const std::string& address) {
  ASSERT_EQ(::send(socket, address.data(), address.size(), 0), static_cast<ssize_t>(address.size()));
}

inline std::string hear(int socket) {
  std::array<char, 4096> address{};
  const ssize_t bytes = ::recv(socket, address.data(), address.size(), 0);
  EXPECT_GT(bytes, 0);
  return {address.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0))};
}

}  // namespace farandole::transport
