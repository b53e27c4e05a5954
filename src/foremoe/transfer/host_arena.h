#pragma once

// Host arena: one per node, in shared memory, with exactly the experts that the node's ranks fetch by the host path in
// this phase. Each entry has a version and checksums, so that readers detect stale or damaged copies.

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
  // `experts` are ascending, as in TransferSchedule::arena; `layout` is the phase's.
  static HostArena create(std::span<const ArenaExpert> experts, const ExpertLayout& layout);
  // Throws InputError if the arena does not exist, or has other experts, another number of segments or another size.
  static HostArena open(const std::string& name, std::span<const ArenaExpert> experts, const ExpertLayout& layout);

  const std::string& name() const { return memory_.name(); }
  void remove_name() { memory_.remove_name(); }
  Bytes bytes() const;                     // of the shared memory, headers included
  int index_of(ArenaExpert expert) const;  // −1 if absent
  std::size_t num_experts() const { return experts_.size(); }

  // Writes an expert and its checksums, then its version (release). Until the version is written, readers see another
  // version and do not read the expert. Each expert has one writer.
  void publish(int index, std::uint64_t version, std::span<const std::byte* const> segments);

  std::uint64_t version(int index) const;  // 0 before the first publish (acquire: pairs with publish)
  std::uint64_t checksum(int index, std::size_t segment) const;
  const std::byte* segment(int index, std::size_t segment) const;

 private:
  struct Header;  // in shared memory, like the entries
  struct Entry;
  HostArena(SharedMemory memory, std::span<const ArenaExpert> experts, ExpertLayout layout);
  Header expected_header() const;
  std::size_t first_expert() const;  // bytes from the start
  Entry& entry(int index) const;
  std::uint64_t* checksums(int index) const;  // [segment]
  std::byte* expert(int index) const;

  SharedMemory memory_;
  std::vector<ArenaExpert> experts_;
  ExpertLayout layout_;
};

}  // namespace foremoe
