#include "foremoe/cluster/cost_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"

namespace foremoe {
namespace {

constexpr double kMicro = 1e-6;

// Round numbers for calculation by hand: 0.5 TFLOP/s reached in GEMMs, 0.25 in attention, 100 GB/s of memory.
Cluster round_cluster() {
  return {.name = "round",
          .ranks_per_node = 4,
          .flops_per_second = 1e12,
          .gemm_efficiency = 0.5,
          .attention_efficiency = 0.25,
          .memory_bytes_per_second = 1e11,
          .memory = Bytes{std::int64_t{1} << 30},
          .row_tile = 16,
          .kernel_seconds = 1e-6,
          .peers = {.bytes_per_second = 1e10, .latency_seconds = 2e-6},
          .network = {.bytes_per_second = 1e9, .latency_seconds = 5e-6},
          .host = {.bytes_per_second = 4e9, .latency_seconds = 3e-6},
          .ranks_per_switch = 2,
          .switch_bytes_per_second = 6e9,
          .host_memory_bytes_per_second = 2e10};
}

// An expert has 3 · 64 · 32 = 6144 parameters.
ModelShape small_model() {
  return {.name = "small",
          .moe_layers = 2,
          .dense_layers = 1,
          .experts = 8,
          .top_k = 2,
          .shared_experts = 1,
          .hidden = 64,
          .intermediate = 32,
          .dense_intermediate = 128,
          .vocabulary = 100,
          .attention = {.heads = 4, .kv_heads = 2, .key_width = 16, .value_width = 16}};
}

CostModel small(CostOptions options = {.sequence_tokens = 50}) { return {round_cluster(), small_model(), options}; }

double experts(const CostModel& cost, const std::vector<int>& loads, Pass direction = Pass::kForward) {
  std::vector<Tokens> replicas;
  for (const int load : loads) replicas.emplace_back(load);
  return cost.experts(replicas, direction);
}

constexpr std::array kBoth = {Pass::kForward, Pass::kBackward};

// Every cost in seconds for a rank with this number of tokens.
std::vector<std::pair<std::string, double>> all_seconds(const CostModel& cost, int tokens) {
  std::vector<std::pair<std::string, double>> seconds;
  for (const Pass direction : kBoth) {
    const std::string pass = direction == Pass::kForward ? " forward" : " backward";
    seconds.emplace_back("dense" + pass, cost.dense(Tokens{tokens}, direction));
    seconds.emplace_back("other layers" + pass, cost.other_layers(Tokens{tokens}, direction));
    seconds.emplace_back("experts" + pass, experts(cost, {tokens, tokens / 2, tokens / 5, 0}, direction));
  }
  seconds.emplace_back("peers", cost.exchange({.sent_to_peers = tokens, .received_from_peers = 3}));
  seconds.emplace_back("nodes", cost.exchange({.sent_to_nodes = 3, .received_from_nodes = tokens}));
  seconds.emplace_back("optimizer", cost.optimizer(4));
  return seconds;
}

}  // namespace

// 20 rows are two tiles of 16. 32 rows · 2 · 6144 = 393216 FLOPs take 0.786432 µs at 0.5 TFLOP/s. Weights of 12288
// bytes and rows of 20 · 2 · (2 · 64 + 3 · 32) bytes take less, 0.21 µs. Sorting and activation move another
// 20 · 2 · (4 · 64 + 3 · 32) = 14080 bytes in 0.1408 µs at 100 GB/s, in five kernels.
TEST(CostModel, ComputeBoundExpertsTakeTheTimeOfTheirTiles) {
  EXPECT_NEAR(experts(small(), {20}), (0.786432 + 0.1408 + 5) * kMicro, 1e-15);
  EXPECT_NEAR(experts(small(), {32}) - experts(small(), {20}), 12 * 2 * 352 / 1e11, 1e-15) << "no more tiles";
  EXPECT_NEAR(experts(small(), {33}) - experts(small(), {32}), 0.393216 * kMicro + 2 * 352 / 1e11, 1e-15);
}

// At 1 GB/s instead of 100 GB/s, the same 12288 + 8960 bytes take 21.248 µs, more than the GEMMs' FLOPs.
TEST(CostModel, MemoryBoundExpertsTakeTheTimeOfTheirBytes) {
  Cluster cluster = round_cluster();
  cluster.memory_bytes_per_second = 1e9;
  const CostModel cost(cluster, small_model());
  EXPECT_NEAR(experts(cost, {20}), (21.248 + 14.08 + 5) * kMicro, 1e-15);
  // Twice the weights: 12288 bytes more.
  EXPECT_NEAR(experts(cost, {10, 10}), (33.536 + 14.08 + 5) * kMicro, 1e-15);
}

// At 1 GB/s, a backward pass reads weights (12288 bytes), reads and writes their float32 gradients (2 · 4 · 6144), and
// reads and writes twice the rows of a forward (2 · 8960): 79360 bytes. The forward runs again, so rows move three
// times.
TEST(CostModel, ABackwardBoundByMemoryReadsAndWritesGradients) {
  Cluster cluster = round_cluster();
  cluster.memory_bytes_per_second = 1e9;
  EXPECT_NEAR(experts({cluster, small_model()}, {20}, Pass::kBackward), (21.248 + 79.36 + 3 * 19.08) * kMicro, 1e-15);
}

// A backward runs the forward again, then twice its FLOPs. Moving rows runs three times.
TEST(CostModel, ABackwardHasTwiceTheFlopsOrThriceWithRecomputation) {
  EXPECT_NEAR(experts(small(), {20}, Pass::kBackward), 3 * (0.786432 + 0.1408 + 5) * kMicro, 1e-15);
  EXPECT_NEAR(experts(small({.recompute_activations = false}), {20}, Pass::kBackward),
              2 * (0.786432 + 0.1408 + 5) * kMicro, 1e-15);
}

// FineMoE, appendix C.1: a backward repeats all of experts(), but no other computation or exchange. Received rows and
// returned rows are stored; gate, up and their product are not.
TEST(CostModel, RecomputesOnlyExpertsIfOtherActivationsAreKept) {
  const CostModel kept = small({.recompute_activations = false});
  const CostModel anew = small({.recompute_activations = false, .recompute_experts = true});
  EXPECT_NEAR(experts(anew, {20}, Pass::kBackward), 3 * (0.786432 + 0.1408 + 5) * kMicro, 1e-15);
  EXPECT_EQ(experts(anew, {20}), experts(kept, {20}));
  EXPECT_EQ(anew.dense(Tokens{100}, Pass::kBackward), kept.dense(Tokens{100}, Pass::kBackward));
  EXPECT_EQ(anew.other_layers(Tokens{100}, Pass::kBackward), kept.other_layers(Tokens{100}, Pass::kBackward));
  EXPECT_EQ(anew.round_trips(Pass::kBackward), 1);
  EXPECT_EQ(anew.activations_per_token(), kept.activations_per_token());
  EXPECT_EQ(anew.activations_per_row(), Bytes{2 * 64 * 2});
  EXPECT_EQ(anew.working_memory_per_row() - kept.working_memory_per_row(), Bytes{3 * 32 * 2});
  EXPECT_THROW((void)small({.recompute_experts = true}), InputError);
}

// Sorting reads and writes 64 values of 2 bytes per row, in one kernel.
TEST(CostModel, SortingIsPartOfTheExpertsTime) {
  EXPECT_NEAR(small().sort(Tokens{20}), (20 * 64 * 2 * 2 / 1e5 + 1) * kMicro, 1e-15);
  EXPECT_EQ(small().sort(Tokens{0}), 0);
}

// Every other rank sends the counts of 8 experts, 4 bytes each, by peer link within a node of 4, else by network.
TEST(CostModel, GathersLoadsOfAllRanksInOneMessage) {
  const auto gathered = [](int ranks, std::int64_t layers) {
    return small().gather_loads({.num_ranks = ranks, .ranks_per_node = 4}, layers);
  };
  EXPECT_NEAR(gathered(4, 1), 2e-6 + 3 * 8 * 4 / 1e10, 1e-15);
  EXPECT_NEAR(gathered(4, 10), 2e-6 + 10 * 3 * 8 * 4 / 1e10, 1e-15);
  EXPECT_NEAR(gathered(8, 1), 5e-6 + 7 * 8 * 4 / 1e9, 1e-15);
  EXPECT_EQ(gathered(1, 1), 0);
}

TEST(CostModel, CostsNothingWithoutRows) {
  EXPECT_EQ(experts(small(), {}), 0);
  EXPECT_EQ(experts(small(), {0, 0}), 0);
  EXPECT_EQ(small().dense(Tokens{0}, Pass::kBackward), 0);
  EXPECT_EQ(small().other_layers(Tokens{0}, Pass::kForward), 0);
  EXPECT_EQ(small().exchange({}), 0);
  EXPECT_EQ(small().optimizer(0), 0);
}

// 100 tokens, each attending to 25 others on average, in µs:
//   projections  64·64 + 64·2·32 + 64·64 = 12288 parameters; 2 · 12288 · 100 FLOPs at 0.5 TFLOP/s            4.9152
//   attention    2 · 4 heads · (16 + 16) · 25 = 6400 FLOPs per token at 0.25 TFLOP/s                        2.56
//   residual     10 passes over 100 · 64 · 2 bytes, 7 kernels                                               1.28 + 7
//   router       2 · 64 · 8 · 100 FLOPs                                                                     0.2048
//   shared       2 · 6144 · 100 FLOPs; 3 passes over 100 · 32 · 2 bytes, 3 kernels                   2.4576 + 0.192 + 3
// Backward: GEMMs three times, attention 1 + 2.5 times, moving three times.
TEST(CostModel, DenseTimeIsTheSumOfGemmsAttentionAndPasses) {
  const double products = 4.9152 + 0.2048 + 2.4576;
  const double moving = 1.28 + 7 + 0.192 + 3;
  EXPECT_NEAR(small().dense(Tokens{100}, Pass::kForward), (products + 2.56 + moving) * kMicro, 1e-15);
  EXPECT_NEAR(small().dense(Tokens{100}, Pass::kBackward), (3 * products + 3.5 * 2.56 + 3 * moving) * kMicro, 1e-15);
  // One sequence of 100 tokens has twice the scores of two sequences of 50.
  EXPECT_NEAR(small().dense(Tokens{100}, 100 * 100, Pass::kForward), (products + 2 * 2.56 + moving) * kMicro, 1e-15);
}

// The dense layer has attention as above, but no router or shared expert. 3 · 64 · 128 = 24576 parameters: 2 · 24576 ·
// 100 FLOPs take 9.8304 µs, 3 passes over 100 · 128 · 2 bytes 0.768 µs, in 3 kernels. The head has 64 · 100 parameters:
// 2 · 6400 · 100 FLOPs take 2.56 µs, in one kernel.
TEST(CostModel, OtherLayersAreTheDenseLayersAndTheHead) {
  const double layer = 4.9152 + 2.56 + 1.28 + 7 + 9.8304 + 0.768 + 3;
  EXPECT_NEAR(small().other_layers(Tokens{100}, Pass::kForward), (layer + 2.56 + 1) * kMicro, 1e-15);
}

// A row has 64 · 2 = 128 bytes. To peers 30 rows at 10 GB/s: 0.384 + 2 µs. To nodes 7 rows at 1 GB/s: 0.896 + 5 µs.
TEST(CostModel, AnExchangeTakesTheBusiestDirectionOfALink) {
  const CostModel cost = small();
  EXPECT_EQ(cost.row(), Bytes{128});
  EXPECT_NEAR(cost.exchange({.sent_to_peers = 10, .received_from_peers = 30}), 2.384 * kMicro, 1e-15);
  EXPECT_NEAR(cost.exchange({.sent_to_peers = 30, .received_from_peers = 30, .sent_to_nodes = 7}), 5.896 * kMicro,
              1e-15);
}

// A row has 128 bytes. Peers: 2 µs and 30 · 128 bytes at half, a quarter or 80 % of 10 GB/s. Network: 5 µs and 100 ·
// 128 bytes at 1 GB/s. Token dispatch takes 1 µs more.
TEST(CostModel, AnExchangeUsesTheShareOfThePeerLinkThatItsDispatchReaches) {
  Cluster cluster = round_cluster();
  cluster.exchange = {
      .token_efficiency = 0.5, .forwarding_efficiency = 0.25, .row_efficiency = 0.8, .token_seconds = kMicro};
  const CostModel token(cluster, small_model());
  const CostModel row(cluster, small_model(), {.dispatch = Dispatch::kRow});
  const RankRows inside{.sent_to_peers = 30};
  const RankRows forwarded{.sent_to_peers = 30 * 100, .received_from_nodes = 1};
  const RankRows across{.sent_to_peers = 30, .sent_to_nodes = 100};
  EXPECT_NEAR(token.exchange(inside), (1 + 2 + 0.768) * kMicro, 1e-15);
  EXPECT_NEAR(token.exchange(forwarded), (1 + 2 + 153.6) * kMicro, 1e-15);
  EXPECT_NEAR(token.exchange(across), (1 + 5 + 12.8) * kMicro, 1e-15);
  EXPECT_NEAR(row.exchange(inside), (2 + 0.48) * kMicro, 1e-15);
  EXPECT_NEAR(row.exchange(forwarded), (2 + 48) * kMicro, 1e-15);
  EXPECT_NEAR(row.exchange(across), (5 + 12.8) * kMicro, 1e-15);
}

// 30 bytes for each of 3 · 6144 parameters: 4 of gradient, 12 of state read and written, 2 of weights.
TEST(CostModel, TheOptimizerReadsAndWritesItsState) {
  EXPECT_NEAR(small().optimizer(3), 3 * 6144 * 30 / 1e11 + 1e-6, 1e-15);
  EXPECT_NEAR(small({.optimizer_shards = 4}).optimizer(4), 6144 * 30 / 1e11 + 1e-6, 1e-15);
}

// Four experts in each of two layers have 49152 parameters. The rest has 87552: three layers of attention (36864), two
// routers (1024), two shared experts (12288), one dense block (24576), embedding and head (12800). Weights and
// gradients take 6 bytes per parameter, the optimizer 12: over 2 shards for experts, over 4 ranks for the rest.
TEST(CostModel, GroupsShareTheOptimizerStateOfExpertsUnlessShardsAreGiven) {
  EXPECT_EQ(small({.ep_groups = 4}).optimizer_shards(), 4);
  EXPECT_EQ(small({.ep_groups = 4}).optimizer(4), small({.optimizer_shards = 4}).optimizer(4));
  EXPECT_EQ(small({.optimizer_shards = 1, .ep_groups = 4}).optimizer(4), small({}).optimizer(4));
  EXPECT_EQ(small({.optimizer_shards = 8}).gather_weights(4).bytes, 0) << "one group";
}

TEST(CostModel, ARankStoresItsExpertsAndAllOtherParameters) {
  EXPECT_EQ(small_model().parameters_besides_experts(), 87552);
  EXPECT_EQ(small({.optimizer_shards = 2}).rank_state(4, 4),
            Bytes{(49152 + 87552) * 6 + 49152 * 12 / 2 + 87552 * 12 / 4});
}

TEST(CostModel, KeptActivationsAndWorkingMemoryAddUpToTheSameRows) {
  const CostModel anew = small();
  const CostModel kept = small({.recompute_activations = false});
  const Bytes row{(2 * 64 + 3 * 32) * 2};
  EXPECT_EQ(anew.activations_per_token(), Bytes{128}) << "the layer's input";
  EXPECT_EQ(anew.activations_per_row(), Bytes{0});
  EXPECT_EQ(anew.working_memory_per_row(Pass::kForward), row);
  EXPECT_EQ(anew.working_memory_per_row(), row + row) << "and the gradient of each";
  EXPECT_EQ(kept.activations_per_row() + kept.working_memory_per_row(), row + row);
  // 4 · 64 + (4 + 2) · 32 + 3 · 32 elements, and 8 scores of 4 bytes.
  EXPECT_EQ(kept.activations_per_token(), Bytes{(256 + 192 + 96) * 2 + 32});
}

// 100 tokens: dense 21.6096 µs. Experts have 200 rows in 13 tiles: 208 · 2 · 6144 FLOPs 5.111808, 200 · 2 · 352 bytes
// 1.408, 5 kernels; together 33.129408. A copy has 12288 bytes. Peers: (33.129408 − 2) µs · 10 GB/s = 311294 bytes, 25
// copies. Host: min(4, 6 ÷ 2, 20 ÷ 4) = 3 GB/s for 30.129408 µs = 90388 bytes, 7 copies.
TEST(CostModel, HiddenCopiesAreThoseThatLinksTransferDuringALayer) {
  const auto hidden = small().hidden_copies(Tokens{100});
  EXPECT_EQ(hidden.from_peers, 25);
  EXPECT_EQ(hidden.from_host, 7);
  Cluster slow = round_cluster();
  slow.peers.latency_seconds = 1e-3;
  slow.host.bytes_per_second = 1e6;
  const auto none = CostModel(slow, small_model()).hidden_copies(Tokens{100});
  EXPECT_EQ(none.from_peers, 0);
  EXPECT_EQ(none.from_host, 0);
}

TEST(CostModel, MoreTokensAreNeverFaster) {
  for (const bool anew : {true, false}) {
    const CostModel cost = small({.recompute_activations = anew});
    auto before = all_seconds(cost, 1);
    for (int tokens = 2; tokens < 400; ++tokens) {
      auto now = all_seconds(cost, tokens);
      for (std::size_t i = 0; i < now.size(); ++i) {
        EXPECT_GE(now[i].second, before[i].second) << now[i].first << ", " << tokens << " tokens";
      }
      before = std::move(now);
    }
  }
}

TEST(CostModel, AFasterClusterIsNeverSlower) {
  int improved = 0;
  Cluster faster = round_cluster();
  visit_keys(faster, [&](std::string_view section, std::string_view key, auto& member, const KeyRange& range) {
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(member)>, double>) {
      const double was = member;
      member = range.least == 0 ? was / 2 : was * 1.5;  // a latency or a rate
      for (const int tokens : {1, 7, 100, 3000}) {
        const auto slow = all_seconds(small(), tokens);
        const auto fast = all_seconds({faster, small_model(), {.sequence_tokens = 50}}, tokens);
        for (std::size_t i = 0; i < slow.size(); ++i) {
          EXPECT_LE(fast[i].second, slow[i].second) << slow[i].first << ", " << section << "." << key;
          improved += fast[i].second < slow[i].second;
        }
      }
      const auto few = small().hidden_copies(Tokens{5000});
      const auto many = CostModel(faster, small_model(), {.sequence_tokens = 50}).hidden_copies(Tokens{5000});
      if (section != "device") {  // a faster device hides fewer copies
        EXPECT_GE(many.from_host, few.from_host) << section << "." << key;
        EXPECT_GE(many.from_peers, few.from_peers) << section << "." << key;
      }
      member = was;
    }
  });
  EXPECT_GT(improved, 50);
}

TEST(CostModel, SplittingAReplicaIsNeverCheaper) {
  Random random(7);
  const CostModel large(find_cluster("h100"), *find_model_shape("Qwen3-30B-A3B"));
  for (int trial = 0; trial < 2000; ++trial) {
    const CostModel& cost = trial % 2 == 0 ? large : small();
    std::vector<int> pieces(1 + random.below(8));
    int whole = 0;
    for (int& piece : pieces) whole += piece = static_cast<int>(random.below(700));
    for (const Pass direction : kBoth) {
      const double together = experts(cost, {whole}, direction);
      EXPECT_GE(experts(cost, pieces, direction), together * (1 - 1e-12)) << "on one rank";
      double apart = 0;
      for (const int piece : pieces) apart += experts(cost, {piece}, direction);
      EXPECT_GE(apart, together * (1 - 1e-12)) << "on ranks of their own";
    }
  }
  // Splitting is not free: 64 replicas of 8 rows use 64 tiles where one replica of 512 rows uses 4.
  EXPECT_GT(experts(large, std::vector<int>(64, 8)), 4 * experts(large, {512}));
}

// Qwen3-30B-A3B has 3.3 billion active parameters (published), so a forward needs about 6.6 GFLOPs per token besides
// attention scores. At the preset's efficiency, these FLOPs give a lower bound on a layer's time on an H100.
TEST(CostModel, ALayerOfQwen3TakesItsActiveParametersOnAnH100) {
  const ModelShape model = *find_model_shape("Qwen3-30B-A3B");
  const CostModel cost(find_cluster("h100"), model);
  const int tokens = 8192;
  const double layer = cost.dense(Tokens{tokens}, Pass::kForward) +
                       experts(cost, std::vector<int>(16, tokens * 8 / 16));  // one of eight ranks, balanced
  const double active = 2 * (3.3e9 - 2 * 151936 * 2048.0) / 48 * tokens;
  const double bound = active / (989.4e12 * 0.65);
  EXPECT_GT(layer, bound);
  EXPECT_LT(layer, 4 * bound);
}

TEST(CostModel, ErrorsNameTheModelAndItsMissingField) {
  const auto error_of = [](const std::function<void(ModelShape&)>& spoil) -> std::string {
    ModelShape model = small_model();
    spoil(model);
    try {
      const CostModel cost(round_cluster(), model);
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_of([](ModelShape& m) { m.attention.heads = 0; }),
            "small: attention.heads: is 0; a cost model needs it to be positive");
  EXPECT_EQ(error_of([](ModelShape& m) { m.dense_intermediate = 0; }),
            "small: dense_intermediate: is 0; a cost model needs it to be positive");
  EXPECT_EQ(error_of([](ModelShape& m) { m.hidden = -1; }),
            "small: hidden: is -1; a cost model needs it to be positive");
  EXPECT_EQ(error_of([](ModelShape& m) { m.groups.count = 0; }), "small: expert_groups: is 0, which is not positive");
  EXPECT_THAT(error_of([](ModelShape& m) { m.groups = {.count = m.experts + 1, .per_token = 1}; }),
              testing::HasSubstr("small: expert_groups: "));
  EXPECT_THAT(error_of([](ModelShape& m) { m.groups = {.count = m.experts, .per_token = m.top_k - 1}; }),
              testing::HasSubstr("small: groups_per_token: "));
  EXPECT_EQ(error_of([](ModelShape& m) { m.groups.per_token = 2; }),
            "small: groups_per_token: 2 is more than expert_groups, 1");
  EXPECT_EQ(error_of([](ModelShape&) {}), "no error");
  EXPECT_THROW(small({.sequence_tokens = 0}), InputError);
  EXPECT_THROW(small({.optimizer_shards = 0}), InputError);
  EXPECT_THROW(small({.ep_groups = 0}), InputError);
}

}  // namespace foremoe
