#pragma once

// The home experts of one rank: weights, gradients and the optimizer's moments, all in slots of one layout, so that a
// step is one call over each. Weights lie in shared memory where peers in other processes are to read them, otherwise
// in the device's own. Which expert is in which slot is its owner's business.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/runtime/device.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

enum class HomeMemory : std::uint8_t {
  kShared,   // named; on a device whose memory is not the host's the same as kPrivate
  kPrivate,  // enough where all ranks are threads of one process
};

class ExpertStore {
 public:
  struct Size {
    int layers = 0;
    int slots = 0;        // homes per layer
    ExpertLayout layout;  // float32
  };
  // Zeroed. Throws InputError naming how much when there is too little memory.
  ExpertStore(Size size, HomeMemory memory, Device& device);

  const Size& size() const { return size_; }
  const HomeExperts& homes() const { return homes_; }

  void zero_gradients();
  void zero_gradients(LayerId layer);
  void sgd(float rate);
  void adam(const Device::Adam& options);  // the moments are allocated at the first call

  // [segment after segment], without padding; on the host.
  std::vector<float> weights(LayerId layer, int slot) const;
  std::vector<float> gradient(LayerId layer, int slot) const;
  void set_weights(LayerId layer, int slot, std::span<const float> weights);

  // An expert's state is its weights and, once there are any, its moments; gradients are no part of it.
  Bytes state_bytes() const;
  void save_state(LayerId layer, int slot, std::span<std::byte> state) const;
  void load_state(LayerId layer, int slot, std::span<const std::byte> state);

 private:
  std::size_t slot_offset(LayerId layer, int slot) const;
  std::size_t floats() const;  // of all slots, padding included
  std::vector<std::byte*> state_parts() const;
  void download(std::span<std::byte> to, const std::byte* memory, LayerId layer, int slot) const;
  void upload(std::byte* memory, LayerId layer, int slot, std::span<const std::byte> from);

  Size size_;
  Device& device_;
  std::int64_t elements_ = 0;  // of an expert, without padding
  SharedMemory shared_;
  DeviceMemory own_;
  std::span<std::byte> weights_;  // in one of the two; [layer][slot]
  DeviceMemory gradients_;        // likewise
  DeviceMemory mean_, square_;    // likewise, empty before the first adam()
  HomeExperts homes_;
};

}  // namespace foremoe
