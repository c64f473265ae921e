/* What sampling asks of rows of logits on CPU: a row's first largest value, and the token that wins with Gumbel noise.
 *
 * A row is looked at by one thread, so nothing depends on the batch or on the number of threads. R rows of V logits; rows may
 * lie apart by more than V.
 */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LONGS 8             /* 64-bit integers of a vector */
#define BLOCK 64            /* tokens that are looked at together */

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint64_t Longs __attribute__((vector_size(64), aligned(8), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));

enum Format { FLOAT32, BFLOAT16 };

static inline float value_at(const void *row, enum Format format, int64_t at) {
    float value;
    if (format == FLOAT32) return ((const float *)row)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static inline Floats values_at(const void *row, enum Format format, int64_t at) {
    if (format == FLOAT32) return *(const Floats *)((const float *)row + at);
    return (Floats)(__builtin_convertvector(*(const Shorts *)((const uint16_t *)row + at), Words) << 16);
}

static inline const void *row_at(const void *logits, enum Format format, int64_t at) {
    return (const char *)logits + at * (format == FLOAT32 ? 4 : 2);
}

static inline int any(Longs mask) {
    uint64_t found = 0;
    for (int i = 0; i < LONGS; i++) found |= mask[i];
    return found != 0;
}

/* --- the largest -------------------------------------------------------------------------------------------------------- */

/* Whether a value is larger, or NaN where the largest is a number: what numpy's and torch's argmax look for. */
static inline int beats(float value, float largest) { return !(value <= largest) && largest == largest; }

static inline __attribute__((always_inline)) int64_t first_largest(const void *row, const enum Format format, int64_t size) {
    float largest = value_at(row, format, 0);
    int64_t found = 0, start = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        Ints larger = {};
        for (int i = 0; i < BLOCK; i += 16) larger |= ~(values_at(row, format, start + i) <= largest - (Floats){});
        if (!any((Longs)larger)) continue;
        for (int64_t i = start; i < start + BLOCK; i++)
            if (beats(value_at(row, format, i), largest)) largest = value_at(row, format, i), found = i;
        if (largest != largest) return found;
    }
    for (; start < size; start++)
        if (beats(value_at(row, format, start), largest)) largest = value_at(row, format, start), found = start;
    return found;
}

/* Of every row the largest value and where it first is. A NaN counts as the largest. */
void largest(
    const void *logits, int format, int64_t stride, int64_t num_rows, int64_t size, int num_threads, float *values, int64_t *ids) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < num_rows; r++) {
        const void *row = row_at(logits, format, r * stride);
        ids[r] = format == FLOAT32 ? first_largest(row, FLOAT32, size) : first_largest(row, BFLOAT16, size);
        values[r] = value_at(row, format, ids[r]);
    }
}

/* --- draws -------------------------------------------------------------------------------------------------------------- */

#define GOLDEN 0x9E3779B97F4A7C15u      /* as in engine.noise */
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu
#define WINDOW 6.0          /* nats below the largest logit, behind which noise must be rare */
#define SLACK 0x1p35        /* of 2^64: the last step of the hash changes a quarter of it, and rounding less */

/* The hash without its last step, which leaves the upper 31 bits alone. */
#define RAW_BITS(Z)                    \
    do {                               \
        Z = (Z ^ (Z >> 30)) * MIX_1;   \
        Z = (Z ^ (Z >> 27)) * MIX_2;   \
    } while (0)

static double gumbel(uint64_t raw) {
    const uint64_t bits = raw ^ (raw >> 31);
    return -log(-log(((double)(bits >> 12) + 0.5) * 0x1p-52));
}

/* The lowest raw bits that may belong to Gumbel noise of at least ``bound``; the share of noise above is 1 - exp(-exp(-bound)). */
static uint64_t lowest_bits(double bound) {
    const double lowest = 0x1p64 * exp(-exp(-bound)) - SLACK;
    return lowest > 0 ? (uint64_t)lowest : 0;
}

/* A race that tokens enter one by one. */
typedef struct {
    const float *logits;
    float temperature, largest;         /* the largest logit after division */
    float near;                         /* logits below this one lie more than WINDOW below the largest after division */
    double margin;                      /* between scores that need a closer look */
    double best, second;
    int64_t winner, first;              /* first: the token that is in the race before the others */
    uint64_t lowest_near, lowest_far;   /* raw bits that a token needs to come within the margin: those above and below near */
} Race;

static void lead(Race *race, int64_t token, double score) {
    race->second = race->best, race->best = score, race->winner = token;
    const double needed = score - race->largest - race->margin;
    race->lowest_near = lowest_bits(needed);
    race->lowest_far = lowest_bits(needed + WINDOW);
}

static void enter(Race *race, int64_t token, uint64_t raw) {
    const float logit = race->logits[token];
    if (raw < (logit >= race->near ? race->lowest_near : race->lowest_far) || token == race->first) return;
    const double score = gumbel(raw) + logit / race->temperature;
    if (score > race->best)
        lead(race, token, score);
    else if (score > race->second)
        race->second = score;
}

static Race start_race(const float *logits, float temperature, double margin, uint64_t key, int64_t first) {
    const float largest = logits[first] / temperature;
    const double near = ((double)largest - WINDOW) * temperature;
    Race race = {
        .logits = logits,
        .temperature = temperature,
        .largest = largest,
        .near = (float)(near - fabs(near) * 0x1p-22),   /* as float32 rounds the quotients of logits */
        .margin = margin * (1 + fabs(largest)),
        .best = -INFINITY,
        .first = first,
    };
    uint64_t raw = key + ((uint64_t)first + 1) * GOLDEN;
    RAW_BITS(raw);
    lead(&race, first, gumbel(raw) + largest);
    return race;
}

/* The first winner of logits / temperature + noise; ``sure`` when nobody else comes within the margin. */
static int64_t draw_one(const float *logits, int64_t size, float temperature, uint64_t key, double margin, uint8_t *sure) {
    Race race = start_race(logits, temperature, margin, key, first_largest(logits, FLOAT32, size));
    uint64_t raw[BLOCK];
    Longs steps;
    for (int i = 0; i < LONGS; i++) steps[i] = key + (uint64_t)(i + 1) * GOLDEN;
    int64_t start = 0;
    for (; start + BLOCK <= size; start += BLOCK) {
        Longs candidates = {};
        for (int i = 0; i < BLOCK; i += LONGS, steps += LONGS * GOLDEN) {
            Longs z = steps;
            RAW_BITS(z);
            *(Longs *)(raw + i) = z;
            candidates |= (Longs)(z >= race.lowest_far);
        }
        for (int i = 0; i < BLOCK; i += 16) candidates |= (Longs)(values_at(logits, FLOAT32, start + i) >= race.near);
        if (any(candidates))
            for (int i = 0; i < BLOCK; i++) enter(&race, start + i, raw[i]);
    }
    for (; start < size; start++) {
        uint64_t z = key + ((uint64_t)start + 1) * GOLDEN;
        RAW_BITS(z);
        enter(&race, start, z);
    }
    *sure = race.best - race.second > race.margin;
    return race.winner;
}

/* Per row the token with the largest logit / temperature + noise, and whether it is that beyond all rounding. */
void draw(
    const float *logits, int64_t stride, int64_t num_rows, int64_t size, const float *temperatures, const uint64_t *keys,
    double margin, int num_threads, int64_t *tokens, uint8_t *sure) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t r = 0; r < num_rows; r++)
        tokens[r] = draw_one(logits + r * stride, size, temperatures ? temperatures[r] : 1, keys[r], margin, sure + r);
}
