#pragma once

// An output file that appears whole or not at all. It has no name while it is written, so that the system removes it
// however the process ends. commit() flushes it to the disk and renames it over its final name. Without commit(), the
// destructor removes it, and an older file of that name stays as it was.
//
// On file systems without O_TMPFILE it is written as .foremoe.PID.N, which a process that is killed leaves behind.
//
// Where the path is a symbolic link, the file that it names is written, whether or not that exists already.
//
// A path that names a device or a pipe (/dev/stdout) is written in place: there is nothing to replace.

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace foremoe {

class AtomicFile {
 public:
  // Throws InputError when no file can be made there, the path is empty or it is a directory.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Throw InputError when the system refuses (disk full, …).
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();  // once, after the last write

 private:
  // Sets temporary_ to the first name that `make` accepts; it leaves EEXIST in errno where another name must be tried.
  void name_temporary(const std::function<bool(const std::string&)>& make);
  [[noreturn]] void fail(int error) const;

  std::string path_;       // as the caller gave it, for messages
  std::string target_;     // links followed; empty: written in place
  std::string temporary_;  // empty: without a name, or committed
  int fd_ = -1;
};

// The whole text as one file.
void write_file(const std::string& path, std::string_view text);

}  // namespace foremoe
