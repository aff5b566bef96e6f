// The kernels of exact numerics by themselves: a column's bits do not depend on what it is computed with; sums are as good as
// upstream's; and both checks find a sum in another order, or a bad one.
#include "kernels.h"

#include <algorithm>
#include <string>

using namespace kernels;

namespace {

// What stands in for a kernel on purpose: one column of a batch summed in another order.
bool reorder_one = false;

int failures = 0;

void report(bool good, const std::string & what) {
    if (!good) {
        ++failures;
        printf("FAILED: %s\n", what.c_str());
    }
}

bool same(const float * a, const float * b, int64_t n) {
    return memcmp(a, b, n * sizeof(float)) == 0;
}

// --- invariance -------------------------------------------------------------------------------------------------------

// Some of 1 ... 67, with the counts at which a kernel of ours or upstream's changes its course.
const int64_t COUNTS[]      = { 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 63, 64, 65, 67 };
constexpr int64_t N_COLUMNS = 67;

// Which cells each token sees: of some few, of others all, of each at least one.
std::vector<uint8_t> drawn_cells(int64_t cells, randoms & r) {
    std::vector<uint8_t> seen(N_COLUMNS * cells);
    for (int64_t j = 0; j < N_COLUMNS; ++j) {
        const int64_t density = r.between(1, 4);
        for (int64_t c = 0; c < cells; ++c) {
            seen[j * cells + c] = r.below(4) < density;
        }
        seen[j * cells + r.below(cells)] = 1;
    }
    return seen;
}

template <typename T>
std::vector<T> pick(const std::vector<T> & rows, int64_t size, const ints & which, int64_t n) {
    std::vector<T> out(n * size);
    for (int64_t j = 0; j < n; ++j) {
        std::copy_n(rows.begin() + which[j] * size, size, out.begin() + j * size);
    }
    return out;
}

// Whether every column of a batch is itself computed alone.
bool products_agree(const weights & w, randoms & r) {
    const floats columns = r.values(N_COLUMNS * w.k);
    floats alone;
    for (int64_t j = 0; j < N_COLUMNS; ++j) {
        const floats column = mul_mat({}, w, { columns.begin() + j * w.k, columns.begin() + (j + 1) * w.k });
        alone.insert(alone.end(), column.begin(), column.end());
    }
    const auto agree = [&](side s, int64_t n, layout l) {
        const ints order = r.order(N_COLUMNS);
        floats found     = mul_mat(s, w, pick(columns, w.k, order, n), l);
        if (reorder_one && n > 1) {
            const floats column = mul_mat(s, w.reordered(), w.reordered(pick(columns, w.k, order, 1)));
            std::copy(column.begin(), column.end(), found.begin());
        }
        bool good = true;
        for (int64_t j = 0; j < n; ++j) {
            good &= same(found.data() + j * w.m, alone.data() + order[j] * w.m, w.m);
        }
        return good;
    };
    for (const int64_t n : COUNTS) {
        if (!agree({ true, 1 }, n, {}) || !agree({ true, 2 }, n, { r.below(3) * 32, 1 })) {
            return false;
        }
    }
    return agree({ true, 1 }, 60, { 64, 4 }) && agree({ true, 2 }, 66, { 0, 3 });
}

bool experts_agree(const weights & w, randoms & r) {
    const int64_t used  = std::min<int64_t>(w.experts, 3);
    const floats tokens = r.values(N_COLUMNS * w.k);
    ints ids;
    for (int64_t j = 0; j < N_COLUMNS; ++j) {
        const ints order = r.order(w.experts);
        ids.insert(ids.end(), order.begin(), order.begin() + used);
    }
    floats alone;
    for (int64_t j = 0; j < N_COLUMNS; ++j) {
        const floats one = mul_mat_id({}, w, { tokens.begin() + j * w.k, tokens.begin() + (j + 1) * w.k },
            { ids.begin() + j * used, ids.begin() + (j + 1) * used });
        alone.insert(alone.end(), one.begin(), one.end());
    }
    for (const int64_t n : COUNTS) {
        const ints order = r.order(N_COLUMNS);
        ints chosen;
        for (int64_t j = 0; j < n; ++j) {
            chosen.insert(chosen.end(), ids.begin() + order[j] * used, ids.begin() + (order[j] + 1) * used);
        }
        const side s = { true, 1 + (int) (n % 2) };
        floats found = mul_mat_id(s, w, pick(tokens, w.k, order, n), chosen);
        if (reorder_one && n > 1) {
            const floats one = mul_mat_id(
                s, w.reordered(), w.reordered(pick(tokens, w.k, order, 1)), { chosen.begin(), chosen.begin() + used });
            std::copy(one.begin(), one.end(), found.begin());
        }
        for (int64_t j = 0; j < n; ++j) {
            if (!same(found.data() + j * used * w.m, alone.data() + order[j] * used * w.m, used * w.m)) {
                return false;
            }
        }
    }
    return true;
}

bool attention_agrees(const attention & a, randoms & r) {
    const int64_t row               = a.heads * a.dim;
    const floats q                  = r.values(N_COLUMNS * row);
    const std::vector<uint8_t> seen = drawn_cells(a.cells, r);
    const auto mask                 = [&](const ints & which, int64_t n) { return pick(seen, a.cells, which, n); };
    floats alone;
    for (int32_t j = 0; j < N_COLUMNS; ++j) {
        const floats one = a.run({}, pick(q, row, { j }, 1), mask({ j }, 1));
        alone.insert(alone.end(), one.begin(), one.end());
    }
    for (const int64_t n : COUNTS) {
        const ints order = r.order(N_COLUMNS);
        const side s     = { true, 1 + (int) (n % 3) };
        floats found     = a.run(s, pick(q, row, order, n), mask(order, n));
        if (reorder_one && n > 1) {
            // the cells in reverse
            attention other        = a;
            std::vector<uint8_t> m = mask(order, 1);
            std::reverse(m.begin(), m.end());
            for (int64_t c = 0; c < a.cells; ++c) {
                std::copy_n(a.k.begin() + c * a.dim, a.dim, other.k.end() - (c + 1) * a.dim);
            }
            const floats one = other.run(s, pick(q, row, order, 1), m);
            std::copy(one.begin(), one.end(), found.begin());
        }
        for (int64_t j = 0; j < n; ++j) {
            if (!same(found.data() + j * row, alone.data() + order[j] * row, row)) {
                return false;
            }
        }
    }
    // cells that no token sees, anywhere between the others, change nothing
    attention wider = a;
    wider.cells     = a.cells + r.between(1, 300);
    wider.k         = r.values(wider.cells * a.dim);
    std::vector<uint8_t> m(wider.cells, 0);
    ints places = r.order(wider.cells);
    std::sort(places.begin(), places.begin() + a.cells);
    for (int64_t c = 0; c < a.cells; ++c) {
        m[places[c]] = seen[c];
        std::copy_n(a.k.begin() + c * a.dim, a.dim, wider.k.begin() + places[c] * a.dim);
    }
    const floats one = wider.run({}, pick(q, row, { 0 }, 1), m);
    return same(one.data(), alone.data(), row);
}

// Rows of a result that a token computes by itself, against those of batches; `reordered` is the mutant.
template <typename F, typename G>
bool tokens_agree(int64_t row, randoms & r, const F & run, const G & reordered) {
    floats alone;
    for (int32_t j = 0; j < N_COLUMNS; ++j) {
        const floats one = run(side{}, ints{ j }, 1);
        alone.insert(alone.end(), one.begin(), one.end());
    }
    for (const int64_t n : COUNTS) {
        const ints order = r.order(N_COLUMNS);
        const side s     = { true, 1 + (int) (n % 3) };
        floats found     = run(s, order, n);
        if (reorder_one && n > 1) {
            const floats one = reordered(s, order);
            std::copy(one.begin(), one.end(), found.begin());
        }
        for (int64_t j = 0; j < n; ++j) {
            if (!same(found.data() + j * row, alone.data() + order[j] * row, row)) {
                return false;
            }
        }
    }
    return true;
}

bool indexer_agrees(const indexer & x, randoms & r) {
    const int64_t size = x.heads * x.dim;
    const floats q = r.values(N_COLUMNS * size), w = r.values(N_COLUMNS * x.heads);
    const std::vector<uint8_t> seen = drawn_cells(x.cells, r);
    const auto run                  = [&](side s, const ints & which, int64_t n) {
        return x.run(s, pick(q, size, which, n), pick(w, x.heads, which, n), pick(seen, x.cells, which, n));
    };
    const auto reordered = [&](side s, const ints & which) { // the heads in reverse
        floats rq, rw;
        for (int64_t h = x.heads - 1; h >= 0; --h) {
            const floats::const_iterator head = q.begin() + which[0] * size + h * x.dim;
            rq.insert(rq.end(), head, head + x.dim);
            rw.push_back(w[which[0] * x.heads + h]);
        }
        return x.run(s, rq, rw, pick(seen, x.cells, which, 1));
    };
    if (!tokens_agree(x.cells, r, run, reordered)) {
        return false;
    }
    // fewer cells, and other ones where none is seen, change nothing
    indexer other = x;
    other.cells   = x.cells - r.between(1, x.cells / 2);
    other.k.resize(other.cells * x.dim);
    std::vector<uint8_t> part(seen.begin(), seen.begin() + other.cells);
    for (int64_t c = 0; c < other.cells; ++c) {
        if (!part[c]) {
            std::fill_n(other.k.begin() + c * x.dim, x.dim, x.type == GGML_TYPE_Q8_0 ? 1.0f : NAN);
        }
    }
    const floats whole = run({}, { 0 }, 1),
                 less  = other.run({}, pick(q, size, { 0 }, 1), pick(w, x.heads, { 0 }, 1), part);
    return same(whole.data(), less.data(), other.cells);
}

bool streams_agree(int64_t width, bool mixed, randoms & r) {
    const int64_t streams = 4;
    const floats x = r.values(N_COLUMNS * width), residual = r.values(N_COLUMNS * streams * width),
                 post = r.values(N_COLUMNS * streams), comb = r.values(mixed ? N_COLUMNS * streams * streams : 0);
    const auto run = [&](side s, const ints & which, int64_t n) {
        return hc_post(s, streams, pick(x, width, which, n), pick(residual, streams * width, which, n),
            pick(post, streams, which, n), mixed ? pick(comb, streams * streams, which, n) : floats());
    };
    const auto reordered = [&](side s, const ints & which) { // the last stream first
        floats rs = pick(residual, streams * width, which, 1), p = pick(post, streams, which, 1), c;
        if (mixed) {
            c = pick(comb, streams * streams, which, 1);
            std::rotate(c.begin(), c.end() - streams, c.end());
        }
        std::rotate(rs.begin(), rs.end() - width, rs.end());
        return hc_post(s, streams, pick(x, width, which, 1), rs, p, c);
    };
    return tokens_agree(streams * width, r, run, reordered);
}

// --- accuracy ---------------------------------------------------------------------------------------------------------

double nmse(const floats & found, const std::vector<double> & truth) {
    double error = 0.0, power = 0.0;
    for (size_t i = 0; i < truth.size(); ++i) {
        error += (found[i] - truth[i]) * (found[i] - truth[i]);
        power += truth[i] * truth[i];
    }
    return error / power;
}

// The columns as the products see them: rounded to the type that goes with the weights'.
floats as_seen(ggml_type type, const floats & columns, int64_t k) {
    const ggml_type seen = ggml_get_type_traits_cpu(type)->vec_dot_type;
    if (seen == GGML_TYPE_F32) {
        return columns;
    }
    bytes data(ggml_row_size(seen, columns.size()));
    for (size_t at = 0; at < columns.size(); at += k) {
        ggml_get_type_traits_cpu(seen)->from_float(columns.data() + at, data.data() + ggml_row_size(seen, at), k);
    }
    if (ggml_get_type_traits(seen)->to_float) {
        return dequantised(seen, data, columns.size());
    }
    // Q8_K, Q8_1: four bytes that begin with the scale, integers, for Q8_K sums of them
    const int64_t size = ggml_type_size(seen), n = ggml_blck_size(seen);
    floats values;
    for (const uint8_t * p = data.data(); p < data.data() + data.size(); p += size) {
        float d;
        ggml_fp16_t h;
        memcpy(&d, p, sizeof(d));
        memcpy(&h, p, sizeof(h));
        for (int64_t i = 0; i < n; ++i) {
            values.push_back((seen == GGML_TYPE_Q8_1 ? ggml_fp16_to_fp32(h) : d) * (float) (int8_t) p[4 + i]);
        }
    }
    return values;
}

// How far sums are off the true ones of the same rounded numbers: (exact, the worst of upstream's own kernels).
struct errors {
    double exact, upstream;
};

errors product_errors(const weights & w, int64_t n, randoms & r) {
    const floats columns = r.values(n * w.k), a = dequantised(w.type, w.data, w.m * w.k),
                 b = as_seen(w.type, columns, w.k);
    std::vector<double> truth(n * w.m);
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < w.m; ++i) {
            for (int64_t l = 0; l < w.k; ++l) {
                truth[j * w.m + i] += (double) a[i * w.k + l] * b[j * w.k + l];
            }
        }
    }
    floats one_by_one;
    for (int64_t j = 0; j < n; ++j) {
        const floats column = mul_mat({ false }, w, { columns.begin() + j * w.k, columns.begin() + (j + 1) * w.k });
        one_by_one.insert(one_by_one.end(), column.begin(), column.end());
    }
    const floats repacked = mul_mat({ false, 1, true }, w, columns);
    double upstream       = std::max(nmse(one_by_one, truth), nmse(mul_mat({ false }, w, columns), truth));
    if (!repacked.empty()) {
        upstream = std::max(upstream, nmse(repacked, truth));
    }
    return { nmse(mul_mat({ true }, w, columns), truth), upstream };
}

errors attention_errors(const attention & a, int64_t n, randoms & r) {
    const floats q = r.values(n * a.heads * a.dim),
                 k = dequantised(a.type, quantised(a.type, a.k, a.dim), a.cells * a.dim);
    std::vector<uint8_t> seen(n * a.cells);
    for (uint8_t & s : seen) {
        s = r.below(2);
    }
    std::vector<double> truth(n * a.heads * a.dim);
    for (int64_t row = 0; row < n * a.heads; ++row) {
        std::vector<double> p(a.cells);
        double max = a.sinks[row % a.heads], sum = 0.0;
        for (int64_t c = 0; c < a.cells; ++c) {
            for (int64_t i = 0; i < a.dim; ++i) {
                p[c] += (double) q[row * a.dim + i] * k[c * a.dim + i] / std::sqrt((double) a.dim);
            }
            max = seen[row / a.heads * a.cells + c] ? std::max(max, p[c]) : max;
        }
        for (int64_t c = 0; c < a.cells; ++c) {
            p[c] = seen[row / a.heads * a.cells + c] ? std::exp(p[c] - max) : 0.0;
            sum += p[c];
        }
        sum += std::exp(a.sinks[row % a.heads] - max);
        for (int64_t c = 0; c < a.cells; ++c) {
            for (int64_t i = 0; i < a.dim; ++i) {
                truth[row * a.dim + i] += p[c] / sum * k[c * a.dim + i];
            }
        }
    }
    return { nmse(a.run({ true }, q, seen), truth), nmse(a.run({ false }, q, seen), truth) };
}

errors indexer_errors(const indexer & x, int64_t n, randoms & r) {
    const floats q = r.values(n * x.heads * x.dim), w = r.values(n * x.heads),
                 k = dequantised(x.type, quantised(x.type, x.k, x.dim), x.cells * x.dim);
    const std::vector<uint8_t> seen(n * x.cells, 1);
    std::vector<double> truth(n * x.cells);
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t c = 0; c < x.cells; ++c) {
            for (int64_t h = 0; h < x.heads; ++h) {
                double product = 0.0;
                for (int64_t i = 0; i < x.dim; ++i) {
                    product += (double) q[(j * x.heads + h) * x.dim + i] * k[c * x.dim + i];
                }
                truth[j * x.cells + c] += std::max(product, 0.0) * w[j * x.heads + h];
            }
        }
    }
    return { nmse(x.run({ true }, q, w, seen), truth), nmse(x.run({ false }, q, w, seen), truth) };
}

errors streams_errors(int64_t width, int64_t n, randoms & r) {
    const int64_t streams = 4;
    const floats x = r.values(n * width), residual = r.values(n * streams * width), post = r.values(n * streams),
                 comb = r.values(n * streams * streams);
    std::vector<double> truth;
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t to = 0; to < streams; ++to) {
            for (int64_t i = 0; i < width; ++i) {
                double sum = (double) x[j * width + i] * post[j * streams + to];
                for (int64_t from = 0; from < streams; ++from) {
                    sum +=
                        (double) residual[(j * streams + from) * width + i] * comb[(j * streams + from) * streams + to];
                }
                truth.push_back(sum);
            }
        }
    }
    return { nmse(hc_post({ true }, streams, x, residual, post, comb), truth),
        nmse(hc_post({ false }, streams, x, residual, post, comb), truth) };
}

// --- the checks -------------------------------------------------------------------------------------------------------

// Types of published V4 files first, then every other that has a kernel or goes without.
const ggml_type TYPES[] = {
    GGML_TYPE_F32,
    GGML_TYPE_F16,
    GGML_TYPE_BF16,
    GGML_TYPE_Q8_0,
    GGML_TYPE_MXFP4,
    GGML_TYPE_Q4_K,
    GGML_TYPE_Q2_K,
    GGML_TYPE_Q6_K,
    GGML_TYPE_IQ2_XXS,
    GGML_TYPE_Q3_K,
    GGML_TYPE_Q5_K,
    GGML_TYPE_Q4_0,
    GGML_TYPE_Q4_1,
    GGML_TYPE_Q5_0,
    GGML_TYPE_Q5_1,
    GGML_TYPE_IQ4_NL,
    GGML_TYPE_IQ4_XS,
    GGML_TYPE_IQ3_XXS,
    GGML_TYPE_IQ3_S,
    GGML_TYPE_IQ2_XS,
    GGML_TYPE_IQ2_S,
    GGML_TYPE_IQ1_S,
    GGML_TYPE_IQ1_M,
};
const ggml_type K_TYPES[] = { GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0 };

// In few rows of few products another order may round alike.
int64_t some_rows(randoms & r) {
    return r.between(1, 70) + (reorder_one ? 16 : 0);
}

// Float types take every k; reordering needs three units.
int64_t some_k(ggml_type type, randoms & r) {
    const int64_t block = ggml_blck_size(type), unit = std::max<int64_t>(block, 64);
    return unit * (r.between(3, block == 256 ? 5 : 9) + (reorder_one ? 24 : 0)) + (block == 1 ? r.below(64) : 0);
}

bool invariant(ggml_type type, const char * op, int trial) {
    randoms r = { (uint64_t) type * 1000 + (uint64_t) trial + (strcmp(op, "mul_mat") ? 500 : 0) };
    if (!strcmp(op, "mul_mat")) {
        const int64_t k = some_k(type, r);
        return products_agree(weights(type, some_rows(r), k, 1, r), r);
    }
    if (!strcmp(op, "mul_mat_id")) {
        const int64_t k = some_k(type, r);
        return experts_agree(weights(type, some_rows(r), k, r.between(2, 5), r), r);
    }
    if (!strcmp(op, "indexer")) {
        const int64_t dims[] = { 32, 64, 128 };
        return indexer_agrees(indexer(type, dims[r.below(3)], r.between(9, 64), r.between(65, 300), r), r);
    }
    if (!strcmp(op, "hc_post")) {
        return streams_agree(r.between(65, 700), trial == 0, r);
    }
    const int64_t dims[] = { 32, 64, 128, 512 };
    const int64_t dim = dims[r.below(4)], heads = r.between(1, dim == 512 ? 20 : 64);
    return attention_agrees(attention(type, dim, heads, r.between(65, 300), r), r);
}

// Whether another order of a sum can show: upstream's plain loop for BF16, which serves where no vector kernel does, sums
// doubles.
bool order_shows(ggml_type type) {
    return type != GGML_TYPE_BF16 || ggml_cpu_has_avx();
}

void check_invariance(const char * op, ggml_type type) {
    for (int trial = 0; trial < 2; ++trial) {
        const std::string name = std::string(op) + " " + ggml_type_name(type) + ", shape " + std::to_string(trial);
        reorder_one            = false;
        report(invariant(type, op, trial), name + ": bits depend on the batch");
        reorder_one = true;
        report(!order_shows(type) || !invariant(type, op, trial), name + ": a sum in another order is not found");
        reorder_one = false;
    }
}

// Rounding noise of one order against another's, from some thousand sums, wavers by this much.
constexpr double NOISE = 1.05;

void hold(const std::string & name, errors e) {
    printf("%-32s exact %.2e   upstream %.2e   %.2f\n", name.c_str(), e.exact, e.upstream, e.exact / e.upstream);
    report(e.exact <= NOISE * e.upstream, name + ": sums are worse than upstream's");
}

void check_accuracy() {
    randoms streams = { 1 };
    hold("hc_post", streams_errors(4096, 8, streams));
    for (const ggml_type type : TYPES) {
        for (const int64_t k : { 512, 4096 }) {
            randoms r = { (uint64_t) type };
            const weights w(type, 96, k, 1, r);
            hold(std::string(ggml_type_name(type)) + " k " + std::to_string(k), product_errors(w, 24, r));
        }
    }
    for (const ggml_type type : K_TYPES) {
        for (const int64_t dim : { 64, 128 }) {
            randoms r = { (uint64_t) type };
            const indexer x(type, dim, 64, 700, r);
            hold(std::string("indexer ") + ggml_type_name(type) + " dim " + std::to_string(dim),
                indexer_errors(x, 8, r));
        }
        for (const int64_t dim : { 64, 128, 512 }) {
            for (const int64_t n : { 1, 64 }) {
                randoms r = { (uint64_t) type };
                const attention a(type, dim, 8, 700, r);
                hold(std::string("attention ") + ggml_type_name(type) + " dim " + std::to_string(dim) + " n " +
                        std::to_string(n),
                    attention_errors(a, n, r));
            }
        }
    }
}

} // namespace

// With an argument only invariance: upstream's own reference kernels are worse than its tiled ones. With a name behind it
// only that: the products of a type of weights, attention, indexer, or hc_post.
int main(int argc, char ** argv) {
    const auto wanted = [=](const char * name) { return argc < 3 || !strcmp(argv[2], name); };
    for (const ggml_type type : TYPES) {
        if (wanted(ggml_type_name(type))) {
            check_invariance("mul_mat", type);
            check_invariance("mul_mat_id", type);
        }
    }
    for (const ggml_type type : K_TYPES) {
        for (const char * op : { "attention", "indexer" }) {
            if (wanted(op)) {
                check_invariance(op, type);
            }
        }
    }
    if (wanted("hc_post")) {
        check_invariance("hc_post", GGML_TYPE_F32);
    }
    if (argc < 2) {
        check_accuracy();
    }
    printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures != 0;
}
