#include "report_gatherer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/plan/step_plan.h"

namespace foremoe::cli {
namespace {

constexpr const char* kOurs = "foremoe";

double mean(const std::vector<double>& values) {
  return values.empty() ? 1 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Of one layer, ρ summed over the micro-steps with load.
double imbalance_of_layer(const Array<Tokens, 3>& loads, LayerId layer) {
  double all = 0;
  for (std::size_t m = 0; m < loads.extent(0); ++m) all += imbalance(loads.row(m, layer)).value_or(0);
  return all;
}

// [micro_step][rank], tokens
Array<std::int64_t, 2> picture(const Array<Tokens, 3>& loads, LayerId layer) {
  Array<std::int64_t, 2> drawn({loads.extent(0), loads.extent(2)});
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    std::ranges::transform(loads.row(m, layer), drawn.row(m).begin(), &Tokens::value);
  }
  return drawn;
}

report::LoadPictures pictures(const StepPlan& before, const StepPlan& after) {
  const Array<Tokens, 3> loads = planned_loads(before);
  LayerId worst;
  double most = 0;
  for (int l = 0; l < before.num_layers(); ++l) {
    const double here = imbalance_of_layer(loads, LayerId{l});
    if (here > most) {
      most = here;
      worst = LayerId{l};
    }
  }
  return {.layer = worst.value, .before = picture(loads, worst), .after = picture(planned_loads(after), worst)};
}

std::vector<report::TimePart> parts_of(const PhaseSeconds& parts) {
  std::vector<report::TimePart> named;
  for (const PhasePart& part : phase_parts()) {
    std::string words(part.name);
    std::ranges::replace(words, '_', ' ');
    named.push_back({std::move(words), parts.*part.seconds});
  }
  return named;
}

double as_double(Bytes bytes) { return static_cast<double>(bytes.value); }

void add_links(const SimulatedPhase& phase, std::vector<report::LinkBytes>& links) {
  for (const LinkTraffic& traffic : phase.traffic) {
    auto at = std::find_if(links.begin(), links.end(), [&](const auto& l) { return l.link == traffic.link; });
    if (at == links.end()) at = links.insert(links.end(), report::LinkBytes{.link = traffic.link});
    at->rows += as_double(traffic.rows);
    at->copies += as_double(traffic.copies);
    at->gradients += as_double(traffic.gradients);
    at->busiest_use = std::max(at->busiest_use, traffic.busiest_use);
  }
}

// Far enough for residents to have settled, and few enough to be simulated again in no time.
constexpr int kMostLayers = 8;
constexpr int kMostMicroSteps = 8;
constexpr std::size_t kMostRanks = 8;

struct Span {
  std::string name;
  Lane lane{};
  double begin = 0;  // seconds
  double end = 0;
};

// Of every rank, by begin.
std::vector<std::vector<Span>> spans_of(const Timeline& timeline, int ranks) {
  std::vector<std::vector<Span>> spans(static_cast<std::size_t>(ranks));
  const auto trace = nlohmann::json::parse(timeline.to_json());
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const double begin = 1e-6 * event.at("ts").get<double>();
    spans.at(event.at("pid").get<std::size_t>())
        .push_back({.name = event.at("name"),
                    .lane = static_cast<Lane>(event.at("tid").get<int>()),
                    .begin = begin,
                    .end = begin + 1e-6 * event.at("dur").get<double>()});
  }
  for (auto& rank : spans) {
    std::ranges::stable_sort(rank, {}, &Span::begin);
  }
  return spans;
}

bool is_copy(const Span& span) { return span.lane == Lane::kHostPath || span.lane == Lane::kPeerPath; }

std::string kind_of(const Span& span, int exchanges_before) {
  switch (span.lane) {
    case Lane::kWork:
      return "dense";
    case Lane::kPlanner:
      return "planning";
    case Lane::kDispatch:
      return exchanges_before == 0 ? "dispatch" : "combine";
    case Lane::kExperts:
      return "experts";
    case Lane::kWait:
      return "waiting for copies";
    case Lane::kHostPath:
      return "copies from the host";
    case Lane::kPeerPath:
      return "copies from peers";
  }
  return {};
}

struct Window {
  double begin = 0;
  double end = 0;
  std::string turn;  // how the names of its spans end
};

bool belongs(const Span& span, const Window& window) { return !is_copy(span) && span.name.ends_with(window.turn); }

report::TimelineLane lane_of(RankId rank, const std::vector<Span>& spans, const Window& window) {
  report::TimelineLane lane{.name = fmt::format("rank {}", rank.value), .spans = {}};
  int exchanges = 0;
  double until = window.begin;
  const auto wait_until = [&](double begin) {
    if (begin - until > 1e-9)
      lane.spans.push_back({"waiting", "waiting for others", until - window.begin, begin - window.begin});
    until = std::max(until, begin);
  };
  for (const Span& span : spans) {
    if (!belongs(span, window) || span.end <= span.begin) continue;
    wait_until(span.begin);
    const std::string kind = kind_of(span, exchanges);
    exchanges += span.lane == Lane::kDispatch;
    lane.spans.push_back({kind, kind, span.begin - window.begin, span.end - window.begin});
    until = std::max(until, span.end);
  }
  wait_until(window.end);
  for (const Span& span : spans) {
    if (!is_copy(span) || span.end <= window.begin || span.begin >= window.end) continue;
    lane.spans.push_back({kind_of(span, 0), span.name, std::max(0.0, span.begin - window.begin),
                          std::min(span.end, window.end) - window.begin, /*beneath=*/true});
  }
  return lane;
}

std::vector<double> imbalances(const StepPlan& plan) {
  const Array<Tokens, 3> loads = planned_loads(plan);
  std::vector<double> rho;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int m = 0; m < plan.num_micro_steps(); ++m) {
      if (const std::optional<double> here = imbalance(loads.row(m, l))) rho.push_back(*here);
    }
  }
  return rho;
}

report::PolicyResult figures_of(const Evaluation& e, const SimulatedStep& vanilla) {
  const SimulatedStep& step = *e.step;
  const auto guests = [](const SimulatedPhase& phase) {
    return as_double(phase.memory.guest_weights) + as_double(phase.memory.guest_gradients);
  };
  report::PolicyResult figures{
      .policy = e.policy,
      .residency = std::string(to_string(e.plan.residency)),
      .rho = imbalances(e.plan),
      .copies_per_layer_event = e.figures.copies_per_layer_event,
      .home_moves = e.figures.home_moves,
      .plan_us = e.us_per_layer_micro_step(),
      .recompute = {.parts = parts_of(step.recompute.parts), .ideal_seconds = step.recompute.ideal_seconds},
      .policy_update = {.parts = parts_of(step.policy_update.parts), .ideal_seconds = step.policy_update.ideal_seconds},
      .step_seconds = step.step_seconds,
      .ideal_step_seconds = step.ideal_step_seconds,
      .exposed_copy_seconds = step.exposed_copy_seconds,
      .speedup = speedup(vanilla.step_seconds, step.step_seconds),
      .memory_bytes = as_double(step.memory_bytes_per_rank),
      .guest_bytes = std::max(guests(step.recompute), guests(step.policy_update)),
      .peak_tokens = step.peak_tokens_per_rank.value};
  if (step.home_move_seconds > 0) {
    figures.policy_update.parts.insert(figures.policy_update.parts.begin(), {"homes moved", step.home_move_seconds});
  }
  if (step.rl_step_seconds > step.step_seconds) {
    figures.rl_speedup = speedup(vanilla.rl_step_seconds, step.rl_step_seconds);
  }
  if (e.largest_micro_batch_tokens) {
    figures.largest_micro_batch = e.largest_micro_batch_tokens->value;
  }
  add_links(step.recompute, figures.links);
  add_links(step.policy_update, figures.links);
  return figures;
}

report::NodeTraffic node_traffic(const Evaluation& e) {
  const SimulatedStep& step = *e.step;
  report::NodeTraffic traffic{.policy = e.policy, .bytes = Array<double, 2>(step.policy_update.between_nodes.shape())};
  for (const SimulatedPhase* phase : {&step.recompute, &step.policy_update}) {
    const auto bytes = phase->between_nodes.flat();
    for (std::size_t i = 0; i < std::min(bytes.size(), traffic.bytes.size()); ++i) {
      traffic.bytes.flat()[i] += as_double(bytes[i]);
    }
  }
  return traffic;
}

WindowChoice choose_window(const StepPlan& plan) {
  WindowChoice choice;
  double worst = 0;
  const Array<Tokens, 3> planned = planned_loads(plan);
  std::vector<Tokens> loads;
  for (int l = 0; l < std::min(plan.num_layers(), kMostLayers); ++l) {
    for (int m = 0; m < std::min(plan.num_micro_steps(), kMostMicroSteps); ++m) {
      const auto row = planned.row(m, l);
      const double rho = imbalance(row).value_or(0);
      if (rho <= worst) continue;
      worst = rho;
      choice.layer = LayerId{l};
      choice.micro_step = MicroStepId{m};
      loads.assign(row.begin(), row.end());
    }
  }
  std::vector<RankId> by_load;
  for (int r = 0; r < plan.num_ranks(); ++r) by_load.emplace_back(r);
  if (loads.empty()) loads.resize(by_load.size());
  std::ranges::stable_sort(by_load, std::greater<>{}, [&](RankId r) { return loads[r.index()]; });
  const std::size_t shown = std::min(kMostRanks, by_load.size());
  for (std::size_t i = 0; i < shown; ++i) {
    choice.ranks.push_back(by_load[shown == 1 ? 0 : i * (by_load.size() - 1) / (shown - 1)]);
  }
  std::ranges::sort(choice.ranks);
  return choice;
}

}  // namespace

ReportGatherer::ReportGatherer(const StepInput& input, const EvaluateOptions& options, EvaluationContext context)
    : input_(input),
      options_(options),
      context_(std::move(context)),
      baseline_policy_(policy_named(std::string(kReportBaseline))),
      baseline_(planned(baseline_policy_)) {}

Evaluation ReportGatherer::checked(const Policy& policy, const PlannerOptions& planner) {
  EvaluateOptions options = options_;
  options.planner = planner;
  Evaluation e = evaluate(policy, input_, options, context_);
  if (e.check.ok()) return e;
  e.skipped = fmt::format("its plan is WRONG: {}", e.check.violations.front().message);
  wrong_.push_back(fmt::format("{}, {}, residency {}: {}", policy.name(), counted(planner.guest_slots, "guest slot"),
                               to_string(planner.residency), e.skipped));
  return e;
}

report::PolicyResult ReportGatherer::figures(const Policy& policy, const PlannerOptions& planner) {
  const Evaluation e = checked(policy, planner);
  if (!e.planned()) return {.policy = std::string(policy.name()), .skipped = e.skipped};
  return figures_of(e, *baseline_.step);
}

Evaluation ReportGatherer::planned(const Policy& policy) {
  Evaluation e = checked(policy, options_.planner);
  if (e.planned()) return e;
  throw InputError({.file = input_.load.name}, fmt::format("{}: {}", policy.name(), e.skipped));
}

void ReportGatherer::compare(const std::vector<const Policy*>& policies, report::Report& out) {
  for (const Policy* policy : policies) {
    out.policies.push_back(policy == &baseline_policy_ ? figures_of(baseline_, *baseline_.step)
                                                       : figures(*policy, options_.planner));
  }
  const report::PolicyResult* after = out.find(kOurs);
  if (after == nullptr) {
    for (const report::PolicyResult& p : out.policies) {
      const bool compared = p.policy != kReportBaseline && p.skipped.empty();
      if (compared && (after == nullptr || p.speedup > after->speedup)) after = &p;
    }
  }
  out.before = kReportBaseline;
  out.after = after == nullptr ? out.before : after->policy;
}

void ReportGatherer::look_closer(report::Report& out) {
  const Policy& policy = policy_named(out.after);
  const Evaluation after = planned(policy);
  out.loads = pictures(baseline_.plan, after.plan);
  out.traffic = {node_traffic(baseline_), node_traffic(after)};
  const WindowChoice window = choose_window(baseline_.plan);
  out.timelines = {timeline_window(baseline_, baseline_policy_, window), timeline_window(after, policy, window)};
}

void ReportGatherer::ablate(report::Report& out) {
  const auto add = [&](const char* stages, const report::PolicyResult& f) {
    if (!f.skipped.empty()) return;
    out.ablation.push_back({.stages = stages,
                            .rho_mean = mean(f.rho),
                            .speedup = f.speedup,
                            .copies_per_layer_event = f.copies_per_layer_event,
                            .exposed_copy_seconds = f.exposed_copy_seconds});
  };
  add("vanilla", figures_of(baseline_, *baseline_.step));
  PlannerOptions options = options_.planner;
  options.stages = {.base = true, .relocation = false, .replication = false, .tokens = false};
  add("B", figures(policy_named(kOurs), options));
  options.stages.relocation = true;
  add("BL", figures(policy_named(kOurs), options));
  options.stages.replication = true;
  add("BLP", figures(policy_named(kOurs), options));
  options.stages.tokens = true;
  add("BLPT", figures(policy_named(kOurs), options));
}

void ReportGatherer::weigh_memory(const std::vector<int>& guest_slots, report::Report& out) {
  const auto add = [&](std::string_view residency, int slots, const report::PolicyResult& f) {
    if (!f.skipped.empty()) return;
    out.memory.push_back({.residency = std::string(residency),
                          .guest_slots = slots,
                          .memory_bytes = f.memory_bytes,
                          .guest_bytes = f.guest_bytes,
                          .speedup = f.speedup,
                          .rho_mean = mean(f.rho),
                          .copies_per_layer_event = f.copies_per_layer_event,
                          .exposed_copy_seconds = f.exposed_copy_seconds});
  };
  add("no guests", 0, figures_of(baseline_, *baseline_.step));
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared}) {
    for (const int slots : guest_slots) {
      if (slots == 0) continue;
      PlannerOptions options = options_.planner;
      options.residency = residency;
      options.guest_slots = slots;
      add(to_string(residency), slots, figures(policy_named(kOurs), options));
    }
  }
}

report::TimelineWindow ReportGatherer::timeline_window(const Evaluation& evaluation, const Policy& policy,
                                                       const WindowChoice& choice) const {
  const StepPlan& whole = evaluation.plan_of(Phase::kRecompute);
  const int micro_steps = choice.micro_step.value + 1;
  const int layers = choice.layer.value + 1;
  const LoadTable load = take_first(input_.load, micro_steps, layers);
  const StepPlan plan = take_first(whole, load);
  Timeline timeline;
  (void)simulate_phase({.load = load,
                        .plan = plan,
                        .cost = *context_.cost,
                        .trace = input_.trace_or_null(),
                        .batching = input_.batching_or_null()},
                       {.phase = Phase::kRecompute,
                        .path = options_.path,
                        .depth = options_.depth,
                        .online = policy.online(),
                        .pool = &context_.pool,
                        .timeline = &timeline});
  const auto spans = spans_of(timeline, plan.num_ranks());

  Window window{.turn = fmt::format("micro-step {}, layer {}", choice.micro_step.value, choice.layer.value)};
  bool found = false;
  for (const auto& rank : spans) {
    for (const Span& span : rank) {
      if (!belongs(span, window)) continue;
      window.begin = found ? std::min(window.begin, span.begin) : span.begin;
      window.end = found ? std::max(window.end, span.end) : span.end;
      found = true;
    }
  }
  report::TimelineWindow out{.policy = evaluation.policy,
                             .what = fmt::format("{}, forward", window.turn),
                             .seconds = window.end - window.begin,
                             .lanes = {}};
  for (const RankId rank : choice.ranks) out.lanes.push_back(lane_of(rank, spans[rank.index()], window));
  return out;
}

}  // namespace foremoe::cli
