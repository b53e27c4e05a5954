#pragma once

// The pending work of each link, by deadline.
//
// Model. A link is never idle while it has work, and serves the earliest deadline first. Work with equal deadlines is
//   served together. Links are independent: a transfer over several links is complete when all of them are done with
//   it, as if it were sent in small pieces.
// Consequence. The completion time of the work up to a deadline depends only on that work and is a maximum of sums, so
//   more bandwidth or an earlier start never delays anything.
// Complexity. O(links with work) per part of a turn.

#include <vector>

#include "foremoe/transfer/cluster_links.h"

namespace foremoe {

class TransferQueues {
 public:
  explicit TransferQueues(int num_links) : queues_(static_cast<std::size_t>(num_links)) {}

  void add(LinkId link, int deadline, double seconds);

  // Seconds of undisturbed link time for all work with this or an earlier deadline.
  double pending(LinkId link, int deadline) const;
  double most_pending(int deadline) const;  // over links

  // Advances by `duration` seconds from `now`. The queue gets the share rate(link) ∈ [0, 1] of each link's time.
  template <class Rate>
  void pass(double now, double duration, const Rate& rate);

  // Returns when the link last completed its work for this deadline; 0 if it had none. Requires keep_times(). Valid
  // until forget() of a later deadline.
  double done_at(LinkId link, int deadline) const;
  void forget(int before_deadline);

  void keep_times() { keeps_times_ = true; }

 private:
  struct Work {
    int deadline = 0;
    double seconds = 0;
  };
  struct Done {
    int deadline = 0;
    double at = 0;
  };
  struct Queue {
    std::vector<Work> work;  // sorted by deadline, unique
    std::vector<Done> done;
    bool listed = false;  // in busy_
  };
  void drain(Queue& queue, double now, double duration, double rate) const;

  std::vector<Queue> queues_;  // [link]
  std::vector<LinkId> busy_;   // links that may have work
  bool keeps_times_ = false;
};

template <class Rate>
void TransferQueues::pass(double now, double duration, const Rate& rate) {
  for (const LinkId link : busy_) drain(queues_[link.index()], now, duration, rate(link));
  std::erase_if(busy_, [this](LinkId link) {
    Queue& queue = queues_[link.index()];
    queue.listed = !queue.work.empty();
    return !queue.listed;
  });
}

}  // namespace foremoe
