#pragma once

// What must hold before a phase starts, on this rank and between ranks.

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/phase_executor.h"

namespace foremoe {

// Throw InputError: shapes, counts and data types that do not fit each other.
void expect_float32(const ExpertLayout& layout, const ExpertShape& shape);
void expect_fitting(const PhaseParts& parts, const Communicator& communicator);

// Collective. Everybody must hold the same load, placement, schedule and version: what one rank waits for, another
// must have sent. (Quotas may still be on their way.)
void expect_same_phase(const PhaseParts& parts, std::uint64_t version, Communicator& communicator);

// The most rows that a rank computes in any layer of any micro-step: of its homes, which fallbacks need, or by quotas
// as far as they are known.
std::int64_t most_rows_computed(const PhaseParts& parts, RankId rank);

}  // namespace foremoe
