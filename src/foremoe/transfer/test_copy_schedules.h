#pragma once

// Schedules of copies for tests of the engine, made here, by nothing of the product.

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/transfer/transfer_schedule.h"

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

// Orders the copies and fills in what follows from them. Arenas hold what copies of the host path fetch, and, where
// `everything`, all other copied experts too.
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

// Every guest slot holds an expert from elsewhere, a new one about every other micro-step.
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

}  // namespace foremoe::test
