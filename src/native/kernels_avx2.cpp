// AVX2 with FMA: sixteen lanes are two registers.
#include "kernels.h"

#ifdef __x86_64__
#include <immintrin.h>

namespace eyas {
namespace avx2 {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

constexpr int kTileRows[3] = {3, 3, 1};  // 12 accumulators of eight lanes

inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F multiply(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F divide(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F multiply_add(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F largest(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F smallest(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F nearest(F x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
// An exponent field of zero or less makes the power zero: results below 2^-126 vanish.
inline __m256 power(__m256 n) {
    const __m256i field = _mm256_max_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)),
                                           _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_slli_epi32(field, 23));
}
inline F scale_by_power(F x, F n) { return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))}; }
inline bool largest_lane_exceeds(F x, float bound) {
    const __m256 limit = _mm256_set1_ps(bound);
    return (_mm256_movemask_ps(_mm256_cmp_ps(x.a, limit, _CMP_GT_OQ)) |
            _mm256_movemask_ps(_mm256_cmp_ps(x.b, limit, _CMP_GT_OQ))) != 0;
}
inline float sum_lanes(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest_lane(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline void store_bytes(int8_t *p, F x) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i order = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}
inline I splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m128i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    return _mm256_castsi256_si128(packed);
}
inline void store_bf16(uint16_t *p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), rounded(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p + 8), rounded(x.b));
}

// A bf16 is the upper half of a float.
struct PairWeights {
    F even, odd;
};
struct Pair {
    __m256 even, odd;
};
inline __m256 low_half(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 high_half(__m256i x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline __m256i load_half(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline PairWeights load_pairs(const uint8_t *p) {
    const __m256i a = load_half(p), b = load_half(p + 32);
    return {{low_half(a), low_half(b)}, {high_half(a), high_half(b)}};
}
inline Pair splat_pair(uint32_t x) {
    const __m256i both = _mm256_set1_epi32(static_cast<int>(x));
    return {low_half(both), high_half(both)};
}
inline F pair_product(F sum, const PairWeights &w, Pair a) {
    sum = {_mm256_fmadd_ps(w.even.a, a.even, sum.a), _mm256_fmadd_ps(w.even.b, a.even, sum.b)};
    return {_mm256_fmadd_ps(w.odd.a, a.odd, sum.a), _mm256_fmadd_ps(w.odd.b, a.odd, sum.b)};
}

// maddubs would saturate: bytes are widened first, evens and odds apart, so that sums stay exact.
struct QuadWeights {
    I even, odd;
};
struct Quad {
    __m256i even, odd;
};
inline __m256i even_bytes(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xff)); }
inline QuadWeights load_quads(const uint8_t *p) {
    const __m256i a = load_half(p), b = load_half(p + 32);
    return {{even_bytes(a), even_bytes(b)}, {_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)}};
}
inline Quad splat_quad(uint32_t x) {  // signed bytes to words
    const __m256i four = _mm256_set1_epi32(static_cast<int>(x));
    return {_mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), _mm256_srai_epi16(four, 8)};
}
inline void quad_product(I &sum, const QuadWeights &w, Quad a) {
    sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(w.even.a, a.even));
    sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(w.even.b, a.even));
    sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(w.odd.a, a.odd));
    sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(w.odd.b, a.odd));
}

#include "kernels.inc"

}  // namespace avx2

const Kernels kAvx2 = {"avx2", avx2::prepare, avx2::norm, avx2::product, avx2::round, avx2::rotate, avx2::attend, avx2::top};

}  // namespace eyas
#else
namespace eyas {
const Kernels kAvx2 = {};
}
#endif
