#include "foremoe/runtime/nccl/nccl_communicator.h"

#include <fmt/format.h>

#include <array>
#include <cassert>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/cuda_stream.h"
#include "foremoe/runtime/cuda/update_kernels.h"
#include "foremoe/runtime/nccl/device_regions.h"
#include "foremoe/runtime/nccl/nccl_group.h"
#include "foremoe/runtime/nccl/nccl_peer_link.h"

namespace foremoe {
namespace {

using nccl::NcclGroup;

// NCCL hangs or fails obscurely when two ranks have one GPU; a machine's GPUs are known by their ids.
void check_gpus(Communicator& host, const Device& device, int gpu) {
  if (device.is_host_memory()) {
    throw InputError({.file = "NCCL", .field = {}, .index = {}}, fmt::format("{} is no GPU", device.name()));
  }
  cudaDeviceProp properties{};
  FOREMOE_CUDA(cudaGetDeviceProperties(&properties, gpu));
  std::vector<cudaUUID_t> all(static_cast<std::size_t>(host.num_ranks()));
  host.all_gather(std::as_bytes(std::span(&properties.uuid, 1)), std::as_writable_bytes(std::span(all)));
  const auto bytes = [](const cudaUUID_t& id) { return std::to_array(id.bytes); };
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      if (bytes(all[a]) != bytes(all[b])) continue;
      throw InputError({.file = "NCCL", .field = "gpu", .index = {}},
                       fmt::format("ranks {} and {} have the same one; NCCL wants one for each", a, b));
    }
  }
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> host, Device& device, const NcclOptions& options)
      : host_((check_gpus(*host, device, options.gpu), std::move(host))),
        device_(device),
        gpu_(options.gpu),
        group_(*host_, {.gpu = options.gpu, .timeout = options.timeout}),
        peers_(*host_, {.gpu = options.gpu, .timeout = options.timeout}),
        regions_(options.gpu) {}

  RankId rank() const override { return host_->rank(); }
  const Topology& topology() const override { return host_->topology(); }

  void all_to_all_v(const AllToAll& exchange, Stream& stream) override {
    const cuda::CurrentDevice here(gpu_);
    cuda::CudaStream& ordered = cuda_stream(stream);
    blocks_.clear();
    const std::byte* from = exchange.send;
    std::byte* to = exchange.receive;
    for (std::size_t r = 0; r < exchange.send_bytes.size(); ++r) {
      blocks_.push_back(
          {.from = from, .sent = exchange.send_bytes[r], .to = to, .received = exchange.receive_bytes[r]});
      from += exchange.send_bytes[r];
      to += exchange.receive_bytes[r];
    }
    exchange_blocks(ordered);
  }

  void all_reduce_sum(std::span<float> values, Stream& stream) override {
    if (num_ranks() == 1) return;
    const cuda::CurrentDevice here(gpu_);
    cuda::CudaStream& ordered = cuda_stream(stream);
    const auto num = static_cast<std::size_t>(num_ranks());
    const auto begin = [&](std::size_t r) { return values.size() * r / num; };
    const auto bytes = [](std::size_t n) { return static_cast<std::int64_t>(n * sizeof(float)); };
    const std::size_t mine = begin(rank().index() + 1) - begin(rank().index());
    float* slices = scratch(mine * num);  // [rank][mine]

    blocks_.clear();
    for (std::size_t r = 0; r < num; ++r) {
      blocks_.push_back({.from = reinterpret_cast<const std::byte*>(values.data() + begin(r)),
                         .sent = bytes(begin(r + 1) - begin(r)),
                         .to = reinterpret_cast<std::byte*>(slices + r * mine),
                         .received = bytes(mine)});
    }
    exchange_blocks(ordered);
    for (std::size_t r = 1; r < num; ++r) {
      cuda::add(slices, slices + r * mine, static_cast<std::int64_t>(mine), ordered.handle());
    }
    blocks_.clear();
    for (std::size_t r = 0; r < num; ++r) {
      blocks_.push_back({.from = reinterpret_cast<const std::byte*>(slices),
                         .sent = bytes(mine),
                         .to = reinterpret_cast<std::byte*>(values.data() + begin(r)),
                         .received = bytes(begin(r + 1) - begin(r))});
    }
    exchange_blocks(ordered);
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override { host_->all_gather(mine, all); }
  void broadcast(std::span<std::byte> bytes, RankId root) override { host_->broadcast(bytes, root); }
  void exchange(const AllToAll& exchange) override { host_->exchange(exchange); }
  void barrier() override { host_->barrier(); }

  // Regions with a name are the host's.
  void share(std::span<const SharedRegion> regions) override {
    std::vector<SharedRegion> of_host;
    std::vector<std::span<std::byte>> of_device;
    for (const SharedRegion& region : regions) {
      if (!region.name.empty()) {
        of_host.push_back(region);
      } else if (!region.bytes.empty()) {
        of_device.push_back(region.bytes);
      }
    }
    host_->share(of_host);
    regions_.share(*host_, of_device);
    std::vector<char> mine;
    for (int r = 0; r < num_ranks(); ++r) mine.push_back(regions_.sees_all_of(RankId{r}) ? 1 : 0);
    sees_.resize(mine.size() * mine.size());
    host_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(sees_)));
  }

  // Nothing of this rank's memory is freed while others have it open: homes are the caller's and outlive the stage.
  void stop_sharing(bool early) noexcept override {
    regions_.close();
    host_->stop_sharing(early);
  }

  const std::byte* local(RankId owner, const std::byte* pointer) const override {
    if (owner == rank()) return pointer;
    const std::byte* here = regions_.local(owner, pointer);
    return here != nullptr ? here : host_->local(owner, pointer);
  }

  std::unique_ptr<Ballot> make_ballot() override { return host_->make_ballot(); }

  std::unique_ptr<CopyLink> make_peer_link(const TransferSchedule& schedule, const ExpertLayout& layout,
                                           const ExpertDirectory& directory) override {
    const cuda::CurrentDevice here(gpu_);
    std::vector<std::size_t> messages;
    for (std::size_t i = 0; i < schedule.copies.size(); ++i) {
      const ScheduledCopy& copy = schedule.copies[i];
      const std::size_t sees = copy.rank.index() * static_cast<std::size_t>(num_ranks()) + copy.source.index();
      if (copy.path != Path::kPeer || (copy.rank != rank() && copy.source != rank()) || sees_[sees] != 0) continue;
      messages.push_back(i);
    }
    return std::make_unique<nccl::NcclPeerLink>(nccl::NcclPeerLink::Parts{.rank = rank(),
                                                                          .gpu = gpu_,
                                                                          .device = device_,
                                                                          .group = peers_,
                                                                          .schedule = schedule,
                                                                          .layout = layout,
                                                                          .directory = directory,
                                                                          .messages = std::move(messages)});
  }

  void give_up(const std::string& why) noexcept override {
    group_.break_off(why);
    peers_.break_off(why);
    host_->give_up(why);
  }

 private:
  struct Block {  // to and from one rank
    const std::byte* from = nullptr;
    std::int64_t sent = 0;
    std::byte* to = nullptr;
    std::int64_t received = 0;
  };

  static cuda::CudaStream& cuda_stream(Stream& stream) {
    auto* ordered = dynamic_cast<cuda::CudaStream*>(&stream);
    if (ordered == nullptr) throw InputError({.file = "NCCL", .field = {}, .index = {}}, "the stream is no GPU's");
    return *ordered;
  }

  float* scratch(std::size_t n) {
    const Bytes need{n * sizeof(float)};
    if (scratch_.bytes() < need) {
      device_.stream().synchronize();  // the former may still be in use
      scratch_ = {};
      scratch_ = device_.allocate(need);
    }
    return scratch_.floats();
  }

  void exchange_blocks(cuda::CudaStream& stream) {
    assert(blocks_.size() == static_cast<std::size_t>(num_ranks()));
    const Block& own = blocks_[rank().index()];
    if (own.sent != own.received) throw PeerFailed("all-to-all: a rank expects other than what it sends itself");
    if (own.sent > 0) {
      FOREMOE_CUDA(cudaMemcpyAsync(own.to, own.from, static_cast<std::size_t>(own.sent), cudaMemcpyDeviceToDevice,
                                   stream.handle()));
    }
    ncclComm_t group = group_.handle();
    FOREMOE_NCCL(ncclGroupStart());
    for (int r = 0; r < num_ranks(); ++r) {
      const Block& block = blocks_[static_cast<std::size_t>(r)];
      if (RankId{r} == rank()) continue;
      const auto sent = static_cast<std::size_t>(block.sent), received = static_cast<std::size_t>(block.received);
      if (sent > 0) FOREMOE_NCCL(ncclSend(block.from, sent, ncclUint8, r, group, stream.handle()));
      if (received > 0) FOREMOE_NCCL(ncclRecv(block.to, received, ncclUint8, r, group, stream.handle()));
    }
    FOREMOE_NCCL(ncclGroupEnd());
    group_.watch(stream.record());
  }

  std::unique_ptr<Communicator> host_;
  Device& device_;
  int gpu_;
  NcclGroup group_;  // of the rank's thread
  NcclGroup peers_;  // of the engine's
  nccl::DeviceRegions regions_;
  std::vector<char> sees_;  // [reader][owner]
  std::vector<Block> blocks_;
  DeviceMemory scratch_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host, Device& device,
                                                     const NcclOptions& options) {
  return std::make_unique<NcclCommunicator>(std::move(host), device, options);
}

}  // namespace foremoe
