#pragma once

// Identifiers. Each type counts from 0 and converts only explicitly, so a rank cannot be mistaken for an expert.
// docs/users/glossary.md defines the terms.

#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "foremoe/core/debug_mode.h"

namespace foremoe {

template <class Tag>
struct Id {
  std::int32_t value = 0;

  constexpr Id() = default;
  constexpr explicit Id(std::integral auto v) : value(static_cast<std::int32_t>(v)) {}

  constexpr std::size_t index() const { return static_cast<std::size_t>(value); }
  friend constexpr auto operator<=>(Id, Id) = default;
};

using RankId = Id<struct RankTag>;      // a device of the expert-parallel group
using NodeId = Id<struct NodeTag>;      // a group of ranks that share the fast interconnect and one host memory
using ExpertId = Id<struct ExpertTag>;  // a logical expert of one MoE layer
using SlotId = Id<struct SlotTag>;      // a place for one expert on one rank: homes first, then guests
using LayerId = Id<struct LayerTag>;    // a MoE layer, in the order of the trace
using MicroStepId = Id<struct MicroStepTag>;
using EventId = Id<struct EventTag>;  // one (pass, micro-step) pair, in execution order

enum class Pass : std::uint8_t { kForward = 0, kBackward = 1 };

inline constexpr ExpertId kNoExpert{-1};    // marks an empty slot, or an entry of a missing row of routes
inline constexpr ExpertId kUnassigned{-2};  // entry of a row with a route that needs no expert; it contributes nothing

static_assert(sizeof(ExpertId) == 4, "arrays of ids are read and written as I32");

}  // namespace foremoe
