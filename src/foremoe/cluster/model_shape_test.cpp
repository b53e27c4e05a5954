#include "foremoe/cluster/model_shape.h"

#include <gtest/gtest.h>

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

}  // namespace foremoe
