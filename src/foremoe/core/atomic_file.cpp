#include "foremoe/core/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <charconv>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {

namespace fs = std::filesystem;

namespace {

constexpr int kMaxTemporaryNames = 10'000;  // tried before giving up
constexpr int kMaxLinks = 40;               // followed, as Linux does
constexpr std::size_t kMaxBytesPerWrite = std::size_t{1} << 30;
constexpr std::size_t kMaxUnfinished = 64;

// The temporary files of this process, in storage that a signal handler may read at any time.
struct Unfinished {
  enum State : int { kFree, kBeingFilled, kFilled };

  std::atomic<int> state = kFree;
  std::array<char, PATH_MAX> path{};
};
static_assert(std::atomic<int>::is_always_lock_free, "read by signal handlers");
std::array<Unfinished, kMaxUnfinished> unfinished_files;

// The slot that now holds the path; -1 when none is free or the path is too long.
int remember_unfinished(const std::string& path) {
  if (path.size() >= PATH_MAX) return -1;
  for (std::size_t i = 0; i < kMaxUnfinished; ++i) {
    Unfinished& slot = unfinished_files[i];
    int expected = Unfinished::kFree;
    if (!slot.state.compare_exchange_strong(expected, Unfinished::kBeingFilled)) continue;
    std::memcpy(slot.path.data(), path.c_str(), path.size() + 1);
    slot.state.store(Unfinished::kFilled);
    return static_cast<int>(i);
  }
  return -1;
}

// A rename is on the disk once its directory is. Not every file system can flush directories; those that cannot
// make no promise that we could keep for them.
void flush_directory(const fs::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

fs::path directory_of(const std::string& target) {
  const fs::path parent = fs::path(target).parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

// What the path names in the end, whether or not that exists; empty where links go round in a circle.
std::string followed(fs::path path) {
  std::error_code ignored;
  for (int i = 0; i < kMaxLinks; ++i) {
    if (!fs::is_symlink(fs::symlink_status(path, ignored))) return path.string();
    path = path.parent_path() / fs::read_symlink(path, ignored);  // an absolute one stands alone
  }
  return {};
}

// The process that made the temporary file `file` of the output `name`; nothing when `file` is another file.
std::optional<pid_t> writer_of(std::string_view file, std::string_view name) {
  if (!file.starts_with('.') || file.substr(1, name.size()) != name) return std::nullopt;
  const char* at = file.data() + std::min(1 + name.size(), file.size());
  const char* const end = file.data() + file.size();
  std::array<pid_t, 2> numbers{};  // PID, N
  for (pid_t& number : numbers) {
    if (at == end || *at != '.') return std::nullopt;
    const auto [after, error] = std::from_chars(at + 1, end, number);
    if (error != std::errc{} || number < 0) return std::nullopt;
    at = after;
  }
  if (at != end || numbers[0] == 0) return std::nullopt;
  return numbers[0];
}

// Removes what dead processes left of earlier attempts to write this output. On a file system shared with other
// machines their processes look dead from here, but they hold a lock.
void remove_leftovers(const fs::path& directory, const std::string& name) {
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const auto pid = writer_of(it->path().filename().native(), name);
    if (!pid || ::kill(*pid, 0) == 0 || errno != ESRCH) continue;
    const int fd = ::open(it->path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) continue;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) ::unlink(it->path().c_str());
    ::close(fd);
  }
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(path) {
  if (path.empty()) throw InputError({}, "the path of a file to write is empty");
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::is_directory(status)) fail(EISDIR);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail(errno);
    return;
  }
  target_ = followed(path);
  if (target_.empty()) fail(ELOOP);
  const fs::path directory = directory_of(target_);
  const std::string name = fs::path(target_).filename().string();
  if (name.empty()) fail(EISDIR);
  remove_leftovers(directory, name);
  for (int i = 0; i < kMaxTemporaryNames; ++i) {
    if (create_temporary((directory / fmt::format(".{}.{}.{}", name, ::getpid(), i)).string())) return;
    if (errno != EEXIST) break;
  }
  fail(errno);
}

// Remembered before it is there: no signal falls between the two.
bool AtomicFile::create_temporary(const std::string& path) {
  slot_ = remember_unfinished(path);
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);  // the user's umask applies
  const int error = errno;
  if (fd_ >= 0) {
    temporary_ = path;
    ::flock(fd_, LOCK_EX | LOCK_NB);  // where the file system cannot lock, only other machines would miss it
  } else {
    forget_temporary();
  }
  errno = error;
  return fd_ >= 0;
}

void AtomicFile::forget_temporary() {
  temporary_.clear();
  if (slot_ >= 0) unfinished_files[static_cast<std::size_t>(slot_)].state.store(Unfinished::kFree);
  slot_ = -1;
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  forget_temporary();
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  assert(fd_ >= 0);
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kMaxBytesPerWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  assert(fd_ >= 0);
  const bool replaces = !temporary_.empty();
  if (replaces && ::fsync(fd_) != 0) fail(errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail(errno);
  if (!replaces) return;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  forget_temporary();
  flush_directory(directory_of(target_));
}

void AtomicFile::fail(int error) const {
  throw InputError({.file = path_}, "cannot be written: " + std::generic_category().message(error));
}

void remove_unfinished_files() noexcept {
  const int error = errno;
  for (const Unfinished& file : unfinished_files) {
    if (file.state.load() == Unfinished::kFilled) ::unlink(file.path.data());
  }
  errno = error;
}

void write_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace foremoe
