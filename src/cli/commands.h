/* commands.h - the table of commands.
 *
 * Each command is one cmd_*.c that defines one ith_command; commands.c lists them in the order that
 * help shows. A command writes results to stdout, messages through ith_log, and returns its
 * failure; main.c prints it and picks the exit code. */
#ifndef ITH_CLI_COMMANDS_H
#define ITH_CLI_COMMANDS_H

#include "cli/options.h"

typedef struct {
    const char *name;
    const char *arguments; /* "CONFIG [key=value ...]", or "" */
    const char *summary;   /* one line, no full stop */
    const char *details;   /* for --help and the man page: a paragraph a line, each ending with \n;
                            * lines that begin with a blank are shown as they are */
    const ith_option *options;          /* may be NULL */
    int min_positional, max_positional; /* max -1: any number */
    bool takes_overrides;               /* positional key=value, also as --key=value */
    const char *words; /* what the first argument can be, for completion; NULL: files */
    ith_status (*run)(const ith_args *args, ith_error *err);
} ith_command;

extern const ith_command *const ith_commands[];
extern const int ith_num_commands;

extern const ith_command ith_cmd_train, ith_cmd_plan, ith_cmd_chat, ith_cmd_generate,
    ith_cmd_export, ith_cmd_experts, ith_cmd_data, ith_cmd_init, ith_cmd_tokenize, ith_cmd_render,
    ith_cmd_env, ith_cmd_completion, ith_cmd_help, ith_cmd_version;

/* NULL when there is none. */
const ith_command *ith_find_command(const char *name);
/* "unknown command (did you mean train?)". */
ith_status ith_fail_unknown_command(const char *name, ith_error *err);
/* Parses the arguments of a command, answers --help, checks their number, runs it. */
ith_status ith_run_command(const ith_command *command, int argc, char *const *argv, ith_error *err);

/* Pages made from the tables. */
void ith_write_overview(ith_buf *out);
void ith_write_command_help(const ith_command *command, ith_buf *out);
void ith_write_man_page(ith_buf *out);
void ith_write_completion_bash(ith_buf *out);
void ith_write_completion_zsh(ith_buf *out);
void ith_write_completion_fish(ith_buf *out);
/* Writes a page to stdout. */
ith_status ith_print_page(void (*write)(ith_buf *out), ith_error *err);
/* Appends all of stdin. */
ith_status ith_read_stdin(ith_buf *text, ith_error *err);
/* Writes bytes to stdout. */
ith_status ith_print(const ith_buf *text, ith_error *err);

#endif
