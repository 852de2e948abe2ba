/* The hot loops of the reference in C, for the CPU. Same operations in the same order as the torch definition in this
 * folder, compiled without contraction or fast math, so that the bits are the same; the tests compare them.
 *
 * A tensor is seen in its moved layout: lead x rows x length with three strides (in elements). Work goes in groups of
 * blocks: neighbours in a row where the length is contiguous, else neighbours across rows, so that reads stay in a
 * cache line either way. Format constants arrive in `struct format` and those of the random generator as definitions;
 * only the layout of binary32 is written here.
 */
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define GROUP 16         /* blocks that share one computation of scales */
#define MAX_BLOCK 128
#define DRAWS 64         /* random draws computed together */
#define INFINITY_BITS 0x7F800000
#define MAGNITUDE 0x7FFFFFFF
#define FRACTION 0x007FFFFF
#define HALF_SUBNORMAL 0x00400000 /* 2^-127 */
#define NAN_BITS 0x7FC00000

struct view { /* dtype: 0 float32, 1 bfloat16 (random bits: 0) */
    const void *data;
    int64_t dtype, lead_stride, row_stride, col_stride;
};

struct format {
    int64_t fixed;          /* 1: fixed point with `mantissa_bits` fraction bits */
    int64_t mantissa_bits, min_exponent_bits, bits, sr_bits;
    int64_t code_offset;    /* FP32's leading bits less a normal code */
    float max, per_step;    /* largest value; one over the smallest */
    int64_t scale_rule;     /* 0: E4M3 under a tensor scale; 1 floor, 2 ceil of a rounded product, 3 exact ceil */
    int64_t scale_offset, scale_threshold, zero_code;   /* of the E8M0 rules */
    float scale_ratio;                                  /* rule 0: 1/6; rule 2: 1/max */
    float scale_max, scale_per_step, fp32_max;          /* of E4M3, and the clamp */
    int64_t scale_mantissa_bits, scale_min_exponent_bits, scale_code_offset, scale_nan;
};

static ALWAYS_INLINE int32_t bits_of(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
static ALWAYS_INLINE float float_of(int32_t b) { float x; memcpy(&x, &b, 4); return x; }
static ALWAYS_INLINE float smaller(float a, float b) { return a < b ? a : b; }

static ALWAYS_INLINE float round_nearest(float x, float max, int32_t min_exponent_bits, int32_t mantissa_bits) {
    int32_t sign = bits_of(x) & ~MAGNITUDE;
    float magnitude = smaller(float_of(bits_of(x) & MAGNITUDE), max);
    int32_t exponent = bits_of(magnitude) & INFINITY_BITS;
    exponent = exponent > min_exponent_bits ? exponent : min_exponent_bits;
    float anchor = float_of(exponent + ((23 - mantissa_bits) << 23));
    return float_of(bits_of((magnitude + anchor) - anchor) | sign);
}

static ALWAYS_INLINE int32_t rounds_away(float fraction, uint32_t random, int32_t sr_bits) {
    if (sr_bits == 8) return (int32_t)(random >> 24) < (int32_t)(fraction * 256.0f);
    float scaled = fraction * 65536.0f;
    int32_t upper = (int32_t)scaled;
    int32_t lower = (int32_t)((scaled - (float)upper) * 65536.0f);
    uint32_t threshold = ((uint32_t)upper << 16) | (uint32_t)lower;
    return (int32_t)(random ^ 0x80000000u) < (int32_t)(threshold ^ 0x80000000u);
}

static ALWAYS_INLINE float round_stochastic(float x, uint32_t random, float max, int32_t min_exponent_bits,
                                     int32_t mantissa_bits, int32_t sr_bits) {
    int32_t sign = bits_of(x) & ~MAGNITUDE, mantissa = mantissa_bits << 23;
    float magnitude = smaller(float_of(bits_of(x) & MAGNITUDE), max);
    int32_t exponent = bits_of(magnitude) & INFINITY_BITS;
    exponent = exponent > min_exponent_bits ? exponent : min_exponent_bits;
    float steps = magnitude * float_of((254 << 23) + mantissa - exponent);
    int32_t below = (int32_t)steps;
    int32_t rounded = below + rounds_away(steps - (float)below, random, sr_bits);
    return float_of(bits_of((float)rounded * float_of(exponent - mantissa)) | sign);
}

static ALWAYS_INLINE float round_fixed(float steps, float limit, uint32_t random, int32_t stochastic, int32_t sr_bits) {
    const float anchor = 12582912.0f; /* 1.5 * 2^23 */
    steps = steps < -limit ? -limit : (steps > limit ? limit : steps);
    if (!stochastic) return (steps + anchor) - anchor;
    float magnitude = float_of(bits_of(steps) & MAGNITUDE);
    int32_t below = (int32_t)magnitude;
    int32_t rounded = below + rounds_away(magnitude - (float)below, random, sr_bits);
    return (float)(steps < 0 ? -rounded : rounded);
}

static void load_blocks(const struct view *v, int64_t base, int64_t count, int64_t block_stride, int64_t down,
                        int64_t length, const int64_t *filled, float buffer[][MAX_BLOCK], const float **blocks) {
    for (int64_t j = 0; j < count; j++) blocks[j] = buffer[j];
    if (down && v->dtype == 0) {
        const float *x = (const float *)v->data + base;
        for (int64_t k = 0; k < filled[0]; k++)
            for (int64_t j = 0; j < count; j++) buffer[j][k] = x[k * v->col_stride + j * block_stride];
    } else if (down) {
        const uint16_t *x = (const uint16_t *)v->data + base;
        for (int64_t k = 0; k < filled[0]; k++)
            for (int64_t j = 0; j < count; j++)
                buffer[j][k] = float_of((int32_t)((uint32_t)x[k * v->col_stride + j * block_stride] << 16));
    } else {
        for (int64_t j = 0; j < count; j++) {
            int64_t start = base + j * block_stride, stride = v->col_stride;
            if (v->dtype == 0 && stride == 1 && filled[j] == length) {
                blocks[j] = (const float *)v->data + start;
            } else if (v->dtype == 0) {
                const float *x = (const float *)v->data + start;
                for (int64_t k = 0; k < filled[j]; k++) buffer[j][k] = x[k * stride];
            } else {
                const uint16_t *x = (const uint16_t *)v->data + start;
                for (int64_t k = 0; k < filled[j]; k++) buffer[j][k] = float_of((int32_t)((uint32_t)x[k * stride] << 16));
            }
        }
    }
    for (int64_t j = 0; j < count; j++)
        for (int64_t k = filled[j]; k < length; k++) buffer[j][k] = 0.0f;
}

static ALWAYS_INLINE int32_t block_top_of(const float *x, int64_t length) {
    int32_t top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t k = 0; k < length; k++) {
        int32_t m = bits_of(x[k]) & MAGNITUDE;
        top = m > top ? m : top;
    }
    return top;
}

/* A block length that the compiler knows halves the time of a short block. */
static int32_t block_top(const float *x, int64_t length) {
    return length == 16 ? block_top_of(x, 16) : length == 32 ? block_top_of(x, 32) : block_top_of(x, length);
}

static ALWAYS_INLINE float power_of_two(int32_t code) {
    int32_t bits = code == 0 ? HALF_SUBNORMAL : code << 23;
    return float_of(code == 255 ? NAN_BITS : bits);
}

static void scales(const struct format *f, const int32_t *restrict top, const float *restrict encode,
                   int32_t *restrict code, float *restrict value, float *restrict factor) {
    const float ratio_of_max = f->scale_ratio, fp32_max = f->fp32_max;
    if (f->scale_rule == 0) {
        const int32_t lowest = (int32_t)f->scale_min_exponent_bits, mantissa = (int32_t)f->scale_mantissa_bits;
        const int32_t offset = (int32_t)f->scale_code_offset;
        const float max = f->scale_max, per_step = f->scale_per_step;
#pragma omp simd
        for (int j = 0; j < GROUP; j++) {
            float amax = float_of(top[j] < INFINITY_BITS ? top[j] : 0);
            float scaled = smaller(amax * (encode[j] * ratio_of_max), fp32_max);
            float scale = round_nearest(scaled, max, lowest, mantissa);
            float product = scale * (1.0f / encode[j]);
            factor[j] = smaller(1.0f / product, fp32_max);
            value[j] = scale;
            int32_t normal = (bits_of(scale) >> (23 - mantissa)) - offset;
            code[j] = normal >= 1 << mantissa ? normal : (int32_t)(scale * per_step);
        }
    } else {
        const int32_t rule = (int32_t)f->scale_rule, offset = (int32_t)f->scale_offset;
        const int32_t threshold = (int32_t)f->scale_threshold, zero_code = (int32_t)f->zero_code;
#pragma omp simd
        for (int j = 0; j < GROUP; j++) {
            int32_t t = top[j] < INFINITY_BITS ? top[j] : 0, c;
            if (rule == 1) {
                c = (t >> 23) - offset;
            } else if (rule == 2) {
                int32_t ratio = bits_of(float_of(t) * ratio_of_max);
                c = (ratio >> 23) + ((ratio & FRACTION) > ((ratio >> 23) == 0 ? HALF_SUBNORMAL : 0));
            } else {
                c = (t >> 23) - offset + ((t & FRACTION) > threshold);
                if (offset == 0 && (t >> 23) == 0) c = t > ((FRACTION + 1 + threshold) >> 1);
            }
            c = c < 0 ? 0 : (c > 254 ? 254 : c);
            c = t == 0 ? zero_code : c;
            code[j] = c;
            value[j] = power_of_two(c);
            factor[j] = power_of_two(254 - c);
        }
    }
#pragma omp simd
    for (int j = 0; j < GROUP; j++)
        if (top[j] >= INFINITY_BITS) {
            code[j] = (int32_t)f->scale_nan;
            value[j] = float_of(NAN_BITS);
        }
}

/* y = round(x * factor) * weight: weight 1 for elements in units of their scale, the scale for values. */
static ALWAYS_INLINE void round_block_of(const struct format *f, const float *restrict x, float factor, float weight,
                        const uint32_t *restrict random, int64_t length, float *restrict y) {
    const int32_t lowest = (int32_t)f->min_exponent_bits, mantissa = (int32_t)f->mantissa_bits;
    const int32_t sr = (int32_t)f->sr_bits;
    const float max = f->max;
    if (f->fixed) {
        const float unit = (float)(1 << mantissa), last = 1.0f / unit, limit = max * unit;
        if (random)
#pragma omp simd
            for (int64_t k = 0; k < length; k++)
                y[k] = round_fixed(x[k] * factor * unit, limit, random[k], 1, sr) * last * weight;
        else
#pragma omp simd
            for (int64_t k = 0; k < length; k++)
                y[k] = round_fixed(x[k] * factor * unit, limit, 0, 0, sr) * last * weight;
    } else if (!random) {
#pragma omp simd
        for (int64_t k = 0; k < length; k++) y[k] = round_nearest(x[k] * factor, max, lowest, mantissa) * weight;
    } else if (sr == 8) {
#pragma omp simd
        for (int64_t k = 0; k < length; k++)
            y[k] = round_stochastic(x[k] * factor, random[k], max, lowest, mantissa, 8) * weight;
    } else {
#pragma omp simd
        for (int64_t k = 0; k < length; k++)
            y[k] = round_stochastic(x[k] * factor, random[k], max, lowest, mantissa, 32) * weight;
    }
}

static void round_block(const struct format *f, const float *x, float factor, float weight, const uint32_t *random,
                        int64_t length, float *y) {
    if (length == 16)
        round_block_of(f, x, factor, weight, random, 16, y);
    else if (length == 32)
        round_block_of(f, x, factor, weight, random, 32, y);
    else
        round_block_of(f, x, factor, weight, random, length, y);
}

static ALWAYS_INLINE void store_codes_of(const struct format *f, const float *restrict x, int64_t length, int64_t filled,
                                         uint8_t *restrict out) {
    uint8_t codes[MAX_BLOCK], packed[MAX_BLOCK / 2];
    const int32_t top = (int32_t)f->bits - 1, drop = 23 - (int32_t)f->mantissa_bits;
    const int32_t offset = (int32_t)f->code_offset, first_normal = 1 << f->mantissa_bits;
    const float per_step = f->per_step;
    if (f->fixed) {
#pragma omp simd
        for (int64_t k = 0; k < length; k++) codes[k] = (uint8_t)(int32_t)(x[k] * (float)(1 << f->mantissa_bits));
    } else {
#pragma omp simd
        for (int64_t k = 0; k < length; k++) {
            int32_t b = bits_of(x[k]), normal = ((b & MAGNITUDE) >> drop) - offset;
            int32_t subnormal = (int32_t)(float_of(b & MAGNITUDE) * per_step);
            int32_t code = normal >= first_normal ? normal : subnormal;
            codes[k] = (uint8_t)(code | ((b >> (31 - top)) & (1 << top)));
        }
    }
    if (f->bits == 4) {
        for (int64_t k = 0; k < length / 8; k++) { /* eight nibbles, little-endian, to four bytes */
            uint64_t v;
            memcpy(&v, codes + 8 * k, 8);
            v = (v | v >> 4) & 0x00FF00FF00FF00FFu;
            v = (v | v >> 8) & 0x0000FFFF0000FFFFu;
            uint32_t four = (uint32_t)(v | v >> 16);
            memcpy(packed + 4 * k, &four, 4);
        }
        if (filled == length)
            memcpy(out, packed, length / 2);
        else
            memcpy(out, packed, (filled + 1) / 2);
    } else if (filled == length) {
        memcpy(out, codes, length);
    } else {
        memcpy(out, codes, filled);
    }
}

static void store_codes(const struct format *f, const float *x, int64_t length, int64_t filled, uint8_t *out) {
    if (length == 16)
        store_codes_of(f, x, 16, filled, out);
    else if (length == 32)
        store_codes_of(f, x, 32, filled, out);
    else
        store_codes_of(f, x, length, filled, out);
}

/* One group: blocks `first`, `first` + 1, ... of a row, or block `first` of rows row, row + 1, ... */
struct group { int64_t lead, row, first, count, down; };

static struct group group_at(int64_t g, int64_t rows, int64_t blocks, int64_t down) {
    int64_t inner = ((down ? rows : blocks) + GROUP - 1) / GROUP, outer = down ? blocks : rows;
    int64_t start = g % inner * GROUP, rest = g / inner;
    int64_t left = (down ? rows : blocks) - start;
    struct group out = {rest / outer, down ? start : rest % outer, down ? rest % outer : start,
                        left < GROUP ? left : GROUP, down};
    return out;
}

static int64_t num_groups(int64_t lead, int64_t rows, int64_t blocks, int64_t down) {
    return lead * (down ? blocks : rows) * (((down ? rows : blocks) + GROUP - 1) / GROUP);
}

static void load_group(const struct view *v, const struct group *g, int64_t length, int64_t row_length,
                       int64_t *filled, float buffer[][MAX_BLOCK], const float **blocks) {
    for (int64_t j = 0; j < g->count; j++) {
        int64_t left = row_length - (g->first + (g->down ? 0 : j)) * length;
        filled[j] = left < length ? left : length;
    }
    load_blocks(v, g->lead * v->lead_stride + g->row * v->row_stride + g->first * length * v->col_stride, g->count,
                g->down ? v->row_stride : length * v->col_stride, g->down, length, filled, buffer, blocks);
}

static int runs_down(const struct view *v) { return v->col_stride != 1; }

/* Magnitude bits of the amax of each block, int32 (lead, rows, blocks). */
void block_tops(const struct view *x, int64_t lead, int64_t rows, int64_t row_length, int64_t length, int32_t *out,
                int64_t threads) {
    int64_t blocks = (row_length + length - 1) / length, down = runs_down(x);
    int64_t total = num_groups(lead, rows, blocks, down);
    (void)threads;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t n = 0; n < total; n++) {
        float buffer[GROUP][MAX_BLOCK];
        const float *block[GROUP];
        int64_t filled[GROUP];
        struct group g = group_at(n, rows, blocks, down);
        load_group(x, &g, length, row_length, filled, buffer, block);
        for (int64_t j = 0; j < g.count; j++)
            out[(g.lead * rows + g.row + (down ? j : 0)) * blocks + g.first + (down ? 0 : j)] = block_top(block[j], length);
    }
}

/* amax, encode and decode tensor scale of `groups` runs of `run` block maxima. Returns 1, unless a block is not finite:
 * then 0, and the amax over the finite elements has to be found another way. */
int64_t tensor_scales(const int32_t *tops, int64_t groups, int64_t run, float span, float fp32_max, float *amax,
                      float *encode, float *decode) {
    for (int64_t g = 0; g < groups; g++) {
        int32_t top = 0;
        for (int64_t i = 0; i < run; i++) top = tops[g * run + i] > top ? tops[g * run + i] : top;
        if (top >= INFINITY_BITS) return 0;
        amax[g] = float_of(top);
        encode[g] = top == 0 ? 1.0f : smaller(span / amax[g], fp32_max);
        decode[g] = 1.0f / encode[g];
    }
    return 1;
}

/* values (or codes) and scale codes. tops: as block_tops writes them, or NULL to take each block's own.
 * encode: encode tensor scale with strides (lead, row, block) or NULL. random: view in the moved layout or NULL. */
void quantize(const struct format *f, const struct view *x, int64_t lead, int64_t rows, int64_t row_length,
              int64_t length, const int32_t *tops, const float *encode, int64_t e_lead, int64_t e_row, int64_t e_block,
              const struct view *random, float *values, uint8_t *codes, int64_t code_stride, uint8_t *scale_codes,
              int64_t threads) {
    int64_t blocks = (row_length + length - 1) / length, down = runs_down(x);
    int64_t total = num_groups(lead, rows, blocks, down);
    (void)threads;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t n = 0; n < total; n++) {
        float buffer[GROUP][MAX_BLOCK], drawn[GROUP][MAX_BLOCK], rounded[MAX_BLOCK];
        const float *element[GROUP], *draw[GROUP];
        int64_t filled[GROUP];
        int32_t top[GROUP] = {0}, code[GROUP];
        float enc[GROUP], value[GROUP], factor[GROUP];
        struct group g = group_at(n, rows, blocks, down);
        load_group(x, &g, length, row_length, filled, buffer, element);
        if (random) load_group(random, &g, length, row_length, filled, drawn, draw);
        for (int64_t j = 0; j < GROUP; j++) enc[j] = 1.0f;
        for (int64_t j = 0; j < g.count; j++) {
            int64_t row = g.row + (down ? j : 0), block = g.first + (down ? 0 : j);
            top[j] = tops ? tops[(g.lead * rows + row) * blocks + block] : block_top(element[j], length);
            if (encode) enc[j] = encode[g.lead * e_lead + row * e_row + block * e_block];
        }
        scales(f, top, enc, code, value, factor);
        for (int64_t j = 0; j < g.count; j++) {
            int64_t row = g.lead * rows + g.row + (down ? j : 0), block = g.first + (down ? 0 : j);
            int bad = top[j] >= INFINITY_BITS;
            const uint32_t *bits = random ? (const uint32_t *)draw[j] : 0;
            if (values) {
                float *out = values + row * row_length + block * length;
                float *whole = filled[j] == length ? out : rounded;
                if (bad)
                    for (int64_t k = 0; k < length; k++) whole[k] = value[j];
                else
                    round_block(f, element[j], factor[j], value[j], bits, length, whole);
                if (whole != out) memcpy(out, rounded, 4 * filled[j]);
            }
            if (codes) {
                int64_t at = f->bits == 4 ? block * length / 2 : block * length;
                if (bad)
                    memset(rounded, 0, sizeof rounded);
                else
                    round_block(f, element[j], factor[j], 1.0f, bits, length, rounded);
                store_codes(f, rounded, length, filled[j], codes + row * code_stride + at);
            }
            if (scale_codes) scale_codes[row * blocks + block] = (uint8_t)code[j];
        }
    }
}

/* Values of codes: table[code] * scale_table[scale code], float32 (rows, row_length). */
void decode(const uint8_t *codes, const uint8_t *scale_codes, int64_t bits, int64_t rows, int64_t row_length,
            int64_t length, const float *restrict table, const float *restrict scale_table, float *restrict out,
            int64_t threads) {
    int64_t blocks = (row_length + length - 1) / length, stored = bits == 4 ? (row_length + 1) / 2 : row_length;
    (void)threads;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            float scale = scale_table[scale_codes[row * blocks + block]];
            int64_t from = block * length, to = from + length < row_length ? from + length : row_length;
            const uint8_t *code = codes + row * stored;
            float *y = out + row * row_length;
            if (bits == 4)
                for (int64_t k = from; k < to; k++) y[k] = table[code[k / 2] >> k % 2 * 4 & 0xF] * scale;
            else
                for (int64_t k = from; k < to; k++) y[k] = table[code[k]] * scale;
        }
}

/* Philox4x32: words 0..4*draws-1 of the counters 0.. under a 64-bit key. */
void philox(uint64_t seed, int64_t draws, uint32_t *restrict out, int64_t threads) {
    uint32_t k0[PHILOX_ROUNDS], k1[PHILOX_ROUNDS];
    for (int r = 0; r < PHILOX_ROUNDS; r++) {
        k0[r] = (uint32_t)seed + (uint32_t)r * PHILOX_INCREMENT_0;
        k1[r] = (uint32_t)(seed >> 32) + (uint32_t)r * PHILOX_INCREMENT_1;
    }
    (void)threads;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t start = 0; start < draws; start += DRAWS) {
        uint32_t w0[DRAWS], w1[DRAWS], w2[DRAWS], w3[DRAWS];
        uint32_t low = (uint32_t)start, high = (uint32_t)((uint64_t)start >> 32); /* DRAWS divides 2^32 */
        for (uint32_t i = 0; i < DRAWS; i++) {
            uint32_t c0 = low + i, c1 = high, c2 = 0, c3 = 0;
#pragma GCC unroll 16
            for (int r = 0; r < PHILOX_ROUNDS; r++) {
                uint64_t p0 = (uint64_t)c0 * PHILOX_MULTIPLIER_0, p1 = (uint64_t)c2 * PHILOX_MULTIPLIER_1;
                c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0[r];
                c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1[r];
                c1 = (uint32_t)p1;
                c3 = (uint32_t)p0;
            }
            w0[i] = c0, w1[i] = c1, w2[i] = c2, w3[i] = c3;
        }
        int64_t left = draws - start < DRAWS ? draws - start : DRAWS;
        for (int64_t i = 0; i < left; i++) {
            uint32_t *word = out + 4 * (start + i);
            word[0] = w0[i], word[1] = w1[i], word[2] = w2[i], word[3] = w3[i];
        }
    }
}

/* Hadamard transform of groups of n along the length, rounded to bfloat16 once; float32 (lead, rows, padded). */
void hadamard(const struct view *x, int64_t lead, int64_t rows, int64_t row_length, int64_t n, const float *signs,
              float after, float *out, int64_t threads) {
    int64_t blocks = (row_length + n - 1) / n, down = runs_down(x), total = num_groups(lead, rows, blocks, down);
    (void)threads;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t t = 0; t < total; t++) {
        float buffer[GROUP][MAX_BLOCK];
        const float *group[GROUP];
        int64_t filled[GROUP];
        struct group g = group_at(t, rows, blocks, down);
        load_group(x, &g, n, row_length, filled, buffer, group);
        for (int64_t j = 0; j < g.count; j++) {
            float v[MAX_BLOCK];
            int64_t row = g.lead * rows + g.row + (down ? j : 0), block = g.first + (down ? 0 : j);
            for (int64_t k = 0; k < n; k++) v[k] = group[j][k] * signs[k];
            for (int64_t half = 1; half < n; half *= 2)
                for (int64_t k = 0; k < n; k += 2 * half)
                    for (int64_t i = k; i < k + half; i++) {
                        float upper = v[i], lower = v[i + half];
                        v[i] = upper + lower;
                        v[i + half] = upper - lower;
                    }
            for (int64_t k = 0; k < n; k++) {
                float y = v[k] * after;
                uint32_t b = (uint32_t)bits_of(y);
                b = (b & MAGNITUDE) > INFINITY_BITS ? NAN_BITS : (b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000u;
                v[k] = float_of((int32_t)b);
            }
            memcpy(out + (row * blocks + block) * n, v, 4 * n);
        }
    }
}
