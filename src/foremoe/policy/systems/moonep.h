#pragma once

// MoonEP (https://github.com/MoonshotAI/MoonEP): in every micro-step, after the router, every rank gets exactly its
// share of all tokens, and with them copies of experts from one other home. Residency `shared`.
//
// A rank's capacity is ⌊total / R⌋, one more on the first (total mod R) ranks; its balance is the load of its home
// experts minus the capacity. While one is positive: the rank with the smallest balance is filled by the one with the
// largest, whose balance falls by as much. It may become negative; then the rank is filled by another in its turn. So a
// receiver has exactly one home, at most E/R guests, and after at most R − 1 pairs all balances are 0. Then every home
// serves its receivers: again and again the one that lacks most, from the expert of which most is left.
//
// Read so. MoonEP reserves E/R slots on every rank, and then ρ is 1. With fewer guest slots a receiver takes the
// largest parts that have a slot, and the rest stays home: what MoonEP's first version did for its B slots, except that
// it read further experts from afar instead.
//
// Options. `bound`: no further pair once every balance is at most bound·capacity, which issue 30 asks for: "balanced
// within a bound" for less weight traffic. The maintainers answer there that exact balance is a deliberate choice, so
// the default is 0.
//
// Online: copies begin after the router. Published about the planning kernel is "negligible overhead", no time; 0 is
// assumed, in its favour.
// Cost. O(R²) for the pairs, O(E/R) per guest.

#include "foremoe/policy/policy.h"

namespace foremoe {

struct MoonepOptions {
  double bound = 0;  // tolerated excess, as a part of the capacity
};

std::unique_ptr<Policy> make_moonep(const MoonepOptions& options = {});

}  // namespace foremoe
