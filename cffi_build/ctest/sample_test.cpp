// One draw: greedy and its ties, seeds, truncation, penalties, log-probabilities, bad input.
#include "check.h"

#include <cmath>
#include <limits>
#include <set>

static dgr_sample_params greedy() {
    return { 0.0f, 0, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, -1, 1, 0 };
}

static int32_t draw(const floats & logits, const dgr_sample_params & p, const std::vector<int32_t> & history = {}) {
    int32_t token = -1;
    std::vector<int32_t> tokens(64);
    floats logprobs(64);
    CHECK(dgr_sample(logits.data(), (int32_t) logits.size(), history.data(), (int32_t) history.size(), &p, &token,
              tokens.data(), logprobs.data()) == DGR_OK);
    return token;
}

static std::set<int32_t> drawn(const floats & logits, dgr_sample_params p) {
    std::set<int32_t> tokens;
    for (p.seed = 0; p.seed < 300; ++p.seed) {
        tokens.insert(draw(logits, p));
    }
    return tokens;
}

static void greedy_draws(const floats & logits) {
    CHECK(draw(logits, greedy()) == 2); // 2 and 5 are equal: the lower id

    dgr_sample_params p = greedy();
    p.repeat_penalty    = 10.0f;
    CHECK(draw(logits, p, { 2 }) == 5);
    p.penalty_last_n = 1;
    CHECK(draw(logits, p, { 2, 0 }) == 2); // too long ago
    p                  = greedy();
    p.presence_penalty = 100.0f;
    CHECK(draw(logits, p, { 2, 5 }) == 1);
    p.penalty_last_n = 0;
    CHECK(draw(logits, p, { 2, 5 }) == 2);
}

static void random_draws(const floats & logits) {
    dgr_sample_params p = greedy();
    p.temperature       = 1.0f;
    CHECK(draw(logits, p) == draw(logits, p)); // a seed is a draw
    CHECK(drawn(logits, p).size() > 3);

    dgr_sample_params top_k = p;
    top_k.top_k             = 2;
    CHECK((drawn(logits, top_k) == std::set<int32_t>{ 2, 5 }));

    dgr_sample_params top_p = p;
    top_p.top_p             = 1e-6f;
    CHECK(drawn(logits, top_p).size() == 1);

    dgr_sample_params min_p = p;
    min_p.min_p             = 0.9f;
    CHECK((drawn(logits, min_p) == std::set<int32_t>{ 2, 5 }));

    dgr_sample_params cold = p;
    cold.temperature       = 0.01f;
    CHECK((drawn(logits, cold) == std::set<int32_t>{ 2, 5 }));
}

static void log_probabilities(const floats & logits) {
    dgr_sample_params p = greedy();
    p.n_top             = (int32_t) logits.size();
    int32_t token;
    std::vector<int32_t> tokens(logits.size());
    floats logprobs(logits.size());
    CHECK(dgr_sample(logits.data(), (int32_t) logits.size(), nullptr, 0, &p, &token, tokens.data(), logprobs.data()) ==
        DGR_OK);
    CHECK((std::vector<int32_t>(tokens.begin(), tokens.begin() + 3) == std::vector<int32_t>{ 2, 5, 1 }));
    double sum = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
        sum += std::exp(logprobs[i]);
        CHECK(std::fabs((logits[tokens[0]] - logits[tokens[i]]) - (logprobs[0] - logprobs[i])) < 1e-5);
    }
    CHECK(std::fabs(sum - 1) < 1e-5);
}

template <class Edit>
static void refused(floats logits, int32_t status, const char * part, Edit && edit) {
    dgr_sample_params p          = greedy();
    std::vector<int32_t> history = { 1 };
    edit(p, logits, history);
    int32_t token;
    int32_t tokens[64];
    float logprobs[64];
    CHECK(dgr_sample(logits.data(), (int32_t) logits.size(), history.data(), (int32_t) history.size(), &p, &token,
              tokens, logprobs) == status);
    CHECK(strstr(dgr_last_error(), part) != nullptr);
}

static void bad_input(const floats & logits) {
    using P             = dgr_sample_params;
    using H             = std::vector<int32_t>;
    const int32_t A     = DGR_ERR_ARGUMENT;
    const float nan     = std::numeric_limits<float>::quiet_NaN();
    dgr_sample_params p = greedy();
    int32_t token;
    CHECK(dgr_sample(logits.data(), 0, nullptr, 0, &p, &token, nullptr, nullptr) == A);
    CHECK(dgr_sample(nullptr, 8, nullptr, 0, &p, &token, nullptr, nullptr) == A);
    CHECK(dgr_sample(logits.data(), 8, nullptr, 1, &p, &token, nullptr, nullptr) == A);
    p.n_top = 1;
    CHECK(dgr_sample(logits.data(), 8, nullptr, 0, &p, &token, nullptr, nullptr) == A);

    refused(logits, A, "temperature", [&](P & p, floats &, H &) { p.temperature = nan; });
    refused(logits, A, "top_p", [](P & p, floats &, H &) { p.top_p = 0; });
    refused(logits, A, "top_p", [&](P & p, floats &, H &) { p.top_p = nan; });
    refused(logits, A, "min_p", [](P & p, floats &, H &) { p.min_p = 1.5f; });
    refused(logits, A, "repeat_penalty", [](P & p, floats &, H &) { p.repeat_penalty = 0; });
    refused(logits, A, "frequency_penalty", [&](P & p, floats &, H &) { p.frequency_penalty = nan; });
    refused(logits, A, "penalty_last_n", [](P & p, floats &, H &) { p.penalty_last_n = -2; });
    refused(logits, A, "0xFFFFFFFF", [](P & p, floats &, H &) { p.seed = 0xFFFFFFFFu; });
    refused(logits, A, "n_top is 65", [](P & p, floats &, H &) { p.n_top = 65; });
    refused(logits, A, "n_top is 9", [](P & p, floats &, H &) { p.n_top = 9; }); // more than there are
    refused(logits, A, "history[0]", [](P &, floats &, H & h) { h = { 8 }; });
    refused(logits, A, "history[1]", [](P &, floats &, H & h) { h = { 0, -1 }; });
    refused(logits, DGR_ERR_NON_FINITE, "NaN or Inf", [&](P &, floats & l, H &) { l[7] = nan; });
    refused(logits, DGR_ERR_NON_FINITE, "out of range", [](P & p, floats &, H &) { p.temperature = 1e-45f; });
}

int main() {
    const floats logits = { 0.5f, 1.0f, 3.0f, -2.0f, 0.25f, 3.0f, 0.75f, -1.0f };
    greedy_draws(logits);
    random_draws(logits);
    log_probabilities(logits);
    bad_input(logits);
}
