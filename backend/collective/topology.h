#pragma once

namespace farandole::collective {

class AlgorithmTable;
class ExchangeDepth;
class HostLayout;
class HostSegment;
class SwapWays;

// Where a program is built for: the ranks of a group, and which of them share memory.
struct Topology {
  int rank;
  int size;
  // What the ranks of this host share; null for a rank that is alone on its host.
  HostSegment* segment = nullptr;
  // Of the two ranks of a segment; null where there is none, or there are more.
  SwapWays* swapWays = nullptr;
  // Of a group that spans two hosts.
  ExchangeDepth* depth = nullptr;
  // Of a group that spans hosts. Null where all ranks share the segment, or, without
  // one, where each rank is taken for a host of its own.
  const HostLayout* layout = nullptr;
  // Null: the default one.
  const AlgorithmTable* table = nullptr;

  // The segment of a group that is on one host.
  HostSegment* wholeSegment() const { return layout == nullptr ? segment : nullptr; }
};

}  // namespace farandole::collective
