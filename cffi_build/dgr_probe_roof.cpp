// What the machine can do at best: memory read and written, products in registers.
#include "dgr_probe.h"

#include "dgr_internal.h"

#include <algorithm>
#include <ctime>
#include <thread>

#if defined(__x86_64__) && defined(__GNUC__)
#define DGR_X86 1
#include <immintrin.h>
#endif

namespace dgr {

namespace {

constexpr size_t LINE    = 64; // bytes
constexpr int N_CHAINS   = 16; // independent sums: more than the latency of a product times how many start at once
constexpr uint64_t TURNS = 1u << 20;

volatile float sink; // results end here, or they would not be computed

//
// memory
//

uint64_t read_plain(const uint64_t * data, size_t n) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 8 <= n; i += 8) {
        for (size_t k = 0; k < 8; ++k) {
            sums[k] += data[i + k];
        }
    }
    uint64_t sum = 0;
    for (const uint64_t one : sums) {
        sum += one;
    }
    return sum;
}

#ifdef DGR_X86
__attribute__((target("avx512f"))) uint64_t read_avx512(const uint64_t * data, size_t n) {
    __m512i sums[4] = {};
    for (size_t i = 0; i + 32 <= n; i += 32) {
        for (size_t k = 0; k < 4; ++k) {
            sums[k] = _mm512_add_epi64(sums[k], _mm512_loadu_si512(data + i + 8 * k));
        }
    }
    return (uint64_t) _mm512_reduce_add_epi64(
        _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
}
#endif

uint64_t read(const uint64_t * data, size_t n) {
#ifdef DGR_X86
    if (__builtin_cpu_supports("avx512f")) {
        return read_avx512(data, n);
    }
#endif
    return read_plain(data, n);
}

void triad(float * a, const float * b, const float * c, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        a[i] = b[i] + 3.0f * c[i];
    }
}

//
// products: each turn has one of every chain; returns operations a turn, 0 where there is no such instruction. Chains begin
// with values that the compiler cannot know to be equal.
//

#ifdef DGR_X86
__attribute__((target("avx512f"))) int f32_avx512(uint64_t turns) {
    __m512 sums[N_CHAINS];
    for (__m512 & sum : sums) {
        sum = _mm512_set1_ps(sink);
    }
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
    for (uint64_t i = 0; i < turns; ++i) {
        for (int k = 0; k < N_CHAINS; ++k) {
            sums[k] = _mm512_fmadd_ps(sums[k], a, b);
        }
    }
    for (const __m512 sum : sums) {
        sink = _mm512_reduce_add_ps(sum);
    }
    return N_CHAINS * 16 * 2;
}

__attribute__((target("avx2,fma"))) int f32_avx2(uint64_t turns) {
    __m256 sums[N_CHAINS - 4]; // sixteen registers in all
    for (__m256 & sum : sums) {
        sum = _mm256_set1_ps(sink);
    }
    const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
    for (uint64_t i = 0; i < turns; ++i) {
        for (__m256 & sum : sums) {
            sum = _mm256_fmadd_ps(sum, a, b);
        }
    }
    for (const __m256 sum : sums) {
        sink = _mm256_cvtss_f32(sum);
    }
    return (N_CHAINS - 4) * 8 * 2;
}

__attribute__((target("avx512f,avx512bf16"))) int bf16_avx512(uint64_t turns) {
    __m512 sums[N_CHAINS];
    for (__m512 & sum : sums) {
        sum = _mm512_set1_ps(sink);
    }
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
    const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.125f), _mm512_set1_ps(0.75f));
    for (uint64_t i = 0; i < turns; ++i) {
        for (int k = 0; k < N_CHAINS; ++k) {
            sums[k] = _mm512_dpbf16_ps(sums[k], a, b);
        }
    }
    for (const __m512 sum : sums) {
        sink = _mm512_reduce_add_ps(sum);
    }
    return N_CHAINS * 32 * 2;
}

__attribute__((target("avx512f,avx512vnni"))) int int8_avx512(uint64_t turns) {
    __m512i sums[N_CHAINS];
    for (__m512i & sum : sums) {
        sum = _mm512_set1_epi32((int32_t) sink);
    }
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
    for (uint64_t i = 0; i < turns; ++i) {
        for (int k = 0; k < N_CHAINS; ++k) {
            sums[k] = _mm512_dpbusd_epi32(sums[k], a, b);
        }
    }
    for (const __m512i sum : sums) {
        sink = (float) _mm512_reduce_add_epi32(sum);
    }
    return N_CHAINS * 64 * 2;
}
#endif

int f32_plain(uint64_t turns) {
    float sums[N_CHAINS];
    for (float & sum : sums) {
        sum = sink;
    }
    for (uint64_t i = 0; i < turns; ++i) {
        for (float & sum : sums) {
            sum = sum * 0.999f + 0.001f;
        }
    }
    for (const float sum : sums) {
        sink = sum;
    }
    return N_CHAINS * 2;
}

int multiply(int32_t kind, uint64_t turns) {
#ifdef DGR_X86
    const bool avx512 = __builtin_cpu_supports("avx512f");
    switch (kind) {
        case DGR_ROOF_F32:
            if (avx512) {
                return f32_avx512(turns);
            }
            if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
                return f32_avx2(turns);
            }
            break;
        case DGR_ROOF_BF16: return avx512 && __builtin_cpu_supports("avx512bf16") ? bf16_avx512(turns) : 0;
        case DGR_ROOF_INT8: return avx512 && __builtin_cpu_supports("avx512vnni") ? int8_avx512(turns) : 0;
        default: break;
    }
#endif
    return kind == DGR_ROOF_F32 ? f32_plain(turns) : 0;
}

//
// the best of repeated runs
//

double now(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

// Runs `body(thread)` on every thread; seconds until the last is done, of one thread its CPU time.
template <class Body>
double seconds_of(int32_t n_threads, const Body & body) {
    const clockid_t clock = n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    const double began    = now(clock);
    std::vector<std::thread> others;
    for (int32_t t = 1; t < n_threads; ++t) {
        others.emplace_back([&body, t] { body(t); });
    }
    body(0);
    for (std::thread & other : others) {
        other.join();
    }
    return now(clock) - began;
}

// `amount`: what one run does, known after the first.
template <class Body>
double best_rate(int32_t n_threads, double seconds, const double & amount, const Body & body) {
    const double end = now(CLOCK_MONOTONIC) + seconds;
    double best      = 0.0;
    do {
        const double took = seconds_of(n_threads, body);
        best              = std::max(best, amount / took);
    } while (now(CLOCK_MONOTONIC) < end);
    return best;
}

double memory_rate(int32_t kind, int32_t n_threads, double seconds, uint64_t n_bytes) {
    const size_t n_arrays = kind == DGR_ROOF_TRIAD ? 3 : 1;
    const size_t share    = n_bytes / n_threads / n_arrays / LINE * LINE;
    if (share == 0) {
        refuse("n_bytes is %llu, too few for %d threads", (unsigned long long) n_bytes, n_threads);
    }
    std::vector<std::vector<float>> held(n_threads * n_arrays);
    seconds_of(n_threads, [&](int32_t t) { // whose memory it is, touches it first
        for (size_t k = 0; k < n_arrays; ++k) {
            held[t * n_arrays + k].assign(share / sizeof(float), 1.0f);
        }
    });
    const double amount = (double) share * n_arrays * n_threads;
    return best_rate(n_threads, seconds, amount, [&](int32_t t) {
        std::vector<float> * mine = held.data() + t * n_arrays;
        if (kind == DGR_ROOF_TRIAD) {
            triad(mine[0].data(), mine[1].data(), mine[2].data(), mine[0].size());
        } else {
            sink = (float) read((const uint64_t *) mine[0].data(), share / sizeof(uint64_t));
        }
    });
}

double product_rate(int32_t kind, int32_t n_threads, double seconds) {
    const double amount = (double) multiply(kind, 1) * TURNS * n_threads;
    return amount == 0.0 ? 0.0 : best_rate(n_threads, seconds, amount, [&](int32_t) { multiply(kind, TURNS); });
}

} // namespace

} // namespace dgr

int32_t dgr_probe_roof(int32_t kind, int32_t n_threads, double seconds, uint64_t n_bytes, double * out) {
    return dgr::guarded([&] {
        dgr::require("out", out);
        if (kind < DGR_ROOF_READ || kind > DGR_ROOF_INT8) {
            dgr::refuse("kind is %d, must be in %d..%d", kind, DGR_ROOF_READ, DGR_ROOF_INT8);
        }
        if (n_threads < 1 || n_threads > dgr::available_cpus() || !(seconds >= 0.0 && seconds <= 3600.0)) {
            dgr::refuse("n_threads is %d and seconds %g, must be in 1..%d and 0..3600", n_threads, seconds,
                dgr::available_cpus());
        }
        const bool memory = kind <= DGR_ROOF_TRIAD;
        *out =
            memory ? dgr::memory_rate(kind, n_threads, seconds, n_bytes) : dgr::product_rate(kind, n_threads, seconds);
    });
}
