/* twin.c - the host in disguise. */
#include "twin.h"

#include <stdlib.h>

static ith_comm *world;

static ith_status twin_identify(ith_device *d, unsigned char uuid[ITH_DEVICE_UUID_BYTES],
                                ith_error *e)
{
    (void)d, (void)e;
    memset(uuid, d->state ? 7 : (int)world->rank, ITH_DEVICE_UUID_BYTES);
    return ITH_OK;
}

/* ---- groups: their ranks meet under the number of their first one ---- */

enum { MAX_RANKS = 16, MAX_WAITING = 64 };

typedef struct {
    ith_comm *host;
    bool beside;
} twin_group;

static ith_status twin_new_group(ith_device *d, char id[ITH_DEVICE_GROUP_ID_BYTES], ith_error *e)
{
    (void)d, (void)e;
    snprintf(id, ITH_DEVICE_GROUP_ID_BYTES, "meet %lld", (long long)world->rank);
    return ITH_OK;
}

static ith_status twin_open(ith_device *d, const char id[ITH_DEVICE_GROUP_ID_BYTES], int64_t rank,
                            int64_t size, bool beside, double timeout_s,
                            void (*lost)(void *, const char *), void *arg, void **group,
                            ith_error *e)
{
    (void)d, (void)lost, (void)arg;
    assert_memory_equal(id, "meet ", 5);
    twin_group *g = calloc(1, sizeof *g);
    assert_non_null(g);
    g->beside = beside;
    ITH_TRY(ith_comm_split(world, strtoll(id + 5, NULL, 10), &g->host, e));
    assert_true(g->host->rank == rank && g->host->size == size && timeout_s > 0);
    *group = g;
    return ITH_OK;
}

/* ---- what is to be done, now or, in groups beside, as late as it may be ---- */

typedef struct {
    twin_group *group;
    bool is_sum;
    int64_t pieces;
    ith_strided sides[2][MAX_RANKS * ITH_MAX_PIECES]; /* send, receive */
    void *to;
    const void *own, *parts;
    int64_t stride, n;
    bool add, wide;
} work;

static work waiting[MAX_WAITING];
static int num_waiting, marks[ITH_QUEUES * 16];

/* Packed, exchanged, unpacked. */
static ith_status move(const work *w, ith_error *e)
{
    int64_t lists[4][MAX_RANKS], bytes[2] = {0, 0}, count = w->group->host->size * w->pieces;
    char *memory[2];
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < count; i++) {
            const ith_strided *r = &w->sides[side][i];
            int64_t j = i / w->pieces;
            if (i % w->pieces == 0) {
                lists[2 * side][j] = bytes[side];
                lists[2 * side + 1][j] = 0;
            }
            lists[2 * side + 1][j] += r->bytes * r->rows;
            bytes[side] += r->bytes * r->rows;
        }
        memory[side] = malloc((size_t)bytes[side] + 1);
        assert_non_null(memory[side]);
    }
    char *at = memory[0];
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = 0; row < w->sides[0][i].rows; row++, at += w->sides[0][i].bytes)
            memcpy(at, (char *)w->sides[0][i].at + row * w->sides[0][i].stride,
                   (size_t)w->sides[0][i].bytes);
    ith_exchange x = {memory[0], lists[0], lists[1], memory[1], lists[2], lists[3]};
    ITH_TRY(ith_comm_exchange(w->group->host, &x, e));
    at = memory[1];
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = 0; row < w->sides[1][i].rows; row++, at += w->sides[1][i].bytes)
            memcpy((char *)w->sides[1][i].at + row * w->sides[1][i].stride, at,
                   (size_t)w->sides[1][i].bytes);
    free(memory[0]);
    free(memory[1]);
    return ITH_OK;
}

static ith_status sum(const work *w)
{
    const ith_comm *host = w->group->host;
    for (int64_t i = 0; i < w->n; i++) {
        double all = 0;
        for (int64_t r = 0; r < host->size; r++) {
            const void *from = r == host->rank ? w->own : w->parts;
            int64_t at = r == host->rank ? i : r * w->stride + i;
            all += w->wide ? ((const double *)from)[at] : (double)((const float *)from)[at];
        }
        if (w->wide)
            ((double *)w->to)[i] = all;
        else
            ((float *)w->to)[i] = (float)all + (w->add ? ((float *)w->to)[i] : 0.0f);
    }
    return ITH_OK;
}

/* All that waits, up to the n-th. */
static ith_status catch_up(int n, ith_error *e)
{
    int done = 0;
    for (; done < n; done++)
        ITH_TRY(waiting[done].is_sum ? sum(&waiting[done]) : move(&waiting[done], e));
    num_waiting -= done;
    memmove(waiting, waiting + done, (size_t)num_waiting * sizeof *waiting);
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        marks[i] = marks[i] > done ? marks[i] - done : 0;
    return ITH_OK;
}

static ith_status do_work(const work *w, ith_error *e)
{
    if (!w->group->beside)
        return w->is_sum ? sum(w) : move(w, e);
    assert_true(num_waiting < MAX_WAITING);
    waiting[num_waiting++] = *w;
    return ITH_OK;
}

static ith_status twin_exchange(ith_device *d, void *group, const ith_exchange *x, ith_error *e)
{
    (void)d;
    static work w;
    w = (work){.group = group, .pieces = 1};
    union {
        const void *in;
        char *out;
    } from = {.in = x->send}; /* only read */
    for (int64_t j = 0; j < w.group->host->size; j++) {
        w.sides[0][j] = (ith_strided){from.out + x->send_at[j], 0, x->send_bytes[j], 1};
        w.sides[1][j] = (ith_strided){(char *)x->recv + x->recv_at[j], 0, x->recv_bytes[j], 1};
    }
    return do_work(&w, e);
}

static ith_status twin_rows(ith_device *d, void *group, const ith_strided *send,
                            const ith_strided *recv, int64_t pieces, ith_error *e)
{
    (void)d;
    static work w;
    w = (work){.group = group, .pieces = pieces};
    size_t bytes = (size_t)(w.group->host->size * pieces) * sizeof *send;
    memcpy(w.sides[0], send, bytes);
    memcpy(w.sides[1], recv, bytes);
    return do_work(&w, e);
}

static ith_status twin_add(ith_device *d, void *group, void *to, bool add, const void *own,
                           const void *parts, int64_t stride, int64_t n, bool wide, ith_error *e)
{
    (void)d;
    static work w;
    w = (work){.group = group,
               .is_sum = true,
               .to = to,
               .own = own,
               .parts = parts,
               .stride = stride,
               .n = n,
               .add = add,
               .wide = wide};
    return do_work(&w, e);
}

static void twin_close(ith_device *d, void *group)
{
    (void)d;
    twin_group *g = group;
    assert_int_equal(num_waiting, 0);
    ith_comm_close(g->host);
    free(g);
}

/* ---- queues: only exchanges wait; sync is of the main queue ---- */

static ith_status twin_fork(ith_device *d, ith_queue queue, ith_error *e)
{
    (void)d, (void)queue, (void)e;
    return ITH_OK;
}

static ith_status twin_note(ith_device *d, ith_queue queue, int mark, ith_error *e)
{
    (void)d, (void)e;
    if (queue == ITH_QUEUE_LINKS)
        marks[mark] = num_waiting;
    return ITH_OK;
}

static ith_status twin_await(ith_device *d, ith_queue queue, int mark, ith_error *e)
{
    (void)d;
    return queue == ITH_QUEUE_LINKS ? catch_up(marks[mark], e) : ITH_OK;
}

static ith_status twin_copy(ith_device *d, void *dst, const void *src, int64_t bytes, bool to_host,
                            ith_error *e)
{
    (void)d, (void)to_host, (void)e;
    memcpy(dst, src, (size_t)bytes);
    return ITH_OK;
}

static void twin_enter(ith_device *d, ith_queue queue)
{
    (void)d, (void)queue;
}

static void twin_leave(ith_device *d)
{
    (void)d;
}

/* A way that refuses on one rank only: all go on to the next. */
static ith_status twin_refuse(ith_device *d, const char id[ITH_DEVICE_GROUP_ID_BYTES], int64_t rank,
                              int64_t size, bool beside, double timeout_s,
                              void (*lost)(void *, const char *), void *arg, void **group,
                              ith_error *e)
{
    ITH_TRY(twin_open(d, id, rank, size, beside, timeout_s, lost, arg, group, e));
    if (rank > 0)
        return ITH_OK;
    twin_close(d, *group);
    *group = NULL;
    return ith_fail(e, ITH_ERR_UNSUPPORTED, "not today");
}

static const ith_device_way twin_way = {.name = "twin",
                                        .new_group = twin_new_group,
                                        .open_group = twin_open,
                                        .close_group = twin_close,
                                        .exchange = twin_exchange,
                                        .exchange_rows = twin_rows},
                            no_way = {.name = "none",
                                      .new_group = twin_new_group,
                                      .open_group = twin_refuse,
                                      .close_group = twin_close,
                                      .exchange = twin_exchange};
static const ith_device_links links = {
    .ways = {&no_way, &twin_way}, .identify = twin_identify, .add_parts = twin_add};

ith_device twin_device(ith_comm *ranks, bool same_everywhere)
{
    ith_device twin = *ith_device_cpu();
    world = ranks;
    twin.links = &links;
    twin.fork = twin_fork;
    twin.note = twin_note;
    twin.await = twin_await;
    twin.copy_beside = twin_copy;
    twin.enter = twin_enter;
    twin.leave = twin_leave;
    twin.state = same_everywhere ? &world : NULL;
    return twin;
}
