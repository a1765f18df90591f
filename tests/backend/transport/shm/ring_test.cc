#include "backend/transport/shm/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "backend/transport/shm/memory.h"

namespace farandole::transport {
namespace {

constexpr RingShape kSmall{16, 4096};

struct Ring {
  explicit Ring(RingShape shape) : memory(std::move(SharedMemory::create("ring-test", ringBytes(shape))).value()) {}
  SharedMemory memory;
};

CellFields eager(std::uint64_t tag, std::size_t bytes) {
  return {.kind = CellKind::kEager, .tag = tag, .bytes = bytes};
}

std::vector<std::byte> messageOf(unsigned number) {
  std::mt19937 random(number);
  std::vector<std::byte> data(random() % 4 == 0 ? random() % 513 : random() % 40);
  for (std::byte& b : data) b = static_cast<std::byte>(random());
  return data;
}

TEST(Ring, CarriesMessagesOfRandomSizesBetweenTwoThreadsInOrder) {
  constexpr unsigned kMessages = 50'000;
  Ring ring(kSmall);
  std::thread writing([&] {
    RingWriter writer(ring.memory.data(), kSmall);
    for (unsigned i = 0; i < kMessages; ++i) {
      const auto data = messageOf(i);
      while (!writer.write(eager(i, data.size()), data)) std::this_thread::yield();
    }
  });
  RingReader reader(ring.memory.data(), kSmall);
  for (unsigned i = 0; i < kMessages; ++i) {
    const Cell* cell = nullptr;
    while ((cell = reader.front()) == nullptr) std::this_thread::yield();
    const auto expected = messageOf(i);
    ASSERT_EQ(cell->tag, i);
    ASSERT_EQ(cell->bytes, expected.size());
    const auto got = reader.payload(*cell, cell->bytes);
    ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin()));
    (void)reader.pop();
  }
  EXPECT_EQ(reader.front(), nullptr);
  writing.join();
}

TEST(Ring, TakesEveryMessageOnceItsReaderHasReadAllOfThem) {
  // What the reader has not told yet must never keep the writer from writing:
  // nobody would wake it up.
  std::mt19937 random(3);
  Ring ring(kSmall);
  RingWriter writer(ring.memory.data(), kSmall);
  RingReader reader(ring.memory.data(), kSmall);
  for (int round = 0; round < 2000; ++round) {
    const std::vector<std::byte> data(random() % (kSmall.payloadBytes / 8 + 1));
    ASSERT_TRUE(writer.write(eager(1, data.size()), data)) << round << ": " << data.size();
    ASSERT_NE(reader.front(), nullptr);
    (void)reader.pop();
  }
}

TEST(Ring, SaysThatAWriterWaitsOnceThereIsRoom) {
  Ring ring(kSmall);
  RingWriter writer(ring.memory.data(), kSmall);
  RingReader reader(ring.memory.data(), kSmall);
  unsigned written = 0;
  while (writer.write(eager(written, 0), {})) ++written;
  EXPECT_EQ(written, kSmall.cells);
  EXPECT_TRUE(reader.pop());
  EXPECT_TRUE(writer.write(eager(written, 0), {}));
  for (unsigned i = 1; i <= written; ++i) {
    ASSERT_NE(reader.front(), nullptr);
    EXPECT_EQ(reader.front()->tag, i);
    EXPECT_FALSE(reader.pop());
  }
}

TEST(Ring, AMessageComesAlongWithItsOffer) {
  Ring ring(kSmall);
  RingWriter writer(ring.memory.data(), kSmall);
  RingReader reader(ring.memory.data(), kSmall);
  const std::vector<std::byte> data(1000, std::byte{7});
  const CellFields offer{.kind = CellKind::kRendezvous, .tag = 1, .bytes = data.size(), .address = data.data()};
  for (const bool comesAlong : {true, false, true, true, true, true, false}) {
    ASSERT_TRUE(writer.write(offer, comesAlong ? std::span(data) : std::span<const std::byte>()));
    const Cell* const cell = reader.front();
    ASSERT_NE(cell, nullptr);
    EXPECT_EQ(cell->bytes, data.size());
    EXPECT_EQ(cell->elsewhere.address, data.data());
    EXPECT_EQ(cell->isOutOfLine(), comesAlong);
    if (comesAlong) {
      EXPECT_TRUE(std::ranges::equal(reader.payload(*cell, cell->bytes), data));
    }
    (void)reader.pop();
  }
}

TEST(Ring, TellsItsWriterWithinARoundThatMessagesAreToStay) {
  Ring ring(kSmall);
  RingWriter writer(ring.memory.data(), kSmall);
  RingReader reader(ring.memory.data(), kSmall);
  reader.holdBack(true);
  unsigned written = 0;
  while (!writer.isHeldBack()) {
    ASSERT_LE(++written, kSmall.cells + 1);
    ASSERT_TRUE(writer.write(eager(written, 0), {}));
    ASSERT_NE(reader.front(), nullptr);
    (void)reader.pop();
  }
  EXPECT_TRUE(writer.isHeldBack());
  reader.holdBack(false);
  EXPECT_FALSE(writer.isHeldBack());
}

}  // namespace
}  // namespace farandole::transport
