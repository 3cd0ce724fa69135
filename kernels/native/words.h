// What the kernels live on: `dots`, of packed numbers with what they meet.
//
// Weights and caches are packed so that one 32-bit lane holds kWord<T> numbers of one output: acc[lane] += sum over i of
// words[lane][i] * operands[i], i ascending. Its bfloat16 rounding is the CPU's own.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace bifolio {

template <class T>
constexpr int kWord = 4 / sizeof(T);  // numbers in one 32-bit lane

// Sixteen packed words of weights or cache.
struct Words {
  WordPart part[kParts];
};
static inline Words load_words(const void *from) {
  Words r;
  EACH(memcpy(&r.part[i], (const char *)from + i * kPart, kPart))
  return r;
}
// The first n of sixteen or more words, and zeros.
template <size_t N>
static inline void copy_words(uint32_t (&to)[N], const void *from, int64_t n) {
  memset(to, 0, sizeof to), memcpy(to, from, n * 4);
}
template <class T>
static inline uint32_t word_at(const T *group) {
  uint32_t r;
  memcpy(&r, group, 4);
  return r;
}

// A word's numbers meet their operands in so many steps; step S takes what `kPerStep` operands it needs.
//
//     float32    1 step of 1 operand
//     bfloat16   AVX-512: 1 step of 2, in the CPU's own rounding; elsewhere 2 steps of 1, widened
//     int8       AVX-512: 1 step of 4; AVX2: 2 steps of 2, of 16 bits; elsewhere 1 step of 4
//
// `Operand` is what the other side is kept in, made once and read many times.
#if defined(__AVX512BF16__)
template <class T>
using Operand = T;
template <class T>
constexpr int kSteps = 1;
#elif defined(__AVX2__)
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, int8_t>, int16_t, float>;
template <class T>
constexpr int kSteps = sizeof(T) == 4 ? 1 : 2;
#else
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, int8_t>, int8_t, float>;
template <class T>
constexpr int kSteps = sizeof(T) == 2 ? 2 : 1;
#endif
template <class T>
constexpr int kPerStep = kWord<T> / kSteps<T>;

// Where number i of a word lies among its operands: int8's even ones, in AVX2 the first step's, come first.
template <class T>
constexpr int operand_at(int i) {
  return std::is_same_v<T, Operand<T>> || kPerStep<T> == 1 ? i : i % 2 * 2 + i / 2;
}

// The numbers of step S: Floats, or words of smaller ones.
template <class T, int S>
static inline auto numbers(const Words &words) {
  if constexpr (std::is_same_v<T, float> || (std::is_same_v<T, bf16> && kSteps<T> == 2)) {
    Floats r;
    EACH(r.part[i] = (FloatPart)(sizeof(T) == 4 ? words.part[i] : S == 0 ? words.part[i] << 16 : words.part[i] & 0xffff0000u))
    return r;
  } else if constexpr (kSteps<T> == 2) {
    typedef uint16_t Pairs __attribute__((vector_size(kPart)));
    Words r;
    EACH(r.part[i] = S == 0 ? words.part[i] & 0x00ff00ffu : (WordPart)((Pairs)words.part[i] >> 8))
    return r;
  } else {
    return words;
  }
}
template <class T>
static inline Floats step(const Floats &acc, const Floats &numbers, const float *operand) {
  if constexpr (std::is_same_v<T, float>) return fma(numbers, all(*operand), acc);
  else return multiply_add(numbers, all(*operand), acc);
}
#if defined(__AVX512BF16__)
template <class T>
static inline Floats step(Floats acc, const Words &numbers, const bf16 *operands) {
  auto x = (__m512bh)_mm512_set1_epi32((int)word_at(operands));
  acc.part[0] = (FloatPart)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)numbers.part[0], x);
  return acc;
}
#endif
// Unsigned weights times signed activations.
template <class T>
static inline Ints step(Ints acc, const Words &numbers, const Operand<int8_t> *operands) {
#if defined(__AVX512BF16__)
  auto x = _mm512_set1_epi32((int)word_at(operands));
  acc.part[0] = (IntPart)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)numbers.part[0], x);
#elif defined(__AVX2__)  // of 16 bits: the CPU's product of unsigned with signed bytes would saturate
  auto x = _mm256_set1_epi32((int)word_at(operands));
  EACH(acc.part[i] += (IntPart)_mm256_madd_epi16((__m256i)numbers.part[i], x))
#else
  EACH(for (int b = 0; b < 4; b++) acc.part[i] += (IntPart)(numbers.part[i] >> (8 * b) & 0xffu) * (int32_t)operands[b])
#endif
  return acc;
}

// acc[m] += words * the operands of row m, `stride` apart. Step by step: each one's numbers are needed no longer then.
template <class T, int S = 0, int M, class A>
static inline void dots(A (&acc)[M], const Words &words, const Operand<T> *operands, int64_t stride) {
  auto those = numbers<T, S>(words);
  for (int m = 0; m < M; m++) acc[m] = step<T>(acc[m], those, operands + m * stride + S * kPerStep<T>);
  if constexpr (S + 1 < kSteps<T>) dots<T, S + 1>(acc, words, operands, stride);
}

static inline void fetch(const char *line) { __builtin_prefetch(line, 0, 2); }
static inline void store_all(Floats *to, const Floats &x) { store((float *)to, x); }
static inline void store_all(Ints *to, const Ints &x) {
  EACH(memcpy((char *)to + i * kPart, &x.part[i], kPart))
}

// J vectors of words times M rows, the one loop in which all time goes:
//
//     sums[m * row + j] = keep[m] * sums[m * row + j] + the sum over g < steps of
//                         words[g * pace + j * next] · operands[m * stride + g * every + j * shift]
//
// `pace` and `next` are in bytes; without `keep` the sums begin at 0. Each step fetches J lines at `ahead`, if Fetch. A
// function of its own: in a larger one compilers keep sums in memory (GCC 12).
constexpr float kAsTheyAre[kLanes] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
template <class T, int M, int J, bool Fetch, class A>
[[gnu::noinline]] static void multiply(A *sums, int64_t row, const float *keep, const char *words, int64_t pace, int64_t next,
                                       const Operand<T> *operands, int64_t every, int64_t stride, int64_t shift,
                                       int64_t steps, const char *ahead) {
  A acc[J][M];  // in registers, if every loop over it is unrolled
#pragma GCC unroll 32
  for (int i = 0; i < J * M; i++) {
    A &to = acc[i / M][i % M];
    if constexpr (std::is_same_v<A, Floats>) to = keep ? load((const float *)(sums + i % M * row + i / M)) * all(keep[i % M]) : all(0.f);
    else to = all(0);
  }
  for (int64_t g = 0; g < steps; g++, words += pace, operands += every)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++, ahead += Fetch ? 64 : 0) {
      if (Fetch) fetch(ahead);
      dots<T>(acc[j], load_words(words + j * next), operands + j * shift, stride);
    }
#pragma GCC unroll 32
  for (int i = 0; i < J * M; i++) store_all(sums + i % M * row + i / M, acc[i / M][i % M]);
}

// `count` numbers of x as operands, and zeros up to `width`, whole words.
template <class T>
static inline void to_operands(const T *x, int64_t count, int64_t width, Operand<T> *to) {
  if constexpr (std::is_same_v<T, Operand<T>>) memcpy(to, x, count * sizeof(T));
  else
    for (int64_t i = 0; i < count; i += kLanes) {
      if (count - i >= kLanes) store(to + i, load(x + i));
      else
        for (int64_t j = i; j < count; j++) to[j] = widen(x[j]);
    }
  for (int64_t i = count; i < width; i++) to[i] = {};
}
// x rounded to T, as operands.
template <class T>
static inline void store_operands(Operand<T> *to, const Floats &x) {
  if constexpr (std::is_same_v<T, Operand<T>>) store(to, x);
  else store(to, rounded(x));
}
static inline Floats to_floats(const Ints &x, int32_t less) {
  Floats r;
  EACH(r.part[i] = __builtin_convertvector(x.part[i] - less, FloatPart))
  return r;
}

}  // namespace bifolio
