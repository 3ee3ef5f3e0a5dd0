/* pages.c - help texts, the man page and shell completions, all from the command table. */
#include "cli/commands.h"

#include "base/env.h"
#include "config/config.h"

#include <stdio.h>
#include <string.h>

#define HELP_COLUMN 30
#define PAGE_WIDTH 80

/* Words of text[0..text_len) from column `indent`, where the cursor stands, broken at PAGE_WIDTH.
 */
static void write_wrapped(const char *text, size_t text_len, int indent, ith_buf *out)
{
    int column = indent;
    for (const char *p = text, *end = text + text_len; p < end;) {
        while (p < end && *p == ' ')
            p++;
        int len = 0;
        while (p + len < end && p[len] != ' ')
            len++;
        if (column > indent && column + 1 + len > PAGE_WIDTH) {
            ith_buf_printf(out, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            ith_buf_putc(out, ' ');
            column++;
        }
        ith_buf_append(out, p, len);
        column += len;
        p += len;
    }
    ith_buf_putc(out, '\n');
}

/* Each line is a paragraph of its own; lines that begin with a blank stay as they are. */
static void write_details(const char *text, ith_buf *out)
{
    for (const char *p = text; *p;) {
        size_t len = strcspn(p, "\n");
        if (*p == ' ')
            ith_buf_printf(out, "%.*s\n", (int)len, p);
        else
            write_wrapped(p, len, 0, out);
        p += len + (p[len] == '\n');
    }
}

/* "  left   text", with the text in its own column. */
static void write_row(const char *left, const char *text, int indent, ith_buf *out)
{
    ith_buf_printf(out, "  %s", left);
    int column = 2 + (int)strlen(left);
    if (column + 2 > indent)
        ith_buf_printf(out, "\n%*s", indent, "");
    else
        ith_buf_printf(out, "%*s", indent - column, "");
    write_wrapped(text, strlen(text), indent, out);
}

static void write_option_text(const ith_option *option, ith_buf *out)
{
    ith_buf_puts(out, option->help);
    if (ith_option_many_words(option))
        ith_buf_printf(out, " One of %s.", option->words);
    if (option->default_text)
        ith_buf_printf(out, " [%s]", option->default_text);
}

static void write_options(const ith_option *options, ith_buf *out)
{
    ith_buf_puts(out, "\nOptions:\n");
    for (int i = 0; i < ith_num_options(options); i++) {
        ith_buf usage = {0}, text = {0};
        ith_option_usage(&options[i], &usage);
        write_option_text(&options[i], &text);
        if (!usage.failed && !text.failed)
            write_row(usage.data, text.data, HELP_COLUMN, out);
        else
            out->failed = ITH_ERR_MEMORY;
        ith_buf_deinit(&usage);
        ith_buf_deinit(&text);
    }
    write_row("-h, --help", "Show this help.", HELP_COLUMN, out);
}

void ith_write_command_help(const ith_command *command, ith_buf *out)
{
    ith_buf_printf(out, "Usage: ithaca %s%s%s%s\n\n", command->name,
                   ith_num_options(command->options) ? " [options]" : "",
                   *command->arguments ? " " : "", command->arguments);
    ith_buf_printf(out, "%s.\n", command->summary);
    if (command->details) {
        ith_buf_putc(out, '\n');
        write_details(command->details, out);
    }
    write_options(command->options, out);
}

void ith_write_overview(ith_buf *out)
{
    ith_buf_puts(out, "Usage: ithaca COMMAND [options] [arguments]\n"
                      "\n"
                      "Fine-tunes large language models on long sequences.\n"
                      "\n"
                      "Commands:\n");
    for (int i = 0; i < ith_num_commands; i++)
        write_row(ith_commands[i]->name, ith_commands[i]->summary, 16, out);
    ith_buf_puts(out, "\n"
                      "ithaca COMMAND --help shows the options of a command.\n"
                      "Exit codes: 0 done, 1 the run failed, 2 the request was wrong.\n");
}

/* ---- man page ---- */

/* Text for roff: backslashes and dashes escaped, a leading dot or quote guarded. */
static void write_roff(const char *text, ith_buf *out)
{
    bool line_start = true;
    for (const char *p = text; *p; p++) {
        if (line_start && (*p == '.' || *p == '\''))
            ith_buf_puts(out, "\\&");
        line_start = *p == '\n';
        if (*p == '\\')
            ith_buf_puts(out, "\\e");
        else if (*p == '-')
            ith_buf_puts(out, "\\-");
        else
            ith_buf_putc(out, *p);
    }
}

static void write_man_option(const ith_option *option, ith_buf *out)
{
    ith_buf usage = {0}, text = {0};
    ith_option_usage(option, &usage);
    write_option_text(option, &text);
    if (usage.failed || text.failed) {
        out->failed = ITH_ERR_MEMORY;
    } else {
        ith_buf_puts(out, ".TP\n.B ");
        write_roff(usage.data, out);
        ith_buf_putc(out, '\n');
        write_roff(text.data, out);
        ith_buf_putc(out, '\n');
    }
    ith_buf_deinit(&usage);
    ith_buf_deinit(&text);
}

/* Every line is kept as a line of its own. */
static void write_man_lines(const char *text, ith_buf *out)
{
    for (const char *p = text; *p;) {
        size_t len = strcspn(p, "\n");
        char line[512];
        snprintf(line, sizeof line, "%.*s", (int)len, p);
        write_roff(line, out);
        ith_buf_puts(out, "\n.br\n");
        p += len + (p[len] == '\n');
    }
}

static void write_man_command(const ith_command *command, ith_buf *out)
{
    ith_buf_printf(out, ".SS ithaca %s ", command->name);
    write_roff(command->arguments, out);
    ith_buf_putc(out, '\n');
    write_roff(command->summary, out);
    ith_buf_puts(out, ".\n");
    if (command->details) {
        ith_buf_puts(out, ".PP\n");
        write_man_lines(command->details, out);
    }
    for (int i = 0; i < ith_num_options(command->options); i++)
        write_man_option(&command->options[i], out);
}

void ith_write_man_page(ith_buf *out)
{
    ith_buf_puts(out, ".\\\" Generated by `ithaca help --man`; do not edit.\n"
                      ".TH ITHACA 1 \"\" \"ithaca " ITH_VERSION "\" \"User Commands\"\n"
                      ".SH NAME\nithaca \\- fine\\-tunes large language models on long sequences\n"
                      ".SH SYNOPSIS\n.B ithaca\n.I COMMAND\n[options] [arguments]\n"
                      ".SH DESCRIPTION\nReads a configuration of LlamaFactory v1, dFactory or TRL, "
                      "data and a Hugging Face model directory, trains, and writes a Hugging Face "
                      "model directory.\n"
                      "Results go to standard output, messages to standard error.\n"
                      ".SH COMMANDS\n");
    for (int i = 0; i < ith_num_commands; i++)
        write_man_command(ith_commands[i], out);
    ith_buf_puts(out, ".SH CONFIGURATION KEYS\n");
    for (int i = 0; i < ith_config_num_keys(); i++) {
        ith_config_key key = ith_config_key_at(i);
        ith_buf_puts(out, ".TP\n.B ");
        write_roff(key.name, out);
        ith_buf_putc(out, '\n');
        write_roff(key.help, out);
        ith_buf_puts(out, " [");
        write_roff(key.default_text, out);
        ith_buf_puts(out, "]\n");
    }
    ith_buf_puts(out, ".SH ENVIRONMENT\n");
    for (int i = 0; i < ITH_ENV_COUNT; i++) {
        ith_buf_printf(out, ".TP\n.B %s\n", ith_env_table[i].name);
        write_roff(ith_env_table[i].meaning, out);
        ith_buf_puts(out, ".\n");
    }
    ith_buf_puts(out, ".SH EXIT STATUS\n0 done, 1 the run failed, 2 the request was wrong.\n");
}

/* ---- completion ---- */

static void write_command_names(ith_buf *out)
{
    for (int i = 0; i < ith_num_commands; i++)
        ith_buf_printf(out, "%s%s", i ? " " : "", ith_commands[i]->name);
}

static void write_key_names(ith_buf *out)
{
    for (int i = 0; i < ith_config_num_keys(); i++) {
        ith_config_key key = ith_config_key_at(i);
        ith_buf_printf(out, "%s%s%s=", i ? " " : "", key.name, key.is_plugin ? ".name" : "");
    }
}

void ith_write_completion_bash(ith_buf *out)
{
    ith_buf_puts(out, "# bash completion of ithaca; generated by `ithaca completion bash`\n"
                      "_ithaca()\n{\n"
                      "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
                      "    local cmd=${COMP_WORDS[1]} words= keys=\n"
                      "    COMPREPLY=()\n"
                      "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
                      "        COMPREPLY=($(compgen -W \"");
    write_command_names(out);
    ith_buf_puts(out, " --help --version\" -- \"$cur\"))\n"
                      "        return\n    fi\n    case \"$cmd $prev\" in\n");
    for (int i = 0; i < ith_num_commands; i++)
        for (int k = 0; k < ith_num_options(ith_commands[i]->options); k++) {
            const ith_option *option = &ith_commands[i]->options[k];
            if (option->type == ITH_OPTION_WORD)
                ith_buf_printf(out,
                               "    \"%s --%s\") COMPREPLY=($(compgen -W \"%s\" -- \"$cur\")); "
                               "return ;;\n",
                               ith_commands[i]->name, option->name, option->words);
        }
    ith_buf_puts(out, "    esac\n    case \"$cmd\" in\n");
    for (int i = 0; i < ith_num_commands; i++) {
        const ith_command *command = ith_commands[i];
        ith_buf_printf(out, "    %s) words=\"--help", command->name);
        for (int k = 0; k < ith_num_options(command->options); k++)
            ith_buf_printf(out, " --%s", command->options[k].name);
        ith_buf_puts(out, "\"");
        if (command->words)
            ith_buf_printf(out, " keys=\"%s\"", command->words);
        if (command->takes_overrides) {
            ith_buf_puts(out, " keys=\"");
            write_key_names(out);
            ith_buf_puts(out, "\"");
        }
        ith_buf_puts(out, " ;;\n");
    }
    ith_buf_puts(out, "    esac\n"
                      "    case \"$cur\" in\n"
                      "    -*) COMPREPLY=($(compgen -W \"$words\" -- \"$cur\")) ;;\n"
                      "    *) COMPREPLY=($(compgen -W \"$keys\" -- \"$cur\") $(compgen -f -- "
                      "\"$cur\")) ;;\n"
                      "    esac\n"
                      "    case \"${COMPREPLY[0]}\" in *=) compopt -o nospace 2>/dev/null ;; esac\n"
                      "}\n"
                      "complete -o filenames -F _ithaca ithaca\n");
}

/* Text inside single quotes of a shell; zsh's own separators are escaped too. */
static void write_quoted(const char *text, const char *escaped, ith_buf *out)
{
    for (const char *p = text; *p; p++) {
        if (*p == '\'')
            ith_buf_puts(out, "'\\''");
        else if (strchr(escaped, *p))
            ith_buf_printf(out, "\\%c", *p);
        else
            ith_buf_putc(out, *p);
    }
}

static void write_zsh_option(const ith_option *option, ith_buf *out)
{
    ith_buf_printf(out, "            '--%s%s[", option->name,
                   option->type == ITH_OPTION_FLAG ? "" : "=");
    write_quoted(option->help, "[]:\\", out);
    ith_buf_putc(out, ']');
    if (option->type == ITH_OPTION_PATH)
        ith_buf_puts(out, ":path:_files");
    else if (option->type == ITH_OPTION_WORD)
        ith_buf_printf(out, ":word:(%s)", option->words);
    else if (option->type != ITH_OPTION_FLAG)
        ith_buf_puts(out, ":value:");
    ith_buf_puts(out, "' \\\n");
}

void ith_write_completion_zsh(ith_buf *out)
{
    ith_buf_puts(out, "#compdef ithaca\n"
                      "# zsh completion; generated by `ithaca completion zsh`\n"
                      "_ithaca()\n{\n    local -a commands\n    commands=(\n");
    for (int i = 0; i < ith_num_commands; i++) {
        ith_buf_printf(out, "        '%s:", ith_commands[i]->name);
        write_quoted(ith_commands[i]->summary, ":\\", out);
        ith_buf_puts(out, "'\n");
    }
    ith_buf_puts(out, "    )\n"
                      "    if (( CURRENT == 2 )); then\n"
                      "        _describe command commands\n        return\n    fi\n"
                      "    local cmd=${words[2]}\n"
                      "    shift words\n    (( CURRENT-- ))\n"
                      "    case $cmd in\n");
    for (int i = 0; i < ith_num_commands; i++) {
        const ith_command *command = ith_commands[i];
        ith_buf_printf(out, "    %s)\n        _arguments \\\n", command->name);
        for (int k = 0; k < ith_num_options(command->options); k++)
            write_zsh_option(&command->options[k], out);
        ith_buf_puts(out, "            '--help[Show the help]' \\\n");
        if (command->words)
            ith_buf_printf(out, "            '*:argument:(%s)' ;;\n", command->words);
        else
            ith_buf_puts(out, "            '*:file:_files' ;;\n");
    }
    ith_buf_puts(out, "    esac\n}\n_ithaca \"$@\"\n");
}

static void write_fish_option(const ith_command *command, const ith_option *option, ith_buf *out)
{
    ith_buf_printf(out, "complete -c ithaca -n '__fish_seen_subcommand_from %s' -l %s",
                   command->name, option->name);
    if (option->letter)
        ith_buf_printf(out, " -s %c", option->letter);
    if (option->type == ITH_OPTION_WORD)
        ith_buf_printf(out, " -x -a '%s'", option->words);
    else if (option->type == ITH_OPTION_PATH)
        ith_buf_puts(out, " -r -F");
    else if (option->type != ITH_OPTION_FLAG)
        ith_buf_puts(out, " -x");
    ith_buf_puts(out, " -d '");
    for (const char *p = option->help; *p; p++) {
        if (*p == '\'' || *p == '\\')
            ith_buf_putc(out, '\\');
        ith_buf_putc(out, *p);
    }
    ith_buf_puts(out, "'\n");
}

void ith_write_completion_fish(ith_buf *out)
{
    ith_buf_puts(out, "# fish completion of ithaca; generated by `ithaca completion fish`\n");
    for (int i = 0; i < ith_num_commands; i++) {
        const ith_command *command = ith_commands[i];
        ith_buf_printf(out, "complete -c ithaca -n __fish_use_subcommand -f -a %s -d '%s'\n",
                       command->name, command->summary);
        for (int k = 0; k < ith_num_options(command->options); k++)
            write_fish_option(command, &command->options[k], out);
        if (command->words)
            ith_buf_printf(out,
                           "complete -c ithaca -n '__fish_seen_subcommand_from %s' -f -a '%s'\n",
                           command->name, command->words);
        if (command->takes_overrides) {
            ith_buf_printf(out, "complete -c ithaca -n '__fish_seen_subcommand_from %s' -a '",
                           command->name);
            write_key_names(out);
            ith_buf_puts(out, "'\n");
        }
    }
}
