// Tests that the checker finds, names and locates every corruption of a valid plan.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "foremoe/plan/plan_json.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/valid_plan.h"

namespace foremoe {
namespace {

using enum ViolationKind;
using test::count;
using test::first_message;
using test::ValidPlan;

struct Mutation {
  const char* name;
  ViolationKind kind;
  Residency residency;
  int in_flight;
  void (*spoil)(ValidPlan&);
};

void PrintTo(const Mutation& mutation, std::ostream* out) { *out << mutation.name; }

constexpr int kLayer = 1;
constexpr int kRank = 2;

ExpertId absent_expert(const ValidPlan& good, int t) {
  for (int e = 0;; ++e) {
    if (std::ranges::count(good.plan.slot_expert.row(t, kLayer, kRank), ExpertId{e}) == 0) return ExpertId{e};
  }
}

const Mutation kMutations[] = {
    {"WrongRankCount", kShape, Residency::kResident, 1, [](ValidPlan& g) { g.load = fold_ranks(g.load, 2); }},
    {"MissingBounds", kShape, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.plan.max_load = Array<Tokens, 2>({1, 2});
     }},
    {"WrongGuestSlots", kShape, Residency::kResident, 1, [](ValidPlan& g) { g.plan.guest_slots = 2; }},
    {"MissingEvent", kShape, Residency::kResident, 1, [](ValidPlan& g) { g.plan.event_pass.pop_back(); }},
    {"NoNodes", kShape, Residency::kResident, 1, [](ValidPlan& g) { g.plan.ranks_per_node = 0; }},
    {"SwappedEvents", kEvents, Residency::kResident, 1,
     [](ValidPlan& g) { std::swap(g.plan.event_micro_step[0], g.plan.event_micro_step[1]); }},
    {"PassesTurnedRound", kEvents, Residency::kResident, 2,
     [](ValidPlan& g) { g.plan.event_pass[2] = Pass::kForward; }},
    {"OtherOrder", kEvents, Residency::kResident, 2, [](ValidPlan& g) { g.plan.in_flight = 3; }},
    {"OtherNumberOfEvents", kEvents, Residency::kResident, 2, [](ValidPlan& g) { g.plan.in_flight = 1; }},
    {"WrongDigest", kDigest, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.load_digest.front() = g.plan.load_digest.front() == '0' ? '1' : '0'; }},
    {"OptionsThatAreNoObject", kOptions, Residency::kResident, 1, [](ValidPlan& g) { g.plan.options = "[1"; }},
    {"NegativeOption", kOptions, Residency::kResident, 1, [](ValidPlan& g) { g.plan.options = R"({"rehome": -1})"; }},
    {"NestedOption", kOptions, Residency::kResident, 1, [](ValidPlan& g) { g.plan.options = R"({"rehome": [[1]]})"; }},
    {"HomeOutOfRange", kHomes, Residency::kResident, 1, [](ValidPlan& g) { g.plan.home(kLayer, 3) = RankId{4}; }},
    {"TooManyHomesOnARank", kHomes, Residency::kResident, 1, [](ValidPlan& g) { g.plan.home(kLayer, 0) = RankId{3}; }},
    {"MovedHomes", kHomeMoves, Residency::kResident, 1,
     [](ValidPlan& g) { std::swap(g.plan.home(kLayer, 0), g.plan.home(kLayer, 7)); }},
    {"MovedHomesBeyondRehome", kHomeMoves, Residency::kFree, 1,
     [](ValidPlan& g) {
       g.record({{"rehome", 1}});
       std::swap(g.plan.home(kLayer, 0), g.plan.home(kLayer, 7));
     }},
    {"UnknownExpert", kUnknownExpert, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.slot_expert(2, kLayer, kRank, 0) = ExpertId{8}; }},
    {"NegativeExpert", kUnknownExpert, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.slot_expert(2, kLayer, kRank, 0) = ExpertId{-2}; }},
    {"SwappedHomeSlots", kHomeSlots, Residency::kResident, 1,
     [](ValidPlan& g) {
       std::swap(g.plan.slot_expert(2, kLayer, kRank, 0), g.plan.slot_expert(2, kLayer, kRank, 1));
       std::swap(g.plan.slot_tokens(2, kLayer, kRank, 0), g.plan.slot_tokens(2, kLayer, kRank, 1));
     }},
    {"DroppedHome", kHomeSlots, Residency::kStatic, 1,
     [](ValidPlan& g) { g.plan.slot_expert(2, kLayer, kRank, 0) = kNoExpert; }},
    {"HomeSwappedWithAGuest", kHomeSlots, Residency::kShared, 1,
     [](ValidPlan& g) {
       std::swap(g.plan.slot_expert(2, kLayer, kRank, 0), g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()));
     }},
    {"ExpertTwiceOnARank", kDuplicate, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()) = g.plan.slot_expert(2, kLayer, kRank, 0);
     }},
    {"NoReplicaLeft", kUnheldExpert, Residency::kFree, 1,
     [](ValidPlan& g) {
       for (int r = 0; r < 4; ++r) {
         for (ExpertId& e : g.plan.slot_expert.row(2, kLayer, r)) {
           if (e == ExpertId{5}) e = kNoExpert;
         }
       }
     }},
    {"StayingExpertMoved", kMovedSlot, Residency::kFree, 1,
     [](ValidPlan& g) {
       std::swap(g.plan.slot_expert(2, kLayer, 3, 0), g.plan.slot_expert(2, kLayer, 3, 1));
       std::swap(g.plan.slot_tokens(2, kLayer, 3, 0), g.plan.slot_tokens(2, kLayer, 3, 1));
     }},
    {"HomesOutOfOrderAtFirst", kMovedSlot, Residency::kFree, 1,
     [](ValidPlan& g) {
       for (int t = 0; t < g.plan.num_events(); ++t) {
         std::swap(g.plan.slot_expert(t, kLayer, 3, 0), g.plan.slot_expert(t, kLayer, 3, 1));
         std::swap(g.plan.slot_tokens(t, kLayer, 3, 0), g.plan.slot_tokens(t, kLayer, 3, 1));
       }
     }},
    {"GuestChangedInTheStep", kChangedGuest, Residency::kStatic, 1,
     [](ValidPlan& g) { g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()) = absent_expert(g, 2); }},
    {"GuestDroppedInTheStep", kChangedGuest, Residency::kStatic, 1,
     [](ValidPlan& g) { g.plan.slot_expert(2, kLayer, kRank, g.guest_slot()) = kNoExpert; }},
    {"GuestsThatChangeCalledStatic", kChangedGuest, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.residency = Residency::kStatic; }},
    {"BackwardOfExpertsThatLeftHome", kForwardOnly, Residency::kResident, 2,
     [](ValidPlan& g) { g.plan.residency = Residency::kFree; }},
    {"NegativeQuota", kQuota, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.slot_tokens(2, kLayer, kRank, 0) = Tokens{-1}; }},
    {"QuotaTooLarge", kQuota, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.slot_tokens(2, kLayer, kRank, 0) += Tokens{1}; }},
    {"QuotaBeyondAllLoad", kQuota, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.slot_tokens(2, kLayer, kRank, 0) = Tokens{std::numeric_limits<std::int64_t>::max()}; }},
    {"QuotaMovedToAnotherExpert", kQuota, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.plan.slot_tokens(2, kLayer, kRank, g.guest_slot()) -= Tokens{1};
       g.plan.slot_tokens(2, kLayer, kRank, 0) += Tokens{1};
     }},
    {"DroppedReplica", kQuota, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.plan.slot_expert(3, kLayer, kRank, g.guest_slot()) = kNoExpert;
       g.plan.slot_tokens(3, kLayer, kRank, g.guest_slot()) = Tokens{0};
     }},
    {"QuotaOnAnEmptySlot", kQuota, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.slot_expert(3, kLayer, kRank, g.guest_slot()) = kNoExpert; }},
    {"PassesThatDiffer", kPasses, Residency::kStatic, 2,
     [](ValidPlan& g) {  // moves a token between a guest and its home, in the last backward only
       const int t = g.plan.num_events() - 1;
       const ExpertId guest = g.plan.slot_expert(t, kLayer, kRank, g.guest_slot());
       const RankId home = g.plan.home(kLayer, guest);
       Tokens& at_guest = g.plan.slot_tokens(t, kLayer, kRank, g.guest_slot());
       Tokens& at_home = g.plan.slot_tokens(t, kLayer, home, guest.value % 2);
       (at_guest > Tokens{0} ? at_guest : at_home) -= Tokens{1};
       (at_guest > Tokens{0} ? at_home : at_guest) += Tokens{1};
     }},
    {"CopiesIntoARank", kCopiesPerRank, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.record({{"max-copies-per-rank", 0}});
     }},
    {"CopiesIntoARankWhenFree", kCopiesPerRank, Residency::kFree, 1,
     [](ValidPlan& g) {
       g.record({{"max-copies-per-rank", 0}});
     }},
    {"CopiesOfAShared", kCopiesPerRank, Residency::kShared, 1,
     [](ValidPlan& g) {
       g.record({{"max-copies-per-rank", 0}});
     }},
    {"CopiesFromASource", kCopiesPerSource, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.record({{"max-copies-per-source", 0}});
     }},
    {"TokensPerGuest", kTokensPerGuest, Residency::kResident, 1,
     [](ValidPlan& g) {
       g.record({{"min-tokens-per-guest", 100000}});
     }},
    {"WrongMaxLoad", kMaxLoad, Residency::kResident, 1, [](ValidPlan& g) { g.plan.max_load(2, kLayer) += Tokens{1}; }},
    {"QuotaMovedBetweenReplicas", kMaxLoad, Residency::kResident, 1,
     [](ValidPlan& g) {  // moves tokens from every guest to its home; the sums remain right
       for (int r = 0; r < 4; ++r) {
         const ExpertId guest = g.plan.slot_expert(2, kLayer, r, g.guest_slot());
         Tokens& at_guest = g.plan.slot_tokens(2, kLayer, r, g.guest_slot());
         g.plan.slot_tokens(2, kLayer, g.plan.home(kLayer, guest), guest.value % 2) += at_guest;
         at_guest = Tokens{0};
       }
     }},
    {"LowerBoundBelowTheMean", kLowerBound, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.lower_bound(2, kLayer) -= Tokens{1}; }},
    {"LowerBoundAboveTheLoad", kLowerBound, Residency::kResident, 2,
     [](ValidPlan& g) { g.plan.lower_bound(2, kLayer) = g.plan.max_load(2, kLayer) + Tokens{1}; }},
    {"LowerBoundThatIsNotTheMean", kLowerBound, Residency::kResident, 1,
     [](ValidPlan& g) { g.plan.lower_bound(2, kLayer) = g.plan.max_load(2, kLayer); }},
};

class CheckSpoiledPlan : public testing::TestWithParam<Mutation> {};

TEST_P(CheckSpoiledPlan, NamesTheBrokenRule) {
  const Mutation& mutation = GetParam();
  ValidPlan good(mutation.residency, mutation.in_flight);
  ASSERT_TRUE(check_plan(good.plan, good.load).ok()) << first_message(check_plan(good.plan, good.load));
  mutation.spoil(good);
  const CheckReport report = check_plan(good.plan, good.load);
  EXPECT_GT(count(report, mutation.kind), 0) << first_message(report);
  for (const Violation& violation : report.violations) EXPECT_FALSE(violation.message.empty());
}

INSTANTIATE_TEST_SUITE_P(With, CheckSpoiledPlan, testing::ValuesIn(kMutations), testing::PrintToStringParamName());

// ---- recorded options ----

// A plan that has a guest on every rank and records every option that a plan may record.
ValidPlan with_recorded_options() {
  ValidPlan good(Residency::kResident, 2);
  good.plan.options = nlohmann::json{
      {"guest-slots", 1},
      {"residency", "resident"},
      {"in-flight", 2},
      {"stages", "BLPT"},
      {"prefer", "balance"},
      {"tolerance", 0.006},
      {"min-tokens-per-guest", 0},
      {"max-copies-per-rank", 1},
      {"max-copies-per-source", "none"},
      {"rehome", 0},
      {"seed", 3},
      {"homes", "contiguous"},
      {"tokens-per-rank", 8192},
      {"layers", 2},
      {"micro-steps", 4}}.dump();
  return good;
}

TEST(CheckPlan, RejectsRecordedOptionsOfAWrongTypeOrOutOfRange) {
  ValidPlan good = with_recorded_options();
  ASSERT_TRUE(check_plan(good.plan, good.load).ok()) << first_message(check_plan(good.plan, good.load));
  const nlohmann::json right = nlohmann::json::parse(good.plan.options);
  const nlohmann::json wrong[] = {nullptr,
                                  true,
                                  -1,
                                  2.5,
                                  2147483648,
                                  (std::int64_t{1} << 40) + 1,
                                  "",
                                  "x",
                                  nlohmann::json::array({1}),
                                  nlohmann::json::object()};
  for (const auto& [option, value] : right.items()) {
    for (const nlohmann::json& mutation : wrong) {
      if (mutation == value) continue;
      if (option == "stages" && mutation == "") continue;       // an empty list of stages is valid
      if (option == "homes" && mutation.is_string()) continue;  // any file name is valid
      if (option == "seed" && mutation.is_number_integer() && mutation > 0) continue;
      if (option == "tokens-per-rank" && mutation == 2147483648) continue;
      nlohmann::json mutated = right;
      mutated[option] = mutation;
      good.plan.options = mutated.dump();
      EXPECT_EQ(count(check_plan(good.plan, good.load), kOptions), 1) << option << " recorded as " << mutation;
    }
  }
}

TEST(CheckPlan, ReportsMissingRecordedOptions) {
  ValidPlan good(Residency::kResident, 2);
  const nlohmann::json right = nlohmann::json::parse(good.plan.options);
  for (const char* option : {"guest-slots", "residency", "in-flight"}) {
    nlohmann::json without = right;
    without.erase(option);
    good.plan.options = without.dump();
    const CheckReport report = check_plan(good.plan, good.load);
    EXPECT_EQ(count(report, kOptions), 1);
    EXPECT_THAT(first_message(report), testing::HasSubstr(fmt::format("option {} is not recorded", option)));
  }
}

TEST(CheckPlan, RejectsRecordedOptionsThatContradictThePlan) {
  const ValidPlan good = with_recorded_options();
  const nlohmann::json right = nlohmann::json::parse(good.plan.options);
  // clang-format off
  const std::pair<const char*, nlohmann::json> contradictions[] = {
      {"guest-slots", 0}, {"guest-slots", 2}, {"guest-slots", 1.0}, {"residency", "static"}, {"residency", 1},
      {"in-flight", 1}, {"in-flight", 3}, {"stages", "TB"}, {"stages", "BB"}, {"prefer", "nothing"},
      {"tolerance", 1.01}, {"tolerance", "0.006"}, {"rehome", "none"}, {"seed", 1.5}, {"max-copies-per-rank", 0},
      {"max-copies-per-source", 0}, {"max-copies-per-source", "free"}, {"min-tokens-per-guest", 1000000}};
  // clang-format on
  for (const auto& [option, value] : contradictions) {
    StepPlan plan = good.plan;
    nlohmann::json mutated = right;
    mutated[option] = value;
    plan.options = mutated.dump();
    EXPECT_FALSE(check_plan(plan, good.load).ok()) << option << " recorded as " << value;
  }
}

TEST(CheckPlan, RejectsEveryLowerBoundExceptTheMean) {
  const ValidPlan good(Residency::kResident, 1);
  for (std::size_t i = 0; i < good.plan.lower_bound.size(); ++i) {
    const Tokens mean = good.plan.lower_bound.flat()[i];
    const Tokens largest = good.plan.max_load.flat()[i];
    ASSERT_LT(mean, largest);
    for (Tokens bound{mean.value - 1}; bound <= largest + Tokens{1}; bound += Tokens{1}) {
      StepPlan plan = good.plan;
      plan.lower_bound.flat()[i] = bound;
      EXPECT_EQ(count(check_plan(plan, good.load), kLowerBound), bound == mean ? 0 : 1) << bound.value;
    }
  }
}

TEST(CheckPlan, DetectsEveryQuotaOrHomeChangedByOne) {
  const ValidPlan good(Residency::kResident, 2);
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

TEST(CheckPlan, RejectsEveryWronglyReportedFigure) {
  const test::CountedTrace batched = test::random_trace(1, 40);
  const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 1}, 1);
  const PlanFigures right = plan_figures(plan, batched.load, {.tokens = &batched});
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
    const CheckReport report = check_plan(plan, batched.load, {.tokens = &batched, .reported = &wrong});
    EXPECT_EQ(count(report, kFigure), 1) << "figure " << &spoil - spoils;
  }
}

TEST(CheckPlan, CountsHomeMovesFromTheGivenHomes) {
  ValidPlan good(Residency::kResident, 1);
  Array<RankId, 2> initial = good.plan.home;
  std::swap(initial(0, 0), initial(0, 7));
  for (const auto& [rehome, is_ok] : {std::pair{0, false}, {1, false}, {2, true}}) {
    good.record({{"rehome", rehome}, {"homes", "last-step.safetensors"}});
    const CheckReport report = check_plan(good.plan, good.load, {.initial_home = initial});
    EXPECT_EQ(report.ok(), is_ok) << rehome;
    EXPECT_EQ(count(report, kHomeMoves), is_ok ? 0 : 1);
  }
}

TEST(CheckPlan, LocatesTheViolation) {
  ValidPlan good(Residency::kResident, 1);
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

TEST(CheckPlan, ListsAtMostMaxListedViolationsAndCountsAll) {
  ValidPlan good(Residency::kResident, 1);
  for (Tokens& quota : good.plan.slot_tokens.flat()) quota = Tokens{-1};
  const CheckReport report = check_plan(good.plan, good.load, {.max_listed = 3});
  EXPECT_EQ(report.violations.size(), 3u);
  EXPECT_GE(report.num_violations(), static_cast<std::int64_t>(good.plan.slot_tokens.size()));
}

}  // namespace
}  // namespace foremoe
