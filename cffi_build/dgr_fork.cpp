// A second sequence that holds what another one holds.
#include "dgr_internal.h"

#include "ggml-cpp.h"
#include "llama-kv-cache-dsv4.h" // private: the caches behind llama_get_memory()

#include <algorithm>

namespace dgr {

static void check_fork(const dgr_stage & stage, int32_t source, int32_t target) {
    check_slot(stage, source);
    check_slot(stage, target);
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it holds no state");
    }
    if (source == target) {
        refuse("slot %d cannot be copied into itself", source);
    }
    for (const int32_t slot : { source, target }) {
        if (stage.lost[slot]) {
            refuse("slot %d was lost in an earlier run: clear it first", slot);
        }
    }
    if (position(stage, source) == 0) {
        refuse("slot %d is empty: there is nothing to copy", source);
    }
    if (const int32_t held = position(stage, target)) {
        refuse("slot %d holds %d tokens: clear it before another sequence is copied into it", target, held);
    }
}

static void copy_rows(const ggml_tensor * tensor, int32_t source, int32_t target, uint32_t begin, uint32_t end) {
    const ggml_context_ptr views{ ggml_init({ 2 * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }) };
    const auto view = [&](int32_t slot) {
        ggml_tensor * rows = ggml_view_2d(views.get(), const_cast<ggml_tensor *>(tensor), tensor->ne[0], end - begin,
            tensor->nb[1], (size_t) slot * tensor->nb[2] + (size_t) begin * tensor->nb[1]);
        ggml_backend_view_init(rows);
        return rows;
    };
    ggml_tensor * from = view(source);
    ggml_backend_tensor_copy(from, view(target));
}

// llama_memory_seq_cp() copies the book-keeping of all tokens at once, and leaves whole tensors, used or not, to the next
// decode: whatever cleared the source until then would leave zeros in the target. So dgr takes the caches one by one. The
// compressed ones have book-keeping alone to copy here; their rows follow in pieces.
//
// There is no rollback that could be pending and would be missed: the context keeps no snapshots of earlier states.
static void copy_window_and_rings(dgr_stage & stage, int32_t source, int32_t target) {
    llama_context * ctx         = stage.ctx.get();
    llama_kv_cache_dsv4 & cache = cache_of(stage);
    llama_kv_cache * window     = cache.get_raw()->get_swa();
    window->seq_cp(source, target, -1, -1);
    const llama_memory_context_ptr copies = window->init_update(ctx, /*optimize =*/false);
    if (copies->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || !copies->apply()) {
        fail(DGR_ERR_LOST, "llama.cpp did not copy slot %d to slot %d: clear slot %d", source, target, target);
    }
    for (llama_kv_cache * compressed : { cache.get_csa(), cache.get_hca(), cache.get_lid() }) {
        compressed->seq_cp(source, target, -1, -1);
        compressed->init_update(ctx, /*optimize =*/false); // takes the copies that wait, and is dropped with them
    }
    for (llama_dsv4_comp_state * ring : { cache.get_csa_state(), cache.get_hca_state(), cache.get_lid_state() }) {
        ring->seq_cp(source, target);
        ring->apply_copies(ring->sc_info);
        ring->sc_info = {};
    }
    for (const component & c : stage.components) {
        if (c.ratio > 1) {
            for (const auto & layer : c.layers) {
                copy_rows(layer.rows, source, target, c.capacity - 1, c.capacity); // takes dummy writes
            }
        }
    }
    llama_synchronize(ctx);
}

static void begin_copying(dgr_stage & stage, int32_t source, int32_t target) {
    check_fork(stage, source, target);
    llama_synchronize(stage.ctx.get());
    stage.lost[target] = true; // until all of it is there
    ++stage.changes[target];
    stage.entered[target] = stage.entered[source];
    copy_window_and_rings(stage, source, target);
    dgr_stage::copying & to_do = stage.copies[target];
    to_do.source               = source;
    to_do.tokens               = position(stage, source);
    to_do.erased               = stage.erased[source];
    to_do.under_way            = true;
}

// The cells that count tokens and have no rows. What the source takes in meanwhile is not looked at.
static uint64_t copy_cells(dgr_stage & stage, int32_t target, uint64_t n_bytes) {
    dgr_stage::copying & to_do   = stage.copies[target];
    const llama_kv_cache & cache = *cache_of(stage).get_raw()->get_base();
    const llama_kv_cells & from  = cache.get_cells(to_do.source);
    auto & to                    = const_cast<llama_kv_cells &>(cache.get_cells(target));
    const uint64_t n = std::min<uint64_t>(from.size() - to_do.cells, std::max<uint64_t>(1, n_bytes / CELL_BYTES));
    uint64_t copied  = 0;
    for (const uint32_t end = to_do.cells + (uint32_t) n; to_do.cells < end; ++to_do.cells) {
        if (from.seq_has(to_do.cells, to_do.source) && from.pos_get(to_do.cells) < (llama_pos) to_do.tokens) {
            to.pos_set(to_do.cells, from.pos_get(to_do.cells));
            to.seq_add(to_do.cells, target);
            ++copied;
        }
    }
    return copied * CELL_BYTES;
}

// Compressed rows are written once, when their last token comes: those of the tokens that the source held when the copying
// began are what they were then, also when it has gone on since.
static bool copy_more(dgr_stage & stage, int32_t target, uint64_t n_bytes) {
    dgr_stage::copying & to_do = stage.copies[target];
    const uint32_t n_cells     = cache_of(stage).get_raw()->get_base()->get_size();
    uint64_t done              = 0;
    while (to_do.cells < n_cells) {
        if (done >= n_bytes) {
            return false;
        }
        done += copy_cells(stage, target, n_bytes - done);
    }
    const bool is_all = walk_rows(
        stage, to_do.rows, to_do.tokens, n_bytes, done, [&](const ggml_tensor * rows, uint32_t begin, uint32_t end) {
            copy_rows(rows, to_do.source, target, begin, end);
        });
    llama_synchronize(stage.ctx.get());
    return is_all;
}

static bool fork_slot(dgr_stage & stage, int32_t source, int32_t target, uint64_t n_bytes) {
    check_slot(stage, target);
    if (stage.aborted) {
        fail(DGR_ERR_LOST, "the stage was aborted: close it");
    }
    const dgr_stage::copying & to_do = stage.copies[target];
    if (!to_do.under_way || to_do.source != source) {
        begin_copying(stage, source, target);
    }
    if (to_do.erased != stage.erased[source]) {
        fail(DGR_ERR_LOST, "slot %d was cleared while it was copied to slot %d: clear slot %d", source, target, target);
    }
    if (!copy_more(stage, target, n_bytes)) {
        return false;
    }
    stage.copies[target] = {};
    stage.lost[target]   = false;
    return true;
}

} // namespace dgr

//
// C interface
//

int32_t dgr_stage_fork(dgr_stage * stage, int32_t source, int32_t target) {
    return dgr::guarded([&] {
        dgr::require("stage", stage);
        dgr::fork_slot(*stage, source, target, UINT64_MAX);
    });
}

int32_t dgr_stage_fork_some(dgr_stage * stage, int32_t source, int32_t target, uint64_t n_bytes, bool * done) {
    return dgr::guarded([&] {
        dgr::require("stage, done", stage, done);
        if (n_bytes == 0) {
            dgr::refuse("n_bytes is 0, must be at least 1");
        }
        *done = dgr::fork_slot(*stage, source, target, n_bytes);
    });
}
