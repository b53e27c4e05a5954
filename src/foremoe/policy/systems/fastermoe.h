#pragma once

// FasterMoE (He et al., PPoPP 2022, https://doi.org/10.1145/3503221.3508418): the experts of busy ranks are *shadowed*,
// that is broadcast to all ranks, each of which then serves its own tokens of them.
//
// Model, as the artifact of the paper has it (https://github.com/thu-pacman/FasterMoE, fmoe/transformer.py). A layer,
// forward and backward, whose busiest rank has B tokens is expected to take
//   B·(3·compute + 4·send)              without shadows: three products (forward, and two backward) and four messages
//                                       (dispatch and combine, forward and backward) of each token;
//   B·3·compute + 2·shadows·broadcast   with some: B counts what is left at homes and every rank's own tokens of
//                                       shadows; every expert goes out once, and its gradient comes back once.
// Shadows are added while the second estimate does not rise, and used if its least value is below the first.
//
// Rules: who is shadowed next.
//   worker  the most loaded expert that is left on the most loaded rank. The default.
//   whole   all experts of the next rank, by their loads before any shadow, but never the last rank's: the artifact,
//           which adds up the experts of a rank before it decides.
//   expert  the most loaded expert of all, by the authors' later code (https://github.com/laekov/fastmoe,
//           fmoe/fastermoe/shadow_policy.py). Its B is the largest *expert* left at its home, it keeps the messages
//           and counts one broadcast per shadow: 3·compute·B + 4·send·B + shadows·broadcast. A step must lower it.
//
// Why `worker`. It is our reading, not anybody's code: the artifact's model with the paper's unit, an expert. With one
// expert per rank the artifact does the same, but for its fixed order of ranks. With 16 or more per rank its shadows
// are of 16 experts or more: a burden on every other rank, and more slots than any comparison here has. Of the three
// rules `worker` has the least mean ρ on all load tables with two slots, so comparisons use the strongest.
//
// Slots. A shadow takes a guest slot on every rank but its home, so that there are at most guest_slots of them; the
// authors have no such limit. Where `whole` finds fewer slots than a rank has experts, the most loaded of these take
// what there is and the search ends: whole ranks or nothing would be nothing in every comparison with few slots.
//
// Not followed: two slips of the artifact. It multiplies the time of products by the bytes of a value, and when it
// shadows a rank it forgets what this rank has of earlier shadows.
//
// Constants. The codes' are of two-matrix experts in float32, 50 Gb/s and 11.5 Tflop/s. Here they are gated experts of
// Qwen3-30B-A3B in bf16, 400 Tflop/s, about what grouped products reach on an H100, and per direction 450 GB/s of
// NVLink where the group is one node, else 400 Gb/s. A policy knows neither cluster nor model; FasterMoeOptions has
// them all. The width of a token cancels out, and that inside an expert weighs messages against the rest.
//
// As a plan. Residency `shared`. Ties go to the lowest rank and expert (torch.sort promises no order among equals).
//
// In the simulator (laekov/fastmoe, cuda/fastermoe/smart_schedule.h, fmoe/fastermoe/schedule.py): shadows are broadcast
// after dispatch beside own experts, kept for the backward, and their gradients reduced.
//
// No counterpart in a plan: a shadow on a rank that has no token for it (broadcast by FasterMoE, no guest here),
// pipelined exchange and computation ("smart schedule"), topology-aware gating, which changes the model.

#include <optional>

#include "foremoe/policy/placed_plan.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// NCCL's broadcast (cuda/fastermoe/smart_schedule.h: ncclBcast): the home sends to the next rank that receives the
// expert, that one to the next, piece by piece. So each link carries the expert once. Only ranks with a guest are in
// the ring. The latency of its hops is not added up. Where guests come over the host path there is no ring, and their
// gradients go home one by one.
void send_in_ring(const CopiesOfExpert& copies, std::span<int> sent);

enum class FasterMoeRule : std::uint8_t { kWorker, kWhole, kExpert };

struct FasterMoeOptions {
  FasterMoeRule rule = FasterMoeRule::kWorker;
  double hidden = 2048;                    // width of a token
  double intermediate = 768;               // width inside an expert
  double matrices = 3;                     // gate, up, down
  double bytes_per_value = 2;              // of tokens and weights
  std::optional<double> bytes_per_second;  // of a rank's link; none: 450e9 if the group is one node, else 50e9
  double flops_per_second = 400e12;        // of a rank, as its products reach
};

struct FasterMoeSeconds {
  double compute = 0;    // one product of a token with all matrices of an expert
  double send = 0;       // one message of a token
  double broadcast = 0;  // of an expert
};

FasterMoeSeconds fastermoe_seconds(const FasterMoeOptions& options, Topology topology);

// The experts to shadow, in the order in which they are chosen, at most load.guest_slots.
std::vector<ExpertId> fastermoe_shadows(const LayerLoad& load, const FasterMoeOptions& options);

std::unique_ptr<Policy> make_fastermoe(const FasterMoeOptions& options = {});

}  // namespace foremoe
