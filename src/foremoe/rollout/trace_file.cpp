#include "foremoe/rollout/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

#include "foremoe/rollout/file_kind.h"

namespace foremoe {

namespace {

constexpr std::size_t kMaxInt = std::numeric_limits<int>::max();

constexpr std::array<std::pair<DType, RouteType>, 4> kRouteTypes{{{DType::kU8, RouteType::kU8},
                                                                  {DType::kU16, RouteType::kU16},
                                                                  {DType::kI16, RouteType::kI16},
                                                                  {DType::kI32, RouteType::kI32}}};

void read_routes(const Safetensors& file, RoutingTrace& trace) {
  const TensorView& t = file.tensor("routed_experts", {DType::kU8, DType::kU16, DType::kI16, DType::kI32}, 3);
  if (t.shape[1] == 0 || t.shape[1] > kMaxInt || t.shape[2] == 0 || t.shape[2] > kMaxExperts) {
    file.fail("routed_experts", "",
              fmt::format("shape [{}], expected [tokens, layers, top_k]", fmt::join(t.shape, ", ")));
  }
  trace.type = std::ranges::find(kRouteTypes, t.dtype, [](const auto& p) { return p.first; })->second;
  trace.routes = t.bytes.data();
  trace.storage = file.storage();
  trace.num_tokens = static_cast<std::int64_t>(t.shape[0]);
  trace.num_layers = static_cast<int>(t.shape[1]);
  trace.top_k = static_cast<int>(t.shape[2]);
  file.integer("top_k", trace.top_k, trace.top_k);
  const std::int64_t most = std::min(kMaxExperts, num_ids(trace.type));
  trace.num_experts = static_cast<int>(file.integer("num_experts", trace.top_k, most));
}

// Reads an optional I32 tensor [sequences].
std::vector<std::int32_t> read_per_sequence(const Safetensors& file, const RoutingTrace& trace, const char* name) {
  if (!file.has(name)) return {};
  const auto sequences = static_cast<std::size_t>(trace.num_sequences());
  return file.tensor(name, {DType::kI32}, std::vector{sequences})
      .to_vector<std::int32_t>({.file = file.name(), .field = name});
}

void read_batching(const Safetensors& file, RoutingTrace& trace) {
  trace.micro_step = read_per_sequence(file, trace, "micro_step");
  trace.rank = read_per_sequence(file, trace, "rank");
  if (trace.rank.empty()) return;
  const auto told = [&](const char* key) {
    return file.metadata().contains(key) ? static_cast<int>(file.integer(key, 1, kMaxRanks)) : 0;
  };
  trace.ranks = told("ranks");
  trace.ranks_per_node = told("ranks_per_node");
}

void read_layers(const Safetensors& file, RoutingTrace& trace) {
  const auto layers = static_cast<std::size_t>(trace.num_layers);
  trace.layer_ids = read_per_layer(file, "layer_ids", layers, 0);
  if (trace.layer_ids.empty()) {
    trace.layer_ids.resize(layers);
    std::iota(trace.layer_ids.begin(), trace.layer_ids.end(), 0);
  }
  trace.experts_of_layer = read_per_layer(file, "experts_of_layer", layers, 1);
  trace.top_k_of_layer = read_per_layer(file, "top_k_of_layer", layers, 1);
  if (file.metadata().contains("weightless_experts")) {
    trace.weightless_experts = static_cast<int>(file.integer("weightless_experts", 0, kMaxExperts));
  }
}

}  // namespace

RoutingTrace read_trace(const Safetensors& file) {
  expect_format(file, kTraceFormat, kTraceFormat2);
  RoutingTrace trace;
  trace.name = file.name();
  read_routes(file, trace);
  trace.cu_seqlens =
      file.tensor("cu_seqlens", {DType::kI64}, 1).to_vector<std::int64_t>({.file = file.name(), .field = "cu_seqlens"});
  trace.prompt_lengths = read_per_sequence(file, trace, "prompt_lengths");
  trace.group_ids = read_per_sequence(file, trace, "group_ids");
  read_batching(file, trace);
  read_layers(file, trace);
  expect_valid(trace);
  infer_ranks(trace);
  trace.model = file.text_or("model", "");
  trace.origin = file.text_or("origin", "");
  const std::string whole = file.text_or("whole_batches", "false");
  trace.whole_batches = whole == "true";
  if (!trace.whole_batches && whole != "false") {
    file.fail("__metadata__.whole_batches", "", fmt::format("'{}', expected true or false", whole));
  }
  return trace;
}

RoutingTrace read_trace(const std::string& path) { return read_trace(open_input(path)); }

void write_trace(const RoutingTrace& trace, const std::string& path, const Metadata& extra) {
  const auto tokens = static_cast<std::size_t>(trace.num_tokens);
  const auto layers = static_cast<std::size_t>(trace.num_layers);
  const auto top_k = static_cast<std::size_t>(trace.top_k);
  const DType dtype = std::ranges::find(kRouteTypes, trace.type, [](const auto& p) { return p.second; })->first;
  std::vector<TensorData> tensors{{.name = "routed_experts",
                                   .dtype = dtype,
                                   .shape = {tokens, layers, top_k},
                                   .bytes = {trace.routes, tokens * layers * top_k * size_of(trace.type)}},
                                  tensor_data("cu_seqlens", std::span<const std::int64_t>(trace.cu_seqlens))};
  const bool is_new = trace.weightless_experts > 0 || !trace.experts_of_layer.empty() || !trace.top_k_of_layer.empty();
  Metadata metadata{{"format", std::string(is_new ? kTraceFormat2 : kTraceFormat)},
                    {"num_experts", fmt::to_string(trace.num_experts)},
                    {"top_k", fmt::to_string(trace.top_k)}};
  const auto add = [&](const char* name, const std::vector<std::int32_t>& values) {
    if (!values.empty()) tensors.push_back(tensor_data(name, std::span<const std::int32_t>(values)));
  };
  add("prompt_lengths", trace.prompt_lengths);
  add("group_ids", trace.group_ids);
  if (trace.has_batching()) {
    add("micro_step", trace.micro_step);
    add("rank", trace.rank);
    metadata.emplace("ranks", fmt::to_string(trace.ranks));
    metadata.emplace("ranks_per_node", fmt::to_string(trace.ranks_per_node));
  }
  add_per_layer(metadata, "layer_ids", trace.layer_ids);
  add_per_layer(metadata, "experts_of_layer", trace.experts_of_layer);
  add_per_layer(metadata, "top_k_of_layer", trace.top_k_of_layer);
  if (trace.weightless_experts > 0) {
    metadata.emplace("weightless_experts", fmt::to_string(trace.weightless_experts));
  }
  if (!trace.model.empty()) metadata.emplace("model", trace.model);
  if (!trace.origin.empty()) metadata.emplace("origin", trace.origin);
  if (trace.whole_batches) metadata.emplace("whole_batches", "true");
  metadata.insert(extra.begin(), extra.end());
  write_safetensors(path, std::move(tensors), metadata);
}

}  // namespace foremoe
