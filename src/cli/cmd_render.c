/* cmd_render.c - `ithaca render`: messages to the text of the chat template. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/model_dir.h"
#include "cli/commands.h"
#include "tokenizer/chat.h"

static ith_status read_input(const ith_args *args, json_t **out, ith_error *err)
{
    if (args->num_positional > 1)
        return ith_json_load(out, args->positional[1], err);
    ith_buf text = {0};
    ith_status status = ith_read_stdin(&text, err);
    if (status == ITH_OK)
        status = ith_json_parse(out, text.data, text.len, "stdin", err);
    ith_buf_deinit(&text);
    return status;
}

/* Contents that are lists of {type, value} blocks are LlamaFactory's canonical form. */
static bool is_canonical(const json_t *messages)
{
    const json_t *content = json_object_get(json_array_get(messages, 0), "content");
    return json_is_array(content) && json_object_get(json_array_get(content, 0), "value") != NULL;
}

static ith_status render(const ith_args *args, const ith_chat *chat, const json_t *input,
                         ith_error *err)
{
    const json_t *messages = json_is_array(input) ? input : json_object_get(input, "messages");
    const json_t *tools = json_is_object(input) ? json_object_get(input, "tools") : NULL;
    json_t *hf = NULL, *hf_tools = NULL;
    if (!json_is_array(messages))
        return ith_fail(err, ITH_ERR_FORMAT,
                        "render: the input is %s; an array of messages, or an object with "
                        "\"messages\", is wanted",
                        ith_json_type_name(input));
    if (is_canonical(messages))
        ITH_TRY(ith_chat_to_hf(chat, messages, tools, &hf, &hf_tools, err));
    ith_chat_options o = {.add_generation_prompt = ith_args_flag(args, "generation-prompt"),
                          .enable_thinking = ith_args_word(args, "thinking")};
    ith_buf out = {0};
    ith_status status =
        ith_chat_render(chat, hf ? hf : messages, hf ? hf_tools : tools, &o, &out, err);
    if (status == ITH_OK)
        status = ith_print(&out, err);
    ith_buf_deinit(&out);
    json_decref(hf);
    json_decref(hf_tools);
    return status;
}

static ith_status run_render(const ith_args *args, ith_error *err)
{
    ith_tokenizer *t = NULL;
    ith_chat *chat = NULL;
    json_t *input = NULL;
    ITH_TRY(ith_model_dir_check(args->positional[0], ITH_DIR_TOKENIZER, err));
    ith_status status = ith_tokenizer_open(&t, args->positional[0], err);
    if (status == ITH_OK)
        status = ith_chat_open(&chat, args->positional[0], ith_args_text(args, "template"), t, err);
    if (status == ITH_OK)
        status = read_input(args, &input, err);
    if (status == ITH_OK)
        status = render(args, chat, input, err);
    json_decref(input);
    ith_chat_close(chat);
    ith_tokenizer_close(t);
    return status;
}

static const ith_option options[] = {{.name = "generation-prompt",
                                      .letter = 'g',
                                      .type = ITH_OPTION_FLAG,
                                      .help = "End with the start of an answer."},
                                     {.name = "thinking",
                                      .type = ITH_OPTION_WORD,
                                      .help = "Sets enable_thinking.",
                                      .words = "off on"},
                                     {.name = "template",
                                      .type = ITH_OPTION_PATH,
                                      .help = "Chat template file instead of the model's."},
                                     {.name = NULL}};

const ith_command ith_cmd_render = {
    .name = "render",
    .arguments = "MODEL [FILE]",
    .summary = "Turn messages into the text of the chat template",
    .details =
        "FILE (or stdin) holds JSON: an array of messages, or an object with messages and tools.\n",
    .options = options,
    .min_positional = 1,
    .max_positional = 2,
    .run = run_render};
