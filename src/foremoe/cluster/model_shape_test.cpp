#include "foremoe/cluster/model_shape.h"

#include <gtest/gtest.h>

namespace foremoe {

TEST(ModelShape, IsFoundByNameWhateverTheCase) {
  for (const ModelShape& shape : model_shapes()) EXPECT_EQ(find_model_shape(shape.name)->name, shape.name);
  EXPECT_EQ(find_model_shape("qwen3-30b-a3b")->name, "Qwen3-30B-A3B");
  EXPECT_FALSE(find_model_shape("qwen3"));
  EXPECT_FALSE(find_model_shape(""));
}

TEST(ModelShape, AnExpertOfQwen3IsNineMegabytesInBf16) {
  EXPECT_EQ(find_model_shape("Qwen3-30B-A3B")->expert_bytes(), Bytes{9437184});
}

// Routed experts are nearly all of these models: their parameters must come out near the published totals.
TEST(ModelShape, RoutedExpertsAddUpToThePublishedSize) {
  const auto billions = [](const char* name) {
    const ModelShape shape = *find_model_shape(name);
    return static_cast<double>(shape.expert_parameters()) * shape.experts * shape.moe_layers * 1e-9;
  };
  EXPECT_NEAR(billions("Qwen3-30B-A3B"), 30.5, 2.5);
  EXPECT_NEAR(billions("Qwen3-235B-A22B"), 235, 12);
  EXPECT_NEAR(billions("DeepSeek-V3"), 671, 20);
  EXPECT_NEAR(billions("GLM-4.5-Air"), 106, 8);
  EXPECT_NEAR(billions("Kimi-K2"), 1026, 20);
  EXPECT_NEAR(billions("Mixtral-8x7B"), 46.7, 2.5);
}

}  // namespace foremoe
