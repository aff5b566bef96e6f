// Where a sequence stands, read from the tensors that hold its state: counts and digests, never rows.
#include "dgr_internal.h"

#include "ggml-backend.h"
#include "llama-kv-cache-dsv4.h" // private: the caches behind llama_get_memory()

#define XXH_INLINE_ALL // nothing of it becomes a symbol
#include "hash/xxhash/xxhash.h"

#include <algorithm>
#include <cstring>

namespace dgr {

//
// where the state lies
//

static uint64_t total(const std::map<ggml_backend_buffer_type_t, size_t> & bytes) {
    uint64_t sum = 0;
    for (const auto & [buft, size] : bytes) {
        sum += size;
    }
    return sum;
}

static component rows_of(const llama_kv_cache & cache, uint32_t ratio) {
    component c;
    c.ratio    = ratio;
    c.capacity = cache.get_size();
    c.bytes    = total(cache.memory_breakdown());
    for (const uint32_t il : cache.get_layer_ids()) {
        c.layers.push_back({ (int32_t) il, cache.get_k_storage(il) });
    }
    return c;
}

// A ring's tensors are only handed out as views made in a ggml context; what they view is what we keep.
static component ring_of(const llama_dsv4_comp_state & ring, const std::vector<component::layer> & layers) {
    component c;
    c.ratio    = 0;
    c.capacity = ring.get_state_size();
    c.bytes    = total(ring.memory_breakdown());

    const ggml_init_params params = { 2 * layers.size() * ggml_tensor_overhead() + 1, nullptr, /*.no_alloc =*/true };
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> views(ggml_init(params), ggml_free);
    for (const auto & layer : layers) {
        c.layers.push_back({ layer.il, ring.get_kv_all(views.get(), layer.il)->view_src,
            ring.get_score_all(views.get(), layer.il)->view_src });
    }
    return c;
}

void find_components(llama_context * ctx, components & out) {
    const auto * cache = dynamic_cast<const llama_kv_cache_dsv4 *>(llama_get_memory(ctx));
    if (!cache) {
        fail(DGR_ERR_INTERNAL, "the context has no DeepSeek V4 cache");
    }
    out[DGR_RAW_SWA]      = rows_of(*cache->get_raw()->get_swa(), 1);
    out[DGR_CSA]          = rows_of(*cache->get_csa(), cache->get_csa_state()->get_ratio());
    out[DGR_HCA]          = rows_of(*cache->get_hca(), cache->get_hca_state()->get_ratio());
    out[DGR_INDEXER]      = rows_of(*cache->get_lid(), cache->get_lid_state()->get_ratio());
    out[DGR_CSA_RING]     = ring_of(*cache->get_csa_state(), out[DGR_CSA].layers);
    out[DGR_HCA_RING]     = ring_of(*cache->get_hca_state(), out[DGR_HCA].layers);
    out[DGR_INDEXER_RING] = ring_of(*cache->get_lid_state(), out[DGR_INDEXER].layers);
}

std::vector<int32_t> raw_positions(const dgr_stage & stage, int32_t slot) {
    const auto & cache           = dynamic_cast<const llama_kv_cache_dsv4 &>(*llama_get_memory(stage.ctx.get()));
    const llama_kv_cells & cells = cache.get_raw()->get_swa()->get_cells(slot);

    std::vector<int32_t> positions(cells.size(), -1);
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, slot)) {
            positions[i] = cells.pos_get(i);
        }
    }
    return positions;
}

//
// counting and digesting
//

namespace {

class digest {
public:
    digest()
        : state(XXH3_createState(), XXH3_freeState) {
        if (!state) {
            throw std::bad_alloc();
        }
        XXH3_128bits_reset(state.get());
    }

    void add(const uint8_t * data, size_t n) { XXH3_128bits_update(state.get(), data, n); }

    void write(uint8_t (&out)[16]) const {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state.get()));
        static_assert(sizeof(canonical) == sizeof(out), "128 bits");
        memcpy(out, &canonical, sizeof(out));
    }

private:
    std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t *)> state;
};

// Calls visit(row, data, size) for rows [begin, end) of a slot, reading them in blocks: a stream may be large.
template <class Visit>
void each_row(const ggml_tensor * tensor, int32_t slot, uint32_t begin, uint32_t end, std::vector<uint8_t> & buffer,
    Visit && visit) {
    const uint32_t block = 4096;
    const size_t size    = tensor->nb[1];
    for (uint32_t row = begin; row < end; row += block) {
        const uint32_t n = std::min(block, end - row);
        buffer.resize(n * size);
        ggml_backend_tensor_get(tensor, buffer.data(), slot * tensor->nb[2] + row * size, n * size);
        for (uint32_t i = 0; i < n; ++i) {
            visit(row + i, buffer.data() + i * size, size);
        }
    }
}

bool is_zero(const uint8_t * data, size_t n) {
    return std::all_of(data, data + n, [](uint8_t byte) { return byte == 0; });
}

void keep_extremes(dgr_component_summary & out, size_t layer, uint32_t rows) {
    out.rows_min = layer == 0 ? rows : std::min(out.rows_min, rows);
    out.rows_max = layer == 0 ? rows : std::max(out.rows_max, rows);
}

// Counts what the sequence holds; digests the window that the next query sees, whatever the ring still keeps beyond it.
void raw_frontier(const dgr_stage & stage, int32_t slot, int32_t committed, dgr_component_summary & out, digest & sum) {
    const component & c                  = stage.components[DGR_RAW_SWA];
    const std::vector<int32_t> positions = raw_positions(stage, slot);

    const int64_t window = std::max<int64_t>(0, (int64_t) committed - stage.n_swa + 1);
    uint32_t held        = 0;
    std::vector<std::pair<int32_t, uint32_t>> live; // position, cell
    for (uint32_t cell = 0; cell < positions.size(); ++cell) {
        held += positions[cell] >= 0;
        if (positions[cell] >= window) {
            live.emplace_back(positions[cell], cell);
        }
    }
    std::sort(live.begin(), live.end());

    std::vector<uint8_t> buffer;
    for (size_t l = 0; l < c.layers.size(); ++l) {
        for (const auto & [pos, cell] : live) {
            each_row(c.layers[l].rows, slot, cell, cell + 1, buffer,
                [&](uint32_t, const uint8_t * row, size_t size) { sum.add(row, size); });
        }
        keep_extremes(out, l, held);
    }
}

// Rows are addressed by position: [0, P/ratio) are committed. The last row of a stream takes dummy writes until the
// commit that fills the context overwrites it.
void compressed_frontier(
    const component & c, int32_t slot, int32_t committed, dgr_component_summary & out, digest & sum) {
    const uint32_t live  = (uint32_t) committed / c.ratio;
    const uint32_t dummy = c.capacity - 1;

    std::vector<uint8_t> buffer;
    for (size_t l = 0; l < c.layers.size(); ++l) {
        uint32_t rows = 0;
        each_row(c.layers[l].rows, slot, 0, c.capacity, buffer, [&](uint32_t r, const uint8_t * row, size_t size) {
            if (r < live) {
                sum.add(row, size);
            }
            rows += (r != dummy || r < live) && !is_zero(row, size);
        });
        keep_extremes(out, l, rows);
    }
}

void ring_frontier(const component & c, int32_t slot, dgr_component_summary & out, digest & sum) {
    std::vector<uint8_t> buffer;
    std::vector<uint8_t> row_buffer;
    for (size_t l = 0; l < c.layers.size(); ++l) {
        uint32_t rows = 0;
        each_row(c.layers[l].rows, slot, 0, c.capacity, buffer, [&](uint32_t r, const uint8_t * kv, size_t size) {
            each_row(c.layers[l].scores, slot, r, r + 1, row_buffer,
                [&](uint32_t, const uint8_t * score, size_t score_size) {
                    sum.add(kv, size);
                    sum.add(score, score_size);
                    rows += !is_zero(kv, size) || !is_zero(score, score_size);
                });
        });
        keep_extremes(out, l, rows);
    }
}

} // namespace

static void frontier(const dgr_stage & stage, int32_t slot, dgr_state_summary & out) {
    check_slot(stage, slot);
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it holds no state");
    }
    out.position = position(stage, slot);
    for (int i = 0; i < DGR_N_COMPONENTS; ++i) {
        const component & c       = stage.components[i];
        dgr_component_summary & f = out.components[i];
        digest sum;

        f.n_layers = (int32_t) c.layers.size();
        f.capacity = c.layers.empty() ? 0 : c.capacity;
        if (i == DGR_RAW_SWA) {
            raw_frontier(stage, slot, out.position, f, sum);
        } else if (c.ratio > 0) {
            compressed_frontier(c, slot, out.position, f, sum);
        } else {
            ring_frontier(c, slot, f, sum);
        }
        sum.write(f.digest);
    }
}

} // namespace dgr

int32_t dgr_stage_summary(const dgr_stage * stage, int32_t slot, dgr_state_summary * out) {
    return dgr::guarded([&] {
        dgr::require("stage, out", stage, out);
        *out = {};
        dgr::frontier(*stage, slot, *out);
    });
}
