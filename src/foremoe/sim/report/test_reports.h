#pragma once

// Made-up reports for tests: figures that nobody measured, in the sizes that pages have.

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "foremoe/sim/report/report.h"

namespace foremoe::report::test {

struct Size {
  int ranks = 16;
  int micro_steps = 12;
  int ranks_per_node = 8;
};

// A skewed load, falling from rank to rank, wandering with the micro-step.
inline Array<std::int64_t, 2> tokens(const Size& size, double skew) {
  Array<std::int64_t, 2> out({static_cast<std::size_t>(size.micro_steps), static_cast<std::size_t>(size.ranks)});
  for (int m = 0; m < size.micro_steps; ++m) {
    for (int r = 0; r < size.ranks; ++r) {
      const double wave = std::sin(0.9 * r + 0.7 * m) + std::sin(0.31 * r * r + m);
      out(m, r) = static_cast<std::int64_t>(4096 * std::exp(skew * wave));
    }
  }
  return out;
}

inline PolicyResult policy(const std::string& name, double rho, double exposed) {
  PolicyResult p{.policy = name, .skipped = {}, .residency = "resident"};
  for (int i = 0; i < 200; ++i) p.rho.push_back(1 + (rho - 1) * (0.6 + 0.8 * ((i * 37 % 200) / 200.0)));
  const auto phase = [&](double factor) {
    return PhaseTime{.parts = {{"dense", 2.5 * factor},
                               {"dispatch", 0.8 * factor},
                               {"experts", 3.1 * rho * factor},
                               {"combine", 0.7 * factor},
                               {"exposed copies", exposed * factor}},
                     .ideal_seconds = 7.1 * factor};
  };
  p.recompute = phase(1);
  p.policy_update = phase(3);
  p.policy_update.parts.push_back({"optimizer", 0.4});
  p.policy_update.ideal_seconds += 0.4;
  p.step_seconds = p.recompute.seconds() + p.policy_update.seconds();
  p.ideal_step_seconds = p.recompute.ideal_seconds + p.policy_update.ideal_seconds;
  p.exposed_copy_seconds = 4 * exposed;
  p.copies_per_layer_event = exposed > 0 ? 12.5 : 0;
  p.plan_us = 37.4;
  p.memory_bytes = 61.2e9 + 1e9 * rho;
  p.guest_bytes = name == "vanilla" ? 0 : 2.7e9;
  p.peak_tokens = static_cast<std::int64_t>(32768 * rho);
  p.links = {{.link = "peers", .rows = 4.1e12, .copies = 2e11, .gradients = 1e11, .busiest_use = 0.31},
             {.link = "network", .rows = 9.5e11, .copies = 1.2e11 * rho, .gradients = 4e10, .busiest_use = 0.42}};
  return p;
}

inline TimelineWindow window(const std::string& name, double rho) {
  TimelineWindow w{
      .policy = name, .what = "layer 3, micro-step 5, forward", .seconds = 0.0031 + 0.0022 * rho, .lanes = {}};
  for (int r = 0; r < 6; ++r) {
    const double begin = 0.0024;
    const double end = begin + 0.0022 * (1 + (rho - 1) * (r == 2 ? 1.0 : -0.15 * r));
    TimelineLane lane{.name = fmt::format("rank {}", r * 3), .spans = {}};
    lane.spans = {{"dense", "attention and router", 0, 0.0019, false},
                  {"dispatch", "dispatch", 0.0019, begin, false},
                  {"experts", "experts", begin, end, false},
                  {"waiting", "waiting for the slowest rank", end, begin + 0.0022 * rho, false},
                  {"combine", "combine", begin + 0.0022 * rho, w.seconds, false}};
    if (name != "vanilla") lane.spans.push_back({"copies", "copy of expert 17", 0.0004, 0.0017, true});
    w.lanes.push_back(std::move(lane));
  }
  return w;
}

inline Report report(const Size& size = {}) {
  Report out{.input = "step.load.safetensors: 12 micro-steps × 4 layers, 128 experts on 16 ranks (2 nodes)",
             .model = "Qwen3-30B-A3B",
             .cluster = "h100",
             .num_ranks = size.ranks,
             .ranks_per_node = size.ranks_per_node,
             .guest_slots = 1,
             .before = "vanilla",
             .after = "foremoe",
             .settings = {{"cluster", "h100"}, {"model", "Qwen3-30B-A3B"}, {"residency", "resident"}}};
  out.policies = {policy("vanilla", 2.4, 0),     policy("static", 1.31, 0),  policy("eplb", 1.62, 0.2),
                  policy("ultraep", 1.05, 0.31), policy("feplb", 1.74, 0.1), policy("foremoe", 1.017, 0.02)};
  const double vanilla = out.policies.front().step_seconds;
  for (PolicyResult& p : out.policies) p.speedup = vanilla / p.step_seconds;
  PolicyResult skipped;
  skipped.policy = "finemoe-symmetric";
  skipped.skipped = "needs 8 guest slots, there is 1";
  out.policies.push_back(skipped);
  out.loads = LoadPictures{.layer = 3, .before = tokens(size, 0.45), .after = tokens(size, 0.01)};
  out.ablation = {{"none", 2.4, 1, 0, 0},
                  {"B", 1.31, 1.36, 0, 0},
                  {"BL", 1.22, 1.4, 3.1, 0.01},
                  {"BLP", 1.08, 1.46, 8.8, 0.03},
                  {"BLPT", 1.017, 1.49, 9.6, 0.08}};
  out.memory.push_back({"no guests", 0, 61.3e9, 0, 1, 2.4, 0, 0});
  int at = 0;
  for (const char* residency : {"static", "resident", "shared"}) {
    for (const int g : {1, 2, 4}) {
      const double bytes = 61.2e9 + (at == 2 ? 0.2e9 : 1.4e9 * g);
      out.memory.push_back({residency, g, bytes, 0.0 + bytes - 61.2e9, 1.5 - 0.2 / g - 0.02 * at, 1.01, 4.2, 0.03});
    }
    ++at;
  }
  const auto nodes = static_cast<std::size_t>(out.num_nodes());
  for (const char* name : {"vanilla", "foremoe"}) {
    NodeTraffic t{.policy = name, .bytes = Array<double, 2>({nodes, nodes})};
    for (std::size_t i = 0; i < nodes; ++i) {
      for (std::size_t j = 0; j < nodes; ++j) {
        if (i != j) t.bytes(i, j) = 1e10 * static_cast<double>(1 + (i * 7 + j * 3) % 11);
      }
    }
    out.traffic.push_back(std::move(t));
  }
  out.timelines = {window("vanilla", 2.4), window("foremoe", 1.02)};
  return out;
}

}  // namespace foremoe::report::test
