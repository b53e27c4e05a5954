#include "foremoe/runtime/threads/threads_communicator.h"

#include <fmt/format.h>

#include <atomic>
#include <cassert>
#include <cstring>
#include <exception>
#include <numeric>
#include <system_error>
#include <thread>

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

class ThreadsCommunicator final : public Communicator, private PeerAccess {
 public:
  ThreadsCommunicator(std::shared_ptr<ThreadGroup> group, RankId rank) : group_(std::move(group)), rank_(rank) {}

  RankId rank() const override { return rank_; }
  const Topology& topology() const override { return group_->topology(); }
  PeerAccess& peers() override { return *this; }

  void exchange(const AllToAll& blocks) override {
    assert(blocks.send_bytes.size() == static_cast<std::size_t>(num_ranks()));
    assert(blocks.receive_bytes.size() == static_cast<std::size_t>(num_ranks()));
    read_posts({.data = blocks.send, .send_bytes = blocks.send_bytes, .receive_bytes = blocks.receive_bytes}, [&] {
      for (int r = 0; r < num_ranks(); ++r) {
        check_block(RankId{r}, rank_);
        check_block(rank_, RankId{r});
      }
      std::int64_t begin = begin_of_block(blocks.receive_bytes, rank_);
      for (int i = 0; i < num_ranks(); ++i) {  // from this rank on, so that not all read the same one at a time
        const RankId source{(rank_.value + i) % num_ranks()};
        if (source.value == 0) begin = 0;
        const Post& theirs = group_->post(source);
        const std::int64_t bytes = blocks.receive_bytes[source.index()];
        if (bytes > 0) {
          std::memcpy(blocks.receive + begin, theirs.data + begin_of_block(theirs.send_bytes, rank_),
                      static_cast<std::size_t>(bytes));
        }
        begin += bytes;
      }
    });
  }

  void all_reduce_sum(std::span<float> values) override {
    if (num_ranks() == 1) return;
    const auto begin = [&](int r) {
      return values.size() * static_cast<std::size_t>(r) / static_cast<std::size_t>(num_ranks());
    };
    const std::size_t first = begin(rank_.value);
    const std::size_t mine = begin(rank_.value + 1) - first;
    if (slice_.size() < mine) slice_.resize(mine);

    read_posts({.data = reinterpret_cast<const std::byte*>(values.data()), .bytes = values.size_bytes()}, [&] {
      check_equal_bytes(values.size_bytes());
      for (int r = 0; r < num_ranks(); ++r) {
        const float* theirs = reinterpret_cast<const float*>(group_->post(RankId{r}).data) + first;
        for (std::size_t i = 0; i < mine; ++i) slice_[i] = r == 0 ? theirs[i] : slice_[i] + theirs[i];
      }
    });
    read_posts({.data = reinterpret_cast<const std::byte*>(slice_.data())}, [&] {
      for (int r = 0; r < num_ranks(); ++r) {
        const std::size_t bytes = (begin(r + 1) - begin(r)) * sizeof(float);
        if (bytes > 0) std::memcpy(values.data() + begin(r), group_->post(RankId{r}).data, bytes);
      }
    });
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    assert(all.size() == mine.size() * static_cast<std::size_t>(num_ranks()));
    read_posts({.data = mine.data(), .bytes = mine.size()}, [&] {
      check_equal_bytes(mine.size());
      for (int r = 0; !mine.empty() && r < num_ranks(); ++r) {
        std::memcpy(all.data() + static_cast<std::size_t>(r) * mine.size(), group_->post(RankId{r}).data, mine.size());
      }
    });
  }

  void broadcast(std::span<std::byte> bytes, RankId root) override {
    read_posts({.data = bytes.data(), .bytes = bytes.size()}, [&] {
      check_equal_bytes(bytes.size());
      if (rank_ != root && !bytes.empty()) std::memcpy(bytes.data(), group_->post(root).data, bytes.size());
    });
  }

  void barrier() override {
    read_posts({}, [] {});
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
    return std::make_unique<MemcpyLink>();
  }

  void give_up(const std::string& why) noexcept override {
    group_->fail(fmt::format("rank {} gave up: {}", rank_.value, why));
  }

 private:
  // Posts, reads, and returns when this rank's memory has been read too.
  template <class Read>
  void read_posts(const Post& mine, Read read) {
    group_->open(rank_, mine);
    bool reading = true;
    try {
      read();
      group_->end_reading();
      reading = false;
      group_->close(rank_);
    } catch (const std::exception& e) {
      if (reading) {
        group_->fail(fmt::format("rank {}: {}", rank_.value, e.what()));
        group_->end_reading();
      }
      group_->settle();
      throw;
    }
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
  std::vector<float> slice_;  // of a sum, this rank's; grows to the largest
  std::uint64_t ballots_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_threads_communicators(const Topology& topology,
                                                                      std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<ThreadGroup>(topology, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int r = 0; r < topology.num_ranks; ++r) {
    communicators.push_back(std::make_unique<ThreadsCommunicator>(group, RankId{r}));
  }
  return communicators;
}

void run_ranks(int n, const std::function<void(RankId)>& f) {
  enum Start : int { kWait, kGo, kGoHome };
  std::atomic<int> start = kWait;
  const auto let = [&start](Start what) {
    start = what;
    start.notify_all();
  };
  struct Outcome {
    std::exception_ptr error;
    bool of_a_peer = false;
  };
  std::vector<Outcome> outcomes(static_cast<std::size_t>(n));
  {
    std::vector<std::jthread> ranks;
    ranks.reserve(outcomes.size());
    try {
      for (int r = 0; r < n; ++r) {
        ranks.emplace_back([&f, &start, &outcome = outcomes[static_cast<std::size_t>(r)], r] {
          start.wait(kWait);
          if (start == kGoHome) return;
          try {
            f(RankId{r});
          } catch (const PeerFailed&) {
            outcome = {.error = std::current_exception(), .of_a_peer = true};
          } catch (...) {
            outcome = {.error = std::current_exception()};
          }
        });
      }
    } catch (const std::system_error& error) {
      let(kGoHome);
      throw std::system_error(error.code(), fmt::format("cannot start a thread for each of {} ranks", n));
    }
    let(kGo);
  }
  for (const bool of_a_peer : {false, true}) {
    for (const Outcome& outcome : outcomes) {
      if (outcome.error && outcome.of_a_peer == of_a_peer) std::rethrow_exception(outcome.error);
    }
  }
}

}  // namespace foremoe
