#include "foremoe/cluster/model_shape.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

namespace foremoe {

TEST(ModelShape, IsFoundByNameIgnoringCase) {
  for (const ModelShape& shape : model_shapes()) EXPECT_EQ(find_model_shape(shape.name)->name, shape.name);
  EXPECT_EQ(find_model_shape("qwen3-30b-a3b")->name, "Qwen3-30B-A3B");
  EXPECT_FALSE(find_model_shape("qwen3"));
  EXPECT_FALSE(find_model_shape(""));
}

TEST(ModelShape, AQwen3ExpertIsNineMegabytesInBf16) {
  EXPECT_EQ(find_model_shape("Qwen3-30B-A3B")->expert_bytes(), Bytes{9437184});
}

// Published totals in billions, from model cards and papers. ModelShape excludes only norms and biases.
TEST(ModelShape, ParametersMatchThePublishedSize) {
  const auto billions = [](const char* name) {
    return static_cast<double>(find_model_shape(name)->parameters()) * 1e-9;
  };
  EXPECT_NEAR(billions("Qwen3-30B-A3B"), 30.5, 0.1);
  EXPECT_NEAR(billions("Qwen3-235B-A22B"), 235, 0.5);
  EXPECT_NEAR(billions("DeepSeek-V3"), 671, 0.5);
  EXPECT_NEAR(billions("GLM-4.5-Air"), 106, 1);
  EXPECT_NEAR(billions("Kimi-K2"), 1040, 20);
  EXPECT_NEAR(billions("Mixtral-8x7B"), 46.7, 0.1);
}

// Active parameters: all except routed experts, plus top_k experts in each MoE layer.
TEST(ModelShape, ActiveParametersMatchThePublishedSize) {
  const auto billions = [](const char* name) {
    const ModelShape shape = *find_model_shape(name);
    return static_cast<double>(shape.parameters_besides_experts() +
                               std::int64_t{shape.moe_layers} * shape.top_k * shape.expert_parameters()) *
           1e-9;
  };
  EXPECT_NEAR(billions("Qwen3-30B-A3B"), 3.3, 0.1);
  EXPECT_NEAR(billions("Qwen3-235B-A22B"), 22, 0.5);
  EXPECT_NEAR(billions("DeepSeek-V3"), 37, 1);
  EXPECT_NEAR(billions("GLM-4.5-Air"), 12, 2);
  EXPECT_NEAR(billions("Kimi-K2"), 32.6, 1.5);
  EXPECT_NEAR(billions("Mixtral-8x7B"), 12.9, 0.1);
}

// FineMoE, table 2, names a model by its number of experts and its size with one expert, in billions of parameters. The
// paper does not define the size. This test counts the vocabulary once, since GPT's embedding is its output head.
TEST(ModelShape, FineMoeModelsWithOneExpertHaveTheSizeInTheirName) {
  const auto billions = [](const char* name) {
    ModelShape shape = *find_model_shape(name);
    shape.experts = 1;
    return static_cast<double>(shape.parameters() - shape.head_parameters()) * 1e-9;
  };
  EXPECT_NEAR(billions("GPT-32x1.3B"), 1.3, 0.05);
  EXPECT_NEAR(billions("GPT-16x3.2B"), 3.2, 0.25);
  EXPECT_NEAR(billions("GPT-8x6.7B"), 6.7, 0.1);
  EXPECT_NEAR(billions("Mixtral-16x2B"), 2, 0.05);
  EXPECT_NEAR(billions("Mixtral-8x7B"), 7, 0.15);
}

// Two matrices of GPT's feed-forward block, of width 4 · hidden.
TEST(ModelShape, AGptExpertHasTheParametersOfItsTwoMatrices) {
  for (const char* name : {"GPT-32x1.3B", "GPT-16x3.2B", "GPT-8x6.7B"}) {
    const ModelShape shape = *find_model_shape(name);
    const auto two = static_cast<double>(std::int64_t{2} * shape.hidden * 4 * shape.hidden);
    EXPECT_NEAR(static_cast<double>(shape.expert_parameters()) / two, 1, 1e-4) << name;
  }
}

// DeepSeek-V3's latent attention: 7168 · 1536 + 1536 · 128 · 192 (queries), 7168 · 576 + 512 · 128 · 256 (keys and
// values), 128 · 128 · 7168 (output). Qwen3's: 2048 · 4096 (queries), 2 · 2048 · 512, 4096 · 2048.
TEST(ModelShape, AttentionIsProjectedDirectlyOrThroughLatentVectors) {
  EXPECT_EQ(find_model_shape("DeepSeek-V3")->attention_parameters(),
            11010048 + 37748736 + 4128768 + 16777216 + 117440512);
  EXPECT_EQ(find_model_shape("Qwen3-30B-A3B")->attention_parameters(), 8388608 + 2 * 1048576 + 8388608);
  // 2 · 32 heads · (128 + 128) FLOPs for each token attended to.
  EXPECT_EQ(find_model_shape("Qwen3-30B-A3B")->attention.flops_per_token(10), 163840);
}

TEST(ModelShape, StagesHaveAllPartsOfTheModelOnce) {
  for (const ModelShape& shape : model_shapes()) {
    for (int stages = 1; stages <= shape.moe_layers; ++stages) {
      int layers = 0;
      int moe_layers = 0;
      std::int64_t parameters = 0;
      for (int s = 0; s < stages; ++s) {
        const ModelShape stage = stage_of(shape, s, stages);
        EXPECT_EQ(stage.moe_layers, shape.moe_layers / stages + (stage.moe_layers > shape.moe_layers / stages ? 1 : 0));
        EXPECT_EQ(moe_layers, first_moe_layer_of(shape, s, stages));
        moe_layers += stage.moe_layers;
        EXPECT_EQ(stage.dense_layers, s == 0 ? shape.dense_layers : 0);
        layers += stage.layers();
        parameters += stage.parameters();
      }
      EXPECT_EQ(moe_layers, shape.moe_layers);
      EXPECT_EQ(layers, shape.layers()) << shape.name;
      // The first and the last stage both need a tied matrix.
      const std::int64_t twice = shape.tied && stages > 1 ? shape.head_parameters() : 0;
      const double difference = static_cast<double>(parameters - twice - shape.parameters());
      // Kinds of attention can be rounded, by at most a layer of each stage.
      const double most = shape.other_attention.empty() ? 0 : 1e-2 * static_cast<double>(shape.parameters());
      EXPECT_LE(std::abs(difference), most) << shape.name << " " << stages;
    }
  }
}

TEST(ModelShape, StagesOfAHybridModelHaveItsAttentionLayersOnce) {
  ModelShape shape = *find_model_shape("Qwen3-Next-80B-A3B");
  ASSERT_EQ(shape.other_attention.size(), 1u);
  shape.attention.layers = 6;
  shape.other_attention.front().layers = 23;
  for (const int stages : {1, 2, 5, 8, 16}) {
    std::int64_t parameters = 0;
    for (int s = 0; s < stages; ++s) parameters += stage_of(shape, s, stages).parameters_besides_experts();
    const auto whole = static_cast<double>(shape.parameters_besides_experts());
    EXPECT_NEAR(static_cast<double>(parameters), whole, 0.02 * whole) << stages;
  }
}

TEST(ModelShape, AStageBeginsAfterTheLastMoeLayerOfThePreviousOne) {
  using enum LayerKind;
  ModelShape shape = *find_model_shape("Qwen3-30B-A3B");
  shape.moe_layers = 4;
  shape.dense_layers = 3;
  shape.layer_kinds = {kDense, kMoe, kNone, kMoe, kDense, kMoe, kMoe, kDense};
  shape.top_k_of_layer = {1, 2, 3, 4};
  shape.other_parameters = 5;
  const ModelShape first = stage_of(shape, 0, 2);
  const ModelShape last = stage_of(shape, 1, 2);
  EXPECT_EQ(first.layer_kinds, (std::vector{kDense, kMoe, kNone, kMoe}));
  EXPECT_EQ(last.layer_kinds, (std::vector{kDense, kMoe, kMoe, kDense}));
  EXPECT_EQ((std::pair{first.dense_layers, last.dense_layers}), (std::pair{1, 2}));
  EXPECT_EQ((std::pair{first.other_parameters, last.other_parameters}), (std::pair<std::int64_t, std::int64_t>{5, 0}));
  EXPECT_EQ((std::pair{first.has_embedding, last.has_embedding}), (std::pair{true, false}));
  EXPECT_EQ((std::pair{first.has_head, last.has_head}), (std::pair{false, true}));
  EXPECT_EQ(last.top_k_of_layer, (std::vector{3, 4}));
}

}  // namespace foremoe
