// A slot becomes as good as new: every row that its sequence may have written is zero again.
#include "dgr_internal.h"

#include "ggml-backend.h"
#include "llama-kv-cache-dsv4.h" // private: the caches behind llama_get_memory()

#include <algorithm>

namespace dgr {

static void zero_rows(const ggml_tensor * tensor, int32_t slot, uint32_t begin, uint32_t end) {
    if (begin < end) {
        ggml_backend_tensor_memset(const_cast<ggml_tensor *>(tensor), 0,
            (size_t) slot * tensor->nb[2] + (size_t) begin * tensor->nb[1], (size_t) (end - begin) * tensor->nb[1]);
    }
}

llama_kv_cache_dsv4 & cache_of(const dgr_stage & stage) {
    auto * cache = dynamic_cast<llama_kv_cache_dsv4 *>(llama_get_memory(stage.ctx.get()));
    if (!cache) {
        fail(DGR_ERR_INTERNAL, "the context has no DeepSeek V4 cache");
    }
    return *cache;
}

bool walk_rows(const dgr_stage & stage, row_walk & walk, uint32_t n_tokens, uint64_t n_bytes, uint64_t done,
    const visit_rows & visit) {
    for (; walk.component < stage.components.size(); ++walk.component, walk.layer = 0) {
        const component & c = stage.components[walk.component];
        if (c.ratio <= 1) {
            continue;
        }
        const uint32_t end = std::min(n_tokens / c.ratio, c.capacity);
        for (; walk.layer < c.layers.size(); ++walk.layer, walk.row = 0) {
            const ggml_tensor * rows = c.layers[walk.layer].rows;
            while (walk.row < end) {
                if (done >= n_bytes) {
                    return false;
                }
                const uint64_t most = std::max<uint64_t>(1, (n_bytes - done) / rows->nb[1]);
                const uint32_t next = (uint32_t) std::min<uint64_t>(end, walk.row + most);
                visit(rows, walk.row, next);
                done += (uint64_t) (next - walk.row) * rows->nb[1];
                walk.row = next;
            }
        }
    }
    return true;
}

// Clears what every token changes: the window, the rings, and the last of the compressed rows, which takes dummy writes.
static void begin_clearing(dgr_stage & stage, int32_t slot) {
    llama_synchronize(stage.ctx.get()); // what failed half way may still write
    dgr_stage::clearing & to_do = stage.clearings[slot];
    to_do.cells                 = std::max<uint32_t>(1, position(stage, slot));
    to_do.tokens                = std::max(stage.entered[slot], to_do.cells);
    stage.lost[slot]            = true; // until all of it is zero
    stage.copies[slot]          = {};
    ++stage.changes[slot];
    ++stage.erased[slot];

    const llama_kv_cache_dsv4 & cache = cache_of(stage);
    for (llama_dsv4_comp_state * ring : { cache.get_csa_state(), cache.get_hca_state(), cache.get_lid_state() }) {
        ring->clear(slot, /*data =*/true);
    }
    for (const auto & layer : stage.components[DGR_RAW_SWA].layers) {
        zero_rows(layer.rows, slot, 0, stage.components[DGR_RAW_SWA].capacity);
    }
    for (const component & c : stage.components) {
        if (c.ratio > 1) {
            for (const auto & layer : c.layers) {
                zero_rows(layer.rows, slot, c.capacity - 1, c.capacity);
            }
        }
    }
    to_do.under_way = true;
}

// Frees the cells of the last tokens that are left, as many as n_bytes stand for. The window's are gone long before the
// others, so that llama.cpp then knows no position any more: only our own count tells the end.
static uint64_t free_cells(dgr_stage & stage, int32_t slot, uint64_t n_bytes) {
    const llama_kv_cache_dsv4 & cache = cache_of(stage);
    uint32_t & left                   = stage.clearings[slot].cells;
    const uint64_t n                  = std::min<uint64_t>(left, std::max<uint64_t>(1, n_bytes / CELL_BYTES));
    left -= (uint32_t) n;
    if (!cache.get_raw()->seq_rm(slot, left > 0 ? (llama_pos) left : -1, -1)) {
        fail(DGR_ERR_INTERNAL, "llama.cpp did not clear slot %d", slot);
    }
    return n * CELL_BYTES;
}

// Frees and clears about n_bytes more; whether that was all.
static bool clear_more(dgr_stage & stage, int32_t slot, uint64_t n_bytes) {
    dgr_stage::clearing & to_do = stage.clearings[slot];
    uint64_t done               = 0;
    while (to_do.cells > 0) {
        if (done >= n_bytes) {
            return false;
        }
        done += free_cells(stage, slot, n_bytes - done);
    }
    return walk_rows(stage, to_do.rows, to_do.tokens, n_bytes, done,
        [&](const ggml_tensor * rows, uint32_t begin, uint32_t end) { zero_rows(rows, slot, begin, end); });
}

// What llama_kv_cache_dsv4::seq_rm() does for a whole sequence, but in pieces, and of the compressed rows only those are
// touched that the sequence can have written: those of the tokens that ever entered the slot, and the last one. Of a slot
// for a million tokens the others are 6.7 GiB, and zero.
static bool clear_slot(dgr_stage & stage, int32_t slot, uint64_t n_bytes) {
    check_slot(stage, slot);
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it holds no state");
    }
    if (!stage.clearings[slot].under_way) {
        begin_clearing(stage, slot);
    }
    if (!clear_more(stage, slot, n_bytes)) {
        return false;
    }
    stage.clearings[slot] = {};
    stage.entered[slot]   = 0;
    stage.lost[slot]      = false;
    return true;
}

} // namespace dgr

int32_t dgr_stage_clear(dgr_stage * stage, int32_t slot) {
    return dgr::guarded([&] {
        dgr::require("stage", stage);
        dgr::clear_slot(*stage, slot, UINT64_MAX);
    });
}

int32_t dgr_stage_clear_some(dgr_stage * stage, int32_t slot, uint64_t n_bytes, bool * done) {
    return dgr::guarded([&] {
        dgr::require("stage, done", stage, done);
        if (n_bytes == 0) {
            dgr::refuse("n_bytes is 0, must be at least 1");
        }
        *done = dgr::clear_slot(*stage, slot, n_bytes);
    });
}
