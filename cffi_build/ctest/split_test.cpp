// A split pipeline returns the bytes of the whole model: however it is cut, chunked, threaded or batched in exact numerics,
// and for equal chunks in native numerics.
#include "check.h"

#include <algorithm>

static const int N_PROMPT = 200;

static void cuts_and_chunks(const char * model, const floats & whole) {
    const std::vector<std::vector<int>> splits = {
        { 0, 15, 29, 43 },
        { 0, 1, 2, 43 },        // cuts inside the hash layers, a head without CSA and HCA layers
        { 0, 2, 3, 4, 42, 43 }, // 2:3 has only a CSA layer, 3:4 only an HCA layer, 42:43 is a tail of one layer
    };
    for (const auto & cuts : splits) {
        for (const int chunk : { 128, 5, 1 }) {
            pipeline split(model, cuts, small_params(0, 0));
            CHECK(same_bytes(split.prefill(0, 0, N_PROMPT, chunk), whole));
        }
    }
}

static void batch_companions(const char * model, const floats & whole) {
    pipeline split(model, { 0, 20, 43 }, small_params(0, 0));
    const dgr_stage_info tail = info(split.stages.back());

    // Slot 1 runs the text while slots 0 and 2 run something else in the same batches.
    floats rows;
    for (int32_t at = 0; at < N_PROMPT; at += 20) {
        batch b;
        b.add(0, at / 20, 7, false);
        for (int32_t i = at; i < at + 20; ++i) {
            b.add(1, i, token_at(i, tail.n_vocab));
        }
        for (int32_t i = 0; i < 3; ++i) {
            b.add(2, at / 20 * 3 + i, 11, false);
        }
        floats out = split.run(std::move(b));
        out.resize((size_t) 20 * tail.n_vocab);
        rows.insert(rows.end(), out.begin(), out.end());
    }
    CHECK(same_bytes(rows, whole));
}

static void threads(const char * model, const floats & whole) {
    dgr_stage_params p = small_params(0, 0);
    p.n_threads        = 2;
    dgr_stage * stage  = nullptr;
    if (dgr_stage_open(model, &p, &stage) == DGR_ERR_ARGUMENT) {
        printf("skipped: a second thread needs a second CPU\n");
        return;
    }
    dgr_stage_close(stage);
    CHECK(same_bytes(pipeline(model, { 0, 43 }, p).prefill(0, 0, N_PROMPT, 33), whole));
}

static void native(const char * model) {
    dgr_stage_params p = small_params(0, 0);
    p.exact            = false;
    const floats whole = pipeline(model, { 0, 43 }, p).prefill(0, 0, N_PROMPT, 64);
    CHECK(same_bytes(pipeline(model, { 0, 2, 30, 43 }, p).prefill(0, 0, N_PROMPT, 64), whole));
}

static void mapped(const char * model, const floats & whole) {
    dgr_stage_params p = small_params(0, 0);
    p.use_mmap         = true;
    CHECK(same_bytes(pipeline(model, { 0, 22, 43 }, p).prefill(0, 0, N_PROMPT, 128), whole));
}

// The checks above would pass on a stage that ignored its input: these must differ.
static void mutants(const char * model, const floats & whole) {
    const int n           = 64;
    const auto last_stage = [&](const std::vector<int> & cuts, auto && damage) {
        pipeline split(model, cuts, small_params(0, 0));
        const dgr_stage_info tail = info(split.stages.back());
        batch b;
        for (int32_t i = 0; i < n; ++i) {
            b.add(0, i, token_at(i, tail.n_vocab));
        }
        CHECK(b.run(split.stages[0]) == DGR_OK);
        b.residual = b.output;
        damage(b);
        CHECK(b.run(split.stages[1]) == DGR_OK);
        return same_bytes(b.output, floats(whole.begin(), whole.begin() + b.output.size()));
    };
    const auto nothing   = [](batch &) {};
    const auto swap_ids  = [](batch & b) { std::swap(b.tokens[3], b.tokens[4]); };
    const auto stale_row = [](batch & b) {
        const size_t width = b.residual.size() / n;
        std::copy_n(b.residual.begin(), width, b.residual.begin() + width);
    };
    CHECK(last_stage({ 0, 1, 43 }, nothing));
    CHECK(!last_stage({ 0, 1, 43 }, swap_ids)); // layers 1 and 2 route by token id
    CHECK(last_stage({ 0, 3, 43 }, swap_ids));  // no layer from 3 on does
    CHECK(!last_stage({ 0, 3, 43 }, stale_row));
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    const char * model = argv[1];
    const floats whole = pipeline(model, { 0, 43 }, small_params(0, 0)).prefill(0, 0, N_PROMPT, 128);

    cuts_and_chunks(model, whole);
    batch_companions(model, whole);
    threads(model, whole);
    native(model);
    mapped(model, whole);
    mutants(model, whole);
}
