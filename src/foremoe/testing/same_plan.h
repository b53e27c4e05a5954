#pragma once

// For tests: expects that two plans are equal in all fields, and reports those that differ.

#include <gtest/gtest.h>

#include "foremoe/plan/step_plan.h"

namespace foremoe::test {

inline void expect_same_plan(const StepPlan& a, const StepPlan& b) {
  EXPECT_EQ(a.policy, b.policy);
  EXPECT_EQ(a.residency, b.residency);
  EXPECT_EQ(a.guest_slots, b.guest_slots);
  EXPECT_EQ(a.ranks_per_node, b.ranks_per_node);
  EXPECT_EQ(a.in_flight, b.in_flight);
  EXPECT_EQ(a.options, b.options);
  EXPECT_EQ(a.load_digest, b.load_digest);
  EXPECT_EQ(a.homes_digest, b.homes_digest);
  EXPECT_EQ(a.slot_expert, b.slot_expert);
  EXPECT_EQ(a.slot_tokens, b.slot_tokens);
  EXPECT_EQ(a.event_micro_step, b.event_micro_step);
  EXPECT_EQ(a.event_pass, b.event_pass);
  EXPECT_EQ(a.home, b.home);
  EXPECT_EQ(a.max_load, b.max_load);
  EXPECT_EQ(a.lower_bound, b.lower_bound);
}

}  // namespace foremoe::test
