/* chat.h - conversations to template text, to token ids with labels.
 *
 * Canonical messages are LlamaFactory v1's: {role, content: [{type, value}], loss_weight}, block
 * types text, reasoning, tool_call, image_url, video_url, audio_url. HF messages are what chat
 * templates read: {role, content, reasoning_content, tool_calls}.
 *
 * A media block may say what stands for it in the encoded text: {placeholder, text}. The template
 * prints the placeholder once for the block; text replaces it before anything is tokenized, as the
 * processors of transformers do. data/media.h fills both in.
 *
 * An ith_chat is immutable after open: any number of threads may use it. */
#ifndef ITH_TOKENIZER_CHAT_H
#define ITH_TOKENIZER_CHAT_H

#include "tokenizer/jinja.h"
#include "tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ITH_LABEL_IGNORE (-100)

typedef struct ith_chat ith_chat;

/* Finds the template: custom_template (Jinja text, or a file) when not NULL; else
 * DIR/chat_template.jinja; else "chat_template" of DIR/tokenizer_config.json (text, or a list of
 * {name, template} of which "default" and "tool_use" count); else plain ChatML. tok is borrowed and
 * may be NULL where only rendering is wanted: then no special token is known and nothing is
 * escaped. A custom template that differs from the model's own in the think block of an answer
 * without reasoning gets a warning. */
ith_status ith_chat_open(ith_chat **out, const char *model_dir, const char *custom_template,
                         const ith_tokenizer *tok, ith_error *err);
void ith_chat_close(ith_chat *chat);
/* Where the template came from, for the log. */
const char *ith_chat_source(const ith_chat *chat);
/* The text of custom_template; NULL: the model's own template. */
const char *ith_chat_custom(const ith_chat *chat);
/* SHA-256 (hex) of the template text(s): part of cache keys. */
const char *ith_chat_hash(const ith_chat *chat);

typedef struct {
    bool add_generation_prompt;
    int enable_thinking;    /* -1 unset, 0, 1 */
    const json_t *extra;    /* more template variables (an object), or NULL */
    ith_jinja_trace *trace; /* over `messages`, or NULL */
    int64_t *steps;         /* or NULL */
} ith_chat_options;

/* HF messages (an array) to text, appended to out. Null fields of a message count as absent; a null
 * or absent content beside tool calls as "". tools: array or NULL. options may be NULL. */
ith_status ith_chat_render(const ith_chat *chat, const json_t *messages, const json_t *tools,
                           const ith_chat_options *options, ith_buf *out, ith_error *err);

/* Canonical messages and tools (JSON text, array or object; NULL or null: none) to HF form. Special
 * tokens written in user-controlled text get U+200B after their first character. *out_tools is NULL
 * without tools. */
ith_status ith_chat_to_hf(const ith_chat *chat, const json_t *messages, const json_t *tools,
                          json_t **out_messages, json_t **out_tools, ith_error *err);

/* One training sample. All arrays have ids.count elements. labels: the id itself where trained,
 * else ITH_LABEL_IGNORE. weights: loss weight, 0 where not trained. */
typedef struct {
    ith_ids ids;
    int32_t *labels;
    float *weights;
    int64_t num_dropped_reasoning; /* trained answers whose reasoning the template leaves out */
} ith_encoded;
void ith_encoded_deinit(ith_encoded *encoded);

/* The sample of messages[0..n), whose last message must be the assistant's: it alone is trained,
 * from where the prompt (messages[0..n-1) with generation prompt) ends; the prompt must be a prefix
 * of the whole, as ids or at least as text (a token across the joint is the prompt's).
 * enable_thinking is set to whether the last message has reasoning. */
ith_status ith_chat_encode_sample(const ith_chat *chat, const json_t *messages, const json_t *tools,
                                  ith_encoded *out, ith_error *err);

/* What ith_chat_encode_turns found. */
typedef struct {
    int64_t num_turns; /* assistant messages with weight > 1e-6 */
    int64_t steps;     /* of the template */
} ith_turns_report;

/* The whole conversation as one sample, rendered once; every assistant message with a loss weight
 * is trained. Work is linear in the conversation. Trained text is that of {% generation %} blocks;
 * in a template without them, what the message's pass of the loop printed after the generation
 * prompt. report may be NULL. */
ith_status ith_chat_encode_turns(const ith_chat *chat, const json_t *messages, const json_t *tools,
                                 ith_encoded *out, ith_turns_report *report, ith_error *err);

/* For generation: messages plus generation prompt, all labels ignored. */
ith_status ith_chat_encode_prompt(const ith_chat *chat, const json_t *messages, const json_t *tools,
                                  int enable_thinking, ith_encoded *out, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
