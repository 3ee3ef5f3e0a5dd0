/* api_model.c - the part of include/ithaca.h that generates text. */
#include <stdio.h>
#include <string.h>

#include "api/api_internal.h"
#include "generate/decoder.h"
#include "tokenizer/chat.h"

#define MAX_STOP_IDS (ITH_HF_MAX_STOP_IDS + 1)
#define DEFAULT_CONTEXT 4096
#define DEFAULT_NEW_TOKENS 512

struct ithaca_model {
    ith_error err; /* the decoder keeps its address */
    ith_hf_generation defaults;
    ith_tokenizer *tokenizer;
    ith_chat *chat;
    ith_decoder decoder;
    int32_t stop_ids[MAX_STOP_IDS];
    int num_stop_ids;
};

void ithaca_model_options_init(ithaca_model_options *options)
{
    *options =
        (ithaca_model_options){.device = "auto", .dtype = "auto", .context = DEFAULT_CONTEXT};
}

static ith_status word(const char *what, const char *value, const char *const *words, int num,
                       int *out, ith_error *err)
{
    for (int i = 0; i < num; i++)
        if (value && strcmp(value, words[i]) == 0) {
            *out = i;
            return ITH_OK;
        }
    return ith_fail(err, ITH_ERR_USAGE, "%s: '%.60s' (use %s, %s or %s)", what,
                    value ? value : "(null)", words[0], words[1], words[2]);
}

static ith_status decoder_options(const ithaca_model_options *o, ith_decoder_options *out,
                                  ith_error *err)
{
    static const char *const devices[] = {"auto", "cpu", "cuda"};
    static const char *const dtypes[] = {"auto", "bfloat16", "float32"};
    static const ith_use_device use[] = {ITH_USE_AUTO, ITH_USE_CPU, ITH_USE_CUDA};
    int device = 0, dtype = 0;
    ITH_TRY(word("device", o->device, devices, 3, &device, err));
    ITH_TRY(word("dtype", o->dtype, dtypes, 3, &dtype, err));
    if (o->threads < 0 || o->context < 2)
        return ith_fail(err, ITH_ERR_USAGE,
                        "threads %d, context %lld: threads are 0 or more, a context is 2 or more",
                        o->threads, (long long)o->context);
    *out = (ith_decoder_options){.device = use[device],
                                 .threads = o->threads,
                                 .set_dtype = dtype > 0,
                                 .dtype = dtype == 2 ? ITH_F32 : ITH_BF16,
                                 .batch = 1,
                                 .capacity = o->context,
                                 .max_append = o->context};
    return ITH_OK;
}

static void add_stop(ithaca_model *m, int64_t id)
{
    for (int i = 0; i < m->num_stop_ids; i++)
        if (m->stop_ids[i] == id)
            return;
    if (id >= 0 && m->num_stop_ids < MAX_STOP_IDS)
        m->stop_ids[m->num_stop_ids++] = (int32_t)id;
}

/* Of the generation config, else of the config; and the tokenizer's own. */
static void collect_stops(ithaca_model *m)
{
    const ith_hf_generation *g = &m->defaults;
    const ith_hf_config *c = &m->decoder.hf;
    for (int i = 0; i < g->num_eos_token_ids; i++)
        add_stop(m, g->eos_token_ids[i]);
    for (int i = 0; g->num_eos_token_ids == 0 && i < c->num_eos_token_ids; i++)
        add_stop(m, c->eos_token_ids[i]);
    add_stop(m, ith_tokenizer_eos(m->tokenizer));
}

static ith_status open_parts(ithaca_model *m, const char *dir, const ithaca_model_options *options)
{
    ith_decoder_options d;
    ith_error *err = &m->err;
    ITH_TRY(decoder_options(options, &d, err));
    ITH_TRY(ith_hf_generation_load(&m->defaults, dir, err));
    ITH_TRY(ith_tokenizer_open(&m->tokenizer, dir, err));
    ITH_TRY(ith_chat_open(&m->chat, dir, NULL, m->tokenizer, err));
    ITH_TRY(ith_decoder_open(&m->decoder, dir, &d, err));
    collect_stops(m);
    return ITH_OK;
}

ithaca_status ithaca_model_open(ithaca_model **out, const char *dir,
                                const ithaca_model_options *options, ithaca_error *err)
{
    ithaca_model_options defaults;
    ithaca_model *m = NULL;
    ith_error e = {0};
    ithaca_model_options_init(&defaults);
    ith_status status = ith_alloc_zero((void **)&m, 1, sizeof *m, "model", &e);
    if (status != ITH_OK)
        return ith_api_status(status, &e, err);
    status = open_parts(m, dir, options ? options : &defaults);
    ithaca_status result = ith_api_status(status, &m->err, err);
    if (status == ITH_OK)
        *out = m;
    else
        ithaca_model_close(m);
    return result;
}

void ithaca_model_close(ithaca_model *model)
{
    if (!model)
        return;
    ith_decoder_close(&model->decoder);
    ith_chat_close(model->chat);
    ith_tokenizer_close(model->tokenizer);
    ith_free(model);
}

void ithaca_sampling_init(const ithaca_model *model, ithaca_sampling *sampling)
{
    const ith_hf_generation *g = &model->defaults;
    *sampling = (ithaca_sampling){.max_new_tokens = DEFAULT_NEW_TOKENS,
                                  .do_sample = g->do_sample,
                                  .temperature = g->temperature,
                                  .top_k = g->top_k,
                                  .top_p = g->top_p,
                                  .min_p = g->min_p,
                                  .repetition_penalty = g->repetition_penalty,
                                  .seed = 42,
                                  .thinking = -1};
}

/* ---- answers ---- */

typedef struct {
    ithaca_model *model;
    ith_token_stream stream;
    ith_buf text;
    ithaca_text_fn fn;
    void *arg;
    ithaca_answer answer;
    ith_status status;
} collector;

/* Hands the text of c->text over and empties it; false: enough. */
static bool hand_over(collector *c)
{
    bool more = c->text.len == 0 || !c->fn || c->fn(c->arg, c->text.data, (size_t)c->text.len);
    ith_buf_clear(&c->text);
    return more;
}

static bool on_token(void *arg, int64_t i, int32_t id, bool is_stop)
{
    collector *c = arg;
    (void)i;
    if (is_stop) {
        c->answer.stopped = true;
        return false;
    }
    c->answer.new_tokens++;
    c->status = ith_token_stream_push(&c->stream, id, &c->text, &c->model->err);
    if (c->status == ITH_OK)
        c->status = ith_buf_check(&c->text, "answer", &c->model->err);
    return c->status == ITH_OK && hand_over(c);
}

static ith_status answer(ithaca_model *m, const ith_ids *prompt, const ithaca_sampling *s,
                         collector *c)
{
    ith_error *err = &m->err;
    if (prompt->count == 0)
        return ith_fail(err, ITH_ERR_USAGE, "the prompt is empty");
    if (prompt->count >= m->decoder.options.capacity)
        return ith_fail(err, ITH_ERR_USAGE,
                        "the prompt has %lld tokens, a context of %lld leaves no room for an "
                        "answer",
                        (long long)prompt->count, (long long)m->decoder.options.capacity);
    if (s->max_new_tokens < 1)
        return ith_fail(err, ITH_ERR_USAGE, "max_new_tokens: %lld (1 or more)",
                        (long long)s->max_new_tokens);
    ith_generate_options how = {.sampling = {s->do_sample, s->temperature, s->top_k, s->top_p,
                                             s->min_p, s->repetition_penalty, s->seed},
                                .stop_ids = m->stop_ids,
                                .num_stop_ids = m->num_stop_ids,
                                .max_new = s->max_new_tokens,
                                .token = on_token,
                                .arg = c};
    c->answer.prompt_tokens = prompt->count;
    ith_token_stream_init(&c->stream, m->tokenizer, true);
    ITH_TRY(ith_decoder_generate(&m->decoder, prompt, 1, &how, err));
    ITH_TRY(c->status);
    ITH_TRY(ith_token_stream_flush(&c->stream, &c->text, err));
    hand_over(c);
    return ITH_OK;
}

static ith_status chat_prompt(ithaca_model *m, const ithaca_message *messages, size_t num,
                              int thinking, ith_ids *out)
{
    ith_error *err = &m->err;
    ith_buf text = {0};
    json_t *list = json_array();
    ith_status status =
        list ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory for the messages");
    for (size_t i = 0; i < num && status == ITH_OK; i++) {
        json_t *message =
            json_pack("{s:s, s:s}", "role", messages[i].role, "content", messages[i].content);
        if (!message)
            status =
                ith_fail(err, ITH_ERR_USAGE, "message %lld: role and content must be UTF-8 text",
                         (long long)i + 1);
        else if (json_array_append_new(list, message) != 0)
            status = ith_fail(err, ITH_ERR_MEMORY, "out of memory for the messages");
    }
    ith_chat_options o = {.add_generation_prompt = true, .enable_thinking = thinking};
    if (status == ITH_OK)
        status = ith_chat_render(m->chat, list, NULL, &o, &text, err);
    if (status == ITH_OK)
        status = ith_tokenizer_encode(m->tokenizer, text.data ? text.data : "", text.len, out, err);
    json_decref(list);
    ith_buf_deinit(&text);
    return status;
}

/* messages NULL: `prompt` as it is. */
static ithaca_status generate(ithaca_model *m, const ithaca_message *messages, size_t num,
                              const char *prompt, const ithaca_sampling *sampling,
                              ithaca_text_fn text, void *arg, ithaca_answer *out, ithaca_error *err)
{
    ithaca_sampling s;
    ith_ids ids = {0};
    collector c = {.model = m, .fn = text, .arg = arg};
    ithaca_sampling_init(m, &s);
    if (sampling)
        s = *sampling;
    ith_error_clear(&m->err);
    ith_status status = messages ? chat_prompt(m, messages, num, s.thinking, &ids)
                                 : ith_tokenizer_encode(m->tokenizer, prompt,
                                                        (int64_t)strlen(prompt), &ids, &m->err);
    if (status == ITH_OK)
        status = answer(m, &ids, &s, &c);
    if (status == ITH_OK && out)
        *out = c.answer;
    ith_ids_free(&ids);
    ith_buf_deinit(&c.text);
    return ith_api_status(status, &m->err, err);
}

ithaca_status ithaca_chat(ithaca_model *model, const ithaca_message *messages, size_t num_messages,
                          const ithaca_sampling *sampling, ithaca_text_fn text, void *arg,
                          ithaca_answer *out, ithaca_error *err)
{
    static const ithaca_message none = {NULL, NULL};
    return generate(model, messages ? messages : &none, messages ? num_messages : 0, NULL, sampling,
                    text, arg, out, err);
}

ithaca_status ithaca_complete(ithaca_model *model, const char *prompt,
                              const ithaca_sampling *sampling, ithaca_text_fn text, void *arg,
                              ithaca_answer *out, ithaca_error *err)
{
    return generate(model, NULL, 0, prompt, sampling, text, arg, out, err);
}
