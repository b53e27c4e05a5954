#include "foremoe/transfer/expert_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

TEST(ExpertLayout, SwigluHasGateUpThenDown) {
  const ExpertLayout layout = swiglu_layout(16, 24);
  ASSERT_EQ(layout.num_segments(), 2U);
  EXPECT_EQ(layout.segments()[0].name, "gate_up");
  EXPECT_EQ(layout.segments()[0].elements, 2 * 24 * 16);
  EXPECT_EQ(layout.segments()[1].name, "down");
  EXPECT_EQ(layout.segments()[1].elements, 16 * 24);
  EXPECT_EQ(layout.offset(0), 0U);
  EXPECT_EQ(layout.offset(1), 2U * 24 * 16 * 4);
  EXPECT_EQ(layout.bytes(), Bytes{3 * 24 * 16 * 4});
  EXPECT_EQ(layout.bytes_read_by(Pass::kForward), Bytes{3 * 24 * 16 * 4});
  EXPECT_EQ(layout.bytes_read_by(Pass::kBackward), Bytes{3 * 24 * 16 * 4});
}

TEST(ExpertLayout, LargeExpertsDoNotOverflow) {
  EXPECT_EQ(swiglu_layout(65536, 32768).bytes(), Bytes{std::int64_t{3} * 65536 * 32768 * 4});
}

TEST(ExpertLayout, SegmentsAndSlotsAreAligned) {
  const ExpertLayout layout(
      {{.name = "a", .elements = 1}, {.name = "b", .elements = 16}, {.name = "c", .elements = 17}});
  EXPECT_EQ(layout.offset(0), 0U);
  EXPECT_EQ(layout.offset(1), 64U);
  EXPECT_EQ(layout.offset(2), 128U);
  EXPECT_EQ(layout.bytes(), Bytes{256});
}

TEST(ExpertLayout, ACopyForOnePassContainsOnlyItsSegments) {
  const ExpertLayout layout({{.name = "both", .elements = 3},
                             {.name = "forward", .elements = 5, .type = DataType::kBfloat16, .in_backward = false},
                             {.name = "backward", .elements = 7, .in_forward = false}});
  EXPECT_EQ(layout.bytes_read_by(Pass::kForward), Bytes{3 * 4 + 5 * 2});
  EXPECT_EQ(layout.bytes_read_by(Pass::kBackward), Bytes{3 * 4 + 7 * 4});
}

TEST(ExpertLayout, TypesHaveSizesAndNames) {
  EXPECT_EQ(size_of(DataType::kFloat32), 4U);
  EXPECT_EQ(size_of(DataType::kBfloat16), 2U);
  EXPECT_EQ(to_string(DataType::kFloat32), "float32");
  EXPECT_EQ(to_string(DataType::kBfloat16), "bfloat16");
}

TEST(ExpertLayout, RejectsMissingAndEmptySegments) {
  EXPECT_THROW(ExpertLayout(std::vector<Segment>()), InputError);
  try {
    ExpertLayout({{.name = "gate_up", .elements = 4}, {.name = "down", .elements = 0}});
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().field, "segments");
    EXPECT_EQ(error.where().index, "[1]");
  }
}

TEST(ExpertLayout, RejectsNonPositiveSizesByName) {
  try {
    swiglu_layout(-8, -8);  // their product is positive
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().field, "hidden");
  }
  EXPECT_THROW(swiglu_layout(8, 0), InputError);
}

}  // namespace
}  // namespace foremoe
