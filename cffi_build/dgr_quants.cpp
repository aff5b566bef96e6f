// Quantised blocks as numbers, read by ggml's own reference code.
#include "dgr_internal.h"

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
