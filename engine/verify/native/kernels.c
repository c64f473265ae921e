/* One packed forward of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on CPU, in one call.
 *
 * Activations are float32 from the embedding to the logits; what meets int8 weights is rounded to 16 bits, one scale per row.
 * Every sum has one fixed order that depends on nothing but the row itself: a row has the same bits in every batch. Threads
 * share outputs, never sums. Written with GCC's vectors of 64 bytes, which any processor can compute; the instruction that
 * multiplies int8 is used where the compiler says that it exists.
 *
 * T rows in the batch, R of them with wanted logits, D width of a head, Hq and Hkv numbers of heads.
 */

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINED static inline __attribute__((always_inline))
#define EXACT static __attribute__((noinline))      /* one body, so that every row is summed by the same instructions */
#define LANES 16            /* of a vector */
#define PANEL 32            /* outputs that are computed together: two vectors */
#define ROWS 12             /* rows of a product that share one pass over the weights */
#define TILE 64             /* keys that attention looks at together; a block of the cache holds whole tiles */
#define ATTENTION_ROWS 16   /* rows that share a converted tile */
#define SHARED_HEADS 4      /* query heads that share a read of keys and values */
#define VECTORS (TILE / LANES)
#define MAX_SPINS 10000     /* before a waiting thread lets others run */
#define PREFETCH 4096       /* bytes of weights that are asked for ahead */

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2), may_alias));

enum Format { FLOAT32, BFLOAT16, INT8 };
enum Epilogue { STORE, ADD, SWIGLU };

/* A linear map. Weights lie in panels of 32 outputs; a panel is a list of groups of inputs, and a group has one word of 4 bytes
 * (1 float32, 2 bfloat16, 4 int8) per output. A map with SWIGLU has 16 gates and their 16 ups in every panel. */
typedef struct {
    const void *weight;
    const float *scale;       /* INT8: per output; else NULL */
    const int32_t *offset;    /* INT8: 128 * sum of an output's weights, since activations are shifted by 128 */
    const float *bias;        /* or NULL */
    int32_t format, num_inputs, num_outputs, num_groups;
} Linear;

typedef struct {
    Linear qkv, attention_out, gate_up, mlp_out;
    const float *attention_norm, *mlp_norm;
    const float *query_norm, *key_norm;     /* [D] or NULL */
    float scaling;
    int32_t window;                         /* positions that a row sees, its own included; 0 = all before it */
} Layer;

typedef struct {
    const Layer *layers;
    Linear head;
    const void *embedding;                  /* [V, hidden], float32 or bfloat16 as the cache */
    const float *norm;
    float eps;
    int32_t num_layers, hidden, num_heads, num_kv, head_dim, mlp_width;
    int32_t cache_format;                   /* FLOAT32 or BFLOAT16 */
    int32_t max_words;                      /* of a row that enters a product */
} Model;

/* Up to ATTENTION_ROWS consecutive rows of one sequence. */
typedef struct {
    int32_t first_row, num_rows;
    int32_t table;                          /* where the block table of the sequence begins */
} RowBlock;

typedef struct {
    const int64_t *tokens, *positions, *places, *slots;     /* [T]; places are positions among the keys that are there */
    const int64_t *logit_rows;                      /* [R] */
    const RowBlock *row_blocks;
    const int32_t *tables;
    const float *cos, *sin;                         /* [positions, D / 2] */
    void *const *caches;                            /* per layer [2 * Hkv, slots, D]: keys, then values */
    float *const *taps;     /* per layer and behind the last: where the rows that enter it are kept, or NULL; NULL for none */
    int64_t num_slots, tap_stride;                  /* of taps, in floats from row to row */
    int32_t num_rows, num_logit_rows, num_row_blocks, block_size;
    int32_t places_first;                           /* whether a block of rows reads keys that another one writes */
} Batch;

/* --- vectors ------------------------------------------------------------------------------------------------------------ */

static inline Floats load(const float *p) { return *(const Floats *)p; }
static inline void store(float *p, Floats v) { *(Floats *)p = v; }
static inline Floats fill(float x) { return x - (Floats){}; }
static inline Floats choose(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }
static inline Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }

static inline float sum_of(Floats v) {
    float s[LANES];
    store(s, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

static inline float max_of(Floats v) {
    float m[LANES];
    store(m, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) m[i] = m[i] > m[i + width] ? m[i] : m[i + width];
    return m[0];
}

/* exp with a relative error of 2e-7: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' coefficients). NaN stays NaN. */
static inline Floats exp_of(Floats x) {
    x = choose(x < -87.0f, fill(-87.0f), x);
    x = choose(x > 88.0f, fill(88.0f), x);
    const Floats shift = fill(0x1.8p23f);   /* added, it leaves the nearest integer in the low bits */
    Floats shifted = x * 0x1.715476p+0f + shift;
    Floats n = shifted - shift;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)(((Ints)shifted + 127) << 23);
}

static inline float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? (uint16_t)rounded : 0x7fc0;
}

/* --- products ----------------------------------------------------------------------------------------------------------- */

/* An input word, which is one input or four of int8, times its weights for 16 outputs. */
static inline Floats dot_float(Floats sum, uint32_t x, Floats w) {
    float value;
    memcpy(&value, &x, 4);
    return sum + fill(value) * w;
}

static inline Ints dot_int8(Ints sum, uint32_t x, Ints w) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)x), (__m512i)w);
#else
    for (int byte = 0; byte < 4; byte++) sum += (int32_t)(x >> (8 * byte) & 255) * ((w << (24 - 8 * byte)) >> 24);
    return sum;
#endif
}

/* The weights of input ``step`` of a group. Two bfloat16 become two float32, since FMAs of these have twice the throughput of
 * the instruction for bfloat16, and leave the activations their precision. */
static inline Floats split_float32(Words w, int step) { return (void)step, (Floats)w; }
static inline Floats split_bfloat16(Words w, int step) { return (Floats)(w << (step ? 0 : 16) & 0xffff0000u); }
static inline Ints split_none(Words w, int step) { return (void)step, (Ints)w; }

/* Products of ``rows`` rows, a constant after inlining so that the sums stay in registers, with one panel. */
#define DEFINE_PRODUCT(NAME, VECTOR, STEPS, SPLIT, DOT)                                                                       \
    INLINED void NAME(                                                                                                        \
        const Linear *map, const uint32_t *w, const uint32_t *x, const int rows, VECTOR (*out)[2]) {                          \
        VECTOR sums[ROWS][2];                                                                                                 \
        _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (VECTOR){};                         \
        for (ptrdiff_t g = 0; g < map->num_groups; g++, w += PANEL) {                                                         \
            const Words low = *(const Words *)w, high = *(const Words *)(w + LANES);                                          \
            __builtin_prefetch((const char *)w + PREFETCH);                                                                   \
            __builtin_prefetch((const char *)w + PREFETCH + 64);                                                              \
            _Pragma("GCC unroll 2") for (int step = 0; step < STEPS; step++) {                                                \
                const VECTOR a = SPLIT(low, step), b = SPLIT(high, step);                                                     \
                _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) {                                                     \
                    const uint32_t value = x[(r * (ptrdiff_t)map->num_groups + g) * STEPS + step];                            \
                    sums[r][0] = DOT(sums[r][0], value, a);                                                                   \
                    sums[r][1] = DOT(sums[r][1], value, b);                                                                   \
                }                                                                                                             \
            }                                                                                                                 \
        }                                                                                                                     \
        _Pragma("GCC unroll 12") for (int r = 0; r < rows; r++) out[r][0] = sums[r][0], out[r][1] = sums[r][1];               \
    }                                                                                                                         \
    static void NAME##_of(const Linear *map, const uint32_t *w, const uint32_t *x, int rows, VECTOR (*out)[2]) {              \
        switch (rows) {                                                                                                       \
            case 1: NAME(map, w, x, 1, out); break;                                                                           \
            case 2: NAME(map, w, x, 2, out); break;                                                                           \
            case 3: NAME(map, w, x, 3, out); break;                                                                           \
            case 4: NAME(map, w, x, 4, out); break;                                                                           \
            case 5: NAME(map, w, x, 5, out); break;                                                                           \
            case 6: NAME(map, w, x, 6, out); break;                                                                           \
            case 7: NAME(map, w, x, 7, out); break;                                                                           \
            case 8: NAME(map, w, x, 8, out); break;                                                                           \
            case 9: NAME(map, w, x, 9, out); break;                                                                           \
            case 10: NAME(map, w, x, 10, out); break;                                                                         \
            case 11: NAME(map, w, x, 11, out); break;                                                                         \
            default: NAME(map, w, x, ROWS, out);                                                                              \
        }                                                                                                                     \
    }

DEFINE_PRODUCT(product_float32, Floats, 1, split_float32, dot_float)
DEFINE_PRODUCT(product_bfloat16, Floats, 2, split_bfloat16, dot_float)
DEFINE_PRODUCT(product_int8, Ints, 1, split_none, dot_int8)

/* Rows ready for a product: float32, or for int8 weights 16-bit integers in two planes of bytes, which are two rows for the
 * product: high bytes, shifted by 128, and low bytes. Integer sums are exact, and 16 bits lose next to nothing of a row. */
typedef struct {
    uint32_t *words;    /* padded to whole groups */
    float *scales;      /* per row: value of one unit of its integers */
} Inputs;

static ptrdiff_t words_per_row(const Linear *map) { return (ptrdiff_t)map->num_groups * (map->format == FLOAT32 ? 1 : 2); }
static int rows_per_pass(const Linear *map) { return map->format == INT8 ? ROWS / 2 : ROWS; }

static void multiply(const Linear *map, int panel, const Inputs *in, ptrdiff_t row, int rows, Floats (*out)[2]) {
    const uint32_t *w = (const uint32_t *)map->weight + (ptrdiff_t)panel * map->num_groups * PANEL;
    const uint32_t *x = in->words + row * words_per_row(map);
    const ptrdiff_t first = (ptrdiff_t)panel * PANEL;
    Ints sums[ROWS][2];
    if (map->format == FLOAT32) product_float32_of(map, w, x, rows, out);
    if (map->format == BFLOAT16) product_bfloat16_of(map, w, x, rows, out);
    if (map->format == INT8) product_int8_of(map, w, x, 2 * rows, sums);
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const ptrdiff_t at = first + half * LANES;
            if (map->format == INT8) {
                const Ints high = sums[2 * r][half] - *(const Ints *)(map->offset + at), low = sums[2 * r + 1][half];
                const Floats sum = __builtin_convertvector(high, Floats) * 256.0f + __builtin_convertvector(low, Floats);
                out[r][half] = sum * in->scales[row + r] * load(map->scale + at);
            }
            if (map->bias) out[r][half] += load(map->bias + at);
        }
}

static void write_outputs(enum Epilogue epilogue, Floats (*values)[2], int count, int rows, float *out, ptrdiff_t stride) {
    for (int r = 0; r < rows; r++, out += stride) {
        if (epilogue == SWIGLU) values[r][0] = values[r][0] / (1.0f + exp_of(-values[r][0])) * values[r][1];
        const float *from = (const float *)values[r];
        if (epilogue == ADD)
            for (int i = 0; i < count; i++) out[i] += from[i];
        else
            memcpy(out, from, (size_t)count * sizeof(float));
    }
}

/* Units of work that threads take one by one. A phase is over when its units are done, not when all threads have arrived: one
 * that the system does not let run holds up nobody, unless it has a unit. */
typedef struct {
    _Alignas(64) atomic_int taken;
    atomic_int done;
} Phase;

/* The next unit of a phase, or -1 when all are done; ``last`` is the one that the caller has finished, or -1. */
static int next_unit(Phase *phase, int count, int last) {
    if (last >= 0) atomic_fetch_add_explicit(&phase->done, 1, memory_order_release);
    const int unit = atomic_fetch_add_explicit(&phase->taken, 1, memory_order_relaxed);
    if (unit < count) return unit;
    for (int spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < count; spins++)
        if (spins > MAX_SPINS) sched_yield();
    return -1;
}

#define FOR_UNITS(UNIT, PHASE, COUNT) \
    for (int UNIT = next_unit(PHASE, COUNT, -1); UNIT >= 0; UNIT = next_unit(PHASE, COUNT, UNIT))

/* out [rows, outputs] = or += in · weight; called by all threads. */
static void linear(const Linear *map, const Inputs *in, int rows, enum Epilogue epilogue, float *out, Phase *phase) {
    const int width = epilogue == SWIGLU ? PANEL / 2 : PANEL;
    const int num_outputs = map->num_outputs, num_panels = (num_outputs + width - 1) / width;
    const int num_passes = (rows + rows_per_pass(map) - 1) / rows_per_pass(map);
    const int pass = num_passes ? (rows + num_passes - 1) / num_passes : 0;      /* of equal size, as far as it goes */
    FOR_UNITS(panel, phase, num_panels) {
        const int first = panel * width, rest = num_outputs - first;
        for (int row = 0; row < rows; row += pass) {
            const int count = rows - row < pass ? rows - row : pass;
            Floats values[ROWS][2];
            multiply(map, panel, in, row, count, values);
            float *to = out + (ptrdiff_t)row * num_outputs + first;
            write_outputs(epilogue, values, rest < width ? rest : width, count, to, num_outputs);
        }
    }
}

/* --- rows --------------------------------------------------------------------------------------------------------------- */

EXACT void rms_norm(const float *x, const float *weight, float eps, int n, float *out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    const float factor = 1.0f / sqrtf(squares / (float)n + eps);
#pragma omp simd
    for (int i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

/* Largest magnitude, or NaN where a value is not finite. */
EXACT float magnitude(const float *x, int n) {
    float largest = 0, spoilt = 0;
#pragma omp simd reduction(max : largest) reduction(+ : spoilt)
    for (int i = 0; i < n; i++) {
        float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
        spoilt += x[i] * 0.0f;
    }
    return largest + spoilt;
}

/* A row [num_inputs] in the form that a product wants. */
EXACT void encode(const Linear *map, const float *x, ptrdiff_t row, const Inputs *in) {
    const int n = map->num_inputs;
    uint32_t *out = in->words + row * words_per_row(map);
    if (map->format != INT8) {
        memset(out + words_per_row(map) - 1, 0, sizeof(float));
        memcpy(out, x, (size_t)n * sizeof(float));
        return;
    }
    uint8_t *high = (uint8_t *)out, *low = (uint8_t *)(out + map->num_groups);
    const float largest = magnitude(x, n), factor = largest > 0 ? 32767.0f / largest : 0.0f;
    in->scales[row] = largest / 32767.0f;
    memset(high + n, 0, (size_t)(4 * map->num_groups - n));     /* what fills up the last group meets weights of 0 */
    memset(low + n, 0, (size_t)(4 * map->num_groups - n));
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const float shifted = x[i] * factor + 0x1.8p23f;    /* the nearest integer is in the low bits */
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        high[i] = (uint8_t)((bits >> 8) + 128);
        low[i] = (uint8_t)bits;
    }
}

/* Floats of q, k and v of one row. */
static ptrdiff_t row_width(const Model *m) { return (ptrdiff_t)(m->num_heads + 2 * m->num_kv) * m->head_dim; }

static void embed(const Model *m, int64_t token, float *out) {
    if (m->cache_format == FLOAT32) {
        memcpy(out, (const float *)m->embedding + token * m->hidden, (size_t)m->hidden * sizeof(float));
    } else {
        const uint16_t *from = (const uint16_t *)m->embedding + token * m->hidden;
        for (int i = 0; i < m->hidden; i++) out[i] = from_bfloat16(from[i]);
    }
}

static void rotate(float *head, const float *cos, const float *sin, int half) {
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

static void write_cache(const Model *m, void *cache, ptrdiff_t at, const float *head) {
    if (m->cache_format == FLOAT32)
        memcpy((float *)cache + at, head, (size_t)m->head_dim * sizeof(float));
    else
        for (int i = 0; i < m->head_dim; i++) ((uint16_t *)cache + at)[i] = to_bfloat16(head[i]);
}

static void place_head(const Model *m, const Batch *b, int row, const float *norm, float *head) {
    const ptrdiff_t half = m->head_dim / 2, at = b->positions[row] * half;
    if (norm) rms_norm(head, norm, m->eps, m->head_dim, head);
    rotate(head, b->cos + at, b->sin + at, (int)half);
}

/* Norm and rotate, in place, what belongs to key head ``kv`` in one row of q, k and v; its key and value go into the cache. */
static void place_heads(const Model *m, const Layer *layer, const Batch *b, int row, int kv, void *cache, float *qkv) {
    const ptrdiff_t dim = m->head_dim, slot = b->slots[row], shared = m->num_heads / m->num_kv;
    float *query = qkv + (ptrdiff_t)row * row_width(m) + kv * shared * dim;
    float *key = qkv + (ptrdiff_t)row * row_width(m) + (m->num_heads + kv) * dim, *value = key + m->num_kv * dim;
    for (int h = 0; h < shared; h++) place_head(m, b, row, layer->query_norm, query + h * dim);
    for (int i = 0; i < shared * dim; i++) query[i] *= layer->scaling;
    place_head(m, b, row, layer->key_norm, key);
    write_cache(m, cache, (kv * b->num_slots + slot) * dim, key);
    write_cache(m, cache, ((m->num_kv + kv) * b->num_slots + slot) * dim, value);
}

/* --- attention ---------------------------------------------------------------------------------------------------------- */

/* What one thread needs for ATTENTION_ROWS rows of the query heads of one key head. */
typedef struct {
    float *keys;      /* [D, TILE] */
    float *values;    /* [TILE, D] */
    float *out;       /* [rows * shared, D] */
    float *largest;   /* [rows * shared]: of the scores so far */
    float *total;     /* [rows * shared]: of the weights so far */
} Scratch;

/* 16 floats of the cache, from element ``at`` on. */
static inline Floats load_cached(const Model *m, const void *cache, ptrdiff_t at) {
    if (m->cache_format == FLOAT32) return load((const float *)cache + at);
    const Shorts bits = *(const Shorts *)((const uint16_t *)cache + at);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

/* Transpose 16 vectors: four perfect shuffles of the first eight with the last eight. */
static inline void transpose(Floats *rows) {
    const Ints low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
    for (int round = 0; round < 4; round++) {
        Floats shuffled[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            shuffled[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            shuffled[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
        memcpy(rows, shuffled, sizeof shuffled);
    }
}

/* A tile's keys and values as float32, the keys transposed. Reads all of its slots; what is in those behind the last key is not
 * used. */
static void load_tile(const Model *m, const void *cache, ptrdiff_t key_at, ptrdiff_t value_at, const Scratch *s) {
    const int dim = m->head_dim;
    for (int j = 0; j < TILE; j += LANES)
        for (int d = 0; d < dim; d += LANES) {
            Floats rows[LANES];
            for (int i = 0; i < LANES; i++) rows[i] = load_cached(m, cache, key_at + (j + i) * dim + d);
            transpose(rows);
            for (int i = 0; i < LANES; i++) store(s->keys + (d + i) * TILE + j, rows[i]);
        }
    for (int i = 0; i < TILE * dim; i += LANES) store(s->values + i, load_cached(m, cache, value_at + i));
}

/* Scores [heads, TILE] of one row's query heads [heads, D]. */
INLINED void score(const float *keys, const float *query, int dim, const int heads, Floats (*out)[VECTORS]) {
    Floats sums[SHARED_HEADS][VECTORS] = {};
    for (int d = 0; d < dim; d++) {
        _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
                sums[h][v] += fill(query[h * dim + d]) * load(keys + d * TILE + v * LANES);
    }
    _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) out[h][v] = sums[h][v];
}

/* Shrink ``vectors`` vectors of the outputs [heads, D] and add the weighted values of keys first ... end - 1, in order. */
INLINED void add_values(
    const float *values, Floats (*weights)[VECTORS], int dim, int first, int end, const int heads, const int vectors,
    const float *shrink, float *out) {
    Floats sums[SHARED_HEADS][VECTORS];
    _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sums[h][v] = load(out + h * dim + v * LANES) * shrink[h];
    for (int j = first; j < end; j++)
        _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
            _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)
                sums[h][v] += fill(((const float *)weights[h])[j]) * load(values + j * dim + v * LANES);
    _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) store(out + h * dim + v * LANES, sums[h][v]);
}

/* Scores become weights exp(score - largest), 0 outside of first ... end - 1. Returns by what earlier weights must shrink. */
static float weigh(Floats *scores, int first, int end, float *largest, float *total) {
    Floats most = fill(*largest);
    Ints seen[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const Ints lane = (Ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + v * LANES;
        seen[v] = (lane >= first) & (lane < end);
        most = larger(choose(seen[v], scores[v], fill(-INFINITY)), most);
    }
    const float now = max_of(most);
    const float shrink = *largest == now ? 1.0f : exp_of(fill(*largest - now))[0];
    Floats sum = {};
    for (int v = 0; v < VECTORS; v++) {
        scores[v] = choose(seen[v], exp_of(scores[v] - now), (Floats){});
        sum += scores[v];
    }
    *largest = now;
    *total = *total * shrink + sum_of(sum);
    return shrink;
}

INLINED void attend_tile(
    const Scratch *s, const float *query, int dim, int first, int end, int pair, const int heads) {
    Floats weights[SHARED_HEADS][VECTORS];
    float shrink[SHARED_HEADS];
    score(s->keys, query, dim, heads, weights);
    for (int h = 0; h < heads; h++) shrink[h] = weigh(weights[h], first, end, s->largest + pair + h, s->total + pair + h);
    float *out = s->out + (ptrdiff_t)pair * dim;
    int at = 0;
    for (; at + VECTORS * LANES <= dim; at += VECTORS * LANES)
        add_values(s->values + at, weights, dim, first, end, heads, VECTORS, shrink, out + at);
    for (; at < dim; at += LANES) add_values(s->values + at, weights, dim, first, end, heads, 1, shrink, out + at);
}

/* One row's query heads of one key head against the keys of a tile that it sees. */
static void attend_row(const Model *m, const Scratch *s, const float *query, int first, int end, int pair) {
    const int dim = m->head_dim, shared = m->num_heads / m->num_kv;
    for (int h = 0; h < shared; h += SHARED_HEADS) {
        const float *q = query + (ptrdiff_t)h * dim;
        switch (shared - h) {
            case 1: attend_tile(s, q, dim, first, end, pair + h, 1); break;
            case 2: attend_tile(s, q, dim, first, end, pair + h, 2); break;
            case 3: attend_tile(s, q, dim, first, end, pair + h, 3); break;
            default: attend_tile(s, q, dim, first, end, pair + h, SHARED_HEADS);
        }
    }
}

/* A block of rows with all query heads of key head ``kv``: softmax(q · k) · v, tile after tile (Milakov, Gimelshein 2018).
 * From q, k and v [T, (Hq + 2 Hkv) D] to out [T, Hq D]. */
static void attend(
    const Model *m, const Layer *layer, const Batch *b, const RowBlock *block, int kv, const void *cache, const float *qkv,
    const Scratch *s, float *out) {
    const int dim = m->head_dim, shared = m->num_heads / m->num_kv, window = layer->window;
    const int64_t *positions = b->places + block->first_row;
    const int pairs = block->num_rows * shared;
    memset(s->out, 0, (size_t)pairs * (size_t)dim * sizeof(float));
    for (int i = 0; i < pairs; i++) s->largest[i] = -INFINITY, s->total[i] = 0;
    const int64_t last = positions[block->num_rows - 1];
    const int64_t start = window && positions[0] >= window ? (positions[0] - window + 1) / TILE * TILE : 0;
    for (int64_t tile = start; tile <= last; tile += TILE) {
        const int64_t slot = b->tables[block->table + tile / b->block_size] * (int64_t)b->block_size + tile % b->block_size;
        load_tile(m, cache, (kv * b->num_slots + slot) * dim, ((m->num_kv + kv) * b->num_slots + slot) * dim, s);
        for (int r = 0; r < block->num_rows; r++) {
            const int64_t behind = positions[r] + 1 - tile, oldest = window ? behind - window : 0;
            const int first = oldest > 0 ? (int)(oldest < TILE ? oldest : TILE) : 0, end = behind < TILE ? (int)behind : TILE;
            const float *query = qkv + (ptrdiff_t)(block->first_row + r) * row_width(m) + kv * shared * dim;
            if (first < end) attend_row(m, s, query, first, end, r * shared);
        }
    }
    for (int i = 0; i < pairs; i++) {
        float *to = out + ((ptrdiff_t)(block->first_row + i / shared) * m->num_heads + kv * shared + i % shared) * dim;
        const float factor = 1.0f / s->total[i];
        for (int d = 0; d < dim; d++) to[d] = s->out[i * dim + d] * factor;
    }
}

/* --- the forward -------------------------------------------------------------------------------------------------------- */

/* Memory of one thread. In steps of few rows every thread encodes all of them for itself: that is quicker than to wait. */
typedef struct {
    Inputs in;
    float *normed;      /* [hidden] */
    Phase *phase;       /* that the thread is in */
    Scratch scratch;
} Private;

typedef struct {
    float *x, *qkv, *attended, *mlp;    /* [T, hidden], [T, (Hq + 2 Hkv) D], [T, Hq D], [T, mlp_width] */
    Inputs in;                          /* of all threads, for many rows */
} Shared;

static float *take(float **memory, int64_t floats) {
    float *taken = *memory;
    *memory += (floats + LANES - 1) / LANES * LANES;
    return taken;
}

/* Of a layer at most four maps with rows to encode, attention with heads to place, and a tap; embedding, last tap and head. */
static int64_t num_phases(const Model *m) { return 11 * m->num_layers + 4; }

static Phase *take_phases(const Model *m, float **memory) {
    return (Phase *)take(memory, num_phases(m) * (int64_t)(sizeof(Phase) / sizeof(float)));
}

static Inputs take_inputs(const Model *m, int64_t rows, float **memory) {
    return (Inputs){.words = (uint32_t *)take(memory, rows * m->max_words), .scales = take(memory, rows)};
}

static Shared take_shared(const Model *m, int64_t rows, float **memory) {
    return (Shared){
        .x = take(memory, rows * m->hidden),
        .qkv = take(memory, rows * row_width(m)),
        .attended = take(memory, rows * m->num_heads * m->head_dim),
        .mlp = take(memory, rows * m->mlp_width),
        .in = take_inputs(m, rows, memory),
    };
}

static Private take_private(const Model *m, float **memory) {
    const int dim = m->head_dim, pairs = ATTENTION_ROWS * (m->num_heads / m->num_kv);
    return (Private){
        .in = take_inputs(m, ROWS, memory),
        .normed = take(memory, m->hidden),
        .scratch = {
            .keys = take(memory, (int64_t)dim * TILE),
            .values = take(memory, (int64_t)TILE * dim),
            .out = take(memory, (int64_t)pairs * dim),
            .largest = take(memory, pairs),
            .total = take(memory, pairs),
        },
    };
}

/* Memory in floats that `forward` needs for ``rows`` rows. */
int64_t workspace_floats(const Model *m, int64_t rows, int num_threads) {
    float *end = NULL;
    take_phases(m, &end);
    take_shared(m, rows, &end);
    for (int i = 0; i < num_threads; i++) take_private(m, &end);
    return end - (float *)NULL;
}

/* Rows of a map's input. */
typedef struct {
    const float *x;             /* [*, num_inputs] */
    const int64_t *which;       /* the rows that count, or NULL for all */
    const float *norm;          /* weight of an RMS norm that comes first, or NULL */
    int count;
} Rows;

static void encode_row(const Model *m, const Linear *to, const Rows *rows, int row, const Inputs *in, float *normed) {
    const float *x = rows->x + (rows->which ? rows->which[row] : row) * to->num_inputs;
    if (rows->norm) rms_norm(x, rows->norm, m->eps, to->num_inputs, normed);
    encode(to, rows->norm ? normed : x, row, in);
}

/* out [rows, outputs] = or += the map of rows; called by all threads. */
static void apply(
    const Model *m, const Linear *map, Rows rows, enum Epilogue epilogue, float *out, const Shared *all, Private *own) {
    const Inputs *in = rows.count <= ROWS ? &own->in : &all->in;
    if (rows.count <= ROWS) {
        for (int r = 0; r < rows.count; r++) encode_row(m, map, &rows, r, in, own->normed);
    } else {
        FOR_UNITS(r, own->phase, rows.count) encode_row(m, map, &rows, r, in, own->normed);
        own->phase++;
    }
    linear(map, in, rows.count, epilogue, out, own->phase++);
}

/* Attention of all rows. Where a sequence has more than one block of rows, or shares a block of the cache with another one that
 * may be filling it, all keys are placed before anyone reads them. */
static void attend_all(
    const Model *m, const Layer *layer, const Batch *b, void *cache, const Shared *all, Private *own) {
    if (b->places_first) {
        FOR_UNITS(unit, own->phase, b->num_rows * m->num_kv)
            place_heads(m, layer, b, unit / m->num_kv, unit % m->num_kv, cache, all->qkv);
        own->phase++;
    }
    FOR_UNITS(unit, own->phase, b->num_row_blocks * m->num_kv) {
        const RowBlock *block = b->row_blocks + unit / m->num_kv;
        const int kv = unit % m->num_kv;
        for (int r = 0; !b->places_first && r < block->num_rows; r++)
            place_heads(m, layer, b, block->first_row + r, kv, cache, all->qkv);
        attend(m, layer, b, block, kv, cache, all->qkv, &own->scratch, all->attended);
    }
    own->phase++;
}

static void run_layer(const Model *m, const Layer *layer, const Batch *b, void *cache, const Shared *all, Private *own) {
    const int rows = b->num_rows;
    apply(m, &layer->qkv, (Rows){all->x, NULL, layer->attention_norm, rows}, STORE, all->qkv, all, own);
    attend_all(m, layer, b, cache, all, own);
    apply(m, &layer->attention_out, (Rows){all->attended, NULL, NULL, rows}, ADD, all->x, all, own);
    apply(m, &layer->gate_up, (Rows){all->x, NULL, layer->mlp_norm, rows}, SWIGLU, all->mlp, all, own);
    apply(m, &layer->mlp_out, (Rows){all->mlp, NULL, NULL, rows}, ADD, all->x, all, own);
}

/* Keep the rows that enter a layer, if somebody wants them. */
static void keep_rows(const Model *m, const Batch *b, int layer, const Shared *all, Private *own) {
    if (!b->taps || !b->taps[layer]) return;
    FOR_UNITS(r, own->phase, b->num_rows) {
        const float *x = all->x + (ptrdiff_t)r * m->hidden;
        memcpy(b->taps[layer] + r * b->tap_stride, x, (size_t)m->hidden * sizeof(float));
    }
    own->phase++;
}

/* Logits [R, V] of a batch; keys and values of all its rows go into the cache. */
void forward(const Model *m, const Batch *b, float *memory, int num_threads, float *logits) {
    Phase *phases = take_phases(m, &memory);
    memset(phases, 0, (size_t)num_phases(m) * sizeof(Phase));
    const Shared all = take_shared(m, b->num_rows, &memory);
#pragma omp parallel num_threads(num_threads)
    {
        float *place = memory;
        Private own = take_private(m, &place);
        for (int i = 0; i < omp_get_thread_num(); i++) own = take_private(m, &place);
        own.phase = phases;
        FOR_UNITS(r, own.phase, b->num_rows) embed(m, b->tokens[r], all.x + (ptrdiff_t)r * m->hidden);
        own.phase++;
        for (int i = 0; i < m->num_layers; i++) {
            keep_rows(m, b, i, &all, &own);
            run_layer(m, m->layers + i, b, b->caches[i], &all, &own);
        }
        keep_rows(m, b, m->num_layers, &all, &own);
        apply(m, &m->head, (Rows){all.x, b->logit_rows, m->norm, b->num_logit_rows}, STORE, logits, &all, &own);
    }
}
