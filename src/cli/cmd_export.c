/* cmd_export.c - `ithaca export`: a model directory again, with another type or shard size. */
#include "base/file.h"
#include "checkpoint/model_dir.h"
#include "cli/commands.h"

static ith_status run_export(const ith_args *args, ith_error *err)
{
    static const ith_dtype types[] = {ITH_BF16, ITH_F32, ITH_F16};
    ith_st_reader *reader = NULL;
    int dtype = ith_args_word(args, "dtype");
    ITH_TRY(ith_model_dir_check(args->positional[0], ITH_DIR_CONFIG | ITH_DIR_WEIGHTS, err));
    ITH_TRY(ith_st_open(&reader, args->positional[0], err));
    ith_model_write w = {.source = args->positional[0],
                         .weights = reader,
                         .set_dtype = dtype >= 0,
                         .dtype = dtype >= 0 ? types[dtype] : ITH_BF16,
                         .max_shard_bytes = (int64_t)(ith_args_float(args, "shard-size") * 1e9)};
    ith_status status = ith_model_dir_write(args->positional[1], &w, err);
    ith_st_close(reader);
    return status;
}

static const ith_option options[] = {{.name = "dtype",
                                      .type = ITH_OPTION_WORD,
                                      .help = "Type of the weights; the source's when unset.",
                                      .words = "bfloat16 float32 float16"},
                                     {.name = "shard-size",
                                      .type = ITH_OPTION_FLOAT,
                                      .default_text = "4",
                                      .help = "Most GB (10^9 bytes) of a weight file.",
                                      .min = 1e-6,
                                      .max = 1e6},
                                     {.name = NULL}};

const ith_command ith_cmd_export = {
    .name = "export",
    .arguments = "MODEL OUTPUT",
    .summary = "Write a model with another shard size or type",
    .details = "Copies everything else of the directory; never writes into MODEL itself.\n",
    .options = options,
    .min_positional = 2,
    .max_positional = 2,
    .run = run_export};
