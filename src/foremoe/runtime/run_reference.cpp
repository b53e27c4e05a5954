#include "foremoe/runtime/run_reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "foremoe/core/sha256.h"

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

// Where a route was recorded the run used it.
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

class Comparison {
 public:
  explicit Comparison(Agreement& agreement) : agreement_(agreement) {}

  void tensor(std::span<const float> x, std::span<const double> reference, const std::string& name) {
    const double error = relative_error(x, reference);
    if (!(error > agreement_.max_relative_error)) return;
    agreement_.max_relative_error = error;
    agreement_.worst = name;
  }

  void by_source(const Array<std::vector<float>, 2>& x, const Array<std::vector<double>, 2>& reference,
                 const char* name) {
    for (std::size_t m = 0; m < x.extent(0); ++m) {
      for (std::size_t r = 0; r < x.extent(1); ++r) {
        tensor(x(m, r), reference(m, r), fmt::format("{} of micro-step {}, rank {}", name, m, r));
      }
    }
  }

  void experts(const Array<std::vector<float>, 2>& x, const Array<std::vector<double>, 2>& reference,
               std::size_t gate_up) {
    for (std::size_t l = 0; l < x.extent(0); ++l) {
      for (std::size_t e = 0; e < x.extent(1); ++e) {
        const std::span<const float> mine(x(l, e));
        const std::span<const double> theirs(reference(l, e));
        if (mine.size() != theirs.size()) {
          tensor(mine, theirs, fmt::format("gradient of layer {}, expert {}", l, e));
          continue;
        }
        tensor(mine.first(gate_up), theirs.first(gate_up),
               fmt::format("gate-up gradient of layer {}, expert {}", l, e));
        tensor(mine.subspan(gate_up), theirs.subspan(gate_up),
               fmt::format("down gradient of layer {}, expert {}", l, e));
      }
    }
  }

  // Every rank has the part of its own tokens.
  void routers(const Array<std::vector<float>, 2>& x, const std::vector<std::vector<double>>& reference) {
    for (std::size_t l = 0; l < x.extent(0); ++l) {
      std::vector<double> total(reference[l].size());
      for (const std::vector<float>& part : x.row(l)) {
        for (std::size_t i = 0; i < std::min(total.size(), part.size()); ++i) total[i] += static_cast<double>(part[i]);
      }
      const std::vector<float> rounded(total.begin(), total.end());
      tensor(rounded, reference[l], fmt::format("router gradient of layer {}", l));
    }
  }

 private:
  Agreement& agreement_;
};

}  // namespace

bool Agreement::equal(Optimizer::Kind optimizer) const {
  return routes_replayed && max_relative_error <= kMaxRelativeError &&
         (optimizer == Optimizer::Kind::kAdam || max_loss_error <= kMaxLossError);
}

void ReferenceRuns::compute(const PhaseOutcome& outcome, int steps, ThreadPool& pool) {
  ReferenceModel reference(model_);
  losses_.clear();
  for (int step = 0; step < steps; ++step) {
    const RoutesUsed& routes = outcome.routes[std::min(static_cast<std::size_t>(step), outcome.routes.size() - 1)];
    ReferenceResult result =
        reference.run({.micro_steps = static_cast<int>(routes.extent(0)),
                       .ranks = static_cast<int>(routes.extent(1)),
                       .routes = [&routes](MicroStepId m, RankId r, LayerId l) { return routes(m, r, l); },
                       .backward = backward_},
                      pool);
    losses_.push_back(result.loss);
    if (step + 1 < steps) reference.optimize(result, optimizer_);
    if (step == 0) first_ = std::move(result);
  }
}

Agreement ReferenceRuns::compare(const PhaseOutcome& outcome, const ReplayRoutes& recorded, ThreadPool& pool) {
  Agreement agreement;
  for (const RoutesUsed& routes : outcome.routes) {
    agreement.routes_replayed = agreement.routes_replayed && replayed(routes, recorded);
  }
  const auto steps = std::max<std::size_t>(outcome.losses.size(), 1);
  const std::string key = key_of(outcome.routes);
  if (key != key_ || losses_.size() < steps) {
    key_.clear();  // until it is done
    compute(outcome, static_cast<int>(steps), pool);
    key_ = key;
  }

  Comparison comparison(agreement);
  const StepResult& result = outcome.result;
  comparison.by_source(result.output, first_.output, "output");
  if (!outcome.losses.empty()) {
    comparison.by_source(result.input_gradient, first_.input_gradient, "input gradient");
    const auto matrix = static_cast<std::size_t>(std::int64_t{model_.shape.hidden} * model_.shape.intermediate);
    comparison.experts(result.expert_gradient, first_.expert_gradient, 2 * matrix);
    comparison.routers(result.router_gradient, first_.router_gradient);
  }
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
