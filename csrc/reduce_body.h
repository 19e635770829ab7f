/* The reduce kernels, compiled once per instruction set. The includer defines PLX_ISA(name), and PLX_HAS_F16C where the
 * processor converts half floats itself. Plain loops: the compiler vectorises them, and -ffp-contract=off keeps the
 * bits the same on every instruction set. */

#define BLOCK 512 /* so many elements are accumulated at a time: a few KiB, well inside the first-level cache */

#define OP_SUM(a, b) ((a) + (b))
#define OP_PRODUCT(a, b) ((a) * (b))
#define OP_MIN(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b)) /* NaN wins, as in torch.minimum */
#define OP_MAX(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define OP_BAND(a, b) ((a) & (b))
#define OP_BOR(a, b) ((a) | (b))
#define OP_BXOR(a, b) ((a) ^ (b))
#define SAME(x, n) (x)
#define MEAN(x, n) ((x) / (n))
#define SIGNED_MEAN(x, n) ((int64_t)(x) / (n))

/* T is the type in memory, W while accumulating (at least as wide), N the type of the divisor; END is what happens to
 * the total. */
#define KERNEL(name, T, W, N, OP, END)                                                                                \
  static void PLX_ISA(name)(void *dst_, const void *const *src_, uint32_t n, size_t count) {                           \
    const T *a = src_[0];                                                                                             \
    T *dst = dst_;                                                                                                    \
    (void)n;                                                                                                          \
    if (n == 1) {                                                                                                     \
      if (dst_ != src_[0]) memmove(dst_, src_[0], count * sizeof(T));                                                 \
      return;                                                                                                         \
    }                                                                                                                 \
    const T *b = src_[1];                                                                                             \
    if (n == 2) {                                                                                                     \
      PLX_IVDEP                                                                                                       \
      for (size_t i = 0; i < count; i++) dst[i] = (T)END((W)OP((W)a[i], (W)b[i]), (N)2);                              \
      return;                                                                                                         \
    }                                                                                                                 \
    W sum[BLOCK];                                                                                                     \
    for (size_t at = 0; at < count; at += BLOCK) {                                                                    \
      size_t len = count - at < BLOCK ? count - at : BLOCK;                                                           \
      for (size_t i = 0; i < len; i++) sum[i] = (W)OP((W)a[at + i], (W)b[at + i]);                                    \
      for (uint32_t r = 2; r < n; r++) {                                                                              \
        const T *c = (const T *)src_[r] + at;                                                                         \
        for (size_t i = 0; i < len; i++) sum[i] = (W)OP(sum[i], (W)c[i]);                                             \
      }                                                                                                               \
      for (size_t i = 0; i < len; i++) dst[at + i] = (T)END(sum[i], (N)n);                                            \
    }                                                                                                                 \
  }

/* Integers wrap. Where C would call that undefined (signed types, and short ones that become int) the arithmetic is done
 * in an unsigned type: S for sums, P for products, uint64_t for means. */
#define INTEGER_KERNELS(suffix, T, S, P, N, AVERAGE)           \
  KERNEL(sum_##suffix, T, S, S, OP_SUM, SAME)                  \
  KERNEL(avg_##suffix, T, uint64_t, N, OP_SUM, AVERAGE)        \
  KERNEL(product_##suffix, T, P, P, OP_PRODUCT, SAME)          \
  KERNEL(min_##suffix, T, T, T, OP_MIN, SAME)                  \
  KERNEL(max_##suffix, T, T, T, OP_MAX, SAME)                  \
  KERNEL(band_##suffix, T, T, T, OP_BAND, SAME)                \
  KERNEL(bor_##suffix, T, T, T, OP_BOR, SAME)                  \
  KERNEL(bxor_##suffix, T, T, T, OP_BXOR, SAME)

INTEGER_KERNELS(u8, uint8_t, uint8_t, uint8_t, uint64_t, MEAN)
INTEGER_KERNELS(i8, int8_t, int8_t, int8_t, int64_t, SIGNED_MEAN)
INTEGER_KERNELS(u16, uint16_t, uint16_t, uint32_t, uint64_t, MEAN)
INTEGER_KERNELS(i16, int16_t, int16_t, uint32_t, int64_t, SIGNED_MEAN)
INTEGER_KERNELS(u32, uint32_t, uint32_t, uint32_t, uint64_t, MEAN)
INTEGER_KERNELS(i32, int32_t, uint32_t, uint32_t, int64_t, SIGNED_MEAN)
INTEGER_KERNELS(u64, uint64_t, uint64_t, uint64_t, uint64_t, MEAN)
INTEGER_KERNELS(i64, int64_t, uint64_t, uint64_t, int64_t, SIGNED_MEAN)

#define FLOAT_KERNELS(suffix, T)                      \
  KERNEL(sum_##suffix, T, T, T, OP_SUM, SAME)         \
  KERNEL(avg_##suffix, T, T, T, OP_SUM, MEAN)         \
  KERNEL(product_##suffix, T, T, T, OP_PRODUCT, SAME) \
  KERNEL(min_##suffix, T, T, T, OP_MIN, SAME)         \
  KERNEL(max_##suffix, T, T, T, OP_MAX, SAME)

FLOAT_KERNELS(f32, float)
FLOAT_KERNELS(f64, double)

/* Complex sums and means are those of their parts; only the product mixes them. */
#define COMPLEX_KERNELS(suffix, T, real)                                                                               \
  static void PLX_ISA(sum_##suffix)(void *dst, const void *const *src, uint32_t n, size_t count) {                     \
    PLX_ISA(sum_##real)(dst, src, n, 2 * count);                                                                      \
  }                                                                                                                    \
  static void PLX_ISA(avg_##suffix)(void *dst, const void *const *src, uint32_t n, size_t count) {                     \
    PLX_ISA(avg_##real)(dst, src, n, 2 * count);                                                                      \
  }                                                                                                                    \
  static void PLX_ISA(product_##suffix)(void *dst_, const void *const *src_, uint32_t n, size_t count) {               \
    T *dst = dst_;                                                                                                     \
    for (size_t i = 0; i < count; i++) {                                                                              \
      T re = ((const T *)src_[0])[2 * i], im = ((const T *)src_[0])[2 * i + 1];                                        \
      for (uint32_t r = 1; r < n; r++) {                                                                              \
        T c = ((const T *)src_[r])[2 * i], d = ((const T *)src_[r])[2 * i + 1];                                        \
        T next = re * c - im * d;                                                                                      \
        im = re * d + im * c;                                                                                          \
        re = next;                                                                                                     \
      }                                                                                                                \
      dst[2 * i] = re;                                                                                                 \
      dst[2 * i + 1] = im;                                                                                             \
    }                                                                                                                  \
  }

COMPLEX_KERNELS(c64, float, f32)
COMPLEX_KERNELS(c128, double, f64)

/* Half types are widened by blocks, accumulated in float32 and rounded once. */
static void PLX_ISA(widen_bf16)(float *to, const uint16_t *from, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = (uint32_t)from[i] << 16;
    memcpy(&to[i], &bits, 4);
  }
}

static void PLX_ISA(narrow_bf16)(uint16_t *to, const float *from, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &from[i], 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* it rounds to nearest, ties to even */
    uint32_t quiet = (bits >> 16) | 0x40u;                           /* a NaN stays one */
    to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

static void PLX_ISA(widen_f16)(float *to, const uint16_t *from, size_t n) {
  size_t i = 0;
#ifdef PLX_HAS_F16C
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
  for (; i < n; i++) to[i] = half_to_float(from[i]);
}

static void PLX_ISA(narrow_f16)(uint16_t *to, const float *from, size_t n) {
  size_t i = 0;
#ifdef PLX_HAS_F16C
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; i++) to[i] = float_to_half(from[i]);
}

#define HALF_KERNEL(name, suffix, OP, END)                                                                            \
  static void PLX_ISA(name##_##suffix)(void *dst, const void *const *src, uint32_t n, size_t count) {                  \
    float sum[BLOCK], next[BLOCK];                                                                                    \
    if (n == 1) {                                                                                                     \
      if (dst != src[0]) memmove(dst, src[0], count * 2);                                                             \
      return;                                                                                                         \
    }                                                                                                                 \
    for (size_t at = 0; at < count; at += BLOCK) {                                                                    \
      size_t len = count - at < BLOCK ? count - at : BLOCK;                                                           \
      PLX_ISA(widen_##suffix)(sum, (const uint16_t *)src[0] + at, len);                                               \
      for (uint32_t r = 1; r < n; r++) {                                                                              \
        PLX_ISA(widen_##suffix)(next, (const uint16_t *)src[r] + at, len);                                            \
        for (size_t i = 0; i < len; i++) sum[i] = OP(sum[i], next[i]);                                                \
      }                                                                                                               \
      for (size_t i = 0; i < len; i++) sum[i] = END(sum[i], (float)n);                                                \
      PLX_ISA(narrow_##suffix)((uint16_t *)dst + at, sum, len);                                                       \
    }                                                                                                                 \
  }

#define HALF_KERNELS(suffix)                      \
  HALF_KERNEL(sum, suffix, OP_SUM, SAME)          \
  HALF_KERNEL(avg, suffix, OP_SUM, MEAN)          \
  HALF_KERNEL(product, suffix, OP_PRODUCT, SAME)  \
  HALF_KERNEL(min, suffix, OP_MIN, SAME)          \
  HALF_KERNEL(max, suffix, OP_MAX, SAME)

HALF_KERNELS(f16)
HALF_KERNELS(bf16)

/* A bool is 0 or not. SUM and MAX say whether any is set, PRODUCT and MIN whether all are; the result is 0 or 1. */
#define OP_ANY(a, b) (((a) | (b)) != 0)
#define OP_ALL(a, b) (((a) != 0) & ((b) != 0))
#define OP_ODD(a, b) (((a) != 0) ^ ((b) != 0))
KERNEL(any_bool, uint8_t, uint8_t, uint8_t, OP_ANY, SAME)
KERNEL(all_bool, uint8_t, uint8_t, uint8_t, OP_ALL, SAME)
KERNEL(odd_bool, uint8_t, uint8_t, uint8_t, OP_ODD, SAME)

#define ALL_OPS(s)                                                                                                    \
  {                                                                                                                   \
    PLX_ISA(sum_##s), PLX_ISA(avg_##s), PLX_ISA(product_##s), PLX_ISA(min_##s), PLX_ISA(max_##s), PLX_ISA(band_##s),  \
        PLX_ISA(bor_##s), PLX_ISA(bxor_##s)                                                                           \
  }
#define FLOAT_OPS(s)                                                                                   \
  {PLX_ISA(sum_##s), PLX_ISA(avg_##s), PLX_ISA(product_##s), PLX_ISA(min_##s), PLX_ISA(max_##s), NULL, NULL, NULL}
#define COMPLEX_OPS(s) {PLX_ISA(sum_##s), PLX_ISA(avg_##s), PLX_ISA(product_##s), NULL, NULL, NULL, NULL, NULL}

static const plx_reduce_fn PLX_ISA(table)[PLX_NUM_DTYPES][PLX_NUM_REDOPS] = {
    [PLX_BOOL] = {PLX_ISA(any_bool), NULL, PLX_ISA(all_bool), PLX_ISA(all_bool), PLX_ISA(any_bool), PLX_ISA(all_bool),
                  PLX_ISA(any_bool), PLX_ISA(odd_bool)},
    [PLX_U8] = ALL_OPS(u8),
    [PLX_I8] = ALL_OPS(i8),
    [PLX_U16] = ALL_OPS(u16),
    [PLX_I16] = ALL_OPS(i16),
    [PLX_U32] = ALL_OPS(u32),
    [PLX_I32] = ALL_OPS(i32),
    [PLX_U64] = ALL_OPS(u64),
    [PLX_I64] = ALL_OPS(i64),
    [PLX_F16] = FLOAT_OPS(f16),
    [PLX_BF16] = FLOAT_OPS(bf16),
    [PLX_F32] = FLOAT_OPS(f32),
    [PLX_F64] = FLOAT_OPS(f64),
    [PLX_C64] = COMPLEX_OPS(c64),
    [PLX_C128] = COMPLEX_OPS(c128),
};

#undef BLOCK
#undef OP_SUM
#undef OP_PRODUCT
#undef OP_MIN
#undef OP_MAX
#undef OP_BAND
#undef OP_BOR
#undef OP_BXOR
#undef SAME
#undef MEAN
#undef SIGNED_MEAN
#undef KERNEL
#undef INTEGER_KERNELS
#undef FLOAT_KERNELS
#undef COMPLEX_KERNELS
#undef HALF_KERNEL
#undef HALF_KERNELS
#undef OP_ANY
#undef OP_ALL
#undef OP_ODD
#undef ALL_OPS
#undef FLOAT_OPS
#undef COMPLEX_OPS
