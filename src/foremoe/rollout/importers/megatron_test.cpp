#include <fmt/format.h>

#include "foremoe/testing/recorded_formats.h"

namespace foremoe::testing {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string call(int rank, int layer, const std::string& rows, int step = 0) {
  return fmt::format(
             R"({{"step": {}, "stage": "pre_dispatch", "block": "decoder", "layer": {}, "rank": {}, "top_indices": {}}})",
             step, layer, rank, rows) +
         "\n";
}

TEST(MegatronTraceImport, TheNthCallOfALayerOnARankIsMicroStepN) {
  const Imported in = import_text(call(0, 3, "[[0, 1], [2, 3]]") + call(0, 5, "[[4, 5], [6, 7]]") +
                                  call(0, 3, "[[1, 0]]") + call(0, 5, "[[5, 4]]"));
  const RoutingTrace& trace = *in.trace();
  EXPECT_THAT(trace.layer_ids, ElementsAre(3, 5));
  EXPECT_THAT(trace.cu_seqlens, ElementsAre(0, 2, 3));
  EXPECT_THAT(trace.micro_step, ElementsAre(0, 1));
  EXPECT_THAT(trace.rank, ElementsAre(0, 0));
  EXPECT_EQ(trace.ranks, 1);
  EXPECT_THAT(routes_of(in), ElementsAre(0, 1, 4, 5, 2, 3, 6, 7, 1, 0, 5, 4));
}

TEST(MegatronTraceImport, RankFilesBecomeOneTraceWithItsBatching) {
  const Imported in =
      import_texts({{"router_trace_rank1.jsonl", call(1, 0, "[[2, 3]]") + call(1, 0, "[[4, 5], [6, 7]]")},
                    {"router_trace_rank0.jsonl", call(0, 0, "[[0, 1]]")}},
                   {.ranks_per_node = 2});
  const RoutingTrace& trace = *in.trace();
  EXPECT_THAT(trace.micro_step, ElementsAre(0, 0, 1));
  EXPECT_TRUE(trace.whole_batches) << "a call does not record where sequences begin";
  EXPECT_THAT(trace.rank, ElementsAre(0, 1, 1));
  EXPECT_EQ(trace.ranks, 2);
  EXPECT_EQ(trace.ranks_per_node, 2);
  EXPECT_THAT(routes_of(in), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(MegatronTraceImport, SkippedCallsAreMissingRowsAndCounted) {
  const Imported in = import_text(call(0, 0, "[[0, 1]]") + call(0, 1, "[[2, 3]]") + call(0, 0, "[[4, 5]]"));
  EXPECT_THAT(routes_of(in), ElementsAre(0, 1, 2, 3, 4, 5, -1, -1));
  EXPECT_EQ(in.report.rows_skipped, 1);
  EXPECT_EQ(in.report.rows, 3);
}

TEST(MegatronTraceImport, RecomputedCallsAreNotedAndDroppedOnRequest) {
  const std::string text = call(0, 0, "[[0, 1]]") + call(0, 0, "[[2, 3]]") + call(0, 0, "[[0, 1]]") +
                           call(0, 0, "[[2, 3]]") + call(0, 0, "[[0, 1]]");
  const Imported kept = import_text(text);
  EXPECT_EQ(kept.trace()->num_sequences(), 5);
  EXPECT_THAT(kept.report.notes, Contains(HasSubstr("2 calls repeat")));
  const Imported dropped = import_text(text, {.drop_recomputed = true});
  EXPECT_THAT(routes_of(dropped), ElementsAre(0, 1, 2, 3, 0, 1));
}

TEST(MegatronTraceImport, PipelineStagesAreConcatenated) {
  // Ranks 4 and 5 are the first stage, 6 and 7 the second; each stage counts its layers from 0.
  std::vector<NamedText> files;
  for (int rank = 4; rank < 8; ++rank) {
    files.push_back({fmt::format("router_trace_rank{}.jsonl", rank),
                     call(rank, 0, fmt::format("[[{}, 0]]", rank)) + call(rank, 1, fmt::format("[[{}, 1]]", rank))});
  }
  const Imported in = import_texts(files, {.pipeline_stages = 2});
  EXPECT_THAT(in.trace()->layer_ids, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(in.trace()->rank, ElementsAre(0, 1));
  EXPECT_THAT(routes_of(in), ElementsAre(4, 0, 4, 1, 6, 0, 6, 1, 5, 0, 5, 1, 7, 0, 7, 1));
  EXPECT_THAT(error_of(files, {.pipeline_stages = 3}),
              HasSubstr("4 ranks cannot be split into 3 equal pipeline stages"));
}

TEST(MegatronTraceImport, MultiTokenPredictionComesAfterTheDecoder) {
  const Imported in = import_text(R"({"block": "mtp", "mtp_idx": 0, "layer": 0, "rank": 0, "top_indices": [[8, 9]]})"
                                  "\n" +
                                  call(0, 0, "[[0, 1]]") + call(0, 1, "[[2, 3]]"));
  EXPECT_THAT(in.trace()->layer_ids, ElementsAre(0, 1, 2));
  EXPECT_THAT(routes_of(in), ElementsAre(0, 1, 2, 3, 8, 9));
}

TEST(MegatronTraceImport, MalformedRecordsNameLineAndIndex) {
  const std::string good = call(0, 0, "[[0, 1]]");
  EXPECT_THAT(error_of(good + "{\"rank\": 0,"), HasSubstr("in: line 2: is not JSON"));
  EXPECT_THAT(error_of(good + "[1]"), HasSubstr("in: line 2: should be a JSON object"));
  EXPECT_THAT(error_of(good + R"({"layer": 0, "top_indices": [[0, 1]]})"), HasSubstr("in: line 2: rank: is missing"));
  EXPECT_THAT(error_of(good + R"({"layer": -1, "rank": 0, "top_indices": [[0, 1]]})"),
              HasSubstr("in: line 2: layer: -1 is not in"));
  EXPECT_THAT(error_of(good + R"({"block": "encoder", "layer": 0, "rank": 0, "top_indices": [[0, 1]]})"),
              HasSubstr("in: line 2: block"));
  EXPECT_THAT(error_of(good + R"({"layer": 0, "rank": 0, "top_indices": 5})"),
              HasSubstr("in: line 2: top_indices: should be a list"));
  EXPECT_THAT(error_of(good + R"({"layer": 0, "rank": 0, "topk": 3, "top_indices": [[0, 1]]})"),
              HasSubstr("in: line 2: top_indices[0]: should be a list of 3"));
  EXPECT_THAT(error_of(good + R"({"layer": 0, "rank": 0, "num_tokens": 9, "top_indices": [[0, 1]]})"),
              HasSubstr("in: line 2: num_tokens: 9"));
  EXPECT_THAT(error_of(good + call(0, 0, "[[0, \"x\"]]")),
              HasSubstr("in: line 2: top_indices[0, 1]: should be an integer"));
  EXPECT_THAT(error_of(good + call(0, 0, "[[0, 1], [2, 8]]"), {.num_experts = 8}),
              HasSubstr("in: line 2: top_indices[1, 1]: expert 8 is out of range"));
  EXPECT_THAT(error_of(good + call(0, 1, "[[0, 1], [2, 3]]")),
              HasSubstr("in: line 2: top_indices: has 2 tokens and top-2, but micro-step 0 of rank 0 began with 1"));
}

TEST(MegatronTraceImport, RejectsFilesWithMoreMissingThanRecordedRows) {
  EXPECT_THAT(error_of({{"a", call(0, 0, "[[0, 1], [2, 3]]")}, {"b", call(1, 1, "[[0, 1]]") + call(1, 2, "[[0, 1]]")}}),
              HasSubstr("a: layer: 5 rows of 9 were never recorded"));
}

TEST(MegatronTraceImport, ARankGivenTwiceIsNamed) {
  EXPECT_THAT(error_of({{"a", call(3, 0, "[[0, 1]]")}, {"b", call(3, 0, "[[0, 1]]")}}),
              HasSubstr("b: line 1: rank: rank 3 is in a already"));
}

TEST(MegatronTraceImport, RejectsFilesOfAnotherFormat) {
  const NamedText trace{"a", call(0, 0, "[[0, 1]]")};
  const NamedText other{"b", R"({"iter": 0, "layer": 0, "tpe": [[1, 2]]})"};
  EXPECT_THAT(error_of({trace, other}), HasSubstr("b: is a megatron-counts file, but a is a megatron-trace file"));
}

std::string counts(int layer, const std::string& tpe, int iteration = 100) {
  return fmt::format(R"({{"iter": {}, "block": "decoder", "layer": {}, "tpe": {}}})", iteration, layer, tpe) + "\n";
}

std::vector<std::int64_t> flat(const Imported& in) {
  std::vector<std::int64_t> out;
  for (const Tokens t : in.load()->load.flat()) out.push_back(t.value);
  return out;
}

TEST(MegatronCountsImport, MicroBatchesOfSourceCountsAreMicroSteps) {
  const Imported in =
      import_texts({{"rank1.jsonl", counts(0, "[[1, 3], [4, 0]]")}, {"rank0.jsonl", counts(0, "[[2, 2], [0, 4]]")}},
                   {.num_experts = 2, .top_k = 2});
  ASSERT_NE(in.load(), nullptr);
  EXPECT_THAT(in.load()->load.shape(), ElementsAre(2, 1, 2, 2));
  EXPECT_THAT(flat(in), ElementsAre(2, 2, 1, 3, 0, 4, 4, 0));
  EXPECT_EQ(in.load()->top_k, 2);
  EXPECT_EQ(in.load()->ranks_per_node, 2);
}

TEST(MegatronCountsImport, IterationsAreConcatenated) {
  const Imported in = import_text(counts(0, "[[7, 1]]", 200) + counts(1, "[[5, 3]]", 200) + counts(0, "[[1, 2]]", 100) +
                                  counts(1, "[[3, 0]]", 100));
  EXPECT_THAT(flat(in), ElementsAre(1, 2, 3, 0, 7, 1, 5, 3));
}

TEST(MegatronCountsImport, ReceivedCountsBecomeLoadsWithEvenSources) {
  // Two ranks with two experts each. Totals over ranks are equal in all layers; a rank's sums differ between layers.
  const std::vector<NamedText> files{{"rank0.jsonl", counts(0, "[[5, 1]]") + counts(1, "[[2, 0]]")},
                                     {"rank1.jsonl", counts(0, "[[2, 0]]") + counts(1, "[[3, 3]]")}};
  for (const ImportOptions& options :
       {ImportOptions{}, ImportOptions{.num_experts = 4}, ImportOptions{.counts_at = CountsAt::kReceived}}) {
    const Imported in = import_texts(files, options);
    EXPECT_THAT(in.load()->load.shape(), ElementsAre(1, 2, 2, 4));
    EXPECT_THAT(flat(in), ElementsAre(3, 0, 1, 0, 2, 1, 1, 0, 1, 0, 2, 1, 1, 0, 1, 2));
    EXPECT_THAT(in.report.notes, Contains(HasSubstr("received")));
  }
  EXPECT_EQ(import_texts(files, {.num_experts = 2}).load()->num_experts(), 2);
  EXPECT_EQ(import_texts(files, {.counts_at = CountsAt::kSource}).load()->num_experts(), 2);
  EXPECT_THAT(error_of(files, {.num_experts = 6}), HasSubstr("2 counts on each of 2 ranks do not make 6 experts"));
}

TEST(MegatronCountsImport, CountsWithDifferentTotalsPerLayerAreNotReceivedCounts) {
  const Imported in = import_texts({{"rank0.jsonl", counts(0, "[[5, 1]]") + counts(1, "[[2, 0]]")},
                                    {"rank1.jsonl", counts(0, "[[2, 0]]") + counts(1, "[[3, 4]]")}});
  EXPECT_THAT(flat(in), ElementsAre(5, 1, 2, 0, 2, 0, 3, 4));
  EXPECT_THAT(in.report.notes, Contains(HasSubstr("own tokens among all experts")));
}

TEST(MegatronCountsImport, ATokenCannotChooseMoreExpertsThanThereAre) {
  EXPECT_EQ(import_text(counts(0, "[[1, 2]]"), {.top_k = 2}).load()->top_k, 2);
  EXPECT_THAT(error_of(counts(0, "[[1, 2]]"), {.top_k = 3}), HasSubstr("in: tpe: 2 experts, too few"));
}

TEST(MegatronCountsImport, MissingCountsAreNamed) {
  EXPECT_THAT(error_of({{"rank0.jsonl", counts(0, "[[1, 2]]") + counts(1, "[[1, 2]]")},
                        {"rank1.jsonl", counts(0, "[[1, 2]]")}}),
              HasSubstr("decoder layer 1 has no counts in iteration 100 on rank 1"));
  EXPECT_THAT(error_of({{"rank0.jsonl", counts(0, "[[1, 2]]")}, {"rank2.jsonl", counts(0, "[[1, 2]]")}}),
              HasSubstr("on rank 1"));
}

TEST(MegatronCountsImport, MalformedRecordsNameLineAndIndex) {
  const std::string good = counts(0, "[[1, 2]]");
  EXPECT_THAT(error_of(good + counts(1, "[[1, -2]]")), HasSubstr("in: line 2: tpe[0, 1]: -2 is not in"));
  EXPECT_THAT(error_of(good + counts(1, "[[1, 9999999999]]")), HasSubstr("in: line 2: tpe[0, 1]: 9999999999"));
  EXPECT_THAT(error_of(good + counts(1, "[[1, 2, 3]]")),
              HasSubstr("in: line 2: tpe[0]: has 3 counts, but the first had 2"));
  EXPECT_THAT(error_of(good + counts(1, "[[1, 2], [3, 4]]")),
              HasSubstr("in: line 2: tpe: has 2 micro-batches, but iteration 100 began with 1"));
  EXPECT_THAT(
      error_of(good + good),
      HasSubstr(
          "in: line 2: layer: was already counted in iteration 100 on rank 0 (in, line 1); is the rank given twice?"));
  EXPECT_THAT(error_of(good + R"({"layer": 1, "tpe": [[1, 2]]})"), HasSubstr("in: line 2: iter: is missing"));
  EXPECT_THAT(error_of(good + R"({"iter": 1, "layer": 1})"), HasSubstr("in: line 2: tpe: should be a list"));
}

}  // namespace foremoe::testing
