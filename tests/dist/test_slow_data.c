/* Goal: ranks wait for the one that reads and tokenizes the data, however long that takes (cases
 * S111). Method: the log of that rank sleeps for longer than a rank may be silent, 1 s, in the
 * midst of it. Run under mpirun. */
#include "e2e/small_dir.h"

#include <time.h>

static ith_comm *world;
static ith_error err;
static char *base;
static int64_t naps;

static void nap(ith_log_level level, const char *subsystem, const char *text, void *arg)
{
    const struct timespec while_longer = {2, 500000000};
    (void)level;
    (void)text;
    (void)arg;
    if (strcmp(subsystem, "data") == 0 && naps++ == 0)
        nanosleep(&while_longer, NULL);
}

static void make_files(void)
{
    small_shape shape = small_dense;
    shape.vocab = 320;
    small_make_model(small_join(base, "model"), &shape, &(small_layout){.dtype = ITH_BF16});
    small_make_data(small_join(base, "data.jsonl"), 12);
}

static void test_ranks_wait_for_slow_data(void **state)
{
    (void)state;
    ith_config c;
    ith_trainer t;
    if (world->rank == 0)
        make_files();
    assert_ok(ith_comm_barrier(world, &err), err);
    small_config(&c, small_join(base, "model"), small_join(base, "data.jsonl"),
                 small_join(base, "out"), "micro_batch_size: 1\nglobal_batch_size: 8\nmax_steps: 1\n");
    assert_ok(ith_log_set_levels("data:info", &err), err);
    if (world->rank == 0)
        ith_log_set_sink(nap, NULL);
    world->timeout_s = 1;
    assert_ok(ith_trainer_open_rank(&t, &c, world, false, NULL, &err), err);
    assert_true(world->timeout_s == 1.0);
    assert_true(world->rank > 0 || naps > 0);
    assert_true(ith_samples_count(t.samples) > 0);
    ith_trainer_close(&t);
    ith_config_deinit(&c);
}

int main(void)
{
    const struct CMUnitTest all[] = {cmocka_unit_test(test_ranks_wait_for_slow_data)};
    int64_t pid = getpid();
    char path[64];
    if (ith_comm_open_world(&world, 60, &err) != ITH_OK ||
        ith_comm_broadcast(world, &pid, sizeof pid, 0, &err) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    snprintf(path, sizeof path, "test-tmp/slow-%lld", (long long)pid);
    base = path;
    int failed = cmocka_run_group_tests(all, NULL, NULL);
    if (failed) /* the others wait: end them */
        ith_comm_abort(world, 1);
    (void)ith_comm_barrier(world, &err);
    if (world->rank == 0)
        (void)ith_remove_tree(base, &err);
    ith_comm_close(world);
    return failed;
}
