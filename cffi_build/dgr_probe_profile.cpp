// Time by operation, through the callback that ggml's scheduler has for looking at results.
#include "dgr_probe.h"

#include "dgr_internal.h"

#include "ggml-backend.h"
#include "llama-context.h" // private: the parameters of a context, which name the callback

#include <cstdio>
#include <ctime>
#include <map>
#include <mutex>
#include <tuple>

namespace dgr {

namespace {

struct profile {
    struct count {
        uint64_t calls = 0, ns = 0;
    };

    using key = std::tuple<std::string, std::string, std::string>; // operation, name, type of the weight
    std::map<key, count> counts;
    clockid_t clock = CLOCK_MONOTONIC;
    uint64_t began  = 0;

    uint64_t now() const {
        timespec t;
        clock_gettime(clock, &t);
        return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
    }
};

// A stage that was closed while it was profiled leaves its entry to the next one at its address.
std::mutex profiles_mutex;
std::map<const dgr_stage *, std::unique_ptr<profile>> profiles;

bool computes_nothing(const ggml_tensor * tensor) {
    switch (tensor->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return true;
        default: return false;
    }
}

// blk.7.attn_q_a.weight -> attn_q_a
std::string weight_name(const std::string & name) {
    const size_t begin = name.rfind("blk.", 0) == 0 ? name.find('.', 4) + 1 : 0;
    const size_t end   = name.rfind('.');
    return name.substr(begin, end == std::string::npos || end < begin ? std::string::npos : end - begin);
}

// hc_attn_pre-7 (view) -> hc_attn_pre; names that ggml makes up are none
std::string result_name(const std::string & name) {
    if (name.rfind("node_", 0) == 0 || name.rfind("leaf_", 0) == 0) {
        return "";
    }
    std::string bare   = name.substr(0, name.find(" ("));
    const size_t layer = bare.rfind('-');
    if (layer != std::string::npos && bare.find_first_not_of("0123456789", layer + 1) == std::string::npos) {
        bare.resize(layer);
    }
    return bare;
}

profile::key key_of(const ggml_tensor * tensor) {
    for (const ggml_tensor * source : tensor->src) {
        const ggml_tensor * base = source && source->view_src ? source->view_src : source;
        if (base && base->buffer && ggml_backend_buffer_get_usage(base->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            return { ggml_op_desc(tensor), weight_name(base->name), ggml_type_name(base->type) };
        }
    }
    return { ggml_op_desc(tensor), result_name(tensor->name), "" };
}

// Asked before an operation whether it is of interest, and told when it is done; what is of none runs with the next.
bool on_operation(ggml_tensor * tensor, bool ask, void * data) {
    profile & into     = *(profile *) data;
    const uint64_t now = into.now();
    if (ask) {
        into.began = now;
        return !computes_nothing(tensor);
    }
    profile::count & count = into.counts[key_of(tensor)];
    count.calls += 1;
    count.ns += now - into.began;
    return true;
}

void copy(char * out, size_t size, const std::string & text) {
    snprintf(out, size, "%s", text.c_str());
}

} // namespace

static void switch_profile(dgr_stage & stage, bool on) {
    if (stage.dry_run) {
        refuse("the stage was opened with dry_run: it runs nothing");
    }
    auto & params = const_cast<llama_cparams &>(stage.ctx->get_cparams());
    const std::lock_guard<std::mutex> lock(profiles_mutex);
    auto & held = profiles[&stage];
    held        = std::make_unique<profile>();
    if (stage.ctx->n_threads() == 1) { // which is the caller's own
        held->clock = CLOCK_THREAD_CPUTIME_ID;
    }
    params.cb_eval           = on ? on_operation : nullptr;
    params.cb_eval_user_data = on ? held.get() : nullptr;
    ggml_backend_sched_set_eval_callback(stage.ctx->get_sched(), params.cb_eval, params.cb_eval_user_data);
}

static void read_profile(const dgr_stage & stage, dgr_probe_op * out, size_t size, size_t & n) {
    const std::lock_guard<std::mutex> lock(profiles_mutex);
    const auto found = profiles.find(&stage);
    if (found == profiles.end()) {
        refuse("nothing was timed: switch the profile on first");
    }
    n        = found->second->counts.size();
    size_t i = 0;
    for (const auto & [key, count] : found->second->counts) {
        if (i == size) {
            return;
        }
        dgr_probe_op & op = out[i++];
        op                = {};
        copy(op.op, sizeof(op.op), std::get<0>(key));
        copy(op.name, sizeof(op.name), std::get<1>(key));
        copy(op.weight, sizeof(op.weight), std::get<2>(key));
        op.calls = count.calls;
        op.ns    = count.ns;
    }
}

} // namespace dgr

int32_t dgr_probe_profile(dgr_stage * stage, bool on) {
    return dgr::guarded([&] {
        dgr::require("stage", stage);
        dgr::switch_profile(*stage, on);
    });
}

int32_t dgr_probe_profile_read(const dgr_stage * stage, dgr_probe_op * out, size_t size, size_t * n) {
    return dgr::guarded([&] {
        if (!stage || !n || (!out && size > 0)) {
            dgr::refuse("stage, out and n are all required");
        }
        dgr::read_profile(*stage, out, size, *n);
    });
}
