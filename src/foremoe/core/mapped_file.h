#pragma once

// A file mapped into memory for reading, unmapped by the destructor. Pages are read when they are touched, so a
// trace of many gigabytes opens at once. Whoever truncates the file meanwhile kills the reader (SIGBUS); our own
// writers never do, they replace files by rename (atomic_file.h).

#include <cstddef>
#include <span>
#include <string>

namespace foremoe {

class MappedFile {
 public:
  // Throws InputError when the path is not a readable regular file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace foremoe
