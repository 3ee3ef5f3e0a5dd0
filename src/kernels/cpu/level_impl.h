/* level_impl.h - everything of one level. A level file defines LEVEL_TABLE, LEVEL_NAME, VW (floats
 * of a vector), MR and NV (register tile: MR rows, NV vectors), maybe LEVEL_BF16_DOT or
 * LEVEL_AMX, and includes this. */
#include "kernels/cpu/cpu_internal.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/cpu/vec_impl.h"
#include "kernels/cpu/gemm_impl.h"
#include "kernels/cpu/attention_impl.h"
#include "kernels/cpu/rows_impl.h"
#include "kernels/cpu/gdn_impl.h"

static float exp_at(float x)
{
    return v_exp(v_set(x))[0];
}

const ith_cpu_level LEVEL_TABLE = {
    .name = LEVEL_NAME,
    .f32 = &tile_f32,
    .bf16 = TILE_BF16,
    .transpose = transpose,
    .store_rows = store_rows,
    .gemv = gemv,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .attention_decode = attention_decode,
    .attention_bytes = attention_bytes,
    ROWS_TABLE GDN_TABLE,
    .exp_at = exp_at,
};
