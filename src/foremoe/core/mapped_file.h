#pragma once

// Files to read: mapped into memory, or embedded in the program.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace foremoe {

// A file mapped into memory for reading, unmapped by the destructor. Pages are read when they are touched, so a
// trace of many gigabytes opens at once. A process that truncates the file meanwhile kills the reader (SIGBUS). Our
// own writers never do: they replace files by rename (atomic_file.h).
class MappedFile {
 public:
  // Throws InputError when the path does not name a readable regular file. Never waits: a pipe is refused at once.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  std::span<const std::byte> bytes_;
};

// A file of the repository that is part of the program (cmake/EmbedFiles.cmake), so that presets need no search path.
struct EmbeddedFile {
  std::string_view name;  // without folder and ending
  std::string_view text;
};

}  // namespace foremoe
