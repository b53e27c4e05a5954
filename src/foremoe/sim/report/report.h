#pragma once

// What `foremoe report` shows, as plain data, and the page that shows it: one HTML file that needs no network, no
// script and nothing beside it. Whoever has these figures can have the page, wherever they were simulated or measured.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/array.h"

namespace foremoe::report {

// Of a phase's critical path: what the ranks were doing.
struct TimePart {
  std::string name;  // "experts", "exposed copies" …: those that occur get a colour in the order of first occurrence
  double seconds = 0;
};

struct PhaseTime {
  std::vector<TimePart> parts;
  double ideal_seconds = 0;  // every rank at the mean load, nothing copied

  double seconds() const;  // the sum of the parts
};

// One kind of link in the whole step, all ranks together.
struct LinkBytes {
  std::string link;
  double rows = 0;
  double copies = 0;
  double gradients = 0;
  double busiest_use = 0;  // of the busiest such link's time, 0 to 1
};

struct PolicyResult {
  std::string policy;
  std::string skipped;  // why there is no plan; empty, and the rest is meant
  std::string residency;
  std::vector<double> rho;  // of every (layer, micro-step) with load
  double copies_per_layer_event = 0;
  std::int64_t home_moves = 0;
  double plan_us = 0;  // per layer and micro-step
  PhaseTime recompute;
  PhaseTime policy_update;
  double step_seconds = 0;
  double ideal_step_seconds = 0;
  double exposed_copy_seconds = 0;
  double speedup = 1;                               // over the policy of Report::before
  std::optional<double> rl_speedup;                 // of the RL step, where the rollout's seconds are known
  double memory_bytes = 0;                          // of the fullest rank
  double guest_bytes = 0;                           // of these, weights and gradients of guests
  std::int64_t peak_tokens = 0;                     // the most that any rank computes at once
  std::optional<std::int64_t> largest_micro_batch;  // tokens per rank that fit the memory budget
  std::vector<LinkBytes> links;
};

// Tokens of every rank in one layer, [micro_step][rank], under the policies of Report::before and after.
struct LoadPictures {
  int layer = 0;
  Array<std::int64_t, 2> before;
  Array<std::int64_t, 2> after;
};

struct AblationRow {
  std::string stages;  // "none", "B", "BL", "BLP", "BLPT"
  double rho_mean = 1;
  double speedup = 1;
  double copies_per_layer_event = 0;
  double exposed_copy_seconds = 0;
};

struct MemoryPoint {
  std::string residency;
  int guest_slots = 0;
  double memory_bytes = 0;  // of the fullest rank
  double guest_bytes = 0;
  double speedup = 1;
  double rho_mean = 1;
  double copies_per_layer_event = 0;
  double exposed_copy_seconds = 0;
};

// Bytes from node to node, [from][to].
struct NodeTraffic {
  std::string policy;
  Array<double, 2> bytes;
};

struct TimelineSpan {
  std::string kind;  // what the colour says
  std::string name;
  double begin = 0;  // seconds in the window
  double end = 0;
  bool beneath = false;  // runs beside the rank's work
};

struct TimelineLane {
  std::string name;
  std::vector<TimelineSpan> spans;
};

struct TimelineWindow {
  std::string policy;
  std::string what;  // which layer and micro-step
  double seconds = 0;
  std::vector<TimelineLane> lanes;
};

struct Setting {
  std::string name;
  std::string value;
};

struct Report {
  std::string input;
  std::string model;
  std::string cluster;
  int num_ranks = 0;
  int ranks_per_node = 1;
  int guest_slots = 0;
  std::string before;                // the policy that is compared with …
  std::string after;                 // … and the one that the reader came for; both among `policies`
  std::vector<std::string> remarks;  // below the summary: what the reader must not overlook
  std::vector<Setting> settings;
  std::vector<PolicyResult> policies;
  std::optional<LoadPictures> loads;
  std::vector<AblationRow> ablation;
  std::vector<MemoryPoint> memory;
  std::vector<NodeTraffic> traffic;
  std::vector<TimelineWindow> timelines;

  int num_nodes() const { return (num_ranks + ranks_per_node - 1) / ranks_per_node; }
  const PolicyResult* find(const std::string& policy) const;  // null when absent or skipped
};

// The page. Equal reports, equal bytes.
std::string to_html(const Report& report);

}  // namespace foremoe::report
