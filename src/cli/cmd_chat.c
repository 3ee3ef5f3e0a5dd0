/* cmd_chat.c - `ithaca chat`: a conversation in the terminal. The cache keeps what two turns have
 * in common. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "cli/answering.h"
#include "cli/commands.h"
#include "cli/terminal.h"

typedef struct {
    ith_answering a;
    ith_decoder d;
    json_t *messages;
    ith_ids cached; /* ids whose keys and values are in the cache */
    ith_sampler sampler;
    int64_t turns;
} conversation;

static ith_status restart(conversation *c, ith_error *err)
{
    json_array_clear(c->messages);
    c->cached.count = 0;
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

/* Appends what the cache does not hold, in pieces of at most max_append. */
static ith_status feed(conversation *c, const int32_t *ids, int64_t n, ith_error *err)
{
    for (int64_t done = 0; done < n;) {
        int64_t piece = n - done < c->d.options.max_append ? n - done : c->d.options.max_append;
        const int32_t *from = ids + done;
        ITH_TRY(ith_decoder_append(&c->d, &from, &piece));
        ITH_TRY(remember(c, from, piece, err));
        done += piece;
    }
    return ITH_OK;
}

static ith_status feed_prompt(conversation *c, const ith_ids *prompt, ith_error *err)
{
    int64_t same = 0;
    while (same < c->cached.count && same + 1 < prompt->count &&
           c->cached.ids[same] == prompt->ids[same])
        same++;
    same = ith_decoder_truncate(&c->d, 0, same);
    c->cached.count = same;
    if (prompt->count >= c->d.options.capacity)
        return ith_fail(err, ITH_ERR_RUN,
                        "the conversation has %lld tokens, the context holds %lld (/clear starts "
                        "anew, --context sets it)",
                        (long long)prompt->count, (long long)c->d.options.capacity);
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

static ith_status turn(conversation *c, const char *line, int64_t len, ith_error *err)
{
    ith_ids prompt = {0};
    ith_buf answer = {0};
    ith_status status = ith_add_message(c->messages, "user", line, len, err);
    if (status == ITH_OK)
        status = ith_prompt_ids(&c->a, c->messages, NULL, &prompt, err);
    if (status == ITH_OK)
        status = feed_prompt(c, &prompt, err);
    if (status == ITH_OK)
        status = answer_turn(c, &answer, err);
    if (status == ITH_OK)
        status = ith_add_message(c->messages, "assistant", answer.data ? answer.data : "",
                                 answer.len, err);
    c->turns++;
    ith_ids_free(&prompt);
    ith_buf_deinit(&answer);
    return status;
}

static ith_status loop(conversation *c, ith_error *err)
{
    bool people = isatty(STDIN_FILENO), colours = ith_terminal_colours(STDOUT_FILENO);
    char *line = NULL;
    size_t cap = 0;
    ith_status status = restart(c, err);
    if (people)
        fputs("Type a message. /clear starts anew, /exit or Ctrl-D ends.\n\n", stdout);
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
        else if (len > 0)
            status = turn(c, line, len, err);
    }
    free(line); /* check_layers: allow, getline took it */
    return status;
}

static ith_status run_chat(const ith_args *args, ith_error *err)
{
    conversation c = {0};
    ith_status status = ith_answering_open(&c.a, args->positional[0], args, err);
    if (status != ITH_OK)
        return status;
    int64_t context = ith_args_int(args, "context");
    ith_decoder_options o =
        ith_answering_decoder(&c.a, args, 1, context, context < 2048 ? context : 2048);
    c.messages = json_array();
    status = c.messages ? ith_sampler_init(&c.sampler, c.a.hf.vocab_size, err)
                        : ith_fail(err, ITH_ERR_MEMORY, "out of memory");
    if (status == ITH_OK)
        status = ith_decoder_open(&c.d, args->positional[0], &o, err);
    if (status == ITH_OK)
        status = loop(&c, err);
    ith_decoder_close(&c.d);
    ith_sampler_deinit(&c.sampler);
    ith_ids_free(&c.cached);
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
                                     ITH_ANSWERING_OPTIONS,
                                     {.name = NULL}};

const ith_command ith_cmd_chat = {
    .name = "chat",
    .arguments = "MODEL",
    .summary = "Talk to a model in the terminal",
    .details = "Reads one message per line; /clear starts anew, /exit ends.\n",
    .options = options,
    .min_positional = 1,
    .max_positional = 1,
    .run = run_chat};
