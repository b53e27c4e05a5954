#include "foremoe/policy/systems/moonep.h"

#include <algorithm>
#include <numeric>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

struct Receiver {
  int rank = 0;
  std::int64_t lacks = 0;  // tokens
  int guests = 0;
};

int index_of_max(std::span<const std::int64_t> values) {
  return static_cast<int>(std::ranges::max_element(values) - values.begin());
}

// Pairs receivers with homes. Returns [home rank][receiver], in order of pairing.
std::vector<std::vector<Receiver>> pair_ranks(const LayerLoad& load, double bound) {
  const int num_ranks = load.topology.num_ranks;
  const std::int64_t total = std::accumulate(load.of_expert.begin(), load.of_expert.end(), std::int64_t{0});
  std::vector<std::int64_t> balance;
  count_at_home(load, balance);
  for (int r = 0; r < num_ranks; ++r) balance[r] -= total / num_ranks + (r < total % num_ranks ? 1 : 0);

  const std::int64_t mean = total / num_ranks;
  const auto tolerated = static_cast<std::int64_t>(bound * static_cast<double>(mean));
  std::vector<std::vector<Receiver>> receivers(num_ranks);
  for (int h = index_of_max(balance); balance[h] > tolerated; h = index_of_max(balance)) {
    const auto u = std::ranges::min_element(balance);
    receivers[h].push_back({.rank = static_cast<int>(u - balance.begin()), .lacks = -*u});
    balance[h] += *u;
    *u = 0;
  }
  return receivers;
}

void serve(const LayerLoad& load, std::span<const ExpertId> experts, std::vector<Receiver>& receivers,
           std::vector<Share>& shares) {
  std::vector<std::int64_t> left(experts.size());
  std::ranges::transform(experts, left.begin(), [&](ExpertId e) { return load.of_expert[e.index()]; });
  for (;;) {
    const auto receiver = std::ranges::max_element(receivers, {}, &Receiver::lacks);
    if (receiver->lacks == 0) return;
    const int i = index_of_max(left);
    if (receiver->guests == load.guest_slots || left[i] == 0) {  // no slot or token is left for the receiver
      receiver->lacks = 0;
      continue;
    }
    const std::int64_t tokens = std::min(left[i], receiver->lacks);
    shares.push_back({.expert = experts[i], .rank = RankId{receiver->rank}, .tokens = tokens});
    left[i] -= tokens;
    receiver->lacks -= tokens;
    ++receiver->guests;
  }
}

class Moonep final : public Policy {
 public:
  explicit Moonep(const MoonepOptions& options) : options_(options) {}

  std::string_view name() const override { return "moonep"; }
  std::string_view summary() const override {
    return "MoonEP: fills every rank to its share with copies of one other rank's experts";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  OnlineWork online() const override { return {.copies_after_router = true, .gathers_loads = true}; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto choose = [this](const LayerLoad& load, std::vector<Share>& shares) {
      std::vector<std::vector<Receiver>> receivers = pair_ranks(load, options_.bound);
      std::vector<std::vector<ExpertId>> experts;  // [home rank]
      list_at_home(load, experts);
      for (std::size_t h = 0; h < receivers.size(); ++h) {
        if (!receivers[h].empty()) serve(load, experts[h], receivers[h], shares);
      }
    };
    return plan_fetched({.name = name(), .of_layer = [&](LayerId) { return choose; }}, input, pool);
  }

 private:
  MoonepOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_moonep(const MoonepOptions& options) { return std::make_unique<Moonep>(options); }

}  // namespace foremoe
