#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using nlohmann::json;

// The relevant keys of the config.json of three families, as published on huggingface.co.
json qwen3() {
  return {{"hidden_size", 2048},       {"num_hidden_layers", 48},      {"num_experts", 128},
          {"num_experts_per_tok", 8},  {"moe_intermediate_size", 768}, {"intermediate_size", 6144},
          {"num_attention_heads", 32}, {"num_key_value_heads", 4},     {"head_dim", 128},
          {"vocab_size", 151936},      {"decoder_sparse_step", 1},     {"mlp_only_layers", json::array()},
          {"model_type", "qwen3_moe"}};
}

json deepseek_v3() {
  return {{"hidden_size", 7168},
          {"num_hidden_layers", 61},
          {"first_k_dense_replace", 3},
          {"n_routed_experts", 256},
          {"num_experts_per_tok", 8},
          {"n_shared_experts", 1},
          {"moe_intermediate_size", 2048},
          {"intermediate_size", 18432},
          {"num_attention_heads", 128},
          {"num_key_value_heads", 128},
          {"q_lora_rank", 1536},
          {"kv_lora_rank", 512},
          {"qk_nope_head_dim", 128},
          {"qk_rope_head_dim", 64},
          {"v_head_dim", 128},
          {"vocab_size", 129280},
          {"moe_layer_freq", 1},
          {"model_type", "deepseek_v3"},
          {"n_group", 8},
          {"topk_group", 4},
          {"topk_method", "noaux_tc"}};
}

json mixtral() {
  return {{"hidden_size", 4096},      {"num_hidden_layers", 32},    {"num_local_experts", 8},
          {"num_experts_per_tok", 2}, {"intermediate_size", 14336}, {"num_attention_heads", 32},
          {"num_key_value_heads", 8}, {"vocab_size", 32000},        {"head_dim", nullptr},
          {"model_type", "mixtral"}};
}

// Llama-4-Maverick's config. Scout has 16 experts in every layer.
json llama4() {
  return {{"model_type", "llama4_text"},
          {"hidden_size", 5120},
          {"num_hidden_layers", 48},
          {"num_local_experts", 128},
          {"num_experts_per_tok", 1},
          {"intermediate_size", 8192},
          {"intermediate_size_mlp", 16384},
          {"num_attention_heads", 40},
          {"num_key_value_heads", 8},
          {"interleave_moe_layer_step", 2},
          {"head_dim", 128},
          {"vocab_size", 202048},
          {"layer_types", {"chunked_attention", "full_attention"}}};
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
  EXPECT_EQ(a.groups, b.groups);
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

TEST(ModelConfig, CountsTheMoeLayers) {
  const auto shape = [](const json& config) { return parse_model_config(config.dump(), "x"); };
  json maverick = llama4();
  EXPECT_EQ(shape(maverick).moe_layers, 24);
  EXPECT_EQ(shape(maverick).dense_layers, 24);
  EXPECT_EQ(shape(maverick).shared_experts, 1);
  EXPECT_NEAR(static_cast<double>(shape(maverick).parameters()) * 1e-9, 400, 1);  // as published
  maverick["moe_layers"] = {1, 3, 5};
  EXPECT_EQ(shape(maverick).moe_layers, 3);

  json scout = llama4();
  scout["interleave_moe_layer_step"] = 1;
  scout["num_local_experts"] = 16;
  EXPECT_EQ(shape(scout).moe_layers, 48);
  EXPECT_NEAR(static_cast<double>(shape(scout).parameters()) * 1e-9, 108, 1);  // 109 with the vision encoder

  json qwen = qwen3();
  qwen["mlp_only_layers"] = {0, 5, 5};
  EXPECT_EQ(shape(qwen).dense_layers, 2);
  qwen["mlp_only_layers"] = json::array();
  qwen["decoder_sparse_step"] = 2;
  EXPECT_EQ(shape(qwen).moe_layers, 24);
  qwen["mlp_only_layers"] = {47};
  EXPECT_THAT(error_of(qwen), testing::HasSubstr("mlp_only_layers"));
  qwen["mlp_only_layers"] = {48};
  EXPECT_THAT(error_of(qwen), testing::HasSubstr("mlp_only_layers: 48 is not a layer from 0 to 47"));
}

TEST(ModelConfig, ReadsTheGroupsThatTheRouterChoosesFrom) {
  const auto groups_with = [](const char* key, const json& value) {
    json config = deepseek_v3();
    config[key] = value;
    return parse_model_config(config.dump(), "x").groups;
  };
  constexpr ExpertGroups kNone{};
  EXPECT_EQ(groups_with("topk_group", 2), (ExpertGroups{.count = 8, .per_token = 2}));
  EXPECT_EQ(groups_with("n_group", 1), kNone);
  EXPECT_EQ(groups_with("n_group", nullptr), kNone);
  EXPECT_EQ(groups_with("topk_method", "greedy"), kNone);
  EXPECT_THAT(error_with("n_group", 7), testing::HasSubstr("n_group: 7 does not divide 256 experts"));
  EXPECT_THAT(error_with("topk_group", nullptr), testing::HasSubstr("topk_group: is missing"));
  EXPECT_THAT(error_with("topk_group", 9), testing::HasSubstr("topk_group: 9 is more than n_group, 8"));
  json small = deepseek_v3();
  small["n_routed_experts"] = 8;
  EXPECT_THAT(error_of(small), testing::HasSubstr("topk_group: 4 groups have fewer experts than a token chooses"));
}

TEST(ModelConfig, RejectsOtherFamiliesByName) {
  for (const char* other : {"jamba", "qwen3_next", "gpt_oss"}) {
    json config = qwen3();
    config["model_type"] = other;
    EXPECT_THAT(error_of(config), testing::HasSubstr(std::string("model_type: '") + other +
                                                     "' is not supported; expected one of mixtral, phimoe, olmoe"));
  }
  json nameless = qwen3();
  nameless.erase("model_type");
  EXPECT_EQ(error_of(nameless), "some/model/config.json: model_type: is missing");
}

TEST(ModelConfig, RejectsADenseModel) {
  const json llama{{"model_type", "llama"}, {"hidden_size", 4096}, {"num_hidden_layers", 32}};
  EXPECT_EQ(error_of(llama), "some/model/config.json: model_type: 'llama' is a dense model: it has no experts");
}

TEST(ModelConfig, RejectsUnsupportedKeysThatChangeTheLayers) {
  for (const char* key : {"interleave_moe_layer_step", "moe_layers", "expert_layer_period", "expert_layer_offset",
                          "full_attention_interval", "attn_layer_period", "decoder_sparse_step", "mlp_only_layers"}) {
    EXPECT_EQ(error_with(key, json(2)),
              std::string("some/model/config.json: ") + key + ": is not supported in a deepseek_v3 model");
    EXPECT_EQ(error_with(key, nullptr), "no error");
  }
  EXPECT_EQ(error_with("layer_types", {"full_attention", "full_attention"}), "no error");
  EXPECT_EQ(error_with("layer_types", {"full_attention", "linear_attention"}),
            "some/model/config.json: layer_types: \"linear_attention\" is not supported; expected \"full_attention\"");
}

TEST(ModelConfig, RejectsContradictoryNumbers) {
  const std::string file = "some/model/config.json: ";
  json config = qwen3();
  config["num_local_experts"] = 64;
  EXPECT_EQ(error_of(config), file + "num_local_experts: 64 experts, but another key says 128");
  config["num_local_experts"] = 128;
  EXPECT_EQ(error_of(config), "no error");

  config["num_key_value_heads"] = 5;
  EXPECT_EQ(error_of(config), file + "num_key_value_heads: 5 does not divide num_attention_heads, 32");
  config["num_key_value_heads"] = 64;
  EXPECT_EQ(error_of(config), file + "num_key_value_heads: 64 does not divide num_attention_heads, 32");
  config["num_key_value_heads"] = 4;
  config["num_attention_heads"] = 36;
  EXPECT_EQ(error_of(config), "no error");  // head_dim gives the width
  config.erase("head_dim");
  EXPECT_EQ(error_of(config), file + "num_attention_heads: 36 does not divide hidden_size, 2048");

  config = qwen3();
  config["decoder_sparse_step"] = 0;
  EXPECT_EQ(error_of(config), file + "decoder_sparse_step: 0 is not between 1 and 16777216");
  config = llama4();
  config["interleave_moe_layer_step"] = 0;
  EXPECT_EQ(error_of(config), file + "interleave_moe_layer_step: 0 is not between 1 and 16777216");
}

TEST(ModelConfig, RejectsARepeatedKey) {
  const auto error_of_text = [](const std::string& text) -> std::string {
    try {
      parse_model_config(text, "c");
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  };
  const std::string inner = R"({"hidden_size": 1024, )" + qwen3().dump().substr(1);
  EXPECT_EQ(error_of_text(inner), "c: hidden_size: appears twice");
  EXPECT_EQ(error_of_text(R"({"text_config": )" + inner + "}"), "c: hidden_size: appears twice");
  EXPECT_EQ(error_of_text(R"({"vision_config": {"hidden_size": 7}, "text_config": )" + qwen3().dump() + "}"),
            "no error");
}

TEST(ModelConfig, IsNamedAfterItsFolderOrFile) {
  EXPECT_EQ(parse_model_config(qwen3().dump(), "models/Mine-7B/config.json").name, "Mine-7B");
  EXPECT_EQ(parse_model_config(qwen3().dump(), "models/mine.json").name, "mine");
}

TEST(ModelConfig, ReadsSharedExpertsGivenAsOneWideExpert) {
  json config = qwen3();
  config["shared_expert_intermediate_size"] = 4 * 768;
  EXPECT_EQ(parse_model_config(config.dump(), "x").shared_experts, 4);
  config["shared_expert_intermediate_size"] = 1000;
  EXPECT_EQ(
      error_of(config),
      "some/model/config.json: shared_expert_intermediate_size: 1000 is not a multiple of moe_intermediate_size, 768");
}

TEST(ModelConfig, ErrorsNameMissingAndWrongKeys) {
  json config = qwen3();
  config.erase("num_experts");
  EXPECT_EQ(error_of(config), "some/model/config.json: num_experts: is missing");
  EXPECT_EQ(error_with("hidden_size", "wide"), "some/model/config.json: hidden_size: must be a whole number");
  EXPECT_EQ(error_with("hidden_size", -1), "some/model/config.json: hidden_size: -1 is not between 1 and 16777216");
  EXPECT_EQ(error_with("num_hidden_layers", 3), "some/model/config.json: num_hidden_layers: leaves no MoE layer");
  EXPECT_EQ(error_with("v_head_dim", nullptr), "some/model/config.json: v_head_dim: is missing");
  EXPECT_THAT(error_with("moe_layer_freq", 2), testing::HasSubstr("moe_layer_freq"));
  EXPECT_THAT(error_with("num_experts_per_tok", 300), testing::HasSubstr("num_experts_per_tok"));
  EXPECT_EQ(error_of(json::array()), "some/model/config.json: is not a JSON object");
  EXPECT_THROW(parse_model_config("{", "x"), InputError);
  EXPECT_THROW(read_model_config("."), InputError);
}

}  // namespace foremoe
