// x weight^T + bias, for few rows as for many. Weights are packed once: panels of 48 outputs, three vectors, in each the
// inputs in ascending order, of each group of kWord<T> inputs one word per output. Where many rows of a whole panel are
// computed together its vectors lie side by side, elsewhere one after the other: as they are read, in each case.
//
//     side by side         |in 0-1: w[48p], w[48p+1] .. w[48p+47]|in 2-3: w[48p] ..   (bfloat16: two inputs a word)
//     one after the other  |in 0-1: w[48p] .. w[48p+15]|in 2-3: w[48p] ..|            |in 0-1: w[48p+16] ..
//
// Every output is one chain of `dot` over its inputs, ascending. How many rows are computed together, in how many
// threads and with which panel beside it makes no difference to a row's bits.
#pragma once

#include <algorithm>
#include <cfloat>

#include "small.h"

namespace bifolio {

constexpr int kColumns = 3;  // vectors of a panel
constexpr int kPanel = kColumns * kLanes;
constexpr bool kWide = kRegisters >= 8 * kColumns;  // room for many rows of a whole panel at once
constexpr int kRows = kWide ? kRegisters / kColumns : kRegisters - 1;  // computed together: those that do not spill
constexpr int64_t kNextGroup = kWide ? kPanel * 4 : 64;
static inline int64_t vector_at(int column, int64_t groups) { return kWide ? column * 64 : column * groups * 64; }
constexpr int64_t kPanelBytes = 384 << 10;    // of a panel are read for all rows before the next part: L2 holds it

// What a linear layer is, and what the caller fills.
struct Linear {
  const void *weight;  // packed: float, bf16, or bytes of the whole number + 128
  const float *bias;   // [outputs], or null
  const float *scale;  // int8: [outputs], what a weight is multiplied by
  int64_t inputs, outputs;
  int32_t type;  // of the weights, as in `Type`
};
enum Type : int32_t { kFloat32, kBfloat16, kInt8 };

template <class T>
static int64_t packed_groups(int64_t inputs) {
  return (inputs + kWord<T> - 1) / kWord<T>;
}

// weight [outputs, inputs] to `packed`: ceil(outputs / 48) panels of groups * 48 words, zeros where there is nothing.
// int8 comes as the whole number + 128, as `dot` takes it; what stands for nothing there meets activations of 0.
template <class T>
static void pack(const T *weight, int64_t inputs, int64_t outputs, T *packed) {
  int64_t groups = packed_groups<T>(inputs), panels = (outputs + kPanel - 1) / kPanel;
  constexpr int w = kWord<T>;
  for (int64_t p = 0; p < panels; p++)
    for (int64_t g = 0; g < groups; g++)
      for (int64_t n = 0; n < kPanel; n++)
        for (int64_t i = 0; i < w; i++) {
          int64_t output = p * kPanel + n, input = g * w + i;
          bool there = output < outputs && input < inputs;
          int64_t at = p * groups * kPanel * 4 + vector_at(n / kLanes, groups) + g * kNextGroup + n % kLanes * 4;
          packed[at / sizeof(T) + i] = there ? weight[output * inputs + input] : T{};
        }
}

// M rows of x times `count` groups of C vectors, from where they point. Rows enough for one vector compute for as long as
// memory takes: it brings the next vector meanwhile.
template <class T, int M, int C, class A>
static inline void part_of(A *sums, const float *keep, const char *words, int64_t groups, const Operand<T> *x, int64_t stride,
                           int64_t count) {
  int64_t next = vector_at(1, groups);
  multiply<T, M, C, C == 1>(sums, kColumns, keep, words, kNextGroup, next, x, kWord<T>, stride, 0, count, words + next);
}

// f(first row, constant of how many, first vector, constant of how many) for the tiles that rows and a panel are cut into,
// rows evenly. Few rows meet all vectors at once, so that sums do not wait for each other; elsewhere a vector's words are
// used by as many rows as there are registers, and by all rows before the next vector's.
template <int M, class F>
static inline void with_rows(int rows, const F &f) {
  if constexpr (M > 1)
    if (rows < M) return with_rows<M - 1>(rows, f);
  f(std::integral_constant<int, M>{});
}
template <class F>
static inline void for_tiles(int64_t rows, const F &f) {
  constexpr int few = kRegisters / kColumns;
  int64_t tiles = (rows + kRows - 1) / kRows;
  for (int column = 0; column < kColumns; column++)
    for (int64_t i = 0; i < tiles; i++) {
      int64_t first = rows * i / tiles;
      int here = (int)(rows * (i + 1) / tiles - first);
      if (!kWide && rows > few)
        with_rows<kRows>(here, [&](auto many) { f(first, many, column, std::integral_constant<int, 1>{}); });
      else if (column == 0)
        with_rows<few>(here, [&](auto many) { f(first, many, 0, std::integral_constant<int, kColumns>{}); });
    }
}

// One panel for all rows; `finish` turns the accumulated row t, vector c of the panel, into what is stored.
template <class T, class F>
static void panel(const Operand<T> *x, int64_t stride, int64_t rows, const char *words, int64_t groups, const F &finish) {
  static thread_local Buffer sums;
  int64_t part = kPanelBytes / (kPanel * 4), parts = (groups + part - 1) / part;
  Floats *partial = sums.of<Floats>((parts > 1 ? rows : kRows) * kColumns);
  for (int64_t begin = 0; begin < groups; begin += part) {
    int64_t count = begin + part < groups ? part : groups - begin;
    for_tiles(rows, [&](int64_t t, auto many, int column, auto across) {
      Floats *p = partial + (parts > 1 ? t * kColumns : 0) + column;
      part_of<T, many(), across()>(p, begin ? kAsTheyAre : nullptr, words + vector_at(column, groups) + begin * kNextGroup,
                                   groups, x + t * stride + begin * kWord<T>, stride, count);
      if (begin + count < groups) return;
      for (int m = 0; m < many(); m++)
        for (int c = 0; c < across(); c++) finish(t + m, column + c, p[m * kColumns + c]);
    });
  }
}

template <class Y>
static inline void finish_row(const Linear &l, Y *y, int64_t stride, int64_t row, int64_t column, Floats value) {
  int n = l.outputs - column < kLanes ? (int)(l.outputs - column) : kLanes;
  if (n <= 0) return;
  if (l.bias) value = value + load_some(l.bias + column, n);
  store_some(y + row * stride + column, value, n);
}

// y [rows, outputs] of x [rows, inputs], both with rows at their strides. x's type is the weights'.
template <class T, class Y>
static void linear(const Linear &l, const T *x, int64_t x_stride, Y *y, int64_t y_stride, int64_t rows, int threads) {
  static thread_local Buffer prepared;
  int64_t groups = packed_groups<T>(l.inputs), panels = (l.outputs + kPanel - 1) / kPanel, width = groups * kWord<T>;
  auto *ready = reinterpret_cast<const Operand<T> *>(x);
  if (!std::is_same_v<T, Operand<T>> || width != l.inputs) {  // what follows a row in memory may be NaN, or nothing
    auto *rows_of = prepared.of<Operand<T>>(rows * width);
    for_rows(threads, rows, [&](int64_t t) { to_operands(x + t * x_stride, l.inputs, width, rows_of + t * width); });
    ready = rows_of, x_stride = width;
  }
  auto weight = static_cast<const char *>(l.weight);
  parallel(threads, panels, [&](int64_t p) {
    panel<T>(ready, x_stride, rows, weight + p * groups * kPanel * 4, groups, [&](int64_t row, int c, const Floats &value) {
      finish_row(l, y, y_stride, row, p * kPanel + c * kLanes, value);
    });
  });
}

// The same with int8 weights. Each row of x is rounded in groups of 64 inputs, to whole multiples of the group's largest
// value / 127: so it does not depend on its batch, and one large value costs its neighbours little. Sums within a group
// are of integers, hence exact; the groups' are fused float32, ascending.
constexpr int64_t kScaled = 64;

struct Quantized {
  Operand<int8_t> *whole;  // [rows, width]
  float *step;    // [rows, groups of 64]
  int32_t *sum;   // the same: 128 times the group's whole numbers, which the weights' + 128 adds to each output
  int64_t width, groups;
};

template <class T>
static void quantize(const T *x, int64_t inputs, int64_t row, const Quantized &q) {
  for (int64_t g = 0; g < q.groups; g++) {
    const T *from = x + g * kScaled;
    int64_t count = std::min(kScaled, inputs - g * kScaled), room = std::min(kScaled, q.width - g * kScaled);
    Floats top = {};
    for_vectors(count, [&](int64_t i, int n) { top = max(top, absolute(load_some(from + i, n))); });
    float step = largest(top) / 127.f;
    Floats inverse = all(step >= FLT_MIN ? 1.f / step : 0.f);  // of smaller ones it is no number
    int32_t sum = 0;
    for_vectors(room, [&](int64_t i, int n) {
      Floats v = i < count ? load_some(from + i, (int)std::min<int64_t>(kLanes, count - i)) : Floats{};
      v = fma(v, inverse, all(12582912.f));  // 1.5 * 2^23: the nearest whole number ends in the low byte
      int32_t bits[kLanes];
      memcpy(bits, &v, sizeof bits);
      for (int j = 0; j < n; j++)
        sum += q.whole[row * q.width + g * kScaled + i + j / 4 * 4 + operand_at<int8_t>(j % 4)] = (int8_t)bits[j];
    });
    q.step[row * q.groups + g] = step, q.sum[row * q.groups + g] = 128 * sum;
  }
}

// M rows times C vectors of one panel.
template <int M, int C>
static inline void multiply_int8(const Quantized &q, int64_t row, const char *words, Floats *total) {
  for (int i = 0; i < M * kColumns; i++) total[i] = {};
  for (int64_t g = 0; g < q.groups; g++) {
    Ints acc[M * kColumns];
    int64_t begin = g * kScaled, count = std::min(kScaled, q.width - begin) / 4;
    const char *from = words + begin / 4 * kNextGroup;
    part_of<int8_t, M, C>(acc, nullptr, from, q.width / 4, q.whole + row * q.width + begin, q.width, count);
    for (int m = 0; m < M; m++) {
      int64_t at = (row + m) * q.groups + g;
      for (int c = 0; c < C; c++) {
        Floats &to = total[m * kColumns + c];
        to = fma(to_floats(acc[m * kColumns + c], q.sum[at]), all(q.step[at]), to);
      }
    }
  }
}

template <class T, class Y>
static void linear_int8(const Linear &l, const T *x, int64_t x_stride, Y *y, int64_t y_stride, int64_t rows,
                        int threads) {
  static thread_local Buffer wholes, steps, sums;
  int64_t width = packed_groups<int8_t>(l.inputs) * 4, groups = (width + kScaled - 1) / kScaled;
  Quantized q{wholes.of<Operand<int8_t>>(rows * width), steps.of<float>(rows * groups), sums.of<int32_t>(rows * groups), width, groups};
  for_rows(threads, rows, [&](int64_t t) { quantize(x + t * x_stride, l.inputs, t, q); });
  auto weight = static_cast<const char *>(l.weight);
  parallel(threads, (l.outputs + kPanel - 1) / kPanel, [&](int64_t p) {
    for_tiles(rows, [&](int64_t t, auto many, int column, auto across) {
      Floats total[many() * kColumns];
      multiply_int8<many(), across()>(q, t, weight + p * width * kPanel + vector_at(column, width / 4), total);
      for (int m = 0; m < many(); m++)
        for (int c = 0; c < across(); c++) {
          int64_t output = p * kPanel + (column + c) * kLanes;
          int n = (int)std::min<int64_t>(kLanes, l.outputs - output);
          if (n > 0) finish_row(l, y, y_stride, t + m, output, total[m * kColumns + c] * load_some(l.scale + output, n));
        }
    });
  });
}

// Whatever the weights are.
template <class T, class Y>
static void apply(const Linear &l, const T *x, int64_t x_stride, Y *y, int64_t y_stride, int64_t rows, int threads) {
  if (l.type == kInt8) linear_int8(l, x, x_stride, y, y_stride, rows, threads);
  else linear(l, x, x_stride, y, y_stride, rows, threads);
}

}  // namespace bifolio
