#include "foremoe/evaluate/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/measured_plan.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/sim/phase_profile.h"

namespace foremoe {
namespace {

constexpr std::array kGuestSlots{1, 2, 4};  // to try

const Policy& policy_of(const PlannerOptions* planner) {
  return policy_named(planner != nullptr ? "foremoe" : "vanilla");
}

// What the plans of a group depend on: [first layer, layers, micro-steps in flight].
using PhaseKey = std::array<int, 3>;

// One stage of one group.
struct StageOfGroup {
  Workload workload;
  CostModel cost;
  int first_layer = 0;  // of the input
  int in_flight = 1;    // micro-steps
  Array<double, 2> squared_lengths = {};

  PhaseKey key(int micro_steps) const { return {first_layer, workload.load.num_layers(), micro_steps}; }
};

struct StageStep {
  std::array<double, 2> running = {};   // [phase] seconds of all micro-steps
  std::array<double, 2> balanced = {};  // the same with every rank at the mean load and without exchanges
  double once = 0;                      // seconds of a step that do not depend on the number of micro-steps
  double balanced_once = 0;
  Bytes memory;
  Bytes state;

  double all_running() const { return running[0] + running[1]; }
};

StageStep stage_step(const SimulatedStep& step) {
  StageStep stage{.once = step.home_move_seconds, .memory = step.memory_bytes_per_rank};
  for (const SimulatedPhase* phase : {&step.recompute, &step.policy_update}) {
    const auto p = static_cast<std::size_t>(phase->phase);
    const double at_end = phase->parts.optimizer + phase->parts.data_parallel;
    stage.running[p] = phase->seconds - at_end - phase->parts.arena_refresh;
    stage.balanced[p] = phase->ideal_seconds - phase->ideal_exchange_seconds - at_end;
    stage.once += at_end + phase->parts.arena_refresh;
    stage.balanced_once += at_end;
    stage.state = phase->memory.state;
  }
  return stage;
}

// Seconds in which the activations of one micro-step travel to the next stage, mean over micro-steps.
double transfer_seconds(const LoadTable& load, const CostModel& cost, bool one_node) {
  const Array<Tokens, 2> tokens = tokens_of_ranks(load);
  const LinkSpeed& link = one_node ? cost.cluster().peers : cost.cluster().network;
  double bytes = 0;
  for (std::size_t m = 0; m < tokens.extent(0); ++m) {
    bytes += static_cast<double>(std::ranges::max(tokens.row(m)).value) * cost.model().hidden *
             cost.options().bytes_per_parameter;
  }
  return link.latency_seconds + bytes / static_cast<double>(tokens.extent(0)) / link.bytes_per_second;
}

// Estimated seconds in which the ranks of a group plan the layers of a stage.
double planning_of_stage(const StageOfGroup& one, const SimulatedStep& step, const EvaluateOptions& options,
                         Residency residency) {
  const bool fills_arena = step.recompute.arena > Bytes{0} || step.policy_update.arena > Bytes{0};
  const LoadTable& load = one.workload.load;
  const std::array of_layer{estimated_planning_seconds(load, residency, fills_arena)};
  const Planners planners{
      .count = load.num_ranks(), .threads = options.planning_threads, .gather_seconds = options.plan_gather_seconds};
  return (one.in_flight > 1 ? 2 : 1) * planning_seconds(of_layer, one.cost.model().moe_layers, planners);
}

// Returns whether a stage has each kind of layer at least as often as the other, and the head if that has it.
bool has_all_of(const ModelShape& stage, const ModelShape& other) {
  if (other.has_head > stage.has_head || other.moe_layers > stage.moe_layers ||
      other.parameters_in_experts() > stage.parameters_in_experts() || other.dense_layers > stage.dense_layers ||
      other.other_attention.size() != stage.other_attention.size()) {
    return false;
  }
  std::vector<int> layers;
  stage.visit_attention([&](const AttentionShape&, int count) { layers.push_back(count); });
  bool all = true;
  std::size_t kind = 0;
  other.visit_attention([&](const AttentionShape&, int count) { all = all && count <= layers[kind++]; });
  return all;
}

// The parts of StageStep that make up a step, as simulated or as its lower bound.
struct Measure {
  std::array<double, 2> StageStep::*running;
  double StageStep::*once;
};
constexpr Measure kSimulated{&StageStep::running, &StageStep::once};
constexpr Measure kBalanced{&StageStep::balanced, &StageStep::balanced_once};

using ProfilePointer = std::shared_ptr<const PhaseProfile>;

struct PlannedPhase {
  StepPlan plan;
  ProfilePointer profile;
};

// What layouts of one expert-parallel size have in common without a plan: [ep][group], with one stage.
using UnplannedProfiles = std::map<int, std::vector<ProfilePointer>>;

// Evaluates a job in one layout.
class Job {
 public:
  Job(const Workload& whole, const JobLayout& layout, const EvaluateOptions& options, const EvaluationContext& context)
      : layout_(layout), options_(options), context_(context), longer_(whole) {
    longer_.load = in_more_micro_steps(whole.load, layout.stages);
    if (whole.tokens) longer_.tokens = in_more_micro_steps(*whole.tokens, layout.stages);
    const int ranks = whole.load.num_ranks();
    const int per_node = whole.load.ranks_per_node;
    one_node_ = ranks <= per_node;
    CostOptions cost = context.cost->options();
    cost.ep_groups = layout.groups;
    cost.groups_share_node = one_node_ || per_node % (ranks / layout.stages) == 0;
    for (int s = 0; s < layout.stages; ++s) {
      costs_.emplace_back(context.cost->cluster(), stage_of(context.cost->model(), s, layout.stages), cost);
    }
    const ModelShape& model = context.cost->model();
    const bool has_all_layers = whole.load.num_layers() == model.moe_layers;
    for (int s = 0; s < layout.stages; ++s) {
      const ModelShape& part = costs_[static_cast<std::size_t>(s)].model();
      const auto covers = [&](const SimulatedStage& before) {
        return has_all_of(costs_[static_cast<std::size_t>(before.stage)].model(), part);
      };
      if (!has_all_layers && std::ranges::any_of(stages_, covers)) continue;  // see the header
      stages_.push_back({.stage = s,
                         .first_layer = has_all_layers ? first_moe_layer_of(model, s, layout.stages) : 0,
                         .num_layers = std::min(part.moe_layers, whole.load.num_layers())});
    }
  }

  int micro_steps() const { return longer_.load.num_micro_steps(); }

  // Evaluates all groups without a plan. Layouts with one stage add to `profiles`, and must come first.
  LayoutStep step_unplanned(UnplannedProfiles& profiles) {
    return step(nullptr, [&](const StageOfGroup& one, int group) {
      const ProfilePointer profile = unplanned_profile(one, group, profiles);
      return simulate(one, nullptr, {plan(one, nullptr, one.in_flight), profile}, {plan(one, nullptr, 1), profile});
    });
  }

  // Evaluates all groups with policy foremoe and these options.
  LayoutStep step(const PlannerOptions& planner) {
    std::map<PhaseKey, PlannedPhase> made;  // of one group
    int of_group = -1;
    const auto with = [&](const StageOfGroup& one, int in_flight) -> const PlannedPhase& {
      const PhaseKey key = one.key(in_flight);
      const auto [at, added] = made.try_emplace(key);
      PlannedPhase& phase = at->second;
      if (!added) return phase;
      phase.plan = plan(one, &planner, in_flight);
      for (const auto& [of, other] : made) {
        const bool same_layers = of[0] == key[0] && of[1] == key[1];
        if (same_layers && other.profile && same_profile(other.plan, phase.plan)) phase.profile = other.profile;
      }
      if (!phase.profile) phase.profile = profile_of(one, phase.plan);
      return phase;
    };
    return step(&planner, [&](const StageOfGroup& one, int group) {
      if (std::exchange(of_group, group) != group) made.clear();
      return simulate(one, &planner, with(one, one.in_flight), with(one, 1));
    });
  }

  // Throws logic_error if a plan of foremoe with these options is wrong.
  void check_plans(const PlannerOptions& planner) const {
    for (int g = 0; g < layout_.groups; ++g) {
      const Workload group = take_group(longer_, layout_.ep, g);
      std::set<PhaseKey> checked;
      for (std::size_t i = 0; i < stages_.size(); ++i) {
        const StageOfGroup one = stage_of_group(group, i);
        for (const int in_flight : {1, one.in_flight}) {
          if (checked.insert(one.key(in_flight)).second) expect_right(plan(one, &planner, in_flight), one.workload);
        }
      }
    }
  }

  // Of the last step().
  double balanced_seconds() const {
    double seconds = 0;
    for (std::size_t g = 0; g < steps_.size(); ++g) {
      seconds = std::max(seconds, seconds_of(g, kBalanced));
    }
    return seconds;
  }

  Bytes most_state() const {
    Bytes most;
    for (const std::vector<StageStep>& group : steps_) {
      for (const StageStep& stage : group) most = std::max(most, stage.state);
    }
    return most;
  }

  // Returns the ways to plan the group and stage that were slowest in the last step(), the fastest first. Omits those
  // that do not fit or are not faster than no plan.
  std::vector<PlannerOptions> plans_by_seconds() const {
    std::size_t slowest = 0;
    double most = -1;
    for (std::size_t g = 0; g < steps_.size(); ++g) {
      const double seconds = seconds_of(g, kSimulated);
      if (seconds > most) slowest = g;
      most = std::max(most, seconds);
    }
    const std::size_t stage = static_cast<std::size_t>(
        std::ranges::max_element(steps_[slowest], {}, &StageStep::all_running) - steps_[slowest].begin());
    const StageOfGroup one = stage_of_group(take_group(longer_, layout_.ep, static_cast<int>(slowest)), stage);
    const double unplanned = steps_[slowest][stage].all_running() + steps_[slowest][stage].once;
    std::vector<std::pair<double, PlannerOptions>> plans;
    for (const int guest_slots : kGuestSlots) {
      EvaluateOptions options = options_;
      options.check = false;  // check_plans() checks those of the recommended layout
      options.choose = options_.choose == ChooseAmong::kGiven ? ChooseAmong::kGiven : ChooseAmong::kPlans;
      options.planner.prefer = options_.planner.prefer.value_or(Prefer::kTime);
      options.planner.guest_slots = guest_slots;
      options.planner.in_flight = one.in_flight;
      const PlanChoice choice = foremoe::choose_plan(one.workload, options, {.pool = context_.pool, .cost = &one.cost});
      for (const PlanTrial& trial : choice.trials) {
        if (!trial.planned || trial.memory > *options.memory_budget() || trial.seconds >= unplanned) continue;
        EvaluateOptions priced = options;
        priced.planner = options_of(trial, options.planner);
        PlannerOptions& planner =
            plans.emplace_back(trial.seconds, planner_options(priced, one.workload.load, &one.cost)).second;
        planner.in_flight = 1;  // set for each stage
      }
    }
    std::ranges::stable_sort(plans, {}, [](const auto& plan) { return plan.first; });
    std::vector<PlannerOptions> sorted;
    for (const auto& [seconds, planner] : plans) sorted.push_back(planner);
    return sorted;
  }

 private:
  LayoutStep step(const PlannerOptions* planner, const auto& simulated_of) {
    steps_.clear();
    transfers_.clear();
    LayoutStep job;
    for (int g = 0; g < layout_.groups; ++g) {
      const Workload group = take_group(longer_, layout_.ep, g);
      std::vector<StageStep>& steps = steps_.emplace_back();
      for (std::size_t i = 0; i < stages_.size(); ++i) {
        const StageOfGroup one = stage_of_group(group, i);
        const SimulatedStep simulated = simulated_of(one, g);
        steps.push_back(stage_step(simulated));
        if (planner != nullptr) {
          steps.back().once += planning_of_stage(one, simulated, options_, planner->residency);
        }
        job.memory = std::max(job.memory, steps.back().memory);
      }
      transfers_.push_back(transfer_seconds(group.load, costs_.front(), one_node_));
      job.seconds = std::max(job.seconds, seconds_of(steps_.size() - 1, kSimulated));
    }
    return job;
  }

  struct SimulatedStage {
    int stage = 0;
    int first_layer = 0;  // of the input
    int num_layers = 0;
  };

  StageOfGroup stage_of_group(const Workload& group, std::size_t i) const {
    const auto [stage, first_layer, num_layers] = stages_[i];
    StageOfGroup one{.workload = group,
                     .cost = costs_[static_cast<std::size_t>(stage)],
                     .first_layer = first_layer,
                     .in_flight = std::min(layout_.stages - stage, micro_steps())};
    if (num_layers < group.load.num_layers()) {
      one.workload = make_workload(take_layers(group.load, first_layer, num_layers));
      if (group.tokens) one.workload.tokens = take_layers(*group.tokens, first_layer, num_layers);
      one.workload.cut = group.cut;
      one.workload.fitted = group.fitted;
    }
    one.squared_lengths = one.workload.squared_lengths();
    return one;
  }

  // Plans with policy vanilla, or with foremoe and the planner's options.
  StepPlan plan(const StageOfGroup& one, const PlannerOptions* planner, int in_flight) const {
    PlannerOptions options = planner != nullptr ? *planner : options_.planner;
    options.in_flight = in_flight;
    PolicyResult result = plan_with(policy_of(planner), one.workload, one.workload.for_policy(options), context_.pool);
    if (const auto* skipped = std::get_if<Skipped>(&result)) throw InputError({}, skipped->reason);
    return std::get<PlannedStep>(std::move(result)).plan;
  }

  SimulationInput simulation_input(const StageOfGroup& one, const StepPlan& plan) const {
    return {.load = one.workload.load,
            .plan = plan,
            .cost = one.cost,
            .tokens = one.workload.tokens_of_load(),
            .fitted = one.workload.fitted.get(),
            .rows = options_.rows,
            .squared_lengths = one.squared_lengths};
  }

  ProfilePointer profile_of(const StageOfGroup& one, const StepPlan& plan) const {
    return std::make_shared<const PhaseProfile>(
        profile_phase(simulation_input(one, plan), Phase::kPolicyUpdate, OnlineWork{}, context_.pool));
  }

  ProfilePointer unplanned_profile(const StageOfGroup& one, int group, UnplannedProfiles& profiles) const {
    const int layers = longer_.load.num_layers();
    if (layers == context_.cost->model().moe_layers || one.workload.load.num_layers() < layers) {
      return profile_of(one, plan(one, nullptr, 1));
    }
    std::vector<ProfilePointer>& of_ep = profiles[layout_.ep];
    if (layout_.stages == 1) return of_ep.emplace_back(profile_of(one, plan(one, nullptr, 1)));
    std::vector<const PhaseProfile*> parts;
    for (int part = group; part < std::ssize(of_ep); part += layout_.groups) {
      parts.push_back(of_ep[static_cast<std::size_t>(part)].get());
    }
    return std::make_shared<const PhaseProfile>(in_more_micro_steps(parts));
  }

  SimulatedStep simulate(const StageOfGroup& one, const PlannerOptions* planner, const PlannedPhase& update,
                         const PlannedPhase& recompute) const {
    const StepProfile profile{.recompute = recompute.profile, .policy_update = update.profile};
    const Policy& policy = policy_of(planner);
    return simulate_step(simulation_input(one, update.plan), one.in_flight > 1 ? &recompute.plan : nullptr,
                         {.phase = {.path = options_.path,
                                    .depth = options_.depth,
                                    .online = policy.online(),
                                    .plans_ahead = policy.plans_ahead(
                                        one.workload.for_policy(planner != nullptr ? *planner : options_.planner)),
                                    .pool = &context_.pool}},
                         &profile);
  }

  void expect_right(const StepPlan& plan, const Workload& workload) const {
    CheckOptions check = check_options(workload);
    check.pool = &context_.pool;
    const CheckReport report = check_plan(plan, workload.load, check);
    if (report.ok()) return;
    throw std::logic_error(fmt::format("the plan of foremoe is wrong: {}", report.violations.front().message));
  }

  // Seconds of the pipeline of one group.
  double seconds_of(std::size_t group, const Measure& measure) const {
    double seconds = 0;
    for (const StageStep& stage : steps_[group]) seconds = std::max(seconds, stage.*measure.once);
    for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
      double slowest = 0;
      for (const StageStep& stage : steps_[group]) {
        slowest = std::max(slowest, (stage.*measure.running)[static_cast<std::size_t>(phase)]);
      }
      const double passes = layout_.stages == 1 ? 0 : phase == Phase::kRecompute ? 1 : 2;
      seconds += (slowest / micro_steps() + passes * transfers_[group]) * (micro_steps() + layout_.stages - 1);
    }
    return seconds;
  }

  JobLayout layout_;
  const EvaluateOptions& options_;
  const EvaluationContext& context_;
  Workload longer_;  // of the ranks of one stage
  bool one_node_ = true;
  std::vector<CostModel> costs_;               // [stage]
  std::vector<SimulatedStage> stages_;         // those that may be the slowest
  std::vector<std::vector<StageStep>> steps_;  // [group][simulated stage], of the last step()
  std::vector<double> transfers_;              // [group]
};

// Fills in the fastest layouts that fit.
void find_best(LayoutChoice& choice) {
  const auto faster = [&](const LayoutStep& step, const LayoutStep* than) {
    return choice.fits(step) && (than == nullptr || step.seconds < than->seconds);
  };
  const LayoutStep* best = nullptr;
  const LayoutStep* unplanned = nullptr;
  for (std::size_t i = 0; i < choice.layouts.size(); ++i) {
    const LayoutResult& result = choice.layouts[i];
    if (faster(result.unplanned, unplanned)) {
      unplanned = &result.unplanned;
      choice.unplanned = i;
    }
    for (const LayoutStep* step : {&result.unplanned, result.planned ? &result.planned->step : nullptr}) {
      if (step == nullptr || !faster(*step, best)) continue;
      best = step;
      choice.best = i;
      choice.planned = step != &result.unplanned;
    }
  }
}

// Plans the layout unless that cannot make it the best. `job` has simulated it without a plan.
void plan_layout(Job& job, const LayoutChoice& choice, LayoutResult& result) {
  if (result.layout.ep == 1) {
    result.not_planned = "a rank has all experts";
  } else if (job.most_state() > choice.limit) {
    result.not_planned = "no memory for guests";
  } else if (choice.best && result.balanced_seconds >= choice.best_step().seconds) {
    result.not_planned = "cannot be the fastest";
  } else {
    for (const PlannerOptions& planner : job.plans_by_seconds()) {
      const PlannedLayout planned{.step = job.step(planner), .planner = planner};
      const bool fits = choice.fits(planned.step);  // other stages may need more memory
      if (fits || !result.planned) result.planned = planned;
      if (fits) break;
    }
    if (!result.planned) result.not_planned = "no plan fits and is faster";
  }
}

[[noreturn]] void refuse_all(const LayoutChoice& choice, int ranks) {
  const auto memory = [](const LayoutResult& result) {
    return std::min(result.unplanned.memory, result.planned ? result.planned->step.memory : result.unplanned.memory);
  };
  const auto least = std::ranges::min_element(choice.layouts, {}, memory);
  throw InputError({.field = "gpus"},
                   fmt::format("no layout of {} GPUs fits {} GB per rank; the least is {} GB, of {}. Give more GPUs, "
                               "smaller micro-steps or a larger memory_budget",
                               ranks, gigabytes(choice.limit), gigabytes(memory(*least)), describe(least->layout)));
}

}  // namespace

std::vector<JobLayout> layouts_of(const Topology& ranks, const ModelShape& model) {
  if (ranks.num_ranks > ranks.ranks_per_node && ranks.num_ranks % ranks.ranks_per_node != 0) {
    throw InputError({.field = "gpus"}, fmt::format("{} is not a multiple of the {} of a node; give ranks_per_node",
                                                    ranks.num_ranks, ranks.ranks_per_node));
  }
  std::vector<JobLayout> layouts;
  for (int stages = 1; stages <= std::min(ranks.num_ranks, model.moe_layers); ++stages) {
    if (ranks.num_ranks % stages != 0) continue;
    const int of_stage = ranks.num_ranks / stages;
    for (int ep = 1; ep <= std::min(of_stage, model.experts); ++ep) {
      const bool whole_nodes = ranks.ranks_per_node % ep == 0 || ep % ranks.ranks_per_node == 0;
      if (!whole_nodes || of_stage % ep != 0 || model.experts % ep != 0) continue;
      layouts.push_back({.ep = ep, .stages = stages, .groups = of_stage / ep});
    }
  }
  return layouts;
}

const LayoutStep& LayoutChoice::best_step() const {
  return planned ? best_layout().planned->step : best_layout().unplanned;
}

LayoutChoice choose_layout(const Workload& whole, const EvaluateOptions& asked, const EvaluationContext& context) {
  const LoadTable& load = whole.load;
  if (num_assignments(load) == 0) throw InputError({.file = load.name}, "has no tokens");
  if (asked.planner.residency == Residency::kFree) {
    throw InputError({.field = "residency"}, "free serves forward-only phases, and a layout is for training");
  }
  LayoutChoice choice{.limit = asked.memory_budget().value_or(context.cost->cluster().memory),
                      .mean_tokens = mean_tokens_per_rank(load)};
  EvaluateOptions options = asked;
  options.memory_budget_gigabytes = static_cast<double>(choice.limit.value) / kBytesPerGigabyte;
  EvaluationContext quiet = context;
  quiet.progress = {};
  const auto tell = [&](const char* what, const JobLayout& layout) {
    context.pool.throw_if_cancelled();
    if (context.progress) context.progress(fmt::format("{} {}", what, describe(layout)));
  };
  std::vector<Job> jobs;
  UnplannedProfiles profiles;
  for (const JobLayout& layout : layouts_of(load.topology(), context.cost->model())) {
    tell("simulating", layout);
    Job& job = jobs.emplace_back(whole, layout, options, quiet);
    const LayoutStep unplanned = job.step_unplanned(profiles);
    choice.layouts.push_back({.layout = layout,
                              .micro_steps = job.micro_steps(),
                              .unplanned = unplanned,
                              .balanced_seconds = job.balanced_seconds()});
  }
  find_best(choice);
  std::vector<std::size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return choice.layouts[i].balanced_seconds; });
  for (const std::size_t i : order) {
    tell("planning", choice.layouts[i].layout);
    plan_layout(jobs[i], choice, choice.layouts[i]);
    find_best(choice);
  }
  if (!choice.best) refuse_all(choice, load.num_ranks());
  if (choice.planned) {
    tell("checking the plans of", choice.best_layout().layout);
    jobs[*choice.best].check_plans(choice.best_layout().planned->planner);
  }
  return choice;
}

std::string describe(const JobLayout& layout) {
  return fmt::format("EP {} with {}", layout.ep, counted(layout.stages, "stage"));
}

}  // namespace foremoe
