// For tests only: reads and writes the rows that hold a sequence's state. It exists in dgr.testing._probe, a complete
// second link of the same libraries, and never in the product's extension.
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

// How a pre-tokenizer splits a text: bytes of each word, in order. `exprs`: its expressions, each after the other. One that
// llama.cpp knows has a splitter of its own; any other runs on std::regex, which recurses once per character. Writes at most
// `size`, the full count to *n.
int32_t dgr_probe_words(const char * const * exprs, size_t n_exprs, const char * text, size_t n_text, int32_t * out,
    size_t size, size_t * n);

#ifdef __cplusplus
}
#endif
#endif
