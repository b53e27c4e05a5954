#include "foremoe/transfer/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <system_error>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/core/memory_limit.h"

namespace foremoe {

namespace {

constexpr const char* kDirectory = "/dev/shm";

struct Creator {
  int pid = 0;
  std::uint64_t start_time = 0;  // clock ticks since boot; differs when a process id is reused

  friend bool operator==(const Creator&, const Creator&) = default;
};

// Returns nullopt if the process does not exist or is a zombie.
std::optional<Creator> running(int pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const std::size_t name_end = line.rfind(')');  // the second field, the name, may contain any character
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(name_end + 1));
  std::string field;
  rest >> field;  // third field: state
  if (field == "Z" || field == "X") return std::nullopt;
  for (int i = 4; i <= 22; ++i) rest >> field;
  Creator creator{.pid = pid};
  const auto end = std::from_chars(field.data(), field.data() + field.size(), creator.start_time);
  return end.ec == std::errc{} ? std::optional(creator) : std::nullopt;
}

Creator this_process() {
  const std::optional<Creator> creator = running(getpid());
  return creator ? *creator : Creator{.pid = getpid()};
}

// 0 if the system has no such namespace.
std::uint64_t process_id_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

std::string prefix() { return fmt::format("foremoe-{}-{}-", getuid(), process_id_namespace()); }

// Parses "foremoe-<uid>-<namespace>-<pid>-<start time>-…" (no slash). nullopt if the name does not start with `ours`.
std::optional<Creator> creator_of(std::string_view name, const std::string& ours) {
  if (!name.starts_with(ours)) return std::nullopt;
  name.remove_prefix(ours.size());
  Creator creator;
  const auto pid = std::from_chars(name.data(), name.data() + name.size(), creator.pid);
  if (pid.ec != std::errc{} || pid.ptr == name.data() + name.size() || *pid.ptr != '-') return std::nullopt;
  const auto time = std::from_chars(pid.ptr + 1, name.data() + name.size(), creator.start_time);
  if (time.ec != std::errc{} || time.ptr == name.data() + name.size() || *time.ptr != '-') return std::nullopt;
  return creator;
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::byte* map(int fd, std::size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

int reserve(int fd, std::int64_t bytes) {
  // More could be reserved, but the system would later kill processes.
  if (Bytes{bytes} > available_memory()) return ENOMEM;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(fd, 0, bytes);
  return error;
}

// Prefix of all names of this process, for remove_own_shared_memory(). Written once, then read-only.
struct OwnPrefix {
  std::array<char, 128> text{};
  std::size_t size = 0;
  int pid = 0;
  std::atomic<bool> written = false;
};
OwnPrefix own_prefix;

// A signal handler removes the names while other threads continue. The handler sets `ending`, after which no thread
// starts to create a name. Then it waits for `creating` threads, so that no name appears after it listed all names.
std::atomic<bool> ending = false;
std::atomic<int> creating = 0;

// Counts this thread in `creating`. Blocks signals on this thread, since a handler would wait for it.
class Creating {
 public:
  Creating() {
    sigset_t every;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, &before_);
    ++creating;
  }
  ~Creating() {
    --creating;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  Creating(const Creating&) = delete;
  Creating& operator=(const Creating&) = delete;

 private:
  sigset_t before_{};
};

// Returns -1 with errno ECANCELED if the process is ending.
int create_name(const char* name) {
  const Creating counted;
  if (!ending) return shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  errno = ECANCELED;
  return -1;
}

void write_own_prefix(const Creator& creator) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (own_prefix.written && own_prefix.pid == creator.pid) return;
  const std::string text = fmt::format("{}{}-{}-", prefix(), creator.pid, creator.start_time);
  own_prefix.written = false;  // a forked child inherits the parent's prefix
  creating = 0;                // counts the parent's threads, which the child lacks
  own_prefix.size = text.copy(own_prefix.text.data(), own_prefix.text.size());
  own_prefix.pid = creator.pid;
  own_prefix.written = true;
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& purpose, Bytes bytes) {
  remove_stale_shared_memory();
  const Creator creator = this_process();
  write_own_prefix(creator);
  SharedMemory memory;
  std::random_device random;  // other users must not be able to take the next name
  const std::string name =
      fmt::format("/{}{}-{}-{:08x}{:08x}-{}", prefix(), creator.pid, creator.start_time, random(), random(), purpose);
  const auto refuse = [&](int error) {
    return InputError(
        {.file = name},
        fmt::format("cannot reserve {} bytes of shared memory for {}: {}", bytes.value, purpose,
                    error == ENOSPC || error == ENOMEM || error == EFBIG ? std::string("too little memory")
                                                                         : std::generic_category().message(error)));
  };
  if (bytes.value <= 0) throw refuse(EINVAL);

  const FileDescriptor file(create_name(name.c_str()));
  if (file.get() < 0) throw refuse(errno);
  memory.name_ = name;
  memory.owner_pid_ = creator.pid;  // from here on, the destructor removes the name
  if (const int error = reserve(file.get(), bytes.value); error != 0) throw refuse(error);
  std::byte* const data = map(file.get(), static_cast<std::size_t>(bytes.value));
  if (data == nullptr) throw refuse(errno);
  memory.bytes_ = {data, static_cast<std::size_t>(bytes.value)};
  return memory;
}

SharedMemory SharedMemory::open(const std::string& name) {
  const FileDescriptor file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  struct stat status {};
  if (file.get() < 0 || fstat(file.get(), &status) != 0 || status.st_size <= 0) {
    throw InputError({.file = name}, "there is no such shared memory");
  }
  if (status.st_uid != geteuid()) throw InputError({.file = name}, "belongs to another user");
  std::byte* const data = map(file.get(), static_cast<std::size_t>(status.st_size));
  if (data == nullptr)
    throw InputError({.file = name}, fmt::format("cannot be mapped: {}", std::generic_category().message(errno)));
  SharedMemory memory;
  memory.name_ = name;
  memory.bytes_ = {data, static_cast<std::size_t>(status.st_size)};
  return memory;
}

SharedMemory::~SharedMemory() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
  remove_name();
}

void SharedMemory::remove_name() {
  if (owner_pid_ != 0 && owner_pid_ == getpid()) shm_unlink(name_.c_str());  // skipped in a child forked since
  owner_pid_ = 0;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::move(other.name_)),
      bytes_(std::exchange(other.bytes_, {})),
      owner_pid_(std::exchange(other.owner_pid_, 0)) {
  other.name_.clear();
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(bytes_, other.bytes_);
  std::swap(owner_pid_, other.owner_pid_);
  return *this;
}

void remove_stale_shared_memory() {
  if (!running(getpid())) return;  // this system does not list processes
  const std::string ours = prefix();
  std::error_code ignored;  // if the directory does not exist, there is nothing to remove
  for (const auto& entry : std::filesystem::directory_iterator(kDirectory, ignored)) {
    const std::string name = entry.path().filename();
    const std::optional<Creator> creator = creator_of(name, ours);
    if (!creator || running(creator->pid) == creator) continue;
    shm_unlink(("/" + name).c_str());  // fails if another process was faster
  }
}

// Uses only system calls and comparisons: a signal handler may neither allocate nor lock.
void remove_own_shared_memory() noexcept {
  ending = true;
  if (!own_prefix.written || own_prefix.pid != getpid()) return;
  while (creating > 0) sched_yield();
  const int directory = open(kDirectory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return;
  struct Entry {  // layout of getdents64(2)
    std::uint64_t inode;
    std::int64_t next;
    std::uint16_t bytes;
    std::uint8_t type;
    char name[1];
  };
  alignas(Entry) std::array<char, 4096> entries{};
  for (long read = 0; (read = syscall(SYS_getdents64, directory, entries.data(), entries.size())) > 0;) {
    for (long at = 0; at < read;) {
      const auto* const entry = reinterpret_cast<const Entry*>(entries.data() + at);
      const char* const name = reinterpret_cast<const char*>(entry) + offsetof(Entry, name);
      if (std::strncmp(name, own_prefix.text.data(), own_prefix.size) == 0) unlinkat(directory, name, 0);
      at += entry->bytes;
    }
  }
  close(directory);
}

}  // namespace foremoe
