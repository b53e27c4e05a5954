#pragma once

// Routes that a step replays: the experts of each token of a source rank, per micro-step and layer. A trace provides
// recorded routes. If only a load is given, routes are dealt (docs/users/formats.md). A source has T = max over layers
// of max(⌈Σ load/k⌉, largest load) tokens in that micro-step, or those of the load if it has short rows. In each layer,
// the assignments, sorted by expert, are dealt one at a time to tokens 0, 1, …, T−1, 0, …. No token receives the same
// expert twice, or more than k experts. Missing assignments of tokens with fewer experts contribute nothing.

#include <memory>
#include <vector>

#include "foremoe/plan/route_tokens.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

class ReplayRoutes {
 public:
  virtual ~ReplayRoutes() = default;
  virtual int top_k() const = 0;
  virtual std::int64_t num_tokens(MicroStepId m, RankId source) const = 0;
  // Fills routes [token][k]. A row without a route has kNoExpert in all k entries; kUnassigned marks missing
  // assignments. The counts per expert equal the load. Thread-safe.
  virtual void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const = 0;
};

// The results keep references to the arguments.
std::unique_ptr<ReplayRoutes> recorded_routes(const RoutingTrace& trace, const Batching& batching);
std::unique_ptr<ReplayRoutes> dealt_routes(const LoadTable& load);

// [micro_step·layers + layer]: 1 if any source has rows without a route; empty if no source has any.
std::vector<std::uint8_t> rows_without_route(const ReplayRoutes& routes, const LoadTable& load);

}  // namespace foremoe
