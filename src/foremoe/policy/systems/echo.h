#pragma once

// ECHO, Elastic Cloning for Hot Experts (Megatron-LM pull request 2368, a paused prototype). In every micro-step, after
// the router, each rank's tokens above the mean load spill to ranks below the mean, which have one spare expert slot
// each. Residency `shared`.
//
// Spill. A rank serves its home experts, smallest first, up to the mean ⌊total / R⌋. The excess, from its largest
// experts, spills. A rank's room is the mean minus the tokens that it serves of its own experts.
// Packing. Ranks are visited in descending order of room. Each takes the expert with the most tokens left to spill, up
// to its room. The maximum is approximate: spills are queued in eight buckets, one for at least the mean and seven of
// width about mean/7. Buckets are served largest first, each in FIFO order. An expert with tokens left is appended to
// the bucket for that number. We omit the pull request's one-shot algorithm.
//
// Our reading. Like the pull request, `echo` uses one slot per rank, even if there are more guest slots. Without guest
// slots, it moves no tokens. Spilled tokens without a slot stay home. Ties go to the lowest id (the sort of the
// original guarantees no order).
//
// Online. Copies begin after the router. The planning time is unpublished. We assume 0, which favours ECHO.
// Cost. O(E·log E + R·log R).

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_echo();

}  // namespace foremoe
