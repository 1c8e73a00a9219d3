// What the rest of the core asks of the vector units: one table of functions for each instruction set.
//
// Every function computes a row of its result from that row of its input alone, in an order that depends on nothing
// but the row (architecture: row invariance). How many rows stand beside it, where they stand and how many threads
// share the work changes nothing, to the last bit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eyas {

constexpr int kLanes = 16;        // columns of a block: the floats of the widest vector register
constexpr int kGroupBlocks = 4;   // blocks that lie interleaved in memory, so that one stream feeds four accumulators
constexpr int kQuantGroup = 64;   // int8: activations along K that share one scale
constexpr int kMaxTileRows = 12;  // rows that one pass over the weights serves

enum class Weights { bf16, int8 };

inline int step_width(Weights kind) { return kind == Weights::bf16 ? 2 : 4; }  // values in one 32-bit step along K
inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// A matrix [N, K] as products read it: [group of 4 blocks][step along K][block][column] of two bf16 or four uint8
// (the signed weight plus 128). N is padded to whole groups, K to whole steps (int8: to whole quantisation groups).
struct Packed {
    Weights kind = Weights::bf16;
    int n = 0, k = 0;                 // as the model has them; for a gated pair, n is the width after the gate
    int steps = 0;                    // along K, padding included
    const uint8_t *weights = nullptr;
    const float *scales = nullptr;    // int8: one for each padded column
    const float *bias = nullptr;      // one for each padded column, or none

    size_t block_bytes() const { return static_cast<size_t>(steps) * kLanes * 4; }
};

// The input of a product: rows in the form of its weights.
struct Rows {
    int m = 0;
    int steps = 0;
    uint32_t *words = nullptr;  // [m, steps]: two bf16 or four int8 each
    float *scales = nullptr;    // int8: [m, steps / 16]
    int32_t *offsets = nullptr; // int8: [m, steps / 16], -128 times the sum of the group
};

enum class Epilogue { store, add, silu_gate, gelu_gate };  // gates: blocks come in pairs, gate and up
inline bool is_gate(Epilogue e) { return e == Epilogue::silu_gate || e == Epilogue::gelu_gate; }

// Where one query looks: logical positions first <= p < end, of which those below in_place stand in the slot of their
// own number, and position in_place + j stands in slots[j].
struct Look {
    int first = 0;
    int in_place = 0;
    int end = 0;
    const int *slots = nullptr;
};

// K/V of one layer and one K/V head of one sequence, in pages. Within a page keys lie [chunk of 16][pair along the
// head][key] and values [pair of keys][column], both as pairs of bf16.
constexpr int kPageSlots = 64;
struct HeadPages {
    uint16_t *const *pages = nullptr;
    size_t keys = 0, values = 0;  // offsets within a page
    int head_dim = 0;
    int padded_dim = 0;  // a multiple of 16
};

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // rounding could make an infinity of a NaN
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    __builtin_memcpy(&result, &bits, 4);
    return result;
}

struct AttentionScratch {
    float *scores = nullptr;       // [12, positions rounded up]
    uint16_t *weights = nullptr;   // the same, bf16
    float *sums = nullptr;         // [12, padded head]
    uint16_t *gathered = nullptr;  // values of nodes that do not stand in place: [pairs, padded head, 2]
};

struct Kernels {
    const char *name;

    // Rows [m, k] of floats (row stride `stride`) -> the form of `kind`.
    void (*prepare)(Weights kind, const float *x, size_t stride, int k, Rows &rows);

    // out = x / sqrt(mean(x^2) + eps) * weight.
    void (*norm)(const float *x, const float *weight, int width, float eps, float *out);

    // Blocks [first, end) of rows * packed^T into out [m, out_stride], `columns` of it; gates halve the columns.
    void (*product)(const Rows &rows, const Packed &packed, int first, int end, Epilogue epilogue, float *out,
                    size_t out_stride, int columns);

    // out = x * scale, rounded to bf16.
    void (*round)(const float *x, int count, float scale, uint16_t *out);

    // Rotates pairs (i, i + half) of x in place.
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);

    // Up to 12 queries (pairs of bf16, [count, head_dim / 2], already scaled) of one K/V head; out[i] gets head_dim
    // floats.
    void (*attend)(const HeadPages &head, const uint32_t *queries, const Look *const *looks, int count,
                   const AttentionScratch &scratch, float *const *out);

    // The `width` largest of x with the lowest index first among equals, and their log-softmax.
    void (*top)(const float *x, int count, int width, int *indices, float *logprobs);
};

extern const Kernels kPortable, kAvx2, kAvx512;

}  // namespace eyas
