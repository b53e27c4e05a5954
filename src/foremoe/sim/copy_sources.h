#pragma once

// From which rank each peer copy comes, where not all of an expert's come from its home.
//
// Rings. NCCL's broadcast, which FasterMoE uses (cuda/fastermoe/smart_schedule.h: ncclBcast): the home sends to the
// next
//   rank that receives the expert, that one to the next, piece by piece. So each link carries the expert once. Only
//   ranks with a guest are in the ring. The latency of its hops is not added up. Where guests come over the host path
//   there is no ring, and their gradients go home one by one.
// Relays. UltraEP's weight_sync by default (csrc/kernels/task_build.cu): with n ≥ 6 copies of an expert, its home sends
//   ⌊√n⌋ ≤ 8 of them. Those go to the ranks that send least so far, experts by home; the other copies come from these
//   relays in turn, then from whichever sends least. A relay passes chunks on as they arrive. With fewer copies, or for
//   gradients, each crosses the home's link.

#include <span>

#include "foremoe/policy/policy.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// Copies come by `arrives`, with their experts' homes as sources; those over the host path are left as they are.
void choose_sources(Fanout fanout, int num_ranks, std::span<ScheduledCopy> copies);

}  // namespace foremoe
