/* sdpa_graph.c - composite attention graphs through cuDNN's backend API.
 *
 * cuDNN 9.19 does causal training on sm_90 only as a graph of simple operations that its engines
 * recognise as a whole; shapes of the pieces and their order below are what they match. Scores are
 * virtual tensors [B,Hq,S,S] that never exist in memory.
 *
 * Invariants:
 *  1. The first failure sticks, later calls do nothing.
 *  2. Every descriptor made is in graph.all, which passes to the plan or is freed.
 *  3. -inf is what masked scores become: rows that see nothing give 0 and lse -inf. */
#include "kernels/cuda/sdpa_graph.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef cudnnBackendDescriptor_t desc;

enum { MAX_OPS = 48, MAX_DESCRIPTORS = 400, MAX_CONFIGS = 8, MAX_PLANS = 64, FIRST_VIRTUAL = 1000 };

typedef struct {
    const ith_cuda_libs *lib;
    cudnnHandle_t handle; /* NULL: for the described device */
    desc device;          /* its description */
    const ith_sdpa_key *key;
    desc ops[MAX_OPS], all[MAX_DESCRIPTORS];
    int num_ops, num_all;
    int64_t num_virtual;
    desc lengths, ragged[ITH_SDPA_MAX_RAGGED];
    ith_sdpa_plan *plan;
    ith_status status;
    ith_error *err;
} graph;

/* ---- backend calls ---- */

static void check(graph *g, cudnnStatus_t code, const char *what)
{
    char detail[256] = "";
    if (code == CUDNN_STATUS_SUCCESS || g->status != ITH_OK)
        return;
    g->lib->cudnnGetLastErrorString(detail, sizeof detail);
    for (char *p = detail; *p; p++)
        *p = *p == '\n' ? ' ' : *p;
    g->status = ith_fail(g->err, ITH_ERR_UNSUPPORTED, "cuDNN: %s: %s (%s)", what,
                         g->lib->cudnnGetErrorString(code), detail);
}

static desc make(graph *g, cudnnBackendDescriptorType_t type)
{
    desc d = NULL;
    if (g->status != ITH_OK)
        return NULL;
    ITH_ASSERT(g->num_all < MAX_DESCRIPTORS);
    check(g, g->lib->cudnnBackendCreateDescriptor(type, &d), "descriptor");
    if (d)
        g->all[g->num_all++] = d;
    return d;
}

static void set(graph *g, desc d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *value)
{
    if (g->status == ITH_OK)
        check(g, g->lib->cudnnBackendSetAttribute(d, name, type, count, value), "attribute");
}

static void set_desc(graph *g, desc d, cudnnBackendAttributeName_t name, desc value)
{
    if (value)
        set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_type(graph *g, desc d, cudnnBackendAttributeName_t name, cudnnDataType_t value)
{
    set(g, d, name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

static void finish(graph *g, desc d, const char *what)
{
    if (g->status == ITH_OK)
        check(g, g->lib->cudnnBackendFinalize(d), what);
}

/* ---- tensors ---- */

typedef struct {
    int64_t v[4];
} four;

static desc tensor(graph *g, int64_t name, cudnnDataType_t type, four dim, four stride, desc ragged)
{
    bool is_virtual = name == ITH_SDPA_NONE;
    bool by_value = name >= ITH_SDPA_SCALE && name < ITH_SDPA_RAGGED;
    int64_t uid = is_virtual ? FIRST_VIRTUAL + g->num_virtual++ : name, alignment = 16;
    desc d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set_type(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dim.v);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride.v);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (is_virtual)
        set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    if (by_value)
        set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    set_desc(g, d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, ragged);
    finish(g, d, "tensor");
    for (int i = 0; i < g->plan->num_names; i++)
        if (g->plan->names[i] == name)
            return d;
    if (!is_virtual)
        g->plan->names[g->plan->num_names++] = name;
    return d;
}

static desc packed_virtual(graph *g, cudnnDataType_t type, int64_t a, int64_t b, int64_t c,
                           int64_t d)
{
    return tensor(g, ITH_SDPA_NONE, type, (four){{a, b, c, d}}, (four){{b * c * d, c * d, d, 1}},
                  NULL);
}

static desc scores(graph *g, cudnnDataType_t type)
{
    const ith_sdpa_key *k = g->key;
    return packed_virtual(g, type, k->batch, k->heads_q, k->seq, k->seq);
}

/* One value per query row. */
static desc row_values(graph *g)
{
    return packed_virtual(g, CUDNN_DATA_FLOAT, g->key->batch, g->key->heads_q, g->key->seq, 1);
}

static desc scalar(graph *g, int64_t name)
{
    four one = {{1, 1, 1, 1}};
    return tensor(g, name, CUDNN_DATA_FLOAT, one, one, NULL);
}

/* Offsets of the documents in a tensor with `stride` elements per token; NULL unless packed. */
static desc ragged_of(graph *g, int64_t stride)
{
    ith_sdpa_plan *p = g->plan;
    if (!g->key->packed)
        return NULL;
    for (int i = 0; i < p->num_ragged; i++)
        if (p->ragged_stride[i] == stride)
            return g->ragged[i];
    ITH_ASSERT(p->num_ragged < ITH_SDPA_MAX_RAGGED);
    int i = p->num_ragged++;
    p->ragged_stride[i] = stride;
    g->ragged[i] = tensor(g, ITH_SDPA_RAGGED + i, CUDNN_DATA_INT64,
                          (four){{g->key->batch + 1, 1, 1, 1}}, (four){{1, 1, 1, 1}}, NULL);
    return g->ragged[i];
}

/* [B,heads,S,Dh] at its place in memory. */
static desc heads_tensor(graph *g, int64_t name, cudnnDataType_t type, int64_t heads,
                         ith_sdpa_place at)
{
    const ith_sdpa_key *k = g->key;
    return tensor(g, name, type, (four){{k->batch, heads, k->seq, k->head_dim}},
                  (four){{k->seq * at.row, at.head, at.row, 1}}, ragged_of(g, at.row));
}

/* The same memory as [B,heads,Dh,S]. */
static desc transposed_tensor(graph *g, int64_t name, int64_t heads, ith_sdpa_place at)
{
    const ith_sdpa_key *k = g->key;
    return tensor(g, name, CUDNN_DATA_BFLOAT16, (four){{k->batch, heads, k->head_dim, k->seq}},
                  (four){{k->seq * at.row, at.head, 1, at.row}}, ragged_of(g, at.row));
}

/* [B,Hq,S,1] f32 in memory as [T,Hq]. */
static desc row_tensor(graph *g, int64_t name)
{
    const ith_sdpa_key *k = g->key;
    return tensor(g, name, CUDNN_DATA_FLOAT, (four){{k->batch, k->heads_q, k->seq, 1}},
                  (four){{k->seq * k->heads_q, 1, k->heads_q, 1}}, ragged_of(g, k->heads_q));
}

static desc lengths_of(graph *g)
{
    if (g->key->packed && !g->lengths)
        g->lengths = tensor(g, ITH_SDPA_LENGTHS, CUDNN_DATA_INT32, (four){{g->key->batch, 1, 1, 1}},
                            (four){{1, 1, 1, 1}}, NULL);
    return g->lengths;
}

/* ---- operations ---- */

static void push(graph *g, desc op, const char *what)
{
    finish(g, op, what);
    ITH_ASSERT(g->num_ops < MAX_OPS);
    g->ops[g->num_ops++] = op;
}

/* y = x op b, or select(t, x, b). axis < 0: none. */
static desc pointwise(graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t math, desc x, desc b,
                      desc t, desc y, int64_t axis)
{
    desc d = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set_type(g, d, CUDNN_ATTR_POINTWISE_MATH_PREC, math);
    if (axis >= 0)
        set(g, d, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    finish(g, d, "pointwise");
    desc op = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, d);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    push(g, op, "pointwise operation");
    return y;
}

static desc binary(graph *g, cudnnPointwiseMode_t mode, desc x, desc b, desc y)
{
    return pointwise(g, mode, CUDNN_DATA_FLOAT, x, b, NULL, y, -1);
}

/* c = a b; rows, columns and inner size of a document where they are shorter than the batch's. */
static desc matmul(graph *g, desc a, desc b, desc c, desc m, desc n, desc k, bool pad)
{
    double zero = 0;
    desc d = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set_type(g, d, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    if (pad)
        set(g, d, CUDNN_ATTR_MATMUL_PADDING_VALUE, CUDNN_TYPE_DOUBLE, 1, &zero);
    finish(g, d, "matmul");
    desc op = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, d);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, m);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, n);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, k);
    push(g, op, "matmul operation");
    return c;
}

static desc reduce(graph *g, cudnnReduceTensorOp_t how, desc x, desc y)
{
    desc d = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set_type(g, d, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    set(g, d, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    finish(g, d, "reduction");
    desc op = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, d);
    push(g, op, "reduction operation");
    return y;
}

static desc index_of(graph *g, desc s, int64_t axis)
{
    return pointwise(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, s, NULL, NULL,
                     scores(g, CUDNN_DATA_INT32), axis);
}

static desc compare(graph *g, cudnnPointwiseMode_t mode, desc x, desc b)
{
    return pointwise(g, mode, CUDNN_DATA_BOOLEAN, x, b, NULL, scores(g, CUDNN_DATA_BOOLEAN), -1);
}

/* s where keep, -inf elsewhere. */
static desc masked(graph *g, desc s, desc keep)
{
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, s,
                     scalar(g, ITH_SDPA_MASKED), keep, scores(g, CUDNN_DATA_FLOAT), -1);
}

static desc mask_padding(graph *g, desc s)
{
    if (!g->key->packed)
        return s;
    desc row = index_of(g, s, 2), col = index_of(g, s, 3);
    desc rows = compare(g, CUDNN_POINTWISE_CMP_LT, row, lengths_of(g));
    desc cols = compare(g, CUDNN_POINTWISE_CMP_LT, col, lengths_of(g));
    return masked(g, s, compare(g, CUDNN_POINTWISE_LOGICAL_AND, rows, cols));
}

static desc mask_future(graph *g, desc s)
{
    if (!g->key->causal)
        return s;
    desc row = index_of(g, s, 2), col = index_of(g, s, 3);
    return masked(g, s, compare(g, CUDNN_POINTWISE_CMP_GE, row, col));
}

/* scale * q k^T, padding masked. */
static desc scaled_scores(graph *g, desc q, desc k_t)
{
    desc len = lengths_of(g);
    desc s = matmul(g, q, k_t, scores(g, CUDNN_DATA_FLOAT), len, len, NULL, g->key->packed != 0);
    s = binary(g, CUDNN_POINTWISE_MUL, s, scalar(g, ITH_SDPA_SCALE), scores(g, CUDNN_DATA_FLOAT));
    return mask_padding(g, s);
}

/* ---- the graph ---- */

static void build_graph(graph *g)
{
    const ith_sdpa_key *k = g->key;
    desc q = heads_tensor(g, ITH_SDPA_Q, CUDNN_DATA_BFLOAT16, k->heads_q, k->q);
    desc k_t = transposed_tensor(g, ITH_SDPA_K, k->heads_kv, k->k);
    desc v = heads_tensor(g, ITH_SDPA_V, CUDNN_DATA_BFLOAT16, k->heads_kv, k->v);
    desc o = heads_tensor(g, ITH_SDPA_O, CUDNN_DATA_BFLOAT16, k->heads_q, k->o);
    desc lse = row_tensor(g, ITH_SDPA_LSE), len = lengths_of(g);
    desc s = mask_future(g, scaled_scores(g, q, k_t));
    desc max = reduce(g, CUDNN_REDUCE_TENSOR_MAX, s, row_values(g));
    desc e = binary(g, CUDNN_POINTWISE_SUB, s, max, scores(g, CUDNN_DATA_FLOAT));
    e = binary(g, CUDNN_POINTWISE_EXP, e, NULL, scores(g, CUDNN_DATA_FLOAT));
    desc sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, row_values(g));
    desc log = binary(g, CUDNN_POINTWISE_LOG, sum, NULL, row_values(g));
    binary(g, CUDNN_POINTWISE_ADD, max, log, lse);
    desc p = binary(g, CUDNN_POINTWISE_DIV, e, sum, scores(g, CUDNN_DATA_BFLOAT16));
    matmul(g, p, v, o, len, NULL, len, false);
}

/* ---- from graph to plan ---- */

static void set_target(graph *g, desc d, cudnnBackendAttributeName_t handle_name,
                       cudnnBackendAttributeName_t device_name)
{
    if (g->handle)
        set(g, d, handle_name, CUDNN_TYPE_HANDLE, 1, &g->handle);
    else
        set_desc(g, d, device_name, g->device);
}

/* Engine configurations that the heuristic proposes, best first. */
static int64_t configs_of(graph *g, desc configs[MAX_CONFIGS])
{
    int64_t found = 0;
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    desc d = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->num_ops, g->ops);
    if (g->handle)
        set(g, d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &g->handle);
    finish(g, d, "operation graph");
    desc heur = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set_desc(g, heur, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, d);
    set(g, heur, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (!g->handle)
        set_desc(g, heur, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, g->device);
    finish(g, heur, "choice of an engine");
    for (int i = 0; i < MAX_CONFIGS; i++)
        configs[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->status == ITH_OK)
        check(g,
              g->lib->cudnnBackendGetAttribute(heur, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                               CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGS, &found,
                                               configs),
              "list of engines");
    return g->status == ITH_OK ? ith_min_i64(found, MAX_CONFIGS) : 0;
}

static void read_engine(graph *g, desc config)
{
    int64_t count = 0;
    desc engine = make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    if (g->status != ITH_OK)
        return;
    (void)g->lib->cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE,
                                           CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine);
    (void)g->lib->cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64,
                                           1, &count, &g->plan->engine);
    (void)g->lib->cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE,
                                           CUDNN_TYPE_INT64, 1, &count, &g->plan->workspace_bytes);
}

/* The first configuration that compiles. Without a device the code cannot be loaded, which is the
 * last thing finalising does: that failure is as good as success there. */
static void compile(graph *g)
{
    desc configs[MAX_CONFIGS] = {NULL};
    int64_t count = 0, n = configs_of(g, configs);
    if (g->status == ITH_OK && n == 0)
        g->status = ith_fail(g->err, ITH_ERR_UNSUPPORTED, "cuDNN has no engine for this attention");
    for (int64_t i = 0; i < n && g->status == ITH_OK && !g->plan->plan; i++) {
        bool last = i + 1 == n;
        desc d = make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set_desc(g, d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        set_target(g, d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
        cudnnStatus_t code =
            g->status == ITH_OK ? g->lib->cudnnBackendFinalize(d) : CUDNN_STATUS_INTERNAL_ERROR;
        char detail[512] = "";
        if (code != CUDNN_STATUS_SUCCESS && !g->handle)
            g->lib->cudnnGetLastErrorString(detail, sizeof detail);
        if (code == CUDNN_STATUS_SUCCESS || strstr(detail, "cuLibraryLoadData")) {
            g->plan->plan = d;
            read_engine(g, configs[i]);
        } else if (last) {
            check(g, code, "compilation");
        }
    }
    if (g->status == ITH_OK && g->handle)
        check(g,
              g->lib->cudnnBackendGetAttribute(
                  g->plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                  &count, &g->plan->workspace_bytes),
              "workspace size");
}

void ith_sdpa_plan_drop(ith_sdpa_plan *plan, const ith_cuda_libs *libs)
{
    for (int64_t i = plan->num_descriptors - 1; i >= 0; i--)
        (void)libs->cudnnBackendDestroyDescriptor(plan->descriptors[i]);
    ith_free(plan->descriptors);
    memset(plan, 0, sizeof *plan);
}

/* Keeps the descriptors with the plan: it may refer to them. */
static void keep_descriptors(graph *g)
{
    void *kept = NULL;
    int64_t bytes = g->num_all * (int64_t)sizeof(desc);
    ith_status status = ith_alloc(&kept, ith_max_i64(bytes, 1), "attention plan", g->err);
    if (status != ITH_OK) {
        for (int i = g->num_all - 1; i >= 0; i--)
            (void)g->lib->cudnnBackendDestroyDescriptor(g->all[i]);
        g->status = g->status == ITH_OK ? status : g->status;
        g->plan->plan = NULL;
        return;
    }
    memcpy(kept, g->all, (size_t)bytes);
    g->plan->descriptors = kept;
    g->plan->num_descriptors = g->num_all;
}

/* g: library, handle or device, err are set. */
static ith_status build(graph *g, const ith_sdpa_key *key, ith_sdpa_plan *out)
{
    memset(out, 0, sizeof *out);
    out->key = *key;
    g->key = key;
    g->plan = out;
    build_graph(g);
    compile(g);
    keep_descriptors(g);
    if (g->status != ITH_OK)
        ith_sdpa_plan_drop(out, g->lib);
    return g->status;
}

/* What an H200 says of itself, as far as cuDNN asks. */
static const char h200[] =
    "{\"cudaDeviceId\":0,\"deviceVer\":900,\"driverVer\":13000,\"deviceName\":\"NVIDIA H200\","
    "\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
    "\"regsPerBlock\":65536,\"multiProcessorCount\":132,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,"
    "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,"
    "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":9013,\"isTccDriver\":0,"
    "\"supportCoopLaunch\":1,\"smClockRateKHz\":1980000,\"memClockRateKHz\":3201000,"
    "\"l2CacheSize\":62914560,\"totalGlobalMem\":150000000000}";

ith_status ith_sdpa_plan_offline(const ith_cuda_libs *libs, const ith_sdpa_key *key,
                                 ith_sdpa_plan *out, ith_error *err)
{
    graph g = {.lib = libs, .err = err};
    g.plan = out;
    g.device = make(&g, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    set(&g, g.device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
        (int64_t)sizeof h200 - 1, h200);
    finish(&g, g.device, "device description");
    return build(&g, key, out);
}

/* ---- cache and execution ---- */

struct ith_sdpa_cache {
    ith_sdpa_plan plans[MAX_PLANS];
    int64_t count, next;
};

ith_status ith_sdpa_cache_create(ith_sdpa_cache **out, ith_error *err)
{
    void *cache = NULL;
    ITH_TRY(ith_alloc_zero(&cache, 1, (int64_t)sizeof(ith_sdpa_cache), "attention plans", err));
    *out = cache;
    return ITH_OK;
}

void ith_sdpa_cache_destroy(ith_sdpa_cache *cache, const ith_cuda_libs *libs)
{
    for (int64_t i = 0; cache && i < cache->count; i++)
        ith_sdpa_plan_drop(&cache->plans[i], libs);
    ith_free(cache);
}

ith_status ith_sdpa_plan_of(ith_ctx *ctx, const ith_sdpa_key *key, const ith_sdpa_plan **out)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    ith_sdpa_cache *cache = cuda->sdpas;
    for (int64_t i = 0; i < cache->count; i++) {
        if (memcmp(&cache->plans[i].key, key, sizeof *key) == 0) {
            *out = &cache->plans[i];
            return ITH_OK;
        }
    }
    graph g = {.lib = cuda->libs, .handle = cuda->dnn, .err = ctx->err};
    ith_sdpa_plan plan;
    ITH_TRY(build(&g, key, &plan));
    ith_sdpa_plan *slot = &cache->plans[cache->next]; /* the oldest leaves */
    if (cache->next < cache->count)
        ith_sdpa_plan_drop(slot, cuda->libs);
    else
        cache->count++;
    cache->next = (cache->next + 1) % MAX_PLANS;
    *slot = plan;
    *out = slot;
    return ITH_OK;
}

ith_status ith_sdpa_execute(ith_ctx *ctx, const ith_sdpa_plan *plan, void *const *data, float scale,
                            void *workspace)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    graph g = {.lib = cuda->libs, .handle = cuda->dnn, .err = ctx->err};
    float negative = -INFINITY;
    void *pointers[ITH_SDPA_NAMES];
    for (int i = 0; i < plan->num_names; i++) {
        int64_t name = plan->names[i];
        pointers[i] = name == ITH_SDPA_SCALE    ? &scale
                      : name == ITH_SDPA_MASKED ? &negative
                                                : data[name];
        ITH_ASSERT(pointers[i]);
    }
    desc pack = make(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set(&g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, plan->num_names,
        plan->names);
    set(&g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, plan->num_names,
        pointers);
    set(&g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    finish(&g, pack, "pointers");
    if (g.status == ITH_OK)
        check(&g, g.lib->cudnnBackendExecute(cuda->dnn, plan->plan, pack), "attention");
    if (pack)
        (void)g.lib->cudnnBackendDestroyDescriptor(pack);
    return g.status;
}
