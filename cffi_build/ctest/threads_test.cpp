// Many threads at once, each with handles of its own: what they share is the library, and nothing of one reaches another.
#include "check.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

static constexpr int32_t N_PROMPT = 130; // past the sliding window, and a compressed row of every kind
static constexpr int ROUNDS       = 3;

static std::atomic<int> lines = { 0 };

static void count_line(int32_t, const char *) {
    ++lines;
}

static void at_once(const std::vector<std::function<void()>> & jobs) {
    std::vector<std::thread> threads;
    for (const auto & job : jobs) {
        threads.emplace_back(job);
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
}

// Weights are fetched by as many threads as compute.
static dgr_stage_params mapped(int n_threads) {
    dgr_stage_params p = small_params(0, 5);
    p.use_mmap         = true;
    p.prefetch         = true;
    p.n_threads        = std::min<int>(n_threads, (int) std::thread::hardware_concurrency());
    return p;
}

// A conversation over three stages, everything that a slot knows included.
static floats conversation(const char * model, int n_threads = 1) {
    pipeline split(model, { 0, 3, 4, 5 }, mapped(n_threads));
    floats rows = split.prefill(0, 0, N_PROMPT, 64);
    for (const stage_ptr & stage : split.stages) {
        CHECK(dgr_stage_fork(stage.get(), 0, 1) == DGR_OK);
        dgr_state_summary source, target;
        CHECK(dgr_stage_summary(stage.get(), 0, &source) == DGR_OK);
        CHECK(dgr_stage_summary(stage.get(), 1, &target) == DGR_OK);
        CHECK(memcmp(&source, &target, sizeof(source)) == 0);
    }
    const floats more = split.prefill(1, N_PROMPT, N_PROMPT + 4, 1);
    rows.insert(rows.end(), more.begin(), more.end());
    split.clear(0);
    split.clear(1);
    return rows;
}

// A run is ended from another thread, while it computes or before; the stage fails from then on, and its end is its own.
static void aborted(const char * model, int round) {
    const stage_ptr stage  = open(model, mapped(1));
    std::atomic<bool> runs = { false };
    std::thread other([&] {
        while (!runs) {
            std::this_thread::yield();
        }
        for (int i = 0; i < round * 1000; ++i) {
            std::this_thread::yield();
        }
        dgr_stage_abort(stage.get());
    });
    int32_t status = DGR_OK;
    for (int32_t at = 0; status == DGR_OK && at + 64 <= 512; at += 64) {
        batch b;
        for (int32_t i = at; i < at + 64; ++i) {
            b.add(0, i, token_at(i, info(stage).n_vocab));
        }
        runs   = true;
        status = b.run(stage);
        CHECK(status == DGR_OK || status == DGR_ERR_LOST);
    }
    other.join();
}

// Failures tell each thread its own message.
static void refused(int32_t slot) {
    const std::string text = std::to_string(slot);
    for (int i = 0; i < 1000; ++i) {
        dgr_vocab * vocab = nullptr;
        CHECK(dgr_vocab_open(("/nonexistent/" + text).c_str(), &vocab) == DGR_ERR_LOAD);
        CHECK(strstr(dgr_last_error(), ("/nonexistent/" + text).c_str()) != nullptr);
    }
}

static void fetched(const char * model) {
    for (int i = 0; i < 10; ++i) {
        open(model, mapped(2));
    }
}

static void tokenized(const char * model) {
    dgr_vocab * vocab = nullptr;
    CHECK(dgr_vocab_open(model, &vocab) == DGR_OK);
    int32_t n = 0;
    for (int i = 0; i < 100; ++i) {
        CHECK(dgr_vocab_tokenize(vocab, "Hello, world!", 13, false, false, nullptr, 0, &n) == DGR_OK);
        CHECK(n > 0);
    }
    dgr_vocab_close(vocab);
}

static void asked() {
    std::string first, probe(33, '\0'), again(33, '\0');
    CHECK(dgr_kernel_probe(probe.data(), probe.size()) == DGR_OK);
    for (int i = 0; i < 20; ++i) {
        CHECK(dgr_kernel_probe(again.data(), again.size()) == DGR_OK);
        CHECK(probe == again);
        CHECK(first.empty() || first == dgr_build_info());
        first = dgr_build_info();
        dgr_log_set(i % 2 ? count_line : nullptr);
    }
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    const char * model = argv[1];
    dgr_log_set(count_line);
    std::vector<floats> found(2);
    for (int round = 0; round < ROUNDS; ++round) { // the first one makes the library ready, on whichever thread
        at_once({
            [&] { found[0] = conversation(model); },
            [&] { found[1] = conversation(model); },
            [&] { aborted(model, round); },
            [&] { refused(1); },
            [&] { refused(2); },
            [&] { tokenized(model); },
            [&] { fetched(model); },
            asked,
        });
        CHECK(same_bytes(found[0], found[1]));
    }
    dgr_log_set(nullptr);
    CHECK(same_bytes(conversation(model, 2), found[0])); // nobody beside it: threads that compute wait by spinning
}
