#pragma once

// LPLB's topologies: which ranks share an expert.
//
// A topology has `columns` and repeats in groups of consecutive ranks. In column c every rank holds a copy of an expert
// of `source`, another rank of its group, and its own expert of that column is held by exactly one other rank. So a
// copy is an edge between two ranks along which tokens can flow. With G guest slots a rank holds ⌊G / columns⌋ copies
// per column, of experts c, c + columns, … of its source, most loaded first; slots that are left stay empty.
//
//   ring       1 column    groups of 8 where 8 divides the ranks (RING_8P), else one of all ranks
//   cube       2 columns   groups of 8: cycles of four, and diagonals between two of them (CUBE_8P2E)
//   hypercube  2 columns   groups of 16: cycles of four, and cycles of four across them (HYPERCUBE_16P2E)
//   torus      2 columns   all ranks: the same place on the next node, and the next rank on the same node (torus_2d)
//
// All but the ring of other sizes are tables or code of the repository (tests/utils.py of
// https://github.com/deepseek-ai/LPLB).

#include <optional>
#include <string>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"

namespace foremoe::lplb {

enum class Edges : std::uint8_t { kAutomatic, kRing, kCube, kHypercube, kTorus };

// Of two columns or more where each rank can hold `copies` of them: hypercube for 16 ranks, cube for 8, torus where
// there are several equal nodes of several ranks, else cube where 8 divides the ranks. Where none of these is defined,
// or for one copy, the ring.
Edges choose_edges(const Topology& topology, int copies);

// Why there is no such topology; nothing when there is. `copies` per rank.
std::optional<std::string> edges_obstacle(Edges edges, const Topology& topology, int copies);

// [rank][column], the rank whose expert is copied. There is no obstacle.
Array<RankId, 2> edge_sources(Edges edges, const Topology& topology);

}  // namespace foremoe::lplb
