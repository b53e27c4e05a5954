#pragma once

// LLEP, Least-Loaded Expert Parallelism (arXiv 2601.17111, ICML 2026,
// https://github.com/SalesforceAIResearch/LeastLoadedEP): after each router, an expert's tokens above the capacity of
// its home spill to the least loaded ranks, which receive a copy of the expert. Residency `shared`.
//
// If the imbalance of the homes is at most λ, no tokens spill. Otherwise experts are visited in descending order of
// load. A rank's effective load is its assigned tokens plus those of its own experts not visited so far; its capacity
// is ⌊α·⌊mean⌋⌋. The home serves tokens up to its capacity. The rest goes in chunks to the rank with the least
// effective load that has capacity. A rank with room for less than the minimum chunk is skipped unless it can take the
// whole rest. If no rank qualifies, the rest goes to the least loaded rank.
//
// The defaults are those of the public command: α = 1, at least 1,024 tokens per chunk, λ = 1.3. `llep` uses them
// unchanged, since a rank in the shared tables has 16,000 tokens or more on average. With less than a few thousand
// tokens per rank, nearly every chunk is too small, whole remainders go to the least loaded rank, and balance is poor.
//
// Inferred. Guest slots limit spilling: a rank without a slot for the expert is skipped, and tokens stay home if no
// rank has one. The public code has memory for any number of copies. Without slot_limit, the plan has the largest
// number of slots that any rank needs in any layer and micro-step, regardless of the requested guest slots. The plan
// records this number, and memory figures count all slots.
//
// As in the public code, the capacity is ⌊α·⌊mean⌋⌋. If α is 1, up to R − 1 tokens are then above all capacities, and
// copies are made for them alone. We sort ranks after every chunk; the public code does so in one of two branches.
//
// Online. Copies begin after the router. The planning time is unpublished; we assume 0, which favours LLEP.
// Cost. O(E·log E), and O(R) per chunk.

#include "foremoe/policy/policy.h"

namespace foremoe {

struct LlepOptions {
  double capacity_factor = 1.0;      // α
  std::int64_t min_chunk = 1024;     // tokens
  double imbalance_threshold = 1.3;  // λ, largest ρ at homes without spilling; 0: always spill
  bool slot_limit = true;            // false: as many guest slots as any rank ever needs
};

std::unique_ptr<Policy> make_llep(const LlepOptions& options = {});

}  // namespace foremoe
