#include "foremoe/runtime/row_exchange.h"

#include "foremoe/core/timeline.h"
#include "foremoe/runtime/cpu/rows.h"

namespace foremoe {
namespace {

const std::byte* bytes(const float* x) { return reinterpret_cast<const std::byte*>(x); }
std::byte* bytes(float* x) { return reinterpret_cast<std::byte*>(x); }

void row_bytes(std::span<const std::int64_t> rows, int width, std::vector<std::int64_t>& out) {
  out.clear();
  for (const std::int64_t n : rows) out.push_back(n * width * static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace

float* RowMatrix::reserve(std::int64_t rows, int width) {
  const Bytes need{rows * width * static_cast<std::int64_t>(sizeof(float))};
  if (memory_.bytes() < need) {
    memory_ = {};  // free the old memory first: both may not fit
    memory_ = allocate_memory(need);
  }
  return memory_.floats();
}

void RowExchange::reserve(std::int64_t rows_sent, std::int64_t rows_computed) {
  sent_.reserve(rows_sent, model_.shape.hidden);
  for (RowMatrix* matrix : {&received_, &computed_, &computed_gradient_}) {
    matrix->reserve(rows_computed, model_.shape.hidden);
  }
}

template <class Compute>
void RowExchange::compute(const LayerDispatch& dispatch, TurnFigures& figures, Compute compute) {
  const double begin = thread_cpu_seconds();
  compute();
  figures.compute_cpu_seconds += thread_cpu_seconds() - begin;
  figures.calls += static_cast<std::int64_t>(experts_.size());
  figures.rows += dispatch.rows_computed();
}

void RowExchange::forward(const ExpertsOf& experts, const LayerForward& layer, ForwardRows& rows,
                          TurnFigures& figures) {
  const LayerDispatch& dispatch = rows.dispatch;
  const int hidden = model_.shape.hidden;
  float* sent = sent_.reserve(dispatch.rows_sent(), hidden);
  float* x = rows.x.reserve(dispatch.rows_computed(), hidden);
  float* gate_up = rows.gate_up.reserve(dispatch.rows_computed(), 2 * model_.shape.intermediate);
  float* y = computed_.reserve(dispatch.rows_computed(), hidden);
  float* returned = rows.returned.reserve(dispatch.rows_sent(), hidden);
  rows.weight = layer.weight;

  cpu::gather_rows(sent, layer.x, dispatch.token_of_sent_row, hidden);
  to_experts(sent, dispatch, x);
  find_experts(experts, dispatch.rows);
  compute(dispatch, figures, [&] { cpu::experts_forward(experts_, {.x = x, .gate_up = gate_up, .y = y}, workspace_); });
  from_experts(y, dispatch, returned);
  cpu::combine(layer.y, {.rows = returned, .row = dispatch.sent_row, .k = model_.top_k, .hidden = hidden},
               layer.weight);
}

void RowExchange::backward(const ExpertsOf& experts, const LayerBackward& layer, const ForwardRows& rows,
                           TurnFigures& figures) {
  const LayerDispatch& dispatch = rows.dispatch;
  const int hidden = model_.shape.hidden;
  float* sent = sent_.reserve(dispatch.rows_sent(), hidden);
  float* dy = computed_.reserve(dispatch.rows_computed(), hidden);
  float* dx = computed_gradient_.reserve(dispatch.rows_computed(), hidden);
  const auto of_tokens = [&](const float* values) {
    return cpu::TokenRows{.rows = values, .row = dispatch.sent_row, .k = model_.top_k, .hidden = hidden};
  };

  cpu::combine_backward(of_tokens(rows.returned.data()), rows.weight, layer.dy,
                        {.d_rows = sent, .d_weight = layer.d_weight});
  to_experts(sent, dispatch, dy);
  find_experts(experts, dispatch.rows);
  compute(dispatch, figures, [&] {
    cpu::experts_backward(experts_, {.x = rows.x.data(), .gate_up = rows.gate_up.data(), .dy = dy, .dx = dx},
                          workspace_);
  });
  from_experts(dx, dispatch, sent);
  cpu::add_rows(layer.dx, of_tokens(sent));
}

void RowExchange::to_experts(const float* sent, const LayerDispatch& dispatch, float* computed) {
  const int hidden = model_.shape.hidden;
  row_bytes(dispatch.rows.send, hidden, bytes_to_);
  row_bytes(dispatch.rows.recv, hidden, bytes_from_);
  float* received = received_.reserve(dispatch.rows_computed(), hidden);
  communicator_.exchange({bytes(sent), bytes_to_, bytes(received), bytes_from_});
  cpu::gather_rows(computed, received, dispatch.rows.to_slots, hidden);
}

void RowExchange::from_experts(const float* computed, const LayerDispatch& dispatch, float* sent) {
  const int hidden = model_.shape.hidden;
  float* received = received_.reserve(dispatch.rows_computed(), hidden);
  cpu::scatter_rows(received, computed, dispatch.rows.to_slots, hidden);
  communicator_.exchange({bytes(received), bytes_from_, bytes(sent), bytes_to_});
}

void RowExchange::find_experts(const ExpertsOf& experts, const RankDispatch& rows) {
  experts_.clear();
  for (std::size_t slot = 0; slot + 1 < rows.slot_offsets.size(); ++slot) {
    const std::int64_t first = rows.slot_offsets[slot];
    const std::int64_t of_slot = rows.slot_offsets[slot + 1] - first;
    if (of_slot == 0) continue;
    experts_.push_back(experts(SlotId{slot}));
    experts_.back().first_row = first;
    experts_.back().rows = of_slot;
  }
}

}  // namespace foremoe
