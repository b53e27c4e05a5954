#pragma once

// LLEP, Least-Loaded Expert Parallelism (arXiv 2601.17111, ICML 2026,
// https://github.com/SalesforceAIResearch/LeastLoadedEP): in every micro-step, after the router, what is too much for
// an expert's home spills to the least loaded ranks, with a copy of the expert. Residency `shared`.
//
// Where the imbalance of the homes is at most λ, nothing is done. Else experts are visited by load, largest first. A
// rank's effective load is what it has been given plus its own experts that are yet to come, its capacity α·mean. The
// home serves what its capacity leaves; the rest goes in chunks to the rank with the least effective load that has
// capacity, skipping chunks below a minimum unless they are all that is left. What no rank has capacity for goes to the
// least loaded one.
//
// The defaults are those of the public command: α = 1, at least 1,024 tokens in a chunk, λ = 1.3. `llep` uses them as
// they are: on the shared tables a rank has 16,000 tokens or more in the mean. On an input with less than some thousand
// tokens per rank nearly every chunk is too small, whole remainders go to the least loaded rank, and balance is poor.
//
// Inferred. Spilling is limited by the guest slots: a rank whose slots hold other experts is passed over, and home
// takes part in the choice of who gets what nobody has capacity for (the public code has memory for any number of
// copies and excludes home). Without slot_limit there are, as in that code, as many slots as some rank needs in some
// layer of some micro-step, whatever guest slots are asked for; the plan records their number, and what counts memory
// counts them all. Then home is never chosen: it is at its capacity while tokens are left, and another rank is below.
// The capacity is ⌈α·mean⌉; the code rounds down, which leaves remainders of up to R − 1 tokens to copy an expert for.
// After every chunk the ranks are sorted anew; the code does so in one of its two branches.
//
// Online: copies begin after the router. The planning time is not published to us; 0 is assumed, in its favour.
// Cost. O(E·log E), and O(R) per chunk.

#include "foremoe/policy/policy.h"

namespace foremoe {

struct LlepOptions {
  double capacity_factor = 1.0;      // α
  std::int64_t min_chunk = 1024;     // tokens
  double imbalance_threshold = 1.3;  // λ, of ρ at homes; 0: always spill
  bool slot_limit = true;            // false: as many guest slots as a rank ever needs
};

std::unique_ptr<Policy> make_llep(const LlepOptions& options = {});

}  // namespace foremoe
