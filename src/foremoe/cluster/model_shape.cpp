#include "foremoe/cluster/model_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cctype>
#include <filesystem>
#include <numeric>

#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"

namespace foremoe {

std::span<const EmbeddedFile> embedded_models();  // data/models, embedded by src/foremoe/CMakeLists.txt

// Decaying, reading and updating one element of a linear attention's state, and reading it for the query.
constexpr double kStateFlops = 8;

std::int64_t AttentionShape::parameters(int hidden) const {
  const std::int64_t queries = std::int64_t{heads} * key_width;
  const std::int64_t values = std::int64_t{heads} * value_width;
  const std::int64_t query =
      query_rank == 0 ? hidden * queries : std::int64_t{hidden} * query_rank + query_rank * queries;
  const std::int64_t key_value = kv_rank == 0
                                     ? std::int64_t{hidden} * kv_heads * (key_width + value_width)
                                     : std::int64_t{hidden} * (kv_rank + rotary_width) +
                                           std::int64_t{kv_rank} * kv_heads * (key_width - rotary_width + value_width);
  return query + key_value + values * hidden + other_parameters;
}

std::int64_t AttentionShape::flops_per_token(int context) const {
  return std::int64_t{2} * heads * (key_width + value_width) * context;
}

double AttentionShape::score_flops(double tokens, double squared_lengths) const {
  if (state > 0) return kStateFlops * static_cast<double>(state) * tokens;
  double pairs = squared_lengths / 2;
  const double indexed = 2.0 * index_width * pairs;
  // A window cuts off the corner of each sequence's triangle, of the mean length squared_lengths ÷ tokens.
  if (window > 0 && squared_lengths > tokens * window)
    pairs = tokens * window * (1 - tokens * window / squared_lengths / 2);
  return static_cast<double>(flops_per_token(1)) * pairs + indexed;
}

std::int64_t AttentionShape::token_width() const {
  return (std::int64_t{heads} + kv_heads) * (key_width + value_width);
}

void expect_groups_fit(const ExpertGroups& groups, int experts, int top_k, const std::string& file) {
  const auto fail = [&](const char* field, const std::string& problem) {
    throw InputError({.file = file, .field = field}, problem);
  };
  if (groups.count < 1) fail("expert_groups", fmt::format("is {}, which is not positive", groups.count));
  if (groups.per_token < 1) fail("groups_per_token", fmt::format("is {}, which is not positive", groups.per_token));
  if (experts % groups.count != 0) {
    fail("expert_groups", fmt::format("{} does not divide {} experts", groups.count, experts));
  }
  if (groups.per_token > groups.count) {
    fail("groups_per_token", fmt::format("{} is more than expert_groups, {}", groups.per_token, groups.count));
  }
  if (experts / groups.count * groups.per_token < top_k) {
    fail("groups_per_token",
         fmt::format("{} groups have fewer experts than a token chooses, {}", groups.per_token, top_k));
  }
}

std::vector<int> ModelShape::moe_layer_numbers() const {
  std::vector<int> numbers;
  for (int l = 0; l < layers(); ++l) {
    const LayerKind kind = !layer_kinds.empty() ? layer_kinds[static_cast<std::size_t>(l)]
                           : l < dense_layers   ? LayerKind::kDense
                                                : LayerKind::kMoe;
    if (kind == LayerKind::kMoe || kind == LayerKind::kHashMoe) numbers.push_back(l);
  }
  return numbers;
}

std::int64_t ModelShape::parameters_in_experts() const {
  const std::int64_t all = experts_of_layer.empty()
                               ? std::int64_t{moe_layers} * experts
                               : std::accumulate(experts_of_layer.begin(), experts_of_layer.end(), std::int64_t{0});
  return all * expert_parameters();
}

std::int64_t ModelShape::parameters_besides_experts() const {
  std::int64_t attention_of_all = 0;
  visit_attention([&](const AttentionShape& kind, int n) { attention_of_all += n * kind.parameters(hidden); });
  const int matrices_of_words = tied ? has_embedding || has_head : has_embedding + has_head;
  return attention_of_all + moe_layers * (shared_parameters() + router_parameters()) +
         dense_layers * dense_parameters() + matrices_of_words * head_parameters() + other_parameters;
}

std::int64_t ModelShape::active_parameters() const {
  const std::int64_t chosen = top_k_of_layer.empty()
                                  ? std::int64_t{moe_layers} * top_k
                                  : std::accumulate(top_k_of_layer.begin(), top_k_of_layer.end(), std::int64_t{0});
  return parameters_besides_experts() + chosen * expert_parameters();
}

int first_moe_layer_of(const ModelShape& model, int stage, int stages) { return model.moe_layers * stage / stages; }

ModelShape stage_of(const ModelShape& model, int stage, int stages) {
  assert(stages <= model.moe_layers && 0 <= stage && stage < stages);
  const int begin = first_moe_layer_of(model, stage, stages);
  const int end = first_moe_layer_of(model, stage + 1, stages);
  const std::vector<int> moe_layers = model.moe_layer_numbers();
  const int first = begin == 0 ? 0 : moe_layers[static_cast<std::size_t>(begin - 1)] + 1;
  const int last = end == model.moe_layers ? model.layers() : moe_layers[static_cast<std::size_t>(end - 1)] + 1;
  const auto cut = [](auto& values, int from, int to) {
    if (!values.empty()) values = {values.begin() + from, values.begin() + to};
  };
  ModelShape part = model;
  part.moe_layers = end - begin;
  part.has_embedding = stage == 0;
  part.has_head = stage == stages - 1;
  if (stage > 0) part.other_parameters = 0;
  cut(part.layer_kinds, first, last);
  cut(part.experts_of_layer, begin, end);
  cut(part.top_k_of_layer, begin, end);
  part.dense_layers = part.layer_kinds.empty()
                          ? last - first - part.moe_layers
                          : static_cast<int>(std::ranges::count(part.layer_kinds, LayerKind::kDense));
  int left = last - first;
  int without = model.layers() - model.attention.layers;  // any attention
  const auto share = [&](int layers) { return layers * last / model.layers() - layers * first / model.layers(); };
  for (AttentionShape& kind : part.other_attention) {
    without -= kind.layers;
    kind.layers = std::min(left, share(kind.layers));
    left -= kind.layers;
  }
  if (part.attention.layers > 0) part.attention.layers = without == 0 ? left : share(part.attention.layers);
  if (model.attention.layers > 0 && part.attention.layers == 0 && !part.other_attention.empty()) {
    part.attention = part.other_attention.back();  // 0 would mean all layers
    part.other_attention.pop_back();
  }
  return part;
}

std::span<const ModelShape> model_shapes() {
  static const auto& shapes = *new std::vector<ModelShape>([] {  // never destroyed; see all_systems()
    std::vector<ModelShape> all;
    for (const EmbeddedFile& file : embedded_models()) {
      all.push_back(parse_model(file.text, fmt::format("{}.toml", file.name)));
    }
    return all;
  }());
  return shapes;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const EmbeddedFile& file : embedded_models()) names.emplace_back(file.name);
  return names;
}

std::optional<ModelShape> find_model_shape(std::string_view name) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  const auto files = embedded_models();
  const auto found =
      std::ranges::find_if(files, [&](const EmbeddedFile& file) { return std::ranges::equal(name, file.name, same); });
  if (found == files.end()) return std::nullopt;
  return parse_model(found->text, fmt::format("{}.toml", found->name));
}

ModelShape model_named(const std::string& name_or_path, const std::string& field) {
  if (auto shape = find_model_shape(name_or_path)) return *std::move(shape);
  std::error_code error;
  if (std::filesystem::exists(name_or_path, error)) {
    if (name_or_path.ends_with(".toml")) return parse_model(MappedFile(name_or_path).text(), name_or_path);
    return read_model_config(name_or_path);
  }
  throw InputError({.field = field},
                   fmt::format("'{}' is neither a file nor one of {}{}", name_or_path, fmt::join(model_names(), ", "),
                               did_you_mean(name_or_path, model_names())));
}

}  // namespace foremoe
