#pragma once

// One arena per node in shared memory: the experts that the node's ranks will fetch in this phase, no more. Each entry
// carries the version at which it was written and a checksum; a reader learns of a stale or damaged copy.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/transfer/checksum.h"
#include "foremoe/transfer/expert_layout.h"
#include "foremoe/transfer/shared_memory.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

class HostArena {
 public:
  // `experts` ascending, as TransferSchedule::arena has them; the layout is that of the phase.
  static HostArena create(std::span<const ArenaExpert> experts, const ExpertLayout& layout);
  // Throws InputError when there is none, or it is one of other experts or another layout.
  static HostArena open(const std::string& name, std::span<const ArenaExpert> experts, const ExpertLayout& layout);

  const std::string& name() const { return memory_.name(); }
  void remove_name() { memory_.remove_name(); }
  Bytes bytes() const;                     // of the segment, headers included
  int index_of(ArenaExpert expert) const;  // −1 when it is not here
  std::size_t num_experts() const { return experts_.size(); }

  // Writes an expert and its checksum, then its version (release).
  // One writer per expert; nobody reads it meanwhile but to find that its version is another.
  void publish(int index, std::uint64_t version, std::span<const std::byte* const> segments);

  std::uint64_t version(int index) const;  // 0 when never published (acquire: pairs with publish)
  std::uint64_t checksum(int index, std::size_t segment) const;
  const std::byte* segment(int index, std::size_t segment) const;

 private:
  struct Header;  // in shared memory, as are the entries
  struct Entry;
  HostArena(SharedMemory memory, std::span<const ArenaExpert> experts, ExpertLayout layout);
  Header expected_header() const;
  std::size_t first_expert() const;  // bytes from the beginning
  Entry& entry(int index) const;
  std::uint64_t* checksums(int index) const;  // [segment]
  std::byte* expert(int index) const;

  SharedMemory memory_;
  std::vector<ArenaExpert> experts_;
  ExpertLayout layout_;
};

}  // namespace foremoe
