// For tests and benchmarks only: reads and writes the rows that hold a sequence's state, times the operations of a graph,
// and tells what the machine could do at best. It exists in dgr.testing._probe, a complete second link of the same
// libraries, and never in the product's extension.
//
// This file is also the cdef: keep it free of preprocessor tricks beyond the include guard.
#ifndef DGR_PROBE_H
#define DGR_PROBE_H

#include "dgr_native.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rows [row_begin, row_begin + n_rows) of a component, in the type they are stored in. Raw SWA rows go by cell, compressed
// rows by block, ring rows by ring index; a ring row is its kv row followed by its score row. *row_bytes is set always;
// out_size must be at least n_rows * *row_bytes.
int32_t dgr_probe_rows(const dgr_stage * stage, int32_t component, int32_t layer, int32_t slot, uint32_t row_begin,
    uint32_t n_rows, uint8_t * out, size_t out_size, size_t * row_bytes);

// Position of every raw SWA cell of a slot, -1 where the cell is free. Writes at most `size`, the full count to *n.
int32_t dgr_probe_raw_positions(const dgr_stage * stage, int32_t slot, int32_t * out, size_t size, size_t * n);

// Overwrites one row; n_bytes must be the row's size as dgr_probe_rows tells it.
int32_t dgr_probe_poke(dgr_stage * stage, int32_t component, int32_t layer, int32_t slot, uint32_t row,
    const uint8_t * bytes, size_t n_bytes);

// Makes an empty slot look as if n_tokens had been committed, without computing them: every row that they would have left
// takes random values of a normalised row's size (a root mean square of 1), in the type it is stored in, and the book-keeping
// of the cells says so. A run that goes on from there does the work of one after a prompt; what it draws means nothing.
int32_t dgr_probe_fill(dgr_stage * stage, int32_t slot, int32_t n_tokens, uint64_t seed);

typedef struct dgr_probe_op {
    char op[32]; // ggml's name of the operation
    char name
        [64]; // of the weight that it multiplies by, without block and suffix; else of its result, without the layer
    char weight[8]; // type of that weight; empty where there is none
    uint64_t calls;
    uint64_t ns;
} dgr_probe_op;

// From now on every operation of the stage's graphs is run by itself and timed; off: no more. Both forget what was timed.
// The graph runs somewhat slower, and operations that llama.cpp would fuse are not. One compute thread is timed by its CPU
// time, which other work on the machine disturbs least, several by the clock on the wall.
int32_t dgr_probe_profile(dgr_stage * stage, bool on);

// What was timed since, by operation and name, in no order. Writes at most `size`, the full count to *n.
int32_t dgr_probe_profile_read(const dgr_stage * stage, dgr_probe_op * out, size_t size, size_t * n);

typedef enum dgr_probe_roof_kind {
    DGR_ROOF_READ  = 0, // bytes a second, reading memory
    DGR_ROOF_TRIAD = 1, // bytes a second, a[i] = b[i] + s * c[i], as STREAM counts them
    DGR_ROOF_F32   = 2, // operations a second in registers: multiplications and additions of float
    DGR_ROOF_BF16  = 3, // of bfloat16 pairs, summed up as float
    DGR_ROOF_INT8  = 4, // of 8-bit integers, summed up as 32-bit ones
} dgr_probe_roof_kind;

// The best of repeated runs within `seconds` on so many threads, of which one is timed by its CPU time; n_bytes: of memory in all, far more than any cache holds.
// *out is 0 where the CPU has no instruction for it, or none that this code knows.
int32_t dgr_probe_roof(int32_t kind, int32_t n_threads, double seconds, uint64_t n_bytes, double * out);

// How a pre-tokenizer splits a text: bytes of each word, in order. `exprs`: its expressions, each after the other. One that
// llama.cpp knows has a splitter of its own; any other runs on std::regex, which recurses once per character. Writes at most
// `size`, the full count to *n.
int32_t dgr_probe_words(const char * const * exprs, size_t n_exprs, const char * text, size_t n_text, int32_t * out,
    size_t size, size_t * n);

typedef enum dgr_probe_fault_kind {
    DGR_FAULT_OVERRUN  = 0, // address: a byte behind a block of memory is read
    DGR_FAULT_FREED    = 1, // address: a block is read that was given back
    DGR_FAULT_OVERFLOW = 2, // undefined: a sum of two int is too large for one
    DGR_FAULT_SHIFT    = 3, // undefined: a number is shifted by more bits than it has
    DGR_FAULT_RACE     = 4, // thread: two threads write to one number
} dgr_probe_fault_kind;

// Does wrong on purpose, to prove that a build under that sanitizer sees it: there it should not return. Other builds refuse.
int32_t dgr_probe_fault(int32_t kind);

#ifdef __cplusplus
}
#endif
#endif
