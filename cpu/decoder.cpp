// A dense decoder (Qwen2, Qwen3, Llama) in float32 over SGLang's paged KV cache, and the sampling of its tokens.
//
// cpu/decoder.py compiles this on first use, and calls what stands under extern "C". One thread.
//
// A row is one token of one request. Its bits follow from its own tokens alone: each of its sums runs over that
// row, in an order that depends on the sum's own length and on nothing else. So neither the batch, nor prefill
// or decode, nor what was cached, nor how many steps a call takes can be seen in them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u16 __attribute__((vector_size(64)));
static const int PANEL = 32;   // columns of a weight that stand side by side, see `pack`
static const int DEPTH = 128;  // terms of a sum that are added up before they join the rest: less is rounded
static const int BLOCK = 192;  // rows that go through a layer together, so that they stay in the cache
static const int STOPS = 8;    // tokens that end an answer, at most
#ifdef __AVX512F__
static const int TILE = 12;  // rows that are multiplied at once: as many as there are registers for their sums
#else
static const int TILE = 3;
#endif

struct Layer {  // addresses; those of what a family lacks are null
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *mlp_norm, *gate_up, *down;
    float *k_cache, *v_cache;  // [slots, kv_heads, dim]
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, dim, inter, vocab, table_width;
    double eps;
    const float *embedding, *norm, *cos_sin, *head;  // cos_sin [positions, dim]: half cosines, half sines
    const int32_t *table;                            // [requests, table_width]: position -> slot of the KV cache
    const Layer *layer;
};

struct Request {       // of `decode`
    int64_t last;      // its newest token, whose KV isn't in the cache yet
    int64_t position;  // of that token
    int64_t index;     // its row of the table
    int64_t seed, greedy;
    int64_t left;  // tokens that it may still get
    int64_t stops[STOPS];
};

static inline v16 load16(const float *from) { return *(const v16 *)from; }
static inline v8 load8(const float *from) { return *(const v8 *)from; }
static inline void store(float *to, v16 x) { *(v16 *)to = x; }
static inline void store(float *to, v8 x) { *(v8 *)to = x; }

static inline v16 exponential(v16 x) {  // Cephes' polynomial, within 2 ulp; x is cut to -87 ... 88
    x = x < -87.f ? v16{} - 87.f : x;
    x = x > 88.f ? v16{} + 88.f : x;
    v16 shifted = x * 1.44269504088896341f + 12582912.f;  // 1.5 * 2^23: the last bits are x / log(2), rounded
    v16 n = shifted - 12582912.f;
    v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    return p * (v16)(((u16)shifted << 23) + 0x3f800000u);  // times 2^n
}

#define PICK __builtin_shufflevector
static inline v8 add_pairs(v8 a, v8 b) {
    return PICK(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + PICK(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
static inline v8 add_twos(v8 a, v8 b) {
    return PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
static inline v8 add_fours(v8 a, v8 b) {
    return PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
static inline v8 totals(const v8 *x) {  // of eight vectors, the sum of each
    v8 low = add_twos(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
    v8 high = add_twos(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
    return add_fours(low, high);
}
static inline float total(v8 x) { return add_fours(add_twos(add_pairs(x, x), x), x)[0]; }

// y [R, cols] (+)= x [R, depth] @ w [depth, PANEL]; rows of x and y lie k and n apart
template <int R>
static void multiply(const float *x, int64_t k, int depth, const float *w, float *y, int64_t n, int cols, bool add) {
    v16 sums[R][2] = {};
    for (int i = 0; i < depth; i++) {
        v16 left = load16(w + i * PANEL), right = load16(w + i * PANEL + 16);
        for (int r = 0; r < R; r++) {
            sums[r][0] += x[r * k + i] * left;
            sums[r][1] += x[r * k + i] * right;
        }
    }
    for (int r = 0; r < R; r++) {
        float edge[PANEL] = {}, *to = cols == PANEL ? y + r * n : edge;
        if (to == edge) memcpy(edge, y + r * n, cols * sizeof(float));
        store(to, add ? load16(to) + sums[r][0] : sums[r][0]);
        store(to + 16, add ? load16(to + 16) + sums[r][1] : sums[r][1]);
        if (to == edge) memcpy(y + r * n, edge, cols * sizeof(float));
    }
}

template <int R, class... Others>
static void multiply_rows(int rows, Others... others) {
    if (rows == R) return multiply<R>(others...);
    if constexpr (R > 1) multiply_rows<R - 1>(rows, others...);
}

// y [rows, n] (+)= x [rows, k] @ w, packed. Each sum goes by DEPTH terms, whatever the rows.
static void matmul(const float *x, int64_t rows, int64_t k, const float *w, int64_t n, float *y, bool add) {
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t r = 0; r < rows; r += TILE)
            for (int64_t i = 0; i < k; i += DEPTH) {
                int count = std::min<int64_t>(TILE, rows - r), depth = std::min<int64_t>(DEPTH, k - i);
                int cols = std::min<int64_t>(PANEL, n - j);
                const float *part = w + j * k + i * PANEL;
                multiply_rows<TILE>(count, x + r * k + i, k, depth, part, y + r * n + j, n, cols, add || i > 0);
            }
}

static void rms_norm(const float *x, const float *scale, int64_t n, float eps, float *y) {
    v8 sum = {};
    for (int64_t i = 0; i < n; i += 8) sum += load8(x + i) * load8(x + i);
    float inverse = 1.f / sqrtf(total(sum) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * inverse * scale[i];
}

static void rotate(float *x, const float *cos_sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cosine = cos_sin[i], sine = cos_sin[i + half];
        x[i] = a * cosine - b * sine;
        x[i + half] = b * cosine + a * sine;
    }
}

static void silu_and_multiply(const float *gate, const float *up, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += 16) {
        int64_t at = std::min(i, n - 16);  // the last one overlaps the one before
        v16 x = load16(gate + at);
        store(out + at, x / (1.f + exponential(-x)) * load16(up + at));
    }
}

// scores [length], with room for 16 at a time, become weights: softmax, but for the factor that is returned
static float softmax(float *scores, int64_t length) {
    const float most = *std::max_element(scores, scores + length);
    v16 sum = {};
    for (int64_t j = 0; j < length; j += 16) {
        for (int64_t c = length; c < j + 16; c++) scores[c] = -INFINITY;
        v16 weights = exponential(load16(scores + j) - most);
        store(scores + j, weights);
        sum += weights;
    }
    return 1.f / (total(PICK(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7) + PICK(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15)));
}

// attention of a query [heads, dim] over the first `length` tokens of its request, eight keys at a time
template <int D>  // of a head, or 0: any multiple of 8
static void attend(const Model &m, const Layer &l, const float *query, const int32_t *slots, int64_t length,
                   float *out) {
    static std::vector<float> space;
    const int64_t dim = D ? D : m.dim, width = m.kv_heads * dim, group = m.heads / m.kv_heads;
    const int64_t padded = (length + 15) / 16 * 16;
    const float scale = (float)(1 / sqrt((double)dim));
    space.resize(m.heads * padded);
    for (int64_t j = 0; j < length; j += 8) {
        const float *keys[8];  // past the end the last one, whose scores `softmax` drops
        for (int i = 0; i < 8; i++) keys[i] = l.k_cache + slots[std::min(j + i, length - 1)] * width;
        for (int64_t h = 0; h < m.heads; h++) {
            v8 products[8] = {};
            for (int64_t d = 0; d < dim; d += 8) {
                v8 q = load8(query + h * dim + d);
                for (int i = 0; i < 8; i++) products[i] += q * load8(keys[i] + h / group * dim + d);
            }
            store(&space[h * padded + j], totals(products) * scale);
        }
    }
    for (int64_t h = 0; h < m.heads; h++) {
        float *weights = &space[h * padded];
        const float factor = softmax(weights, length);
        const int PARTS = D ? D / 8 : 1;  // vectors of a value that are summed at once
        for (int64_t d = 0; d < dim; d += 8 * PARTS) {
            v8 sums[PARTS] = {};
            const float *values = l.v_cache + h / group * dim + d;
            for (int64_t j = 0; j < length; j++)
                for (int i = 0; i < PARTS; i++) sums[i] += weights[j] * load8(values + slots[j] * width + 8 * i);
            for (int i = 0; i < PARTS; i++) store(out + h * dim + d + 8 * i, sums[i] * factor);
        }
    }
}

// x [rows, hidden] through a layer; keys and values go into the cache
static void run_layer(const Model &m, const Layer &l, int64_t rows, const int64_t *positions,
                      const int64_t *requests, float *x) {
    static std::vector<float> normed, qkv, mixed, gates;
    auto attend_by = m.dim == 24 ? attend<24> : m.dim == 64 ? attend<64> : m.dim == 128 ? attend<128> : attend<0>;
    const int64_t h = m.hidden, q_size = m.heads * m.dim, kv_size = m.kv_heads * m.dim, width = q_size + 2 * kv_size;
    normed.resize(BLOCK * std::max(h, m.inter));
    qkv.resize(BLOCK * width);
    mixed.resize(BLOCK * q_size);
    gates.resize(BLOCK * 2 * m.inter);
    for (int64_t r = 0; r < rows; r++) {
        rms_norm(x + r * h, l.input_norm, h, m.eps, &normed[r * h]);
        if (l.qkv_bias) memcpy(&qkv[r * width], l.qkv_bias, width * sizeof(float));
    }
    matmul(normed.data(), rows, h, l.qkv, width, qkv.data(), l.qkv_bias);
    for (int64_t r = 0; r < rows; r++) {
        float *q = &qkv[r * width], *k = q + q_size, *v = k + kv_size;
        for (float *head = q; head < v; head += m.dim) {
            const float *scale = head < k ? l.q_norm : l.k_norm;
            if (scale) rms_norm(head, scale, m.dim, m.eps, head);
            rotate(head, m.cos_sin + positions[r] * m.dim, m.dim / 2);
        }
        int64_t slot = m.table[requests[r] * m.table_width + positions[r]];
        memcpy(l.k_cache + slot * kv_size, k, kv_size * sizeof(float));
        memcpy(l.v_cache + slot * kv_size, v, kv_size * sizeof(float));
    }
    for (int64_t r = 0; r < rows; r++)
        attend_by(m, l, &qkv[r * width], m.table + requests[r] * m.table_width, positions[r] + 1, &mixed[r * q_size]);
    matmul(mixed.data(), rows, q_size, l.o, h, x, true);
    for (int64_t r = 0; r < rows; r++) rms_norm(x + r * h, l.mlp_norm, h, m.eps, &normed[r * h]);
    matmul(normed.data(), rows, h, l.gate_up, 2 * m.inter, gates.data(), false);
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = &gates[r * 2 * m.inter];
        silu_and_multiply(gate, gate + m.inter, m.inter, &normed[r * m.inter]);
    }
    matmul(normed.data(), rows, m.inter, l.down, h, x, true);
}

static u16 murmur(uint64_t seed, uint32_t position, u16 columns) {  // MurmurHash3_x86_32 of these 16 bytes
    u16 state = {};
    const u16 words[] = {u16{} + (uint32_t)seed, u16{} + (uint32_t)(seed >> 32), u16{} + position, columns};
    for (u16 word : words) {
        word *= 0xCC9E2D51u;
        word = (word << 15) | (word >> 17);
        state ^= word * 0x1B873593u;
        state = ((state << 13) | (state >> 19)) * 5 + 0xE6546B64u;
    }
    state ^= 16;
    state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
    state = (state ^ (state >> 13)) * 0xC2B2AE35u;
    return state ^ (state >> 16);
}

// The token of largest x + noise, x = logits / temperature; its log-probability is that of softmax(x). Noise is
// -log(-log(u)) with u in [0, 1] from the hash of seed, position and token, or none.
static int64_t sample_row(const float *logits, int64_t vocab, float temperature, bool greedy, int64_t seed,
                          int64_t position, float *logprob) {
    static std::vector<float> space;
    const int64_t padded = (vocab + 15) / 16 * 16;
    space.resize(2 * padded);
    float *x = space.data(), *weights = x + padded;  // weights: exp(x - most)
    for (int64_t c = 0; c < vocab; c++) x[c] = logits[c] / temperature;
    memcpy(weights, x, vocab * sizeof(float));
    const float factor = softmax(weights, vocab), most = *std::max_element(x, x + vocab);
    int64_t best = std::find(x, x + vocab, most) - x;
    // the largest x + noise has the least noise' = -log(u) exp(most - x), which is at least (1 - u) / weight
    double least = INFINITY;
    auto look_at = [&](int64_t c, uint32_t hash) {
        double noise = std::max(-log(hash / 4294967295.0), 1 / 4294967296.0) * exp((double)most - x[c]);
        if (noise < least) best = c;
        least = std::min(noise, least);
    };
    if (!greedy) {
        look_at(best, murmur(seed, position, u16{} + (uint32_t)best)[0]);
        u16 columns = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t c = 0; c < padded; c += 16, columns += 16) {
            u16 hash = murmur(seed, position, columns);
            v16 bound = __builtin_convertvector(~hash, v16) * (0.999f / 4294967296.f);
            u16 may_win = (u16)(bound < load16(weights + c) * (float)least);
            for (int i = 0; i < 16; i++)
                if (may_win[i] && c + i < vocab) look_at(c + i, hash[i]);
        }
    }
    *logprob = x[best] - most + logf(factor);
    return best;
}

extern "C" {

// weight [n, k] -> packed [n / PANEL, k, PANEL], the last panel filled up with zeros
void pack(const float *weight, int64_t n, int64_t k, float *packed) {
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t i = 0; i < k; i++)
            for (int64_t c = j; c < j + PANEL; c++) *packed++ = c < n ? weight[c * k + i] : 0;
}

// hidden [rows, hidden] -> [rows, vocab]
void logits(const Model *model, int64_t rows, const float *hidden, float *out) {
    const Model &m = *model;
    for (int64_t r = 0; r < rows; r += BLOCK) {
        int64_t count = std::min<int64_t>(BLOCK, rows - r);
        matmul(hidden + r * m.hidden, count, m.hidden, m.head, m.vocab, out + r * m.vocab, false);
    }
}

// token, position and request of each row -> hidden [rows, hidden] behind the last norm. A row may look at
// those before it, whose keys and values are in the cache by then.
void forward(const Model *model, int64_t rows, const int64_t *ids, const int64_t *positions, const int64_t *requests,
             float *hidden) {
    const Model &m = *model;
    for (int64_t r = 0; r < rows; r++)
        memcpy(hidden + r * m.hidden, m.embedding + ids[r] * m.hidden, m.hidden * sizeof(float));
    for (int64_t i = 0; i < m.layers; i++)
        for (int64_t r = 0; r < rows; r += BLOCK) {
            int64_t count = std::min<int64_t>(BLOCK, rows - r);
            run_layer(m, m.layer[i], count, positions + r, requests + r, hidden + r * m.hidden);
        }
    for (int64_t r = 0; r < rows; r++) {
        float *x = hidden + r * m.hidden;
        rms_norm(x, m.norm, m.hidden, m.eps, x);
    }
}

// scores [rows, vocab], logits, -> a token of each row, and its log-probability
void sample(int64_t rows, int64_t vocab, const float *scores, const float *temperatures, const int64_t *greedy,
            const int64_t *seeds, const int64_t *positions, int64_t *tokens, float *logprobs) {
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = sample_row(scores + r * vocab, vocab, temperatures[r], greedy[r], seeds[r], positions[r],
                               logprobs + r);
}

// Up to `steps` tokens of each request, which leaves when it ends: tokens, logprobs [count, steps], how many of
// each. No step begins after limit_s seconds of this thread.
void decode(const Model *model, int64_t count, int64_t steps, double limit_s, const Request *request,
            const float *temperatures, int64_t *tokens, float *logprobs, int64_t *counts) {
    const Model &m = *model;
    static std::vector<float> hidden, scores;
    std::vector<int64_t> active, ids, positions, indices;
    hidden.resize(count * m.hidden);
    scores.resize(count * m.vocab);
    for (int64_t r = 0; r < count; r++) active.push_back(r);
    const clock_t begin = clock();
    for (int64_t step = 0; step < steps && !active.empty(); step++) {
        ids.clear(), positions.clear(), indices.clear();
        for (int64_t r : active) {
            ids.push_back(step ? tokens[r * steps + step - 1] : request[r].last);
            positions.push_back(request[r].position + step);
            indices.push_back(request[r].index);
        }
        const int64_t rows = active.size();
        forward(model, rows, ids.data(), positions.data(), indices.data(), hidden.data());
        logits(model, rows, hidden.data(), scores.data());
        std::vector<int64_t> remaining;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t r = active[i];
            const Request &q = request[r];
            int64_t token = sample_row(&scores[i * m.vocab], m.vocab, temperatures[r], q.greedy, q.seed, positions[i],
                                       &logprobs[r * steps + step]);
            tokens[r * steps + step] = token;
            counts[r] = step + 1;
            bool ends = counts[r] == q.left || std::count(q.stops, q.stops + STOPS, token);
            if (!ends) remaining.push_back(r);
        }
        active = remaining;
        if (clock() - begin > limit_s * CLOCKS_PER_SEC) break;
    }
}
}
