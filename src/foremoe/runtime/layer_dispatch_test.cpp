#include "foremoe/runtime/layer_dispatch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"

namespace foremoe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Random routes of one layer, with a random placement and random quotas that serve all routes.
struct RandomLayer {
  static constexpr int kRanks = 4;
  static constexpr int kExperts = 8;
  static constexpr int kSlots = 4;  // 2 homes, 2 guests
  static constexpr int kTopK = 3;

  explicit RandomLayer(std::uint64_t seed) : random(seed) {
    for (int s = 0; s < kRanks; ++s) {
      const int tokens = 1 + static_cast<int>(random.below(12));
      for (int t = 0; t < tokens; ++t) add_token(s);
    }
    for (int r = 0; r < kRanks; ++r) {
      slot_expert(r, 0) = ExpertId{2 * r};
      slot_expert(r, 1) = ExpertId{2 * r + 1};
      slot_expert(r, 2) = ExpertId{(2 * r + 2 + static_cast<int>(random.below(2))) % kExperts};
      slot_expert(r, 3) = ExpertId{(2 * r + 4 + static_cast<int>(random.below(2))) % kExperts};
    }
    for (int e = 0; e < kExperts; ++e) split(ExpertId{e});
  }

  void add_token(int source) {
    const bool missing = random.below(6) == 0;
    std::vector<ExpertId> chosen;
    while (static_cast<int>(chosen.size()) < kTopK) {
      const ExpertId e{random.below(kExperts)};
      if (std::ranges::find(chosen, e) == chosen.end()) chosen.push_back(e);
    }
    for (const ExpertId e : chosen) {
      routes[source].push_back(missing ? kNoExpert : e);
      if (!missing) load(source, e) += Tokens{1};
    }
  }

  // Gives every replica a random share of the expert's tokens.
  void split(ExpertId e) {
    std::vector<Tokens*> quotas;
    for (int r = 0; r < kRanks; ++r) {
      for (int s = 0; s < kSlots; ++s) {
        if (slot_expert(r, s) == e) quotas.push_back(&slot_tokens(r, s));
      }
    }
    for (int s = 0; s < kRanks; ++s) {
      for (std::int64_t i = 0; i < load(s, e).value; ++i) *quotas[random.below(quotas.size())] += Tokens{1};
    }
  }

  LayerDispatch dispatch(int rank) const {
    DispatchWorkspace workspace;
    LayerDispatch result;
    rank_dispatch({.load = load, .quotas = {slot_expert, slot_tokens}, .topology = {kRanks, 2}}, RankId{rank},
                  workspace.rows, result.rows);
    find_sent_rows(routes[rank], kTopK, workspace, result);
    return result;
  }

  Random random;
  std::vector<ExpertId> routes[kRanks];
  Array<Tokens, 2> load{{kRanks, kExperts}};
  Array<ExpertId, 2> slot_expert{{kRanks, kSlots}, kNoExpert};
  Array<Tokens, 2> slot_tokens{{kRanks, kSlots}};
};

using Row = std::tuple<int, int, int>;  // source, token, expert

// Sends (source, token, expert) of every row through a hand-written all-to-all.
struct Delivery {
  std::vector<std::vector<Row>> computed;  // [rank][computed row]
};

Delivery deliver(const RandomLayer& layer, const std::vector<LayerDispatch>& dispatch) {
  std::vector<std::vector<Row>> sent(RandomLayer::kRanks);
  for (int s = 0; s < RandomLayer::kRanks; ++s) {
    sent[s].resize(dispatch[s].token_of_sent_row.size());
    for (std::size_t i = 0; i < layer.routes[s].size(); ++i) {
      if (const int row = dispatch[s].sent_row[i]; row >= 0) {
        sent[s][row] = {s, static_cast<int>(i) / RandomLayer::kTopK, layer.routes[s][i].value};
        EXPECT_EQ(dispatch[s].token_of_sent_row[row], static_cast<int>(i) / RandomLayer::kTopK);
      }
    }
  }
  Delivery delivery;
  for (int r = 0; r < RandomLayer::kRanks; ++r) {
    std::vector<Row> received;
    for (int s = 0; s < RandomLayer::kRanks; ++s) {
      std::int64_t first = 0;
      for (int q = 0; q < r; ++q) first += dispatch[s].rows.send[q];
      EXPECT_EQ(dispatch[s].rows.send[r], dispatch[r].rows.recv[s]);
      for (std::int64_t i = 0; i < dispatch[s].rows.send[r]; ++i) received.push_back(sent[s][first + i]);
    }
    std::vector<Row> computed;
    for (const std::int32_t row : dispatch[r].rows.to_slots) computed.push_back(received.at(row));
    delivery.computed.push_back(computed);
  }
  return delivery;
}

TEST(LayerDispatch, DeliversEveryPlannedRowOnceInBlocksPerExpert) {
  for (int seed = 0; seed < 200; ++seed) {
    const RandomLayer layer(seed);
    std::vector<LayerDispatch> dispatch;
    for (int r = 0; r < RandomLayer::kRanks; ++r) dispatch.push_back(layer.dispatch(r));
    const Delivery delivery = deliver(layer, dispatch);

    std::map<Row, int> times;
    for (int r = 0; r < RandomLayer::kRanks; ++r) {
      std::map<int, std::int64_t> rows_of;
      for (int s = 0; s < RandomLayer::kSlots; ++s) {
        for (std::int64_t i = dispatch[r].rows.slot_offsets[s]; i < dispatch[r].rows.slot_offsets[s + 1]; ++i) {
          const Row row = delivery.computed[r].at(i);
          EXPECT_EQ(std::get<2>(row), layer.slot_expert(r, s).value);
          ++times[row];
          ++rows_of[layer.slot_expert(r, s).value];
        }
      }
      for (int s = 0; s < RandomLayer::kSlots; ++s) {
        EXPECT_EQ(rows_of[layer.slot_expert(r, s).value], layer.slot_tokens(r, s).value) << "the quota, seed " << seed;
      }
    }
    std::int64_t planned = 0;
    for (int s = 0; s < RandomLayer::kRanks; ++s) {
      planned += std::ranges::count_if(layer.routes[s], [](ExpertId e) { return e != kNoExpert; });
    }
    EXPECT_EQ(static_cast<std::int64_t>(times.size()), planned);
    for (const auto& [row, n] : times) EXPECT_EQ(n, 1);
  }
}

TEST(LayerDispatch, OrdersRowsOfAnExpertBySourceForAnyPlacement) {
  const RandomLayer layer(3);
  for (int r = 0; r < RandomLayer::kRanks; ++r) {
    std::vector<LayerDispatch> dispatch;
    for (int q = 0; q < RandomLayer::kRanks; ++q) dispatch.push_back(layer.dispatch(q));
    const Delivery delivery = deliver(layer, dispatch);
    for (int s = 0; s < RandomLayer::kSlots; ++s) {
      const auto begin = delivery.computed[r].begin();
      EXPECT_TRUE(
          std::is_sorted(begin + dispatch[r].rows.slot_offsets[s], begin + dispatch[r].rows.slot_offsets[s + 1]))
          << "by source, then token";
    }
  }
}

TEST(LayerDispatch, RefusesRoutesThatTheLoadDoesNotCount) {
  RandomLayer layer(1);
  layer.routes[2].push_back(ExpertId{5});
  layer.routes[2].push_back(kNoExpert);
  layer.routes[2].push_back(kNoExpert);
  try {
    layer.dispatch(2);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 2"));
    EXPECT_THAT(error.what(), HasSubstr("expert 5"));
  }
}

TEST(LayerDispatch, IsEmptyWithoutTokens) {
  DispatchWorkspace workspace;
  LayerDispatch dispatch;
  const Array<Tokens, 2> load({2, 2});
  const Array<ExpertId, 2> slots({2, 1}, kNoExpert);
  const Array<Tokens, 2> quotas({2, 1});
  rank_dispatch({.load = load, .quotas = {slots, quotas}, .topology = {2, 2}}, RankId{1}, workspace.rows,
                dispatch.rows);
  find_sent_rows({}, 2, workspace, dispatch);
  EXPECT_EQ(dispatch.rows_sent(), 0);
  EXPECT_EQ(dispatch.rows_computed(), 0);
  EXPECT_THAT(dispatch.rows.send, ElementsAre(0, 0));
  EXPECT_THAT(dispatch.rows.slot_offsets, ElementsAre(0, 0));
}

}  // namespace
}  // namespace foremoe
