#pragma once

// FasterMoE (He et al., PPoPP 2022, https://doi.org/10.1145/3503221.3508418): *shadows* experts of busy ranks, i.e.
// broadcasts them to all ranks. Each rank serves its own tokens of a shadowed expert.
//
// Model, from the paper's artifact (https://github.com/thu-pacman/FasterMoE, fmoe/transformer.py). If the busiest rank
// has B tokens, the expected time of a layer (forward and backward) is
//   B·(3·compute + 4·send)              without shadows: three products (forward, and two backward) and four messages
//                                       (dispatch and combine, forward and backward) per token;
//   B·3·compute + 2·shadows·broadcast   with shadows: B counts a rank's unshadowed home experts and its own tokens of
//                                       shadows; each shadow is broadcast once, and its gradient is reduced once.
// Shadows are added until the second estimate rises. They are used if this estimate falls below the first.
//
// Rules for the next shadow:
//   worker  the most loaded remaining expert of the most loaded rank. Default.
//   whole   all experts of the next rank by initial load, except the last rank's. This is the artifact's rule. It adds
//           up a rank's experts before it decides.
//   expert  the most loaded expert of all, as in the authors' later code (https://github.com/laekov/fastmoe,
//           fmoe/fastermoe/shadow_policy.py). B is the largest *expert* load left at home. The estimate keeps the
//           messages and counts one broadcast per shadow: 3·compute·B + 4·send·B + shadows·broadcast. Each shadow must
//           lower the estimate.
//
// Why `worker`. `worker` is our reading: the artifact's model applied to the paper's unit, an expert. With one expert
// per rank, the artifact does the same except for its fixed order of ranks. With 16 or more experts per rank, it
// shadows at least 16 at a time. This loads every other rank and needs more slots than any comparison here has. With
// two slots, `worker` has the lowest mean ρ of the three rules on all load tables, so comparisons use `worker`.
//
// Slots. A shadow uses a guest slot on every rank except its home, so there are at most guest_slots shadows. The
// authors have no limit. If `whole` finds fewer slots than the rank has experts, its most loaded experts take the free
// slots and the search ends. With few slots, a rule that shadows only whole ranks would never shadow an expert.
//
// We do not reproduce two bugs of the artifact. It multiplies the time of products by the bytes of a value. When it
// shadows a rank, it drops that rank's tokens of earlier shadows.
//
// Constants. The published codes assume two-matrix experts in float32, 50 Gb/s and 11.5 Tflop/s. The defaults here are
// gated experts of Qwen3-30B-A3B in bf16, 400 Tflop/s (about what grouped products reach on an H100), and per direction
// 450 GB/s of NVLink if the group is one node, else 400 Gb/s. A policy knows neither cluster nor model, so these are
// FasterMoeOptions. `hidden` cancels out; `intermediate` determines the weight of messages relative to the other terms.
//
// As a plan. Residency `shared`. Ties go to the lowest rank and expert (torch.sort does not define their order).
//
// The simulator broadcasts shadows after dispatch while ranks compute their own experts, keeps them for the backward,
// and reduces their gradients (laekov/fastmoe, cuda/fastermoe/smart_schedule.h, fmoe/fastermoe/schedule.py).
//
// Not part of a plan: shadows on ranks that have no tokens for the expert (FasterMoE broadcasts to all ranks),
// pipelined exchange and computation ("smart schedule"), and topology-aware gating, which changes the model.

#include <optional>

#include "foremoe/policy/placed_plan.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// NCCL's broadcast (cuda/fastermoe/smart_schedule.h: ncclBcast). The home sends an expert in pieces to the next
// receiving rank, which forwards them to the next, so each link carries the expert once. Only ranks with a guest are in
// the ring. Hop latency is not summed. On the host path, there is no ring, and gradients go home one by one.
void send_in_ring(const CopiesOfExpert& copies, std::span<int> sent);

enum class FasterMoeRule : std::uint8_t { kWorker, kWhole, kExpert };

struct FasterMoeOptions {
  FasterMoeRule rule = FasterMoeRule::kWorker;
  double hidden = 2048;                    // width of a token
  double intermediate = 768;               // width inside an expert
  double matrices = 3;                     // gate, up, down
  double bytes_per_value = 2;              // of tokens and weights
  std::optional<double> bytes_per_second;  // of a rank's link; default: 450e9 if the group is one node, else 50e9
  double flops_per_second = 400e12;        // reached by a rank's products
};

struct FasterMoeSeconds {
  double compute = 0;    // one product of a token with all matrices of an expert
  double send = 0;       // one message of a token
  double broadcast = 0;  // one expert
};

FasterMoeSeconds fastermoe_seconds(const FasterMoeOptions& options, Topology topology);

// Returns the experts to shadow, in order of choice, at most load.guest_slots of them.
std::vector<ExpertId> fastermoe_shadows(const LayerLoad& load, const FasterMoeOptions& options);

std::unique_ptr<Policy> make_fastermoe(const FasterMoeOptions& options = {});

}  // namespace foremoe
