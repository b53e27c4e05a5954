#include "foremoe/runtime/model_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/optimizers.h"

namespace foremoe {
namespace {

// cpu:: functions take ids as plain integers.
std::span<const std::int32_t> plain(std::span<const ExpertId> experts) {
  return {reinterpret_cast<const std::int32_t*>(experts.data()), experts.size()};
}

int most_in_flight(const TurnOrder& order) {
  int now = 0;
  int most = 0;
  for (const Turn& turn : order.turns) {
    if (turn.layer != LayerId{0}) continue;
    now += turn.pass == Pass::kForward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

Bytes floats(std::int64_t n) { return Bytes{std::max<std::int64_t>(n, 1) * static_cast<std::int64_t>(sizeof(float))}; }

void expect(const char* field, std::size_t found, int wanted) {
  if (found == static_cast<std::size_t>(wanted)) return;
  throw InputError({.field = field}, fmt::format("the phase is for {}, the step has {}", found, wanted));
}

}  // namespace

ModelStep::ModelStep(const Parts& parts, const TurnOrder& order)
    : parts_(parts), order_(order), rank_(parts.communicator.rank()) {
  const ModelSize& size = parts_.size;
  const int micro_steps = parts_.tokens.micro_steps;
  expect("micro_steps", order.forward.extent(0), micro_steps);
  expect("layers", order.forward.extent(1), size.layers);
  if (parts_.tokens.routes.top_k() != size.top_k) {
    throw InputError({.field = "top_k"}, fmt::format("routes have {} experts per token, the model takes {}",
                                                     parts_.tokens.routes.top_k(), size.top_k));
  }

  std::int64_t most = 0;  // maximum tokens of this rank per micro-step
  for (int m = 0; m < micro_steps; ++m) {
    for (int r = 0; r < parts_.communicator.num_ranks(); ++r) {
      const std::int64_t tokens = parts_.tokens.routes.num_tokens(MicroStepId{m}, RankId{r});
      step_tokens_ += tokens;
      if (RankId{r} == rank_) most = std::max(most, tokens);
    }
  }

  const bool has_backward = !order.backward.empty();
  const Bytes row_bytes = floats(most * size.shape.hidden);
  const Bytes weight_bytes = floats(most * size.top_k);
  ring_.resize(has_backward ? static_cast<std::size_t>(most_in_flight(order)) : 1);
  for (MicroStep& micro_step : ring_) {
    micro_step.x.resize(has_backward ? static_cast<std::size_t>(size.layers) + 1 : 2);
    for (Memory& x : micro_step.x) x = allocate_memory(row_bytes);
    micro_step.layers.resize(has_backward ? static_cast<std::size_t>(size.layers) : 1);
    for (Layer& layer : micro_step.layers) {
      layer.routes.reserve(static_cast<std::size_t>(most * size.top_k));
      layer.picked.reserve(layer.routes.capacity());
      layer.weight = allocate_memory(weight_bytes);
    }
  }
  missing_.reserve(static_cast<std::size_t>(most));
  picks_.reserve(static_cast<std::size_t>(most * size.top_k));
  if (has_backward) {
    for (Memory* memory : {&target_, &dy_, &dx_}) *memory = allocate_memory(row_bytes);
    d_weight_ = allocate_memory(weight_bytes);
  }
  if (parts_.tokens.keep_results) {
    results_.output.resize(static_cast<std::size_t>(micro_steps));
    results_.input_gradient.resize(has_backward ? results_.output.size() : 0);
    results_.routes_used =
        Array<std::vector<ExpertId>, 2>({results_.output.size(), static_cast<std::size_t>(size.layers)});
  }
}

double ModelStep::run(PhaseExecutor& phase, const MoeModel::Work& work) {
  double loss = 0;
  for (int t = 0; t < order_.size(); ++t) {
    const TurnId turn{t};
    phase.begin(turn);
    if (work) work(order_[turn]);
    const At here = at(order_[turn]);
    const int layer = here.turn.layer.value;
    if (here.turn.pass == Pass::kForward) {
      if (layer == 0) begin_micro_step(here);
      forward(phase, turn, here);
    } else {
      if (layer == parts_.size.layers - 1) loss += begin_backward(here);
      backward(phase, turn, here);
    }
  }
  return loss;
}

ModelStep::At ModelStep::at(const Turn& turn) {
  MicroStep& micro_step = ring_[turn.micro_step.index() % ring_.size()];
  const auto router = turn.layer.value * std::int64_t{parts_.size.experts} * parts_.size.shape.hidden;
  return {.turn = turn,
          .micro_step = micro_step,
          .layer = micro_step.layers[turn.layer.index() % micro_step.layers.size()],
          .router = parts_.router.weights + router};
}

float* ModelStep::x(const MicroStep& micro_step, int layer) const {
  return micro_step.x[static_cast<std::size_t>(layer) % micro_step.x.size()].floats();
}

std::size_t ModelStep::values(const MicroStep& micro_step) const {
  return static_cast<std::size_t>(micro_step.tokens * parts_.size.shape.hidden);
}

cpu::RoutedTokens ModelStep::routed(const At& at) const {
  return {.x = x(at.micro_step, at.turn.layer.value),
          .router = at.router,
          .expert = plain(at.layer.used()),
          .k = parts_.size.top_k,
          .hidden = parts_.size.shape.hidden};
}

void ModelStep::begin_micro_step(const At& at) {
  MicroStep& micro_step = at.micro_step;
  micro_step.tokens = parts_.tokens.routes.num_tokens(at.turn.micro_step, rank_);
  draw(parts_.size, {.tensor = Tensor::kInput, .a = at.turn.micro_step.value, .b = rank_.value},
       {x(micro_step, 0), values(micro_step)});
}

// Routes rows that have no recorded route by the current router.
void ModelStep::pick_missing(const At& at) {
  const auto k = static_cast<std::size_t>(parts_.size.top_k);
  const std::vector<ExpertId>& routes = at.layer.routes;
  std::vector<ExpertId>& picked = at.layer.picked;
  missing_.clear();
  for (std::size_t row = 0; row < routes.size(); row += k) {
    if (routes[row] == kNoExpert) missing_.push_back(static_cast<std::int32_t>(row / k));
  }
  picked.clear();
  if (missing_.empty()) return;

  picked.assign(routes.begin(), routes.end());
  picks_.resize(missing_.size() * k);
  cpu::router_pick(routed(at), {.experts = parts_.size.experts, .token = missing_, .picked = picks_},
                   router_workspace_);
  for (std::size_t i = 0; i < picks_.size(); ++i) {
    picked[static_cast<std::size_t>(missing_[i / k]) * k + i % k] = ExpertId{picks_[i]};
  }
}

void ModelStep::forward(PhaseExecutor& phase, TurnId turn, const At& at) {
  const int l = at.turn.layer.value;
  const MicroStep& micro_step = at.micro_step;
  Layer& layer = at.layer;
  parts_.tokens.routes.gather(at.turn.micro_step, rank_, at.turn.layer, layer.routes);
  pick_missing(at);

  const float* in = x(micro_step, l);
  float* out = x(micro_step, l + 1);
  cpu::router_forward(routed(at), layer.weight.floats(), router_workspace_);
  std::copy_n(in, values(micro_step), out);
  phase.forward(turn,
                {.routes = layer.routes, .picked = layer.picked, .x = in, .weight = layer.weight.floats(), .y = out});

  if (!parts_.tokens.keep_results) return;
  results_.routes_used(at.turn.micro_step, l) = layer.used();
  if (l == parts_.size.layers - 1) {
    results_.output[at.turn.micro_step.index()].assign(out, out + values(micro_step));
  }
}

// Computes the loss and its gradient at the start of the backward, so that all micro-steps share one gradient buffer.
double ModelStep::begin_backward(const At& at) {
  const MicroStep& micro_step = at.micro_step;
  const std::span target(target_.floats(), values(micro_step));
  draw(parts_.size, {.tensor = Tensor::kTarget, .a = at.turn.micro_step.value, .b = rank_.value}, target);
  const double scale = 1.0 / static_cast<double>(std::max<std::int64_t>(step_tokens_, 1));
  return cpu::squared_error({x(micro_step, parts_.size.layers), target.size()}, target.data(),
                            static_cast<float>(scale), dy_.floats());
}

void ModelStep::backward(PhaseExecutor& phase, TurnId turn, const At& at) {
  const int l = at.turn.layer.value;
  const Layer& layer = at.layer;
  std::copy_n(dy_.floats(), values(at.micro_step), dx_.floats());
  phase.backward(turn, {.dy = dy_.floats(), .dx = dx_.floats(), .d_weight = d_weight_.floats()});
  cpu::router_backward(routed(at),
                       {.weight = layer.weight.floats(),
                        .d_weight = d_weight_.floats(),
                        .dx = dx_.floats(),
                        .d_router = parts_.router.gradients + (at.router - parts_.router.weights)},
                       router_workspace_);
  std::swap(dx_, dy_);
  if (l == 0 && parts_.tokens.keep_results) {
    const float* dx = dy_.floats();
    results_.input_gradient[at.turn.micro_step.index()].assign(dx, dx + values(at.micro_step));
  }
}

}  // namespace foremoe
