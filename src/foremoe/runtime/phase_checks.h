#pragma once

// What must hold before a phase starts, on this rank and between ranks.

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/phase_executor.h"

namespace foremoe {

// Collective. Throws InputError where shapes, counts, data types or homes do not fit each other, and where ranks hold
// different loads, placements, schedules or versions.
void check_phase(const PhaseParts& parts, const HomeExperts& homes, std::uint64_t version, Communicator& communicator);

// The most rows that a rank computes in any layer of any micro-step: of its homes, which fallbacks need, or by quotas
// as far as they are known.
std::int64_t most_rows_computed(const PhaseParts& parts, RankId rank);

}  // namespace foremoe
