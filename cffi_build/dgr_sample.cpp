// One draw from one row of logits.
#include "dgr_internal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace dgr {

struct free_sampler {
    void operator()(llama_sampler * s) const { llama_sampler_free(s); }
};
using sampler_ptr = std::unique_ptr<llama_sampler, free_sampler>;

static constexpr int32_t MAX_TOP = 64;

static void check(
    const float * logits, int32_t n_vocab, const int32_t * history, int32_t n_history, const dgr_sample_params & p) {
    if (n_vocab < 1) {
        refuse("n_vocab is %d, must be >= 1", n_vocab);
    }
    if (n_history < 0 || (n_history > 0 && !history)) {
        refuse("n_history is %d, must be >= 0 and go with a history", n_history);
    }
    for (int32_t i = 0; i < n_history; ++i) {
        if (history[i] < 0 || history[i] >= n_vocab) {
            refuse("token id %d at history[%d] is outside the vocabulary 0..%d", history[i], i, n_vocab - 1);
        }
    }
    if (!std::isfinite(p.temperature)) {
        refuse("temperature is not finite");
    }
    if (!(p.top_p > 0) || !std::isfinite(p.top_p)) {
        refuse("top_p is %g, must be above 0 (1 turns it off)", p.top_p);
    }
    if (!(p.min_p <= 1) || !std::isfinite(p.min_p)) {
        refuse("min_p is %g, must be at most 1 (0 turns it off)", p.min_p);
    }
    if (!(p.repeat_penalty > 0) || !std::isfinite(p.repeat_penalty)) {
        refuse("repeat_penalty is %g, must be above 0 (1 turns it off)", p.repeat_penalty);
    }
    if (!std::isfinite(p.frequency_penalty) || !std::isfinite(p.presence_penalty)) {
        refuse("frequency_penalty is %g and presence_penalty is %g, both must be finite", p.frequency_penalty,
            p.presence_penalty);
    }
    if (p.penalty_last_n < -1) {
        refuse("penalty_last_n is %d, must be >= -1 (-1: the whole history)", p.penalty_last_n);
    }
    if (p.seed == LLAMA_DEFAULT_SEED) {
        refuse("seed 0x%X means a random seed to llama.cpp: take another", p.seed);
    }
    if (p.n_top < 0 || p.n_top > std::min(MAX_TOP, n_vocab)) {
        refuse("n_top is %d, must be in 0..%d", p.n_top, std::min(MAX_TOP, n_vocab));
    }
    if (!all_finite(logits, n_vocab)) {
        fail(DGR_ERR_NON_FINITE, "the logits hold NaN or Inf: drop the session");
    }
}

static sampler_ptr make_chain(
    int32_t n_vocab, const int32_t * history, int32_t n_history, const dgr_sample_params & p) {
    sampler_ptr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    const auto add = [&](llama_sampler * sampler) { llama_sampler_chain_add(chain.get(), sampler); };

    const int32_t last_n = p.penalty_last_n < 0 ? n_history : std::min(p.penalty_last_n, n_history);
    if (last_n > 0) {
        llama_sampler * penalties =
            llama_sampler_init_penalties(n_vocab, last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty);
        for (int32_t i = n_history - last_n; i < n_history; ++i) {
            llama_sampler_accept(penalties, history[i]);
        }
        add(penalties);
    }
    if (p.temperature <= 0) {
        add(llama_sampler_init_greedy()); // the first of equals, and candidates are in id order
        return chain;
    }
    add(llama_sampler_init_top_k(p.top_k));
    add(llama_sampler_init_top_p(p.top_p, /*min_keep =*/1));
    add(llama_sampler_init_min_p(p.min_p, /*min_keep =*/1));
    add(llama_sampler_init_temp(p.temperature));
    return chain;
}

// Finite logits can still overflow, divided by a temperature near 0 or shifted by a huge penalty.
static void check_range(float logit, float temperature) {
    if (!std::isfinite(logit)) {
        fail(DGR_ERR_NON_FINITE, "temperature %g and the penalties take the logits out of range: use milder ones",
            temperature);
    }
}

// The greatest; not a number as soon as one is not.
static float greatest(const llama_token_data_array & view) {
    float best = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < view.size; ++i) {
        const float logit = view.data[i].logit;
        best              = logit > best || std::isnan(logit) ? logit : best;
    }
    return best;
}

static int32_t draw(
    const float * logits, int32_t n_vocab, const int32_t * history, int32_t n_history, const dgr_sample_params & p) {
    std::vector<llama_token_data> candidates(n_vocab);
    for (int32_t id = 0; id < n_vocab; ++id) {
        candidates[id] = { id, logits[id], 0.0f };
    }
    llama_token_data_array view = { candidates.data(), candidates.size(), /*.selected =*/-1, /*.sorted =*/false };

    const sampler_ptr chain = make_chain(n_vocab, history, n_history, p);
    llama_sampler_apply(chain.get(), &view);
    if (p.temperature > 0) {
        check_range(greatest(view), p.temperature); // upstream asserts that there is something to draw
        const sampler_ptr dist(llama_sampler_init_dist(p.seed));
        llama_sampler_apply(dist.get(), &view);
    }
    const bool drawn = view.selected >= 0 && (size_t) view.selected < view.size;
    check_range(drawn ? view.data[view.selected].logit : NAN, p.temperature);
    return view.data[view.selected].id;
}

// Of the raw logits: what the model believes, before temperature and penalties.
static void top(const float * logits, int32_t n_vocab, int32_t n_top, int32_t * tokens, float * logprobs) {
    std::vector<int32_t> ids(n_vocab);
    std::iota(ids.begin(), ids.end(), 0);
    std::partial_sort(ids.begin(), ids.begin() + n_top, ids.end(),
        [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });

    const double max = logits[ids.front()];
    double sum       = 0;
    for (int32_t id = 0; id < n_vocab; ++id) {
        sum += std::exp(logits[id] - max);
    }
    for (int32_t i = 0; i < n_top; ++i) {
        tokens[i]   = ids[i];
        logprobs[i] = (float) (logits[ids[i]] - max - std::log(sum));
    }
}

} // namespace dgr

int32_t dgr_sample(const float * logits, int32_t n_vocab, const int32_t * history, int32_t n_history,
    const dgr_sample_params * params, int32_t * token, int32_t * top_tokens, float * top_logprobs) {
    return dgr::guarded([&] {
        dgr::require("logits, params, token", logits, params, token);
        dgr::check(logits, n_vocab, history, n_history, *params);
        if (params->n_top > 0 && (!top_tokens || !top_logprobs)) {
            dgr::refuse("n_top is %d: top_tokens and top_logprobs are both required", params->n_top);
        }
        dgr::library_init();
        *token = dgr::draw(logits, n_vocab, history, n_history, *params);
        if (params->n_top > 0) {
            dgr::top(logits, n_vocab, params->n_top, top_tokens, top_logprobs);
        }
    });
}
