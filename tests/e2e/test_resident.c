/* test_resident.c - the memory the system sees is the memory that was planned.
 * Method: train a model of some 30 million bytes of weights for an epoch; read the resident size of
 * this process from /proc between two steps, and its peak at the end. */
#include "e2e/small_dir.h"

#include <time.h>

static char *base;

/* A line like "VmRSS:  1234 kB" of /proc/self/status, in bytes. */
static int64_t status_bytes(const char *key)
{
    FILE *f = fopen("/proc/self/status", "r");
    char line[256];
    int64_t kb = -1;
    assert_non_null(f);
    while (fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            kb = strtoll(line + strlen(key) + 1, NULL, 10);
    fclose(f);
    assert_true(kb >= 0);
    return kb * 1024;
}

typedef struct {
    int64_t resident; /* largest between two steps */
} seen_memory;

static int on_poll(void *arg)
{
    seen_memory *s = arg;
    int64_t now = status_bytes("VmRSS");
    s->resident = now > s->resident ? now : s->resident;
    return 0;
}

static void assert_within(int64_t got, int64_t want, double share, const char *what)
{
    double error = ((double)got - (double)want) / (double)want;
    print_message("%s: %lld, expected %lld (%+.2f %%)\n", what, (long long)got, (long long)want,
                  100 * error);
    if (error > share || error < -share)
        fail_msg("%s: %lld, expected %lld (%+.2f %%, allowed %.0f %%)", what, (long long)got,
                 (long long)want, 100 * error, 100 * share);
}

static void test_resident_size_is_what_was_planned(void **state)
{
    (void)state;
#ifdef ITH_SANITIZED
    print_message("[   SKIP   ] a sanitizer takes memory of its own\n");
    skip();
#endif
    static const char *const kinds[] = {"none", "full"};
    for (int k = 0; k < 2; k++) {
        ith_error err = {0};
        ith_config c;
        ith_trainer t;
        ith_run_result result;
        seen_memory seen = {0};
        ith_trainer_hooks hooks = {on_poll, NULL, NULL, NULL, &seen};
        char more[256];
        snprintf(more, sizeof more,
                 "num_train_epochs: 1\nbatching_strategy: packing\nmicro_batch_size: 8\n"
                 "enable_activation_checkpointing: %s\n%s",
                 k ? "true" : "false", k ? "recompute: full\n" : "");
        small_config(&c, small_join(base, "model"), small_join(base, "data.jsonl"),
                     small_join(base, "out"), more);
        int64_t before = status_bytes("VmRSS"), file = 0;
        assert_ok(ith_file_stat(small_join(base, "model/model.safetensors"), &file, NULL, &err),
                  err);
        assert_ok(ith_trainer_open(&t, &c, false, &hooks, &err), err);
        int64_t planned = 0;
        for (int i = 0; i < ITH_MEM_CLASSES; i++)
            planned += ith_plan_peak(t.session.ctx.plan, (ith_mem_class)i);
        t.matmul_rate = 1e9;
        assert_ok(ith_trainer_run(&t, &hooks, &result, &err), err);
        assert_within(seen.resident - before, planned, 0.05, kinds[k]);
        /* at most the weights of the source are mapped beside it, while they are read */
        int64_t peak = status_bytes("VmHWM") - before;
        if (k == 0 && (double)peak > 1.05 * (double)(planned + file))
            fail_msg("peak %lld, planned %lld and a file of %lld", (long long)peak,
                     (long long)planned, (long long)file);
        ith_trainer_close(&t);
        ith_config_deinit(&c);
    }
}

static int setup(void **state)
{
    (void)state;
    base = small_setup("resident");
    small_shape shape = {320, 512, 4, 8, 4, 64, 1536, 0, 0, 0, false, false, NULL, NULL, NULL};
    small_make_model(small_join(base, "model"), &shape, &(small_layout){.dtype = ITH_BF16});
    small_make_data(small_join(base, "data.jsonl"), 60);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_teardown(base);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_resident_size_is_what_was_planned)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
