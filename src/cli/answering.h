/* answering.h - what `chat` and `generate` share: their options, and a model opened with tokenizer
 * and template. */
#ifndef ITH_CLI_ANSWERING_H
#define ITH_CLI_ANSWERING_H

#include "cli/options.h"
#include "data/media.h"
#include "generate/decoder.h"
#include "tokenizer/chat.h"

/* Rows for option tables. */
#define ITH_RANK_OPTIONS                                                                           \
    {.name = "cut-weights",                                                                        \
     .type = ITH_OPTION_FLAG,                                                                      \
     .help = "Several ranks: cut the weights among them, gather layer by layer."},                 \
        {.name = "ep-size",                                                                        \
         .type = ITH_OPTION_INT,                                                                   \
         .default_text = "1",                                                                      \
         .help = "With --cut-weights: ranks that share the experts of a layer.",                   \
         .min = 1,                                                                                 \
         .max = 4096},                                                                             \
    {                                                                                              \
        .name = "cp-mode", .type = ITH_OPTION_WORD, .default_text = "auto",                        \
        .help = "How ranks share a prompt, as in training.", .words = "auto ulysses ring hybrid"   \
    }
#define ITH_ANSWERING_OPTIONS                                                                      \
    {.name = "max-new-tokens",                                                                     \
     .letter = 'n',                                                                                \
     .type = ITH_OPTION_INT,                                                                       \
     .default_text = "512",                                                                        \
     .help = "Most tokens of an answer.",                                                          \
     .min = 1,                                                                                     \
     .max = 1e9},                                                                                  \
        {.name = "image",                                                                          \
         .letter = 'i',                                                                            \
         .type = ITH_OPTION_PATH,                                                                  \
         .help = "An image before the first message; may be given again."},                        \
        {.name = "video",                                                                          \
         .type = ITH_OPTION_PATH,                                                                  \
         .help = "A video before the first message; may be given again."},                         \
        {.name = "image-max-pixels",                                                               \
         .type = ITH_OPTION_INT,                                                                   \
         .help = "Bring larger images, and frames of videos, down to this area first.",            \
         .min = 1,                                                                                 \
         .max = 1e12},                                                                             \
        {.name = "do-sample",                                                                      \
         .type = ITH_OPTION_WORD,                                                                  \
         .help =                                                                                   \
             "Draw tokens instead of taking the likeliest; the model's own setting when unset.",   \
         .words = "false true"},                                                                   \
        {.name = "temperature",                                                                    \
         .letter = 'T',                                                                            \
         .type = ITH_OPTION_FLOAT,                                                                 \
         .help = "Divides logits; 0 is greedy.",                                                   \
         .min = 0,                                                                                 \
         .max = 1000},                                                                             \
        {.name = "top-k",                                                                          \
         .type = ITH_OPTION_INT,                                                                   \
         .help = "Keep the k likeliest tokens; 0: all.",                                           \
         .min = 0,                                                                                 \
         .max = 1e9},                                                                              \
        {.name = "top-p",                                                                          \
         .type = ITH_OPTION_FLOAT,                                                                 \
         .help = "Keep the likeliest tokens that sum to p.",                                       \
         .min = 0,                                                                                 \
         .max = 1},                                                                                \
        {.name = "min-p",                                                                          \
         .type = ITH_OPTION_FLOAT,                                                                 \
         .help = "Drop tokens less likely than this share of the likeliest.",                      \
         .min = 0,                                                                                 \
         .max = 1},                                                                                \
        {.name = "repetition-penalty",                                                             \
         .type = ITH_OPTION_FLOAT,                                                                 \
         .help = "Above 1: past tokens get less likely.",                                          \
         .min = 0.01,                                                                              \
         .max = 100},                                                                              \
        {.name = "seed",                                                                           \
         .type = ITH_OPTION_INT,                                                                   \
         .default_text = "42",                                                                     \
         .help = "Seed of the draws.",                                                             \
         .min = 0,                                                                                 \
         .max = 9e15},                                                                             \
        {.name = "thinking",                                                                       \
         .type = ITH_OPTION_WORD,                                                                  \
         .help = "Sets enable_thinking of the template.",                                          \
         .words = "off on"},                                                                       \
        {.name = "system",                                                                         \
         .type = ITH_OPTION_TEXT,                                                                  \
         .help = "System message before each conversation."},                                      \
        {.name = "template",                                                                       \
         .type = ITH_OPTION_PATH,                                                                  \
         .help = "Chat template file instead of the model's."},                                    \
        {.name = "device",                                                                         \
         .type = ITH_OPTION_WORD,                                                                  \
         .default_text = "auto",                                                                   \
         .help = "Where to run.",                                                                  \
         .words = "auto cpu cuda"},                                                                \
        {.name = "dtype",                                                                          \
         .type = ITH_OPTION_WORD,                                                                  \
         .help = "Type of weights; the model's when unset.",                                       \
         .words = "float32 bfloat16"},                                                             \
    {                                                                                              \
        .name = "threads", .type = ITH_OPTION_INT, .default_text = "0",                            \
        .help = "Compute threads; 0: all cores.", .min = 0, .max = 4096                            \
    }

typedef struct {
    ith_tokenizer *tokenizer;
    ith_chat *chat;
    ith_media *media;           /* NULL: the model reads text only */
    ith_hf_generation defaults; /* generation_config.json */
    ith_hf_config hf;
    int32_t stop_ids[2 * ITH_HF_MAX_STOP_IDS + 1];
    int num_stop_ids;
    int thinking;       /* -1 unset */
    const char *system; /* or NULL */
    int64_t max_new;
    ith_sampling sampling;
} ith_answering;

/* Tokenizer, template, sampling settings (options over generation_config.json over the defaults of
 * transformers), stop ids (generation config, else config, and the tokenizer's eos). No weight is
 * read. */
ith_status ith_answering_open(ith_answering *a, const char *model_dir, const ith_args *args,
                              ith_error *err);
void ith_answering_close(ith_answering *a);
/* What the options say of these ranks, cp_size of which share a prompt. check: before. */
ith_ranks_options ith_answering_ranks(const ith_args *args, ith_comm *world, int64_t cp_size);
ith_status ith_answering_check_ranks(const ith_args *args, const char *command, ith_error *err);
/* Runs a command of these ranks; an error is told once, by rank 0 where they agree on it. */
ith_status ith_answering_run(const ith_args *args, double timeout_s,
                             ith_status (*command)(const ith_args *, ith_comm *, ith_error *),
                             ith_error *err);
ith_decoder_options ith_answering_decoder(const ith_answering *a, const ith_args *args,
                                          int64_t batch, int64_t capacity, int64_t max_append);
/* {role, content} appended to an array of messages. */
ith_status ith_add_message(json_t *messages, const char *role, const char *text, int64_t len,
                           ith_error *err);
/* The same with images and videos before the text: paths, ended by NULL; NULL: none. Appends them
 * to media, too. */
ith_status ith_add_media_message(const ith_answering *a, json_t *messages, const char *text,
                                 int64_t len, const char *const *images, const char *const *videos,
                                 ith_media_list *media, ith_error *err);
/* Values of --image or --video, ended by NULL; free with ith_free. */
ith_status ith_args_paths(const ith_args *args, const char *name, const char ***out,
                          ith_error *err);
/* Patches and grids of items [first, first + num) of a list, as a decoder wants them; free both
 * with ith_free. */
ith_status ith_load_media(const ith_answering *a, const ith_media_list *list, int64_t first,
                          int64_t num, float **pixels, ith_grid **grids, ith_error *err);
/* Adds what those items need. */
void ith_count_media(const ith_media_list *list, int64_t first, int64_t num,
                     ith_vision_limits *limits);
/* Ids of the prompt of HF messages, or of canonical ones with media, generation prompt included. */
ith_status ith_prompt_ids(const ith_answering *a, const json_t *messages, const json_t *tools,
                          ith_ids *out, ith_error *err);

#endif
