#include "foremoe/runtime/threads/threads_communicator.h"

#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

#include "foremoe/runtime/threads/thread_group.h"

namespace foremoe {
namespace {

class ThreadsBallot final : public Ballot {
 public:
  ThreadsBallot(std::shared_ptr<ThreadGroup> group, std::shared_ptr<BallotBox> box, RankId rank)
      : group_(std::move(group)), box_(std::move(box)), rank_(rank) {}

  void cast(std::uint64_t number, bool ok) override { box_->cast(rank_, number, ok); }
  std::optional<bool> outcome(std::uint64_t number) override {
    const std::optional<bool> outcome = box_->outcome(number);
    if (!outcome) group_->check();  // throws, so that no rank waits for a missing vote
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

  // All memory is mapped, since ranks share one process.
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
  // Posts, reads, and returns once all ranks have read this rank's memory.
  void exchange_blocks(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive) override {
    group_->open(rank_, {.send = send, .receive = receive});
    bool reading = true;
    try {
      read(receive);
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

  void read(std::span<const ReceiveBlock> receive) const {
    for (int r = 0; r < num_ranks(); ++r) {
      check_block(RankId{r}, rank_);
      check_block(rank_, RankId{r});
    }
    for (int i = 0; i < num_ranks(); ++i) {  // starts at this rank, so that ranks do not all read the same source
      const RankId source{(rank_.value + i) % num_ranks()};
      const SendBlock& block = group_->post(source).send[rank_.index()];
      std::byte* const to = receive[source.index()].data;
      if (block.bytes > 0 && block.data != to) std::memcpy(to, block.data, static_cast<std::size_t>(block.bytes));
    }
  }

  void check_block(RankId from, RankId to) const {
    const std::int64_t sent = group_->post(from).send[to.index()].bytes;
    const std::int64_t expected = group_->post(to).receive[from.index()].bytes;
    if (sent == expected) return;
    throw PhaseFailed(
        fmt::format("rank {} sends {} bytes to rank {}, which expects {}", from.value, sent, to.value, expected));
  }

  std::shared_ptr<ThreadGroup> group_;
  RankId rank_;
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
  enum Start : int { kWait, kGo, kCancel };
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
          if (start == kCancel) return;
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
      let(kCancel);
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
