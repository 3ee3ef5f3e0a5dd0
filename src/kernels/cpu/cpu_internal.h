/* cpu_internal.h - what the files of the CPU backend share.
 *
 * A level is one instruction set: generic, avx2, avx512, avx512bf16, amx. Each is one source file
 * (level_*.c) that includes the same templates (level_impl.h) and is compiled with its own -m
 * flags; it exports one table of functions and nothing else, so that a binary holds all levels and
 * runs anywhere. Everything else here is compiled for the baseline and calls through the table.
 *
 * Invariants. 1. Work is cut by rows, columns or heads, never by the summed index, unless the cut
 * is a constant: results are the same bits for any number of threads. 2. Nothing allocates; scratch
 * comes from ctx->scratch. 3. F64 goes to the reference. */
#ifndef ITH_KERNELS_CPU_INTERNAL_H
#define ITH_KERNELS_CPU_INTERNAL_H

#include "kernels/backend.h"

/* Longest summed stretch kept in registers before it is added to memory, in packed dwords (two bf16
 * or one f32). A constant, for the order of sums depends on it. */
#define ITH_CPU_KC 512
/* Packed panels are followed by this many dwords that a packer may write. */
#define ITH_CPU_PACK_SLACK 16

/* A strided matrix: element (r, k) lies at data[r*ld + k] when k_contiguous, else at
 * data[k*ld + r]. */
typedef struct {
    const void *data;
    ith_dtype dtype; /* F32 or BF16 */
    int64_t ld;      /* elements */
    bool k_contiguous;
} ith_cpu_matrix;

/* y[m, n] = sum_k a(m, k) b(n, k) (+ y). */
typedef struct {
    ith_cpu_matrix a, b;
    void *y;
    ith_dtype y_dtype;
    int64_t y_ld, m, n, k;
    bool accumulate;
} ith_cpu_gemm;

typedef struct {
    ith_tensor o, lse, q, k, v, dq, dk, dv, do_;
    ith_seqs seqs;
    float scale;
    bool causal;
    int64_t q_block;      /* query positions of one tile */
    char *scratch;        /* per-thread parts */
    int64_t thread_bytes; /* size of one */
    /* Decoding: caches [B, C, Hkv, Dh] stand in k and v. */
    ith_tensor lengths;
} ith_cpu_attention;

static inline ith_document ith_cpu_document(const ith_cpu_attention *a, int64_t doc)
{
    return ith_document_of(&a->seqs, a->seqs.cu_host[doc], a->seqs.cu_host[doc + 1], a->q.shape[0],
                           a->k.shape[0]);
}

/* What own kernels compute; else the reference. */
static inline bool ith_cpu_is_fast(ith_tensor t)
{
    return t.dtype == ITH_F32 || t.dtype == ITH_BF16;
}

/* Sums over rows are cut into at most this many parts, whatever the threads. */
#define ITH_CPU_PARTS 64

static inline int64_t ith_cpu_part_rows(int64_t rows)
{
    return ith_max_i64(16, ith_div_ceil(rows, ITH_CPU_PARTS));
}

static inline int64_t ith_cpu_part_count(int64_t rows)
{
    return ith_div_ceil(rows, ith_cpu_part_rows(rows));
}

/* out[d] += parts[p * stride + d], in order of p. */
static inline void ith_cpu_add_parts(ith_tensor out, const float *parts, int64_t count,
                                     int64_t stride)
{
    for (int64_t d = 0; d < out.shape[0]; d++) {
        float sum = 0;
        for (int64_t p = 0; p < count; p++)
            sum += parts[p * stride + d];
        ((float *)out.data)[d * out.stride[0]] += sum;
    }
}

/* Limits of buffers on the stack; beyond them the reference runs. */
#define ITH_CPU_MAX_DIM 1024
#define ITH_CPU_MAX_EXPERTS 2048

/* AdamW's factors, made once in double. */
typedef struct {
    float beta1, rest1, beta2, rest2; /* rest = 1 - beta */
    float decay, step_size, v_factor, eps;
} ith_cpu_adamw;

/* Arguments of the row operators; rows_impl.h says at each what is where. */
typedef struct {
    ith_tensor t[10], ids, more[2];
    ith_seqs seqs;
    float f[2];
    int64_t i[4];
    bool flag;
    char *scratch;
    ith_cpu_adamw adamw;
    uint64_t seed;
} ith_cpu_rows;

/* The gated delta rule. */
typedef struct {
    ith_tensor o, q, k, v, g, beta, state, dq, dk, dv, dg, dbeta, dstate, do_;
    ith_seqs seqs;
    float scale;
    char *scratch; /* per-thread parts */
    int64_t thread_bytes;
} ith_cpu_delta;

/* How a level multiplies packed operands: panels of mr rows of A and of nr columns of B. A dword
 * holds one f32 or two bf16 of consecutive k; k is padded with zeros to a multiple of k_step. */
typedef struct {
    int mr, nr, k_per_dword, k_step;
    /* c[m, nr] (+)= panel of a times panel of b over kd dwords; m <= mr. load: add to c. */
    void (*micro)(int64_t m, int64_t kd, const void *a, const void *b, float *c, int64_t ldc,
                  bool load);
    /* Panels of rows [r0, r0+rows) and summed indices [k0, k0+k) of src, rows past the end zero. */
    void (*pack_a)(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                   int64_t k);
    void (*pack_b)(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                   int64_t k);
    /* Around calls of micro by a thread; NULL where there is nothing to set up. */
    void (*begin)(void), (*end)(void);
} ith_cpu_tile;

typedef struct {
    const char *name;
    const ith_cpu_tile *f32;  /* widens bf16 when it packs */
    const ith_cpu_tile *bf16; /* multiplies pairs in hardware; NULL where there is no such */
    /* dst[k*width + r] = src[r*ld + k] for dwords. */
    void (*transpose)(float *dst, int64_t width, const float *src, int64_t ld, int64_t rows,
                      int64_t k);
    /* y = c (+ y when accumulate), rounded; n of each row. */
    void (*store_rows)(void *y, ith_dtype dtype, int64_t y_ld, const float *c, int64_t ldc,
                       int64_t rows, int64_t n, bool accumulate);
    /* y[m, n0..n1) for few rows, straight from memory. */
    void (*gemv)(const ith_cpu_gemm *g, int64_t n0, int64_t n1);
    ith_task attention_forward, attention_backward, attention_decode;
    int64_t (*attention_bytes)(const ith_cpu_attention *a, bool backward); /* of one thread */
    ith_task embedding_backward;
    ith_task rmsnorm_forward, rmsnorm_backward, rope_forward, rope_backward;
    ith_task swiglu_forward, swiglu_backward, add, cast, cross_entropy, cross_entropy_confident,
        choose_ids, dot;
    ith_task combine, combine_backward, router_forward, adamw;
    ith_task delta_forward, delta_backward;
    int64_t (*delta_bytes)(const ith_cpu_delta *a, bool backward); /* of one thread */
    ith_task conv_forward, conv_backward; /* over pieces of conv_lanes channels */
    int64_t conv_lanes, conv_max_taps;
    ith_task gated_norm_forward, gated_norm_backward, sigmoid_gate_forward, sigmoid_gate_backward;
    float (*exp_at)(float x); /* the vector exponential, for tests */
} ith_cpu_level;

extern const ith_cpu_level ith_cpu_level_generic;
extern const ith_cpu_level ith_cpu_level_avx2;
extern const ith_cpu_level ith_cpu_level_avx512;
extern const ith_cpu_level ith_cpu_level_avx512bf16;
extern const ith_cpu_level ith_cpu_level_amx;

/* The level in use, chosen once. */
const ith_cpu_level *ith_cpu_level_get(void);
/* For tests and benches: another level (NULL: the best this machine has). False when the machine
 * lacks it. Not while operators run. */
bool ith_cpu_level_set(const char *name);
void ith_cpu_level_use(const ith_cpu_level *level); /* one of a test */

static inline int64_t ith_cpu_tile_dwords(const ith_cpu_tile *tile, int64_t k)
{
    return ith_round_up(k, tile->k_step) / tile->k_per_dword;
}

/* Own matrix products, see gemm.c. */
int64_t ith_cpu_gemm_bytes(ith_ctx *ctx, const ith_cpu_gemm *g);
void ith_cpu_gemm_run(ith_ctx *ctx, const ith_cpu_gemm *g);

/* Fills table entries. */
void ith_cpu_fill_gemm(ith_backend *b);
void ith_cpu_fill_attention(ith_backend *b);
void ith_cpu_fill_rows(ith_backend *b);
void ith_cpu_fill_gdn(ith_backend *b);

#endif
