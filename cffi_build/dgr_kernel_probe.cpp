// A fixed graph through the reference kernels. Two builds on two hosts whose digests are equal give the same bits.
#include "dgr_internal.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#define XXH_INLINE_ALL // nothing of it becomes a symbol
#include "hash/xxhash/xxhash.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace dgr {

namespace {

// A counter-based stream: the same values on every host, whatever the order of filling.
float value(uint64_t stream, uint64_t i) {
    uint64_t z = (stream << 32) + i + 1; // splitmix64
    z *= 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (float) (z >> 40) * 0x1p-23f - 1.0f; // [-1, 1), exact
}

struct free_ggml {
    void operator()(ggml_context * c) const { ggml_free(c); }
};
struct free_backend {
    void operator()(ggml_backend * b) const { ggml_backend_free(b); }
};
struct free_buffer {
    void operator()(ggml_backend_buffer * b) const { ggml_backend_buffer_free(b); }
};

class probe {
public:
    probe() {
        ctx.reset(ggml_init({ 1024 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*.no_alloc =*/true }));
        backend.reset(ggml_backend_cpu_init());
        if (!ctx || !backend) {
            throw std::bad_alloc();
        }
        ggml_backend_cpu_set_n_threads(backend.get(), 1);
        ggml_backend_cpu_set_use_ref(backend.get(), true);
        matmuls();
        elementwise();
        attention();
        own_operations();
    }

    XXH128_hash_t run() {
        const std::unique_ptr<ggml_backend_buffer, free_buffer> buffer(
            ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        if (!buffer) {
            throw std::bad_alloc();
        }
        for (size_t stream = 0; stream < inputs.size(); ++stream) {
            fill(inputs[stream], stream);
        }
        ggml_cgraph * graph = ggml_new_graph(ctx.get());
        for (ggml_tensor * output : outputs) {
            ggml_build_forward_expand(graph, output);
        }
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            fail(DGR_ERR_INTERNAL, "the probe graph did not run");
        }

        const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t *)> state(
            XXH3_createState(), XXH3_freeState);
        if (!state) {
            throw std::bad_alloc();
        }
        XXH3_128bits_reset(state.get());
        std::vector<uint8_t> data;
        for (const ggml_tensor * output : outputs) {
            data.resize(ggml_nbytes(output));
            ggml_backend_tensor_get(output, data.data(), 0, data.size());
            XXH3_128bits_update(state.get(), data.data(), data.size());
        }
        return XXH3_128bits_digest(state.get());
    }

private:
    ggml_tensor * input(ggml_type type, int64_t n0, int64_t n1 = 1, int64_t n2 = 1) {
        inputs.push_back(ggml_new_tensor_3d(ctx.get(), type, n0, n1, n2));
        return inputs.back();
    }

    // The types that have a kernel of ours, one that has none, and the row counts at which kernels change course; for float
    // types rows that no vector divides. Products with experts run the same kernels.
    void matmuls() {
        const int64_t n_out = 41;
        for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_MXFP4,
                 GGML_TYPE_Q4_K, GGML_TYPE_Q2_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ2_XXS, GGML_TYPE_Q4_0 }) {
            const int64_t n_in    = ggml_blck_size(type) == 1 ? 523 : 512;
            ggml_tensor * weights = input(type, n_in, n_out);
            for (const int64_t n_rows : { 1, 2, 3, 5, 8, 17, 64 }) {
                outputs.push_back(ggml_mul_mat(ctx.get(), weights, input(GGML_TYPE_F32, n_in, n_rows)));
            }
        }
        const int64_t n_experts = 4, n_used = 2, n_tokens = 9;
        ggml_tensor * ids = input(GGML_TYPE_I32, n_used, n_tokens);
        for (const ggml_type type : { GGML_TYPE_MXFP4, GGML_TYPE_Q2_K }) {
            ggml_tensor * weights = input(type, 512, n_out, n_experts);
            outputs.push_back(ggml_mul_mat_id(ctx.get(), weights, input(GGML_TYPE_F32, 512, 1, n_tokens), ids));
        }
    }

    void elementwise() {
        ggml_tensor * rows = input(GGML_TYPE_F32, 257, 5);
        outputs.push_back(ggml_rms_norm(ctx.get(), rows, 1e-6f));
        outputs.push_back(ggml_soft_max(ctx.get(), rows));
        outputs.push_back(ggml_silu(ctx.get(), rows));
        outputs.push_back(ggml_exp(ctx.get(), rows));
        outputs.push_back(ggml_sigmoid(ctx.get(), rows));
        outputs.push_back(ggml_softplus(ctx.get(), rows));

        const int n_dims        = 64;
        ggml_tensor * heads     = input(GGML_TYPE_F32, n_dims, 4, 5);
        ggml_tensor * positions = input(GGML_TYPE_I32, 5);
        outputs.push_back(ggml_rope_ext(ctx.get(), heads, positions, nullptr, n_dims, GGML_ROPE_TYPE_NEOX,
            /*n_ctx_orig =*/65536, /*freq_base =*/160000.0f, /*freq_scale =*/1.0f / 16, /*ext_factor =*/1.0f,
            /*attn_factor =*/1.0f, /*beta_fast =*/32.0f, /*beta_slow =*/1.0f));
    }

    // More heads than one group, more cells than one block and not a multiple of it, some of them masked; one query and many.
    void attention() {
        const int64_t dim = 64, n_heads = 20, n_keys = 770;
        for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
            ggml_tensor * k = input(type, dim, n_keys);
            for (const int64_t n_queries : { 1, 65 }) {
                ggml_tensor * q    = input(GGML_TYPE_F32, dim, n_queries, n_heads);
                ggml_tensor * mask = input(GGML_TYPE_F16, n_keys, n_queries);
                masks.push_back(mask);
                outputs.push_back(ggml_flash_attn_ext(ctx.get(), q, k, k, mask, 0.125f, 0.0f, 0.0f));
                ggml_flash_attn_ext_add_sinks(outputs.back(), input(GGML_TYPE_F32, n_heads));
            }
        }
    }

    // DeepSeek V4's: more heads than one term, more cells than one block, some of them masked; rows no piece divides.
    void own_operations() {
        const int64_t dim = 64, n_heads = 20, n_cells = 150, n_tokens = 3, width = 300, n_streams = 4;
        for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
            ggml_tensor * q = input(GGML_TYPE_F32, dim, n_heads, n_tokens);
            ggml_tensor * k = input(type, dim, 1, n_cells);
            masks.push_back(input(GGML_TYPE_F16, n_cells, n_tokens));
            outputs.push_back(
                ggml_lightning_indexer(ctx.get(), q, k, input(GGML_TYPE_F32, n_heads, n_tokens), masks.back()));
        }
        ggml_tensor * x        = input(GGML_TYPE_F32, width, n_tokens);
        ggml_tensor * residual = input(GGML_TYPE_F32, width, n_streams, n_tokens);
        ggml_tensor * post     = input(GGML_TYPE_F32, n_streams, n_tokens);
        ggml_tensor * comb     = input(GGML_TYPE_F32, n_streams, n_streams, n_tokens);
        outputs.push_back(ggml_dsv4_hc_post(ctx.get(), x, residual, post, comb));
    }

    void fill(ggml_tensor * tensor, uint64_t stream) const {
        const int64_t n = ggml_nelements(tensor);
        if (tensor->type == GGML_TYPE_I32) { // positions, or expert numbers
            std::vector<int32_t> numbers(n);
            for (int64_t i = 0; i < n; ++i) {
                numbers[i] = (int32_t) (tensor->ne[1] == 1 ? i * 1009 : (i + i / tensor->ne[0]) % 4);
            }
            ggml_backend_tensor_set(tensor, numbers.data(), 0, ggml_nbytes(tensor));
            return;
        }
        std::vector<float> values(n);
        for (int64_t i = 0; i < n; ++i) {
            values[i] = value(stream, i);
        }
        if (std::find(masks.begin(), masks.end(), tensor) != masks.end()) {
            for (float & x : values) { // a quarter is not seen
                x = x < -0.5f ? -INFINITY : x;
            }
        }
        std::vector<uint8_t> data(ggml_nbytes(tensor));
        if (tensor->type == GGML_TYPE_F32) {
            memcpy(data.data(), values.data(), data.size());
        } else if (tensor->type == GGML_TYPE_IQ2_XXS) { // every block is one; to look for good ones takes a second
            for (size_t i = 0; i < data.size(); ++i) {
                data[i] = i % ggml_type_size(tensor->type) < 2 ? 0x18 : (uint8_t) (int) (values[i] * 128.0f);
            }
        } else {
            ggml_quantize_chunk(
                tensor->type, values.data(), data.data(), 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
        }
        ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
    }

    std::unique_ptr<ggml_context, free_ggml> ctx;
    std::unique_ptr<ggml_backend, free_backend> backend;
    std::vector<ggml_tensor *> inputs;
    std::vector<ggml_tensor *> masks;
    std::vector<ggml_tensor *> outputs;
};

} // namespace

} // namespace dgr

int32_t dgr_kernel_probe(char * out, size_t out_size) {
    return dgr::guarded([&] {
        if (!out || out_size < 33) {
            dgr::refuse("out must hold 33 bytes, it holds %zu", out ? out_size : 0);
        }
        dgr::library_init();
        const XXH128_hash_t hash = dgr::probe().run();
        snprintf(out, out_size, "%016llx%016llx", (unsigned long long) hash.high64, (unsigned long long) hash.low64);
    });
}
