// How long the kernels of exact numerics take beside those of native ones, the two in turn, as nanoseconds of thread CPU time
// for 32 products. Not a test: it prints a table.
//
//   kernels_time [SECONDS FOR A ROW [TYPE, "own" or "attention" [COLUMNS]]]
#include "kernels.h"

#include <ctime>
#include <string>

using namespace kernels;

namespace {

double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

double timed(graph & g) {
    const double began = now();
    g.compute();
    return now() - began;
}

// The least time of each, as work shared with others only adds to it.
void compare(const char * name, graph & exact, graph & native, double products, double seconds) {
    double best[2] = { 1e9, 1e9 };
    timed(exact);
    timed(native);
    for (const double end = now() + seconds; now() < end;) {
        best[0] = std::min(best[0], timed(exact));
        best[1] = std::min(best[1], timed(native));
    }
    const double scale = 32e9 / products;
    printf("%-40s exact %6.3f   native %6.3f   speed of exact/native %.2f\n", name, best[0] * scale, best[1] * scale,
        best[1] / best[0]);
    fflush(stdout);
}

void products(ggml_type type, int64_t m, int64_t k, int64_t n, double seconds) {
    randoms r = { 1 };
    // as many matrices as no cache holds; every one is used once a turn
    const int64_t size = ggml_row_size(type, k) * m, experts = std::max<int64_t>(1, (48 << 20) / size);
    const weights w(type, m, k, experts, r);
    const floats tokens = r.values(n * k);
    ints ids(experts * n);
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t e = 0; e < experts; ++e) {
            ids[t * experts + e] = (int32_t) e;
        }
    }
    const auto build = [&](graph & g) {
        ggml_tensor * a = g.input(type, { k, m, experts }, w.data.data(), true);
        ggml_tensor * b = g.input(GGML_TYPE_F32, { k, 1, n }, tokens.data());
        ggml_tensor * i = g.input(GGML_TYPE_I32, { experts, n }, ids.data());
        return g.build(ggml_mul_mat_id(g.context(), a, b, i));
    };
    const auto build_one = [&](graph & g) {
        ggml_tensor * a = g.input(type, { k, m * experts }, w.data.data(), true);
        ggml_tensor * b = g.input(GGML_TYPE_F32, { k, n }, tokens.data());
        return g.build(ggml_mul_mat(g.context(), a, b));
    };
    for (const bool id : { false, true }) {
        graph exact({ true }), repacked({ false, 1, true }), plain({ false });
        const auto make = [&](graph & g) { return id ? build(g) : build_one(g); };
        make(exact);
        const bool repacks = make(repacked);
        if (!repacks) {
            make(plain);
        }
        char name[80];
        snprintf(name, sizeof(name), "%s %s k %d n %d%s", id ? "mul_mat_id" : "mul_mat", ggml_type_name(type), (int) k,
            (int) n, repacks ? " (repacked)" : "");
        compare(name, exact, repacks ? repacked : plain, (double) m * k * n * experts, seconds);
    }
}

// DeepSeek V4's own operations at its widths.
void own_operations(int64_t n, double seconds) {
    randoms r = { 1 };
    {
        const int64_t dim = 128, heads = 64, cells = 4096;
        const indexer x(GGML_TYPE_F16, dim, heads, cells, r);
        const bytes data = quantised(x.type, x.k, dim);
        const floats q = r.values(n * heads * dim), w = r.values(n * heads);
        const std::vector<ggml_fp16_t> mask(n * cells, 0);
        const auto build = [&](graph & g) {
            ggml_tensor * tq = g.input(GGML_TYPE_F32, { dim, heads, n }, q.data());
            ggml_tensor * tk = g.input(x.type, { dim, 1, cells }, data.data());
            ggml_tensor * tw = g.input(GGML_TYPE_F32, { heads, n }, w.data());
            ggml_tensor * tm = g.input(GGML_TYPE_F16, { cells, n }, mask.data());
            g.build(ggml_lightning_indexer(g.context(), tq, tk, tw, tm));
        };
        graph exact({ true }), native({ false });
        build(exact);
        build(native);
        const std::string name = "indexer 64 x 128, 4096 cells, n " + std::to_string(n);
        compare(name.c_str(), exact, native, (double) n * heads * cells * dim, seconds);
    }
    const int64_t width = 4096, streams = 4;
    const floats x = r.values(n * width), residual = r.values(n * streams * width), post = r.values(n * streams),
                 comb = r.values(n * streams * streams);
    const auto build  = [&](graph & g) {
        ggml_tensor * tx = g.input(GGML_TYPE_F32, { width, n }, x.data());
        ggml_tensor * tr = g.input(GGML_TYPE_F32, { width, streams, n }, residual.data());
        ggml_tensor * tp = g.input(GGML_TYPE_F32, { streams, n }, post.data());
        ggml_tensor * tc = g.input(GGML_TYPE_F32, { streams, streams, n }, comb.data());
        g.build(ggml_dsv4_hc_post(g.context(), tx, tr, tp, tc));
    };
    graph exact({ true }), native({ false });
    build(exact);
    build(native);
    const std::string name = "4 streams of 4096, n " + std::to_string(n);
    compare(name.c_str(), exact, native, (double) n * width * streams * (streams + 1), seconds);
}

} // namespace

int main(int argc, char ** argv) {
    const double seconds = argc > 1 ? atof(argv[1]) : 1.0;
    const char * only    = argc > 2 ? argv[2] : nullptr;
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_MXFP4,
             GGML_TYPE_Q4_K, GGML_TYPE_Q2_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ2_XXS }) {
        if (only && strcmp(only, ggml_type_name(type))) {
            continue;
        }
        for (const int64_t n : { 1, 12, 64 }) {
            if (argc > 3 && atoi(argv[3]) != n) {
                continue;
            }
            products(type, 512, 2048, n, seconds);
        }
    }
    for (const int64_t n : { 1, 64 }) {
        if (!only || !strcmp(only, "own")) {
            own_operations(n, seconds);
        }
    }
    if (only && strcmp(only, "attention")) {
        return 0;
    }
    for (const int64_t n : { 1, 64 }) {
        for (const int64_t cells : { 768, 8192 }) {
            for (const int64_t heads : { 16, 64 }) {
                randoms r         = { 1 };
                const int64_t dim = heads == 64 ? 512 : 128;
                const attention a(GGML_TYPE_F16, dim, heads, cells, r);
                const bytes kv = quantised(a.type, a.k, dim);
                const floats q = r.values(n * heads * dim);
                std::vector<ggml_fp16_t> mask(n * cells, ggml_fp32_to_fp16(-INFINITY));
                for (int64_t t = 0; t < n; ++t) {
                    for (int64_t c = 0; c < 640; ++c) { // as many as V4 sees, strewn
                        mask[t * cells + r.below(cells)] = 0;
                    }
                }
                const auto build = [&](graph & g) {
                    ggml_tensor * tq =
                        ggml_permute(g.context(), g.input(GGML_TYPE_F32, { dim, heads, n }, q.data()), 0, 2, 1, 3);
                    ggml_tensor * tk = g.input(a.type, { dim, cells, 1 }, kv.data());
                    ggml_tensor * tm = g.input(GGML_TYPE_F16, { cells, n }, mask.data());
                    g.build(ggml_flash_attn_ext(g.context(), tq, tk, tk, tm, 1.0f, 0.0f, 0.0f));
                };
                graph exact({ true }), native({ false });
                build(exact);
                build(native);
                char name[80];
                snprintf(name, sizeof(name), "attention %d x %d, %d cells, n %d", (int) heads, (int) dim, (int) cells,
                    (int) n);
                compare(name, exact, native, 2.0 * n * heads * dim * std::min<int64_t>(cells, 640), seconds);
            }
        }
    }
}
