#include "foremoe/runtime/memory.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

constexpr std::align_val_t kAlignment{64};
constexpr std::int64_t kMinCheckedBytes = std::int64_t{16} << 20;  // smaller requests skip the check, which reads files

std::optional<std::int64_t> number_in(const char* path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  if (file >> value) return value;
  return {};
}

std::optional<std::int64_t> machine_available() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "MemAvailable:" && file >> kibibytes) return kibibytes << 10;
  }
  return {};
}

std::optional<std::int64_t> cgroup_available() {
  const auto most = number_in("/sys/fs/cgroup/memory.max");  // contains "max" if unlimited
  const auto taken = number_in("/sys/fs/cgroup/memory.current");
  if (!most || !taken) return {};
  return std::max<std::int64_t>(0, *most - *taken);
}

[[noreturn]] void refuse(Bytes bytes, const std::string& why) {
  throw InputError({.file = "memory", .field = {}, .index = {}},
                   "cannot have " + std::to_string(bytes.value) + " bytes: " + why);
}

}  // namespace

std::optional<Bytes> available_memory() {
  const auto machine = machine_available();
  const auto group = cgroup_available();
  if (!machine && !group) return {};
  if (!machine || !group) return Bytes{machine ? *machine : *group};
  return Bytes{std::min(*machine, *group)};
}

void Memory::Free::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

Memory allocate_memory(Bytes bytes) {
  if (bytes.value < 0) refuse(bytes, "negative size");
  if (bytes.value >= kMinCheckedBytes) {
    const auto available = available_memory();
    if (available && *available < bytes) refuse(bytes, std::to_string(available->value) + " are available");
  }
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes.value, 64));
  void* data = ::operator new(size, kAlignment, std::nothrow);
  if (data == nullptr) refuse(bytes, "allocation failed");
  Memory memory;
  memory.data_.reset(static_cast<std::byte*>(data));
  memory.bytes_ = bytes;
  std::memset(data, 0, size);
  return memory;
}

}  // namespace foremoe
