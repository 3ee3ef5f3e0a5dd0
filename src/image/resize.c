/* resize.c - antialiased bicubic on 8-bit samples, in fixed point. */
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/mem.h"
#include "image/image.h"

#define CHANNELS 3
#define MAX_PRECISION 22 /* bits: 32 - 8 of a sample - 2 for overshoot */

/* rint of a / b, halves to even; both positive. */
static int64_t round_half_even(double quotient)
{
    return (int64_t)nearbyint(quotient);
}

ith_status ith_smart_resize(int64_t height, int64_t width, int64_t factor, int64_t min_pixels,
                            int64_t max_pixels, int64_t *out_height, int64_t *out_width,
                            ith_error *err)
{
    int64_t low = ith_min_i64(height, width), high = ith_max_i64(height, width);
    if (low <= 0 || (double)high / (double)low > ITH_IMAGE_MAX_ASPECT)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "a picture of %lld x %lld: sides may be at most %d:1 apart",
                        (long long)width, (long long)height, ITH_IMAGE_MAX_ASPECT);
    double h = (double)height, w = (double)width, f = (double)factor;
    int64_t hb = round_half_even(h / f) * factor, wb = round_half_even(w / f) * factor;
    if (hb * wb > max_pixels) {
        double beta = sqrt(h * w / (double)max_pixels);
        hb = ith_max_i64(factor, (int64_t)floor(h / beta / f) * factor);
        wb = ith_max_i64(factor, (int64_t)floor(w / beta / f) * factor);
    } else if (hb * wb < min_pixels) {
        double beta = sqrt((double)min_pixels / (h * w));
        hb = (int64_t)ceil(h * beta / f) * factor;
        wb = (int64_t)ceil(w * beta / f) * factor;
    }
    *out_height = hb;
    *out_width = wb;
    return ITH_OK;
}

/* Keys' cubic, a = -0.5. */
static double cubic(double x)
{
    const double a = -0.5;
    x = fabs(x);
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/* Taps of one axis: output o reads inputs first[o] .. first[o] + count[o] - 1. */
typedef struct {
    int64_t outputs, max_taps;
    int64_t *first, *count;
    double *exact;   /* [outputs, max_taps] */
    int32_t *weight; /* the same in fixed point */
    int precision;
} taps;

static void taps_deinit(taps *t)
{
    ith_free(t->first);
    ith_free(t->count);
    ith_free(t->exact);
    ith_free(t->weight);
}

static ith_status taps_init(taps *t, int64_t in, int64_t out, ith_resize_kind kind, ith_error *err)
{
    double ratio = (double)in / (double)out, stretch = ratio > 1 ? ratio : 1, largest = 0;
    *t = (taps){.outputs = out, .max_taps = (int64_t)ceil(4 * stretch) + 3};
    ITH_TRY(ith_alloc((void **)&t->first, out * 8, "resize", err));
    ITH_TRY(ith_alloc((void **)&t->count, out * 8, "resize", err));
    ITH_TRY(ith_alloc_zero((void **)&t->exact, out * t->max_taps, 8, "resize", err));
    ITH_TRY(ith_alloc_zero((void **)&t->weight, out * t->max_taps, 4, "resize", err));
    for (int64_t o = 0; o < out; o++) {
        double centre = ((double)o + 0.5) * ratio, sum = 0;
        int64_t from = (int64_t)(centre - 2 * stretch + 0.5);
        int64_t to = (int64_t)(centre + 2 * stretch + 0.5);
        from = ith_max_i64(from, 0);
        to = ith_min_i64(to, in);
        double *w = t->exact + o * t->max_taps;
        ITH_ASSERT(to - from <= t->max_taps);
        t->first[o] = from;
        t->count[o] = to - from;
        for (int64_t i = from; i < to; i++)
            sum += w[i - from] = cubic(((double)i - centre + 0.5) / stretch);
        for (int64_t i = 0; i < to - from; i++) {
            w[i] /= sum;
            largest = fmax(largest, w[i]);
        }
    }
    /* torchvision: the most bits that keep the largest weight in int16 */
    if (kind == ITH_RESIZE_PILLOW)
        t->precision = MAX_PRECISION;
    while (t->precision < MAX_PRECISION && floor(ldexp(largest, t->precision + 1) + 0.5) < 32768)
        t->precision++;
    for (int64_t i = 0; i < out * t->max_taps; i++)
        t->weight[i] = (int32_t)round(ldexp(t->exact[i], t->precision));
    return ITH_OK;
}

static uint8_t clamp_shift(int64_t sum, int precision)
{
    int64_t value = (sum + ((int64_t)1 << (precision - 1))) >> precision;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void horizontal(uint8_t *out, const uint8_t *in, const taps *t, int64_t rows, int64_t width)
{
    for (int64_t y = 0; y < rows; y++) {
        for (int64_t o = 0; o < t->outputs; o++) {
            const uint8_t *from = in + (y * width + t->first[o]) * CHANNELS;
            const int32_t *w = t->weight + o * t->max_taps;
            int64_t sum[CHANNELS] = {0};
            for (int64_t i = 0; i < t->count[o]; i++)
                for (int c = 0; c < CHANNELS; c++)
                    sum[c] += (int64_t)w[i] * from[i * CHANNELS + c];
            for (int c = 0; c < CHANNELS; c++)
                out[(y * t->outputs + o) * CHANNELS + c] = clamp_shift(sum[c], t->precision);
        }
    }
}

static void vertical(uint8_t *out, const uint8_t *in, const taps *t, int64_t width)
{
    int64_t row = width * CHANNELS;
    for (int64_t o = 0; o < t->outputs; o++) {
        const int32_t *w = t->weight + o * t->max_taps;
        const uint8_t *from = in + t->first[o] * row;
        for (int64_t x = 0; x < row; x++) {
            int64_t sum = 0;
            for (int64_t i = 0; i < t->count[o]; i++)
                sum += (int64_t)w[i] * from[i * row + x];
            out[o * row + x] = clamp_shift(sum, t->precision);
        }
    }
}

ith_status ith_image_resize(ith_image *out, const ith_image *in, int64_t height, int64_t width,
                            ith_resize_kind kind, ith_error *err)
{
    ith_status status = ITH_OK;
    ith_image result = {width, height, NULL};
    taps across = {0}, down = {0};
    uint8_t *between = NULL;
    ITH_TRY_OUT(taps_init(&across, in->width, width, kind, err));
    ITH_TRY_OUT(taps_init(&down, in->height, height, kind, err));
    ITH_TRY_OUT(ith_alloc((void **)&between, in->height * width * CHANNELS, "picture", err));
    ITH_TRY_OUT(ith_alloc((void **)&result.rgb, height * width * CHANNELS, "picture", err));
    if (width == in->width)
        memcpy(between, in->rgb, (size_t)(in->height * width * CHANNELS));
    else
        horizontal(between, in->rgb, &across, in->height, in->width);
    if (height == in->height)
        memcpy(result.rgb, between, (size_t)(height * width * CHANNELS));
    else
        vertical(result.rgb, between, &down, width);
    *out = result;
    result.rgb = NULL;
out:
    ith_free(result.rgb);
    ith_free(between);
    taps_deinit(&across);
    taps_deinit(&down);
    return status;
}
