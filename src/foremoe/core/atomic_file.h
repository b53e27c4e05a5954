#pragma once

// An output file that appears whole or not at all: it is written under a temporary name in the same directory, flushed
// to the disk, and renamed over its final name by commit(). Without commit(), the destructor removes it and the file
// that had the name before stays as it was.
//
// The temporary name of NAME is .NAME.PID.N, and the file is locked while it is written. A process that is killed
// leaves it behind; the next AtomicFile for the same NAME removes it. A program that ends on a signal calls
// remove_unfinished_files(), and ignores SIGXFSZ, which would end it in the middle of a write.
//
// Where the path is a symbolic link, the file that it names is written, whether or not that exists already.
//
// A path that names a device or a pipe (/dev/stdout) is written in place: there is nothing to replace.

#include <cstddef>
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
  bool create_temporary(const std::string& path);
  void forget_temporary();
  [[noreturn]] void fail(int error) const;

  std::string path_;       // as the caller gave it, for messages
  std::string target_;     // links followed
  std::string temporary_;  // empty: written in place, or committed
  int slot_ = -1;          // where remove_unfinished_files() finds temporary_
  int fd_ = -1;
};

// Removes the temporary files of this process. Async-signal-safe: a signal handler may call it. It knows the first 64
// that are open at a time. An AtomicFile that lost its file fails to commit.
void remove_unfinished_files() noexcept;

// The whole text as one file.
void write_file(const std::string& path, std::string_view text);

}  // namespace foremoe
