#include "foremoe/transfer/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

bool exists(const std::string& name) {
  const int fd = shm_open(name.c_str(), O_RDONLY, 0);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

std::vector<std::string> names_of(pid_t process) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.find("-" + std::to_string(process) + "-") != std::string::npos) names.push_back(name);
  }
  return names;
}

TEST(SharedMemory, IsZeroedAlignedAndShared) {
  const SharedMemory memory = SharedMemory::create("test", Bytes{100'000});
  ASSERT_EQ(memory.bytes().size(), 100'000U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.bytes().data()) % 64, 0U);
  EXPECT_THAT(memory.bytes(), testing::Each(std::byte{0}));
  const SharedMemory same = SharedMemory::open(memory.name());
  ASSERT_EQ(same.bytes().size(), memory.bytes().size());
  memory.bytes()[77'777] = std::byte{42};
  EXPECT_EQ(same.bytes()[77'777], std::byte{42});
}

TEST(SharedMemory, NameIsRemovedWithItsCreator) {
  std::string name;
  {
    SharedMemory memory = SharedMemory::create("test", Bytes{64});
    name = memory.name();
    EXPECT_THAT(name,
                testing::MatchesRegex(fmt::format("/foremoe-{}-[0-9]+-{}-[0-9]+-[0-9a-f]+-test", getuid(), getpid())));
    { const SharedMemory opened = SharedMemory::open(name); }
    EXPECT_TRUE(exists(name)) << "one who opened it has gone";
    const SharedMemory moved = std::move(memory);
    EXPECT_TRUE(exists(name));
  }
  EXPECT_FALSE(exists(name));
  EXPECT_THROW(SharedMemory::open(name), InputError);
}

// Another user could otherwise create the next name, so that create() fails, or offer memory of his own under it.
TEST(SharedMemory, NamesCannotBePredictedAndMemoryOfOthersIsRefused) {
  const auto number_of = [](const std::string& name) {
    const std::size_t end = name.rfind('-');
    return std::stoull(name.substr(name.rfind('-', end - 1) + 1, end), nullptr, 16);
  };
  std::set<std::uint64_t> numbers;
  for (int i = 0; i < 100; ++i) numbers.insert(number_of(SharedMemory::create("test", Bytes{8}).name()));
  EXPECT_EQ(numbers.size(), 100U);
  EXPECT_GT(*numbers.rbegin() - *numbers.begin(), std::uint64_t{1} << 60);
  if (geteuid() != 0) GTEST_SKIP() << "only root can make memory of another user";
  const SharedMemory memory = SharedMemory::create("test", Bytes{8});
  ASSERT_EQ(chown(("/dev/shm" + memory.name()).c_str(), 65534, 65534), 0);
  EXPECT_THROW(SharedMemory::open(memory.name()), InputError);
}

TEST(SharedMemory, OutlivesItsName) {
  SharedMemory memory = SharedMemory::create("test", Bytes{64});
  SharedMemory opened = SharedMemory::open(memory.name());
  opened.remove_name();
  EXPECT_TRUE(exists(memory.name())) << "it is the creator's";
  memory.remove_name();
  EXPECT_FALSE(exists(memory.name()));
  memory.bytes()[7] = std::byte{42};
  EXPECT_EQ(opened.bytes()[7], std::byte{42});
}

TEST(SharedMemory, ReportsTheSizeThatItCannotReserve) {
  try {
    SharedMemory::create("arena", Bytes{std::int64_t{1} << 50});
    FAIL() << "there is a petabyte";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("arena"), testing::HasSubstr("1125899906842624 bytes"),
                                             testing::HasSubstr("too little memory")));
  }
  EXPECT_THROW(SharedMemory::create("arena", Bytes{0}), InputError);
}

TEST(SharedMemory, AFailedCreationLeavesNoName) {
  EXPECT_THROW(SharedMemory::create("petabyte", Bytes{std::int64_t{1} << 50}), InputError);
  EXPECT_THAT(names_of(getpid()), testing::Not(testing::Contains(testing::EndsWith("petabyte"))));
}

// A child that creates shared memory, reports the memory's name and waits to be killed.
struct Child {
  pid_t pid = 0;
  std::string name;
};

Child child_with_memory() {
  std::array<int, 2> pipe_ends{};
  EXPECT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const SharedMemory memory = SharedMemory::create("orphan", Bytes{4096});
    const ssize_t written = write(pipe_ends[1], memory.name().data(), memory.name().size());
    while (written > 0) pause();
    _exit(1);
  }
  std::array<char, 256> name{};
  const ssize_t length = read(pipe_ends[0], name.data(), name.size());
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  return {pid, std::string(name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)))};
}

TEST(SharedMemory, TheNextStartRemovesSegmentsOfAKilledProcess) {
  const Child child = child_with_memory();
  ASSERT_TRUE(exists(child.name));
  const SharedMemory meanwhile = SharedMemory::create("test", Bytes{64});
  EXPECT_TRUE(exists(child.name)) << "its creator is alive";

  kill(child.pid, SIGKILL);
  waitpid(child.pid, nullptr, 0);
  const SharedMemory next = SharedMemory::create("test", Bytes{64});
  EXPECT_FALSE(exists(child.name));
  EXPECT_TRUE(exists(meanwhile.name()));
}

TEST(SharedMemory, AZombieCountsAsDead) {
  const Child child = child_with_memory();
  kill(child.pid, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOWAIT), 0);
  remove_stale_shared_memory();
  EXPECT_FALSE(exists(child.name));
  waitpid(child.pid, nullptr, 0);
}

// Creates an empty segment with this name and leaves it behind.
void leave(const std::string& name) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(fd, 0);
  close(fd);
}

// The prefix "…-<namespace>-" of this process's names.
std::string name_begins() {
  const std::string name = SharedMemory::create("test", Bytes{64}).name();
  return name.substr(0, name.find(fmt::format("-{}-", getpid()), name.find('-') + 1) + 1);
}

TEST(SharedMemory, AReusedProcessIdDoesNotKeepOldSegments) {
  const std::string name = fmt::format("{}{}-1-0-test", name_begins(), getpid());  // with another start time
  leave(name);
  remove_stale_shared_memory();
  EXPECT_FALSE(exists(name));
}

TEST(SharedMemory, ProcessesOfAnotherNamespaceAreNotTreatedAsDead) {
  const std::string name = fmt::format("/foremoe-{}-1-{}-1-0-test", getuid(), getpid());
  leave(name);
  remove_stale_shared_memory();
  EXPECT_TRUE(exists(name));
  shm_unlink(name.c_str());
}

TEST(SharedMemory, KeepsSegmentsWithOtherNames) {
  const std::string name = fmt::format("/foremoe-{}-x", getuid());
  leave(name);
  remove_stale_shared_memory();
  EXPECT_TRUE(exists(name));
  shm_unlink(name.c_str());
}

TEST(SharedMemory, AForkedChildDoesNotRemoveItsParentsMemory) {
  const SharedMemory memory = SharedMemory::create("test", Bytes{64});
  const pid_t pid = fork();
  if (pid == 0) {
    { SharedMemory taken = std::move(const_cast<SharedMemory&>(memory)); }
    _exit(0);
  }
  waitpid(pid, nullptr, 0);
  EXPECT_TRUE(exists(memory.name()));
}

TEST(SharedMemoryThread, ThreadsOfOneProcessOpenByName) {
  const SharedMemory memory = SharedMemory::create("test", Bytes{64});
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] { SharedMemory::open(memory.name()).bytes()[i] = std::byte{1}; });
    }
  }
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(memory.bytes()[i], std::byte{1});
}

TEST(SharedMemory, CannotBeCreatedWhileTheProcessEnds) {
  const pid_t child = fork();
  if (child == 0) {
    remove_own_shared_memory();
    try {
      SharedMemory::create("late", Bytes{64});
    } catch (const InputError&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SharedMemory, CreatedByThreadsDuringASignalLeavesNoName) {
  for (int repeat = 0; repeat < 300; ++repeat) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      std::signal(SIGTERM, [](int) {
        remove_own_shared_memory();
        _exit(0);
      });
      const SharedMemory first = SharedMemory::create("first", Bytes{64});
      std::array<std::thread, 2> threads;
      for (std::thread& thread : threads) {
        thread = std::thread([] {
          try {
            for (;;) SharedMemory::create("again", Bytes{64});
          } catch (const InputError&) {
            pause();
          }
        });
      }
      _exit(write(ready[1], "", 1) == 1 ? pause() : 1);
    }
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    usleep(static_cast<useconds_t>(10 * repeat));
    kill(child, SIGTERM);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(names_of(child), std::vector<std::string>{});
    close(ready[0]);
    close(ready[1]);
  }
}

TEST(SharedMemory, IsRemovedByTheHandlerOfAnEndingSignal) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    static const SharedMemory first = SharedMemory::create("signal", Bytes{64});
    static const SharedMemory second = SharedMemory::create("signal", Bytes{64});
    std::signal(SIGTERM, [](int) {
      remove_own_shared_memory();
      _exit(0);
    });
    const char names = static_cast<char>(exists(first.name()) + exists(second.name()));
    _exit(write(ready[1], &names, 1) == 1 ? pause() : 1);
  }
  char names = 0;
  ASSERT_EQ(read(ready[0], &names, 1), 1);
  EXPECT_EQ(names, 2);
  const SharedMemory mine = SharedMemory::create("signal", Bytes{64});
  kill(child, SIGTERM);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(names_of(child), std::vector<std::string>{});
  EXPECT_TRUE(exists(mine.name())) << "another process's";
  close(ready[0]);
  close(ready[1]);
}

}  // namespace
}  // namespace foremoe
