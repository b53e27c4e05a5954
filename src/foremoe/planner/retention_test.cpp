// Compares retention with all schedules of a small cache whose future requests are known.

#include "foremoe/planner/retention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe::planner {
namespace {

// Rank r is home to experts 4r … 4r + 3. Wanted guests are sets of the other experts, as bits.
constexpr int kHomes = 4;

struct Caches {
  LayerProblem problem;
  PlannerOptions options;
  ExecutionOrder order;
  std::vector<WantedGuests> wanted;  // [micro_step]
};

// wanted_sets[micro_step][rank]: bit i is the i-th expert whose home is elsewhere.
Caches caches_of(const std::vector<std::vector<unsigned>>& wanted_sets, const PlannerOptions& options) {
  const int micro_steps = static_cast<int>(wanted_sets.size());
  const int ranks = static_cast<int>(wanted_sets.front().size());
  const LoadTable load =
      test::load_of(ranks, test::ExpertLoads(micro_steps, std::vector<std::int64_t>(kHomes * ranks)));
  Caches caches{.problem = test::problem_of(load, options),
                .options = options,
                .order = make_execution_order(micro_steps, options.in_flight),
                .wanted = std::vector<WantedGuests>(micro_steps, WantedGuests(ranks))};
  for (int m = 0; m < micro_steps; ++m) {
    for (int r = 0; r < ranks; ++r) {
      for (int e = 0, bit = 0; e < kHomes * ranks; ++e) {
        if (e / kHomes != r && (wanted_sets[m][r] >> bit++ & 1U) != 0) caches.wanted[m][r].push_back(e);
      }
    }
  }
  return caches;
}

GuestSlots retain(const Caches& c) { return retain_guests(c.problem, c.options, c.order, c.wanted); }

std::vector<int> held(const GuestSlots& guests, int t, int r) {
  if (t < 0) return {};
  std::vector<int> experts;
  for (const int e : guests.row(t, r)) {
    if (e >= 0) experts.push_back(e);
  }
  std::ranges::sort(experts);
  return experts;
}

bool holds(const GuestSlots& guests, int t, int r, int expert) {
  const auto experts = held(guests, t, r);
  return std::ranges::binary_search(experts, expert);
}

std::vector<int> copied(const GuestSlots& guests, int t, int r) {
  std::vector<int> copies;
  for (const int e : held(guests, t, r)) {
    if (!holds(guests, t - 1, r, e)) copies.push_back(e);
  }
  return copies;
}

const std::vector<int>& wanted_at(const Caches& c, int t, int r) { return c.wanted[c.order.micro_step[t].value][r]; }

int num_copies(const Caches& c, const GuestSlots& guests) {
  int copies = 0;
  for (int t = 0; t < c.order.num_events(); ++t) {
    for (int r = 0; r < c.problem.num_ranks(); ++r) copies += static_cast<int>(copied(guests, t, r).size());
  }
  return copies;
}

int num_missing(const Caches& c, const GuestSlots& guests) {
  int missing = 0;
  for (int t = 0; t < c.order.num_events(); ++t) {
    for (int r = 0; r < c.problem.num_ranks(); ++r) {
      missing +=
          static_cast<int>(std::ranges::count_if(wanted_at(c, t, r), [&](int e) { return !holds(guests, t, r, e); }));
    }
  }
  return missing;
}

// Expects that guests are away from home, appear at most once per rank, and keep their slot while they stay.
void expect_orderly(const Caches& c, const GuestSlots& guests) {
  for (int t = 0; t < c.order.num_events(); ++t) {
    for (int r = 0; r < c.problem.num_ranks(); ++r) {
      const auto experts = held(guests, t, r);
      ASSERT_TRUE(std::ranges::adjacent_find(experts) == experts.end());
      for (int g = 0; g < c.problem.guest_slots; ++g) {
        const int e = guests(t, r, g);
        if (e < 0) continue;
        ASSERT_NE(c.problem.home[e], r);
        if (t > 0 && holds(guests, t - 1, r, e)) {
          ASSERT_EQ(guests(t - 1, r, g), e) << "expert " << e << " moved";
        }
      }
    }
  }
}

void expect_within_budgets(const Caches& c, const GuestSlots& guests) {
  for (int t = 0; t < c.order.num_events(); ++t) {
    std::vector<int> from(c.problem.num_ranks());
    for (int r = 0; r < c.problem.num_ranks(); ++r) {
      const auto copies = copied(guests, t, r);
      ASSERT_LE(std::ssize(copies), c.options.max_copies_per_rank.value_or(c.problem.guest_slots));
      for (const int e : copies) ++from[c.problem.home[e]];
    }
    for (const int copies : from) ASSERT_LE(copies, c.options.max_copies_per_source);
  }
}

// Cost of a schedule: missing guests first, then copies.
struct Cost {
  int missing = 0;
  int copies = 0;
  auto operator<=>(const Cost&) const = default;
};

// Minimum over all schedules of rank 0. A cache contains at most G of the four guests, and gains at most `max_copies`
// per event.
Cost brute_force(const Caches& c, int max_copies) {
  std::map<unsigned, Cost> least{{0U, Cost{}}};
  for (int t = 0; t < c.order.num_events(); ++t) {
    unsigned wanted = 0;
    for (const int e : wanted_at(c, t, 0)) wanted |= 1U << (e - kHomes);
    std::map<unsigned, Cost> next;
    for (unsigned now = 0; now < 1U << kHomes; ++now) {
      if (std::popcount(now) > c.problem.guest_slots) continue;
      for (const auto& [before, cost] : least) {
        if (std::popcount(now & ~before) > max_copies) continue;
        const Cost then{cost.missing + std::popcount(wanted & ~now), cost.copies + std::popcount(now & ~before)};
        const auto [at, fresh] = next.try_emplace(now, then);
        if (!fresh) at->second = std::min(at->second, then);
      }
    }
    least = std::move(next);
  }
  return std::ranges::min_element(least, {}, [](const auto& entry) { return entry.second; })->second;
}

// Visits all sequences of `micro_steps` sets of at most `guest_slots` of the four guests. Rank 1 needs none.
template <class Visit>
void for_all_wishes(int micro_steps, int guest_slots, const Visit& visit) {
  std::vector<unsigned> sets;
  for (unsigned set = 0; set < 1U << kHomes; ++set) {
    if (std::popcount(set) <= guest_slots) sets.push_back(set);
  }
  const auto kinds = static_cast<int>(sets.size());
  for (int n = 0; n < static_cast<int>(std::lround(std::pow(kinds, micro_steps))); ++n) {
    std::vector<std::vector<unsigned>> wishes;
    for (int m = 0, rest = n; m < micro_steps; ++m, rest /= kinds) wishes.push_back({sets[rest % kinds], 0});
    visit(wishes);
  }
}

class EverySmallCache : public testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(EverySmallCache, NeedsNoMoreCopiesThanTheBestSchedule) {
  const auto [in_flight, guest_slots, micro_steps] = GetParam();
  for_all_wishes(micro_steps, guest_slots, [&](const auto& wishes) {
    SCOPED_TRACE(testing::PrintToString(wishes));
    const Caches c = caches_of(wishes, {.guest_slots = guest_slots, .in_flight = in_flight});
    const GuestSlots guests = retain(c);
    expect_orderly(c, guests);
    ASSERT_EQ(num_missing(c, guests), 0);
    ASSERT_EQ(num_copies(c, guests), brute_force(c, guest_slots).copies);
  });
}

INSTANTIATE_TEST_SUITE_P(InFlightGuestSlotsMicroSteps, EverySmallCache,
                         testing::Values(std::tuple{1, 1, 5}, std::tuple{2, 1, 5}, std::tuple{4, 1, 5},
                                         std::tuple{1, 2, 3}, std::tuple{2, 2, 3}, std::tuple{4, 2, 3},
                                         std::tuple{1, 3, 3}, std::tuple{2, 3, 2}, std::tuple{4, 3, 3}));

// One copy per event, two guest slots. An earlier event can often make a copy that exceeds the current budget.
class EverySmallCacheOnABudget : public testing::TestWithParam<int> {};

TEST_P(EverySmallCacheOnABudget, RarelyMissesMoreGuestsThanTheBestSchedule) {
  int instances = 0;
  int least = 0;
  int missing = 0;
  int worse = 0;
  for_all_wishes(3, 2, [&](const auto& wishes) {
    SCOPED_TRACE(testing::PrintToString(wishes));
    const Caches c = caches_of(wishes, {.guest_slots = 2, .in_flight = GetParam(), .max_copies_per_rank = 1});
    const GuestSlots guests = retain(c);
    expect_orderly(c, guests);
    expect_within_budgets(c, guests);
    const int must = brute_force(c, 1).missing;
    const int does = num_missing(c, guests);
    ASSERT_GE(does, must);
    ++instances;
    least += must;
    missing += does;
    worse += does > must ? 1 : 0;
  });
  EXPECT_LE(missing, 1.25 * least);
  EXPECT_LE(worse, 0.16 * instances);
}

INSTANTIATE_TEST_SUITE_P(InFlight, EverySmallCacheOnABudget, testing::Values(1, 2, 4));

Caches random_caches(Random& random, const PlannerOptions& options, int ranks, int micro_steps) {
  std::vector<std::vector<unsigned>> wishes(micro_steps, std::vector<unsigned>(ranks));
  for (auto& of_ranks : wishes) {
    for (unsigned& set : of_ranks) {
      for (std::uint64_t n = random.below(options.guest_slots + 1); n > 0; --n) {
        set |= 1U << random.below(kHomes * (ranks - 1));
      }
    }
  }
  return caches_of(wishes, options);
}

TEST(RetainGuests, RespectsBothBudgetsAndMissesNoGuestWithoutThem) {
  Random random(1);
  for (int n = 0; n < 600; ++n) {
    PlannerOptions options{.guest_slots = 1 + static_cast<int>(random.below(4)), .in_flight = 1 << random.below(4)};
    Caches c = random_caches(random, options, 4, 8);
    const GuestSlots unlimited = retain(c);
    expect_orderly(c, unlimited);
    ASSERT_EQ(num_missing(c, unlimited), 0);
    if (random.below(2) == 0) c.options.max_copies_per_rank = static_cast<int>(random.below(options.guest_slots + 1));
    if (random.below(2) == 0) c.options.max_copies_per_source = static_cast<int>(random.below(4));
    const GuestSlots guests = retain(c);
    expect_orderly(c, guests);
    expect_within_budgets(c, guests);
  }
}

TEST(RetainGuests, CopiesNothingWhereABudgetIsZero) {
  Random random(2);
  for (const bool per_rank : {true, false}) {
    PlannerOptions options{.guest_slots = 2};
    (per_rank ? options.max_copies_per_rank.emplace() : options.max_copies_per_source) = 0;
    const Caches c = random_caches(random, options, 3, 6);
    EXPECT_EQ(num_copies(c, retain(c)), 0);
  }
}

// Micro-step 2 needs two guests, with one copy per event. An earlier event makes one of the copies, in a free slot.
TEST(RetainGuests, CopiesEarlierIfTheRanksBudgetIsSpent) {
  const Caches c = caches_of({{0, 0}, {0, 0}, {0b11, 0}}, {.guest_slots = 2, .max_copies_per_rank = 1});
  const GuestSlots guests = retain(c);
  EXPECT_EQ(num_missing(c, guests), 0);
  EXPECT_EQ(num_copies(c, guests), 2);
}

// The same for a budget per source: ranks 1 and 2 need an expert of rank 0 in the same micro-step.
TEST(RetainGuests, CopiesEarlierIfTheSourcesBudgetIsSpent) {
  const Caches c = caches_of({{0, 0, 0}, {0, 0b1, 0b1}}, {.guest_slots = 1, .max_copies_per_source = 1});
  const GuestSlots guests = retain(c);
  EXPECT_EQ(num_missing(c, guests), 0);
  expect_within_budgets(c, guests);
}

TEST(RetainGuests, KeepsAnUnneededGuestUntilItsSlotIsNeeded) {
  const Caches c = caches_of({{0b1, 0}, {0, 0}, {0b10, 0}, {0b1, 0}}, {.guest_slots = 2});
  const GuestSlots guests = retain(c);
  EXPECT_TRUE(holds(guests, 1, 0, kHomes));
  EXPECT_EQ(num_copies(c, guests), 2);
}

}  // namespace
}  // namespace foremoe::planner
