#pragma once

#include <cstdint>
#include <string_view>

namespace farandole {

// FNV-1a (Fowler, Noll, Vo), 64 bits: equal on all machines for equal contents; no protection against an attacker.
class Digest {
 public:
  void add(std::string_view bytes) {
    for (const char byte : bytes) addByte(static_cast<unsigned char>(byte));
  }
  void add(std::int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      addByte(static_cast<unsigned char>(static_cast<std::uint64_t>(value) >> shift));
    }
  }
  std::uint64_t value() const { return hash_; }

 private:
  void addByte(unsigned char byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ull; }

  std::uint64_t hash_ = 0xcbf29ce484222325ull;
};

}  // namespace farandole
