/* twin.c - the host in disguise. */
#include "twin.h"

static ith_comm *world;

static ith_status twin_identify(ith_device *d, unsigned char uuid[ITH_DEVICE_UUID_BYTES],
                                ith_error *e)
{
    (void)d, (void)e;
    memset(uuid, d->state ? 7 : (int)world->rank, ITH_DEVICE_UUID_BYTES);
    return ITH_OK;
}

static ith_status twin_new_group(ith_device *d, char id[ITH_DEVICE_GROUP_ID_BYTES], ith_error *e)
{
    (void)d, (void)e;
    snprintf(id, ITH_DEVICE_GROUP_ID_BYTES, "meet here");
    return ITH_OK;
}

static ith_status twin_open(ith_device *d, const char id[ITH_DEVICE_GROUP_ID_BYTES], int64_t rank,
                            int64_t size, bool beside, double timeout_s,
                            void (*lost)(void *, const char *), void *arg, void **group,
                            ith_error *e)
{
    (void)d, (void)beside, (void)lost, (void)arg;
    ith_comm *host = NULL;
    assert_string_equal(id, "meet here");
    ITH_TRY(ith_comm_split(world, 0, &host, e));
    assert_true(host->rank == rank && host->size == size && timeout_s > 0);
    *group = host;
    return ITH_OK;
}

static void twin_close(ith_device *d, void *group)
{
    (void)d;
    ith_comm_close(group);
}

static ith_status twin_exchange(ith_device *d, void *group, const ith_exchange *x, ith_error *e)
{
    (void)d;
    return ith_comm_exchange(group, x, e);
}

/* Packed, exchanged, unpacked. */
static ith_status twin_rows(ith_device *d, void *group, const ith_strided *send,
                            const ith_strided *recv, int64_t pieces, ith_error *e)
{
    (void)d;
    static char out[1 << 16], in[1 << 16];
    const ith_comm *host = group;
    int64_t lists[4][16], at[2] = {0, 0};
    const ith_strided *sides[2] = {send, recv};
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < host->size * pieces; i++) {
            const ith_strided *r = &sides[side][i];
            int64_t j = i / pieces;
            if (i % pieces == 0) {
                lists[2 * side][j] = at[side];
                lists[2 * side + 1][j] = 0;
            }
            lists[2 * side + 1][j] += r->bytes * r->rows;
            for (int64_t row = 0; side == 0 && row < r->rows; row++)
                memcpy(out + at[side] + row * r->bytes, (char *)r->at + row * r->stride,
                       (size_t)r->bytes);
            at[side] += r->bytes * r->rows;
        }
    ith_exchange x = {out, lists[0], lists[1], in, lists[2], lists[3]};
    ITH_TRY(ith_comm_exchange(group, &x, e));
    for (int64_t i = 0, from = 0; i < host->size * pieces; i++)
        for (int64_t row = 0; row < recv[i].rows; row++, from += recv[i].bytes)
            memcpy((char *)recv[i].at + row * recv[i].stride, in + from, (size_t)recv[i].bytes);
    return ITH_OK;
}

static ith_status twin_add(ith_device *d, void *group, void *to, bool add, const void *own,
                           const void *parts, int64_t stride, int64_t n, bool wide, ith_error *e)
{
    (void)d, (void)e;
    const ith_comm *host = group;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t r = 0; r < host->size; r++) {
            const void *from = r == host->rank ? own : parts;
            int64_t at = r == host->rank ? i : r * stride + i;
            sum += wide ? ((const double *)from)[at] : (double)((const float *)from)[at];
        }
        if (wide)
            ((double *)to)[i] = sum;
        else
            ((float *)to)[i] = (float)sum + (add ? ((float *)to)[i] : 0.0f);
    }
    return ITH_OK;
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
    twin.state = same_everywhere ? &world : NULL;
    return twin;
}
