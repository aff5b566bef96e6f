// What happens to one sequence stays in it, and a cleared slot is as good as new.
#include "check.h"

#include "dgr_probe.h"

#include <limits>

static const int N_PROMPT = 140; // past an HCA block

// Calls visit(component, layer, rows, bytes of a row) for all that a stage holds.
template <class Visit>
static void each_component(const stage_ptr & stage, int32_t slot, Visit && visit) {
    dgr_state_summary f;
    CHECK(dgr_stage_summary(stage.get(), slot, &f) == DGR_OK);
    for (int32_t c = 0; c < DGR_N_COMPONENTS; ++c) {
        int32_t n_layers = 0;
        for (int32_t il = 0; il < info(stage).n_layer; ++il) {
            size_t row_bytes = 0;
            if (dgr_probe_rows(stage.get(), c, il, slot, 0, 0, nullptr, 0, &row_bytes) == DGR_OK) {
                visit(c, il, f.components[c].capacity, row_bytes);
                ++n_layers;
            }
        }
        CHECK(n_layers == f.components[c].n_layers);
    }
}

static std::vector<uint8_t> rows_of(const stage_ptr & stage, int32_t slot) {
    std::vector<uint8_t> all;
    each_component(stage, slot, [&](int32_t c, int32_t il, uint32_t n_rows, size_t row_bytes) {
        std::vector<uint8_t> rows(n_rows * row_bytes);
        CHECK(dgr_probe_rows(stage.get(), c, il, slot, 0, n_rows, rows.data(), rows.size(), &row_bytes) == DGR_OK);
        all.insert(all.end(), rows.begin(), rows.end());
    });
    return all;
}

static bool all_zero(const std::vector<uint8_t> & bytes) {
    for (const uint8_t byte : bytes) {
        if (byte != 0) {
            return false;
        }
    }
    return true;
}

// The largest residual that the guard lets in; then NaN in every row that the slot has, as the worst that any graph could
// leave.
static void poison(const stage_ptr & stage, int32_t slot) {
    const dgr_stage_info i = info(stage);
    batch b;
    for (int32_t k = 0; k < N_PROMPT - 12; ++k) {
        b.add(slot, k, token_at(k, i.n_vocab));
    }
    b.residual.assign(b.tokens.size() * i.width_in, std::numeric_limits<float>::max());
    CHECK(b.run(stage) == DGR_ERR_NON_FINITE);
    b.residual.assign(b.tokens.size() * i.width_in, 1e15f);
    CHECK(b.run(stage) == DGR_OK);

    each_component(stage, slot, [&](int32_t c, int32_t il, uint32_t n_rows, size_t row_bytes) {
        const std::vector<uint8_t> nan(row_bytes, 0xff); // in f16 and in f32
        for (uint32_t row = 0; row < n_rows; ++row) {
            CHECK(dgr_probe_poke(stage.get(), c, il, slot, row, nan.data(), nan.size()) == DGR_OK);
        }
    });
}

static void poison_stays_in_its_slot(const char * model, bool flash_attn) {
    dgr_stage_params p = small_params(0, 0);
    p.flash_attn       = flash_attn;
    pipeline clean(model, { 0, 1, 43 }, p);
    const floats expected = clean.prefill(0, 0, N_PROMPT, 64);

    for (const int32_t poisoned : { 0, 1 }) {
        pipeline split(model, { 0, 1, 43 }, p);
        poison(split.stages[1], poisoned);
        CHECK(same_bytes(split.prefill(2, 0, N_PROMPT, 64), expected)); // beside it

        split.clear(poisoned);
        CHECK(all_zero(rows_of(split.stages[1], poisoned)));
        CHECK(!all_zero(rows_of(split.stages[1], 2)));
        split.clear(2);
        CHECK(same_bytes(split.prefill(poisoned, 0, N_PROMPT, 64), expected)); // after it
        CHECK(same_bytes(split.prefill(2, 0, N_PROMPT, 64), expected));
    }
}

// The digest sees a changed row, and nothing else does it.
static void frontier_sees_a_poke(const char * model) {
    pipeline whole(model, { 0, 43 }, small_params(0, 0));
    whole.prefill(1, 0, N_PROMPT, 64);
    const stage_ptr & stage = whole.stages[0];

    dgr_state_summary before, again, after;
    CHECK(dgr_stage_summary(stage.get(), 1, &before) == DGR_OK);
    CHECK(dgr_stage_summary(stage.get(), 1, &again) == DGR_OK);
    CHECK(memcmp(&before, &again, sizeof(before)) == 0);
    CHECK(before.position == N_PROMPT);
    CHECK(before.components[DGR_RAW_SWA].rows_min == (uint32_t) N_PROMPT);
    CHECK(before.components[DGR_CSA].rows_min == N_PROMPT / 4 && before.components[DGR_CSA].rows_max == N_PROMPT / 4);
    CHECK(before.components[DGR_INDEXER].rows_min == N_PROMPT / 4);
    CHECK(before.components[DGR_HCA].rows_min == N_PROMPT / 128);
    CHECK(before.components[DGR_CSA_RING].rows_min == 8 && before.components[DGR_HCA_RING].rows_min == 128);

    const int32_t layer = 4; // CSA
    size_t row_bytes    = 0;
    CHECK(dgr_probe_rows(stage.get(), DGR_CSA, layer, 1, 0, 0, nullptr, 0, &row_bytes) == DGR_OK);
    std::vector<uint8_t> row(row_bytes, 0x11);
    CHECK(dgr_probe_poke(stage.get(), DGR_CSA, layer, 1, /*row =*/3, row.data(), row.size()) == DGR_OK);
    CHECK(dgr_stage_summary(stage.get(), 1, &after) == DGR_OK);
    for (int32_t c = 0; c < DGR_N_COMPONENTS; ++c) {
        const bool same = memcmp(&before.components[c], &after.components[c], sizeof(before.components[c])) == 0;
        CHECK(same == (c != DGR_CSA));
    }
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    poison_stays_in_its_slot(argv[1], true);
    poison_stays_in_its_slot(argv[1], false);
    frontier_sees_a_poke(argv[1]);
}
