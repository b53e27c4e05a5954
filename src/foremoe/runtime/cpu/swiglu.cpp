#include "foremoe/runtime/cpu/swiglu.h"

#include <bit>
#include <cstring>

namespace foremoe::cpu {

namespace {

constexpr int kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));

Floats load(const float* from, int lanes) {
  Floats v{};
  std::memcpy(&v, from, static_cast<std::size_t>(lanes) * sizeof(float));
  return v;
}

void store(float* to, Floats v, int lanes) { std::memcpy(to, &v, static_cast<std::size_t>(lanes) * sizeof(float)); }

// eˣ for |x| ≤ 87, where neither it nor its inverse leaves the normal numbers; beyond, e^±87. Reduced to
// |r| ≤ ½ ln 2 by powers of two, then a polynomial of degree 7 (coefficients of Cephes' expf).
Floats exponential(Floats x) {
  constexpr float kBound = 87.0F;
  x = x > kBound ? Floats{} + kBound : x;
  x = x < -kBound ? Floats{} - kBound : x;
  constexpr float kToInteger = 0x1.8p23F;  // added, it rounds to an integer in the low bits
  const Floats shifted = x * 1.44269504F + kToInteger;
  const Floats n = shifted - kToInteger;
  const Floats r = (x - n * 0.693359375F) + n * 2.12194440e-4F;  // ln 2 in two parts: the first product is exact
  Floats p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const Floats y = (p * (r * r) + r) + 1.0F;
  const Ints exponent = std::bit_cast<Ints>(shifted) - std::bit_cast<std::int32_t>(kToInteger);
  return y * std::bit_cast<Floats>((exponent + 127) << 23);
}

template <class Step>
void for_each_lanes(int n, const Step& step) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, kLanes);
  if (i < n) step(i, n - i);
}

}  // namespace

void swiglu(const float* gate_up, std::int64_t rows, int intermediate, float* h) {
  for (std::int64_t row = 0; row < rows; ++row, gate_up += std::ptrdiff_t{2} * intermediate, h += intermediate) {
    for_each_lanes(intermediate, [&](int i, int lanes) {
      const Floats g = load(gate_up + i, lanes);
      const Floats sigmoid = 1.0F / (1.0F + exponential(-g));
      store(h + i, g * sigmoid * load(gate_up + intermediate + i, lanes), lanes);
    });
  }
}

void swiglu_backward(const float* gate_up, const float* dh, std::int64_t rows, int intermediate, SwigluGradients out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for_each_lanes(intermediate, [&](int i, int lanes) {
      const Floats g = load(gate_up + i, lanes);
      const Floats u = load(gate_up + intermediate + i, lanes);
      const Floats d = load(dh + i, lanes);
      const Floats e = exponential(-g);
      const Floats sigmoid = 1.0F / (1.0F + e);
      const Floats silu = g * sigmoid;
      // silu' = s·(1 + g·(1 − s)), and 1 − s = e·s without cancellation
      const Floats slope = sigmoid * (1.0F + g * (e * sigmoid));
      store(out.h + i, silu * u, lanes);
      store(out.d_gate_up + i, d * u * slope, lanes);
      store(out.d_gate_up + intermediate + i, d * silu, lanes);
    });
    gate_up += std::ptrdiff_t{2} * intermediate;
    out.d_gate_up += std::ptrdiff_t{2} * intermediate;
    dh += intermediate;
    out.h += intermediate;
  }
}

}  // namespace foremoe::cpu
