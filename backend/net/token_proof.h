#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace farandole::net {

// SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012): a keyed
// hash that cannot be forged without the key.
using SipKey = std::array<std::uint64_t, 2>;
std::array<std::uint8_t, 16> sipHash128(const SipKey& key, std::string_view message);

// The proof that its sender knows `token`, for this `message` only: the token
// itself never travels. 16 bytes.
std::string proofOf(std::string_view token, std::string_view message);

// Takes the same time wherever the two differ.
bool equalInConstantTime(std::string_view a, std::string_view b);

// From the system's random generator.
std::uint64_t randomNumber();

}  // namespace farandole::net
