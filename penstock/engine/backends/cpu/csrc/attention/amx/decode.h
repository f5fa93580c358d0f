// What decode on AMX tiles shares for every cache format: tokens in groups of 16, tasks that share tile shapes.
//
// A task is a (sequence, kv head, part of the keys). Tasks are done a few at a time, step by step: setting the shape of
// tiles takes as long as multiplying hundreds of keys. The data of the thread's next tasks is prefetched meanwhile.

#pragma once

#include "attention/amx/prefill.h"

#if defined(PK_AMX)

namespace pk::PK_SET {

constexpr int kTogether = 4;  // tasks, at most
constexpr int kTogetherKeys = 1024;  // and keys, about: intermediate results stay in the core's own caches
constexpr int kGroups = kPart / kTileGroup;
constexpr int kSharing = 8;  // query heads that share keys, at most: two halves of each are 16 rows

inline bool by_groups(const AttentionArgs& a) {
    return a.dtype == 2 && a.head_dim % 64 == 0 && a.heads / a.kv_heads <= kSharing && a.block_size % kTileGroup == 0;
}

// A query head takes a lane: of 4 or 8.
inline int group_lanes(const AttentionArgs& a) { return a.heads / a.kv_heads <= 4 ? 4 : 8; }

// Keys, values and scales (of an int8 cache) of a task, by groups of 16 tokens.
struct TokenGroups {
    const uint8_t *keys[kGroups], *values[kGroups];
    const bf16 *key_scales[kGroups], *value_scales[kGroups];
    int count = 0, bytes = 0;  // bytes of a group's keys, and of its values

    void find(const AttentionArgs& a, const Task& task) {
        const int number = a.cache_dtype == 3 ? 1 : 2;
        bytes = kTileGroup * a.head_dim * number;
        count = 0;
        const int first = task.begin / kTileGroup * kTileGroup;
        const int32_t* block = a.block_tables + a.rows[task.sequence] * a.table_stride + first / a.block_size;
        int offset = first % a.block_size;
        for (int key = first; key < task.end; key += kTileGroup, ++count) {
            keys[count] = static_cast<const uint8_t*>(a.k_cache) +
                          (*block * a.k_block_stride + task.kv_head * a.k_head_stride + offset * a.head_dim) * number;
            values[count] = static_cast<const uint8_t*>(a.v_cache) +
                            (*block * a.v_block_stride + task.kv_head * a.v_head_stride + offset * a.head_dim) * number;
            const int64_t scale = (int64_t(*block) * a.kv_heads + task.kv_head) * a.block_size + offset;
            key_scales[count] = static_cast<const bf16*>(a.k_scales) + scale;
            value_scales[count] = static_cast<const bf16*>(a.v_scales) + scale;
            if ((offset += kTileGroup) == a.block_size) {
                offset = 0;
                ++block;
            }
        }
        if (number == 1)
            for (int i = 0; i < count; ++i) {
                __builtin_prefetch(key_scales[i], 0, 2);
                __builtin_prefetch(value_scales[i], 0, 2);
            }
    }
};

// Prefetches the keys and values of a later task, a few lines at a time in step with the work: a core has a limited
// number of outstanding reads, and stalls when it issues more.
class PrefetchTask {
  public:
    PrefetchTask() = default;
    explicit PrefetchTask(const TokenGroups* of) : of_(of), lines_(of ? of->bytes / 64 : 0) {}

    // Eight lines; a group's keys, and its values, are a multiple of that.
    PK_INLINE void prefetch() {
        if (left_ == 0 && !open_group()) return;
        PK_UNROLL for (int i = 0; i < 8; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
        at_ += 512;
        left_ -= 8;
    }

    // A quarter of a group of tokens: each of the four steps of its work prefetches as much.
    PK_INLINE void prefetch_quarter() {
        for (int i = 0; i < lines_; i += 16) prefetch();
    }

  private:
    PK_INLINE bool open_group() {
        if (!of_ || group_ == 2 * of_->count) return false;
        at_ = group_ < of_->count ? of_->keys[group_] : of_->values[group_ - of_->count];
        left_ = lines_;
        ++group_;
        return true;
    }

    const TokenGroups* of_ = nullptr;
    const uint8_t* at_ = nullptr;
    int lines_ = 0, left_ = 0, group_ = 0;
};

template <int LANES>
class DecodeTask {
  protected:
    void open(const AttentionArgs& args, const Task& task_, const TokenGroups& own, const TokenGroups* following) {
        a = &args;
        task = &task_;
        group = a->heads / a->kv_heads;
        dim = a->head_dim;
        cached = &own;
        ahead = PrefetchTask(following);
    }

    const bf16* query(int g) const {
        return static_cast<const bf16*>(a->q) + a->query_starts[task->sequence] * a->q_stride +
               int64_t(task->kv_head * group + g) * dim;
    }

    // The tokens of group i that belong to the task.
    __mmask16 there(int i) const {
        const int key = task->begin / kTileGroup * kTileGroup + i * kTileGroup;
        const int from = std::max(0, task->begin - key), to = std::min(kTileGroup, task->end - key);
        return __mmask16(((1u << to) - 1) & ~((1u << from) - 1));
    }

    static constexpr int kPerVector = VL / LANES;  // keys of a vector of scores

    // The numbers of keys j * kPerVector ... of a group, each in all lanes of its key.
    PK_INLINE static vf by_key(vf numbers, int j) {
        alignas(64) int32_t of[VL];
        PK_UNROLL for (int i = 0; i < VL; ++i) of[i] = j * kPerVector + i / LANES;
        return (vf)_mm512_permutexvar_ps(_mm512_load_si512(of), (__m512)numbers);
    }

    // Stores scores [key][lane] from score(i, j), vector j of group i in `score_unit`; keys outside the task are masked.
    // Returns the largest of every lane, in all its places.
    template <class F>
    PK_INLINE vf keep_scores(float* scores, F&& score) {
        vf top = splat(kMasked);
        for (int i = 0; i < cached->count; ++i) {
            const __mmask16 seen = there(i);
            const vf limit = (vf)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, _mm512_set1_ps(INFINITY));
            PK_UNROLL for (int j = 0; j < LANES; ++j) {
                vf x = finished(score(i, j), *a);
                if (seen != 0xffff) x = vmin(x, by_key(limit, j));
                store(scores + (i * LANES + j) * VL, x);
                top = vmax(top, x);
            }
            ahead.prefetch_quarter();
        }
        return across_keys(top, LANES, [](vf x, vf y) { return vmax(x, y); });
    }

    // Stores the largest score and the sum of weights behind the head's numbers.
    void store_totals(float* partial, vf top, vf total) const {
        const int width = padded(dim), stride = width + VL;
        total = across_keys(total, LANES, [](vf x, vf y) { return x + y; });
        for (int g = 0; g < group; ++g) {
            partial[g * stride + width] = top[g] * (1 / kLog2);
            partial[g * stride + width + 1] = total[g];
        }
    }

    const AttentionArgs* a;
    const Task* task;
    const TokenGroups* cached;
    PrefetchTask ahead;  // what this thread will probably need next
    int group, dim;
};

// A thread's tasks, a few at a time.
template <class Part>
class DecodeRun {
  public:
    DecodeRun(const AttentionArgs& args, float* scratch) : a(args), scratch_(scratch) {}
    ~DecodeRun() { _tile_release(); }

    // Those from `following` on will probably be the next. partial(i): where the result of tasks[i] goes.
    template <class F>
    void together(const Task* tasks, int count, const Task* following, int followers, F&& partial) {
        if (tasks != expected_) find(tasks, count, own_);
        find(following, followers, next_);
        Part parts[kTogether];
        for (int i = 0; i < count; ++i)
            parts[i].start(a, tasks[i], own_[i], i < followers ? next_ + i : nullptr, scratch_ + i * Part::floats(a));
        if (Part::kReshapes || !shaped_) parts[0].shape_for_keys();
        shaped_ = true;
        for (int i = 0; i < count; ++i) parts[i].multiply_keys();
        for (int i = 0; i < count; ++i) parts[i].softmax(partial(i));
        if constexpr (Part::kReshapes) {
            uint8_t* const panels = reinterpret_cast<uint8_t*>(scratch_ + kTogether * Part::floats(a));
            parts[0].shape_for_values();
            for (int i = 0; i < count; ++i) parts[i].add_values(panels, partial(i));
        } else {
            for (int i = 0; i < count; ++i) parts[i].add_values(partial(i));
        }
        std::swap(own_, next_);
        expected_ = following;
    }

  private:
    void find(const Task* tasks, int count, TokenGroups* groups) const {
        for (int i = 0; i < count; ++i) groups[i].find(a, tasks[i]);
    }

    const AttentionArgs& a;
    float* const scratch_;
    TokenGroups groups_[2][kTogether], *own_ = groups_[0], *next_ = groups_[1];
    const Task* expected_ = nullptr;  // whose groups have been found
    bool shaped_ = false;
};

template <class Part>
size_t together_floats(const AttentionArgs& a) {
    return kTogether * Part::floats(a) + (Part::kReshapes ? 2 * kTileBytes : 0);
}

// Registers 0..3; 4; 5; 6 and 7.
struct GroupShape {
    int rows, bytes;
};
inline void shape_groups(GroupShape sums, GroupShape four, GroupShape five, GroupShape rest) {
    TileShape shape;
    for (int i = 0; i < 8; ++i) {
        const GroupShape& of = i < 4 ? sums : i == 4 ? four : i == 5 ? five : rest;
        shape.rows[i] = uint8_t(of.rows);
        shape.bytes[i] = uint16_t(of.bytes);
    }
    load_shape(shape);
}

}  // namespace pk::PK_SET

#endif
