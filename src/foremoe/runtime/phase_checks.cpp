#include "foremoe/runtime/phase_checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"
#include "foremoe/runtime/run_memory.h"

namespace foremoe {
namespace {

void expect_float32(const ExpertLayout& layout, const ExpertShape& shape) {
  const std::int64_t elements[] = {std::int64_t{2} * shape.intermediate * shape.hidden,
                                   std::int64_t{shape.hidden} * shape.intermediate};
  if (layout.num_segments() != 2) {
    throw InputError({.field = "layout"}, fmt::format("{} segments, expected gate-up and down", layout.num_segments()));
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const Segment& segment = layout.segments()[i];
    if (segment.type != DataType::kFloat32) {
      throw InputError({.field = "layout", .index = segment.name},
                       fmt::format("{}, the arithmetic is float32", to_string(segment.type)));
    }
    if (segment.elements != elements[i]) {
      throw InputError({.field = "layout", .index = segment.name},
                       fmt::format("{} elements, hidden {} and intermediate {} need {}", segment.elements, shape.hidden,
                                   shape.intermediate, elements[i]));
    }
  }
}

void expect_fitting(const PhaseParts& parts, const Communicator& communicator) {
  const StepPlan& plan = parts.plan();
  const LoadTable& load = parts.load();
  if (parts.turns.rank() != communicator.rank()) {
    throw InputError({.field = "turns"}, fmt::format("of rank {}, the communicator is rank {}'s",
                                                     parts.turns.rank().value, communicator.rank().value));
  }
  const auto expect = [](const char* what, int of_plan, int other, const char* of) {
    if (of_plan == other) return;
    throw InputError({.field = "plan"}, fmt::format("{} {}, {} has {}", of_plan, what, of, other));
  };
  expect("ranks", plan.num_ranks(), communicator.num_ranks(), "the communicator");
  expect("ranks per node", plan.ranks_per_node, communicator.topology().ranks_per_node, "the communicator");
  expect("events", plan.num_events(), static_cast<int>(parts.schedule().order.first.extent(0)), "the schedule");
  const auto cells = static_cast<std::size_t>(load.num_micro_steps()) * static_cast<std::size_t>(load.num_layers());
  if (!parts.without_route.empty() && parts.without_route.size() != cells) {
    throw InputError({.field = "without_route"},
                     fmt::format("{} entries, expected {} micro-steps × layers", parts.without_route.size(), cells));
  }
}

[[noreturn]] void refuse(int layer, int slot, const std::string& what) {
  throw InputError({.field = "home experts", .index = fmt::format("[{}, {}]", layer, slot)}, what);
}

void expect_homes(const PhaseParts& parts, const HomeExperts& homes) {
  const int homes_per_rank = parts.plan().num_slots() - parts.plan().guest_slots;
  const auto layers = static_cast<std::size_t>(parts.plan().num_layers());
  const auto slots = static_cast<std::size_t>(homes_per_rank);
  if (homes.experts.shape() != Array<HomeExpert, 2>::Shape{layers, slots}) {
    throw InputError({.field = "home experts"},
                     fmt::format("{} × {}, expected {} layers × {} homes", homes.experts.extent(0),
                                 homes.experts.extent(1), layers, slots));
  }
  const std::size_t segments = parts.layout.num_segments();
  const bool backward = parts.schedule().phase == Phase::kPolicyUpdate;
  for (int l = 0; l < parts.plan().num_layers(); ++l) {
    for (int s = 0; s < homes_per_rank; ++s) {
      const HomeExpert& expert = homes.experts(l, s);
      if (expert.weights.size() != segments) {
        refuse(l, s, fmt::format("{} segments of weights, the layout has {}", expert.weights.size(), segments));
      }
      if (backward && expert.gradients.size() != segments) {
        refuse(l, s, fmt::format("{} segments of gradients, the layout has {}", expert.gradients.size(), segments));
      }
    }
  }
}

// Compares load, placement, schedule and version across ranks: every copy that one rank waits for must be sent by
// another. Excludes quotas, which may not be planned yet.
void expect_same_phase(const PhaseParts& parts, std::uint64_t version, Communicator& communicator) {
  const StepPlan& plan = parts.plan();
  const TransferSchedule& schedule = parts.schedule();
  std::vector<std::int64_t> words = {static_cast<std::int64_t>(version),
                                     static_cast<std::int64_t>(plan.residency),
                                     plan.guest_slots,
                                     plan.in_flight,
                                     static_cast<std::int64_t>(schedule.phase),
                                     schedule.depth,
                                     parts.load().top_k,
                                     parts.shape.hidden,
                                     parts.shape.intermediate};
  for (int e = 0; e < plan.num_events(); ++e) {
    words.push_back(plan.event_micro_step[static_cast<std::size_t>(e)].value);
    words.push_back(static_cast<std::int64_t>(plan.event_pass[static_cast<std::size_t>(e)]));
  }
  for (const ScheduledCopy& copy : schedule.copies) {
    words.insert(words.end(),
                 {copy.rank.value, copy.layer.value, copy.expert.value, copy.slot.value, copy.buffer, copy.opens.value,
                  copy.arrives.value, copy.closes.value, static_cast<std::int64_t>(copy.path), copy.source.value,
                  copy.staging, copy.source_buffer});
  }
  Sha256 hash;
  hash.update(std::as_bytes(std::span(words)));
  hash.update(std::as_bytes(plan.slot_expert.flat()));
  hash.update(std::as_bytes(plan.home.flat()));
  hash.update(std::as_bytes(parts.load().load.flat()));
  hash.update(std::as_bytes(std::span(parts.without_route)));
  const std::string mine = hash.hex();
  std::string all(mine.size() * static_cast<std::size_t>(communicator.num_ranks()), '\0');
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (int r = 0; r < communicator.num_ranks(); ++r) {
    if (all.compare(static_cast<std::size_t>(r) * mine.size(), mine.size(), mine) == 0) continue;
    throw InputError({.field = "plan"},
                     fmt::format("rank {} and rank {} hold different plans, loads, schedules or versions", r,
                                 communicator.rank().value));
  }
}

}  // namespace

void check_phase(const PhaseParts& parts, const HomeExperts& homes, std::uint64_t version, Communicator& communicator) {
  expect_float32(parts.layout, parts.shape);
  expect_fitting(parts, communicator);
  expect_homes(parts, homes);
  expect_same_phase(parts, version, communicator);
}

std::int64_t most_rows_computed(const PhaseParts& parts, RankId rank) {
  std::int64_t most = most_rows_at_homes(parts.load(), parts.plan().home)[rank.index()];
  for (int event = 0; event < parts.plan().num_events(); ++event) {
    for (int l = 0; l < parts.plan().num_layers(); ++l) {
      std::int64_t quota = 0;
      for (const Tokens tokens : parts.plan().slot_tokens.row(event, l, rank)) quota += tokens.value;
      most = std::max(most, quota);
    }
  }
  return most;
}

}  // namespace foremoe
