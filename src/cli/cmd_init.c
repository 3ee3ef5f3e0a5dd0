/* cmd_init.c - `ithaca init`: a model directory with random weights, tokenizer and chat template
 * included. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/json_edit.h"
#include "checkpoint/model_dir.h"
#include "cli/commands.h"
#include "config/yaml.h"
#include "model/model.h"
#include "model/presets.h"
#include "tokenizer/tokenizer.h"

#define CHUNK_ELEMENTS ((int64_t)1 << 20)

/* A plain ChatML template with thinking, for directories whose tokenizer brings none. */
static const char default_template[] =
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.role == 'assistant' and message.reasoning_content is defined and "
    "message.reasoning_content %}\n"
    "        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "    {%- if message.tool_calls is defined and message.tool_calls or message.role == 'tool' %}\n"
    "        {{- raise_exception('this template has no form for tools') }}\n"
    "    {%- endif %}\n"
    "    {%- if message.content is string %}\n"
    "        {{- message.content }}\n"
    "    {%- else %}\n"
    "        {%- for item in message.content %}\n"
    "            {%- if item.type == 'image' %}\n"
    "                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}\n"
    "            {%- elif item.type == 'video' %}\n"
    "                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}\n"
    "            {%- else %}\n"
    "                {{- item.text }}\n"
    "            {%- endif %}\n"
    "        {%- endfor %}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n";

static ith_status write_text(const char *dir, const char *name, const char *text, int64_t len,
                             ith_error *err)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    ith_status status = ith_buf_check(&path, dir, err);
    if (status == ITH_OK)
        status = ith_write_file(path.data, text, len, err);
    ith_buf_deinit(&path);
    return status;
}

/* Copies the tokenizer of another directory, or learns one from a text. */
static ith_status make_tokenizer(const ith_args *args, const char *dir, ith_error *err)
{
    static const char *const plain[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>",
                                        "<think>",       "</think>",     "<|mask|>"};
    static const char *const seeing[] = {"<|endoftext|>",  "<|im_start|>",  "<|im_end|>",
                                         "<think>",        "</think>",      "<|vision_start|>",
                                         "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"};
    bool preset = !ith_args_text(args, "config");
    bool masks = preset && ith_preset_is_diffusion(ith_args_word(args, "size"));
    bool sees = preset && ith_preset_sees(ith_args_word(args, "size"));
    const char *from = ith_args_text(args, "tokenizer"), *learn = ith_args_text(args, "learn");
    if (!from == !learn)
        return ith_fail(err, ITH_ERR_USAGE,
                        "init: give either --tokenizer DIR (copied) or --learn TEXT_FILE (a new "
                        "one is learned)");
    if (learn) {
        ith_buf text = {0};
        ith_status status = ith_read_file(learn, (int64_t)1 << 32, &text, err);
        if (status == ITH_OK)
            status = ith_bpe_train(text.data, text.len, ith_args_int(args, "vocab-size"),
                                   sees ? seeing : plain,
                                   sees    ? 9
                                   : masks ? 6
                                           : 5,
                                   dir, err);
        ith_buf_deinit(&text);
        return status;
    }
    ith_names names;
    ITH_TRY(ith_model_dir_check(from, ITH_DIR_TOKENIZER, err));
    ITH_TRY(ith_list_dir(from, &names, err));
    ith_buf src = {0}, dst = {0};
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        if (!ith_model_dir_is_side_file(names.names[i]) ||
            strcmp(names.names[i], "config.json") == 0)
            continue;
        ith_path_join(&src, from, names.names[i]);
        ith_path_join(&dst, dir, names.names[i]);
        status = src.failed || dst.failed ? ith_fail(err, ITH_ERR_MEMORY, "out of memory")
                                          : ith_copy_file(src.data, dst.data, err);
    }
    ith_buf_deinit(&src);
    ith_buf_deinit(&dst);
    ith_names_free(&names);
    return status;
}

/* A chat template of our own where the directory has none. */
static ith_status ensure_template(const char *dir, ith_error *err)
{
    ith_buf path = {0};
    json_t *config = NULL;
    ith_path_join(&path, dir, "chat_template.jinja");
    ITH_TRY(ith_buf_check(&path, dir, err));
    bool have = ith_path_exists(path.data);
    ith_path_join(&path, dir, "tokenizer_config.json");
    ith_status status = ith_buf_check(&path, dir, err);
    if (status == ITH_OK && !have && ith_path_exists(path.data)) {
        status = ith_json_load(&config, path.data, err);
        have = json_object_get(config, "chat_template") != NULL;
        json_decref(config);
    }
    ith_buf_deinit(&path);
    if (status == ITH_OK && !have)
        status = write_text(dir, "chat_template.jinja", default_template,
                            (int64_t)sizeof default_template - 1, err);
    return status;
}

typedef struct {
    const ith_model *model;
    const ith_hf_piece *piece;
    uint64_t seed;
    int64_t first;
    ith_dtype dtype;
    float *values;
    char *bytes;
} init_job;

static void init_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const init_job *j = arg;
    (void)thread;
    ith_model_init_piece(j->model, j->piece, j->seed, j->first + begin, end - begin,
                         j->values + begin);
    ith_convert(j->bytes + begin * ith_dtype_bytes(j->dtype), j->dtype, j->values + begin, ITH_F32,
                end - begin);
}

static ith_status write_piece(init_job *j, ith_pool *pool, ith_st_writer *w, ith_error *err)
{
    for (j->first = 0; j->first < j->piece->count;) {
        int64_t n = ith_min_i64(CHUNK_ELEMENTS, j->piece->count - j->first);
        ith_pool_for(pool, n, 8192, init_task, j);
        ITH_TRY(ith_st_writer_push(w, j->bytes, n * ith_dtype_bytes(j->dtype), err));
        j->first += n;
    }
    return ITH_OK;
}

static ith_status write_weights(const ith_model *m, const char *dir, ith_dtype dtype, uint64_t seed,
                                ith_error *err)
{
    ith_st_entry *tensors = NULL;
    ith_st_writer *w = NULL;
    ith_pool *pool = NULL;
    float *values = NULL;
    char *bytes = NULL;
    int64_t all = m->num_pieces + m->num_buffers;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_pool_create(&pool, 0, err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&tensors, all, sizeof *tensors, "tensor list", err));
    ITH_TRY_OUT(ith_alloc((void **)&values, CHUNK_ELEMENTS * 4, "weights", err));
    ITH_TRY_OUT(ith_alloc((void **)&bytes, CHUNK_ELEMENTS * 4, "weights", err));
    for (int64_t i = 0; i < m->num_pieces; i++) {
        tensors[i] = (ith_st_entry){.name = m->pieces[i].hf_name,
                                    .dtype = m->params[m->pieces[i].param].is_f32 ? ITH_F32 : dtype,
                                    .ndim = m->pieces[i].ndim};
        memcpy(tensors[i].shape, m->pieces[i].shape, sizeof m->pieces[i].shape);
    }
    for (int64_t i = 0; i < m->num_buffers; i++) { /* zeros, f32 as published */
        const ith_hf_buffer *b = &m->buffer_list[i];
        tensors[m->num_pieces + i] =
            (ith_st_entry){.name = b->hf_name, .dtype = ITH_F32, .ndim = 1, .shape = {b->count}};
    }
    ITH_TRY_OUT(ith_st_writer_create(&w, dir, tensors, all, NULL, err));
    for (int64_t i = ith_st_writer_next(w); i >= 0; i = ith_st_writer_next(w)) {
        if (i < m->num_pieces) {
            init_job j = {m, &m->pieces[i], seed, 0, tensors[i].dtype, values, bytes};
            ITH_TRY_OUT(write_piece(&j, pool, w, err));
            continue;
        }
        int64_t n = m->buffer_list[i - m->num_pieces].count;
        ITH_ASSERT(n <= CHUNK_ELEMENTS);
        memset(values, 0, (size_t)n * 4);
        ITH_TRY_OUT(ith_st_writer_push(w, values, n * 4, err));
    }
    status = ith_st_writer_commit(w, err);
out:
    ith_st_writer_destroy(w);
    ith_pool_destroy(pool);
    ith_free(tensors);
    ith_free(values);
    ith_free(bytes);
    return status;
}

/* One key=value. Models have keys that we do not know, but one that is nearly a key which is there
 * is a slip of the pen. */
static ith_status change_config(ith_buf *text, const char *change, ith_error *err)
{
    const char *eq = strchr(change, '='), *names[64], *near = NULL;
    char key[128];
    int n = 0;
    json_t *config = NULL, *value = NULL;
    if (!eq || eq - change >= (int)sizeof key)
        return ith_fail(err, ITH_ERR_USAGE, "init: %s is not key=value", change);
    snprintf(key, sizeof key, "%.*s", (int)(eq - change), change);
    ITH_TRY(ith_json_parse(&config, text->data, text->len, "config.json", err));
    const char *name = NULL;
    json_object_foreach(config, name, value) if (n < 64) names[n++] = name;
    if (!json_object_get(config, key) && !strchr(key, '.'))
        near = ith_nearest_name(key, names, n);
    ith_status status =
        near ? ith_fail(err, ITH_ERR_USAGE, "init: %s: unknown key (did you mean %s?)", key, near)
             : ITH_OK;
    json_decref(config);
    return status == ITH_OK ? ith_json_edit_set(text, key, eq + 1, err) : status;
}

/* config.json from a file or a preset, with key=value changes; *text owned by the caller. */
static ith_status make_config(const ith_args *args, const char *dir, ith_dtype dtype, ith_buf *text,
                              ith_error *err)
{
    const char *file = ith_args_text(args, "config");
    if (file) {
        ITH_TRY(ith_read_file(file, (int64_t)1 << 24, text, err));
    } else {
        ith_tokenizer *tok = NULL;
        json_t *config = NULL;
        ITH_TRY(ith_tokenizer_open(&tok, dir, err));
        int64_t size = ith_tokenizer_size(tok),
                vocab = size > 140000 ? 151936 : ith_round_up(size, 64);
        int32_t eos = ith_tokenizer_find(tok, "<|im_end|>");
        int64_t mask = ith_tokenizer_find(tok, "<|mask|>");
        static const char *const media_keys[] = {"vision_start_token_id", "vision_end_token_id",
                                                 "image_token_id", "video_token_id"};
        const int32_t media_ids[] = {
            ith_tokenizer_find(tok, "<|vision_start|>"), ith_tokenizer_find(tok, "<|vision_end|>"),
            ith_tokenizer_find(tok, "<|image_pad|>"), ith_tokenizer_find(tok, "<|video_pad|>")};
        ith_tokenizer_close(tok);
        if (ith_preset_sees(ith_args_word(args, "size")) && media_ids[2] < 0)
            return ith_fail(err, ITH_ERR_USAGE,
                            "init: the tokenizer has no <|image_pad|>, which this size needs (give "
                            "that of a Qwen3 or Qwen3.5 model)");
        ITH_TRY(ith_preset_config(ith_args_word(args, "size"),
                                  ith_max_i64(vocab, ith_round_up(size, 64)), eos, dtype, &config,
                                  err));
        if (ith_preset_is_diffusion(ith_args_word(args, "size"))) {
            int64_t last = json_integer_value(json_object_get(config, "vocab_size")) - 1;
            json_object_set_new(config, "mask_token_id", json_integer(mask >= 0 ? mask : last));
        }
        if (ith_preset_sees(ith_args_word(args, "size")))
            for (int i = 0; i < 4; i++)
                json_object_set_new(config, media_keys[i], json_integer(media_ids[i]));
        char *dump = json_dumps(config, JSON_INDENT(2));
        json_decref(config);
        if (!dump)
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory for config.json");
        ith_buf_puts(text, dump);
        ith_buf_puts(text, "\n");
        ith_free(dump);
    }
    for (int i = 1; i < args->num_positional; i++)
        ITH_TRY(change_config(text, args->positional[i], err));
    return ith_buf_check(text, "config.json", err);
}

/* The processor files of a model that sees, where the tokenizer's directory brought none. */
static ith_status write_processors(const ith_args *args, const char *dir, ith_error *err)
{
    static const char *const names[] = {"preprocessor_config.json",
                                        "video_preprocessor_config.json"};
    int preset = ith_args_word(args, "size");
    ith_status status = ITH_OK;
    if (ith_args_text(args, "config") || !ith_preset_sees(preset))
        return ITH_OK;
    for (int i = 0; i < 2 && status == ITH_OK; i++) {
        ith_buf path = {0};
        json_t *json = NULL;
        ith_path_join(&path, dir, names[i]);
        status = ith_buf_check(&path, dir, err);
        if (status == ITH_OK && !ith_path_exists(path.data)) {
            status = ith_preset_processor(preset, i == 1, &json, err);
            char *dump = status == ITH_OK ? json_dumps(json, JSON_INDENT(2)) : NULL;
            if (status == ITH_OK)
                status = dump ? write_text(dir, names[i], dump, (int64_t)strlen(dump), err)
                              : ith_fail(err, ITH_ERR_MEMORY, "out of memory for %s", names[i]);
            ith_free(dump);
            json_decref(json);
        }
        ith_buf_deinit(&path);
    }
    return status;
}

static ith_status check_vocabulary(const char *dir, const ith_hf_config *config, ith_error *err)
{
    ith_tokenizer *tok = NULL;
    ITH_TRY(ith_tokenizer_open(&tok, dir, err));
    int64_t size = ith_tokenizer_size(tok);
    ith_tokenizer_close(tok);
    return size <= config->vocab_size
               ? ITH_OK
               : ith_fail(err, ITH_ERR_USAGE,
                          "init: vocab_size: found %lld, the tokenizer has %lld tokens",
                          (long long)config->vocab_size, (long long)size);
}

static ith_status init(const ith_args *args, const char *dir, ith_error *err)
{
    ith_dtype dtype = ith_args_word(args, "dtype") == 1 ? ITH_F32 : ITH_BF16;
    ith_buf text = {0};
    ith_hf_config config = {0};
    ith_model *model = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_make_dirs(dir, err));
    ITH_TRY_OUT(make_tokenizer(args, dir, err));
    ITH_TRY_OUT(ensure_template(dir, err));
    ITH_TRY_OUT(make_config(args, dir, dtype, &text, err));
    ITH_TRY_OUT(ith_hf_config_parse(&config, text.data, text.len, "config.json", err));
    ITH_TRY_OUT(check_vocabulary(dir, &config, err));
    ITH_TRY_OUT((config.vision.hidden_size ? ith_model_create_multimodal
                                           : ith_model_create)(&model, &config, dtype, 1, err));
    ITH_TRY_OUT(write_weights(model, dir, dtype, (uint64_t)ith_args_int(args, "seed"), err));
    ITH_TRY_OUT(write_processors(args, dir, err));
    ITH_TRY_OUT(write_text(dir, "config.json", text.data, text.len, err));
    printf("%s: %s, %.3g parameters, vocabulary %lld\n", dir, config.model_type,
           (double)model->num_weights, (long long)config.vocab_size);
out:
    ith_model_destroy(model);
    ith_hf_config_deinit(&config);
    ith_buf_deinit(&text);
    return status;
}

static ith_status run_init(const ith_args *args, ith_error *err)
{
    const char *dir = args->positional[0];
    bool is_new = !ith_path_exists(dir);
    for (int i = 1; i < args->num_positional; i++)
        if (!strchr(args->positional[i], '='))
            return ith_fail(err, ITH_ERR_USAGE, "init: %s is not key=value", args->positional[i]);
    if (ith_path_is_dir(dir)) {
        ith_names names;
        ITH_TRY(ith_list_dir(dir, &names, err));
        bool empty = names.count == 0;
        ith_names_free(&names);
        if (!empty && !ith_args_flag(args, "force"))
            return ith_fail(err, ITH_ERR_USAGE, "init: %s is not empty (--force writes into it)",
                            dir);
    }
    ith_status status = init(args, dir, err);
    if (status != ITH_OK && is_new) { /* nothing half written */
        ith_error ignored = {0};
        (void)ith_remove_tree(dir, &ignored);
    }
    return status;
}

static const ith_option options[] = {{.name = "size",
                                      .letter = 's',
                                      .type = ITH_OPTION_WORD,
                                      .default_text = "small",
                                      .help = "Shape of a Qwen3, Qwen3.5 or LLaDA2 model.",
                                      .words = ith_preset_words},
                                     {.name = "config",
                                      .letter = 'c',
                                      .type = ITH_OPTION_PATH,
                                      .help = "A config.json to follow instead of a size."},
                                     {.name = "tokenizer",
                                      .letter = 't',
                                      .type = ITH_OPTION_PATH,
                                      .help = "Model directory whose tokenizer is copied."},
                                     {.name = "learn",
                                      .letter = 'l',
                                      .type = ITH_OPTION_PATH,
                                      .help = "Text file from which a byte-level BPE is learned."},
                                     {.name = "vocab-size",
                                      .type = ITH_OPTION_INT,
                                      .default_text = "2048",
                                      .help = "Tokens of a learned tokenizer.",
                                      .min = 300,
                                      .max = 1000000},
                                     {.name = "dtype",
                                      .type = ITH_OPTION_WORD,
                                      .default_text = "bfloat16",
                                      .help = "Type of the weights.",
                                      .words = "bfloat16 float32"},
                                     {.name = "seed",
                                      .type = ITH_OPTION_INT,
                                      .default_text = "42",
                                      .help = "Seed of the weights.",
                                      .min = 0,
                                      .max = 9e15},
                                     {.name = "force",
                                      .letter = 'f',
                                      .type = ITH_OPTION_FLAG,
                                      .help = "Write into a directory that is not empty."},
                                     {.name = NULL}};

const ith_command ith_cmd_init = {.name = "init",
                                  .arguments = "OUTPUT [key=value ...]",
                                  .summary = "Make a model directory with random weights",
                                  .details = "key=value changes keys of config.json: ithaca init "
                                             "/tmp/m --learn book.txt num_hidden_layers=6\n",
                                  .options = options,
                                  .min_positional = 1,
                                  .max_positional = -1,
                                  .takes_overrides = true,
                                  .run = run_init};
