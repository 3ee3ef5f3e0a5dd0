/* Goal: a weight file is either read right or refused with a text that says what is wrong. Method:
 * files made byte by byte, one fault each; every truncation and every flipped byte of a small file;
 * reference directories where they are present. */
#include "testing.h"

#include "base/log.h"
#include "checkpoint/safetensors.h"

static char dir[4096];

static const char *in_dir(const char *name)
{
    static char path[2][4300];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void write_bytes(const char *name, const void *data, int64_t len)
{
    ith_error err = {0};
    assert_ok(ith_write_file(in_dir(name), data, len, &err), err);
}

/* A file of this header (length put before it) and data_bytes bytes 0, 1, 2 .. */
static int64_t make_file(char *out, const char *header, int64_t data_bytes)
{
    size_t len = strlen(header);
    for (int i = 0; i < 8; i++)
        out[i] = (char)((uint64_t)len >> (8 * i));
    memcpy(out + 8, header, len);
    for (int64_t i = 0; i < data_bytes; i++)
        out[8 + (int64_t)len + i] = (char)i;
    return 8 + (int64_t)len + data_bytes;
}

static void write_file(const char *name, const char *header, int64_t data_bytes)
{
    static char bytes[65536];
    write_bytes(name, bytes, make_file(bytes, header, data_bytes));
}

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "%s", temp_dir("st-reader"));
    return 0;
}

static void test_open_two_tensors_gives_names_shapes_and_bytes(void **state)
{
    (void)state;
    ith_error err = {0};
    write_file("a.safetensors",
               "{\"__metadata__\":{\"format\":\"pt\",\"crc\":\"12\"},"
               "\"w\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[5,17]},"
               "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[5,5]},"
               "\"b\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]},"
               "\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[17,25]}}  ",
               25);
    ith_st_reader *r = NULL;
    assert_ok(ith_st_open(&r, in_dir("a.safetensors"), &err), err);
    assert_int_equal(ith_st_count(r), 4);
    assert_string_equal(ith_st_at(r, 0)->name, "b");
    assert_string_equal(ith_st_at(r, 1)->name, "empty");
    assert_string_equal(ith_st_at(r, 2)->name, "w");
    assert_int_equal(ith_st_total_bytes(r), 25);
    const ith_st_entry *w = ith_st_find(r, "w");
    assert_ptr_equal(w, ith_st_at(r, 2));
    assert_int_equal(w->dtype, ITH_BF16);
    assert_true(ith_st_has_shape(w, 2, (int64_t[]){2, 3}));
    assert_false(ith_st_has_shape(w, 2, (int64_t[]){3, 2}));
    assert_int_equal(w->bytes, 12);
    assert_int_equal(((const char *)w->data)[0], 5);
    assert_int_equal(((const char *)w->data)[11], 16);
    ith_tensor view = ith_st_view(w);
    assert_int_equal(view.stride[0], 3);
    assert_true(ith_is_contiguous(view));
    assert_int_equal(ith_numel(view), 6);
    assert_int_equal(ith_st_numel(ith_st_find(r, "s")), 1);
    assert_int_equal(ith_st_numel(ith_st_find(r, "empty")), 0);
    assert_null(ith_st_find(r, "x"));
    assert_null(ith_st_find(r, ""));
    assert_string_equal(ith_st_metadata(r, 0, "crc"), "12");
    assert_null(ith_st_metadata(r, 0, "none"));
    ith_st_close(r);
}

static void test_need_names_what_is_missing_or_misshapen(void **state)
{
    (void)state;
    ith_error err = {0};
    write_file("a.safetensors",
               "{\"w\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]}}", 12);
    ith_st_reader *r = NULL;
    const ith_st_entry *w = NULL;
    assert_ok(ith_st_open(&r, in_dir("a.safetensors"), &err), err);
    assert_ok(ith_st_need(r, "w", 2, (int64_t[]){2, 3}, NULL, &w, &err), err);
    assert_string_equal(w->name, "w");
    w = NULL;
    assert_fails(ith_st_need(r, "w", 2, (int64_t[]){2, 4}, "hidden_size", &w, &err), err,
                 ITH_ERR_FORMAT, "a.safetensors: w: shape [2, 3], expected [2, 4] (hidden_size)");
    assert_fails(ith_st_need(r, "v", 1, (int64_t[]){2}, NULL, &w, &err), err, ITH_ERR_FORMAT,
                 "tensor v is missing");
    assert_null(w);
    ith_st_close(r);
}

static void test_metadata_without_tensors_loads(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *r = NULL;
    write_file("a.safetensors", "{\"__metadata__\":{\"crc\":\"12\"}}", 0);
    assert_ok(ith_st_open(&r, in_dir("a.safetensors"), &err), err);
    assert_int_equal(ith_st_count(r), 0);
    assert_null(ith_st_find(r, "crc"));
    assert_string_equal(ith_st_metadata(r, 0, "crc"), "12");
    ith_st_close(r);
    write_file("a.safetensors", "{}", 0);
    assert_ok(ith_st_open(&r, in_dir("a.safetensors"), &err), err);
    assert_int_equal(ith_st_count(r), 0);
    ith_st_close(r);
}

#define ROW(name, dtype, shape, offsets)                                                           \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_each_faulty_header_is_refused_with_its_reason(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        int64_t data_bytes;
        ith_status status;
        const char *text;
    } cases[] = {
        {"{" ROW("w", "F32", "[2]", "[0,8]") "}", 7, ITH_ERR_FORMAT,
         "w: ends at byte 8 of the data, the file holds 7"},
        {"{" ROW("w", "F32", "[2]", "[0,8]") "}", 9, ITH_ERR_FORMAT,
         "1 bytes after the last tensor"},
        {"{" ROW("w", "F32", "[2]", "[0,7]") "}", 7, ITH_ERR_FORMAT,
         "w: [2] F32 needs 8 bytes, data_offsets span 7"},
        {"{" ROW("w", "F32", "[3]", "[0,8]") "}", 8, ITH_ERR_FORMAT, "needs 12 bytes"},
        {"{" ROW("w", "F32", "[2]", "[8,0]") "}", 8, ITH_ERR_FORMAT,
         "data_offsets: expected [begin, end]"},
        {"{" ROW("w", "F32", "[2]", "[-8,0]") "}", 8, ITH_ERR_FORMAT,
         "data_offsets: expected [begin, end]"},
        {"{" ROW("w", "F32", "[2]", "[0,8,9]") "}", 8, ITH_ERR_FORMAT,
         "data_offsets: expected [begin, end]"},
        {"{" ROW("w", "F32", "[2]", "[0.0,8]") "}", 8, ITH_ERR_FORMAT,
         "data_offsets: expected [begin, end]"},
        {"{" ROW("w", "F32", "[2]", "{}") "}", 8, ITH_ERR_FORMAT,
         "data_offsets: expected [begin, end]"},
        {"{" ROW("w", "F32", "[2]", "[0,18446744073709551624]") "}", 8, ITH_ERR_FORMAT,
         "too big integer"},
        {"{" ROW("w", "F32", "[4294967296,4294967296,4]", "[0,0]") "}", 0, ITH_ERR_FORMAT,
         "does not fit 64 bits"},
        {"{" ROW("w", "F32", "[9223372036854775808]", "[0,8]") "}", 8, ITH_ERR_FORMAT,
         "too big integer"},
        {"{" ROW("w", "F32", "[-2]", "[0,8]") "}", 8, ITH_ERR_FORMAT,
         "shape[0]: expected an integer"},
        {"{" ROW("w", "F32", "[2.0]", "[0,8]") "}", 8, ITH_ERR_FORMAT,
         "shape[0]: expected an integer"},
        {"{" ROW("w", "F32", "2", "[0,8]") "}", 8, ITH_ERR_FORMAT,
         "shape: found integer, expected an array"},
        {"{" ROW("w", "F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", 8, ITH_ERR_UNSUPPORTED,
         "9 dimensions, at most 8"},
        {"{" ROW("w", "F33", "[2]", "[0,8]") "}", 8, ITH_ERR_UNSUPPORTED,
         "w: dtype F33 is not supported"},
        {"{\"w\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, ITH_ERR_FORMAT,
         "dtype: found integer"},
        {"{\"w\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, ITH_ERR_FORMAT,
         "dtype: found nothing"},
        {"{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, ITH_ERR_FORMAT,
         "shape: found nothing"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, ITH_ERR_FORMAT, "data_offsets: expected"},
        {"{\"w\":[1,2]}", 0, ITH_ERR_FORMAT, "w: found array, expected an object"},
        {"{" ROW("a", "F32", "[2]", "[0,8]") "," ROW("b", "F32", "[2]", "[4,12]") "}", 12,
         ITH_ERR_FORMAT, "b overlaps a"},
        {"{" ROW("a", "F32", "[2]", "[0,8]") "," ROW("b", "F32", "[2]", "[0,8]") "}", 8,
         ITH_ERR_FORMAT, "b overlaps a"},
        {"{" ROW("a", "F32", "[2]", "[0,8]") "," ROW("b", "F32", "[2]", "[12,20]") "}", 20,
         ITH_ERR_FORMAT, "4 unused bytes before b"},
        {"{" ROW("a", "F32", "[2]", "[4,12]") "}", 12, ITH_ERR_FORMAT, "4 unused bytes before a"},
        {"{" ROW("a", "F32", "[2]", "[0,8]") "," ROW("z", "F32", "[0]", "[4,4]") "}", 8,
         ITH_ERR_FORMAT, "z overlaps a"},
        {"{" ROW("a", "U8", "[1]", "[0,1]") "," ROW("a", "U8", "[1]", "[1,2]") "}", 2,
         ITH_ERR_FORMAT, "duplicate"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         ITH_ERR_FORMAT, "duplicate"},
        {"{\"__metadata__\":{\"n\":1}}", 0, ITH_ERR_FORMAT,
         "__metadata__: n: found integer, expected a string"},
        {"{\"__metadata__\":[]}", 0, ITH_ERR_FORMAT, "__metadata__: found array"},
        {"{\"w\":", 0, ITH_ERR_FORMAT, "header:1:"},
        {"{} x", 0, ITH_ERR_FORMAT, "header:1:"},
        {"[]", 0, ITH_ERR_FORMAT, "header does not begin with '{'"},
        {" {}", 0, ITH_ERR_FORMAT, "header does not begin with '{'"},
        {"", 4, ITH_ERR_FORMAT, "header does not begin with '{'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        ith_st_reader *r = NULL;
        write_file("bad.safetensors", cases[i].header, cases[i].data_bytes);
        assert_fails(ith_st_open(&r, in_dir("bad.safetensors"), &err), err, cases[i].status,
                     cases[i].text);
        assert_non_null(strstr(err.text, "bad.safetensors: "));
        assert_null(r);
    }
}

static void test_foreign_files_are_named_for_what_they_are(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        int64_t len;
        const char *text;
    } cases[] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", 64,
         "not a safetensors file (Git LFS pointer"},
        {"PK\x03\x04rest of a zip", 17, "zip, as torch.save writes"},
        {"GGUF\x03\0\0\0", 8, "not a safetensors file (GGUF)"},
        {"", 0, "0 bytes are too few"},
        {"\x08\0\0\0\0\0\0", 7, "7 bytes are too few"},
        {"\x40\x9d\xdf\x07\0\0\0\0{}", 10, "header of 132095296 bytes in a file of 10: truncated"},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "header of 18446744073709551615 bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        ith_st_reader *r = NULL;
        write_bytes("x.safetensors", cases[i].bytes, cases[i].len);
        assert_fails(ith_st_open(&r, in_dir("x.safetensors"), &err), err, ITH_ERR_FORMAT,
                     cases[i].text);
    }
    ith_error err = {0};
    ith_st_reader *r = NULL;
    assert_fails(ith_st_open(&r, in_dir("absent.safetensors"), &err), err, ITH_ERR_IO,
                 "absent.safetensors: cannot open");
    assert_ok(ith_make_dirs(in_dir("hollow"), &err), err);
    assert_fails(ith_st_open(&r, in_dir("hollow"), &err), err, ITH_ERR_IO,
                 "neither model.safetensors nor model.safetensors.index.json is there");
}

/* Every prefix of a good file fails; every single flipped bit fails or gives entries inside the
 * file. */
static void test_truncated_and_flipped_files_never_read_outside(void **state)
{
    (void)state;
    char good[1024], bad[1024];
    int64_t len =
        make_file(good,
                  "{\"__metadata__\":{\"format\":\"pt\"}," ROW(
                      "w", "BF16", "[2,3]", "[0,12]") "," ROW("b", "F32", "[2]", "[12,20]") "}",
                  20);
    for (int64_t n = 0; n < len; n++) {
        ith_error err = {0};
        ith_st_reader *r = NULL;
        write_bytes("cut.safetensors", good, n);
        if (ith_st_open(&r, in_dir("cut.safetensors"), &err) == ITH_OK)
            fail_msg("prefix of %lld of %lld bytes was accepted", (long long)n, (long long)len);
    }
    for (int64_t bit = 0; bit < 8 * (len - 20); bit++) {
        ith_error err = {0};
        ith_st_reader *r = NULL;
        memcpy(bad, good, (size_t)len);
        bad[bit / 8] = (char)(bad[bit / 8] ^ 1 << bit % 8);
        write_bytes("flip.safetensors", bad, len);
        if (ith_st_open(&r, in_dir("flip.safetensors"), &err) != ITH_OK) {
            assert_non_null(strstr(err.text, "flip.safetensors"));
            continue;
        }
        unsigned sum = 0;
        for (int64_t i = 0; i < ith_st_count(r); i++)
            for (int64_t k = 0; k < ith_st_at(r, i)->bytes; k++)
                sum += ((const unsigned char *)ith_st_at(r, i)->data)[k];
        assert_true(sum <= 190); /* 0 + 1 + .. + 19 */
        ith_st_close(r);
    }
}

/* ---- shards ---- */

static char last_warning[512];

static void keep_warning(ith_log_level level, const char *subsystem, const char *text, void *arg)
{
    (void)subsystem;
    (void)arg;
    if (level == ITH_LOG_WARN)
        snprintf(last_warning, sizeof last_warning, "%s", text);
}

#define INDEX(map) "{\"metadata\":{\"total_size\":3},\"weight_map\":{" map "}}"

static void write_shards(const char *index)
{
    write_file("model-1.safetensors", "{" ROW("a", "U8", "[1]", "[0,1]") "}", 1);
    write_file("model-2.safetensors",
               "{" ROW("b", "U8", "[1]", "[0,1]") "," ROW("c", "U8", "[1]", "[1,2]") "}", 2);
    write_bytes("model.safetensors.index.json", index, (int64_t)strlen(index));
}

static void test_shards_open_through_directory_and_index(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *r = NULL;
    write_shards(INDEX("\"c\":\"model-2.safetensors\",\"b\":\"model-2.safetensors\",\"a\":\"model-"
                       "1.safetensors\""));
    for (int way = 0; way < 2; way++) {
        assert_ok(ith_st_open(&r, way ? in_dir("model.safetensors.index.json") : dir, &err), err);
        assert_int_equal(ith_st_num_files(r), 2);
        assert_int_equal(ith_st_count(r), 3);
        assert_int_equal(ith_st_find(r, "c")->file_idx, 1);
        assert_string_equal(ith_path_base(ith_st_file_path(r, 1)), "model-2.safetensors");
        ith_st_close(r);
    }
    last_warning[0] = '\0';
    ith_log_set_sink(keep_warning, NULL); /* in a shard, not in the index */
    write_shards(INDEX("\"b\":\"model-2.safetensors\",\"a\":\"model-1.safetensors\""));
    assert_ok(ith_st_open(&r, dir, &err), err);
    ith_log_set_sink(NULL, NULL);
    assert_int_equal(ith_st_count(r), 3);
    assert_non_null(strstr(last_warning, "c is not in the index"));
    ith_st_close(r);
}

static void test_shards_and_index_that_disagree_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *index, *text;
        ith_status status;
    } cases[] = {
        {INDEX("\"a\":\"model-1.safetensors\",\"x\":\"model-1.safetensors\""),
         "weight_map: x is not in model-1.safetensors", ITH_ERR_FORMAT},
        {INDEX("\"a\":\"model-2.safetensors\",\"b\":\"model-1.safetensors\""),
         "weight_map: a is not in model-2.safetensors", ITH_ERR_FORMAT},
        {INDEX("\"a\":\"model-3.safetensors\""), "model-3.safetensors: cannot open", ITH_ERR_IO},
        {INDEX("\"a\":\"../model-1.safetensors\""), "weight_map: a: expected a file name",
         ITH_ERR_FORMAT},
        {INDEX("\"a\":\"/etc/passwd\""), "weight_map: a: expected a file name", ITH_ERR_FORMAT},
        {INDEX("\"a\":\"\""), "weight_map: a: expected a file name", ITH_ERR_FORMAT},
        {INDEX("\"a\":7"), "weight_map: a: expected a file name", ITH_ERR_FORMAT},
        {INDEX("\"a\":\"model-1.safetensors\",\"a\":\"model-2.safetensors\""), "duplicate",
         ITH_ERR_FORMAT},
        {INDEX("\"a\":\"model-1.safetensors\",\"a2\":\"model-4.safetensors\""),
         "model-4.safetensors: a is in ", ITH_ERR_FORMAT},
        {"{\"weight_map\":[]}", "weight_map: found array", ITH_ERR_FORMAT},
        {"{}", "weight_map: found nothing", ITH_ERR_FORMAT},
        {"[]", "weight_map: found nothing", ITH_ERR_FORMAT},
        {"{", "model.safetensors.index.json:1:", ITH_ERR_FORMAT},
    };
    write_file("model-4.safetensors",
               "{" ROW("a", "U8", "[1]", "[0,1]") "," ROW("a2", "U8", "[1]", "[1,2]") "}", 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        ith_st_reader *r = NULL;
        write_shards(cases[i].index);
        assert_fails(ith_st_open(&r, dir, &err), err, cases[i].status, cases[i].text);
        assert_null(r);
    }
}

static void test_every_failing_allocation_and_read_gives_one_error(void **state)
{
    (void)state;
    write_shards(INDEX("\"c\":\"model-2.safetensors\",\"b\":\"model-2.safetensors\",\"a\":\"model-"
                       "1.safetensors\""));
    static const ith_fault_kind kinds[] = {ITH_FAULT_ALLOC, ITH_FAULT_READ};
    for (int k = 0; k < 2; k++)
        for (int64_t n = 1;; n++) {
            ith_error err = {0};
            ith_st_reader *r = NULL;
            ith_fault_set(kinds[k], n);
            ith_status status = ith_st_open(&r, dir, &err);
            int64_t seen = ith_fault_count(kinds[k]);
            ith_fault_set(kinds[k], 0);
            if (seen < n) {
                assert_int_equal(status, ITH_OK);
                ith_st_close(r);
                assert_true(n > 3);
                break;
            }
            if (status == ITH_OK || !err.text[0] || r)
                fail_msg("kind %d, n %lld: status %d, text '%s'", k, (long long)n, (int)status,
                         err.text);
        }
}

/* 20,000 tensors: time and memory linear enough to be unnoticed, look-ups right. */
static void test_many_tensors(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_buf header = {0};
    ith_buf_puts(&header, "        {");
    enum { N = 20000 };
    for (int i = 0; i < N; i++)
        ith_buf_printf(&header,
                       "%s\"t.%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                       i ? "," : "", i, N - 1 - i, N - i);
    ith_buf_putc(&header, '}');
    for (int i = 0; i < 8; i++)
        header.data[i] = (char)((uint64_t)(header.len - 8) >> (8 * i));
    for (int i = 0; i < N; i++)
        ith_buf_putc(&header, (char)(i % 251));
    write_bytes("many.safetensors", header.data, header.len);
    ith_buf_deinit(&header);
    ith_st_reader *r = NULL;
    assert_ok(ith_st_open(&r, in_dir("many.safetensors"), &err), err);
    assert_int_equal(ith_st_count(r), N);
    for (int i = 0; i < N; i++) {
        char name[32];
        snprintf(name, sizeof name, "t.%d", i);
        const ith_st_entry *t = ith_st_find(r, name);
        assert_non_null(t);
        assert_int_equal(*(const unsigned char *)t->data, (N - 1 - i) % 251);
    }
    ith_st_close(r);
}

static void test_reference_directories_open(void **state)
{
    (void)state;
    static const char *const names[] = {"qwen3",       "qwen3_tied", "qwen3_moe", "qwen3_5_text",
                                        "qwen3_5_moe", "qwen3_5_mm", "llada2"};
    shared_path("golden");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ith_error err = {0};
        char name[64];
        ith_st_reader *r = NULL;
        snprintf(name, sizeof name, "golden/%s/hf", names[i]);
        assert_ok(ith_st_open(&r, shared_path(name), &err), err);
        assert_true(ith_st_count(r) > 10);
        ith_st_close(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_open_two_tensors_gives_names_shapes_and_bytes, set_up),
        cmocka_unit_test_setup(test_need_names_what_is_missing_or_misshapen, set_up),
        cmocka_unit_test_setup(test_metadata_without_tensors_loads, set_up),
        cmocka_unit_test_setup(test_each_faulty_header_is_refused_with_its_reason, set_up),
        cmocka_unit_test_setup(test_foreign_files_are_named_for_what_they_are, set_up),
        cmocka_unit_test_setup(test_truncated_and_flipped_files_never_read_outside, set_up),
        cmocka_unit_test_setup(test_shards_open_through_directory_and_index, set_up),
        cmocka_unit_test_setup(test_shards_and_index_that_disagree_are_refused, set_up),
        cmocka_unit_test_setup(test_every_failing_allocation_and_read_gives_one_error, set_up),
        cmocka_unit_test_setup(test_many_tensors, set_up),
        cmocka_unit_test_setup(test_reference_directories_open, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
