#include "foremoe/core/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <string>

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

}  // namespace
}  // namespace foremoe
