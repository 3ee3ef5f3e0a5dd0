/* cmd_chat.c - `ithaca chat`: a conversation in the terminal. The cache keeps what two turns have
 * in common; a diffusion model reads its prompt anew, in one forward. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "cli/block_answering.h"
#include "cli/commands.h"
#include "cli/terminal.h"

/* Tokens of one append with images: the tower's memory is planned for as many. */
#define MAX_MEDIA_APPEND 4096

typedef struct {
    ith_answering a;
    ith_decoder d;
    bool blocks; /* a diffusion model: bd in place of d */
    ith_block_decoder bd;
    ith_block_how how;
    json_t *messages;
    ith_ids cached; /* ids whose keys and values are in the cache */
    ith_media_list media;
    int64_t cached_media; /* items of it whose tokens are in the cache */
    const char **videos;  /* before the next message, ended by NULL, as: */
    char **images;        /* owned */
    int64_t num_images, cap_images;
    ith_sampler sampler;
    int64_t turns;
} conversation;

static ith_status restart(conversation *c, ith_error *err)
{
    json_array_clear(c->messages);
    c->cached.count = 0;
    ith_media_list_deinit(&c->media);
    c->cached_media = 0;
    if (!c->blocks)
        ith_decoder_reset(&c->d);
    return c->a.system ? ith_add_message(c->messages, "system", c->a.system,
                                         (int64_t)strlen(c->a.system), err)
                       : ITH_OK;
}

static ith_status remember(conversation *c, const int32_t *ids, int64_t n, ith_error *err)
{
    void *grown = c->cached.ids;
    ITH_TRY(ith_grow(&grown, &c->cached.cap, c->cached.count + n, 4, "tokens", err));
    c->cached.ids = grown;
    memcpy(c->cached.ids + c->cached.count, ids, (size_t)n * 4);
    c->cached.count += n;
    return ITH_OK;
}

/* Appends a piece with the next `num` images and videos. */
static ith_status feed_piece(conversation *c, const int32_t *ids, int64_t n, int64_t num,
                             ith_error *err)
{
    float *pixels = NULL;
    ith_grid *grids = NULL;
    if (num)
        ITH_TRY(ith_load_media(&c->a, &c->media, c->cached_media, num, &pixels, &grids, err));
    ith_decoder_media media = {pixels, grids, num};
    ith_status status = ith_decoder_append_media(&c->d, &ids, &n, &media);
    ith_free(pixels);
    ith_free(grids);
    ITH_TRY(status);
    c->cached_media += num;
    return remember(c, ids, n, err);
}

/* Appends what the cache does not hold, in pieces of at most max_append that cut through no image.
 */
static ith_status feed(conversation *c, const int32_t *ids, int64_t n, ith_error *err)
{
    int64_t most = c->d.options.max_append, end = 0, num = 0;
    for (int64_t done = 0; done < n; done = end) {
        end = n - done < most ? n : done + most;
        if (c->a.media)
            ITH_TRY(ith_media_cut(ith_media_ids(c->a.media), ids, n, done, most,
                                  c->media.items + c->cached_media,
                                  c->media.count - c->cached_media, &end, &num, err));
        if (end == done)
            return ith_fail(err, ITH_ERR_RUN,
                            "an image or video is longer than the %lld tokens that fit at once "
                            "(--image-max-pixels makes it smaller, --context makes room)",
                            (long long)most);
        ITH_TRY(feed_piece(c, ids + done, end - done, num, err));
    }
    return ITH_OK;
}

/* How many tokens of the prompt the cache keeps: what both begin with, as far as the model can go
 * back, and no image half. */
static ith_status keep_common(conversation *c, const ith_ids *prompt, int64_t *out, ith_error *err)
{
    int64_t same = 0, num = 0;
    while (same < c->cached.count && same + 1 < prompt->count &&
           c->cached.ids[same] == prompt->ids[same])
        same++;
    if (c->a.media)
        ITH_TRY(ith_media_cut(ith_media_ids(c->a.media), prompt->ids, prompt->count, 0, same,
                              c->media.items, c->media.count, &same, &num, err));
    same = ith_decoder_truncate(&c->d, 0, same);
    c->cached.count = same;
    c->cached_media = same ? num : 0;
    *out = same;
    return ITH_OK;
}

static ith_status fail_too_long(int64_t tokens, int64_t capacity, ith_error *err)
{
    return ith_fail(err, ITH_ERR_RUN,
                    "the conversation has %lld tokens, the context holds %lld (/clear starts anew, "
                    "--context sets it)",
                    (long long)tokens, (long long)capacity);
}

static ith_status feed_prompt(conversation *c, const ith_ids *prompt, ith_error *err)
{
    int64_t same = 0;
    ITH_TRY(keep_common(c, prompt, &same, err));
    if (prompt->count >= c->d.options.capacity)
        return fail_too_long(prompt->count, c->d.options.capacity, err);
    return feed(c, prompt->ids + same, prompt->count - same, err);
}

static bool stops(const ith_answering *a, int32_t id)
{
    for (int i = 0; i < a->num_stop_ids; i++)
        if (a->stop_ids[i] == id)
            return true;
    return false;
}

/* Prints the answer as it comes; appends it to `answer`. */
static ith_status answer_turn(conversation *c, ith_buf *answer, ith_error *err)
{
    ith_token_stream stream;
    ith_token_stream_init(&stream, c->a.tokenizer, true);
    for (int64_t n = 0; n < c->a.max_new && c->cached.count < c->d.options.capacity; n++) {
        int32_t id = 0;
        int64_t before = answer->len;
        ITH_TRY(ith_sampler_next(&c->sampler, &c->a.sampling, c->d.host_logits, c->cached.ids,
                                 c->cached.count, (uint64_t)c->turns, &id, err));
        if (stops(&c->a, id))
            break;
        ITH_TRY(ith_token_stream_push(&stream, id, answer, err));
        fwrite(answer->data ? answer->data + before : "", 1, (size_t)(answer->len - before),
               stdout);
        fflush(stdout);
        ITH_TRY(feed(c, &id, 1, err));
    }
    int64_t before = answer->len;
    ITH_TRY(ith_token_stream_flush(&stream, answer, err));
    fwrite(answer->data ? answer->data + before : "", 1, (size_t)(answer->len - before), stdout);
    fputs("\n\n", stdout);
    return ith_buf_check(answer, "answer", err);
}

/* NULL: forgets all. */
static ith_status add_image(conversation *c, const char *path, ith_error *err)
{
    for (; !path && c->num_images > 0; c->images[c->num_images] = NULL)
        ith_free(c->images[--c->num_images]);
    ITH_TRY(ith_grow((void **)&c->images, &c->cap_images, c->num_images + 2, sizeof *c->images,
                     "paths", err));
    char *copy = path ? ith_strndup(path, (int64_t)strlen(path)) : NULL;
    c->images[c->num_images] = copy;
    c->num_images += copy != NULL;
    c->images[c->num_images] = NULL;
    return !path || copy ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory for paths");
}

/* The same of a diffusion model: on a terminal its blocks resolve in place. */
static ith_status answer_blocks(conversation *c, const ith_ids *prompt, ith_buf *answer,
                                ith_error *err)
{
    int64_t room = c->bd.options.capacity - prompt->count;
    bool drawn = ith_terminal_colours(STDOUT_FILENO);
    ith_block_view view;
    ith_block_answer a = {0};
    if (room <= 0)
        return fail_too_long(prompt->count, c->bd.options.capacity, err);
    c->how.max_new = c->a.max_new < room ? c->a.max_new : room;
    c->how.first_stream = (uint64_t)c->turns;
    if (drawn)
        ith_block_view_begin(&view, &c->a, &c->how, &a);
    ITH_TRY(ith_block_decoder_generate(&c->bd, prompt, 1, &c->how, &a, err));
    ith_status status = drawn ? ith_block_view_end(&view, err) : ITH_OK;
    int64_t n = a.end - a.prompt - a.stopped,
            forwards = a.steps + a.commits + (a.prompt >= c->bd.block);
    if (status == ITH_OK)
        status = ith_tokenizer_decode(c->a.tokenizer, a.row.ids + a.prompt, n, true, answer, err);
    if (!drawn)
        fwrite(answer->data ? answer->data : "", 1, (size_t)answer->len, stdout);
    fputs("\n", stdout);
    if (drawn)
        printf("\033[2m%lld tokens in %lld forwards\033[0m\n", (long long)n, (long long)forwards);
    fputs("\n", stdout);
    ith_block_answer_deinit(&a);
    return status;
}

static ith_status turn(conversation *c, const char *line, int64_t len, ith_error *err)
{
    ith_ids prompt = {0};
    ith_buf answer = {0};
    ith_status status = ith_add_media_message(
        &c->a, c->messages, line, len, (const char *const *)c->images, c->videos, &c->media, err);
    c->videos[0] = NULL; /* seen */
    if (status == ITH_OK)
        status = add_image(c, NULL, err);
    if (status == ITH_OK)
        status = ith_prompt_ids(&c->a, c->messages, NULL, &prompt, err);
    if (status == ITH_OK && c->blocks)
        status = answer_blocks(c, &prompt, &answer, err);
    if (status == ITH_OK && !c->blocks)
        status = feed_prompt(c, &prompt, err);
    if (status == ITH_OK && !c->blocks)
        status = answer_turn(c, &answer, err);
    if (status == ITH_OK)
        status = ith_add_message(c->messages, "assistant", answer.data ? answer.data : "",
                                 answer.len, err);
    c->turns++;
    ith_ids_free(&prompt);
    ith_buf_deinit(&answer);
    return status;
}

/* /image FILE: before the next message. A file that cannot be read is told, and no end. */
static ith_status take_image(conversation *c, const char *path, ith_error *err)
{
    ith_media_list looked = {0};
    ith_error why = {0};
    json_t *messages = json_array();
    const char *const one[] = {path, NULL};
    ith_status status =
        c->a.media ? ith_add_media_message(&c->a, messages, "", 0, one, NULL, &looked, &why)
                   : ith_fail(&why, ITH_ERR_USAGE, "%s reads text only", c->a.hf.model_type);
    if (status == ITH_OK)
        printf("(%s comes with the next message)\n", path);
    else
        printf("(%s)\n", why.text);
    ith_media_list_deinit(&looked);
    json_decref(messages);
    return status == ITH_OK ? add_image(c, path, err) : ITH_OK;
}

static ith_status loop(conversation *c, ith_error *err)
{
    bool people = isatty(STDIN_FILENO), colours = ith_terminal_colours(STDOUT_FILENO);
    char *line = NULL;
    size_t cap = 0;
    ith_status status = restart(c, err);
    if (people)
        printf("Type a message. %s/clear starts anew, /exit or Ctrl-D ends.\n\n",
               c->a.media ? "/image FILE shows a picture. " : "");
    while (status == ITH_OK) {
        if (people)
            fputs(colours ? "\033[1m> \033[0m" : "> ", stdout);
        fflush(stdout);
        ssize_t len = getline(&line, &cap, stdin);
        if (len < 0)
            break;
        while (len > 0 && (line[len - 1] == '\n' || line[len - 1] == '\r'))
            line[--len] = '\0';
        if (strcmp(line, "/exit") == 0 || strcmp(line, "exit") == 0)
            break;
        if (strcmp(line, "/clear") == 0 || strcmp(line, "clear") == 0)
            status = restart(c, err);
        else if (strncmp(line, "/image ", 7) == 0)
            status = take_image(c, line + 7, err);
        else if (len > 0)
            status = turn(c, line, len, err);
    }
    free(line); /* check_layers: allow, getline took it */
    return status;
}

static ith_status open_decoder(conversation *c, const ith_args *args, ith_error *err)
{
    int64_t context = ith_args_int(args, "context"), piece = context < 2048 ? context : 2048;
    ith_decoder_options o = ith_answering_decoder(&c->a, args, 1, context, piece);
    if (c->a.media) { /* an image is fed whole */
        int64_t merge = ith_media_ids(c->a.media)->merge;
        o.max_append = context < MAX_MEDIA_APPEND ? context : MAX_MEDIA_APPEND;
        o.media = (ith_vision_limits){.max_patches = o.max_append * merge * merge,
                                      .max_segments = o.max_append,
                                      .max_segment_patches = o.max_append * merge * merge};
    }
    if (!c->blocks)
        return ith_decoder_open(&c->d, args->positional[0], &o, err);
    ITH_TRY(ith_block_settings(&c->a, args, &c->how, err));
    o.capacity = ith_block_row_len(0, context, c->how.block);
    o.max_append = o.capacity;
    return ith_block_decoder_open(&c->bd, args->positional[0], &o, c->how.block, err);
}

static ith_status run_chat(const ith_args *args, ith_error *err)
{
    conversation c = {0};
    ith_status status = ith_answering_open(&c.a, args->positional[0], args, err);
    if (status != ITH_OK)
        return status;
    c.blocks = c.a.hf.family == ITH_FAMILY_LLADA2;
    status = c.blocks ? ITH_OK : ith_block_options_refuse(&c.a, args, err);
    if (status == ITH_OK)
        status = add_image(&c, NULL, err);
    for (int i = 0; status == ITH_OK && ith_args_each(args, "image", i); i++)
        status = add_image(&c, ith_args_each(args, "image", i), err);
    if (status == ITH_OK)
        status = ith_args_paths(args, "video", &c.videos, err);
    c.messages = json_array();
    if (status == ITH_OK)
        status = c.messages ? ith_sampler_init(&c.sampler, c.a.hf.vocab_size, err)
                            : ith_fail(err, ITH_ERR_MEMORY, "out of memory");
    if (status == ITH_OK)
        status = open_decoder(&c, args, err);
    if (status == ITH_OK)
        status = loop(&c, err);
    if (c.blocks)
        ith_block_decoder_close(&c.bd);
    else
        ith_decoder_close(&c.d);
    ith_sampler_deinit(&c.sampler);
    ith_ids_free(&c.cached);
    ith_media_list_deinit(&c.media);
    for (int64_t i = 0; i < c.num_images; i++)
        ith_free(c.images[i]);
    ith_free(c.images);
    ith_free(c.videos);
    json_decref(c.messages);
    ith_answering_close(&c.a);
    return status;
}

static const ith_option options[] = {{.name = "context",
                                      .letter = 'c',
                                      .type = ITH_OPTION_INT,
                                      .default_text = "8192",
                                      .help = "Tokens of a conversation.",
                                      .min = 2,
                                      .max = 1e9},
                                     ITH_BLOCK_OPTIONS,
                                     ITH_ANSWERING_OPTIONS,
                                     {.name = NULL}};

const ith_command ith_cmd_chat = {
    .name = "chat",
    .arguments = "MODEL",
    .summary = "Talk to a model in the terminal",
    .details = "Reads one message per line; /image FILE shows a picture with the next one, /clear "
               "starts anew, /exit ends.\n",
    .options = options,
    .min_positional = 1,
    .max_positional = 1,
    .run = run_chat};
