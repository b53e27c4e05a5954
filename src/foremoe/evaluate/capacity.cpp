#include "foremoe/evaluate/capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

namespace foremoe {
namespace {

constexpr std::int64_t kTile = 256;  // rows of TransformerEngine's grouped products
constexpr std::int64_t kPage = 64;   // rows; Megatron-LM's default moe_paged_stash_page_size

std::int64_t rounded_to(std::int64_t rows, std::int64_t to) { return (rows + to - 1) / to * to; }

double in_float(std::int64_t value) { return static_cast<double>(value); }

// Python's a // b for b > 0 and a ≥ 0.
double floor_division(double a, double b) {
  const double quotient = (a - std::fmod(a, b)) / b;
  const double floor = std::floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

// The smallest double that is `enough`, which must be true for all larger ones. `estimate` differs by few roundings.
template <class Enough>
double smallest_factor(double estimate, Enough&& enough) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double factor = estimate;
  while (!enough(factor)) factor = std::nextafter(factor, kInfinity);
  while (factor > 0 && enough(std::nextafter(factor, -kInfinity))) factor = std::nextafter(factor, -kInfinity);
  return factor;
}

// int(size · factor) ≥ rows, as Python computes it. Returns nullopt if no factor suffices.
std::optional<double> factor_for(std::int64_t size, std::int64_t rows) {
  if (rows <= 0) return 0;
  if (size <= 0) return std::nullopt;
  return smallest_factor(in_float(rows) / in_float(size),
                         [&](double factor) { return std::trunc(in_float(size) * factor) >= in_float(rows); });
}

// The largest factor. Has no value if any factor has none.
class Largest {
 public:
  void add(std::optional<double> factor) {
    if (value_) value_ = factor ? std::optional(std::max(*value_, *factor)) : std::nullopt;
  }
  std::optional<double> value() const { return value_; }

 private:
  std::optional<double> value_ = 0;
};

// Rows that the ranks of a plan compute, and the tokens that size their buffers.
class BufferRows {
 public:
  BufferRows(const StepPlan& plan, const LoadTable& load) : plan_(plan), load_(load), event_(load.load.extent(0)) {
    for (int t = plan.num_events() - 1; t >= 0; --t) event_[plan.event_micro_step[EventId{t}.index()].index()] = t;
  }

  template <class Visit>  // visit(micro_step, layer, rank)
  void for_each(Visit&& visit) const {
    for (int m = 0; m < load_.num_micro_steps(); ++m) {
      for (int l = 0; l < load_.num_layers(); ++l) {
        for (int r = 0; r < load_.num_ranks(); ++r) visit(m, l, r);
      }
    }
  }
  // Assignments of the rank's own tokens.
  std::int64_t own(int m, int l, int r) const {
    std::int64_t sum = 0;
    for (const Tokens tokens : load_.load.row(m, l, r)) sum += tokens.value;
    return sum;
  }
  // Rows that the rank computes, with each slot's rows padded to a multiple of `pad`.
  std::int64_t computed(int m, int l, int r, std::int64_t pad = 1) const {
    std::int64_t sum = 0;
    for (const Tokens rows : plan_.slot_tokens.row(event_[static_cast<std::size_t>(m)], l, r)) {
      sum += rounded_to(rows.value, pad);
    }
    return sum;
  }
  const StepPlan& plan() const { return plan_; }
  const LoadTable& load() const { return load_; }

 private:
  const StepPlan& plan_;
  const LoadTable& load_;
  std::vector<int> event_;  // [micro_step], the first event
};

std::optional<double> expert_factor(const BufferRows& rows) {
  Largest largest;
  rows.for_each([&](int m, int l, int r) {
    const std::int64_t most = std::ranges::max(rows.load().load.row(m, l, r)).value;
    if (most == 0) return;
    const double share = in_float(rows.own(m, l, r)) / rows.load().num_experts();
    largest.add(smallest_factor(in_float(most - 1) / share,
                                [&](double factor) { return std::ceil(share * factor) >= in_float(most); }));
  });
  return largest.value();
}

// pad: of each expert's rows.
std::optional<double> rank_factor(const BufferRows& rows, std::int64_t pad) {
  Largest largest;
  rows.for_each([&](int m, int l, int r) {
    // A buffer of n rows is rounded up to whole tiles, so n may be just above one tile less.
    const std::int64_t needed = rounded_to(rows.computed(m, l, r, pad), kTile);
    largest.add(factor_for(rows.own(m, l, r), needed == 0 ? 0 : needed - kTile + 1));
  });
  return largest.value();
}

std::optional<double> stash_factor(const BufferRows& rows, std::int64_t pad, std::optional<double> rank_capacity,
                                   int model_layers) {
  if (!rank_capacity) return std::nullopt;
  if (*rank_capacity == 0) return 0;
  const StepPlan& plan = rows.plan();
  // The backward of the last layer follows its forward, so that this layer is not stashed.
  const int stashed_layers = plan.num_layers() - (plan.in_flight == 1 && plan.num_layers() == model_layers ? 1 : 0);
  Largest largest;
  for (int r = 0; r < plan.num_ranks(); ++r) {
    struct Use {
      std::int64_t average = 0;
      std::int64_t stashed = 0;
    };
    const auto use_of = [&](int m) {
      Use use;
      for (int l = 0; l < plan.num_layers(); ++l) {
        const double budget = std::trunc(in_float(rows.own(m, l, r)) * *rank_capacity);
        const std::int64_t buffer = rounded_to(static_cast<std::int64_t>(budget), kTile);
        use.average += static_cast<std::int64_t>(floor_division(in_float(buffer), *rank_capacity));
        if (l < stashed_layers) use.stashed += rounded_to(rows.computed(m, l, r, pad), kPage);
      }
      return use;
    };
    Use now;
    Use most;
    for (int t = 0; t < plan.num_events(); ++t) {
      const Use use = use_of(plan.event_micro_step[EventId{t}.index()].value);
      const bool forward = plan.event_pass[EventId{t}.index()] == Pass::kForward;
      if (forward) now = {now.average + use.average, now.stashed + use.stashed};
      most = {std::max(most.average, now.average), std::max(most.stashed, now.stashed)};
      if (!forward || plan.in_flight == 1) now = {now.average - use.average, now.stashed - use.stashed};
    }
    largest.add(factor_for(most.average, most.stashed));
  }
  return largest.value();
}

std::optional<double> titan_factor(const BufferRows& rows) {
  const LoadTable& load = rows.load();
  const bool is_short = has_short_rows(load);
  Largest largest;
  rows.for_each([&](int m, int l, int r) {
    const int top_k = load.top_k_in(LayerId{l});
    const std::int64_t most_of_token = std::min(rows.plan().num_slots(), top_k);
    const std::int64_t tokens = is_short ? load.tokens(m, r).value : rows.own(m, l, r) / top_k;
    largest.add(factor_for(tokens * load.num_ranks() * most_of_token, rows.computed(m, l, r)));
  });
  return largest.value();
}

}  // namespace

std::optional<double> Capacity::rounded() const {
  if (!smallest) return std::nullopt;
  constexpr double kSteps = 1e4;
  double steps = std::ceil(*smallest * kSteps);
  while (steps / kSteps < *smallest) ++steps;
  return steps / kSteps;
}

std::vector<Capacity> capacities(const StepPlan& recompute, const StepPlan& policy_update, const LoadTable& load,
                                 int model_layers) {
  const BufferRows update(policy_update, load);
  const BufferRows other(recompute, load);
  const auto of_both = [&](auto&& factor) {
    Largest largest;
    largest.add(factor(update));
    if (&recompute != &policy_update) largest.add(factor(other));
    return largest.value();
  };
  std::vector<Capacity> all{{"Megatron-LM", "moe_expert_capacity_factor", expert_factor(update)}};
  for (const auto& [trainer, pad] :
       {std::pair{"Megatron-LM 0.19, BF16 HybridEP", std::int64_t{1}}, std::pair{"Megatron-LM 0.20", kTile}}) {
    all.push_back({trainer, "moe_expert_rank_capacity_factor",
                   of_both([&, pad = pad](const BufferRows& rows) { return rank_factor(rows, pad); })});
    const std::optional<double> stash = stash_factor(update, pad, all.back().rounded(), model_layers);
    all.push_back({trainer, "moe_paged_stash_buffer_size_factor_cuda", stash});
  }
  all.push_back({"torchtitan 0.2", "non_blocking_capacity_factor", of_both(titan_factor)});
  return all;
}

}  // namespace foremoe
