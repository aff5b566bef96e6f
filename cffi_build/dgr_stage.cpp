// A range of layers and its context: open, run, clear.
#include "dgr_internal.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama-context.h" // private: the scheduler, for the CPU backend
#include "llama-ext.h"     // staging API: the residual leaves through the nextn embeddings
#include "llama-model.h"   // private: hyper-parameters

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace dgr {

// llama.cpp rounds a sequence's tokens up to this.
static constexpr uint32_t CTX_PAD = 256;

// Below this a graph of one layer may not fit the nodes that llama.cpp reserves (40 per token of a sub-batch).
static constexpr uint32_t MIN_UBATCH = 32;

static uint32_t padded_ctx(uint32_t n_ctx) {
    return (n_ctx + CTX_PAD - 1) / CTX_PAD * CTX_PAD;
}

static void check_params(const dgr_stage_params & p) {
    if (p.layer_begin < 0 || p.layer_end < 0 || (p.layer_end != 0 && p.layer_begin >= p.layer_end)) {
        refuse("layers %d:%d are not a range: begin must be >= 0 and below end (end 0 means all)", p.layer_begin, p.layer_end);
    }
    if (p.n_seq_max < 1 || p.n_seq_max > llama_max_parallel_sequences()) {
        refuse("n_seq_max is %u, must be in 1..%zu", p.n_seq_max, llama_max_parallel_sequences());
    }
    // Positions and cells are counted in int32.
    const uint64_t most_ctx = (uint64_t) INT32_MAX / p.n_seq_max / CTX_PAD * CTX_PAD;
    if (p.n_ctx < 1 || p.n_ctx > most_ctx) {
        refuse("n_ctx is %u, must be in 1..%" PRIu64 " with n_seq_max %u", p.n_ctx, most_ctx, p.n_seq_max);
    }
    if (p.n_ubatch < MIN_UBATCH || p.n_ubatch > p.n_batch) {
        refuse("n_ubatch is %u, must be in %u..n_batch (%u)", p.n_ubatch, MIN_UBATCH, p.n_batch);
    }
    if (p.n_batch > INT32_MAX) {
        refuse("n_batch is %u, must be at most %d", p.n_batch, INT32_MAX);
    }
    if (p.n_threads < 1 || p.n_threads > available_cpus()) {
        refuse("n_threads is %d, must be in 1..%d, the CPUs this process may use", p.n_threads, available_cpus());
    }
    if (p.type_k != GGML_TYPE_F32 && p.type_k != GGML_TYPE_F16 && p.type_k != GGML_TYPE_Q8_0) {
        refuse("type_k is %d, must be %d (f32), %d (f16) or %d (q8_0)", p.type_k, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0);
    }
    if (p.type_k == GGML_TYPE_Q8_0 && !p.flash_attn) {
        refuse("type_k q8_0 needs flash attention: turn flash_attn on or use f16");
    }
}

// The reason of a load that failed: llama.cpp returns NULL and says why in its log. An allocation that failed is told
// apart by the words of that line; there is nothing else to go by.
[[noreturn]] static void fail_load(const char * path, const first_error & why) {
    const std::string reason = why.text("no reason given");
    const bool memory = reason.find("allocate") != std::string::npos || reason.find("bad_alloc") != std::string::npos;
    fail(memory ? DGR_ERR_MEMORY : DGR_ERR_LOAD, "%s: %s", path, reason.c_str());
}

static model_ptr load_model(const char * path, const dgr_stage_params & p) {
    llama_model_kv_override overrides[3] = {};
    size_t n = 0;
    const auto override_int = [&](const char * key, int32_t value) {
        overrides[n].tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
        overrides[n].val_i64 = value;
        snprintf(overrides[n].key, sizeof(overrides[n].key), "%s", key);
        ++n;
    };
    override_int("deepseek4.dgr.layer_begin", p.layer_begin);
    if (p.layer_end != 0) {
        override_int("deepseek4.dgr.layer_end", p.layer_end);
    }

    ggml_backend_dev_t cpu_only[] = { nullptr };

    llama_model_params mp = llama_model_default_params();
    mp.kv_overrides      = overrides; // ends at the first empty key
    mp.load_mode         = p.use_mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    mp.check_tensors     = p.check_tensors;
    mp.no_alloc          = p.dry_run;
    mp.load_mtp          = false;
    mp.progress_callback = [](float, void *) { return true; }; // no dots in the log
    if (p.exact) {
        mp.devices         = cpu_only;
        mp.use_extra_bufts = false; // repacked weights compute rows in groups of four unlike the rest
    }

    const first_error why;
    model_ptr model(llama_model_load_from_file(path, mp));
    if (!model) {
        fail_load(path, why);
    }
    return model;
}

static bool is_aborted(void * data) {
    return ((const std::atomic<bool> *) data)->load(std::memory_order_relaxed);
}

static context_ptr make_context(const char * path, const dgr_stage_params & p, dgr_stage & stage) {
    const bool tail = stage.is_tail();

    llama_context_params cp = llama_context_default_params();
    cp.n_ctx      = padded_ctx(p.n_ctx) * p.n_seq_max;
    cp.n_batch    = p.n_batch;
    cp.n_ubatch   = p.n_ubatch;
    cp.n_seq_max  = p.n_seq_max;
    // The most rows of logits in a batch. llama.cpp asserts it, and reserves the graph for min(n_ubatch, this) rows. Its
    // host buffer, n_vocab floats a row, is a different thing: it starts with n_seq_max rows and grows when a batch wants
    // more, so a tail that decodes never holds n_batch rows.
    cp.n_outputs_max    = tail ? std::max(p.n_batch, p.n_seq_max) : p.n_seq_max;
    cp.n_threads        = p.n_threads;
    cp.n_threads_batch  = p.n_threads;
    cp.flash_attn_type  = p.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.type_k           = (ggml_type) p.type_k;
    cp.type_v           = cp.type_k; // V4 has no V cache, and llama.cpp refuses a different type for it
    cp.embeddings       = false;     // llama.cpp asserts with the 4*n_embd wide stream
    cp.swa_full         = false;     // true keeps n_ctx raw rows per layer
    cp.kv_unified       = false;     // V4's cache ignores it but for n_ctx times n_seq_max of memory
    cp.abort_callback      = is_aborted;
    cp.abort_callback_data = &stage.aborted;

    const first_error why;
    context_ptr ctx(llama_init_from_model(stage.model.get(), cp));
    if (!ctx) {
        fail_load(path, why);
    }
    if (!tail) {
        llama_set_embeddings_nextn(ctx.get(), true, /*masked =*/ false);
    }
    return ctx;
}

// Kernels whose result does not depend on batch structure or threads.
static void use_reference_kernels(llama_context * ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (!ggml_backend_is_cpu(backend)) {
            refuse("exact numerics runs on the CPU alone, but this build computes on %s too: use native numerics", ggml_backend_name(backend));
        }
        ggml_backend_cpu_set_use_ref(backend, true);
    }
}

// An id outside the experts would make the first graph abort, or read past a table on a GPU.
static void check_hash_routing(const char * path, const llama_model & model) {
    const llama_hparams & hp = model.hparams;
    for (uint32_t il = hp.dgr_layer_begin; il < std::min(hp.dgr_layer_end, hp.dsv4_hash_layer_count); ++il) {
        const ggml_tensor * table = model.layers[il].ffn_gate_tid2eid;
        if (table->type != GGML_TYPE_I32) {
            fail(DGR_ERR_LOAD, "%s: blk.%u.ffn_gate_tid2eid holds %s, must be i32", path, il, ggml_type_name(table->type));
        }
        std::vector<int32_t> experts(ggml_nelements(table));
        ggml_backend_tensor_get(table, experts.data(), 0, ggml_nbytes(table));
        for (const int32_t expert : experts) {
            if (expert < 0 || (uint32_t) expert >= hp.n_expert) {
                fail(DGR_ERR_LOAD, "%s: blk.%u.ffn_gate_tid2eid names expert %d, must be in 0..%u", path, il, expert, hp.n_expert - 1);
            }
        }
    }
}

// Devices of the scheduler, in the order in which it prefers them. A line that does not fit is left out.
static void name_devices(llama_context & ctx, char * out, size_t size) {
    ggml_backend_sched_t sched = ctx.get_sched();
    std::string lines;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t     backend = ggml_backend_sched_get_backend(sched, i);
        ggml_backend_dev_t device  = ggml_backend_get_device(backend);
        std::string line = ggml_backend_name(backend);
        if (device) {
            line += std::string(" ") + ggml_backend_dev_description(device);
        }
        if (lines.size() + line.size() + 2 <= size) {
            lines += (lines.empty() ? "" : "\n") + line;
        }
    }
    snprintf(out, size, "%s", lines.c_str());
}

static void fill_info(dgr_stage & stage) {
    const llama_context & ctx = *stage.ctx;
    const llama_hparams & hp  = stage.model->hparams;
    dgr_stage_info & info = stage.info;

    info.n_vocab   = llama_vocab_n_tokens(llama_model_get_vocab(stage.model.get()));
    info.width_in  = stage.is_head() ? 0 : hp.n_embd_inp();
    info.width_out = stage.is_tail() ? 0 : hp.n_embd_out();
    info.n_ctx_seq = ctx.n_ctx_seq();
    info.n_batch   = ctx.n_batch();
    info.n_ubatch  = ctx.n_ubatch();
    info.n_seq_max = ctx.n_seq_max();
    name_devices(*stage.ctx, info.devices, sizeof(info.devices));

    for (const auto & [buft, bytes] : llama_get_memory_breakdown(&ctx)) {
        info.weight_bytes  += bytes.model;
        info.compute_bytes += bytes.compute;
    }
    for (int c = 0; c < DGR_N_COMPONENTS; ++c) {
        info.state_bytes[c]  = stage.components[c].bytes;
        info.state_layers[c] = (int32_t) stage.components[c].layers.size();
    }
}

static std::unique_ptr<dgr_stage> open_stage(const char * path, const dgr_stage_params & p) {
    check_params(p);
    check_metadata(path, p.layer_begin, p.layer_end);

    auto stage = std::make_unique<dgr_stage>();
    stage->model   = load_model(path, p);
    stage->dry_run = p.dry_run;

    const llama_hparams & hp = stage->model->hparams;
    stage->n_swa            = hp.n_swa; // llama_model_n_swa() says 0 for V4
    stage->info.layer_begin = hp.dgr_layer_begin;
    stage->info.layer_end   = hp.dgr_layer_end;
    stage->info.n_layer     = hp.n_layer();
    if (!p.dry_run) {
        check_hash_routing(path, *stage->model);
    }

    stage->ctx = make_context(path, p, *stage);
    if (p.exact) {
        use_reference_kernels(stage->ctx.get());
    }
    find_components(stage->ctx.get(), stage->components);
    stage->batch.reset(llama_batch_ext_init(stage->ctx.get()));
    stage->lost.resize(p.n_seq_max, false);
    fill_info(*stage);
    return stage;
}

//
// run
//

static const uint32_t EXPONENT = 0x7f800000; // all ones in an infinity or a NaN

// The largest residual that is let in or out. Norms add up the squares of up to 4*n_embd values in f32: far below the
// greatest float they become infinite, and the row then turns to zeros, or worse, without a NaN to tell of it: seen
// from 8e18 on in a whole row.
static const float RESIDUAL_MAX = 1e15f;

bool all_finite(const float * values, size_t n) {
    uint32_t bad = 0; // no early exit: this vectorizes
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof(bits));
        bad |= (bits & EXPONENT) == EXPONENT;
    }
    return bad == 0;
}

static bool is_residual(float value) {
    uint32_t bits, limit;
    memcpy(&bits, &value, sizeof(bits));
    memcpy(&limit, &RESIDUAL_MAX, sizeof(limit));
    return (bits & 0x7fffffff) <= limit; // magnitudes order like their bits, NaN and infinity last
}

static bool all_residual(const float * values, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
        bad |= !is_residual(values[i]);
    }
    return bad == 0;
}

void check_slot(const dgr_stage & stage, int32_t slot) {
    if (slot < 0 || (uint32_t) slot >= stage.info.n_seq_max) {
        refuse("slot is %d, must be in 0..%u", slot, stage.info.n_seq_max - 1);
    }
}

int32_t position(const dgr_stage & stage, int32_t slot) {
    return llama_memory_seq_pos_max(llama_get_memory(stage.ctx.get()), slot) + 1;
}

static void check_pointers(const dgr_stage & stage, const dgr_run & run) {
    if (run.n_tokens < 1 || (uint32_t) run.n_tokens > stage.info.n_batch) {
        refuse("n_tokens is %d, must be in 1..n_batch (%u)", run.n_tokens, stage.info.n_batch);
    }
    if (!run.tokens || !run.positions || !run.slots || !run.want_logits || !run.row_finite) {
        refuse("tokens, positions, slots, want_logits and row_finite are all required");
    }
    if ((run.residual_in != nullptr) == stage.is_head()) {
        refuse(stage.is_head() ? "a head takes token ids alone: residual_in must be NULL"
                               : "layers from %d on take a residual: residual_in is NULL", stage.info.layer_begin);
    }
    if ((run.residual_out != nullptr) == stage.is_tail()) {
        refuse(stage.is_tail() ? "a tail gives logits alone: residual_out must be NULL"
                               : "layers up to %d give a residual: residual_out is NULL", stage.info.layer_end);
    }
}

// Entries of one slot are consecutive, slots ascend, and positions go on where the slot stands. llama.cpp would accept
// any first position and repeated ones, and compute nonsense.
static void check_entries(const dgr_stage & stage, const dgr_run & run) {
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        if (run.tokens[i] < 0 || run.tokens[i] >= stage.info.n_vocab) {
            refuse("token id %d at entry %d is outside the vocabulary 0..%d", run.tokens[i], i, stage.info.n_vocab - 1);
        }
    }
    for (int32_t begin = 0, end; begin < run.n_tokens; begin = end) {
        const int32_t slot = run.slots[begin];
        check_slot(stage, slot);
        if (begin > 0 && slot <= run.slots[begin - 1]) {
            refuse("slot %d at entry %d follows slot %d: give each slot one run of entries, in ascending order", slot, begin, run.slots[begin - 1]);
        }
        if (stage.lost[slot]) {
            refuse("slot %d was lost in an earlier run: clear it first", slot);
        }
        const int32_t committed = position(stage, slot);
        for (end = begin; end < run.n_tokens && run.slots[end] == slot; ++end) {
            if (run.positions[end] != committed + (end - begin)) {
                refuse("position of entry %d is %d, slot %d continues at %d", end, run.positions[end], slot, committed + (end - begin));
            }
        }
        if ((uint32_t) committed + (uint32_t) (end - begin) > stage.info.n_ctx_seq) {
            fail(DGR_ERR_FULL, "slot %d holds %d tokens and cannot take %d more: n_ctx is %u", slot, committed, end - begin, stage.info.n_ctx_seq);
        }
    }
}

static uint32_t count_rows(const dgr_stage & stage, const dgr_run & run) {
    uint32_t rows = 0;
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        rows += run.want_logits[i] != 0;
    }
    if (rows > 0 && !stage.is_tail()) {
        refuse("logits of %u rows are wanted from layers %d:%d: only the stage that ends at %d has them", rows,
            stage.info.layer_begin, stage.info.layer_end, stage.info.n_layer);
    }
    if (rows > 0 && !run.logits_out) {
        refuse("logits of %u rows are wanted but logits_out is NULL", rows);
    }
    return rows;
}

static void check_residual(const dgr_stage & stage, const dgr_run & run) {
    const size_t width = stage.info.width_in;
    for (int32_t i = 0; width > 0 && i < run.n_tokens; ++i) {
        const float * row = run.residual_in + i * width;
        if (!all_residual(row, width)) {
            const float value = *std::find_if_not(row, row + width, is_residual);
            fail(DGR_ERR_NON_FINITE, "the residual of slot %d at position %d holds %g: values must be finite and at most %g in magnitude; drop the session",
                run.slots[i], run.positions[i], value, RESIDUAL_MAX);
        }
    }
}

static void fill_batch(dgr_stage & stage, const dgr_run & run) {
    const size_t width = stage.info.width_in;
    llama_batch_ext * batch = stage.batch.get();
    llama_batch_ext_clear(batch);
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        const int32_t entry = llama_batch_ext_add_token(batch, run.slots[i], run.tokens[i]);
        bool ok = entry == i && llama_batch_ext_set_pos(batch, entry, run.positions + i);
        if (ok && width > 0) {
            ok = llama_batch_ext_set_embd_token(batch, entry, { run.residual_in + i * width, /*.n_rows =*/ 1, /*.n_embd =*/ width });
        }
        if (!ok || !llama_batch_ext_set_output_logits(batch, entry, run.want_logits[i] != 0)) {
            refuse("llama.cpp refused entry %d of the batch", i);
        }
    }
}

// Everything was checked; from here on the state changes. Past a failure only clearing the slots helps: the caches of
// layers that ran are ahead of those that did not.
static void decode(dgr_stage & stage, const dgr_run & run) {
    const first_error why;
    int32_t rc;
    std::string reason;
    try {
        rc = llama_process(stage.ctx.get(), LLAMA_PROCESS_TYPE_DECODE, stage.batch.get());
        reason = stage.aborted ? "the stage was aborted" : why.text("no reason given");
    } catch (const std::exception & e) {
        rc = INT32_MIN;
        reason = e.what();
    } catch (...) {
        rc = INT32_MIN;
        reason = "an exception of unknown type";
    }
    switch (rc) {
        case  0: return;
        case  1: fail(DGR_ERR_FULL, "no room in the context for a batch of %d tokens: n_ctx is %u", run.n_tokens, stage.info.n_ctx_seq);
        case -1: refuse("llama.cpp refused the batch: %s", reason.c_str());
        default: break;
    }
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        stage.lost[run.slots[i]] = true;
    }
    fail(DGR_ERR_LOST, "running %d tokens failed (%d: %s): clear every slot of the batch", run.n_tokens, rc, reason.c_str());
}

static void copy_outputs(dgr_stage & stage, const dgr_run & run, uint32_t rows) {
    const bool   tail  = stage.is_tail();
    const size_t width = tail ? stage.info.n_vocab : stage.info.width_out;
    const size_t n     = tail ? rows : run.n_tokens;
    float *      out   = tail ? run.logits_out : run.residual_out;

    memset(run.row_finite, 1, run.n_tokens);
    if (n == 0) {
        llama_synchronize(stage.ctx.get());
        return;
    }
    const float * source = tail ? llama_get_logits(stage.ctx.get()) : llama_get_embeddings_nextn(stage.ctx.get());
    memcpy(out, source, n * width * sizeof(float));
    for (int32_t i = 0, row = 0; i < run.n_tokens; ++i) {
        if (!tail || run.want_logits[i]) {
            run.row_finite[i] = tail ? all_finite(out + row * width, width) : all_residual(out + row * width, width);
            ++row;
        }
    }
}

static void run_batch(dgr_stage & stage, const dgr_run & run) {
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it has no memory to run in");
    }
    if (stage.aborted) {
        fail(DGR_ERR_LOST, "the stage was aborted: close it");
    }
    check_pointers(stage, run);
    check_entries(stage, run);
    const uint32_t rows = count_rows(stage, run);
    check_residual(stage, run);
    fill_batch(stage, run);
    decode(stage, run);
    stage.output_rows = std::max(stage.output_rows, rows);
    copy_outputs(stage, run, rows);
}

} // namespace dgr

//
// C interface
//

dgr_stage_params dgr_stage_params_default(void) {
    dgr_stage_params p = {};
    p.n_ctx      = 4096;
    p.n_batch    = 512;
    p.n_ubatch   = 512;
    p.n_seq_max  = 1;
    p.n_threads  = 1; // always right; too many is catastrophic
    p.type_k     = GGML_TYPE_F16;
    p.flash_attn = true;
    p.exact      = true;
    return p;
}

int32_t dgr_stage_open(const char * path, const dgr_stage_params * params, dgr_stage ** out) {
    return dgr::guarded([&] {
        if (!path || !params || !out) {
            dgr::refuse("path, params and out are all required");
        }
        *out = nullptr;
        dgr::library_init();
        *out = dgr::open_stage(path, *params).release();
    });
}

void dgr_stage_close(dgr_stage * stage) {
    dgr::guarded([&] { delete stage; });
}

int32_t dgr_stage_info_get(const dgr_stage * stage, dgr_stage_info * out) {
    return dgr::guarded([&] {
        if (!stage || !out) {
            dgr::refuse("stage and out are both required");
        }
        *out = stage->info;
        // llama.cpp keeps n_seq_max rows of logits on every stage, more once a batch has asked for more, and the residual
        // of n_batch tokens where there is one to hand on.
        const uint64_t rows = std::max(out->n_seq_max, stage->output_rows);
        out->output_bytes = sizeof(float) * (rows * out->n_vocab + (uint64_t) out->n_batch * out->width_out);
    });
}

int32_t dgr_stage_run(dgr_stage * stage, const dgr_run * run) {
    return dgr::guarded([&] {
        if (!stage || !run) {
            dgr::refuse("stage and run are both required");
        }
        dgr::run_batch(*stage, *run);
    });
}

int32_t dgr_stage_position(const dgr_stage * stage, int32_t slot, int32_t * out) {
    return dgr::guarded([&] {
        if (!stage || !out) {
            dgr::refuse("stage and out are both required");
        }
        dgr::check_slot(*stage, slot);
        *out = dgr::position(*stage, slot);
    });
}

int32_t dgr_stage_clear(dgr_stage * stage, int32_t slot) {
    return dgr::guarded([&] {
        if (!stage) {
            dgr::refuse("stage is required");
        }
        dgr::check_slot(*stage, slot);
        if (stage->dry_run) {
            dgr::refuse("the stage was opened with dry_run: it holds no state");
        }
        if (!llama_memory_seq_rm(llama_get_memory(stage->ctx.get()), slot, -1, -1)) {
            dgr::fail(DGR_ERR_INTERNAL, "llama.cpp did not clear slot %d", slot);
        }
        stage->lost[slot] = false;
    });
}

void dgr_stage_abort(dgr_stage * stage) {
    if (stage) {
        stage->aborted = true;
    }
}
