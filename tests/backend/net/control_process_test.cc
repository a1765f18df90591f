// The control plane between real processes that die, stop, fork and vanish.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "tests/backend/net/control_cluster.h"

namespace farandole::net {
namespace {

using Clock = std::chrono::steady_clock;

long nowMicroseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count();
}

void writeLine(int fd, const std::string& line) {
  const std::string text = line + '\n';
  if (::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(71);
}

// Empty when nothing came in time or the other side is gone.
std::string readLine(int fd, std::chrono::milliseconds limit) {
  std::string line;
  const auto end = Clock::now() + limit;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    pollfd wait{fd, POLLIN, 0};
    if (left <= 0 || ::poll(&wait, 1, static_cast<int>(left)) <= 0) return {};
    char byte = 0;
    if (::read(fd, &byte, 1) != 1) return {};
    if (byte == '\n') return line;
    line += byte;
  }
}

std::string toHex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string fromHex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

// How often the thread of this process's loop, named "test", has run.
long loopWakeUps() {
  long switches = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (name != "test") continue;
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.find("ctxt_switches") != std::string::npos) switches += std::stol(line.substr(line.find(':') + 1));
    }
  }
  return switches;
}

// Says on a pipe what this rank is told, and when.
class PipeListener : public ControlListener {
 public:
  explicit PipeListener(int fd) : fd_(fd) {}
  void peerFailed(int rank, const Status& status) override { tell("failed", rank, status); }
  void aborted(int rank, const Status& status) override { tell("aborted", rank, status); }

 private:
  void tell(const char* what, int rank, const Status& status) const {
    writeLine(fd_, std::string(what) + ' ' + std::to_string(rank) + ' ' + std::to_string(nowMicroseconds()) + ' ' +
                       std::string(status.message()));
  }
  const int fd_;
};

struct Told {
  std::string what;
  int rank = -1;
  long microseconds = 0;
  std::string message;
};

// Ranks as processes of their own. The test speaks to each over a socket pair:
// "abort", "leave", "fork" (a child that sleeps on) and "usage" are obeyed.
class ControlProcesses {
 public:
  // `prepare` runs in each child before anything else.
  explicit ControlProcesses(
      int size, ControlTimes times = {}, const std::function<void(int)>& prepare = [](int) {}) {
    for (int rank = 0; rank < size; ++rank) {
      std::array<int, 2> pair{};
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0)
        throw std::runtime_error("socketpair");
      const pid_t pid = ::fork();
      if (pid == 0) {
        for (const int fd : fds_) ::close(fd);
        ::close(pair[0]);
        ::alarm(120);
        prepare(rank);
        ::_exit(runRank(pair[1], rank, size, times));
      }
      ::close(pair[1]);
      fds_.push_back(pair[0]);
      pids_.push_back(pid);
    }
    std::string all;
    for (int rank = 0; rank < size; ++rank) all += readLine(fd(rank), 20s) + ' ' + std::to_string(pid(rank)) + ' ';
    for (int rank = 0; rank < size; ++rank) writeLine(fd(rank), all);
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(readLine(fd(rank), 20s), "joined");
    std::this_thread::sleep_for(200ms);  // for the tree to be built
  }
  ~ControlProcesses() {
    for (const pid_t pid : pids_) ::kill(pid, SIGKILL);
    for (const pid_t pid : pids_) ::waitpid(pid, nullptr, 0);
    for (const pid_t pid : strays_) ::kill(pid, SIGKILL);
    for (const int fd : fds_) ::close(fd);
  }
  ControlProcesses(const ControlProcesses&) = delete;
  ControlProcesses& operator=(const ControlProcesses&) = delete;

  pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  int fd(int rank) const { return fds_[static_cast<std::size_t>(rank)]; }
  void signal(int rank, int number) const { ::kill(pid(rank), number); }
  void order(int rank, const std::string& what) const { writeLine(fd(rank), what); }
  std::string ask(int rank, const std::string& what) const {
    order(rank, what);
    return readLine(fd(rank), 10s);
  }
  pid_t forkFrom(int rank) {
    const std::string answer = ask(rank, "fork");
    strays_.push_back(answer.empty() ? 0 : std::stoi(answer));
    if (strays_.back() <= 0) throw std::runtime_error("the rank forked no child");
    return strays_.back();
  }

  // What rank is told next; `what` is empty when that is nothing within the limit.
  Told next(int rank, std::chrono::milliseconds limit) const {
    const std::string line = readLine(fd(rank), limit);
    if (line.empty()) return {};
    Told told;
    const auto first = line.find(' ');
    const auto second = line.find(' ', first + 1);
    const auto third = line.find(' ', second + 1);
    told.what = line.substr(0, first);
    told.rank = std::stoi(line.substr(first, second - first));
    told.microseconds = std::stol(line.substr(second, third - second));
    told.message = line.substr(third + 1);
    return told;
  }

 private:
  static int runRank(int fd, int rank, int size, const ControlTimes& times) {
    EventLoop loop("test");
    auto plane = ControlPlane::listen(loop, times);
    if (!plane) {
      std::cerr << plane.status().toString() << std::endl;
      return 70;
    }
    writeLine(fd, toHex((*plane)->address()));
    std::istringstream all(readLine(fd, 20s));
    std::vector<ControlMember> members(static_cast<std::size_t>(size));
    for (ControlMember& member : members) {
      std::string address;
      all >> address >> member.pid;
      member.address = fromHex(address);
      member.host = "testhost";
    }
    const auto listener = std::make_shared<PipeListener>(fd);
    const Status joined = (*plane)->joinGroup("g", rank, members, kTestToken, listener);
    writeLine(fd, joined.isOk() ? "joined" : joined.toString());
    while (true) {
      const std::string order = readLine(fd, 100s);
      if (order == "abort") (void)(*plane)->abort("g", "told to");
      if (order == "leave") (void)(*plane)->leaveGroup("g");
      if (order == "fork") {
        const pid_t child = ::fork();
        if (child == 0) {
          for (int i = 0; i < 600; ++i) ::usleep(100000);
          ::_exit(0);
        }
        writeLine(fd, std::to_string(child));
      }
      if (order == "child") {  // one that uses and destroys what it inherited
        const pid_t child = ::fork();
        if (child == 0) {
          const bool refused = !(*plane)->abort("g", "from a child").isOk() && !(*plane)->leaveGroup("g").isOk();
          (*plane).reset();
          ::_exit(refused ? 0 : 1);
        }
        int status = -1;
        ::waitpid(child, &status, 0);
        writeLine(fd, std::to_string(status));
      }
      if (order == "usage") {
        rusage usage{};
        ::getrusage(RUSAGE_SELF, &usage);
        writeLine(fd, std::to_string(loopWakeUps()) + ' ' +
                          std::to_string(usage.ru_utime.tv_sec * 1000000 + usage.ru_utime.tv_usec +
                                         usage.ru_stime.tv_sec * 1000000 + usage.ru_stime.tv_usec));
      }
      if (order == "exit") {
        (*plane).reset();
        return 0;
      }
      if (order.empty()) return 72;
    }
  }

  std::vector<pid_t> pids_;
  std::vector<int> fds_;
  std::vector<pid_t> strays_;
};

TEST(ControlProcesses, LearnWithinASecondWhomKill9Took) {
  constexpr int kSize = 8;
  for (const int victim : {0, 5}) {
    ControlProcesses ranks(kSize);
    const long killed = nowMicroseconds();
    ranks.signal(victim, SIGKILL);
    long last = 0;
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank == victim) continue;
      const Told told = ranks.next(rank, 5s);
      ASSERT_EQ(told.what, "failed") << "rank " << rank;
      EXPECT_EQ(told.rank, victim);
      EXPECT_NE(told.message.find("(host testhost, pid " + std::to_string(ranks.pid(victim))), std::string::npos)
          << told.message;
      last = std::max(last, told.microseconds - killed);
    }
    EXPECT_LT(last, 1000000);
    std::cout << "kill -9 of rank " << victim << " of " << kSize << ": the last rank was told after " << last
              << " us\n";
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank != victim) {
        EXPECT_EQ(ranks.next(rank, 20ms).what, "");
      }
    }
  }
}

TEST(ControlProcesses, SpreadAnAbort) {
  ControlProcesses ranks(6);
  const long start = nowMicroseconds();
  ranks.order(4, "abort");
  long last = 0;
  for (const int rank : {0, 1, 2, 3, 5}) {
    const Told told = ranks.next(rank, 5s);
    ASSERT_EQ(told.what, "aborted");
    EXPECT_EQ(told.rank, 4);
    EXPECT_NE(told.message.find("told to"), std::string::npos);
    last = std::max(last, told.microseconds - start);
  }
  std::cout << "abort among 6: the last rank was told after " << last << " us\n";
}

TEST(ControlProcesses, TakeAStoppedProcessForAlive) {
  ControlTimes times;
  times.silence = 2000ms;
  ControlProcesses ranks(4, times);
  for (const int stopped : {0, 3}) ranks.signal(stopped, SIGSTOP);
  for (const int rank : {1, 2}) EXPECT_EQ(ranks.next(rank, 2500ms).what, "") << "rank " << rank;
  for (const int stopped : {0, 3}) ranks.signal(stopped, SIGCONT);
  ranks.order(1, "abort");
  for (const int rank : {0, 2, 3}) EXPECT_EQ(ranks.next(rank, 5s).what, "aborted") << "rank " << rank;
}

TEST(ControlProcesses, SeeADeathBehindALivingForkedChild) {
  for (const int victim : {0, 2}) {
    ControlProcesses ranks(4);
    const pid_t worker = ranks.forkFrom(victim);
    ranks.signal(victim, SIGKILL);
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      const Told told = ranks.next(rank, 5s);
      EXPECT_EQ(told.what, "failed");
      EXPECT_EQ(told.rank, victim);
    }
    EXPECT_EQ(::kill(worker, 0), 0) << "the child was to live on";
  }
}

TEST(ControlProcesses, AreNotDisturbedByAForkedChildThatUsesAndDestroysThePlane) {
  ControlProcesses ranks(3);
  for (const int rank : {0, 1}) EXPECT_EQ(ranks.ask(rank, "child"), "0");
  for (const int rank : {0, 1, 2}) EXPECT_EQ(ranks.next(rank, 100ms).what, "");
  ranks.order(1, "abort");
  for (const int rank : {0, 2}) EXPECT_EQ(ranks.next(rank, 5s).what, "aborted");
}

TEST(ControlProcesses, LeaveInOrderWithoutAReport) {
  ControlProcesses ranks(6);
  // Who exits at once has 110 ms to hand its farewell over, which a loaded machine may exceed.
  for (const char* const step : {"leave", "exit"}) {
    for (const int rank : {0, 3, 1}) ranks.order(rank, step);
    for (const int rank : {2, 4, 5}) EXPECT_EQ(ranks.next(rank, 300ms).what, "") << step << ", rank " << rank;
  }
  ranks.signal(2, SIGKILL);
  for (const int rank : {4, 5}) {
    const Told told = ranks.next(rank, 5s);
    EXPECT_EQ(told.what, "failed");
    EXPECT_EQ(told.rank, 2);
  }
}

TEST(ControlProcesses, DoNothingWhileNothingHappens) {
  ControlProcesses ranks(4);
  std::this_thread::sleep_for(1500ms);  // until every timer of the start has passed
  std::vector<std::string> before(4);
  for (int rank = 0; rank < 4; ++rank) before[static_cast<std::size_t>(rank)] = ranks.ask(rank, "usage");
  std::this_thread::sleep_for(3s);
  for (int rank = 0; rank < 4; ++rank) {
    long switches[2] = {};
    long cpu[2] = {};
    std::istringstream(before[static_cast<std::size_t>(rank)]) >> switches[0] >> cpu[0];
    std::istringstream(ranks.ask(rank, "usage")) >> switches[1] >> cpu[1];
    std::cout << "rank " << rank << " in 3 s: the loop woke up " << switches[1] - switches[0] << " times; "
              << cpu[1] - cpu[0] << " us of CPU in the process\n";
    EXPECT_GT(switches[0], 0);
    EXPECT_EQ(switches[1], switches[0]);
  }
}

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

TEST(ControlProcesses, LearnThatAHostVanishedWithoutAWord) {
  if (::geteuid() != 0 || !run("unshare -n true") || !run("ip -V")) {
    GTEST_SKIP() << "network namespaces need root, unshare and ip";
  }
  // Rank 1 lives in a network namespace of its own, joined to rank 0's by a veth pair that is then cut.
  std::array<int, 2> made{};
  std::array<int, 2> joined{};
  ASSERT_EQ(::pipe(made.data()), 0);
  ASSERT_EQ(::pipe(joined.data()), 0);
  const std::string suffix = std::to_string(::getpid() % 10000);
  const std::string a = "fdl" + suffix + "a";
  const std::string b = "fdl" + suffix + "b";
  ControlTimes times;
  times.silence = 2000ms;
  bool possible = true;
  ControlProcesses ranks(2, times, [&](int rank) {
    if (::unshare(CLONE_NEWNET) != 0 || !run("ip link set lo up")) ::_exit(73);
    if (rank == 0) {
      writeLine(made[1], std::to_string(::getpid()));
      if (readLine(joined[0], 10s).empty()) ::_exit(74);
      if (!run("ip addr add 10.99.0.1/24 dev " + a) || !run("ip link set " + a + " up")) ::_exit(75);
    } else {
      const std::string other = readLine(made[0], 10s);
      possible = run("ip link add " + b + " type veth peer name " + a + " netns " + other);
      writeLine(joined[1], possible ? "yes" : "");
      if (!possible || !run("ip addr add 10.99.0.2/24 dev " + b) || !run("ip link set " + b + " up")) ::_exit(76);
    }
  });
  for (const int fd : {made[0], made[1], joined[0], joined[1]}) ::close(fd);
  ranks.order(0, "abort");  // they are connected
  ASSERT_EQ(ranks.next(1, 5s).what, "aborted");
  const long start = nowMicroseconds();
  ASSERT_TRUE(run("nsenter -t " + std::to_string(ranks.pid(1)) + " -n ip link set " + b + " down"));
  for (const int rank : {0, 1}) {
    const Told told = ranks.next(rank, 10s);
    ASSERT_EQ(told.what, "failed") << "rank " << rank;
    EXPECT_EQ(told.rank, 1 - rank);
    EXPECT_NE(told.message.find("host does not answer"), std::string::npos) << told.message;
    std::cout << "rank " << rank << " was told after " << (told.microseconds - start) / 1000 << " ms\n";
    EXPECT_LT(told.microseconds - start, 6000000);
  }
}

}  // namespace
}  // namespace farandole::net
