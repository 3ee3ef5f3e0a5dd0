/* options.c - parsing by table. */
#include "cli/options.h"

#include "base/words.h"
#include "config/yaml.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ith_num_options(const ith_option *options)
{
    int n = 0;
    while (options && options[n].name)
        n++;
    ITH_ASSERT(n <= ITH_MAX_OPTIONS);
    return n;
}

/* Longer lists of words stand in the help text. */
#define MANY_WORDS_BYTES 75

static int find_word(const char *words, const char *text)
{
    int len = 0;
    for (int i = 0;; i++) {
        const char *word = ith_word(words, i, &len);
        if (!word)
            return -1;
        if (strlen(text) == (size_t)len && memcmp(word, text, (size_t)len) == 0)
            return i;
    }
}

bool ith_option_many_words(const ith_option *option)
{
    return option->type == ITH_OPTION_WORD && strlen(option->words) > MANY_WORDS_BYTES;
}

void ith_option_usage(const ith_option *option, ith_buf *out)
{
    static const char *const arguments[] = {"", "N", "X", "TEXT", "PATH", "WORD"};
    if (option->letter)
        ith_buf_printf(out, "-%c, ", option->letter);
    ith_buf_printf(out, "--%s", option->name);
    if (option->type == ITH_OPTION_FLAG)
        return;
    if (option->type != ITH_OPTION_WORD || ith_option_many_words(option)) {
        ith_buf_printf(out, " %s", arguments[option->type]);
        return;
    }
    int len = 0;
    for (int i = 0;; i++) {
        const char *word = ith_word(option->words, i, &len);
        if (!word)
            break;
        ith_buf_printf(out, "%s%.*s", i ? "|" : " ", len, word);
    }
}

static bool parse_int(const char *text, int64_t *out)
{
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno == ERANGE)
        return false;
    *out = value;
    return true;
}

static bool parse_float(const char *text, double *out)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value))
        return false;
    *out = value;
    return true;
}

static ith_status fail_value(const ith_option *option, const char *text, ith_error *err)
{
    char wanted[400] = "text";
    const char *noun = option->type == ITH_OPTION_INT ? "an integer" : "a number";
    bool any = !(option->min < 0 || option->min > 0 || option->max > 0);
    if (option->type == ITH_OPTION_WORD) {
        int used = snprintf(wanted, sizeof wanted, "one of "), len = 0;
        for (int i = 0; used < (int)sizeof wanted; i++) {
            const char *word = ith_word(option->words, i, &len);
            if (!word)
                break;
            used += snprintf(wanted + used, sizeof wanted - (size_t)used, "%s%.*s", i ? ", " : "",
                             len, word);
        }
    } else if (any) {
        snprintf(wanted, sizeof wanted, "%s", noun);
    } else if (option->max >= 1e15) {
        snprintf(wanted, sizeof wanted, "%s >= %.15g", noun, option->min);
    } else {
        snprintf(wanted, sizeof wanted, "%s from %.15g to %.15g", noun, option->min, option->max);
    }
    return ith_fail(err, ITH_ERR_USAGE, "--%s: found '%.200s' (use %s)", option->name, text,
                    wanted);
}

static ith_status check_value(const ith_option *option, const char *text, ith_error *err)
{
    int64_t integer = 0;
    double number = 0;
    bool any = !(option->min < 0 || option->min > 0 || option->max > 0);
    switch (option->type) {
    case ITH_OPTION_INT:
        if (!parse_int(text, &integer))
            return fail_value(option, text, err);
        number = (double)integer;
        break;
    case ITH_OPTION_FLOAT:
        if (!parse_float(text, &number))
            return fail_value(option, text, err);
        break;
    case ITH_OPTION_WORD:
        return find_word(option->words, text) < 0 ? fail_value(option, text, err) : ITH_OK;
    case ITH_OPTION_FLAG:
    case ITH_OPTION_TEXT:
    case ITH_OPTION_PATH:
        return ITH_OK;
    }
    if (!any && (number < option->min || number > option->max))
        return fail_value(option, text, err);
    return ITH_OK;
}

static ith_status fail_unknown(const ith_option *options, const char *arg, ith_error *err)
{
    const char *names[ITH_MAX_OPTIONS + 1];
    char name[64];
    int n = ith_num_options(options);
    for (int i = 0; i < n; i++)
        names[i] = options[i].name;
    names[n] = "help";
    snprintf(name, sizeof name, "%.*s", (int)strcspn(arg + 2, "="), arg + 2);
    const char *near = ith_nearest_name(name, names, n + 1);
    if (near)
        return ith_fail(err, ITH_ERR_USAGE, "--%s: unknown option (did you mean --%s?)", name,
                        near);
    return ith_fail(err, ITH_ERR_USAGE, "--%s: unknown option (--help lists all)", name);
}

typedef struct {
    ith_args args;
    bool takes_overrides;
    int argc;
    char *const *argv;
    int at; /* next argument */
} parser;

/* The value of a row: after '=', attached to the letter, or the next argument. */
static ith_status take_value(parser *p, int idx, const char *attached, ith_error *err)
{
    const ith_option *option = &p->args.options[idx];
    const char *value = attached;
    if (option->type == ITH_OPTION_FLAG) {
        if (attached)
            return ith_fail(err, ITH_ERR_USAGE, "--%s: takes no value", option->name);
        value = "true";
    } else if (!value) {
        if (p->at == p->argc)
            return ith_fail(err, ITH_ERR_USAGE, "--%s: the value is missing", option->name);
        value = p->argv[p->at++];
    }
    ITH_TRY(check_value(option, value, err));
    p->args.values[idx] = value;
    p->args.given[idx] = true;
    p->args.all[p->args.num_all] = value;
    p->args.all_rows[p->args.num_all++] = idx;
    return ITH_OK;
}

static ith_status parse_long(parser *p, const char *arg, ith_error *err)
{
    const char *name = arg + 2, *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    if (strcmp(name, "help") == 0) {
        p->args.help = true;
        return ITH_OK;
    }
    for (int i = 0; i < ith_num_options(p->args.options); i++)
        if (strlen(p->args.options[i].name) == len &&
            memcmp(p->args.options[i].name, name, len) == 0)
            return take_value(p, i, equals ? equals + 1 : NULL, err);
    if (p->takes_overrides && equals) {
        p->args.positional[p->args.num_positional++] = arg;
        return ITH_OK;
    }
    return fail_unknown(p->args.options, arg, err);
}

/* -abc: flags may share a dash; a row with a value takes the rest or the next argument. */
static ith_status parse_letters(parser *p, const char *arg, ith_error *err)
{
    for (const char *c = arg + 1; *c; c++) {
        int idx = 0, n = ith_num_options(p->args.options);
        while (idx < n && p->args.options[idx].letter != *c)
            idx++;
        if (*c == 'h' && idx == n) {
            p->args.help = true;
            continue;
        }
        if (idx == n)
            return ith_fail(err, ITH_ERR_USAGE, "-%c: unknown option (--help lists all)", *c);
        if (p->args.options[idx].type == ITH_OPTION_FLAG) {
            ITH_TRY(take_value(p, idx, NULL, err));
            continue;
        }
        return take_value(p, idx, c[1] ? c + 1 : NULL, err);
    }
    return ITH_OK;
}

static ith_status parse_all(parser *p, ith_error *err)
{
    bool only_positional = false;
    while (p->at < p->argc) {
        const char *arg = p->argv[p->at++];
        if (only_positional || arg[0] != '-' || arg[1] == '\0')
            p->args.positional[p->args.num_positional++] = arg;
        else if (strcmp(arg, "--") == 0)
            only_positional = true;
        else if (arg[1] == '-')
            ITH_TRY(parse_long(p, arg, err));
        else
            ITH_TRY(parse_letters(p, arg, err));
    }
    return ITH_OK;
}

ith_status ith_args_parse(ith_args *out, const ith_option *options, bool takes_overrides, int argc,
                          char *const *argv, ith_error *err)
{
    parser p = {.args = {.options = options},
                .takes_overrides = takes_overrides,
                .argc = argc,
                .argv = argv};
    ITH_TRY(ith_alloc_zero((void **)&p.args.positional, argc + 1,
                           (int64_t)sizeof *p.args.positional, "arguments", err));
    int64_t most = 0; /* flags may share an argument */
    for (int i = 0; i < argc; i++)
        most += (int64_t)strlen(argv[i]) + 1;
    ith_status status =
        ith_alloc((void **)&p.args.all, (most + 1) * (int64_t)sizeof *p.args.all, "arguments", err);
    if (status == ITH_OK)
        status = ith_alloc((void **)&p.args.all_rows, (most + 1) * (int64_t)sizeof *p.args.all_rows,
                           "arguments", err);
    for (int i = 0; i < ith_num_options(options); i++)
        p.args.values[i] = options[i].default_text;
    if (status == ITH_OK)
        status = parse_all(&p, err);
    if (status == ITH_OK)
        *out = p.args;
    else
        ith_args_deinit(&p.args);
    return status;
}

void ith_args_deinit(ith_args *args)
{
    ith_free(args->positional);
    ith_free(args->all);
    ith_free(args->all_rows);
    args->positional = NULL;
    args->all = NULL;
    args->all_rows = NULL;
    args->num_positional = 0;
}

static int find_option(const ith_args *args, const char *name)
{
    int n = ith_num_options(args->options), idx = 0;
    while (idx < n && strcmp(args->options[idx].name, name) != 0)
        idx++;
    ITH_ASSERT(idx < n);
    return idx;
}

bool ith_args_flag(const ith_args *args, const char *name)
{
    int idx = find_option(args, name);
    ITH_ASSERT(args->options[idx].type == ITH_OPTION_FLAG);
    return args->values[idx] != NULL;
}

int64_t ith_args_int(const ith_args *args, const char *name)
{
    int idx = find_option(args, name);
    int64_t value = INT64_MIN;
    ITH_ASSERT(args->options[idx].type == ITH_OPTION_INT);
    if (args->values[idx])
        ITH_ASSERT(parse_int(args->values[idx], &value));
    return value;
}

double ith_args_float(const ith_args *args, const char *name)
{
    int idx = find_option(args, name);
    double value = (double)NAN;
    ITH_ASSERT(args->options[idx].type == ITH_OPTION_FLOAT);
    if (args->values[idx])
        ITH_ASSERT(parse_float(args->values[idx], &value));
    return value;
}

const char *ith_args_text(const ith_args *args, const char *name)
{
    int idx = find_option(args, name);
    ITH_ASSERT(args->options[idx].type >= ITH_OPTION_TEXT);
    return args->values[idx];
}

int ith_args_word(const ith_args *args, const char *name)
{
    int idx = find_option(args, name);
    ITH_ASSERT(args->options[idx].type == ITH_OPTION_WORD);
    return args->values[idx] ? find_word(args->options[idx].words, args->values[idx]) : -1;
}

const char *ith_args_each(const ith_args *args, const char *name, int i)
{
    int idx = find_option(args, name);
    for (int k = 0; k < args->num_all; k++)
        if (args->all_rows[k] == idx && i-- == 0)
            return args->all[k];
    return NULL;
}

bool ith_args_given(const ith_args *args, const char *name)
{
    return args->given[find_option(args, name)];
}
