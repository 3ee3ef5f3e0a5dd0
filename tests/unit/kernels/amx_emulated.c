/* amx_emulated.c - level amx with the tile instructions in C, so that its packing, edges and loops
 * are tested on machines without AMX. */
#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/cpu_internal.h"

typedef struct {
    float at[16][16];
} emulated_tile;

static _Thread_local emulated_tile emulated[8];
static _Thread_local bool emulated_shape;

static void emulated_check(void)
{
    ITH_ASSERT(emulated_shape); /* the processor would raise an illegal instruction */
}

static void emulated_load(emulated_tile *t, const void *base, int64_t step)
{
    emulated_check();
    for (int i = 0; i < 16; i++)
        memcpy(t->at[i], (const char *)base + i * step, 64);
}

static void emulated_store(const emulated_tile *t, void *base, int64_t step)
{
    emulated_check();
    for (int i = 0; i < 16; i++)
        memcpy((char *)base + i * step, t->at[i], 64);
}

static float emulated_half(float pair, int second)
{
    uint16_t x[2];
    memcpy(x, &pair, sizeof x);
    return ith_bf16_to_f32(x[second]);
}

/* Sums of first and of second halves of the pairs, then both to the tile. */
static void emulated_multiply(emulated_tile *c, const emulated_tile *a, const emulated_tile *b)
{
    emulated_check();
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float sum[2] = {0, 0};
            for (int k = 0; k < 16; k++)
                for (int j = 0; j < 2; j++)
                    sum[j] += emulated_half(a->at[m][k], j) * emulated_half(b->at[k][n], j);
            c->at[m][n] += sum[0] + sum[1];
        }
}

static void emulated_configure(const void *shape)
{
    const unsigned char *bytes = shape;
    ITH_ASSERT(bytes[0] == 1); /* palette */
    for (int i = 0; i < 8; i++)
        ITH_ASSERT(bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 16);
    ITH_ASSERT(!emulated_shape);
    emulated_shape = true;
    memset(emulated, 0, sizeof emulated);
}

static void emulated_release(void)
{
    emulated_check();
    emulated_shape = false;
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) emulated_configure(shape)
#define _tile_release() emulated_release()
#define _tile_loadd(t, base, step) emulated_load(&emulated[t], base, step)
#define _tile_stream_loadd(t, base, step) emulated_load(&emulated[t], base, step)
#define _tile_stored(t, base, step) emulated_store(&emulated[t], base, step)
#define _tile_zero(t) memset(&emulated[t], 0, sizeof emulated[t])
#define _tile_dpbf16ps(c, a, b) emulated_multiply(&emulated[c], &emulated[a], &emulated[b])
#define LEVEL_TABLE ith_cpu_level_amx_emulated
#define LEVEL_NAME "amx emulated"
extern const ith_cpu_level ith_cpu_level_amx_emulated;
#include "kernels/cpu/level_amx.c"
