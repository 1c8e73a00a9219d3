// The Python face of the core. Arrays come and go through the buffer protocol without copies; an object keeps the
// arrays that it was made of alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cpu_features.h"
#include "draft.h"
#include "model.h"
#include "packing.h"

namespace nb = nanobind;
using namespace eyas;

namespace {

template <typename T, typename... Shape>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu, Shape...>;
using Floats = Array<float, nb::ndim<1>>;
using Ids = Array<int32_t, nb::ndim<1>>;

// The first arguments of ours that have to be right for memory to be safe are checked here; the rest in Python.
void require(bool condition, const char *message) {
    if (!condition) throw std::invalid_argument(message);
}

constexpr int kLargest = 1 << 24;  // of any size: products of two of them fit 64 bits

Weights weights_kind(const std::string &name) {
    require(name == "bfloat16" || name == "int8", "weights are bfloat16 or int8");
    return name == "int8" ? Weights::int8 : Weights::bf16;
}

const float *data_or_none(const nb::object &array, size_t size, nb::list &alive) {
    if (array.is_none()) return nullptr;
    const Floats floats = nb::cast<Floats>(array);
    require(floats.size() == size, "a vector has the wrong length");
    alive.append(array);
    return floats.data();
}

struct PyMatrix {
    Packed packed;
    nb::list alive;
};

struct PyLayer {
    Layer layer;
    nb::list alive;
};

struct PyModel {
    Model model;
    nb::list alive;
};

struct PyDraft {
    Draft draft;
    nb::list alive;
};

template <typename T>
nb::ndarray<nb::numpy, T> own(std::vector<T> &&values, std::vector<size_t> shape) {
    auto *moved = new std::vector<T>(std::move(values));
    nb::capsule owner(moved, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
    return nb::ndarray<nb::numpy, T>(moved->data(), shape.size(), shape.data(), owner);
}

// Big results come again and again in the same sizes: fresh memory would cost a page fault for each 4 kilobytes.
class Recycled {
public:
    explicit Recycled(size_t count) : buffer_(take(count)) {}
    float *data() { return buffer_->data(); }

    nb::ndarray<nb::numpy, float> give(std::vector<size_t> shape) {
        Buffer *buffer = buffer_.release();
        nb::capsule owner(buffer, [](void *p) noexcept { put_back(static_cast<Buffer *>(p)); });
        return nb::ndarray<nb::numpy, float>(buffer->data(), shape.size(), shape.data(), owner);
    }

private:
    using Buffer = std::vector<float>;
    static constexpr size_t kKept = 8;

    static std::mutex &mutex() {
        static std::mutex the;
        return the;
    }
    static std::vector<std::unique_ptr<Buffer>> &free() {
        static auto *buffers = new std::vector<std::unique_ptr<Buffer>>();  // outlives arrays that die at exit
        return *buffers;
    }
    static std::unique_ptr<Buffer> take(size_t count) {
        const std::lock_guard<std::mutex> lock(mutex());
        auto &buffers = free();
        size_t best = buffers.size();
        for (size_t i = 0; i < buffers.size(); ++i) {
            const size_t size = buffers[i]->size();
            if (size >= count && size <= 4 * count + 1024 && (best == buffers.size() || size < buffers[best]->size())) {
                best = i;
            }
        }
        if (best == buffers.size()) return std::make_unique<Buffer>(count);
        std::unique_ptr<Buffer> found = std::move(buffers[best]);
        buffers.erase(buffers.begin() + static_cast<std::ptrdiff_t>(best));
        return found;
    }
    static void put_back(Buffer *buffer) {
        const std::lock_guard<std::mutex> lock(mutex());
        free().emplace_back(buffer);
        if (free().size() > kKept) free().erase(free().begin());
    }

    std::unique_ptr<Buffer> buffer_;
};

Shape shape_of(const nb::dict &d) {
    const auto integer = [&](const char *key) { return nb::cast<int>(d[key]); };
    Shape s;
    s.width = integer("width");
    s.heads = integer("heads");
    s.kv_heads = integer("kv_heads");
    s.head_dim = integer("head_dim");
    s.ffn_width = integer("ffn_width");
    s.window = integer("window");
    s.norm_eps = nb::cast<float>(d["norm_eps"]);
    s.query_scale = nb::cast<float>(d["query_scale"]);
    for (int size : {s.width, s.heads, s.kv_heads, s.head_dim, s.ffn_width}) {
        require(size > 0 && size < kLargest, "impossible sizes");
    }
    require(s.window >= 0 && s.heads < 4096 && s.head_dim < 4096 && s.heads % s.kv_heads == 0 && s.head_dim % 2 == 0,
            "impossible sizes");
    return s;
}

void check_layer(const Shape &s, const Layer &layer, int input_width) {
    require(layer.qkv.n == (s.heads + 2 * s.kv_heads) * s.head_dim && layer.qkv.k == input_width, "qkv misfits");
    require(layer.output.n == s.width && layer.output.k == s.heads * s.head_dim, "output misfits");
    require(layer.gate_up.n == s.ffn_width && layer.gate_up.k == s.width, "gate_up misfits");
    require(layer.down.n == s.width && layer.down.k == s.ffn_width, "down misfits");
}

std::vector<Rope> ropes_of(const std::vector<Floats> &frequencies, const std::vector<float> &scales, int head_dim) {
    require(!frequencies.empty() && frequencies.size() == scales.size(), "a rotary table is missing");
    std::vector<Rope> ropes;
    for (size_t i = 0; i < frequencies.size(); ++i) {
        require(static_cast<int>(frequencies[i].size()) * 2 == head_dim, "a rotary table has the wrong width");
        const float *f = frequencies[i].data();
        ropes.emplace_back(std::vector<float>(f, f + frequencies[i].size()), scales[i]);
    }
    return ropes;
}

void check_tokens(const int *tokens, size_t count, size_t vocab_size) {
    for (size_t i = 0; i < count; ++i) {
        require(tokens[i] >= 0 && static_cast<size_t>(tokens[i]) < vocab_size, "a token is outside the vocabulary");
    }
}

void set_num_threads(int count) {
    require(count >= 1 && count <= 1024, "threads must be between 1 and 1024");
    Engine &core = engine();
    const std::lock_guard<std::mutex> lock(core.busy);
    core.asked_threads = count;
    if (core.team->size() != count) {
        core.team.reset();
        core.team = std::make_unique<Team>(count);
    }
}

nb::tuple verify(PyModel &self, const std::vector<Cache *> &caches, const Ids &counts, const Ids &tokens,
                 const Ids &parents, const std::vector<int> &reads, bool last_only) {
    Model &model = self.model;
    require(caches.size() == counts.size() && tokens.size() == parents.size(), "trees misfit");
    std::vector<Branching> trees;
    size_t rows = 0;
    for (size_t i = 0; i < caches.size(); ++i) {
        const int nodes = counts.data()[i];
        require(nodes >= 1 && rows + nodes <= tokens.size(), "trees misfit");
        require(std::count(caches.begin(), caches.end(), caches[i]) == 1, "a cache can hold one tree at a time");
        const int *up = parents.data() + rows;
        for (int node = 1; node < nodes; ++node) require(up[node] >= 0 && up[node] < node, "parents come first");
        trees.push_back({caches[i], tokens.data() + rows, up, nodes});
        rows += nodes;
    }
    require(rows == tokens.size() && rows > 0, "trees misfit");
    check_tokens(tokens.data(), rows, model.vocab_size);
    for (size_t i = 0; i < reads.size(); ++i) {
        require(reads[i] >= 0 && reads[i] <= static_cast<int>(model.layers.size()), "no such state");
        require(i == 0 || reads[i] > reads[i - 1], "states must ascend");
    }
    const size_t logit_rows = last_only ? caches.size() : rows;
    Recycled hidden(rows * reads.size() * model.shape.width), logits(logit_rows * model.vocab_size);
    {
        nb::gil_scoped_release release;
        model.verify(trees, reads, last_only, hidden.data(), logits.data());
    }
    return nb::make_tuple(logits.give({logit_rows, static_cast<size_t>(model.vocab_size)}),
                          hidden.give({rows, reads.size(), static_cast<size_t>(model.shape.width)}));
}

struct Best {
    std::vector<int64_t> tokens;
    std::vector<float> logprobs;
    Best(int rows, int width) : tokens(static_cast<size_t>(rows) * width), logprobs(tokens.size()) {}
    nb::tuple give(int rows, int width) {
        const std::vector<size_t> shape = {static_cast<size_t>(rows), static_cast<size_t>(width)};
        return nb::make_tuple(own(std::move(tokens), shape), own(std::move(logprobs), shape));
    }
};

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compiled core of eyas. Reach it through eyas.native: it may be absent.";

    m.def(
        "cpu_features",
        [] {
            nb::dict features;
            for (const CpuFeature &feature : cpu_features()) features[feature.name] = feature.usable;
            return features;
        },
        "Which vector instruction sets the CPU and the operating system let us use.");
    m.def("kernels", [] { return std::string(choose_kernels().name); },
          "The name of the kernels in use: portable, avx2 or avx512.");
    m.def("set_num_threads", &set_num_threads);
    m.def("num_threads", [] { return engine().asked_threads; }, "What set_num_threads was given last; 0 before that.");

    m.def(
        "pack",
        [](const std::string &kind, const Array<float, nb::ndim<2>> &rows, const Ids &order) {
            const int k = static_cast<int>(rows.shape(1));
            std::vector<int> columns(order.data(), order.data() + order.size());
            for (int row : columns) require(row < static_cast<int>(rows.shape(0)), "no such row");
            const Weights weights = weights_kind(kind);
            const float *data = rows.data();
            PackedBytes packed;
            {
                nb::gil_scoped_release release;
                packed = pack(weights, data, k, columns);
            }
            const size_t bytes = packed.weights.size(), scales = packed.scales.size();
            return nb::make_tuple(own(std::move(packed.weights), {bytes}), own(std::move(packed.scales), {scales}));
        },
        nb::arg("kind"), nb::arg("rows"), nb::arg("order"),
        "Rows [n, k], in the order given (-1: zeros), as the bytes that products read, and scales (int8).");

    nb::class_<PyMatrix>(m, "Matrix")
        .def(
            "__init__",
            [](PyMatrix *self, const std::string &kind, int n, int k, int num_columns,
               const Array<uint8_t, nb::ndim<1>> &weights, nb::object scales, nb::object bias) {
                const Weights weights_form = weights_kind(kind);
                require(n > 0 && k > 0 && num_columns >= n && k < kLargest && num_columns < kLargest, "impossible sizes");
                require(weights.size() == packed_bytes(weights_form, num_columns, k), "packed weights misfit");
                const int columns = round_up(num_columns, kLanes * kGroupBlocks);
                new (self) PyMatrix();
                self->alive.append(weights);
                Packed &p = self->packed;
                p.kind = weights_form;
                p.n = n;
                p.k = k;
                p.steps = static_cast<int>(weights.size() / columns / 4);
                p.weights = weights.data();
                p.scales = data_or_none(scales, columns, self->alive);
                p.bias = data_or_none(bias, columns, self->alive);
                require((p.kind == Weights::int8) == (p.scales != nullptr), "int8 weights have scales, others none");
            },
            nb::arg("kind"), nb::arg("n"), nb::arg("k"), nb::arg("num_columns"), nb::arg("weights"),
            nb::arg("scales").none(), nb::arg("bias").none(),
            "Packed weights. n columns come out; num_columns are packed (both halves of a gated pair).");

    nb::class_<PyLayer>(m, "Layer")
        .def(
            "__init__",
            [](PyLayer *self, const nb::dict &shape, const PyMatrix &qkv, const PyMatrix &output,
               const PyMatrix &gate_up, const PyMatrix &down, const nb::dict &norms, const std::string &activation,
               bool windowed, int rope) {
                const Shape s = shape_of(shape);
                require(activation == "silu" || activation == "gelu_tanh", "activations are silu or gelu_tanh");
                new (self) PyLayer();
                Layer &l = self->layer;
                l.qkv = qkv.packed, l.output = output.packed, l.gate_up = gate_up.packed, l.down = down.packed;
                const std::vector<std::pair<const char *, const float **>> slots = {
                    {"input", &l.input_norm}, {"query", &l.query_norm},
                    {"key", &l.key_norm},     {"after_attention", &l.after_attention},
                    {"mlp", &l.mlp_norm},     {"after_mlp", &l.after_mlp}};
                for (const auto &[name, slot] : slots) {
                    const bool head = slot == &l.query_norm || slot == &l.key_norm;
                    if (norms.contains(name)) {
                        *slot = data_or_none(norms[name], head ? s.head_dim : s.width, self->alive);
                    }
                }
                require(l.mlp_norm != nullptr, "a layer needs the norm before its MLP");
                l.gate = activation == "silu" ? Epilogue::silu_gate : Epilogue::gelu_gate;
                l.windowed = windowed;
                l.rope = rope;
                for (const PyMatrix *matrix : {&qkv, &output, &gate_up, &down}) {
                    self->alive.append(nb::find(*matrix));
                }
            },
            nb::arg("shape"), nb::arg("qkv"), nb::arg("output"), nb::arg("gate_up"), nb::arg("down"),
            nb::arg("norms"), nb::arg("activation"), nb::arg("windowed"), nb::arg("rope"));

    nb::class_<Cache>(m, "Cache")
        .def_ro("length", &Cache::length)
        .def_ro("pending", &Cache::pending)
        .def("keep", [](Cache &self, const std::vector<int> &path) {
            for (size_t i = 0; i < path.size(); ++i) {
                require(path[i] < self.pending && path[i] >= (i ? path[i - 1] + 1 : 0), "no such path");
            }
            self.keep(path);
        })
        .def("rewind", [](Cache &self, int length) {
            require(length >= 0 && length <= self.length, "no such length");
            self.length = length;
            self.pending = 0;
        });

    nb::class_<PyModel>(m, "Model")
        .def(
            "__init__",
            [](PyModel *self, const nb::dict &shape, const nb::list &layers,
               const Array<uint16_t, nb::ndim<2>> &embedding, float embedding_scale, const Floats &final_norm,
               const PyMatrix &head, const std::vector<Floats> &frequencies, const std::vector<float> &scales) {
                const Shape s = shape_of(shape);
                require(static_cast<int>(embedding.shape(1)) == s.width && head.packed.k == s.width &&
                            head.packed.n == static_cast<int>(embedding.shape(0)),
                        "embedding and head misfit");
                require(static_cast<int>(final_norm.size()) == s.width && layers.size() > 0, "the model misfits");
                std::vector<Rope> ropes = ropes_of(frequencies, scales, s.head_dim);
                new (self) PyModel();
                Model &model = self->model;
                model.shape = s;
                model.vocab_size = static_cast<int>(embedding.shape(0));
                model.embedding_scale = embedding_scale;
                model.embedding = embedding.data();
                model.final_norm = final_norm.data();
                model.head = head.packed;
                model.ropes = std::move(ropes);
                for (nb::handle item : layers) {
                    const Layer &layer = nb::cast<const PyLayer &>(item).layer;
                    check_layer(s, layer, s.width);
                    require(layer.input_norm && layer.rope >= 0 && layer.rope < static_cast<int>(model.ropes.size()),
                            "a layer misfits");
                    model.layers.push_back(layer);
                }
                self->alive.append(layers);
                self->alive.append(embedding);
                self->alive.append(final_norm);
                self->alive.append(nb::find(head));
            },
            nb::arg("shape"), nb::arg("layers"), nb::arg("embedding"), nb::arg("embedding_scale"),
            nb::arg("final_norm"), nb::arg("head"), nb::arg("frequencies"), nb::arg("rope_scales"))
        .def("new_cache",
             [](const PyModel &self) {
                 const Shape &s = self.model.shape;
                 return new Cache(static_cast<int>(self.model.layers.size()), s.kv_heads, s.head_dim);
             })
        .def("verify", &verify, nb::arg("caches"), nb::arg("counts"), nb::arg("tokens"), nb::arg("parents"),
             nb::arg("reads"), nb::arg("last_only"),
             "Trees, one after the other -> logits [rows, vocab] and states [nodes, reads, width].");

    nb::class_<DraftState>(m, "DraftState")
        .def_prop_ro("length", [](const DraftState &s) { return s.cache.length; })
        .def("rewind", [](DraftState &self, int length) {
            require(length >= 0 && length <= self.cache.length, "no such length");
            self.cache.length = length;
            self.ancestors.clear();
        });

    nb::class_<PyDraft>(m, "Draft")
        .def(
            "__init__",
            [](PyDraft *self, const std::string &kind, const nb::dict &shape, int num_states,
               const Array<uint16_t, nb::ndim<2>> &embedding, const PyMatrix &fusion, const PyLayer &layer,
               const PyMatrix &head, nb::object vocabulary, const nb::dict &norms, const Floats &frequencies) {
                const Shape s = shape_of(shape);
                require(kind == "eagle" || kind == "eagle3", "draft kinds are eagle and eagle3");
                const bool first = kind == "eagle";
                const int input_width = first ? s.width : 2 * s.width;
                check_layer(s, layer.layer, input_width);
                require(static_cast<int>(embedding.shape(1)) == s.width && head.packed.k == s.width &&
                            fusion.packed.n == s.width,
                        "fusion, embedding and head misfit");
                std::vector<Rope> ropes = ropes_of({frequencies}, {1.0f}, s.head_dim);
                new (self) PyDraft();
                Draft &d = self->draft;
                d.kind = first ? Draft::Kind::eagle : Draft::Kind::eagle3;
                d.shape = s;
                d.input_width = input_width;
                d.state_width = num_states;
                require(fusion.packed.k == (first ? 2 * s.width : num_states) && (!first || num_states == s.width),
                        "the fusion misfits");
                d.embedding = embedding.data();
                d.vocab_size = static_cast<int>(embedding.shape(0));
                d.fusion = fusion.packed;
                d.head = head.packed;
                d.layers = {layer.layer};
                d.ropes = std::move(ropes);
                if (!first) {
                    d.embedding_norm = data_or_none(norms["embedding"], s.width, self->alive);
                    d.hidden_norm = data_or_none(norms["hidden"], s.width, self->alive);
                    d.final_norm = data_or_none(norms["final"], s.width, self->alive);
                }
                if (!vocabulary.is_none()) {
                    const auto ids = nb::cast<Array<int64_t, nb::ndim<1>>>(vocabulary);
                    require(static_cast<int>(ids.size()) == d.head.n, "the draft vocabulary misfits");
                    d.vocabulary = ids.data();
                    self->alive.append(vocabulary);
                }
                self->alive.append(embedding);
                self->alive.append(nb::find(layer));
                self->alive.append(nb::find(fusion));
                self->alive.append(nb::find(head));
            },
            nb::arg("kind"), nb::arg("shape"), nb::arg("num_states"), nb::arg("embedding"), nb::arg("fusion"),
            nb::arg("layer"), nb::arg("head"), nb::arg("vocabulary").none(), nb::arg("norms"), nb::arg("frequencies"))
        .def("new_state",
             [](const PyDraft &self) {
                 const Shape &s = self.draft.shape;
                 return new DraftState(s.kv_heads, s.head_dim, s.width);
             })
        .def(
            "observe",
            [](PyDraft &self, DraftState &state, const Ids &tokens, const Array<float, nb::ndim<2>> &states,
               int width) {
                Draft &d = self.draft;
                const int count = static_cast<int>(tokens.size());
                require(count > 0 && static_cast<int>(states.shape(0)) == count &&
                            static_cast<int>(states.shape(1)) == d.state_width,
                        "states misfit");
                check_tokens(tokens.data(), tokens.size(), d.vocab_size);
                width = std::min(width, d.head.n);
                Best best(1, width);
                {
                    nb::gil_scoped_release release;
                    d.observe(state, tokens.data(), states.data(), count, width, best.tokens.data(),
                              best.logprobs.data());
                }
                return best.give(1, width);
            },
            nb::arg("state"), nb::arg("tokens"), nb::arg("states"), nb::arg("width"))
        .def(
            "expand",
            [](PyDraft &self, DraftState &state, const Ids &rows, const Ids &tokens, int width) {
                Draft &d = self.draft;
                const int count = static_cast<int>(tokens.size());
                require(count > 0 && count <= kMaxRows && rows.size() == tokens.size(), "rows misfit");
                check_tokens(tokens.data(), tokens.size(), d.vocab_size);
                for (int k = 0; k < count; ++k) {
                    require(rows.data()[k] >= 0 && rows.data()[k] < static_cast<int>(state.ancestors.size()),
                            "no such row");
                }
                width = std::min(width, d.head.n);
                Best best(count, width);
                {
                    nb::gil_scoped_release release;
                    d.expand(state, rows.data(), tokens.data(), count, width, best.tokens.data(),
                             best.logprobs.data());
                }
                return best.give(count, width);
            },
            nb::arg("state"), nb::arg("rows"), nb::arg("tokens"), nb::arg("width"));
}
