/* yaml.h - YAML files as a tree that remembers where everything stood.
 *
 * Reads one document with libyaml. Invariants of a tree that was read without error:
 *   1. Every node knows file, line and column (from 1), so that any later complaint can point at
 * it.
 *   2. Map keys are scalars and unique within their map; `<<` merge keys are already applied.
 *   3. Aliases are resolved: they share the node of their anchor. The tree walked with all aliases
 *      followed has at most ITH_YAML_MAX_NODES nodes and ITH_YAML_MAX_DEPTH levels.
 *   4. Plain scalars are typed by the YAML 1.1 rules as PyYAML applies them (yes/no/on/off are
 *      booleans, 0o17 is text, 017 is 15, 1_000 is 1000, 1e-4 is text). ith_yaml_get_float accepts
 *      every usual way to write a number, quoted or not, where a number is wanted.
 * A byte order mark is skipped. JSON is read too (as a subset, with \ud83d\ude00 pairs). */
#ifndef ITH_CONFIG_YAML_H
#define ITH_CONFIG_YAML_H

#include "base/mem.h"

#define ITH_YAML_MAX_BYTES ((int64_t)16 << 20)
#define ITH_YAML_MAX_NODES 1000000
#define ITH_YAML_MAX_DEPTH 64

typedef enum { ITH_YAML_SCALAR, ITH_YAML_SEQ, ITH_YAML_MAP } ith_yaml_kind;
typedef enum {
    ITH_YAML_NULL,
    ITH_YAML_BOOL,
    ITH_YAML_INT,
    ITH_YAML_FLOAT,
    ITH_YAML_STR
} ith_yaml_type;

typedef struct ith_yaml_node ith_yaml_node;
typedef struct {
    const ith_yaml_node *key, *value;
} ith_yaml_pair;

struct ith_yaml_node {
    ith_yaml_kind kind;
    ith_yaml_type type; /* of a scalar */
    bool quoted;        /* scalar in quotes or a block scalar: always ITH_YAML_STR */
    bool bool_value;
    int line, column; /* from 1; 0: not from a file */
    const char *file; /* name for messages */
    const char *text; /* of a scalar: as written, NUL-terminated; len bytes, may hold NULs */
    int64_t len;
    int64_t int_value;           /* ITH_YAML_INT */
    double float_value;          /* ITH_YAML_FLOAT, and ITH_YAML_INT as a double */
    int64_t count;               /* of pairs or items */
    const ith_yaml_pair *pairs;  /* ITH_YAML_MAP, in file order */
    const ith_yaml_node **items; /* ITH_YAML_SEQ */
    int64_t expanded_nodes;      /* of the whole subtree, aliases followed */
    int height;                  /* levels below, 1 for a scalar */
};

typedef struct {
    ith_arena arena;
    const ith_yaml_node *root; /* an empty document is a null scalar */
} ith_yaml;

/* Parses text[0..len); `name` stands in messages and is copied. On success the caller owns *out;
 * on failure nothing. More than one document is an error. */
ith_status ith_yaml_parse(ith_yaml *out, const char *text, int64_t len, const char *name,
                          ith_error *err);
ith_status ith_yaml_load(ith_yaml *out, const char *path, ith_error *err);
void ith_yaml_deinit(ith_yaml *yaml);

/* Value of a key, NULL when absent. `map` must be a map. */
const ith_yaml_node *ith_yaml_find(const ith_yaml_node *map, const char *key);
bool ith_yaml_is_null(const ith_yaml_node *node);
/* Records "file:line:column: text" (without a position for nodes that have none). */
ith_status ith_yaml_fail(const ith_yaml_node *node, ith_error *err, const char *fmt, ...)
    ITH_PRINTF(3, 4);
/* What the node is, for messages: `text 'abc'`, `number 3`, `a list`, `nothing (null)`; shortened.
 */
const char *ith_yaml_describe(const ith_yaml_node *node, char *buf, size_t size);

/* Typed values. On failure: "file:line:col: <what>: found <node> (would be right)", ITH_ERR_USAGE.
 * bool: true false yes no on off, unquoted, or the same words quoted. int: integers, quoted or not.
 * float: any number, quoted or not (1e-5, 5E-05, .1, 3.e-4, inf is refused). string: text of any
 * scalar but null, as written; no NULs. list: a sequence of scalars. */
ith_status ith_yaml_get_bool(const ith_yaml_node *node, const char *what, bool *out,
                             ith_error *err);
ith_status ith_yaml_get_int(const ith_yaml_node *node, const char *what, int64_t min, int64_t max,
                            int64_t *out, ith_error *err);
ith_status ith_yaml_get_float(const ith_yaml_node *node, const char *what, double min, double max,
                              double *out, ith_error *err);
ith_status ith_yaml_get_string(const ith_yaml_node *node, const char *what, const char **out,
                               ith_error *err);
ith_status ith_yaml_get_map(const ith_yaml_node *node, const char *what, ith_error *err);
ith_status ith_yaml_get_seq(const ith_yaml_node *node, const char *what, ith_error *err);
/* Every key of the map is one of names[0..num_names); the first other one is an error that names
 * the nearest. `what` (may be NULL) tells which map it is. */
ith_status ith_yaml_check_keys(const ith_yaml_node *map, const char *what, const char *const *names,
                               int num_names, ith_error *err);

/* Appends a scalar so that it reads back as the same text, quoted where plain text would not. */
void ith_yaml_write_string(ith_buf *out, const char *text);

/* The name nearest to `word` by edit distance, NULL when none is near. */
const char *ith_nearest_name(const char *word, const char *const *names, int num_names);

#endif
