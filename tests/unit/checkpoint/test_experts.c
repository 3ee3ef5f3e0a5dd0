/* Goal: merge and split move every byte of every tensor to where it belongs, go on after a stop,
 * and refuse what they do not understand. Method: a small model directory with odd types, both ways
 * and back; shards taken away between two calls; directories that are wrong in one place. */
#include "testing.h"

#include "base/file.h"
#include "base/hash.h"
#include "checkpoint/experts.h"

#include <stdio.h>
#include <unistd.h>

static ith_error err;

enum { EXPERTS = 4, ROWS = 3, COLS = 5, MAX_TENSORS = 40 };

typedef struct {
    ith_st_entry entries[MAX_TENSORS];
    char names[MAX_TENSORS][96];
    unsigned char data[MAX_TENSORS][256];
    int64_t count;
} tensors;

static void add(tensors *t, const char *name, ith_dtype dtype, int ndim, int64_t a, int64_t b)
{
    int64_t i = t->count++, bytes = a * (ndim > 1 ? b : 1) * ith_dtype_bytes(dtype);
    assert_true(i < MAX_TENSORS && bytes <= (int64_t)sizeof t->data[0]);
    snprintf(t->names[i], sizeof t->names[i], "%s", name);
    for (int64_t k = 0; k < bytes; k++)
        t->data[i][k] = (unsigned char)(i * 37 + k * 11 + 5);
    t->entries[i] = (ith_st_entry){
        .name = t->names[i], .dtype = dtype, .ndim = ndim, .shape = {a, b}, .data = t->data[i]};
}

/* Files that are not weights; each begins with its name. */
static const char *const others[] = {"tokenizer_config.json", "chat_template.jinja",
                                     "generation_config.json", "preprocessor_config.json",
                                     "modeling_llada2_moe.py"};
enum { NUM_OTHERS = sizeof others / sizeof *others };

/* Layer 0 dense, layers 1 and 2 with experts; `skip`: a name that is left out. */
static void write_model(const char *dir, const char *skip)
{
    static tensors t;
    static const char *const proj[] = {"gate_proj", "up_proj", "down_proj"};
    char name[96];
    ith_buf path = {0};
    memset(&t, 0, sizeof t);
    add(&t, "model.word_embeddings.weight", ITH_BF16, 2, 6, COLS);
    add(&t, "model.layers.0.mlp.gate_proj.weight", ITH_BF16, 2, ROWS, COLS);
    for (int l = 1; l < 3; l++) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate.expert_bias", l);
        add(&t, name, ITH_F32, 1, EXPERTS, 1);
        for (int e = EXPERTS - 1; e >= 0; e--) /* not in order of experts */
            for (int k = 0; k < 3; k++) {
                snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", l, e,
                         proj[k]);
                if (!skip || strcmp(skip, name) != 0)
                    add(&t, name, l == 2 ? ITH_F32 : ITH_BF16, 2, k == 2 ? COLS : ROWS,
                        k == 2 ? ROWS : COLS);
            }
    }
    add(&t, "foo.bar", ITH_F16, 1, 7, 1);
    assert_ok(ith_make_dirs(dir, &err), err);
    assert_ok(ith_st_write(dir, t.entries, t.count, NULL, &err), err);
    static const char config[] = "{\"model_type\": \"llada2_moe\", \"num_experts\": 4}\n";
    ith_path_join(&path, dir, "config.json");
    assert_ok(ith_write_file(path.data, config, (int64_t)sizeof config - 1, &err), err);
    for (int i = 0; i < NUM_OTHERS; i++) {
        ith_path_join(&path, dir, others[i]);
        assert_ok(ith_write_file(path.data, others[i], 9, &err), err);
    }
    ith_buf_deinit(&path);
}

static void join(char *out, size_t size, const char *dir, const char *name)
{
    snprintf(out, size, "%.900s/%s", dir, name);
}

static void assert_same_tensors(const char *a, const char *b)
{
    ith_st_reader *ra = NULL, *rb = NULL;
    assert_ok(ith_st_open(&ra, a, &err), err);
    assert_ok(ith_st_open(&rb, b, &err), err);
    assert_int_equal(ith_st_count(ra), ith_st_count(rb));
    for (int64_t i = 0; i < ith_st_count(ra); i++) {
        const ith_st_entry *x = ith_st_at(ra, i), *y = ith_st_find(rb, x->name);
        if (!y || y->dtype != x->dtype || !ith_st_has_shape(y, x->ndim, x->shape) ||
            memcmp(x->data, y->data, (size_t)x->bytes) != 0)
            fail_msg("%s differs", x->name);
    }
    ith_st_close(ra);
    ith_st_close(rb);
}

static void test_merge_then_split_gives_every_byte_back(void **state)
{
    (void)state;
    const char *root = temp_dir("experts_round");
    char m[1024], g[1024], s[1024];
    join(m, sizeof m, root, "m");
    join(g, sizeof g, root, "g");
    join(s, sizeof s, root, "s");
    write_model(m, NULL);
    for (int64_t shard = 0; shard < 2; shard++) {
        ith_experts_report r;
        assert_ok(ith_experts_convert(m, g, true, shard ? 300 : 0, &r, &err), err);
        assert_int_equal(r.num_in, 2 + 2 * (1 + 12) + 1);
        assert_int_equal(r.num_out, 2 + 2 * (1 + 3) + 1);
        assert_int_equal(r.num_changed, 6);
        assert_true(shard ? r.num_files > 1 : r.num_files == 1);
        ith_st_reader *reader = NULL;
        assert_ok(ith_st_open(&reader, g, &err), err);
        const ith_st_entry *e = ith_st_find(reader, "model.layers.2.mlp.experts.down_proj");
        assert_non_null(e);
        assert_true(e->dtype == ITH_F32 &&
                    ith_st_has_shape(e, 3, (int64_t[]){EXPERTS, COLS, ROWS}));
        assert_non_null(ith_st_find(reader, "foo.bar"));
        ith_st_close(reader);
        assert_ok(ith_experts_convert(g, s, false, shard ? 300 : 0, &r, &err), err);
        assert_same_tensors(m, s);
        for (int i = 0; i < NUM_OTHERS; i++) {
            char file[1200];
            ith_buf text = {0};
            join(file, sizeof file, s, others[i]);
            assert_ok(ith_read_file(file, 0, &text, &err), err);
            assert_true(text.len == 9 && memcmp(text.data, others[i], 9) == 0);
            ith_buf_deinit(&text);
        }
        char partial[1200];
        join(partial, sizeof partial, s, ".experts.partial");
        assert_false(ith_path_exists(partial));
        assert_ok(ith_remove_tree(g, &err), err);
        assert_ok(ith_remove_tree(s, &err), err);
    }
}

/* A stop after some shards, as a kill leaves it: shards and records below the partial directory, no
 * model file. */
static void test_a_second_call_goes_on(void **state)
{
    (void)state;
    const char *root = temp_dir("experts_resume");
    char m[1024], g[1024], whole[1024], path[1200], to[1200], done[1200];
    ith_experts_report r;
    join(m, sizeof m, root, "m");
    join(g, sizeof g, root, "g");
    join(whole, sizeof whole, root, "whole");
    write_model(m, NULL);
    assert_ok(ith_experts_convert(m, whole, true, 300, &r, &err), err);
    int64_t files = r.num_files;
    assert_true(files > 2);
    /* the same conversion, stopped: a file stands where the last shard's staging would be */
    snprintf(path, sizeof path, "%.1000s/.experts.partial", g);
    assert_ok(ith_make_dirs(path, &err), err);
    snprintf(to, sizeof to, "%.1000s/.experts.partial/part-00002.done", g);
    assert_ok(ith_make_dirs(to, &err), err); /* a directory: its record cannot be written */
    assert_true(ith_experts_convert(m, g, true, 300, &r, &err) != ITH_OK);
    ith_error_clear(&err);
    snprintf(done, sizeof done, "%.1000s/.experts.partial/part-00001.done", g);
    assert_true(ith_path_exists(done));
    snprintf(path, sizeof path, "%.1000s/model.safetensors.index.json", g);
    assert_false(ith_path_exists(path));
    assert_ok(ith_remove_tree(to, &err), err);
    assert_ok(ith_experts_convert(m, g, true, 300, &r, &err), err);
    assert_int_equal(r.num_kept, 1);
    assert_same_tensors(whole, g);
    /* other settings do not take what is there */
    assert_ok(ith_remove_tree(g, &err), err);
}

static void assert_refused(const char *source, const char *out, bool merge, const char *text)
{
    ith_experts_report r;
    ith_error_clear(&err);
    assert_true(ith_experts_convert(source, out, merge, 0, &r, &err) != ITH_OK);
    if (!strstr(err.text, text))
        fail_msg("\"%s\" does not say \"%s\"", err.text, text);
    ith_error_clear(&err);
}

static void test_mistakes_are_named_before_anything_is_written(void **state)
{
    (void)state;
    const char *root = temp_dir("experts_mistakes");
    char m[1024], g[1024], broken[1024];
    ith_experts_report r;
    join(m, sizeof m, root, "m");
    join(g, sizeof g, root, "g");
    join(broken, sizeof broken, root, "broken");
    write_model(m, NULL);
    assert_refused(m, g, false, "the experts are apart already");
    assert_refused(m, m, true, "the source itself");
    assert_false(ith_path_exists(g));
    write_model(broken, "model.layers.1.mlp.experts.3.up_proj.weight");
    assert_refused(broken, g, true, "model.layers.1.mlp.experts.3.up_proj.weight is missing");
    write_model(broken, "model.layers.2.mlp.experts.0.gate_proj.weight");
    assert_refused(broken, g, true, "expert 0 beside it is missing");
    assert_false(ith_path_exists(g));
    assert_ok(ith_experts_convert(m, g, true, 0, &r, &err), err);
    assert_refused(g, broken, true, "the experts are merged already");
    assert_refused(m, g, true, "is not empty");
}

/* Vectors of the published algorithm, and pieces of any size. */
static void test_hash64_is_xxh64(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t value;
    } known[] = {
        {"", 0xEF46DB3751D8E999u}, {"a", 0xD24EC4F1A98C6E5Bu}, {"abc", 0x44BC2CF5AD770999u}};
    for (int i = 0; i < 3; i++) {
        ith_hash64 h;
        ith_hash64_init(&h);
        ith_hash64_update(&h, known[i].text, (int64_t)strlen(known[i].text));
        if (ith_hash64_value(&h) != known[i].value)
            fail_msg("\"%s\": %016llx, expected %016llx", known[i].text,
                     (unsigned long long)ith_hash64_value(&h), (unsigned long long)known[i].value);
    }
    unsigned char data[200];
    for (int i = 0; i < 200; i++)
        data[i] = (unsigned char)(i * 7);
    for (int64_t piece = 1; piece < 80; piece += 13) {
        ith_hash64 whole, parts;
        ith_hash64_init(&whole);
        ith_hash64_init(&parts);
        ith_hash64_update(&whole, data, 200);
        for (int64_t at = 0; at < 200; at += piece)
            ith_hash64_update(&parts, data + at, piece < 200 - at ? piece : 200 - at);
        assert_true(ith_hash64_value(&whole) == ith_hash64_value(&parts));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge_then_split_gives_every_byte_back),
        cmocka_unit_test(test_a_second_call_goes_on),
        cmocka_unit_test(test_mistakes_are_named_before_anything_is_written),
        cmocka_unit_test(test_hash64_is_xxh64),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
