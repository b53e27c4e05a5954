#include "foremoe/runtime/cpu/blas.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "foremoe/testing/address_space.h"

namespace foremoe::cpu {
namespace {

std::ptrdiff_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// n·n products of matrices of one value each: every element is n·a·b.
bool product_is_right(std::int64_t n, float a_value) {
  const auto size = static_cast<std::size_t>(n * n);
  const std::vector<float> a(size, a_value), b(size, 2);
  std::vector<float> c(size);
  multiply({.rows = n, .columns = n, .depth = n, .transpose_b = true}, a.data(), b.data(), c.data());
  for (const float v : c) {
    if (v != 2 * a_value * static_cast<float>(n)) return false;
  }
  return true;
}

TEST(Blas, StartsNoThreadsAndLeavesTheEnvironmentAsItWas) {
  setenv("OPENBLAS_NUM_THREADS", "7", 1);
  const auto before = threads_of_this_process();
  const BlasThread thread;
  EXPECT_TRUE(product_is_right(300, 1));
  EXPECT_EQ(threads_of_this_process(), before);
  EXPECT_EQ(std::string(std::getenv("OPENBLAS_NUM_THREADS")), "7");
}

TEST(BlasThreads, MultiplyAtTheSameTime) {
  std::vector<int> wrong(4);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < wrong.size(); ++t) {
      threads.emplace_back([&, t] {
        const BlasThread thread;
        for (int i = 0; i < 3'000; ++i) wrong[t] += product_is_right(24, static_cast<float>(t + 1)) ? 0 : 1;
      });
    }
  }
  EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST(BlasDeathTest, SaysSoWhereTheAddressSpaceHasNoRoomForAnotherThread) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer cannot live in little address space";
  EXPECT_EXIT(
      {
        const BlasThread first;
        test::forbid_more_address_space();
        try {
          const std::vector<BlasThread> more(100);
        } catch (const std::system_error& error) {
          std::exit(error.code() == std::errc::not_enough_memory ? 0 : 1);
        }
        std::exit(2);
      },
      testing::ExitedWithCode(0), "");
}

TEST(BlasDeathTest, HasMoreThreadsThanOpenBlasHasBuffers) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer cannot live beside so many buffers";
  const auto multiply_on_many_threads = [] {
    reserve_blas(1'000);
    std::vector<int> wrong(300);
    {
      std::vector<std::jthread> threads;
      for (std::size_t t = 0; t < wrong.size(); ++t) {
        threads.emplace_back([&, t] {
          const BlasThread thread;
          wrong[t] = product_is_right(64, static_cast<float>(t % 8 + 1)) ? 0 : 1;
        });
      }
    }
    std::exit(wrong == std::vector<int>(wrong.size()) ? 0 : 1);
  };
  EXPECT_EXIT(multiply_on_many_threads(), testing::ExitedWithCode(0), "^$") << "OpenBLAS complains on stderr";
}

TEST(Blas, ADepthOfNothingLeavesTheSumAndNoRowsAreLegal) {
  std::vector<double> c{5};
  multiply({.rows = 1, .columns = 1, .depth = 0}, c.data(), c.data(), c.data());
  EXPECT_EQ(c[0], 5);
  multiply({.rows = 0, .columns = 1, .depth = 1}, c.data(), c.data(), c.data());
  EXPECT_EQ(c[0], 5);
}

}  // namespace
}  // namespace foremoe::cpu
