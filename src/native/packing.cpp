#include "packing.h"

#include <cmath>
#include <cstring>

namespace eyas {

namespace {

int padded_columns(int num_columns) { return round_up(num_columns, kLanes * kGroupBlocks); }

int padded_steps(Weights kind, int k) {
    return kind == Weights::bf16 ? round_up(k, 2) / 2 : round_up(k, kQuantGroup) / 4;
}

}  // namespace

size_t packed_bytes(Weights kind, int num_columns, int k) {
    return static_cast<size_t>(padded_columns(num_columns)) * padded_steps(kind, k) * 4;
}

PackedBytes pack(Weights kind, const float *rows, int k, const std::vector<int> &order) {
    const int columns = padded_columns(static_cast<int>(order.size())), steps = padded_steps(kind, k);
    const int per_step = step_width(kind), group_columns = kLanes * kGroupBlocks;
    PackedBytes packed;
    packed.weights.assign(static_cast<size_t>(columns) * steps * 4, kind == Weights::bf16 ? 0 : 128);
    if (kind == Weights::int8) packed.scales.assign(columns, 0.0f);
    for (int c = 0; c < static_cast<int>(order.size()); ++c) {
        if (order[c] < 0) continue;
        const float *row = rows + static_cast<size_t>(order[c]) * k;
        float inverse = 0.0f;
        if (kind == Weights::int8) {
            float most = 0.0f;
            for (int i = 0; i < k; ++i) most = std::fmax(most, std::fabs(row[i]));
            packed.scales[c] = most / 127.0f;
            inverse = most > 0.0f ? 127.0f / most : 0.0f;
        }
        uint8_t *group = packed.weights.data() + static_cast<size_t>(c / group_columns) * group_columns * steps * 4;
        for (int i = 0; i < k; ++i) {
            uint8_t *step = group + (static_cast<size_t>(i / per_step) * group_columns + c % group_columns) * 4;
            if (kind == Weights::bf16) {
                const uint16_t bits = to_bf16(row[i]);
                std::memcpy(step + i % 2 * 2, &bits, 2);
            } else {
                step[i % 4] = static_cast<uint8_t>(std::nearbyint(row[i] * inverse) + 128.0f);
            }
        }
    }
    return packed;
}

}  // namespace eyas
