#pragma once

// A small cluster in one process, for tests of the engine. Provides schedules of copies, made without the product's
// scheduler, and the homes, buffers, arenas and ballot to run them.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe::test {

struct ClusterShape {
  int ranks = 1;
  int ranks_per_node = 1;
  int micro_steps = 1;
  int layers = 1;
  int experts = 4;  // per layer, homes contiguous
  int guests = 1;   // slots per rank
  bool backward = false;

  RankId home(ExpertId e) const { return RankId{e.value / (experts / ranks)}; }
  int node_of(RankId r) const { return r.value / ranks_per_node; }
  int num_nodes() const { return (ranks + ranks_per_node - 1) / ranks_per_node; }
};

inline TurnOrder turn_order(const ClusterShape& shape) {
  TurnOrder order;
  for (int m = 0; m < shape.micro_steps; ++m) {
    const auto take = [&](Pass pass, int l) {
      order.turns.push_back({.event = EventId{m}, .pass = pass, .micro_step = MicroStepId{m}, .layer = LayerId{l}});
    };
    for (int l = 0; l < shape.layers; ++l) take(Pass::kForward, l);
    for (int l = shape.layers - 1; shape.backward && l >= 0; --l) take(Pass::kBackward, l);
  }
  return order;
}

// Sorts the copies and derives the rest of the schedule. Arenas contain the experts that the host path copies. With
// `everything`, arenas contain all copied experts.
inline TransferSchedule complete(const ClusterShape& shape, std::vector<ScheduledCopy> copies, bool everything) {
  TransferSchedule schedule;
  schedule.phase = shape.backward ? Phase::kPolicyUpdate : Phase::kRecompute;
  schedule.order = turn_order(shape);
  const auto key = [](const ScheduledCopy& c) { return std::tuple(c.arrives, c.rank, c.slot); };
  std::ranges::sort(copies, {}, key);
  for (int t = 0; t <= schedule.order.size() + 1; ++t) {
    schedule.first_of_turn.push_back(static_cast<std::size_t>(
        std::ranges::lower_bound(copies, TurnId{t}, {}, &ScheduledCopy::arrives) - copies.begin()));
  }
  schedule.arena.resize(static_cast<std::size_t>(shape.num_nodes()));
  for (const ScheduledCopy& c : copies) {
    schedule.buffers_per_rank = std::max(schedule.buffers_per_rank, c.buffer + 1);
    if (c.path != Path::kHost && !everything) continue;
    schedule.arena[static_cast<std::size_t>(shape.node_of(c.rank))].push_back({c.layer, c.expert});
  }
  for (std::vector<ArenaExpert>& arena : schedule.arena) {
    std::ranges::sort(arena);
    arena.erase(std::unique(arena.begin(), arena.end()), arena.end());
  }
  schedule.copies = std::move(copies);
  return schedule;
}

// Every guest slot contains an expert of another rank. About every second micro-step replaces the expert.
inline TransferSchedule random_schedule(const ClusterShape& shape, std::uint64_t seed, bool everything = true) {
  Random random(seed);
  const TurnOrder order = turn_order(shape);
  const int turns_per_event = shape.layers * (shape.backward ? 2 : 1);
  std::vector<ScheduledCopy> copies;
  for (int r = 0; r < shape.ranks; ++r) {
    for (int l = 0; l < shape.layers; ++l) {
      std::vector<ScheduledCopy> current(static_cast<std::size_t>(shape.guests));
      for (int m = 0; m < shape.micro_steps; ++m) {
        const TurnId first{m * turns_per_event + l};
        const TurnId last = shape.backward ? TurnId{(m + 1) * turns_per_event - 1 - l} : first;
        for (int g = 0; g < shape.guests; ++g) {
          ScheduledCopy& c = current[static_cast<std::size_t>(g)];
          if (m > 0 && random.below(2) == 0) {
            c.closes = last;
            continue;
          }
          if (m > 0) copies.push_back(c);
          const TurnId opens{m > 0 ? c.closes.value + 1 : 0};
          const auto taken = [&](ExpertId e) {
            return shape.home(e) == RankId{r} ||
                   std::ranges::any_of(current, [&](const ScheduledCopy& o) { return &o != &c && o.expert == e; });
          };
          ExpertId expert{random.below(static_cast<std::uint64_t>(shape.experts))};
          while (taken(expert)) expert = ExpertId{random.below(static_cast<std::uint64_t>(shape.experts))};
          c = {.rank = RankId{r},
               .layer = LayerId{l},
               .expert = expert,
               .slot = SlotId{shape.experts / shape.ranks + g},
               .buffer = l * shape.guests + g,
               .opens = opens,
               .arrives = first,
               .closes = last,
               .path = random.below(2) == 0 ? Path::kHost : Path::kPeer,
               .source = shape.home(expert)};
        }
      }
      copies.insert(copies.end(), current.begin(), current.end());
    }
  }
  return complete(shape, std::move(copies), everything);
}

// Votes of ranks that run as threads.
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
        published_(static_cast<std::size_t>(shape.ranks)),
        in_place_(static_cast<std::size_t>(shape.ranks)) {
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
  std::span<const std::byte* const> read_buffer(RankId r, int b) const {
    return buffers_[r.index()][static_cast<std::size_t>(b)].read_only;
  }
  std::span<const std::byte* const> home(LayerId l, ExpertId e) const { return homes_.at({l, e}).read_only; }
  void put_in_place(RankId r, TurnId before) { in_place_[r.index()].store(before.value, std::memory_order_release); }
  bool in_place(RankId r, TurnId before) const {
    return in_place_[r.index()].load(std::memory_order_acquire) >= before.value;
  }
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
  // Writes weights that differ between layers, experts and versions, and from byte to byte.
  void write_homes(std::uint64_t version) {
    for (auto& [key, expert] : homes_) {
      Random random(version * 1'000'003 + key.first.index() * 1009 + key.second.index());
      for (std::byte& b : expert.bytes) b = static_cast<std::byte>(random.bits());
    }
  }
  void unmap_homes() { mapped_ = false; }
  bool mapped() const { return mapped_; }

  // Returns whether the segments that this pass reads equal those of the home.
  bool holds(RankId r, const ScheduledCopy& c, Pass pass) const {
    for (std::size_t s = 0; s < layout_.num_segments(); ++s) {
      const Segment& segment = layout_.segments()[s];
      if (!segment.read_by(pass)) continue;
      const auto bytes = static_cast<std::size_t>(segment.bytes().value);
      if (std::memcmp(buffer(r, c.buffer)[s], home(c.layer, c.expert)[s], bytes) != 0) return false;
    }
    return true;
  }
  // Returns this rank's copies that the turn reads.
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
    std::vector<std::byte> bytes;  // moving it does not move the elements
    SegmentPointers segments;
    std::vector<const std::byte*> read_only;
  };

  TransferSchedule schedule_;
  ExpertLayout layout_;
  ClusterShape shape_;
  BallotTable ballot_;
  std::vector<std::atomic<std::uint64_t>> published_;
  std::vector<std::atomic<int>> in_place_;  // [rank], all copies that arrive before this turn are in place
  std::vector<std::vector<Expert>> buffers_;
  std::map<std::pair<LayerId, ExpertId>, Expert> homes_;
  std::vector<HostArena> arenas_;
  bool mapped_ = true;
};

class ClusterDirectory final : public ExpertDirectory {
 public:
  ClusterDirectory(Cluster& cluster, RankId rank) : cluster_(cluster), rank_(rank) {}
  std::span<std::byte* const> buffer(int b) const override { return cluster_.buffer(rank_, b); }
  std::span<const std::byte* const> source(const ScheduledCopy& copy) const override {
    if (!cluster_.mapped()) return {};
    return copy.staged() ? cluster_.read_buffer(copy.source, copy.source_buffer)
                         : cluster_.home(copy.layer, copy.expert);
  }
  std::uint64_t published(RankId owner) const override { return cluster_.published(owner); }
  void put_in_place(TurnId before) override { cluster_.put_in_place(rank_, before); }
  bool in_place(RankId owner, TurnId before) const override { return cluster_.in_place(owner, before); }

 private:
  Cluster& cluster_;
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
    int wrong_turns = 0;      // reported as whole, but wrong when they began or ended
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
      engine_.release(turn);
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
