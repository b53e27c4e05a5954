#pragma once

// ECHO, Elastic Cloning for Hot Experts (Megatron-LM pull request 2368, a paused prototype): in every micro-step, after
// the router, what spills over a rank's mean load goes to one spare expert slot on every rank that has less. Residency
// `shared`.
//
// Spill. A rank keeps its home experts, smallest first, up to the mean ⌊total / R⌋; what exceeds it spills, from its
// largest experts. The room of a rank is what it lacks to the mean.
// Packing. Ranks by room, largest first, take one expert each: one that has most left to spill, as far as the room
// goes. "Most" is approximate: spills wait in eight buckets of width mean/7, largest bucket first, in a bucket first
// come first served; what is left of an expert goes to the end of the bucket that it then belongs to. The pull
// request's other algorithm, one shot, is not built.
//
// Read so. `echo` packs, with one slot per rank however many guest slots there are, as the pull request does; with none
// it does nothing. What finds no slot stays home. Ties go to the lowest id (the sort of the original promises no
// order).
//
// Online: copies begin after the router. The planning time is not published to us; 0 is assumed, in its favour.
// Cost. O(E·log E + R·log R).

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_echo();

}  // namespace foremoe
