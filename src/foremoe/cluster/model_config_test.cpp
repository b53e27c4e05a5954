#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

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
          {"layer_types", std::vector<std::string>(48, "chunked_attention")}};
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

// The relevant keys of deepseek-ai/DeepSeek-V4-Flash and V4-Pro, and of transformers' LongcatFlashConfig.
TEST(ModelConfig, ReadsThePresetsWithHashLayersOrIdsWithoutWeights) {
  const auto v4 = [](int hidden, int layers, int experts, int width, int heads, int rank, int groups, int topk,
                     const std::vector<int>& first) {
    std::vector<int> ratios = first;
    while (std::ssize(ratios) < layers) ratios.push_back(std::ssize(ratios) % 2 == 0 ? 4 : 128);
    ratios.push_back(0);  // of its multi-token prediction layer
    return json{{"model_type", "deepseek_v4"},
                {"hidden_size", hidden},
                {"num_hidden_layers", layers},
                {"num_hash_layers", 3},
                {"n_routed_experts", experts},
                {"num_experts_per_tok", 6},
                {"n_shared_experts", 1},
                {"moe_intermediate_size", width},
                {"num_attention_heads", heads},
                {"num_key_value_heads", 1},
                {"head_dim", 512},
                {"q_lora_rank", rank},
                {"o_lora_rank", 1024},
                {"o_groups", groups},
                {"index_topk", topk},
                {"index_n_heads", 64},
                {"index_head_dim", 128},
                {"sliding_window", 128},
                {"hc_mult", 4},
                {"vocab_size", 129280},
                {"num_nextn_predict_layers", 1},
                {"topk_method", "noaux_tc"},
                {"compress_ratios", ratios}};
  };
  const json longcat{{"model_type", "longcat_flash"},
                     {"hidden_size", 6144},
                     {"num_layers", 28},
                     {"n_routed_experts", 512},
                     {"zero_expert_num", 256},
                     {"moe_topk", 12},
                     {"expert_ffn_hidden_size", 2048},
                     {"ffn_hidden_size", 12288},
                     {"num_attention_heads", 64},
                     {"num_key_value_heads", 64},
                     {"head_dim", 64},
                     {"kv_lora_rank", 512},
                     {"q_lora_rank", 1536},
                     {"qk_nope_head_dim", 128},
                     {"qk_rope_head_dim", 64},
                     {"v_head_dim", 128},
                     {"tie_word_embeddings", false},
                     {"vocab_size", 131072}};
  for (const auto& [name, config] : std::vector<std::pair<std::string, json>>{
           {"DeepSeek-V4-Flash", v4(4096, 43, 256, 2048, 64, 1024, 8, 512, {0, 0})},
           {"DeepSeek-V4-Pro", v4(7168, 61, 384, 3072, 128, 1536, 16, 1024, {128, 128})},
           {"LongCat-Flash", longcat}}) {
    SCOPED_TRACE(name);
    const ModelShape a = parse_model_config(config.dump(), "config.json");
    const ModelShape b = *find_model_shape(name);
    expect_same(a, b);
    EXPECT_EQ(a.moe_layer_numbers(), b.moe_layer_numbers());
    EXPECT_EQ(std::ranges::count(a.layer_kinds, LayerKind::kHashMoe),
              std::ranges::count(b.layer_kinds, LayerKind::kHashMoe));
    EXPECT_EQ(a.weightless_experts, b.weightless_experts);
    EXPECT_EQ(a.notes, b.notes);
    const auto score = [](const ModelShape& model) {
      std::vector<double> of_kinds;
      model.visit_attention(
          [&](const AttentionShape& kind, int n) { of_kinds.push_back(n * kind.score_flops(8192, 8192.0 * 8192)); });
      return of_kinds;
    };
    EXPECT_EQ(score(a), score(b));
  }
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
  EXPECT_THAT(shape(qwen).moe_layer_numbers(), testing::Contains(1));
  EXPECT_THAT(shape(qwen).moe_layer_numbers(), testing::Not(testing::Contains(2)));
  qwen["mlp_only_layers"] = {47};
  EXPECT_EQ(shape(qwen).moe_layers, 23);

  json deepseek = deepseek_v3();
  deepseek["moe_layer_freq"] = 2;
  EXPECT_EQ(shape(deepseek).moe_layers, 29);  // 4, 6, … 60
  json listed = deepseek_v3();
  listed["mlp_layer_types"] = std::vector<std::string>(61, "sparse");
  EXPECT_EQ(shape(listed).moe_layers, 61);
  listed["mlp_layer_types"] = {"sparse"};
  EXPECT_THAT(error_of(listed), testing::HasSubstr("mlp_layer_types: has 1 values, but number 1 is needed"));
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
  EXPECT_THAT(error_with("topk_group", 9), testing::HasSubstr("topk_group: 9 is more than expert_groups, 8"));
  json small = deepseek_v3();
  small["n_routed_experts"] = 8;
  EXPECT_THAT(error_of(small), testing::HasSubstr("topk_group: 4 groups have fewer experts than a token chooses"));
}

TEST(ModelConfig, RefusesOtherFamiliesWithAFileThatDescribesTheModel) {
  json config = qwen3();
  config["model_type"] = "new_moe";
  const std::string error = error_of(config);
  EXPECT_THAT(error, testing::HasSubstr("some/model/config.json: model_type: 'new_moe' is not supported. Describe"));
  // The file that the command in the message writes is complete, since the config has the usual keys.
  std::string lines = error.substr(error.find("'name = ") + 1);
  lines = lines.substr(0, lines.find("' > model.toml"));
  for (std::size_t at = lines.find("' '"); at != std::string::npos; at = lines.find("' '")) lines.replace(at, 3, "\n");
  const ModelShape model = parse_model(lines, "model.toml");
  expect_same(model, *find_model_shape("Qwen3-30B-A3B"));
  EXPECT_EQ(model.name, "model");

  json nameless = qwen3();
  nameless.erase("model_type");
  EXPECT_EQ(error_of(nameless), "some/model/config.json: model_type: is missing");
}

TEST(ModelConfig, DoesNotSayThatAnUnknownFamilyIsDense) {
  const json llama{{"model_type", "llama"}, {"hidden_size", 4096}, {"num_hidden_layers", 32}};
  EXPECT_THAT(error_of(llama), testing::HasSubstr("'llama' is not supported, and no known key says how many experts"));
  EXPECT_THAT(error_of(llama), testing::HasSubstr("'experts = ?'"));
}

TEST(ModelConfig, FindsTheInnermostTextModel) {
  const json omni{
      {"model_type", "qwen3_omni_moe"},
      {"thinker_config",
       {{"model_type", "qwen3_omni_moe_thinker"}, {"text_config", qwen3()}, {"audio_config", {{"d_model", 8}}}}},
      {"talker_config", {{"num_experts", 7}}}};
  const ModelShape shape = parse_model_config(omni.dump(), "x");
  expect_same(shape, *find_model_shape("Qwen3-30B-A3B"));
  EXPECT_THAT(shape.notes,
              testing::UnorderedElementsAre("its audio tower is not counted", "its talker is not counted"));
  const json outer{{"model_type", "minimax_m3_vl"}, {"llm_config", {{"language_config", qwen3()}}}};
  expect_same(parse_model_config(outer.dump(), "x"), *find_model_shape("Qwen3-30B-A3B"));
}

TEST(ModelConfig, ReadsPythonsNumbers) {
  const std::string text = R"({"a": [0.0, Infinity, -Infinity, NaN], "b\"NaN": "\\", )" + qwen3().dump().substr(1);
  expect_same(parse_model_config(text, "x"), *find_model_shape("Qwen3-30B-A3B"));
}

TEST(ModelConfig, CountsTiedEmbeddingsOnce) {
  json config = qwen3();
  config["tie_word_embeddings"] = true;
  EXPECT_EQ(find_model_shape("Qwen3-30B-A3B")->parameters() - parse_model_config(config.dump(), "x").parameters(),
            std::int64_t{151936} * 2048);
}

TEST(ModelConfig, ReadsHashLayersAndExpertsWithoutWeights) {
  const json v4{{"model_type", "deepseek_v4"},
                {"hidden_size", 64},
                {"num_hidden_layers", 4},
                {"n_routed_experts", 8},
                {"num_experts_per_tok", 2},
                {"n_shared_experts", 1},
                {"moe_intermediate_size", 32},
                {"num_attention_heads", 4},
                {"num_key_value_heads", 1},
                {"head_dim", 16},
                {"q_lora_rank", 16},
                {"o_lora_rank", 16},
                {"o_groups", 2},
                {"index_topk", 4},
                {"index_n_heads", 2},
                {"index_head_dim", 8},
                {"sliding_window", 8},
                {"hc_mult", 2},
                {"vocab_size", 100},
                {"num_hash_layers", 1},
                {"compress_ratios", {0, 4, 128, 4}}};
  const ModelShape shape = parse_model_config(v4.dump(), "x");
  EXPECT_EQ(shape.layer_kinds.front(), LayerKind::kHashMoe);
  EXPECT_EQ(shape.moe_layers, 4);
  EXPECT_EQ(shape.attention.layers, 2);
  EXPECT_EQ(shape.other_attention.size(), 2U);

  const json longcat{{"model_type", "longcat_flash"},
                     {"hidden_size", 64},
                     {"num_layers", 2},
                     {"n_routed_experts", 8},
                     {"zero_expert_num", 4},
                     {"moe_topk", 10},
                     {"expert_ffn_hidden_size", 32},
                     {"ffn_hidden_size", 128},
                     {"num_attention_heads", 4},
                     {"kv_lora_rank", 16},
                     {"q_lora_rank", 16},
                     {"qk_nope_head_dim", 8},
                     {"qk_rope_head_dim", 8},
                     {"v_head_dim", 8},
                     {"vocab_size", 100}};
  const ModelShape zero = parse_model_config(longcat.dump(), "x");
  EXPECT_EQ(zero.weightless_experts, 4);
  EXPECT_EQ(zero.parameters_in_experts(), 2 * 8 * 3 * 64 * 32);
}

TEST(ModelFile, DescribesExpertsOfEachLayer) {
  const std::string file = R"(name = "mine"
layer_kinds = ["dense", "moe", "none", "hash"]
experts = [4, 8]
top_k = [1, 2]
hidden = 16
latent = 8
expert_matrices = 2
intermediate = 4
dense_intermediate = 32
vocabulary = 10
tied_embeddings = true
notes = ["a note"]
[[attention]]
heads = 2
key_width = 8
[[attention]]
heads = 2
key_width = 8
window = 4
layers = 1
)";
  const ModelShape model = parse_model(file, "mine.toml");
  EXPECT_THAT(model.moe_layer_numbers(), testing::ElementsAre(1, 3));
  EXPECT_THAT(model.experts_of_layer, testing::ElementsAre(4, 8));
  EXPECT_EQ(model.parameters_in_experts(), (4 + 8) * 2 * 8 * 4);
  // Attention of four layers, routers and projections to the latent width, the dense layer, the embedding.
  EXPECT_EQ(model.parameters_besides_experts(), 4 * 4 * 16 * 16 + 2 * (16 * 8 + 2 * 16 * 8) + 2 * 16 * 32 + 160);
  EXPECT_EQ(model.active_parameters() - model.parameters_besides_experts(), (1 + 2) * 2 * 8 * 4);
  EXPECT_EQ(model.notes.size(), 1U);

  const auto error_with_line = [&](const std::string& from, const std::string& to) -> std::string {
    std::string changed = file;
    changed.replace(changed.find(from), from.size(), to);
    try {
      parse_model(changed, "mine.toml");
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_with_line("hidden = 16", "hiden = 16"), "mine.toml: hiden line 5: is not a key of a model file");
  EXPECT_EQ(error_with_line("hidden = 16", ""), "mine.toml: hidden: is missing");
  EXPECT_THAT(error_with_line("hidden = 16", "hidden = 1.5"), testing::HasSubstr("must be a whole number"));
  EXPECT_THAT(error_with_line("hidden = 16", "hidden = \"hidden_size\""), testing::HasSubstr("must be a whole number"));
  EXPECT_THAT(error_with_line("[4, 8]", "[4]"), testing::HasSubstr("experts line 3: has 1 values, but there are 2"));
  EXPECT_THAT(error_with_line("\"hash\"", "\"moo\""), testing::HasSubstr("\"moo\" (layer 3) is not one of dense, moe"));
  EXPECT_THAT(error_with_line("layers = 1", "layers = 9"), testing::HasSubstr("is more than the 4 layers"));
  EXPECT_THAT(error_with_line("layers = 1", ""), testing::HasSubstr("is needed for every kind of attention but"));
}

TEST(ModelConfig, RejectsUnsupportedKeysThatChangeTheLayers) {
  for (const char* key : {"interleave_moe_layer_step", "moe_layers", "expert_layer_period", "expert_layer_offset",
                          "full_attention_interval", "attn_layer_period", "decoder_sparse_step", "mlp_only_layers"}) {
    EXPECT_EQ(error_with(key, json(2)),
              std::string("some/model/config.json: ") + key + ": is not supported in a deepseek_v3 model");
    EXPECT_EQ(error_with(key, nullptr), "no error");
  }
  std::vector<std::string> types(61, "full_attention");
  EXPECT_EQ(error_with("layer_types", types), "no error");
  types[1] = "linear_attention";
  EXPECT_EQ(
      error_with("layer_types", types),
      "some/model/config.json: layer_types: \"linear_attention\" of layer 1 is not supported in a deepseek_v3 model");
}

TEST(ModelConfig, RejectsContradictoryNumbers) {
  const std::string file = "some/model/config.json: ";
  json config = qwen3();
  config["num_local_experts"] = 64;
  EXPECT_EQ(error_of(config), file + "num_local_experts: is 64, but another key says 128");
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
  EXPECT_EQ(error_of(config), file + "decoder_sparse_step: is 0");
  config = llama4();
  config["interleave_moe_layer_step"] = 0;
  EXPECT_EQ(error_of(config), file + "interleave_moe_layer_step: is 0");
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
  config["shared_expert_intermediate_size"] = 1000;
  const ModelShape shape = parse_model_config(config.dump(), "x");
  EXPECT_EQ(shape.shared_width(), 1000);
  EXPECT_EQ(shape.shared_parameters(), 3 * 2048 * 1000);
}

TEST(ModelConfig, ErrorsNameMissingAndWrongKeys) {
  json config = qwen3();
  config.erase("num_experts");
  EXPECT_EQ(error_of(config), "some/model/config.json: num_experts: is missing");
  EXPECT_EQ(error_with("hidden_size", "wide"), "some/model/config.json: hidden_size: must be a whole number");
  EXPECT_EQ(error_with("hidden_size", -1), "some/model/config.json: hidden_size: -1 is not between 1 and 16777216");
  EXPECT_EQ(error_with("num_hidden_layers", 3), "some/model/config.json: num_hidden_layers: leaves no MoE layer");
  EXPECT_EQ(error_with("v_head_dim", nullptr), "some/model/config.json: v_head_dim: is missing");
  EXPECT_EQ(error_with("qk_nope_head_dim", nullptr), "some/model/config.json: qk_nope_head_dim: is missing");
  EXPECT_THAT(error_with("num_hidden_layers", 5000), testing::HasSubstr("5000 is not between 1 and 4096"));
  EXPECT_THAT(error_with("num_experts_per_tok", 300), testing::HasSubstr("num_experts_per_tok"));
  EXPECT_EQ(error_of(json::array()), "some/model/config.json: is not a JSON object");
  EXPECT_THROW(parse_model_config("{", "x"), InputError);
  EXPECT_THROW(read_model_config("."), InputError);
}

}  // namespace foremoe
