#include "foremoe/rollout/synthesis/synthesis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "foremoe/core/error.h"
#include "foremoe/rollout/synthesis/synthesis_request.h"
#include "foremoe/testing/load_figures.h"

namespace foremoe::testing {

using ::testing::HasSubstr;

const SynthesisOptions kSmall{.num_layers = 2,
                              .num_experts = 32,
                              .top_k = 4,
                              .num_micro_steps = 4,
                              .num_ranks = 4,
                              .tokens_per_rank = 512,
                              .seed = 3};

const std::vector<RoutingModel> kModels{ZipfRouting{},
                                        ZipfRouting{.skew = 0.5, .permute_probability = 0.5},
                                        DirichletRouting{},
                                        DirichletRouting{.concentration = 0.01, .sequence_concentration = 3},
                                        GrpoRouting{},
                                        GrpoRouting{.step_spread = 3, .group_spread = 2},
                                        StressWorkload::kHotExperts,
                                        StressWorkload::kRaggedSources};

std::vector<std::byte> bytes_of(const RoutingTrace& trace) {
  const std::size_t entries = static_cast<std::size_t>(trace.num_tokens * trace.num_layers * trace.top_k);
  return {trace.routes, trace.routes + entries * size_of(trace.type)};
}

TEST(Synthesis, TheSameSeedProducesTheSameBytes) {
  SynthesisOptions other = kSmall;
  other.seed = 4;
  for (const RoutingModel& model : kModels) {
    EXPECT_EQ(synthesize_load(kSmall, model).load, synthesize_load(kSmall, model).load);
    EXPECT_EQ(bytes_of(synthesize_trace(kSmall, model)), bytes_of(synthesize_trace(kSmall, model)));
    if (!std::holds_alternative<StressWorkload>(model)) {
      EXPECT_NE(synthesize_load(kSmall, model).load, synthesize_load(other, model).load) << describe(kSmall, model);
    }
  }
}

TEST(Synthesis, EveryTokenCountsTopKTimesWithoutRepeats) {
  for (const RoutingModel& model : kModels) {
    const LoadTable load = synthesize_load(kSmall, model);
    for (int m = 0; m < 4; ++m) {
      for (int l = 0; l < 2; ++l) {
        for (int r = 0; r < 4; ++r) {
          std::int64_t assignments = 0;
          for (const Tokens t : load.load.row(m, l, r)) assignments += t.value;
          const std::int64_t tokens = assignments / 4;
          EXPECT_EQ(assignments % 4, 0);
          for (const Tokens t : load.load.row(m, l, r)) EXPECT_LE(t.value, tokens) << describe(kSmall, model);
          if (!std::holds_alternative<StressWorkload>(model)) {
            EXPECT_EQ(tokens, 512);
          }
        }
      }
    }
  }
}

TEST(Synthesis, RowsOfATraceAreDistinctExpertsInRange) {
  for (const RoutingModel& model : kModels) {
    const RoutingTrace trace = synthesize_trace(kSmall, model);
    std::vector<ExpertId> row(4);
    for (std::int64_t t = 0; t < trace.num_tokens; ++t) {
      for (int l = 0; l < 2; ++l) {
        trace.route(t, LayerId{l}, row);
        const std::set<ExpertId> distinct(row.begin(), row.end());
        ASSERT_EQ(distinct.size(), 4);
        ASSERT_GE(distinct.begin()->value, 0);
        ASSERT_LT(distinct.rbegin()->value, 32);
      }
    }
  }
}

TEST(Synthesis, ATraceRecordsItsBatchingAndGroups) {
  const RoutingTrace trace = synthesize_trace(kSmall, GrpoRouting{});
  EXPECT_EQ(trace.num_sequences(), 4 * 4 * 2);
  EXPECT_EQ(trace.num_tokens, 4 * 4 * 512);
  EXPECT_EQ(trace.ranks, 4);
  EXPECT_EQ(trace.ranks_per_node, 4);
  EXPECT_EQ(trace.group_ids.size(), 32);
  EXPECT_EQ(trace.layer_ids.size(), 2);
  EXPECT_EQ(trace.type, RouteType::kU8);
  EXPECT_THAT(trace.origin, HasSubstr("grpo step_spread=0.7"));
  SynthesisOptions wide = kSmall;
  wide.num_experts = 256;
  EXPECT_EQ(synthesize_trace(wide, GrpoRouting{}).type, RouteType::kU16);
}

// Trace and load draw in different ways from the same probabilities: per expert, sums over the step agree within 10 %.
TEST(Synthesis, TraceAndLoadAgreeInExpectation) {
  SynthesisOptions options = kSmall;
  options.tokens_per_rank = 4096;
  for (const RoutingModel& model :
       {RoutingModel{ZipfRouting{}}, RoutingModel{GrpoRouting{}}, RoutingModel{DirichletRouting{.concentration = 2}}}) {
    const LoadTable load = synthesize_load(options, model);
    const LoadTable traced = counted(synthesize_trace(options, model), 4);
    for (int m = 0; m < 4; ++m) {
      const auto a = expert_loads(load, m, 1);
      const auto b = expert_loads(traced, m, 1);
      for (std::size_t e = 0; e < a.size(); ++e)
        EXPECT_NEAR(static_cast<double>(a[e]), static_cast<double>(b[e]), 0.1 * static_cast<double>(a[e]) + 100)
            << describe(options, model);
    }
  }
}

const ExpertGroups kTwoOfFour{.count = 4, .per_token = 2};

SynthesisOptions with_groups(SynthesisOptions options, const ExpertGroups& groups) {
  options.groups = groups;
  return options;
}

// Number of tokens of a trace with an expert in each group, and number of tokens with experts in n groups.
struct GroupsOfTokens {
  std::vector<int> with_group;
  std::map<std::size_t, int> of_groups;
};

GroupsOfTokens groups_of_tokens(const RoutingTrace& trace, const ExpertGroups& groups) {
  GroupsOfTokens result{.with_group = std::vector<int>(static_cast<std::size_t>(groups.count)), .of_groups = {}};
  std::vector<ExpertId> row(static_cast<std::size_t>(trace.top_k));
  for (std::int64_t t = 0; t < trace.num_tokens; ++t) {
    for (int l = 0; l < trace.num_layers; ++l) {
      trace.route(t, LayerId{l}, row);
      std::set<std::size_t> used;
      for (const ExpertId e : row) used.insert(e.index() / static_cast<std::size_t>(trace.num_experts / groups.count));
      for (const std::size_t g : used) ++result.with_group[g];
      ++result.of_groups[used.size()];
    }
  }
  return result;
}

TEST(GroupsOfExperts, TokensRespectTheGroupLimit) {
  for (const RoutingModel& model : kModels) {
    if (std::holds_alternative<StressWorkload>(model)) continue;
    const GroupsOfTokens limited =
        groups_of_tokens(synthesize_trace(with_groups(kSmall, kTwoOfFour), model), kTwoOfFour);
    EXPECT_GT(limited.of_groups.at(2), 0) << describe(kSmall, model);
    EXPECT_LE(limited.of_groups.rbegin()->first, 2) << describe(kSmall, model);
    for (const int tokens : limited.with_group) EXPECT_GT(tokens, 0) << describe(kSmall, model);
    EXPECT_GT(groups_of_tokens(synthesize_trace(kSmall, model), kTwoOfFour).of_groups.rbegin()->first, 2);
  }
}

TEST(GroupsOfExperts, ALoadIsTheSumOfItsTrace) {
  const SynthesisOptions options = with_groups(kSmall, kTwoOfFour);
  for (const RoutingModel& model : kModels) {
    if (std::holds_alternative<StressWorkload>(model)) continue;
    EXPECT_EQ(synthesize_load(options, model).load, counted(synthesize_trace(options, model), 4).load);
  }
}

TEST(GroupsOfExperts, RequiresBothGroupOptions) {
  const auto field_of = [](const SynthesisRequest& request) -> std::string {
    try {
      synthesis_options(request);
      return {};
    } catch (const InputError& error) {
      return error.where().field;
    }
  };
  SynthesisRequest request;
  EXPECT_EQ(field_of(request), "");
  request.expert_groups = 8;
  EXPECT_EQ(field_of(request), "groups_per_token");
  request.groups_per_token = 4;
  EXPECT_EQ(field_of(request), "");
  EXPECT_EQ(synthesis_options(request).groups, (ExpertGroups{.count = 8, .per_token = 4}));
  request.expert_groups.reset();
  EXPECT_EQ(field_of(request), "expert_groups");
}

TEST(GroupsOfExperts, TopKGroupsPerTokenAreNoLimit) {
  for (const ExpertGroups& groups : {ExpertGroups{.count = 8, .per_token = 4}, {.count = 2, .per_token = 2}}) {
    EXPECT_EQ(bytes_of(synthesize_trace(with_groups(kSmall, groups), GrpoRouting{})),
              bytes_of(synthesize_trace(kSmall, GrpoRouting{})));
  }
}

TEST(ZipfRouting, LoadsFollowThePowerLaw) {
  const SynthesisOptions options{
      .num_layers = 1, .num_experts = 32, .top_k = 1, .num_micro_steps = 2, .num_ranks = 8, .tokens_per_rank = 65536};
  const LoadTable table = synthesize_load(options, ZipfRouting{.skew = 0.8});
  auto loads = expert_loads(table, 0, 0);
  std::sort(loads.rbegin(), loads.rend());
  for (const std::size_t i : {1, 3, 7, 15, 31}) {
    const double expected = std::pow(static_cast<double>(i + 1), -0.8);
    EXPECT_NEAR(static_cast<double>(loads[i]) / static_cast<double>(loads[0]), expected, 0.03) << i;
  }
}

TEST(ZipfRouting, ZeroSkewIsUniform) {
  const SynthesisOptions options{
      .num_layers = 1, .num_experts = 32, .top_k = 2, .num_micro_steps = 1, .num_ranks = 8, .tokens_per_rank = 65536};
  EXPECT_LT(ratio(expert_loads(synthesize_load(options, ZipfRouting{.skew = 0}), 0, 0)), 1.03);
}

TEST(ZipfRouting, TheHottestExpertMovesOnlyWhenPermuted) {
  const auto hottest = [](double permute_probability) {
    SynthesisOptions options = kSmall;
    options.num_micro_steps = 40;
    const LoadTable table = synthesize_load(options, ZipfRouting{.permute_probability = permute_probability});
    int moves = 0;
    for (int m = 1; m < 40; ++m) {
      const auto before = expert_loads(table, m - 1, 0);
      const auto now = expert_loads(table, m, 0);
      const auto old_top = std::max_element(before.begin(), before.end()) - before.begin();
      moves += static_cast<double>(now[static_cast<std::size_t>(old_top)]) < 0.7 * static_cast<double>(largest(now));
    }
    return moves;
  };
  EXPECT_EQ(hottest(0), 0);
  EXPECT_GT(hottest(0.5), 8);
  EXPECT_LT(hottest(0.5), 30);
  EXPECT_GT(hottest(1), 30);
}

TEST(ZipfRouting, PopularityIsLimitedToOneOverTopK) {
  SynthesisOptions options = kSmall;
  options.tokens_per_rank = 4096;
  const LoadTable table = synthesize_load(options, ZipfRouting{.skew = 3});
  EXPECT_LE(largest(expert_loads(table, 0, 0)), 4 * 4096);  // an expert is chosen at most once per token
  EXPECT_GE(largest(expert_loads(table, 0, 0)), 4 * 4096 * 98 / 100);
}

TEST(DirichletRouting, SmallConcentrationIsSkewedAndLargeIsFlat) {
  SynthesisOptions options = kSmall;
  options.tokens_per_rank = 4096;
  const auto skew = [&](double concentration) {
    return ratio(expert_loads(synthesize_load(options, DirichletRouting{.concentration = concentration}), 0, 0));
  };
  EXPECT_LT(skew(1000), 1.2);
  EXPECT_GT(skew(1), 2);
  EXPECT_GT(skew(0.1), 6);
}

TEST(DirichletRouting, MicroStepsAreAlikeWithoutSequenceConcentration) {
  SynthesisOptions options = kSmall;
  options.tokens_per_rank = 16384;
  const auto change = [&](double sequence_concentration) {
    const LoadTable table = synthesize_load(
        options, DirichletRouting{.concentration = 1, .sequence_concentration = sequence_concentration});
    const auto a = expert_loads(table, 0, 0);
    const auto b = expert_loads(table, 1, 0);
    double difference = 0;
    for (std::size_t e = 0; e < a.size(); ++e) difference += std::abs(static_cast<double>(a[e] - b[e]));
    return difference / static_cast<double>(sum(a));
  };
  EXPECT_LT(change(0), 0.02);
  EXPECT_GT(change(5), 0.1);
}

// Parameters of the mild and the bursty table of 8 ranks, with mean imbalance ratios of 1.42 and 1.65.
TEST(GrpoRouting, ImbalanceMatchesTheReferenceTables) {
  const SynthesisOptions mild{.num_layers = 8, .seed = 1};
  SynthesisOptions bursty = mild;
  bursty.tokens_per_rank = 4096;
  bursty.sequences_per_rank = 1;
  bursty.group_size = 8;
  const double mild_rho = mean_rho(synthesize_load(mild, GrpoRouting{.group_spread = 0.5}));
  const double bursty_rho = mean_rho(synthesize_load(bursty, GrpoRouting{.group_spread = 1.0}));
  EXPECT_NEAR(mild_rho, 1.42, 0.15);
  EXPECT_NEAR(bursty_rho, 1.65, 0.2);
}

TEST(GrpoRouting, MicroStepsAreLessBalancedThanTheStep) {
  SynthesisOptions options{
      .num_layers = 4, .num_ranks = 16, .tokens_per_rank = 4096, .sequences_per_rank = 1, .seed = 5};
  const LoadTable table = synthesize_load(options, GrpoRouting{.group_spread = 1.0});
  double step = 0;
  for (int l = 0; l < 4; ++l) step += ratio(step_home_loads(table, l)) / 4;
  EXPECT_GT(mean_rho(table), 1.25 * step);
}

TEST(GrpoRouting, ShufflingGroupsReducesTheImbalanceOfMicroSteps) {
  SynthesisOptions options{
      .num_layers = 4, .num_ranks = 16, .tokens_per_rank = 4096, .sequences_per_rank = 1, .seed = 5};
  const double grouped = mean_rho(synthesize_load(options, GrpoRouting{.group_spread = 1.0}));
  options.layout = Layout::kShuffled;
  EXPECT_LT(mean_rho(synthesize_load(options, GrpoRouting{.group_spread = 1.0})), grouped - 0.2);
}

TEST(GrpoRouting, AGroupSharesAMicroStepOnlyWhenGrouped) {
  SynthesisOptions options = kSmall;
  options.num_micro_steps = 8;
  options.group_size = 4;
  for (const Layout layout : {Layout::kGrouped, Layout::kShuffled}) {
    options.layout = layout;
    const RoutingTrace trace = synthesize_trace(options, GrpoRouting{});
    std::map<int, std::set<int>> micro_steps;
    std::map<int, int> members;
    for (std::size_t s = 0; s < trace.group_ids.size(); ++s) {
      micro_steps[trace.group_ids[s]].insert(trace.micro_step[s]);
      ++members[trace.group_ids[s]];
    }
    EXPECT_EQ(members.size(), 16);
    for (const auto& [group, count] : members) EXPECT_EQ(count, 4);
    std::size_t together = 0;
    for (const auto& [group, steps] : micro_steps) together += steps.size() == 1;
    EXPECT_EQ(together, layout == Layout::kGrouped ? 16 : 0);
  }
}

TEST(Synthesis, ShapesSetLayersExpertsAndTopK) {
  const SynthesisOptions options = with_shape({.num_ranks = 16}, *find_model_shape("DeepSeek-V3"));
  EXPECT_EQ(options.num_layers, 58);
  EXPECT_EQ(options.num_experts, 256);
  EXPECT_EQ(options.top_k, 8);
  EXPECT_EQ(options.num_ranks, 16);
}

TEST(Synthesis, InvalidOptionsAreNamed) {
  const auto error_of = [](SynthesisOptions options, const RoutingModel& model) -> std::string {
    try {
      synthesize_load(options, model);
      return {};
    } catch (const InputError& error) {
      return error.what();
    }
  };
  EXPECT_THAT(error_of({.top_k = 129}, ZipfRouting{}), HasSubstr("top_k: must be an integer from 1 to 128 (is 129)"));
  EXPECT_THAT(error_of({.num_ranks = 0}, ZipfRouting{}), HasSubstr("ranks: must be"));
  EXPECT_THAT(error_of({.tokens_per_rank = 0}, ZipfRouting{}), HasSubstr("tokens_per_rank"));
  EXPECT_THAT(error_of({.length_spread = NAN}, ZipfRouting{}), HasSubstr("length_spread"));
  EXPECT_THAT(error_of({}, ZipfRouting{.skew = -1}), HasSubstr("skew"));
  EXPECT_THAT(error_of({}, ZipfRouting{.permute_probability = 2}), HasSubstr("permute_probability"));
  EXPECT_THAT(error_of({}, DirichletRouting{.concentration = 0}), HasSubstr("concentration"));
  EXPECT_THAT(error_of({}, GrpoRouting{.step_spread = -1}), HasSubstr("step_spread"));
  EXPECT_THAT(error_of({.num_ranks = 1}, StressWorkload::kBalanced), HasSubstr("ranks: must be at least 2"));
  EXPECT_THAT(error_of({.groups = {.count = 3, .per_token = 1}}, ZipfRouting{}),
              HasSubstr("expert_groups: 3 does not divide 128 experts"));
  EXPECT_THAT(error_of({.groups = {.count = 4, .per_token = 5}}, ZipfRouting{}),
              HasSubstr("groups_per_token: 5 is more than expert_groups, 4"));
  EXPECT_THAT(error_of({.groups = {.count = 32, .per_token = 1}}, ZipfRouting{}),
              HasSubstr("groups_per_token: 1 groups have fewer experts than a token chooses, 8"));
  EXPECT_THAT(error_of({.groups = {.count = 4, .per_token = 2}}, StressWorkload::kBalanced),
              HasSubstr("expert_groups: w0 deals experts to tokens in turn"));
  EXPECT_THAT(error_of({.num_ranks = 3}, StressWorkload::kBalanced),
              HasSubstr("experts: must be a multiple of the 3 ranks"));
}

}  // namespace foremoe::testing
