// Quantised blocks as numbers and numbers as blocks, by ggml's own reference code.
#include "dgr_internal.h"

#include <cmath>

int32_t dgr_dequantize(int32_t type, const void * blocks, size_t n_bytes, float * out, size_t n_values) {
    return dgr::guarded([&] {
        if (type < 0 || type >= GGML_TYPE_COUNT) {
            dgr::refuse("type is %d, must be a ggml_type: 0..%d", type, GGML_TYPE_COUNT - 1);
        }
        const ggml_type_traits * traits = ggml_get_type_traits((ggml_type) type);
        if (!traits->is_quantized || !traits->to_float) {
            dgr::refuse("type %d (%s) has no blocks that can be read as numbers", type,
                traits->type_name ? traits->type_name : "removed");
        }
        const size_t n_blocks = n_bytes / traits->type_size;
        if (!blocks || !out || n_blocks == 0 || n_bytes % traits->type_size ||
            n_values != n_blocks * traits->blck_size) {
            dgr::refuse("%zu bytes and %zu values, must be whole blocks of %zu bytes and %zu values each, at least one",
                n_bytes, n_values, traits->type_size, (size_t) traits->blck_size);
        }
        dgr::library_init();
        traits->to_float(blocks, out, (int64_t) n_values);
    });
}

// The types that ggml_quantize_chunk knows: every other one aborts there.
static bool is_written(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return true;
        case GGML_TYPE_Q8_1:
        case GGML_TYPE_Q8_K: return false; // of activations
        default:
            return ggml_is_quantized(type) && ggml_get_type_traits(type)->to_float &&
                !ggml_quantize_requires_imatrix(type);
    }
}

int32_t dgr_quantize(int32_t type, const float * values, size_t n_values, size_t width, void * out, size_t n_bytes) {
    return dgr::guarded([&] {
        if (type < 0 || type >= GGML_TYPE_COUNT) {
            dgr::refuse("type is %d, must be a ggml_type: 0..%d", type, GGML_TYPE_COUNT - 1);
        }
        const ggml_type_traits * traits = ggml_get_type_traits((ggml_type) type);
        if (!is_written((ggml_type) type)) {
            dgr::refuse("type %d (%s) is not one that numbers are written in without an importance matrix", type,
                traits->type_name ? traits->type_name : "removed");
        }
        const size_t block  = (size_t) traits->blck_size;
        const size_t n_rows = width ? n_values / width : 0;
        if (!values || !out || n_rows == 0 || n_values % width || width % block ||
            n_bytes != n_values / block * traits->type_size) {
            dgr::refuse(
                "%zu values in rows of %zu and %zu bytes, must be whole rows of whole blocks of %zu values and %zu "
                "bytes each, at least one",
                n_values, width, n_bytes, block, traits->type_size);
        }
        for (size_t i = 0; i < n_values; ++i) {
            if (!std::isfinite(values[i])) {
                dgr::refuse("value %zu is not finite", i);
            }
        }
        dgr::library_init();
        ggml_quantize_chunk((ggml_type) type, values, out, 0, (int64_t) n_rows, (int64_t) width, nullptr);
    });
}
