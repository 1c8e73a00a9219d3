// Weights as the model has them -> weights as the products read them. Done once for a model, kept on disk.
#pragma once

#include <vector>

#include "kernels.h"

namespace eyas {

struct PackedBytes {
    std::vector<uint8_t> weights;
    std::vector<float> scales;  // int8 only
};

size_t packed_bytes(Weights kind, int num_columns, int k);

// Column c of the result is row order[c] of `rows` [n, k], or zero where order[c] is negative; more zero columns fill
// the last group. int8: each column is scaled so that its largest weight becomes 127.
PackedBytes pack(Weights kind, const float *rows, int k, const std::vector<int> &order);

}  // namespace eyas
