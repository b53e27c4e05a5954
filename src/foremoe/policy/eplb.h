#pragma once

// EPLB (DeepSeek, https://github.com/deepseek-ai/EPLB): all replicas placed anew from expected loads, each serving an
// equal part of its expert's tokens. Five policies, by what they expect and by who splits the tokens:
//
//                                     equal split     our exact assignment on the same placement
//   mean of a step                    eplb            eplb-exact
//   moving average, now and then      eplb-ema
//   every micro-step                  eplb-oracle     eplb-oracle-exact
//
// The mean is of the former step where its load is given (`previous_load`), which is what EPLB can know when it runs,
// else of this step, which foresight permits. Equal weight is given to tokens, not to micro-steps. The oracle places
// every micro-step by that micro-step's own loads, and moves whatever changes in between.
//
// Moving average ("EMA LB" of the review of ForeMoE, §1.5). After every micro-step â ← α·c + (1 − α)·â for each expert;
// before every period-th micro-step place anew by â. The step begins with the mean of the former step's micro-steps
// where that is given, and is placed by it; without it nothing is known: the first micro-step's loads begin the
// average, and homes serve alone until the first replacement. So this policy alone never looks ahead. Inferred: the
// review (as FlexMoE, LAER-MoE and others do) averages over steps of pre-training, places every 50 and gives no α; a
// plan is of one step, whose micro-steps take their part here, and its 8 micro-steps per step are our period.
//
// A rank has E/R + G slots, so that there are E + R·G replicas. As in the reference, replicas are placed hierarchically
// (groups to nodes, replicas inside nodes) when the router's expert groups divide by the nodes, else globally. Load
// tables know of no groups: one by default, so that on more than one node "global" is what the reference chooses. It
// is also the better of EPLB's two ways here, and gives the project's reference figures (with 8 groups q30-ep64 has a
// mean ρ of 1.56 instead of 1.298).

#include "foremoe/policy/policy.h"

namespace foremoe {

enum class EplbMode : std::uint8_t {
  kAsReference,   // hierarchical when the groups divide by the nodes, else global
  kHierarchical,  // skipped when they do not
  kGlobal,        // all ranks as one node
};

struct EplbOptions {
  EplbMode mode = EplbMode::kAsReference;
  int num_groups = 1;  // of consecutive experts, ≥ 1; more than one where the router limits a token to some of them
};

struct EplbEmaOptions {
  EplbOptions placement;
  double decay = 0.1;  // α, of the newest micro-step, in (0, 1]
  int period = 8;      // micro-steps from one placement to the next, ≥ 1
};

std::unique_ptr<Policy> make_eplb(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_exact(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_ema(const EplbEmaOptions& options = {});
std::unique_ptr<Policy> make_eplb_oracle(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_oracle_exact(const EplbOptions& options = {});

}  // namespace foremoe
