#include "dgr_probe.h"

#include "dgr_internal.h"

#include "ggml-backend.h"
#include "unicode.h"

#include <algorithm>
#include <cstring>

namespace dgr {

static const component::layer & find_layer(
    const dgr_stage & stage, int32_t c, int32_t layer, int32_t slot, uint32_t row_begin, uint32_t n_rows) {
    if (c < 0 || c >= DGR_N_COMPONENTS) {
        refuse("component is %d, must be in 0..%d", c, DGR_N_COMPONENTS - 1);
    }
    check_slot(stage, slot);
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it holds no state");
    }
    const component & found = stage.components[c];
    if (row_begin > found.capacity || n_rows > found.capacity - row_begin) {
        refuse("rows %u..%u are outside the capacity %u", row_begin, row_begin + n_rows, found.capacity);
    }
    for (const auto & candidate : found.layers) {
        if (candidate.il == layer) {
            return candidate;
        }
    }
    refuse("layer %d holds no component %d on this stage", layer, c);
}

static size_t row_size(const component::layer & layer) {
    return layer.rows->nb[1] + (layer.scores ? layer.scores->nb[1] : 0);
}

static size_t offset(const ggml_tensor * tensor, int32_t slot, uint32_t row) {
    return slot * tensor->nb[2] + row * tensor->nb[1];
}

} // namespace dgr

int32_t dgr_probe_rows(const dgr_stage * stage, int32_t component, int32_t layer, int32_t slot, uint32_t row_begin,
    uint32_t n_rows, uint8_t * out, size_t out_size, size_t * row_bytes) {
    return dgr::guarded([&] {
        if (!stage || !row_bytes || (!out && out_size > 0)) {
            dgr::refuse("stage, out and row_bytes are all required");
        }
        const auto & found = dgr::find_layer(*stage, component, layer, slot, row_begin, n_rows);
        *row_bytes         = dgr::row_size(found);
        if (out_size / *row_bytes < n_rows) {
            dgr::refuse("out_size is %zu, %u rows need %zu", out_size, n_rows, n_rows * *row_bytes);
        }
        for (uint32_t row = row_begin; row < row_begin + n_rows; ++row) {
            for (const ggml_tensor * tensor : { found.rows, found.scores }) {
                if (tensor) {
                    ggml_backend_tensor_get(tensor, out, dgr::offset(tensor, slot, row), tensor->nb[1]);
                    out += tensor->nb[1];
                }
            }
        }
    });
}

int32_t dgr_probe_raw_positions(const dgr_stage * stage, int32_t slot, int32_t * out, size_t size, size_t * n) {
    return dgr::guarded([&] {
        if (!stage || !n || (!out && size > 0)) {
            dgr::refuse("stage, out and n are all required");
        }
        dgr::check_slot(*stage, slot);
        const std::vector<int32_t> positions = dgr::raw_positions(*stage, slot);
        *n                                   = positions.size();
        std::copy_n(positions.begin(), std::min(size, positions.size()), out);
    });
}

int32_t dgr_probe_poke(dgr_stage * stage, int32_t component, int32_t layer, int32_t slot, uint32_t row,
    const uint8_t * bytes, size_t n_bytes) {
    return dgr::guarded([&] {
        dgr::require("stage, bytes", stage, bytes);
        const auto & found = dgr::find_layer(*stage, component, layer, slot, row, 1);
        if (n_bytes != dgr::row_size(found)) {
            dgr::refuse("n_bytes is %zu, the row has %zu", n_bytes, dgr::row_size(found));
        }
        const uint32_t ratio = stage->components[component].ratio;
        stage->entered[slot] = std::max(stage->entered[slot], (row + 1) * ratio); // as if tokens had written it
        ++stage->changes[slot];
        for (const ggml_tensor * tensor : { found.rows, found.scores }) {
            if (tensor) {
                ggml_backend_tensor_set(
                    const_cast<ggml_tensor *>(tensor), bytes, dgr::offset(tensor, slot, row), tensor->nb[1]);
                bytes += tensor->nb[1];
            }
        }
    });
}

int32_t dgr_probe_words(const char * const * exprs, size_t n_exprs, const char * text, size_t n_text, int32_t * out,
    size_t size, size_t * n) {
    return dgr::guarded([&] {
        if (!exprs || !text || !n || (!out && size > 0)) {
            dgr::refuse("exprs, text, out and n are all required");
        }
        const auto words = unicode_regex_split({ text, n_text }, { exprs, exprs + n_exprs }, /*byte_encode =*/false);
        *n               = words.size();
        for (size_t i = 0; i < std::min(size, words.size()); ++i) {
            out[i] = (int32_t) words[i].size();
        }
    });
}
