#pragma once

// Evaluations of a job with several expert-parallel groups (split_groups() in workload.h), from those of each group.
//
// Groups do not wait for each other between micro-steps. They wait once, at the end of the step, where they reduce
// gradients (PhaseSeconds::data_parallel), so the slowest group's step is the job's.

#include <cstddef>
#include <string>
#include <vector>

#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/fit.h"

namespace foremoe {

struct SlowestGroup {
  std::size_t group = 0;  // with the longest step; without a simulation, with the most rows on its busiest ranks
  std::string why;        // empty if the policy has no plan for some group, which is then `group`
};

struct JobEvaluation {
  // [policy]: those of the slowest group, except ρ (over all groups) and rows and memory of a rank (the largest).
  // Speedups compare the slowest groups.
  std::vector<Evaluation> policies;
  int ep = 0;                                   // ranks of a group; 0: the job was not split, and the rest is empty
  std::vector<std::vector<Evaluation>> groups;  // [group][policy]
  std::vector<SlowestGroup> slowest;            // [policy]
};

// evaluations: [group][policy], as evaluate_all() returns them. ep: ranks of a group; 0 for a job that was not split.
JobEvaluation over_groups(std::vector<std::vector<Evaluation>> evaluations, int ep);

struct JobFit {
  // Ranks are those of the job, and peaks the largest of all groups. Guest slots and capacities suffice for all groups,
  // with the trials of the group that needs the most guest slots. Other values are of the group with the most memory.
  Fit whole;
  int ep = 0;  // ranks of a group; 0: the job was not split, and `groups` is empty
  std::vector<Fit> groups;
};

JobFit over_groups(std::vector<Fit> fits, int ep);

}  // namespace foremoe
