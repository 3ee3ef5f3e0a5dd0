/* comm_mpi.c - exchanges over MPI: libithaca_mpi.so, opened at run time by comm_self.c.
 *
 * Invariants:
 *  1. Only this file knows MPI.
 *  2. A block is sent in pieces of at most PIECE_BYTES, for MPI counts in int; messages of a pair
 *     keep their order, so pieces need no names.
 *  3. Waiting ends: with the timeout, or when MPI reports a failure. */
#include <mpi.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/mem.h"
#include "comm/mpi_api.h"

#define PIECE_BYTES ((int64_t)1 << 30)
#define BUSY_POLLS 2000  /* before the processor is given up between two looks */
#define IDLE_NANOS 20000 /* between two looks, later */
#define TAG 7

typedef struct {
    MPI_Comm comm;
    MPI_Request *requests; /* [2 * size] */
    bool is_world;
} mpi_state;

__attribute__((visibility("default"))) ith_mpi_open_fn ith_mpi_open;

static ith_status mpi_failed(int code, const char *what, ith_error *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int len = 0;
    (void)MPI_Error_string(code, text, &len);
    return ith_fail(err, ITH_ERR_RUN, "%s: MPI: %s", what, text);
}

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

/* Yields: with more ranks than processors the peer needs this one to answer. */
static ith_status wait_all(ith_comm *comm, int count, ith_error *err)
{
    mpi_state *s = comm->state;
    double start = 0;
    for (int64_t polls = 0;; polls++) {
        int done = 0, code = MPI_Testall(count, s->requests, &done, MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS)
            return mpi_failed(code, "exchange", err);
        if (done)
            return ITH_OK;
        if (polls < BUSY_POLLS) {
            sched_yield();
            continue;
        }
        struct timespec nap = {0, IDLE_NANOS};
        nanosleep(&nap, NULL);
        if (polls % 1024 != 0)
            continue;
        double now = now_s();
        start = start > 0 ? start : now;
        if (comm->timeout_s > 0 && now - start > comm->timeout_s)
            return ith_fail(err, ITH_ERR_RUN,
                            "another rank does not answer since %.0f s (dist_timeout)",
                            comm->timeout_s);
    }
}

static int64_t piece_of(int64_t bytes, int64_t done)
{
    return ith_max_i64(0, ith_min_i64(PIECE_BYTES, bytes - done));
}

/* Starts the pieces at offset `done` of all blocks; returns how many messages, -1 on failure. */
static int start_pieces(ith_comm *comm, const ith_exchange *x, int64_t done, int *code)
{
    mpi_state *s = comm->state;
    int count = 0;
    for (int64_t i = 1; i < comm->size; i++) {
        int64_t j = (comm->rank + comm->size - i) % comm->size;
        int64_t n = piece_of(x->recv_bytes[j], done);
        if (n == 0)
            continue;
        *code = MPI_Irecv((char *)x->recv + x->recv_at[j] + done, ith_narrow(n), MPI_BYTE,
                          ith_narrow(j), TAG, s->comm, &s->requests[count++]);
        if (*code != MPI_SUCCESS)
            return -1;
    }
    for (int64_t i = 1; i < comm->size; i++) {
        int64_t j = (comm->rank + i) % comm->size;
        int64_t n = piece_of(x->send_bytes[j], done);
        if (n == 0)
            continue;
        *code = MPI_Isend((const char *)x->send + x->send_at[j] + done, ith_narrow(n), MPI_BYTE,
                          ith_narrow(j), TAG, s->comm, &s->requests[count++]);
        if (*code != MPI_SUCCESS)
            return -1;
    }
    return count;
}

static ith_status mpi_exchange(ith_comm *comm, const ith_exchange *x, ith_error *err)
{
    int64_t me = comm->rank, longest = 0;
    ITH_ASSERT(x->send_bytes[me] == x->recv_bytes[me]);
    if (x->send_bytes[me])
        memmove((char *)x->recv + x->recv_at[me], (const char *)x->send + x->send_at[me],
                (size_t)x->send_bytes[me]);
    for (int64_t j = 0; j < comm->size; j++)
        longest = ith_max_i64(longest, ith_max_i64(x->send_bytes[j], x->recv_bytes[j]));
    for (int64_t done = 0; done < longest; done += PIECE_BYTES) {
        int code = MPI_SUCCESS, count = start_pieces(comm, x, done, &code);
        if (count < 0)
            return mpi_failed(code, "exchange", err);
        ITH_TRY(wait_all(comm, count, err));
    }
    return ITH_OK;
}

static ith_status make_state(mpi_state **out, MPI_Comm comm, bool is_world, int size,
                             ith_error *err)
{
    mpi_state *s = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&s, 1, sizeof *s, "MPI group", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->requests, 2 * (int64_t)size, sizeof *s->requests,
                               "MPI group", err));
    s->comm = comm;
    s->is_world = is_world;
    *out = s;
    return ITH_OK;
out:
    ith_free(s);
    return status;
}

static ith_status mpi_split(ith_comm *comm, int64_t color, void **state, int64_t *rank,
                            int64_t *size, ith_error *err)
{
    mpi_state *s = comm->state;
    MPI_Comm group = MPI_COMM_NULL;
    int r = 0, n = 0,
        code = MPI_Comm_split(s->comm, ith_narrow(color), ith_narrow(comm->rank), &group);
    if (code != MPI_SUCCESS)
        return mpi_failed(code, "split", err);
    (void)MPI_Comm_set_errhandler(group, MPI_ERRORS_RETURN);
    (void)MPI_Comm_rank(group, &r);
    (void)MPI_Comm_size(group, &n);
    mpi_state *made = NULL;
    ITH_TRY(make_state(&made, group, false, n, err));
    *state = made;
    *rank = r;
    *size = n;
    return ITH_OK;
}

static void mpi_close(ith_comm *comm)
{
    mpi_state *s = comm->state;
    if (s->is_world)
        (void)MPI_Finalize();
    else
        (void)MPI_Comm_free(&s->comm);
    ith_free(s->requests);
    ith_free(s);
}

static void mpi_abort(ith_comm *comm, int exit_code)
{
    mpi_state *s = comm->state;
    (void)MPI_Abort(s->comm, exit_code);
}

static const ith_comm_driver driver = {"mpi",     mpi_exchange, mpi_split, mpi_close,
                                       mpi_abort, NULL,         NULL,      NULL};

static void find_local(ith_comm *comm)
{
    MPI_Comm node = MPI_COMM_NULL;
    int rank = 0, size = 1;
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, ith_narrow(comm->rank),
                            MPI_INFO_NULL, &node) != MPI_SUCCESS)
        return;
    (void)MPI_Comm_rank(node, &rank);
    (void)MPI_Comm_size(node, &size);
    (void)MPI_Comm_free(&node);
    comm->local_rank = rank;
    comm->local_size = size;
}

ith_status ith_mpi_open(const ith_mpi_api *api, ith_comm **out, double timeout_s, ith_error *err)
{
    int started = 0, level = 0, rank = 0, size = 0, code = 0;
    if (strcmp(api->abi, ITH_MPI_ABI) != 0)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "the MPI plug-in is of another build (it says '%s', this program '%s')",
                        ITH_MPI_ABI, api->abi);
    (void)MPI_Initialized(&started);
    if (!started &&
        (code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level)) != MPI_SUCCESS)
        return mpi_failed(code, "MPI_Init", err);
    (void)MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
    mpi_state *s = NULL;
    ITH_TRY(make_state(&s, MPI_COMM_WORLD, true, size, err));
    ITH_TRY(api->wrap(out, &driver, s, rank, size, timeout_s, err));
    find_local(*out);
    return ITH_OK;
}
