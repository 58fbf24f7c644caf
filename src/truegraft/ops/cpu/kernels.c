// The CPU kernels, once for each model dtype. See kernels.h for what they compute.
//
// Bits: every output is one fixed sequence of IEEE operations on its own row's inputs. Contraction
// is off and each fused multiply-add is written out, so a vector loop, its scalar tail and any
// vector width give the same bits; sums run in 16 lanes that are added in order at the end.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 64   // keys of a cache block: a tile of attention
#define SPLIT 256  // keys of an attention split, at absolute positions
#define PAGE_RANK 16
#define STRIP 64   // output columns of an adapter page at a time
#define CHUNK 512  // input columns of one at a time, a multiple of LANES
#define MAX_DIM 256
#define MAX_GROUP 64

#ifdef __FMA__
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

static inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bf16_to_float(uint16_t half) { return from_bits((uint32_t)half << 16); }

// Round to nearest even; a NaN stays one.
static inline uint16_t float_to_bf16(float value) {
  uint32_t bits = to_bits(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value != value ? 0x7fc0 : (uint16_t)rounded;
}

// e^x to about 1 ulp for x <= 88 (Cody-Waite reduction, degree-6 Taylor); 0 below -87, NaN for NaN.
static inline float exp_(float x) {
  float n = __builtin_rintf(x * 1.44269504f);
  n = n > 127.0f ? 127.0f : n;
  n = n < -126.0f ? -126.0f : n;
  float r = FMA(n, -0.693145752f, x);
  r = FMA(n, -1.42860677e-6f, r);
  float p = FMA(r, 1.0f / 720, 1.0f / 120);
  p = FMA(p, r, 1.0f / 24);
  p = FMA(p, r, 1.0f / 6);
  p = FMA(p, r, 0.5f);
  p = FMA(p, r, 1.0f);
  p = FMA(p, r, 1.0f);
  float value = p * from_bits((uint32_t)((int32_t)n + 127) << 23);
  return x < -87.0f ? 0.0f : value;
}

static inline float add_lanes(const float *lanes) {
  float total = lanes[0];
  for (int j = 1; j < LANES; j++) total += lanes[j];
  return total;
}

static inline float dot(const float *a, const float *b, int64_t n) {
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++) lanes[j] = FMA(a[i + j], b[i + j], lanes[j]);
  for (int j = 0; i + j < n; j++) lanes[j] = FMA(a[i + j], b[i + j], lanes[j]);
  return add_lanes(lanes);
}

#define T float
#define LOAD(x) (x)
#define STORE(x) (x)
#define NAME(f) f##_float32
#include "kernels.h"
#undef T
#undef LOAD
#undef STORE
#undef NAME

#define T uint16_t
#define LOAD(x) bf16_to_float(x)
#define STORE(x) float_to_bf16(x)
#define NAME(f) f##_bfloat16
#include "kernels.h"
#undef T
#undef LOAD
#undef STORE
#undef NAME

#ifdef __FLT16_MANT_DIG__
#define T _Float16
#define LOAD(x) ((float)(x))
#define STORE(x) ((_Float16)(x))
#define NAME(f) f##_float16
#include "kernels.h"
#endif
