#include "foremoe/runtime/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "foremoe/core/error.h"

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
  const std::int64_t bytes = std::int64_t{1} << 50;
  try {
    allocate_memory(Bytes{bytes});
    FAIL() << "a pebibyte was given";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
  }
  EXPECT_NE(allocate_memory(Bytes{64}).data(), nullptr);
}

TEST(Memory, RefusesMoreThanIsAvailableBeforeTouchingIt) {
  const auto available = available_memory();
  if (!available) GTEST_SKIP() << "the system does not say how much there is";
  EXPECT_GT(*available, Bytes{1 << 20});
  EXPECT_THROW(allocate_memory(Bytes{available->value * 4}), InputError);
  EXPECT_THROW(allocate_memory(Bytes{-1}), InputError);
}

}  // namespace
}  // namespace foremoe
