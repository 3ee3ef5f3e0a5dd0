/* Goal: a written model directory is complete, names and dtypes are the source's, and what was not
 * trained comes through bit for bit. Method: a small source directory with every kind of file and
 * tensor; the reference directories where they are present. */
#include "testing.h"

#include "checkpoint/model_dir.h"

static char source[4200], target[4200];

static const char *path_in(const char *dir, const char *name)
{
    static char path[4][4500];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void put(const char *name, const char *text)
{
    ith_error err = {0};
    assert_ok(ith_write_file(path_in(source, name), text, (int64_t)strlen(text), &err), err);
}

static void assert_text(const char *name, const char *wanted)
{
    ith_error err = {0};
    ith_buf buf = {0};
    assert_ok(ith_read_file(path_in(target, name), 0, &buf, &err), err);
    assert_string_equal(buf.data, wanted);
    ith_buf_deinit(&buf);
}

static const char config[] = "{\n  \"rms_norm_eps\": 1e-06,\n  \"text_config\": {\n    \"dtype\": "
                             "\"bfloat16\",\n    \"mamba_ssm_dtype\": \"float32\"\n  },\n"
                             "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"bfloat16\",\n "
                             " \"unknown\": \"\\u00e9\"\n}\n";

static uint16_t embed[6] = {0x3f80, 0xbf80, 0x7fc1, 0x0001, 0x4000, 0x7f80};
static uint16_t head[6] = {1, 2, 3, 4, 5, 6}, mtp[3] = {7, 8, 9}, proj[2] = {0x3f81, 0x3f82};
static float a_log[2] = {1.00000012f, -2.5f};
static unsigned char flags[3] = {1, 0, 1};

/* bf16 model in two shards: tied with a stored duplicate, an fp32 tensor on purpose, mtp, bytes. */
static int set_up(void **state)
{
    (void)state;
    ith_error err = {0};
    snprintf(source, sizeof source, "%s", temp_dir("model-source"));
    snprintf(target, sizeof target, "%s/out/deep", temp_dir("model-target"));
    ith_st_entry t[] = {
        {.name = "lm_head.weight", .dtype = ITH_BF16, .ndim = 2, .shape = {3, 2}, .data = head},
        {.name = "model.embed_tokens.weight",
         .dtype = ITH_BF16,
         .ndim = 2,
         .shape = {3, 2},
         .data = embed},
        {.name = "model.layers.0.A_log", .dtype = ITH_F32, .ndim = 1, .shape = {2}, .data = a_log},
        {.name = "model.layers.0.proj", .dtype = ITH_BF16, .ndim = 1, .shape = {2}, .data = proj},
        {.name = "mtp.norm.weight", .dtype = ITH_BF16, .ndim = 1, .shape = {3}, .data = mtp},
        {.name = "flags", .dtype = ITH_BOOL, .ndim = 1, .shape = {3}, .data = flags},
    };
    assert_ok(ith_st_write(source, t, 6, &(ith_st_options){.max_shard_bytes = 24}, &err), err);
    put("config.json", config);
    put("generation_config.json", "{\"top_k\": 20}");
    put("tokenizer.json", "{}");
    put("chat_template.jinja", "{{ x }}");
    put("modeling_x.py", "pass\n");
    put("trainer_log.jsonl", "{}\n");
    put("README.md", "card");
    put("optimizer.bin", "x");
    assert_ok(ith_make_dirs(path_in(source, "additional_chat_templates"), &err), err);
    put("additional_chat_templates/tools.jinja", "t");
    assert_ok(ith_make_dirs(path_in(source, "tokenizer_dir"), &err),
              err); /* a folder: not copied */
    return 0;
}

static void assert_tensor(const ith_st_reader *r, const char *name, ith_dtype dtype,
                          const void *data, int64_t bytes)
{
    const ith_st_entry *t = ith_st_find(r, name);
    if (!t || t->dtype != dtype || t->bytes != bytes)
        fail_msg("%s: missing, or %s of %lld bytes, expected %s of %lld", name,
                 t ? ith_dtype_name(t->dtype) : "none", t ? (long long)t->bytes : 0LL,
                 ith_dtype_name(dtype), (long long)bytes);
    else
        assert_memory_equal(t->data, data, (size_t)bytes);
}

static void test_files_are_copied_and_strangers_are_not(void **state)
{
    (void)state;
    ith_error err = {0};
    assert_ok(ith_model_dir_copy_files(source, target, false, ITH_F32, &err), err);
    assert_text("config.json", config);
    assert_text("generation_config.json", "{\"top_k\": 20}");
    assert_text("tokenizer.json", "{}");
    assert_text("chat_template.jinja", "{{ x }}");
    assert_text("modeling_x.py", "pass\n");
    assert_text("additional_chat_templates/tools.jinja", "t");
    ith_names names;
    assert_ok(ith_list_dir(target, &names, &err), err);
    assert_int_equal(names.count, 6);
    ith_names_free(&names);
    static const char *const yes[] = {"tokenizer_config.json",
                                      "tokenizer.model",
                                      "vocab.json",
                                      "merges.txt",
                                      "special_tokens_map.json",
                                      "added_tokens.json",
                                      "chat_template.json",
                                      "preprocessor_config.json",
                                      "video_preprocessor_config.json",
                                      "processor_config.json",
                                      "qwen.tiktoken",
                                      "configuration_x.py",
                                      "LICENSE"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (!ith_model_dir_is_side_file(yes[i]))
            fail_msg("%s should be copied", yes[i]);
    static const char *const no[] = {"model.safetensors", "model.safetensors.index.json",
                                     "pytorch_model.bin", "trainer_state.json",
                                     "README.md",         ".gitattributes",
                                     "config.json",       "tokenizer.json.tmp-12",
                                     "loss.svg"};
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (ith_model_dir_is_side_file(no[i]))
            fail_msg("%s should not be copied", no[i]);
}

static void test_asked_dtype_changes_only_the_dtype_keys(void **state)
{
    (void)state;
    ith_error err = {0};
    assert_ok(ith_model_dir_copy_files(source, target, true, ITH_F32, &err), err);
    assert_text("config.json",
                "{\n  \"rms_norm_eps\": 1e-06,\n  \"text_config\": {\n    \"dtype\": "
                "\"float32\",\n    \"mamba_ssm_dtype\": \"float32\"\n  },\n"
                "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"float32\",\n  \"unknown\": "
                "\"\\u00e9\"\n}\n");
    put("config.json", "{\"model_type\": \"qwen3\"}");
    assert_ok(ith_model_dir_copy_files(source, target, true, ITH_F16, &err), err);
    assert_text("config.json", "{\"model_type\": \"qwen3\",\"torch_dtype\": \"float16\"}");
    assert_fails(ith_model_dir_copy_files(source, target, true, ITH_U8, &err), err, ITH_ERR_USAGE,
                 "weights cannot be written as U8");
}

static void test_source_directory_is_refused_by_any_name(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_model_write write = {.source = source};
    char link_path[4400];
    snprintf(link_path, sizeof link_path, "%s/../link-%ld", source, (long)getpid());
    unlink(link_path);
    assert_int_equal(symlink(ith_path_base(source), link_path), 0);
    const char *ways[] = {source, path_in(source, "."), link_path};
    for (int i = 0; i < 3; i++) {
        assert_fails(ith_model_dir_write(ways[i], &write, &err), err, ITH_ERR_USAGE,
                     "is the directory the model was read from");
        assert_fails(ith_model_dir_copy_files(source, ways[i], false, ITH_F32, &err), err,
                     ITH_ERR_USAGE, "write to another one");
    }
    unlink(link_path);
}

static void test_pure_copy_keeps_every_tensor_bit_for_bit(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *in = NULL, *out = NULL;
    assert_ok(ith_st_open(&in, source, &err), err);
    assert_ok(
        ith_model_dir_write(target, &(ith_model_write){.source = source, .weights = in}, &err),
        err);
    assert_ok(ith_st_open(&out, target, &err), err);
    assert_int_equal(ith_st_count(out), ith_st_count(in));
    for (int64_t i = 0; i < ith_st_count(in); i++)
        assert_tensor(out, ith_st_at(in, i)->name, ith_st_at(in, i)->dtype, ith_st_at(in, i)->data,
                      ith_st_at(in, i)->bytes);
    ith_st_close(in);
    ith_st_close(out);
}

/* The caller trains in fp32 and holds embedding and proj; data comes element by element, from the
 * last one on. */
typedef struct {
    const ith_st_entry *tensors;
    int64_t calls;
} putter;

static ith_status put_backwards(void *arg, int64_t i, ith_model_sink *sink, ith_error *err)
{
    putter *p = arg;
    p->calls++;
    for (int64_t at = ith_st_numel(&p->tensors[i]) - 1; at >= 0; at--)
        ITH_TRY(ith_model_put(sink, at, (const float *)p->tensors[i].data + at, 1, err));
    return ITH_OK;
}

static void test_trained_tensors_take_the_source_dtype_and_a_tied_duplicate_goes(void **state)
{
    (void)state;
    ith_error err = {0};
    static const float new_embed[6] = {1, 2, 3, 4, 5, 6.001f}, new_proj[2] = {1.00390625f, 0.5f},
                       extra[1] = {3};
    static const uint16_t embed_bf16[6] = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0},
                          proj_bf16[2] = {0x3f80, 0x3f00};
    ith_st_entry t[] = {
        {.name = "model.embed_tokens.weight",
         .dtype = ITH_F32,
         .ndim = 2,
         .shape = {3, 2},
         .data = new_embed},
        {.name = "extra.weight", .dtype = ITH_F32, .ndim = 1, .shape = {1}, .data = extra},
        {.name = "model.layers.0.proj",
         .dtype = ITH_F32,
         .ndim = 1,
         .shape = {2},
         .data = new_proj},
    };
    ith_st_reader *in = NULL, *out = NULL;
    assert_ok(ith_st_open(&in, source, &err), err);
    for (int way = 0; way < 2; way++) {
        putter p = {t, 0};
        ith_model_write write = {.source = source,
                                 .weights = in,
                                 .tensors = t,
                                 .count = 3,
                                 .max_shard_bytes = way ? 16 : 0};
        if (way) {
            write.put = put_backwards;
            write.put_arg = &p;
            write.chat_template = "other {{ x }}";
        }
        assert_ok(ith_model_dir_write(target, &write, &err), err);
        assert_text("chat_template.jinja", way ? "other {{ x }}" : "{{ x }}");
        assert_int_equal(p.calls, way ? 3 : 0);
        assert_ok(ith_st_open(&out, target, &err), err);
        assert_int_equal(ith_st_count(out), 6); /* six of the source, less the head, plus extra */
        assert_null(ith_st_find(out, "lm_head.weight"));
        assert_tensor(out, "model.embed_tokens.weight", ITH_BF16, embed_bf16, 12);
        assert_tensor(out, "model.layers.0.proj", ITH_BF16, proj_bf16, 4); /* ties to even */
        assert_tensor(out, "model.layers.0.A_log", ITH_F32, a_log, 8);
        assert_tensor(out, "mtp.norm.weight", ITH_BF16, mtp, 6);
        assert_tensor(out, "flags", ITH_BOOL, flags, 3);
        assert_tensor(out, "extra.weight", ITH_F32, extra, 4);
        ith_st_close(out);
    }
    ith_st_close(in);
}

static void test_asked_dtype_converts_the_main_type_only(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *in = NULL, *out = NULL;
    static const float mtp_f32[3] = {6.42847e-40f, 7.34683e-40f, 8.26518e-40f};
    float embed_f32[6];
    ith_convert(embed_f32, ITH_F32, embed, ITH_BF16, 6);
    assert_ok(ith_st_open(&in, source, &err), err);
    assert_ok(ith_model_dir_write(
                  target,
                  &(ith_model_write){
                      .source = source, .weights = in, .set_dtype = true, .dtype = ITH_F32},
                  &err),
              err);
    assert_ok(ith_st_open(&out, target, &err), err);
    assert_tensor(out, "model.embed_tokens.weight", ITH_F32, embed_f32, 24);
    assert_int_equal(ith_st_find(out, "mtp.norm.weight")->bytes, 12);
    float got[3];
    memcpy(got, ith_st_find(out, "mtp.norm.weight")->data, sizeof got);
    assert_true(got[1] > 0.99f * mtp_f32[1] && got[1] < 1.01f * mtp_f32[1]);
    ith_st_close(out);
    assert_ok(ith_model_dir_write(
                  target,
                  &(ith_model_write){
                      .source = source, .weights = in, .set_dtype = true, .dtype = ITH_F16},
                  &err),
              err);
    assert_ok(ith_st_open(&out, target, &err), err);
    assert_int_equal(ith_st_find(out, "model.embed_tokens.weight")->dtype, ITH_F16);
    assert_tensor(out, "model.layers.0.A_log", ITH_F32, a_log, 8); /* fp32 on purpose */
    assert_tensor(out, "flags", ITH_BOOL, flags, 3);
    ith_st_close(out);
    ith_st_close(in);
}

static void test_wrong_shapes_and_types_fail_before_any_file(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *in = NULL;
    ith_st_entry t = {
        .name = "model.layers.0.proj", .dtype = ITH_F32, .ndim = 1, .shape = {3}, .data = a_log};
    ith_model_write write = {.source = source, .tensors = &t, .count = 1};
    assert_ok(ith_st_open(&in, source, &err), err);
    write.weights = in;
    assert_fails(ith_model_dir_write(target, &write, &err), err, ITH_ERR_FORMAT,
                 "model.layers.0.proj: shape is [2] BF16, [3] F32 is to be written");
    t.shape[0] = 2;
    t.dtype = ITH_I32;
    assert_fails(ith_model_dir_write(target, &write, &err), err, ITH_ERR_UNSUPPORTED,
                 "I32 cannot be written as BF16");
    assert_false(ith_path_exists(target));
    ith_st_close(in);
}

static void test_new_model_without_source_weights(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *out = NULL;
    ith_st_entry t = {.name = "w", .dtype = ITH_F32, .ndim = 1, .shape = {2}, .data = a_log};
    assert_ok(
        ith_model_dir_write(
            target,
            &(ith_model_write){
                .source = source, .tensors = &t, .count = 1, .set_dtype = true, .dtype = ITH_BF16},
            &err),
        err);
    assert_ok(ith_st_open(&out, target, &err), err);
    assert_int_equal(ith_st_count(out), 1);
    assert_int_equal(ith_st_find(out, "w")->dtype, ITH_BF16);
    ith_st_close(out);
}

static void test_every_failure_leaves_the_old_model_or_the_new(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_st_reader *in = NULL;
    static const float trained[2] = {0.5f, 0.25f};
    ith_st_entry t = {
        .name = "model.layers.0.proj", .dtype = ITH_F32, .ndim = 1, .shape = {2}, .data = trained};
    assert_ok(ith_st_open(&in, source, &err), err);
    ith_model_write old = {.source = source, .weights = in},
                    fresh = {.source = source, .weights = in, .tensors = &t, .count = 1};
    assert_ok(ith_model_dir_write(target, &old, &err), err);
    static const ith_fault_kind kinds[] = {ITH_FAULT_ALLOC, ITH_FAULT_READ, ITH_FAULT_WRITE};
    for (int k = 0; k < 3; k++)
        for (int64_t n = 1;; n++) {
            ith_error_clear(&err);
            ith_fault_set(kinds[k], n);
            ith_status status = ith_model_dir_write(target, &fresh, &err);
            int64_t seen = ith_fault_count(kinds[k]);
            ith_fault_set(kinds[k], 0);
            ith_error why = {0};
            ith_st_reader *out = NULL;
            assert_ok(ith_st_open(&out, target, &why), why); /* one file: never absent */
            uint16_t got;
            memcpy(&got, ith_st_find(out, t.name)->data, sizeof got);
            ith_st_close(out);
            if (seen < n) {
                assert_int_equal(status, ITH_OK);
                assert_int_equal(got, 0x3f00);
                break;
            }
            if (status == ITH_OK || !err.text[0])
                fail_msg("kind %d, n %lld: status %d, text '%s'", k, (long long)n, (int)status,
                         err.text);
            assert_true(got == 0x3f81 || got == 0x3f00);
        }
    ith_st_close(in);
}

static void test_reference_directories_round_trip(void **state)
{
    (void)state;
    static const char *const names[] = {"qwen3",       "qwen3_tied", "qwen3_moe", "qwen3_5_text",
                                        "qwen3_5_moe", "qwen3_5_mm", "llada2"};
    shared_path("golden");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ith_error err = {0};
        char name[96], from[4200];
        ith_st_reader *in = NULL, *out = NULL;
        snprintf(name, sizeof name, "golden/%s/hf", names[i]);
        snprintf(from, sizeof from, "%s", shared_path(name));
        snprintf(target, sizeof target, "%s", temp_dir("model-target"));
        assert_ok(ith_st_open(&in, from, &err), err);
        assert_ok(ith_model_dir_write(
                      target,
                      &(ith_model_write){.source = from, .weights = in, .max_shard_bytes = 100000},
                      &err),
                  err);
        assert_ok(ith_st_open(&out, target, &err), err);
        assert_true(ith_st_num_files(out) > 1);
        assert_int_equal(ith_st_count(out), ith_st_count(in));
        for (int64_t k = 0; k < ith_st_count(in); k++)
            assert_tensor(out, ith_st_at(in, k)->name, ith_st_at(in, k)->dtype,
                          ith_st_at(in, k)->data, ith_st_at(in, k)->bytes);
        ith_st_close(in);
        ith_st_close(out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_files_are_copied_and_strangers_are_not, set_up),
        cmocka_unit_test_setup(test_asked_dtype_changes_only_the_dtype_keys, set_up),
        cmocka_unit_test_setup(test_source_directory_is_refused_by_any_name, set_up),
        cmocka_unit_test_setup(test_pure_copy_keeps_every_tensor_bit_for_bit, set_up),
        cmocka_unit_test_setup(test_trained_tensors_take_the_source_dtype_and_a_tied_duplicate_goes,
                               set_up),
        cmocka_unit_test_setup(test_asked_dtype_converts_the_main_type_only, set_up),
        cmocka_unit_test_setup(test_wrong_shapes_and_types_fail_before_any_file, set_up),
        cmocka_unit_test_setup(test_new_model_without_source_weights, set_up),
        cmocka_unit_test_setup(test_every_failure_leaves_the_old_model_or_the_new, set_up),
        cmocka_unit_test_setup(test_reference_directories_round_trip, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
