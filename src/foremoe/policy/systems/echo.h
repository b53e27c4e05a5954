#pragma once

// ECHO, Elastic Cloning for Hot Experts (Megatron-LM pull request 2368, a paused prototype). In every micro-step, after
// the router, each rank's tokens above the mean load spill to ranks below the mean, which have one spare expert slot
// each. Residency `shared`.
//
// Spill. A rank serves its home experts, smallest first, up to the mean ⌊total / R⌋. The excess, from its largest
// experts, spills. A rank's room is the mean minus the tokens that it serves of its own experts.
// Packing. Ranks, in descending order of room, take one expert each: the one with the most tokens left to spill, as far
// as the room permits. The choice of the maximum is approximate. Spills wait in eight buckets, one for at least the
// mean and seven of width about mean/7. Buckets are served largest first, and first in, first out within a bucket. An
// expert with tokens left is appended to the bucket for that number. The pull request's one-shot algorithm is omitted.
//
// Our reading. `echo` packs with one slot per rank for any number of guest slots, as the pull request does, and does
// nothing without guest slots. Spilled tokens without a slot stay home. Ties go to the lowest id (the sort of the
// original guarantees no order).
//
// Online. Copies begin after the router. The planning time is unpublished; we assume 0, in ECHO's favour.
// Cost. O(E·log E + R·log R).

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_echo();

}  // namespace foremoe
