// A tokenizer, loaded without weights.
#include "dgr_internal.h"

struct dgr_vocab {
    dgr::model_ptr model;
    const llama_vocab * vocab = nullptr;
};

namespace dgr {

static std::unique_ptr<dgr_vocab> open_vocab(const char * path) {
    check_metadata(path, 0, 0);

    llama_model_params mp = llama_model_default_params();
    mp.vocab_only         = true;

    const first_error why;
    auto vocab = std::make_unique<dgr_vocab>();
    vocab->model.reset(llama_model_load_from_file(path, mp));
    if (!vocab->model) {
        fail(DGR_ERR_LOAD, "%s: %s", path, why.text("no reason given"));
    }
    vocab->vocab = llama_model_get_vocab(vocab->model.get());
    if (llama_vocab_type(vocab->vocab) == LLAMA_VOCAB_TYPE_NONE) { // llama.cpp asserts on the first use of one
        fail(DGR_ERR_LOAD, "%s: the file has no tokenizer (tokenizer.ggml.model is none): use token ids", path);
    }
    return vocab;
}

// llama.cpp answers with the count, or with minus the count it has no room for.
static int32_t full_count(int32_t answer) {
    if (answer == INT32_MIN) {
        refuse("the text has more than %d tokens", INT32_MAX);
    }
    return answer < 0 ? -answer : answer;
}

} // namespace dgr

int32_t dgr_vocab_open(const char * path, dgr_vocab ** out) {
    return dgr::guarded([&] {
        dgr::require("path, out", path, out);
        *out = nullptr;
        dgr::library_init();
        *out = dgr::open_vocab(path).release();
    });
}

void dgr_vocab_close(dgr_vocab * vocab) {
    dgr::guarded([&] { delete vocab; });
}

int32_t dgr_vocab_specials(const dgr_vocab * vocab, int32_t * n_vocab, int32_t * bos, int32_t * eos) {
    return dgr::guarded([&] {
        dgr::require("vocab, n_vocab, bos, eos", vocab, n_vocab, bos, eos);
        *n_vocab = llama_vocab_n_tokens(vocab->vocab);
        *bos     = llama_vocab_bos(vocab->vocab);
        *eos     = llama_vocab_eos(vocab->vocab);
    });
}

int32_t dgr_vocab_tokenize(const dgr_vocab * vocab, const char * text, int32_t n_text, bool add_special,
    bool parse_special, int32_t * tokens, int32_t size, int32_t * n) {
    return dgr::guarded([&] {
        if (!vocab || !text || !n || (!tokens && size > 0)) {
            dgr::refuse("vocab, text, tokens and n are all required");
        }
        if (n_text < 0 || size < 0) {
            dgr::refuse("n_text is %d and size is %d, both must be >= 0", n_text, size);
        }
        *n = dgr::full_count(llama_tokenize(vocab->vocab, text, n_text, tokens, size, add_special, parse_special));
    });
}

int32_t dgr_vocab_piece(const dgr_vocab * vocab, int32_t token, bool special, char * out, int32_t size, int32_t * n) {
    return dgr::guarded([&] {
        if (!vocab || !n || (!out && size > 0)) {
            dgr::refuse("vocab, out and n are all required");
        }
        const int32_t n_vocab = llama_vocab_n_tokens(vocab->vocab);
        if (token < 0 || token >= n_vocab) {
            dgr::refuse("token id %d is outside the vocabulary 0..%d", token, n_vocab - 1);
        }
        if (size < 0) {
            dgr::refuse("size is %d, must be >= 0", size);
        }
        *n = dgr::full_count(llama_token_to_piece(vocab->vocab, token, out, size, /*lstrip =*/0, special));
    });
}
