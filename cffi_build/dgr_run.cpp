// A stage at work: batches run, positions told.
#include "dgr_internal.h"

#include "llama-ext.h" // staging API: the residual leaves through the nextn embeddings

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace dgr {

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

// How residuals come in and go out. Anything but f32 is rounded on its way out, each row by itself, by ggml's reference code.
struct residual_format {
    const ggml_type_traits * traits;
    size_t width;
    size_t row_bytes;
    float most; // the greatest magnitude that it carries

    bool is_f32() const { return traits->type_size == sizeof(float) && traits->blck_size == 1; }
};

static residual_format format_of(const dgr_run & run, size_t width) {
    const ggml_type type = (ggml_type) run.residual_type;
    float most           = RESIDUAL_MAX;
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_BF16: break;
        case GGML_TYPE_F16: most = 65504.0f; break;
        case GGML_TYPE_Q8_0: most = 127 * 65504.0f; break; // the scale of a block is an f16
        default: refuse("residual_type is %d, must be 0 (f32), 1 (f16), 8 (q8_0) or 30 (bf16)", run.residual_type);
    }
    const ggml_type_traits * traits = ggml_get_type_traits(type);
    if (width % traits->blck_size) {
        refuse("a residual of %zu values a token does not go in blocks of %d (%s)", width, (int) traits->blck_size,
            traits->type_name);
    }
    return { traits, width, ggml_row_size(type, (int64_t) width), most };
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
                               : "layers from %d on take a residual: residual_in is NULL",
            stage.info.layer_begin);
    }
    if ((run.residual_out != nullptr) == stage.is_tail()) {
        refuse(stage.is_tail() ? "a tail gives logits alone: residual_out must be NULL"
                               : "layers up to %d return a residual: residual_out is NULL",
            stage.info.layer_end);
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
            refuse("slot %d at entry %d follows slot %d: give each slot one run of entries, in ascending order", slot,
                begin, run.slots[begin - 1]);
        }
        if (stage.lost[slot]) {
            refuse("slot %d was lost in an earlier run: clear it first", slot);
        }
        const int32_t committed = position(stage, slot);
        for (end = begin; end < run.n_tokens && run.slots[end] == slot; ++end) {
            if (run.positions[end] != committed + (end - begin)) {
                refuse("position of entry %d is %d, slot %d continues at %d", end, run.positions[end], slot,
                    committed + (end - begin));
            }
        }
        if ((uint32_t) committed + (uint32_t) (end - begin) > stage.info.n_ctx_seq) {
            fail(DGR_ERR_FULL, "slot %d holds %d tokens and cannot take %d more: n_ctx is %u", slot, committed,
                end - begin, stage.info.n_ctx_seq);
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

static void check_residual(const dgr_run & run, int32_t i, const float * row, size_t width) {
    if (!all_residual(row, width)) {
        const float value = *std::find_if_not(row, row + width, is_residual);
        fail(DGR_ERR_NON_FINITE,
            "the residual of slot %d at position %d holds %g: values must be finite and at most %g in magnitude; "
            "drop the session",
            run.slots[i], run.positions[i], value, RESIDUAL_MAX);
    }
}

// A row is looked at as it is copied, while it is in the cache; a batch that is refused half-filled changed nothing.
static void fill_batch(dgr_stage & stage, const dgr_run & run) {
    const size_t width           = stage.info.width_in;
    const residual_format format = format_of(run, width);
    std::vector<float> read(format.is_f32() ? 0 : width);
    std::vector<float> aligned; // a residual lies where it came in a packet, at any byte
    llama_batch_ext * batch = stage.batch.get();
    llama_batch_ext_clear(batch);
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        const int32_t entry = llama_batch_ext_add_token(batch, run.slots[i], run.tokens[i]);
        bool ok             = entry == i && llama_batch_ext_set_pos(batch, entry, run.positions + i);
        if (ok && width > 0) {
            const char * came = (const char *) run.residual_in + i * format.row_bytes;
            if ((uintptr_t) came % alignof(float)) {
                aligned.resize((format.row_bytes + sizeof(float) - 1) / sizeof(float));
                came = (const char *) memcpy(aligned.data(), came, format.row_bytes);
            }
            const float * row = (const float *) came;
            if (!format.is_f32()) {
                format.traits->to_float(came, read.data(), (int64_t) width);
                row = read.data();
            }
            check_residual(run, i, row, width);
            ok = llama_batch_ext_set_embd_token(batch, entry, { row, /*.n_rows =*/1, /*.n_embd =*/width });
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
        llama_synchronize(stage.ctx.get()); // a device may still compute, and fail
        reason = stage.aborted ? "the stage was aborted" : why.text("no reason given");
    } catch (const std::exception & e) {
        rc     = INT32_MIN;
        reason = e.what();
    } catch (...) {
        rc     = INT32_MIN;
        reason = "an exception of unknown type";
    }
    if (rc == 0 && stage.aborted) {
        rc = 2; // devices do not ask whether to go on: the run came to its end, and fails all the same
    }
    switch (rc) {
        case 0: return;
        case 1:
            fail(DGR_ERR_FULL, "no room in the context for a batch of %d tokens: n_ctx is %u", run.n_tokens,
                stage.info.n_ctx_seq);
        case -1: refuse("llama.cpp refused the batch: %s", reason.c_str());
        default: break;
    }
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        stage.lost[run.slots[i]] = true;
    }
    fail(DGR_ERR_LOST, "running %d tokens failed (%d: %s): clear every slot of the batch", run.n_tokens, rc,
        reason.c_str());
}

// Writes one row as it goes out, and tells whether it may: 1, or as dgr_run.row_finite says.
static uint8_t put_residual(const residual_format & format, const float * row, char * out) {
    uint8_t verdict = all_residual(row, format.width);
    if (verdict == 1 && format.most < RESIDUAL_MAX) {
        for (size_t i = 0; i < format.width; ++i) {
            verdict |= std::fabs(row[i]) > format.most ? 2 : 0; // no early exit: this vectorizes
        }
        verdict = verdict > 1 ? 2 : 1;
    }
    if (verdict != 1) {
        memset(out, 0, format.row_bytes);
    } else if (format.is_f32()) {
        memcpy(out, row, format.row_bytes);
    } else {
        format.traits->from_float_ref(row, out, (int64_t) format.width);
    }
    return verdict;
}

static void copy_outputs(dgr_stage & stage, const dgr_run & run, uint32_t rows) {
    memset(run.row_finite, 1, run.n_tokens);
    if (stage.is_tail() && rows == 0) {
        llama_synchronize(stage.ctx.get());
        return;
    }
    if (stage.is_tail()) {
        const size_t width   = stage.info.n_vocab;
        const float * source = llama_get_logits(stage.ctx.get());
        float * out          = run.logits_out;
        for (int32_t i = 0; i < run.n_tokens; ++i) {
            if (run.want_logits[i]) {
                memcpy(out, source, width * sizeof(float));
                run.row_finite[i] = all_finite(out, width);
                out += width;
                source += width;
            }
        }
        return;
    }
    const residual_format format = format_of(run, stage.info.width_out);
    const float * source         = llama_get_embeddings_nextn(stage.ctx.get());
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        run.row_finite[i] =
            put_residual(format, source + i * format.width, (char *) run.residual_out + i * format.row_bytes);
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
    format_of(run, stage.info.width_out); // what cannot go out is refused before anything is computed
    const uint32_t rows = count_rows(stage, run);
    fill_batch(stage, run);
    for (int32_t i = 0; i < run.n_tokens; ++i) {
        const int32_t slot  = run.slots[i];
        stage.entered[slot] = std::max(stage.entered[slot], (uint32_t) run.positions[i] + 1);
        ++stage.changes[slot];
    }
    decode(stage, run);
    stage.output_rows = std::max(stage.output_rows, rows);
    copy_outputs(stage, run, rows);
}

} // namespace dgr

//
// C interface
//

int32_t dgr_stage_run(dgr_stage * stage, const dgr_run * run) {
    return dgr::guarded([&] {
        dgr::require("stage, run", stage, run);
        dgr::run_batch(*stage, *run);
    });
}

int32_t dgr_stage_position(const dgr_stage * stage, int32_t slot, int32_t * out) {
    return dgr::guarded([&] {
        dgr::require("stage, out", stage, out);
        dgr::check_slot(*stage, slot);
        *out = dgr::position(*stage, slot);
    });
}

void dgr_stage_abort(dgr_stage * stage) {
    if (stage) {
        stage->aborted = true;
    }
}
