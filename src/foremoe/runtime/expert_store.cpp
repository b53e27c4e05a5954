#include "foremoe/runtime/expert_store.h"

#include <algorithm>
#include <cassert>

namespace foremoe {

ExpertStore::ExpertStore(Size size, HomeMemory memory, Device& device) : size_(std::move(size)), device_(device) {
  assert(std::ranges::all_of(size_.layout.segments(), [](const Segment& s) { return s.type == DataType::kFloat32; }));
  elements_ = size_.layout.elements();
  const Bytes bytes{std::int64_t{size_.layers} * size_.slots * size_.layout.bytes().value};
  if (memory == HomeMemory::kShared && device.is_host_memory()) {
    shared_ = SharedMemory::create("homes", bytes);
    weights_ = shared_.bytes();
  } else {
    own_ = device.allocate(bytes);
    weights_ = {own_.data(), static_cast<std::size_t>(bytes.value)};
  }
  gradients_ = device.allocate(bytes);

  homes_.experts =
      Array<HomeExpert, 2>({static_cast<std::size_t>(size_.layers), static_cast<std::size_t>(size_.slots)});
  for (int l = 0; l < size_.layers; ++l) {
    for (int s = 0; s < size_.slots; ++s) {
      const std::size_t slot = slot_offset(LayerId{l}, s);
      for (std::size_t i = 0; i < size_.layout.num_segments(); ++i) {
        const std::size_t at = slot + size_.layout.offset(i);
        homes_.experts(l, s).weights.push_back(weights_.data() + at);
        homes_.experts(l, s).gradients.push_back(reinterpret_cast<float*>(gradients_.data() + at));
      }
    }
  }
  homes_.regions = {{weights_, shared_.name()}};
}

std::size_t ExpertStore::slot_offset(LayerId layer, int slot) const {
  return (layer.index() * static_cast<std::size_t>(size_.slots) + static_cast<std::size_t>(slot)) *
         static_cast<std::size_t>(size_.layout.bytes().value);
}

std::size_t ExpertStore::floats() const { return weights_.size() / sizeof(float); }

void ExpertStore::zero_gradients() { device_.zero(gradients_.data(), weights_.size()); }

void ExpertStore::zero_gradients(LayerId layer) {
  const std::size_t begin = slot_offset(layer, 0);
  device_.zero(gradients_.data() + begin, slot_offset(layer, size_.slots) - begin);
}

// Padding has gradient 0 and stays 0 under both rules.
void ExpertStore::sgd(float rate) {
  device_.sgd(reinterpret_cast<float*>(weights_.data()), gradients_.floats(), static_cast<std::int64_t>(floats()),
              rate);
}

void ExpertStore::adam(const Device::Adam& options) {
  if (mean_.data() == nullptr) {
    mean_ = device_.allocate(gradients_.bytes());
    square_ = device_.allocate(gradients_.bytes());
  }
  device_.adam(reinterpret_cast<float*>(weights_.data()), gradients_.floats(), mean_.floats(), square_.floats(),
               static_cast<std::int64_t>(floats()), options);
}

void ExpertStore::download(std::span<std::byte> to, const std::byte* memory, LayerId layer, int slot) const {
  for (std::size_t i = 0; i < size_.layout.num_segments(); ++i) {
    const auto bytes = static_cast<std::size_t>(size_.layout.segments()[i].bytes().value);
    device_.download(to.first(bytes), memory + slot_offset(layer, slot) + size_.layout.offset(i));
    to = to.subspan(bytes);
  }
}

void ExpertStore::upload(std::byte* memory, LayerId layer, int slot, std::span<const std::byte> from) {
  for (std::size_t i = 0; i < size_.layout.num_segments(); ++i) {
    const auto bytes = static_cast<std::size_t>(size_.layout.segments()[i].bytes().value);
    device_.upload(memory + slot_offset(layer, slot) + size_.layout.offset(i), from.first(bytes));
    from = from.subspan(bytes);
  }
}

std::vector<float> ExpertStore::weights(LayerId layer, int slot) const {
  std::vector<float> values(static_cast<std::size_t>(elements_));
  download(std::as_writable_bytes(std::span(values)), weights_.data(), layer, slot);
  return values;
}

std::vector<float> ExpertStore::gradient(LayerId layer, int slot) const {
  std::vector<float> values(static_cast<std::size_t>(elements_));
  download(std::as_writable_bytes(std::span(values)), gradients_.data(), layer, slot);
  return values;
}

void ExpertStore::set_weights(LayerId layer, int slot, std::span<const float> weights) {
  assert(static_cast<std::int64_t>(weights.size()) == elements_);
  upload(weights_.data(), layer, slot, std::as_bytes(weights));
}

std::vector<std::byte*> ExpertStore::state_parts() const {
  if (mean_.data() == nullptr) return {weights_.data()};
  return {weights_.data(), mean_.data(), square_.data()};
}

Bytes ExpertStore::state_bytes() const {
  return Bytes{static_cast<std::int64_t>(state_parts().size()) * elements_ * static_cast<std::int64_t>(sizeof(float))};
}

void ExpertStore::save_state(LayerId layer, int slot, std::span<std::byte> state) const {
  const std::size_t part_bytes = static_cast<std::size_t>(elements_) * sizeof(float);
  for (const std::byte* part : state_parts()) {
    download(state.first(part_bytes), part, layer, slot);
    state = state.subspan(part_bytes);
  }
}

void ExpertStore::load_state(LayerId layer, int slot, std::span<const std::byte> state) {
  const std::size_t part_bytes = static_cast<std::size_t>(elements_) * sizeof(float);
  for (std::byte* part : state_parts()) {
    upload(part, layer, slot, state.first(part_bytes));
    state = state.subspan(part_bytes);
  }
}

}  // namespace foremoe
