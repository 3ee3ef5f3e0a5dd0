/* cmd_experts.c - `ithaca experts merge|split`: the layout of expert weights on disk. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "checkpoint/experts.h"
#include "cli/commands.h"

static ith_status run_experts(const ith_args *args, ith_error *err)
{
    const char *mode = args->positional[0];
    bool merge = strcmp(mode, "merge") == 0;
    struct timespec t0, t1;
    ith_experts_report r;
    if (!merge && strcmp(mode, "split") != 0)
        return ith_fail(err, ITH_ERR_USAGE, "experts: '%.60s': use merge or split", mode);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    ITH_TRY(ith_experts_convert(args->positional[1], args->positional[2], merge,
                                (int64_t)(ith_args_float(args, "shard-size") * 1e9), &r, err));
    clock_gettime(CLOCK_MONOTONIC, &t1);
    double s = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
    printf("%s: %lld tensors became %lld (%lld changed), %.3g GB in %lld file(s), %.2g GB/s",
           args->positional[2], (long long)r.num_in, (long long)r.num_out, (long long)r.num_changed,
           (double)r.bytes / 1e9, (long long)r.num_files, (double)r.bytes / 1e9 / s);
    printf(r.num_kept ? "; %lld file(s) were there\n" : "\n", (long long)r.num_kept);
    return ITH_OK;
}

static const ith_option options[] = {{.name = "shard-size",
                                      .type = ITH_OPTION_FLOAT,
                                      .default_text = "4",
                                      .help = "Most GB (10^9 bytes) of a weight file.",
                                      .min = 1e-6,
                                      .max = 1e6},
                                     {.name = NULL}};

const ith_command ith_cmd_experts = {
    .name = "experts",
    .arguments = "merge|split MODEL OUTPUT",
    .summary = "Change the layout of expert weights",
    .details = "merge stacks the experts of a projection into one tensor (as dFactory trains "
               "them), split takes them apart (as they are published).\n"
               "No byte is changed; each file is read back and compared. A second call goes on "
               "where a first one stopped. Training reads and writes both layouts.\n",
    .options = options,
    .min_positional = 3,
    .max_positional = 3,
    .run = run_experts};
