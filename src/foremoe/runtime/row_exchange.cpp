#include "foremoe/runtime/row_exchange.h"

#include "foremoe/core/timeline.h"

namespace foremoe {
namespace {

const std::byte* bytes(const float* x) { return reinterpret_cast<const std::byte*>(x); }
std::byte* bytes(float* x) { return reinterpret_cast<std::byte*>(x); }

void row_bytes(std::span<const std::int64_t> rows, int width, std::vector<std::int64_t>& out) {
  out.clear();
  for (const std::int64_t n : rows) out.push_back(n * width * static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace

float* RowMatrix::reserve(Device& device, std::int64_t rows, int width) {
  const Bytes need{rows * width * static_cast<std::int64_t>(sizeof(float))};
  if (memory_.bytes() < need) {
    memory_ = {};  // the old one first: both need not fit
    memory_ = device.allocate(need);
  }
  return memory_.floats();
}

void RowExchange::reserve(std::int64_t rows_sent, std::int64_t rows_computed) {
  sent_.reserve(device_, rows_sent, shape_.hidden);
  for (RowMatrix* matrix : {&received_, &computed_, &computed_gradient_}) {
    matrix->reserve(device_, rows_computed, shape_.hidden);
  }
  device_.reserve_rows(rows_computed, shape_);
}

void RowExchange::forward(const ExpertsOf& experts, const float* x, const float* weight, float* y, ForwardRows& rows) {
  const LayerDispatch& dispatch = rows.dispatch;
  const int hidden = shape_.hidden;
  float* sent = sent_.reserve(device_, dispatch.rows_sent(), hidden);
  float* x_rows = rows.x.reserve(device_, dispatch.rows_computed(), hidden);
  float* gate_up = rows.gate_up.reserve(device_, dispatch.rows_computed(), 2 * shape_.intermediate);
  float* y_rows = computed_.reserve(device_, dispatch.rows_computed(), hidden);
  float* returned = rows.returned.reserve(device_, dispatch.rows_sent(), hidden);

  device_.gather_rows(sent, x, dispatch.token_of_sent_row, hidden);
  to_experts(sent, dispatch, x_rows);
  find_experts(experts, dispatch);
  const double begin = thread_cpu_seconds();
  device_.experts_forward(experts_, shape_, x_rows, gate_up, y_rows);
  compute_cpu_seconds_ += thread_cpu_seconds() - begin;
  from_experts(y_rows, dispatch, returned);
  device_.combine(y, returned, weight, dispatch.sent_row, top_k_, hidden);
}

void RowExchange::backward(const ExpertsOf& experts, const float* dy, const float* weight, float* dx, float* d_weight,
                           const ForwardRows& rows) {
  const LayerDispatch& dispatch = rows.dispatch;
  const int hidden = shape_.hidden;
  float* sent = sent_.reserve(device_, dispatch.rows_sent(), hidden);
  float* dy_rows = computed_.reserve(device_, dispatch.rows_computed(), hidden);
  float* dx_rows = computed_gradient_.reserve(device_, dispatch.rows_computed(), hidden);

  device_.combine_backward(sent, d_weight, dy, rows.returned.data(), weight, dispatch.sent_row, top_k_, hidden);
  to_experts(sent, dispatch, dy_rows);
  find_experts(experts, dispatch);
  const double begin = thread_cpu_seconds();
  device_.experts_backward(experts_, shape_, rows.x.data(), rows.gate_up.data(), dy_rows, dx_rows);
  compute_cpu_seconds_ += thread_cpu_seconds() - begin;
  from_experts(dx_rows, dispatch, sent);
  device_.add_rows(dx, sent, dispatch.sent_row, top_k_, hidden);
}

void RowExchange::to_experts(const float* sent, const LayerDispatch& dispatch, float* computed) {
  row_bytes(dispatch.rows_to, shape_.hidden, bytes_to_);
  row_bytes(dispatch.rows_from, shape_.hidden, bytes_from_);
  float* received = received_.reserve(device_, dispatch.rows_computed(), shape_.hidden);
  communicator_.all_to_all_v({bytes(sent), bytes_to_, bytes(received), bytes_from_}, device_.stream());
  device_.gather_rows(computed, received, dispatch.received_row, shape_.hidden);
}

void RowExchange::from_experts(const float* computed, const LayerDispatch& dispatch, float* sent) {
  float* received = received_.reserve(device_, dispatch.rows_computed(), shape_.hidden);
  device_.scatter_rows(received, computed, dispatch.received_row, shape_.hidden);
  communicator_.all_to_all_v({bytes(received), bytes_from_, bytes(sent), bytes_to_}, device_.stream());
}

void RowExchange::find_experts(const ExpertsOf& experts, const LayerDispatch& dispatch) {
  experts_.clear();
  for (const ComputedExpert& expert : dispatch.experts) {
    experts_.push_back(experts(expert));
    experts_.back().first_row = expert.first_row;
    experts_.back().rows = expert.rows;
  }
}

}  // namespace foremoe
