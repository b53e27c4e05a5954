#pragma once

// Eight workloads, each with one difficulty and nothing else, so that a planner's answer to each can be read
// separately. Their counts know no chance: they are rounded shares. R ranks, E experts
// at home in equal runs, all loads below relative to the mean; p is an expert's share of the tokens.

#include <cstdint>
#include <optional>
#include <string_view>

namespace foremoe {

enum class StressWorkload : std::uint8_t {
  kBalanced,    // w0: every expert alike; any two differ by at most one token
  kHotExperts,  // w1: max(1, R/8) experts at home eight ranks apart, each with p = 1.5/R: alone more than a rank's
                //     fair share, so only replicas help
  kHotRank,     // w2: all experts of rank 0 alike, together p = min(3, (R+1)/2)/R: each is small, so moving some helps
  kSpreadHeat,  // w3: the loads of w2, but the hot experts are at home on different ranks
  kRaggedSources,  // w4: experts as in w0; rank r sends w/mean(w) times tokens_per_rank, w a shuffle of 1 … R, anew in
                   // each micro-step
  kZeroLoadRanks,    // w5: nobody chooses the experts of the last max(1, R/4) ranks, the others are alike
  kRotatingHotSpot,  // w6: w2 with the hot rank m mod R in micro-step m: even on the mean, never at once
  kBursts  // w7: w0, but in every fourth micro-step (1, 5, …) max(1, R/8) experts drawn anew are as hot as w1's
};

inline constexpr int kNumStressWorkloads = 8;

std::string_view name_of(StressWorkload workload);         // "w0" … "w7"
std::string_view description_of(StressWorkload workload);  // "hot experts"
std::optional<StressWorkload> stress_workload_named(std::string_view name);

}  // namespace foremoe
