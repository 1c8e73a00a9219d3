// One decoder layer over a batch of rows, shared by the target and by draft heads.
#pragma once

#include <new>
#include <vector>

#include "cache.h"
#include "kernels.h"
#include "threads.h"

namespace eyas {

// Vectors of numbers that begin with a cache line: no store straddles two, and threads that share out columns in
// multiples of sixteen share no line.
template <typename T>
struct Aligned {
    using value_type = T;
    Aligned() = default;
    template <typename U>
    Aligned(const Aligned<U> &) {}
    T *allocate(size_t n) { return static_cast<T *>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T *p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const Aligned &) const { return true; }
    bool operator!=(const Aligned &) const { return false; }
};
template <typename T>
using Numbers = std::vector<T, Aligned<T>>;

struct Shape {
    int width = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn_width = 0;
    float norm_eps = 0, query_scale = 0;
    int window = 0;  // positions that windowed layers see, or 0
};

struct Layer {
    Packed qkv, output, gate_up, down;
    const float *input_norm = nullptr;   // none: the caller gives the attention's input
    const float *query_norm = nullptr, *key_norm = nullptr;               // Qwen3, Gemma3: of each head
    const float *after_attention = nullptr, *after_mlp = nullptr;         // Gemma3: before the residual is added
    const float *mlp_norm = nullptr;
    Epilogue gate = Epilogue::silu_gate;
    bool windowed = false;
    int rope = 0;  // which table
};

// Cosines and sines by position, made when a position is first needed.
class Rope {
public:
    Rope(std::vector<float> frequencies, float scale) : frequencies_(std::move(frequencies)), scale_(scale) {}
    void reserve(int positions);
    int half() const { return static_cast<int>(frequencies_.size()); }
    const float *cosines(int position) const { return table_.data() + static_cast<size_t>(position) * 2 * half(); }
    const float *sines(int position) const { return cosines(position) + half(); }

private:
    std::vector<float> frequencies_;
    float scale_;
    int positions_ = 0;
    std::vector<float> table_;
};

// A token under test: where its K/V go, and where it looks.
struct Row {
    Cache *cache = nullptr;
    int slot = 0;
    int position = 0;
    int in_place = 0;         // its logical positions below this stand in their own slots,
    std::vector<int> slots;   // and the others in these
};

constexpr int kMaxRows = 128;  // of one pass; longer inputs take several

// What the rows of one pass need, and each thread for itself. Grows, never shrinks.
class Workspace {
public:
    void fit(const Shape &shape, const std::vector<Row> &rows, int threads, int input_width, int most_columns);

    int num_rows = 0;
    int first_output = 0;      // rows before this one only leave their K/V
    Numbers<float> x;          // [rows, width]: the residual
    Numbers<float> input;      // [rows, input_width]: the attention's input where the layer has no norm of its own
    Numbers<float> wide;       // [rows, most_columns]: q, k and v; then the gated hidden values
    Numbers<float> attended, mixed;
    Numbers<uint32_t> queries;  // [kv head][row][head of the group][pairs]
    std::vector<Look> full, windowed;

    struct Private {
        Numbers<float> normed;
        Numbers<uint32_t> words;
        Numbers<float> scales;
        Numbers<int32_t> offsets;
        Numbers<float> scores, sums;
        Numbers<uint16_t> weights, gathered;
    };
    std::vector<Private> own;
};

// The members of the team call these together, each with its number.
class Pass {
public:
    Pass(const Kernels &kernels, Team &team, const Shape &shape, const std::vector<Row> &rows, Workspace &space)
        : kernels_(kernels), team_(team), shape_(shape), rows_(rows), space_(space) {}

    void layer(int member, const Layer &layer, int index, const Rope &rope) const;

    // x [m, k], normed first where `norm` is given, times the matrix: each member computes its share of the columns.
    void multiply(int member, const float *x, size_t stride, int m, const float *norm, const Packed &matrix,
                  Epilogue epilogue, float *out, size_t out_stride) const;

    // Rows of [0, count) that a member takes where rows are shared out.
    template <typename Work>
    void each(int member, int count, const Work &work) const {
        for (int i = member; i < count; i += team_.size()) work(i);
    }

private:
    void place(int member, const Layer &layer, int index, const Rope &rope) const;
    void attend(int member, const Layer &layer, int index) const;
    void add_normed(int member, const float *norm) const;

    const Kernels &kernels_;
    Team &team_;
    const Shape &shape_;
    const std::vector<Row> &rows_;
    Workspace &space_;
};

}  // namespace eyas
