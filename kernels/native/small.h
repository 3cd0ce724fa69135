// Norm, activation, and RoPE with the cache write: row by row, each row in one order.
#pragma once

#include "cache.h"
#include "parallel.h"

namespace bifolio {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int64_t kRowsAThread = 8;  // fewer are not worth waking another thread

template <class F>
static void for_rows(int threads, int64_t rows, const F &f) {
  int64_t pieces = (rows + kRowsAThread - 1) / kRowsAThread;
  parallel(threads, pieces, [&](int64_t piece) {
    int64_t end = (piece + 1) * kRowsAThread;
    for (int64_t t = piece * kRowsAThread; t < (end < rows ? end : rows); t++) f(t);
  });
}
// f(first lane's index, lanes) for the vectors of n numbers.
template <class F>
static inline void for_vectors(int64_t n, const F &f) {
  for (int64_t i = 0; i < n; i += kLanes) f(i, n - i < kLanes ? (int)(n - i) : kLanes);
}

// One row: sum = x + residual where there is one, rounded to T and kept in `residual`; out = sum normed.
template <class T>
static inline void norm_row(const T *x, T *residual, const T *weight, float eps, int64_t width, T *out) {
  Floats squares = {};
  for_vectors(width, [&](int64_t i, int n) {
    Floats v = load_some(x + i, n);
    if (residual) {
      store_some(residual + i, v + load_some(residual + i, n), n);
      v = load_some(residual + i, n);
    }
    squares = fma(v, v, squares);
  });
  const T *from = residual ? residual : x;
  Floats scale = all(1.f / std::sqrt(sum(squares) / (float)width + eps));
  for_vectors(width, [&](int64_t i, int n) {
    store_some(out + i, load_some(from + i, n) * scale * load_some(weight + i, n), n);
  });
}
template <class T>
static void rms_norm(const T *x, T *residual, const T *weight, float eps, int64_t rows, int64_t width, T *out,
                     int threads) {
  for_rows(threads, rows, [&](int64_t t) {
    norm_row(x + t * width, residual ? residual + t * width : nullptr, weight, eps, width, out + t * width);
  });
}

// silu(gate) * up of [rows, 2 * width], gate in the first half.
template <class T>
static void silu_mul(const T *gate_up, int64_t rows, int64_t width, T *out, int threads) {
  for_rows(threads, rows, [&](int64_t t) {
    const T *gate = gate_up + t * 2 * width, *up = gate + width;
    for_vectors(width, [&](int64_t i, int n) {
      Floats g = load_some(gate + i, n);
      Floats sigmoid = all(1.f) / (all(1.f) + exp2(g * all(-kLog2E)));
      store_some(out + t * width + i, g * sigmoid * load_some(up + i, n), n);
    });
  });
}

// x cos + rotate_half(x) sin: pairs (i, i + D / 2).
template <class T>
static inline void rotate(const T *x, const float *cos, const float *sin, int64_t head_dim, T *out) {
  int64_t half = head_dim / 2;
  for_vectors(half, [&](int64_t i, int n) {
    Floats a = load_some(x + i, n), b = load_some(x + half + i, n), c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, a * c - b * s, n);
    store_some(out + half + i, b * c + a * s, n);
  });
}

struct Rows {  // [rows, heads, D] with rows at a stride, heads side by side
  void *data;
  int64_t stride, heads;
};

// q is rotated into `out`, k and v go to the cache at `slots`. `out` may be q.
template <class T>
static void rope_and_write(const Rows &q, const Rows &k, const Rows &v, const float *cos, const float *sin,
                           const int64_t *positions, const int64_t *slots, int64_t rows, const Cache &cache,
                           const Rows &out, int threads) {
  int64_t d = cache.head_dim;
  for_rows(threads, rows, [&](int64_t t) {
    const float *c = cos + positions[t] * d, *s = sin + positions[t] * d;
    for (int64_t h = 0; h < q.heads; h++)
      rotate((const T *)q.data + t * q.stride + h * d, c, s, d, (T *)out.data + t * out.stride + h * d);
    if (slots[t] < 0) return;
    T rotated[kMostHeadDim];
    for (int64_t h = 0; h < k.heads; h++) {
      rotate((const T *)k.data + t * k.stride + h * d, c, s, d, rotated);
      write_slot(cache, h, slots[t], rotated, (const T *)v.data + t * v.stride + h * d);
    }
  });
}

}  // namespace bifolio
