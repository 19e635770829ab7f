/* This file has the reduce kernels for every instruction set, and chooses among them when the program runs. */
#include "reduce.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PLX_X86 1
#endif

#if defined(__clang__)
#define PLX_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define PLX_IVDEP _Pragma("GCC ivdep")
#endif

/* These convert IEEE 754 half and single precision in integers: exactly, and alike on every machine. */
static inline float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu, bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | fraction << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else if (fraction == 0) {
    bits = sign;
  } else {
    exponent = 113;
    while ((fraction & 0x400u) == 0) {
      fraction <<= 1;
      exponent--;
    }
    bits = sign | exponent << 23 | (fraction & 0x3ffu) << 13;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu)); /* NaN, made quiet */
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);                             /* it rounds to infinity */
  if (magnitude < 0x33000001u) return (uint16_t)sign;                                          /* it rounds to zero */
  if (magnitude >= 0x38800000u) {
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
  }
  uint32_t shift = 126 - (magnitude >> 23), fraction = (magnitude & 0x7fffffu) | 0x800000u; /* a subnormal half */
  uint32_t half = fraction >> shift, rest = fraction & ((1u << shift) - 1), middle = 1u << (shift - 1);
  if (rest > middle || (rest == middle && (half & 1u))) half++;
  return (uint16_t)(sign | half);
}

#define PLX_ISA(name) base_##name
#include "reduce_body.h"
#undef PLX_ISA

#ifdef PLX_X86
#define PLX_HAS_F16C 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define PLX_ISA(name) avx2_##name
#include "reduce_body.h"
#undef PLX_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

plx_reduce_fn plx_reduce_kernel(int dtype, int redop) {
  if (dtype < 0 || dtype >= PLX_NUM_DTYPES || redop < 0 || redop >= PLX_NUM_REDOPS) return NULL;
#ifdef PLX_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return avx2_table[dtype][redop];
#endif
  return base_table[dtype][redop];
}

size_t plx_dtype_size(int dtype) {
  static const size_t size[PLX_NUM_DTYPES] = {
      [PLX_BYTES] = 1, [PLX_BOOL] = 1, [PLX_U8] = 1,  [PLX_I8] = 1,   [PLX_U16] = 2, [PLX_I16] = 2,
      [PLX_U32] = 4,   [PLX_I32] = 4,  [PLX_U64] = 8, [PLX_I64] = 8,  [PLX_F16] = 2, [PLX_BF16] = 2,
      [PLX_F32] = 4,   [PLX_F64] = 8,  [PLX_C64] = 8, [PLX_C128] = 16};
  return dtype < 0 || dtype >= PLX_NUM_DTYPES ? 0 : size[dtype];
}
