#include "foremoe/rollout/routing_trace.h"

#include <fmt/format.h>

#include <cassert>
#include <cstring>

#include "foremoe/core/error.h"
#include "foremoe/rollout/route_entry.h"

namespace foremoe {

std::size_t size_of(RouteType type) {
  return visit_route_type(type, []<class Id>(std::type_identity<Id>) { return sizeof(Id); });
}

std::int64_t sentinel_of(RouteType type) {
  return visit_route_type(type, []<class Id>(std::type_identity<Id>) { return std::int64_t{kSentinel<Id>}; });
}

RouteType narrowest_route_type(int num_experts) {
  if (num_experts <= kSentinel<std::uint8_t>) return RouteType::kU8;
  if (num_experts <= kSentinel<std::uint16_t>) return RouteType::kU16;
  return RouteType::kI32;
}

void RoutingTrace::route(std::int64_t token, LayerId layer, std::span<ExpertId> out) const {
  assert(token >= 0 && token < num_tokens && layer.index() < static_cast<std::size_t>(num_layers));
  assert(out.size() == static_cast<std::size_t>(top_k));
  const std::size_t row = static_cast<std::size_t>(token) * static_cast<std::size_t>(num_layers) + layer.index();
  visit_route_type(type, [&]<class Id>(std::type_identity<Id>) {
    const std::byte* const entries = routes + row * out.size() * sizeof(Id);
    bool missing = true;
    for (std::size_t k = 0; k < out.size(); ++k) missing = missing && load_entry<Id>(entries, k) == kSentinel<Id>;
    for (std::size_t k = 0; k < out.size(); ++k) {
      const auto id = static_cast<std::int64_t>(load_entry<Id>(entries, k));
      if (!missing && (id < 0 || id >= num_experts)) {
        throw InputError(
            {.file = name, .field = "routed_experts", .index = fmt::format("[{}, {}, {}]", token, layer.value, k)},
            fmt::format("expert {} of {}", id, num_experts));
      }
      out[k] = missing ? kNoExpert : ExpertId{id};
    }
  });
}

}  // namespace foremoe
