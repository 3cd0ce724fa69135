// Softmax attention over paged blocks, for single tokens and prompt chunks alike. The work is cut into pieces: of one
// sequence, one KV head or several, and up to kQueries of the rows * group queries that share a head. A piece goes over
// its keys once:
//
//     for each tile of 32 keys, at multiples of 32 positions, and each head:
//       scores    a lane is a key, a `dot` a step along head_dim       K: [D / w][P][w]
//       weights   2^(score - largest so far), in float32               (Milakov and Gimelshein 2018, online softmax)
//       mixed     a lane is a dim, a `dot` a step along the keys       V: [P / w][D][w]
//
// A query's sums run in an order given by absolute positions alone: not by its chunk, its batch or its neighbours, whose
// keys add exact zeros to it. Slots that no query of a piece sees are never used.
//
// Decoding reads each key once, so memory sets the pace. Blocks are scattered, and a CPU fetches ahead only within one:
// while a tile is computed, the next one is brought to the second-level cache, which has more requests in flight than the
// first. Tiles are short, so that requests come at an even pace, through the weights as well: those that come too close
// together are lost (measured on Zen 4: 7 GB/s without, 14 with tiles of 128 and none through the weights, 18 so).
#pragma once

#include <algorithm>

#include "linear.h"

namespace bifolio {

constexpr int kTile = 32;
constexpr int kQueries = kWide ? kRegisters / 2 : kRegisters - 1;  // that do not spill
static_assert(kQueries <= kLanes);

struct Attention {
  Rows q, out;
  Cache cache;
  const int32_t *first_rows, *lengths, *table;  // [sequences + 1], [sequences], [sequences, table_stride]
  int64_t sequences, table_stride;
  int64_t window;  // 0: none
  float scale;
  int32_t causal;
};

// What is brought to the cache while a tile is computed: K and V of some heads of some blocks, in the order in which they
// lie in memory, a line for each line that is used.
class Ahead {
 public:
  template <class T>
  void aim(const Cache &c, const int32_t *blocks, int64_t count, int64_t head, int64_t heads) {
    blocks_ = blocks, last_ = blocks + count, half_ = 0, line_ = stop_ = nullptr;
    base_ = reinterpret_cast<const char *>(block_of<T>(c, 0, 0, head));
    block_stride_ = c.block_stride * sizeof(T), kv_stride_ = c.kv_stride * sizeof(T);
    bytes_ = ((heads - 1) * c.head_stride + c.block_size * c.head_dim) * sizeof(T);
  }
  // The next so many lines, side by side, to be fetched one by one; `other` when there are no more.
  const char *take(int64_t lines, const void *other) {
    if (line_ >= stop_) {
      if (blocks_ == last_) return static_cast<const char *>(other);
      line_ = base_ + *blocks_ * block_stride_ + half_ * kv_stride_, stop_ = line_ + bytes_;
      blocks_ += half_, half_ ^= 1;
    }
    line_ = std::min(line_ + lines * 64, stop_);
    return line_ - lines * 64;
  }

 private:
  const int32_t *blocks_ = nullptr, *last_ = nullptr;
  int64_t half_ = 0, block_stride_ = 0, kv_stride_ = 0, bytes_ = 0;
  const char *base_ = nullptr, *line_ = nullptr, *stop_ = nullptr;
};

// A piece's keys.
template <class T>
struct Keys {
  const Attention &a;
  const int32_t *blocks;       // of the sequence
  int64_t begin, end;          // positions that some query sees
  T *tile_keys, *tile_values;  // a tile of a plain cache, packed; null: the cache is packed
};

// Up to sixteen keys that lie side by side in a block.
template <class T>
struct Span {
  const T *keys, *values;  // of the first key in its block
  int64_t size;            // positions of the block
  int64_t offset;          // of the first key in its word of V
  int64_t position;        // of the first key, in the tile
  int count;
};

// The keys low .. high - 1 of the tile at `tile`; returns how many spans they are.
template <class T>
static inline int spans_of(const Keys<T> &k, int64_t head, int64_t tile, int64_t low, int64_t high, Span<T> *spans) {
  const Cache &c = k.a.cache;
  constexpr int w = kWord<T>;
  int64_t size = k.tile_keys ? kTile : c.block_size;
  int n = 0;
  for (int64_t position = low; position < high;) {
    int64_t block = k.tile_keys ? tile / kTile : position / size, at = position - block * size;
    const T *keys = k.tile_keys ? k.tile_keys : block_of<T>(c, k.blocks[block], 0, head);
    const T *values = k.tile_keys ? k.tile_values : block_of<T>(c, k.blocks[block], 1, head);
    for (int64_t stop = std::min(high, (block + 1) * size); position < stop;) {
      int count = (int)std::min<int64_t>(kLanes, stop - position);
      spans[n++] = {keys + at * w, values + at / w * w * c.head_dim, size, at % w, position - tile, count};
      position += count, at += count;
    }
  }
  return n;
}

// The keys low .. high - 1 of a tile of a plain cache as one packed block of kTile positions, zeros elsewhere.
template <class T>
static void pack_tile(const Keys<T> &k, int64_t head, int64_t tile, int64_t low, int64_t high) {
  const Cache &c = k.a.cache;
  constexpr int w = kWord<T>;
  int64_t d = c.head_dim;
  std::fill_n(k.tile_keys, (d + w - 1) / w * w * kTile, T{});
  std::fill_n(k.tile_values, d * kTile, T{});
  for (int64_t position = low; position < high; position++) {
    int64_t block = k.blocks[position / c.block_size], at = position % c.block_size * d, i = position - tile;
    const T *keys = block_of<T>(c, block, 0, head) + at, *values = block_of<T>(c, block, 1, head) + at;
    for (int64_t j = 0; j < d; j++) k.tile_keys[(j / w * kTile + i) * w + j % w] = keys[j];
    for (int64_t j = 0; j < d; j++) k.tile_values[(i / w * d + j) * w + i % w] = values[j];
  }
}

// R queries' scores of one span's keys: of even and of odd groups of dims, and both together.
template <class T, int R>
static inline void score(const Operand<T> *q, int64_t width, const Span<T> &s, const char *ahead, Floats scale,
                         float (*scores)[kTile + kLanes]) {
  constexpr int w = kWord<T>;
  alignas(64) Floats sums[R][2];
  int64_t groups = width / w, pace = s.size * 4;
  auto keys = reinterpret_cast<const char *>(s.keys);
  alignas(64) uint32_t some[kMostHeadDim / w][kLanes];
  if (s.count < kLanes) {  // what follows is another block, or nothing
    for (int64_t g = 0; g < groups; g++) copy_words(some[g], s.keys + g * s.size * w, s.count);
    pace = 64, keys = reinterpret_cast<const char *>(some);
  }
  if constexpr (2 * R <= std::min(kRegisters, 16)) {  // together, as few sums would wait for each other
    multiply<T, R, 2, true>(sums[0], 2, nullptr, keys, 2 * pace, pace, q, 2 * w, width, w, groups / 2, ahead);
    int64_t last = groups - 1;
    if (groups % 2)
      multiply<T, R, 1, false>(sums[0], 2, kAsTheyAre, keys + last * pace, 0, 0, q + last * w, 0, width, 0, 1, ahead);
  } else {
    multiply<T, R, 1, true>(sums[0], 2, nullptr, keys, 2 * pace, 0, q, 2 * w, width, 0, (groups + 1) / 2, ahead);
    ahead += (groups + 1) / 2 * 64;
    multiply<T, R, 1, true>(sums[0] + 1, 2, nullptr, keys + pace, 2 * pace, 0, q + w, 2 * w, width, 0, groups / 2, ahead);
  }
  for (int r = 0; r < R; r++) store(scores[r] + s.position, (sums[r][0] + sums[r][1]) * scale);
}

// R queries' weighted values of one span, J vectors of dims of which `lanes` are there, added to what is kept of `out`.
template <class T, int R, int J>
static inline void mix(const Span<T> &s, int64_t column, int64_t lanes, const char *ahead, int64_t head_dim,
                       const Operand<T> (*weights)[kTile + kLanes], const float *keep, float (*out)[kMostHeadDim]) {
  constexpr int w = kWord<T>;
  auto add = [&](int key, const void *words, int64_t pace, int64_t count) {
    multiply<T, R, J, true>(reinterpret_cast<Floats *>(out[0] + column), kMostHeadDim / kLanes, keep, (const char *)words,
                            pace, 64, weights[0] + s.position + key, w, kTile + kLanes, 0, count, ahead);
    keep = kAsTheyAre;
  };
  auto add_some = [&](int key, const T *values, uint32_t used) {  // of a word's keys, or of a vector's dims
    alignas(64) uint32_t words[J * kLanes];
    copy_words(words, values, std::min<int64_t>(lanes, J * kLanes));
    for (uint32_t &word : words) word &= used;
    add(key, words, 0, 1);
  };
  const T *values = s.values + column * w;
  int key = 0;
  if (w > 1 && s.offset) {  // the first word begins with a key before the span
    add_some(-1, values, 0xffff0000u);
    key = 1, values += head_dim * w;
  }
  int whole = lanes < J * kLanes ? 0 : (s.count - key) / w;
  add(key, values, head_dim * 4, whole);
  key += whole * w, values += whole * head_dim * w;
  for (; key < s.count; key += w, values += head_dim * w)  // the last may end with a key after the span
    add_some(key, values, key + w > s.count ? 0x0000ffffu : ~0u);
}

// R queries of one KV head on their way over the keys.
template <class T, int R>
struct Queries {
  alignas(64) Operand<T> q[R * kMostHeadDim];
  alignas(64) float out[R][kMostHeadDim];
  alignas(64) float top[kLanes], total[kLanes];  // a lane is a query
  int64_t from[R], to[R];  // the keys a query sees
};

// The weights of a tile's keys first .. last - 1, from their scores; fade: what the sums so far are worth beside them.
template <class T, int R>
static void weigh(int64_t tile, int first, int last, Ahead &ahead, Queries<T, R> &x, float (*scores)[kTile + kLanes],
                  Operand<T> (*weights)[kTile + kLanes], float *fade) {
  alignas(64) float top[kLanes] = {}, base[kLanes] = {}, sums[kLanes] = {};
  auto for_keys = [&](int lines, auto f) {  // fetches so many for each vector of keys
    const char *line = ahead.take((last - first + kLanes - 1) / kLanes * lines, scores);
    for (int i = first; i < last; i += kLanes) {
      for (int j = 0; j < lines; j++, line += 64) fetch(line);
      f(i);
    }
  };
  for (int r = 0; r < R; r++) {
    int see = (int)(std::max(x.from[r], tile) - tile), until = (int)(std::min(x.to[r], tile + kTile) - tile);
    Floats most = all(-INFINITY);
    for_keys(1, [&](int i) {
      Floats s = load(scores[r] + i);
      if (i < see || i + kLanes > until)
        store(scores[r] + i, s = within(s, lane_numbers(), see - i, until - i, -INFINITY));
      most = max(most, s);
    });
    top[r] = std::max(x.top[r], largest(most)), base[r] = top[r] == -INFINITY ? 0.f : top[r];
  }
  for (int r = 0; r < R; r++) {
    Floats part = {};
    for_keys(2, [&](int i) {
      Floats e = exp2(load(scores[r] + i) - all(base[r]));
      store_operands<T>(weights[r] + i, e), part = part + e;
    });
    sums[r] = sum(part);
  }
  Floats faded = memcmp(top, x.top, sizeof top) ? exp2(load(x.top) - load(base)) : all(1.f);
  store(fade, faded), store(x.top, load(top)), store(x.total, load(x.total) * faded + load(sums));
}

// One tile for R queries of one head.
template <class T, int R>
static void attend_tile(const Keys<T> &k, int64_t head, int64_t tile, Ahead &ahead, Queries<T, R> &x) {
  constexpr int w = kWord<T>, J = std::clamp(kRegisters / R, 1, 4);
  alignas(64) float scores[R][kTile + kLanes], fade[kLanes];
  alignas(64) Operand<T> weights[R][kTile + kLanes];
  int64_t d = k.a.cache.head_dim, width = (d + w - 1) / w * w;
  int64_t low = std::max(k.begin, tile), high = std::min<int64_t>(k.end, tile + kTile);
  if (k.tile_keys) pack_tile(k, head, tile, low, high);
  Floats scale = all(k.a.scale * kLog2E);
  Span<T> spans[kTile];
  int n = spans_of(k, head, tile, low, high, spans);
  for (int i = 0; i < n; i++) score<T, R>(x.q, width, spans[i], ahead.take(width / w, spans[i].keys), scale, scores);
  weigh(tile, (int)((low - tile) / kLanes * kLanes), (int)(high - tile), ahead, x, scores, weights, fade);
  for (int64_t column = 0; column < d;) {
    auto columns = [&](auto many) {
      for (int i = 0; i < n; i++) {
        const char *line = ahead.take(spans[i].count / w * many(), spans[i].values + column * w);
        mix<T, R, many()>(spans[i], column, d - column, line, d, weights, i ? kAsTheyAre : fade, x.out);
      }
      column += many() * kLanes;
    };
    if (column + J * kLanes <= d) columns(std::integral_constant<int, J>{});
    else columns(std::integral_constant<int, 1>{});
  }
}

struct Piece {
  int64_t sequence, head, heads, first;  // `queries` queries from `first` on, of `heads` heads from `head` on
  int queries;
};

template <class T, int R>
static void attend(const Attention &a, const Piece &p, const Piece *next) {
  constexpr int w = kWord<T>;
  static thread_local Buffer packed, states;
  int64_t d = a.cache.head_dim, width = (d + w - 1) / w * w, group = a.q.heads / a.cache.kv_heads;
  int64_t row = a.first_rows[p.sequence], rows = a.first_rows[p.sequence + 1] - row, keys = a.lengths[p.sequence];
  Keys<T> k{a, a.table + p.sequence * a.table_stride, keys, 0, nullptr, nullptr};
  if (!a.cache.packed) k.tile_keys = packed.of<T>((width + d) * kTile), k.tile_values = k.tile_keys + width * kTile;

  auto *x = states.of<Queries<T, R>>(p.heads);
  auto place = [&](const Rows &rows, int64_t h, int r) {  // of query r of head h
    return (T *)rows.data + (row + (p.first + r) / group) * rows.stride + ((p.head + h) * group + (p.first + r) % group) * d;
  };
  for (int64_t h = 0; h < p.heads; h++) {
    store(x[h].top, all(-INFINITY)), store(x[h].total, Floats{});
    for (int r = 0; r < R; r++) {
      to_operands(place(a.q, h, r), d, width, x[h].q + r * width);
      std::fill_n(x[h].out[r], kMostHeadDim, 0.f);
      int64_t position = keys - rows + (p.first + r) / group;
      x[h].to[r] = a.causal ? std::max<int64_t>(0, position + 1) : keys;
      x[h].from[r] = a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0;
      k.begin = std::min(k.begin, x[h].from[r]), k.end = std::max(k.end, x[h].to[r]);
    }
  }
  Ahead ahead;
  int64_t size = a.cache.block_size;
  auto aim = [&](int64_t sequence, int64_t from, int64_t to, int64_t head, int64_t heads) {
    int64_t first = from / size, stop = (std::min<int64_t>(to, a.lengths[sequence]) + size - 1) / size;
    ahead.aim<T>(a.cache, a.table + sequence * a.table_stride + first, std::max<int64_t>(0, stop - first), head, heads);
  };
  for (int64_t tile = k.begin / kTile * kTile; tile < k.end; tile += kTile) {
    if (tile + kTile < k.end) aim(p.sequence, tile + kTile, tile + 2 * kTile, p.head, p.heads);
    else if (next) aim(next->sequence, 0, kTile, next->head, next->heads);
    for (int64_t h = 0; h < p.heads; h++) attend_tile(k, p.head + h, tile, ahead, x[h]);
  }
  for (int64_t h = 0; h < p.heads; h++)
    for (int r = 0; r < R; r++) {
      Floats share = all(x[h].total[r] == 0.f ? 1.f : x[h].total[r]);
      T *y = place(a.out, h, r);
      for_vectors(d, [&](int64_t i, int n) { store_some(y + i, load(x[h].out[r] + i) / share, n); });
    }
}
template <class T, int R = kQueries>
static void attend_some(const Attention &a, const Piece &p, const Piece *next) {
  if constexpr (R > 1)
    if (p.queries < R) return attend_some<T, R - 1>(a, p, next);
  attend<T, R>(a, p, next);
}

// Long pieces of many queries find their keys in the cache, head by head; those of a single token read all heads of a
// block together, as they lie in memory.
template <class T>
static void paged_attention(const Attention &a, int threads) {
  static thread_local Buffer list;
  int64_t kv_heads = a.cache.kv_heads, group = a.q.heads / kv_heads, most = 0;
  auto parts_of = [&](int64_t s) { return ((a.first_rows[s + 1] - a.first_rows[s]) * group + kQueries - 1) / kQueries; };
  for (int64_t s = 0; s < a.sequences; s++) most += parts_of(s) * kv_heads;
  Piece *pieces = list.of<Piece>(most);
  int64_t count = 0;
  for (int64_t s = 0; s < a.sequences; s++) {
    int64_t queries = (a.first_rows[s + 1] - a.first_rows[s]) * group, parts = parts_of(s);
    int64_t heads = parts > 1 || a.sequences < threads ? 1 : kv_heads;
    for (int64_t head = 0; head < kv_heads; head += heads)
      for (int64_t i = 0; i < parts; i++) {  // of equal sizes, or nearly
        int64_t first = queries * i / parts;
        pieces[count++] = {s, head, heads, first, (int)(queries * (i + 1) / parts - first)};
      }
  }
  parallel(threads, count, [&](int64_t i) {
    attend_some<T>(a, pieces[i], i + threads < count ? &pieces[i + threads] : nullptr);
  });
}

}  // namespace bifolio
