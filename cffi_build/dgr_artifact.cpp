// What must be true of a file's metadata before llama.cpp reads it: each rule stands for an assertion, a division by
// zero or an out-of-bounds read in the loader or in the first graph. dgr/v4/hyper_parameters.py and dgr/v4/metadata.py refuse
// the same and more, and are the master: this is the last guard, for whoever calls the shim without them.
#include "dgr_internal.h"

#include "gguf.h"

#include <algorithm>

namespace dgr {

namespace {

constexpr uint64_t MAX_LAYERS  = 512;  // LLAMA_MAX_LAYERS
constexpr uint64_t MAX_EXPERTS = 1024; // LLAMA_MAX_EXPERTS
constexpr uint64_t ANY         = UINT32_MAX;

struct free_gguf {
    void operator()(gguf_context * g) const { gguf_free(g); }
};

class metadata {
public:
    explicit metadata(const char * path)
        : path(path) {
        const first_error why;
        file.reset(gguf_init_from_file(path, { /*.no_alloc =*/true, /*.ctx =*/nullptr }));
        if (!file) {
            fail(DGR_ERR_LOAD, "%s: not a readable GGUF file: %s", path, why.text("no reason given"));
        }
    }

    std::string architecture() const {
        const int64_t id   = gguf_find_key(file.get(), "general.architecture");
        const bool is_text = id >= 0 && gguf_get_kv_type(file.get(), id) == GGUF_TYPE_STRING;
        return is_text ? gguf_get_val_str(file.get(), id) : "(none)";
    }

    // The integers under a key, a scalar counting as one; empty when the key is absent or holds no integers.
    std::vector<uint64_t> integers(const char * key) const {
        const int64_t id = gguf_find_key(file.get(), ("deepseek4." + std::string(key)).c_str());
        if (id < 0) {
            return {};
        }
        if (gguf_get_kv_type(file.get(), id) == GGUF_TYPE_ARRAY) {
            const gguf_type type = gguf_get_arr_type(file.get(), id);
            const size_t n       = gguf_get_arr_n(file.get(), id);
            std::vector<uint64_t> values;
            if (type == GGUF_TYPE_INT32 || type == GGUF_TYPE_UINT32) {
                const auto * data = (const uint32_t *) gguf_get_arr_data(file.get(), id);
                values.assign(data, data + n); // a negative value becomes a huge one and is refused as such
            }
            return values;
        }
        switch (gguf_get_kv_type(file.get(), id)) {
            case GGUF_TYPE_UINT8: return { gguf_get_val_u8(file.get(), id) };
            case GGUF_TYPE_UINT16: return { gguf_get_val_u16(file.get(), id) };
            case GGUF_TYPE_UINT32: return { gguf_get_val_u32(file.get(), id) };
            case GGUF_TYPE_INT32: return { (uint64_t) gguf_get_val_i32(file.get(), id) };
            case GGUF_TYPE_UINT64: return { gguf_get_val_u64(file.get(), id) };
            case GGUF_TYPE_INT64: return { (uint64_t) gguf_get_val_i64(file.get(), id) };
            default: return {};
        }
    }

    uint64_t integer(const char * key, uint64_t fallback) const {
        const auto values = integers(key);
        return values.empty() ? fallback : values.front();
    }

    void within(const char * key, uint64_t least, uint64_t most) const {
        for (const uint64_t value : integers(key)) {
            if (value < least || value > most) {
                fail(DGR_ERR_LOAD, "%s: deepseek4.%s is %lld, must be in %llu..%llu", path.c_str(), key,
                    (long long) value, (unsigned long long) least, (unsigned long long) most);
            }
        }
    }

    void divisible(const char * key, uint64_t by, const char * by_name) const {
        const uint64_t value = integer(key, by);
        if (by != 0 && value % by != 0) {
            fail(DGR_ERR_LOAD, "%s: deepseek4.%s is %llu, must be a multiple of %s (%llu)", path.c_str(), key,
                (unsigned long long) value, by_name, (unsigned long long) by);
        }
    }

    const std::string path;

private:
    std::unique_ptr<gguf_context, free_gguf> file;
};

void check_layers(const metadata & meta, uint64_t n_layer_all) {
    meta.within("block_count", 1, MAX_LAYERS);
    meta.within("nextn_predict_layers", 0, n_layer_all - 1);
    meta.within("hash_layer_count", 0, n_layer_all);

    const auto ratios = meta.integers("attention.compress_ratios");
    if (ratios.size() > MAX_LAYERS) {
        fail(DGR_ERR_LOAD, "%s: attention.compress_ratios has %zu entries, at most %llu are supported",
            meta.path.c_str(), ratios.size(), (unsigned long long) MAX_LAYERS);
    }
    for (size_t il = 0; il < ratios.size(); ++il) {
        if (ratios[il] != 0 && ratios[il] != 4 && ratios[il] != 128) {
            fail(DGR_ERR_LOAD, "%s: attention.compress_ratios[%zu] is %lld, must be 0, 4 or 128", meta.path.c_str(), il,
                (long long) ratios[il]);
        }
    }
}

void check_attention(const metadata & meta) {
    const uint64_t head_dim    = meta.integer("attention.key_length", ANY);
    const uint64_t indexer_dim = meta.integer("attention.indexer.key_length", ANY);

    meta.within("embedding_length", 1, ANY);
    meta.within("attention.head_count", 1, ANY);
    meta.within("attention.head_count_kv", 1, 1);
    meta.within("attention.key_length", 1, ANY);
    meta.within("attention.sliding_window", 1, ANY);
    meta.within("attention.output_group_count", 1, ANY);
    meta.within("attention.indexer.head_count", 1, ANY);
    meta.within("attention.indexer.key_length", 1, ANY);
    meta.within("attention.indexer.top_k", 1, ANY);
    meta.divisible("attention.indexer.key_length", 64, "the rotation block");
    meta.divisible(
        "attention.head_count", meta.integer("attention.output_group_count", 1), "attention.output_group_count");
    meta.within("rope.dimension_count", 2, std::min(head_dim, indexer_dim));
    meta.divisible("rope.dimension_count", 2, "2");
    meta.within("hyper_connection.count", 4, 4);
    meta.within("hyper_connection.sinkhorn_iterations", 1, ANY);
}

void check_experts(const metadata & meta) {
    const uint64_t n_expert = meta.integer("expert_count", 1);
    meta.within("expert_count", 1, MAX_EXPERTS);
    meta.within("expert_used_count", 1, n_expert);
    meta.within("expert_group_count", 0, n_expert - 1);

    const uint64_t n_group = meta.integer("expert_group_count", 0);
    if (n_group > 1) {
        meta.divisible("expert_count", n_group, "expert_group_count");
        meta.within("expert_group_used_count", 1, n_group - 1);
    }
}

} // namespace

void check_metadata(const char * path, int32_t layer_begin, int32_t layer_end) {
    const metadata meta(path);

    const std::string architecture = meta.architecture();
    if (architecture != "deepseek4") {
        fail(DGR_ERR_LOAD, "%s: architecture is %s, this runtime loads deepseek4", path, architecture.c_str());
    }

    const uint64_t n_layer_all = meta.integer("block_count", 1);
    check_layers(meta, n_layer_all);
    check_attention(meta);
    check_experts(meta);

    const uint64_t n_layer = n_layer_all - meta.integer("nextn_predict_layers", 0);
    if ((uint64_t) std::max(layer_begin + 1, layer_end) > n_layer_all) {
        refuse("layers %d:%d exceed the model's %llu main layers: give a range within 0:%llu", layer_begin, layer_end,
            (unsigned long long) n_layer, (unsigned long long) n_layer);
    }
}

} // namespace dgr
