/* Last words over TCP: the cause is told, once, though a rank between says nothing for long. Run as
 * three ranks by start_ranks.sh. */
#include "testing.h"

#include <time.h>

#include "comm/comm.h"

static ith_comm *world;
static ith_error err;

/* Rank 2 fails, rank 0 waits for it, rank 1 is busy for longer than others wait for words. */
static void test_cause_is_told_though_a_rank_is_busy(void **state)
{
    (void)state;
    int64_t mine = 1, all[3];
    if (world->rank == 1) {
        struct timespec busy = {5, 0};
        nanosleep(&busy, NULL);
    }
    if (world->rank == 2)
        (void)ith_fail(&err, ITH_ERR_IO, "the disk is full");
    else
        assert_int_not_equal(ith_comm_all_gather(world, all, &mine, sizeof mine, &err), ITH_OK);
    assert_int_equal(ith_comm_last_words(world, &err), world->rank == 0);
    assert_string_equal(err.text, "rank 2: the disk is full");
    assert_int_equal(err.status, ITH_ERR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cause_is_told_though_a_rank_is_busy)};
    if (ith_comm_open_world(&world, 120, &err) != ITH_OK || world->size != 3) {
        fprintf(stderr, "three ranks: %s\n", err.text);
        return 1;
    }
    int failed = cmocka_run_group_tests_name("last words", tests, NULL, NULL);
    ith_comm_close(world);
    return failed;
}
