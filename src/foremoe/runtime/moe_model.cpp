#include "foremoe/runtime/moe_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/optimizers.h"
#include "foremoe/runtime/model_step.h"

namespace foremoe {
namespace {

Array<RankId, 2> copy_of(ArrayView<const RankId, 2> home) {
  Array<RankId, 2> result(home.shape());
  std::ranges::copy(home.flat(), result.flat().begin());
  return result;
}

// Returns `home` if its shape is [layers][experts]; throws InputError otherwise.
ArrayView<const RankId, 2> fitting(ArrayView<const RankId, 2> home, const ModelSize& size) {
  const auto layers = static_cast<std::size_t>(size.layers);
  const auto experts = static_cast<std::size_t>(size.experts);
  if (home.shape() != ArrayView<const RankId, 2>::Shape{layers, experts}) {
    throw InputError({.field = "home"}, fmt::format("is [{}, {}], the model has {} layers of {} experts",
                                                    home.extent(0), home.extent(1), layers, experts));
  }
  return home;
}

}  // namespace

struct MoeModel::State {
  State(const ModelSize& model_size, ArrayView<const RankId, 2> model_home, Communicator& model_communicator,
        HomeMemory memory)
      : size(model_size),
        communicator(model_communicator),
        home(copy_of(fitting(model_home, size))),
        slots(homes_on(home, communicator.num_ranks(), communicator.rank())),
        store({.layers = size.layers,
               .slots = static_cast<int>(slots.extent(1)),
               .layout = swiglu_layout(size.shape.hidden, size.shape.intermediate)},
              memory),
        router(allocate_memory(router_bytes())),
        router_gradient(allocate_memory(router_bytes())),
        router_sum(allocate_memory(router_bytes())) {}

  std::int64_t router_values() const { return std::int64_t{size.experts} * size.shape.hidden; }  // per layer
  Bytes router_bytes() const { return Bytes{size.layers * router_values() * static_cast<std::int64_t>(sizeof(float))}; }
  int slot_of(LayerId l, ExpertId e) const {
    const auto row = slots.row(l);
    const auto slot = std::ranges::find(row, e);
    assert(slot != row.end());
    return static_cast<int>(slot - row.begin());
  }
  std::vector<float> router_part(const Memory& memory, LayerId l) const {
    std::vector<float> values(static_cast<std::size_t>(router_values()));
    std::copy_n(memory.floats() + l.index() * values.size(), values.size(), values.begin());
    return values;
  }
  void draw_weights();

  const ModelSize size;
  Communicator& communicator;
  Array<RankId, 2> home;     // [layer][expert]
  Array<ExpertId, 2> slots;  // [layer][home slot], ascending
  ExpertStore store;
  Memory router, router_gradient, router_sum;  // [layer][experts][hidden]; router_sum: over all ranks
  Memory router_mean, router_square;           // [layer][experts][hidden]; empty before Adam's first step
  int adam_steps = 0;                          // equal for all parameters, so it does not move with experts
  StepResults results;
};

void MoeModel::State::draw_weights() {
  const std::int64_t matrix = std::int64_t{size.shape.hidden} * size.shape.intermediate;
  std::vector<float> expert(static_cast<std::size_t>(3 * matrix));
  const auto gate_up = std::span(expert).first(static_cast<std::size_t>(2 * matrix));
  const auto down = std::span(expert).last(static_cast<std::size_t>(matrix));
  std::vector<float> values(static_cast<std::size_t>(router_values()));
  for (int l = 0; l < size.layers; ++l) {
    for (std::size_t s = 0; s < slots.extent(1); ++s) {
      draw(size, {.tensor = Tensor::kGateUp, .a = l, .b = slots(l, s).value}, gate_up);
      draw(size, {.tensor = Tensor::kDown, .a = l, .b = slots(l, s).value}, down);
      store.set_weights(LayerId{l}, static_cast<int>(s), expert);
    }
    draw(size, {.tensor = Tensor::kRouter, .a = l}, values);
    std::ranges::copy(values, router.floats() + static_cast<std::size_t>(l) * values.size());
  }
}

MoeModel::MoeModel(const ModelSize& size, ArrayView<const RankId, 2> home, Communicator& communicator,
                   HomeMemory memory)
    : state_(std::make_unique<State>(size, home, communicator, memory)) {
  state_->draw_weights();
}

MoeModel::~MoeModel() = default;

const HomeExperts& MoeModel::homes() const { return state_->store.homes(); }

void MoeModel::zero_gradients() {
  state_->store.zero_gradients();
  std::memset(state_->router_gradient.data(), 0, static_cast<std::size_t>(state_->router_bytes().value));
}

void MoeModel::optimize(const Optimizer& optimizer) {
  State& s = *state_;
  const auto n = static_cast<std::size_t>(s.size.layers * s.router_values());
  const std::span<float> router(s.router.floats(), n);
  std::copy_n(s.router_gradient.floats(), n, s.router_sum.floats());
  s.communicator.all_reduce_sum({s.router_sum.floats(), n});
  switch (optimizer.kind) {
    case Optimizer::Kind::kSgd:
      s.store.sgd(optimizer.rate);
      cpu::sgd(router, s.router_sum.floats(), optimizer.rate);
      break;
    case Optimizer::Kind::kAdam:
      if (s.router_mean.data() == nullptr) {
        s.router_mean = allocate_memory(s.router_bytes());
        s.router_square = allocate_memory(s.router_bytes());
      }
      const cpu::Adam adam{.rate = optimizer.rate, .step = ++s.adam_steps};
      s.store.adam(adam);
      cpu::adam(router, s.router_sum.floats(), {.mean = s.router_mean.floats(), .square = s.router_square.floats()},
                adam);
      break;
  }
}

Bytes MoeModel::move_homes(ArrayView<const RankId, 2> home) {
  State& s = *state_;
  Array<ExpertId, 2> slots = homes_on(fitting(home, s.size), s.communicator.num_ranks(), s.communicator.rank());
  const Bytes sent = foremoe::move_homes({.from = s.home, .to = home}, s.store, s.communicator);
  s.home = copy_of(home);
  s.slots = std::move(slots);
  return Bytes{sum(s.communicator, sent.value)};
}

double MoeModel::run(PhaseExecutor& phase, const StepTokens& tokens, const Work& work) {
  State& s = *state_;
  ModelStep step({.size = s.size,
                  .tokens = tokens,
                  .router = {.weights = s.router.floats(), .gradients = s.router_gradient.floats()},
                  .communicator = s.communicator},
                 phase.order());
  const double loss = step.run(phase, work);
  std::vector<LayerId> layers;
  for (int l = 0; l < s.size.layers; ++l) layers.emplace_back(l);
  phase.drain(layers);
  phase.finish();
  s.results = step.take_results();
  return sum(s.communicator, loss);
}

std::vector<float> MoeModel::output(MicroStepId m) const { return state_->results.output.at(m.index()); }

std::vector<float> MoeModel::input_gradient(MicroStepId m) const {
  return state_->results.input_gradient.at(m.index());
}

std::vector<float> MoeModel::expert_gradient(LayerId l, ExpertId e) const {
  return state_->store.gradient(l, state_->slot_of(l, e));
}

std::vector<float> MoeModel::expert_weights(LayerId l, ExpertId e) const {
  return state_->store.weights(l, state_->slot_of(l, e));
}

std::vector<float> MoeModel::router_gradient(LayerId l) const {
  return state_->router_part(state_->router_gradient, l);
}

std::vector<float> MoeModel::router_weights(LayerId l) const { return state_->router_part(state_->router, l); }

std::vector<ExpertId> MoeModel::routes_used(MicroStepId m, LayerId l) const {
  return state_->results.routes_used(m, l);
}

const Array<RankId, 2>& MoeModel::home() const { return state_->home; }

}  // namespace foremoe
