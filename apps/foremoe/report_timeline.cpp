#include "report_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/plan/step_plan.h"

namespace foremoe::cli {
namespace {

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

}  // namespace

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

report::TimelineWindow timeline_window(const ReportProblem& problem, const SimulatedPolicy& simulated,
                                       const Policy& policy, const WindowChoice& choice) {
  const StepPlan& whole = simulated.recompute_plan ? *simulated.recompute_plan : simulated.measured.plan;
  const int micro_steps = choice.micro_step.value + 1;
  const int layers = choice.layer.value + 1;
  const StepInput& step = problem.input.step;
  const LoadTable load = take_first(step.load, micro_steps, layers);
  const StepPlan plan = take_first(whole, load);
  Timeline timeline;
  (void)simulate_phase({.load = load,
                        .plan = plan,
                        .cost = problem.setup.cost,
                        .trace = step.trace_or_null(),
                        .batching = step.batching_or_null()},
                       {.phase = Phase::kRecompute,
                        .path = problem.setup.path,
                        .depth = problem.setup.depth,
                        .online = policy.online(),
                        .pool = &problem.pool,
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
  report::TimelineWindow out{.policy = simulated.policy,
                             .what = fmt::format("{}, forward", window.turn),
                             .seconds = window.end - window.begin,
                             .lanes = {}};
  for (const RankId rank : choice.ranks) out.lanes.push_back(lane_of(rank, spans[rank.index()], window));
  return out;
}

}  // namespace foremoe::cli
