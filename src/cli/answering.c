/* answering.c - options, tokenizer, template and stop ids of `chat` and `generate`. */
#include "cli/answering.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "checkpoint/model_dir.h"
#include "cli/launch.h"
#include "model/media_open.h"

static void add_stop(ith_answering *a, int64_t id)
{
    for (int i = 0; i < a->num_stop_ids; i++)
        if (a->stop_ids[i] == id)
            return;
    if (id >= 0 && a->num_stop_ids < (int)(sizeof a->stop_ids / sizeof *a->stop_ids))
        a->stop_ids[a->num_stop_ids++] = (int32_t)id;
}

static double or_default(double given, double fallback)
{
    return isnan(given) ? fallback : given;
}

static void settings(ith_answering *a, const ith_args *args)
{
    const ith_hf_generation *g = &a->defaults;
    int sample = ith_args_word(args, "do-sample");
    a->sampling = (ith_sampling){
        .do_sample =
            sample >= 0 ? sample == 1 : g->do_sample || ith_args_given(args, "temperature"),
        .temperature = or_default(ith_args_float(args, "temperature"), g->temperature),
        .top_k = ith_args_given(args, "top-k") ? ith_args_int(args, "top-k") : g->top_k,
        .top_p = or_default(ith_args_float(args, "top-p"), g->top_p),
        .min_p = or_default(ith_args_float(args, "min-p"), g->min_p),
        .repetition_penalty =
            or_default(ith_args_float(args, "repetition-penalty"), g->repetition_penalty),
        .seed = (uint64_t)ith_args_int(args, "seed")};
    a->max_new = ith_args_int(args, "max-new-tokens");
    a->thinking = ith_args_word(args, "thinking");
    a->system = ith_args_text(args, "system");
    for (int i = 0; i < g->num_eos_token_ids; i++)
        add_stop(a, g->eos_token_ids[i]);
    for (int i = 0; g->num_eos_token_ids == 0 && i < a->hf.num_eos_token_ids; i++)
        add_stop(a, a->hf.eos_token_ids[i]);
    add_stop(a, ith_tokenizer_eos(a->tokenizer));
}

ith_status ith_answering_open(ith_answering *a, const char *model_dir, const ith_args *args,
                              ith_error *err)
{
    ith_status status = ITH_OK;
    memset(a, 0, sizeof *a);
    ITH_TRY(
        ith_model_dir_check(model_dir, ITH_DIR_CONFIG | ITH_DIR_TOKENIZER | ITH_DIR_WEIGHTS, err));
    ITH_TRY_OUT(ith_hf_config_load(&a->hf, model_dir, err));
    ITH_TRY_OUT(ith_hf_generation_load(&a->defaults, model_dir, err));
    ITH_TRY_OUT(ith_tokenizer_open(&a->tokenizer, model_dir, err));
    ITH_TRY_OUT(
        ith_chat_open(&a->chat, model_dir, ith_args_text(args, "template"), a->tokenizer, err));
    settings(a, args);
    ITH_TRY_OUT(ith_media_open_model(&a->media, model_dir, NULL,
                                     ith_args_int(args, "image-max-pixels"), &a->hf, a->tokenizer,
                                     err));
    if (!a->media && (ith_args_given(args, "image") || ith_args_given(args, "video")))
        status = ith_fail(err, ITH_ERR_USAGE, "--%s: %s reads text only",
                          ith_args_given(args, "image") ? "image" : "video", a->hf.model_type);
out:
    if (status != ITH_OK)
        ith_answering_close(a);
    return status;
}

void ith_answering_close(ith_answering *a)
{
    ith_media_close(a->media);
    ith_chat_close(a->chat);
    ith_tokenizer_close(a->tokenizer);
    ith_hf_config_deinit(&a->hf);
    memset(a, 0, sizeof *a);
}

ith_decoder_options ith_answering_decoder(const ith_answering *a, const ith_args *args,
                                          int64_t batch, int64_t capacity, int64_t max_append)
{
    (void)a;
    int dtype = ith_args_word(args, "dtype");
    static const ith_use_device use[] = {ITH_USE_AUTO, ITH_USE_CPU, ITH_USE_CUDA};
    return (ith_decoder_options){.device = use[ith_args_word(args, "device")],
                                 .threads = (int)ith_args_int(args, "threads"),
                                 .set_dtype = dtype >= 0,
                                 .dtype = dtype == 0 ? ITH_F32 : ITH_BF16,
                                 .batch = batch,
                                 .capacity = capacity,
                                 .max_append = max_append};
}

ith_ranks_options ith_answering_ranks(const ith_args *args, ith_comm *world, int64_t cp_size)
{
    static const ith_ring_wish wishes[] = {ITH_RING_AUTO, ITH_RING_NEVER, ITH_RING_ONLY,
                                           ITH_RING_MIXED};
    return (ith_ranks_options){.world = world,
                               .cut_weights = ith_args_flag(args, "cut-weights"),
                               .ep_size = ith_args_int(args, "ep-size"),
                               .cp_size = cp_size,
                               .cp_mode = wishes[ith_args_word(args, "cp-mode")]};
}

ith_status ith_answering_check_ranks(const ith_args *args, const char *command, ith_error *err)
{
    return ith_args_given(args, "ep-size") && !ith_args_flag(args, "cut-weights")
               ? ith_fail(err, ITH_ERR_USAGE, "%s: --ep-size goes with --cut-weights", command)
               : ITH_OK;
}

ith_status ith_answering_run(const ith_args *args, double timeout_s,
                             ith_status (*command)(const ith_args *, ith_comm *, ith_error *),
                             ith_error *err)
{
    ith_comm *world = NULL;
    ITH_TRY(ith_comm_open_world(&world, timeout_s, err));
    ith_status status = command(args, world, err);
    if (status != ITH_OK && world->broken)
        ith_end_all_ranks(world, status, err);
    if (world->rank > 0) /* agreed: rank 0 tells it */
        status = ITH_OK;
    ith_comm_close(world);
    return status;
}

ith_status ith_add_message(json_t *messages, const char *role, const char *text, int64_t len,
                           ith_error *err)
{
    json_t *m = json_pack("{s:s, s:o}", "role", role, "content", json_stringn(text, (size_t)len));
    if (!m)
        return ith_fail(err, ITH_ERR_FORMAT, "the %s message is not UTF-8 text", role);
    if (json_array_append_new(messages, m) != 0)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for messages");
    return ITH_OK;
}

static ith_status add_blocks(json_t *content, const char *type, const char *const *paths,
                             ith_error *err)
{
    for (int i = 0; paths && paths[i]; i++)
        if (json_array_append_new(content,
                                  json_pack("{s:s, s:s}", "type", type, "value", paths[i])) != 0)
            return ith_fail(err, ITH_ERR_FORMAT, "%s: a path that is not UTF-8", paths[i]);
    return ITH_OK;
}

ith_status ith_add_media_message(const ith_answering *a, json_t *messages, const char *text,
                                 int64_t len, const char *const *images, const char *const *videos,
                                 ith_media_list *media, ith_error *err)
{
    if ((!images || !images[0]) && (!videos || !videos[0]))
        return ith_add_message(messages, "user", text, len, err);
    json_t *content = json_array(), *one = json_array();
    json_t *message = json_pack("{s:s, s:O}", "role", "user", "content", content);
    ith_status status = message && json_array_append(one, message) == 0
                            ? ITH_OK
                            : ith_fail(err, ITH_ERR_MEMORY, "out of memory for messages");
    if (status == ITH_OK)
        status = add_blocks(content, "image_url", images, err);
    if (status == ITH_OK)
        status = add_blocks(content, "video_url", videos, err);
    if (status == ITH_OK &&
        json_array_append_new(content, json_pack("{s:s, s:o}", "type", "text", "value",
                                                 json_stringn(text, (size_t)len))) != 0)
        status = ith_fail(err, ITH_ERR_FORMAT, "the user message is not UTF-8 text");
    if (status == ITH_OK)
        status = ith_media_prepare(a->media, one, NULL, media, err);
    if (status == ITH_OK && json_array_append(messages, message) != 0)
        status = ith_fail(err, ITH_ERR_MEMORY, "out of memory for messages");
    json_decref(content);
    json_decref(message);
    json_decref(one);
    return status;
}

ith_status ith_args_paths(const ith_args *args, const char *name, const char ***out, ith_error *err)
{
    int n = 0;
    while (ith_args_each(args, name, n))
        n++;
    ITH_TRY(ith_alloc_zero((void **)out, n + 1, (int64_t)sizeof **out, "paths", err));
    for (int i = 0; i < n; i++)
        (*out)[i] = ith_args_each(args, name, i);
    return ITH_OK;
}

void ith_count_media(const ith_media_list *list, int64_t first, int64_t num,
                     ith_vision_limits *limits)
{
    for (int64_t i = first; i < first + num; i++) {
        ith_grid g = list->items[i].grid;
        limits->max_patches += ith_grid_patches(g);
        limits->max_segments += g.t;
        limits->max_segment_patches = ith_max_i64(limits->max_segment_patches, (int64_t)g.h * g.w);
    }
}

ith_status ith_load_media(const ith_answering *a, const ith_media_list *list, int64_t first,
                          int64_t num, float **pixels, ith_grid **grids, ith_error *err)
{
    ith_vision_limits sizes = {0};
    ith_status status = ITH_OK;
    float *values = NULL;
    ith_grid *all = NULL;
    int64_t done = 0, width = ith_media_patch_width(a->media);
    ith_count_media(list, first, num, &sizes);
    ITH_TRY_OUT(ith_alloc((void **)&values, ith_mul_bytes(sizes.max_patches, width * 4),
                          "patches of images", err));
    ITH_TRY_OUT(ith_alloc((void **)&all, (num + 1) * (int64_t)sizeof *all, "images", err));
    for (int64_t i = 0; i < num; i++) {
        const ith_media_item *item = &list->items[first + i];
        ITH_TRY_OUT(ith_media_load(a->media, item, list->paths.data + item->path,
                                   values + done * width, err));
        all[i] = item->grid;
        done += ith_grid_patches(item->grid);
    }
    *pixels = values;
    *grids = all;
    return ITH_OK;
out:
    ith_free(values);
    ith_free(all);
    return status;
}

ith_status ith_prompt_ids(const ith_answering *a, const json_t *messages, const json_t *tools,
                          ith_ids *out, ith_error *err)
{
    ith_chat_options o = {.add_generation_prompt = true, .enable_thinking = a->thinking};
    if (ith_media_count(messages, 0)) {
        ith_encoded encoded = {0};
        ITH_TRY(ith_chat_encode_prompt(a->chat, messages, tools, a->thinking, &encoded, err));
        *out = encoded.ids;
        encoded.ids = (ith_ids){0};
        ith_encoded_deinit(&encoded);
        return ITH_OK;
    }
    ith_buf text = {0};
    ith_ids ids = {0};
    ith_status status = ith_chat_render(a->chat, messages, tools, &o, &text, err);
    if (status == ITH_OK)
        status =
            ith_tokenizer_encode(a->tokenizer, text.data ? text.data : "", text.len, &ids, err);
    ith_buf_deinit(&text);
    if (status == ITH_OK && ids.count == 0)
        status = ith_fail(err, ITH_ERR_FORMAT, "the prompt is empty");
    if (status == ITH_OK)
        *out = ids;
    else
        ith_ids_free(&ids);
    return status;
}
