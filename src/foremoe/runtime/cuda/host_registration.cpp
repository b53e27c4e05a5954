#include "foremoe/runtime/cuda/host_registration.h"

#include <map>
#include <mutex>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {
namespace {

struct Registrations {
  std::mutex mutex;
  std::map<const std::byte*, int> users;  // by first byte; guarded by mutex
};

Registrations& registrations() {
  static Registrations instance;
  return instance;
}

}  // namespace

void pin_host_memory(std::span<const std::byte> memory) {
  if (memory.empty()) return;
  Registrations& all = registrations();
  const std::lock_guard lock(all.mutex);
  const auto [entry, is_new] = all.users.try_emplace(memory.data(), 0);
  if (is_new) {
    try {
      // CUDA takes no const; the pages are only locked. Portable: for every device of the process.
      auto* data = const_cast<std::byte*>(memory.data());
      FOREMOE_CUDA(cudaHostRegister(data, memory.size(), cudaHostRegisterPortable));
    } catch (...) {
      all.users.erase(entry);
      throw;
    }
  }
  ++entry->second;
}

void unpin_host_memory(std::span<const std::byte> memory) noexcept {
  Registrations& all = registrations();
  const std::lock_guard lock(all.mutex);
  const auto entry = all.users.find(memory.data());
  if (entry == all.users.end() || --entry->second > 0) return;
  FOREMOE_CUDA_NOTHROW(cudaHostUnregister(const_cast<std::byte*>(memory.data())));
  all.users.erase(entry);
}

}  // namespace foremoe::cuda
