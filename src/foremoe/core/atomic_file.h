#pragma once

// An output file that appears whole or not at all: written under a temporary name in the same directory, flushed
// to the disk, then renamed over its final name by commit(). Without commit(), the destructor removes it and
// whatever had the name before stays as it was.
//
// A path that names a device or a pipe (/dev/stdout) is written in place: there is nothing to replace.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace foremoe {

class AtomicFile {
 public:
  // Throws InputError when no file can be made there, or the path is a directory.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Throw InputError when the system refuses (disk full, …).
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();  // once, after the last write

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_;       // as the caller gave it, for messages
  std::string target_;     // links followed
  std::string temporary_;  // empty: written in place, or committed
  int fd_ = -1;
};

// The whole text as one file.
void write_file(const std::string& path, std::string_view text);

}  // namespace foremoe
