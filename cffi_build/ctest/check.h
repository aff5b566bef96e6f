// What the tests share: checks that end the program, and a stage with std::vector for arrays.
#pragma once

#include "dgr_native.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, dgr_last_error());        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

using floats = std::vector<float>;

inline bool same_bytes(const floats & a, const floats & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct close_stage {
    void operator()(dgr_stage * s) const { dgr_stage_close(s); }
};
using stage_ptr = std::unique_ptr<dgr_stage, close_stage>;

inline dgr_stage_params small_params(int begin, int end) {
    dgr_stage_params p = dgr_stage_params_default();
    p.layer_begin      = begin;
    p.layer_end        = end;
    p.n_ctx            = 512;
    p.n_batch          = 128;
    p.n_ubatch         = 64;
    p.n_seq_max        = 3;
    return p;
}

inline stage_ptr open(const char * model, const dgr_stage_params & p) {
    dgr_stage * stage = nullptr;
    CHECK(dgr_stage_open(model, &p, &stage) == DGR_OK);
    return stage_ptr(stage);
}

inline dgr_stage_info info(const stage_ptr & stage) {
    dgr_stage_info i;
    CHECK(dgr_stage_info_get(stage.get(), &i) == DGR_OK);
    return i;
}

inline int32_t position(const stage_ptr & stage, int32_t slot) {
    int32_t p = -1;
    CHECK(dgr_stage_position(stage.get(), slot, &p) == DGR_OK);
    return p;
}

// One batch with its arrays; edit a field to make it wrong.
struct batch {
    std::vector<int32_t> tokens, positions, slots;
    std::vector<uint8_t> want, finite;
    floats residual, output;
    size_t shift = 0; // bytes by which the residual that comes in lies off where floats lie
    std::vector<char> packet;

    void add(int32_t slot, int32_t position, int32_t token, bool wanted = true) {
        tokens.push_back(token);
        positions.push_back(position);
        slots.push_back(slot);
        want.push_back(wanted);
    }

    int32_t run(const stage_ptr & stage) {
        const dgr_stage_info i = info(stage);
        const bool tail        = i.width_out == 0;
        finite.assign(tokens.size(), 2);
        output.assign(tokens.size() * (tail ? i.n_vocab : i.width_out), -1.0f);
        std::vector<uint8_t> wanted = want;
        if (!tail) {
            wanted.assign(tokens.size(), 0);
        }
        packet.resize(shift + residual.size() * sizeof(float));
        std::copy_n((const char *) residual.data(), residual.size() * sizeof(float), packet.begin() + shift);

        dgr_run run      = {};
        run.n_tokens     = (int32_t) tokens.size();
        run.tokens       = tokens.data();
        run.positions    = positions.data();
        run.slots        = slots.data();
        run.want_logits  = wanted.data();
        run.residual_in  = residual.empty() ? nullptr : packet.data() + shift;
        run.residual_out = tail ? nullptr : output.data();
        run.logits_out   = tail ? output.data() : nullptr;
        run.row_finite   = finite.data();
        return dgr_stage_run(stage.get(), &run);
    }

    bool all_finite() const {
        for (const uint8_t flag : finite) {
            if (flag != 1) {
                return false;
            }
        }
        return true;
    }
};

// Token of a fixed text, the same in every test.
inline int32_t token_at(int32_t i, int32_t n_vocab) {
    return (int32_t) (((uint32_t) i * 2654435761u >> 7) % (uint32_t) n_vocab);
}

// A pipeline of stages in one process: what one returns, the next takes.
struct pipeline {
    std::vector<stage_ptr> stages;

    pipeline(const char * model, const std::vector<int> & cuts, dgr_stage_params p) {
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
            p.layer_begin = cuts[i];
            p.layer_end   = cuts[i + 1];
            stages.push_back(open(model, p));
        }
    }

    floats run(batch b) {
        for (const stage_ptr & stage : stages) {
            CHECK(b.run(stage) == DGR_OK);
            CHECK(b.all_finite());
            b.residual = b.output;
        }
        return b.output;
    }

    // Positions [begin, end) of the fixed text in one slot, in chunks.
    floats prefill(int32_t slot, int32_t begin, int32_t end, int32_t chunk) {
        const int32_t n_vocab = info(stages.back()).n_vocab;
        floats rows;
        for (int32_t at = begin; at < end; at += chunk) {
            batch b;
            for (int32_t i = at; i < at + chunk && i < end; ++i) {
                b.add(slot, i, token_at(i, n_vocab));
            }
            const floats out = run(std::move(b));
            rows.insert(rows.end(), out.begin(), out.end());
        }
        return rows;
    }

    void clear(int32_t slot) {
        for (const stage_ptr & stage : stages) {
            CHECK(dgr_stage_clear(stage.get(), slot) == DGR_OK);
            CHECK(position(stage, slot) == 0);
        }
    }
};
