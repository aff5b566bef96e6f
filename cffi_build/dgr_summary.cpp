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

// Bytes that are digested and counted at a time: few enough to be still in the cache the second time.
constexpr size_t BLOCK = 256 << 10;

// Rows [begin, begin + n) of a slot: where they lie, or a copy where no pointer leads to them.
const uint8_t * rows_at(
    const ggml_tensor * tensor, int32_t slot, uint32_t begin, uint32_t n, std::vector<uint8_t> & buffer) {
    const size_t offset = slot * tensor->nb[2] + begin * tensor->nb[1];
    if (ggml_backend_buffer_is_host(tensor->buffer)) {
        return (const uint8_t *) tensor->data + offset;
    }
    buffer.resize(n * tensor->nb[1]);
    ggml_backend_tensor_get(tensor, buffer.data(), offset, buffer.size());
    return buffer.data();
}

bool is_zero(const uint8_t * data, size_t n) {
    for (size_t i = 0; i < n;) {
        uint8_t any = 0; // no early exit within a line: this vectorizes
        for (const size_t end = std::min(n, i + 64); i < end; ++i) {
            any |= data[i];
        }
        if (any) {
            return false;
        }
    }
    return true;
}

void keep_extremes(dgr_component_summary & out, size_t layer, uint32_t rows) {
    out.rows_min = layer == 0 ? rows : std::min(out.rows_min, rows);
    out.rows_max = layer == 0 ? rows : std::max(out.rows_max, rows);
}

// Counts what the sequence holds; digests the window that the next query sees, whatever the ring still keeps beyond it.
void read_raw(const dgr_stage & stage, int32_t slot, int32_t committed, dgr_component_summary & out) {
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

    digest sum;
    std::vector<uint8_t> buffer;
    for (size_t l = 0; l < c.layers.size(); ++l) {
        const ggml_tensor * rows = c.layers[l].rows;
        const uint8_t * data     = live.empty() ? nullptr : rows_at(rows, slot, 0, c.capacity, buffer);
        for (const auto & [pos, cell] : live) {
            sum.add(data + cell * rows->nb[1], rows->nb[1]);
        }
        keep_extremes(out, l, held);
    }
    sum.write(out.digest);
}

void read_ring(const component & c, int32_t slot, dgr_component_summary & out) {
    digest sum;
    std::vector<uint8_t> kv_buffer, score_buffer;
    for (size_t l = 0; l < c.layers.size(); ++l) {
        const auto & layer   = c.layers[l];
        const size_t kv_size = layer.rows->nb[1], score_size = layer.scores->nb[1];
        const uint8_t * kv     = rows_at(layer.rows, slot, 0, c.capacity, kv_buffer);
        const uint8_t * scores = rows_at(layer.scores, slot, 0, c.capacity, score_buffer);
        uint32_t rows          = 0;
        for (uint32_t r = 0; r < c.capacity; ++r, kv += kv_size, scores += score_size) {
            sum.add(kv, kv_size);
            sum.add(scores, score_size);
            rows += !is_zero(kv, kv_size) || !is_zero(scores, score_size);
        }
        keep_extremes(out, l, rows);
    }
    sum.write(out.digest);
}

} // namespace
} // namespace dgr

// Reads one slot's state in pieces. Window and rings, which every token changes, come first and at once; the compressed
// rows, which grow with the context, block by block.
struct dgr_summary_reader {
    dgr_summary_reader(const dgr_stage & stage, int32_t slot)
        : stage(stage)
        , slot(slot)
        , changes(stage.changes[slot]) {
        out.position = dgr::position(stage, slot);
        for (int i = 0; i < DGR_N_COMPONENTS; ++i) {
            const dgr::component & c   = stage.components[i];
            out.components[i].n_layers = (int32_t) c.layers.size();
            out.components[i].capacity = c.layers.empty() ? 0 : c.capacity;
        }
    }

    // Reads about n_bytes more.
    dgr_reading next(uint64_t n_bytes) {
        if (stage.changes[slot] != changes) {
            return DGR_READING_MOVED;
        }
        if (at == 0 && layer == 0 && row == 0) {
            read_window_and_rings();
        }
        for (uint64_t done = 0; at < DGR_N_COMPONENTS; next_component()) {
            const dgr::component & c = stage.components[at];
            for (; c.ratio > 1 && layer < c.layers.size(); ++layer, row = 0, held = 0) {
                for (; row < c.capacity;) {
                    if (done >= n_bytes) {
                        return DGR_READING_MORE;
                    }
                    done += read_block(c);
                }
                dgr::keep_extremes(out.components[at], layer, held);
            }
        }
        return DGR_READING_DONE;
    }

    dgr_state_summary out = {};

private:
    void read_window_and_rings() {
        for (int i = 0; i < DGR_N_COMPONENTS; ++i) {
            const dgr::component & c = stage.components[i];
            if (i == DGR_RAW_SWA) {
                dgr::read_raw(stage, slot, out.position, out.components[i]);
            } else if (c.ratio == 0) {
                dgr::read_ring(c, slot, out.components[i]);
            }
        }
    }

    // Rows are addressed by position: [0, P/ratio) are committed. The last row of a stream takes dummy writes until the
    // commit that fills the context overwrites it.
    size_t read_block(const dgr::component & c) {
        const ggml_tensor * rows = c.layers[layer].rows;
        const size_t size        = rows->nb[1];
        const uint32_t live      = (uint32_t) out.position / c.ratio;
        const uint32_t dummy     = c.capacity - 1;
        const uint32_t most      = std::max<uint32_t>(1, dgr::BLOCK / size);
        // a block is of committed rows, or of others
        const uint32_t n     = std::min(most, (row < live ? live : c.capacity) - row);
        const uint8_t * data = dgr::rows_at(rows, slot, row, n, buffer);
        if (row < live) {
            sum.add(data, n * size);
        }
        for (uint32_t i = 0; i < n; ++i) {
            held += (row + i != dummy || row < live) && !dgr::is_zero(data + i * size, size);
        }
        row += n;
        return n * size;
    }

    void next_component() {
        if (stage.components[at].ratio > 1) {
            sum.write(out.components[at].digest);
            sum = {};
        }
        ++at;
        layer = 0;
        row   = 0;
        held  = 0;
    }

    const dgr_stage & stage;
    const int32_t slot;
    const uint64_t changes;
    int at        = 0; // component
    size_t layer  = 0;
    uint32_t row  = 0; // the next one
    uint32_t held = 0; // rows of this layer that hold data
    dgr::digest sum;
    std::vector<uint8_t> buffer;
};

namespace dgr {

static std::unique_ptr<dgr_summary_reader> open_reader(const dgr_stage & stage, int32_t slot) {
    check_slot(stage, slot);
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it holds no state");
    }
    llama_synchronize(stage.ctx.get());
    return std::make_unique<dgr_summary_reader>(stage, slot);
}

} // namespace dgr

int32_t dgr_stage_summary(const dgr_stage * stage, int32_t slot, dgr_state_summary * out) {
    return dgr::guarded([&] {
        dgr::require("stage, out", stage, out);
        *out              = {};
        const auto reader = dgr::open_reader(*stage, slot);
        reader->next(UINT64_MAX);
        *out = reader->out;
    });
}

int32_t dgr_summary_open(const dgr_stage * stage, int32_t slot, dgr_summary_reader ** out) {
    return dgr::guarded([&] {
        dgr::require("stage, out", stage, out);
        *out = nullptr;
        *out = dgr::open_reader(*stage, slot).release();
    });
}

int32_t dgr_summary_read(
    dgr_summary_reader * reader, uint64_t n_bytes, dgr_reading * reading, dgr_state_summary * out) {
    return dgr::guarded([&] {
        dgr::require("reader, reading, out", reader, reading, out);
        if (n_bytes == 0) {
            dgr::refuse("n_bytes is 0, must be at least 1");
        }
        *out     = {};
        *reading = reader->next(n_bytes);
        if (*reading == DGR_READING_DONE) {
            *out = reader->out;
        }
    });
}

void dgr_summary_close(dgr_summary_reader * reader) {
    dgr::guarded([&] { delete reader; });
}
