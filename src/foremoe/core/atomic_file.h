#pragma once

// Writes an output file atomically: it appears complete or not at all. The file has no name while it is written, so the
// system removes it if the process ends early. commit() flushes it to the disk and gives it its final name. Without
// commit(), the destructor removes the new file, and an older file of that name is unchanged.
//
// On file systems without O_TMPFILE the file is written as .foremoe.PID.N, which remains if the process is killed.
//
// A file that is replaced keeps its mode, and its group if the system permits that; another group gets no rights. If
// the path is a symbolic link, writes the link's target, whether or not the target exists. In a folder that all users
// can write, that link must be the user's or the folder's owner's (as under fs.protected_symlinks).
//
// If the path is a device or a pipe (/dev/stdout), writes to it directly, since there is no file to replace.

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace foremoe {

class AtomicFile {
 public:
  // Throws InputError if the path is empty, a directory or a link that another user made in a shared folder, or if the
  // file cannot be created.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Throw InputError if the system reports an error (disk full, …).
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();  // once, after the last write

  // The path after following links; empty if it is written in place.
  const std::string& target() const { return target_; }

 private:
  // Creates the file as readable as the one that it replaces.
  void keep_mode() const;
  // Sets temporary_ to the first name that `make` accepts. `make` sets errno to EEXIST if another name must be tried.
  void name_temporary(const std::function<bool(const std::string&)>& make);
  [[noreturn]] void fail(int error) const;

  std::string path_;       // as given by the caller, for messages
  std::string target_;     // after following links; empty: written in place
  std::string temporary_;  // empty: unnamed, or committed
  int fd_ = -1;
};

// Returns the path that a file of this name would be written to, after following links; empty for a device or pipe,
// which is not opened, since its reader would see an end of file. Throws InputError if the file cannot be written.
std::string expect_writable(const std::string& path);

// Writes the whole text as one file.
void write_file(const std::string& path, std::string_view text);

}  // namespace foremoe
