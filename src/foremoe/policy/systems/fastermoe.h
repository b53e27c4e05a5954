#pragma once

// FasterMoE (He et al., PPoPP 2022, https://doi.org/10.1145/3503221.3508418; https://github.com/laekov/fastmoe,
// fmoe/fastermoe/shadow_policy.py): the most loaded experts are *shadowed*, that is broadcast to all ranks, each of
// which then serves its own tokens of them.
//
// Method, as the code has it. Experts by load, B₀ ≥ B₁ ≥ …. With the first k shadowed the model expects a layer to take
//   3·compute·Bₖ + 4·send·Bₖ + k·broadcast:
// the largest expert left to its home has Bₖ tokens, three products (forward, and two backward) and four messages
// (dispatch and combine, forward and backward) for each, and every shadow is one broadcast of an expert. The next
// expert is shadowed while this falls; the first that does not lower it ends the search. The last expert is never
// shadowed.
//
// Constants. The code's are of two-matrix experts in float32, width 2048, twice that inside, 50 Gb/s and 11.5 Tflop/s.
// Here they are those of today's smallest comparison: gated experts of Qwen3-30B-A3B in bf16, 400 Gb/s per rank, and
// 400 Tflop/s, about what grouped products reach on an H100.
//
// As a plan. Residency `shared`; a shadow takes a guest slot on every rank but its home, so that there are at most
// guest_slots of them. Ties go to the lowest expert (torch.sort promises no order among equals).
//
// Inferred. The code sums counts so that what is sorted are experts, whatever their rank: a rank's other experts do not
// enter its model. So here.
//
// In the simulator (cuda/fastermoe/smart_schedule.h, fmoe/fastermoe/schedule.py): shadows are broadcast after dispatch
// beside own experts, kept for the backward, and their gradients reduced.
//
// No counterpart in a plan: a shadow on a rank that has no token for it (broadcast by FasterMoE, no guest here),
// pipelined exchange and computation ("smart schedule"), topology-aware gating, which changes the model.

#include "foremoe/policy/policy.h"

namespace foremoe {

// NCCL's broadcast (cuda/fastermoe/smart_schedule.h: ncclBcast): the home sends to the next rank that receives the
// expert, that one to the next, piece by piece. So each link carries the expert once. Only ranks with a guest are in
// the ring. The latency of its hops is not added up. Where guests come over the host path there is no ring, and their
// gradients go home one by one.
void send_in_ring(const CopiesOfExpert& copies, std::span<int> sent);

struct FasterMoeOptions {
  double hidden = 2048;              // width of a token
  double intermediate = 768;         // width inside an expert
  double matrices = 3;               // gate, up, down
  double bytes_per_value = 2;        // of tokens and weights
  double bytes_per_second = 50e9;    // of a rank's network
  double flops_per_second = 400e12;  // of a rank, as its products reach

  double compute_seconds() const { return 2 * matrices * hidden * intermediate / flops_per_second; }  // per token
  double send_seconds() const { return hidden * bytes_per_value / bytes_per_second; }                 // per token
  double broadcast_seconds() const { return matrices * hidden * intermediate * bytes_per_value / bytes_per_second; }
};

// What the model expects when `num_shadows` experts are shadowed and the largest of the others has `tokens`.
double fastermoe_seconds(const FasterMoeOptions& options, std::int64_t tokens, int num_shadows);

// The experts to shadow, most loaded first, at most `limit`. `load` is [expert], tokens.
std::vector<ExpertId> fastermoe_shadows(std::span<const std::int64_t> load, int limit, const FasterMoeOptions& options);

std::unique_ptr<Policy> make_fastermoe(const FasterMoeOptions& options = {});

}  // namespace foremoe
