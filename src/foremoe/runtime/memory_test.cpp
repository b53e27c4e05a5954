#include "foremoe/runtime/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "foremoe/testing/limited_memory.h"

namespace foremoe {
namespace {

TEST(Memory, IsZeroedAndAligned) {
  for (const std::int64_t bytes : {0, 1, 100, 4096, 20'000'000}) {
    const Memory memory = allocate_memory(Bytes{bytes});
    EXPECT_EQ(memory.bytes(), Bytes{bytes});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 64, 0U);
    EXPECT_TRUE(std::all_of(memory.data(), memory.data() + bytes, [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(Memory, ReportsTheSizeOfAnImpossibleAllocation) {
  try {
    allocate_memory(Bytes{std::int64_t{1} << 50});
    FAIL() << "a pebibyte was given";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("needs 1125899.9 GB"), std::string::npos) << error.what();
  }
  EXPECT_NE(allocate_memory(Bytes{64}).data(), nullptr);
}

TEST(Memory, RefusesMoreThanIsAvailableBeforeTouchingIt) {
  const test::LimitedMemory limited;
  EXPECT_THROW(allocate_memory(Bytes{std::int64_t{30} << 30}), InsufficientMemory);
  EXPECT_THROW(allocate_memory(Bytes{-1}), InputError);
}

}  // namespace
}  // namespace foremoe
