// Devices beside the CPU: which there are, which a stage takes, and what it holds there.
#include "dgr_internal.h"

#include "ggml-backend.h"
#include "llama-context.h" // private: the scheduler
#include "llama-ext.h"     // staging API: the memory breakdown
#include "llama-model.h"   // private: the device of each layer

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>

namespace dgr {

// Holds layers by itself: neither the CPU nor what only helps it, as BLAS does.
static bool holds_layers(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

static std::vector<ggml_backend_dev_t> all_devices() {
    std::vector<ggml_backend_dev_t> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_t device = ggml_backend_dev_get(i); holds_layers(device)) {
            found.push_back(device);
        }
    }
    return found;
}

// ggml-vulkan shows a device to other threads before it has made it: two stages opened at once would use it half made.
static void make(const std::vector<ggml_backend_dev_t> & devices) {
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> held(one_at_a_time);
    for (ggml_backend_dev_t device : devices) {
        ggml_backend_dev_buffer_type(device);
    }
}

static std::string names_of(const std::vector<ggml_backend_dev_t> & devices) {
    std::string names;
    for (ggml_backend_dev_t device : devices) {
        names += std::string(ggml_backend_dev_name(device)) + " (" + ggml_backend_dev_description(device) + "), ";
    }
    return names + "CPU";
}

static std::vector<ggml_backend_dev_t> named_devices(const char * names) {
    const std::vector<ggml_backend_dev_t> known = all_devices();
    std::vector<ggml_backend_dev_t> chosen;
    const std::string text = names;
    for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
        end                    = std::min(text.find(',', begin), text.size());
        const std::string name = text.substr(begin, end - begin);
        if (name == "CPU") {
            continue; // always there
        }
        const auto found = std::find_if(known.begin(), known.end(),
            [&](ggml_backend_dev_t device) { return name == ggml_backend_dev_name(device); });
        if (found == known.end()) {
            refuse("there is no device '%s' here; choose from %s", name.c_str(), names_of(known).c_str());
        }
        if (std::find(chosen.begin(), chosen.end(), *found) != chosen.end()) {
            refuse("device %s is named twice", name.c_str());
        }
        chosen.push_back(*found);
    }
    return chosen;
}

chosen_devices choose_devices(const dgr_stage_params & p) {
    if (p.gpu_layers < -1) {
        refuse("gpu_layers is %d, must be 0 or more, or -1 for all", p.gpu_layers);
    }
    chosen_devices out;
    if (p.devices) {
        out.devices = named_devices(p.devices);
        out.given   = true;
    }
    if (p.exact) {
        if (!out.devices.empty() || p.gpu_layers > 0) {
            refuse(
                "exact numerics runs on the CPU alone: name no device and no layers for one, or use native numerics");
        }
        out.given = true; // none
    } else {
        make(out.given ? out.devices : all_devices());
    }
    out.devices.push_back(nullptr);
    return out;
}

bool tells_of_memory(const std::string & reason) {
    for (const char * words :
        { "allocat", "alloc failed", "bad_alloc", "out of memory", "OutOfDeviceMemory", "OutOfHostMemory" }) {
        if (reason.find(words) != std::string::npos) {
            return true;
        }
    }
    return false;
}

static void copy_text(char * out, size_t size, const std::string & text) {
    snprintf(out, size, "%s", text.c_str());
}

// Devices of the scheduler, in the order in which it prefers them, and how many layers of the stage each holds. A line
// that does not fit is left out.
static void name_devices(const dgr_stage & stage, char * out, size_t size) {
    ggml_backend_sched_t sched = stage.ctx->get_sched();
    const int32_t n_layers     = stage.info.layer_end - stage.info.layer_begin;
    std::string lines;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend    = ggml_backend_sched_get_backend(sched, i);
        ggml_backend_dev_t device = ggml_backend_get_device(backend);
        std::string line          = ggml_backend_name(backend);
        if (device) {
            line += std::string(" ") + ggml_backend_dev_description(device);
        }
        if (device && holds_layers(device)) {
            int32_t held = 0;
            for (int32_t il = stage.info.layer_begin; il < stage.info.layer_end; ++il) {
                held += stage.model->dev_layer(il) == device;
            }
            line += ": " + std::to_string(held) + " of " + std::to_string(n_layers) + " layers";
        }
        if (lines.size() + line.size() + 2 <= size) {
            lines += (lines.empty() ? "" : "\n") + line;
        }
    }
    copy_text(out, size, lines);
}

void describe_devices(const dgr_stage & stage, dgr_stage_info & info) {
    name_devices(stage, info.devices, sizeof(info.devices));
    info.graph_splits = ggml_backend_sched_get_n_splits(stage.ctx->get_sched());

    std::map<ggml_backend_dev_t, dgr_device_bytes> held; // only what lies in a device's own memory
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(stage.ctx.get())) {
        ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
        if (device && holds_layers(device) && !ggml_backend_buft_is_host(buft)) {
            held[device].weight_bytes += bytes.model;
            held[device].state_bytes += bytes.context;
            held[device].compute_bytes += bytes.compute;
        }
    }
    for (ggml_backend_dev_t device : all_devices()) {
        const auto found = held.find(device);
        if (found == held.end() || info.n_device_bytes == DGR_MAX_DEVICES) {
            continue;
        }
        copy_text(found->second.name, sizeof(found->second.name), ggml_backend_dev_name(device));
        info.device_bytes[info.n_device_bytes++] = found->second;
    }
}

} // namespace dgr

//
// C interface
//

int32_t dgr_devices(dgr_device * out, int32_t size, int32_t * n) {
    return dgr::guarded([&] {
        dgr::require("n", n);
        if (size < 0 || (size > 0 && !out)) {
            dgr::refuse("size is %d: give room for as many devices", size);
        }
        dgr::library_init();
        const auto devices = dgr::all_devices();
        dgr::make(devices); // before a driver is asked about its memory
        *n = (int32_t) devices.size();
        for (int32_t i = 0; i < std::min(size, *n); ++i) {
            out[i] = {};
            dgr::copy_text(out[i].name, sizeof(out[i].name), ggml_backend_dev_name(devices[i]));
            dgr::copy_text(out[i].description, sizeof(out[i].description), ggml_backend_dev_description(devices[i]));
            size_t free = 0, total = 0;
            ggml_backend_dev_memory(devices[i], &free, &total);
            out[i].memory_free  = free;
            out[i].memory_total = total;
        }
    });
}
