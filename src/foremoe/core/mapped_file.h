#pragma once

// Input files that are mapped into memory or embedded in the program.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace foremoe {

// The bytes of a file. Files of up to kMostCopied bytes are read into memory, so that their bytes never change. Larger
// ones are mapped: pages are read on first access, so a trace of many gigabytes opens immediately. Others may overwrite
// a mapped file in place, so readers check what they copied, or indices where they use them. If another process
// truncates it, the reader gets SIGBUS, which the program reports. Our own writers rename instead (atomic_file.h).
class MappedFile {
 public:
  static constexpr std::size_t kMostCopied = std::size_t{64} << 20;

  // Throws InputError if the path is not a readable regular file, or if the file changes while it is read. Does not
  // block: rejects a pipe immediately.
  explicit MappedFile(const std::string& path) : MappedFile(path, /*or_stream=*/false, kMostCopied) {}
  // Accepts also "-", standard input, and pipes, which are read until their end. `most_copied` replaces kMostCopied.
  static std::unique_ptr<const MappedFile> or_stream(const std::string& path, std::size_t most_copied = kMostCopied);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  MappedFile(const std::string& path, bool or_stream, std::size_t most_copied);
  void read(const std::string& path, int fd);

  std::span<const std::byte> bytes_;
  std::string read_;  // instead of a map
};

// Returns whether the path is "-" or a pipe, whose contents can be read only once.
bool is_stream(const std::string& path);

// A file of the repository embedded in the program (src/foremoe/CMakeLists.txt), so that presets need no search path.
struct EmbeddedFile {
  std::string_view name;  // without folder and extension
  std::string_view text;
};

}  // namespace foremoe
