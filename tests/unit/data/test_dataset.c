/* Data sets: what a name stands for, the list of samples, and sampling by size and weight. */
#include "testing.h"

#include "data/dataset.h"

#include "base/log.h"

static ith_error err;
static char root[1024];

/* A file below the folder of the test. */
static const char *put(const char *name, const char *text)
{
    static char path[2048];
    char dir[2048];
    snprintf(path, sizeof path, "%s/%s", root, name);
    snprintf(dir, sizeof dir, "%.*s", (int)(strrchr(path, '/') - path), path);
    assert_ok(ith_make_dirs(dir, &err), err);
    assert_ok(ith_write_file(path, text, (int64_t)strlen(text), &err), err);
    return path;
}

static const char *at(const char *name)
{
    static char path[2048];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static ith_dataset *open_indexed(const char *path, ith_dataset_options o)
{
    ith_dataset *d = NULL;
    assert_ok(ith_dataset_open(&d, path, &o, &err), err);
    assert_ok(ith_dataset_index(d, NULL, &err), err);
    return d;
}

static void expect_open_fails(const char *path, ith_status status, const char *part)
{
    ith_dataset *d = NULL;
    ith_dataset_options o = {0};
    assert_fails(ith_dataset_open(&d, path, &o, &err), err, status, part);
    assert_null(d);
}

static void expect_load_fails(const char *path, ith_status status, const char *part)
{
    ith_dataset *d = NULL;
    ith_dataset_options o = {0};
    assert_ok(ith_dataset_open(&d, path, &o, &err), err);
    assert_fails(ith_dataset_load(d, &err), err, status, part);
    ith_dataset_close(d);
}

#define Q "{\"role\":\"user\",\"content\":\"q\"}"
#define A "{\"role\":\"assistant\",\"content\":\"a\"}"
#define A0 "{\"role\":\"assistant\",\"content\":\"a\",\"loss_weight\":0}"
#define MANY_ROW "{\"messages\":[" Q "," A "," A "]}\n"

static const char chat_rows[] = "{\"messages\":[" Q "," A "," Q "," A "]}\n"
                                "{\"messages\":[" Q "," A0 "," Q "," A "]}\n"
                                "{\"messages\":[]}\n"
                                "{\"messages\":[" A0 "]}\n"
                                "{\"messages\":[7]}\n";

/* One sample per supervised turn; a turn of weight 0 gives none; rows without any are counted by
 * reason (cases S03, S28). */
static void test_index_prefix_samples_per_supervised_turn(void **state)
{
    (void)state;
    ith_dataset *d = open_indexed(put("chat.jsonl", chat_rows), (ith_dataset_options){0});
    const ith_dataset_sample expected[] = {{0, 0, 2}, {0, 0, 4}, {1, 0, 4}};
    assert_int_equal(ith_dataset_num_samples(d), 3);
    assert_memory_equal(ith_dataset_samples(d), expected, sizeof expected);
    const ith_drops *drops = ith_dataset_drops(d);
    assert_int_equal(drops->rows[ITH_DROP_NO_ASSISTANT].count, 1);
    assert_int_equal(drops->rows[ITH_DROP_NO_ASSISTANT].row, 2);
    assert_int_equal(drops->rows[ITH_DROP_NO_WEIGHT].count, 1);
    assert_int_equal(drops->rows[ITH_DROP_TYPE].count, 1);
    assert_string_equal(drops->rows[ITH_DROP_TYPE].detail,
                        "messages[0]: found integer, expected an object");
    char where[2048];
    ith_dataset_where(d, 0, 4, where, sizeof where);
    assert_non_null(strstr(where, "chat.jsonl: row 5 (line 5)"));
    ith_dataset_close(d);
    d = open_indexed(at("chat.jsonl"), (ith_dataset_options){.all_turns = true});
    const ith_dataset_sample whole[] = {{0, 0, 0}, {1, 0, 0}};
    assert_int_equal(ith_dataset_num_samples(d), 2);
    assert_memory_equal(ith_dataset_samples(d), whole, sizeof whole);
    ith_dataset_close(d);
}

static void test_index_media_rows_are_counted(void **state)
{
    (void)state;
    const char *path =
        put("media.json", "[{\"instruction\":\"<image>x\",\"output\":\"y\",\"images\":"
                          "\"1.jpg\"},{\"instruction\":\"x\",\"output\":\"y\"}]");
    ith_dataset *d = open_indexed(path, (ith_dataset_options){0});
    assert_int_equal(ith_dataset_num_samples(d), 1);
    assert_int_equal(ith_dataset_drops(d)->rows[ITH_DROP_MEDIA].count, 1);
    assert_int_equal(ith_dataset_part_at(d, 0)->converter, ITH_CONVERTER_ALPACA);
    ith_dataset_close(d);
    d = open_indexed(path, (ith_dataset_options){.allow_media = true});
    assert_int_equal(ith_dataset_num_samples(d), 2);
    ith_dataset_close(d);
}

/* A row that contradicts itself, and a row that is no JSON, end the run with their place (cases
 * S11). */
static void test_index_errors_name_the_row(void **state)
{
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"{\"instruction\":\"a\",\"output\":\"b\"}\n{\"instruction\":\"<image><image>hi\","
         "\"output\":\"b\",\"images\":[\"1\"]}\n",
         "row 2 (line 2): 2 placeholders <image>, but 1 image in images"},
        {"{\"instruction\":\"a\",\"output\":\"b\"}\n\n{\"instruction\":\n", "bad.jsonl:3:"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_dataset *d = NULL;
        ith_dataset_options o = {0};
        assert_ok(ith_dataset_open(&d, put("bad.jsonl", cases[i].text), &o, &err), err);
        assert_fails(ith_dataset_index(d, NULL, &err), err, ITH_ERR_FORMAT, cases[i].part);
        ith_dataset_close(d);
    }
}

static void test_load_tells_the_format(void **state)
{
    (void)state;
    expect_load_fails(put("text.jsonl", "{\"text\":\"hello\"}\n{\"text\":\"you\"}\n"),
                      ITH_ERR_FORMAT, "row 1 (line 1): found the keys text; expected messages");
    expect_load_fails(put("pair.json", "[{\"conversations\":[],\"chosen\":{},\"rejected\":{}}]"),
                      ITH_ERR_UNSUPPORTED, "preference data");
    expect_load_fails(put("empty.jsonl", "\n"), ITH_ERR_FORMAT, "empty.jsonl: no row in it");
    put("x/conv.jsonl", "{\"conversations\":[]}\n");
    expect_load_fails(put("x/info.yaml", "c: {path: conv.jsonl, converter: alpaca}\n"),
                      ITH_ERR_FORMAT, "converter: sharegpt would fit");
}

static void test_open_names_that_are_not_local(void **state)
{
    (void)state;
    expect_open_fails("someone/some-data", ITH_ERR_USAGE, "download it first");
    expect_open_fails("someone/some-data/info.yaml", ITH_ERR_USAGE, "download it first");
    expect_open_fails(put("hub.yaml", "a:\n  path: someone/some-data\n"), ITH_ERR_USAGE,
                      "hub.yaml:2:9: a: someone/some-data: no such file or folder; data sets");
}

/* Paths of an info file: beside it, above it, or from the working folder. */
static void test_info_paths_are_looked_for(void **state)
{
    (void)state;
    const char *row = "{\"instruction\":\"a\",\"output\":\"b\"}\n";
    put("p/data/one.jsonl", row);
    put("p/two.jsonl", row);
    put("p/data/sub/three.jsonl", row);
    put("p/data/info.yaml", "one: {path: data/one.jsonl, source: local}\n"
                            "two: {path: two.jsonl}\n"
                            "three: {path: sub/three.jsonl, converter: alpaca}\n"
                            "bare: {path: elsewhere/one.jsonl}\n");
    ith_dataset *d = open_indexed(at("p/data/info.yaml"), (ith_dataset_options){0});
    assert_int_equal(ith_dataset_num_parts(d), 4);
    assert_string_equal(ith_dataset_part_at(d, 2)->name, "three");
    assert_int_equal(ith_dataset_num_drawn(d), 4);
    ith_dataset_close(d);
    char text[3000];
    snprintf(text, sizeof text, "here: {path: %s/p/two.jsonl}\n", root);
    d = open_indexed(put("q/info.yml", text), (ith_dataset_options){0}); /* working folder */
    assert_int_equal(ith_dataset_num_drawn(d), 1);
    ith_dataset_close(d);
}

static void test_info_mistakes_have_positions(void **state)
{
    (void)state;
    put("m/a.jsonl", "{\"instruction\":\"a\",\"output\":\"b\"}\n");
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "dataset-info file"},
        {"{}", "names no data set"},
        {"a: 1", "i.yaml:1:4: a"},
        {"a: {source: local}", "i.yaml:1:4: a: path is missing"},
        {"a: {path: a.jsonl, pth: 1}", "i.yaml:1:20: "},
        {"a: {file_name: a.jsonl}", "file_name belongs to the older dataset_info.json"},
        {"a:\n  path: a.jsonl\n  converter: alpca", "i.yaml:3:14: converter: found 'alpca'"},
        {"a: {path: a.jsonl, size: 0}", "i.yaml:1:26: size"},
        {"a: {path: a.jsonl, weight: -1}", "weight"},
        {"a: {path: a.jsonl, split: test}", "split: found 'test'"},
        {"a: {path: a.jsonl, source: ftp}", "source: found 'ftp'"},
        {"a: {path: gone.jsonl, source: local}", "gone.jsonl: no such file or folder (looked"},
        {"a: {path: a.jsonl, streaming: true}\nb: {path: a.jsonl}", "streaming: all data sets"},
        {"a: {path: a.jsonl}\na: {path: a.jsonl}", "i.yaml:2:1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_open_fails(put("m/i.yaml", cases[i].text), ITH_ERR_USAGE, cases[i].part);
}

/* A folder is one data set: its files in order of name, rows numbered through. */
static void test_folder_reads_files_in_order(void **state)
{
    (void)state;
    put("f/b.jsonl",
        "{\"instruction\":\"2\",\"output\":\"x\"}\n{\"instruction\":\"3\",\"output\":\"x\"}");
    put("f/a.json", "[{\"instruction\":\"1\",\"output\":\"x\"}]");
    put("f/c.jsonl", "");
    put("f/d.jsonl", "{\"instruction\":\"4\",\"output\":\"x\"}");
    put("f/notes.md", "not data");
    ith_dataset *d = open_indexed(at("f"), (ith_dataset_options){0});
    assert_int_equal(ith_dataset_part_at(d, 0)->num_files, 4);
    assert_int_equal(ith_dataset_part_at(d, 0)->num_rows, 4);
    for (int64_t row = 0; row < 4; row++) {
        ith_converted c;
        assert_ok(ith_dataset_read(d, 0, row, &c, &err), err);
        const json_t *content = json_object_get(json_array_get(c.messages, 0), "content");
        const char *text = json_string_value(json_object_get(json_array_get(content, 0), "value"));
        assert_int_equal(text[0], '1' + row);
        ith_converted_deinit(&c);
    }
    char where[2048];
    ith_dataset_where(d, 0, 3, where, sizeof where);
    assert_non_null(strstr(where, "d.jsonl: row 1 (line 1)"));
    ith_dataset_close(d);
    put("g/notes.md", "not data");
    expect_open_fails(at("g"), ITH_ERR_USAGE, "no .json or .jsonl file (1 others)");
}

static void fill_rows(ith_buf *text, int count)
{
    for (int i = 0; i < count; i++)
        ith_buf_printf(text, "{\"instruction\":\"q%d\",\"output\":\"a%d\"}\n", i, i);
}

/* size and weight choose without replacement as far as there are samples, and whole rounds beyond;
 * int(samples x weight) of them. */
static void test_size_and_weight_choose(void **state)
{
    (void)state;
    ith_buf text = {0};
    fill_rows(&text, 10);
    put("s/ten.jsonl", text.data);
    ith_buf_deinit(&text);
    static const struct {
        const char *choice;
        int64_t count, most; /* entries, and how often one sample may occur */
    } cases[] = {{"size: 4", 4, 1},     {"size: 10", 10, 1},           {"size: 23", 23, 3},
                 {"weight: 0.7", 7, 1}, {"weight: 2", 20, 2},          {"weight: 2.55", 25, 3},
                 {"weight: 0", 0, 0},   {"size: 4, weight: 0.5", 2, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char info[200];
        snprintf(info, sizeof info, "t: {path: ten.jsonl, %s}\n", cases[i].choice);
        put("s/info.yaml", info);
        ith_dataset *d = open_indexed(at("s/info.yaml"), (ith_dataset_options){.seed = 1});
        const int64_t *drawn = ith_dataset_drawn(d);
        const ith_dataset_sample *samples = ith_dataset_samples(d);
        int64_t seen[10] = {0}, n = ith_dataset_num_drawn(d);
        if (n != cases[i].count)
            fail_msg("%s: %lld entries, expected %lld", cases[i].choice, (long long)n,
                     (long long)cases[i].count);
        for (int64_t k = 0; k < n; k++) {
            assert_in_range(drawn[k], 0, ith_dataset_num_samples(d) - 1);
            assert_true(k == 0 || drawn[k] >= drawn[k - 1]);
            seen[samples[drawn[k]].row]++;
        }
        for (int k = 0; k < 10; k++)
            assert_true(seen[k] <= cases[i].most && seen[k] >= n / 10);
        ith_dataset_close(d);
    }
    /* The choice is the seed's. */
    put("s/info.yaml", "t: {path: ten.jsonl, size: 5}\n");
    ith_dataset_sample first[5];
    bool differs = false;
    for (uint64_t seed = 1; seed < 6; seed++) {
        ith_dataset *d = open_indexed(at("s/info.yaml"), (ith_dataset_options){.seed = seed});
        if (seed == 1)
            memcpy(first, ith_dataset_samples(d), sizeof first);
        assert_int_equal(ith_dataset_num_samples(d), 5);
        differs |= memcmp(first, ith_dataset_samples(d), sizeof first) != 0;
        ith_dataset_close(d);
    }
    assert_true(differs);
}

/* List, drops and errors do not depend on threads. */
static void test_index_is_the_same_for_any_number_of_threads(void **state)
{
    (void)state;
    ith_buf text = {0};
    for (int i = 0; i < 3000; i++) {
        if (i % 7 == 3)
            ith_buf_printf(&text, "{\"messages\":[{\"role\":\"x%d\"}]}\n", i);
        else
            ith_buf_puts(&text, MANY_ROW);
    }
    put("many.jsonl", text.data);
    ith_dataset *one = open_indexed(at("many.jsonl"), (ith_dataset_options){0});
    for (int threads = 2; threads <= 5; threads += 3) {
        ith_pool *pool = NULL;
        ith_dataset *d = NULL;
        ith_dataset_options o = {0};
        assert_ok(ith_pool_create(&pool, threads, &err), err);
        assert_ok(ith_dataset_open(&d, at("many.jsonl"), &o, &err), err);
        assert_ok(ith_dataset_index(d, pool, &err), err);
        assert_int_equal(ith_dataset_num_samples(d), ith_dataset_num_samples(one));
        assert_memory_equal(ith_dataset_samples(d), ith_dataset_samples(one),
                            (size_t)ith_dataset_num_samples(d) * sizeof(ith_dataset_sample));
        assert_int_equal(ith_dataset_drops(d)->rows[ITH_DROP_TYPE].count, 429);
        assert_string_equal(ith_dataset_drops(d)->rows[ITH_DROP_TYPE].detail,
                            ith_dataset_drops(one)->rows[ITH_DROP_TYPE].detail);
        ith_dataset_close(d);
        /* The first of two bad rows is the one that is told. */
        ith_buf_clear(&text);
        fill_rows(&text, 2500);
        ith_buf_puts(&text, "{1}\n");
        fill_rows(&text, 10);
        ith_buf_puts(&text, "{2}\n");
        put("bad2.jsonl", text.data);
        assert_ok(ith_dataset_open(&d, at("bad2.jsonl"), &o, &err), err);
        assert_fails(ith_dataset_index(d, pool, &err), err, ITH_ERR_FORMAT, "bad2.jsonl:2501:");
        ith_dataset_close(d);
        ith_pool_destroy(pool);
    }
    ith_dataset_close(one);
    ith_buf_deinit(&text);
}

/* The identity follows content and settings, not the place or the time. */
static void test_identity_follows_content_and_settings(void **state)
{
    (void)state;
    const char *row = "{\"instruction\":\"a\",\"output\":\"b\"}\n";
    put("i/1/a.jsonl", row);
    put("i/2/a.jsonl", row);
    put("i/3/a.jsonl", "{\"instruction\":\"a\",\"output\":\"c\"}\n");
    static const struct {
        const char *folder, *info;
        bool same;
    } cases[] = {{"i/1", "t: {path: a.jsonl}", true},
                 {"i/2", "t: {path: a.jsonl}", true},
                 {"i/3", "t: {path: a.jsonl}", false},
                 {"i/1", "u: {path: a.jsonl}", false},
                 {"i/1", "t: {path: a.jsonl, size: 1}", false},
                 {"i/1", "t: {path: a.jsonl, weight: 1}", false},
                 {"i/1", "t: {path: a.jsonl, separator: ''}", false},
                 {"i/1", "t: {path: a.jsonl, converter: alpaca}", false},
                 {"i/1", "t: {path: a.jsonl}\nv: {path: a.jsonl}", false}};
    char first[65] = "", got[65];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[64];
        ith_dataset *d = NULL;
        ith_dataset_options o = {0};
        snprintf(name, sizeof name, "%s/info.yaml", cases[i].folder);
        assert_ok(ith_dataset_open(&d, put(name, cases[i].info), &o, &err), err);
        assert_ok(ith_dataset_identity(d, got, &err), err);
        if (i == 0)
            memcpy(first, got, 65);
        if ((strcmp(first, got) == 0) != cases[i].same)
            fail_msg("case %zu: identity %s, first %s", i, got, first);
        ith_dataset_close(d);
    }
}

static void test_faults_leave_nothing(void **state)
{
    (void)state;
    put("o/a.jsonl", chat_rows);
    put("o/info.yaml", "t: {path: a.jsonl, size: 2, weight: 1.5, separator: x}\n");
    for (int kind = ITH_FAULT_ALLOC; kind <= ITH_FAULT_READ; kind++) {
        int failures = 0;
        for (int64_t n = 1;; n++) {
            ith_dataset *d = NULL;
            ith_dataset_options o = {0};
            char hex[65];
            ith_error_clear(&err);
            ith_fault_set((ith_fault_kind)kind, n);
            ith_status status = ith_dataset_open(&d, at("o/info.yaml"), &o, &err);
            if (status == ITH_OK)
                status = ith_dataset_identity(d, hex, &err);
            if (status == ITH_OK)
                status = ith_dataset_index(d, NULL, &err);
            bool hit = ith_fault_count((ith_fault_kind)kind) >= n;
            ith_fault_set((ith_fault_kind)kind, 0);
            if (status == ITH_OK && ith_dataset_num_drawn(d) != 3)
                fail_msg("fault %lld of kind %d lost samples: %lld", (long long)n, kind,
                         (long long)ith_dataset_num_drawn(d));
            ith_dataset_close(d);
            failures += status != ITH_OK;
            if (!hit)
                break;
        }
        assert_true(failures > 2);
    }
}

/* Every file that supervised fine-tuning can use, and how the others are refused. */
static void test_shared_files(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t samples, dropped;
        const char *refused;
    } files[] = {
        {"alpaca_en_demo.json", 999, 0, NULL},
        {"alpaca_zh_demo.json", 1000, 0, NULL},
        {"identity.json", 91, 0, NULL},
        {"v1_sft_demo.jsonl", 0, 0, NULL},
        {"v1_sft_demo.yaml", 0, 0, NULL},
        {"reason_tool_use_demo_50.jsonl", 0, 0, NULL},
        {"glaive_toolcall_en_demo.json", 0, 0, NULL},
        {"v1_multimodal_demo.jsonl", -1, 24, NULL},
        {"mllm_demo.json", -1, 6, NULL},
        {"c4_demo.jsonl", 0, 0, "found the keys text"},
        {"dpo_en_demo.json", 0, 0, "preference data"},
        {"v1_dpo_demo.jsonl", 0, 0, "preference data"},
        {"v1_dpo_demo.yaml", 0, 0, "download it first"},
        {"dataset_info.json", 0, 0, "a dataset_info.json of LlamaFactory v0"},
    };
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char name[200];
        snprintf(name, sizeof name, "data/llamafactory/%s", files[i].name);
        const char *path = shared_path(name);
        ith_dataset *d = NULL;
        ith_dataset_options o = {0};
        ith_error_clear(&err);
        ith_status status = ith_dataset_open(&d, path, &o, &err);
        if (status == ITH_OK)
            status = ith_dataset_index(d, NULL, &err);
        if (files[i].refused) {
            if (status == ITH_OK || !strstr(err.text, files[i].refused))
                fail_msg("%s: status %d '%s', expected '%s'", path, (int)status, err.text,
                         files[i].refused);
        } else if (status != ITH_OK) {
            fail_msg("%s: %s", path, err.text);
        } else {
            int64_t dropped = 0;
            for (int k = 1; k < ITH_DROP_COUNT; k++)
                dropped += ith_dataset_drops(d)->rows[k].count;
            int64_t samples = ith_dataset_num_samples(d);
            if (dropped != files[i].dropped ||
                (files[i].samples > 0 && samples != files[i].samples) ||
                (files[i].samples < 0 && samples != 0) || (files[i].samples == 0 && samples == 0))
                fail_msg("%s: %lld samples, %lld dropped", path, (long long)samples,
                         (long long)dropped);
        }
        ith_dataset_close(d);
    }
}

static int setup(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "%s", temp_dir("dataset"));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return ith_remove_tree(root, &err) == ITH_OK ? 0 : 1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_prefix_samples_per_supervised_turn),
        cmocka_unit_test(test_index_media_rows_are_counted),
        cmocka_unit_test(test_index_errors_name_the_row),
        cmocka_unit_test(test_load_tells_the_format),
        cmocka_unit_test(test_open_names_that_are_not_local),
        cmocka_unit_test(test_info_paths_are_looked_for),
        cmocka_unit_test(test_info_mistakes_have_positions),
        cmocka_unit_test(test_folder_reads_files_in_order),
        cmocka_unit_test(test_size_and_weight_choose),
        cmocka_unit_test(test_index_is_the_same_for_any_number_of_threads),
        cmocka_unit_test(test_identity_follows_content_and_settings),
        cmocka_unit_test(test_faults_leave_nothing),
        cmocka_unit_test(test_shared_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
