/* onednn.c - matrix products by oneDNN, loaded at run time. The only file that knows its API, which
 * changed at 3.0 (descriptors became handles, primitives lost their operation descriptors).
 *
 * Invariants. 1. Absence is a normal state with a reason, not an error. 2. Primitives are made at
 * the first use of a shape and kept until exit; the cache has a stated size and then starts over.
 */
#include "onednn.h"

#ifndef ITH_HAVE_ONEDNN
const char *ith_onednn_version(void)
{
    return "not built in";
}

bool ith_onednn_gemm(const ith_cpu_gemm *g)
{
    (void)g;
    return false;
}
#else
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#if DNNL_VERSION_MAJOR >= 3
#define LIBRARY "libdnnl.so.3"
typedef dnnl_memory_desc_t memory_desc; /* a handle */
#define DESC_ARG(d) (d)
#else
#define LIBRARY "libdnnl.so.2"
typedef dnnl_memory_desc_t memory_desc; /* a struct */
#define DESC_ARG(d) (&(d))
#endif

/* The functions used, as the header declares them. */
#define COMMON(X)                                                                                  \
    X(dnnl_version)                                                                                \
    X(dnnl_engine_create)                                                                          \
    X(dnnl_stream_create)                                                                          \
    X(dnnl_stream_wait)                                                                            \
    X(dnnl_primitive_attr_create)                                                                  \
    X(dnnl_primitive_attr_destroy)                                                                 \
    X(dnnl_primitive_attr_set_post_ops)                                                            \
    X(dnnl_post_ops_create)                                                                        \
    X(dnnl_post_ops_destroy)                                                                       \
    X(dnnl_post_ops_append_sum)                                                                    \
    X(dnnl_primitive_create)                                                                       \
    X(dnnl_primitive_destroy)                                                                      \
    X(dnnl_primitive_execute)                                                                      \
    X(dnnl_primitive_desc_destroy)                                                                 \
    X(dnnl_memory_create)                                                                          \
    X(dnnl_memory_set_data_handle)
#if DNNL_VERSION_MAJOR >= 3
#define FUNCTIONS(X)                                                                               \
    COMMON(X)                                                                                      \
    X(dnnl_memory_desc_create_with_strides)                                                        \
    X(dnnl_memory_desc_destroy)                                                                    \
    X(dnnl_matmul_primitive_desc_create)
#else
#define FUNCTIONS(X)                                                                               \
    COMMON(X)                                                                                      \
    X(dnnl_memory_desc_init_by_strides)                                                            \
    X(dnnl_matmul_desc_init)                                                                       \
    X(dnnl_primitive_desc_create)
#endif

#define MEMBER(name) __typeof__(&(name)) name; /* NOLINT(bugprone-macro-parentheses) */
static struct {
    FUNCTIONS(MEMBER)
} api;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char version_text[160];
static bool available;
static dnnl_engine_t engine;
static dnnl_stream_t stream;

typedef struct {
    ith_cpu_gemm key; /* pointers NULL */
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, y;
} cached;

#define CACHE_SIZE 64
static cached cache[CACHE_SIZE];
static int cache_used;

/* dlsym gives void *; ISO C has no cast from it to a function. */
static bool find(void *lib, const char *name, void *slot)
{
    void *address = dlsym(lib, name);
    memcpy(slot, &address, sizeof address);
    return address != NULL;
}

static void load_library(void)
{
    void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(version_text, sizeof version_text, "absent (%s)", LIBRARY);
        return;
    }
#define FIND(name)                                                                                 \
    if (!find(lib, #name, &api.name)) {                                                            \
        snprintf(version_text, sizeof version_text, "unusable: %s has no %s", LIBRARY, #name);     \
        return;                                                                                    \
    }
    FUNCTIONS(FIND)
    if (api.dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success ||
        api.dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success) {
        snprintf(version_text, sizeof version_text, "unusable: no CPU engine");
        return;
    }
    const dnnl_version_t *v = api.dnnl_version();
    snprintf(version_text, sizeof version_text, "%d.%d.%d", v->major, v->minor, v->patch);
    available = true;
}

const char *ith_onednn_version(void)
{
    pthread_once(&once, load_library);
    return version_text;
}

static dnnl_data_type_t type_of(ith_dtype dtype)
{
    return dtype == ITH_BF16 ? dnnl_bf16 : dnnl_f32;
}

static bool make_desc(memory_desc *d, int64_t rows, int64_t cols, int64_t row_step,
                      int64_t col_step, ith_dtype dtype)
{
    dnnl_dims_t dims = {rows, cols}, strides = {row_step, col_step};
#if DNNL_VERSION_MAJOR >= 3
    return api.dnnl_memory_desc_create_with_strides(d, 2, dims, type_of(dtype), strides) ==
           dnnl_success;
#else
    return api.dnnl_memory_desc_init_by_strides(d, 2, dims, type_of(dtype), strides) ==
           dnnl_success;
#endif
}

static bool make_primitive(dnnl_primitive_t *out, const memory_desc *a, const memory_desc *b,
                           const memory_desc *y, bool accumulate)
{
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t ops = NULL;
    dnnl_primitive_desc_t pd = NULL;
    bool ok = api.dnnl_primitive_attr_create(&attr) == dnnl_success &&
              api.dnnl_post_ops_create(&ops) == dnnl_success;
#if DNNL_VERSION_MAJOR >= 3
    if (ok && accumulate)
        ok = api.dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef) == dnnl_success;
    ok = ok && api.dnnl_primitive_attr_set_post_ops(attr, ops) == dnnl_success &&
         api.dnnl_matmul_primitive_desc_create(&pd, engine, *a, *b, NULL, *y, attr) == dnnl_success;
#else
    dnnl_matmul_desc_t desc;
    if (ok && accumulate)
        ok = api.dnnl_post_ops_append_sum(ops, 1.0f) == dnnl_success;
    ok = ok && api.dnnl_primitive_attr_set_post_ops(attr, ops) == dnnl_success &&
         api.dnnl_matmul_desc_init(&desc, a, b, NULL, y) == dnnl_success &&
         api.dnnl_primitive_desc_create(&pd, &desc, attr, engine, NULL) == dnnl_success;
#endif
    ok = ok && api.dnnl_primitive_create(out, pd) == dnnl_success;
    if (pd)
        (void)api.dnnl_primitive_desc_destroy(pd);
    if (ops)
        (void)api.dnnl_post_ops_destroy(ops);
    if (attr)
        (void)api.dnnl_primitive_attr_destroy(attr);
    return ok;
}

static bool build(cached *c, const ith_cpu_gemm *g)
{
    memory_desc a, b, y;
    bool ok = make_desc(&a, g->m, g->k, g->a.k_contiguous ? g->a.ld : 1,
                        g->a.k_contiguous ? 1 : g->a.ld, g->a.dtype) &&
              make_desc(&b, g->k, g->n, g->b.k_contiguous ? 1 : g->b.ld,
                        g->b.k_contiguous ? g->b.ld : 1, g->b.dtype) &&
              make_desc(&y, g->m, g->n, g->y_ld, 1, g->y_dtype) &&
              make_primitive(&c->primitive, &a, &b, &y, g->accumulate) &&
              api.dnnl_memory_create(&c->a, DESC_ARG(a), engine, NULL) == dnnl_success &&
              api.dnnl_memory_create(&c->b, DESC_ARG(b), engine, NULL) == dnnl_success &&
              api.dnnl_memory_create(&c->y, DESC_ARG(y), engine, NULL) == dnnl_success;
#if DNNL_VERSION_MAJOR >= 3
    if (ok) {
        (void)api.dnnl_memory_desc_destroy(a);
        (void)api.dnnl_memory_desc_destroy(b);
        (void)api.dnnl_memory_desc_destroy(y);
    }
#endif
    return ok;
}

static bool same_shape(const ith_cpu_gemm *x, const ith_cpu_gemm *y)
{
    return x->m == y->m && x->n == y->n && x->k == y->k && x->a.ld == y->a.ld &&
           x->b.ld == y->b.ld && x->y_ld == y->y_ld && x->a.dtype == y->a.dtype &&
           x->b.dtype == y->b.dtype && x->y_dtype == y->y_dtype &&
           x->a.k_contiguous == y->a.k_contiguous && x->b.k_contiguous == y->b.k_contiguous &&
           x->accumulate == y->accumulate;
}

bool ith_onednn_gemm(const ith_cpu_gemm *g)
{
    pthread_once(&once, load_library);
    if (!available)
        return false;
    cached *c = NULL;
    for (int i = 0; i < cache_used && !c; i++)
        if (same_shape(&cache[i].key, g))
            c = &cache[i];
    if (!c) {
        if (cache_used == CACHE_SIZE)
            return false;
        c = &cache[cache_used];
        if (!build(c, g))
            return false;
        c->key = *g;
        cache_used++;
    }
    /* The API takes void * for inputs too. */
    union {
        const void *in;
        void *out;
    } a = {g->a.data}, b = {g->b.data};
    (void)api.dnnl_memory_set_data_handle(c->a, a.out);
    (void)api.dnnl_memory_set_data_handle(c->b, b.out);
    (void)api.dnnl_memory_set_data_handle(c->y, g->y);
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, c->a}, {DNNL_ARG_WEIGHTS, c->b}, {DNNL_ARG_DST, c->y}};
    return api.dnnl_primitive_execute(c->primitive, stream, 3, args) == dnnl_success &&
           api.dnnl_stream_wait(stream) == dnnl_success;
}
#endif
