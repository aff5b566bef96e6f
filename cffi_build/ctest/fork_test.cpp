// A copied sequence holds the bytes of its source, and both go on as if the other had never been.
#include "check.h"

#include "dgr_probe.h"

#include "llama.h"

#include "dgr_internal.h"

// Around the borders of CSA (4), HCA and the window (128), an HCA block (256) and a ring of raw K that has turned over.
static const std::vector<int> LENGTHS = { 1, 3, 4, 5, 127, 128, 129, 255, 300 };
static const int N_AFTER              = 5; // tokens that each goes on with: past the next CSA block
static const int N_CHUNK              = 64;

// The beginning of the fixed text, without logits.
static void advance(pipeline & stages, int32_t slot, int32_t end) {
    const int32_t n_vocab = info(stages.stages.back()).n_vocab;
    for (int32_t at = 0; at < end; at += N_CHUNK) {
        batch b;
        for (int32_t i = at; i < at + N_CHUNK && i < end; ++i) {
            b.add(slot, i, token_at(i, n_vocab), false);
        }
        stages.run(std::move(b));
    }
}

// Positions [begin, begin + n) of another text.
static floats go_on(pipeline & stages, int32_t slot, int32_t begin, int32_t n, int32_t kind) {
    const int32_t n_vocab = info(stages.stages.back()).n_vocab;
    floats rows;
    for (int32_t at = begin; at < begin + n; ++at) {
        batch b;
        b.add(slot, at, token_at(1000 * kind + at, n_vocab));
        const floats out = stages.run(std::move(b));
        rows.insert(rows.end(), out.begin(), out.end());
    }
    return rows;
}

static dgr_state_summary summary(const stage_ptr & stage, int32_t slot) {
    dgr_state_summary s;
    CHECK(dgr_stage_summary(stage.get(), slot, &s) == DGR_OK);
    return s;
}

static bool same_state(const dgr_state_summary & a, const dgr_state_summary & b) {
    return memcmp(&a, &b, sizeof(a)) == 0;
}

static void fork_slot(const pipeline & p, int32_t source, int32_t target) {
    for (const stage_ptr & stage : p.stages) {
        const dgr_state_summary before = summary(stage, source);
        CHECK(dgr_stage_fork(stage.get(), source, target) == DGR_OK);
        CHECK(same_state(summary(stage, target), before));
        CHECK(same_state(summary(stage, source), before));
    }
}

// All rows of a slot, those beyond its position too: what a copy leaves behind must not be met later.
static std::vector<uint8_t> rows_of(const stage_ptr & stage, int32_t slot) {
    const dgr_state_summary s = summary(stage, slot);
    std::vector<uint8_t> all;
    for (int32_t c = 0; c < DGR_N_COMPONENTS; ++c) {
        for (int32_t il = 0; il < info(stage).n_layer; ++il) {
            size_t size           = 0;
            const uint32_t n_rows = s.components[c].capacity;
            if (dgr_probe_rows(stage.get(), c, il, slot, 0, 0, nullptr, 0, &size) == DGR_OK) {
                std::vector<uint8_t> rows(n_rows * size);
                CHECK(dgr_probe_rows(stage.get(), c, il, slot, 0, n_rows, rows.data(), rows.size(), &size) == DGR_OK);
                all.insert(all.end(), rows.begin(), rows.end());
            }
        }
    }
    return all;
}

struct kind {
    bool exact;
    int32_t type_k;
    bool flash_attn;
};

static void forked_is_cold(
    const char * model, const kind & k, const std::vector<int> & cuts, const std::vector<int> & lengths) {
    dgr_stage_params p = small_params(0, 0);
    p.exact            = k.exact;
    p.type_k           = k.type_k;
    p.flash_attn       = k.flash_attn;
    pipeline cold(model, cuts, p), warm(model, cuts, p);
    for (const int length : lengths) {
        floats expected[3];
        std::vector<dgr_state_summary> ends[3];
        for (const int32_t after : { 1, 2 }) {
            advance(cold, 0, length);
            expected[after] = go_on(cold, 0, length, N_AFTER, after);
            for (const stage_ptr & stage : cold.stages) {
                ends[after].push_back(summary(stage, 0));
            }
            cold.clear(0);
        }

        // A copy of a copy, of which the one between is closed at once: a copy that were still to be made would be one of
        // zeros. Then the source goes on with other tokens, and the copy is to have noticed nothing.
        advance(warm, 0, length);
        fork_slot(warm, 0, 1);
        for (const stage_ptr & stage : warm.stages) {
            CHECK(rows_of(stage, 0) == rows_of(stage, 1));
            CHECK(dgr_stage_fork(stage.get(), 1, 2) == DGR_OK);
            CHECK(dgr_stage_clear(stage.get(), 1) == DGR_OK);
        }
        CHECK(same_bytes(go_on(warm, 0, length, N_AFTER, 1), expected[1]));
        CHECK(same_bytes(go_on(warm, 2, length, N_AFTER, 2), expected[2]));
        for (size_t i = 0; i < warm.stages.size(); ++i) {
            CHECK(same_state(summary(warm.stages[i], 0), ends[1][i]));
            CHECK(same_state(summary(warm.stages[i], 2), ends[2][i]));
        }
        warm.clear(0);
        warm.clear(2);
    }
}

// Upwards, downwards, and into slots that held something else before.
static void again_and_again(const char * model) {
    pipeline cold(model, { 0, 43 }, small_params(0, 0)), warm(model, { 0, 43 }, small_params(0, 0));
    advance(cold, 0, 130);
    const floats expected = go_on(cold, 0, 130, N_AFTER, 1);

    advance(warm, 1, 200);
    go_on(warm, 2, 0, 7, 4);
    warm.clear(1);
    warm.clear(2);
    advance(warm, 0, 130);
    fork_slot(warm, 0, 1);
    fork_slot(warm, 1, 2);
    warm.clear(1);
    warm.clear(0);
    fork_slot(warm, 2, 0);
    CHECK(same_bytes(go_on(warm, 2, 130, N_AFTER, 1), expected));
    fork_slot(warm, 0, 1);
    CHECK(same_bytes(go_on(warm, 1, 130, N_AFTER, 1), expected));
    CHECK(same_bytes(go_on(warm, 0, 130, N_AFTER, 1), expected));
}

// Closed before the copies are made, the source leaves zeros: what these tests must be able to see.
static void a_copy_put_off_is_seen(const char * model) {
    pipeline warm(model, { 0, 43 }, small_params(0, 0));
    advance(warm, 0, 130);
    dgr_stage * stage              = warm.stages[0].get();
    const dgr_state_summary before = summary(warm.stages[0], 0);
    llama_memory_seq_cp(llama_get_memory(stage->ctx.get()), 0, 1, -1, -1);
    CHECK(dgr_stage_clear(stage, 0) == DGR_OK);
    const dgr_state_summary after = summary(warm.stages[0], 1);
    CHECK(after.position == before.position);
    for (int32_t c = 0; c < DGR_N_COMPONENTS; ++c) {
        CHECK(
            memcmp(after.components[c].digest, before.components[c].digest, sizeof(before.components[c].digest)) != 0);
    }
}

static void refused(const stage_ptr & stage, int32_t source, int32_t target, const char * part) {
    CHECK(dgr_stage_fork(stage.get(), source, target) == DGR_ERR_ARGUMENT);
    CHECK(strstr(dgr_last_error(), part) != nullptr);
}

static void guards(const char * model) {
    pipeline p(model, { 0, 43 }, small_params(0, 0));
    const stage_ptr & stage = p.stages[0];
    advance(p, 0, 5);
    for (const int32_t slot : { -1, 3, INT32_MAX, INT32_MIN }) {
        refused(stage, slot, 1, "must be in 0..2");
        refused(stage, 0, slot, "must be in 0..2");
    }
    refused(stage, 0, 0, "into itself");
    refused(stage, 1, 2, "slot 1 is empty");
    fork_slot(p, 0, 1);
    refused(stage, 0, 1, "slot 1 holds 5 tokens");
    CHECK(dgr_stage_fork(nullptr, 0, 1) == DGR_ERR_ARGUMENT);
    CHECK(position(stage, 2) == 0);

    stage->lost[0] = true;
    refused(stage, 0, 2, "slot 0 was lost");
    stage->lost[0] = false;
    stage->lost[2] = true;
    refused(stage, 0, 2, "slot 2 was lost");
    CHECK(dgr_stage_clear(stage.get(), 2) == DGR_OK);
    fork_slot(p, 0, 2);

    dgr_stage_abort(stage.get());
    CHECK(dgr_stage_clear(stage.get(), 2) == DGR_OK);
    CHECK(dgr_stage_fork(stage.get(), 0, 2) == DGR_ERR_LOST);

    dgr_stage_params dry = small_params(15, 29);
    dry.dry_run          = true;
    refused(open(model, dry), 0, 1, "dry_run");
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    const char * model = argv[1];
    guards(model);
    a_copy_put_off_is_seen(model);
    again_and_again(model);
    const int32_t f32 = 0, f16 = 1;
    forked_is_cold(model, { true, f16, true }, { 0, 20, 43 }, LENGTHS);
    forked_is_cold(model, { true, f32, false }, { 0, 43 }, { 5, 128, 300 });
    forked_is_cold(model, { false, f16, true }, { 0, 43 }, LENGTHS);
    forked_is_cold(model, { false, f32, true }, { 0, 20, 43 }, { 3, 129, 255 });
}
