#include "draft.h"

#include <algorithm>
#include <cstring>

namespace eyas {

void Draft::observe(DraftState &state, const int *tokens, const float *states, int count, int width, int64_t *best,
                    float *logprobs) {
    const std::lock_guard<std::mutex> lock(engine().busy);
    Cache &cache = state.cache;
    cache.reserve(cache.length + count);
    for (int first = 0; first < count; first += kMaxRows) {
        const int m = std::min(kMaxRows, count - first);
        std::vector<Row> rows(m);
        std::vector<const float *> from(m);
        for (int r = 0; r < m; ++r) {
            const int at = cache.length + r;
            rows[r] = {&cache, at, at, at + 1, {}};
            from[r] = states + static_cast<size_t>(first + r) * state_width;
        }
        const bool last = first + m == count;
        pass(rows, tokens + first, from.data(), true, last ? 1 : 0, width, best, logprobs);
        cache.length += m;
    }
    state.ancestors.assign(1, {});
    state.hidden.assign(space.x.begin() + static_cast<size_t>(space.num_rows - 1) * shape.width,
                        space.x.begin() + static_cast<size_t>(space.num_rows) * shape.width);
}

void Draft::expand(DraftState &state, const int *rows, const int *tokens, int count, int width, int64_t *best,
                   float *logprobs) {
    const std::lock_guard<std::mutex> lock(engine().busy);
    Cache &cache = state.cache;
    const int nodes = static_cast<int>(state.ancestors.size()) - 1;  // row 0 is a verified pair, not a node
    cache.reserve(cache.length + nodes + count);
    std::vector<Row> level(count);
    std::vector<const float *> from(count);
    for (int k = 0; k < count; ++k) {
        const int slot = cache.length + nodes + k;
        std::vector<int> seen = state.ancestors[rows[k]];
        seen.push_back(slot);
        const int position = cache.length + static_cast<int>(seen.size()) - 1;
        level[k] = {&cache, slot, position, cache.length, seen};
        from[k] = state.hidden.data() + static_cast<size_t>(rows[k]) * shape.width;
        state.ancestors.push_back(std::move(seen));
    }
    pass(level, tokens, from.data(), false, count, width, best, logprobs);
    state.hidden.insert(state.hidden.end(), space.x.begin(),
                        space.x.begin() + static_cast<size_t>(count) * shape.width);
}

void Draft::pass(const std::vector<Row> &rows, const int *tokens, const float *const *states,
                 bool verified, int outputs, int width, int64_t *best, float *logprobs) {
    Engine &core = engine();
    const int m = static_cast<int>(rows.size()), d = shape.width;
    const int fused = kind == Kind::eagle ? 2 * d : state_width;
    space.fit(shape, rows, core.team->size(), std::max({input_width, fused, d}),
              std::max(layers[0].qkv.n, shape.ffn_width));
    int positions = 0;
    for (const Row &row : rows) positions = std::max(positions, row.position + 1);
    ropes[0].reserve(positions);
    space.first_output = m - outputs;
    logits_.resize(std::max<size_t>(logits_.size(), static_cast<size_t>(outputs) * head.n));
    std::vector<int> indices(static_cast<size_t>(outputs) * width);
    const Pass pass(*core.kernels, *core.team, shape, rows, space);
    const auto embed = [&](int r, float *out) {
        const uint16_t *row = embedding + static_cast<size_t>(tokens[r]) * d;
        for (int c = 0; c < d; ++c) out[c] = from_bf16(row[c]);
    };
    core.team->run([&](int member) {
        // the residual: EAGLE-1 fuses [embedding, hidden] at every row; EAGLE-3 fuses the target's states of verified
        // pairs and takes its own output as it is
        if (kind == Kind::eagle || verified) {
            pass.each(member, m, [&](int r) {
                float *in = space.input.data() + static_cast<size_t>(r) * fused;
                if (kind == Kind::eagle) embed(r, in);
                std::memcpy(kind == Kind::eagle ? in + d : in, states[r],
                            (kind == Kind::eagle ? d : state_width) * sizeof(float));
            });
            core.team->barrier();
            pass.multiply(member, space.input.data(), fused, m, nullptr, fusion, Epilogue::store, space.x.data(), d);
        } else {
            pass.each(member, m, [&](int r) {
                std::memcpy(space.x.data() + static_cast<size_t>(r) * d, states[r], d * sizeof(float));
            });
        }
        core.team->barrier();
        // the attention's input: EAGLE-1 the residual, EAGLE-3 [norm(embedding), norm(residual)]
        pass.each(member, m, [&](int r) {
            const float *x = space.x.data() + static_cast<size_t>(r) * d;
            float *in = space.input.data() + static_cast<size_t>(r) * input_width;
            if (kind == Kind::eagle) {
                std::memcpy(in, x, d * sizeof(float));
                return;
            }
            embed(r, in);
            core.kernels->norm(in, embedding_norm, d, shape.norm_eps, in);
            core.kernels->norm(x, hidden_norm, d, shape.norm_eps, in + d);
        });
        core.team->barrier();
        pass.layer(member, layers[0], 0, ropes[0]);
        if (outputs == 0) return;
        const float *x = space.x.data() + static_cast<size_t>(m - outputs) * d;
        pass.multiply(member, x, d, outputs, kind == Kind::eagle3 ? final_norm : nullptr, head, Epilogue::store,
                      logits_.data(), head.n);
        core.team->barrier();
        pass.each(member, outputs, [&](int r) {
            int *found = indices.data() + static_cast<size_t>(r) * width;
            core.kernels->top(logits_.data() + static_cast<size_t>(r) * head.n, head.n, width, found,
                              logprobs + static_cast<size_t>(r) * width);
            for (int w = 0; w < width; ++w) {
                best[static_cast<size_t>(r) * width + w] = vocabulary ? vocabulary[found[w]] : found[w];
            }
        });
    });
}

}  // namespace eyas
