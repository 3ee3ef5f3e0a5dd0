/* rope.c - rotary frequencies and tables. Formulas: Su et al. 2021; YaRN: Peng et al. 2023. */
#include "model/model.h"

#include <math.h>

int64_t ith_rope_dim(const ith_rope_config *rope, int64_t head_dim)
{
    return (int64_t)((double)head_dim * rope->partial_rotary_factor);
}

/* Dimension whose wavelength fits `rotations` times into the original context. */
static double correction_dim(double rotations, double dim, double theta, double original)
{
    return dim * log(original / (rotations * 2.0 * 3.14159265358979323846)) / (2.0 * log(theta));
}

/* inv_freq[i] for i in [0, dim/2), in double and then rounded to f32 as the Python models keep
 * them. */
static float inv_freq_at(const ith_rope_config *rope, int64_t dim, int64_t max_position_embeddings,
                         int64_t i)
{
    float base = (float)(1.0 / pow(rope->theta, 2.0 * (double)i / (double)dim));
    if (rope->type == ITH_ROPE_DEFAULT)
        return base;
    if (rope->type == ITH_ROPE_LINEAR)
        return (float)((double)base / rope->factor);
    double original =
        (double)(rope->original_max_position_embeddings > 0 ? rope->original_max_position_embeddings
                                                            : max_position_embeddings);
    double low = correction_dim(rope->beta_fast, (double)dim, rope->theta, original);
    double high = correction_dim(rope->beta_slow, (double)dim, rope->theta, original);
    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0.0);
    high = fmin(high, (double)dim - 1.0);
    if (low == high)
        high += 0.001;
    double ramp = fmin(fmax(((double)i - low) / (high - low), 0.0), 1.0);
    return (float)((double)base * (1.0 - ramp) + (double)base / rope->factor * ramp);
}

void ith_rope_table(const ith_rope_config *rope, int64_t head_dim, int64_t max_position_embeddings,
                    int64_t n, ith_dtype dtype, void *cos_out, void *sin_out)
{
    ITH_ASSERT(dtype == ITH_F32 || dtype == ITH_BF16);
    int64_t dim = ith_rope_dim(rope, head_dim), half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float inv_freq = inv_freq_at(rope, dim, max_position_embeddings, i);
        for (int64_t p = 0; p < n; p++) {
            float angle = (float)p * inv_freq; /* one f32 product, as the Python models do */
            float c = (float)(cos((double)angle) * rope->attention_factor);
            float s = (float)(sin((double)angle) * rope->attention_factor);
            if (dtype == ITH_BF16) {
                ((uint16_t *)cos_out)[p * half + i] = ith_f32_to_bf16(c);
                ((uint16_t *)sin_out)[p * half + i] = ith_f32_to_bf16(s);
            } else {
                ((float *)cos_out)[p * half + i] = c;
                ((float *)sin_out)[p * half + i] = s;
            }
        }
    }
}
