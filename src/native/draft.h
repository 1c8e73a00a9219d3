// An EAGLE head: fusion, one decoder layer with K/V of its own, an output matrix over a draft vocabulary.
#pragma once

#include <vector>

#include "model.h"

namespace eyas {

struct DraftState {
    DraftState(int kv_heads, int head_dim, int width) : cache(1, kv_heads, head_dim), width(width) {}

    Cache cache;                              // `length` verified pairs, then the nodes of this round
    const int width;
    std::vector<float> hidden;                // [rows of this round, width]; row 0 is the last verified pair
    std::vector<std::vector<int>> ancestors;  // per row, the slots behind the verified ones that it sees
};

struct Draft {
    enum class Kind { eagle, eagle3 };

    Kind kind = Kind::eagle3;
    Shape shape;
    int input_width = 0;    // of the attention's input
    int state_width = 0;    // of all target states that are fused
    int vocab_size = 0;
    const uint16_t *embedding = nullptr;  // bf16 [vocab, width]
    Packed fusion, head;
    const float *embedding_norm = nullptr, *hidden_norm = nullptr, *final_norm = nullptr;  // EAGLE-3
    const int64_t *vocabulary = nullptr;  // target ids of the head's columns, or none where they are the same
    std::vector<Layer> layers;
    std::vector<Rope> ropes;
    Workspace space;

    // Absorbs verified pairs (states [count, state_width] and the tokens after them), forgets the round before; the
    // best `width` tokens below the root.
    void observe(DraftState &state, const int *tokens, const float *states, int count, int width, int64_t *best,
                 float *logprobs);

    // One level deeper: node k carries tokens[k] and was proposed by row rows[k].
    void expand(DraftState &state, const int *rows, const int *tokens, int count, int width, int64_t *best,
                float *logprobs);

private:
    void pass(const std::vector<Row> &rows, const int *tokens, const float *const *states,
              bool verified, int outputs, int width, int64_t *best, float *logprobs);

    std::vector<float> logits_;
};

}  // namespace eyas
