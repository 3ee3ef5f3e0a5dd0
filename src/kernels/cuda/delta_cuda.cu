/* delta_cuda.cu - the operators of the gated delta rule: chunks, stretches, scratch, and which way.
 *
 * bf16 heads of 128 go to tensor cores (delta_fast.cu), all else the plain way (delta_plain.cu); a
 * few tokens of each document are decoded token by token. */
#include "kernels/cuda/delta_cuda.cuh"

enum { STRETCH_CHUNKS = 256, PIECE_CHUNKS = 12, DECODE_TOKENS = 8, TABLE_THREADS = 1024 };

/* Chunks of every document, in order. One block. */
__global__ void __launch_bounds__(TABLE_THREADS)
    make_chunks(delta_chunk *chunks, int32_t *doc_chunks, const int32_t *cu_seqlens, int64_t docs)
{
    __shared__ int32_t warps[32], total;
    int id = (int)threadIdx.x, lane = id % 32;
    if (id == 0)
        total = 0;
    __syncthreads();
    for (int64_t first = 0; first < docs; first += TABLE_THREADS) {
        int64_t doc = first + id;
        int32_t n =
            doc < docs ? (cu_seqlens[doc + 1] - cu_seqlens[doc] + DELTA_C - 1) / DELTA_C : 0;
        int32_t sum = n;
        for (int o = 1; o < 32; o <<= 1) {
            int32_t below = __shfl_up_sync(0xffffffffu, sum, o);
            sum += lane >= o ? below : 0;
        }
        if (lane == 31)
            warps[id / 32] = sum;
        __syncthreads();
        for (int w = 0; w < id / 32; w++)
            sum += warps[w];
        sum += total;
        if (doc < docs)
            doc_chunks[doc] = sum - n;
        __syncthreads();
        if (id == TABLE_THREADS - 1)
            total = sum;
        __syncthreads();
    }
    if (id == 0)
        doc_chunks[docs] = total;
    __syncthreads();
    for (int32_t c = id; c < total; c += TABLE_THREADS) {
        int64_t low = 0, high = docs; /* the last document that begins at or before c */
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (doc_chunks[middle] <= c)
                low = middle;
            else
                high = middle;
        }
        int32_t row = cu_seqlens[low] + (c - doc_chunks[low]) * DELTA_C;
        int32_t left = cu_seqlens[low + 1] - row;
        chunks[c].row = row;
        chunks[c].rows = left < DELTA_C ? left : DELTA_C;
    }
}

/* Scratch beyond what the kernels see. */
typedef struct {
    delta_chunk *chunks;
    int32_t *doc_chunks;
    float *begins;    /* [stretches,heads,Dk,Dv] states at the begin of a stretch */
    float *gradients; /* [2,heads,Dk,Dv] of the state between stretches */
    int64_t stretch, state_size;
} delta_scratch;

/* What is known from shapes alone; then lay_out cuts the scratch. */
static delta_args args_of(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor g, ith_tensor beta,
                          float scale)
{
    delta_args a = {};
    a.q = q;
    a.k = k;
    a.v = v;
    a.g = g;
    a.beta = beta;
    a.heads = v.shape[1];
    a.group = v.shape[1] / k.shape[1];
    a.dim_k = (int)k.shape[2];
    a.dim_v = (int)v.shape[2];
    a.scale = scale;
    return a;
}

/* A document in p pieces takes a head p - 1 walks from zero and p - 2 for the maps, a block each
 * (p and p - 1 where the end of the last is wanted, too), and p walks in the end; from 3 pieces on
 * it gains. So all cells of (document, piece, head) are at most one a block. */
static bool has_pieces(int64_t heads)
{
    return 3 * heads <= ITH_CUDA_SMS;
}

/* As many as keep the device busy in one wave, of PIECE_CHUNKS chunks or more. ends_only: nothing
 * is walked in the end, so that 2 pieces gain. */
static int64_t pieces_of(int64_t heads, int64_t docs, int64_t chunks, bool ends_only)
{
    int64_t walks = heads * docs, most = (ITH_CUDA_SMS / walks + (ends_only ? 1 : 3)) / 2;
    int64_t pieces = ith_min_i64(most, chunks / docs / PIECE_CHUNKS);
    return 3 * walks <= ITH_CUDA_SMS && pieces >= (ends_only ? 2 : 3) ? pieces : 1;
}

static int64_t lay_out(delta_args *a, delta_scratch *s, ith_carve c, ith_seqs seqs, bool backward,
                       bool fast)
{
    int64_t most = a->q.shape[0] / DELTA_C + seqs.num_docs; /* chunks */
    int64_t stretch = ith_min_i64(most, STRETCH_CHUNKS), keys = a->heads / a->group;
    int64_t stretches = ith_div_ceil(most, STRETCH_CHUNKS), item = fast ? 2 : 4;
    int64_t cells = stretch * a->heads, size = (int64_t)a->dim_k * a->dim_v;
    s->stretch = stretch;
    int64_t piece_cells = fast && has_pieces(a->heads) ? ITH_CUDA_SMS : 0;
    s->state_size = a->heads * size;
    s->chunks = (delta_chunk *)ith_carve_take(&c, ith_mul_bytes(most, sizeof(delta_chunk)));
    s->doc_chunks = (int32_t *)ith_carve_take(&c, ith_mul_bytes(seqs.num_docs + 1, 4));
    s->begins = (float *)ith_carve_take(
        &c, ith_mul_bytes((backward ? stretches : ith_min_i64(stretches, 2)) * s->state_size, 4));
    a->chunks = s->chunks;
    a->doc_chunks = s->doc_chunks;
    a->z = ith_carve_take(&c, ith_mul_bytes(cells * DELTA_C * DELTA_C, item));
    a->p = ith_carve_take(&c, ith_mul_bytes(cells * DELTA_C * DELTA_C, item));
    a->gates = (float *)ith_carve_take(&c, ith_mul_bytes(cells * DELTA_GATES * DELTA_C, 4));
    a->sums = (double *)ith_carve_take(&c, ith_mul_bytes(cells * DELTA_C, 8));
    a->norms = (float *)ith_carve_take(&c, ith_mul_bytes(stretch * keys * 2 * DELTA_C, 4));
    a->entries = (float *)ith_carve_take(&c, ith_mul_bytes(piece_cells * size, 4));
    a->ends = (float *)ith_carve_take(&c, ith_mul_bytes(piece_cells * size, 4));
    a->maps = (float *)ith_carve_take(&c, ith_mul_bytes(piece_cells * size, 4));
    if (backward) {
        s->gradients = (float *)ith_carve_take(&c, ith_mul_bytes(2 * s->state_size, 4));
        a->states = ith_carve_take(&c, ith_mul_bytes(cells * size, item));
        a->dstates = ith_carve_take(&c, ith_mul_bytes(cells * size, item));
        a->y = ith_carve_take(&c, ith_mul_bytes(cells * DELTA_C * a->dim_v, item));
        a->dr = ith_carve_take(&c, ith_mul_bytes(cells * DELTA_C * a->dim_v, item));
    }
    return c.used;
}

static int64_t count_bytes(delta_args a, ith_seqs seqs, bool backward, bool fast)
{
    delta_scratch s = {};
    ith_carve nowhere = {NULL, 0, INT64_MAX};
    return lay_out(&a, &s, nowhere, seqs, backward, fast);
}

static int64_t doc_chunks_of(ith_seqs seqs, int64_t doc)
{
    return ith_div_ceil(seqs.cu_host[doc + 1] - seqs.cu_host[doc], DELTA_C);
}

static int64_t chunks_of(ith_seqs seqs)
{
    int64_t n = 0;
    for (int64_t doc = 0; doc < seqs.num_docs; doc++)
        n += doc_chunks_of(seqs, doc);
    return n;
}

/* Goes to stretch idx; returns how many documents it meets. */
static int64_t enter_stretch(delta_args *a, const delta_scratch *s, ith_seqs seqs, int64_t chunks,
                             int64_t idx)
{
    int64_t at = 0, docs = 0;
    a->first = idx * s->stretch;
    a->count = ith_min_i64(s->stretch, chunks - a->first);
    for (int64_t doc = 0; doc < seqs.num_docs && at < a->first + a->count; doc++) {
        int64_t end = at + doc_chunks_of(seqs, doc);
        if (end > a->first && docs == 0)
            a->doc = doc;
        docs += end > a->first;
        at = end;
    }
    a->pieces = pieces_of(a->heads, docs, a->count, a->carry_only);
    return docs;
}

static ith_status check_dims(ith_ctx *ctx, ith_tensor k)
{
    if (k.shape[2] > DELTA_MOST_K)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "keys of %lld elements; the most is %d",
                        (long long)k.shape[2], DELTA_MOST_K);
    return ITH_OK;
}

/* Tensor cores do it when all operands suit them. */
static bool is_fast(const ith_tensor *operands, int count)
{
    for (int i = 0; i < count; i++)
        if (!delta_fast_takes(operands[i]))
            return false;
    return true;
}

/* The stages of a stretch, either way. */
static ith_status prepare(ith_ctx *ctx, const delta_args *a, bool fast)
{
    if (fast)
        return delta_fast_prepare(ctx, a);
    ITH_CUDA_TRY(ctx, delta_plain_prepare(ith_cuda_stream(ctx), a->q.dtype, a), a->q);
    return ITH_OK;
}

static ith_status scan(ith_ctx *ctx, const delta_args *a, int64_t docs, bool fast)
{
    if (fast)
        return delta_fast_scan(ctx, a, docs);
    ITH_CUDA_TRY(ctx, delta_plain_scan(ith_cuda_stream(ctx), a->q.dtype, a, docs), a->q);
    return ITH_OK;
}

static ith_status scan_back(ith_ctx *ctx, const delta_args *a, int64_t docs, bool fast)
{
    if (fast)
        return delta_fast_scan_back(ctx, a, docs);
    ITH_CUDA_TRY(ctx, delta_plain_scan_back(ith_cuda_stream(ctx), a->q.dtype, a, docs), a->q);
    return ITH_OK;
}

static ith_status gradients(ith_ctx *ctx, const delta_args *a, bool fast)
{
    if (fast)
        return delta_fast_grads(ctx, a);
    ITH_CUDA_TRY(ctx, delta_plain_grads(ith_cuda_stream(ctx), a->q.dtype, a), a->q);
    return ITH_OK;
}

static void launch_table(ith_ctx *ctx, const delta_scratch *s, ith_seqs seqs)
{
    make_chunks<<<1, TABLE_THREADS, 0, ith_cuda_stream(ctx)>>>(
        s->chunks, s->doc_chunks, (const int32_t *)seqs.cu_seqlens.data, seqs.num_docs);
}

static int64_t forward_workspace(ith_ctx *ctx, ith_tensor o, ith_tensor q, ith_tensor k,
                                 ith_tensor v, ith_tensor g, ith_tensor beta, ith_tensor state,
                                 ith_seqs seqs, float scale)
{
    (void)ctx, (void)state;
    ith_tensor operands[] = {o, q, k, v};
    return count_bytes(args_of(q, k, v, g, beta, scale), seqs, false, is_fast(operands, 4));
}

static ith_status forward(ith_ctx *ctx, ith_tensor o, ith_tensor q, ith_tensor k, ith_tensor v,
                          ith_tensor g, ith_tensor beta, ith_tensor state, ith_seqs seqs,
                          float scale)
{
    delta_args a = args_of(q, k, v, g, beta, scale);
    delta_scratch s = {};
    ith_tensor operands[] = {o, q, k, v};
    bool fast = is_fast(operands, 4);
    ITH_TRY(check_dims(ctx, k));
    if (q.shape[0] == 0)
        return ITH_OK;
    a.o = o;
    a.state = state;
    a.give_state = true;
    if (seqs.max_len <= DECODE_TOKENS) {
        delta_plain_decode(ith_cuda_stream(ctx), q.dtype, &a, (const int32_t *)seqs.cu_seqlens.data,
                           seqs.num_docs);
        return ITH_CUDA_LAUNCHED(ctx, q);
    }
    lay_out(&a, &s, ith_carve_begin(ctx), seqs, false, fast);
    launch_table(ctx, &s, seqs);
    int64_t chunks = chunks_of(seqs);
    for (int64_t i = 0; i * s.stretch < chunks; i++) {
        int64_t docs = enter_stretch(&a, &s, seqs, chunks, i);
        a.carried = s.begins + i % 2 * s.state_size;
        a.carry = s.begins + (i + 1) % 2 * s.state_size;
        ITH_TRY(prepare(ctx, &a, fast));
        ITH_TRY(scan(ctx, &a, docs, fast));
    }
    return ITH_CUDA_LAUNCHED(ctx, q);
}

static int64_t backward_workspace(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                  ith_tensor dg, ith_tensor dbeta, ith_tensor dstate,
                                  ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                  ith_tensor g, ith_tensor beta, ith_tensor state, ith_seqs seqs,
                                  float scale)
{
    (void)ctx, (void)dg, (void)dbeta, (void)dstate, (void)state;
    ith_tensor operands[] = {dq, dk, dv, do_, q, k, v};
    return count_bytes(args_of(q, k, v, g, beta, scale), seqs, true, is_fast(operands, 7));
}

/* States at the begins of the stretches first, then the stretches from the last to the first. */
static ith_status backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv, ith_tensor dg,
                           ith_tensor dbeta, ith_tensor dstate, ith_tensor do_, ith_tensor q,
                           ith_tensor k, ith_tensor v, ith_tensor g, ith_tensor beta,
                           ith_tensor state, ith_seqs seqs, float scale)
{
    delta_args a = args_of(q, k, v, g, beta, scale);
    delta_scratch s = {};
    ith_tensor operands[] = {dq, dk, dv, do_, q, k, v};
    bool fast = is_fast(operands, 7);
    ITH_TRY(check_dims(ctx, k));
    if (q.shape[0] == 0)
        return ITH_OK;
    a.dq = dq;
    a.dk = dk;
    a.dv = dv;
    a.dg = dg;
    a.dbeta = dbeta;
    a.do_ = do_;
    a.dstate = dstate;
    a.state = state;
    lay_out(&a, &s, ith_carve_begin(ctx), seqs, true, fast);
    launch_table(ctx, &s, seqs);
    int64_t chunks = chunks_of(seqs), stretches = ith_div_ceil(chunks, s.stretch);
    delta_args ahead = a;
    ahead.states = ahead.y = NULL;
    ahead.carry_only = true;
    for (int64_t i = 0; i + 1 < stretches; i++) {
        int64_t docs = enter_stretch(&ahead, &s, seqs, chunks, i);
        ahead.carried = s.begins + i * s.state_size;
        ahead.carry = s.begins + (i + 1) * s.state_size;
        ITH_TRY(prepare(ctx, &ahead, fast));
        ITH_TRY(scan(ctx, &ahead, docs, fast));
    }
    for (int64_t i = stretches - 1; i >= 0; i--) {
        int64_t docs = enter_stretch(&a, &s, seqs, chunks, i);
        a.carried = s.begins + i * s.state_size;
        a.carry = s.begins + (i + 1) * s.state_size; /* read already */
        ITH_TRY(prepare(ctx, &a, fast));
        ITH_TRY(scan(ctx, &a, docs, fast));
        a.carried = s.gradients + i % 2 * s.state_size;
        a.carry = s.gradients + (i + 1) % 2 * s.state_size;
        ITH_TRY(scan_back(ctx, &a, docs, fast));
        ITH_TRY(gradients(ctx, &a, fast));
    }
    return ITH_CUDA_LAUNCHED(ctx, q);
}

void ith_cuda_fill_delta(struct ith_backend *b)
{
    b->gated_delta_rule_forward.run = forward;
    b->gated_delta_rule_forward.workspace = forward_workspace;
    b->gated_delta_rule_backward.run = backward;
    b->gated_delta_rule_backward.workspace = backward_workspace;
}
