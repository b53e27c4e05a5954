#include "foremoe/core/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {

namespace fs = std::filesystem;

namespace {

constexpr int kMaxTemporaryNames = 10'000;  // before giving up
constexpr int kMaxLinks = 40;               // as in Linux
constexpr std::size_t kMaxBytesPerWrite = std::size_t{1} << 30;

// A rename is durable once its directory is flushed. On file systems that cannot flush directories, a rename may be
// lost in a crash.
void flush_directory(const fs::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

fs::path directory_of(const fs::path& target) {
  const fs::path parent = target.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

// Whether the link may have been made by someone who wants this process to write elsewhere.
bool is_planted(const fs::path& link) {
  struct stat of_link {};
  struct stat of_folder {};
  if (::lstat(link.c_str(), &of_link) != 0 || ::stat(directory_of(link).c_str(), &of_folder) != 0) return false;
  const bool shared = (of_folder.st_mode & S_ISVTX) != 0 && (of_folder.st_mode & S_IWOTH) != 0;
  return shared && of_link.st_uid != ::geteuid() && of_link.st_uid != of_folder.st_uid;
}

// Follows symbolic links to the final path, which need not exist. Returns an empty path if links form a cycle.
std::string followed(fs::path path, const std::string& given) {
  std::error_code ignored;
  for (int i = 0; i < kMaxLinks; ++i) {
    if (!fs::is_symlink(fs::symlink_status(path, ignored))) return path.string();
    if (is_planted(path)) {
      throw InputError({.file = given},
                       "cannot be written: it is another user's link in a folder that all can write; "
                       "remove the link or give another path");
    }
    path = path.parent_path() / fs::read_symlink(path, ignored);  // an absolute link replaces the path
  }
  return {};
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  if (path.empty()) throw InputError({}, "the path of a file to write is empty");
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::is_directory(status)) fail(EISDIR);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail(errno);
    return;
  }
  target_ = followed(path, path_);
  if (target_.empty()) fail(ELOOP);
  if (fs::path(target_).filename().empty()) fail(EISDIR);
  if (::access("/proc/self/fd", X_OK) == 0) {  // commit() names the file by this path
    fd_ = ::open(directory_of(target_).c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);  // the user's umask applies
  }
  if (fd_ < 0) {
    name_temporary([&](const std::string& name) {
      fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, fs::exists(status) ? 0600 : 0666);
      return fd_ >= 0;
    });
  }
  keep_mode();
}

void AtomicFile::keep_mode() const {
  struct stat old {};
  if (::stat(target_.c_str(), &old) != 0) return;
  const bool same_group = ::fchown(fd_, static_cast<uid_t>(-1), old.st_gid) == 0;
  const mode_t mode = old.st_mode & (same_group ? 0777 : 0707);  // another group must not get the old one's rights
  (void)::fchmod(fd_, mode);                                     // fails on file systems without modes
}

void AtomicFile::name_temporary(const std::function<bool(const std::string&)>& make) {
  for (int i = 0; i < kMaxTemporaryNames; ++i) {
    const std::string name = fmt::format(".foremoe.{}.{}", ::getpid(), i);
    std::string path = (directory_of(target_) / name).string();
    if (make(path)) {
      temporary_ = std::move(path);
      return;
    }
    if (errno != EEXIST) break;
  }
  fail(errno);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
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
  if (!target_.empty()) {
    if (::fsync(fd_) != 0) fail(errno);
    if (temporary_.empty()) {
      const std::string unnamed = fmt::format("/proc/self/fd/{}", fd_);
      name_temporary([&](const std::string& name) {
        return ::linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
      });
    }
  }
  if (::close(std::exchange(fd_, -1)) != 0) fail(errno);
  if (target_.empty()) return;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  temporary_.clear();
  flush_directory(directory_of(target_));
}

void AtomicFile::fail(int error) const {
  throw InputError({.file = path_}, "cannot be written: " + std::generic_category().message(error));
}

std::string expect_writable(const std::string& path) {
  std::error_code ignored;
  if (fs::is_other(path, ignored)) return {};
  const AtomicFile trial(path);  // removed by the destructor
  return trial.target();
}

void write_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace foremoe
