#include "run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "console.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/plan/plan_json.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kColumns =
    R"(Columns:
  ρ planned      planned imbalance: rows (token–expert assignments) of the busiest rank ÷ mean of all ranks, mean over
                 all layers and passes of the micro-steps. 1 is perfect
  ρ ran          the same for the rows that the ranks' experts computed
  critical path  expert computation: the slowest rank's time, summed over layers and passes, since all others wait for
                 it. Times are fitted (seconds per call of an expert and per row) to the CPU time of all ranks'
                 threads, so that a rank disturbed by other processes does not count as the slowest
  of first       critical path ÷ that of the first policy in this phase. Below 1 is shorter. ±: half the range of single
                 repeats, of both policies; it grows on a busy machine
  expected       the same ratio as predicted from ρ, if every row took equally long
  exposed        time spent waiting for copies of experts, by the rank that waited longest. If ranks outnumber processor
                 cores, most of it is waiting for a core
  copies         weights of one expert moved to another rank, over all ranks and the whole phase
  guest memory   memory of a rank for guests: weights, and gradients if any
  equal          yes: every output and gradient is within 1e-5 of its largest value, or within the rounding bound, of a
                 float64 reference without ranks, plans and copies, and all repeats are bitwise identical
)";

nlohmann::ordered_json to_json(const Spread& s) { return {{"mean", s.mean}, {"p99", s.p99}, {"max", s.max}}; }

std::string seconds(double value) {
  if (value >= 1) return fmt::format("{:.2f} s", value);
  return fmt::format("{:.1f} ms", 1e3 * value);
}

std::string bytes(Bytes b) {
  const auto value = static_cast<double>(b.value);
  if (value >= 1 << 30) return fmt::format("{:.2f} GiB", value / (1 << 30));
  if (value >= 1 << 20) return fmt::format("{:.1f} MiB", value / (1 << 20));
  return fmt::format("{:.0f} KiB", value / (1 << 10));
}

std::string ratio(double value, double base) { return base > 0 ? fmt::format("{:.3f}", value / base) : "-"; }

// Returns the ratio of the critical paths. Adds the spread of both rows' repeats unless `row` is `first`.
std::string ratio_of_paths(const RunRow& row, const RunRow& first) {
  const CriticalPath& path = row.outcome.critical_path;
  const CriticalPath& base = first.outcome.critical_path;
  if (&row == &first || base.seconds <= 0) return ratio(path.seconds, base.seconds);
  const double of_first = path.seconds / base.seconds;
  return fmt::format("{:.3f} ±{:.3f}", of_first, of_first * std::hypot(path.spread, base.spread));
}

std::string verdict(const RunRow& row, const RunSettings& settings) {
  if (!row.violations.empty()) return "WRONG PLAN";
  if (!row.outcome.repeats_equal) return "NO: repeats differ";
  if (row.outputs_identical == false) return "NO: bits differ";
  if (!row.agreement) return "not checked";
  if (row.agreement->equal(settings.optimizer.kind)) return "yes";
  return fmt::format("NO: {:.1e}", row.agreement->max_relative_error);
}

// Returns the phase's baseline: its first row that was not skipped.
const RunRow* first_of(const std::vector<RunRow>& rows, Phase phase) {
  const auto at = std::ranges::find_if(rows, [&](const RunRow& r) { return r.phase == phase && r.skipped.empty(); });
  return at == rows.end() ? nullptr : &*at;
}

}  // namespace

bool right(const RunRow& row, const RunSettings& settings) {
  if (!row.skipped.empty()) return true;
  return row.violations.empty() && row.outcome.repeats_equal && row.outputs_identical.value_or(true) &&
         (!row.agreement || row.agreement->equal(settings.optimizer.kind));
}

nlohmann::ordered_json to_json(const RunRow& row, const RunSettings& settings) {
  nlohmann::ordered_json json = {{"policy", row.policy}, {"phase", to_string(row.phase)}};
  if (!row.skipped.empty()) {
    json["skipped"] = row.skipped;
    return json;
  }
  const PhaseOutcome& o = row.outcome;
  json["residency"] = to_string(row.residency);
  json["in_flight"] = row.in_flight;
  json["equal_to_reference"] = nullptr;
  json["max_relative_error"] = nullptr;
  if (row.agreement) {
    json["equal_to_reference"] = row.agreement->equal(settings.optimizer.kind);
    json["max_relative_error"] = row.agreement->max_relative_error;  // null if infinite
  }
  if (row.mismatched) json["mismatched_rows"] = *row.mismatched;
  json["rho_planned"] = to_json(row.rho_planned);
  json["rho_computed"] = to_json(row.rho_computed);
  json["critical_path_seconds"] = row.critical_path();
  json["critical_path_spread"] = o.critical_path.spread;
  json["most_rows"] = std::ranges::max(o.turns.rows.flat());
  json["critical_path_rows"] = critical_path_rows(o.turns);
  json["compute_seconds_total"] = compute_seconds_total(o.turns);
  json["copies"] = o.transfer.copies;
  json["copy_bytes"] = {{"host_path", o.transfer.host_bytes.value}, {"peer_path", o.transfer.peer_bytes.value}};
  json["exposed_copy_seconds"] = o.transfer.exposed_seconds;
  json["failed_copy_attempts"] = o.transfer.failed_attempts;
  json["arena_bytes"] = o.arena.value;
  json["arena_refresh_seconds"] = o.arena_refresh_seconds;
  json["guest_weight_bytes_per_rank"] = o.guest_weights.value;
  json["guest_gradient_bytes_per_rank"] = o.guest_gradients.value;
  json["guest_bytes_predicted"] = {{"weights", row.predicted.weights.value},
                                   {"gradients", row.predicted.gradients.value}};
  json["gradient_return_bytes"] = o.gradient_returns.value;
  json["home_move_bytes"] = o.home_moves.value;
  json["fallbacks"] = o.fallbacks;
  json["step_seconds"] = o.step_seconds;
  json["repeats"] = settings.repeats;
  json["repeats_equal"] = o.repeats_equal;
  json["steps"] = std::max<std::size_t>(o.losses.size(), 1);
  json["losses"] = o.losses;
  if (row.agreement && !o.losses.empty()) json["max_loss_error"] = row.agreement->max_loss_error;
  json["output_digest"] = o.digest.outputs;
  json["result_digest"] = o.result_digest;
  if (row.outputs_identical) json["outputs_identical"] = *row.outputs_identical;
  if (o.plain_critical_path_seconds) {
    json["bitwise_cost"] =
        *o.plain_critical_path_seconds > 0 ? row.critical_path() / *o.plain_critical_path_seconds : 1.0;
  }
  if (!row.violations.empty()) {
    for (const Violation& v : row.violations) json["violations"].push_back(foremoe::to_json(v));
  }
  return json;
}

std::string to_text(const std::vector<RunRow>& rows, const RunSettings& settings) {
  std::string text;
  for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
    const RunRow* const first = first_of(rows, phase);
    TextTable table({"policy", "residency", "ρ planned", "ρ ran", "critical path", "of first", "expected", "exposed",
                     "copies", "guest memory", "equal"});
    bool any = false;
    for (const RunRow& row : rows) {
      if (row.phase != phase) continue;
      any = true;
      if (!row.skipped.empty()) {
        table.add({row.policy, "skipped: " + row.skipped});
        continue;
      }
      const double path = row.critical_path();
      const auto base_rows = static_cast<double>(critical_path_rows(first->outcome.turns));
      table.add({row.policy, std::string(to_string(row.residency)), fmt::format("{:.4f}", row.rho_planned.mean),
                 fmt::format("{:.4f}", row.rho_computed.mean), seconds(path), ratio_of_paths(row, *first),
                 ratio(static_cast<double>(critical_path_rows(row.outcome.turns)), base_rows),
                 seconds(row.outcome.transfer.exposed_seconds), fmt::format("{}", row.outcome.transfer.copies),
                 bytes(row.outcome.guest_weights + row.outcome.guest_gradients), verdict(row, settings)});
    }
    if (!any) continue;
    text += fmt::format("{}\n{}\n",
                        phase == Phase::kRecompute ? "recompute: forward only" : "policy update: forward and backward",
                        table.to_string());
  }
  for (const RunRow& row : rows) {
    const std::string name = fmt::format("{}, {}", row.policy, to_string(row.phase));
    if (row.outcome.losses.size() > 1) {
      text += fmt::format("loss of {} over {} steps: {:.6f} … {:.6f}\n", name, row.outcome.losses.size(),
                          row.outcome.losses.front(), row.outcome.losses.back());
    }
    if (row.outcome.fallbacks > 0) {
      text += fmt::format("{}: {} ran at homes, unbalanced, because copies failed or came too late ({})\n", name,
                          counted(row.outcome.fallbacks, "(micro-step, layer) pair"),
                          counted(row.outcome.transfer.failed_attempts, "attempt"));
    }
    if (row.outcome.plain_critical_path_seconds && *row.outcome.plain_critical_path_seconds > 0) {
      text += fmt::format("--bitwise makes the critical path of {} {:.2f} times as long\n", name,
                          row.critical_path() / *row.outcome.plain_critical_path_seconds);
    }
    if (row.agreement && !row.agreement->equal(settings.optimizer.kind)) {
      text += fmt::format("{} differs from the reference: {}\n", name,
                          !row.agreement->routes_replayed ? "recorded routes were not replayed"
                          : !row.agreement->tensors_equal()
                              ? row.agreement->worst
                              : fmt::format("losses by {:.1e}", row.agreement->max_loss_error));
    }
    for (const Violation& v : row.violations) text += fmt::format("{}: {}: {}\n", name, to_string(v.kind), v.message);
  }
  return text;
}

std::string meaning_of_columns() { return std::string(kColumns); }

}  // namespace foremoe::cli
