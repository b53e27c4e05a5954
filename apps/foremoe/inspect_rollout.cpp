// What a trace or a load holds: sizes, and how uneven it is.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/trace_file.h"
#include "inspection.h"
#include "load_picture.h"
#include "messages.h"
#include "terminal.h"
#include "text_table.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const LoadViolation& v) {
  return {{"max_vio", v.max_vio}, {"min_vio", v.min_vio}, {"avg_vio", v.avg_vio}};
}

Json to_json(const LayerStatistics& s, int layer, std::span<const double> rho) {
  return {{"layer", layer},
          {"rho", {{"step", s.step_ratio}, {"mean", s.mean_ratio}, {"max", s.max_ratio}}},
          {"step", to_json(s.step)},
          {"mean_micro_step", to_json(s.mean_micro_step)},
          {"worst_micro_step", to_json(s.worst_micro_step)},
          {"fluctuation", s.fluctuation},
          {"micro_step_rho", rho}};
}

Json describe_trace(const RoutingTrace& trace) {
  std::int64_t longest = 0;
  for (int s = 0; s < trace.num_sequences(); ++s) longest = std::max(longest, trace.sequence_length(s));
  Json json{{"kind", "trace"},
            {"model", trace.model},
            {"origin", trace.origin},
            {"sequences", trace.num_sequences()},
            {"tokens", trace.num_tokens},
            {"longest_sequence", longest},
            {"layers", trace.num_layers},
            {"layer_ids", trace.layer_ids},
            {"experts", trace.num_experts},
            {"top_k", trace.top_k},
            {"recorded_ranks", trace.ranks}};
  return json;
}

void print_trace(const Json& trace, const std::string& path) {
  const auto number = [&](const char* key) { return trace[key].get<std::int64_t>(); };
  fmt::print("{}: a trace of {} in {} (the longest {}), {}, top-{} of {}\n", path, counted(number("tokens"), "token"),
             counted(number("sequences"), "sequence"), number("longest_sequence"), counted(number("layers"), "layer"),
             number("top_k"), counted(number("experts"), "expert"));
  for (const char* key : {"model", "origin"}) {
    if (!trace[key].get<std::string>().empty()) fmt::print("{}: {}\n", key, trace[key].get<std::string>());
  }
}

// [micro_step][layer][rank], tokens that the ranks' own experts receive.
Array<Tokens, 3> loads_at_home(const LoadTable& table, ArrayView<const RankId, 2> home) {
  const auto& shape = table.load.shape();
  Array<Tokens, 3> loads({shape[0], shape[1], shape[2]});
  std::vector<std::int64_t> of_expert(shape[3]);
  for (std::size_t m = 0; m < shape[0]; ++m) {
    for (std::size_t l = 0; l < shape[1]; ++l) {
      table.expert_loads(MicroStepId{m}, LayerId{l}, of_expert);
      for (std::size_t e = 0; e < of_expert.size(); ++e) loads(m, l, home(l, e)) += Tokens{of_expert[e]};
    }
  }
  return loads;
}

void print_layers(const std::vector<LayerStatistics>& layers, const std::vector<std::vector<double>>& rho) {
  double largest = 1;
  for (const LayerStatistics& s : layers) largest = std::max(largest, s.max_ratio);
  TextTable table(
      {"layer", "ρ step", "ρ mean", "ρ max", "max_vio", "min_vio", "avg_vio", "fluctuation", "micro-steps"});
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerStatistics& s = layers[l];
    table.add({fmt::format("{}", l), fmt::format("{:.3f}", s.step_ratio), fmt::format("{:.3f}", s.mean_ratio),
               fmt::format("{:.3f}", s.max_ratio), fmt::format("{:.3f}", s.step.max_vio),
               fmt::format("{:.3f}", s.step.min_vio), fmt::format("{:.3f}", s.step.avg_vio),
               fmt::format("{:.3f}", s.fluctuation), sparkline(rho[l], 1, largest, 32)});
  }
  fmt::print("{}\n", table.to_string());
}

}  // namespace

nlohmann::ordered_json inspect_rollout(const Safetensors& file, bool is_trace, const InspectArguments& arguments) {
  Json json{{"kind", "load"}};
  InputOptions input = arguments.input;
  if (is_trace) {
    const RoutingTrace trace = read_trace(file);
    json = describe_trace(trace);
    if (!trace.has_batching() && input.ranks == 0) {
      note(fmt::format("{}: no batching recorded; taken as one micro-step on one rank (--ranks R for more)",
                       input.path));
      input.ranks = 1;
      input.tokens_per_rank = std::max<std::int64_t>(1, trace.num_tokens);
    }
  }
  ThreadPool pool;
  const LoadTable load = read_step(input, pool).load;
  const Array<RankId, 2> homes = initial_homes(arguments.homes, load);
  const std::vector<LayerStatistics> layers = layer_statistics(load, homes);
  const Array<double, 2> ratios = imbalance_ratios(load, homes);  // [micro_step][layer]

  std::vector<std::vector<double>> rho(layers.size());  // [layer][micro_step]
  json["micro_steps"] = load.num_micro_steps();
  json["layers"] = load.num_layers();
  json["ranks"] = load.num_ranks();
  json["ranks_per_node"] = load.ranks_per_node;
  json["experts"] = load.num_experts();
  json["top_k"] = load.top_k;
  json["load_digest"] = load_digest(load);
  json["layer_statistics"] = Json::array();
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (std::size_t m = 0; m < ratios.extent(0); ++m) rho[l].push_back(ratios(m, l));
    json["layer_statistics"].push_back(to_json(layers[l], static_cast<int>(l), rho[l]));
  }
  const auto worst = std::ranges::max_element(layers, {}, &LayerStatistics::mean_ratio);
  const int layer = layer_to_draw(arguments, load.num_layers(), static_cast<int>(worst - layers.begin()));
  if (arguments.json) return json;

  if (is_trace) print_trace(json, input.path);
  fmt::print("{}{}, top-{}\n", is_trace ? "as batched: " : fmt::format("{}: a load of ", input.path), describe(load),
             load.top_k);
  if (std::ranges::all_of(load.load.flat(), [](Tokens tokens) { return tokens == Tokens{0}; })) {
    fmt::print("no load\n");
    return json;
  }
  fmt::print("\n");
  print_layers(layers, rho);
  print_picture(loads_at_home(load, homes), layer, arguments);
  return json;
}

int layer_to_draw(const InspectArguments& arguments, int num_layers, int most_uneven) {
  const int layer = arguments.layer.value_or(most_uneven);
  if (layer >= num_layers && arguments.layer) {
    throw InputError({.file = "--layer", .field = {}, .index = {}},
                     fmt::format("{}, but {} has {}", layer, arguments.input.path, counted(num_layers, "layer")));
  }
  return layer;
}

void print_picture(const Array<Tokens, 3>& rank_loads, int layer, const InspectArguments& arguments) {
  LoadPicture picture{
      .title = fmt::format("Layer {}: tokens that each of {} ranks serves", layer, rank_loads.extent(2)),
      .rank_loads = Array<Tokens, 2>({rank_loads.extent(0), rank_loads.extent(2)}),
      .max_rows = arguments.rows,
      .columns = terminal_columns(),
      .color = wants_color()};
  for (std::size_t m = 0; m < rank_loads.extent(0); ++m) {
    std::ranges::copy(rank_loads.row(m, layer), picture.rank_loads.row(m).begin());
  }
  fmt::print("{}", draw(picture));
}

}  // namespace foremoe::cli
