/* Collectives on integer values: every result must be equal, on any number of ranks. Run as it is
 * (one rank) or under mpirun. */
#include "testing.h"

#include <math.h>

#include "comm/comm.h"
#include "twin.h"

static ith_comm *world;
static ith_error err;

/* A value that names its rank and place, exact in every type. */
static int64_t value_of(int64_t rank, int64_t i)
{
    return (rank + 1) * 1000 + i % 997;
}

/* Uneven ranges, one of them empty: rank r owns 3*r*(r != 1) + extra elements. */
static void make_ranges(int64_t *first, int64_t extra)
{
    first[0] = 0;
    for (int64_t r = 0; r < world->size; r++)
        first[r + 1] = first[r] + (r == 1 ? 0 : 3 * r + extra);
}

static void assert_value(int64_t got, int64_t want, const char *what, int64_t i)
{
    if (got != want)
        fail_msg("rank %lld: %s[%lld] is %lld, expected %lld", (long long)world->rank, what,
                 (long long)i, (long long)got, (long long)want);
}

/* Each rank sends j + 1 values to rank j; what arrives names its sender. */
static void test_exchange_of_unequal_blocks(void **state)
{
    (void)state;
    int64_t p = world->size, me = world->rank, sent = world->bytes_sent, expect = 0;
    int64_t lists[4][16], send[256], recv[256];
    for (int64_t j = 0, at = 0; j < p; j++) {
        lists[0][j] = at * 8;
        lists[1][j] = (j + 1) * 8;
        lists[2][j] = j * (me + 1) * 8;
        lists[3][j] = (me + 1) * 8;
        expect += j == me ? 0 : (j + 1) * 8;
        for (int64_t k = 0; k <= j; k++)
            send[at++] = me * 100 + j * 10 + k;
    }
    ith_exchange x = {send, lists[0], lists[1], recv, lists[2], lists[3]};
    assert_ok(ith_comm_exchange(world, &x, &err), err);
    for (int64_t j = 0; j < p; j++)
        for (int64_t k = 0; k <= me; k++)
            assert_value(recv[j * (me + 1) + k], j * 100 + me * 10 + k, "received", j);
    assert_value(world->bytes_sent - sent, expect, "bytes sent", 0);
}

static void test_all_gather_and_broadcast(void **state)
{
    (void)state;
    int64_t own[5], all[5 * 16], first[17], *ranges = NULL;
    for (int64_t i = 0; i < 5; i++)
        own[i] = value_of(world->rank, i);
    assert_ok(ith_comm_all_gather(world, all, own, sizeof own, &err), err);
    for (int64_t i = 0; i < 5 * world->size; i++)
        assert_value(all[i], value_of(i / 5, i % 5), "gathered", i);
    make_ranges(first, 2);
    assert_ok(ith_alloc_zero((void **)&ranges, first[world->size] + 1, 8, "test", &err), err);
    for (int64_t i = first[world->rank]; i < first[world->rank + 1]; i++)
        ranges[i] = value_of(world->rank, i);
    assert_ok(ith_comm_all_gather_v(world, ranges, NULL, first, 8, &err), err);
    for (int64_t r = 0; r < world->size; r++)
        for (int64_t i = first[r]; i < first[r + 1]; i++)
            assert_value(ranges[i], value_of(r, i), "ranges", i);
    ith_free(ranges);
    for (int64_t root = 0; root < world->size; root++) {
        int64_t x = root == world->rank ? 77 + root : -1;
        assert_ok(ith_comm_broadcast(world, &x, sizeof x, root, &err), err);
        assert_value(x, 77 + root, "broadcast", root);
    }
    assert_ok(ith_comm_barrier(world, &err), err);
}

static void fill(void *data, ith_dtype dtype, int64_t i, int64_t value)
{
    if (dtype == ITH_F32)
        ((float *)data)[i] = (float)value;
    else if (dtype == ITH_F64)
        ((double *)data)[i] = (double)value;
    else
        ((int64_t *)data)[i] = value;
}

static int64_t read_back(const void *data, ith_dtype dtype, int64_t i)
{
    return dtype == ITH_F32   ? (int64_t)((const float *)data)[i]
           : dtype == ITH_F64 ? (int64_t)((const double *)data)[i]
                              : ((const int64_t *)data)[i];
}

static int64_t reduced(int64_t i, ith_reduce op)
{
    int64_t sum = 0;
    for (int64_t r = 0; r < world->size; r++)
        sum += value_of(r, i);
    return op == ITH_REDUCE_SUM ? sum : value_of(world->size - 1, i);
}

/* Counts below and above the switch to two exchanges, and one of several scratch rounds. */
static void test_reductions_of_every_type_and_size(void **state)
{
    (void)state;
    static const ith_dtype types[] = {ITH_F32, ITH_F64, ITH_I64};
    static const int64_t counts[] = {0, 1, 7, 500, 5000, 1500001};
    void *data = NULL;
    assert_ok(ith_alloc(&data, 1500001 * 8 + 8, "test", &err), err);
    for (int t = 0; t < 3; t++)
        for (int op = 0; op < 2; op++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                for (int64_t i = 0; i < counts[c]; i++)
                    fill(data, types[t], i, value_of(world->rank, i));
                assert_ok(
                    ith_comm_all_reduce(world, data, counts[c], types[t], (ith_reduce)op, &err),
                    err);
                for (int64_t i = 0; i < counts[c]; i++)
                    assert_value(read_back(data, types[t], i), reduced(i, (ith_reduce)op),
                                 "all_reduce", i);
            }
    int64_t first[17], me = world->rank;
    make_ranges(first, 1000);
    for (int64_t i = 0; i < first[world->size]; i++)
        fill(data, ITH_F32, i, value_of(me, i));
    assert_ok(ith_comm_reduce_scatter_v(world, data, first, ITH_F32, ITH_REDUCE_SUM, NULL, &err),
              err);
    for (int64_t i = 0; i < first[world->size]; i++) {
        bool mine = i >= first[me] && i < first[me + 1];
        assert_value(read_back(data, ITH_F32, i),
                     mine ? reduced(i, ITH_REDUCE_SUM) : value_of(me, i), "reduce_scatter", i);
    }
    ith_free(data);
}

/* Values that do not add up exactly: all ranks hold the same bits, and the shard of reduce_scatter
 * is bit for bit the part of all_reduce. */
static void test_sums_have_the_same_bits_everywhere(void **state)
{
    (void)state;
    enum { N = 30011 };
    static float a[N], b[N], theirs[N];
    int64_t first[17], me = world->rank;
    for (int64_t i = 0; i < N; i++)
        a[i] = b[i] = sinf((float)(i * (me + 3))) * powf(10.0f, (float)(i % 9) - 4.0f);
    for (int64_t r = 0; r <= world->size; r++)
        first[r] = N * r / world->size;
    assert_ok(ith_comm_all_reduce(world, a, N, ITH_F32, ITH_REDUCE_SUM, &err), err);
    assert_ok(ith_comm_reduce_scatter_v(world, b, first, ITH_F32, ITH_REDUCE_SUM, NULL, &err), err);
    assert_memory_equal(a + first[me], b + first[me], (size_t)(first[me + 1] - first[me]) * 4);
    memcpy(theirs, a, sizeof a);
    assert_ok(ith_comm_broadcast(world, theirs, sizeof theirs, 0, &err), err);
    assert_memory_equal(theirs, a, sizeof a);
}

/* Groups by parity; each counts its own members and adds its own ranks. */
static void test_split_groups_work_alone(void **state)
{
    (void)state;
    ith_comm *group = NULL;
    int64_t parity = world->rank % 2, members = (world->size + 1 - parity) / 2, sum = world->rank,
            want = 0;
    assert_ok(ith_comm_split(world, parity, &group, &err), err);
    assert_value(group->size, members, "group size", 0);
    assert_value(group->rank, world->rank / 2, "group rank", 0);
    assert_ok(ith_comm_all_reduce(group, &sum, 1, ITH_I64, ITH_REDUCE_SUM, &err), err);
    for (int64_t r = parity; r < world->size; r += 2)
        want += r;
    assert_value(sum, want, "sum of the group", 0);
    ith_comm_close(group);
}

/* NaN on the last rank is the maximum everywhere. */
static void test_nan_is_not_lost(void **state)
{
    (void)state;
    double x = world->rank == world->size - 1 ? (double)NAN : (double)world->rank;
    assert_ok(ith_comm_all_reduce(world, &x, 1, ITH_F64, ITH_REDUCE_MAX, &err), err);
    assert_true(isnan(x));
}

/* One rank fails, then two: everyone has the failure of the lowest, with its text. */
static void test_agree_gives_the_lowest_failure(void **state)
{
    (void)state;
    int64_t p = world->size;
    assert_ok(ith_comm_agree(world, ITH_OK, &err), err);
    for (int64_t bad = 0; bad < p; bad++) {
        ith_status mine = ITH_OK;
        ith_error_clear(&err);
        if (world->rank >= bad)
            mine = ith_fail(&err, world->rank == bad ? ITH_ERR_IO : ITH_ERR_FORMAT, "row %lld",
                            (long long)world->rank);
        char want[64] = "row 0";
        if (bad > 0)
            snprintf(want, sizeof want, "rank %lld: row %lld", (long long)bad, (long long)bad);
        ith_status got = ith_comm_agree(world, mine, &err);
        assert_int_equal(got, ITH_ERR_IO);
        assert_string_equal(err.text, want);
    }
    ith_error_clear(&err);
}

/* Goal: collectives on memory of devices have the bits of those on host memory. Scratch is small,
 * so that there are rounds. */
static void test_device_group_has_the_bits_of_the_host(void **state)
{
    (void)state;
    enum { N = 5003 };
    static float a[N], b[N], into[N], into_b[N];
    static double small[3], small_b[3];
    char scratch[16 * 64];
    ith_device twin = twin_device(world, false);
    ith_comm *group = NULL;
    int64_t first[17], me = world->rank;
    if (world->size == 1)
        skip();
    assert_ok(ith_comm_open_device(&group, world, &twin, false, &err), err);
    assert_string_equal(ith_comm_way(group), "twin");
    ith_comm_set_scratch(group, scratch, sizeof scratch);
    for (int64_t i = 0; i < N; i++)
        a[i] = b[i] = sinf((float)(i * (me + 3))) * powf(10.0f, (float)(i % 9) - 4.0f);
    for (int64_t i = 0; i < 3; i++)
        small[i] = small_b[i] = cos((double)(i + me));
    for (int64_t r = 0; r <= world->size; r++)
        first[r] = N * r / world->size;
    for (int64_t i = 0; i < N; i++)
        into[i] = into_b[i] = (float)i;
    assert_ok(ith_comm_reduce_scatter_v(world, a, first, ITH_F32, ITH_REDUCE_SUM, into, &err), err);
    assert_ok(ith_comm_reduce_scatter_v(group, b, first, ITH_F32, ITH_REDUCE_SUM, into_b, &err),
              err);
    assert_memory_equal(into, into_b, sizeof into);
    assert_ok(ith_comm_reduce_scatter_v(world, a, first, ITH_F32, ITH_REDUCE_SUM, NULL, &err), err);
    assert_ok(ith_comm_reduce_scatter_v(group, b, first, ITH_F32, ITH_REDUCE_SUM, NULL, &err), err);
    assert_memory_equal(a, b, sizeof a);
    for (int64_t i = first[me]; i < first[me + 1]; i++) /* data stayed, and into grew by the sum */
        if (into[i - first[me]] != (float)(i - first[me]) + a[i])
            fail_msg("into[%lld] is %.9g", (long long)(i - first[me]), (double)into[i - first[me]]);
    memcpy(into, a + first[me], (size_t)(first[me + 1] - first[me]) * 4);
    for (int64_t i = first[me]; i < first[me + 1]; i++)
        b[i] = 0; /* the own part comes from elsewhere */
    assert_ok(ith_comm_all_gather_v(world, a, NULL, first, 4, &err), err);
    assert_ok(ith_comm_all_gather_v(group, b, into, first, 4, &err), err);
    assert_memory_equal(a, b, sizeof a);
    assert_ok(ith_comm_all_reduce(world, small, 3, ITH_F64, ITH_REDUCE_SUM, &err), err);
    assert_ok(ith_comm_all_reduce(group, small_b, 3, ITH_F64, ITH_REDUCE_SUM, &err), err);
    assert_memory_equal(small, small_b, sizeof small);
    ith_comm_close(group);
}

/* Goal: two ranks on one device, unless tests ask for it, and a device without links, are one
 * agreed line. */
static void test_device_group_refuses_what_cannot_work(void **state)
{
    (void)state;
    ith_device twin = twin_device(world, true);
    ith_comm *group = NULL;
    if (world->size == 1)
        skip();
    assert_fails(ith_comm_open_device(&group, world, ith_device_cpu(), false, &err), err,
                 ITH_ERR_UNSUPPORTED, "cpu works alone (use 1 rank)");
    assert_fails(ith_comm_open_device(&group, world, &twin, false, &err), err, ITH_ERR_USAGE,
                 "rank 1: ranks 0 and 1 have the same GPU, cpu");
    assert_null(group);
    ith_error_clear(&err);
    setenv("ITH_SHARE_GPU", "1", 1);
    assert_ok(ith_comm_open_device(&group, world, &twin, false, &err), err);
    unsetenv("ITH_SHARE_GPU");
    assert_int_equal(group->sharers, world->size);
    ith_comm_close(group);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exchange_of_unequal_blocks),
        cmocka_unit_test(test_all_gather_and_broadcast),
        cmocka_unit_test(test_reductions_of_every_type_and_size),
        cmocka_unit_test(test_sums_have_the_same_bits_everywhere),
        cmocka_unit_test(test_split_groups_work_alone),
        cmocka_unit_test(test_nan_is_not_lost),
        cmocka_unit_test(test_agree_gives_the_lowest_failure),
        cmocka_unit_test(test_device_group_has_the_bits_of_the_host),
        cmocka_unit_test(test_device_group_refuses_what_cannot_work),
    };
    if (ith_comm_open_world(&world, 120, &err) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    int failed = cmocka_run_group_tests_name("comm", tests, NULL, NULL);
    ith_comm_close(world);
    return failed;
}
