#include "foremoe/core/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"

namespace foremoe {
namespace {

std::string refusal_of(const std::string& path) {
  try {
    const MappedFile file(path);
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().file, path);
    return error.problem();
  }
  return "";
}

TEST(MappedFile, ReturnsTheBytesOfAFile) {
  const std::string path = testing::TempDir() + "mapped_file_test";
  write_file(path, "some text");
  EXPECT_EQ(MappedFile(path).text(), "some text");
  write_file(path, "");
  EXPECT_TRUE(MappedFile(path).bytes().empty());
  std::remove(path.c_str());
}

TEST(MappedFile, KeepsTheBytesOfAFileThatIsOverwrittenOrTruncatedInPlace) {
  const std::string path = testing::TempDir() + "mapped_file_test";
  const std::string text(200'000, 'x');
  write_file(path, text);
  const MappedFile file(path);
  std::fstream(path, std::ios::in | std::ios::out) << std::string(text.size(), 'y');
  EXPECT_EQ(file.text(), text);
  std::filesystem::resize_file(path, 0);
  EXPECT_EQ(file.text(), text);
  std::remove(path.c_str());
}

TEST(MappedFile, RejectsOtherThanRegularFilesWithoutBlocking) {
  const std::string pipe = testing::TempDir() + "mapped_file_test_pipe";
  std::remove(pipe.c_str());
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(refusal_of(pipe), "is a pipe, not a regular file");  // without a writer, opening would block forever
  std::remove(pipe.c_str());
  EXPECT_EQ(refusal_of("/dev/null"), "is a device, not a regular file");
  EXPECT_EQ(refusal_of(testing::TempDir()), "is a directory, not a regular file");
  EXPECT_THAT(refusal_of("no/such/file"), testing::HasSubstr("cannot be read"));
}

TEST(MappedFile, ReadsAPipeToItsEndIfStreamsAreAccepted) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const std::string path = "/dev/fd/" + std::to_string(ends[0]);
  EXPECT_TRUE(is_stream(path));
  const std::string text(200'000, 'x');  // more than a pipe holds
  std::jthread writer([&] {
    EXPECT_EQ(::write(ends[1], text.data(), text.size()), static_cast<::ssize_t>(text.size()));
    ::close(ends[1]);
  });
  EXPECT_EQ(MappedFile::or_stream(path)->text(), text);
  ::close(ends[0]);
  const std::string file = testing::TempDir() + "mapped_file_test";
  write_file(file, text);
  EXPECT_FALSE(is_stream(file));
  EXPECT_EQ(MappedFile::or_stream(file)->text(), text);
  std::remove(file.c_str());
  EXPECT_EQ(refusal_of("-"), "standard input is not read here: give a file");
}

}  // namespace
}  // namespace foremoe
