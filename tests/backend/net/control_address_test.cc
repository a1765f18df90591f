#include "backend/net/control_address.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "backend/net/control_plane.h"

namespace farandole::net {
namespace {

const std::vector<InterfaceAddress> kMachine = {
    {"lo", "127.0.0.1", true, false},        {"eth0", "2001:db8::1", false, true}, {"eth0", "10.0.0.1", false, false},
    {"docker0", "172.17.0.1", false, false}, {"eth1", "10.1.0.1", false, false},   {"ib0", "10.2.0.1", false, false}};

std::string hosts(const std::vector<InterfaceAddress>& addresses) {
  std::string text;
  for (const InterfaceAddress& address : addresses) text += (text.empty() ? "" : " ") + address.host;
  return text;
}

TEST(ControlAddress, IsReadBackAsPublished) {
  const ControlAddress address{0x1122334455667788, 4711, "boot/net:[1]", {"10.0.0.1", "2001:db8::1"}};
  const auto decoded = ControlAddress::decode(address.encode());
  ASSERT_TRUE(decoded) << decoded.status().toString();
  EXPECT_EQ((*decoded).plane, address.plane);
  EXPECT_EQ((*decoded).port, address.port);
  EXPECT_EQ((*decoded).machine, address.machine);
  EXPECT_EQ((*decoded).hosts, address.hosts);
  const std::string text = address.encode();
  for (std::size_t cut = 0; cut < text.size(); ++cut) EXPECT_FALSE(ControlAddress::decode(text.substr(0, cut))) << cut;
  EXPECT_FALSE(ControlAddress::decode(text + "x"));
}

TEST(ControlAddress, IsLoopbackForProcessesOfTheSameMachineOnly) {
  const ControlAddress any{1, 2, "here", {"10.0.0.1"}};
  EXPECT_EQ(any.hostsFrom("here").front(), "127.0.0.1");
  EXPECT_EQ(any.hostsFrom("there"), any.hosts);
  const ControlAddress narrowed{1, 2, "", {"10.0.0.1"}};
  EXPECT_EQ(narrowed.hostsFrom(""), narrowed.hosts);
}

TEST(ControlAddress, ChoosesInterfacesInTheSyntaxOfNccl) {
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "")), "10.0.0.1 172.17.0.1 10.1.0.1 10.2.0.1 2001:db8::1");
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "eth")), "10.0.0.1 10.1.0.1 2001:db8::1");
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "=eth1")), "10.1.0.1");
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "=eth")), "");
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "ib,eth1")), "10.1.0.1 10.2.0.1");
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "^docker,eth")), "10.2.0.1");
  EXPECT_EQ(hosts(chooseInterfaces(kMachine, "lo")), "127.0.0.1");
  EXPECT_EQ(hosts(chooseInterfaces({kMachine.front()}, "")), "127.0.0.1");
}

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

TEST(ControlAddress, IsNarrowedBySettingsWhichAreRefusedByName) {
  EventLoop loop("test");
  {
    const Variable host("FARANDOLE_CONTROL_HOST", "127.0.0.1");
    const auto plane = ControlPlane::listen(loop);
    ASSERT_TRUE(plane) << plane.status().toString();
    const auto address = ControlAddress::decode((*plane)->address());
    EXPECT_EQ((*address).hosts, std::vector<std::string>{"127.0.0.1"});
    EXPECT_EQ((*address).machine, "");
  }
  {
    const Variable host("FARANDOLE_CONTROL_HOST", "192.0.2.1");  // of nobody
    const auto plane = ControlPlane::listen(loop);
    ASSERT_FALSE(plane);
    EXPECT_NE(plane.status().toString().find("FARANDOLE_CONTROL_HOST is '192.0.2.1'"), std::string::npos);
  }
  {
    const Variable name("FARANDOLE_SOCKET_IFNAME", "lo");
    const auto plane = ControlPlane::listen(loop);
    ASSERT_TRUE(plane) << plane.status().toString();
    EXPECT_EQ((*ControlAddress::decode((*plane)->address())).hosts, std::vector<std::string>{"127.0.0.1"});
  }
  {
    const Variable name("FARANDOLE_SOCKET_IFNAME", "=nosuch0");
    const auto plane = ControlPlane::listen(loop);
    ASSERT_FALSE(plane);
    EXPECT_NE(plane.status().toString().find("FARANDOLE_SOCKET_IFNAME is '=nosuch0'"), std::string::npos);
    EXPECT_NE(plane.status().toString().find("lo"), std::string::npos);
  }
}

}  // namespace
}  // namespace farandole::net
