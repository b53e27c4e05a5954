#pragma once

// EPLB (DeepSeek, https://github.com/deepseek-ai/EPLB): all replicas placed anew from expected loads, each serving an
// equal part of its expert's tokens. Four policies, by what they expect and by who splits the tokens:
//
//                        equal split     our exact assignment on the same placement
//   mean of a step       eplb            eplb-exact
//   every micro-step     eplb-oracle     eplb-oracle-exact
//
// The mean is of the former step where its load is given (`previous_load`), which is what EPLB can know when it runs,
// else of this step, which foresight permits. The oracle places every micro-step by that micro-step's own loads, and
// moves whatever changes in between.
//
// A rank has E/R + G slots, so that there are E + R·G replicas. All ranks are one node and one group ("global"):
// groups are those of a router that limits a token to some of them, and the load tables know of none. It is also the
// better of EPLB's two ways here, and the one that gives the project's reference figures (with 8 groups q30-ep64 has
// a mean ρ of 1.56 instead of 1.298). Equal weight is given to tokens, not to micro-steps.

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_eplb();
std::unique_ptr<Policy> make_eplb_exact();
std::unique_ptr<Policy> make_eplb_oracle();
std::unique_ptr<Policy> make_eplb_oracle_exact();

}  // namespace foremoe
