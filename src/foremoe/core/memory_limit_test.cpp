#include "foremoe/core/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>

#include "foremoe/core/array.h"
#include "foremoe/testing/limited_memory.h"

namespace foremoe {
namespace {

constexpr std::size_t kLarge = std::size_t{1} << 60;

TEST(MemoryLimit, NamesThePlaceAndBothAmounts) {
  const test::LimitedMemory limited;
  try {
    expect_memory(8e12, {.file = "step.safetensors", .field = "load"});
    FAIL() << "8 TB were allowed";
  } catch (const InsufficientMemory& error) {
    EXPECT_THAT(error.what(), testing::StartsWith("step.safetensors: load: needs 8000.0 GB of memory; "));
    EXPECT_THAT(error.what(), testing::EndsWith(" GB are available or allowed (`max_memory`)"));
  }
}

TEST(MemoryLimit, AcceptsWhatIsAvailable) {
  const test::LimitedMemory limited;
  EXPECT_GT(available_memory(), Bytes{0});
  EXPECT_LT(available_memory(), Bytes{std::int64_t{30} << 30});
  EXPECT_NO_THROW(expect_memory(1e8));
}

TEST(MemoryLimit, ArraysRefuseShapesBeforeTheyAllocate) {
  const test::LimitedMemory limited;
  EXPECT_THROW((Array<Tokens, 4>({1024, 1024, 65'536, 4096})), InsufficientMemory);
  EXPECT_THROW((Array<char, 2>({kLarge, kLarge})), InsufficientMemory);
  EXPECT_THROW((Array<Tokens, 2>({kLarge / 2, 16})), InsufficientMemory);  // 2^66 bytes: 0 in 64 bits
  EXPECT_EQ((Array<char, 3>({kLarge, 0, 2})).size(), 0U);
}

TEST(MemoryLimit, HoldsForAllOtherAllocations) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer ends the process when an allocation fails";
  const std::size_t bytes = std::size_t{32} << 30;
  {
    const test::LimitedMemory limited;
    EXPECT_THROW((void)std::make_unique<char[]>(bytes), std::bad_alloc);
  }
  EXPECT_GT(available_memory(), Bytes{0});
}

}  // namespace
}  // namespace foremoe
