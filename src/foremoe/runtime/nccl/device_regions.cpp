#include "foremoe/runtime/nccl/device_regions.h"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <functional>
#include <string>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::nccl {
namespace {

// The same on all ranks of one running machine, and there alone.
std::uint64_t this_machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return std::hash<std::string>{}(id);
}

// First byte of the allocation that the pointer lies in: what an IPC handle stands for. The driver knows; it is asked
// for the function by name, so that programs link and start where there is no driver.
std::byte* allocation_of(const std::byte* pointer) {
  using AddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  FOREMOE_CUDA(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12050, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) throw cuda::CudaError("the driver has no cuMemGetAddressRange");
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const CUresult result = reinterpret_cast<AddressRange>(function)(&base, &bytes, std::bit_cast<CUdeviceptr>(pointer));
  if (result != CUDA_SUCCESS) throw cuda::CudaError("a shared region is no device memory");
  return std::bit_cast<std::byte*>(base);
}

}  // namespace

struct DeviceRegions::Told {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;  // in its allocation
  std::uint64_t machine = 0;
  std::int64_t process = 0;
  cudaIpcMemHandle_t handle{};
};

DeviceRegions::Told DeviceRegions::tell(std::span<std::byte> region) const {
  const cuda::CurrentDevice here(gpu_);
  std::byte* base = allocation_of(region.data());
  Told told{.address = std::bit_cast<std::uint64_t>(region.data()),
            .bytes = region.size(),
            .offset = static_cast<std::uint64_t>(region.data() - base),
            .machine = this_machine(),
            .process = getpid()};
  FOREMOE_CUDA(cudaIpcGetMemHandle(&told.handle, base));
  return told;
}

bool DeviceRegions::map(RankId owner, const Told& told) {
  if (told.machine != this_machine()) return false;
  Mapping mapping{.owners_address = told.address, .bytes = told.bytes};
  if (told.process == getpid()) {
    mapping.here = std::bit_cast<std::byte*>(told.address);
  } else {
    const cuda::CurrentDevice here(gpu_);
    if (cudaIpcOpenMemHandle(&mapping.opened, told.handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    mapping.here = static_cast<std::byte*>(mapping.opened) + told.offset;
  }
  mapped_[owner.index()].push_back(mapping);
  return true;
}

void DeviceRegions::close() noexcept {
  for (const std::vector<Mapping>& of_owner : mapped_) {
    for (const Mapping& mapping : of_owner) {
      if (mapping.opened != nullptr) FOREMOE_CUDA_NOTHROW(cudaIpcCloseMemHandle(mapping.opened));
    }
  }
  mapped_.clear();
}

void DeviceRegions::share(Communicator& host, std::span<const std::span<std::byte>> regions) {
  close();
  host.barrier();  // now an owner may free what it shared before
  const auto num_ranks = static_cast<std::size_t>(host.num_ranks());
  mapped_.resize(num_ranks);
  sees_.assign(num_ranks, true);

  const auto count = static_cast<std::int64_t>(regions.size());
  std::vector<std::int64_t> counts(num_ranks);
  host.all_gather(std::as_bytes(std::span(&count, 1)), std::as_writable_bytes(std::span(counts)));
  const auto most = static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end()));
  std::vector<Told> mine(most), all(most * num_ranks);
  std::transform(regions.begin(), regions.end(), mine.begin(), [&](std::span<std::byte> r) { return tell(r); });
  host.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));

  for (std::size_t r = 0; r < num_ranks; ++r) {
    const RankId owner{r};
    if (owner == host.rank()) continue;
    for (std::int64_t i = 0; i < counts[r]; ++i) {
      const bool mapped =
          host.topology().same_node(owner, host.rank()) && map(owner, all[r * most + static_cast<std::size_t>(i)]);
      sees_[r] = sees_[r] && mapped;
    }
  }
}

const std::byte* DeviceRegions::local(RankId owner, const std::byte* pointer) const {
  const auto address = std::bit_cast<std::uint64_t>(pointer);
  if (owner.index() >= mapped_.size()) return nullptr;
  for (const Mapping& mapping : mapped_[owner.index()]) {
    if (address < mapping.owners_address || address - mapping.owners_address >= mapping.bytes) continue;
    return mapping.here + (address - mapping.owners_address);
  }
  return nullptr;
}

}  // namespace foremoe::nccl
