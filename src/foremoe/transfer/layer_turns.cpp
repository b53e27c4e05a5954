#include "foremoe/transfer/layer_turns.h"

#include <algorithm>

namespace foremoe {

LayerTurns::LayerTurns(const TurnOrder& order) : num_turns_(order.size()) {
  for (int t = 0; t < order.size(); ++t) {
    const Turn& turn = order[TurnId{t}];
    if (turn.layer.index() >= of_layer_.size()) {
      of_layer_.resize(turn.layer.index() + 1);
      forwards_before_.resize(of_layer_.size(), {0});
    }
    of_layer_[turn.layer.index()].push_back(TurnId{t});
    std::vector<int>& forwards = forwards_before_[turn.layer.index()];
    forwards.push_back(forwards.back() + (turn.pass == Pass::kForward ? 1 : 0));
  }
}

std::optional<TurnId> LayerTurns::next(LayerId layer, TurnId after) const {
  const std::vector<TurnId>& turns = of_layer_[layer.index()];
  const auto at = std::ranges::upper_bound(turns, after);
  return at == turns.end() ? std::nullopt : std::optional(*at);
}

bool LayerTurns::any(const ScheduledCopy& copy, Pass pass) const {
  const std::vector<TurnId>& turns = of_layer_[copy.layer.index()];
  const auto begin = std::ranges::lower_bound(turns, copy.arrives) - turns.begin();
  const auto end = std::ranges::upper_bound(turns, copy.closes) - turns.begin();
  const auto before = [&](std::ptrdiff_t i) {
    return forwards_before_[copy.layer.index()][static_cast<std::size_t>(i)];
  };
  const auto forwards = before(end) - before(begin);
  return pass == Pass::kForward ? forwards > 0 : end - begin > forwards;
}

bool LayerTurns::needs(const ScheduledCopy& copy, const Segment& segment) const {
  if (copy.arrives.value >= num_turns_) return true;
  return (segment.in_forward && any(copy, Pass::kForward)) || (segment.in_backward && any(copy, Pass::kBackward));
}

}  // namespace foremoe
