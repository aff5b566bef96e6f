// Text to ids and back, sizes that do not fit, bad input.
#include "check.h"

static std::string text_of(const dgr_vocab * vocab, const std::vector<int32_t> & tokens) {
    std::string text;
    for (const int32_t token : tokens) {
        int32_t n = 0;
        CHECK(dgr_vocab_piece(vocab, token, true, nullptr, 0, &n) == DGR_OK);
        std::string piece(n, '\0');
        CHECK(dgr_vocab_piece(vocab, token, true, piece.data(), n, &n) == DGR_OK);
        text += piece;
    }
    return text;
}

static std::vector<int32_t> tokens_of(const dgr_vocab * vocab, const std::string & text) {
    int32_t n = 0;
    CHECK(dgr_vocab_tokenize(vocab, text.data(), (int32_t) text.size(), false, false, nullptr, 0, &n) == DGR_OK);
    std::vector<int32_t> tokens(n);
    CHECK(dgr_vocab_tokenize(vocab, text.data(), (int32_t) text.size(), false, false, tokens.data(), n, &n) == DGR_OK);
    return tokens;
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    dgr_vocab * vocab = nullptr;
    CHECK(dgr_vocab_open(argv[1], &vocab) == DGR_OK);

    int32_t n_vocab = 0, bos = 0, eos = 0, n = 0;
    CHECK(dgr_vocab_specials(vocab, &n_vocab, &bos, &eos) == DGR_OK);
    CHECK(n_vocab > 0 && bos < n_vocab && eos < n_vocab);

    for (const char * text : { "", "a", "Hello, world!", "caf\xc3\xa9 \xe2\x9c\x93\n\t  x" }) {
        CHECK(text_of(vocab, tokens_of(vocab, text)) == text);
    }

    char byte;
    CHECK(dgr_vocab_piece(vocab, -1, true, &byte, 1, &n) == DGR_ERR_ARGUMENT);
    CHECK(dgr_vocab_piece(vocab, n_vocab, true, &byte, 1, &n) == DGR_ERR_ARGUMENT);
    CHECK(dgr_vocab_piece(vocab, 0, true, &byte, -1, &n) == DGR_ERR_ARGUMENT);
    CHECK(dgr_vocab_tokenize(vocab, "a", -1, false, false, nullptr, 0, &n) == DGR_ERR_ARGUMENT);
    CHECK(dgr_vocab_tokenize(vocab, nullptr, 1, false, false, nullptr, 0, &n) == DGR_ERR_ARGUMENT);
    dgr_vocab_close(vocab);
    dgr_vocab_close(nullptr);

    CHECK(dgr_vocab_open("/nonexistent.gguf", &vocab) == DGR_ERR_LOAD);
    CHECK(vocab == nullptr);
}
