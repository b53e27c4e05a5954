#include "foremoe/runtime/threads/threads_communicator.h"

#include <fmt/format.h>

#include <cassert>
#include <cstring>
#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/runtime/threads/ballot_box.h"
#include "foremoe/runtime/threads/thread_group.h"

namespace foremoe {
namespace {

std::int64_t begin_of_block(std::span<const std::int64_t> bytes, RankId r) {
  return std::accumulate(bytes.begin(), bytes.begin() + r.value, std::int64_t{0});
}

class ThreadsBallot final : public Ballot {
 public:
  ThreadsBallot(std::shared_ptr<ThreadGroup> group, std::shared_ptr<BallotBox> box, RankId rank)
      : group_(std::move(group)), box_(std::move(box)), rank_(rank) {}

  void cast(std::uint64_t number, bool ok) override { box_->cast(rank_, number, ok); }
  std::optional<bool> outcome(std::uint64_t number) override {
    const std::optional<bool> outcome = box_->outcome(number);
    if (!outcome) group_->check();  // nobody waits for a vote that will not come
    return outcome;
  }

 private:
  std::shared_ptr<ThreadGroup> group_;
  std::shared_ptr<BallotBox> box_;
  RankId rank_;
};

class ThreadsCommunicator final : public Communicator {
 public:
  ThreadsCommunicator(std::shared_ptr<ThreadGroup> group, RankId rank, Device& device)
      : group_(std::move(group)), rank_(rank), device_(device) {}

  RankId rank() const override { return rank_; }
  const Topology& topology() const override { return group_->topology(); }

  void all_to_all_v(const AllToAll& exchange, Stream& stream) override {
    exchange_blocks(exchange, &stream,
                    [&](std::byte* to, const std::byte* from, std::size_t bytes) { device_.copy(to, from, bytes); });
  }

  void exchange(const AllToAll& exchange) override {
    exchange_blocks(exchange, nullptr,
                    [](std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); });
  }

  void all_reduce_sum(std::span<float> values, Stream& stream) override {
    if (num_ranks() == 1) return;
    const auto begin = [&](int r) {
      return values.size() * static_cast<std::size_t>(r) / static_cast<std::size_t>(num_ranks());
    };
    const std::size_t first = begin(rank_.value);
    const std::size_t mine = begin(rank_.value + 1) - first;
    if (scratch_.bytes() < Bytes{mine * sizeof(float)}) {
      stream.synchronize();  // it waits for those that still read the former one
      scratch_ = device_.allocate(Bytes{mine * sizeof(float)});
    }

    Post post{.data = reinterpret_cast<const std::byte*>(values.data()),
              .bytes = values.size_bytes(),
              .ready = stream.record()};
    read_posts(post, &stream, [&] {
      check_equal_bytes(values.size_bytes());
      if (mine == 0) return;
      for (int r = 0; r < num_ranks(); ++r) {
        const Post& theirs = group_->post(RankId{r});
        const float* slice = reinterpret_cast<const float*>(theirs.data) + first;
        stream.wait(theirs.ready);
        if (r == 0) {
          device_.copy(scratch_.data(), reinterpret_cast<const std::byte*>(slice), mine * sizeof(float));
        } else {
          device_.add(scratch_.floats(), slice, static_cast<std::int64_t>(mine));
        }
      }
    });
    post = {.data = scratch_.data(), .ready = stream.record()};
    read_posts(post, &stream, [&] {
      for (int r = 0; r < num_ranks(); ++r) {
        const std::size_t bytes = (begin(r + 1) - begin(r)) * sizeof(float);
        if (bytes == 0) continue;
        stream.wait(group_->post(RankId{r}).ready);
        device_.copy(reinterpret_cast<std::byte*>(values.data() + begin(r)), group_->post(RankId{r}).data, bytes);
      }
    });
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    assert(all.size() == mine.size() * static_cast<std::size_t>(num_ranks()));
    read_posts({.data = mine.data(), .bytes = mine.size()}, nullptr, [&] {
      check_equal_bytes(mine.size());
      for (int r = 0; !mine.empty() && r < num_ranks(); ++r) {
        std::memcpy(all.data() + static_cast<std::size_t>(r) * mine.size(), group_->post(RankId{r}).data, mine.size());
      }
    });
  }

  void broadcast(std::span<std::byte> bytes, RankId root) override {
    read_posts({.data = bytes.data(), .bytes = bytes.size()}, nullptr, [&] {
      check_equal_bytes(bytes.size());
      if (rank_ != root && !bytes.empty()) std::memcpy(bytes.data(), group_->post(root).data, bytes.size());
    });
  }

  void barrier() override {
    read_posts({}, nullptr, [] {});
  }

  // One process: everything is mapped.
  void share(std::span<const SharedRegion> regions) override {
    if (!regions.empty()) group_->begin_sharing(rank_);
    try {
      barrier();
    } catch (const PeerFailed&) {
      group_->withdraw_sharing(rank_);
      throw;
    }
  }
  void stop_sharing(bool early) noexcept override {
    if (early) group_->fail(fmt::format("rank {} ended its phase early", rank_.value));
    group_->end_sharing(rank_);
  }
  const std::byte* local(RankId, const std::byte* pointer) const override { return pointer; }

  std::unique_ptr<Ballot> make_ballot() override {
    return std::make_unique<ThreadsBallot>(group_, group_->ballot_box(ballots_++), rank_);
  }

  std::unique_ptr<CopyLink> make_peer_link(const TransferSchedule&, const ExpertLayout&,
                                           const ExpertDirectory&) override {
    return device_.make_copy_link();
  }

  void give_up(const std::string& why) noexcept override {
    group_->fail(fmt::format("rank {} gave up: {}", rank_.value, why));
  }

 private:
  // Posts, reads, and returns when this rank's memory has been read too: at once, or in the order of `stream`.
  template <class Read>
  void read_posts(const Post& mine, Stream* stream, Read read) {
    group_->open(rank_, mine);
    bool reading = true;
    try {
      read();
      group_->end_reading(rank_, stream == nullptr ? Event{} : stream->record());
      reading = false;
      group_->close(rank_);
    } catch (const std::exception& e) {
      if (reading) {
        group_->fail(fmt::format("rank {}: {}", rank_.value, e.what()));
        if (stream != nullptr) stream->synchronize();  // what was enqueued reads memory of ranks that now may leave
        group_->end_reading(rank_, Event{});
      }
      group_->settle(stream);
      throw;
    }
    for (int r = 0; stream != nullptr && r < num_ranks(); ++r) {
      const bool read_mine = mine.send_bytes.empty() || mine.send_bytes[static_cast<std::size_t>(r)] > 0;
      if (RankId{r} != rank_ && read_mine) stream->wait(group_->done(RankId{r}));
    }
  }

  template <class Copy>
  void exchange_blocks(const AllToAll& exchange, Stream* stream, Copy copy) {
    assert(exchange.send_bytes.size() == static_cast<std::size_t>(num_ranks()));
    assert(exchange.receive_bytes.size() == static_cast<std::size_t>(num_ranks()));
    const Post mine{.data = exchange.send,
                    .send_bytes = exchange.send_bytes,
                    .receive_bytes = exchange.receive_bytes,
                    .ready = stream == nullptr ? Event{} : stream->record()};
    read_posts(mine, stream, [&] {
      for (int r = 0; r < num_ranks(); ++r) {
        check_block(RankId{r}, rank_);
        check_block(rank_, RankId{r});
      }
      std::int64_t begin = begin_of_block(exchange.receive_bytes, rank_);
      for (int i = 0; i < num_ranks(); ++i) {  // from this rank on, so that not all read the same one at a time
        const RankId source{(rank_.value + i) % num_ranks()};
        if (source.value == 0) begin = 0;
        const Post& theirs = group_->post(source);
        const std::int64_t bytes = exchange.receive_bytes[source.index()];
        if (bytes > 0) {
          if (stream != nullptr && source != rank_) stream->wait(theirs.ready);
          copy(exchange.receive + begin, theirs.data + begin_of_block(theirs.send_bytes, rank_),
               static_cast<std::size_t>(bytes));
        }
        begin += bytes;
      }
    });
  }

  void check_block(RankId from, RankId to) const {
    const std::int64_t sent = group_->post(from).send_bytes[to.index()];
    const std::int64_t expected = group_->post(to).receive_bytes[from.index()];
    if (sent == expected) return;
    throw PhaseFailed(fmt::format("all-to-all: rank {} sends {} bytes to rank {}, which expects {}", from.value, sent,
                                  to.value, expected));
  }

  void check_equal_bytes(std::size_t bytes) const {
    for (int r = 0; r < num_ranks(); ++r) {
      const std::size_t theirs = group_->post(RankId{r}).bytes;
      if (theirs == bytes) continue;
      throw PhaseFailed(fmt::format("rank {} has {} bytes where rank {} has {}", r, theirs, rank_.value, bytes));
    }
  }

  std::shared_ptr<ThreadGroup> group_;
  RankId rank_;
  Device& device_;
  DeviceMemory scratch_;  // this rank's slice of a sum; grows to the largest
  std::uint64_t ballots_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_threads_communicators(const Topology& topology,
                                                                      std::span<Device* const> devices,
                                                                      std::chrono::milliseconds timeout) {
  if (devices.size() != static_cast<std::size_t>(topology.num_ranks)) {
    throw InputError({.file = "", .field = "devices", .index = ""},
                     fmt::format("{} for {} ranks", devices.size(), topology.num_ranks));
  }
  const auto group = std::make_shared<ThreadGroup>(topology, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int r = 0; r < topology.num_ranks; ++r) {
    communicators.push_back(
        std::make_unique<ThreadsCommunicator>(group, RankId{r}, *devices[static_cast<std::size_t>(r)]));
  }
  return communicators;
}

}  // namespace foremoe
