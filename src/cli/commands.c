/* commands.c - the commands, and how one is run. */
#include "cli/commands.h"

#include "config/yaml.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

const ith_command *const ith_commands[] = {
    &ith_cmd_train,   &ith_cmd_plan,       &ith_cmd_chat, &ith_cmd_generate, &ith_cmd_export,
    &ith_cmd_experts, &ith_cmd_data,       &ith_cmd_init, &ith_cmd_tokenize, &ith_cmd_render,
    &ith_cmd_env,     &ith_cmd_completion, &ith_cmd_help, &ith_cmd_version};
const int ith_num_commands = (int)(sizeof ith_commands / sizeof *ith_commands);

const ith_command *ith_find_command(const char *name)
{
    for (int i = 0; i < ith_num_commands; i++)
        if (strcmp(ith_commands[i]->name, name) == 0)
            return ith_commands[i];
    return NULL;
}

ith_status ith_fail_unknown_command(const char *name, ith_error *err)
{
    const char *names[sizeof ith_commands / sizeof *ith_commands];
    for (int i = 0; i < ith_num_commands; i++)
        names[i] = ith_commands[i]->name;
    const char *near = ith_nearest_name(name, names, ith_num_commands);
    if (near)
        return ith_fail(err, ITH_ERR_USAGE, "%.60s: unknown command (did you mean %s?)", name,
                        near);
    return ith_fail(err, ITH_ERR_USAGE, "%.60s: unknown command (ithaca help lists all)", name);
}

ith_status ith_print(const ith_buf *text, ith_error *err)
{
    ITH_TRY(ith_buf_check(text, "output", err));
    if (text->len && fwrite(text->data, 1, (size_t)text->len, stdout) != (size_t)text->len)
        return ith_fail(err, ITH_ERR_IO, "stdout: cannot write: %s", strerror(errno));
    return ITH_OK;
}

ith_status ith_read_stdin(ith_buf *text, ith_error *err)
{
    char chunk[65536];
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, stdin)) > 0;)
        ith_buf_append(text, chunk, (int64_t)n);
    if (ferror(stdin))
        return ith_fail(err, ITH_ERR_IO, "stdin: cannot read");
    return ith_buf_check(text, "stdin", err);
}

ith_status ith_print_page(void (*write)(ith_buf *out), ith_error *err)
{
    ith_buf text = {0};
    write(&text);
    ith_status status = ith_print(&text, err);
    ith_buf_deinit(&text);
    return status;
}

static ith_status print_help(const ith_command *command, ith_error *err)
{
    ith_buf text = {0};
    ith_write_command_help(command, &text);
    ith_status status = ith_print(&text, err);
    ith_buf_deinit(&text);
    return status;
}

static ith_status check_count(const ith_command *command, const ith_args *args, ith_error *err)
{
    if (args->num_positional < command->min_positional)
        return ith_fail(err, ITH_ERR_USAGE, "%s: an argument is missing (use ithaca %s %s)",
                        command->name, command->name, command->arguments);
    if (command->max_positional >= 0 && args->num_positional > command->max_positional)
        return ith_fail(err, ITH_ERR_USAGE,
                        "%s: '%.200s': one argument too many (use ithaca %s%s%s)", command->name,
                        args->positional[command->max_positional], command->name,
                        *command->arguments ? " " : "", command->arguments);
    return ITH_OK;
}

ith_status ith_run_command(const ith_command *command, int argc, char *const *argv, ith_error *err)
{
    ith_args args;
    ITH_WRAP(ith_args_parse(&args, command->options, command->takes_overrides, argc, argv, err),
             err, "%s", command->name);
    ith_status status = ITH_OK;
    if (args.help)
        status = print_help(command, err);
    else if ((status = check_count(command, &args, err)) == ITH_OK)
        status = command->run(&args, err);
    ith_args_deinit(&args);
    return status;
}
