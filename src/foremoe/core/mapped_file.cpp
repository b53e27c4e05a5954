#include "foremoe/core/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "foremoe/core/memory_limit.h"

namespace foremoe {

namespace {

// Without O_NONBLOCK, opening a pipe for reading waits for a writer. O_NONBLOCK has no effect on regular files.
constexpr int kReadWithoutWaiting = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : fd_(path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), kReadWithoutWaiting)) {}
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

std::unique_ptr<const MappedFile> MappedFile::or_stream(const std::string& path, std::size_t most_copied) {
  return std::unique_ptr<const MappedFile>(new MappedFile(path, /*or_stream=*/true, most_copied));
}

bool is_stream(const std::string& path) {
  struct stat status {};
  if (path == "-") return true;
  return ::stat(path.c_str(), &status) == 0 && S_ISFIFO(status.st_mode);
}

void MappedFile::read(const std::string& path, int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);  // waits for writers that have opened the pipe
  std::array<char, 1 << 16> part{};
  for (;;) {
    const ::ssize_t size = ::read(fd, part.data(), part.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail(path, errno);
    if (size == 0) break;
    if (read_.size() + static_cast<std::size_t>(size) > read_.capacity())  // doubles
      expect_memory(2.0 * static_cast<double>(read_.capacity()), {.file = path});
    read_.append(part.data(), static_cast<std::size_t>(size));
  }
  bytes_ = std::as_bytes(std::span(read_));
}

MappedFile::MappedFile(const std::string& path, bool or_stream, std::size_t most_copied) {
  if (path == "-" && !or_stream) throw InputError({.file = path}, "standard input is not read here: give a file");
  const Descriptor fd(path);
  if (fd.get() < 0) fail(path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail(path, errno);
  if (!S_ISREG(status.st_mode)) {
    if (or_stream && (path == "-" || S_ISFIFO(status.st_mode))) {
      read(path, fd.get());
      return;
    }
    throw InputError({.file = path}, fmt::format("is {}, not a regular file", kind_of(status.st_mode)));
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;  // mmap refuses empty files
  if (size <= most_copied) {
    read_.reserve(size);
    read(path, fd.get());
    struct stat after {};
    const auto time_of = [](const struct stat& of) { return std::pair(of.st_mtim.tv_sec, of.st_mtim.tv_nsec); };
    if (::fstat(fd.get(), &after) != 0) fail(path, errno);
    if (read_.size() == size && time_of(after) == time_of(status)) return;
    throw InputError({.file = path},
                     "changed while it was read: write it under another name, and rename it when it is complete");
  }
  void* const data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) fail(path, errno);
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  if (read_.empty() && !bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace foremoe
