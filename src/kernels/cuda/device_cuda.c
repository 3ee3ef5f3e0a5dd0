/* device_cuda.c - the CUDA device behind base/device.h, and what the plug-in exports. */
#include "kernels/cuda/cuda_api.h"
#include "kernels/cuda/sdpa_graph.h"

#include "base/env.h"
#include "base/pool.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

ith_status ith_cuda_check(ith_error *err, cudaError_t code, const char *what, ith_tensor t)
{
    char shape[96];
    if (code == cudaSuccess)
        return ITH_OK;
    return ith_fail(err, code == cudaErrorMemoryAllocation ? ITH_ERR_MEMORY : ITH_ERR_RUN,
                    "%s: %s on %s", what, cudaGetErrorString(code),
                    ith_tensor_text(t, shape, sizeof shape));
}

/* ---- device ---- */

/* Asked first: asking is a look at the thread's context, setting more. */
ith_cuda *ith_cuda_use(ith_cuda *cuda)
{
    int now = -1;
    if (cudaGetDevice(&now) != cudaSuccess || now != cuda->index)
        (void)cudaSetDevice(cuda->index);
    return cuda;
}

static ith_cuda *cuda_of(ith_device *d)
{
    return ith_cuda_use(d->state);
}

static void cuda_use(ith_device *d)
{
    (void)cuda_of(d);
}

static ith_status check_bytes(ith_device *d, cudaError_t code, const char *what, int64_t bytes,
                              ith_error *err)
{
    if (code == cudaSuccess)
        return ITH_OK;
    return ith_fail(err, ITH_ERR_RUN, "%s: %s of %lld bytes: %s", d->name, what, (long long)bytes,
                    cudaGetErrorString(code));
}

static ith_status cuda_memory(ith_device *d, int64_t *free_bytes, int64_t *total_bytes,
                              ith_error *err)
{
    size_t left = 0, total = 0;
    cuda_use(d);
    ITH_TRY(check_bytes(d, cudaMemGetInfo(&left, &total), "free memory", 0, err));
    *free_bytes = (int64_t)left;
    *total_bytes = (int64_t)total;
    return ITH_OK;
}

/* Small allocations share a block of the driver. Another GPU maps a block as a whole and once: each
 * of ours has its own. */
#define BLOCK_BYTES ((int64_t)2 << 20)

static ith_status cuda_alloc(ith_device *d, int64_t bytes, void **out, ith_error *err)
{
    void *ptr = NULL;
    cuda_use(d);
    cudaError_t code = cudaMalloc(&ptr, (size_t)ith_round_up(ith_max_i64(bytes, 1), BLOCK_BYTES));
    if (code == cudaErrorMemoryAllocation) {
        int64_t left = 0, total = 0;
        (void)cudaGetLastError();
        (void)cuda_memory(d, &left, &total, NULL);
        return ith_fail(err, ITH_ERR_MEMORY,
                        "out of memory: %lld bytes on %s (%lld of %lld bytes are free)",
                        (long long)bytes, d->name, (long long)left, (long long)total);
    }
    ITH_TRY(check_bytes(d, code, "allocation", bytes, err));
    *out = ptr;
    return ITH_OK;
}

static void cuda_free(ith_device *d, void *ptr)
{
    cuda_use(d);
    (void)cudaFree(ptr);
}

static ith_status move(ith_device *d, void *dst, const void *src, int64_t bytes,
                       enum cudaMemcpyKind kind, const char *what, ith_error *err)
{
    if (bytes <= 0)
        return ITH_OK;
    return check_bytes(d, cudaMemcpyAsync(dst, src, (size_t)bytes, kind, cuda_of(d)->stream), what,
                       bytes, err);
}

static ith_status cuda_upload(ith_device *d, void *dst, const void *src, int64_t bytes,
                              ith_error *err)
{
    return move(d, dst, src, bytes, cudaMemcpyHostToDevice, "upload", err);
}

static ith_status cuda_download(ith_device *d, void *dst, const void *src, int64_t bytes,
                                ith_error *err)
{
    return move(d, dst, src, bytes, cudaMemcpyDeviceToHost, "download", err);
}

static ith_status cuda_copy(ith_device *d, void *dst, const void *src, int64_t bytes,
                            ith_error *err)
{
    return move(d, dst, src, bytes, cudaMemcpyDeviceToDevice, "copy", err);
}

static ith_status cuda_copy_rows(ith_device *d, void *dst, int64_t dst_stride, const void *src,
                                 int64_t src_stride, int64_t bytes, int64_t rows, ith_error *err)
{
    ith_cuda_copy_rows(cuda_of(d)->stream, dst, dst_stride, src, src_stride, bytes, rows);
    return check_bytes(d, cudaGetLastError(), "copy of rows", bytes * rows, err);
}

static ith_status cuda_fill(ith_device *d, void *dst, int byte, int64_t bytes, ith_error *err)
{
    if (bytes <= 0)
        return ITH_OK;
    return check_bytes(d, cudaMemsetAsync(dst, byte, (size_t)bytes, cuda_of(d)->stream), "fill",
                       bytes, err);
}

static ith_status cuda_sync(ith_device *d, ith_error *err)
{
    return check_bytes(d, cudaStreamSynchronize(cuda_of(d)->main), "wait", 0, err);
}

/* ---- pinned host memory: mapped, touched by all cores, then registered (ten times as fast as
 * cudaHostAlloc). The length lies in a page before the block. */

#define HOST_PAGE 4096
#define TOUCH_BYTES ((int64_t)64 << 20)

static void touch(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    memset((char *)arg + begin, 0, (size_t)(end - begin));
}

static ith_status cuda_alloc_host(ith_device *d, int64_t bytes, void **out, ith_error *err)
{
    int64_t all = bytes + HOST_PAGE;
    char *base =
        mmap(NULL, (size_t)all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return ith_fail(err, ITH_ERR_MEMORY, "out of host memory: %lld bytes", (long long)bytes);
    (void)madvise(base, (size_t)all, MADV_HUGEPAGE);
    ith_pool *pool = NULL;
    (void)ith_pool_create(&pool, 0, NULL); /* without threads it is only slower */
    ith_pool_for(pool, all, TOUCH_BYTES, touch, base);
    ith_pool_destroy(pool);
    cuda_use(d);
    cudaError_t code = cudaHostRegister(base, (size_t)all, cudaHostRegisterDefault);
    if (code != cudaSuccess) {
        munmap(base, (size_t)all);
        return check_bytes(d, code, "pinning of host memory", bytes, err);
    }
    memcpy(base, &all, sizeof all);
    *out = base + HOST_PAGE;
    return ITH_OK;
}

static void cuda_free_host(ith_device *d, void *ptr)
{
    cuda_use(d);
    char *base = (char *)ptr - HOST_PAGE;
    int64_t all = 0;
    memcpy(&all, base, sizeof all);
    (void)cudaHostUnregister(base);
    munmap(base, (size_t)all);
}

/* ---- other queues ---- */

static ith_status cuda_fork(ith_device *d, ith_queue queue, ith_error *err)
{
    ith_cuda *cuda = cuda_of(d);
    cudaError_t code = cudaEventRecord(cuda->queues[queue].forked, cuda->main);
    if (code == cudaSuccess)
        code = cudaStreamWaitEvent(cuda->queues[queue].stream, cuda->queues[queue].forked, 0);
    return check_bytes(d, code, "fork of a queue", 0, err);
}

static ith_status cuda_note(ith_device *d, ith_queue queue, int mark, ith_error *err)
{
    ith_cuda *cuda = cuda_of(d);
    void *grown = cuda->queues[queue].marks;
    ITH_ASSERT(mark >= 0);
    ITH_TRY(ith_grow(&grown, &cuda->queues[queue].cap_marks, mark + 1, (int64_t)sizeof(cudaEvent_t),
                     "marks", err));
    cudaEvent_t *marks = cuda->queues[queue].marks = grown;
    for (int64_t *n = &cuda->queues[queue].num_marks; *n <= mark; ++*n)
        ITH_TRY(check_bytes(d, cudaEventCreateWithFlags(&marks[*n], cudaEventDisableTiming),
                            "event", 0, err));
    return check_bytes(d, cudaEventRecord(marks[mark], cuda->queues[queue].stream),
                       "mark of a queue", 0, err);
}

static ith_status cuda_await(ith_device *d, ith_queue queue, int mark, ith_error *err)
{
    ith_cuda *cuda = cuda_of(d);
    if (mark >= cuda->queues[queue].num_marks) /* never noted */
        return ITH_OK;
    return check_bytes(d, cudaStreamWaitEvent(cuda->main, cuda->queues[queue].marks[mark], 0),
                       "wait for a queue", 0, err);
}

/* One multiprocessor updates at 64 GB/s, beside products that leave it alone, whichever way it
 * loads: 24 update a layer of Qwen3-4B in 1.9 ms, the time of its forward walk with 4,096 tokens.
 */
enum { FEW_SMS = 24, UPDATE_TOKENS = 4096 };

static void cuda_enter(ith_device *d, ith_queue queue)
{
    ith_cuda *cuda = cuda_of(d);
    cuda->stream = cuda->queues[queue].stream;
}

static void cuda_leave(ith_device *d)
{
    ith_cuda *cuda = cuda_of(d);
    cuda->stream = cuda->main;
}

static ith_status cuda_copy_beside(ith_device *d, void *dst, const void *src, int64_t bytes,
                                   bool to_host, ith_error *err)
{
    return check_bytes(d,
                       cudaMemcpyAsync(dst, src, (size_t)bytes,
                                       to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                                       cuda_of(d)->queues[ITH_QUEUE_COPIES].stream),
                       "copy beside", bytes, err);
}

static ith_status cuda_stamp(ith_device *d, int64_t idx, ith_error *err)
{
    ith_cuda *cuda = cuda_of(d);
    void *grown = cuda->stamps;
    ITH_TRY(
        ith_grow(&grown, &cuda->cap_stamps, idx + 1, (int64_t)sizeof(cudaEvent_t), "stamps", err));
    cuda->stamps = grown;
    for (; cuda->num_stamps <= idx; cuda->num_stamps++)
        ITH_TRY(check_bytes(d, cudaEventCreate(&cuda->stamps[cuda->num_stamps]), "event", 0, err));
    return check_bytes(d, cudaEventRecord(cuda->stamps[idx], cuda->stream), "event", 0, err);
}

static ith_status cuda_elapsed(ith_device *d, int64_t from, int64_t to, double *ms, ith_error *err)
{
    ith_cuda *cuda = cuda_of(d);
    float value = 0;
    ITH_ASSERT(from >= 0 && from < cuda->num_stamps && to >= 0 && to < cuda->num_stamps);
    ITH_TRY(check_bytes(d, cudaEventSynchronize(cuda->stamps[to]), "wait for an event", 0, err));
    ITH_TRY(check_bytes(d, cudaEventElapsedTime(&value, cuda->stamps[from], cuda->stamps[to]),
                        "time between events", 0, err));
    *ms = (double)value;
    return ITH_OK;
}

/* Without a driver there is nothing but counting; who tries more is told so. */
static ith_status absent_alloc(ith_device *d, int64_t bytes, void **out, ith_error *err)
{
    (void)out;
    return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s was opened for counting only (%lld bytes wanted)",
                    d->name, (long long)bytes);
}

static ith_status absent_move(ith_device *d, void *dst, const void *src, int64_t bytes,
                              ith_error *err)
{
    (void)dst, (void)src;
    return absent_alloc(d, bytes, NULL, err);
}

static ith_status absent_fill(ith_device *d, void *dst, int byte, int64_t bytes, ith_error *err)
{
    (void)dst, (void)byte;
    return absent_alloc(d, bytes, NULL, err);
}

static ith_status absent_sync(ith_device *d, ith_error *err)
{
    (void)d, (void)err;
    return ITH_OK;
}

static ith_status absent_memory(ith_device *d, int64_t *free_bytes, int64_t *total_bytes,
                                ith_error *err)
{
    (void)free_bytes, (void)total_bytes;
    return ith_fail(err, ITH_ERR_USAGE,
                    "%s: its memory is not known without it (give memory_limit)", d->name);
}

static void absent_free(ith_device *d, void *ptr)
{
    (void)d, (void)ptr;
}

static void fill_device(ith_cuda *cuda)
{
    ith_device real = {.name = cuda->name,
                       .state = cuda,
                       .use = cuda_use,
                       .alloc = cuda_alloc,
                       .free = cuda_free,
                       .upload = cuda_upload,
                       .download = cuda_download,
                       .copy = cuda_copy,
                       .fill = cuda_fill,
                       .sync = cuda_sync,
                       .memory = cuda_memory,
                       .alloc_host = cuda_alloc_host,
                       .free_host = cuda_free_host,
                       .fork = cuda_fork,
                       .note = cuda_note,
                       .await = cuda_await,
                       .copy_beside = cuda_copy_beside,
                       .enter = cuda_enter,
                       .leave = cuda_leave,
                       .update_tokens = UPDATE_TOKENS,
                       .stamp = cuda_stamp,
                       .elapsed = cuda_elapsed,
                       .copy_rows = cuda_copy_rows,
                       .links = &ith_cuda_links};
    ith_device absent = {.name = cuda->name,
                         .state = cuda,
                         .alloc = absent_alloc,
                         .free = absent_free,
                         .upload = absent_move,
                         .download = absent_move,
                         .copy = absent_move,
                         .fill = absent_fill,
                         .sync = absent_sync,
                         .memory = absent_memory,
                         .links = &ith_cuda_links};
    cuda->device = cuda->counting_only ? absent : real;
}

/* ---- open and close ---- */

static ith_status check_runtime(cudaError_t code, const char *what, ith_error *err)
{
    if (code == cudaSuccess)
        return ITH_OK;
    return ith_fail(err, ITH_ERR_UNSUPPORTED, "CUDA: %s: %s", what, cudaGetErrorString(code));
}

/* Small kernels between exchanges go before those of the main queue. */
static ith_status open_queues(ith_cuda *cuda, ith_error *err)
{
    int low = 0, high = 0;
    ITH_TRY(check_runtime(cudaDeviceGetStreamPriorityRange(&low, &high), "stream", err));
    for (int q = 0; q < ITH_QUEUES; q++) {
        ITH_TRY(check_runtime(cudaStreamCreateWithPriority(&cuda->queues[q].stream,
                                                           cudaStreamNonBlocking,
                                                           q == ITH_QUEUE_COPIES ? low : high),
                              "stream", err));
        ITH_TRY(
            check_runtime(cudaEventCreateWithFlags(&cuda->queues[q].forked, cudaEventDisableTiming),
                          "event", err));
    }
    return ITH_OK;
}

static ith_status open_device(ith_cuda *cuda, ith_error *err)
{
    int count = 0;
    struct cudaDeviceProp props;
    ITH_TRY(check_runtime(cudaGetDeviceCount(&count), "devices", err));
    if (count == 1) /* a launcher may show each rank a GPU of its own only */
        cuda->index = 0;
    if (count > 0 && ith_env_truthy(ITH_ENV_SHARE_GPU))
        cuda->index %= count;
    snprintf(cuda->name, sizeof cuda->name, "cuda:%d", cuda->index);
    if (cuda->index < 0 || cuda->index >= count)
        return ith_fail(err, ITH_ERR_USAGE, "CUDA device %d: this machine has %d (0 to %d)",
                        cuda->index, count, count - 1);
    ITH_TRY(check_runtime(cudaGetDeviceProperties(&props, cuda->index), "device", err));
    if (props.major != 9)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "CUDA device %d is %s (compute capability %d.%d); this build is for 9.0",
                        cuda->index, props.name, props.major, props.minor);
    ITH_TRY(check_runtime(cudaSetDevice(cuda->index), "device", err));
    ITH_TRY(check_runtime(cudaStreamCreateWithFlags(&cuda->main, cudaStreamNonBlocking), "stream",
                          err));
    cuda->stream = cuda->main;
    return open_queues(cuda, err);
}

static ith_status open_libraries(ith_cuda *cuda, ith_error *err)
{
    ITH_TRY(ith_cuda_libs_open(&cuda->libs, err));
    const ith_cuda_libs *l = cuda->libs;
    cublasStatus_t blas = l->cublasLtCreate(&cuda->lt);
    if (blas != CUBLAS_STATUS_SUCCESS)
        return ith_fail(err, ITH_ERR_RUN, "cuBLASLt: %s", l->cublasLtGetStatusString(blas));
    cudnnStatus_t dnn = l->cudnnCreate(&cuda->dnn);
    if (dnn == CUDNN_STATUS_SUCCESS)
        dnn = l->cudnnSetStream(cuda->dnn, cuda->stream);
    if (dnn != CUDNN_STATUS_SUCCESS)
        return ith_fail(err, ITH_ERR_RUN, "cuDNN: %s", l->cudnnGetErrorString(dnn));
    ITH_TRY(ith_matmul_cache_create(&cuda->matmuls, err));
    return ith_sdpa_cache_create(&cuda->sdpas, err);
}

static void close_queues(ith_cuda *cuda)
{
    for (int q = 0; q < ITH_QUEUES; q++) {
        for (int64_t i = 0; i < cuda->queues[q].num_marks; i++)
            (void)cudaEventDestroy(cuda->queues[q].marks[i]);
        ith_free(cuda->queues[q].marks);
        if (cuda->queues[q].forked)
            (void)cudaEventDestroy(cuda->queues[q].forked);
        if (cuda->queues[q].stream)
            (void)cudaStreamDestroy(cuda->queues[q].stream);
    }
}

static void close_cuda(ith_cuda *cuda)
{
    if (cuda->stream)
        (void)cudaStreamSynchronize(ith_cuda_use(cuda)->stream);
    for (int q = 0; q < ITH_QUEUES; q++)
        if (cuda->queues[q].stream)
            (void)cudaStreamSynchronize(cuda->queues[q].stream);
    for (int64_t i = 0; i < cuda->num_stamps; i++)
        (void)cudaEventDestroy(cuda->stamps[i]);
    ith_free(cuda->stamps);
    ith_sdpa_cache_destroy(cuda->sdpas, cuda->libs);
    ith_matmul_cache_destroy(cuda->matmuls, cuda->libs);
    if (cuda->dnn)
        (void)cuda->libs->cudnnDestroy(cuda->dnn);
    if (cuda->lt)
        (void)cuda->libs->cublasLtDestroy(cuda->lt);
    close_queues(cuda);
    if (cuda->stream)
        (void)cudaStreamDestroy(cuda->stream);
    ith_free(cuda);
}

/* Filled once, before the first open returns; the same for every device. */
static const ith_backend *backend_table(void)
{
    static struct ith_backend table;
    if (!table.name) {
        ith_cuda_fill_rows(&table);
        ith_cuda_fill_norm(&table);
        ith_cuda_fill_rope(&table);
        ith_cuda_fill_linear(&table);
        ith_cuda_fill_attention(&table);
        ith_cuda_fill_swiglu(&table);
        ith_cuda_fill_loss(&table);
        ith_cuda_fill_experts(&table);
        ith_cuda_fill_group_router(&table);
        ith_cuda_fill_grouped(&table);
        ith_cuda_fill_gates(&table);
        ith_cuda_fill_vision(&table);
        ith_cuda_fill_optimizer(&table);
        ith_cuda_fill_gdn_rows(&table);
        ith_cuda_fill_delta(&table);
        table.overwrites = true;
        table.name = "cuda";
    }
    return &table;
}

void ith_cuda_abi(char out[96])
{
    ith_cuda_abi_text(out);
}

ith_status ith_cuda_open(ith_ctx *ctx, int index, bool counting_only)
{
    void *memory = NULL;
    ITH_TRY(ith_alloc_zero(&memory, 1, (int64_t)sizeof(ith_cuda), "CUDA device", ctx->err));
    ith_cuda *cuda = memory;
    cuda->index = index;
    cuda->counting_only = counting_only;
    cuda->few_sms = FEW_SMS;
    snprintf(cuda->name, sizeof cuda->name, "cuda:%d", index);
    fill_device(cuda);
    ith_status status = counting_only ? ITH_OK : open_device(cuda, ctx->err);
    if (status == ITH_OK && !counting_only)
        status = open_libraries(cuda, ctx->err);
    if (status != ITH_OK) {
        close_cuda(cuda);
        return status;
    }
    ctx->backend = backend_table();
    ctx->device = &cuda->device;
    ctx->state = cuda;
    return ITH_OK;
}

void ith_cuda_close(ith_ctx *ctx)
{
    if (ctx->state)
        close_cuda(ctx->state);
    ctx->state = NULL;
    ctx->device = NULL;
    ctx->backend = NULL;
}

/* ---- description ---- */

static void describe_device(ith_buf *out, int index)
{
    struct cudaDeviceProp props;
    if (cudaGetDeviceProperties(&props, index) != cudaSuccess)
        return;
    ith_buf_printf(out, "cuda:%d: %s, compute capability %d.%d, %d multiprocessors, %.1f GiB\n",
                   index, props.name, props.major, props.minor, props.multiProcessorCount,
                   (double)props.totalGlobalMem / (double)(1 << 30));
}

static void describe_nccl(ith_buf *out)
{
    const ith_nccl *nccl = NULL;
    ith_error why = {0};
    void *address = NULL;
    int version = 0;
    if (ith_nccl_open(&nccl, &why) != ITH_OK) {
        ith_buf_printf(out, "NCCL: none (%s)\n", why.text);
        return;
    }
    (void)nccl->ncclGetVersion(&version);
    memcpy(&address, &nccl->ncclSend, sizeof address);
    ith_buf_printf(out, "NCCL %d.%d.%d: %s\n", version / 10000, version / 100 % 100, version % 100,
                   ith_cuda_libs_file(address));
}

ith_status ith_cuda_describe(ith_buf *out, ith_error *err)
{
    int driver = 0, runtime = 0, count = 0;
    const ith_cuda_libs *libs = NULL;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    ith_buf_printf(out, "CUDA runtime %d.%d, driver for %d.%d\n", runtime / 1000,
                   runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess)
        ith_buf_printf(out, "CUDA devices: none (%s)\n", cudaGetErrorString(code));
    for (int i = 0; code == cudaSuccess && i < count; i++)
        describe_device(out, i);
    ITH_TRY(ith_cuda_libs_open(&libs, err));
    void *lt = NULL, *dnn = NULL;
    memcpy(&lt, &libs->cublasLtMatmul, sizeof lt);
    memcpy(&dnn, &libs->cudnnGetVersion, sizeof dnn);
    ith_buf_printf(out, "cuBLASLt %lld: %s\n", (long long)libs->cublasLtGetVersion(),
                   ith_cuda_libs_file(lt));
    ith_buf_printf(out, "cuDNN %lld: %s\n", (long long)libs->cudnnGetVersion(),
                   ith_cuda_libs_file(dnn));
    describe_nccl(out);
    return ith_buf_check(out, "description", err);
}

/* ---- graphs without a GPU ---- */

/* q, k and v in one buffer, side by side in a row. */
static ith_sdpa_key key_for(int64_t batch, int64_t seq, int64_t hq, int64_t hkv, int64_t dim,
                            bool causal, bool packed)
{
    ith_sdpa_place fused = {(hq + 2 * hkv) * dim, dim}, o = {hq * dim, dim};
    ith_sdpa_key key = {.batch = batch,
                        .seq = seq,
                        .heads_q = hq,
                        .heads_kv = hkv,
                        .head_dim = dim,
                        .causal = causal,
                        .packed = packed,
                        .q = fused,
                        .k = fused,
                        .v = fused,
                        .o = o};
    return key;
}

ith_status ith_cuda_check_graphs(ith_buf *out, ith_error *err)
{
    static const struct {
        int64_t batch, seq, hq, hkv, dim;
        bool causal;
    } cases[] = {
        {4, 4096, 8, 2, 256, true},
        {2, 512, 14, 2, 160, true},
        {4, 1024, 16, 16, 192, false},
    };
    static const struct {
        const char *name;
        bool packed;
    } forms[] = {{"batch", false}, {"packed", true}};
    const ith_cuda_libs *libs = NULL;
    ITH_TRY(ith_cuda_libs_open(&libs, err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
            ith_sdpa_key key = key_for(cases[i].batch, cases[i].seq, cases[i].hq, cases[i].hkv,
                                       cases[i].dim, cases[i].causal, forms[f].packed);
            ith_sdpa_plan plan;
            ITH_WRAP(ith_sdpa_plan_offline(libs, &key, &plan, err), err,
                     "%s of %lld x %lld, heads %lld/%lld, head_dim %lld", forms[f].name,
                     (long long)key.batch, (long long)key.seq, (long long)key.heads_q,
                     (long long)key.heads_kv, (long long)key.head_dim);
            ith_buf_printf(out, "%s %lldx%lld %lld/%lld d%lld: engine %lld, %lld bytes\n",
                           forms[f].name, (long long)key.batch, (long long)key.seq,
                           (long long)key.heads_q, (long long)key.heads_kv, (long long)key.head_dim,
                           (long long)plan.engine, (long long)plan.workspace_bytes);
            ith_sdpa_plan_drop(&plan, libs);
        }
    }
    return ith_buf_check(out, "graphs", err);
}
