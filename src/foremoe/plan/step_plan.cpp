#include "foremoe/plan/step_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

static constexpr std::array<std::string_view, 4> kResidencyNames = {"static", "resident", "shared", "free"};

std::string_view to_string(Residency residency) { return kResidencyNames[static_cast<std::size_t>(residency)]; }

std::optional<Residency> residency_from_string(std::string_view text) {
  const auto* at = std::find(kResidencyNames.begin(), kResidencyNames.end(), text);
  if (at == kResidencyNames.end()) return std::nullopt;
  return static_cast<Residency>(at - kResidencyNames.begin());
}

ExecutionOrder make_execution_order(int num_micro_steps, int in_flight) {
  if (num_micro_steps < 0 || in_flight < 1) throw InputError({.field = "in_flight"}, "must be at least 1");
  ExecutionOrder order{.num_micro_steps = num_micro_steps, .in_flight = in_flight};
  order.forward.resize(num_micro_steps);
  order.backward.resize(num_micro_steps);
  const auto append = [&](int m, Pass pass) {
    const EventId event{order.micro_step.size()};
    order.micro_step.emplace_back(m);
    order.pass.push_back(pass);
    (pass == Pass::kForward ? order.forward : order.backward)[m] = event;
  };
  if (in_flight == 1) {
    for (int m = 0; m < num_micro_steps; ++m) append(m, Pass::kForward);
    order.backward = order.forward;
    return order;
  }
  const int lead = std::min(in_flight, num_micro_steps);  // forwards before the first backward
  for (int m = 0; m < lead; ++m) append(m, Pass::kForward);
  for (int m = 0; m < num_micro_steps; ++m) {
    append(m, Pass::kBackward);
    if (m + lead < num_micro_steps) append(m + lead, Pass::kForward);
  }
  return order;
}

int StepPlan::num_micro_steps() const {
  const auto last = std::max_element(event_micro_step.begin(), event_micro_step.end());
  return last == event_micro_step.end() ? 0 : last->value + 1;
}

int StepPlan::effective_in_flight() const { return std::min(in_flight, num_micro_steps()); }

void expect_homes(ArrayView<const RankId, 2> home, int num_ranks) {
  const int homes_per_rank = static_cast<int>(home.extent(1)) / num_ranks;
  std::vector<int> homes_on(static_cast<std::size_t>(num_ranks));
  for (std::size_t l = 0; l < home.extent(0); ++l) {
    std::ranges::fill(homes_on, 0);
    for (std::size_t e = 0; e < home.extent(1); ++e) {
      const int rank = home(l, e).value;
      const auto refuse = [&](const std::string& what) {
        throw InputError({.field = "homes", .index = fmt::format("[{}, {}]", l, e)}, what);
      };
      if (rank < 0 || rank >= num_ranks) refuse(fmt::format("rank {} is not in 0 … {}", rank, num_ranks - 1));
      if (++homes_on[static_cast<std::size_t>(rank)] > homes_per_rank) {
        refuse(fmt::format("rank {} has more than {} homes in this layer", rank, homes_per_rank));
      }
    }
  }
}

// Throws InputError for a slot whose expert or tokens are out of range, and for one that disagrees with the homes.
static void expect_valid_slots(const StepPlan& plan) {
  const std::size_t layers = plan.slot_expert.extent(1);
  const std::size_t ranks = plan.slot_expert.extent(2);
  const std::size_t slots = plan.slot_expert.extent(3);
  const std::size_t experts = plan.home.extent(1);
  const std::span<const ExpertId> held = plan.slot_expert.flat();
  const std::span<const Tokens> quotas = plan.slot_tokens.flat();
  for (std::size_t i = 0; i < held.size(); ++i) {
    const std::size_t slot = i % slots;
    const auto refuse = [&](const char* field, const std::string& what) {
      const std::size_t row = i / slots;
      throw InputError(
          {.field = field,
           .index = fmt::format("[{}, {}, {}, {}]", row / ranks / layers, row / ranks % layers, row % ranks, slot)},
          what);
    };
    if (quotas[i].value < 0 || quotas[i].value > kMaxTokensPerLayer) {
      refuse("slot_tokens", fmt::format("{} tokens, expected 0 to {}", quotas[i].value, kMaxTokensPerLayer));
    }
    const ExpertId e = held[i];
    if (e == kNoExpert) continue;
    if (e.value < 0 || e.index() >= experts) {
      refuse("slot_expert", fmt::format("expert {} is not in 0 … {}", e.value, experts - 1));
    }
    const std::size_t rank = i / slots % ranks;
    const bool is_home = plan.home(i / slots / ranks % layers, e).index() == rank;
    if (plan.can_train() && is_home != (slot < experts / ranks)) {
      refuse("slot_expert",
             fmt::format("expert {} of rank {} {} home", e.value, rank, is_home ? "is at" : "has another"));
    }
  }
}

void expect_valid(const StepPlan& plan) {
  const std::size_t events = plan.slot_expert.extent(0);
  const std::size_t layers = plan.slot_expert.extent(1);
  const std::size_t ranks = plan.slot_expert.extent(2);
  const std::size_t slots = plan.slot_expert.extent(3);
  const auto expect = [&](bool good, const char* field, const char* what) {
    if (good) return;
    throw InputError({.field = field}, fmt::format("does not fit a plan of [{}] events, layers, ranks and slots: {}",
                                                   fmt::join(plan.slot_expert.shape(), ", "), what));
  };
  const std::size_t experts = plan.home.extent(1);
  expect(ranks >= 1 && ranks <= kMaxRanks && events <= kMaxLoadCells, "slot_expert", "it has no rank, or too many");
  expect(plan.in_flight >= 1, "in_flight", "expected 1 or more");
  expect(plan.ranks_per_node >= 1, "ranks_per_node", "expected 1 or more");
  expect(plan.home.extent(0) == layers && experts >= 1 && experts <= kMaxExperts && experts % ranks == 0, "home",
         "expected [layers, experts], a multiple of the ranks");
  expect(plan.guest_slots >= 0 && slots == experts / ranks + static_cast<std::size_t>(plan.guest_slots), "guest_slots",
         "expected homes and guest slots to be all slots");
  expect(plan.slot_tokens.shape() == plan.slot_expert.shape(), "slot_tokens", "it has another shape");
  const ExecutionOrder order =
      make_execution_order(static_cast<int>(plan.in_flight == 1 ? events : events / 2), plan.in_flight);
  expect(order.micro_step.size() == events && plan.event_micro_step == order.micro_step, "event_micro_step",
         "it is not the execution order of in_flight");
  expect(plan.event_pass == order.pass, "event_pass", "it is not the execution order of in_flight");
  const std::array pairs{static_cast<std::size_t>(order.num_micro_steps), layers};
  expect(plan.max_load.empty() || plan.max_load.shape() == pairs, "max_load", "expected [micro_steps, layers]");
  expect(plan.lower_bound.empty() || plan.lower_bound.shape() == pairs, "lower_bound",
         "expected [micro_steps, layers]");
  expect_homes(plan.home, plan.num_ranks());
  expect_valid_slots(plan);
}

void expect_valid(const StepPlan& plan, const LoadTable& load) {
  expect_valid(plan);
  expect_valid(load, load.name);
  const std::array<std::size_t, 4> expected{static_cast<std::size_t>(plan.num_micro_steps()),
                                            plan.slot_expert.extent(1), plan.slot_expert.extent(2),
                                            plan.home.extent(1)};
  if (load.load.shape() == expected) return;
  throw InputError({.file = load.name, .field = "load"},
                   fmt::format("has shape [{}], but the plan is for [{}]", fmt::join(load.load.shape(), ", "),
                               fmt::join(expected, ", ")));
}

StepPlan empty_plan(StepPlan header, const LoadTable& load) {
  const auto& [micro_steps, layers, ranks, experts] = load.load.shape();
  const std::size_t slots = experts / ranks + static_cast<std::size_t>(header.guest_slots);
  ExecutionOrder order = make_execution_order(load.num_micro_steps(), header.in_flight);
  const std::array<std::size_t, 4> shape = {order.micro_step.size(), layers, ranks, slots};
  StepPlan plan = std::move(header);
  plan.ranks_per_node = load.ranks_per_node;
  plan.load_digest = load_digest(load);
  plan.slot_expert = Array<ExpertId, 4>(shape, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(shape);
  plan.event_micro_step = std::move(order.micro_step);
  plan.event_pass = std::move(order.pass);
  plan.home = Array<RankId, 2>({layers, experts});
  plan.max_load = Array<Tokens, 2>({micro_steps, layers});
  plan.lower_bound = Array<Tokens, 2>({micro_steps, layers});
  return plan;
}

static Array<Tokens, 2> first_of(const Array<Tokens, 2>& figures, std::size_t micro_steps, std::size_t layers) {
  if (figures.empty()) return {};
  Array<Tokens, 2> first({micro_steps, layers});
  for (std::size_t m = 0; m < micro_steps; ++m) std::ranges::copy(figures.row(m).first(layers), first.row(m).begin());
  return first;
}

StepPlan take_first(const StepPlan& plan, const LoadTable& part) {
  expect_valid(plan);
  if (part.num_layers() > plan.num_layers() || part.num_micro_steps() > plan.num_micro_steps() ||
      part.num_ranks() != plan.num_ranks() || part.num_experts() != plan.num_experts()) {
    throw InputError({.file = part.name, .field = "load"},
                     fmt::format("has shape [{}], which the plan of {} micro-steps, {} layers, {} ranks and {} experts "
                                 "does not contain",
                                 fmt::join(part.load.shape(), ", "), plan.num_micro_steps(), plan.num_layers(),
                                 plan.num_ranks(), plan.num_experts()));
  }
  const auto layers = static_cast<std::size_t>(part.num_layers());
  const auto micro_steps = static_cast<std::size_t>(part.num_micro_steps());
  std::vector<std::size_t> events;
  for (std::size_t e = 0; e < plan.event_micro_step.size(); ++e) {
    if (plan.event_micro_step[e].index() < micro_steps) events.push_back(e);
  }
  StepPlan first = plan;
  first.load_digest = load_digest(part);
  const std::array<std::size_t, 4> shape = {events.size(), layers, plan.slot_expert.extent(2),
                                            plan.slot_expert.extent(3)};
  first.slot_expert = Array<ExpertId, 4>(shape);
  first.slot_tokens = Array<Tokens, 4>(shape);
  first.event_micro_step.clear();
  first.event_pass.clear();
  for (std::size_t e = 0; e < events.size(); ++e) {
    first.event_micro_step.push_back(plan.event_micro_step[events[e]]);
    first.event_pass.push_back(plan.event_pass[events[e]]);
    for (std::size_t l = 0; l < layers; ++l) {
      std::ranges::copy(plan.slot_expert[events[e]][l].flat(), first.slot_expert[e][l].flat().begin());
      std::ranges::copy(plan.slot_tokens[events[e]][l].flat(), first.slot_tokens[e][l].flat().begin());
    }
  }
  first.home = Array<RankId, 2>({layers, plan.home.extent(1)});
  std::ranges::copy(plan.home.flat().first(first.home.size()), first.home.flat().begin());
  const bool moved = homes_digest(plan.home) != plan.homes_digest;
  if (layers != plan.home.extent(0)) first.homes_digest = moved ? "" : homes_digest(first.home);
  first.max_load = first_of(plan.max_load, micro_steps, layers);
  first.lower_bound = first_of(plan.lower_bound, micro_steps, layers);
  return first;
}

Array<Tokens, 3> planned_loads(const StepPlan& plan) {
  expect_valid(plan);
  Array<Tokens, 3> loads({static_cast<std::size_t>(plan.num_micro_steps()), static_cast<std::size_t>(plan.num_layers()),
                          static_cast<std::size_t>(plan.num_ranks())});
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        const auto quotas = plan.slot_tokens.row(t, l, r);
        loads(plan.event_micro_step[static_cast<std::size_t>(t)], l, r) =
            std::accumulate(quotas.begin(), quotas.end(), Tokens{});
      }
    }
  }
  return loads;
}

std::optional<double> imbalance(std::span<const Tokens> rank_loads) {
  const Tokens total = std::accumulate(rank_loads.begin(), rank_loads.end(), Tokens{});
  if (total == Tokens{0}) return std::nullopt;
  return static_cast<double>(std::ranges::max(rank_loads).value) * static_cast<double>(rank_loads.size()) /
         static_cast<double>(total.value);
}

std::vector<SlotId> home_slots(std::span<const RankId> home) {
  std::vector<int> next;  // [rank], slot
  std::vector<SlotId> slots;
  for (const RankId rank : home) {
    if (rank.index() >= next.size()) next.resize(rank.index() + 1);
    slots.push_back(SlotId{next[rank.index()]++});
  }
  return slots;
}

std::span<const Copy> CopyFinder::into(EventId event, RankId rank) {
  copies_.clear();
  for (int s = 0; s < plan_.num_slots(); ++s) {
    const ExpertId e = plan_.slot_expert(event, layer_, rank, s);
    if (e == kNoExpert) continue;
    const bool fetched = plan_.residency == Residency::kShared
                             ? plan_.home(layer_, e) != rank && plan_.slot_tokens(event, layer_, rank, s) > Tokens{0}
                             : !held_before(e, event, rank);
    if (fetched) copies_.push_back({e, SlotId{s}});
  }
  return copies_;
}

bool CopyFinder::held_before(ExpertId e, EventId event, RankId rank) const {
  if (event == EventId{0}) return plan_.home(layer_, e) == rank;
  const std::span<const ExpertId> before = plan_.slot_expert.row(event.value - 1, layer_, rank);
  return std::ranges::find(before, e) != before.end();
}

}  // namespace foremoe
