/* convert.h - rows of the usual formats to canonical messages.
 *
 * Canonical (LlamaFactory v1): {messages: [{role, content: [{type, value}], loss_weight}], tools}.
 * Roles: system user assistant tool. Block types: text reasoning tool_call image_url video_url
 * audio_url. Every converter gives every message an explicit loss_weight.
 *
 *   canonical  the above; also {role, content: "text"} as OpenAI and dFactory files have it, with
 *              reasoning_content, tool_calls, and images/videos/audios for <image> tags.
 *              The weight is loss_weight, or loss_mask, loss, train, weight (number or boolean).
 *   alpaca     system, instruction, input, output
 *   sharegpt   conversations: [{from: human|gpt|system|observation|function_call, value}], tools
 *   pair       chosen, rejected: preference data; SFT refuses it
 *   tokenid    input_ids, prompt_lengths: ids that need no template; ids from prompt_lengths on are
 *              trained. With reveal_steps (one number per trained id: the step of the decoder that
 *              wrote it) the row is a recorded trajectory, see noise.h. Instead of messages it
 *              gives ids.
 *
 * A null field is an absent field. A row that cannot be used is dropped for a reason that is
 * counted and named, never silently. Only fields that are read are checked. */
#ifndef ITH_DATA_CONVERT_H
#define ITH_DATA_CONVERT_H

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ITH_CONVERTER_AUTO, /* told from the keys of the first row */
    ITH_CONVERTER_CANONICAL,
    ITH_CONVERTER_ALPACA,
    ITH_CONVERTER_SHAREGPT,
    ITH_CONVERTER_PAIR,
    ITH_CONVERTER_TOKENID,
    ITH_CONVERTER_COUNT
} ith_converter;

const char *ith_converter_name(ith_converter converter);
/* False when there is no converter of that name. */
bool ith_converter_from_name(const char *name, ith_converter *out);

/* Why a row, a sample of a row, or one message of it is not used. */
typedef enum {
    ITH_DROP_NONE,
    /* rows */
    ITH_DROP_TYPE,         /* a field that is read has the wrong type or value */
    ITH_DROP_NO_ASSISTANT, /* no assistant turn */
    ITH_DROP_NO_WEIGHT,    /* assistant turns, but none with a loss weight */
    ITH_DROP_MEDIA,        /* images, video or audio for a model that reads text only */
    ITH_DROP_BROKEN_MEDIA, /* a file that is no picture or video, or audio */
    /* samples */
    ITH_DROP_RENDER,       /* the chat template, a tool call or the tokenizer refused it */
    ITH_DROP_NO_TRAINABLE, /* no trained token within cutoff_len */
    ITH_DROP_SPLIT_PART,   /* a part of a split document without a trained token */
    /* messages and columns; the row stays */
    ITH_DROP_MESSAGE_TAG,  /* unknown speaker */
    ITH_DROP_MESSAGE_CALL, /* function_call whose value is not JSON */
    ITH_DROP_TOOLS,        /* tools column that is not JSON */
    ITH_DROP_KEY,          /* key of a message that has no meaning here */
    ITH_DROP_COUNT
} ith_drop;

/* "no assistant turn", ... */
const char *ith_drop_text(ith_drop drop);
/* "row", "sample" or "message". */
const char *ith_drop_unit(ith_drop drop);

#define ITH_DROP_DETAIL_BYTES 200
typedef struct {
    int64_t count;
    int64_t dataset, row; /* of the first one, from 0 */
    char detail[ITH_DROP_DETAIL_BYTES];
} ith_drop_row;
typedef struct {
    ith_drop_row rows[ITH_DROP_COUNT];
} ith_drops;
/* Counts one; keeps the detail of the first. */
void ith_drops_add(ith_drops *drops, ith_drop drop, int64_t dataset, int64_t row,
                   const char *detail);
/* Adds `more`, which comes later in the data. */
void ith_drops_merge(ith_drops *drops, const ith_drops *more);

/* Fails unless `row` has the keys of `wanted`: the text names expected and found keys and the
 * converter that would fit. AUTO picks the converter that fits. *out is never AUTO. */
ith_status ith_convert_detect(const json_t *row, ith_converter wanted, ith_converter *out,
                              ith_error *err);

typedef struct {
    const char *separator; /* alpaca: between instruction and a non-empty input; NULL: nothing */
} ith_convert_options;

typedef struct {
    json_t *messages;          /* canonical, new */
    json_t *tools;             /* JSON text or array as the row had it, new; NULL when absent */
    json_t *chosen, *rejected; /* canonical messages of preference data, in place of messages */
    json_t *input_ids;         /* of tokenid rows, in place of messages: integers, new */
    int64_t prompt_length;     /* of them, in [0, their number) */
    json_t *reveal_steps;      /* integers >= 0, one per id after the prompt, new; or NULL */
    ith_drop drop;             /* not NONE: the row is dropped, messages and tools are NULL */
    char detail[ITH_DROP_DETAIL_BYTES];
    int64_t num_messages_dropped[ITH_DROP_COUNT]; /* the row stays */
    /* the first of each kind, from ITH_DROP_MESSAGE_TAG on */
    char message_detail[ITH_DROP_COUNT - ITH_DROP_MESSAGE_TAG][ITH_DROP_DETAIL_BYTES];
    bool has_media;
} ith_converted;

/* Fails for a row that contradicts itself (media and tags that do not match) and without memory; a
 * row that is merely of no use gives ITH_OK and out->drop. options may be NULL. */
ith_status ith_convert_row(ith_converter converter, const json_t *row,
                           const ith_convert_options *options, ith_converted *out, ith_error *err);
void ith_converted_deinit(ith_converted *converted);

/* Weight of a canonical message, and whether it is an assistant turn with weight > 1e-6. */
double ith_message_weight(const json_t *message);
bool ith_message_is_supervised(const json_t *message);
/* The row holds preference data (chosen and rejected answers), which SFT cannot use. */
bool ith_row_is_preference(const json_t *row);

#ifdef __cplusplus
}
#endif
#endif
