#include "layer.h"

#include <algorithm>
#include <cmath>

namespace eyas {

void Rope::reserve(int positions) {
    if (positions <= positions_) return;
    positions = std::max(positions, 2 * positions_);
    table_.resize(static_cast<size_t>(positions) * 2 * half());
    for (int p = positions_; p < positions; ++p) {
        float *row = table_.data() + static_cast<size_t>(p) * 2 * half();
        for (int i = 0; i < half(); ++i) {
            const float angle = static_cast<float>(p) * frequencies_[i];
            row[i] = std::cos(angle) * scale_;
            row[half() + i] = std::sin(angle) * scale_;
        }
    }
    positions_ = positions;
}

void Workspace::fit(const Shape &shape, const std::vector<Row> &rows, int threads, int input_width, int most_columns) {
    num_rows = static_cast<int>(rows.size());
    first_output = 0;
    const auto grow = [](auto &buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    };
    const size_t m = rows.size();
    const int head_values = shape.heads * shape.head_dim;
    grow(x, m * shape.width);
    grow(input, m * input_width);
    grow(wide, m * most_columns);
    grow(attended, m * head_values);
    grow(mixed, m * shape.width);
    grow(queries, m * shape.heads * (shape.head_dim / 2));
    full.resize(m);
    windowed.resize(m);
    int slots = 0, gathered = 0;
    for (size_t r = 0; r < m; ++r) {
        const Row &row = rows[r];
        full[r] = {0, row.in_place, row.position + 1, row.slots.data()};
        windowed[r] = full[r];
        if (shape.window > 0) windowed[r].first = std::max(0, row.position + 1 - shape.window);
        slots = std::max({slots, row.position + 1, row.slots.empty() ? 0 : row.slots.back() + 1});
        gathered = std::max(gathered, row.position + 2 - row.in_place);
    }
    const int k = std::max({input_width, shape.width, head_values, most_columns});
    const size_t steps = round_up(k, kQuantGroup) / 2, groups = round_up(k, kQuantGroup) / kQuantGroup;
    const int padded_slots = round_up(slots, kLanes), padded_dim = round_up(shape.head_dim, kLanes);
    own.resize(threads);
    for (Private &mine : own) {
        grow(mine.normed, m * k);
        grow(mine.words, m * steps);
        grow(mine.scales, m * groups);
        grow(mine.offsets, m * groups);
        grow(mine.scores, static_cast<size_t>(kMaxTileRows) * padded_slots);
        grow(mine.weights, std::max<size_t>(kMaxTileRows * padded_slots, 2 * shape.head_dim));
        grow(mine.sums, static_cast<size_t>(kMaxTileRows) * padded_dim);
        grow(mine.gathered, static_cast<size_t>(gathered + 2) * padded_dim);
    }
}

void Pass::multiply(int member, const float *x, size_t stride, int m, const float *norm, const Packed &matrix,
                    Epilogue epilogue, float *out, size_t out_stride) const {
    // every member prepares all rows for itself: cheaper than to share them out and wait
    Workspace::Private &mine = space_.own[member];
    if (norm) {
        for (int r = 0; r < m; ++r) {
            kernels_.norm(x + r * stride, norm, matrix.k, shape_.norm_eps,
                          mine.normed.data() + static_cast<size_t>(r) * matrix.k);
        }
        x = mine.normed.data();
        stride = matrix.k;
    }
    Rows rows = {m, matrix.steps, mine.words.data(), mine.scales.data(), mine.offsets.data()};
    kernels_.prepare(matrix.kind, x, stride, matrix.k, rows);
    const int per = is_gate(epilogue) ? 2 : 1;
    const int units = (matrix.n + kLanes - 1) / kLanes;
    const int first = units * member / team_.size(), end = units * (member + 1) / team_.size();
    kernels_.product(rows, matrix, first * per, end * per, epilogue, out, out_stride, matrix.n);
}

void Pass::layer(int member, const Layer &layer, int index, const Rope &rope) const {
    const int first = space_.first_output, m = space_.num_rows - first;
    float *x = space_.x.data() + static_cast<size_t>(first) * shape_.width;
    float *wide = space_.wide.data(), *attended = space_.attended.data(), *mixed = space_.mixed.data();
    if (layer.input_norm) {
        multiply(member, space_.x.data(), shape_.width, space_.num_rows, layer.input_norm, layer.qkv, Epilogue::store,
                 wide, layer.qkv.n);
    } else {
        multiply(member, space_.input.data(), layer.qkv.k, space_.num_rows, nullptr, layer.qkv, Epilogue::store, wide,
                 layer.qkv.n);
    }
    team_.barrier();
    place(member, layer, index, rope);
    team_.barrier();
    if (m == 0) return;  // only keys and values were wanted
    attend(member, layer, index);
    team_.barrier();
    const int values = shape_.heads * shape_.head_dim;
    if (layer.after_attention) {
        multiply(member, attended, values, m, nullptr, layer.output, Epilogue::store, mixed, shape_.width);
        team_.barrier();
        add_normed(member, layer.after_attention);
    } else {
        multiply(member, attended, values, m, nullptr, layer.output, Epilogue::add, x, shape_.width);
    }
    team_.barrier();
    multiply(member, x, shape_.width, m, layer.mlp_norm, layer.gate_up, layer.gate, wide, shape_.ffn_width);
    team_.barrier();
    if (layer.after_mlp) {
        multiply(member, wide, shape_.ffn_width, m, nullptr, layer.down, Epilogue::store, mixed, shape_.width);
        team_.barrier();
        add_normed(member, layer.after_mlp);
    } else {
        multiply(member, wide, shape_.ffn_width, m, nullptr, layer.down, Epilogue::add, x, shape_.width);
    }
    team_.barrier();
}

void Pass::add_normed(int member, const float *norm) const {
    const int first = space_.first_output;
    Workspace::Private &mine = space_.own[member];
    each(member, space_.num_rows - first, [&](int r) {
        kernels_.norm(space_.mixed.data() + static_cast<size_t>(r) * shape_.width, norm, shape_.width, shape_.norm_eps,
                      mine.normed.data());
        float *x = space_.x.data() + static_cast<size_t>(first + r) * shape_.width;
        for (int c = 0; c < shape_.width; ++c) x[c] += mine.normed[c];
    });
}

// Norms of heads, rotation, keys and values into their slots, queries scaled and rounded.
void Pass::place(int member, const Layer &layer, int index, const Rope &rope) const {
    const int dim = shape_.head_dim, group = shape_.heads / shape_.kv_heads;
    const int parts = shape_.heads + shape_.kv_heads;
    each(member, space_.num_rows * parts, [&](int item) {
        const int r = item / parts, part = item % parts;
        const Row &row = rows_[r];
        float *head = space_.wide.data() + static_cast<size_t>(r) * layer.qkv.n + part * dim;
        const bool query = part < shape_.heads;
        if (query && r < space_.first_output) return;
        if (const float *norm = query ? layer.query_norm : layer.key_norm) {
            kernels_.norm(head, norm, dim, shape_.norm_eps, head);
        }
        kernels_.rotate(head, rope.cosines(row.position), rope.sines(row.position), dim / 2);
        if (!query) {
            const int kv_head = part - shape_.heads;
            uint16_t *key = space_.own[member].weights.data(), *value = key + dim;
            kernels_.round(head, dim, 1.0f, key);
            kernels_.round(head + shape_.kv_heads * dim, dim, 1.0f, value);
            row.cache->write(index, kv_head, row.slot, key, value);
            return;
        }
        const size_t place = (static_cast<size_t>(part / group) * space_.num_rows + r) * group + part % group;
        kernels_.round(head, dim, shape_.query_scale, reinterpret_cast<uint16_t *>(&space_.queries[place * (dim / 2)]));
    });
}

void Pass::attend(int member, const Layer &layer, int index) const {
    const int dim = shape_.head_dim, group = shape_.heads / shape_.kv_heads;
    const int first_row = space_.first_output, per_head = (space_.num_rows - first_row) * group;
    const std::vector<Look> &looks = layer.windowed ? space_.windowed : space_.full;
    Workspace::Private &mine = space_.own[member];
    const AttentionScratch scratch = {mine.scores.data(), mine.weights.data(), mine.sums.data(), mine.gathered.data()};
    const int total = shape_.kv_heads * per_head;
    int item = total * member / team_.size();
    const int end = total * (member + 1) / team_.size();
    while (item < end) {
        const int kv_head = item / per_head, first = item % per_head;
        const Cache *cache = rows_[first_row + first / group].cache;
        const Look *seen[kMaxTileRows];
        float *out[kMaxTileRows];
        int count = 0;
        for (int q = first; q < per_head && count < kMaxTileRows && item + count < end; ++q, ++count) {
            const int r = q / group;
            if (rows_[first_row + r].cache != cache) break;
            seen[count] = &looks[first_row + r];
            out[count] = space_.attended.data() + static_cast<size_t>(r) * shape_.heads * dim +
                         (kv_head * group + q % group) * dim;
        }
        const uint32_t *queries =
            space_.queries.data() +
            ((static_cast<size_t>(kv_head) * space_.num_rows + first_row) * group + first) * (dim / 2);
        kernels_.attend(cache->head(index, kv_head), queries, seen, count, scratch, out);
        item += count;
    }
}

}  // namespace eyas
