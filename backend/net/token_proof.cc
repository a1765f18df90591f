#include "backend/net/token_proof.h"

#include <bit>
#include <random>

#include "backend/net/wire.h"

namespace farandole::net {
namespace {

struct SipState {
  std::uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  }
  void absorb(std::uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  std::uint64_t digest() const { return v0 ^ v1 ^ v2 ^ v3; }
};

}  // namespace

std::array<std::uint8_t, 16> sipHash128(const SipKey& key, std::string_view message) {
  SipState state{key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d ^ 0xee, key[0] ^ 0x6c7967656e657261,
                 key[1] ^ 0x7465646279746573};
  const auto lastByte = static_cast<std::uint64_t>(message.size()) << 56;
  for (; message.size() >= 8; message.remove_prefix(8)) state.absorb(WireReader(message).number<std::uint64_t>());
  std::uint64_t last = lastByte;
  for (std::size_t i = 0; i < message.size(); ++i) {
    last |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(message[i])) << (8 * i);
  }
  state.absorb(last);
  state.v2 ^= 0xee;
  state.rounds(4);
  const std::uint64_t low = state.digest();
  state.v1 ^= 0xdd;
  state.rounds(4);
  const std::uint64_t high = state.digest();
  std::array<std::uint8_t, 16> digest{};
  for (int i = 0; i < 8; ++i) {
    digest[i] = static_cast<std::uint8_t>(low >> (8 * i));
    digest[8 + i] = static_cast<std::uint8_t>(high >> (8 * i));
  }
  return digest;
}

std::string proofOf(std::string_view token, std::string_view message) {
  // Tokens are random, so a fixed key is enough to press one into 128 bits.
  const auto pressed = sipHash128({0, 0}, token);
  WireReader key({reinterpret_cast<const char*>(pressed.data()), pressed.size()});
  const auto low = key.number<std::uint64_t>();
  const auto proof = sipHash128({low, key.number<std::uint64_t>()}, message);
  return {proof.begin(), proof.end()};
}

bool equalInConstantTime(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::uint64_t randomNumber() {
  std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

}  // namespace farandole::net
