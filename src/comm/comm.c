/* comm.c - the collectives, all of them one or more exchanges. */
#include "comm/comm.h"

#include <math.h>
#include <stdio.h>
#include <time.h>

#include "base/checked.h"
#include "base/mem.h"

/* Up to here every rank reduces everything by itself: one exchange instead of two. */
#define SMALL_REDUCE_BYTES 4096

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

ith_status ith_comm_wrap(ith_comm **out, const ith_comm_driver *driver, void *state, int64_t rank,
                         int64_t size, double timeout_s, ith_error *err)
{
    ITH_ASSERT(size >= 1 && rank >= 0 && rank < size);
    ith_comm *comm = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&comm, 1, sizeof *comm, "group of ranks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&comm->lists, 5 * size + 1, sizeof *comm->lists,
                               "group of ranks", err));
    if (size > 1 && !driver->add_parts) {
        ITH_TRY_OUT(ith_alloc(&comm->scratch, ITH_COMM_SCRATCH_BYTES, "scratch of a group", err));
        comm->scratch_bytes = ITH_COMM_SCRATCH_BYTES;
    }
    comm->driver = driver;
    comm->state = state;
    comm->rank = rank;
    comm->size = comm->local_size = size;
    comm->local_rank = rank;
    comm->timeout_s = timeout_s;
    comm->sharers = 1;
    *out = comm;
    return ITH_OK;
out:
    ith_free(comm->lists);
    ith_free(comm);
    return status;
}

void ith_comm_close(ith_comm *comm)
{
    if (!comm)
        return;
    comm->driver->close(comm);
    ith_free(comm->lists);
    if (!comm->driver->add_parts)
        ith_free(comm->scratch);
    ith_free(comm);
}

void ith_comm_set_scratch(ith_comm *comm, void *memory, int64_t bytes)
{
    ITH_ASSERT(comm->driver->add_parts);
    comm->scratch = memory;
    comm->scratch_bytes = bytes;
}

/* Where ranks cannot talk, the lowest one speaks first, and its abort ends the others. */
#define TURN_NANOS 200000000
#define MAX_TURNS 10

bool ith_comm_last_words(ith_comm *world, ith_error *err)
{
    if (world->size == 1)
        return true;
    if (world->driver->last_words)
        return world->driver->last_words(world, err);
    char own[sizeof err->text];
    snprintf(own, sizeof own, "%s", err->text);
    ith_status status = err->status;
    for (int64_t i = 0; i < ith_min_i64(world->rank, MAX_TURNS); i++) {
        struct timespec turn = {0, TURN_NANOS};
        nanosleep(&turn, NULL);
    }
    ith_error_clear(err);
    (void)ith_fail(err, status, "rank %lld: %s", (long long)world->rank, own);
    return true;
}

void ith_comm_abort(ith_comm *comm, int exit_code)
{
    if (comm)
        comm->driver->abort(comm, exit_code);
}

ith_status ith_comm_split(ith_comm *comm, int64_t color, ith_comm **out, ith_error *err)
{
    void *state = NULL;
    int64_t rank = 0, size = 1;
    ITH_TRY(comm->driver->split(comm, color, &state, &rank, &size, err));
    return ith_comm_wrap(out, comm->driver, state, rank, size, comm->timeout_s, err);
}

ith_status ith_comm_exchange(ith_comm *comm, const ith_exchange *x, ith_error *err)
{
    for (int64_t j = 0; j < comm->size; j++) {
        ITH_ASSERT(x->send_bytes[j] >= 0 && x->recv_bytes[j] >= 0);
        comm->bytes_sent += j == comm->rank ? 0 : x->send_bytes[j];
    }
    comm->exchanges++;
    double t0 = now_s();
    ith_status status = comm->driver->exchange(comm, x, err);
    comm->broken |= status != ITH_OK;
    comm->seconds += now_s() - t0;
    return status;
}

ith_status ith_comm_exchange_rows(ith_comm *comm, const ith_strided *send, const ith_strided *recv,
                                  int64_t pieces, ith_error *err)
{
    ITH_ASSERT(comm->takes_rows && pieces >= 1 && pieces <= ITH_MAX_PIECES);
    for (int64_t i = 0; i < comm->size * pieces; i++)
        comm->bytes_sent += i / pieces == comm->rank ? 0 : send[i].bytes * send[i].rows;
    comm->exchanges++;
    double t0 = now_s();
    ith_status status = comm->driver->exchange_rows(comm, send, recv, pieces, err);
    comm->broken |= status != ITH_OK;
    comm->seconds += now_s() - t0;
    return status;
}

/* The group's own lists: send offsets and sizes, receive offsets and sizes, range borders. */
static int64_t *list(const ith_comm *comm, int which)
{
    return comm->lists + which * comm->size;
}

static ith_exchange own_lists(const ith_comm *comm, const void *send, void *recv)
{
    ith_exchange x = {send, list(comm, 0), list(comm, 1), recv, list(comm, 2), list(comm, 3)};
    return x;
}

ith_status ith_comm_barrier(ith_comm *comm, ith_error *err)
{
    char *flags = comm->scratch;
    if (comm->size == 1)
        return ITH_OK;
    ITH_ASSERT(comm->size + 1 <= comm->scratch_bytes);
    flags[comm->size] = 0;
    return ith_comm_all_gather(comm, flags, flags + comm->size, 1, err);
}

ith_status ith_comm_broadcast(ith_comm *comm, void *data, int64_t bytes, int64_t root,
                              ith_error *err)
{
    ITH_ASSERT(root >= 0 && root < comm->size);
    if (comm->size == 1)
        return ITH_OK;
    bool from_here = comm->rank == root;
    for (int64_t j = 0; j < comm->size; j++) {
        list(comm, 0)[j] = list(comm, 2)[j] = 0;
        list(comm, 1)[j] = from_here && j != root ? bytes : 0;
        list(comm, 3)[j] = !from_here && j == root ? bytes : 0;
    }
    ith_exchange x = own_lists(comm, data, data);
    return ith_comm_exchange(comm, &x, err);
}

ith_status ith_comm_all_gather(ith_comm *comm, void *recv, const void *send, int64_t bytes,
                               ith_error *err)
{
    char *own = (char *)recv + comm->rank * bytes;
    if (own != send)
        memcpy(own, send, (size_t)bytes);
    if (comm->size == 1)
        return ITH_OK;
    for (int64_t j = 0; j < comm->size; j++) {
        list(comm, 0)[j] = comm->rank * bytes;
        list(comm, 2)[j] = j * bytes;
        list(comm, 1)[j] = list(comm, 3)[j] = j == comm->rank ? 0 : bytes;
    }
    ith_exchange x = own_lists(comm, recv, recv);
    return ith_comm_exchange(comm, &x, err);
}

ith_status ith_comm_all_gather_v(ith_comm *comm, void *data, const void *own, const int64_t *first,
                                 int64_t elem_bytes, ith_error *err)
{
    int64_t me = comm->rank, at = first[me] * elem_bytes;
    if (comm->size == 1 && !own)
        return ITH_OK;
    for (int64_t j = 0; j < comm->size; j++) {
        bool moves = j != me || own; /* the own block */
        list(comm, 0)[j] = own ? 0 : at;
        list(comm, 1)[j] = moves ? (first[me + 1] - first[me]) * elem_bytes : 0;
        list(comm, 2)[j] = first[j] * elem_bytes;
        list(comm, 3)[j] = moves ? (first[j + 1] - first[j]) * elem_bytes : 0;
    }
    ith_exchange x = own_lists(comm, own ? own : data, data);
    return ith_comm_exchange(comm, &x, err);
}

/* ---- reductions ---- */

/* own[i] = reduction over r, in rank order, of parts[r * stride + i]; the own part is own[i]. With
 * `into`, into[i] grows by it. */
static void reduce_f32(float *own, float *into, const float *parts, int64_t rank, int64_t ranks,
                       int64_t stride, int64_t n, ith_reduce op)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t r = 0; r < ranks; r++) {
            double x = (double)(r == rank ? own[i] : parts[r * stride + i]);
            sum = r == 0 ? x : op == ITH_REDUCE_SUM ? sum + x : (x > sum || isnan(x) ? x : sum);
        }
        if (into)
            into[i] += (float)sum;
        else
            own[i] = (float)sum;
    }
}

static void reduce_f64(double *own, const double *parts, int64_t rank, int64_t ranks,
                       int64_t stride, int64_t n, ith_reduce op)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t r = 0; r < ranks; r++) {
            double x = r == rank ? own[i] : parts[r * stride + i];
            sum = r == 0 ? x : op == ITH_REDUCE_SUM ? sum + x : (x > sum || isnan(x) ? x : sum);
        }
        own[i] = sum;
    }
}

static void reduce_i64(int64_t *own, const int64_t *parts, int64_t rank, int64_t ranks,
                       int64_t stride, int64_t n, ith_reduce op)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t sum = 0;
        for (int64_t r = 0; r < ranks; r++) {
            int64_t x = r == rank ? own[i] : parts[r * stride + i];
            sum = r == 0 ? x : op == ITH_REDUCE_SUM ? sum + x : ith_max_i64(sum, x);
        }
        own[i] = sum;
    }
}

static ith_status reduce(ith_comm *comm, void *own, float *into, int64_t stride, int64_t n,
                         ith_dtype dtype, ith_reduce op, ith_error *err)
{
    const void *parts = comm->scratch;
    int64_t rank = comm->rank, ranks = comm->size;
    ITH_ASSERT(dtype == ITH_F32 || dtype == ITH_F64 || dtype == ITH_I64);
    ITH_ASSERT(!into || (op == ITH_REDUCE_SUM && dtype == ITH_F32));
    if (comm->driver->add_parts) {
        ITH_ASSERT(op == ITH_REDUCE_SUM && dtype != ITH_I64);
        return comm->driver->add_parts(comm, into ? into : own, into, own, stride, n, dtype, err);
    }
    if (dtype == ITH_F32)
        reduce_f32(own, into, parts, rank, ranks, stride, n, op);
    else if (dtype == ITH_F64)
        reduce_f64(own, parts, rank, ranks, stride, n, op);
    else
        reduce_i64(own, parts, rank, ranks, stride, n, op);
    return ITH_OK;
}

/* Elements [begin, end) of a range that are in round c of n elements each. */
static int64_t round_part(int64_t begin, int64_t end, int64_t c, int64_t n, int64_t *at)
{
    *at = ith_min_i64(begin + c * n, end);
    return ith_min_i64(n, end - *at);
}

ith_status ith_comm_reduce_scatter_v(ith_comm *comm, void *data, const int64_t *first,
                                     ith_dtype dtype, ith_reduce op, float *into, ith_error *err)
{
    int64_t size = ith_dtype_bytes(dtype), me = comm->rank, longest = 0;
    if (comm->size == 1)
        return into ? reduce(comm, (char *)data + first[0] * size, into, 0, first[1] - first[0],
                             dtype, op, err)
                    : ITH_OK;
    int64_t n = comm->scratch_bytes / size / comm->size;
    ITH_ASSERT(n > 0);
    for (int64_t j = 0; j < comm->size; j++)
        longest = ith_max_i64(longest, first[j + 1] - first[j]);
    for (int64_t c = 0; c < ith_div_ceil(longest, n); c++) {
        int64_t own_at = 0, own = round_part(first[me], first[me + 1], c, n, &own_at);
        for (int64_t j = 0; j < comm->size; j++) {
            int64_t at = 0, part = round_part(first[j], first[j + 1], c, n, &at);
            list(comm, 0)[j] = at * size;
            list(comm, 1)[j] = j == me ? 0 : part * size;
            list(comm, 2)[j] = j * n * size;
            list(comm, 3)[j] = j == me ? 0 : own * size;
        }
        ith_exchange x = own_lists(comm, data, comm->scratch);
        ITH_TRY(ith_comm_exchange(comm, &x, err));
        ITH_TRY(reduce(comm, (char *)data + own_at * size,
                       into ? into + (own_at - first[me]) : NULL, n, own, dtype, op, err));
    }
    return ITH_OK;
}

/* Every rank has all of every rank, and reduces it by itself. */
static ith_status small_all_reduce(ith_comm *comm, void *data, int64_t count, ith_dtype dtype,
                                   ith_reduce op, ith_error *err)
{
    int64_t bytes = count * ith_dtype_bytes(dtype);
    for (int64_t j = 0; j < comm->size; j++) {
        list(comm, 0)[j] = 0;
        list(comm, 2)[j] = j * bytes;
        list(comm, 1)[j] = list(comm, 3)[j] = j == comm->rank ? 0 : bytes;
    }
    ith_exchange x = own_lists(comm, data, comm->scratch);
    ITH_TRY(ith_comm_exchange(comm, &x, err));
    return reduce(comm, data, NULL, count, count, dtype, op, err);
}

ith_status ith_comm_all_reduce(ith_comm *comm, void *data, int64_t count, ith_dtype dtype,
                               ith_reduce op, ith_error *err)
{
    int64_t size = ith_dtype_bytes(dtype), bytes = ith_mul_bytes(count, size);
    if (comm->size == 1)
        return ITH_OK;
    if (bytes <= SMALL_REDUCE_BYTES && bytes * comm->size <= comm->scratch_bytes)
        return small_all_reduce(comm, data, count, dtype, op, err);
    int64_t *first = list(comm, 4);
    for (int64_t j = 0; j <= comm->size; j++)
        first[j] = count / comm->size * j + ith_min_i64(j, count % comm->size);
    ITH_TRY(ith_comm_reduce_scatter_v(comm, data, first, dtype, op, NULL, err));
    return ith_comm_all_gather_v(comm, data, NULL, first, size, err);
}

ith_status ith_comm_agree(ith_comm *comm, ith_status status, ith_error *err)
{
    if (!comm || comm->size == 1)
        return status;
    int64_t *all = comm->scratch, mine = (int64_t)status;
    ith_error own = {0}, why = {0};
    if (ith_comm_all_gather(comm, all, &mine, sizeof mine, &own) != ITH_OK)
        return ith_fail(err, own.status, "%s", own.text); /* an own failure keeps its text */
    int64_t failed = 0;
    while (failed < comm->size && all[failed] == ITH_OK)
        failed++;
    if (failed == comm->size)
        return ITH_OK;
    ith_status agreed = (ith_status)all[failed];
    if (comm->rank == failed)
        snprintf(why.text, sizeof why.text, "%s", err->text);
    ITH_TRY(ith_comm_broadcast(comm, why.text, sizeof why.text, failed, err));
    why.text[sizeof why.text - 1] = '\0';
    ith_error_clear(err);
    return failed == 0 ? ith_fail(err, agreed, "%s", why.text)
                       : ith_fail(err, agreed, "rank %lld: %s", (long long)failed, why.text);
}
