#include "foremoe/runtime/nccl/nccl_communicator.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/cpu_device.h"
#include "foremoe/runtime/cuda/cuda_device.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace foremoe {
namespace {

// One thread and one GPU per rank; host memory goes by threads.
class NcclRanksThread : public testing::Test {
 protected:
  void SetUp() override {
    num_ranks_ = num_cuda_devices();
    if (num_ranks_ < 2) GTEST_SKIP() << "NCCL needs two GPUs, there is " << num_ranks_;
    std::vector<Device*> hosts;
    for (int r = 0; r < num_ranks_; ++r) {
      hosts.push_back(host_devices_.emplace_back(make_cpu_device()).get());
      devices_.push_back(make_cuda_device(r));
    }
    hosts_ = make_threads_communicators({.num_ranks = num_ranks_, .ranks_per_node = num_ranks_}, hosts,
                                        std::chrono::milliseconds{60'000});
  }
  void run(const std::function<void(Communicator&, Device&)>& body) {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < num_ranks_; ++r) {
      ranks.emplace_back([&, i = static_cast<std::size_t>(r)] {
        const auto communicator =
            make_nccl_communicator(std::move(hosts_[i]), *devices_[i], {.gpu = static_cast<int>(i)});
        body(*communicator, *devices_[i]);
        devices_[i]->stream().synchronize();
        communicator->barrier();
      });
    }
  }

  int num_ranks_ = 0;
  std::vector<std::unique_ptr<Device>> host_devices_, devices_;
  std::vector<std::unique_ptr<Communicator>> hosts_;
};

TEST_F(NcclRanksThread, BlocksOfDifferentSizesArriveWhereTheyAreSent) {
  run([&](Communicator& communicator, Device& device) {
    const int me = communicator.rank().value;
    const auto words = [](int from, int to) { return std::int64_t{100} * ((3 * from + 5 * to) % 4); };
    std::vector<std::int64_t> send_bytes, receive_bytes;
    std::vector<float> sent, expected;
    for (int r = 0; r < num_ranks_; ++r) {
      send_bytes.push_back(words(me, r) * static_cast<std::int64_t>(sizeof(float)));
      receive_bytes.push_back(words(r, me) * static_cast<std::int64_t>(sizeof(float)));
      sent.insert(sent.end(), static_cast<std::size_t>(words(me, r)), static_cast<float>(100 * me + r));
      expected.insert(expected.end(), static_cast<std::size_t>(words(r, me)), static_cast<float>(100 * r + me));
    }
    const DeviceMemory from = device.allocate(Bytes{sent.size() * sizeof(float)});
    const DeviceMemory to = device.allocate(Bytes{expected.size() * sizeof(float)});
    device.upload(from.data(), std::as_bytes(std::span(sent)));
    communicator.all_to_all_v(
        {.send = from.data(), .send_bytes = send_bytes, .receive = to.data(), .receive_bytes = receive_bytes},
        device.stream());
    std::vector<float> received(expected.size());
    device.download(std::as_writable_bytes(std::span(received)), to.data());
    EXPECT_EQ(received, expected);
  });
}

TEST_F(NcclRanksThread, SumsAreTakenInRankOrder) {
  run([&](Communicator& communicator, Device& device) {
    const auto value = [](int rank, std::size_t i) {
      return (rank % 2 == 0 ? 1e8F : -1e8F) + static_cast<float>((i + static_cast<std::size_t>(rank)) % 97) / 3.0F;
    };
    std::vector<float> values(1001), expected(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = value(communicator.rank().value, i);
      expected[i] = value(0, i);
      for (int r = 1; r < num_ranks_; ++r) expected[i] += value(r, i);
    }
    const DeviceMemory memory = device.allocate(Bytes{values.size() * sizeof(float)});
    device.upload(memory.data(), std::as_bytes(std::span(values)));
    communicator.all_reduce_sum({memory.floats(), values.size()}, device.stream());
    device.download(std::as_writable_bytes(std::span(values)), memory.data());
    EXPECT_EQ(values, expected);
  });
}

TEST_F(NcclRanksThread, DeviceMemoryOfRanksOfTheProcessIsSeenAsItIs) {
  run([&](Communicator& communicator, Device& device) {
    const DeviceMemory memory = device.allocate(Bytes{4096});
    const SharedRegion region{.bytes = {memory.data(), 4096}, .name = {}};
    communicator.share({&region, 1});
    auto mine = reinterpret_cast<std::uintptr_t>(memory.data());
    std::vector<std::uintptr_t> all(static_cast<std::size_t>(num_ranks_));
    communicator.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    for (int r = 0; r < num_ranks_; ++r) {
      const auto* theirs = reinterpret_cast<const std::byte*>(all[static_cast<std::size_t>(r)]);
      EXPECT_EQ(communicator.local(RankId{r}, theirs + 100), theirs + 100);
    }
    communicator.share({});
  });
}

TEST(NcclCommunicatorChoice, ADeviceWhoseMemoryIsTheHostsIsRefused) {
  const auto device = make_cpu_device();
  Device* const devices[] = {device.get()};
  auto host = make_threads_communicators({.num_ranks = 1, .ranks_per_node = 1}, devices, std::chrono::seconds{5});
  EXPECT_THROW(make_nccl_communicator(std::move(host[0]), *device, {}), InputError);
}

}  // namespace
}  // namespace foremoe
