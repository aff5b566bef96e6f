// A slot as a long prompt would leave it, without the prompt.
#include "dgr_probe.h"

#include "dgr_internal.h"

#include "ggml-backend.h"
#include "llama-kv-cache-dsv4.h" // private: the caches behind llama_get_memory()

#include <algorithm>
#include <cstring>

namespace dgr {

namespace {

// Random values with a root mean square of 1: SplitMix64, 16 bits a value.
class values {
public:
    explicit values(uint64_t seed)
        : state(seed) {}

    void fill(float * out, size_t n) {
        const float scale = 1.7320508f / 32768.0f;
        for (size_t i = 0; i < n; i += 4) {
            const uint64_t bits = next();
            for (size_t k = 0; k < 4 && i + k < n; ++k) {
                out[i + k] = scale * (int16_t) (bits >> 16 * k);
            }
        }
    }

private:
    uint64_t state;

    uint64_t next() {
        uint64_t x = state += 0x9E3779B97F4A7C15u;
        x          = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x          = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        return x ^ (x >> 31);
    }
};

} // namespace

static void fill_rows(const ggml_tensor * tensor, int32_t slot, uint32_t n_rows, uint64_t seed) {
    const uint32_t block = 1024;
    const size_t width   = tensor->ne[0];
    const size_t size    = tensor->nb[1];
    values source(seed);
    std::vector<float> floats(block * width);
    std::vector<uint8_t> rows(block * size);
    const auto convert = ggml_get_type_traits(tensor->type)->from_float_ref;
    for (uint32_t row = 0; row < n_rows; row += block) {
        const uint32_t n = std::min(block, n_rows - row);
        source.fill(floats.data(), n * width);
        if (tensor->type == GGML_TYPE_F32) {
            memcpy(rows.data(), floats.data(), n * size);
        } else {
            convert(floats.data(), rows.data(), n * width);
        }
        ggml_backend_tensor_set(
            const_cast<ggml_tensor *>(tensor), rows.data(), slot * tensor->nb[2] + row * size, n * size);
    }
}

// Cell i holds position first + i: the oldest one in the cell where the next search for a free one begins.
static void fill_cells(const llama_kv_cache & cache, int32_t slot, int32_t first, int32_t n_tokens) {
    auto & cells = const_cast<llama_kv_cells &>(cache.get_cells(slot));
    for (int32_t i = 0; first + i < n_tokens; ++i) {
        cells.pos_set(i, first + i);
        cells.seq_add(i, slot);
    }
}

static void fill(dgr_stage & stage, int32_t slot, int32_t n_tokens, uint64_t seed) {
    check_slot(stage, slot);
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it holds no state");
    }
    if (n_tokens < 1 || (uint32_t) n_tokens > stage.info.n_ctx_seq) {
        refuse("n_tokens is %d, must be in 1..%u", n_tokens, stage.info.n_ctx_seq);
    }
    if (stage.lost[slot] || position(stage, slot) != 0) {
        refuse("slot %d is not empty: clear it first", slot);
    }
    stage.entered[slot] = n_tokens;
    ++stage.changes[slot];
    const auto & cache              = dynamic_cast<const llama_kv_cache_dsv4 &>(*llama_get_memory(stage.ctx.get()));
    const llama_kv_cache_iswa & raw = *cache.get_raw();
    const int32_t window            = (int32_t) raw.get_swa()->get_size();
    fill_cells(*raw.get_base(), slot, 0, n_tokens);
    fill_cells(*raw.get_swa(), slot, std::max(0, n_tokens - window), n_tokens);
    for (int c = 0; c < DGR_N_COMPONENTS; ++c) {
        const component & part = stage.components[c];
        const uint32_t live    = n_tokens / std::max(1u, part.ratio); // rings: one row a token, until they are full
        for (const auto & layer : part.layers) {
            for (const ggml_tensor * tensor : { layer.rows, layer.scores }) {
                if (tensor) {
                    const uint64_t key = 4 * (uint64_t) (layer.il * DGR_N_COMPONENTS + c) + (tensor == layer.scores);
                    fill_rows(tensor, slot, std::min(live, part.capacity), seed + (key << 32));
                }
            }
        }
    }
}

} // namespace dgr

int32_t dgr_probe_fill(dgr_stage * stage, int32_t slot, int32_t n_tokens, uint64_t seed) {
    return dgr::guarded([&] {
        dgr::require("stage", stage);
        dgr::fill(*stage, slot, n_tokens, seed);
    });
}
