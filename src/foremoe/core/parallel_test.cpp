#include "foremoe/core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace foremoe {
namespace {

class ThreadPoolOf : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolOf, RunsEveryIndexOnceInEveryCall) {
  ThreadPool pool(GetParam());
  for (const std::size_t n : {0, 1, 2, 3, 64, 1000}) {
    std::vector<std::atomic<int>> runs(n);
    pool.for_each_index(n, [&](std::size_t i, std::size_t) { ++runs[i]; });
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(runs[i], 1) << i << " of " << n;
  }
}

TEST_P(ThreadPoolOf, NamesAWorkerThatNoOtherTaskUses) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> inside(pool.num_threads());
  std::atomic<int> clashes = 0;
  pool.for_each_index(2000, [&](std::size_t, std::size_t worker) {
    if (++inside.at(worker) != 1) ++clashes;
    --inside[worker];
  });
  EXPECT_EQ(clashes, 0);
}

TEST_P(ThreadPoolOf, RethrowsATasksExceptionAndRemainsUsable) {
  ThreadPool pool(GetParam());
  const auto fail_at_seven = [](std::size_t i, std::size_t) {
    if (i == 7) throw std::runtime_error("seven");
  };
  EXPECT_THROW(pool.for_each_index(100, fail_at_seven), std::runtime_error);
  std::atomic<int> runs = 0;
  pool.for_each_index(100, [&](std::size_t, std::size_t) { ++runs; });
  EXPECT_EQ(runs, 100);
}

TEST_P(ThreadPoolOf, StopsAndThrowsWhenCancelled) {
  ThreadPool pool(GetParam());
  std::atomic<int> runs = 0;
  const auto task = [&](std::size_t, std::size_t) {
    if (++runs == 10) pool.cancel();
  };
  EXPECT_THROW(pool.for_each_index(100000, task), Cancelled);
  EXPECT_LT(runs, 10 + 64) << "those that ran when it was cancelled, no more";
  const int before = runs;
  EXPECT_THROW(pool.for_each_index(3, task), Cancelled) << "for good";
  EXPECT_EQ(runs, before);
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOf, testing::Values(1, 2, 7));

}  // namespace
}  // namespace foremoe
