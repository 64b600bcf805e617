/* Attention over packed rows, each of its own length: no padding, no copies between layouts, exponentials by AVX-512.
 *
 * For one row and one head, Q, K and V are laid out once as floats (K transposed), and for each BLOCK of queries
 *
 *     scores = Q · Kᵀ        panel(), 8 queries by 32 keys in registers
 *     exponentials           of scores less the block's own maximum of each query
 *     output = P · V / sum   panel(), 8 queries by 32 of the head's width in registers
 *
 * All sums are float32 for either type of input. One thread; the caller splits nothing. `native_attention.py` compiles
 * it and says what comes in; nothing here is checked again.
 */
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, BLOCK = 8 };
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

static inline long rounded_up(long count, long step) { return (count + step - 1) / step * step; }

/* 16 values of either type, as floats. */
static inline floats load(const void *from, long at, int is_bf16)
{
    if (!is_bf16)
        return *(const floats *)((const float *)from + at);
    return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)from + at), ints) << 16);
}

/* To the nearest, ties to even, for bf16. */
static inline void store(void *to, long at, floats values, int is_bf16)
{
    if (!is_bf16) {
        *(floats *)((float *)to + at) = values;
        return;
    }
    ints bits = (ints)values;
    bits += 0x7fff + ((bits >> 16) & 1);
    *(halves *)((uint16_t *)to + at) = __builtin_convertvector(bits >> 16, halves);
}

/* e to the power of x, for x <= 0, to 2 units in the last place; below -87, where floats end, it is e to the -87. */
static inline floats exponential(floats x)
{
    const float round_to_int = 12582912.0f; /* 1.5 · 2^23: what is added to it loses its fraction */
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x); /* in this order: of a NaN it gives the second, so NaN stays NaN */
    floats shifted = x * 1.44269504f + round_to_int;
    floats whole = shifted - round_to_int;
    floats rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    floats power = rest * 1.98756915e-4f + 1.39819995e-3f; /* Cephes, expf */
    power = power * rest + 8.33345205e-3f;
    power = power * rest + 4.16657962e-2f;
    power = power * rest + 1.66666657e-1f;
    power = power * rest + 0.5f;
    power = power * rest * rest + rest + 1.0f;
    return power * (floats)(((ints)shifted << 23) + (127 << 23)); /* times 2^whole; higher bits of `shifted` fall off */
}

/* c[BLOCK][vectors · LANES] = a[BLOCK][depth] · b[depth][vectors · LANES], with sums in registers. */
static inline __attribute__((always_inline)) void panel(
    const float *a, long a_stride, const float *b, long b_stride, long depth, floats c[BLOCK][2], int vectors)
{
    floats sums[BLOCK][2] = {};
    for (long at = 0; at < depth; at++) {
        floats left = *(const floats *)(b + at * b_stride), right = {};
        if (vectors == 2)
            right = *(const floats *)(b + at * b_stride + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < BLOCK; row++) {
            float factor = a[row * a_stride + at];
            sums[row][0] += factor * left;
            if (vectors == 2)
                sums[row][1] += factor * right;
        }
    }
    memcpy(c, sums, sizeof sums);
}

/* scores[BLOCK][keys_stride] to exponentials in place, and one over the sum of each query. */
static inline void softmax(float *scores, long keys, long keys_stride, float over_sum[BLOCK])
{
    for (int row = 0; row < BLOCK; row++) {
        float *own = scores + row * keys_stride;
        for (long at = keys; at < keys_stride; at++)
            own[at] = -INFINITY; /* columns that only fill up the last vector */
        floats most = *(floats *)own, sums = {};
        for (long at = LANES; at < keys_stride; at += LANES)
            most = _mm512_max_ps(most, *(floats *)(own + at));
        float maximum = _mm512_reduce_max_ps(most);
        for (long at = 0; at < keys_stride; at += LANES) {
            floats power = exponential(*(floats *)(own + at) - maximum);
            sums += power;
            *(floats *)(own + at) = power;
        }
        over_sum[row] = 1 / _mm512_reduce_add_ps(sums);
    }
}

struct scratch {
    float *query, *key, *value, *scores; /* [length][width], [width][keys_stride], [length][width], [BLOCK][keys_stride] */
};

static inline __attribute__((always_inline)) void attend_one(
    const struct scratch *own, const void *qkv, void *out, const uint8_t *mask, long length, long heads, long width,
    long head, int is_bf16)
{
    const long hidden = heads * width, keys_stride = rounded_up(length, LANES);
    const float scale = 1 / sqrtf(width);
    for (long token = 0; token < length; token++)
        for (long at = 0; at < width; at += LANES) {
            long from = token * 3 * hidden + head * width + at;
            *(floats *)(own->query + token * width + at) = load(qkv, from, is_bf16) * scale;
            floats key = load(qkv, from + hidden, is_bf16);
            for (int lane = 0; lane < LANES; lane++)
                own->key[(at + lane) * keys_stride + token] = key[lane];
            *(floats *)(own->value + token * width + at) = load(qkv, from + 2 * hidden, is_bf16);
        }
    for (long first = 0; first < length; first += BLOCK) {
        floats sums[BLOCK][2];
        float over_sum[BLOCK];
        const float *queries = own->query + first * width; /* past the last one lies what an earlier row left: unused */
        for (long at = 0; at < keys_stride; at += 2 * LANES) {
            int vectors = at + LANES < keys_stride ? 2 : 1;
            if (vectors == 2)
                panel(queries, width, own->key + at, keys_stride, width, sums, 2);
            else
                panel(queries, width, own->key + at, keys_stride, width, sums, 1);
            for (int row = 0; row < BLOCK; row++)
                for (int vector = 0; vector < vectors; vector++)
                    *(floats *)(own->scores + row * keys_stride + at + vector * LANES) = sums[row][vector];
        }
        if (mask) /* the least float and not minus infinity: where all are masked, all count alike */
            for (long key = 0; key < length; key++)
                for (int row = 0; row < BLOCK && !mask[key]; row++)
                    own->scores[row * keys_stride + key] = -FLT_MAX;
        softmax(own->scores, length, keys_stride, over_sum);
        long rows = length - first < BLOCK ? length - first : BLOCK;
        for (long at = 0; at < width; at += 2 * LANES) {
            int vectors = at + LANES < width ? 2 : 1;
            if (vectors == 2)
                panel(own->scores, keys_stride, own->value + at, width, length, sums, 2);
            else
                panel(own->scores, keys_stride, own->value + at, width, length, sums, 1);
            for (long row = 0; row < rows; row++)
                for (int vector = 0; vector < vectors; vector++)
                    store(out, (first + row) * hidden + head * width + at + vector * LANES,
                          sums[row][vector] * over_sum[row], is_bf16);
        }
    }
}

/* out[tokens][heads · width] from qkv[tokens][3][heads · width], both of one type, for rows one after another.
 * mask[tokens] may be null; width is a multiple of LANES. Returns 0, or -1 when there is no memory. */
int tidegate_attend(const void *qkv, void *out, const int64_t *lengths, const uint8_t *mask, long rows, long heads,
                    long width, int is_bf16)
{
    long longest = 0;
    for (long row = 0; row < rows; row++)
        longest = lengths[row] > longest ? lengths[row] : longest;
    const long padded = rounded_up(longest, LANES), size = is_bf16 ? 2 : 4;
    float *memory = aligned_alloc(64, sizeof(float) * padded * (3 * width + BLOCK));
    if (!memory)
        return -1;
    memset(memory, 0, sizeof(float) * padded * width); /* so that no NaN is in queries that are unused */
    const struct scratch own = {memory, memory + padded * width, memory + 2 * padded * width, memory + 3 * padded * width};
    for (long row = 0, start = 0; row < rows; start += lengths[row++]) {
        const char *from = (const char *)qkv + start * 3 * heads * width * size;
        char *to = (char *)out + start * heads * width * size;
        const uint8_t *row_mask = mask ? mask + start : 0;
        for (long head = 0; head < heads; head++) {
            if (is_bf16)
                attend_one(&own, from, to, row_mask, lengths[row], heads, width, head, 1);
            else
                attend_one(&own, from, to, row_mask, lengths[row], heads, width, head, 0);
        }
    }
    free(memory);
    return 0;
}
