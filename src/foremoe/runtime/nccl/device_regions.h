#pragma once

// Device memory of this node's other ranks, as seen from here: by CUDA IPC between processes, as it is within one.
//
// Method. Ranks tell each other of every region: the IPC handle of the allocation that it lies in, and where in it.
//   What cannot be opened (another node, another container, a GPU that this one does not reach) is not mapped.

#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"

namespace foremoe::nccl {

class DeviceRegions {
 public:
  explicit DeviceRegions(int gpu) : gpu_(gpu) {}
  ~DeviceRegions() { close(); }
  DeviceRegions(const DeviceRegions&) = delete;
  DeviceRegions& operator=(const DeviceRegions&) = delete;

  // Collective over `host`; replaces what was shared. On return nobody sees the former regions.
  void share(Communicator& host, std::span<const std::span<std::byte>> regions);
  void close() noexcept;                                                 // nobody's memory is seen from here any more
  const std::byte* local(RankId owner, const std::byte* pointer) const;  // null when not mapped
  bool sees_all_of(RankId owner) const { return sees_[owner.index()]; }

 private:
  struct Mapping {
    std::uint64_t owners_address = 0;
    std::uint64_t bytes = 0;
    std::byte* here = nullptr;
    void* opened = nullptr;  // null: of this process
  };
  struct Told;
  Told tell(std::span<std::byte> region) const;
  bool map(RankId owner, const Told& told);

  int gpu_;
  std::vector<std::vector<Mapping>> mapped_;  // [owner]
  std::vector<bool> sees_;                    // [owner]
};

}  // namespace foremoe::nccl
