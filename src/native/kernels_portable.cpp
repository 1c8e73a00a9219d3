// Plain C++ for any CPU: sixteen lanes are an array, which compilers vectorise as they can.
#include <cmath>

#include "kernels.h"

namespace eyas {
namespace portable {

struct F {
    float v[kLanes];
};
struct I {
    int32_t v[kLanes];
};

constexpr int kTileRows[3] = {3, 3, 1};

#define EYAS_LANES for (int i = 0; i < kLanes; ++i)

inline F load(const float *p) {
    F x;
    EYAS_LANES x.v[i] = p[i];
    return x;
}
inline void store(float *p, const F &x) { EYAS_LANES p[i] = x.v[i]; }
inline F splat(float value) {
    F x;
    EYAS_LANES x.v[i] = value;
    return x;
}
inline F add(F a, const F &b) {
    EYAS_LANES a.v[i] += b.v[i];
    return a;
}
inline F multiply(F a, const F &b) {
    EYAS_LANES a.v[i] *= b.v[i];
    return a;
}
inline F divide(F a, const F &b) {
    EYAS_LANES a.v[i] /= b.v[i];
    return a;
}
inline F multiply_add(F a, const F &b, const F &c) {
    EYAS_LANES a.v[i] = a.v[i] * b.v[i] + c.v[i];
    return a;
}
inline F largest(F a, const F &b) {
    EYAS_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline F smallest(F a, const F &b) {
    EYAS_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline F nearest(F x) {
    EYAS_LANES x.v[i] = std::nearbyint(x.v[i]);
    return x;
}
inline F scale_by_power(F x, const F &n) {
    EYAS_LANES x.v[i] = std::ldexp(x.v[i], static_cast<int>(n.v[i]));
    return x;
}
inline bool largest_lane_exceeds(const F &x, float bound) {
    bool any = false;
    EYAS_LANES any |= x.v[i] > bound;
    return any;
}
inline float sum_lanes(F x) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    }
    return x.v[0];
}
inline float largest_lane(const F &x) {
    float best = x.v[0];
    EYAS_LANES best = x.v[i] > best ? x.v[i] : best;
    return best;
}
inline void store_bytes(int8_t *p, const F &x) { EYAS_LANES p[i] = static_cast<int8_t>(x.v[i]); }
inline I splat_int(int32_t value) {
    I x;
    EYAS_LANES x.v[i] = value;
    return x;
}
inline F to_float(const I &x) {
    F y;
    EYAS_LANES y.v[i] = static_cast<float>(x.v[i]);
    return y;
}

struct PairWeights {
    F even, odd;
};
struct Pair {
    float even, odd;
};
inline PairWeights load_pairs(const uint8_t *p) {
    uint32_t words[kLanes];
    __builtin_memcpy(words, p, sizeof words);
    PairWeights w;
    EYAS_LANES {
        w.even.v[i] = from_bf16(static_cast<uint16_t>(words[i]));
        w.odd.v[i] = from_bf16(static_cast<uint16_t>(words[i] >> 16));
    }
    return w;
}
inline Pair splat_pair(uint32_t x) { return {from_bf16(static_cast<uint16_t>(x)), from_bf16(static_cast<uint16_t>(x >> 16))}; }
inline F pair_product(F sum, const PairWeights &w, Pair a) {
    EYAS_LANES sum.v[i] = sum.v[i] + w.even.v[i] * a.even + w.odd.v[i] * a.odd;
    return sum;
}

struct QuadWeights {
    uint8_t v[kLanes * 4];
};
struct Quad {
    int8_t v[4];
};
inline QuadWeights load_quads(const uint8_t *p) {
    QuadWeights w;
    __builtin_memcpy(w.v, p, sizeof w.v);
    return w;
}
inline Quad splat_quad(uint32_t x) {
    Quad a;
    __builtin_memcpy(a.v, &x, 4);
    return a;
}
inline void quad_product(I &sum, const QuadWeights &w, Quad a) {
    EYAS_LANES for (int j = 0; j < 4; ++j) sum.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * a.v[j];
}

inline void store_bf16(uint16_t *p, const F &x) { EYAS_LANES p[i] = to_bf16(x.v[i]); }

#include "kernels.inc"

}  // namespace portable

const Kernels kPortable = {"portable", portable::prepare, portable::norm, portable::product, portable::round, portable::rotate, portable::attend, portable::top};

}  // namespace eyas
