// A range of layers and its context: opened, described, closed.
#include "dgr_internal.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama-context.h" // private: the scheduler, for the CPU backend
#include "llama-ext.h"     // staging API: the residual leaves through the nextn embeddings
#include "llama-model.h"   // private: hyper-parameters

#include <algorithm>
#include <cinttypes>
#include <cstdio>

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
        refuse("layers %d:%d are not a range: begin must be >= 0 and below end (end 0 means all)", p.layer_begin,
            p.layer_end);
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
        refuse("type_k is %d, must be %d (f32), %d (f16) or %d (q8_0)", p.type_k, GGML_TYPE_F32, GGML_TYPE_F16,
            GGML_TYPE_Q8_0);
    }
    if (p.type_k == GGML_TYPE_Q8_0 && !p.flash_attn) {
        refuse("type_k q8_0 needs flash attention: turn flash_attn on or use f16");
    }
}

// The reason of a load that failed: llama.cpp returns NULL and says why in its log.
[[noreturn]] static void fail_load(const char * path, const first_error & why) {
    const std::string reason = why.text("no reason given");
    fail(tells_of_memory(reason) ? DGR_ERR_MEMORY : DGR_ERR_LOAD, "%s: %s", path, reason.c_str());
}

static model_ptr load_model(const char * path, const dgr_stage_params & p) {
    llama_model_kv_override overrides[3] = {};
    size_t n                             = 0;
    const auto override_int              = [&](const char * key, int32_t value) {
        overrides[n].tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
        overrides[n].val_i64 = value;
        snprintf(overrides[n].key, sizeof(overrides[n].key), "%s", key);
        ++n;
    };
    override_int("deepseek4.dgr.layer_begin", p.layer_begin);
    if (p.layer_end != 0) {
        override_int("deepseek4.dgr.layer_end", p.layer_end);
    }

    chosen_devices chosen = choose_devices(p);

    llama_model_params mp = llama_model_default_params();
    mp.kv_overrides       = overrides; // ends at the first empty key
    mp.load_mode          = p.use_mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    mp.check_tensors      = p.check_tensors;
    mp.no_alloc           = p.dry_run;
    mp.load_mtp           = false;
    mp.progress_callback  = [](float, void *) { return true; }; // no dots in the log
    mp.devices            = chosen.given ? chosen.devices.data() : nullptr;
    mp.n_gpu_layers       = p.gpu_layers;
    mp.use_extra_bufts    = !p.exact; // repacked weights compute rows in groups of four unlike the rest

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
    cp.n_ctx                = padded_ctx(p.n_ctx) * p.n_seq_max;
    cp.n_batch              = p.n_batch;
    cp.n_ubatch             = p.n_ubatch;
    cp.n_seq_max            = p.n_seq_max;
    // The most rows of logits in a batch. llama.cpp asserts it, and reserves the graph for min(n_ubatch, this) rows. Its
    // host buffer, n_vocab floats a row, is a different thing: it starts with n_seq_max rows and grows when a batch wants
    // more, so a tail that decodes never holds n_batch rows.
    cp.n_outputs_max       = tail ? std::max(p.n_batch, p.n_seq_max) : p.n_seq_max;
    cp.n_threads           = p.n_threads;
    cp.n_threads_batch     = p.n_threads;
    cp.flash_attn_type     = p.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.type_k              = (ggml_type) p.type_k;
    cp.type_v              = cp.type_k; // V4 has no V cache, and llama.cpp refuses a different type for it
    cp.embeddings          = false;     // llama.cpp asserts with the 4*n_embd wide stream
    cp.swa_full            = false;     // true keeps n_ctx raw rows per layer
    cp.kv_unified          = false;     // V4's cache ignores it but for n_ctx times n_seq_max of memory
    cp.abort_callback      = is_aborted;
    cp.abort_callback_data = &stage.aborted;

    const first_error why;
    context_ptr ctx(llama_init_from_model(stage.model.get(), cp));
    if (!ctx) {
        fail_load(path, why);
    }
    if (!tail) {
        llama_set_embeddings_nextn(ctx.get(), true, /*masked =*/false);
    }
    return ctx;
}

// Kernels whose result does not depend on batch structure or threads.
static void use_reference_kernels(llama_context * ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (!ggml_backend_is_cpu(backend)) {
            refuse("exact numerics runs on the CPU alone, but this build computes on %s too: use native numerics",
                ggml_backend_name(backend));
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
            fail(DGR_ERR_LOAD, "%s: blk.%u.ffn_gate_tid2eid holds %s, must be i32", path, il,
                ggml_type_name(table->type));
        }
        std::vector<int32_t> experts(ggml_nelements(table));
        ggml_backend_tensor_get(table, experts.data(), 0, ggml_nbytes(table));
        for (const int32_t expert : experts) {
            if (expert < 0 || (uint32_t) expert >= hp.n_expert) {
                fail(DGR_ERR_LOAD, "%s: blk.%u.ffn_gate_tid2eid names expert %d, must be in 0..%u", path, il, expert,
                    hp.n_expert - 1);
            }
        }
    }
}

static void fill_info(dgr_stage & stage) {
    const llama_context & ctx = *stage.ctx;
    const llama_hparams & hp  = stage.model->hparams;
    dgr_stage_info & info     = stage.info;

    info.n_vocab   = llama_vocab_n_tokens(llama_model_get_vocab(stage.model.get()));
    info.width_in  = stage.is_head() ? 0 : hp.n_embd_inp();
    info.width_out = stage.is_tail() ? 0 : hp.n_embd_out();
    info.n_ctx_seq = ctx.n_ctx_seq();
    info.n_batch   = ctx.n_batch();
    info.n_ubatch  = ctx.n_ubatch();
    info.n_seq_max = ctx.n_seq_max();
    describe_devices(stage, info);

    for (const auto & [buft, bytes] : llama_get_memory_breakdown(&ctx)) {
        info.weight_bytes += bytes.model;
        info.compute_bytes += bytes.compute;
    }
    if (stage.is_mapped) { // a mapped buffer reaches from the first owned tensor to the last, whatever lies between
        info.weight_bytes = tensor_bytes(*stage.model);
    }
    for (int c = 0; c < DGR_N_COMPONENTS; ++c) {
        info.state_bytes[c]  = stage.components[c].bytes;
        info.state_layers[c] = (int32_t) stage.components[c].layers.size();
    }
}

static std::unique_ptr<dgr_stage> open_stage(const char * path, const dgr_stage_params & p) {
    check_params(p);
    check_metadata(path, p.layer_begin, p.layer_end);

    auto stage     = std::make_unique<dgr_stage>();
    stage->model   = load_model(path, p);
    stage->dry_run = p.dry_run;

    const llama_hparams & hp = stage->model->hparams;
    stage->n_swa             = hp.n_swa; // llama_model_n_swa() says 0 for V4
    stage->info.layer_begin  = hp.dgr_layer_begin;
    stage->info.layer_end    = hp.dgr_layer_end;
    stage->info.n_layer      = hp.n_layer();
    stage->is_mapped         = p.use_mmap && !p.dry_run;
    if (!p.dry_run) {
        check_hash_routing(path, *stage->model);
        make_resident(*stage->model, p.use_mmap, p.prefetch, p.lock, p.n_threads);
    }

    stage->ctx = make_context(path, p, *stage);
    if (p.exact) {
        use_reference_kernels(stage->ctx.get());
    }
    find_components(stage->ctx.get(), stage->components);
    stage->batch.reset(llama_batch_ext_init(stage->ctx.get()));
    stage->lost.resize(p.n_seq_max, false);
    stage->entered.resize(p.n_seq_max, 0);
    stage->changes.resize(p.n_seq_max, 0);
    stage->clearings.resize(p.n_seq_max);
    stage->copies.resize(p.n_seq_max);
    stage->erased.resize(p.n_seq_max);
    fill_info(*stage);
    return stage;
}

} // namespace dgr

//
// C interface
//

dgr_stage_params dgr_stage_params_default(void) {
    dgr_stage_params p = {};
    p.n_ctx            = 4096;
    p.n_batch          = 512;
    p.n_ubatch         = 512;
    p.n_seq_max        = 1;
    p.n_threads        = 1; // always right; too many is catastrophic
    p.type_k           = GGML_TYPE_F16;
    p.gpu_layers       = -1;
    p.flash_attn       = true;
    p.exact            = true;
    return p;
}

int32_t dgr_stage_open(const char * path, const dgr_stage_params * params, dgr_stage ** out) {
    return dgr::guarded([&] {
        dgr::require("path, params, out", path, params, out);
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
        dgr::require("stage, out", stage, out);
        *out = stage->info;
        // llama.cpp keeps n_seq_max rows of logits on every stage, more once a batch has asked for more, and the residual
        // of n_batch tokens where there is one to hand on.
        const uint64_t rows = std::max(out->n_seq_max, stage->output_rows);
        out->output_bytes   = sizeof(float) * (rows * out->n_vocab + (uint64_t) out->n_batch * out->width_out);
    });
}
