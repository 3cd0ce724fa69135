// The C interface: what `bindings.py` calls. One build of this file for each instruction set; see setup.py.
//
// Pointers and sizes are trusted: `ops.py` and `bindings.py` have checked them. `bf` says bfloat16; else it is float32.
#include "layer.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace bifolio;

// The best of our builds for the CPU this runs on.
EXPORT const char *bifolio_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (fma && wide && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return "avx512";
  if (fma) return "avx2";
#endif
  return "generic";
}

EXPORT void bifolio_set_parallel(void *gomp_parallel) { region = reinterpret_cast<Region>(gomp_parallel); }

// Bytes of a packed weight of this type.
EXPORT int64_t bifolio_packed_bytes(int64_t inputs, int64_t outputs, int32_t type) {
  int64_t panels = (outputs + kPanel - 1) / kPanel;
  int64_t groups = type == kInt8       ? packed_groups<uint8_t>(inputs)
                   : type == kBfloat16 ? packed_groups<bf16>(inputs)
                                       : packed_groups<float>(inputs);
  return panels * groups * kPanel * 4;
}
EXPORT void bifolio_pack(const void *weight, int64_t inputs, int64_t outputs, int32_t type, void *packed) {
  if (type == kInt8) pack((const uint8_t *)weight, inputs, outputs, (uint8_t *)packed);
  else if (type == kBfloat16) pack((const bf16 *)weight, inputs, outputs, (bf16 *)packed);
  else pack((const float *)weight, inputs, outputs, (float *)packed);
}

// x [rows, inputs] and y [rows, outputs] with rows at their strides. wide: y is float32 whatever x is.
EXPORT void bifolio_linear(const Linear *l, int32_t bf, int32_t wide, const void *x, int64_t x_stride, void *y,
                           int64_t y_stride, int64_t rows, int32_t threads) {
  if (!bf) apply(*l, (const float *)x, x_stride, (float *)y, y_stride, rows, threads);
  else if (wide) apply(*l, (const bf16 *)x, x_stride, (float *)y, y_stride, rows, threads);
  else apply(*l, (const bf16 *)x, x_stride, (bf16 *)y, y_stride, rows, threads);
}

EXPORT void bifolio_rms_norm(int32_t bf, const void *x, void *residual, const void *weight, float eps, int64_t rows,
                             int64_t width, void *out, int32_t threads) {
  if (bf) rms_norm((const bf16 *)x, (bf16 *)residual, (const bf16 *)weight, eps, rows, width, (bf16 *)out, threads);
  else rms_norm((const float *)x, (float *)residual, (const float *)weight, eps, rows, width, (float *)out, threads);
}

EXPORT void bifolio_silu_mul(int32_t bf, const void *gate_up, int64_t rows, int64_t width, void *out, int32_t threads) {
  if (bf) silu_mul((const bf16 *)gate_up, rows, width, (bf16 *)out, threads);
  else silu_mul((const float *)gate_up, rows, width, (float *)out, threads);
}

EXPORT void bifolio_rope_and_write(int32_t bf, const Rows *q, const Rows *k, const Rows *v, const float *cos,
                                   const float *sin, const int64_t *positions, const int64_t *slots, int64_t rows,
                                   const Cache *cache, const Rows *out, int32_t threads) {
  if (bf) rope_and_write<bf16>(*q, *k, *v, cos, sin, positions, slots, rows, *cache, *out, threads);
  else rope_and_write<float>(*q, *k, *v, cos, sin, positions, slots, rows, *cache, *out, threads);
}

EXPORT void bifolio_paged_attention(int32_t bf, const Attention *a, int32_t threads) {
  if (bf) paged_attention<bf16>(*a, threads);
  else paged_attention<float>(*a, threads);
}

// `count` layers, one after the other, each with its step; the cache is the first one's, the next ones' each
// `layer_stride` elements on.
EXPORT void bifolio_layers(int32_t bf, int64_t count, const Layer *layers, const Step *const *steps, const Cache *cache,
                           int64_t layer_stride, void *x, void *residual, int32_t threads) {
  auto all = [&](auto *x, auto *residual) {
    Cache here = *cache;
    for (int64_t i = 0; i < count; i++) {
      here.data = static_cast<decltype(x)>(cache->data) + i * layer_stride;
      layer(layers[i], *steps[i], here, x, residual, threads);
    }
  };
  if (bf) all((bf16 *)x, (bf16 *)residual);
  else all((float *)x, (float *)residual);
}
