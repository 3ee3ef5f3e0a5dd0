/* links: ith_tokenizer */
/* fuzz_chat.c - any bytes as the chat template of a training run: what is trained in conversations
 * is found, or one line says why not. The first byte picks the conversation. Templates that count
 * (range) may take a second each, and are fuzz_template's. */
#include "tokenizer/chat.h"

#include "base/file.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char dir[256];
static ith_tokenizer *tokenizer;

static const char *const conversations[] = {
    ("[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": \"hi\"}]}, {\"role\": "
     "\"assistant\", \"loss_weight\": 1, \"content\": [{\"type\": \"text\", \"value\": "
     "\"yes\"}]}]"),
    ("[{\"role\": \"system\", \"content\": [{\"type\": \"text\", \"value\": \"s\"}]}, {\"role\": "
     "\"user\", \"content\": [{\"type\": \"text\", \"value\": \"yes\"}]}, {\"role\": "
     "\"assistant\", "
     "\"loss_weight\": 0.5, \"content\": [{\"type\": \"reasoning\", \"value\": \"why\"}, "
     "{\"type\": "
     "\"text\", \"value\": \"yes\"}]}, {\"role\": \"user\", \"content\": [{\"type\": \"text\", "
     "\"value\": \"\"}]}, {\"role\": \"assistant\", \"loss_weight\": 1, \"content\": [{\"type\": "
     "\"text\", \"value\": \"\\nr</think>a \\u00e9\"}]}]"),
    ("[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": \"<t> what\"}]}, "
     "{\"role\": \"assistant\", \"loss_weight\": 1, \"content\": [{\"type\": \"tool_call\", "
     "\"value\": \"{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": {\\\"a\\\": [1, null]}}\"}]}, "
     "{\"role\": \"tool\", \"content\": [{\"type\": \"text\", \"value\": \"3\"}]}, {\"role\": "
     "\"assistant\", \"loss_weight\": 1, \"content\": [{\"type\": \"text\", \"value\": \"3\"}]}]"),
};

static void remove_dir(void)
{
    ith_tokenizer_close(tokenizer);
    ith_remove_tree(dir, NULL);
}

static bool prepare(void)
{
    static const char text[] = "user assistant yes yes the thin thing then that this 12 12 hi hi";
    static const char *const special[] = {"<|end|>", "<t>"};
    const char *base = getenv("TMPDIR");
    if (dir[0])
        return tokenizer != NULL;
    snprintf(dir, sizeof dir, "%s/fuzz-chat-%ld", base ? base : "/tmp", (long)getpid());
    if (ith_bpe_train(text, (int64_t)sizeof text - 1, 280, special, 2, dir, NULL) != ITH_OK ||
        ith_tokenizer_open(&tokenizer, dir, NULL) != ITH_OK)
        return false;
    atexit(remove_dir);
    return true;
}

static void check(ith_status status, ith_encoded *e, ith_error *err)
{
    if (status != ITH_OK) {
        ITH_ASSERT(err->text[0] && !strchr(err->text, '\n'));
    } else {
        for (int64_t i = 0; i < e->ids.count; i++) {
            ITH_ASSERT(e->ids.ids[i] >= 0 && e->ids.ids[i] < ith_tokenizer_size(tokenizer));
            ITH_ASSERT(e->labels[i] == e->ids.ids[i] || e->labels[i] == ITH_LABEL_IGNORE);
            ITH_ASSERT(e->weights[i] >= 0);
            ITH_ASSERT(e->labels[i] >= 0 || e->weights[i] <= 0);
        }
        ith_encoded_deinit(e);
    }
    ith_error_clear(err);
    memset(e, 0, sizeof *e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ith_error err = {0};
    ith_chat *chat = NULL;
    ith_encoded e = {0};
    json_t *messages = NULL;
    if (size < 2 || memmem(data, size, "range", 5) || memchr(data + 1, 0, size - 1) || !prepare())
        return 0;
    char *text = ith_strndup((const char *)data + 1, (int64_t)size - 1);
    ITH_ASSERT(text);
    if (ith_chat_open(&chat, NULL, text, tokenizer, &err) == ITH_OK) {
        const char *chosen =
            conversations[data[0] % (sizeof conversations / sizeof conversations[0])];
        ITH_ASSERT(ith_json_parse(&messages, chosen, (int64_t)strlen(chosen), "rows", &err) ==
                   ITH_OK);
        check(ith_chat_encode_sample(chat, messages, NULL, &e, &err), &e, &err);
        check(ith_chat_encode_turns(chat, messages, NULL, &e, NULL, &err), &e, &err);
        check(ith_chat_encode_prompt(chat, messages, NULL, data[0] & 1, &e, &err), &e, &err);
        json_decref(messages);
        ith_chat_close(chat);
    } else {
        ITH_ASSERT(err.text[0]);
    }
    ith_free(text);
    return 0;
}
