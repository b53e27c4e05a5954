#include "foremoe/runtime/threads/run_ranks.h"

#include <exception>
#include <thread>
#include <vector>

#include "foremoe/runtime/communicator.h"

namespace foremoe {

void run_ranks(int n, const std::function<void(RankId)>& f) {
  struct Outcome {
    std::exception_ptr error;
    bool of_a_peer = false;
  };
  std::vector<Outcome> outcomes(static_cast<std::size_t>(n));
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < n; ++r) {
      ranks.emplace_back([&f, &outcome = outcomes[static_cast<std::size_t>(r)], r] {
        try {
          f(RankId{r});
        } catch (const PeerFailed&) {
          outcome = {.error = std::current_exception(), .of_a_peer = true};
        } catch (...) {
          outcome = {.error = std::current_exception()};
        }
      });
    }
  }
  for (const bool of_a_peer : {false, true}) {
    for (const Outcome& outcome : outcomes) {
      if (outcome.error && outcome.of_a_peer == of_a_peer) std::rethrow_exception(outcome.error);
    }
  }
}

}  // namespace foremoe
