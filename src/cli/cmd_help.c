/* cmd_help.c - help, version, completion: pages made from the tables. */
#include "cli/commands.h"

#include "config/config.h"

#include <stdio.h>
#include <string.h>

static const ith_option help_options[] = {
    {.name = "man", .help = "Write the man page (roff) instead."},
    {.name = "config-markdown", .help = "Write docs/config.md, every configuration key, instead."},
    {0}};

static ith_status run_help(const ith_args *args, ith_error *err)
{
    if (ith_args_flag(args, "man"))
        return ith_print_page(ith_write_man_page, err);
    if (ith_args_flag(args, "config-markdown"))
        return ith_print_page(ith_config_markdown, err);
    if (args->num_positional == 0)
        return ith_print_page(ith_write_overview, err);
    const ith_command *command = ith_find_command(args->positional[0]);
    if (!command)
        return ith_fail_unknown_command(args->positional[0], err);
    ith_buf text = {0};
    ith_write_command_help(command, &text);
    ith_status status = ith_print(&text, err);
    ith_buf_deinit(&text);
    return status;
}

const ith_command ith_cmd_help = {.name = "help",
                                  .arguments = "[COMMAND]",
                                  .summary = "Show the commands, or the options of one",
                                  .options = help_options,
                                  .max_positional = 1,
                                  .words = "train plan chat generate export experts data init "
                                           "tokenize render env completion version",
                                  .run = run_help};

static ith_status run_version(const ith_args *args, ith_error *err)
{
    (void)args;
    ith_buf text = {0};
    ith_buf_puts(&text, "ithaca " ITH_VERSION "\n");
    ith_status status = ith_print(&text, err);
    ith_buf_deinit(&text);
    return status;
}

const ith_command ith_cmd_version = {
    .name = "version", .arguments = "", .summary = "Show the version", .run = run_version};

static ith_status run_completion(const ith_args *args, ith_error *err)
{
    static const struct {
        const char *shell;
        void (*write)(ith_buf *out);
    } shells[] = {{"bash", ith_write_completion_bash},
                  {"zsh", ith_write_completion_zsh},
                  {"fish", ith_write_completion_fish}};
    for (size_t i = 0; i < sizeof shells / sizeof *shells; i++)
        if (strcmp(args->positional[0], shells[i].shell) == 0)
            return ith_print_page(shells[i].write, err);
    return ith_fail(err, ITH_ERR_USAGE, "completion: found '%.60s' (use bash, zsh or fish)",
                    args->positional[0]);
}

const ith_command ith_cmd_completion = {.name = "completion",
                                        .arguments = "bash|zsh|fish",
                                        .summary = "Write a completion script for a shell",
                                        .details = "For bash: source <(ithaca completion bash)\n",
                                        .min_positional = 1,
                                        .max_positional = 1,
                                        .words = "bash zsh fish",
                                        .run = run_completion};
