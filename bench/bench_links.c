/* bench_links.c - what the links between the GPUs of a job give: exchanges of blocks and of heads
 * (rows as they lie, where the way takes them), gathers, sums, and copies of rows within a GPU.
 *
 *     mpirun -n 2 ithaca_bench_links [mib=256]
 *
 * Times are of the device, the median of 20 calls in a row. Bus: bytes that leave a GPU / time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/session.h"
#include "parallel/mesh.h"

#define CALLS 20
#define SCRATCH ((int64_t)128 << 20)

static ith_error err;
static ith_session session;
static ith_comm *world, *links;
static char *memory[2];

static void check(ith_status status)
{
    if (status == ITH_OK)
        return;
    fprintf(stderr, "error: %s\n", err.text);
    exit(1);
}

typedef enum { EXCHANGE, HEADS, GATHER, SUM, ROWS, KINDS } kind;

/* One call that makes `bytes` leave this GPU (of rows: that copies them). */
static void call(kind k, int64_t bytes, int64_t row)
{
    ith_device *d = session.ctx.device;
    int64_t lists[2][64], first[65], others = world->size - 1, part = bytes / others / 256 * 256;
    for (int64_t r = 0; r < world->size; r++) {
        lists[0][r] = r * part;
        lists[1][r] = r == world->rank ? 0 : part;
        first[r] = r * (k == GATHER ? part : part / 4);
    }
    first[world->size] = world->size * (k == GATHER ? part : part / 4);
    ith_exchange x = {memory[0], lists[0], lists[1], memory[1], lists[0], lists[1]};
    ith_strided send[64], recv[64];
    for (int64_t r = 0; k == HEADS && r < world->size; r++) {
        int64_t rows = r == world->rank ? 0 : part / row;
        send[r] = (ith_strided){memory[0] + 2 * r * part, 2 * row, row, rows};
        recv[r] = (ith_strided){memory[1] + 2 * r * part, 2 * row, row, rows};
    }
    if (k == EXCHANGE)
        check(ith_comm_exchange(links, &x, &err));
    else if (k == HEADS)
        check(ith_comm_exchange_rows(links, send, recv, 1, &err));
    else if (k == GATHER)
        check(ith_comm_all_gather_v(links, memory[0], NULL, first, 1, &err));
    else if (k == SUM)
        check(ith_comm_reduce_scatter_v(links, memory[0], first, ITH_F32, ITH_REDUCE_SUM,
                                        (float *)(void *)memory[1], &err));
    else
        check(d->copy_rows(d, memory[1], row, memory[0], 2 * row, row, bytes / row, &err));
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void measure(kind k, int64_t bytes, int64_t row)
{
    static const char *const names[KINDS] = {"exchange", "heads", "all-gather", "reduce-scatter",
                                             "rows"};
    ith_device *d = session.ctx.device;
    double ms[CALLS];
    for (int i = 0; i < 3; i++)
        call(k, bytes, row);
    check(d->sync(d, &err));
    check(ith_comm_barrier(world, &err));
    for (int64_t i = 0; i < CALLS; i++) {
        check(d->stamp(d, 2 * i, &err));
        call(k, bytes, row);
        check(d->stamp(d, 2 * i + 1, &err));
    }
    check(d->sync(d, &err));
    for (int64_t i = 0; i < CALLS; i++)
        check(d->elapsed(d, 2 * i, 2 * i + 1, &ms[i], &err));
    qsort(ms, CALLS, sizeof *ms, by_value);
    if (world->rank == 0)
        printf("%-14s %9.2f MiB %6lld B rows %9.1f us %7.1f GB/s\n", names[k],
               (double)bytes / (1 << 20), (long long)row, 1e3 * ms[CALLS / 2],
               (double)bytes / ms[CALLS / 2] * 1e-6);
}

int main(int argc, char **argv)
{
    int64_t most =
        (argc > 1 && strncmp(argv[1], "mib=", 4) == 0 ? strtoll(argv[1] + 4, NULL, 10) : 256) << 20;
    void *at = NULL;
    check(ith_comm_open_world(&world, 60, &err));
    check(ith_session_open(&session, ITH_USE_CUDA, ith_narrow(world->local_rank), 1, false, &err));
    ith_device *d = session.ctx.device;
    check(ith_comm_open_device(&links, world, d, false, &err));
    check(d->alloc(d, SCRATCH, &at, &err));
    ith_comm_set_scratch(links, at, SCRATCH);
    int64_t room = 4 * most + 65536; /* with two ranks, rows with gaps of both */
    for (int i = 0; i < 2; i++) {
        check(d->alloc(d, room, &at, &err));
        check(d->fill(d, at, 0, room, &err));
        memory[i] = at;
    }
    for (int k = 0; k < KINDS; k++) {
        bool has_rows = k == ROWS || k == HEADS;
        for (int64_t bytes = (int64_t)1 << 16; bytes <= most; bytes *= 4)
            for (int64_t row = 256; row <= (has_rows ? 4096 : 256); row *= 2)
                if (k != HEADS || links->takes_rows)
                    measure((kind)k, bytes, has_rows ? row : 0);
    }
    for (int i = 0; i < 2; i++)
        d->free(d, memory[i]);
    d->free(d, links->scratch);
    ith_comm_close(links);
    ith_session_close(&session);
    ith_comm_close(world);
    return 0;
}
