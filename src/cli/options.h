/* options.h - command options as tables: parsing, --help, man page and completion read the same
 * rows.
 *
 * A table ends with a row whose name is NULL. Values are checked while parsing, so getters cannot
 * fail. --name value, --name=value, -n value, -nvalue; `--` ends the options; of an option given
 * more than once the last one wins, where the command does not read each. A flag takes no value. */
#ifndef ITH_CLI_OPTIONS_H
#define ITH_CLI_OPTIONS_H

#include "base/mem.h"

#define ITH_MAX_OPTIONS 48

typedef enum {
    ITH_OPTION_FLAG,
    ITH_OPTION_INT,
    ITH_OPTION_FLOAT,
    ITH_OPTION_TEXT,
    ITH_OPTION_PATH, /* text; completion offers files */
    ITH_OPTION_WORD  /* one of words */
} ith_option_type;

typedef struct {
    const char *name; /* long name without dashes */
    char letter;      /* short name, 0: none */
    ith_option_type type;
    const char *default_text; /* NULL: unset */
    const char *help;         /* one sentence */
    double min, max;          /* of INT and FLOAT; both 0: any */
    const char *words;        /* of WORD, separated by blanks */
} ith_option;

/* What was given. Zero-initialise; ith_args_deinit frees. */
typedef struct {
    const ith_option *options;
    const char *values[ITH_MAX_OPTIONS]; /* per row: given, else default, else NULL */
    bool given[ITH_MAX_OPTIONS];
    const char **all; /* every value in the order given, and beside it the row it is of */
    int *all_rows, num_all;
    const char **positional; /* borrowed from argv */
    int num_positional;
    bool help; /* --help or -h was given */
} ith_args;

/* Parses argv[0..argc) (the command's name is not in it). takes_overrides: an unknown --key=value
 * is a positional argument (a configuration override). */
ith_status ith_args_parse(ith_args *out, const ith_option *options, bool takes_overrides, int argc,
                          char *const *argv, ith_error *err);
void ith_args_deinit(ith_args *args);

/* The option must exist in the table, with that type. An unset INT is INT64_MIN, an unset FLOAT is
 * NaN, an unset text is NULL. */
bool ith_args_flag(const ith_args *args, const char *name);
int64_t ith_args_int(const ith_args *args, const char *name);
double ith_args_float(const ith_args *args, const char *name);
const char *ith_args_text(const ith_args *args, const char *name);
/* Index of the chosen word, -1 when unset. */
int ith_args_word(const ith_args *args, const char *name);
bool ith_args_given(const ith_args *args, const char *name);
/* The i-th value of an option that may be given more than once; NULL: there are no more. */
const char *ith_args_each(const ith_args *args, const char *name, int i);

int ith_num_options(const ith_option *options);
/* "-n, --name N", for help and man page. */
void ith_option_usage(const ith_option *option, ith_buf *out);
/* Its words are too many for the usage: the help text lists them. */
bool ith_option_many_words(const ith_option *option);

#endif
