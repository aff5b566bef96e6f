// A second sequence that holds what another one holds: every row of every component, copied at once.
#include "dgr_internal.h"

#include "llama-memory.h" // private: what llama_decode() does with copies that wait

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

// llama_memory_seq_cp() moves only the book-keeping and leaves the rows to the next decode; whatever cleared the source
// until then would leave zeros in the target. So the copies are made here and now. llama_context::memory_update() would do
// the same and then reserve a graph anew, which no copy needs, and report no failure.
//
// There is no rollback that could be pending and would be missed: the context keeps no snapshots of earlier states.
static void fork_slot(dgr_stage & stage, int32_t source, int32_t target) {
    check_fork(stage, source, target);
    if (stage.aborted) {
        fail(DGR_ERR_LOST, "the stage was aborted: close it");
    }
    llama_context * ctx     = stage.ctx.get();
    llama_memory_i * memory = llama_get_memory(ctx);
    stage.lost[target]      = true; // until all of it is there
    llama_synchronize(ctx);
    stage.entered[target] = stage.entered[source];
    ++stage.changes[target];
    memory->seq_cp(source, target, -1, -1);
    const llama_memory_context_ptr copies = memory->init_update(ctx, /*optimize =*/false);
    if (copies->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || !copies->apply()) {
        fail(DGR_ERR_LOST, "llama.cpp did not copy slot %d to slot %d: clear slot %d", source, target, target);
    }
    llama_synchronize(ctx);
    stage.lost[target] = false;
}

} // namespace dgr

//
// C interface
//

int32_t dgr_stage_fork(dgr_stage * stage, int32_t source, int32_t target) {
    return dgr::guarded([&] {
        dgr::require("stage", stage);
        dgr::fork_slot(*stage, source, target);
    });
}
