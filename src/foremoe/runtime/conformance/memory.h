#pragma once

// Conformance of a device's memory, stream and copies.

#include <chrono>
#include <string>
#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/runtime/conformance/device_fixture.h"

namespace foremoe {

TEST_P(DeviceConformance, MemoryIsZeroedAndAligned) {
  for (const std::int64_t bytes : {0, 1, 100, 4096, 20'000'000}) {
    const DeviceMemory memory = device().allocate(Bytes{bytes});
    EXPECT_EQ(memory.bytes(), Bytes{bytes});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 64, 0U);
    std::vector<std::byte> values(static_cast<std::size_t>(bytes), std::byte{1});
    device().download(values, memory.data());
    EXPECT_EQ(values, std::vector<std::byte>(values.size()));
  }
}

TEST_P(DeviceConformance, MemoryThatNobodyHasIsRefusedNamingHowMuch) {
  const std::int64_t bytes = std::int64_t{1} << 50;
  try {
    device().allocate(Bytes{bytes});
    FAIL() << "a pebibyte was given";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
  }
  EXPECT_NE(device().allocate(Bytes{64}).data(), nullptr);  // and the device goes on
}

TEST_P(DeviceConformance, WhatIsUploadedIsItsOwnersAgainOnReturn) {
  std::vector<float> values = random_values(5000);
  const std::vector<float> before = values;
  const float* there = put(values);
  values.assign(values.size(), -7);
  EXPECT_EQ(get(there, before.size()), before);
}

TEST_P(DeviceConformance, CopyAndZeroTouchTheirBytesAlone) {
  const std::vector<float> from = random_values(10);
  float* to = put(10, 5);
  device().copy(reinterpret_cast<std::byte*>(to + 2), reinterpret_cast<std::byte*>(put(from)), 3 * sizeof(float));
  device().zero(reinterpret_cast<std::byte*>(to + 7), 2 * sizeof(float));
  device().copy(nullptr, nullptr, 0);
  device().zero(nullptr, 0);
  EXPECT_EQ(get(to, 10), (std::vector<float>{5, 5, from[0], from[1], from[2], 5, 5, 0, 0, 5}));
}

TEST_P(DeviceConformance, EventsHaveHappenedOnceTheStreamIsSynchronized) {
  Stream& stream = device().stream();
  stream.wait(Event{});
  const Event first = stream.record();
  device().zero(reinterpret_cast<std::byte*>(put(1000, 1)), 4000);
  const Event second = stream.record();
  stream.wait(second);
  stream.synchronize();
  EXPECT_TRUE(happened(Event{}));
  EXPECT_TRUE(happened(first));
  EXPECT_TRUE(happened(second));
}

TEST_P(DeviceConformance, TheCopyLinkBringsHostMemoryAndThatOfTheDevice) {
  std::vector<float> host = random_values(1000);
  const std::vector<float> there = random_values(500);
  const float* from = put(there);
  float* to = put(1500, 0);
  device().pin(std::as_bytes(std::span(host)));
  {
    const std::unique_ptr<CopyLink> link = device().make_copy_link();
    const auto chunk = [](const float* source, float* target, std::size_t n) {
      return Chunk{.from = reinterpret_cast<const std::byte*>(source),
                   .to = reinterpret_cast<std::byte*>(target),
                   .bytes = n * sizeof(float)};
    };
    const Chunk chunks[] = {chunk(host.data(), to, 1000), chunk(from, to + 1000, 500)};
    link->submit({.id = CopyId{4}, .chunks = chunks, .source = {}, .after = device().stream().record()});
    CopyState state = CopyState::kUnderWay;
    for (int tries = 0; tries < 10'000 && state == CopyState::kUnderWay; ++tries) {
      link->progress();
      state = link->poll(CopyId{4});
      if (state == CopyState::kUnderWay) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(state, CopyState::kDone);
  }
  device().unpin(std::as_bytes(std::span(host)));
  std::vector<float> expected = host;
  expected.insert(expected.end(), there.begin(), there.end());
  EXPECT_EQ(get(to, 1500), expected);
}

}  // namespace foremoe
