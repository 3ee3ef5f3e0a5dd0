/* cmd_stub.c - commands that are not built yet. Each leaves this file when its cmd_*.c arrives. */
#include "cli/commands.h"

#define STUB(command, arguments_text, summary_text, overrides)                                     \
    static ith_status run_##command(const ith_args *args, ith_error *err)                          \
    {                                                                                              \
        (void)args;                                                                                \
        return ith_fail(err, ITH_ERR_UNSUPPORTED, #command ": not built yet");                     \
    }                                                                                              \
    const ith_command ith_cmd_##command = {.name = #command,                                       \
                                           .arguments = (arguments_text),                          \
                                           .summary = (summary_text),                              \
                                           .max_positional = -1,                                   \
                                           .takes_overrides = (overrides),                         \
                                           .run = run_##command}

STUB(experts, "merge|split MODEL OUTPUT", "Change the layout of expert weights", false);
