/* cmd_chat.c - `ithaca chat`: a conversation in the terminal. The cache keeps what two turns have
 * in common; a diffusion model reads its prompt anew, in one forward. Several ranks share the one
 * conversation: rank 0 reads and writes, all do the same; they read every prompt anew, too. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/log.h"
#include "cli/block_answering.h"
#include "cli/commands.h"
#include "cli/terminal.h"

/* Tokens of one append with images: the tower's memory is planned for as many. */
#define MAX_MEDIA_APPEND 4096
#define CHAT_TIMEOUT_S 604800 /* of the person who types */

typedef struct {
    ith_comm *world;
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
    same = ith_decoder_truncate(&c->d, 0, c->world->size > 1 ? 0 : same);
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
        ITH_TRY(ith_decoder_ranks_tell(&c->d.ranks, &id, sizeof id, err));
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
    status = ith_comm_agree(c->world, status, &why);
    if (status == ITH_OK)
        printf("(%s comes with the next message)\n", path);
    else
        printf("(%s)\n", why.text);
    ith_media_list_deinit(&looked);
    json_decref(messages);
    return status == ITH_OK ? add_image(c, path, err) : ITH_OK;
}

/* The next line, without its end, to all ranks; *len < 0: there is none. */
static ith_status read_line(conversation *c, ith_buf *line, int64_t *len, ith_error *err)
{
    char *got = NULL;
    size_t cap = 0;
    ith_buf_clear(line);
    if (c->world->rank == 0) {
        *len = getline(&got, &cap, stdin);
        while (*len > 0 && (got[*len - 1] == '\n' || got[*len - 1] == '\r'))
            --*len;
        ith_buf_append(line, got, ith_max_i64(*len, 0));
        free(got); /* check_layers: allow, getline took it */
    }
    ITH_TRY(ith_comm_broadcast(c->world, len, sizeof *len, 0, err));
    while (line->len < *len && ith_buf_check(line, "a message", err) == ITH_OK)
        ith_buf_putc(line, ' ');
    ITH_TRY(ith_buf_check(line, "a message", err));
    return *len > 0 ? ith_comm_broadcast(c->world, line->data, *len, 0, err) : ITH_OK;
}

static ith_status loop(conversation *c, ith_error *err)
{
    bool people = isatty(STDIN_FILENO) && c->world->rank == 0,
         colours = ith_terminal_colours(STDOUT_FILENO);
    ith_buf buf = {0};
    ith_status status = restart(c, err);
    if (people)
        printf("Type a message. %s/clear starts anew, /exit or Ctrl-D ends.\n\n",
               c->a.media ? "/image FILE shows a picture. " : "");
    while (status == ITH_OK) {
        if (people)
            fputs(colours ? "\033[1m> \033[0m" : "> ", stdout);
        fflush(stdout);
        int64_t len = 0;
        status = read_line(c, &buf, &len, err);
        if (status != ITH_OK || len < 0)
            break;
        const char *line = buf.data ? buf.data : "";
        if (strcmp(line, "/exit") == 0 || strcmp(line, "exit") == 0)
            break;
        if (strcmp(line, "/clear") == 0 || strcmp(line, "clear") == 0)
            status = restart(c, err);
        else if (strncmp(line, "/image ", 7) == 0)
            status = take_image(c, line + 7, err);
        else if (len > 0)
            status = turn(c, line, len, err);
    }
    ith_buf_deinit(&buf);
    return status;
}

static ith_status open_decoder(conversation *c, const ith_args *args, ith_error *err)
{
    bool shared = c->world->size > 1; /* prompts go through whole, too */
    int64_t context = ith_args_int(args, "context"),
            piece = shared ? context : ith_min_i64(context, 2048);
    ith_decoder_options o = ith_answering_decoder(&c->a, args, 1, context, piece);
    o.ranks = ith_answering_ranks(args, c->world, c->world->size);
    if (c->a.media) { /* an image is fed whole */
        int64_t merge = ith_media_ids(c->a.media)->merge;
        o.max_append = shared ? context : ith_min_i64(context, MAX_MEDIA_APPEND);
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

/* All that can be wrong before the ranks share it. */
static ith_status prepare(conversation *c, const ith_args *args, ith_error *err)
{
    ITH_TRY(ith_answering_check_ranks(args, "chat", err));
    ITH_TRY(ith_answering_open(&c->a, args->positional[0], args, err));
    c->blocks = c->a.hf.family == ITH_FAMILY_LLADA2;
    if (!c->blocks)
        ITH_TRY(ith_block_options_refuse(&c->a, args, err));
    ITH_TRY(add_image(c, NULL, err));
    for (int i = 0; ith_args_each(args, "image", i); i++)
        ITH_TRY(add_image(c, ith_args_each(args, "image", i), err));
    ITH_TRY(ith_args_paths(args, "video", &c->videos, err));
    c->messages = json_array();
    if (!c->messages)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory");
    return ith_sampler_init(&c->sampler, c->a.hf.vocab_size, err);
}

static void close_conversation(conversation *c)
{
    if (c->blocks)
        ith_block_decoder_close(&c->bd);
    else
        ith_decoder_close(&c->d);
    ith_sampler_deinit(&c->sampler);
    ith_ids_free(&c->cached);
    ith_media_list_deinit(&c->media);
    for (int64_t i = 0; i < c->num_images; i++)
        ith_free(c->images[i]);
    ith_free(c->images);
    ith_free(c->videos);
    json_decref(c->messages);
    ith_answering_close(&c->a);
}

static ith_status chat(const ith_args *args, ith_comm *world, ith_error *err)
{
    conversation c = {.world = world};
    ith_status status = ITH_OK;
    if (world->rank > 0)
        status = ith_log_set_levels("error", err);
    if (world->rank > 0 && !freopen("/dev/null", "w", stdout))
        status = ith_fail(err, ITH_ERR_IO, "/dev/null cannot be opened");
    if (status == ITH_OK)
        status = prepare(&c, args, err);
    status = ith_comm_agree(world, status, err);
    if (status == ITH_OK)
        status = open_decoder(&c, args, err);
    if (status == ITH_OK) {
        status = loop(&c, err);
        world->broken |= world->size > 1 && status != ITH_OK; /* the others may be in a walk */
    }
    close_conversation(&c);
    return status;
}

static ith_status run_chat(const ith_args *args, ith_error *err)
{
    return ith_answering_run(args, CHAT_TIMEOUT_S, chat, err);
}

static const ith_option options[] = {{.name = "context",
                                      .letter = 'c',
                                      .type = ITH_OPTION_INT,
                                      .default_text = "8192",
                                      .help = "Tokens of a conversation.",
                                      .min = 2,
                                      .max = 1e9},
                                     ITH_ANSWERING_OPTIONS,
                                     ITH_RANK_OPTIONS,
                                     ITH_BLOCK_OPTIONS,
                                     {.name = NULL}};

const ith_command ith_cmd_chat = {
    .name = "chat",
    .arguments = "MODEL",
    .summary = "Talk to a model in the terminal",
    .details =
        "Reads one message per line; /image FILE shows a picture with the next one, /clear "
        "starts anew, /exit ends.\n"
        "Under mpirun, srun or torchrun all ranks share the conversation and its cache; rank 0 "
        "reads and writes.\n",
    .options = options,
    .min_positional = 1,
    .max_positional = 1,
    .run = run_chat};
