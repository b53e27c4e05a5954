#include "foremoe/core/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

// Without O_NONBLOCK, opening a pipe for reading waits for a writer. O_NONBLOCK has no effect on regular files.
constexpr int kReadWithoutWaiting = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), kReadWithoutWaiting)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::string& path, int error) {
  throw InputError({.file = path}, "cannot be read: " + std::generic_category().message(error));
}

const char* kind_of(mode_t mode) {
  return S_ISDIR(mode) ? "a directory" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor fd(path);
  if (fd.get() < 0) fail(path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail(path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw InputError({.file = path}, fmt::format("is {}, not a regular file", kind_of(status.st_mode)));
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;  // mmap refuses empty files
  void* const data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) fail(path, errno);
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace foremoe
