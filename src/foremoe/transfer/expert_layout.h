#pragma once

// Memory layout of an expert: segments (gate-up and down projections; data, scales), each tagged with the passes that
// read it. Slots and arenas store the segments consecutively, each 64-byte aligned. Owners may store segments anywhere.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/units.h"
#include "foremoe/plan/step_plan.h"

namespace foremoe {

enum class DataType : std::uint8_t { kFloat32, kBfloat16 };

std::size_t size_of(DataType type);
std::string_view to_string(DataType type);  // "float32", "bfloat16"

struct Segment {
  std::string name;  // "gate_up", "down"
  std::int64_t elements = 0;
  DataType type = DataType::kFloat32;
  bool in_forward = true;   // read by a forward pass
  bool in_backward = true;  // read by a backward pass

  Bytes bytes() const { return Bytes{elements * static_cast<std::int64_t>(size_of(type))}; }
  bool read_by(Pass pass) const { return pass == Pass::kForward ? in_forward : in_backward; }
};

class ExpertLayout {
 public:
  ExpertLayout() = default;
  explicit ExpertLayout(std::vector<Segment> segments);  // throws InputError without segments or if one is empty

  std::span<const Segment> segments() const { return segments_; }
  std::size_t num_segments() const { return segments_.size(); }
  std::size_t offset(std::size_t segment) const { return offsets_[segment]; }  // bytes, within a slot
  std::int64_t elements() const;                                               // of all segments; size of a gradient
  Bytes bytes() const { return bytes_; }                                       // of a slot, padding included
  Bytes bytes_read_by(Pass pass) const;                                        // size of a copy for this pass alone

 private:
  std::vector<Segment> segments_;
  std::vector<std::size_t> offsets_;
  Bytes bytes_;
};

// A SwiGLU expert in float32: gate_up [2·intermediate][hidden], then down [hidden][intermediate].
ExpertLayout swiglu_layout(int hidden, int intermediate);

// Addresses of one expert's segments. [segment]
using SegmentPointers = std::vector<std::byte*>;

}  // namespace foremoe
