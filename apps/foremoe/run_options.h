#pragma once

// What `foremoe run` may be told.

#include <string>
#include <vector>

#include "foremoe/runtime/moe_model.h"
#include "planner_arguments.h"
#include "run_group.h"
#include "run_work.h"

namespace foremoe::cli {

struct RunArguments {
  InputOptions input;
  PlannerArguments planner;
  std::vector<std::string> policies{"vanilla", "foremoe"};
  std::string plan;  // a plan file, executed alone; empty: policies plan
  enum class Phases : std::uint8_t { kBoth, kRecompute, kPolicyUpdate } phases = Phases::kBoth;
  bool homes_given = false;
  bool in_flight_given = false;

  Comm comm = Comm::kThreads;
  double timeout_seconds = 60;
  ExpertShape shape{.hidden = 64, .intermediate = 32};
  Optimizer::Kind optimizer = Optimizer::Kind::kSgd;
  double rate = 0;  // 0: the optimizer's own
  int repeats = 5;
  int steps = 1;
  bool bitwise = false;
  bool no_reference = false;

  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;
  double link_throttle = 0;  // bytes per second; 0: none
  WorkOptions work;

  std::string timeline;
  bool json = false;

  Optimizer optimizer_options() const;
  bool runs(Phase phase) const {
    return phases == Phases::kBoth || (phases == Phases::kRecompute) == (phase == Phase::kRecompute);
  }
};

void add_run_options(CLI::App& command, RunArguments& arguments);

}  // namespace foremoe::cli
