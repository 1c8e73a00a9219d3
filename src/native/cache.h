// Keys and values of one sequence, in pages that never move: a cache grows without copying.
#pragma once

#include <cstring>
#include <new>
#include <vector>

#include "kernels.h"

namespace eyas {

class Cache {
public:
    Cache(int layers, int kv_heads, int head_dim)
        : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), padded_dim_(round_up(head_dim, kLanes)) {}

    ~Cache() {
        for (uint16_t *page : pages_) ::operator delete[](page, std::align_val_t{64});
    }
    Cache(const Cache &) = delete;
    Cache &operator=(const Cache &) = delete;

    int length = 0;   // slots that are kept; the rows of the tree under test stand behind them
    int pending = 0;  // nodes of that tree

    void reserve(int slots) {
        while (static_cast<int>(pages_.size()) * kPageSlots < slots) {
            // zeros: a slot that was never written must not hold a NaN, which a weight of zero would not silence
            const size_t size = static_cast<size_t>(layers_) * kv_heads_ * head_values();
            void *page = ::operator new[](size * sizeof(uint16_t), std::align_val_t{64});
            std::memset(page, 0, size * sizeof(uint16_t));
            pages_.push_back(static_cast<uint16_t *>(page));
        }
    }

    HeadPages head(int layer, int kv_head) const {
        const size_t first = static_cast<size_t>(layer * kv_heads_ + kv_head) * head_values();
        return {pages_.data(), first, first + static_cast<size_t>(kPageSlots) * head_dim_, head_dim_, padded_dim_};
    }

    // One token's key and value, both head_dim of bf16.
    void write(int layer, int kv_head, int slot, const uint16_t *key, const uint16_t *value) {
        uint16_t *page = pages_[slot / kPageSlots];
        const HeadPages at = head(layer, kv_head);
        uint16_t *keys = page + at.keys + key_place(slot % kPageSlots);
        for (int c = 0; c < head_dim_; ++c) keys[c / 2 * 2 * kLanes + c % 2] = key[c];
        uint16_t *values = page + at.values + value_place(slot % kPageSlots);
        for (int c = 0; c < head_dim_; ++c) values[2 * c] = value[c];
    }

    // Keeps the nodes of `path` (ascending, counted from the root) and forgets the others; moves only what must.
    void keep(const std::vector<int> &path) {
        for (int i = 0; i < static_cast<int>(path.size()); ++i) {
            if (path[i] != i) move(length + path[i], length + i);
        }
        length += static_cast<int>(path.size());
        pending = 0;
    }

private:
    size_t head_values() const { return static_cast<size_t>(kPageSlots) * (head_dim_ + padded_dim_); }
    size_t key_place(int place) const {
        return static_cast<size_t>(place / kLanes) * kLanes * head_dim_ + place % kLanes * 2;
    }
    size_t value_place(int place) const { return static_cast<size_t>(place / 2) * 2 * padded_dim_ + place % 2; }

    void move(int from, int to) {
        for (int layer = 0; layer < layers_; ++layer) {
            for (int kv_head = 0; kv_head < kv_heads_; ++kv_head) {
                const HeadPages at = head(layer, kv_head);
                const uint16_t *source = pages_[from / kPageSlots];
                uint16_t *target = pages_[to / kPageSlots];
                const uint16_t *key = source + at.keys + key_place(from % kPageSlots);
                uint16_t *new_key = target + at.keys + key_place(to % kPageSlots);
                for (int c = 0; c < head_dim_; ++c) {
                    const int offset = c / 2 * 2 * kLanes + c % 2;
                    new_key[offset] = key[offset];
                }
                const uint16_t *value = source + at.values + value_place(from % kPageSlots);
                uint16_t *new_value = target + at.values + value_place(to % kPageSlots);
                for (int c = 0; c < head_dim_; ++c) new_value[2 * c] = value[2 * c];
            }
        }
    }

    const int layers_, kv_heads_, head_dim_, padded_dim_;
    std::vector<uint16_t *> pages_;
};

}  // namespace eyas
