/* Goal: what is written reads back bit for bit, the same input gives the same bytes, and no failure
 * or kill costs the files that were there. Method: small sets over shard limits; every failing
 * write and allocation; the reference directories rewritten byte for byte where they are present.
 */
#include "testing.h"

#include "checkpoint/safetensors.h"

static char dir[4096];

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "%s", temp_dir("st-writer"));
    return 0;
}

static const char *in_dir(const char *name)
{
    static char path[2][4600];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static unsigned char pattern[4096];

/* Six tensors of several types, given out of order; `salt` changes the data. */
static int64_t sample(ith_st_entry *t, int salt)
{
    for (size_t i = 0; i < sizeof pattern; i++)
        pattern[i] = (unsigned char)(i * 7 + (size_t)salt);
    static const ith_st_entry all[] = {
        {.name = "z.bytes", .dtype = ITH_U8, .ndim = 1, .shape = {13}},
        {.name = "b.weight", .dtype = ITH_BF16, .ndim = 2, .shape = {4, 5}},
        {.name = "a \"quoted\"\n\\", .dtype = ITH_F32, .ndim = 3, .shape = {2, 1, 3}},
        {.name = "empty", .dtype = ITH_F32, .ndim = 2, .shape = {0, 9}},
        {.name = "scalar", .dtype = ITH_F64, .ndim = 0},
        {.name = "five", .dtype = ITH_BF16, .ndim = 5, .shape = {3, 1, 2, 2, 2}},
    };
    int64_t count = (int64_t)(sizeof all / sizeof *all);
    memcpy(t, all, sizeof all);
    for (int64_t i = 0; i < count; i++)
        t[i].data = pattern + 100 * i;
    return count;
}

static void assert_holds(const char *path, const ith_st_entry *t, int64_t count)
{
    ith_error err = {0};
    ith_st_reader *r = NULL;
    assert_ok(ith_st_open(&r, path, &err), err);
    assert_int_equal(ith_st_count(r), count);
    for (int64_t i = 0; i < count; i++) {
        const ith_st_entry *got = ith_st_find(r, t[i].name);
        if (!got)
            fail_msg("%s is missing", t[i].name);
        assert_int_equal(got->dtype, t[i].dtype);
        assert_true(ith_st_has_shape(got, t[i].ndim, t[i].shape));
        if (got->bytes)
            assert_memory_equal(got->data, t[i].data, (size_t)got->bytes);
        assert_int_equal((uintptr_t)got->data % (uintptr_t)ith_dtype_bytes(got->dtype), 0);
    }
    ith_st_close(r);
}

static int64_t num_files(void)
{
    ith_error err = {0};
    ith_names names;
    assert_ok(ith_list_dir(dir, &names, &err), err);
    int64_t count = names.count;
    ith_names_free(&names);
    return count;
}

static void read_all(const char *path, ith_buf *buf)
{
    ith_error err = {0};
    ith_buf_clear(buf);
    assert_ok(ith_read_file(path, 0, buf, &err), err);
}

static void test_one_file_reads_back_and_is_the_same_each_time(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry t[6];
    int64_t count = sample(t, 1);
    ith_buf first = {0}, second = {0};
    assert_ok(ith_st_write(dir, t, count, NULL, &err), err);
    assert_int_equal(num_files(), 1);
    assert_holds(dir, t, count);
    read_all(in_dir("model.safetensors"), &first);
    assert_int_equal(first.data[0] % 8, 0);
    assert_memory_equal(first.data + 8,
                        "{\"__metadata__\":{\"format\":\"pt\"},\"scalar\":{\"dtype\":\"F64\"", 55);
    assert_ok(ith_st_write(dir, t, count, NULL, &err), err);
    read_all(in_dir("model.safetensors"), &second);
    assert_int_equal(first.len, second.len);
    assert_memory_equal(first.data, second.data, (size_t)first.len);
    ith_buf_deinit(&first);
    ith_buf_deinit(&second);
}

static void test_shard_limits_give_the_shards_they_say(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry t[6];
    int64_t count = sample(t, 2); /* 13, 40, 24, 0, 8, 48 bytes */
    static const struct {
        int64_t limit, files;
    } cases[] = {{1, 5}, {13, 5}, {53, 3}, {77, 2}, {85, 2}, {132, 2}, {133, 1}, {0, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_st_options options = {.max_shard_bytes = cases[i].limit};
        ith_st_writer *w = NULL;
        assert_ok(ith_st_writer_create(&w, NULL, t, count, &options, &err), err);
        int64_t files = ith_st_writer_num_files(w);
        if (files != cases[i].files)
            fail_msg("limit %lld: %lld files, expected %lld", (long long)cases[i].limit,
                     (long long)files, (long long)cases[i].files);
        assert_int_equal(ith_st_writer_total_bytes(w), 133);
        ith_st_writer_destroy(w);
        assert_ok(ith_st_write(dir, t, count, &options, &err), err);
        assert_holds(dir, t, count); /* nothing of the sets before it is in the way */
        assert_int_equal(num_files(), files == 1 ? 1 : files + 1);
    }
}

static void test_index_is_sorted_and_sums_the_bytes(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry t[6];
    int64_t count = sample(t, 3);
    ith_buf text = {0};
    assert_ok(ith_st_write(dir, t, count,
                           &(ith_st_options){.max_shard_bytes = 77, .stem = "adam_m"}, &err),
              err);
    read_all(in_dir("adam_m.safetensors.index.json"), &text);
    assert_string_equal(text.data,
                        "{\n  \"metadata\": {\n    \"total_size\": 133\n  },\n  \"weight_map\": {\n"
                        "    \"a \\\"quoted\\\"\\n\\\\\": \"adam_m-00001-of-00002.safetensors\",\n"
                        "    \"b.weight\": \"adam_m-00001-of-00002.safetensors\",\n"
                        "    \"empty\": \"adam_m-00001-of-00002.safetensors\",\n"
                        "    \"five\": \"adam_m-00002-of-00002.safetensors\",\n"
                        "    \"scalar\": \"adam_m-00002-of-00002.safetensors\",\n"
                        "    \"z.bytes\": \"adam_m-00001-of-00002.safetensors\"\n  }\n}\n");
    ith_buf_deinit(&text);
}

static void test_pieces_of_any_size_give_the_same_file(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry t[6];
    int64_t count = sample(t, 4);
    static const int64_t sizes[] = {13, 40, 24, 0, 8, 48};
    for (int64_t piece = 1; piece <= 48; piece++) {
        ith_st_writer *w = NULL;
        assert_ok(
            ith_st_writer_create(&w, dir, t, count, &(ith_st_options){.max_shard_bytes = 60}, &err),
            err);
        for (int64_t i; (i = ith_st_writer_next(w)) >= 0;)
            for (int64_t at = 0; at < sizes[i]; at += piece) {
                int64_t n = ith_min_i64(piece, sizes[i] - at);
                assert_ok(ith_st_writer_push(w, (const char *)t[i].data + at, n, &err), err);
            }
        assert_ok(ith_st_writer_commit(w, &err), err);
        ith_st_writer_destroy(w);
        assert_holds(dir, t, count);
    }
}

static void test_no_tensors_and_only_empty_tensors(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry none[] = {{.name = "e", .dtype = ITH_F32, .ndim = 1, .shape = {0}},
                           {.name = "f", .dtype = ITH_I64, .ndim = 2, .shape = {3, 0}}};
    assert_ok(ith_st_write(dir, none, 0, NULL, &err), err);
    assert_holds(dir, none, 0);
    assert_ok(ith_st_write(dir, none, 2, NULL, &err), err);
    assert_holds(dir, none, 2);
}

static void test_bad_declarations_are_refused(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_writer *w = NULL;
    ith_st_entry twice[] = {{.name = "w", .dtype = ITH_U8, .ndim = 1, .shape = {1}},
                            {.name = "v", .dtype = ITH_U8, .ndim = 1, .shape = {1}},
                            {.name = "w", .dtype = ITH_U8, .ndim = 1, .shape = {1}}};
    assert_fails(ith_st_writer_create(&w, dir, twice, 3, NULL, &err), err, ITH_ERR_FORMAT,
                 "tensor w is declared twice");
    twice[0] =
        (ith_st_entry){.name = "h", .dtype = ITH_F32, .ndim = 2, .shape = {INT64_MAX / 4, 2}};
    assert_fails(ith_st_writer_create(&w, dir, twice, 1, NULL, &err), err, ITH_ERR_FORMAT,
                 "h: bad shape");
    twice[0] = (ith_st_entry){.name = "__metadata__", .dtype = ITH_F32};
    assert_fails(ith_st_writer_create(&w, dir, twice, 1, NULL, &err), err, ITH_ERR_FORMAT,
                 "__metadata__");
    assert_int_equal(num_files(), 0);
}

static void test_abandoned_writer_leaves_nothing(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry t[6];
    int64_t count = sample(t, 5);
    assert_ok(ith_st_write(dir, t, count, NULL, &err), err);
    ith_st_writer *w = NULL;
    ith_st_entry other[6];
    memcpy(other, t, sizeof other);
    assert_ok(
        ith_st_writer_create(&w, dir, other, count, &(ith_st_options){.max_shard_bytes = 20}, &err),
        err);
    assert_ok(ith_st_writer_push(w, pattern, 13, &err), err);
    assert_int_equal(num_files(), 2); /* the old file and the staging directory */
    ith_st_writer_destroy(w);
    assert_int_equal(num_files(), 1);
    assert_holds(dir, t, count);
}

static void test_leftovers_of_killed_writers_alone_are_removed(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_entry t[6];
    int64_t count = sample(t, 6);
    char file[256];
    snprintf(file, sizeof file, "%s", named_by(".model", false));
    assert_ok(ith_make_dirs(in_dir(file), &err), err);
    char shard[300];
    snprintf(shard, sizeof shard, "%s/model-00001-of-00002.safetensors", file);
    assert_ok(ith_write_file(in_dir(shard), "x", 1, &err), err);
    assert_ok(ith_make_dirs(in_dir(named_by(".model_b", false)), &err), err); /* another stem's */
    assert_ok(ith_make_dirs(in_dir(named_by(".model", true)), &err), err);
    assert_ok(ith_st_write(dir, t, count, NULL, &err), err);
    assert_int_equal(num_files(), 3);
    assert_holds(dir, t, count);
}

/* Old set A, new set B of the same or another number of shards; the n-th write or allocation fails.
 * After it the directory holds A, or B, or (commit of shards under way) nothing that opens. */
static void check_faults(ith_fault_kind kind, int64_t limit_a, int64_t limit_b)
{
    ith_error err = {0};
    static unsigned char data_a[1024];
    ith_st_entry a[6], b[6];
    int64_t count = sample(a, 7);
    memcpy(data_a, pattern, sizeof data_a);
    for (int64_t i = 0; i < count; i++)
        a[i].data = data_a + 100 * i;
    sample(b, 8);
    int64_t n = 1;
    for (bool done = false; !done; n++) {
        snprintf(dir, sizeof dir, "%s", temp_dir("st-writer"));
        assert_ok(ith_st_write(dir, a, count, &(ith_st_options){.max_shard_bytes = limit_a}, &err),
                  err);
        ith_error_clear(&err);
        ith_fault_set(kind, n);
        ith_status status =
            ith_st_write(dir, b, count, &(ith_st_options){.max_shard_bytes = limit_b}, &err);
        done = ith_fault_count(kind) < n;
        ith_fault_set(kind, 0);
        if (status == ITH_OK) {
            assert_holds(dir, b, count);
            assert_true(done);
            break;
        }
        assert_true(err.text[0]);
        ith_st_reader *r = NULL;
        ith_error why = {0};
        if (ith_st_open(&r, dir, &why) != ITH_OK) {
            if (limit_b == 0 || !strstr(why.text, "neither"))
                fail_msg("n %lld: after '%s' the directory reads '%s'", (long long)n, err.text,
                         why.text);
            continue;
        }
        unsigned char sign = *(const unsigned char *)ith_st_find(r, "z.bytes")->data;
        ith_st_close(r);
        assert_holds(dir, sign == 7 ? a : b, count);
    }
    assert_true(n > 4);
}

static void test_every_failing_write_or_allocation_leaves_old_or_new(void **state)
{
    (void)state;
    static const int64_t limits[] = {0, 77, 53};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++) {
            check_faults(ITH_FAULT_WRITE, limits[i], limits[k]);
            check_faults(ITH_FAULT_ALLOC, limits[i], limits[k]);
        }
}

static void test_reference_files_are_rewritten_byte_for_byte(void **state)
{
    (void)state;
    static const char *const names[] = {"qwen3/hf",        "qwen3_tied/hf",  "qwen3_moe/hf",
                                        "qwen3_5_text/hf", "qwen3_5_moe/hf", "qwen3_5_mm/hf",
                                        "llada2/hf",       "qwen3/after3"};
    shared_path("golden");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ith_error err = {0};
        char name[96];
        ith_st_reader *r = NULL;
        ith_buf ours = {0}, theirs = {0};
        snprintf(name, sizeof name, "golden/%s/model.safetensors", names[i]);
        assert_ok(ith_st_open(&r, shared_path(name), &err), err);
        read_all(shared_path(name), &theirs);
        assert_ok(ith_st_write(dir, ith_st_at(r, 0), ith_st_count(r), NULL, &err), err);
        read_all(in_dir("model.safetensors"), &ours);
        if (ours.len != theirs.len || memcmp(ours.data, theirs.data, (size_t)ours.len) != 0)
            fail_msg("%s: %lld bytes, %lld in the original, or other bytes", name,
                     (long long)ours.len, (long long)theirs.len);
        ith_st_close(r);
        ith_buf_deinit(&ours);
        ith_buf_deinit(&theirs);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_one_file_reads_back_and_is_the_same_each_time, set_up),
        cmocka_unit_test_setup(test_shard_limits_give_the_shards_they_say, set_up),
        cmocka_unit_test_setup(test_index_is_sorted_and_sums_the_bytes, set_up),
        cmocka_unit_test_setup(test_pieces_of_any_size_give_the_same_file, set_up),
        cmocka_unit_test_setup(test_no_tensors_and_only_empty_tensors, set_up),
        cmocka_unit_test_setup(test_bad_declarations_are_refused, set_up),
        cmocka_unit_test_setup(test_abandoned_writer_leaves_nothing, set_up),
        cmocka_unit_test_setup(test_leftovers_of_killed_writers_alone_are_removed, set_up),
        cmocka_unit_test_setup(test_every_failing_write_or_allocation_leaves_old_or_new, set_up),
        cmocka_unit_test_setup(test_reference_files_are_rewritten_byte_for_byte, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
