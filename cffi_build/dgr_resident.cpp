// Weights in memory: how much the owned tensors take, how they get there, and how they stay.
#include "dgr_internal.h"

#include "ggml-backend.h"
#include "llama-model.h" // private: the tensors that were loaded

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <thread>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace dgr {

namespace {

struct range {
    uintptr_t begin, end;
};

// Bytes that a thread treats at a time, whole huge pages: neighbours are read in the order of the file, whoever reads them.
constexpr size_t PIECE = 16 << 20;

// Where tensors lie in host memory, in whole pages, ascending and apart.
std::vector<range> pages_of(const llama_model & model) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    std::vector<range> found;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        if (tensor->buffer && tensor->data && ggml_backend_buffer_is_host(tensor->buffer)) {
            const auto begin = (uintptr_t) tensor->data;
            found.push_back({ begin / page * page, (begin + ggml_nbytes(tensor) + page - 1) / page * page });
        }
    }
    std::sort(found.begin(), found.end(), [](const range & a, const range & b) { return a.begin < b.begin; });
    std::vector<range> merged;
    for (const range & r : found) {
        if (!merged.empty() && r.begin <= merged.back().end) {
            merged.back().end = std::max(merged.back().end, r.end);
        } else {
            merged.push_back(r);
        }
    }
    return merged;
}

void fetch(const range & r) {
#ifdef MADV_POPULATE_READ
    if (madvise((void *) r.begin, r.end - r.begin, MADV_POPULATE_READ) == 0) {
        return;
    }
#endif
    // an older kernel; or the file is damaged, which whoever uses the tensor learns
    madvise((void *) r.begin, r.end - r.begin, MADV_WILLNEED);
}

// Memory of the process's own, in pages of 2 MiB where that is to be had: a step of decoding goes through all weights, and
// looks their pages up. A kernel that has no such call, or no such pages left, leaves them as they are.
void collapse(const range & r) {
#ifdef __linux__
#ifndef MADV_COLLAPSE
    constexpr int MADV_COLLAPSE = 25; // Linux 6.1; older headers do not have it
#endif
    madvise((void *) r.begin, r.end - r.begin, MADV_COLLAPSE);
#else
    (void) r;
#endif
}

void in_pieces(const std::vector<range> & ranges, int32_t n_threads, void (*treat)(const range &)) {
    std::vector<range> pieces;
    for (const range & r : ranges) {
        for (uintptr_t at = r.begin, next; at < r.end; at = next) {
            next = std::min<uintptr_t>(r.end, (at / PIECE + 1) * PIECE);
            pieces.push_back({ at, next });
        }
    }
    std::atomic<size_t> next = { 0 };
    const auto work          = [&] {
        for (size_t i; (i = next++) < pieces.size();) {
            treat(pieces[i]);
        }
    };
    std::vector<std::thread> threads;
    for (int32_t i = 1; i < n_threads; ++i) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

void lock_all(const std::vector<range> & ranges) {
    uint64_t bytes = 0;
    for (const range & r : ranges) {
        bytes += r.end - r.begin;
    }
    for (const range & r : ranges) {
        if (mlock((const void *) r.begin, r.end - r.begin) != 0) {
            const int why = errno;
            rlimit limit  = {};
            getrlimit(RLIMIT_MEMLOCK, &limit);
            fail(DGR_ERR_MEMORY,
                "%" PRIu64 " bytes of weights cannot be locked in memory (%s), the limit of this process is %" PRIu64
                " bytes: raise it (ulimit -l, LimitMEMLOCK=) or do without the lock",
                bytes, strerror(why), (uint64_t) limit.rlim_cur);
        }
    }
}

// Lets go of the pages of mapped buffers between the tensors that are used where they are mapped: those of other layers, and
// of tensors that were repacked into a buffer of their own.
void drop_others(const llama_model & model, const std::vector<range> & ranges) {
    std::vector<range> buffers;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        if (tensor->buffer && std::string(ggml_backend_buffer_name(tensor->buffer)) == "CPU_Mapped") {
            const auto base = (uintptr_t) ggml_backend_buffer_get_base(tensor->buffer);
            buffers.push_back({ base, base + ggml_backend_buffer_get_size(tensor->buffer) });
        }
    }
    const auto less = [](const range & a, const range & b) { return a.begin < b.begin; };
    std::sort(buffers.begin(), buffers.end(), less);
    uintptr_t done = 0;
    for (const range & buffer : buffers) {
        if (buffer.begin < done) {
            continue; // of another tensor in it
        }
        const uintptr_t page = sysconf(_SC_PAGESIZE);
        uintptr_t at         = (buffer.begin + page - 1) / page * page;
        done                 = buffer.end;
        for (const range & r : ranges) {
            if (r.end > buffer.begin && r.begin < buffer.end) {
                if (at < r.begin) {
                    madvise((void *) at, r.begin - at, MADV_DONTNEED);
                }
                at = std::max(at, r.end);
            }
        }
    }
}

} // namespace

uint64_t tensor_bytes(const llama_model & model) {
    uint64_t sum = 0;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        sum += tensor->buffer ? ggml_backend_buffer_get_alloc_size(tensor->buffer, tensor) : ggml_nbytes(tensor);
    }
    return sum;
}

void make_resident(const llama_model & model, bool mapped, bool prefetch, bool lock, int32_t n_threads) {
    const std::vector<range> ranges = pages_of(model);
    if (mapped) {
        drop_others(model, ranges);
    }
    if (mapped && prefetch) {
        in_pieces(ranges, n_threads, fetch);
    }
    if (!mapped) {
        in_pieces(ranges, n_threads, collapse);
    }
    if (lock) {
        lock_all(ranges);
    }
}

} // namespace dgr
