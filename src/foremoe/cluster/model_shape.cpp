#include "foremoe/cluster/model_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>

#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"

namespace foremoe {

std::int64_t AttentionShape::parameters(int hidden) const {
  const std::int64_t queries = std::int64_t{heads} * key_width;
  const std::int64_t values = std::int64_t{heads} * value_width;
  const std::int64_t query =
      query_rank == 0 ? hidden * queries : std::int64_t{hidden} * query_rank + query_rank * queries;
  const std::int64_t key_value = kv_rank == 0
                                     ? std::int64_t{hidden} * kv_heads * (key_width + value_width)
                                     : std::int64_t{hidden} * (kv_rank + rotary_width) +
                                           std::int64_t{kv_rank} * kv_heads * (key_width - rotary_width + value_width);
  return query + key_value + values * hidden;
}

std::int64_t AttentionShape::flops_per_token(int context) const {
  return std::int64_t{2} * heads * (key_width + value_width) * context;
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

std::int64_t ModelShape::parameters_besides_experts() const {
  return layers() * attention_parameters() + moe_layers * (shared_parameters() + router_parameters()) +
         dense_layers * dense_parameters() + 2 * head_parameters();
}

std::int64_t ModelShape::parameters() const {
  return parameters_besides_experts() + std::int64_t{moe_layers} * experts * expert_parameters();
}

std::span<const ModelShape> model_shapes() {
  // The presets up to Mixtral-8x7B are from each model's config.json on huggingface.co: hidden_size,
  // moe_intermediate_size, intermediate_size (of dense layers), num_attention_heads, num_key_value_heads, head_dim,
  // q_lora_rank, kv_lora_rank, qk_nope_head_dim + qk_rope_head_dim, v_head_dim, vocab_size, n_group, topk_group.
  static const std::array<ModelShape, 10> kShapes{{
      // Qwen/Qwen3-30B-A3B: num_hidden_layers 48
      {.name = "Qwen3-30B-A3B",
       .moe_layers = 48,
       .experts = 128,
       .top_k = 8,
       .hidden = 2048,
       .intermediate = 768,
       .vocabulary = 151936,
       .attention = {.heads = 32, .kv_heads = 4, .key_width = 128, .value_width = 128}},
      // Qwen/Qwen3-235B-A22B: num_hidden_layers 94
      {.name = "Qwen3-235B-A22B",
       .moe_layers = 94,
       .experts = 128,
       .top_k = 8,
       .hidden = 4096,
       .intermediate = 1536,
       .vocabulary = 151936,
       .attention = {.heads = 64, .kv_heads = 4, .key_width = 128, .value_width = 128}},
      // deepseek-ai/DeepSeek-V3: num_hidden_layers 61, first_k_dense_replace 3; without its multi-token prediction
      // layer
      {.name = "DeepSeek-V3",
       .moe_layers = 58,
       .dense_layers = 3,
       .experts = 256,
       .top_k = 8,
       .groups = {.count = 8, .per_token = 4},
       .shared_experts = 1,
       .hidden = 7168,
       .intermediate = 2048,
       .dense_intermediate = 18432,
       .vocabulary = 129280,
       .attention = {.heads = 128,
                     .kv_heads = 128,
                     .key_width = 192,
                     .value_width = 128,
                     .query_rank = 1536,
                     .kv_rank = 512,
                     .rotary_width = 64}},
      // zai-org/GLM-4.5-Air: num_hidden_layers 46, first_k_dense_replace 1; without its multi-token prediction layer
      {.name = "GLM-4.5-Air",
       .moe_layers = 45,
       .dense_layers = 1,
       .experts = 128,
       .top_k = 8,
       .shared_experts = 1,
       .hidden = 4096,
       .intermediate = 1408,
       .dense_intermediate = 10944,
       .vocabulary = 151552,
       .attention = {.heads = 96, .kv_heads = 8, .key_width = 128, .value_width = 128}},
      // moonshotai/Kimi-K2-Instruct: num_hidden_layers 61, first_k_dense_replace 1
      {.name = "Kimi-K2",
       .moe_layers = 60,
       .dense_layers = 1,
       .experts = 384,
       .top_k = 8,
       .shared_experts = 1,
       .hidden = 7168,
       .intermediate = 2048,
       .dense_intermediate = 18432,
       .vocabulary = 163840,
       .attention = {.heads = 64,
                     .kv_heads = 64,
                     .key_width = 192,
                     .value_width = 128,
                     .query_rank = 1536,
                     .kv_rank = 512,
                     .rotary_width = 64}},
      // mistralai/Mixtral-8x7B-v0.1: num_hidden_layers 32, intermediate_size 14336
      {.name = "Mixtral-8x7B",
       .moe_layers = 32,
       .experts = 8,
       .top_k = 2,
       .hidden = 4096,
       .intermediate = 14336,
       .vocabulary = 32000,
       .attention = {.heads = 32, .kv_heads = 8, .key_width = 128, .value_width = 128}},
      // From FineMoE (arXiv 2511.16947), table 2, whose fifth model is Mixtral-8x7B. Experts have the two matrices of
      // GPT's feed-forward block, 8192 or 16384 wide. These have the parameters of three matrices of two thirds of the
      // width. Vocabularies and key-value heads are those of GPT-2, since the table has none.
      {.name = "GPT-32x1.3B",
       .moe_layers = 24,
       .experts = 32,
       .top_k = 2,
       .hidden = 2048,
       .intermediate = 5461,
       .vocabulary = 50257,
       .attention = {.heads = 16, .kv_heads = 16, .key_width = 128, .value_width = 128}},
      {.name = "GPT-16x3.2B",
       .moe_layers = 16,
       .experts = 16,
       .top_k = 2,
       .hidden = 4096,
       .intermediate = 10923,
       .vocabulary = 50257,
       .attention = {.heads = 32, .kv_heads = 32, .key_width = 128, .value_width = 128}},
      {.name = "GPT-8x6.7B",
       .moe_layers = 32,
       .experts = 8,
       .top_k = 2,
       .hidden = 4096,
       .intermediate = 10923,
       .vocabulary = 50257,
       .attention = {.heads = 32, .kv_heads = 32, .key_width = 128, .value_width = 128}},
      // From the same table, with the vocabulary, key-value heads and three matrices of Mixtral-8x7B.
      {.name = "Mixtral-16x2B",
       .moe_layers = 32,
       .experts = 16,
       .top_k = 2,
       .hidden = 2048,
       .intermediate = 8192,
       .vocabulary = 32000,
       .attention = {.heads = 32, .kv_heads = 8, .key_width = 64, .value_width = 64}},
  }};
  return kShapes;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const ModelShape& shape : model_shapes()) names.push_back(shape.name);
  return names;
}

std::optional<ModelShape> find_model_shape(std::string_view name) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  const auto shapes = model_shapes();
  const auto found = std::find_if(shapes.begin(), shapes.end(), [&](const ModelShape& shape) {
    return std::equal(name.begin(), name.end(), shape.name.begin(), shape.name.end(), same);
  });
  return found == shapes.end() ? std::nullopt : std::optional(*found);
}

ModelShape model_named(const std::string& name_or_path) {
  if (auto shape = find_model_shape(name_or_path)) return *std::move(shape);
  std::error_code error;
  if (std::filesystem::exists(name_or_path, error)) return read_model_config(name_or_path);
  throw InputError({.field = "model"},
                   fmt::format("'{}' is neither a file nor one of {}{}", name_or_path, fmt::join(model_names(), ", "),
                               did_you_mean(name_or_path, model_names())));
}

}  // namespace foremoe
