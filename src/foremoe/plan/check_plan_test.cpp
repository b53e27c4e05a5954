#include "foremoe/plan/check_plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "foremoe/plan/test_plans.h"
#include "foremoe/plan/test_traces.h"

namespace foremoe {
namespace {

using enum ViolationKind;

std::string first_message(const CheckReport& report) {
  if (report.violations.empty()) return "no violation";
  return to_json(report.violations.front()).dump();
}

std::int64_t count(const CheckReport& report, ViolationKind kind) {
  return report.num_of_kind[static_cast<std::size_t>(kind)];
}

// ---- good plans pass ----

struct GoodPlan {
  test::PlanShape shape;
  test::Shape load;
};

void PrintTo(const GoodPlan& good, std::ostream* out) {
  *out << fmt::format("{}G{}K{}R{}", to_string(good.shape.residency), good.shape.guest_slots, good.shape.in_flight,
                      good.load.ranks);
}

class CheckGoodPlan : public testing::TestWithParam<GoodPlan> {};

TEST_P(CheckGoodPlan, FindsNothingWrongAndTheSameFigures) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const LoadTable load = test::random_load(GetParam().load, seed);
    const StepPlan plan = test::random_plan(load, GetParam().shape, seed);
    const PlanFigures figures = plan_figures(plan, load);
    const CheckReport report = check_plan(plan, load, {.reported = &figures, .certificate_ranks = 8});
    EXPECT_TRUE(report.ok()) << first_message(report);
    EXPECT_TRUE(report.figures);
    EXPECT_THAT(report.not_checked, testing::IsEmpty());
  }
}

std::vector<GoodPlan> good_plans() {
  std::vector<GoodPlan> plans;
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
    for (const int guest_slots : {0, 1, 3}) {
      for (const int in_flight : {1, 2, 4}) {
        if (residency == Residency::kFree && in_flight > 1) continue;
        for (const test::Shape& load : {test::Shape{.micro_steps = 5}, test::Shape{.ranks = 1, .experts = 4},
                                        test::Shape{.ranks = 6, .experts = 12, .ranks_per_node = 2},
                                        test::Shape{.ranks = 3, .experts = 3, .ranks_per_node = 2}}) {
          plans.push_back({{residency, guest_slots, in_flight}, load});
        }
      }
    }
  }
  return plans;
}

INSTANTIATE_TEST_SUITE_P(OfEveryKind, CheckGoodPlan, testing::ValuesIn(good_plans()),
                         testing::PrintToStringParamName());

TEST(CheckPlan, RecomputesFiguresOfRowsWhereTheTokensAreKnown) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const test::BatchedTrace batched = test::random_trace(seed, 40);
    const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 2, .in_flight = 2}, seed);
    const FiguresOptions with_tokens{.trace = &batched.trace, .batching = &batched.batching};
    const PlanFigures figures = plan_figures(plan, batched.load, with_tokens);
    ASSERT_GT(figures.node_link_rows->max, 0);
    ASSERT_LT(figures.node_link_rows->max, figures.node_link_tokens.max);
    const CheckReport report =
        check_plan(plan, batched.load, {.trace = &batched.trace, .batching = &batched.batching, .reported = &figures});
    EXPECT_TRUE(report.ok()) << first_message(report);
    EXPECT_THAT(report.not_checked, testing::IsEmpty());
  }
}

TEST(CheckPlan, SaysSoWhenTheTraceIsNotTheOneBehindTheLoad) {
  const test::BatchedTrace batched = test::random_trace(1);
  const test::BatchedTrace other = test::random_trace(2);
  const StepPlan plan = test::random_plan(batched.load, {}, 1);
  const CheckReport report = check_plan(plan, batched.load, {.trace = &other.trace, .batching = &other.batching});
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.not_checked.size(), 1u);
  EXPECT_FALSE(report.figures->node_link_rows);
}

// ---- each way of spoiling a good plan is found and named ----

// A load in which every expert has tokens from every source, and a plan with a guest on every rank at every event.
struct Good {
  LoadTable load;
  StepPlan plan;

  Good(Residency residency, int in_flight) : load(test::random_load({.micro_steps = 4}, 11)) {
    for (Tokens& tokens : load.load.flat()) tokens += Tokens{20};
    for (std::uint64_t seed = 1; plan.slot_expert.empty() || !has_all_guests(); ++seed) {
      plan = test::random_plan(load, {residency, 1, in_flight}, seed);
    }
  }
  bool has_all_guests() const {
    for (int t = 0; t < plan.num_events(); ++t) {
      for (int l = 0; l < plan.num_layers(); ++l) {
        for (int r = 0; r < plan.num_ranks(); ++r) {
          if (plan.slot_expert(t, l, r, guest_slot()) == kNoExpert) return false;
          if (plan.slot_tokens(t, l, r, guest_slot()) == Tokens{0} && plan.in_flight == 1) return false;
        }
      }
    }
    return true;
  }
  int guest_slot() const { return plan.num_slots() - 1; }
};

struct Mutation {
  const char* name;
  ViolationKind kind;
  Residency residency;
  int in_flight;
  void (*spoil)(Good&);
};

void PrintTo(const Mutation& mutation, std::ostream* out) { *out << mutation.name; }

constexpr int kLayer = 1;
constexpr int kRank = 2;

ExpertId absent_expert(const Good& good, int t) {
  for (int e = 0;; ++e) {
    if (std::ranges::count(good.plan.slot_expert.row(t, kLayer, kRank), ExpertId{e}) == 0) return ExpertId{e};
  }
}

const Mutation kMutations[] = {
    {"WrongRankCount", kShape, Residency::kResident, 1, [](Good& g) { g.load = fold_ranks(g.load, 2); }},
    {"MissingBounds", kShape, Residency::kResident, 1,
     [](Good& g) {
       g.plan.max_load = Array<Tokens, 2>({1, 2});
     }},
    {"WrongGuestSlots", kShape, Residency::kResident, 1, [](Good& g) { g.plan.guest_slots = 2; }},
    {"MissingEvent", kShape, Residency::kResident, 1, [](Good& g) { g.plan.event_pass.pop_back(); }},
    {"NoNodes", kShape, Residency::kResident, 1, [](Good& g) { g.plan.ranks_per_node = 0; }},
    {"SwappedEvents", kEvents, Residency::kResident, 1,
     [](Good& g) { std::swap(g.plan.event_micro_step[0], g.plan.event_micro_step[1]); }},
    {"PassesTurnedRound", kEvents, Residency::kResident, 2, [](Good& g) { g.plan.event_pass[2] = Pass::kForward; }},
    {"OtherOrder", kEvents, Residency::kResident, 2, [](Good& g) { g.plan.in_flight = 3; }},
    {"OtherNumberOfEvents", kEvents, Residency::kResident, 2, [](Good& g) { g.plan.in_flight = 1; }},
    {"WrongDigest", kDigest, Residency::kResident, 1,
     [](Good& g) { g.plan.load_digest.front() = g.plan.load_digest.front() == '0' ? '1' : '0'; }},
    {"OptionsThatAreNoObject", kOptions, Residency::kResident, 1, [](Good& g) { g.plan.options = "[1"; }},
    {"NegativeOption", kOptions, Residency::kResident, 1, [](Good& g) { g.plan.options = R"({"rehome": -1})"; }},
    {"NestedOption", kOptions, Residency::kResident, 1, [](Good& g) { g.plan.options = R"({"rehome": [[1]]})"; }},
    {"HomeOutOfRange", kHomes, Residency::kResident, 1, [](Good& g) { g.plan.home(kLayer, 3) = RankId{4}; }},
    {"TooManyHomesOnARank", kHomes, Residency::kResident, 1, [](Good& g) { g.plan.home(kLayer, 0) = RankId{3}; }},
    {"MovedHomes", kHomeMoves, Residency::kResident, 1,
     [](Good& g) { std::swap(g.plan.home(kLayer, 0), g.plan.home(kLayer, 7)); }},
    {"MovedHomesBeyondRehome", kHomeMoves, Residency::kFree, 1,
     [](Good& g) {
       g.plan.options = R"({"rehome": 1})";
       std::swap(g.plan.home(kLayer, 0), g.plan.home(kLayer, 7));
     }},
    {"UnknownExpert", kUnknownExpert, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_expert(2, kLayer, kRank, 0) = ExpertId{8}; }},
    {"NegativeExpert", kUnknownExpert, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_expert(2, kLayer, kRank, 0) = ExpertId{-2}; }},
    {"SwappedHomeSlots", kHomeSlots, Residency::kResident, 1,
     [](Good& g) {
       std::swap(g.plan.slot_expert(2, kLayer, kRank, 0), g.plan.slot_expert(2, kLayer, kRank, 1));
       std::swap(g.plan.slot_tokens(2, kLayer, kRank, 0), g.plan.slot_tokens(2, kLayer, kRank, 1));
     }},
    {"DroppedHome", kHomeSlots, Residency::kStatic, 1,
     [](Good& g) { g.plan.slot_expert(2, kLayer, kRank, 0) = kNoExpert; }},
    {"HomeSwappedWithAGuest", kHomeSlots, Residency::kShared, 1,
     [](Good& g) {
       std::swap(g.plan.slot_expert(2, kLayer, kRank, 0), g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()));
     }},
    {"ExpertTwiceOnARank", kDuplicate, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()) = g.plan.slot_expert(2, kLayer, kRank, 0); }},
    {"NoReplicaLeft", kNoReplica, Residency::kFree, 1,
     [](Good& g) {
       for (int r = 0; r < 4; ++r) {
         for (ExpertId& e : g.plan.slot_expert.row(2, kLayer, r)) {
           if (e == ExpertId{5}) e = kNoExpert;
         }
       }
     }},
    {"StayingExpertMoved", kMovedSlot, Residency::kFree, 1,
     [](Good& g) {
       std::swap(g.plan.slot_expert(2, kLayer, 3, 0), g.plan.slot_expert(2, kLayer, 3, 1));
       std::swap(g.plan.slot_tokens(2, kLayer, 3, 0), g.plan.slot_tokens(2, kLayer, 3, 1));
     }},
    {"HomesOutOfOrderAtFirst", kMovedSlot, Residency::kFree, 1,
     [](Good& g) {
       for (int t = 0; t < g.plan.num_events(); ++t) {
         std::swap(g.plan.slot_expert(t, kLayer, 3, 0), g.plan.slot_expert(t, kLayer, 3, 1));
         std::swap(g.plan.slot_tokens(t, kLayer, 3, 0), g.plan.slot_tokens(t, kLayer, 3, 1));
       }
     }},
    {"GuestChangedInTheStep", kChangedGuest, Residency::kStatic, 1,
     [](Good& g) { g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()) = absent_expert(g, 2); }},
    {"GuestDroppedInTheStep", kChangedGuest, Residency::kStatic, 1,
     [](Good& g) { g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()) = kNoExpert; }},
    {"GuestsThatChangeCalledStatic", kChangedGuest, Residency::kResident, 1,
     [](Good& g) { g.plan.residency = Residency::kStatic; }},
    {"BackwardOfExpertsThatLeftHome", kForwardOnly, Residency::kResident, 2,
     [](Good& g) { g.plan.residency = Residency::kFree; }},
    {"NegativeQuota", kQuota, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_tokens(2, kLayer, kRank, 0) = Tokens{-1}; }},
    {"QuotaTooLarge", kQuota, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_tokens(2, kLayer, kRank, 0) += Tokens{1}; }},
    {"QuotaBeyondAllLoad", kQuota, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_tokens(2, kLayer, kRank, 0) = Tokens{std::numeric_limits<std::int64_t>::max()}; }},
    {"QuotaMovedToAnotherExpert", kQuota, Residency::kResident, 1,
     [](Good& g) {
       g.plan.slot_tokens(2, kLayer, kRank, g.guest_slot()) -= Tokens{1};
       g.plan.slot_tokens(2, kLayer, kRank, 0) += Tokens{1};
     }},
    {"DroppedReplica", kQuota, Residency::kResident, 1,
     [](Good& g) {
       g.plan.slot_expert(3, kLayer, kRank, g.guest_slot()) = kNoExpert;
       g.plan.slot_tokens(3, kLayer, kRank, g.guest_slot()) = Tokens{0};
     }},
    {"QuotaOnAnEmptySlot", kQuota, Residency::kResident, 1,
     [](Good& g) { g.plan.slot_expert(3, kLayer, kRank, g.guest_slot()) = kNoExpert; }},
    {"PassesThatDiffer", kPasses, Residency::kStatic, 2,
     [](Good& g) {  // a token between a guest and its home, in the last backward only
       const int t = g.plan.num_events() - 1;
       const ExpertId guest = g.plan.slot_expert(t, kLayer, kRank, g.guest_slot());
       const RankId home = g.plan.home(kLayer, guest);
       Tokens& at_guest = g.plan.slot_tokens(t, kLayer, kRank, g.guest_slot());
       Tokens& at_home = g.plan.slot_tokens(t, kLayer, home, guest.value % 2);
       (at_guest > Tokens{0} ? at_guest : at_home) -= Tokens{1};
       (at_guest > Tokens{0} ? at_home : at_guest) += Tokens{1};
     }},
    {"CopiesIntoARank", kCopiesPerRank, Residency::kResident, 1,
     [](Good& g) { g.plan.options = R"({"max-copies-per-rank": 0})"; }},
    {"CopiesIntoARankWhenFree", kCopiesPerRank, Residency::kFree, 1,
     [](Good& g) { g.plan.options = R"({"max-copies-per-rank": 0})"; }},
    {"CopiesOfAShared", kCopiesPerRank, Residency::kShared, 1,
     [](Good& g) { g.plan.options = R"({"max-copies-per-rank": 0})"; }},
    {"CopiesFromASource", kCopiesPerSource, Residency::kResident, 1,
     [](Good& g) { g.plan.options = R"({"max-copies-per-source": 0})"; }},
    {"TokensPerGuest", kTokensPerGuest, Residency::kResident, 1,
     [](Good& g) { g.plan.options = R"({"min-tokens-per-guest": 100000})"; }},
    {"WrongMaxLoad", kMaxLoad, Residency::kResident, 1, [](Good& g) { g.plan.max_load(2, kLayer) += Tokens{1}; }},
    {"QuotaMovedBetweenReplicas", kMaxLoad, Residency::kResident, 1,
     [](Good& g) {  // from every guest to its home: the sums stay right
       for (int r = 0; r < 4; ++r) {
         const ExpertId guest = g.plan.slot_expert(2, kLayer, r, g.guest_slot());
         Tokens& at_guest = g.plan.slot_tokens(2, kLayer, r, g.guest_slot());
         g.plan.slot_tokens(2, kLayer, g.plan.home(kLayer, guest), guest.value % 2) += at_guest;
         at_guest = Tokens{0};
       }
     }},
    {"LowerBoundBelowTheMean", kLowerBound, Residency::kResident, 1,
     [](Good& g) { g.plan.lower_bound(2, kLayer) -= Tokens{1}; }},
    {"LowerBoundAboveTheLoad", kLowerBound, Residency::kResident, 2,
     [](Good& g) { g.plan.lower_bound(2, kLayer) = g.plan.max_load(2, kLayer) + Tokens{1}; }},
    {"LowerBoundThatThePlacementBeats", kLowerBound, Residency::kResident, 1,
     [](Good& g) { g.plan.lower_bound(2, kLayer) = g.plan.max_load(2, kLayer); }},
};

class CheckSpoiledPlan : public testing::TestWithParam<Mutation> {};

TEST_P(CheckSpoiledPlan, NamesTheRuleThatIsBroken) {
  const Mutation& mutation = GetParam();
  Good good(mutation.residency, mutation.in_flight);
  const CheckOptions options{.certificate_ranks = 4};
  ASSERT_TRUE(check_plan(good.plan, good.load, options).ok()) << first_message(check_plan(good.plan, good.load));
  mutation.spoil(good);
  const CheckReport report = check_plan(good.plan, good.load, options);
  EXPECT_GT(count(report, mutation.kind), 0) << first_message(report);
  for (const Violation& violation : report.violations) EXPECT_FALSE(violation.message.empty());
}

INSTANTIATE_TEST_SUITE_P(With, CheckSpoiledPlan, testing::ValuesIn(kMutations), testing::PrintToStringParamName());

TEST(CheckPlan, NoticesEveryQuotaAndEveryHomeThatChangesByOne) {
  const Good good(Residency::kResident, 2);
  for (std::size_t i = 0; i < good.plan.slot_tokens.size(); ++i) {
    for (const int change : {-1, 1}) {
      StepPlan plan = good.plan;
      plan.slot_tokens.flat()[i] += Tokens{change};
      EXPECT_GT(count(check_plan(plan, good.load), kQuota), 0) << i;
    }
  }
  for (std::size_t i = 0; i < good.plan.home.size(); ++i) {
    StepPlan plan = good.plan;
    plan.home.flat()[i] = RankId{(plan.home.flat()[i].value + 1) % 4};
    EXPECT_GT(count(check_plan(plan, good.load), kHomes), 0) << i;
  }
}

// ---- what a violation says ----

TEST(CheckPlan, SaysWhereTheViolationIs) {
  Good good(Residency::kResident, 1);
  const ExpertId expert = good.plan.slot_expert(2, kLayer, kRank, 1);
  good.plan.slot_tokens(2, kLayer, kRank, 1) = Tokens{-7};
  const CheckReport report = check_plan(good.plan, good.load);
  ASSERT_FALSE(report.ok());
  const Violation& violation = report.violations.front();
  EXPECT_EQ(violation.kind, kQuota);
  EXPECT_EQ(violation.event, EventId{2});
  EXPECT_EQ(violation.layer, LayerId{kLayer});
  EXPECT_EQ(violation.rank, RankId{kRank});
  EXPECT_EQ(violation.slot, SlotId{1});
  EXPECT_EQ(violation.expert, expert);
  EXPECT_THAT(violation.message, testing::HasSubstr("-7"));
  const auto json = to_json(report);
  EXPECT_EQ(json["ok"], false);
  EXPECT_EQ(json["violations"][0]["kind"], "quota");
  EXPECT_EQ(json["violations"][0]["event"], 2);
}

TEST(CheckPlan, ListsAFewViolationsAndCountsAll) {
  Good good(Residency::kResident, 1);
  for (Tokens& quota : good.plan.slot_tokens.flat()) quota = Tokens{-1};
  const CheckReport report = check_plan(good.plan, good.load, {.max_listed = 3});
  EXPECT_EQ(report.violations.size(), 3u);
  EXPECT_GE(report.num_violations(), static_cast<std::int64_t>(good.plan.slot_tokens.size()));
}

TEST(CheckPlan, PermitsWhatTheOptionsPermit) {
  Good good(Residency::kResident, 1);
  for (const char* options : {R"({"max-copies-per-rank": 1, "max-copies-per-source": 4, "rehome": "free"})",
                              R"({"max-copies-per-rank": null, "max-copies-per-source": "none", "rehome": "none"})",
                              R"({"max-copies-per-source": 2147483647, "homes": "contiguous", "rehome": 0})"}) {
    good.plan.options = options;
    const CheckReport report = check_plan(good.plan, good.load);
    EXPECT_TRUE(report.ok()) << options << first_message(report);
  }
}

TEST(CheckPlan, HoldsHomeMovesAgainstTheGivenHomes) {
  Good good(Residency::kResident, 1);
  Array<RankId, 2> initial = good.plan.home;
  std::swap(initial(0, 0), initial(0, 7));
  for (const auto& [rehome, is_ok] : {std::pair{0, false}, {1, false}, {2, true}}) {
    good.plan.options = fmt::format(R"({{"rehome": {}, "homes": "last-step.safetensors"}})", rehome);
    const CheckReport report = check_plan(good.plan, good.load, {.initial_home = initial});
    EXPECT_EQ(report.ok(), is_ok) << rehome;
    EXPECT_EQ(count(report, kHomeMoves), is_ok ? 0 : 1);
  }
}

TEST(CheckPlan, SaysSoWhenItDoesNotKnowTheHomesBeforeThePlan) {
  Good good(Residency::kResident, 1);
  good.plan.options = R"({"homes": "last-step.safetensors"})";
  const CheckReport report = check_plan(good.plan, good.load);
  EXPECT_TRUE(report.ok());
  EXPECT_THAT(report.not_checked, testing::ElementsAre(testing::HasSubstr("last-step.safetensors")));
}

TEST(CheckPlan, FindsEveryFigureThatIsReportedWrongly) {
  const test::BatchedTrace batched = test::random_trace(1, 40);
  const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 1}, 1);
  const PlanFigures right = plan_figures(plan, batched.load, {.trace = &batched.trace, .batching = &batched.batching});
  void (*const spoils[])(PlanFigures&) = {
      [](PlanFigures& f) { f.policy = "eplb"; },
      [](PlanFigures& f) { f.residency = Residency::kShared; },
      [](PlanFigures& f) { ++f.events; },
      [](PlanFigures& f) { ++f.micro_steps; },
      [](PlanFigures& f) { ++f.layers; },
      [](PlanFigures& f) { ++f.ranks; },
      [](PlanFigures& f) { ++f.ranks_per_node; },
      [](PlanFigures& f) { ++f.experts; },
      [](PlanFigures& f) { ++f.guest_slots; },
      [](PlanFigures& f) { ++f.in_flight; },
      [](PlanFigures& f) { f.rho.mean *= 1.0001; },
      [](PlanFigures& f) { f.rho.p99 *= 1.0001; },
      [](PlanFigures& f) { f.rho.max *= 1.0001; },
      [](PlanFigures& f) { f.rho_lower_bound_mean *= 1.0001; },
      [](PlanFigures& f) { ++f.align; },
      [](PlanFigures& f) { f.rho_padded.mean *= 1.0001; },
      [](PlanFigures& f) { f.rho_padded.max *= 1.0001; },
      [](PlanFigures& f) { ++f.max_rank_tokens; },
      [](PlanFigures& f) { ++f.copies; },
      [](PlanFigures& f) { f.copies_per_layer_event = std::nan(""); },
      [](PlanFigures& f) { ++f.copies_max_per_rank; },
      [](PlanFigures& f) { ++f.home_moves; },
      [](PlanFigures& f) { f.guests_per_layer += 1; },
      [](PlanFigures& f) { f.node_link_tokens.mean += 1; },
      [](PlanFigures& f) { f.node_link_tokens.max += 1; },
      [](PlanFigures& f) { f.node_link_rows->mean += 1; },
      [](PlanFigures& f) { f.node_link_rows->max += 1; },
  };
  for (const auto spoil : spoils) {
    PlanFigures wrong = right;
    spoil(wrong);
    const CheckReport report =
        check_plan(plan, batched.load, {.trace = &batched.trace, .batching = &batched.batching, .reported = &wrong});
    EXPECT_EQ(count(report, kFigure), 1) << "figure " << &spoil - spoils;
  }
}

}  // namespace
}  // namespace foremoe
