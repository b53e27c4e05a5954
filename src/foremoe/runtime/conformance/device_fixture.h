#pragma once

// What every test of a Device needs: a device, values in its memory, and the bound on errors.

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/runtime/device.h"
#include "foremoe/runtime/reference_model.h"

namespace foremoe {

using MakeDevice = std::unique_ptr<Device> (*)();  // null where this machine has no such device: tests are skipped

// ‖x − float64‖∞ ÷ ‖float64‖∞ of every tensor.
inline constexpr double kDeviceTolerance = 1e-5;

class DeviceConformance : public testing::TestWithParam<MakeDevice> {
 protected:
  void SetUp() override {
    device_ = GetParam()();
    if (device_ == nullptr) GTEST_SKIP() << "this machine has no such device";
  }
  void TearDown() override { memory_.clear(); }

  Device& device() { return *device_; }

  // A copy in the device's memory, alive until the test ends.
  float* put(std::span<const float> values) {
    memory_.push_back(device_->allocate(Bytes{values.size_bytes()}));
    device_->upload(memory_.back().data(), std::as_bytes(values));
    return memory_.back().floats();
  }
  float* put(std::size_t n, float value) { return put(std::vector<float>(n, value)); }

  std::vector<float> get(const float* from, std::size_t n) {
    std::vector<float> values(n);
    device_->download(std::as_writable_bytes(std::span(values)), reinterpret_cast<const std::byte*>(from));
    return values;
  }

  // Uniform in [low, low + 2).
  std::vector<float> random_values(std::size_t n, double low = -1) {
    std::vector<float> values(n);
    for (float& v : values) v = static_cast<float>(low + 2 * random_.uniform());
    return values;
  }

  Random& random() { return random_; }

 private:
  std::unique_ptr<Device> device_;  // before the memory, which it frees
  std::vector<DeviceMemory> memory_;
  Random random_{11};
};

inline std::vector<double> to_double(std::span<const float> values) { return {values.begin(), values.end()}; }

// Central differences of f by every element of `at`.
template <class Function>
std::vector<double> slopes(const Function& f, std::vector<double> at) {
  constexpr double kStep = 1e-5;
  std::vector<double> result;
  for (double& v : at) {
    const double before = v;
    v = before + kStep;
    const double above = f(at);
    v = before - kStep;
    result.push_back((above - f(at)) / (2 * kStep));
    v = before;
  }
  return result;
}

inline double inner_product(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace foremoe
