#pragma once

// An experiment that a paper did, to be done again: inputs × systems → figures, beside what was published.
//
// One TOML file each (docs/formats.md lists the keys). What is computed follows from the columns that it asks for
// (columns.h): figures of the plans, which are exact; of their replay on a modelled cluster; of the planners' own time
// on this machine. The first system is the one that others are compared with.

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/rollout/synthesis/synthesis.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// What is simulated, where a column asks for it.
struct ModelledCluster {
  std::string cluster;         // preset or TOML file
  ModelShape model;            // a load of fewer layers stands for all of them
  CostOptions cost;            // of the cost model
  double rollout_seconds = 0;  // of the RL step
};

struct ExperimentInput {
  std::string label;
  std::string file;    // a trace, from the working directory; empty: drawn from the routing model
  int file_ranks = 0;  // that it is batched for; 0: as recorded
  SynthesisOptions options;
  RoutingModel routing;
  bool former_step = false;  // systems know the load of a step before this one: same popularity, other tokens
  int steps = 1;             // the micro-steps are so many steps of equal length, one after the other; divides them
  std::optional<ModelledCluster> on;
};

struct ExperimentSystem {
  std::string label;
  std::string policy;
  PlannerOptions options;
  std::vector<std::pair<std::string, double>> own;  // options that only this policy has (systems.h)
  PathChoice path = PathChoice::kAuto;
};

// A figure that somebody published. With input and system it stands beside ours; else it is told below the table.
struct Published {
  std::string input;
  std::string system;
  std::string column;
  std::variant<double, std::string> value;
  std::string note;
};

// What we set out to reach: every figure of `column` that input and system select (empty: all) within the bounds.
struct Aim {
  std::string column;
  std::string input;
  std::string system;
  std::string relative_to;  // a system: its figure on the same input is the unit
  std::optional<double> at_least;
  std::optional<double> at_most;
};

struct Experiment {
  std::string name;
  std::string file;  // that it was read from; empty where it is the program's own
  std::string title;
  std::string source;      // paper and figure
  bool secondary = false;  // the source tells of the paper; it is not the paper
  std::string about;       // what they did
  std::string reading;     // what we assumed where they do not say
  std::string finding;     // what came out, in words
  bool across = false;     // the table has a row per input and a column per system
  std::vector<std::string> columns;
  std::vector<ExperimentInput> inputs;
  std::vector<ExperimentSystem> systems;
  std::vector<Published> published;
  std::vector<Aim> aims;
};

}  // namespace foremoe
