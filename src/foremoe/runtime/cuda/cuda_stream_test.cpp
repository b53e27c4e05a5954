#include "foremoe/runtime/cuda/cuda_stream.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/cuda_device.h"
#include "foremoe/runtime/cuda/measure/gpu_load.h"
#include "foremoe/runtime/cuda/staging_ring.h"

namespace foremoe::cuda {
namespace {

// Two streams, and 50 ms of work to put into one of them.
class CudaStreams : public testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU";
    device_ = make_cuda_device(0);
    other_ = make_cuda_device(0);
  }
  void occupy(Device& device) { occupy_stream(device.stream(), 0.05); }

  std::unique_ptr<Device> device_, other_;
};

TEST_F(CudaStreams, AnEventHasHappenedWhenWhatWasBeforeItIsDone) {
  occupy(*device_);
  const Event event = device_->stream().record();
  EXPECT_FALSE(happened(event));
  device_->stream().synchronize();
  EXPECT_TRUE(happened(event));
  EXPECT_TRUE(happened(Event{}));
}

TEST_F(CudaStreams, AnEventWhosePlaceWasReusedIsNeverSaidToHaveHappenedTooEarly) {
  occupy(*device_);
  const Event event = device_->stream().record();
  for (std::uint64_t i = 0; i < 2 * kEventsKept; ++i) device_->stream().record();
  EXPECT_FALSE(happened(event));
  device_->stream().synchronize();
  EXPECT_TRUE(happened(event));
}

TEST_F(CudaStreams, AStreamThatWaitsForAnotherRunsAfterIt) {
  occupy(*device_);
  other_->stream().wait(device_->stream().record());
  const Event behind = other_->stream().record();
  EXPECT_FALSE(happened(behind));
  other_->stream().synchronize();
  EXPECT_TRUE(happened(device_->stream().record()));
}

TEST_F(CudaStreams, ACopyBeginsAfterItsEventAndTheHostDoesNotWait) {
  const DeviceMemory from = device_->allocate(Bytes{4096}), to = device_->allocate(Bytes{4096});
  const auto link = device_->make_copy_link();
  occupy(*device_);
  const Chunk chunk{.from = from.data(), .to = to.data(), .bytes = 4096};
  const std::int64_t before = host_waits();
  link->submit({.id = CopyId{1}, .chunks = {&chunk, 1}, .after = device_->stream().record()});
  EXPECT_EQ(link->poll(CopyId{1}), CopyState::kUnderWay);
  EXPECT_EQ(host_waits(), before);
  device_->stream().synchronize();
  CopyState state = CopyState::kUnderWay;
  while (state == CopyState::kUnderWay) state = link->poll(CopyId{1});
  EXPECT_EQ(state, CopyState::kDone);
}

TEST_F(CudaStreams, StagedArraysArriveAlsoWhenTheRingComesRoundAndGrows) {
  std::vector<std::int32_t> row(3000), back(row.size());
  const DeviceMemory to = device_->allocate(Bytes{row.size() * sizeof(std::int32_t)});
  auto* stream = dynamic_cast<CudaStream*>(&device_->stream());
  ASSERT_NE(stream, nullptr);
  StagingRing ring(stream->handle(), 4096);
  for (int round = 0; round < 100; ++round) {
    const std::size_t n = round == 50 ? row.size() : 700;
    std::iota(row.begin(), row.end(), 1000 * round);
    const std::int32_t* staged = ring.stage(std::span<const std::int32_t>(row).first(n));
    device_->copy(to.data(), reinterpret_cast<const std::byte*>(staged), n * sizeof(std::int32_t));
    if (round % 7 == 0 || round == 50) {
      device_->download(std::as_writable_bytes(std::span(back)).first(n * sizeof(std::int32_t)), to.data());
      ASSERT_TRUE(std::equal(back.begin(), back.begin() + static_cast<std::ptrdiff_t>(n), row.begin())) << round;
    }
  }
}

}  // namespace
}  // namespace foremoe::cuda
