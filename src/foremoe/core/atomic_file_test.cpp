#include "foremoe/core/atomic_file.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class AtomicFileTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  static std::string contents(const std::string& path) {
    std::ifstream in(path);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::size_t num_files() const { return std::distance(fs::directory_iterator(folder_), {}); }

  fs::path folder_ = fs::path(testing::TempDir()) /
                     (std::string("atomic_file_") + testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(AtomicFileTest, AppearsOnCommitAndNotBefore) {
  AtomicFile file(path("a"));
  file.write("one ");
  file.write("two");
  EXPECT_FALSE(fs::exists(path("a")));
  file.commit();
  EXPECT_EQ(contents(path("a")), "one two");
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(AtomicFileTest, LeavesOnlyTheOldFileWithoutCommit) {
  write_file(path("a"), "old");
  {
    AtomicFile file(path("a"));
    file.write("half of the ne");
  }
  EXPECT_EQ(contents(path("a")), "old");
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(AtomicFileTest, ReplacesTheTargetOfALink) {
  write_file(path("target"), "old");
  fs::create_symlink(path("target"), path("link"));
  write_file(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(contents(path("target")), "new");
}

TEST_F(AtomicFileTest, KeepsTheModeOfTheFileThatItReplaces) {
  for (const fs::perms mode : {fs::perms{0600}, fs::perms{0640}, fs::perms{0755}}) {
    write_file(path("a"), "old");
    fs::permissions(path("a"), mode);
    write_file(path("a"), "new");
    EXPECT_EQ(fs::status(path("a")).permissions(), mode);
    EXPECT_EQ(contents(path("a")), "new");
  }
}

TEST_F(AtomicFileTest, FollowsNoLinkOfAnotherUserInASharedFolder) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make another user's link";
  constexpr uid_t kOther = 65534;
  write_file(path("target"), "old");
  fs::create_symlink(path("target"), path("link"));
  ASSERT_EQ(::lchown(path("link").c_str(), kOther, kOther), 0);
  write_file(path("link"), "in a folder of one's own");
  fs::permissions(folder_, fs::perms{01777});
  EXPECT_THROW(write_file(path("link"), "new"), InputError);
  EXPECT_EQ(contents(path("target")), "in a folder of one's own");
  fs::create_symlink(path("target"), path("own"));
  write_file(path("own"), "by a link of one's own");
  EXPECT_EQ(contents(path("target")), "by a link of one's own");
  ASSERT_EQ(::chown(folder_.c_str(), kOther, kOther), 0);  // the link is the folder's owner's
  write_file(path("link"), "by its owner's link");
  EXPECT_EQ(contents(path("target")), "by its owner's link");
}

TEST_F(AtomicFileTest, CreatesTheTargetOfADanglingLink) {
  fs::create_directory(path("folder"));
  fs::create_symlink("folder/target", path("link"));
  fs::create_symlink(path("link"), path("link to a link"));
  write_file(path("link to a link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")) && fs::is_symlink(path("link to a link")));
  EXPECT_EQ(contents(path("folder/target")), "new");
  EXPECT_EQ(num_files(), 3U);
}

TEST_F(AtomicFileTest, RejectsCyclicLinks) {
  fs::create_symlink("b", path("a"));
  fs::create_symlink("a", path("b"));
  try {
    write_file(path("a"), "new");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("symbolic links"));
  }
  EXPECT_TRUE(fs::is_symlink(path("a")));
}

TEST_F(AtomicFileTest, TwoWritersOfOnePathDoNotInterfere) {
  AtomicFile first(path("a"));
  AtomicFile second(path("a"));
  first.write("first");
  second.write("second");
  first.commit();
  second.commit();
  EXPECT_EQ(contents(path("a")), "second");
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(AtomicFileTest, WritesToADeviceInPlace) {
  write_file("/dev/null", "gone");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(AtomicFileTest, LeavesNothingWhenTheProcessIsKilled) {
  const auto die = [&] {
    AtomicFile first(path("a"));
    AtomicFile second(path("a"));
    first.write("half");
    std::raise(SIGKILL);
  };
  EXPECT_EXIT(die(), testing::KilledBySignal(SIGKILL), "");
  EXPECT_EQ(num_files(), 0U);
}

TEST_F(AtomicFileTest, KeepsExistingFilesWithTemporaryNames) {
  const std::string other = fmt::format(".foremoe.{}.0", ::getpid());
  write_file(path(other.c_str()), "kept");
  write_file(path("a"), "new");
  EXPECT_EQ(contents(path(other.c_str())), "kept");
  EXPECT_EQ(num_files(), 2U);
}

TEST_F(AtomicFileTest, RejectsAnEmptyPath) { EXPECT_THROW(write_file("", "x"), InputError); }

TEST_F(AtomicFileTest, ErrorsNameThePath) {
  for (const std::string& bad : {path("no/such/folder"), folder_.string()}) {
    try {
      write_file(bad, "x");
      FAIL() << bad;
    } catch (const InputError& error) {
      EXPECT_EQ(error.where().file, bad);
      EXPECT_THAT(error.what(), HasSubstr("cannot be written"));
    }
  }
}

}  // namespace
}  // namespace foremoe
