// AVX-512 with BF16 and VNNI: sixteen lanes are one register.
#include "kernels.h"

#ifdef __x86_64__
#include <immintrin.h>

namespace eyas {
namespace avx512 {

using F = __m512;
using I = __m512i;

constexpr int kTileRows[3] = {12, 12, 6};  // 24 accumulators, the weights, one broadcast

inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline F splat(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
inline F divide(F a, F b) { return _mm512_div_ps(a, b); }
inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F largest(F a, F b) { return _mm512_max_ps(a, b); }
inline F smallest(F a, F b) { return _mm512_min_ps(a, b); }
inline F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F scale_by_power(F x, F n) { return _mm512_scalef_ps(x, n); }
inline bool largest_lane_exceeds(F x, float bound) { return _mm512_cmp_ps_mask(x, splat(bound), _CMP_GT_OQ) != 0; }
inline float sum_lanes(F x) { return _mm512_reduce_add_ps(x); }
inline float largest_lane(F x) { return _mm512_reduce_max_ps(x); }
inline void store_bytes(int8_t *p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
inline I splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline void store_bf16(uint16_t *p, F x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    __builtin_memcpy(p, &rounded, 32);
}

using PairWeights = __m512bh;
using Pair = __m512bh;
inline PairWeights load_pairs(const uint8_t *p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Pair splat_pair(uint32_t x) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(x)); }
inline F pair_product(F sum, PairWeights w, Pair a) { return _mm512_dpbf16_ps(sum, w, a); }

using QuadWeights = __m512i;
using Quad = __m512i;
inline QuadWeights load_quads(const uint8_t *p) { return _mm512_loadu_si512(p); }
inline Quad splat_quad(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
// By hand: GCC 12 otherwise copies every accumulator once a step, which halves the speed.
inline void quad_product(I &sum, QuadWeights w, Quad a) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a)); }

#include "kernels.inc"

}  // namespace avx512

const Kernels kAvx512 = {"avx512", avx512::prepare, avx512::norm, avx512::product, avx512::round, avx512::rotate, avx512::attend, avx512::top};

}  // namespace eyas
#else
namespace eyas {
const Kernels kAvx512 = {};
}
#endif
