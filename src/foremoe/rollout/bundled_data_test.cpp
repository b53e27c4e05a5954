// Checks that bundled load tables and rollouts can be read, and that counts agree with numpy.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe {
namespace {

class BundledData : public testing::Test {
 protected:
  static std::string path(const std::string& name) { return "data/" + name + ".safetensors"; }
};

struct Shape {
  const char* name;
  int micro_steps, layers, ranks, experts;
};

TEST_F(BundledData, EveryLoadTableHasItsShape) {
  for (const Shape& s : {Shape{"load-q30-ep8", 32, 8, 8, 128}, Shape{"load-q30-ep16", 32, 6, 16, 128},
                         Shape{"load-q30-ep64", 32, 2, 64, 128}, Shape{"load-q30-ep64-shuffled", 32, 2, 64, 128},
                         Shape{"load-v3-ep64", 24, 2, 64, 256}, Shape{"load-v3-ep64-skewed", 24, 2, 64, 256},
                         Shape{"load-q30-ep8-bursty", 32, 8, 8, 128}, Shape{"load-q30-ep16-bursty", 32, 4, 16, 128},
                         Shape{"load-q30-ep64-bursty", 32, 2, 64, 128}, Shape{"load-v3-ep64-bursty", 24, 2, 64, 256}}) {
    EXPECT_EQ(file_kind(path(s.name)), FileKind::kLoad);
    const LoadTable table = read_load(path(s.name));
    EXPECT_EQ(table.name, std::string(s.name).substr(5));
    EXPECT_EQ(table.num_micro_steps(), s.micro_steps);
    EXPECT_EQ(table.num_layers(), s.layers);
    EXPECT_EQ(table.num_ranks(), s.ranks);
    EXPECT_EQ(table.num_experts(), s.experts);
    EXPECT_EQ(table.top_k, 8);
    EXPECT_EQ(table.ranks_per_node, 8);
  }
}

TEST_F(BundledData, LoadTableDigestsMatchHashlib) {
  EXPECT_EQ(load_digest(read_load(path("load-q30-ep8"))),
            "12d66f8fef38c41901e38b00318756224805be2c61a3958895af38d1191bcf56");
  EXPECT_EQ(load_digest(read_load(path("load-v3-ep64-bursty"))),
            "029d04ae2f46da6f3124f0213e16e6bbeb07c5773091fdcf4459658339251b10");
}

TEST_F(BundledData, TheMathRolloutMatchesNumpyBincount) {
  const RoutingTrace trace = read_trace(path("rollout-math-full"));
  const Batching batching = make_batching(trace, {});
  EXPECT_TRUE(batching.recorded);
  EXPECT_EQ(batching.num_ranks, 8);
  for (const std::size_t threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(load_digest(collect(trace, batching, pool)),
              "693408bf7463e6cf344efa911c6033e568719a4c1c982878b1f442f1925995ea");
  }
}

TEST_F(BundledData, TheSmallMathRolloutIsTwoLayersOfTheFullOne) {
  const RoutingTrace small = read_trace(path("rollout-math"));
  const RoutingTrace whole = read_trace(path("rollout-math-full"));
  EXPECT_THAT(small.layer_ids, testing::ElementsAre(0, 7));
  EXPECT_EQ(small.cu_seqlens, whole.cu_seqlens);
  EXPECT_EQ(small.micro_step, whole.micro_step);
  EXPECT_EQ(small.rank, whole.rank);
  std::vector<ExpertId> of_small(8);
  std::vector<ExpertId> of_whole(8);
  for (std::int64_t t = 0; t < whole.num_tokens; t += 97) {
    for (const int l : {0, 1}) {
      small.route(t, LayerId{l}, of_small);
      whole.route(t, LayerId{7 * l}, of_whole);
      ASSERT_EQ(of_small, of_whole) << t;
    }
  }
}

TEST_F(BundledData, TheMixedRolloutIsBatchedByTokens) {
  const RoutingTrace trace = read_trace(path("rollout-mixed"));
  EXPECT_FALSE(trace.has_batching());
  check_routes(trace);
  const Batching batching = make_batching(trace, {.num_ranks = 8, .tokens_per_rank = 1'024});
  EXPECT_LE(batching.num_micro_steps, 14);  // 96,247 tokens ÷ 8,192 is 11.7; sequences are not split
  ThreadPool pool(2);
  const LoadTable table = collect(trace, batching, pool);
  std::int64_t assignments = 0;
  for (const Tokens t : table.load.flat()) assignments += t.value;
  EXPECT_EQ(assignments, (trace.num_tokens - trace.num_sequences()) * 8 * 8);  // last tokens of sequences have no route
}

}  // namespace
}  // namespace foremoe
