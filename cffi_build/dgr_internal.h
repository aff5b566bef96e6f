// Shared by the shim's sources; never included outside cffi_build.
#pragma once

#include "dgr_native.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__GNUC__)
#define DGR_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define DGR_PRINTF(fmt, args)
#endif

class llama_kv_cache_dsv4; // private to llama.cpp

namespace dgr {

//
// errors: thrown inside the shim, turned into a status and a message at its border
//

struct error : std::runtime_error {
    dgr_status status;
    error(dgr_status status, const std::string & what)
        : std::runtime_error(what)
        , status(status) {}
};

[[noreturn]] void fail(dgr_status status, const char * fmt, ...) DGR_PRINTF(2, 3);
[[noreturn]] void refuse(const char * fmt, ...) DGR_PRINTF(1, 2); // DGR_ERR_ARGUMENT

// Refuses null pointers; `names` are those of the arguments.
template <class... Pointer>
void require(const char * names, const Pointer *... pointers) {
    if ((... || !pointers)) {
        refuse("%s: all are required, and one is NULL", names);
    }
}

// Records the message of the calling thread's last failure; returns the status for `return`.
int32_t record(dgr_status status, const char * what) noexcept;

// The border: runs `body` and lets no exception out. Bodies catch what llama.cpp may throw half way through a change.
template <class Body>
int32_t guarded(Body && body) noexcept {
    try {
        body();
        return DGR_OK;
    } catch (const error & e) {
        return record(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return record(DGR_ERR_MEMORY, "out of memory: lower n_ctx, n_seq_max or n_batch");
    } catch (const std::exception & e) {
        return record(DGR_ERR_INTERNAL, e.what());
    } catch (...) {
        return record(DGR_ERR_INTERNAL, "an exception of unknown type");
    }
}

//
// library
//

// Once per process: environment, backends, log. Every function that reaches llama.cpp calls it first.
void library_init();

// CPUs that this process may run on.
int32_t available_cpus();

// While alive, remembers the first error line that the calling thread logs: llama.cpp says why only there.
class first_error {
public:
    first_error();
    ~first_error();
    first_error(const first_error &)             = delete;
    first_error & operator=(const first_error &) = delete;

    const char * text(const char * fallback) const { return line.empty() ? fallback : line.c_str(); }

private:
    friend struct log_sink;
    std::string line;
    first_error * outer;
};

//
// devices
//

struct chosen_devices {
    bool given = false;                      // else llama.cpp chooses
    std::vector<ggml_backend_dev_t> devices; // ends with NULL
};

// The devices that a stage is to take, made and ready.
chosen_devices choose_devices(const dgr_stage_params & p);

// Whether an error line of llama.cpp or of a backend says that memory ran out; there is nothing else to go by.
bool tells_of_memory(const std::string & reason);

//
// artifact
//

// Refuses files whose metadata would make llama.cpp's loader or first graph abort. What is merely absent or of a wrong
// type is left to the loader, which reports it.
void check_metadata(const char * path, int32_t layer_begin, int32_t layer_end);

//
// weights
//

// Bytes that the tensors of a model take in their buffers.
uint64_t tensor_bytes(const llama_model & model);

// What of a mapped file is in memory becomes the tensors that are used there, and nothing else; with `prefetch` all of them
// at once, on n_threads threads. `lock` keeps tensors in host memory where they are.
void make_resident(const llama_model & model, bool mapped, bool prefetch, bool lock, int32_t n_threads);

//
// state
//

struct free_model {
    void operator()(llama_model * m) const { llama_model_free(m); }
};
struct free_context {
    void operator()(llama_context * c) const { llama_free(c); }
};
struct free_batch {
    void operator()(llama_batch_ext * b) const { llama_batch_ext_free(b); }
};

using model_ptr   = std::unique_ptr<llama_model, free_model>;
using context_ptr = std::unique_ptr<llama_context, free_context>;
using batch_ptr   = std::unique_ptr<llama_batch_ext, free_batch>;

// Where the rows of one state component lie. Tensors are [row, rows, slots]; a ring has a second one, its scores.
struct component {
    struct layer {
        int32_t il;
        const ggml_tensor * rows;
        const ggml_tensor * scores = nullptr;
    };

    uint32_t ratio    = 1; // tokens behind one row; 0 for rings, which have no committed rows
    uint32_t capacity = 0; // rows per layer and slot
    uint64_t bytes    = 0;
    std::vector<layer> layers;
};

using components = std::array<component, DGR_N_COMPONENTS>;

// Fills `out` from the cache of a context; throws when the cache is not V4's.
void find_components(llama_context * ctx, components & out);

// Position of every raw SWA cell of a slot, -1 where the cell is free.
std::vector<int32_t> raw_positions(const dgr_stage & stage, int32_t slot);

// How far a walk through the compressed rows of a slot is: component, its layer, and the next row of it.
struct row_walk {
    size_t component = 0;
    size_t layer     = 0;
    uint32_t row     = 0;
};

// The cache of a stage's context.
llama_kv_cache_dsv4 & cache_of(const dgr_stage & stage);

// Calls visit(tensor, begin, end) with rows that come of n_tokens tokens, up to n_bytes more of them, of which `done` have
// been used; whether those were all.
using visit_rows = std::function<void(const ggml_tensor *, uint32_t, uint32_t)>;
bool walk_rows(const dgr_stage & stage, row_walk & walk, uint32_t n_tokens, uint64_t n_bytes, uint64_t done,
    const visit_rows & visit);

// llama.cpp keeps book of every token, in trees: what takes about as long as going through so many bytes.
constexpr uint64_t CELL_BYTES = 2048;

// Throws unless 0 <= slot < n_seq_max.
void check_slot(const dgr_stage & stage, int32_t slot);

// Tokens committed in a slot.
int32_t position(const dgr_stage & stage, int32_t slot);

bool all_finite(const float * values, size_t n);

// What `info` tells of devices.
void describe_devices(const dgr_stage & stage, dgr_stage_info & info);

} // namespace dgr

struct dgr_stage {
    dgr_stage_info info  = {};
    bool dry_run         = false;
    bool is_mapped       = false; // weights are where the file is mapped
    uint32_t n_swa       = 0;     // window of raw attention
    uint32_t output_rows = 0;     // most rows of logits that one batch has asked for
    dgr::model_ptr model;
    dgr::context_ptr ctx;
    dgr::batch_ptr batch; // kept: its buffer for the residual is large
    dgr::components components;
    std::vector<bool> lost;        // slots that native code left in an unknown state
    std::vector<uint32_t> entered; // per slot: most tokens it was given since it was cleared, also in runs that failed
    std::vector<uint64_t> changes; // per slot: grows with every change of what it holds
    // How far the clearing of a slot is: its cells, then its rows.
    struct clearing {
        bool under_way  = false;
        uint32_t tokens = 0; // whose rows are to be cleared
        uint32_t cells  = 0; // that are to be freed
        dgr::row_walk rows;
    };
    std::vector<clearing> clearings; // per slot
    // How far a copy into a slot is: likewise.
    struct copying {
        bool under_way  = false;
        int32_t source  = -1;
        uint32_t tokens = 0; // that the source held when it began
        uint32_t cells  = 0; // that have been looked at
        uint64_t erased = 0; // how often the source had been cleared by then
        dgr::row_walk rows;
    };
    std::vector<copying> copies;  // per target
    std::vector<uint64_t> erased; // per slot: how often its clearing began
    std::atomic<bool> aborted = { false };

    bool is_head() const { return info.layer_begin == 0; }
    bool is_tail() const { return info.layer_end == info.n_layer; }
};
