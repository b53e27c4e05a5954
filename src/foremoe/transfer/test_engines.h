#pragma once

// A little cluster in one process, for tests of the engine: homes, buffers, arenas and a ballot.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/transfer/memcpy_link.h"
#include "foremoe/transfer/test_copy_schedules.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe::test {

// Votes of ranks that are threads.
class BallotTable {
 public:
  explicit BallotTable(int ranks) : ranks_(ranks) {}
  void cast(std::uint64_t number, bool ok) {
    const std::lock_guard lock(mutex_);
    votes_.resize(std::max(votes_.size(), number + 1));
    ++votes_[number].cast;
    votes_[number].ok &= ok;
  }
  std::optional<bool> outcome(std::uint64_t number) const {
    const std::lock_guard lock(mutex_);
    if (number >= votes_.size() || votes_[number].cast < ranks_) return std::nullopt;
    return votes_[number].ok;
  }
  std::size_t num_votes() const {
    const std::lock_guard lock(mutex_);
    return votes_.size();
  }

 private:
  struct Votes {
    int cast = 0;
    bool ok = true;
  };
  int ranks_;
  mutable std::mutex mutex_;
  std::vector<Votes> votes_;
};

inline ExpertLayout small_layout() {
  return ExpertLayout(
      {{.name = "gate_up", .elements = 37}, {.name = "down", .elements = 16, .type = DataType::kBfloat16}});
}

class Cluster {
 public:
  Cluster(const ClusterShape& shape, TransferSchedule schedule, ExpertLayout expert_layout = small_layout())
      : schedule_(std::move(schedule)),
        layout_(std::move(expert_layout)),
        shape_(shape),
        ballot_(shape.ranks),
        published_(static_cast<std::size_t>(shape.ranks)) {
    const auto bytes = static_cast<std::size_t>(layout_.bytes().value);
    buffers_.resize(static_cast<std::size_t>(shape.ranks));
    for (auto& of_rank : buffers_) {
      of_rank.resize(static_cast<std::size_t>(schedule_.buffers_per_rank));
      for (Expert& buffer : of_rank) buffer = Expert(layout_, bytes);
    }
    for (int l = 0; l < shape.layers; ++l) {
      for (int e = 0; e < shape.experts; ++e)
        homes_.emplace(std::pair(LayerId{l}, ExpertId{e}), Expert(layout_, bytes));
    }
    for (const std::vector<ArenaExpert>& experts : schedule_.arena)
      arenas_.push_back(HostArena::create(experts, layout_));
    write_homes(1);
    for (int n = 0; n < shape.num_nodes(); ++n) publish_arena(n, 1);
    for (int r = 0; r < shape.ranks; ++r) publish(RankId{r}, 1);
  }

  const TransferSchedule& schedule() const { return schedule_; }
  const ExpertLayout& layout() const { return layout_; }
  BallotTable& ballot() { return ballot_; }
  std::span<std::byte* const> buffer(RankId r, int b) const {
    return buffers_[r.index()][static_cast<std::size_t>(b)].segments;
  }
  std::span<const std::byte* const> home(LayerId l, ExpertId e) const { return homes_.at({l, e}).read_only; }
  HostArena& arena(int node) { return arenas_[static_cast<std::size_t>(node)]; }
  HostArena& arena_of(RankId r) { return arena(shape_.node_of(r)); }
  std::uint64_t published(RankId r) const { return published_[r.index()].load(std::memory_order_acquire); }
  void publish(RankId r, std::uint64_t version) { published_[r.index()].store(version, std::memory_order_release); }
  void publish_arena(int node, std::uint64_t version) {
    const auto& experts = schedule_.arena[static_cast<std::size_t>(node)];
    for (std::size_t i = 0; i < experts.size(); ++i) {
      arena(node).publish(static_cast<int>(i), version, home(experts[i].layer, experts[i].expert));
    }
  }
  // Weights that differ between layers, experts, versions, and from byte to byte.
  void write_homes(std::uint64_t version) {
    for (auto& [key, expert] : homes_) {
      Random random(version * 1'000'003 + key.first.index() * 1009 + key.second.index());
      for (std::byte& b : expert.bytes) b = static_cast<std::byte>(random.bits());
    }
  }
  void unmap_homes() { mapped_ = false; }
  bool mapped() const { return mapped_; }

  // Are the bytes that this pass reads those of the home?
  bool holds(RankId r, const ScheduledCopy& c, Pass pass) const {
    for (std::size_t s = 0; s < layout_.num_segments(); ++s) {
      const Segment& segment = layout_.segments()[s];
      if (!segment.read_by(pass)) continue;
      const auto bytes = static_cast<std::size_t>(segment.bytes().value);
      if (std::memcmp(buffer(r, c.buffer)[s], home(c.layer, c.expert)[s], bytes) != 0) return false;
    }
    return true;
  }
  // This rank's copies that the turn reads.
  std::vector<ScheduledCopy> read_at(RankId r, TurnId t) const {
    std::vector<ScheduledCopy> read;
    for (const ScheduledCopy& c : schedule_.copies) {
      if (c.rank == r && c.layer == schedule_.order[t].layer && c.arrives <= t && t <= c.closes) read.push_back(c);
    }
    return read;
  }
  bool holds_all(RankId r, TurnId t) const {
    return std::ranges::all_of(read_at(r, t),
                               [&](const ScheduledCopy& c) { return holds(r, c, schedule_.order[t].pass); });
  }

 private:
  struct Expert {
    Expert() = default;
    Expert(const ExpertLayout& layout, std::size_t size) : bytes(size) {
      for (std::size_t s = 0; s < layout.num_segments(); ++s) segments.push_back(bytes.data() + layout.offset(s));
      read_only.assign(segments.begin(), segments.end());
    }
    std::vector<std::byte> bytes;  // stays where it is when moved
    SegmentPointers segments;
    std::vector<const std::byte*> read_only;
  };

  TransferSchedule schedule_;
  ExpertLayout layout_;
  ClusterShape shape_;
  BallotTable ballot_;
  std::vector<std::atomic<std::uint64_t>> published_;
  std::vector<std::vector<Expert>> buffers_;
  std::map<std::pair<LayerId, ExpertId>, Expert> homes_;
  std::vector<HostArena> arenas_;
  bool mapped_ = true;
};

class ClusterDirectory final : public ExpertDirectory {
 public:
  ClusterDirectory(const Cluster& cluster, RankId rank) : cluster_(cluster), rank_(rank) {}
  std::span<std::byte* const> buffer(int b) const override { return cluster_.buffer(rank_, b); }
  std::span<const std::byte* const> home(LayerId l, ExpertId e) const override {
    return cluster_.mapped() ? cluster_.home(l, e) : std::span<const std::byte* const>();
  }
  std::uint64_t published(RankId owner) const override { return cluster_.published(owner); }

 private:
  const Cluster& cluster_;
  RankId rank_;
};

class ClusterBallot final : public Ballot {
 public:
  explicit ClusterBallot(BallotTable& table) : table_(table) {}
  void cast(std::uint64_t number, bool ok) override { table_.cast(number, ok); }
  std::optional<bool> outcome(std::uint64_t number) override { return table_.outcome(number); }

 private:
  BallotTable& table_;
};

// One rank of the cluster.
class ClusterRank {
 public:
  struct Links {
    std::unique_ptr<CopyLink> host = std::make_unique<MemcpyLink>();
    std::unique_ptr<CopyLink> peer = std::make_unique<MemcpyLink>();
  };
  ClusterRank(Cluster& cluster, RankId rank, Links links, const EngineOptions& options = {})
      : cluster_(cluster),
        rank_(rank),
        directory_(cluster, rank),
        engine_({.schedule = cluster.schedule(),
                 .layout = cluster.layout(),
                 .rank = rank,
                 .directory = directory_,
                 .arena = &cluster.arena_of(rank),
                 .host = std::move(links.host),
                 .peer = std::move(links.peer),
                 .ballot = std::make_unique<ClusterBallot>(cluster.ballot())},
                options) {}
  ClusterRank(Cluster& cluster, RankId rank, const EngineOptions& options = {})
      : ClusterRank(cluster, rank, Links(), options) {}

  ExpertTransferEngine& engine() { return engine_; }

  struct Run {
    std::vector<bool> whole;  // [turn]
    int wrong_turns = 0;      // said to be whole, and were not: when they began or when they ended
  };
  Run run() {
    Run result;
    for (int t = 0; t < cluster_.schedule().order.size(); ++t) {
      const TurnId turn{t};
      engine_.submit(turn);
      const bool whole = engine_.wait(turn);
      result.whole.push_back(whole);
      bool right = !whole || cluster_.holds_all(rank_, turn);
      std::this_thread::yield();
      right = right && (!whole || cluster_.holds_all(rank_, turn));
      result.wrong_turns += right ? 0 : 1;
      engine_.release(turn, {});
    }
    engine_.finish();
    return result;
  }

 private:
  Cluster& cluster_;
  RankId rank_;
  ClusterDirectory directory_;
  ExpertTransferEngine engine_;
};

}  // namespace foremoe::test
