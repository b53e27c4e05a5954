#include "foremoe/core/memory_limit.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

namespace foremoe {
namespace {

constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();
constexpr double kLeastChecked = 1 << 24;
constexpr rlim_t kStackBytes = rlim_t{8} << 20;  // of a thread; counts when it is mapped, although most is never used

// Returns the number after `word`, or the first number if `word` is empty. std::nullopt for "max" and missing files.
std::optional<std::int64_t> number_in(const std::string& path, const std::string& word = {}) {
  std::ifstream file(path);
  for (std::string read; read != word;) {
    if (!(file >> read)) return {};
  }
  std::int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// Memory of files that were read counts as available, since the system can drop it.
std::int64_t available_in_group(const std::string& limit, const std::string& used, const std::string& statistics) {
  const auto most = number_in(limit);
  if (!most) return kUnknown;
  std::int64_t kept = number_in(used).value_or(0);
  for (const char* const files : {"inactive_file", "active_file"}) kept -= number_in(statistics, files).value_or(0);
  return std::max<std::int64_t>(0, *most - std::max<std::int64_t>(0, kept));
}

std::int64_t available_in_system() {
  const std::string group = "/sys/fs/cgroup/";
  const auto kibibytes = number_in("/proc/meminfo", "MemAvailable:");
  const auto swap = number_in("/proc/meminfo", "SwapFree:");
  return std::min({kibibytes ? (*kibibytes + swap.value_or(0)) * 1024 : kUnknown,
                   available_in_group(group + "memory.max", group + "memory.current", group + "memory.stat"),
                   available_in_group(group + "memory/memory.limit_in_bytes", group + "memory/memory.usage_in_bytes",
                                      group + "memory/memory.stat")});
}

// Bytes that this process has mapped, in all and in private writable memory.
struct Mapped {
  std::int64_t all = 0;
  std::int64_t data = 0;
};

Mapped mapped() {
  std::ifstream file("/proc/self/statm");
  std::array<std::int64_t, 6> pages{};  // all, resident, shared, text, unused, data
  for (std::int64_t& n : pages) file >> n;
  return {pages[0] * ::sysconf(_SC_PAGESIZE), pages[5] * ::sysconf(_SC_PAGESIZE)};
}

std::int64_t left_of(rlim_t limit, std::int64_t used) {
  if (limit > static_cast<rlim_t>(kUnknown)) return kUnknown;  // RLIM_INFINITY
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(limit) - used);
}

}  // namespace

Bytes available_memory() {
  const Mapped now = mapped();
  rlimit data{};
  rlimit all{};
  ::getrlimit(RLIMIT_DATA, &data);
  ::getrlimit(RLIMIT_AS, &all);
  return Bytes{std::min({available_in_system(), left_of(data.rlim_cur, now.data), left_of(all.rlim_cur, now.all)})};
}

void limit_memory(std::optional<Bytes> most) {
  rlimit limit{};
  ::getrlimit(RLIMIT_DATA, &limit);
  const rlim_t stacks = std::thread::hardware_concurrency() * kStackBytes;
  const rlim_t wanted = most ? static_cast<rlim_t>(mapped().data + most->value) + stacks : RLIM_INFINITY;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  ::setrlimit(RLIMIT_DATA, &limit);
}

void expect_memory(double bytes, const Where& where) {
  if (bytes < kLeastChecked) return;
  const auto available = static_cast<double>(available_memory().value);
  if (bytes <= available) return;
  throw InsufficientMemory(where,
                           fmt::format("needs {:.1f} GB of memory; {:.1f} GB are available or allowed (`max_memory`)",
                                       bytes / kBytesPerGigabyte, available / kBytesPerGigabyte));
}

}  // namespace foremoe
