#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/collective/buffer_pool.h"
#include "backend/collective/operation.h"

namespace farandole::collective {

// dst[i] = sources[0][i] + sources[1][i] + ... in that order, for `count`
// elements and whatever "+" is. `dst` may be one of the sources.
using ReduceFunction = void (*)(void* dst, const void* const* sources, int numSources, std::size_t count);

// What one rank does for a collective: posts, waits for all that was posted,
// local work. Built by the algorithms, carried out by a ProgramOperation.
class Program {
 public:
  void send(int peer, const void* data, std::size_t bytes);
  void recv(int peer, void* data, std::size_t bytes);
  // What comes after it starts when all that was posted before it is done.
  void wait();
  void copy(void* dst, const void* src, std::size_t bytes);
  void reduce(ReduceFunction function, void* dst, std::span<const void* const> sources, std::size_t count);

  // Memory that lives as long as the program.
  std::byte* scratch(std::size_t bytes);

  int numMessages() const { return numMessages_; }

 private:
  friend class ProgramOperation;
  enum class Kind : std::uint8_t { kSend, kRecv, kWait, kCopy, kReduce };
  struct Step {
    Kind kind;
    int peer;            // or the number of sources
    const void* source;  // or null
    void* destination;
    std::size_t size;  // bytes, or elements of a reduction
    std::size_t firstSource;
    ReduceFunction function;
  };

  std::vector<Step> steps_;
  std::vector<const void*> sources_;
  std::vector<BufferPool::Buffer> scratch_;
  int numMessages_ = 0;
};

// A collective in flight.
class ProgramOperation : public Operation {
 public:
  // `sequence` tells the collectives of a communicator apart: equal on all ranks.
  void setProgram(Program program, std::uint32_t sequence);

 protected:
  using Operation::Operation;
  bool postNext() final;
  std::span<Message> messages() final { return {messages_.get(), static_cast<std::size_t>(posted_)}; }

 private:
  Program program_;
  std::uint32_t sequence_ = 0;
  std::size_t next_ = 0;
  std::unique_ptr<Message[]> messages_;
  int posted_ = 0;
};

}  // namespace farandole::collective
