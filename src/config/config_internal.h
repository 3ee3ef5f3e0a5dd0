/* config_internal.h - the key table and the bookkeeping behind ith_config. */
#ifndef ITH_CONFIG_CONFIG_INTERNAL_H
#define ITH_CONFIG_CONFIG_INTERNAL_H

#include "base/words.h"
#include "config/config.h"

#define ITH_MAX_CONFIG_KEYS 160

typedef enum {
    KEY_BOOL,   /* bool */
    KEY_INT,    /* int64_t */
    KEY_FLOAT,  /* double */
    KEY_FLOAT2, /* two doubles in a row */
    KEY_TEXT,   /* const char * */
    KEY_ENUM,   /* an enum; words are its values from 0 */
    KEY_FLAGS,  /* int64_t of bits; words are bits 0, 1, ... */
    KEY_LIST,   /* ith_config_list from a list or a comma text */
    KEY_PATHS,  /* ith_config_list from a list or one text */
    KEY_SIZE,   /* int64_t bytes, "16GiB" */
    KEY_PLUGIN  /* a map with a name: an enum (words), or a const char * when words is NULL */
} config_kind;

typedef struct {
    const char *name, *section;
    config_kind kind;
    size_t offset; /* in ith_config */
    const char *default_text;
    double min, max; /* of KEY_INT and KEY_FLOAT */
    bool min_open, max_open, nullable;
    const char *words; /* separated by blanks; "-" cannot be written */
    const char *plugins;
    ith_key_status status;
    const char *why; /* of NOT_NEEDED and NOT_YET: the reason, or what is missing */
    const char *help;
} config_row;

extern const config_row ith_config_rows[];
extern const int ith_config_num_rows;

typedef struct {
    const ith_yaml_node *key;   /* for its position */
    const ith_yaml_node *value; /* NULL: not given */
} config_given;

struct ith_config_origin {
    ith_yaml file;   /* keeps the nodes alive */
    ith_yaml *extra; /* overrides and JSON texts */
    int64_t num_extra, cap_extra;
    ith_arena arena; /* strings and lists of the config */
    config_given given[ITH_MAX_CONFIG_KEYS];
    const char **notes;
    int64_t num_notes, cap_notes;
};

/* Index of a key in the table, -1 when there is none. */
int ith_config_find_row(const char *name, size_t len);
/* Index of the plugin row a dotted row belongs to, -1 for top-level rows. */
int ith_config_plugin_of(int idx);
/* The row belongs to the plugin chosen in the config (always true for top-level rows). */
bool ith_config_row_applies(const ith_config *config, int idx);
/* The value of a row as YAML text (without the key); "null" when unset. */
void ith_config_write_value(const ith_config *config, int idx, ith_buf *out);
/* Whether the value differs from the row's default. */
ith_status ith_config_differs(const ith_config *config, int idx, bool *out, ith_error *err);

/* Collected mistakes. */
typedef struct {
    int line, column;
    char *text;
} config_problem;
typedef struct {
    config_problem *items;
    int64_t count, cap;
    ith_error *err; /* of the caller of the library */
} config_problems;
/* Keeps the text of err (and clears it). A failure that is no mistake of the user goes to
 * problems->err and comes back. */
ith_status ith_config_add_problem(config_problems *problems, const ith_yaml_node *where,
                                  ith_status status, ith_error *err);
/* Checks that need several keys; fills values that follow from others. */
ith_status ith_config_check_together(ith_config *config, config_problems *problems);

static inline void *ith_config_field(ith_config *config, int idx)
{
    return (char *)config + ith_config_rows[idx].offset;
}

static inline const void *ith_config_field_const(const ith_config *config, int idx)
{
    return (const char *)config + ith_config_rows[idx].offset;
}

#endif
