// Measures the overlap of copies with the device's computation between layers, over throttled links.
//
//   overlap [work_ms]          prints Markdown tables for lab/performance.md
//
// Every rank fetches the same number of experts in every turn (residency `shared`, two guest slots, two experts of the
// other rank, forward only). Copies thus take a known share of a turn's work time. 90 % can be hidden completely; 150 %
// leaves half of the work time per turn exposed. Work is a timed wait, like a host that waits for its device. Exposed
// time is the time in wait() on the rank that waited longest.

#include <fmt/format.h>

#include <cstdlib>
#include <thread>

#include "foremoe/runtime/rank_run.h"
#include "foremoe/runtime/threads/threads_communicator.h"
#include "foremoe/transfer/copy_link.h"

namespace foremoe {
namespace {

using std::chrono::duration;

constexpr int kRanks = 2;
constexpr int kLayers = 4;
constexpr int kMicroSteps = 10;
constexpr int kGuests = 2;
constexpr int kExperts = 4;  // two homes per rank
constexpr int kTokens = 4;   // per source; each visits one expert
constexpr ExpertShape kShape{.hidden = 64, .intermediate = 64};

// Every source sends one token to each expert, in order.
LoadTable even_load() {
  LoadTable table{.top_k = 1, .ranks_per_node = kRanks, .name = "even"};
  table.load = Array<Tokens, 4>({kMicroSteps, kLayers, kRanks, kExperts}, Tokens{kTokens / kExperts});
  return table;
}

// Both ranks serve every expert: their own at home and the other rank's as guests.
StepPlan even_plan() {
  StepPlan plan;
  plan.policy = "even";
  plan.residency = Residency::kShared;
  plan.guest_slots = kGuests;
  plan.ranks_per_node = kRanks;
  plan.slot_expert = Array<ExpertId, 4>({kMicroSteps, kLayers, kRanks, kGuests + kExperts / kRanks});
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape(), Tokens{1});
  plan.home = Array<RankId, 2>({kLayers, kExperts});
  for (int l = 0; l < kLayers; ++l) {
    for (int e = 0; e < kExperts; ++e) plan.home(l, e) = RankId{e / 2};
    for (int m = 0; m < kMicroSteps; ++m) {
      for (int r = 0; r < kRanks; ++r) {
        for (int s = 0; s < kExperts; ++s) plan.slot_expert(m, l, r, s) = ExpertId{(2 * r + s) % kExperts};
      }
    }
  }
  for (int m = 0; m < kMicroSteps; ++m) {
    plan.event_micro_step.emplace_back(m);
    plan.event_pass.push_back(Pass::kForward);
  }
  return plan;
}

struct Measured {
  double exposed_seconds = 0;
  double step_seconds = 0;
  Bytes guest_weights;
};

struct Setting {
  double share = 0.9;  // copy time ÷ work time per turn
  double work_seconds = 0.02;
  int depth = kDefaultDepth;
  PathChoice path = PathChoice::kHost;
};

Measured measure(const Setting& setting) {
  const LoadTable load = even_load();
  const StepPlan plan = even_plan();
  const ExpertLayout layout = swiglu_layout(kShape.hidden, kShape.intermediate);
  const auto schedule = std::make_shared<const TransferSchedule>(
      make_transfer_schedule(plan, layout, {.phase = Phase::kRecompute, .path = setting.path, .depth = setting.depth}));
  const auto routes = dealt_routes(load);
  const double bytes_per_turn = kGuests * static_cast<double>(layout.bytes().value);
  const double rate = bytes_per_turn / (setting.share * setting.work_seconds);

  PhaseRun run{.load = load,
               .plan = plan,
               .schedule = schedule,
               .routes = *routes,
               .model = {.layers = kLayers, .experts = kExperts, .top_k = 1, .shape = kShape, .seed = 1},
               .initial_home = plan.home,
               .gather = false,
               .work = [&](const Turn&) { std::this_thread::sleep_for(duration<double>(setting.work_seconds)); }};
  run.options.decorate = [rate](std::unique_ptr<CopyLink> link, RankId, Path) {
    return std::make_unique<ThrottledLink>(std::move(link), rate);
  };

  const Topology topology{.num_ranks = kRanks, .ranks_per_node = kRanks};
  const auto communicators = make_threads_communicators(topology, std::chrono::seconds(60));
  Measured measured;
  run_ranks(kRanks, [&](RankId r) {
    const PhaseOutcome outcome = run_phase(run, *communicators[r.index()]);
    if (r == RankId{0}) measured = {outcome.transfer.exposed_seconds, outcome.step_seconds, outcome.guest_weights};
  });
  return measured;
}

void print(double work_seconds) {
  fmt::print("{} turns of {:.0f} ms of work, {} ranks, {} experts fetched at each turn\n\n", kLayers * kMicroSteps,
             1e3 * work_seconds, kRanks, kGuests);
  fmt::print(
      "| path | copying ÷ work | depth | guest weights, bytes | exposed ÷ step | exposed ÷ what cannot hide |\n");
  fmt::print("|---|---|---|---|---|---|\n");
  for (const PathChoice path : {PathChoice::kHost, PathChoice::kPeer}) {
    for (const double share : {0.9, 1.5}) {
      for (const int depth : {1, 2, 3, 4}) {
        const Measured m = measure({.share = share, .work_seconds = work_seconds, .depth = depth, .path = path});
        const double cannot_hide = std::max(0.0, share - 1) * work_seconds * kLayers * kMicroSteps;
        fmt::print("| {} | {:.0f} % | {} | {} | {:.2f} % | {} |\n", path == PathChoice::kHost ? "host" : "peer",
                   100 * share, depth, m.guest_weights.value, 100 * m.exposed_seconds / m.step_seconds,
                   cannot_hide > 0 ? fmt::format("{:.3f}", m.exposed_seconds / cannot_hide) : "–");
      }
    }
  }
}

}  // namespace
}  // namespace foremoe

int main(int argc, char** argv) {
  foremoe::print(argc > 1 ? std::atof(argv[1]) / 1e3 : 0.02);
  return 0;
}
