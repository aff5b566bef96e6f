// The native stage: llama.cpp's DeepSeek V4 graph, cut to a range of layers, behind plain C.
//
// Rules. Every function returns a dgr_status (0 is success) unless its comment says otherwise; a failing call leaves a
// message in dgr_last_error(). No C++ type and no C++ exception crosses this header. Every argument is checked before
// llama.cpp sees it, because a failed GGML_ASSERT would end the process. A handle is used by one thread at a time;
// dgr_stage_abort is the one exception. There is no function that saves, loads or reads cache rows:
// dgr_stage_fork copies them from slot to slot, and nothing of them leaves the stage.
//
// This file is also the cdef: keep it free of preprocessor tricks beyond the include guard (the build strips '#' lines).
#ifndef DGR_NATIVE_H
#define DGR_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Grows when this header changes; a package that was written for another one refuses the library.
typedef enum dgr_abi {
    DGR_ABI_VERSION = 7,
} dgr_abi;

// As many as llama.cpp takes for a model.
typedef enum dgr_limit {
    DGR_MAX_DEVICES = 16,
} dgr_limit;

typedef struct dgr_stage dgr_stage;                   // one model range and its context
typedef struct dgr_vocab dgr_vocab;                   // a tokenizer, loaded without weights
typedef struct dgr_summary_reader dgr_summary_reader; // a slot's state on its way into a summary

typedef enum dgr_status {
    DGR_OK             = 0,
    DGR_ERR_ARGUMENT   = -1, // a guard refused; nothing was changed
    DGR_ERR_LOAD       = -2, // the file cannot be loaded; the first error line of the log is the message
    DGR_ERR_MEMORY     = -3, // an allocation failed; nothing was changed
    DGR_ERR_FULL       = -4, // the batch does not fit the context; nothing was changed
    DGR_ERR_NON_FINITE = -5, // the residual that came in holds NaN, Inf or a value over 1e15; nothing was changed
    DGR_ERR_LOST       = -6, // native code failed or was aborted: every sequence of the batch must be cleared
    DGR_ERR_INTERNAL   = -7, // an exception of unknown kind; treat like DGR_ERR_LOST
} dgr_status;

typedef struct dgr_stage_params {
    int32_t layer_begin;  // first owned main layer
    int32_t layer_end;    // one past the last owned main layer; 0: all of them
    uint32_t n_ctx;       // tokens per sequence; rounded up to a multiple of 256
    uint32_t n_batch;     // most tokens in one dgr_stage_run
    uint32_t n_ubatch;    // most tokens in one graph
    uint32_t n_seq_max;   // sequence slots
    int32_t n_threads;    // compute threads; more than the free cores is hundreds of times slower
    int32_t type_k;       // ggml_type of the K cache: 0 f32, 1 f16, 8 q8_0
    const char * devices; // names of dgr_devices, a comma between them, or CPU; NULL: llama.cpp's choice of all
    int32_t gpu_layers;   // so many of the owned layers, the last, lie on devices; a tail's output is one; -1: all
    bool flash_attn;
    bool exact;         // reference kernels, no repacking: bits do not depend on batch structure or threads
    bool use_mmap;      // map the file instead of reading the owned tensors
    bool prefetch;      // with use_mmap: fetch the owned tensors at once, not when they are first used
    bool lock;          // keep the owned tensors in memory (mlock)
    bool check_tensors; // refuse non-finite weights at load
    bool dry_run;       // allocate nothing: dgr_stage_info tells the bytes, dgr_stage_run is refused
} dgr_stage_params;

// State components in the order of dgr_stage_info.state_bytes and of dgr_stage_summary.
typedef enum dgr_component {
    DGR_RAW_SWA      = 0, // sliding-window K of every owned layer
    DGR_CSA          = 1, // compressed K, ratio 4
    DGR_HCA          = 2, // compressed K, ratio 128
    DGR_INDEXER      = 3, // indexer K, ratio 4
    DGR_CSA_RING     = 4, // compressor state of CSA
    DGR_HCA_RING     = 5, // compressor state of HCA
    DGR_INDEXER_RING = 6, // compressor state of the indexer
    DGR_N_COMPONENTS = 7,
} dgr_component;

// A device beside the CPU that can hold layers.
typedef struct dgr_device {
    char name[64];
    char description[192];
    uint64_t memory_total, memory_free; // bytes
} dgr_device;

// What a stage has in a device's own memory; all else that it allocates is the host's.
typedef struct dgr_device_bytes {
    char name[64];
    uint64_t weight_bytes, state_bytes, compute_bytes;
} dgr_device_bytes;

typedef struct dgr_stage_info {
    int32_t layer_begin, layer_end;
    int32_t n_layer; // main layers of the whole model
    int32_t n_vocab;
    int32_t width_in;   // floats per token at the entry; 0 on a head
    int32_t width_out;  // floats per token at the exit; 0 on a tail
    uint32_t n_ctx_seq; // tokens per sequence, after rounding
    uint32_t n_batch, n_ubatch, n_seq_max;
    uint64_t weight_bytes;   // allocated for the owned tensors; where the file is mapped, what they take of it
    uint64_t compute_bytes;  // allocated for graphs
    uint64_t state_bytes[7]; // allocated per component, all slots
    int32_t state_layers[7]; // layers that hold the component
    uint64_t output_bytes;   // host buffer for logits and residuals
    char devices[2048];      // what may compute, a line each: llama.cpp's name of it, its own words, layers it holds
    int32_t n_device_bytes;
    dgr_device_bytes device_bytes[16];
    int32_t graph_splits; // parts of the graph that was laid out last; each further one is a hand-over between devices
} dgr_stage_info;

// One native batch. Entries of one sequence are consecutive and ascending in position; sequences ascend.
typedef struct dgr_run {
    int32_t n_tokens;
    const int32_t * tokens;      // [n_tokens], always required (hash routing needs them below layer 3)
    const int32_t * positions;   // [n_tokens], per sequence exactly P, P+1, ...
    const int32_t * slots;       // [n_tokens]
    const uint8_t * want_logits; // [n_tokens] non-zero: a row of logits is wanted; must be all zero unless tail
    const void * residual_in;    // [n_tokens] rows of width_in values as residual_type, NULL on a head
    void * residual_out;         // [n_tokens] rows of width_out values as residual_type, NULL on a tail
    float * logits_out;          // [rows wanted * n_vocab], NULL when none is wanted
    uint8_t * row_finite;        // [n_tokens] out: 1 when the token's output row (residual or logits) is finite, and no
                                 // value of a residual exceeds 1e15 in magnitude;
                                 // 1 too where a tail was asked for no row; 2 when residual_type cannot carry a value.
                                 // The residual of a token that has no 1 here is zeros
    int32_t residual_type; // ggml_type of residuals that come in and go out: 0 f32, 1 f16, 8 q8_0, 30 bf16; rounded
                           // and read by ggml's reference code, row by row
} dgr_run;

typedef struct dgr_component_summary {
    int32_t n_layers;
    uint32_t capacity;  // rows per layer and sequence
    uint32_t rows_min;  // rows holding data (by position for raw SWA, non-zero rows elsewhere), least over layers
    uint32_t rows_max;  // and most
    uint8_t digest[16]; // XXH3-128 over the live rows of every layer, by layer, then by position
} dgr_component_summary;

typedef struct dgr_state_summary {
    int32_t position; // tokens committed
    dgr_component_summary components[7];
} dgr_state_summary;

// What a call of dgr_summary_read came to.
typedef enum dgr_reading {
    DGR_READING_MORE  = 0,
    DGR_READING_DONE  = 1,
    DGR_READING_MOVED = 2,
} dgr_reading;

typedef struct dgr_sample_params {
    float temperature; // <= 0: greedy
    int32_t top_k;     // <= 0: off
    float top_p;       // >= 1: off
    float min_p;       // <= 0: off
    float repeat_penalty;
    float frequency_penalty;
    float presence_penalty;
    int32_t penalty_last_n; // 0: off, -1: all
    uint32_t seed;          // of this very draw; 0xFFFFFFFF is refused (llama.cpp takes it as random)
    int32_t n_top;          // candidates to report, 0..64
} dgr_sample_params;

// Library.
int32_t dgr_abi_version(void);     // DGR_ABI_VERSION of the library itself
const char * dgr_last_error(void); // message of the calling thread's last failure, never NULL
void dgr_log_set(void (*on_line)(int32_t level, const char * text)); // ggml_log_level, one line a call; NULL: silent
// Names of the instruction sets that the kernels were compiled for, as AVX2, with blanks between them. Runs none of them: it
// is asked before anything else on a CPU that may lack some.
const char * dgr_instruction_sets(void);
const char * dgr_build_info(void); // JSON: llama.cpp commit, patch digest, compiler, flags, CPU features
// Writes at most `size` devices, and the full count to *n.
int32_t dgr_devices(dgr_device * out, int32_t size, int32_t * n);
// Runs a fixed probe graph with the reference kernels and writes the digest of its output (32 hex digits + NUL).
int32_t dgr_kernel_probe(char * out, size_t out_size);
// Reads quantised blocks as numbers with the type's reference code (ggml's to_float); a ggml_type that has no blocks, and
// sizes that are not whole blocks, at least one, are refused.
int32_t dgr_dequantize(int32_t type, const void * blocks, size_t n_bytes, float * out, size_t n_values);
// Writes numbers as rows of a type, quantised as ggml does without an importance matrix (ggml_quantize_chunk); `width` values
// a row. Refused are types that hold no weights or need a matrix, values that are not finite, and sizes that are not whole
// rows of whole blocks, at least one.
int32_t dgr_quantize(int32_t type, const float * values, size_t n_values, size_t width, void * out, size_t n_bytes);

// A stage.
dgr_stage_params dgr_stage_params_default(void);
int32_t dgr_stage_open(const char * path, const dgr_stage_params * params, dgr_stage ** out);
void dgr_stage_close(dgr_stage * stage); // NULL is fine
int32_t dgr_stage_info_get(const dgr_stage * stage, dgr_stage_info * out);
int32_t dgr_stage_run(dgr_stage * stage, const dgr_run * run);
int32_t dgr_stage_position(const dgr_stage * stage, int32_t slot, int32_t * out); // tokens committed
int32_t dgr_stage_clear(dgr_stage * stage, int32_t slot);                         // every component of the slot to zero
// The same in pieces of about n_bytes, between which other slots may run; this one cannot before *done.
int32_t dgr_stage_clear_some(dgr_stage * stage, int32_t slot, uint64_t n_bytes, bool * done);
// Copies all that a slot holds into an empty one, which then goes on by itself; the source is as it was. After DGR_ERR_LOST
// the target alone must be cleared.
int32_t dgr_stage_fork(dgr_stage * stage, int32_t source, int32_t target);
// The same in pieces of about n_bytes, between which other slots may run, and the source too: the copy is of what it held at
// the first piece. The target runs nothing before *done. Clearing the source between two pieces is DGR_ERR_LOST.
int32_t dgr_stage_fork_some(dgr_stage * stage, int32_t source, int32_t target, uint64_t n_bytes, bool * done);
int32_t dgr_stage_summary(const dgr_stage * stage, int32_t slot, dgr_state_summary * out);
// The same summary in pieces of about n_bytes, between which the stage may do other work; *out is filled when it is done. When
// the slot itself has changed it is DGR_READING_MOVED: open another reader.
int32_t dgr_summary_open(const dgr_stage * stage, int32_t slot, dgr_summary_reader ** out);
int32_t dgr_summary_read(dgr_summary_reader * reader, uint64_t n_bytes, dgr_reading * reading, dgr_state_summary * out);
void dgr_summary_close(dgr_summary_reader * reader); // NULL is fine; after its stage's end too
void dgr_stage_abort(dgr_stage * stage);             // from any thread: the run in progress and all later ones fail

// Draws from one row of logits with llama.cpp's sampler chain; needs no stage.
int32_t dgr_sample(const float * logits, int32_t n_vocab, const int32_t * history, int32_t n_history,
    const dgr_sample_params * params, int32_t * token, int32_t * top_tokens, float * top_logprobs);

// A tokenizer. Text is UTF-8.
int32_t dgr_vocab_open(const char * path, dgr_vocab ** out);
void dgr_vocab_close(dgr_vocab * vocab);
int32_t dgr_vocab_specials(const dgr_vocab * vocab, int32_t * n_vocab, int32_t * bos, int32_t * eos); // -1: none
// Both write at most `size` items, and the full count to *n: call again with more room when *n > size.
int32_t dgr_vocab_tokenize(const dgr_vocab * vocab, const char * text, int32_t n_text, bool add_special,
    bool parse_special, int32_t * tokens, int32_t size, int32_t * n);
int32_t dgr_vocab_piece(const dgr_vocab * vocab, int32_t token, bool special, char * out, int32_t size, int32_t * n);

#ifdef __cplusplus
}
#endif
#endif
