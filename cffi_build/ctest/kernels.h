// ggml's matrix products and attention by themselves, on the CPU backend with the reference switch (exact numerics) or
// without it (native ones), and random inputs for them.
#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace kernels {

using floats = std::vector<float>;
using bytes  = std::vector<uint8_t>;
using ints   = std::vector<int32_t>;

// The same numbers everywhere for a seed (splitmix64).
struct randoms {
    uint64_t state;

    uint64_t next() {
        uint64_t z = (state += 0x9E3779B97F4A7C15u);
        z          = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z          = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }

    int64_t below(int64_t n) { return (int64_t) (next() % (uint64_t) n); }
    int64_t between(int64_t a, int64_t b) { return a + below(b - a + 1); }

    // Roughly normal, as weights and activations are.
    float value() {
        float sum = 0.0f;
        for (int i = 0; i < 4; ++i) {
            sum += (float) (next() >> 40) * 0x1p-24f - 0.5f;
        }
        return sum;
    }

    floats values(int64_t n) {
        floats v(n);
        for (float & x : v) {
            x = value();
        }
        return v;
    }

    // Numbers below n in random order.
    ints order(int64_t n) {
        ints o(n);
        for (int64_t i = 0; i < n; ++i) {
            const int64_t j = below(i + 1);
            o[i]            = o[j];
            o[j]            = (int32_t) i;
        }
        return o;
    }
};

struct free_ggml {
    void operator()(ggml_context * c) const { ggml_free(c); }
};
struct free_backend {
    void operator()(ggml_backend * b) const { ggml_backend_free(b); }
};
struct free_buffer {
    void operator()(ggml_backend_buffer * b) const { ggml_backend_buffer_free(b); }
};

[[noreturn]] inline void die(const char * what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

// How to compute.
struct side {
    bool exact  = true;
    int threads = 1;
    bool repack = false; // weights in the layout that native numerics choose for this CPU
};

// One graph with its inputs, computed as often as asked.
class graph {
public:
    explicit graph(side s)
        : how(s)
        , ctx(ggml_init({ 256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }))
        , weights_ctx(ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true }))
        , backend(ggml_backend_cpu_init()) {
        ggml_backend_cpu_set_n_threads(backend.get(), s.threads);
        ggml_backend_cpu_set_use_ref(backend.get(), s.exact);
    }

    ggml_context * context() const { return ctx.get(); }

    ggml_tensor * input(ggml_type type, std::vector<int64_t> ne, const void * data, bool weights = false) {
        ggml_tensor * t = ggml_new_tensor((weights ? weights_ctx : ctx).get(), type, (int) ne.size(), ne.data());
        inputs.push_back({ t, data });
        return t;
    }

    // Compute what ends in `result`; false when these weights are not repacked on this CPU.
    bool build(ggml_tensor * r) {
        result = r;
        if (ggml_get_first_tensor(weights_ctx.get())) {
            ggml_backend_buffer_type_t type = how.repack ? repacked(r) : ggml_backend_cpu_buffer_type();
            if (!type) {
                return false;
            }
            weights.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_ctx.get(), type));
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        for (const auto & [tensor, data] : inputs) {
            ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
        }
        g = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(g, r);
        return true;
    }

    void compute() {
        if (ggml_backend_graph_compute(backend.get(), g) != GGML_STATUS_SUCCESS) {
            die("a graph did not run");
        }
    }

    floats run() {
        if (!g) {
            build(result);
        }
        compute();
        floats out(ggml_nelements(result));
        ggml_backend_tensor_get(result, out.data(), 0, ggml_nbytes(result));
        return out;
    }

private:
    static ggml_backend_buffer_type_t repacked(ggml_tensor * op) {
        ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        const auto extra          = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t * types = extra ? extra(device) : nullptr; types && *types; ++types) {
            // the buffer of an operand decides whether the device supports the operation
            const std::unique_ptr<ggml_backend_buffer, free_buffer> probe(ggml_backend_buft_alloc_buffer(*types, 0));
            op->src[0]->buffer = probe.get();
            const bool served  = ggml_backend_dev_supports_op(device, op);
            op->src[0]->buffer = nullptr;
            if (served) {
                return *types;
            }
        }
        return nullptr;
    }

    side how;
    std::unique_ptr<ggml_context, free_ggml> ctx, weights_ctx;
    std::unique_ptr<ggml_backend, free_backend> backend;
    std::unique_ptr<ggml_backend_buffer, free_buffer> weights, buffer;
    std::vector<std::pair<ggml_tensor *, const void *>> inputs;
    ggml_tensor * result = nullptr;
    ggml_cgraph * g      = nullptr;
};

inline bytes quantised(ggml_type type, const floats & values, int64_t k) {
    bytes data(ggml_row_size(type, k) * (values.size() / k));
    if (type == GGML_TYPE_F32) {
        memcpy(data.data(), values.data(), data.size());
    } else {
        const floats importance(k, 1.0f); // some types cannot be made without
        ggml_quantize_chunk(type, values.data(), data.data(), 0, (int64_t) values.size() / k, k, importance.data());
    }
    return data;
}

inline floats dequantised(ggml_type type, const bytes & data, int64_t n) {
    floats values(n);
    if (type == GGML_TYPE_F32) {
        memcpy(values.data(), data.data(), n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(data.data(), values.data(), n);
    }
    return values;
}

// Weights of `experts` matrices [m][k].
struct weights {
    ggml_type type;
    int64_t m, k, experts;
    bytes data;

    weights(ggml_type t, int64_t rows, int64_t cols, int64_t n_experts, randoms & r)
        : type(t)
        , m(rows)
        , k(cols)
        , experts(n_experts)
        , data(quantised(t, r.values(rows * cols * n_experts), cols)) {}

    // The smallest run of elements along k that can be moved: several vectors of any kernel for float types.
    int64_t unit() const { return std::max<int64_t>(ggml_blck_size(type), 64); }

    // The units of every row turned round: with those of the columns the same products, in another order.
    weights reordered() const {
        weights w = *this;
        for (size_t row = 0; row < data.size(); row += ggml_row_size(type, k)) {
            turn(w.data.data() + row, ggml_row_size(type, unit()));
        }
        return w;
    }

    floats reordered(floats column) const {
        turn(column.data(), unit());
        return column;
    }

private:
    template <typename T>
    void turn(T * p, int64_t size) const {
        for (int64_t a = 0, b = k / unit() - 1; a < b; ++a, --b) {
            std::swap_ranges(p + a * size, p + (a + 1) * size, p + b * size);
        }
    }
};

// How the columns of a product lie in memory.
struct layout {
    int64_t padding = 0; // floats between two columns
    int64_t batch   = 1; // the columns as so many matrices against one of weights
};

// Columns [n][k] times weights: [n][m].
inline floats mul_mat(side s, const weights & w, const floats & columns, layout l = {}) {
    const int64_t n = (int64_t) columns.size() / w.k, stride = w.k + l.padding;
    floats spaced(n * stride, NAN);
    for (int64_t j = 0; j < n; ++j) {
        std::copy_n(columns.begin() + j * w.k, w.k, spaced.begin() + j * stride);
    }
    graph g(s);
    ggml_tensor * a   = g.input(w.type, { w.k, w.m }, w.data.data(), true);
    ggml_tensor * all = g.input(GGML_TYPE_F32, { stride, n / l.batch, l.batch }, spaced.data());
    ggml_tensor * b   = ggml_view_3d(g.context(), all, w.k, all->ne[1], all->ne[2], all->nb[1], all->nb[2], 0);
    if (!g.build(ggml_mul_mat(g.context(), a, b))) {
        return {};
    }
    return g.run();
}

// Tokens [n][k] times the experts that `ids` [n][used] names for each: [n][used][m].
inline floats mul_mat_id(side s, const weights & w, const floats & tokens, const ints & ids) {
    const int64_t n = (int64_t) tokens.size() / w.k, used = (int64_t) ids.size() / n;
    graph g(s);
    ggml_tensor * a = g.input(w.type, { w.k, w.m, w.experts }, w.data.data(), true);
    ggml_tensor * b = g.input(GGML_TYPE_F32, { w.k, 1, n }, tokens.data());
    ggml_tensor * i = g.input(GGML_TYPE_I32, { used, n }, ids.data());
    if (!g.build(ggml_mul_mat_id(g.context(), a, b, i))) {
        return {};
    }
    return g.run();
}

inline std::vector<ggml_fp16_t> mask_of(const std::vector<uint8_t> & seen) {
    std::vector<ggml_fp16_t> mask;
    for (const uint8_t one : seen) {
        mask.push_back(ggml_fp32_to_fp16(one ? 0.0f : -INFINITY));
    }
    return mask;
}

// Attention as V4 has it: one K head, which is V too, cells that a token sees or not, a sink for every head.
struct attention {
    ggml_type type;
    int64_t dim, heads, cells;
    floats k;     // [cells][dim]
    floats sinks; // [heads]

    attention(ggml_type t, int64_t d, int64_t h, int64_t c, randoms & r)
        : type(t)
        , dim(d)
        , heads(h)
        , cells(c)
        , k(r.values(d * c))
        , sinks(r.values(h)) {}

    // q [n][heads][dim], seen [n][cells]: [n][heads][dim]
    floats run(side s, const floats & q, const std::vector<uint8_t> & seen) const {
        const int64_t n                     = (int64_t) q.size() / (heads * dim);
        const bytes kv                      = quantised(type, k, dim);
        const std::vector<ggml_fp16_t> mask = mask_of(seen);
        graph g(s);
        ggml_tensor * tq = ggml_permute(g.context(), g.input(GGML_TYPE_F32, { dim, heads, n }, q.data()), 0, 2, 1, 3);
        ggml_tensor * tk = g.input(type, { dim, cells, 1 }, kv.data());
        ggml_tensor * tm = g.input(GGML_TYPE_F16, { cells, n }, mask.data());
        ggml_tensor * r  = ggml_flash_attn_ext(g.context(), tq, tk, tk, tm, 1.0f / std::sqrt((float) dim), 0.0f, 0.0f);
        ggml_flash_attn_ext_add_sinks(r, g.input(GGML_TYPE_F32, { heads }, sinks.data()));
        g.build(r);
        return g.run();
    }
};

// DeepSeek V4's indexer: scores of cells for tokens, summed over its heads.
struct indexer {
    ggml_type type;
    int64_t dim, heads, cells;
    floats k; // [cells][dim]

    indexer(ggml_type t, int64_t d, int64_t h, int64_t c, randoms & r)
        : type(t)
        , dim(d)
        , heads(h)
        , cells(c)
        , k(r.values(d * c)) {}

    // q [n][heads][dim], weights [n][heads], seen [n][cells]: [n][cells]
    floats run(side s, const floats & q, const floats & weights, const std::vector<uint8_t> & seen) const {
        const int64_t n                     = (int64_t) weights.size() / heads;
        const bytes data                    = quantised(type, k, dim);
        const std::vector<ggml_fp16_t> mask = mask_of(seen);
        graph g(s);
        ggml_tensor * tq = g.input(GGML_TYPE_F32, { dim, heads, n }, q.data());
        ggml_tensor * tk = g.input(type, { dim, 1, cells }, data.data());
        ggml_tensor * tw = g.input(GGML_TYPE_F32, { heads, n }, weights.data());
        ggml_tensor * tm = g.input(GGML_TYPE_F16, { cells, n }, mask.data());
        g.build(ggml_lightning_indexer(g.context(), tq, tk, tw, tm));
        return g.run();
    }
};

// DeepSeek V4's streams, mixed after a block: x [n][width], residual [n][streams][width], post [n][streams], comb
// [n][streams from][streams to] or nothing: [n][streams][width].
inline floats hc_post(
    side s, int64_t streams, const floats & x, const floats & residual, const floats & post, const floats & comb) {
    const int64_t n = (int64_t) post.size() / streams, width = (int64_t) x.size() / n;
    graph g(s);
    ggml_tensor * tx = g.input(GGML_TYPE_F32, { width, n }, x.data());
    ggml_tensor * tr = g.input(GGML_TYPE_F32, { width, streams, n }, residual.data());
    ggml_tensor * tp = g.input(GGML_TYPE_F32, { streams, n }, post.data());
    ggml_tensor * tc = comb.empty() ? nullptr : g.input(GGML_TYPE_F32, { streams, streams, n }, comb.data());
    g.build(ggml_dsv4_hc_post(g.context(), tx, tr, tp, tc));
    return g.run();
}

} // namespace kernels
