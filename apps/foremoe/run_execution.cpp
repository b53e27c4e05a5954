#include "run_execution.h"

#include <fmt/format.h>

#include <algorithm>

#include "console.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/runtime/run_memory.h"
#include "foremoe/transfer/copy_link.h"
#include "planning_arguments.h"
#include "progress.h"
#include "run_facts.h"

namespace foremoe::cli {

Execution::Execution(const RunArguments& arguments, RankGroup& group)
    : arguments_(arguments),
      group_(group),
      pool_(static_cast<std::size_t>(arguments.threads)),
      work_(arguments.work, 0) {
  group_.agree({{"version of foremoe", FOREMOE_VERSION}});
  group_.agree(facts_of(arguments_));
  group_.prepare([this] {
    if (group_.has_first()) {
      std::vector<std::string> files = files_of(arguments_.input);
      files.push_back(arguments_.plan);
      expect_output(arguments_.timeline, files, "timeline");
    }
    if (arguments_.plan.empty()) policies_ = policies_named(arguments_.policies);
    input_ = read_run_input(arguments_, group_.num_ranks(), pool_);
    model_ = {.layers = load().num_layers(),
              .experts = load().num_experts(),
              .top_k = load().top_k,
              .shape = arguments_.shape,
              .seed = arguments_.evaluate.planner.seed};
    if (input_->plan) {  // check that it can be executed as requested
      if (phases_of_given_plan().empty()) {
        throw InputError({.file = arguments_.plan},
                         "has backward events: it serves the policy update only, but --phase is recompute");
      }
      make_transfer_schedule(*input_->plan, swiglu_layout(model_.shape.hidden, model_.shape.intermediate),
                             {.phase = input_->plan->in_flight > 1 ? Phase::kPolicyUpdate : Phase::kRecompute,
                              .path = arguments_.evaluate.path,
                              .depth = arguments_.evaluate.depth});
    }
    expect_room();
  });
  group_.agree(facts_of(*input_));
  work_ = LayerWork(arguments_.work, load().num_ranks());
  group_.set_topology(load().topology());
  if (!arguments_.timeline.empty()) timeline_.emplace();
  if (!arguments_.no_reference) {
    reference_.emplace(model_, arguments_.optimizer_options(), backward());
  }
}

bool Execution::backward() const {
  return arguments_.runs(Phase::kPolicyUpdate) && !(input_->plan && !input_->plan->can_train());
}

void Execution::expect_room() const {
  expect_enough_memory(
      {.load = load(),
       .routes = *input_->routes,
       .home = input_->step.homes,
       .model = model_,
       .guest_slots = input_->plan ? input_->plan->guest_slots : arguments_.evaluate.planner.guest_slots,
       .in_flight = input_->plan ? input_->plan->in_flight : arguments_.evaluate.planner.in_flight,
       .ranks_here = load().num_ranks(),
       .backward = backward(),
       .adam = arguments_.optimizer == Optimizer::Kind::kAdam,
       .arena = arguments_.evaluate.path != PathChoice::kPeer,
       .reference = !arguments_.no_reference});
}

std::vector<RunRow> Execution::run() {
  if (timeline_) {
    // Each process counts time from its first span. The barrier aligns this first span across processes.
    group_.run([this](Communicator& communicator) {
      communicator.barrier();
      const std::int64_t now = Timeline::now_ns();
      timeline_->add(communicator.rank(), Lane::kWork, "begin", now, now);
    });
  }
  if (input_->plan) run_given_plan();
  for (const Policy* policy : policies_) run_policy(*policy);
  if (timeline_) write_timeline();
  return std::move(rows_);
}

// Returns the phases to execute. A plan with backward events supports only the policy update.
std::vector<Phase> Execution::phases_of_given_plan() const {
  std::vector<Phase> phases;
  if (input_->plan->in_flight == 1 && arguments_.runs(Phase::kRecompute)) phases.push_back(Phase::kRecompute);
  if (arguments_.runs(Phase::kPolicyUpdate)) phases.push_back(Phase::kPolicyUpdate);
  return phases;
}

void Execution::run_given_plan() {
  RunningPlan running(*input_->plan);
  for (const Phase phase : phases_of_given_plan()) execute(input_->plan->policy, phase, running);
}

void Execution::run_policy(const Policy& policy) {
  const std::string name(policy.name());
  Timeline* const timeline = timeline_ ? &*timeline_ : nullptr;
  PlannerOptions options = arguments_.evaluate.planner;
  options.in_flight = 1;
  const int in_flight = arguments_.evaluate.planner.in_flight;
  if (arguments_.runs(Phase::kRecompute)) {
    RunningPlan running({.policy = policy, .input = input_->step, .options = options, .timeline = timeline}, pool_);
    execute(name, Phase::kRecompute, running);
    if (!arguments_.runs(Phase::kPolicyUpdate)) return;
    const bool serves_both = in_flight == 1 && running.plan().can_train();
    if (serves_both && rows_.back().skipped.empty()) {
      execute(name, Phase::kPolicyUpdate, running);
      return;
    }
  }
  options.in_flight = in_flight;
  if (options.residency == Residency::kFree) options.residency = Residency::kResident;
  RunningPlan running({.policy = policy, .input = input_->step, .options = options, .timeline = timeline}, pool_);
  execute(name, Phase::kPolicyUpdate, running);
}

void Execution::execute(const std::string& policy, Phase phase, RunningPlan& running) {
  RunRow& row = rows_.emplace_back(RunRow{.policy = policy, .phase = phase});
  PartCount turns;
  std::optional<Activity> activity(std::in_place, fmt::format("planning with {}", policy), &pool_.parts());
  if (const auto reason = running.wait_to_begin()) {
    row.skipped = *reason;
    return;
  }
  const StepPlan& plan = running.plan();
  // The schedule is built for all micro-steps at once, so the slots of every micro-step must be known.
  if (plan.residency == Residency::kShared) running.wait_for(MicroStepId{plan.num_micro_steps() - 1});
  activity.emplace(fmt::format("running {}, {}", policy, to_string(phase)), &turns);
  row.residency = plan.residency;
  row.in_flight = plan.in_flight;
  row.mismatched = input_->mismatched;
  std::shared_ptr<const TransferSchedule> copies;
  row.skipped = schedule(plan, phase, copies);
  if (!row.skipped.empty()) {
    running.finish();
    return;
  }

  const std::int64_t begin = Timeline::now_ns();
  row.outcome = run_planned(run_of(plan, copies), running, turns);
  // Every process computes the plan from equal inputs, and binding the phase compared slots and homes. Different quotas
  // are therefore an internal error.
  const std::string quotas = sha256_hex(std::as_bytes(plan.slot_tokens.flat())).substr(0, 16);
  if (const auto differs = group_.difference({{"quotas of the plan", quotas}})) {
    throw PhaseFailed(fmt::format("{} differ: {}", differs->name, differs->who));
  }
  if (timeline_ && group_.has_first()) {
    timeline_->add(RankId{0}, Lane::kPlanner, fmt::format("{}, {}: all repeats", policy, to_string(phase)), begin,
                   Timeline::now_ns());
  }

  if (group_.has_first()) {
    row.rho_planned = imbalance(planned_rows(plan, copies->order));
    row.rho_computed = imbalance(row.outcome.turns.rows);
    row.predicted = guest_memory(plan, swiglu_layout(model_.shape.hidden, model_.shape.intermediate), *copies);
    check(row, plan);
  }
  if (reference_) group_.run_at_first([&] { hold_against_reference(row); });
}

std::string Execution::schedule(const StepPlan& plan, Phase phase,
                                std::shared_ptr<const TransferSchedule>& schedule) const {
  if (phase == Phase::kPolicyUpdate && !plan.can_train()) return std::string(kPlacesFreely);
  const ExpertLayout layout = swiglu_layout(model_.shape.hidden, model_.shape.intermediate);
  const ScheduleOptions options{.phase = phase, .path = arguments_.evaluate.path, .depth = arguments_.evaluate.depth};
  try {
    schedule = std::make_shared<const TransferSchedule>(make_transfer_schedule(plan, layout, options));
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

PhaseRun Execution::run_of(const StepPlan& plan, std::shared_ptr<const TransferSchedule> schedule) {
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * arguments_.timeout_seconds));
  EngineOptions engine;
  engine.timeout = timeout / engine.attempts;
  LinkDecorator decorate;
  if (arguments_.link_throttle > 0) {
    decorate = [rate = arguments_.link_throttle](std::unique_ptr<CopyLink> link, RankId, Path) {
      return std::make_unique<ThrottledLink>(std::move(link), rate);
    };
  }
  return {.load = load(),
          .plan = plan,
          .schedule = std::move(schedule),
          .routes = *input_->routes,
          .without_route = input_->without_route,
          .model = model_,
          .home_memory = group_.one_process() ? HomeMemory::kPrivate : HomeMemory::kShared,
          .initial_home = input_->step.homes,
          .optimizer = arguments_.optimizer_options(),
          .options = {.engine = engine, .decorate = decorate, .timeline = timeline_ ? &*timeline_ : nullptr},
          .repeats = arguments_.repeats,
          .steps = arguments_.steps,
          .bitwise = arguments_.bitwise,
          .gather = !arguments_.no_reference};
}

// Returns the outcome on the process of rank 0, and an empty one on others. turns: receives those of rank 0.
PhaseOutcome Execution::run_planned(const PhaseRun& run, RunningPlan& running, PartCount& turns) {
  const int runs = (arguments_.bitwise ? 2 : 1) * arguments_.repeats + (backward() ? arguments_.steps - 1 : 0);
  turns.begin(std::ssize(run.schedule->order.turns) * runs);
  PhaseOutcome of_first;
  group_.run([&](Communicator& communicator) {
    PhaseRun mine = run;
    const RankId rank = communicator.rank();
    mine.work = [&, rank](const Turn& turn) {
      if (turn.pass == Pass::kForward && turn.layer == LayerId{0}) running.wait_for(turn.micro_step);
      work_(rank);
      if (rank == RankId{0}) turns.add();
    };
    PhaseOutcome outcome = run_phase(mine, communicator);
    if (rank == RankId{0}) of_first = std::move(outcome);
  });
  running.finish();
  return of_first;
}

// Checks plans made by this run; given plans were checked when they were read.
void Execution::check(RunRow& row, const StepPlan& plan) const {
  if (!input_->plan) {
    row.violations = check_plan(plan, load(), check_options(input_->step)).violations;
  }
  if (!arguments_.bitwise) return;
  const auto first = std::ranges::find_if(
      rows_, [&](const RunRow& other) { return other.phase == row.phase && other.skipped.empty(); });
  row.outputs_identical = first->outcome.digest.outputs == row.outcome.digest.outputs;
}

void Execution::hold_against_reference(RunRow& row) {
  row.agreement = reference_->compare(row.outcome, *input_->routes, pool_);
  row.outcome.result = {};
  row.outcome.routes.clear();
}

void Execution::write_timeline() {
  std::vector<std::vector<std::byte>> texts;
  if (group_.one_process()) {
    write_file(arguments_.timeline, timeline_->to_json());
    return;
  }
  group_.run([&](Communicator& communicator) {
    const std::string mine = timeline_->to_json();
    texts = gather(communicator, std::as_bytes(std::span(mine)));
  });
  if (group_.has_first()) write_file(arguments_.timeline, merged_timelines(texts));
}

std::string Execution::describe() const {
  const LoadTable& load = input_->step.load;
  std::string text = fmt::format("{}: {}\n", load.name, foremoe::describe(load));
  text +=
      fmt::format("Executed on {}: hidden {}, intermediate {}, top-{}; {} of each phase\n",
                  group_.one_process() ? counted(load.num_ranks(), "thread") : counted_processes(load.num_ranks()),
                  model_.shape.hidden, model_.shape.intermediate, model_.top_k, counted(arguments_.repeats, "repeat"));
  if (!input_->without_route.empty()) {
    const auto there = std::ranges::count(input_->without_route, 1);
    text += fmt::format(
        "The router chooses experts for rows without a route, which occur in {} of {} (micro-step, layer) pairs\n",
        there, input_->without_route.size());
  }
  return text;
}

}  // namespace foremoe::cli
