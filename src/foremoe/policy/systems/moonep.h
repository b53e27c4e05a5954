#pragma once

// MoonEP (https://github.com/MoonshotAI/MoonEP): in every micro-step, after the router, every rank gets exactly its
// share of all tokens, and copies of the experts that it serves from one other home. Residency `shared`.
//
// A rank's capacity is ⌊total / R⌋, plus one on the first (total mod R) ranks; its balance is the load of its home
// experts minus the capacity. While any balance is positive, the rank with the largest fills the rank with the smallest
// to its capacity, and its own balance falls by as much. A rank whose own balance falls below zero is filled later. So
// a receiver has one home and at most E/R guests, and after at most R − 1 pairs all balances are 0. Then every home
// serves its receivers: repeatedly give tokens of the largest remaining expert to the receiver with the largest
// deficit.
//
// Our reading. MoonEP reserves E/R slots on every rank, and then ρ is 1. With fewer guest slots, a receiver takes the
// largest parts that its slots permit, and the rest stays home. MoonEP's first version did the same for its B slots,
// except that it read further experts remotely.
//
// Options. `bound` stops pairing once every balance is at most bound·⌊total / R⌋. Issue 30 asks for this ("balanced
// within a bound") to reduce weight traffic. The maintainers call exact balance deliberate, so the default is 0.
//
// Online. Copies begin after the router. For the planning kernel, only "negligible overhead" is published, no time; we
// assume 0, in MoonEP's favour.
// Cost. O(R²) for the pairs, O(E/R) per guest.

#include "foremoe/policy/policy.h"

namespace foremoe {

struct MoonepOptions {
  double bound = 0;  // tolerated excess, as a fraction of the capacity
};

std::unique_ptr<Policy> make_moonep(const MoonepOptions& options = {});

}  // namespace foremoe
