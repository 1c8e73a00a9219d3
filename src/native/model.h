// The target: embedding, layers, final norm, output head; one call verifies the trees of several sequences.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "layer.h"

namespace eyas {

// Which kernels this process runs, and with how many threads. One forward runs at a time.
struct Engine {
    const Kernels *kernels;
    std::unique_ptr<Team> team;
    int asked_threads;  // 0: nobody has said yet
    std::mutex busy;
};
Engine &engine();

// A tree behind what a cache holds: nodes after their parents, node 0 the root.
struct Branching {
    Cache *cache;
    const int *tokens;
    const int *parents;
    int nodes;
};

// The rows of trees, all sequences one after the other.
std::vector<Row> rows_of(const std::vector<Branching> &trees);

struct Model {
    Shape shape;
    int vocab_size = 0;
    float embedding_scale = 1;
    const uint16_t *embedding = nullptr;  // bf16 [vocab, width]
    std::vector<Layer> layers;
    std::vector<Rope> ropes;
    const float *final_norm = nullptr;
    Packed head;
    Workspace space;

    // States read (`reads`, ascending; the last possible one is after the final norm) of every node into `hidden`
    // [nodes, reads, width], and logits of every node, or of the last one of each tree, into `logits` [.., vocab].
    void verify(const std::vector<Branching> &trees, const std::vector<int> &reads, bool last_only, float *hidden,
                float *logits);

private:
    void pass(const std::vector<Row> &rows, const int *const *tokens, const std::vector<int> &reads, float *hidden,
              const std::vector<int> &logit_rows, float *logits);
};

}  // namespace eyas
