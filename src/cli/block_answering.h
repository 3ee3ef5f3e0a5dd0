/* block_answering.h - answers of diffusion models: the options that chat and generate share, and a
 * block that resolves in place on a terminal. */
#ifndef ITH_CLI_BLOCK_ANSWERING_H
#define ITH_CLI_BLOCK_ANSWERING_H

#include "cli/answering.h"
#include "generate/block_decoder.h"

/* Rows for option tables. */
#define ITH_BLOCK_OPTIONS                                                                          \
    {.name = "block-size",                                                                         \
     .type = ITH_OPTION_INT,                                                                       \
     .default_text = "32",                                                                         \
     .help = "Diffusion: tokens of a block, as in training.",                                      \
     .min = 1,                                                                                     \
     .max = 65536},                                                                                \
        {.name = "threshold",                                                                      \
         .type = ITH_OPTION_FLOAT,                                                                 \
         .default_text = "0.95",                                                                   \
         .help = "Diffusion: tokens more likely than this are written at once; above 1: none.",    \
         .min = 0,                                                                                 \
         .max = 2},                                                                                \
        {.name = "steps",                                                                          \
         .type = ITH_OPTION_INT,                                                                   \
         .help = "Diffusion: most forwards of a block; unset: one for each token.",                \
         .min = 1,                                                                                 \
         .max = 65536},                                                                            \
        {.name = "minimal-topk",                                                                   \
         .type = ITH_OPTION_INT,                                                                   \
         .default_text = "1",                                                                      \
         .help = "Diffusion: steps are at most max-new-tokens over this.",                         \
         .min = 1,                                                                                 \
         .max = 65536},                                                                            \
        {.name = "edit-threshold",                                                                 \
         .type = ITH_OPTION_FLOAT,                                                                 \
         .help = "Diffusion: replace written tokens of the block when another id is more likely "  \
                 "than this (LLaDA2.1); unset: never.",                                            \
         .min = 0,                                                                                 \
         .max = 1},                                                                                \
        {.name = "max-post-steps",                                                                 \
         .type = ITH_OPTION_INT,                                                                   \
         .default_text = "16",                                                                     \
         .help = "Diffusion: most forwards that only edit, in each block.",                        \
         .min = 0,                                                                                 \
         .max = 65536},                                                                            \
        {.name = "early-stop",                                                                     \
         .type = ITH_OPTION_FLAG,                                                                  \
         .help = "Diffusion: stop within a block once all before the end token is written."},      \
    {                                                                                              \
        .name = "mask-id", .type = ITH_OPTION_INT,                                                 \
        .help = "Diffusion: id of the mask token; the model's when unset.", .min = 0,              \
        .max = 2147483647                                                                          \
    }

/* Fails when an option has no meaning for a diffusion model, or the mask token is not known. */
ith_status ith_block_settings(const ith_answering *a, const ith_args *args, ith_block_how *how,
                              ith_error *err);

/* Fails when one of these options was given, for a model that is none of diffusion. */
ith_status ith_block_options_refuse(const ith_answering *a, const ith_args *args, ith_error *err);

/* One answer as it is written, on a terminal: the running block is drawn again at every token, with
 * marks for masks; finished blocks stay. */
typedef struct {
    const ith_answering *a;
    const ith_block_answer *answer;
    int32_t mask_id;
    int64_t block, begin; /* of the running block; -1: none yet */
    int64_t settled;      /* tokens of the row that stay */
    ith_token_stream stream;
    int width, column; /* of the terminal; where the running block begins */
    int rows;          /* below that, drawn so far */
    ith_status status;
    ith_error err;
} ith_block_view;

/* Looks at `answer`, which the decoder is about to fill by `how`; sets how->written. */
void ith_block_view_begin(ith_block_view *v, const ith_answering *a, ith_block_how *how,
                          const ith_block_answer *answer);
/* The answer is complete: draws what is left of it. */
ith_status ith_block_view_end(ith_block_view *v, ith_error *err);

/* Rows and column after `text`, begun in *column of a terminal of `width` columns. */
int ith_terminal_advance(const char *text, int64_t len, int width, int *column);

#endif
