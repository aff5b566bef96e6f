// Everything that would end the process, or give a silently wrong answer, is refused, and the stage goes on as if nothing
// had been asked.
#include "check.h"
#include "dgr_internal.h"

#include <atomic>
#include <limits>
#include <thread>

static bool message_has(const char * part) {
    return strstr(dgr_last_error(), part) != nullptr;
}

template <class Edit>
static void open_refused(const char * model, int32_t status, const char * part, Edit && edit) {
    dgr_stage_params p = small_params(0, 0);
    edit(p);
    dgr_stage * stage = nullptr;
    CHECK(dgr_stage_open(model, &p, &stage) == status);
    CHECK(stage == nullptr);
    CHECK(message_has(part));
}

static void parameters(const char * model) {
    using P         = dgr_stage_params;
    const int32_t A = DGR_ERR_ARGUMENT;
    open_refused(model, A, "layers -1:4", [](P & p) {
        p.layer_begin = -1;
        p.layer_end   = 4;
    });
    open_refused(model, A, "layers 7:7", [](P & p) {
        p.layer_begin = 7;
        p.layer_end   = 7;
    });
    open_refused(model, A, "layers 9:3", [](P & p) {
        p.layer_begin = 9;
        p.layer_end   = 3;
    });
    open_refused(model, A, "layers 40:44", [](P & p) {
        p.layer_begin = 40;
        p.layer_end   = 44;
    });
    open_refused(model, A, "layers 43:0", [](P & p) { p.layer_begin = 43; });
    open_refused(model, A, "n_ctx is 0", [](P & p) { p.n_ctx = 0; });
    open_refused(model, A, "n_ctx is", [](P & p) { p.n_ctx = UINT32_MAX; });
    open_refused(model, A, "n_seq_max is 0", [](P & p) { p.n_seq_max = 0; });
    open_refused(model, A, "n_seq_max is 257", [](P & p) { p.n_seq_max = 257; });
    open_refused(model, A, "n_ubatch is 31", [](P & p) { p.n_ubatch = 31; });
    open_refused(model, A, "n_ubatch is 64", [](P & p) { p.n_batch = 63; });
    open_refused(model, A, "n_batch is", [](P & p) { p.n_batch = UINT32_MAX; });
    open_refused(model, A, "n_threads is 0", [](P & p) { p.n_threads = 0; });
    open_refused(model, A, "n_threads is 100000", [](P & p) { p.n_threads = 100000; });
    open_refused(model, A, "type_k is 999", [](P & p) { p.type_k = 999; });
    open_refused(model, A, "type_k is 2", [](P & p) { p.type_k = 2; });
    open_refused(model, A, "flash attention", [](P & p) {
        p.type_k     = 8;
        p.flash_attn = false;
    });
    open_refused(model, A, "no device 'NPU7' here; choose from ", [](P & p) {
        p.exact   = false;
        p.devices = "CPU,NPU7";
    });
    open_refused(model, A, "no device '' here", [](P & p) {
        p.exact   = false;
        p.devices = "CPU,";
    });
    open_refused(model, A, "gpu_layers is -2", [](P & p) { p.gpu_layers = -2; });
    open_refused(model, A, "exact numerics runs on the CPU alone", [](P & p) { p.gpu_layers = 1; });
    open_refused("/nonexistent.gguf", DGR_ERR_LOAD, "/nonexistent.gguf", [](P &) {});

    dgr_stage_params p = small_params(0, 0);
    dgr_stage * stage  = nullptr;
    CHECK(dgr_stage_open(nullptr, &p, &stage) == A);
    CHECK(dgr_stage_open(model, nullptr, &stage) == A);
    CHECK(dgr_stage_open(model, &p, nullptr) == A);
    dgr_stage_close(nullptr);
    dgr_stage_abort(nullptr);
}

// Lines as llama.cpp and its backends log them: what means that memory ran out, and what does not.
static void memory_words() {
    for (const char * line : {
             "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1024.00 MiB on device 0: cudaMalloc failed: out "
             "of memory",
             "ggml_vulkan: Device memory allocation of size 4294967296 failed.",
             "alloc_tensor_range: failed to allocate Vulkan0 buffer of size 4294967296",
             "unable to allocate CPU buffer",
             "vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
             "llama_init_from_model: failed to initialize the context: std::bad_alloc",
         }) {
        CHECK(dgr::tells_of_memory(line));
    }
    for (const char * line : {
             "llama_model_load: error loading model: missing tensor 'blk.3.ffn_gate_inp.weight'",
             "gguf_init_from_file_impl: failed to read magic",
             "failed to open GGUF file 'locations.gguf'",
         }) {
        CHECK(!dgr::tells_of_memory(line));
    }
}

// More slots than tokens in a batch: llama.cpp asserts unless outputs are sized for both.
static void more_slots_than_batch(const char * model) {
    dgr_stage_params p = small_params(0, 2);
    p.n_ctx            = 256;
    p.n_batch          = 32;
    p.n_ubatch         = 32;
    p.n_seq_max        = 40;
    CHECK(info(open(model, p)).n_seq_max == 40);
}

template <class Edit>
static void run_refused(const stage_ptr & stage, int32_t status, const char * part, Edit && edit) {
    const dgr_stage_info i  = info(stage);
    const int32_t committed = position(stage, 1);
    batch b;
    for (int32_t k = 0; k < 4; ++k) {
        b.add(1, committed + k, 5 + k);
    }
    if (i.width_in > 0) {
        b.residual.assign(4 * i.width_in, 0.25f);
    }
    edit(b);
    CHECK(b.run(stage) == status);
    CHECK(message_has(part));
    CHECK(position(stage, 1) == committed);
}

static void batches(const stage_ptr & stage) {
    const dgr_stage_info i = info(stage);
    const int32_t A        = DGR_ERR_ARGUMENT;
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    const int32_t n_vocab = i.n_vocab, committed = position(stage, 1);

    run_refused(stage, A, "n_tokens is 0", [](batch & b) { b = batch(); });
    run_refused(stage, A, "n_tokens is 129", [&](batch & b) {
        b = batch();
        for (int32_t k = 0; k < 129; ++k) {
            b.add(1, committed + k, 5);
        }
        b.residual.assign((size_t) 129 * i.width_in, 0.25f);
    });
    run_refused(stage, A, "token id -1", [](batch & b) { b.tokens[2] = -1; });
    run_refused(stage, A, "token id", [&](batch & b) { b.tokens[0] = n_vocab; });
    run_refused(stage, A, "slot is -1", [](batch & b) { b.slots[0] = -1; });
    run_refused(stage, A, "slot is 3", [](batch & b) { b.slots[3] = 3; });
    run_refused(stage, A, "slot 0 at entry 2 follows slot 1", [](batch & b) { b.slots = { 1, 1, 0, 0 }; });
    run_refused(stage, A, "slot 0 at entry 2 follows slot 1", [&](batch & b) {
        b.slots     = { 0, 1, 0, 1 };
        b.positions = { 0, committed, 1, committed + 1 };
    });
    run_refused(stage, A, "position", [](batch & b) { b.positions[0] += 1; });
    run_refused(stage, A, "position", [](batch & b) { b.positions[3] -= 1; });
    run_refused(stage, A, "position", [](batch & b) { b.positions[1] = b.positions[0]; });
    run_refused(stage, A, "continues at", [](batch & b) { b.positions[0] = INT32_MAX; });

    if (i.width_in > 0) {
        run_refused(stage, A, "residual_in is NULL", [](batch & b) { b.residual.clear(); });
        run_refused(
            stage, DGR_ERR_NON_FINITE, "holds nan: values must be finite", [&](batch & b) { b.residual[1] = nan; });
        run_refused(stage, DGR_ERR_NON_FINITE, "holds -inf: values must be finite",
            [&](batch & b) { b.residual.back() = -inf; });
        run_refused(
            stage, DGR_ERR_NON_FINITE, "at most 1e+15 in magnitude", [&](batch & b) { b.residual[0] = 1.1e15f; });
    } else {
        run_refused(stage, A, "must be NULL", [](batch & b) { b.residual.assign(4, 0.0f); });
    }
}

static void wrong_outputs(const stage_ptr & head, const stage_ptr & tail) {
    int32_t token = 5, zero = 0;
    uint8_t yes = 1, no = 0, finite;
    floats row(info(head).width_out);

    dgr_run run = { 1, &token, &zero, &zero, &yes, nullptr, row.data(), row.data(), &finite };
    CHECK(dgr_stage_run(head.get(), &run) == DGR_ERR_ARGUMENT && message_has("only the stage that ends at 43"));
    run.want_logits   = &no;
    run.residual_type = 2;
    CHECK(dgr_stage_run(head.get(), &run) == DGR_ERR_ARGUMENT && message_has("residual_type is 2, must be 0"));
    run.residual_type = 0;
    run.residual_out  = nullptr;
    CHECK(dgr_stage_run(head.get(), &run) == DGR_ERR_ARGUMENT && message_has("residual_out is NULL"));
    run.row_finite = nullptr;
    CHECK(dgr_stage_run(head.get(), &run) == DGR_ERR_ARGUMENT && message_has("required"));

    floats residual(info(tail).width_in, 0.25f);
    run = { 1, &token, &zero, &zero, &yes, residual.data(), nullptr, nullptr, &finite };
    CHECK(dgr_stage_run(tail.get(), &run) == DGR_ERR_ARGUMENT && message_has("logits_out is NULL"));
    CHECK(dgr_stage_run(nullptr, &run) == DGR_ERR_ARGUMENT);
    CHECK(position(head, 0) == 0 && position(tail, 0) == 0);
}

static void full(const char * model) {
    pipeline whole(model, { 0, 43 }, small_params(0, 0));
    whole.prefill(1, 0, 510, 128);
    const stage_ptr & stage = whole.stages[0];
    run_refused(stage, DGR_ERR_FULL, "cannot take 4 more", [](batch &) {});
    whole.prefill(1, 510, 512, 2); // exactly full
    run_refused(stage, DGR_ERR_FULL, "holds 512 tokens", [](batch &) {});

    // The last compressed row of a full slot is a committed one, no longer the dummy.
    dgr_state_summary f;
    CHECK(dgr_stage_summary(stage.get(), 1, &f) == DGR_OK);
    CHECK(f.position == 512 && f.components[DGR_CSA].rows_min == 128);
}

static void slots(const stage_ptr & stage) {
    int32_t p;
    dgr_state_summary f;
    for (const int32_t slot : { -1, 3, INT32_MAX, INT32_MIN }) {
        CHECK(dgr_stage_position(stage.get(), slot, &p) == DGR_ERR_ARGUMENT);
        CHECK(dgr_stage_clear(stage.get(), slot) == DGR_ERR_ARGUMENT);
        CHECK(dgr_stage_summary(stage.get(), slot, &f) == DGR_ERR_ARGUMENT);
    }
}

static void dry_run(const char * model) {
    dgr_stage_params p        = small_params(15, 29);
    const dgr_stage_info real = info(open(model, p));
    p.dry_run                 = true;
    const stage_ptr stage     = open(model, p);
    const dgr_stage_info dry  = info(stage);
    CHECK(memcmp(&dry, &real, sizeof(dry)) == 0);
    run_refused(stage, DGR_ERR_ARGUMENT, "dry_run", [](batch &) {});
    dgr_state_summary f;
    CHECK(dgr_stage_summary(stage.get(), 0, &f) == DGR_ERR_ARGUMENT);
    CHECK(dgr_stage_clear(stage.get(), 0) == DGR_ERR_ARGUMENT);
}

// A payload begins where it came in a packet.
static void residual_at_any_byte(const char * model) {
    pipeline split(model, { 0, 1, 3 }, small_params(0, 0));
    batch b;
    for (int32_t i = 0; i < 5; ++i) {
        b.add(0, i, 7 * i);
    }
    CHECK(b.run(split.stages[0]) == DGR_OK);
    b.residual = b.output;
    floats expected;
    for (b.shift = 0; b.shift < sizeof(float); ++b.shift) {
        CHECK(b.run(split.stages[1]) == DGR_OK && b.all_finite());
        CHECK(b.shift == 0 || same_bytes(b.output, expected));
        expected = b.output;
        CHECK(dgr_stage_clear(split.stages[1].get(), 0) == DGR_OK);
    }
}

static void aborted(const char * model) {
    pipeline whole(model, { 0, 43 }, small_params(0, 0));
    whole.prefill(0, 0, 8, 8);
    dgr_stage_abort(whole.stages[0].get());
    batch b;
    b.add(0, 8, 5);
    CHECK(b.run(whole.stages[0]) == DGR_ERR_LOST);
    CHECK(message_has("aborted"));
}

// From another thread, while tokens run.
static void aborted_in_flight(const char * model) {
    pipeline whole(model, { 0, 43 }, small_params(0, 0));
    const stage_ptr & stage   = whole.stages[0];
    std::atomic<bool> running = false;
    std::thread other([&] {
        while (!running) {
            std::this_thread::yield();
        }
        dgr_stage_abort(stage.get());
    });
    int32_t status;
    do {
        batch b;
        for (int32_t i = 0, begin = position(stage, 2); i < 128; ++i) {
            b.add(2, begin + i, 5);
        }
        status  = b.run(stage);
        running = true; // from here on one run follows another, until the abort comes
        if (status == DGR_ERR_FULL) {
            status = dgr_stage_clear(stage.get(), 2);
        }
    } while (status == DGR_OK);
    other.join();
    CHECK(status == DGR_ERR_LOST);
    CHECK(message_has("aborted"));
    CHECK(dgr_stage_clear(stage.get(), 2) == DGR_OK);
    CHECK(position(stage, 2) == 0);
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    const char * model = argv[1];
    parameters(model);
    memory_words();
    more_slots_than_batch(model);

    // Half way through a session, and then the session goes on as if nothing had been asked.
    const floats expected = pipeline(model, { 0, 15, 29, 43 }, small_params(0, 0)).prefill(1, 0, 60, 60);
    pipeline split(model, { 0, 15, 29, 43 }, small_params(0, 0));
    floats rows = split.prefill(1, 0, 30, 30);
    for (const stage_ptr & stage : split.stages) {
        batches(stage);
        slots(stage);
    }
    wrong_outputs(split.stages[0], split.stages[2]);
    const floats rest = split.prefill(1, 30, 60, 30);
    rows.insert(rows.end(), rest.begin(), rest.end());
    CHECK(same_bytes(rows, expected));

    residual_at_any_byte(model);
    full(model);
    dry_run(model);
    aborted(model);
    aborted_in_flight(model);
}
