/* Ranks that write one set of weight files, each its parts. Goal: the files are those of one
 * process, byte for byte, and a rank that fails anywhere leaves the old ones and is named on all
 * ranks. Method: every byte belongs to a rank by a rule; the n-th write of one rank fails, for
 * every n. Run as it is (one rank) or under mpirun. */
#include "testing.h"

#include "checkpoint/safetensors.h"

#define SHARD_BYTES 2000
#define NUM_TENSORS 5

static ith_comm *world;
static ith_error err;
static char together[300], alone[300];
static unsigned char content[4096];

static const ith_st_entry tensors[NUM_TENSORS] = {
    {.name = "embed", .dtype = ITH_BF16, .ndim = 2, .shape = {31, 17}, .data = content},
    {.name = "norm", .dtype = ITH_F32, .ndim = 1, .shape = {3}, .data = content + 5},
    {.name = "nothing", .dtype = ITH_F32, .ndim = 1, .shape = {0}, .data = content},
    {.name = "up", .dtype = ITH_F32, .ndim = 2, .shape = {25, 33}, .data = content + 77},
    {.name = "flag", .dtype = ITH_U8, .ndim = 0, .data = content + 99},
};

static int64_t bytes_of(int64_t i)
{
    return ith_st_numel(&tensors[i]) * ith_dtype_bytes(tensors[i].dtype);
}

static int64_t owner(int64_t i, int64_t piece)
{
    return (i * 7 + piece * 5 + piece / 3) % world->size;
}

/* Pieces of 1 to 40 bytes, those of this rank, the last ones first. */
static ith_status put_own(ith_st_writer *w)
{
    for (int64_t k = NUM_TENSORS - 1; k >= 0; k--) {
        int64_t i = ith_st_writer_at(w, k), bytes = bytes_of(i), at = 0;
        for (int64_t piece = 0; at < bytes; piece++) {
            int64_t n = ith_min_i64(1 + piece % 40, bytes - at);
            if (owner(i, piece) == world->rank)
                ITH_TRY(ith_st_writer_put(w, i, at, (const char *)tensors[i].data + at, n, &err));
            at += n;
        }
    }
    return ITH_OK;
}

static ith_status write_together(int64_t max_shard_bytes)
{
    ith_st_writer *w = NULL;
    ith_st_options options = {.max_shard_bytes = max_shard_bytes, .ranks = world};
    ith_error_clear(&err);
    ITH_TRY(ith_st_writer_create(&w, together, tensors, NUM_TENSORS, &options, &err));
    ith_status status = ith_st_writer_meet(w, put_own(w), &err);
    if (status == ITH_OK)
        status = ith_st_writer_commit(w, &err);
    ith_st_writer_destroy(w);
    return status;
}

/* Rank 0 compares two directories, names and bytes. */
static void assert_same_directories(const char *what, int64_t n)
{
    ith_names a = {0}, b = {0};
    ith_buf x = {0}, y = {0}, path = {0};
    if (world->rank != 0)
        return;
    assert_ok(ith_list_dir(together, &a, &err), err);
    assert_ok(ith_list_dir(alone, &b, &err), err);
    if (a.count != b.count)
        fail_msg("%s %lld: %lld files, expected %lld", what, (long long)n, (long long)a.count,
                 (long long)b.count);
    for (int64_t i = 0; i < a.count; i++) {
        assert_string_equal(a.names[i], b.names[i]);
        ith_buf_clear(&x);
        ith_buf_clear(&y);
        ith_path_join(&path, together, a.names[i]);
        assert_ok(ith_read_file(path.data, 0, &x, &err), err);
        ith_path_join(&path, alone, a.names[i]);
        assert_ok(ith_read_file(path.data, 0, &y, &err), err);
        if (x.len != y.len || memcmp(x.data, y.data, (size_t)x.len) != 0)
            fail_msg("%s %lld: %s: other bytes", what, (long long)n, a.names[i]);
    }
    ith_buf_deinit(&x);
    ith_buf_deinit(&y);
    ith_buf_deinit(&path);
    ith_names_free(&a);
    ith_names_free(&b);
}

static void write_alone(int64_t max_shard_bytes)
{
    ith_st_options options = {.max_shard_bytes = max_shard_bytes};
    if (world->rank == 0)
        assert_ok(ith_st_write(alone, tensors, NUM_TENSORS, &options, &err), err);
    assert_ok(ith_comm_barrier(world, &err), err);
}

static void test_files_of_many_are_those_of_one(void **state)
{
    (void)state;
    const int64_t limits[] = {0, SHARD_BYTES, 1};
    for (int k = 0; k < 3; k++) {
        write_alone(limits[k]);
        if (write_together(limits[k]) != ITH_OK)
            fail_msg("limit %lld: %s", (long long)limits[k], err.text);
        assert_same_directories("limit", limits[k]);
        assert_ok(ith_comm_barrier(world, &err), err);
    }
}

static void test_a_failing_rank_leaves_the_old_files_and_is_named(void **state)
{
    (void)state;
    for (int64_t bad = 0; bad < world->size; bad++) {
        char name[40];
        int64_t hit = 1, n = 0;
        snprintf(name, sizeof name, bad ? "rank %lld: " : "cannot", (long long)bad);
        while (hit) {
            n++;
            for (size_t i = 0; i < sizeof content; i++) /* the old set */
                content[i] = (unsigned char)(i * 11 + 1);
            write_alone(0);
            assert_ok(write_together(0), err);
            for (size_t i = 0; i < sizeof content; i++)
                content[i] = (unsigned char)(i * 13 + (size_t)n);
            ith_fault_set(ITH_FAULT_WRITE, world->rank == bad ? n : 0);
            ith_status status = write_together(0);
            hit = ith_fault_count(ITH_FAULT_WRITE) >= n;
            ith_fault_set(ITH_FAULT_WRITE, 0);
            ith_error other = {0};
            assert_ok(ith_comm_broadcast(world, &hit, sizeof hit, bad, &other), other);
            if (hit != (status != ITH_OK) || (hit && !strstr(err.text, name)))
                fail_msg("write %lld of rank %lld fails: status %d, '%s' on rank %lld",
                         (long long)n, (long long)bad, (int)status, err.text,
                         (long long)world->rank);
            assert_ok(ith_comm_barrier(world, &other), other);
            if (world->rank == 0) { /* one of the two sets, whole */
                ith_st_reader *r = NULL;
                assert_ok(ith_st_open(&r, together, &other), other);
                const ith_st_entry *up = ith_st_find(r, "up");
                unsigned char first = ((const unsigned char *)up->data)[0];
                unsigned char old = (unsigned char)(77 * 11 + 1), fresh = content[77];
                if (first != old && first != fresh)
                    fail_msg("write %lld of rank %lld: neither the old nor the new set",
                             (long long)n, (long long)bad);
                ith_st_close(r);
            }
            assert_ok(ith_comm_barrier(world, &other), other);
        }
        assert_true(n > 1);
    }
}

static void test_a_byte_that_nobody_writes_is_found(void **state)
{
    (void)state;
    ith_st_writer *w = NULL;
    ith_st_options options = {.ranks = world};
    assert_ok(ith_st_writer_create(&w, together, tensors, NUM_TENSORS, &options, &err), err);
    ith_status status = world->rank == 0 ? ith_st_writer_put(w, 3, 0, content, 8, &err) : ITH_OK;
    assert_fails(ith_st_writer_meet(w, status, &err), err, ITH_ERR_RUN, "8 of ");
    ith_st_writer_destroy(w);
}

int main(void)
{
    const struct CMUnitTest all[] = {
        cmocka_unit_test(test_files_of_many_are_those_of_one),
        cmocka_unit_test(test_a_failing_rank_leaves_the_old_files_and_is_named),
        cmocka_unit_test(test_a_byte_that_nobody_writes_is_found),
    };
    int64_t pid = getpid();
    if (ith_comm_open_world(&world, 60, &err) != ITH_OK ||
        ith_comm_broadcast(world, &pid, sizeof pid, 0, &err) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    snprintf(together, sizeof together, "test-tmp/together-%lld", (long long)pid);
    snprintf(alone, sizeof alone, "test-tmp/alone-%lld", (long long)pid);
    int failed = cmocka_run_group_tests(all, NULL, NULL);
    if (failed) /* the others wait: end them */
        ith_comm_abort(world, 1);
    (void)ith_comm_barrier(world, &err);
    if (world->rank == 0) {
        (void)ith_remove_tree(together, &err);
        (void)ith_remove_tree(alone, &err);
    }
    ith_comm_close(world);
    return failed;
}
