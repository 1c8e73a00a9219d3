#include "model.h"

#include <algorithm>
#include <cstring>

#include "cpu_features.h"

namespace eyas {

Engine &engine() {
    static Engine the = {&choose_kernels(), std::make_unique<Team>(1), 0, {}};
    return the;
}

std::vector<Row> rows_of(const std::vector<Branching> &trees) {
    std::vector<Row> rows;
    for (const Branching &tree : trees) {
        const int first = static_cast<int>(rows.size()), length = tree.cache->length;
        std::vector<int> leading(tree.nodes);  // how many nodes of a path, from the root, stand in place
        for (int node = 0; node < tree.nodes; ++node) {
            Row row;
            row.cache = tree.cache;
            row.slot = length + node;
            const int parent = node > 0 ? tree.parents[node] : -1;
            row.position = parent < 0 ? length : rows[first + parent].position + 1;
            const int depth = row.position - length, before = parent < 0 ? 0 : leading[parent];
            leading[node] = before == depth && node == depth ? depth + 1 : before;
            row.in_place = length + leading[node];
            if (leading[node] <= depth) {
                if (parent >= 0) row.slots = rows[first + parent].slots;
                row.slots.push_back(row.slot);
            }
            rows.push_back(std::move(row));
        }
        tree.cache->reserve(length + tree.nodes);
        tree.cache->pending = tree.nodes;
    }
    return rows;
}

void Model::verify(const std::vector<Branching> &trees, const std::vector<int> &reads, bool last_only, float *hidden,
                   float *logits) {
    Engine &core = engine();
    const std::lock_guard<std::mutex> lock(core.busy);
    const std::vector<Row> rows = rows_of(trees);
    std::vector<const int *> tokens;
    std::vector<int> wanted;  // rows whose logits are asked for
    for (const Branching &tree : trees) {
        for (int node = 0; node < tree.nodes; ++node) {
            if (!last_only || node + 1 == tree.nodes) wanted.push_back(static_cast<int>(tokens.size()));
            tokens.push_back(tree.tokens + node);
        }
    }
    for (int first = 0; first < static_cast<int>(rows.size()); first += kMaxRows) {
        const int end = std::min(first + kMaxRows, static_cast<int>(rows.size()));
        const auto low = std::lower_bound(wanted.begin(), wanted.end(), first);
        const auto high = std::lower_bound(wanted.begin(), wanted.end(), end);
        std::vector<int> logit_rows;
        for (auto row = low; row != high; ++row) logit_rows.push_back(*row - first);
        pass({rows.begin() + first, rows.begin() + end}, tokens.data() + first, reads,
             hidden + static_cast<size_t>(first) * reads.size() * shape.width, logit_rows,
             logits + static_cast<size_t>(low - wanted.begin()) * vocab_size);
    }
}

void Model::pass(const std::vector<Row> &rows, const int *const *tokens, const std::vector<int> &reads, float *hidden,
                 const std::vector<int> &logit_rows, float *logits) {
    Engine &core = engine();
    const int m = static_cast<int>(rows.size()), width = shape.width, num_reads = static_cast<int>(reads.size());
    const int most_columns = std::max(layers[0].qkv.n, shape.ffn_width);
    space.fit(shape, rows, core.team->size(), 0, most_columns);
    int positions = 0;
    for (const Row &row : rows) positions = std::max(positions, row.position + 1);
    for (Rope &rope : ropes) rope.reserve(positions);
    const Pass pass(*core.kernels, *core.team, shape, rows, space);
    const auto show = [&](int member, int state, const Numbers<float> &from) {
        const int place = static_cast<int>(std::find(reads.begin(), reads.end(), state) - reads.begin());
        if (place == num_reads) return;
        pass.each(member, m, [&](int r) {
            std::memcpy(hidden + (static_cast<size_t>(r) * num_reads + place) * width,
                        from.data() + static_cast<size_t>(r) * width, width * sizeof(float));
        });
    };
    core.team->run([&](int member) {
        pass.each(member, m, [&](int r) {
            const uint16_t *row = embedding + static_cast<size_t>(*tokens[r]) * width;
            float *x = space.x.data() + static_cast<size_t>(r) * width;
            for (int c = 0; c < width; ++c) x[c] = from_bf16(row[c]) * embedding_scale;
        });
        core.team->barrier();
        for (size_t l = 0; l < layers.size(); ++l) {
            show(member, static_cast<int>(l), space.x);
            pass.layer(member, layers[l], static_cast<int>(l), ropes[layers[l].rope]);
        }
        pass.each(member, m, [&](int r) {
            core.kernels->norm(space.x.data() + static_cast<size_t>(r) * width, final_norm, width, shape.norm_eps,
                               space.mixed.data() + static_cast<size_t>(r) * width);
        });
        core.team->barrier();
        show(member, static_cast<int>(layers.size()), space.mixed);
        if (logit_rows.empty()) return;
        // rows that are asked for are either all or the last ones of sequences: gather them behind one another
        pass.each(member, static_cast<int>(logit_rows.size()), [&](int i) {
            std::memcpy(space.x.data() + static_cast<size_t>(i) * width,
                        space.mixed.data() + static_cast<size_t>(logit_rows[i]) * width, width * sizeof(float));
        });
        core.team->barrier();
        pass.multiply(member, space.x.data(), width, static_cast<int>(logit_rows.size()), nullptr, head,
                      Epilogue::store, logits, vocab_size);
    });
}

}  // namespace eyas
