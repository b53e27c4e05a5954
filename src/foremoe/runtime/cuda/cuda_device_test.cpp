#include "foremoe/runtime/cuda/cuda_device.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/runtime/device_conformance.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace {

std::unique_ptr<foremoe::Device> first_gpu() {
  return foremoe::num_cuda_devices() > 0 ? foremoe::make_cuda_device(0) : nullptr;
}

}  // namespace

FOREMOE_DEVICE_CONFORMANCE(Cuda, first_gpu);

namespace foremoe {
namespace {

TEST(CudaDeviceChoice, AGpuThatIsNotThereIsRefusedByNumber) {
  const int n = num_cuda_devices();
  for (const int gpu : {-1, n, n + 7}) {
    try {
      make_cuda_device(gpu);
      FAIL() << gpu;
    } catch (const InputError& e) {
      EXPECT_EQ(e.where().field, "gpu");
      EXPECT_NE(std::string(e.what()).find(std::to_string(gpu)), std::string::npos) << e.what();
    }
  }
}

class CudaRanksThread : public testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(CudaRanksThread, RanksOnOneGpuExchangeAndSumOverThreads) {
  constexpr int kRanks = 4;
  constexpr std::size_t kBlock = 10'000;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Device*> pointers;
  for (int r = 0; r < kRanks; ++r) pointers.push_back(devices.emplace_back(make_cuda_device(0)).get());
  auto communicators = make_threads_communicators({.num_ranks = kRanks, .ranks_per_node = kRanks}, pointers,
                                                  std::chrono::milliseconds{20'000});
  std::vector<std::vector<float>> received(kRanks), summed(kRanks);
  {
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < kRanks; ++r) {
      ranks.emplace_back([&, r] {
        Device& device = *devices[r];
        std::vector<float> mine(kRanks * kBlock);
        std::iota(mine.begin(), mine.end(), static_cast<float>(r * mine.size()));
        const Bytes bytes{mine.size() * sizeof(float)};
        const DeviceMemory from = device.allocate(bytes), to = device.allocate(bytes);
        device.upload(from.data(), std::as_bytes(std::span(mine)));
        const std::vector<std::int64_t> blocks(kRanks, kBlock * sizeof(float));
        communicators[r]->all_to_all_v(
            {.send = from.data(), .send_bytes = blocks, .receive = to.data(), .receive_bytes = blocks},
            device.stream());
        communicators[r]->all_reduce_sum({from.floats(), mine.size()}, device.stream());
        received[r].resize(mine.size());
        summed[r].resize(mine.size());
        device.download(std::as_writable_bytes(std::span(received[r])), to.data());
        device.download(std::as_writable_bytes(std::span(summed[r])), from.data());
        communicators[r]->barrier();  // memory lives until everybody has read it
      });
    }
  }
  for (std::size_t r = 0; r < kRanks; ++r) {
    for (std::size_t i = 0; i < kRanks * kBlock; ++i) {
      const std::size_t source = i / kBlock;
      ASSERT_EQ(received[r][i], static_cast<float>(source * kRanks * kBlock + r * kBlock + i % kBlock));
      float sum = 0;
      for (std::size_t s = 0; s < kRanks; ++s) sum += static_cast<float>(s * kRanks * kBlock + i);
      ASSERT_EQ(summed[r][i], sum);
    }
  }
}

}  // namespace
}  // namespace foremoe
