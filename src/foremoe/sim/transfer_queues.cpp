#include "foremoe/sim/transfer_queues.h"

#include <algorithm>

namespace foremoe {

void TransferQueues::add(LinkId link, int deadline, double seconds) {
  Queue& queue = queues_[link.index()];
  const auto at = std::ranges::lower_bound(queue.work, deadline, {}, &Work::deadline);
  if (at != queue.work.end() && at->deadline == deadline) {
    at->seconds += seconds;
  } else {
    queue.work.insert(at, {.deadline = deadline, .seconds = seconds});
  }
  if (!queue.listed) busy_.push_back(link);
  queue.listed = true;
}

double TransferQueues::pending(LinkId link, int deadline) const {
  double seconds = 0;
  for (const Work& work : queues_[link.index()].work) {
    if (work.deadline > deadline) break;
    seconds += work.seconds;
  }
  return seconds;
}

double TransferQueues::most_pending(int deadline) const {
  double most = 0;
  for (const LinkId link : busy_) most = std::max(most, pending(link, deadline));
  return most;
}

void TransferQueues::drain(Queue& queue, double now, double duration, double rate) const {
  double left = duration * rate;  // seconds of link time
  auto done = queue.work.begin();
  for (; done != queue.work.end() && done->seconds <= left; ++done) {
    left -= done->seconds;
    if (keeps_times_) {
      const double at = rate > 0 ? now + (duration * rate - left) / rate : now;
      const auto entry = std::ranges::find(queue.done, done->deadline, &Done::deadline);
      if (entry == queue.done.end()) {
        queue.done.push_back({.deadline = done->deadline, .at = at});
      } else {
        entry->at = at;
      }
    }
  }
  if (done != queue.work.end()) done->seconds -= left;
  queue.work.erase(queue.work.begin(), done);
}

double TransferQueues::done_at(LinkId link, int deadline) const {
  const std::vector<Done>& done = queues_[link.index()].done;
  const auto at = std::ranges::find(done, deadline, &Done::deadline);
  return at == done.end() ? 0 : at->at;
}

void TransferQueues::forget(int before_deadline) {
  for (Queue& queue : queues_) {
    std::erase_if(queue.done, [&](const Done& done) { return done.deadline < before_deadline; });
  }
}

}  // namespace foremoe
