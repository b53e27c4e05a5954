#include "foremoe/core/memory_limit.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

namespace foremoe {
namespace {

constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();
constexpr double kLeastChecked = 1 << 24;

// Returns the number after `word`, or the first number if `word` is empty. std::nullopt for "max" and missing files.
std::optional<std::int64_t> number_in(const std::filesystem::path& path, const std::string& word = {}) {
  std::ifstream file(path);
  for (std::string read; read != word;) {
    if (!(file >> read)) return {};
  }
  std::int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// Memory that the system can drop, such as that of files that were read, counts as available.
std::int64_t available_in_group(const std::filesystem::path& group, bool is_version_2) {
  const auto most = number_in(group / (is_version_2 ? "memory.max" : "memory.limit_in_bytes"));
  if (!most) return kUnknown;
  std::int64_t kept = number_in(group / (is_version_2 ? "memory.current" : "memory.usage_in_bytes")).value_or(0);
  const auto droppable = is_version_2 ? std::array{"inactive_file", "active_file", "slab_reclaimable"}
                                      : std::array{"total_inactive_file", "total_active_file", ""};
  for (const std::string word : droppable) {
    if (!word.empty()) kept -= number_in(group / "memory.stat", word).value_or(0);
  }
  return std::max<std::int64_t>(0, *most - std::max<std::int64_t>(0, kept));
}

// Of the process's control group and all groups around it, as far as they are visible.
std::int64_t available_in_groups() {
  std::int64_t least = kUnknown;
  std::ifstream file("/proc/self/cgroup");  // lines "number:controllers:path", without controllers in version 2
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_version_2 = controllers == ",,";
    if (!is_version_2 && controllers.find(",memory,") == std::string::npos) continue;
    const std::filesystem::path root = is_version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (std::filesystem::path group = line.substr(second + 1);; group = group.parent_path()) {
      least = std::min(least, available_in_group(root / group.relative_path(), is_version_2));
      if (!group.has_relative_path()) break;
    }
  }
  return least;
}

std::int64_t available_in_system() {
  const auto kibibytes = number_in("/proc/meminfo", "MemAvailable:");
  return std::min(kibibytes ? *kibibytes * 1024 : kUnknown, available_in_groups());
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

// Of a thread. They count when they are mapped, although most are never used.
rlim_t stack_bytes() {
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  ::pthread_getattr_default_np(&attributes);
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  return bytes;
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
  static const rlim_t given = limit.rlim_cur;  // by the system or its user; never raised
  const rlim_t stacks = std::thread::hardware_concurrency() * stack_bytes();
  limit.rlim_cur = most ? std::min(given, static_cast<rlim_t>(mapped().data + most->value) + stacks) : given;
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
