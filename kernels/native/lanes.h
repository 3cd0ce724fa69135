// Sixteen float lanes, whatever the CPU: one register with AVX-512, two with AVX2, four elsewhere. All kernels are
// written in these, so their float32 results have the same bits on every CPU: lane by lane, in one order, every
// multiply-add fused (in software where the CPU has none).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bifolio {

constexpr int kLanes = 16;
struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512BF16__)
constexpr int kPart = 64;
constexpr int kRegisters = 24;  // Floats that a kernel may accumulate in without spilling
#elif defined(__AVX2__)
constexpr int kPart = 32;
constexpr int kRegisters = 6;
#else
constexpr int kPart = 16;
constexpr int kRegisters = 3;
#endif
constexpr int kParts = 64 / kPart;

typedef float FloatPart __attribute__((vector_size(kPart)));
typedef int32_t IntPart __attribute__((vector_size(kPart)));
typedef uint32_t WordPart __attribute__((vector_size(kPart)));
typedef uint16_t HalfPart __attribute__((vector_size(kPart / 2)));

// The statement for each part i. Written out, not a loop: then the parts stay in registers.
#define PART(n, ...)       \
  {                        \
    constexpr int i = n;   \
    __VA_ARGS__;           \
  }
#if defined(__AVX512BF16__)
#define EACH(...) PART(0, __VA_ARGS__)
#elif defined(__AVX2__)
#define EACH(...) PART(0, __VA_ARGS__) PART(1, __VA_ARGS__)
#else
#define EACH(...) PART(0, __VA_ARGS__) PART(1, __VA_ARGS__) PART(2, __VA_ARGS__) PART(3, __VA_ARGS__)
#endif

struct Ints {
  IntPart part[kParts];
};
struct Floats {
  FloatPart part[kParts];
};

static inline Floats all(float x) {
  Floats r;
  EACH(r.part[i] = x - FloatPart{})  // not {} + x: that loses the sign of -0
  return r;
}
static inline Ints all(int32_t x) {
  Ints r;
  EACH(r.part[i] = x + IntPart{})
  return r;
}
static inline Ints lane_numbers() {
  Ints r;
  EACH(for (int j = 0; j < kPart / 4; j++) r.part[i][j] = i * (kPart / 4) + j)
  return r;
}
static inline Floats operator+(Floats a, const Floats &b) {
  EACH(a.part[i] += b.part[i])
  return a;
}
static inline Floats operator-(Floats a, const Floats &b) {
  EACH(a.part[i] -= b.part[i])
  return a;
}
static inline Floats operator*(Floats a, const Floats &b) {
  EACH(a.part[i] *= b.part[i])
  return a;
}
static inline Floats operator/(Floats a, const Floats &b) {
  EACH(a.part[i] /= b.part[i])
  return a;
}
static inline Floats max(Floats a, const Floats &b) {
  EACH(a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i])
  return a;
}
static inline Floats absolute(Floats a) {
  EACH(a.part[i] = (FloatPart)((WordPart)a.part[i] & 0x7fffffffu))
  return a;
}
// x where from <= lane number < to, elsewhere `other`.
static inline Floats within(Floats x, const Ints &number, int from, int to, float other) {
  EACH(x.part[i] = (number.part[i] >= from) & (number.part[i] < to) ? x.part[i] : other - FloatPart{})
  return x;
}

// Rounded once.
static inline Floats fma(const Floats &a, const Floats &b, Floats c) {
#if defined(__AVX512BF16__)
  c.part[0] = (FloatPart)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__)
  EACH(c.part[i] = (FloatPart)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]))
#else
  EACH(for (int j = 0; j < kPart / 4; j++) c.part[i][j] = __builtin_fmaf(a.part[i][j], b.part[i][j], c.part[i][j]))
#endif
  return c;
}

// As fast as the CPU can: rounded twice where it has no fused one.
static inline Floats multiply_add(const Floats &a, const Floats &b, const Floats &c) {
#if defined(__FMA__) || defined(__aarch64__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

static inline void spread(const Floats &x, float *to) { memcpy(to, &x, sizeof x); }

// Halves are joined with halves, always in this order.
template <class F>
static inline float join(const Floats &x, const F &two) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad q[4];
  memcpy(q, &x, sizeof q);
  Quad r = two(two(q[0], q[2]), two(q[1], q[3]));
  return two(two(r[0], r[2]), two(r[1], r[3]));
}
static inline float sum(const Floats &x) {
  return join(x, [](auto a, auto b) { return a + b; });
}
static inline float largest(const Floats &x) {
  return join(x, [](auto a, auto b) { return a > b ? a : b; });
}

static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float r;
  memcpy(&r, &bits, 4);
  return r;
}
static inline float widen(float x) { return x; }

// Part by part: a copy of all at once would go through memory.
static inline Floats load(const float *from) {
  Floats r;
  EACH(memcpy(&r.part[i], from + i * (kPart / 4), kPart))
  return r;
}
static inline Floats load(const bf16 *from) {
  Floats r;
  EACH({
    HalfPart half;
    memcpy(&half, from + i * (kPart / 4), sizeof half);
    r.part[i] = (FloatPart)(__builtin_convertvector(half, WordPart) << 16);
  })
  return r;
}
static inline void store(float *to, const Floats &x) {
  EACH(memcpy(to + i * (kPart / 4), &x.part[i], kPart))
}
// To bfloat16's numbers, the nearest, ties to even; NaN stays NaN.
static inline Floats rounded(Floats x) {
  EACH({
    WordPart bits = (WordPart)x.part[i];
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    x.part[i] = x.part[i] == x.part[i] ? (FloatPart)bits : (FloatPart)(0x7fc00000u + WordPart{});
  })
  return x;
}
static inline void store(bf16 *to, const Floats &x) {
#if defined(__AVX512BF16__)
  auto half = _mm512_cvtneps_pbh((__m512)x.part[0]);
  memcpy(to, &half, 32);
#else
  Floats near = rounded(x);
  EACH({
    HalfPart half = __builtin_convertvector((WordPart)near.part[i] >> 16, HalfPart);
    memcpy(to + i * (kPart / 4), &half, sizeof half);
  })
#endif
}
// The first n lanes; memory beyond them is not touched, and lanes beyond them are 0.
template <class T>
static inline Floats load_some(const T *from, int n) {
  if (n >= kLanes) return load(from);
  T some[kLanes] = {};
  memcpy(some, from, n * sizeof(T));
  return load(some);
}
template <class T>
static inline void store_some(T *to, const Floats &x, int n) {
  if (n >= kLanes) return store(to, x);
  T some[kLanes];
  store(some, x);
  memcpy(to, some, n * sizeof(T));
}

// 2^x to a unit or two in the last place; 0 below -126, 2^127 above 127, NaN of NaN. The polynomial is that of Cephes
// (Moshier, exp2f.c), for fractions in [-1/2, 1/2].
static inline Floats exp2(const Floats &x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the low bits of a sum with it are the nearest integer
  Floats fraction, power;
  EACH({
    FloatPart v = x.part[i] < -126.f ? -126.f - FloatPart{} : x.part[i];
    v = v > 127.f ? 127.f - FloatPart{} : v;
    FloatPart shifted = v + kRound;
    power.part[i] = (FloatPart)((WordPart)shifted << 23);
    fraction.part[i] = v - (shifted - kRound);
  })
  Floats p = all(1.535336188319500e-4f);
  for (float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                  6.931472028550421e-1f, 1.f})
    p = fma(p, fraction, all(c));
  EACH({
    auto scaled = (FloatPart)((WordPart)p.part[i] + (WordPart)power.part[i]);
    p.part[i] = x.part[i] < -126.f ? FloatPart{} : scaled;
  })
  return p;
}

}  // namespace bifolio
