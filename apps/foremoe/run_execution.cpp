#include "run_execution.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "console.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/fit_plan.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/runtime/rank_run.h"
#include "foremoe/runtime/run_memory.h"
#include "foremoe/transfer/copy_link.h"
#include "planning_arguments.h"
#include "progress.h"
#include "run_facts.h"

namespace foremoe::cli {
namespace {

[[noreturn]] void refuse(const std::string& file, const std::string& what) { throw InputError({.file = file}, what); }

// Returns the homes before planning, as recorded in the plan.
std::string recorded_homes(const StepPlan& plan) {
  const auto options = nlohmann::json::parse(plan.options);
  const auto at = options.find("homes");
  return at != options.end() && at->is_string() ? at->get<std::string>() : std::string(kContiguous);
}

Array<RankId, 2> first_layers(const Array<RankId, 2>& homes, int layers) {
  Array<RankId, 2> first({static_cast<std::size_t>(layers), homes.extent(1)});
  std::ranges::copy(homes.flat().first(first.size()), first.flat().begin());
  return first;
}

// Reads the plan and its workload, and truncates both to the layers and micro-steps to execute.
void read_given_plan(const RunArguments& arguments, InputOptions options, ThreadPool& pool, RunInput& input) {
  const std::string& path = arguments.plan;
  const int layers = options.layers;
  const int micro_steps = options.micro_steps;
  options.layers = options.micro_steps = 0;  // they select the executed part of the plan, not its input
  StepPlan plan = read_plan(path);
  const int processes = options.wanted_ranks;
  options = input_as_planned(plan, options);
  if (processes != 0 && options.ep == 0) options.wanted_ranks = processes;
  Workload step = read_load_or_trace(options, pool);

  if (plan.num_ranks() != step.load.num_ranks()) {
    refuse(path, fmt::format("is a plan for {}, but {} has {}", counted(plan.num_ranks(), "rank"), step.load.name,
                             step.load.num_ranks()));
  }
  if (plan.ranks_per_node != step.load.ranks_per_node) {
    refuse(path, fmt::format("is a plan for {} per node, but {} has {}", counted(plan.ranks_per_node, "rank"),
                             step.load.name, step.load.ranks_per_node));
  }
  const int in_flight = arguments.evaluate.planner.in_flight;
  if (arguments.given("in_flight") && in_flight != plan.in_flight) {
    refuse(path, fmt::format("is a plan for {} in flight, but --in-flight is {}", counted(plan.in_flight, "micro-step"),
                             in_flight));
  }
  if (arguments.fit_plan) {
    try {
      FittedPlan fitted = fit_plan(std::move(plan), step.load);
      plan = std::move(fitted.plan);
      input.mismatched = fitted.mismatched;
      if (fitted.mismatched > 0) {
        note(fmt::format("{} does not cover {} of {}: their homes serve them", path, counted(fitted.mismatched, "row"),
                         step.load.name));
      }
    } catch (const InputError& error) {
      refuse(path, error.problem());
    }
  } else {
    expect_plan_for(step.load, plan, path);
  }
  step.homes = initial_homes(arguments.given("homes") ? arguments.input.homes : recorded_homes(plan), step.load);
  CheckOptions check = check_options(step);
  check.max_listed = 1;
  const CheckReport report = check_plan(plan, step.load, check);
  if (!report.ok()) {
    const Violation& v = report.violations.front();
    const std::string place = place_of(v);
    refuse(path, fmt::format("is not right for {}: {}{}{} (foremoe verify lists all violations)", step.load.name, place,
                             place.empty() ? "" : ", ", v.message));
  }

  const LoadTable part = take_first(step.load, number_to_use("micro_steps", micro_steps, plan.num_micro_steps(), path),
                                    number_to_use("layers", layers, plan.num_layers(), path));
  input.plan = take_first(plan, part);
  step.cut =
      step.cut || part.num_layers() < step.load.num_layers() || part.num_micro_steps() < step.load.num_micro_steps();
  step.homes = first_layers(step.homes, part.num_layers());
  step.load = part;
  input.step = std::move(step);
}

std::string counted_processes(int n) { return fmt::format("{} process{}", n, n == 1 ? "" : "es"); }

std::unique_ptr<const RunInput> read_run_input(const RunArguments& arguments, int processes, ThreadPool& pool) {
  InputOptions options = arguments.input;
  if (processes != 0) {
    if (options.ranks != 0 && options.ranks != processes) {
      refuse("--ranks",
             fmt::format("{}, but mpirun has started {}: use mpirun -np {}", options.ranks, processes, options.ranks));
    }
    if (processes > 1) options.wanted_ranks = processes;
  }
  auto input = std::make_unique<RunInput>();
  if (arguments.plan.empty()) {
    input->step = read_workload(options, pool);
  } else {
    read_given_plan(arguments, options, pool, *input);
  }
  const Workload& step = input->step;
  note_all(step.remarks);
  if (processes == 1 && step.load.num_ranks() != 1) {
    refuse("--comm mpi",
           fmt::format("{} is a load of {}, and mpirun has started 1 process; start one for each rank, or "
                       "fold the load with --ranks 1 --fold",
                       step.load.name, counted(step.load.num_ranks(), "rank")));
  }
  if (processes != 0 && step.load.num_ranks() != processes) {
    refuse(step.load.name, fmt::format("is a load of {}, which {} cannot run", counted(step.load.num_ranks(), "rank"),
                                       counted_processes(processes)));
  }
  input->routes = step.tokens ? recorded_routes(step.tokens->trace, step.tokens->batching) : dealt_routes(step.load);
  input->without_route = rows_without_route(*input->routes, step.load);
  return input;
}

}  // namespace

Optimizer RunArguments::optimizer_options() const {
  const double initial = optimizer == Optimizer::Kind::kSgd ? 1e-2 : 1e-3;
  return {.kind = optimizer, .rate = static_cast<float>(rate > 0 ? rate : initial)};
}

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
        refuse(arguments_.plan, "has backward events: it serves the policy update only, but --phase is recompute");
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
  if (phase == Phase::kPolicyUpdate && !plan.can_train()) {
    row.skipped = kPlacesFreely;
    running.finish();
    return;
  }

  const ExpertLayout layout = swiglu_layout(model_.shape.hidden, model_.shape.intermediate);
  const ScheduleOptions schedule_options{
      .phase = phase, .path = arguments_.evaluate.path, .depth = arguments_.evaluate.depth};
  std::shared_ptr<const TransferSchedule> schedule;
  try {
    schedule = std::make_shared<const TransferSchedule>(make_transfer_schedule(plan, layout, schedule_options));
  } catch (const InputError& error) {
    row.skipped = error.what();
    running.finish();
    return;
  }
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * arguments_.timeout_seconds));
  EngineOptions engine;
  engine.timeout = timeout / engine.attempts;
  LinkDecorator decorate;
  if (arguments_.link_throttle > 0) {
    decorate = [rate = arguments_.link_throttle](std::unique_ptr<CopyLink> link, RankId, Path) {
      return std::make_unique<ThrottledLink>(std::move(link), rate);
    };
  }
  const PhaseRun run{.load = load(),
                     .plan = plan,
                     .schedule = schedule,
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
  const std::int64_t begin = Timeline::now_ns();
  const int runs = (arguments_.bitwise ? 2 : 1) * arguments_.repeats + (backward() ? arguments_.steps - 1 : 0);
  turns.begin(std::ssize(schedule->order.turns) * runs);
  group_.run([&](Communicator& communicator) {
    PhaseRun mine = run;
    const RankId rank = communicator.rank();
    mine.work = [&, rank](const Turn& turn) {
      if (turn.pass == Pass::kForward && turn.layer == LayerId{0}) running.wait_for(turn.micro_step);
      work_(rank);
      if (rank == RankId{0}) turns.add();
    };
    PhaseOutcome outcome = run_phase(mine, communicator);
    if (rank == RankId{0}) row.outcome = std::move(outcome);
  });
  running.finish();
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
    row.rho_planned = imbalance(planned_rows(plan, schedule->order));
    row.rho_computed = imbalance(row.outcome.turns.rows);
    row.predicted = guest_memory(plan, layout, *schedule);
    check(row, plan);
  }
  if (reference_) group_.run_at_first([&] { hold_against_reference(row); });
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
  if (!group_.has_first()) return;
  nlohmann::ordered_json merged;
  for (const std::vector<std::byte>& bytes : texts) {
    const auto* const text = reinterpret_cast<const char*>(bytes.data());
    nlohmann::ordered_json one = nlohmann::ordered_json::parse(text, text + bytes.size());
    if (merged.is_null()) {
      merged = std::move(one);
      continue;
    }
    auto& dropped = merged["otherData"]["dropped_spans"];
    dropped = dropped.get<std::int64_t>() + one["otherData"]["dropped_spans"].get<std::int64_t>();
    for (auto& event : one["traceEvents"]) merged["traceEvents"].push_back(std::move(event));
  }
  write_file(arguments_.timeline, merged.dump() + "\n");
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
