#pragma once

// Checks of captured routes before they are planned or replayed. Each finding names the first place, a cause and a
// remedy.
//
// Some damage resembles routes. Its thresholds depend on the information of a token's route, log2 C(experts, top_k)
// bits per layer, so that real routes raise no alarm. In 320,000 tokens of two models with 105 bits or more, no token
// has the route of the token before it in all layers; with 80 bits, 2 of 90,000 have. In one layer, at most 40 tokens
// in a row share a route, and at most 0.2 % of the tokens have the same route in two layers. If ids ascend in every
// row, as without an order by weight, up to 6 tokens in a row share a route in all layers, and 208 in one. At most 10
// tokens in a row, 7 with 40 bits and 3 with 100 bits or more, have the routes of as many earlier ones of their
// sequence.
//
// Time is n log n in the number of tokens; comparing pairs of layers reads at most 1,024 tokens, and 64 of a sequence.
// A remark gives the number of sequences of fewer than 16 tokens, which are not compared on their own.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct RouteExpectations {
  int experts = 0;                           // 0: as recorded
  int top_k = 0;                             // 0: as recorded
  int layers = 0;                            // layers with experts; 0: not checked
  int dense_layers = 0;                      // layers without experts
  std::vector<std::int64_t> lengths;         // [sequences], tokens; −1: unknown; empty: not checked
  std::vector<std::uint8_t> attention_mask;  // [tokens], 0 for padding; empty: no padding
  // Versions of the weights that sampled each sequence, [sequences]; none of a sequence: unknown. Empty: not checked.
  std::vector<std::vector<std::string>> weight_versions;
  int weightless_experts = 0;           // ids from `experts` on without weights; 0: as recorded
  std::vector<LayerKind> layer_kinds;   // [decoder layers]; empty: dense layers are first
  std::vector<std::string> counted_in;  // where lengths are from, [sequences]; empty: unknown
  std::vector<int> samples;             // number of each sequence in its source, for findings; empty: 0, 1, …
};

struct RouteFinding {
  std::string check;        // "duplicate-experts", …
  int layer = -1;           // first place; −1: all layers
  int sequence = -1;        // −1: all sequences
  std::int64_t token = -1;  // index in the sequence; −1: all tokens
  std::string cause;
  std::string remedy;
  std::int64_t count = 1;  // places with this fault
};

struct RouteReport {
  std::vector<RouteFinding> findings;  // one per check that failed
  std::vector<std::string> remarks;    // what may be a fault, depending on the model
  // Samples that could not be read: number in the sources, and problem. Also a finding.
  std::vector<std::pair<int, std::string>> skipped = {};
};

// The routes themselves may be invalid. Throws InputError if an expectation has the wrong length.
RouteReport find_route_faults(const RoutingTrace& trace, const RouteExpectations& expected);

}  // namespace foremoe
