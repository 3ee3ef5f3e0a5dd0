/* env.c - the table of environment variables. */
#include "base/env.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

const ith_env_row ith_env_table[ITH_ENV_COUNT] = {
    [ITH_ENV_LOG] =
        {"ITH_LOG", "info",
         "log levels: LEVEL or SUBSYSTEM:LEVEL, comma-separated (debug, info, warn, error)"},
    [ITH_ENV_FAULT] =
        {"ITH_FAULT", "",
         "makes the n-th operation fail, for tests: alloc:N, read:N, write:N; kill:N ends the "
         "process "
         "at its n-th write; verify:N plants a difference at the n-th check of `verify: true`; "
         "comma-separated"},
    [ITH_ENV_THREADS] = {"ITH_THREADS", "all cores", "number of compute threads"},
    [ITH_ENV_CPU] = {"ITH_CPU", "best",
                     "CPU kernels: ref (plain C), generic, avx2, avx512, avx512bf16, amx; "
                     "unset: the best but amx"},
    [ITH_ENV_ALLOW_EXTRA_KEYS] =
        {"ALLOW_EXTRA_KEYS", "0",
         "unknown top-level configuration keys are ignored instead of being an error"},
    [ITH_ENV_NO_COLOR] = {"NO_COLOR", "", "any value: no colours on the terminal"},
    [ITH_ENV_CUDA_PLUGIN] = {"ITH_CUDA_PLUGIN", "",
                             "path of the CUDA plug-in, instead of the search beside the program"},
    [ITH_ENV_MPI_PLUGIN] = {"ITH_MPI_PLUGIN", "",
                            "path of the MPI plug-in, instead of the search beside the program"},
    [ITH_ENV_LINKS] = {"ITH_LINKS", "the first that works",
                       "how GPUs exchange: peer (copies between GPUs of one machine) or nccl"},
    [ITH_ENV_MEETING_TIMEOUT] = {"ITH_MEETING_TIMEOUT", "300",
                                 "seconds that ranks over TCP wait for each other at the start"},
    [ITH_ENV_SHARE_GPU] =
        {"ITH_SHARE_GPU", "0",
         "for tests: ranks beyond the number of GPUs share them, and each plans with its part of "
         "the memory that is free"},
};

const char *ith_env(ith_env_id id)
{
    const char *value = getenv(ith_env_table[id].name);
    return value && value[0] ? value : NULL;
}

bool ith_env_truthy(ith_env_id id)
{
    static const char *const words[] = {"true", "yes", "on", "t", "y", "1"};
    const char *value = ith_env(id);
    for (size_t i = 0; value && i < sizeof words / sizeof *words; i++)
        if (strcasecmp(value, words[i]) == 0)
            return true;
    return false;
}

static ith_status apply_fault(const char *spec, ith_error *err)
{
    static const char *const kinds[ITH_FAULT_KINDS] = {
        "alloc:", "read:", "write:", "kill:", "verify:"};
    for (const char *p = spec; *p;) {
        size_t len = strcspn(p, ",");
        int kind = 0;
        while (kind < ITH_FAULT_KINDS && strncmp(p, kinds[kind], strlen(kinds[kind])) != 0)
            kind++;
        char *end = NULL;
        long long n = kind < ITH_FAULT_KINDS ? strtoll(p + strlen(kinds[kind]), &end, 10) : 0;
        if (n <= 0 || end != p + len)
            return ith_fail(err, ITH_ERR_USAGE,
                            "ITH_FAULT: '%.*s' is not alloc:N, read:N, write:N, kill:N or verify:N",
                            (int)len, p);
        ith_fault_set((ith_fault_kind)kind, n);
        p += len + (p[len] == ',');
    }
    return ITH_OK;
}

ith_status ith_env_apply(ith_error *err)
{
    if (ith_env(ITH_ENV_LOG))
        ITH_TRY(ith_log_set_levels(ith_env(ITH_ENV_LOG), err));
    if (ith_env(ITH_ENV_FAULT))
        ITH_TRY(apply_fault(ith_env(ITH_ENV_FAULT), err));
    return ITH_OK;
}
