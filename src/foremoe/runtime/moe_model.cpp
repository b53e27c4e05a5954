#include "foremoe/runtime/moe_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "foremoe/core/error.h"
#include "foremoe/runtime/home_moves.h"
#include "foremoe/runtime/model_step.h"

namespace foremoe {
namespace {

Array<RankId, 2> copy_of(ArrayView<const RankId, 2> home) {
  Array<RankId, 2> result(home.shape());
  std::ranges::copy(home.flat(), result.flat().begin());
  return result;
}

// [layers][experts], or an InputError.
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
        Device& model_device, HomeMemory memory)
      : size(model_size),
        communicator(model_communicator),
        device(model_device),
        home(copy_of(fitting(model_home, size))),
        slots(home_slots(home, communicator.num_ranks(), communicator.rank())),
        store({.layers = size.layers,
               .slots = static_cast<int>(slots.extent(1)),
               .layout = swiglu_layout(size.shape.hidden, size.shape.intermediate)},
              memory, device),
        router(device.allocate(router_bytes())),
        router_gradient(device.allocate(router_bytes())),
        router_sum(device.allocate(router_bytes())) {}

  std::int64_t router_values() const { return std::int64_t{size.experts} * size.shape.hidden; }  // of one layer
  Bytes router_bytes() const { return Bytes{size.layers * router_values() * static_cast<std::int64_t>(sizeof(float))}; }
  int slot_of(LayerId l, ExpertId e) const {
    const auto row = slots.row(l);
    const auto slot = std::ranges::find(row, e);
    assert(slot != row.end());
    return static_cast<int>(slot - row.begin());
  }
  std::vector<float> router_part(const DeviceMemory& memory, LayerId l) const {
    std::vector<float> values(static_cast<std::size_t>(router_values()));
    device.download(std::as_writable_bytes(std::span(values)),
                    memory.data() + l.index() * values.size() * sizeof(float));
    return values;
  }
  void draw_weights();

  const ModelSize size;
  Communicator& communicator;
  Device& device;
  Array<RankId, 2> home;     // [layer][expert]
  Array<ExpertId, 2> slots;  // [layer][home slot], ascending
  ExpertStore store;
  DeviceMemory router, router_gradient, router_sum;  // [layer][experts][hidden]; the sum is that of all ranks
  DeviceMemory router_mean, router_square;           // likewise, empty before Adam's first step
  int adam_steps = 0;                                // the same for every parameter: state that need not travel
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
    device.upload(router.data() + static_cast<std::size_t>(l) * values.size() * sizeof(float),
                  std::as_bytes(std::span(values)));
  }
}

MoeModel::MoeModel(const ModelSize& size, ArrayView<const RankId, 2> home, Communicator& communicator, Device& device,
                   HomeMemory memory)
    : state_(std::make_unique<State>(size, home, communicator, device, memory)) {
  state_->draw_weights();
}

MoeModel::~MoeModel() = default;

const HomeExperts& MoeModel::homes() const { return state_->store.homes(); }

void MoeModel::zero_gradients() {
  state_->store.zero_gradients();
  state_->device.zero(state_->router_gradient.data(), static_cast<std::size_t>(state_->router_bytes().value));
}

void MoeModel::optimize(const Optimizer& optimizer) {
  State& s = *state_;
  const std::int64_t n = s.size.layers * s.router_values();
  s.device.copy(s.router_sum.data(), s.router_gradient.data(), static_cast<std::size_t>(s.router_bytes().value));
  s.communicator.all_reduce_sum({s.router_sum.floats(), static_cast<std::size_t>(n)}, s.device.stream());
  switch (optimizer.kind) {
    case Optimizer::Kind::kSgd:
      s.store.sgd(optimizer.rate);
      s.device.sgd(s.router.floats(), s.router_sum.floats(), n, optimizer.rate);
      break;
    case Optimizer::Kind::kAdam:
      if (s.router_mean.data() == nullptr) {
        s.router_mean = s.device.allocate(s.router_bytes());
        s.router_square = s.device.allocate(s.router_bytes());
      }
      const Device::Adam adam{.rate = optimizer.rate, .step = ++s.adam_steps};
      s.store.adam(adam);
      s.device.adam(s.router.floats(), s.router_sum.floats(), s.router_mean.floats(), s.router_square.floats(), n,
                    adam);
      break;
  }
  s.device.stream().synchronize();
}

Bytes MoeModel::move_homes(ArrayView<const RankId, 2> home) {
  State& s = *state_;
  Array<ExpertId, 2> slots = home_slots(fitting(home, s.size), s.communicator.num_ranks(), s.communicator.rank());
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
                  .communicator = s.communicator,
                  .device = s.device},
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
