#include "foremoe/reference/run_reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "foremoe/core/sha256.h"
#include "foremoe/reference/tensor_error.h"

namespace foremoe {
namespace {

std::string key_of(const std::vector<RoutesUsed>& steps) {
  Sha256 hash;
  for (const RoutesUsed& routes : steps) {
    for (const std::vector<ExpertId>& of_layer : routes.flat()) {
      const std::uint64_t size = of_layer.size();
      hash.update(std::as_bytes(std::span(&size, 1)));
      hash.update(std::as_bytes(std::span(of_layer)));
    }
  }
  return hash.hex();
}

// Whether the run used every recorded route.
bool replayed(const RoutesUsed& used, const ReplayRoutes& recorded) {
  std::vector<ExpertId> routes;
  for (std::size_t m = 0; m < used.extent(0); ++m) {
    for (std::size_t r = 0; r < used.extent(1); ++r) {
      for (std::size_t l = 0; l < used.extent(2); ++l) {
        recorded.gather(MicroStepId{m}, RankId{r}, LayerId{l}, routes);
        const std::vector<ExpertId>& now = used(m, r, l);
        if (now.size() != routes.size()) return false;
        for (std::size_t i = 0; i < now.size(); ++i) {
          if (routes[i] == kNoExpert ? now[i].value < 0 : now[i] != routes[i]) return false;
        }
      }
    }
  }
  return true;
}

// A tensor of the run and the corresponding tensor of the reference.
struct Compared {
  std::span<const float> x;
  std::span<const double> reference;
  std::span<const double> variance;  // empty if the reference has no variances
  std::string name;
};

// Calls visit(Compared) for every tensor.
class Comparison {
 public:
  using Visit = std::function<void(const Compared&)>;
  Comparison(const StepResult& result, const ReferenceResult& reference)
      : result_(result), reference_(reference), bounded_(!reference.variance.output.empty()) {}

  void for_each_output(const Visit& visit) const {
    by_source(result_.output, reference_.output, reference_.variance.output, "output", visit);
  }
  void for_each_gradient(std::size_t gate_up, const Visit& visit) const {
    by_source(result_.input_gradient, reference_.input_gradient, reference_.variance.input_gradient, "input gradient",
              visit);
    experts(gate_up, visit);
    routers(visit);
  }

 private:
  using Tensors = Array<std::vector<double>, 2>;

  void by_source(const Array<std::vector<float>, 2>& x, const Tensors& reference, const Tensors& variance,
                 const char* name, const Visit& visit) const {
    for (std::size_t m = 0; m < x.extent(0); ++m) {
      for (std::size_t r = 0; r < x.extent(1); ++r) {
        visit({.x = x(m, r),
               .reference = reference(m, r),
               .variance = bounded_ ? std::span<const double>(variance(m, r)) : std::span<const double>(),
               .name = fmt::format("{} of micro-step {}, rank {}", name, m, r)});
      }
    }
  }

  void experts(std::size_t gate_up, const Visit& visit) const {
    const Array<std::vector<float>, 2>& x = result_.expert_gradient;
    for (std::size_t l = 0; l < x.extent(0); ++l) {
      for (std::size_t e = 0; e < x.extent(1); ++e) {
        const Compared whole{.x = x(l, e),
                             .reference = reference_.expert_gradient(l, e),
                             .variance = bounded_ ? std::span<const double>(reference_.variance.expert_gradient(l, e))
                                                  : std::span<const double>(),
                             .name = fmt::format("gradient of layer {}, expert {}", l, e)};
        if (whole.x.size() != whole.reference.size()) {
          visit(whole);
          continue;
        }
        const auto part = [&](std::size_t first, std::size_t n, const char* name) {
          visit({.x = whole.x.subspan(first, n),
                 .reference = whole.reference.subspan(first, n),
                 .variance = bounded_ ? whole.variance.subspan(first, n) : whole.variance,
                 .name = name + whole.name});
        };
        part(0, gate_up, "gate-up ");
        part(gate_up, whole.x.size() - gate_up, "down ");
      }
    }
  }

  // Sums the ranks' gradients. Each rank's gradient covers only its own tokens.
  void routers(const Visit& visit) const {
    const Array<std::vector<float>, 2>& x = result_.router_gradient;
    for (std::size_t l = 0; l < x.extent(0); ++l) {
      std::vector<double> total(reference_.router_gradient[l].size());
      for (const std::vector<float>& part : x.row(l)) {
        for (std::size_t i = 0; i < std::min(total.size(), part.size()); ++i) total[i] += static_cast<double>(part[i]);
      }
      const std::vector<float> rounded(total.begin(), total.end());
      visit({.x = rounded,
             .reference = reference_.router_gradient[l],
             .variance =
                 bounded_ ? std::span<const double>(reference_.variance.router_gradient[l]) : std::span<const double>(),
             .name = fmt::format("router gradient of layer {}", l)});
    }
  }

  const StepResult& result_;
  const ReferenceResult& reference_;
  bool bounded_;
};

void compare_tensors(const PhaseOutcome& outcome, const ReferenceResult& reference, ExpertShape shape,
                     const Comparison::Visit& visit) {
  const Comparison comparison(outcome.result, reference);
  comparison.for_each_output(visit);
  if (outcome.losses.empty()) return;
  comparison.for_each_gradient(static_cast<std::size_t>(std::int64_t{2} * shape.hidden * shape.intermediate), visit);
}

}  // namespace

bool Agreement::equal(Optimizer::Kind optimizer) const {
  return routes_replayed && tensors_equal() && (optimizer == Optimizer::Kind::kAdam || max_loss_error <= kMaxLossError);
}

ReferenceStep ReferenceRuns::step(const RoutesUsed& routes) const {
  return {.micro_steps = static_cast<int>(routes.extent(0)),
          .ranks = static_cast<int>(routes.extent(1)),
          .routes = [&routes](MicroStepId m, RankId r, LayerId l) { return routes(m, r, l); },
          .backward = backward_};
}

void ReferenceRuns::compute(const PhaseOutcome& outcome, int steps, ThreadPool& pool) {
  ReferenceModel reference(model_, pool);
  losses_.clear();
  for (int s = 0; s < steps; ++s) {
    const RoutesUsed& routes = outcome.routes[std::min(static_cast<std::size_t>(s), outcome.routes.size() - 1)];
    ReferenceResult result = reference.run(step(routes), pool);
    losses_.push_back(result.loss);
    if (s + 1 < steps) reference.optimize(result, optimizer_, pool);
    if (s == 0) first_ = std::move(result);
  }
}

// Computes variances only on demand: they cost more than the reference itself and are rarely needed.
void ReferenceRuns::judge_rounding(const PhaseOutcome& outcome, Agreement& agreement, ThreadPool& pool) {
  if (first_.variance.output.empty()) {
    ReferenceStep with_variances = step(outcome.routes.front());
    with_variances.variances = true;
    first_ = {};  // free its memory first
    first_ = ReferenceModel(model_, pool).run(with_variances, pool);
  }
  std::size_t values = 0;
  compare_tensors(outcome, first_, model_.shape, [&](const Compared& tensor) { values += tensor.x.size(); });
  const double most = most_deviations(values);
  double worst = 0;
  compare_tensors(outcome, first_, model_.shape, [&](const Compared& tensor) {
    const double error = relative_error(tensor.x, tensor.reference);
    if (error <= kMaxRelativeError || deviations(tensor.x, tensor.reference, tensor.variance) <= most) return;
    agreement.within_rounding = false;
    if (error > worst) agreement.worst = tensor.name;
    worst = std::max(worst, error);
  });
}

Agreement ReferenceRuns::compare(const PhaseOutcome& outcome, const ReplayRoutes& recorded, ThreadPool& pool) {
  Agreement agreement;
  for (const RoutesUsed& routes : outcome.routes) {
    agreement.routes_replayed = agreement.routes_replayed && replayed(routes, recorded);
  }
  const auto steps = std::max<std::size_t>(outcome.losses.size(), 1);
  const std::string key = key_of(outcome.routes);
  if (key != key_ || losses_.size() < steps) {
    key_.clear();  // invalid until compute() succeeds
    compute(outcome, static_cast<int>(steps), pool);
    key_ = key;
  }

  compare_tensors(outcome, first_, model_.shape, [&](const Compared& tensor) {
    const double error = relative_error(tensor.x, tensor.reference);
    if (!(error > agreement.max_relative_error)) return;
    agreement.max_relative_error = error;
    agreement.worst = tensor.name;
  });
  if (agreement.max_relative_error > kMaxRelativeError) judge_rounding(outcome, agreement, pool);
  for (std::size_t step = 0; step < outcome.losses.size(); ++step) {
    const double scale = std::abs(losses_[step]);
    const double error = std::abs(outcome.losses[step] - losses_[step]);
    const double relative = scale > 0 ? error / scale : error;
    agreement.max_loss_error = std::max(agreement.max_loss_error, relative);
    if (std::isnan(relative)) agreement.max_loss_error = std::numeric_limits<double>::infinity();
  }
  return agreement;
}

}  // namespace foremoe
