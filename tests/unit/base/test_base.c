/* Goal: the ground the rest stands on. Method: each base facility on small inputs, edges and
 * faults. */
#include "testing.h"

#include "base/checked.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/pool.h"
#include "base/rng.h"
#include "base/utf8.h"

#include <sys/wait.h>
#include <unistd.h>

static void test_error_context_is_prepended(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_status status = ith_fail(&err, ITH_ERR_FORMAT, "shape %d", 7);
    ith_fail(&err, ITH_ERR_IO, "later failures do not replace the first");
    ith_wrap(&err, status, "tensor %s", "w");
    assert_string_equal(err.text, "tensor w: shape 7");
    assert_int_equal(err.status, ITH_ERR_FORMAT);
    char longer[4000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    ith_wrap(&err, status, "%s", longer); /* too long: dropped, nothing overflows */
    assert_string_equal(err.text, "tensor w: shape 7");
}

static void test_buffer_failure_sticks(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_buf buf;
    ith_buf_init(&buf, 8);
    ith_buf_puts(&buf, "12345678");
    ith_buf_putc(&buf, '9');
    ith_buf_clear(&buf);
    ith_buf_puts(&buf, "1234567");
    ith_buf_printf(&buf, "%d", 89);
    assert_string_equal(buf.data, "1234567");
    assert_fails(ith_buf_check(&buf, "text", &err), err, ITH_ERR_MEMORY, "more than 8 bytes");
    ith_buf_deinit(&buf);
}

static void test_writer_is_atomic_for_every_failing_write(void **state)
{
    (void)state;
    ith_error err = {0};
    char path[4200];
    snprintf(path, sizeof path, "%s/file", temp_dir("writer"));
    assert_ok(ith_write_file(path, "old", 3, &err), err);
    for (int64_t n = 1;; n++) {
        ith_fault_set(ITH_FAULT_WRITE, n);
        ith_error_clear(&err);
        ith_status status = ith_write_file(path, "new!", 4, &err);
        int64_t seen = ith_fault_count(ITH_FAULT_WRITE);
        ith_fault_set(ITH_FAULT_WRITE, 0);
        ith_buf buf = {0};
        ith_error read_err = {0};
        assert_ok(ith_read_file(path, 0, &buf, &read_err), read_err);
        assert_string_equal(buf.data, status == ITH_OK ? "new!" : "old");
        ith_buf_deinit(&buf);
        ith_names names;
        char dir[4200];
        snprintf(dir, sizeof dir, "%.*s", (int)(strlen(path) - 5), path);
        assert_ok(ith_list_dir(dir, &names, &read_err), read_err);
        assert_int_equal(names.count, 1); /* no temporary file is left */
        ith_names_free(&names);
        if (status == ITH_OK) {
            assert_true(n > seen && n > 3);
            break;
        }
    }
}

/* Begins files and ends without a word; returns its PID. */
static pid_t leave_half_written(const char *dir, const char *const *names, int count)
{
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < count; i++) {
            char path[8500];
            ith_writer w;
            ith_error err = {0};
            snprintf(path, sizeof path, "%s/%s", dir, names[i]);
            if (ith_writer_open(&w, path, &err) != ITH_OK)
                _exit(1);
        }
        _exit(0);
    }
    int state = 1;
    assert_true(child > 0 && waitpid(child, &state, 0) == child && state == 0);
    return child;
}

/* What a killed writer leaves goes; what only looks like it, is being written, or is of another
 * host, stays. */
static void test_leftovers_of_dead_writers_are_removed(void **state)
{
    (void)state;
    static const char *const go[] = {"log.jsonl", "x.tmp-1", ".mark"};
    static const char *const stay[] = {"a.tmp-%.9s1", /* a process that lives */
                                       "a.tmp-%.9s",    "a.tmp-%.9s0",   "a.tmp-%.9sx",
                                       "a.tmp-%.9s12x", "a.tmp-%.9s007", "a.tmp-%.9s99999999999",
                                       ".tmp-%s", /* no name before it */
                                       "a.tmp%s",       "a-tmp-%s",      "a.tmp-%s.txt"};
    enum { NUM_STAY = sizeof stay / sizeof *stay };
    ith_error err = {0};
    char dir[4200], path[8500], name[128], tag[64], other[64];
    ith_names names;
    snprintf(dir, sizeof dir, "%s", temp_dir("leftovers"));
    long child = leave_half_written(dir, go, 3);
    assert_ok(ith_list_dir(dir, &names, &err), err);
    assert_int_equal(names.count, 3);
    snprintf(tag, sizeof tag, "%s", strstr(names.names[1], ".tmp-") + 5); /* PLACE-PID */
    ith_names_free(&names);
    snprintf(name, sizeof name, "-%ld", child);
    assert_string_equal(tag + 8, name);
    snprintf(other, sizeof other, "%s", tag);
    other[0] = other[0] == '0' ? '1' : '0';
    const char *const tags[] = {tag, other, name + 1}; /* the last as other programs have it */
    for (int i = 0; i < NUM_STAY + 2; i++) {
        int at = snprintf(path, sizeof path, "%s/", dir);
        if (i < NUM_STAY)
            snprintf(path + at, sizeof path - (size_t)at, stay[i], tag);
        else
            snprintf(path + at, sizeof path - (size_t)at, "b.tmp-%s", tags[1 + i - NUM_STAY]);
        assert_ok(ith_write_file(path, "x", 1, &err), err);
    }
    snprintf(path, sizeof path, "%s/checkpoint-2.tmp-%s", dir, tag); /* a directory */
    assert_ok(ith_make_dirs(path, &err), err);
    snprintf(path, sizeof path, "%s/link.tmp-%s", dir, tag);
    assert_int_equal(symlink("a.tmp-1", path), 0);
    snprintf(name, sizeof name, "a.tmp-%s", other);
    assert_false(ith_tmp_is_left(name));
    assert_true(ith_tmp_is_left(named_by("a", false)));
    assert_false(ith_tmp_is_left(named_by("a", true)));
    ith_tmp_tag(other);
    snprintf(name, sizeof name, "a%s", other);
    assert_true(ith_tmp_is_left(name));
    ith_writer mine;
    snprintf(path, sizeof path, "%s/mine", dir);
    assert_ok(ith_writer_open(&mine, path, &err), err);
    assert_ok(ith_remove_leftovers(dir, &err), err);
    assert_ok(ith_writer_commit(&mine, &err), err);
    assert_ok(ith_list_dir(dir, &names, &err), err);
    for (int64_t i = 0; i < names.count; i++)
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "%s.tmp-%s", go[k], tag);
            if (strcmp(names.names[i], name) == 0)
                fail_msg("%s is left", name);
        }
    assert_int_equal(names.count, NUM_STAY + 5);
    ith_names_free(&names);
    snprintf(path, sizeof path, "%s/nowhere", dir);
    assert_ok(ith_remove_leftovers(path, &err), err);
}

/* Readers add sizes to where a file begins: of an empty one, too. */
static void test_map_of_an_empty_file_has_an_address(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_map map = {0};
    char path[4200];
    snprintf(path, sizeof path, "%s/empty", temp_dir("map"));
    assert_ok(ith_write_file(path, NULL, 0, &err), err);
    assert_ok(ith_map_open(&map, path, &err), err);
    assert_int_equal(map.size, 0);
    assert_non_null(map.data);
    ith_map_close(&map);
}

/* Once by the instructions of the CPU, where it has them, and once without. */
static void test_sha256_known_answers(void **state)
{
    (void)state;
    char hex[65];
    ith_sha256 h;
    for (int plain = 0; plain < 2; plain++) {
        ith_sha256_init(&h);
        h.instructions &= !plain;
        ith_sha256_hex(&h, hex);
        assert_string_equal(hex,
                            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        ith_sha256_init(&h);
        h.instructions &= !plain;
        ith_sha256_update(&h, "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56);
        ith_sha256_hex(&h, hex);
        assert_string_equal(hex,
                            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
        ith_sha256_init(&h);
        h.instructions &= !plain;
        char as[1000];
        memset(as, 'a', sizeof as);
        for (int i = 0; i < 1000; i++) /* a million, in pieces that begin anywhere in a block */
            for (int at = 0, n = 1 + i; at < 1000; at += n)
                ith_sha256_update(&h, as, n < 1000 - at ? n : 1000 - at);
        ith_sha256_hex(&h, hex);
        assert_string_equal(hex,
                            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
}

static void test_philox_known_answer(void **state)
{
    (void)state; /* Random123's kat_vectors: philox4x32 10, zero counter and key; all ones */
    uint32_t out[4];
    ith_philox(0, 0, 0, out);
    assert_int_equal(out[0], 0x6627e8d5u);
    assert_int_equal(out[3], 0x9b00dbd8u);
    ith_philox(UINT64_MAX, UINT64_MAX, UINT64_MAX, out);
    assert_int_equal(out[0], 0x408f276du);
    assert_int_equal(out[3], 0x6d5451fdu);
    int64_t perm[100];
    bool seen[100] = {false};
    ith_rng_permutation(1, 2, 100, perm);
    for (int i = 0; i < 100; i++) {
        assert_true(perm[i] >= 0 && perm[i] < 100 && !seen[perm[i]]);
        seen[perm[i]] = true;
    }
}

static void sum_task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    int64_t *parts = arg;
    for (int64_t i = begin; i < end; i++)
        parts[begin / 7] += i;
}

static void test_pool_covers_every_index_once(void **state)
{
    (void)state;
    ith_error err = {0};
    for (int threads = 1; threads <= 4; threads++) {
        ith_pool *pool = NULL;
        assert_ok(ith_pool_create(&pool, threads, &err), err);
        for (int round = 0; round < 200; round++) {
            int64_t parts[150] = {0}, sum = 0;
            ith_pool_for(pool, 1000, 7, sum_task, parts);
            for (int i = 0; i < 150; i++)
                sum += parts[i];
            assert_int_equal(sum, 499500);
        }
        ith_pool_destroy(pool);
    }
}

static void test_json_positions_and_order(void **state)
{
    (void)state;
    ith_error err = {0};
    json_t *value = NULL;
    const char *text = "\xef\xbb\xbf{\"b\": 1, \"a\": [1.5, null, \"\\u00e9\"]}";
    assert_ok(ith_json_parse(&value, text, (int64_t)strlen(text), "x.json", &err), err);
    ith_buf buf = {0};
    assert_ok(ith_json_dump(value, true, &buf, &err), err);
    assert_string_equal(buf.data, "{\"b\": 1, \"a\": [1.5, null, \"\xc3\xa9\"]}");
    ith_buf_deinit(&buf);
    json_decref(value);
    assert_fails(ith_json_parse(&value, "{\n \"a\": }", 9, "x.json", &err), err, ITH_ERR_FORMAT,
                 "x.json:2:");
}

static void test_utf8_refuses_what_is_not_text(void **state)
{
    (void)state;
    static const char *const bad[] = {"\x80",     "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                      "\xe2\x82", "\xff"};
    uint32_t c = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(ith_utf8_decode(bad[i], bad[i] + strlen(bad[i]), &c), 0);
    char out[4];
    const char *smile = "\xf0\x9f\x98\x80";
    assert_int_equal(ith_utf8_decode(smile, smile + 4, &c), 4);
    assert_int_equal(c, 0x1f600);
    assert_int_equal(ith_utf8_encode(0x1f600, out), 4);
    assert_memory_equal(out, "\xf0\x9f\x98\x80", 4);
}

static void test_log_levels(void **state)
{
    (void)state;
    ith_error err = {0};
    assert_ok(ith_log_set_levels("data:debug,warn", &err), err);
    assert_true(ith_log_enabled(ITH_LOG_DEBUG, "data"));
    assert_false(ith_log_enabled(ITH_LOG_INFO, "comm"));
    assert_fails(ith_log_set_levels("data:loud", &err), err, ITH_ERR_USAGE, "data:loud");
    assert_ok(ith_log_set_levels(NULL, &err), err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_context_is_prepended),
        cmocka_unit_test(test_buffer_failure_sticks),
        cmocka_unit_test(test_writer_is_atomic_for_every_failing_write),
        cmocka_unit_test(test_leftovers_of_dead_writers_are_removed),
        cmocka_unit_test(test_map_of_an_empty_file_has_an_address),
        cmocka_unit_test(test_sha256_known_answers),
        cmocka_unit_test(test_philox_known_answer),
        cmocka_unit_test(test_pool_covers_every_index_once),
        cmocka_unit_test(test_json_positions_and_order),
        cmocka_unit_test(test_utf8_refuses_what_is_not_text),
        cmocka_unit_test(test_log_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
