#include "foremoe/transfer/expert_layout.h"

#include <fmt/format.h>

#include "foremoe/core/error.h"

namespace foremoe {

static constexpr std::size_t kAlignment = 64;  // bytes; cache line, suits vector loads and checksums

std::size_t size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

std::string_view to_string(DataType type) { return type == DataType::kFloat32 ? "float32" : "bfloat16"; }

ExpertLayout::ExpertLayout(std::vector<Segment> segments) : segments_(std::move(segments)) {
  if (segments_.empty()) throw InputError({.field = "segments"}, "expected at least one");
  std::size_t end = 0;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.elements <= 0) {
      throw InputError({.field = "segments", .index = fmt::format("[{}]", i)},
                       fmt::format("'{}' has {} elements", segment.name, segment.elements));
    }
    offsets_.push_back(end);
    const auto bytes = static_cast<std::size_t>(segment.bytes().value);
    end += (bytes + kAlignment - 1) / kAlignment * kAlignment;  // aligns the next segment and slot
  }
  bytes_ = Bytes{end};
}

Bytes ExpertLayout::bytes_read_by(Pass pass) const {
  Bytes sum;
  for (const Segment& segment : segments_) {
    if (segment.read_by(pass)) sum += segment.bytes();
  }
  return sum;
}

std::int64_t ExpertLayout::elements() const {
  std::int64_t sum = 0;
  for (const Segment& segment : segments_) sum += segment.elements;
  return sum;
}

ExpertLayout swiglu_layout(int hidden, int intermediate) {
  if (hidden <= 0) throw InputError({.field = "hidden"}, fmt::format("{} is not positive", hidden));
  if (intermediate <= 0) throw InputError({.field = "intermediate"}, fmt::format("{} is not positive", intermediate));
  const std::int64_t matrix = std::int64_t{hidden} * intermediate;
  return ExpertLayout({{.name = "gate_up", .elements = 2 * matrix}, {.name = "down", .elements = matrix}});
}

}  // namespace foremoe
