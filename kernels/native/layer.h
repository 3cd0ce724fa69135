// One decoder layer for all rows of a step: the call that the decode hot path makes once per layer.
#pragma once

#include "attention.h"
#include "linear.h"

namespace bifolio {

struct Layer {
  const void *attention_norm, *mlp_norm;  // [hidden]
  const void *q_norm, *k_norm;            // [D] each, or null
  Linear qkv, o, gate_up, down;
  int64_t window;  // 0: none
  float eps;
};

struct Step {
  const float *cos, *sin;             // [positions, D]
  const int64_t *positions, *slots;   // [rows]
  const int32_t *first_rows, *lengths, *table;
  int64_t rows, sequences, table_stride;
};

// residual += x, then x = what the layer adds to it next. x and residual are [rows, hidden], contiguous.
template <class T>
static void layer(const Layer &l, const Step &s, const Cache &cache, T *x, T *residual, int threads) {
  static thread_local Buffer normed_, qkv_, mixed_, gate_up_, hidden_;
  int64_t rows = s.rows, width = l.qkv.inputs, d = cache.head_dim, inner = l.down.inputs;
  int64_t heads = l.o.inputs / d, all_heads = heads + 2 * cache.kv_heads, stride = all_heads * d;
  T *normed = normed_.of<T>(rows * width), *qkv = qkv_.of<T>(rows * stride), *mixed = mixed_.of<T>(rows * heads * d);
  T *gate_up = gate_up_.of<T>(rows * 2 * inner), *hidden = hidden_.of<T>(rows * inner);

  rms_norm(x, residual, (const T *)l.attention_norm, l.eps, rows, width, normed, threads);
  apply(l.qkv, normed, width, qkv, stride, rows, threads);
  if (l.q_norm)
    for_rows(threads, rows, [&](int64_t t) {
      for (int64_t h = 0; h < heads + cache.kv_heads; h++) {
        T *head = qkv + t * stride + h * d;
        norm_row(head, (T *)nullptr, (const T *)(h < heads ? l.q_norm : l.k_norm), l.eps, d, head);
      }
    });
  Rows q{qkv, stride, heads}, k{qkv + heads * d, stride, cache.kv_heads};
  Rows v{qkv + (heads + cache.kv_heads) * d, stride, cache.kv_heads}, out{mixed, heads * d, heads};
  rope_and_write<T>(q, k, v, s.cos, s.sin, s.positions, s.slots, rows, cache, q, threads);
  Attention a{q, out, cache, s.first_rows, s.lengths, s.table, s.sequences, s.table_stride, l.window,
              1.f / std::sqrt((float)d), 1};
  paged_attention<T>(a, threads);
  apply(l.o, mixed, heads * d, x, width, rows, threads);
  rms_norm(x, residual, (const T *)l.mlp_norm, l.eps, rows, width, normed, threads);
  apply(l.gate_up, normed, width, gate_up, 2 * inner, rows, threads);
  silu_mul(gate_up, rows, inner, hidden, threads);
  apply(l.down, hidden, inner, x, width, rows, threads);
}

}  // namespace bifolio
