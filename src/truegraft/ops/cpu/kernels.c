// The CPU kernels, once for each model dtype. See kernels.h for what they compute.
//
// Bits: every output is one fixed sequence of IEEE operations on its own row's inputs. Contraction
// is off, so products and sums round apart, and a vector loop, its scalar tail and any vector width
// give the same bits; sums run in 16 lanes that are added in a fixed tree at the end.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 64   // keys of a cache block: a tile of attention
#define SPLIT 256  // keys of an attention split, at absolute positions
#define PAGE_RANK 16
#define STRIP 64   // output columns of an adapter page at a time
#define MAX_DIM 256
#define MAX_GROUP 64

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
  float r = x - n * 0.693145752f;  // exact: the constant's last bits are zero
  r = r - n * 1.42860677e-6f;
  float p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  float value = p * from_bits((uint32_t)((int32_t)n + 127) << 23);
  return x < -87.0f ? 0.0f : value;
}

typedef float lanes_t __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t bits_t __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t halves_t __attribute__((vector_size(LANES * sizeof(uint16_t))));

static inline lanes_t load_float(const float *x) {
  lanes_t value;
  memcpy(&value, x, sizeof value);
  return value;
}

static inline lanes_t load_bf16(const uint16_t *x) {
  halves_t halves;
  memcpy(&halves, x, sizeof halves);
  bits_t bits = __builtin_convertvector(halves, bits_t) << 16;
  lanes_t value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Halves onto halves: a fixed tree, short where a chain of additions would wait for each.
static inline float add_lanes(lanes_t lanes) {
  float sum[LANES / 2];
  for (int j = 0; j < 8; j++) sum[j] = lanes[j] + lanes[j + 8];
  for (int j = 0; j < 4; j++) sum[j] += sum[j + 4];
  for (int j = 0; j < 2; j++) sum[j] += sum[j + 2];
  return sum[0] + sum[1];
}

#define T float
#define LOAD(x) (x)
#define LOAD_LANES(x) load_float(x)
#define STORE(x) (x)
#define NAME(f) f##_float32
#include "kernels.h"
#undef T
#undef LOAD
#undef LOAD_LANES
#undef STORE
#undef NAME

#define T uint16_t
#define LOAD(x) bf16_to_float(x)
#define LOAD_LANES(x) load_bf16(x)
#define STORE(x) float_to_bf16(x)
#define NAME(f) f##_bfloat16
#include "kernels.h"
#undef T
#undef LOAD
#undef LOAD_LANES
#undef STORE
#undef NAME

#ifdef __FLT16_MANT_DIG__
#define T _Float16
typedef _Float16 fp16_t __attribute__((vector_size(LANES * sizeof(_Float16))));
static inline lanes_t load_fp16(const _Float16 *x) {
  fp16_t halves;
  memcpy(&halves, x, sizeof halves);
  return __builtin_convertvector(halves, lanes_t);
}

#define LOAD(x) ((float)(x))
#define LOAD_LANES(x) load_fp16(x)
#define STORE(x) ((_Float16)(x))
#define NAME(f) f##_float16
#include "kernels.h"
#endif
