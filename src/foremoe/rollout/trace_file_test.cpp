#include "foremoe/rollout/trace_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>

#include "foremoe/core/error.h"
#include "foremoe/testing/random_traces.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

RoutingTrace full_trace(RouteType type) {
  RoutingTrace trace = make_random_trace({.type = type, .lengths = {3, 5, 0, 4}}).first;
  trace.prompt_lengths = {1, 5, 0, 2};
  trace.group_ids = {0, 0, 1, 1};
  trace.micro_step = {0, 1, 1, 0};
  trace.rank = {1, 0, 2, 0};
  trace.ranks = 6;
  trace.ranks_per_node = 3;
  trace.layer_ids = {1, 2, 5};
  trace.model = "a model";
  trace.origin = "a test";
  trace.whole_batches = true;
  return trace;
}

TEST(TraceFile, SurvivesTheRoundTripInEveryType) {
  const std::string path = testing::TempDir() + "trace_file_round_trip.safetensors";
  for (const RouteType type : {RouteType::kU8, RouteType::kU16, RouteType::kI16, RouteType::kI32}) {
    const RoutingTrace written = full_trace(type);
    write_trace(written, path, {{"parameters", "{}"}});
    const RoutingTrace read = read_trace(path);
    EXPECT_EQ(read.name, path);
    EXPECT_EQ(read.type, type);
    EXPECT_EQ(read.num_tokens, 12);
    EXPECT_EQ(read.num_layers, 3);
    EXPECT_EQ(read.top_k, 2);
    EXPECT_EQ(read.num_experts, 8);
    EXPECT_EQ(read.cu_seqlens, written.cu_seqlens);
    EXPECT_EQ(read.prompt_lengths, written.prompt_lengths);
    EXPECT_EQ(read.group_ids, written.group_ids);
    EXPECT_EQ(read.micro_step, written.micro_step);
    EXPECT_EQ(read.rank, written.rank);
    EXPECT_EQ(read.ranks, 6);
    EXPECT_EQ(read.ranks_per_node, 3);
    EXPECT_EQ(read.layer_ids, written.layer_ids);
    EXPECT_EQ(read.model, "a model");
    EXPECT_EQ(read.origin, "a test");
    EXPECT_TRUE(read.whole_batches);
    EXPECT_EQ(std::memcmp(read.routes, written.routes, 12 * 3 * 2 * size_of(type)), 0);
    EXPECT_EQ(Safetensors::open(path).text("parameters"), "{}");
  }
  std::filesystem::remove(path);
}

// Parts of a valid file, which tests modify.
struct Parts {
  std::vector<std::uint8_t> routes = std::vector<std::uint8_t>(4 * 2 * 2);
  std::vector<std::size_t> routes_shape{4, 2, 2};
  std::vector<std::int64_t> cu_seqlens{0, 3, 4};
  std::map<std::string, std::vector<std::int32_t>> per_sequence;
  Metadata metadata{{"format", "foremoe.trace/1"}, {"num_experts", "8"}, {"top_k", "2"}};

  Parts() {
    for (std::size_t i = 0; i < routes.size(); ++i) routes[i] = static_cast<std::uint8_t>(i % 8);
  }
  std::vector<std::byte> file() const {
    std::vector<TensorData> tensors{tensor_data("routed_experts", std::span<const std::uint8_t>(routes), routes_shape),
                                    tensor_data("cu_seqlens", std::span<const std::int64_t>(cu_seqlens))};
    for (const auto& [name, values] : per_sequence) {
      tensors.push_back(tensor_data(name, std::span<const std::int32_t>(values), {values.size()}));
    }
    return to_safetensors(tensors, metadata);
  }
};

std::string complaint(const std::function<void(Parts&)>& damage) {
  Parts parts;
  damage(parts);
  const std::vector<std::byte> bytes = parts.file();
  try {
    read_trace(Safetensors::parse(bytes, "t"));
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

RoutingTrace read(const Parts& parts) {
  const auto bytes = std::make_shared<std::vector<std::byte>>(parts.file());
  return read_trace(Safetensors::parse(*bytes, "t", bytes));
}

TEST(TraceReader, FillsInOptionalFields) {
  Parts parts;
  const RoutingTrace bare = read(parts);
  EXPECT_FALSE(bare.has_batching());
  EXPECT_EQ(bare.ranks, 0);
  EXPECT_THAT(bare.layer_ids, ElementsAre(0, 1));
  EXPECT_TRUE(bare.prompt_lengths.empty());

  parts.per_sequence = {{"micro_step", {1, 0}}, {"rank", {0, 9}}};
  const RoutingTrace batched = read(parts);
  EXPECT_EQ(batched.ranks, 10);
  EXPECT_EQ(batched.ranks_per_node, 8);
  parts.per_sequence["rank"] = {0, 2};
  EXPECT_EQ(read(parts).ranks_per_node, 3);
}

TEST(TraceReader, DoesNotCheckRoutes) {
  EXPECT_EQ(complaint([](Parts& p) { p.routes[3] = 77; }), "");
}

TEST(TraceReader, NamesFieldAndIndexOfAFault) {
  EXPECT_EQ(complaint([](Parts&) {}), "");
  EXPECT_EQ(complaint([](Parts& p) { p.routes_shape = {8, 2}; }), "t: routed_experts: shape [8, 2], expected 3 axes");
  EXPECT_EQ(complaint([](Parts& p) {
              p.routes.clear();
              p.routes_shape = {4, 0, 2};
            }),
            "t: routed_experts: shape [4, 0, 2], expected [tokens, layers, top_k]");
  EXPECT_EQ(complaint([](Parts& p) { p.cu_seqlens = {1, 3, 4}; }), "t: cu_seqlens[0]: 1, expected 0");
  EXPECT_EQ(complaint([](Parts& p) { p.cu_seqlens = {0, 3, 2, 4}; }), "t: cu_seqlens[2]: 2 is less than 3 before it");
  EXPECT_EQ(complaint([](Parts& p) {
              p.cu_seqlens = {0, 3, 5};
            }),
            "t: cu_seqlens[2]: 5, expected the 4 tokens of routed_experts");
  EXPECT_THAT(complaint([](Parts& p) { p.cu_seqlens = {0}; }), HasSubstr("t: cu_seqlens: 1 entries"));
  EXPECT_EQ(complaint([](Parts& p) {
              p.per_sequence["prompt_lengths"] = {1, 2};
            }),
            "t: prompt_lengths[1]: 2, expected 0 to 1");
  EXPECT_EQ(complaint([](Parts& p) { p.per_sequence["group_ids"] = {1}; }), "t: group_ids: shape [1], expected [2]");
  EXPECT_THAT(complaint([](Parts& p) { p.per_sequence["group_ids"] = {-1, 0}; }), HasSubstr("t: group_ids[0]: -1"));
}

TEST(TraceReader, RejectsInvalidBatching) {
  const auto batched = [](std::vector<std::int32_t> micro_step, std::vector<std::int32_t> rank, const char* ranks) {
    return complaint([&](Parts& p) {
      p.per_sequence = {{"micro_step", micro_step}, {"rank", rank}};
      if (ranks != nullptr) p.metadata["ranks"] = ranks;
    });
  };
  EXPECT_EQ(batched({0, 1}, {0, 3}, "4"), "");
  EXPECT_EQ(batched({0, 1}, {0, 4}, "4"), "t: rank[1]: 4, expected 0 to 3");
  EXPECT_EQ(batched({0, 1}, {-1, 0}, nullptr), "t: rank[0]: -1, expected 0 to 65535");
  EXPECT_EQ(batched({0, 2}, {0, 0}, nullptr), "t: micro_step[1]: 2, expected 0 to 1");
  EXPECT_THAT(batched({0, 1}, {0, 3}, "many"),
              HasSubstr("t: __metadata__.ranks: must be an integer from 1 to 65536 (is 'many')"));
  EXPECT_EQ(complaint([](Parts& p) {
              p.per_sequence["rank"] = {0, 0};
            }),
            "t: micro_step: is missing: micro_step and rank go together");
}

TEST(TraceReader, RefusesMetadataThatContradictsTheTensors) {
  const auto with = [](const char* key, const char* value) {
    return complaint([&](Parts& p) { p.metadata[key] = value; });
  };
  EXPECT_EQ(with("top_k", "3"), "t: __metadata__.top_k: must be 2 (is '3')");
  EXPECT_EQ(with("num_experts", "1"), "t: __metadata__.num_experts: must be an integer from 2 to 255 (is '1')");
  EXPECT_EQ(with("num_experts", "256"), "t: __metadata__.num_experts: must be an integer from 2 to 255 (is '256')");
  EXPECT_EQ(with("num_experts", "255"), "");
  EXPECT_EQ(with("layer_ids", "[3, 7]"), "");
  EXPECT_THAT(with("layer_ids", "[3]"), HasSubstr("__metadata__.layer_ids: expected a JSON list of 2 integers"));
  EXPECT_THAT(with("layer_ids", "[3, "), HasSubstr("__metadata__.layer_ids: expected a JSON list of 2 integers"));
  EXPECT_EQ(with("layer_ids", "[3, -7]"), "t: __metadata__.layer_ids[1]: must be an integer from 0 to 2147483647");
  EXPECT_EQ(with("whole_batches", "1"), "t: __metadata__.whole_batches: '1', expected true or false");
  EXPECT_EQ(with("whole_batches", "false"), "");
  EXPECT_THAT(with("format", "foremoe.load/1"),
              HasSubstr("is a load, expected a trace. A load has no routes: give the trace that it counts"));
  EXPECT_THAT(with("format", "foremoe.trace/3"), HasSubstr("expected foremoe.trace/1 or foremoe.trace/2"));
}

TEST(TraceReader, ReadsLayersThatDifferAndWeightlessIds) {
  Parts parts;
  parts.metadata = {{"format", "foremoe.trace/2"}, {"num_experts", "8"},          {"top_k", "2"},
                    {"weightless_experts", "4"},   {"experts_of_layer", "[8,4]"}, {"top_k_of_layer", "[1,2]"}};
  const RoutingTrace trace = read(parts);
  EXPECT_EQ(trace.weightless_experts, 4);
  EXPECT_THAT(trace.experts_of_layer, ElementsAre(8, 4));
  EXPECT_THAT(trace.top_k_of_layer, ElementsAre(1, 2));

  const std::string path = testing::TempDir() + "trace_file_layers.safetensors";
  write_trace(trace, path);
  EXPECT_EQ(Safetensors::open(path).text("format"), "foremoe.trace/2");
  EXPECT_EQ(read_trace(path).experts_of_layer, trace.experts_of_layer);
  EXPECT_EQ(read_trace(path).top_k_of_layer, trace.top_k_of_layer);
  EXPECT_EQ(read_trace(path).weightless_experts, 4);
  write_trace(read(Parts()), path);
  EXPECT_EQ(Safetensors::open(path).text("format"), "foremoe.trace/1") << "older readers can read it";
  std::filesystem::remove(path);

  const auto with = [](const char* key, const char* value) {
    return complaint([&](Parts& p) { p.metadata[key] = value; });
  };
  EXPECT_EQ(with("experts_of_layer", "[8, 9]"), "t: experts_of_layer[1]: 9, expected 1 to 8");
  EXPECT_EQ(with("experts_of_layer", "[8, 1]"), "t: experts_of_layer[1]: 1, but a token chooses 2 of them");
  EXPECT_EQ(with("experts_of_layer", "[8]"), "t: __metadata__.experts_of_layer: expected a JSON list of 2 integers");
  EXPECT_EQ(with("experts_of_layer", "[8, 0]"),
            "t: __metadata__.experts_of_layer[1]: must be an integer from 1 to 2147483647");
  EXPECT_EQ(with("top_k_of_layer", "[3, 1]"), "t: top_k_of_layer[0]: 3, expected 1 to 2");
  EXPECT_THAT(with("weightless_experts", "248"), HasSubstr("t: weightless_experts: 248, expected 0 to 247"));
  EXPECT_THAT(with("weightless_experts", "-1"), HasSubstr("t: __metadata__.weightless_experts: must be an integer"));
}

TEST(TraceReader, RefusesEveryTruncation) {
  Parts parts;
  parts.per_sequence = {{"micro_step", {1, 0}}, {"rank", {0, 9}}};
  const std::vector<std::byte> whole = parts.file();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(read_trace(Safetensors::parse(std::span(whole).first(size), "t")), InputError) << size;
  }
}

}  // namespace
}  // namespace foremoe
