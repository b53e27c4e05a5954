// Small input that claims large tables is refused with the place and the amount.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/synthesis/synthesis.h"
#include "foremoe/testing/limited_memory.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string refusal_of(const std::function<void()>& call) {
  const test::LimitedMemory limited;
  try {
    call();
  } catch (const InsufficientMemory& error) {
    return error.what();
  }
  return "";
}

TEST(MemoryRefusals, OfALoadFileWhoseNumbersAreNarrow) {
  const std::string path = testing::TempDir() + "memory_refusals_test.safetensors";
  std::string header = R"({"__metadata__":{"format":"foremoe.load/1","num_experts":"4096","top_k":"1",)"
                       R"("ranks_per_node":"8"},"load":{"dtype":"U16","shape":[16,64,1024,4096],)"
                       R"("data_offsets":[0,8589934592]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  std::ofstream(path).write(reinterpret_cast<const char*>(&length), sizeof length) << header;
  std::filesystem::resize_file(path, sizeof length + length + (std::uintmax_t{8} << 30));  // sparse: needs no disk
  EXPECT_THAT(refusal_of([&] { (void)read_load(path); }), StartsWith(path + ": load: needs 34.4 GB of memory"));
  std::filesystem::remove(path);
}

TEST(MemoryRefusals, AreNotForATableThatExists) {
  EXPECT_EQ(refusal_of([] {
              LoadTable table{.load = Array<Tokens, 4>({2, 10, 256, 4096}), .top_k = 1, .ranks_per_node = 8};  // 168 MB
              expect_valid(table, "load");
            }),
            "");
}

TEST(MemoryRefusals, OfATraceThatIsBatchedForManyRanks) {
  auto [trace, storage] = make_random_trace({.lengths = {2, 2}, .num_layers = 64, .num_experts = 255});
  const Batching batching{.num_micro_steps = 2,
                          .num_ranks = 65'536,
                          .ranks_per_node = 8,
                          .micro_step = {MicroStepId{0}, MicroStepId{1}},
                          .rank = {RankId{0}, RankId{65'535}}};
  ThreadPool pool(1);
  EXPECT_THAT(refusal_of([&] { (void)collect(trace, batching, pool); }),
              StartsWith("random: load: needs 17.1 GB of memory"));
  EXPECT_THAT(
      refusal_of([] { RolloutCollector({.num_layers = 65'536, .top_k = 1, .num_experts = 65'536}, "rollout"); }),
      StartsWith("rollout: shape: needs 34.4 GB of memory"));
}

TEST(MemoryRefusals, OfSyntheticLoadsAndTraces) {
  const SynthesisOptions wide{.num_layers = 512, .num_experts = 4096, .num_micro_steps = 1024, .num_ranks = 65'536};
  EXPECT_THAT(refusal_of([&] { (void)synthesize_load(wide, GrpoRouting{}); }),
              StartsWith("load: needs 1125899.9 GB of memory"));
  const SynthesisOptions tall{.num_ranks = 1024, .tokens_per_rank = 1 << 18};
  EXPECT_THAT(refusal_of([&] { (void)synthesize_trace(tall, GrpoRouting{}); }),
              StartsWith("tokens_per_rank: needs 274.9 GB of memory"));
  const SynthesisOptions many{.num_layers = 1, .num_experts = 8, .num_ranks = 1024, .sequences_per_rank = 1 << 15};
  EXPECT_THAT(refusal_of([&] { (void)synthesize_load(many, GrpoRouting{}); }),
              StartsWith("sequences_per_rank: needs 25.8 GB of memory"));
}

TEST(MemoryRefusals, OfImportsAreNotSkippedSamples) {
  const std::vector<std::uint8_t> row(std::size_t{4096} * 16, 0);
  const IntegerArray array{
      .bytes = std::as_bytes(std::span(row)), .type_bytes = 1, .is_signed = false, .shape = {1, 4096, 16}};
  const DecodedSequence cached{.where = {.file = "responses.json", .field = "choices[0]"},
                               .content = array,
                               .num_tokens = (1 << 20) + 1,
                               .omitted_rows = 1 << 20};
  EXPECT_THAT(refusal_of([&] { (void)import_sequences(std::array{cached}, {.num_experts = 128}); }),
              StartsWith("responses.json: choices[0]: needs 68.7 GB of memory"));
  const std::vector<std::int64_t> tokens(65'536, 1);
  const DecodedSequence counts{
      .where = {.file = "counts.json"},
      .content = IntegerArray{.bytes = std::as_bytes(std::span(tokens)), .type_bytes = 8, .shape = {1, 1, 65'536}}};
  EXPECT_THAT(refusal_of([&] { (void)import_counts(std::array{counts}, {.top_k = 1, .ranks = 65'536}); }),
              StartsWith("counts.json: load: needs 34.4 GB of memory"));
}

}  // namespace
}  // namespace foremoe
