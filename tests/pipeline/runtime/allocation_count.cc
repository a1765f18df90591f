#include "tests/pipeline/runtime/allocation_count.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <sstream>
#include <utility>

namespace farandole::pipeline {

namespace {

thread_local AllocationCount* counting = nullptr;
thread_local bool isPaused = false;

constexpr int kMaxFrames = 32;

const void* thisProgram() {
  static const void* const base = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&thisProgram), &info);
    return info.dli_fbase;
  }();
  return base;
}

// Where the code of a loaded file is in memory.
struct Range {
  std::uintptr_t begin = 0, end = 0;
  bool contains(const void* address) const {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    return at >= begin && at < end;
  }
};

// Of this program and of the standard library, which may act for it; what any other file asks for is its own.
const std::array<Range, 2>& ambiguousRanges() {
  static const std::array<Range, 2> ranges = [] {
    std::array<Range, 2> found;
    dl_iterate_phdr(
        [](dl_phdr_info* file, std::size_t, void* data) {
          const bool isProgram = file->dlpi_name[0] == '\0';
          if (!isProgram && std::strstr(file->dlpi_name, "libstdc++") == nullptr) return 0;
          Range& range = (*static_cast<std::array<Range, 2>*>(data))[isProgram ? 0 : 1];
          for (int i = 0; i < file->dlpi_phnum; ++i) {
            const auto& segment = file->dlpi_phdr[i];
            if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
            range.begin = file->dlpi_addr + segment.p_vaddr;
            range.end = range.begin + segment.p_memsz;
          }
          return 0;
        },
        &found);
    return found;
  }();
  return ranges;
}

// The standard library's code, be it in its own library or, as templates, in any.
bool isStandard(const Dl_info& info) {
  if (info.dli_fname != nullptr && std::strstr(info.dli_fname, "libstdc++") != nullptr) return true;
  const char* name = info.dli_sname;
  if (name == nullptr) return false;
  for (const char* prefix : {"_ZNSt", "_ZNKSt", "_ZSt", "_Znw", "_Zna"}) {
    if (std::strncmp(name, prefix, std::strlen(prefix)) == 0) return true;
  }
  return false;
}

// Where functions are hidden, as they are by default here, it is what addr2line takes.
std::string nameOf(const Dl_info& info, const void* address) {
  if (info.dli_sname == nullptr) {
    std::ostringstream text;
    text << "addr2line "
         << reinterpret_cast<const void*>(static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase));
    return text.str();
  }
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &failed),
                                                         &std::free);
  return failed == 0 ? name.get() : info.dli_sname;
}

}  // namespace

AllocationCount::AllocationCount() {
  std::array<void*, 2> frames{};
  (void)backtrace(frames.data(), static_cast<int>(frames.size()));  // allocates the first time
  (void)ambiguousRanges();
  counting = this;
}

AllocationCount::~AllocationCount() { counting = nullptr; }

AllocationCount::Pause::Pause() : before_(std::exchange(isPaused, true)) {}
AllocationCount::Pause::~Pause() { isPaused = before_; }

void AllocationCount::note(const void* caller) {
  const auto& ranges = ambiguousRanges();
  if (std::ranges::none_of(ranges, [caller](const Range& range) { return range.contains(caller); })) {
    ++theirs_;
    return;
  }
  const Pause pause;
  std::array<void*, kMaxFrames> frames{};
  const int numFrames = backtrace(frames.data(), kMaxFrames);
  int first = 0;
  while (first < numFrames && frames[first] != caller) ++first;
  for (int i = first; i < numFrames; ++i) {
    Dl_info info{};
    if (dladdr(frames[i], &info) == 0 || isStandard(info)) continue;
    if (info.dli_fbase != thisProgram()) {
      ++theirs_;
      return;
    }
    ++ours_;
    ++places_[nameOf(info, frames[i])];
    return;
  }
}

std::string AllocationCount::places() const {
  std::string text;
  for (const auto& [name, count] : places_) text += "\n  " + std::to_string(count) + " in " + name;
  return text;
}

}  // namespace farandole::pipeline

namespace {

void* allocate(std::size_t size, std::size_t alignment) {
  const std::size_t atLeastOne = size == 0 ? 1 : size;
  void* memory = alignment == 0 ? std::malloc(atLeastOne)
                                : std::aligned_alloc(alignment, (atLeastOne + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// The other forms of the standard library call these.
void* operator new(std::size_t size) {
  if (farandole::pipeline::counting != nullptr && !farandole::pipeline::isPaused) {
    farandole::pipeline::counting->note(__builtin_return_address(0));
  }
  return allocate(size, 0);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  if (farandole::pipeline::counting != nullptr && !farandole::pipeline::isPaused) {
    farandole::pipeline::counting->note(__builtin_return_address(0));
  }
  return allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
