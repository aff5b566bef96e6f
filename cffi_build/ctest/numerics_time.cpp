// How long exact numerics take beside native ones on one model and one thread: the two in turn, chunk by chunk and token by
// token, in thread CPU time, which other work on the machine disturbs least. Not a test: it prints a table.
//
//   numerics_time MODEL LENGTH [ROUNDS [DECODED]]
//
// Prefills LENGTH tokens in chunks of 512, ROUNDS times; after the last, decodes DECODED tokens from there, and before the
// first as many from position 0. Ratios are of speed, exact over native: median (quartiles).
#include "check.h"

#include <algorithm>
#include <ctime>
#include <utility>

namespace {

constexpr int32_t CHUNK = 512;

double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
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
        printf("%s %6d to %6d: %.3f (%.3f to %.3f), ms a token: exact %.2f, native %.2f, samples %zu\n", what, begin,
            end, quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75), quantile(exact, 0.5),
            quantile(native, 0.5), ratios.size());
        fflush(stdout);
    }
}

class pair {
public:
    pair(const char * model, int32_t length) {
        for (const bool exact : { true, false }) {
            dgr_stage_params p = dgr_stage_params_default();
            p.n_ctx            = length;
            p.n_batch          = CHUNK;
            p.n_ubatch         = CHUNK;
            p.n_seq_max        = 1;
            p.n_threads        = 1;
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
            const double began = now();
            CHECK(b.run(stage) == DGR_OK);
            (native ? s.native : s.exact) = (now() - began) / (end - begin);
        }
        return s;
    }

    void clear() {
        for (const stage_ptr & stage : stages) {
            CHECK(dgr_stage_clear(stage.get(), 0) == DGR_OK);
        }
    }

private:
    std::vector<stage_ptr> stages;
};

} // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: numerics_time MODEL LENGTH [ROUNDS [DECODED]]\n");
        return 2;
    }
    const int32_t length = atoi(argv[2]), rounds = argc > 3 ? atoi(argv[3]) : 3,
                  decoded = argc > 4 ? atoi(argv[4]) : 64;
    pair sides(argv[1], length + decoded + 1);
    std::vector<sample> prefill, first, last;
    for (int32_t i = 0; i <= decoded; ++i) {
        const sample s = sides.run(i, i + 1, i % 2);
        if (i > 0) { // the first warms up
            first.push_back(s);
        }
    }
    report("decode ", first, 0, decoded + 1);
    for (int32_t round = 0; round < rounds; ++round) {
        sides.clear();
        for (int32_t begin = 0; begin < length; begin += CHUNK) {
            prefill.push_back(sides.run(begin, std::min(begin + CHUNK, length), (begin / CHUNK + round) % 2));
        }
    }
    report("prefill", prefill, 0, CHUNK);
    for (int32_t begin = CHUNK; begin < length; begin *= 2) {
        report("prefill", prefill, begin, 2 * begin);
    }
    for (int32_t i = length; i < length + decoded; ++i) {
        last.push_back(sides.run(i, i + 1, i % 2));
    }
    report("decode ", last, length, length + decoded);
}
