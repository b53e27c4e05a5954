#pragma once

// The routes that a step replays: for each token of a source rank in a micro-step, the experts that it visits in a
// layer. From a trace they are what was recorded; from a load alone they are dealt (docs/users/formats.md): a source
// has T = max over layers of max(⌈Σ load/k⌉, largest load) tokens in that micro-step, and in each layer the experts,
// ascending, are dealt one assignment at a time to tokens 0, 1, …, T−1, 0, …, each going on where the one before
// stopped. No token then has an expert twice or more than k; one with fewer is legal and adds nothing for the rest.

#include <memory>
#include <vector>

#include "foremoe/plan/route_tokens.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// An assignment that a token of a dealt load does not have: it adds nothing. (kNoExpert marks rows without a route.)
inline constexpr ExpertId kUnassigned{-2};

class ReplayRoutes {
 public:
  virtual ~ReplayRoutes() = default;
  virtual int top_k() const = 0;
  virtual std::int64_t num_tokens(MicroStepId m, RankId source) const = 0;
  // [token][k]; kNoExpert in all k entries of a row without a route, kUnassigned where a token has fewer than k. The
  // counts of the experts are the load's. Any thread may call.
  virtual void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const = 0;
};

// Keep references to what they are given.
std::unique_ptr<ReplayRoutes> recorded_routes(const RoutingTrace& trace, const Batching& batching);
std::unique_ptr<ReplayRoutes> dealt_routes(const LoadTable& load);

// [micro_step·layers + layer]: 1 where any source has rows without a route; empty where there is none at all.
std::vector<std::uint8_t> rows_without_route(const ReplayRoutes& routes, const LoadTable& load);

}  // namespace foremoe
