// The independent reference: whole model, upstream's kernels, llama.h alone, so that it also links to an unpatched
// llama.cpp. Reads int32 token ids, writes one row of f32 logits for each.
//
//   whole_logits MODEL TOKENS.i32 LOGITS.f32 CHUNK THREADS FLASH_ATTN(0|1) TYPE_K(f32|f16) N_CTX N_UBATCH
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

static void need(bool condition, const char * what) {
    if (!condition) {
        fprintf(stderr, "whole_logits: %s\n", what);
        exit(1);
    }
}

int main(int argc, char ** argv) {
    need(argc == 10, "usage: MODEL TOKENS.i32 LOGITS.f32 CHUNK THREADS FLASH_ATTN TYPE_K N_CTX N_UBATCH");
    const int chunk = atoi(argv[4]);

    std::ifstream in(argv[2], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    std::vector<llama_token> tokens(bytes.size() / sizeof(llama_token));
    memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(llama_token));
    need(!tokens.empty() && chunk > 0, "no tokens, or no chunk size");

    llama_backend_init();
    llama_model_params mp = llama_model_default_params();
    mp.load_mode          = LLAMA_LOAD_MODE_NONE;
    llama_model * model   = llama_model_load_from_file(argv[1], mp);
    need(model, "the model does not load");

    llama_context_params cp = llama_context_default_params();
    cp.n_ctx                = atoi(argv[8]);
    cp.n_batch              = chunk > atoi(argv[9]) ? chunk : atoi(argv[9]);
    cp.n_ubatch             = atoi(argv[9]);
    cp.n_threads            = atoi(argv[5]);
    cp.n_threads_batch      = cp.n_threads;
    cp.flash_attn_type      = atoi(argv[6]) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.type_k               = strcmp(argv[7], "f32") == 0 ? GGML_TYPE_F32 : GGML_TYPE_F16;
    cp.type_v               = cp.type_k;
    cp.swa_full             = false;
    llama_context * ctx     = llama_init_from_model(model, cp);
    need(ctx, "the context does not fit");

    std::ofstream out(argv[3], std::ios::binary);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(chunk, 0, 1);
    for (size_t at = 0; at < tokens.size(); at += chunk) {
        batch.n_tokens = 0;
        for (size_t i = at; i < tokens.size() && i < at + chunk; ++i) {
            const int k        = batch.n_tokens++;
            batch.token[k]     = tokens[i];
            batch.pos[k]       = (llama_pos) i;
            batch.n_seq_id[k]  = 1;
            batch.seq_id[k][0] = 0;
            batch.logits[k]    = 1;
        }
        need(llama_decode(ctx, batch) == 0, "decoding failed");
        out.write((const char *) llama_get_logits(ctx), (std::streamsize) batch.n_tokens * n_vocab * sizeof(float));
    }
    out.close();
    need(out.good(), "the logits cannot be written");

    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
}
