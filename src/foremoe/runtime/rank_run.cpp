#include "foremoe/runtime/rank_run.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "foremoe/core/sha256.h"

namespace foremoe {
namespace {

struct Repeat {
  PhaseFigures figures;
  double loss = 0;
  double seconds = 0;  // slowest rank
};

// Runs a phase repeatedly on this rank's part of a model.
class RankRun {
 public:
  RankRun(const PhaseRun& run, Communicator& communicator)
      : run_(run),
        communicator_(communicator),
        shape_{.micro_steps = run.load.num_micro_steps(),
               .layers = run.load.num_layers(),
               .ranks = run.load.num_ranks(),
               .experts = run.load.num_experts(),
               .backward = run.schedule->phase == Phase::kPolicyUpdate},
        turns_(run.plan, run.load, communicator.rank(), run.schedule),
        layout_(swiglu_layout(run.model.shape.hidden, run.model.shape.intermediate)),
        model_(run.model, run.initial_home, communicator, run.home_memory) {
    for (int m = 0; m < shape_.micro_steps; ++m) {
      for (int r = 0; r < shape_.ranks; ++r) {
        most_tokens_ = std::max(most_tokens_, run.routes.num_tokens(MicroStepId{m}, RankId{r}));
      }
    }
  }

  PhaseOutcome run();

 private:
  bool first() const { return communicator_.rank() == RankId{0}; }
  MoeModel::Work work(Timeline* timeline);
  Repeat repeat(bool overlap, bool bitwise, Timeline* timeline);
  void repeat_first_step(PhaseOutcome& outcome);
  void take_figures(const Repeat& repeat, PhaseOutcome& outcome);
  TurnTable gather_turns(const std::vector<PhaseFigures>& repeats);
  double most(double value);

  const PhaseRun& run_;
  Communicator& communicator_;
  const ResultShape shape_;
  const RankTurns turns_;
  const ExpertLayout layout_;
  MoeModel model_;
  std::int64_t most_tokens_ = 0;
  std::uint64_t version_ = 0;
};

double RankRun::most(double value) {
  std::vector<double> all(static_cast<std::size_t>(shape_.ranks));
  communicator_.all_gather(std::as_bytes(std::span(&value, 1)), std::as_writable_bytes(std::span(all)));
  return std::ranges::max(all);
}

// Wraps the caller's work to record it on the timeline.
MoeModel::Work RankRun::work(Timeline* timeline) {
  if (timeline == nullptr || !run_.work) return run_.work;
  return [this, timeline](const Turn& turn) {
    const std::int64_t begin = Timeline::now_ns();
    run_.work(turn);
    timeline->add(communicator_.rank(), Lane::kWork,
                  turn.pass == Pass::kForward ? "work before a layer, forward" : "work before a layer, backward", begin,
                  Timeline::now_ns());
  };
}

Repeat RankRun::repeat(bool overlap, bool bitwise, Timeline* timeline) {
  model_.zero_gradients();
  PhaseOptions options = run_.options;
  options.engine.version = ++version_;
  options.overlap = overlap;
  options.most_tokens = most_tokens_;
  options.timeline = timeline;
  options.position_independent = bitwise;
  communicator_.barrier();
  const auto begin = std::chrono::steady_clock::now();
  Repeat result;
  {
    PhaseExecutor phase(
        {.turns = turns_, .layout = layout_, .shape = run_.model.shape, .without_route = run_.without_route},
        model_.homes(), communicator_, options);
    result.loss = model_.run(phase, {.routes = run_.routes, .micro_steps = shape_.micro_steps, .keep_results = true},
                             work(timeline));
    result.figures = phase.figures();
  }
  result.seconds = most(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return result;
}

TurnTable RankRun::gather_turns(const std::vector<PhaseFigures>& repeats) {
  const auto ranks = static_cast<std::size_t>(shape_.ranks);
  const std::size_t turns = turns_.order().turns.size();
  TurnTable table{.compute_seconds = Array<double, 3>({repeats.size(), turns, ranks}),
                  .calls = Array<std::int64_t, 2>({turns, ranks}),
                  .rows = Array<std::int64_t, 2>({turns, ranks})};
  for (const Turn& turn : turns_.order().turns) table.pass.push_back(turn.pass);
  std::vector<TurnFigures> all(turns * ranks);
  for (std::size_t i = 0; i < repeats.size(); ++i) {
    communicator_.all_gather(std::as_bytes(std::span(repeats[i].turns)), std::as_writable_bytes(std::span(all)));
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t t = 0; t < turns; ++t) {
        const TurnFigures& figures = all[r * turns + t];
        table.compute_seconds(i, t, r) = figures.compute_cpu_seconds;
        table.calls(t, r) = figures.calls;
        table.rows(t, r) = figures.rows;
      }
    }
  }
  return table;
}

void RankRun::take_figures(const Repeat& repeat, PhaseOutcome& outcome) {
  const PhaseFigures& f = repeat.figures;
  const auto total = [&](std::int64_t value) { return sum(communicator_, value); };
  outcome.step_seconds = repeat.seconds;
  outcome.transfer = {.copies = total(f.transfer.copies),
                      .failed_attempts = total(f.transfer.failed_attempts),
                      .host_bytes = Bytes{total(f.transfer.host_bytes.value)},
                      .peer_bytes = Bytes{total(f.transfer.peer_bytes.value)},
                      .exposed_seconds = most(f.transfer.exposed_seconds)};
  const bool first_of_node = communicator_.rank().value % communicator_.topology().ranks_per_node == 0;
  outcome.arena = Bytes{total(first_of_node ? f.arena.value : 0)};
  outcome.arena_refresh_seconds = most(f.arena_refresh_seconds);
  outcome.guest_weights = Bytes{static_cast<std::int64_t>(most(static_cast<double>(f.guest_weights.value)))};
  outcome.guest_gradients = Bytes{static_cast<std::int64_t>(most(static_cast<double>(f.guest_gradients.value)))};
  outcome.gradient_returns = Bytes{total(f.gradient_returns.value)};
  outcome.fallbacks = f.fallbacks;
}

void RankRun::repeat_first_step(PhaseOutcome& outcome) {
  std::vector<PhaseFigures> repeats;
  double fastest = std::numeric_limits<double>::infinity();
  double loss = 0;
  for (int r = 0; r < run_.repeats; ++r) {
    const bool overlap = r % 2 == 0;
    const Repeat now = repeat(overlap, run_.bitwise, r == 0 ? run_.options.timeline : nullptr);
    repeats.push_back(now.figures);
    const ResultDigest digest = digest_result(model_, shape_, communicator_);
    if (r == 0) outcome.digest = digest;
    outcome.repeats_equal = outcome.repeats_equal && digest == outcome.digest;
    loss = now.loss;
    if (overlap && now.seconds < fastest) {
      fastest = now.seconds;
      take_figures(now, outcome);
    }
  }
  outcome.turns = gather_turns(repeats);
  if (first()) outcome.critical_path = fitted_critical_path(outcome.turns);
  if (shape_.backward) outcome.losses.push_back(loss);
  if (run_.gather) {
    outcome.result = gather_result(model_, shape_, communicator_);
    outcome.routes.push_back(gather_routes(model_, shape_, communicator_));
  }
}

PhaseOutcome RankRun::run() {
  PhaseOutcome outcome;
  outcome.home_moves = model_.move_homes(run_.plan.home);
  if (run_.bitwise) {  // first, because later repeats provide the gathered and optimized state
    std::vector<PhaseFigures> plain;
    for (int r = 0; r < run_.repeats; ++r) plain.push_back(repeat(r % 2 == 0, false, nullptr).figures);
    outcome.plain_critical_path_seconds = fitted_critical_path(gather_turns(plain)).seconds;
  }
  repeat_first_step(outcome);
  std::string digests = outcome.digest.all;
  if (shape_.backward) {
    model_.optimize(run_.optimizer);
    for (int step = 1; step < run_.steps; ++step) {
      outcome.losses.push_back(repeat(true, run_.bitwise, nullptr).loss);
      digests += digest_result(model_, shape_, communicator_).all;
      if (run_.gather && !run_.without_route.empty()) {
        outcome.routes.push_back(gather_routes(model_, shape_, communicator_));
      }
      model_.optimize(run_.optimizer);
    }
  }
  digests += digest_weights(model_, shape_, communicator_);
  outcome.result_digest = sha256_hex(std::as_bytes(std::span(digests)));
  return outcome;
}

}  // namespace

PhaseOutcome run_phase(const PhaseRun& run, Communicator& communicator) { return RankRun(run, communicator).run(); }

}  // namespace foremoe
