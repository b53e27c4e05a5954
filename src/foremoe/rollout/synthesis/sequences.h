#pragma once

// Which sequences a synthetic step has: how long, in which group, in which micro-step on which rank.

#include <vector>

#include "foremoe/rollout/synthesis/token_router.h"

namespace foremoe {

// Micro-step after micro-step, rank after rank. The lengths of a rank fill its tokens exactly; a sequence may be empty.
std::vector<SyntheticSequence> draw_sequences(const SynthesisOptions& options, const TokenRouter& router);

}  // namespace foremoe
