#include "foremoe/cluster/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using nlohmann::json;

// What of the config.json of three families counts, as published on huggingface.co.
json qwen3() {
  return {{"hidden_size", 2048},       {"num_hidden_layers", 48},      {"num_experts", 128},
          {"num_experts_per_tok", 8},  {"moe_intermediate_size", 768}, {"intermediate_size", 6144},
          {"num_attention_heads", 32}, {"num_key_value_heads", 4},     {"head_dim", 128},
          {"vocab_size", 151936},      {"decoder_sparse_step", 1},     {"mlp_only_layers", json::array()},
          {"model_type", "qwen3_moe"}};
}

json deepseek_v3() {
  return {{"hidden_size", 7168},           {"num_hidden_layers", 61},    {"first_k_dense_replace", 3},
          {"n_routed_experts", 256},       {"num_experts_per_tok", 8},   {"n_shared_experts", 1},
          {"moe_intermediate_size", 2048}, {"intermediate_size", 18432}, {"num_attention_heads", 128},
          {"num_key_value_heads", 128},    {"q_lora_rank", 1536},        {"kv_lora_rank", 512},
          {"qk_nope_head_dim", 128},       {"qk_rope_head_dim", 64},     {"v_head_dim", 128},
          {"vocab_size", 129280},          {"moe_layer_freq", 1}};
}

json mixtral() {
  return {{"hidden_size", 4096},      {"num_hidden_layers", 32},    {"num_local_experts", 8},
          {"num_experts_per_tok", 2}, {"intermediate_size", 14336}, {"num_attention_heads", 32},
          {"num_key_value_heads", 8}, {"vocab_size", 32000},        {"head_dim", nullptr}};
}

std::string error_of(const json& config) {
  try {
    parse_model_config(config.dump(), "some/model/config.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string error_with(const char* key, const json& value) {
  json config = deepseek_v3();
  config[key] = value;
  return error_of(config);
}

void expect_same(const ModelShape& a, const ModelShape& b) {
  EXPECT_EQ(a.moe_layers, b.moe_layers);
  EXPECT_EQ(a.dense_layers, b.dense_layers);
  EXPECT_EQ(a.experts, b.experts);
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.shared_experts, b.shared_experts);
  EXPECT_EQ(a.attention_parameters(), b.attention_parameters());
  EXPECT_EQ(a.attention.flops_per_token(100), b.attention.flops_per_token(100));
  EXPECT_EQ(a.parameters_besides_experts(), b.parameters_besides_experts());
  EXPECT_EQ(a.parameters(), b.parameters());
}

}  // namespace

TEST(ModelConfig, ReadsThePresetsFromTheirOwnFiles) {
  expect_same(parse_model_config(qwen3().dump(), "config.json"), *find_model_shape("Qwen3-30B-A3B"));
  expect_same(parse_model_config(deepseek_v3().dump(), "config.json"), *find_model_shape("DeepSeek-V3"));
  expect_same(parse_model_config(mixtral().dump(), "config.json"), *find_model_shape("Mixtral-8x7B"));
  expect_same(parse_model_config(json{{"text_config", qwen3()}}.dump(), "x"), *find_model_shape("Qwen3-30B-A3B"));
}

TEST(ModelConfig, IsNamedAsItsFolderOrFile) {
  EXPECT_EQ(parse_model_config(qwen3().dump(), "models/Mine-7B/config.json").name, "Mine-7B");
  EXPECT_EQ(parse_model_config(qwen3().dump(), "models/mine.json").name, "mine");
}

TEST(ModelConfig, SharedExpertsMayBeGivenAsOneWideOne) {
  json config = qwen3();
  config["shared_expert_intermediate_size"] = 4 * 768;
  EXPECT_EQ(parse_model_config(config.dump(), "x").shared_experts, 4);
  config["shared_expert_intermediate_size"] = 1000;
  EXPECT_EQ(
      error_of(config),
      "some/model/config.json: shared_expert_intermediate_size: 1000 is no multiple of moe_intermediate_size, 768");
}

TEST(ModelConfig, WhatIsMissingOrWrongIsNamed) {
  json config = qwen3();
  config.erase("num_experts");
  EXPECT_EQ(error_of(config), "some/model/config.json: n_routed_experts: is missing");
  EXPECT_EQ(error_with("hidden_size", "wide"), "some/model/config.json: hidden_size: must be a whole number");
  EXPECT_EQ(error_with("hidden_size", -1), "some/model/config.json: hidden_size: -1 is not between 1 and 16777216");
  EXPECT_EQ(error_with("num_hidden_layers", 3), "some/model/config.json: num_hidden_layers: leaves no MoE layer");
  EXPECT_EQ(error_with("v_head_dim", nullptr), "some/model/config.json: v_head_dim: is missing");
  EXPECT_THAT(error_with("moe_layer_freq", 2), testing::HasSubstr("moe_layer_freq"));
  EXPECT_THAT(error_with("num_experts_per_tok", 300), testing::HasSubstr("num_experts_per_tok"));
  EXPECT_EQ(error_of(json::array()), "some/model/config.json: is no JSON object");
  EXPECT_THROW(parse_model_config("{", "x"), InputError);
  EXPECT_THROW(read_model_config("."), InputError);
}

}  // namespace foremoe
