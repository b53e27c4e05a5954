#include "foremoe/runtime/cpu/cpu_device.h"

#include <algorithm>
#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/host_memory.h"
#include "foremoe/runtime/cpu/row_tiles.h"
#include "foremoe/runtime/device_conformance.h"

FOREMOE_DEVICE_CONFORMANCE(Cpu, foremoe::make_cpu_device);

namespace foremoe {
namespace {

constexpr ExpertShape kShape{.hidden = 40, .intermediate = 24};
constexpr std::int64_t kRows = 700;

std::vector<float> values(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> result(n);
  for (float& v : result) v = static_cast<float>(2 * random.uniform() - 1);
  return result;
}

// Forward and backward of two experts, every operand `shift` floats behind an aligned address: y, dx, gradients.
std::vector<float> run_experts(std::size_t shift) {
  const std::unique_ptr<Device> device = make_cpu_device();
  std::vector<DeviceMemory> memory;
  const auto place = [&](std::size_t n, std::uint64_t seed) {
    memory.push_back(device->allocate(Bytes{(n + shift) * sizeof(float)}));
    if (seed > 0) std::ranges::copy(values(n, seed), memory.back().floats() + shift);
    return memory.back().floats() + shift;
  };
  constexpr std::size_t kHidden = kShape.hidden, kInner = kShape.intermediate, kMatrix = kHidden * kInner;
  const float *x = place(kRows * kHidden, 1), *dy = place(kRows * kHidden, 2);
  const float *gate_up = place(2 * kMatrix, 3), *down = place(kMatrix, 4);
  float *d_gate_up = place(2 * kMatrix, 5), *d_down = place(kMatrix, 6);
  float *kept = place(kRows * 2 * kInner, 0), *y = place(kRows * kHidden, 0), *dx = place(kRows * kHidden, 0);
  const std::vector<ExpertRows> experts{{0, 3, gate_up, down, d_gate_up, d_down, false},
                                        {3, kRows - 3, gate_up, down, d_gate_up, d_down, false}};
  device->experts_forward(experts, kShape, x, kept, y);
  device->experts_backward(experts, kShape, x, kept, dy, dx);
  std::vector<float> result(y, y + kRows * kHidden);
  result.insert(result.end(), dx, dx + kRows * kHidden);
  result.insert(result.end(), d_gate_up, d_gate_up + 2 * kMatrix);
  result.insert(result.end(), d_down, d_down + kMatrix);
  return result;
}

TEST(CpuDevice, BitsDoNotDependOnWhereTheOperandsLie) {
  const std::vector<float> aligned = run_experts(0);
  for (const std::size_t shift : {1, 2, 3, 5, 8, 15}) EXPECT_EQ(run_experts(shift), aligned) << shift;
}

TEST(CpuDeviceThread, RanksThatComputeAtOnceGetTheSameBits) {
  const std::vector<float> alone = run_experts(0);
  std::vector<std::vector<float>> results(16);
  {
    std::vector<std::jthread> ranks;
    for (auto& result : results) ranks.emplace_back([&result] { result = run_experts(0); });
  }
  for (const auto& result : results) EXPECT_EQ(result, alone);
}

TEST(CpuDevice, MoreMemoryThanIsAvailableIsRefusedBeforeItIsTouched) {
  const auto available = cpu::available_memory();
  if (!available) GTEST_SKIP() << "the system does not say how much there is";
  EXPECT_GT(*available, Bytes{1 << 20});
  EXPECT_THROW(make_cpu_device()->allocate(Bytes{available->value * 4}), InputError);
  EXPECT_THROW(make_cpu_device()->allocate(Bytes{-1}), InputError);
}

TEST(RowTiles, TheHeightOfAShapeStaysWhatItWas) {
  const int height = cpu::tile_height(48, 40);
  EXPECT_TRUE(std::ranges::find(cpu::kTileHeights, height) != std::end(cpu::kTileHeights));
  EXPECT_EQ(cpu::tile_height(48, 40), height);
}

}  // namespace
}  // namespace foremoe
