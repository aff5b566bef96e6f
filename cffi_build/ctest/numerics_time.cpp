// How long exact numerics take beside native ones on one model: the two in turn, chunk by chunk and token by token. Not a
// test: it prints a table.
//
//   numerics_time MODEL THREADS DECODED DEPTH...
//
// At every depth (ascending; a multiple of 512): two chunks of 512 tokens, then DECODED tokens; from one depth to the next
// chunks of 512. Ratios are of speed, exact over native: median (quartiles). One thread is timed by its CPU time, which other
// work on the machine disturbs least, several by the clock on the wall.
#include "check.h"

#include <algorithm>
#include <ctime>
#include <utility>

namespace {

constexpr int32_t CHUNK = 512;

double now(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

struct sample {
    int32_t position;
    double exact, native; // seconds a token
};

double quantile(std::vector<double> v, double q) {
    std::sort(v.begin(), v.end());
    const double at = q * (double) (v.size() - 1);
    const size_t i  = (size_t) at;
    return v[i] + (at - (double) i) * (v[std::min(i + 1, v.size() - 1)] - v[i]);
}

void report(const char * what, const std::vector<sample> & samples, int32_t begin, int32_t end) {
    std::vector<double> ratios, exact, native;
    for (const sample & s : samples) {
        if (s.position >= begin && s.position < end) {
            ratios.push_back(s.native / s.exact);
            exact.push_back(1e3 * s.exact);
            native.push_back(1e3 * s.native);
        }
    }
    if (!ratios.empty()) {
        printf("%-10s %6d to %6d: %.3f (%.3f to %.3f), ms a token: exact %.2f, native %.2f, samples %zu\n", what, begin,
            end, quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75), quantile(exact, 0.5),
            quantile(native, 0.5), ratios.size());
        fflush(stdout);
    }
}

class pair {
public:
    pair(const char * model, int32_t threads, int32_t length)
        : clock(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC) {
        for (const bool exact : { true, false }) {
            dgr_stage_params p = dgr_stage_params_default();
            p.n_ctx            = length;
            p.n_batch          = CHUNK;
            p.n_ubatch         = CHUNK;
            p.n_seq_max        = 1;
            p.n_threads        = threads;
            p.exact            = exact;
            stages.push_back(open(model, p));
        }
    }

    // Tokens [begin, end) as one batch on both; who begins alternates.
    sample run(int32_t begin, int32_t end, bool native_first) {
        sample s = { begin, 0.0, 0.0 };
        for (const bool native : { native_first, !native_first }) {
            const stage_ptr & stage = stages[native];
            batch b;
            for (int32_t i = begin; i < end; ++i) {
                b.add(0, i, token_at(i, info(stage).n_vocab), i == end - 1);
            }
            const double began = now(clock);
            CHECK(b.run(stage) == DGR_OK);
            (native ? s.native : s.exact) = (now(clock) - began) / (end - begin);
        }
        return s;
    }

    void clear() {
        for (const stage_ptr & stage : stages) {
            CHECK(dgr_stage_clear(stage.get(), 0) == DGR_OK);
        }
    }

private:
    clockid_t clock;
    std::vector<stage_ptr> stages;
};

} // namespace

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: numerics_time MODEL THREADS DECODED DEPTH...\n");
        return 2;
    }
    const int32_t threads = atoi(argv[2]), decoded = atoi(argv[3]);
    pair sides(argv[1], threads, atoi(argv[argc - 1]) + 2 * CHUNK + decoded);
    int32_t position = 0;
    const auto run   = [&](int32_t n) {
        const sample s = sides.run(position, position + n, (position / n) % 2);
        position += n;
        return s;
    };
    run(CHUNK); // warms up
    run(1);
    sides.clear();
    position = 0;
    for (int i = 4; i < argc; ++i) {
        const int32_t depth = atoi(argv[i]), begin = position;
        std::vector<sample> way, chunks, tokens;
        while (position < depth) {
            way.push_back(run(std::min(CHUNK, depth - position)));
        }
        for (int32_t from = CHUNK; from < depth; from *= 2) { // by doublings
            report("on the way", way, std::max(begin, from), 2 * from);
        }
        for (int chunk = 0; chunk < 2; ++chunk) {
            if (depth == 0) {
                sides.clear();
                position = 0;
            }
            chunks.push_back(run(CHUNK));
        }
        report("prefill", chunks, depth, position);
        if (depth == 0) {
            sides.clear();
            position = 0;
        }
        for (int32_t token = 0; token < decoded; ++token) {
            tokens.push_back(run(1));
        }
        report("decode", tokens, depth, position);
    }
}
