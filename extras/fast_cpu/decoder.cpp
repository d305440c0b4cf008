// A dense decoder (Qwen2, Qwen3, Llama) in float32 over SGLang's paged KV cache, and the sampling of tokens.
//
// compiler.py compiles it, decoder.py calls it, on one thread.
// A row is one token of one request. Its bits depend only on its own tokens: each of its sums runs over that
// row, in an order that depends only on the sum's length. So they are the same whatever the batch, in prefill
// and decode, whatever was cached, and however many steps a call takes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

typedef int64_t i64;
// WIDTH: floats per register; compilers pass wider vectors through memory, some thirty times slower.
// PART: floats per vector in a sum of eight lanes.
// TILE: rows that are multiplied at once: as many as have registers for their sums.
#if defined(__AVX512F__)
static const int WIDTH = 16, PART = 8, TILE = 12;
#elif defined(__AVX2__)
static const int WIDTH = 8, PART = 8, TILE = 3;
#elif defined(__aarch64__)
static const int WIDTH = 4, PART = 4, TILE = 6;
#else
static const int WIDTH = 4, PART = 4, TILE = 3;
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef float part __attribute__((vector_size(4 * PART), aligned(4)));
typedef int32_t places __attribute__((vector_size(4 * PART)));
struct Eight {  // eight lanes of a sum, added in the same order on every processor
    part at[8 / PART];
};
static const int PANEL = 32;   // columns of a matrix that are stored together, see `pack` in decoder.py
static const int DEPTH = 128;  // terms of a sum that are added before they join the rest: this rounds less
static const int BLOCK = 192;  // rows that go through a layer together, so that they stay in the cache
static const int STOPS = 8;    // most tokens that can end an answer
static const int SUMS = PANEL / WIDTH < 4 ? PANEL / WIDTH : 4;  // vectors side by side in a tile

struct Layer {  // addresses; null if a family lacks the weight
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *mlp_norm, *gate_up, *down;
    float *k_cache, *v_cache;  // [slots, kv_heads, dim]
};

struct Model {
    i64 layers, hidden, heads, kv_heads, dim, inter, vocab, table_width;
    const double *eps;  // the norms' epsilon
    const float *embedding, *norm, *cos_sin, *head;  // cos_sin [positions, dim]: half cosines, half sines
    const int32_t *table;  // [requests, table_width]: position -> slot of the KV cache
    const Layer *layer;
};

struct Request {                // an argument of `decode`
    i64 last, position, index;  // the newest token, not in the cache yet; its row of the table
    i64 seed, greedy, left;     // left: most tokens to come
    i64 stops[STOPS];
};

static inline vec load(const float *from) { return *(const vec *)from; }
static inline void store(float *to, vec x) { *(vec *)to = x; }
static inline Eight load8(const float *from) { return *(const Eight *)from; }
static inline void store(float *to, Eight x) { *(Eight *)to = x; }
static inline void operator+=(Eight &sum, Eight x) {
    for (int i = 0; i < 8 / PART; i++) sum.at[i] += x.at[i];
}
static inline Eight operator*(Eight a, Eight b) {
    for (int i = 0; i < 8 / PART; i++) a.at[i] *= b.at[i];
    return a;
}
static inline Eight operator*(Eight a, float factor) {
    for (int i = 0; i < 8 / PART; i++) a.at[i] *= factor;
    return a;
}

static inline vec exponential(vec x) {  // Cephes' polynomial, within 2 ulp; x is clamped to -87 ... 88
    x = x < -87.f ? vec{} - 87.f : x > 88.f ? vec{} + 88.f : x;
    vec shifted = x * 1.44269504088896341f + 12582912.f;  // 1.5 * 2^23: n = x / log(2) is in the last bits
    vec n = shifted - 12582912.f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = (r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f;
    p = ((p * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    return p * (vec)(((uvec)shifted << 23) + 0x3f800000u);  // times 2^n
}

#ifdef __clang__
#define PICK(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // g++ has the former only since 12
#define PICK(...) __builtin_shuffle(a, b, places{__VA_ARGS__})
#endif
#ifdef __AVX2__
static part add_pairs(part a, part b) { return PICK(0, 8, 2, 10, 4, 12, 6, 14) + PICK(1, 9, 3, 11, 5, 13, 7, 15); }
static part add_twos(part a, part b) { return PICK(0, 1, 8, 9, 4, 5, 12, 13) + PICK(2, 3, 10, 11, 6, 7, 14, 15); }
static part add_fours(part a, part b) { return PICK(0, 1, 2, 3, 8, 9, 10, 11) + PICK(4, 5, 6, 7, 12, 13, 14, 15); }
#else
static part add_pairs(part a, part b) { return PICK(0, 4, 2, 6) + PICK(1, 5, 3, 7); }
static part add_twos(part a, part b) { return PICK(0, 1, 4, 5) + PICK(2, 3, 6, 7); }
#endif
static part add_up(const Eight *x, int i) {  // sums of four lanes each, in part i of x[0] ... x[3]
    return add_twos(add_pairs(x[0].at[i], x[1].at[i]), add_pairs(x[2].at[i], x[3].at[i]));
}
static Eight totals(const Eight *x) {  // the total of each of x[0] ... x[7]
#ifdef __AVX2__
    return {add_fours(add_up(x, 0), add_up(x + 4, 0))};
#else
    return {add_up(x, 0) + add_up(x, 1), add_up(x + 4, 0) + add_up(x + 4, 1)};
#endif
}
static float total(Eight x) {  // added in the order of `totals`
    const float *f = (const float *)&x;
    return ((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]));
}

// y [R, cols] (+)= x [R, depth] @ w [depth, PANEL]; k and n: strides of rows in x and y
template <int R>
static void multiply(const float *x, i64 k, int depth, const float *w, float *y, i64 n, int cols, bool add) {
    for (int c = 0; c < cols; c += SUMS * WIDTH) {
        vec sums[R][SUMS] = {};
        for (int i = 0; i < depth; i++) {
            vec columns[SUMS];
            for (int v = 0; v < SUMS; v++) columns[v] = load(w + i * PANEL + c + v * WIDTH);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < SUMS; v++) sums[r][v] += x[r * k + i] * columns[v];
        }
        const int count = std::min(cols - c, SUMS * WIDTH);
        for (int r = 0; r < R; r++) {
            float edge[PANEL] = {}, *from = y + r * n + c, *to = count == SUMS * WIDTH ? from : edge;
            if (to == edge) memcpy(edge, from, count * sizeof(float));
            for (int v = 0; v < SUMS; v++) {
                float *at = to + v * WIDTH;
                store(at, add ? load(at) + sums[r][v] : sums[r][v]);
            }
            if (to == edge) memcpy(from, edge, count * sizeof(float));
        }
    }
}

template <int R, class... Others>
static void multiply_rows(int rows, Others... others) {
    if (rows == R) return multiply<R>(others...);
    if constexpr (R > 1) multiply_rows<R - 1>(rows, others...);
}

// y [rows, n] (+)= x [rows, k] @ w, packed. Each sum adds DEPTH terms at a time, whatever the rows.
static void matmul(const float *x, i64 rows, i64 k, const float *w, i64 n, float *y, bool add) {
    for (i64 j = 0; j < n; j += PANEL)
        for (i64 i = 0; i < k; i += DEPTH)  // this part of a panel stays in the nearest cache for all rows
            for (i64 r = 0; r < rows; r += TILE) {
                int count = std::min<i64>(TILE, rows - r), depth = std::min<i64>(DEPTH, k - i);
                int cols = std::min<i64>(PANEL, n - j);
                multiply_rows<TILE>(count, x + r * k + i, k, depth, w + j * k + i * PANEL, y + r * n + j, n,
                                    cols, add || i > 0);
            }
}

static void rms_norm(const float *x, const float *scale, i64 n, float eps, float *y) {
    Eight sum = {};
    for (i64 i = 0; i < n; i += 8) sum += load8(x + i) * load8(x + i);
    float inverse = 1.f / sqrtf(total(sum) / n + eps);
    for (i64 i = 0; i < n; i++) y[i] = x[i] * inverse * scale[i];
}

static void rotate(float *x, const float *cos_sin, i64 half) {
    for (i64 i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cosine = cos_sin[i], sine = cos_sin[i + half];
        x[i] = a * cosine - b * sine;
        x[i + half] = b * cosine + a * sine;
    }
}

static void silu_and_multiply(const float *gate, const float *up, i64 n, float *out) {
    for (i64 i = 0; i < n; i += WIDTH) {
        i64 at = std::min(i, n - WIDTH);  // the last vector overlaps the one before
        vec x = load(gate + at);
        store(out + at, x / (1.f + exponential(-x)) * load(up + at));
    }
}

// Turn scores [length], with room for a multiple of 16, into weights: softmax except for the returned factor
static float softmax(float *scores, i64 length) {
    const float most = *std::max_element(scores, scores + length);
    vec sums[16 / WIDTH] = {};
    for (i64 j = 0; j < length; j += 16) {
        for (i64 c = length; c < j + 16; c++) scores[c] = -INFINITY;
        for (int v = 0; v < 16 / WIDTH; v++) {
            float *at = scores + j + v * WIDTH;
            vec weights = exponential(load(at) - most);
            store(at, weights);
            sums[v] += weights;
        }
    }
    float lanes[16];
    for (int v = 0; v < 16 / WIDTH; v++) store(lanes + v * WIDTH, sums[v]);
    Eight sum = load8(lanes);
    sum += load8(lanes + 8);
    return 1.f / total(sum);
}

// Attend from a query [heads, dim] to the first `length` tokens of its request, eight keys at a time
template <int D>  // dim, or 0 for any multiple of 8
static void attend(const Model &m, const Layer &l, const float *query, const int32_t *slots, i64 length,
                   float *out) {
    static std::vector<float> space;
    const i64 dim = D ? D : m.dim, width = m.kv_heads * dim, group = m.heads / m.kv_heads;
    const i64 padded = (length + 15) / 16 * 16;
    const float scale = 1 / sqrt((double)dim);
    space.resize(m.heads * padded);
    for (i64 j = 0; j < length; j += 8) {
        const float *keys[8];  // past the end, repeats the last one; `softmax` drops its scores
        for (int i = 0; i < 8; i++) keys[i] = l.k_cache + slots[std::min(j + i, length - 1)] * width;
        for (i64 h = 0; h < m.heads; h++) {
            Eight products[8] = {};
            for (i64 d = 0; d < dim; d += 8) {
                Eight q = load8(query + h * dim + d);
                for (int i = 0; i < 8; i++) products[i] += q * load8(keys[i] + h / group * dim + d);
            }
            store(&space[h * padded + j], totals(products) * scale);
        }
    }
    for (i64 h = 0; h < m.heads; h++) {
        float *weights = &space[h * padded];
        const float factor = softmax(weights, length);
        const int PARTS = D ? D / 8 : 1;  // vectors of a value that are summed at once
        for (i64 d = 0; d < dim; d += 8 * PARTS) {
            Eight sums[PARTS] = {};
            const float *values = l.v_cache + h / group * dim + d;
            for (i64 j = 0; j < length; j++)
                for (int i = 0; i < PARTS; i++)
                    sums[i] += load8(values + slots[j] * width + 8 * i) * weights[j];
            for (int i = 0; i < PARTS; i++) store(out + h * dim + d + 8 * i, sums[i] * factor);
        }
    }
}

// Run x [rows, hidden] through a layer. All rows' keys and values are cached before any row attends to them.
static void run_layer(const Model &m, const Layer &l, i64 rows, const i64 *positions,
                      const i64 *requests, float *x) {
    const i64 h = m.hidden, d = m.dim, q_size = m.heads * d, kv_size = m.kv_heads * d;
    auto attend_by = d == 24 ? attend<24> : d == 64 ? attend<64> : d == 128 ? attend<128> : attend<0>;
    const i64 width = q_size + 2 * kv_size;
    std::vector<float> normed(rows * std::max(h, m.inter)), qkv(rows * width), mixed(rows * q_size);
    std::vector<float> gates(rows * 2 * m.inter);
    for (i64 r = 0; r < rows; r++) {
        rms_norm(x + r * h, l.input_norm, h, *m.eps, &normed[r * h]);
        if (l.qkv_bias) memcpy(&qkv[r * width], l.qkv_bias, width * sizeof(float));
    }
    matmul(normed.data(), rows, h, l.qkv, width, qkv.data(), l.qkv_bias);
    for (i64 r = 0; r < rows; r++) {
        float *q = &qkv[r * width], *k = q + q_size, *v = k + kv_size;
        for (float *head = q; head < v; head += d) {
            const float *scale = head < k ? l.q_norm : l.k_norm;
            if (scale) rms_norm(head, scale, d, *m.eps, head);
            rotate(head, m.cos_sin + positions[r] * d, d / 2);
        }
        i64 slot = m.table[requests[r] * m.table_width + positions[r]];
        memcpy(l.k_cache + slot * kv_size, k, kv_size * sizeof(float));
        memcpy(l.v_cache + slot * kv_size, v, kv_size * sizeof(float));
    }
    for (i64 r = 0; r < rows; r++) {
        const int32_t *slots = m.table + requests[r] * m.table_width;
        attend_by(m, l, &qkv[r * width], slots, positions[r] + 1, &mixed[r * q_size]);
    }
    matmul(mixed.data(), rows, q_size, l.o, h, x, true);
    for (i64 r = 0; r < rows; r++) rms_norm(x + r * h, l.mlp_norm, h, *m.eps, &normed[r * h]);
    matmul(normed.data(), rows, h, l.gate_up, 2 * m.inter, gates.data(), false);
    for (i64 r = 0; r < rows; r++) {
        const float *gate = &gates[r * 2 * m.inter];
        silu_and_multiply(gate, gate + m.inter, m.inter, &normed[r * m.inter]);
    }
    matmul(normed.data(), rows, m.inter, l.down, h, x, true);
}

static uvec murmur(uint64_t seed, uint32_t position, uvec columns) {  // MurmurHash3_x86_32 of these 16 bytes
    uvec state = {};
    for (uvec word : {uvec{} + (uint32_t)seed, uvec{} + (uint32_t)(seed >> 32), uvec{} + position, columns}) {
        word *= 0xCC9E2D51u;
        state ^= ((word << 15) | (word >> 17)) * 0x1B873593u;
        state = ((state << 13) | (state >> 19)) * 5 + 0xE6546B64u;
    }
    state ^= 16;
    state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
    state = (state ^ (state >> 13)) * 0xC2B2AE35u;
    return state ^ (state >> 16);
}

// Return the token with the largest x + noise, x = scores / temperature; its logprob is softmax(x)'s. Noise
// is -log(-log(u)), u in [0, 1] from the hash of seed, position and token; greedy has none.
static i64 sample_row(const float *scores, i64 vocab, float temperature, bool greedy, i64 seed,
                          i64 position, float *logprob) {
    static std::vector<float> space;
    const i64 padded = (vocab + 15) / 16 * 16;
    space.resize(2 * padded);
    float *x = space.data(), *weights = x + padded;  // weights: exp(x - most)
    for (i64 c = 0; c < vocab; c++) x[c] = scores[c] / temperature;
    memcpy(weights, x, vocab * sizeof(float));
    i64 best = std::max_element(x, x + vocab) - x;
    const float factor = softmax(weights, vocab), most = x[best];
    double least = INFINITY;  // the largest has the least -log(u) / weight, at least (1 - u) / weight
    auto look_at = [&](i64 c, uint32_t hash) {
        double ratio = std::max(-log(hash / 4294967295.0), 1 / 4294967296.0) * exp((double)most - x[c]);
        if (ratio < least) best = c;
        least = std::min(ratio, least);
    };
    uvec columns;
    for (int i = 0; i < WIDTH; i++) columns[i] = i;
    if (!greedy) look_at(best, murmur(seed, position, uvec{} + (uint32_t)best)[0]);
    for (i64 c = 0; c < padded && !greedy; c += WIDTH, columns += WIDTH) {
        uvec hash = murmur(seed, position, columns);
        // 0.999 keeps it below 1 - u, and so below -log(u), despite rounding: no winner is missed
        vec bound = __builtin_convertvector(~hash, vec) * (0.999f / 4294967296.f);
        uvec may_win = (uvec)(bound < load(weights + c) * (float)least);
        for (int i = 0; i < WIDTH; i++)
            if (may_win[i] && c + i < vocab) look_at(c + i, hash[i]);
    }
    *logprob = x[best] - most + logf(factor);
    return best;
}

// token, position and request of each row -> hidden [rows, hidden], after the last norm
extern "C" void forward(const Model *model, i64 rows, const i64 *ids, const i64 *positions,
                        const i64 *requests, float *hidden) {
    const Model &m = *model;
    const i64 h = m.hidden;
    for (i64 r = 0; r < rows; r++) memcpy(hidden + r * h, m.embedding + ids[r] * h, h * sizeof(float));
    for (i64 i = 0; i < m.layers; i++)
        for (i64 r = 0; r < rows; r += BLOCK) {
            i64 count = std::min<i64>(BLOCK, rows - r);
            run_layer(m, m.layer[i], count, positions + r, requests + r, hidden + r * h);
        }
    for (i64 r = 0; r < rows; r++) rms_norm(hidden + r * h, m.norm, h, *m.eps, hidden + r * h);
}

// hidden [rows, hidden] -> scores [rows, vocab]
extern "C" void logits(const Model *m, i64 rows, const float *hidden, float *scores) {
    matmul(hidden, rows, m->hidden, m->head, m->vocab, scores, false);
}

// scores [rows, vocab] -> a token per row, and its log-probability
extern "C" void sample(i64 rows, i64 vocab, const float *scores, const float *temperature, const i64 *greedy,
                       const i64 *seed, const i64 *position, i64 *token, float *logprob) {
    for (i64 r = 0; r < rows; r++, scores += vocab)
        token[r] = sample_row(scores, vocab, temperature[r], greedy[r], seed[r], position[r], &logprob[r]);
}

// Write up to `steps` tokens of each request, which leaves when it ends: tokens and logprobs [count, steps],
// and how many. No step begins after limit_ms of CPU time.
extern "C" void decode(const Model *model, i64 count, i64 steps, i64 limit_ms, const Request *request,
                       const float *temperatures, i64 *tokens, float *logprobs, i64 *counts) {
    const i64 vocab = model->vocab;
    std::vector<float> hidden(count * model->hidden), scores(count * vocab);
    std::vector<i64> active(count), ids(count), positions(count), indices(count);
    for (i64 r = 0; r < count; r++) active[r] = r;
    const clock_t begin = clock();
    for (i64 step = 0, rows = count; step < steps && rows; step++) {
        for (i64 i = 0; i < rows; i++) {
            const Request &q = request[active[i]];
            ids[i] = step ? tokens[active[i] * steps + step - 1] : q.last;
            positions[i] = q.position + step;
            indices[i] = q.index;
        }
        forward(model, rows, ids.data(), positions.data(), indices.data(), hidden.data());
        logits(model, rows, hidden.data(), scores.data());
        i64 staying = 0;
        for (i64 i = 0; i < rows; i++) {
            const i64 r = active[i], at = r * steps + step;
            const Request &q = request[r];
            const float *x = &scores[i * vocab];
            tokens[at] = sample_row(x, vocab, temperatures[r], q.greedy, q.seed, positions[i], &logprobs[at]);
            counts[r] = step + 1;
            bool ends = counts[r] == q.left || std::count(q.stops, q.stops + STOPS, tokens[at]);
            if (!ends) active[staying++] = r;
        }
        rows = staying;
        if (clock() - begin > limit_ms * CLOCKS_PER_SEC / 1000) break;
    }
}
