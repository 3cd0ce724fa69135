// One layer of a replica's KV cache, and where in it a number lies.
//
//     packed, w = kWord<T>:   K of a head in a block [D / w][P][w]     V [P / w][D][w]
//     plain:                  K [P][D]                                 V [P][D]
#pragma once

#include "words.h"

namespace bifolio {

constexpr int64_t kMostHeadDim = 256;

struct Cache {
  void *data;
  int64_t block_stride, kv_stride, head_stride;  // in elements
  int64_t kv_heads, block_size, head_dim;
  int32_t packed;
};

template <class T>
static inline T *block_of(const Cache &c, int64_t block, int64_t kv, int64_t head) {
  return static_cast<T *>(c.data) + block * c.block_stride + kv * c.kv_stride + head * c.head_stride;
}

template <class T>
static inline void write_slot(const Cache &c, int64_t head, int64_t slot, const T *k, const T *v) {
  constexpr int w = kWord<T>;
  int64_t block = slot / c.block_size, at = slot % c.block_size, d = c.head_dim;
  T *keys = block_of<T>(c, block, 0, head), *values = block_of<T>(c, block, 1, head);
  if (!c.packed) {
    memcpy(keys + at * d, k, d * sizeof(T));
    memcpy(values + at * d, v, d * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < d; i += w) memcpy(keys + (i / w * c.block_size + at) * w, k + i, 4);
  for (int64_t i = 0; i < d; i++) values[(at / w * d + i) * w + at % w] = v[i];
}

}  // namespace bifolio
