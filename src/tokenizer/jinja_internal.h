/* jinja_internal.h - what the files of the template interpreter share: syntax tree, values,
 * interpreter state.
 *
 * Control flow: the compiler and the renderer leave by longjmp on the first failure (ith_jj_fail,
 * ith_jj_syntax_fail never return), as Lua does. What makes that safe: all memory of a compile or
 * render lies in one arena, freed by the function that called setjmp; nothing else is acquired. */
#ifndef ITH_TOKENIZER_JINJA_INTERNAL_H
#define ITH_TOKENIZER_JINJA_INTERNAL_H

#include "tokenizer/jinja.h"

#include <setjmp.h>

/* A byte range of text that someone else keeps. */
typedef struct {
    const char *s;
    int64_t len;
} ith_jj_text;

/* ---- values ---------------------------------------------------------------------------------- */

typedef enum {
    JJ_UNDEFINED, /* str: what is undefined, for the error text */
    JJ_NONE,
    JJ_BOOL,
    JJ_INT,
    JJ_FLOAT,
    JJ_STR,
    JJ_LIST,
    JJ_DICT,
    JJ_NAMESPACE, /* dict */
    JJ_MACRO,
    JJ_BUILTIN, /* a global function */
    JJ_METHOD,  /* of a value */
    JJ_LOOP,
    JJ_CYCLER,
    JJ_JOINER
} ith_jj_kind;

typedef struct ith_jj_list ith_jj_list;
typedef struct ith_jj_dict ith_jj_dict;
typedef struct ith_jj_macro ith_jj_macro;
typedef struct ith_jj_builtin ith_jj_builtin;
typedef struct ith_jj_method ith_jj_method;
typedef struct ith_jj_loop ith_jj_loop;

/* Passed by value; what it points to is immutable except namespaces, loops and generators. */
typedef struct {
    ith_jj_kind kind;
    bool markup;     /* JJ_STR: marked safe, so that + escapes the other side */
    int32_t message; /* 1 + index in the tracked list, 0 for all other values */
    int64_t len;     /* JJ_STR, JJ_UNDEFINED: bytes */
    union {
        bool b;
        int64_t i;
        double f;
        const char *s;
        ith_jj_list *list;
        ith_jj_dict *dict;
        const ith_jj_macro *macro;
        const ith_jj_builtin *builtin;
        const ith_jj_method *method;
        ith_jj_loop *loop;
        ith_jj_list *cycle; /* items; pos */
    } u;
} ith_jj_value;

typedef enum {
    JJ_SEQ_LIST,
    JJ_SEQ_TUPLE,
    JJ_SEQ_RANGE,
    JJ_SEQ_VIEW,
    JJ_SEQ_GENERATOR
} ith_jj_flavor;

/* A generator (what map, select, items ... give) is computed at once but can be read only once, as
 * Python's: pos is where the next reader starts. */
struct ith_jj_list {
    ith_jj_value *items;
    int64_t count, pos;
    ith_jj_flavor flavor;
    const char *type_name; /* JJ_SEQ_VIEW: "dict_items" ... */
};

/* Insertion-ordered; index is an open-addressing table of entry numbers + 1, made beyond 8 entries.
 */
struct ith_jj_dict {
    ith_jj_value *keys, *values;
    int64_t count, cap;
    int32_t *index;
    int64_t index_cap;
};

/* ---- syntax tree ----------------------------------------------------------------------------- */

typedef enum {
    JJ_CONST,
    JJ_NAME,
    JJ_LIST_LITERAL,
    JJ_TUPLE_LITERAL,
    JJ_DICT_LITERAL, /* kids: key, value, key, value ... */
    JJ_ATTR,
    JJ_ITEM,
    JJ_SLICE, /* a: object, kids: start, stop, step; each may be NULL */
    JJ_CALL,
    JJ_FILTER, /* a NULL: the text of the enclosing block */
    JJ_TEST,
    JJ_NOT,
    JJ_NEG,
    JJ_POS,
    JJ_AND,
    JJ_OR,
    JJ_ADD,
    JJ_SUB,
    JJ_MUL,
    JJ_DIV,
    JJ_FLOORDIV,
    JJ_MOD,
    JJ_POW,
    JJ_CONCAT,
    JJ_COMPARE, /* a, then kids: JJ_OPERAND */
    JJ_OPERAND, /* a; cmp */
    JJ_COND,    /* a: test, b: then, c: else or NULL */
    JJ_NS_TARGET,
    /* statements */
    JJ_BLOCK, /* kids */
    JJ_TEXT,
    JJ_PRINT,
    JJ_IF,           /* a: test, b: body, c: else or NULL */
    JJ_FOR,          /* a: target, b: iterable, c: condition or NULL; kids: body, else */
    JJ_SET,          /* a: target, b: value */
    JJ_SET_BLOCK,    /* a: target, b: body, c: filter or NULL */
    JJ_MACRO_DEF,    /* text: name; macro */
    JJ_CALL_BLOCK,   /* a: call, macro: the caller */
    JJ_FILTER_BLOCK, /* b: body, c: filter */
    JJ_WITH,         /* kids: target, value ...; b: body */
    JJ_GENERATION,   /* b: body */
    JJ_BREAK,
    JJ_CONTINUE
} ith_jj_op;

typedef enum { JJ_EQ, JJ_NE, JJ_LT, JJ_LE, JJ_GT, JJ_GE, JJ_IN, JJ_NOT_IN } ith_jj_cmp;

typedef struct ith_jj_node ith_jj_node;

typedef struct {
    ith_jj_node **values; /* positional, then keywords */
    const char **names;   /* of the keywords */
    int64_t num_pos, num_kw;
    ith_jj_node *star, *star_star;
} ith_jj_call_args;

typedef struct {
    const char *name;
    const char **params;
    ith_jj_node **defaults; /* NULL entries: none */
    int64_t num_params;
    ith_jj_node *body;
    bool uses_varargs, uses_kwargs, uses_caller;
} ith_jj_macro_def;

/* Names are interned: equal names have equal pointers. */
struct ith_jj_node {
    ith_jj_op op;
    int32_t line;
    ith_jj_cmp cmp;
    ith_jj_text text; /* JJ_TEXT; names (interned, NUL-terminated) */
    ith_jj_value value;
    ith_jj_node *a, *b, *c;
    ith_jj_node **kids;
    int64_t num_kids;
    ith_jj_call_args *args;
    ith_jj_macro_def *macro;
};

typedef struct ith_jj_name ith_jj_name;
struct ith_jj_name {
    ith_jj_name *next;
    bool is_variable;
    char text[];
};
#define JJ_NAME_BUCKETS 256

struct ith_jinja {
    ith_arena arena;
    const char *name; /* for errors */
    ith_jj_node *root;
    ith_jj_name *names[JJ_NAME_BUCKETS];
    int64_t num_names;
    bool has_generation;
    /* names the renderer asks for */
    const char *sym_loop, *sym_caller, *sym_varargs, *sym_kwargs;
};

/* ---- compiler -------------------------------------------------------------------------------- */

typedef enum {
    JJ_TOK_EOF,
    JJ_TOK_TEXT,
    JJ_TOK_VAR_BEGIN,
    JJ_TOK_VAR_END,
    JJ_TOK_BLOCK_BEGIN,
    JJ_TOK_BLOCK_END,
    JJ_TOK_NAME,
    JJ_TOK_STRING,
    JJ_TOK_INT,
    JJ_TOK_FLOAT,
    JJ_TOK_OP
} ith_jj_token_type;

typedef struct {
    ith_jj_token_type type;
    int32_t line;
    ith_jj_text text; /* names, strings (unescaped), operators */
    int64_t i;
    double f;
} ith_jj_token;

typedef struct {
    ith_jinja *jinja;
    const char *src, *end;
    ith_jj_token *tokens; /* ends with JJ_TOK_EOF */
    int64_t num_tokens, cap_tokens, pos;
    int depth, loop_depth;
    ith_jj_macro_def *macro; /* being parsed */
    ith_error *err;
    ith_status status;
    jmp_buf jump;
} ith_jj_compiler;

#define JJ_MAX_NESTING 200
#define JJ_MAX_TEMPLATE_BYTES ((int64_t)4 << 20)

_Noreturn void ith_jj_syntax_fail(ith_jj_compiler *c, int32_t line, const char *fmt, ...)
    ITH_PRINTF(3, 4);
void *ith_jj_compiler_alloc(ith_jj_compiler *c, int64_t bytes);
void ith_jj_tokenize(ith_jj_compiler *c);
void ith_jj_parse(ith_jj_compiler *c);
const char *ith_jj_intern(ith_jj_compiler *c, const char *s, int64_t len);
/* The interned name, or NULL when the template does not have it. */
ith_jj_name *ith_jj_find_name(const ith_jinja *jinja, const char *s, int64_t len);

/* ---- renderer -------------------------------------------------------------------------------- */

typedef struct {
    const char *name; /* interned */
    ith_jj_value value;
} ith_jj_binding;

typedef struct ith_jj_scope ith_jj_scope;
struct ith_jj_scope {
    ith_jj_scope *parent;
    ith_jj_binding *vars;
    int64_t count, cap;
};

struct ith_jj_macro {
    const ith_jj_macro_def *def;
    ith_jj_scope *scope;
};

struct ith_jj_loop {
    const ith_jj_value *items;
    int64_t length, index0;
    ith_jj_value *changed; /* last arguments of loop.changed */
    int64_t num_changed;
    bool has_changed;
};

/* Evaluated arguments of a call. */
typedef struct {
    ith_jj_value *values; /* positional, then keywords */
    const char **names;
    int64_t num_pos, num_kw;
} ith_jj_args;

typedef struct {
    const ith_jinja *jinja;
    ith_arena arena;
    ith_buf *out;
    int64_t out_base; /* where the rendered text starts in out */
    int64_t max_output, steps, max_steps;
    int capture_depth, depth;
    bool in_item; /* inside a traced pass */
    int32_t line;
    ith_jj_scope *scope;
    ith_jj_value block_input; /* of a filter block */
    /* last string made by +, which may grow in place */
    char *tail;
    int64_t tail_used, tail_cap;
    int64_t now;
    ith_jinja_trace *trace;
    ith_error *err;
    ith_status status;
    jmp_buf jump;
} ith_jj_interp;

#define JJ_MAX_DEPTH 1000
#define JJ_MAX_RANGE 100000

typedef ith_jj_value (*ith_jj_builtin_fn)(ith_jj_interp *in, const ith_jj_args *args);
struct ith_jj_builtin {
    const char *name;
    ith_jj_builtin_fn call;
};

typedef ith_jj_value (*ith_jj_method_fn)(ith_jj_interp *in, ith_jj_value self,
                                         const ith_jj_args *args);
struct ith_jj_method {
    const char *name;
    ith_jj_method_fn call;
    ith_jj_value self;
};

/* "name:LINE: " before the text. */
_Noreturn void ith_jj_fail(ith_jj_interp *in, const char *fmt, ...) ITH_PRINTF(2, 3);
_Noreturn void ith_jj_fail_as(ith_jj_interp *in, ith_status status, const char *fmt, ...)
    ITH_PRINTF(3, 4);
void *ith_jj_alloc(ith_jj_interp *in, int64_t bytes);
void ith_jj_step(ith_jj_interp *in, int64_t n);
static inline void ith_jj_step_bytes(ith_jj_interp *in, int64_t bytes)
{
    ith_jj_step(in, bytes / 32);
}
void ith_jj_enter(ith_jj_interp *in);
static inline void ith_jj_leave(ith_jj_interp *in)
{
    in->depth--;
}

/* Output and capture: text made between begin and end becomes a string instead of output. */
void ith_jj_emit(ith_jj_interp *in, const char *s, int64_t len);
void ith_jj_emit_text(ith_jj_interp *in, const char *s);
int64_t ith_jj_capture_begin(ith_jj_interp *in);
ith_jj_value ith_jj_capture_end(ith_jj_interp *in, int64_t begin);

ith_jj_value ith_jj_eval(ith_jj_interp *in, const ith_jj_node *node);
ith_jj_value ith_jj_call(ith_jj_interp *in, ith_jj_value callee, const ith_jj_args *args);
ith_jj_value ith_jj_getattr(ith_jj_interp *in, ith_jj_value obj, const char *name);
ith_jj_value ith_jj_getitem(ith_jj_interp *in, ith_jj_value obj, ith_jj_value key);

/* Values (jinja_value.c) */
static inline ith_jj_value ith_jj_none(void)
{
    return (ith_jj_value){.kind = JJ_NONE};
}
static inline ith_jj_value ith_jj_bool(bool b)
{
    return (ith_jj_value){.kind = JJ_BOOL, .u.b = b};
}
static inline ith_jj_value ith_jj_int(int64_t i)
{
    return (ith_jj_value){.kind = JJ_INT, .u.i = i};
}
static inline ith_jj_value ith_jj_float(double f)
{
    return (ith_jj_value){.kind = JJ_FLOAT, .u.f = f};
}
static inline ith_jj_value ith_jj_str(const char *s, int64_t len)
{
    return (ith_jj_value){.kind = JJ_STR, .len = len, .u.s = s};
}
static inline ith_jj_value ith_jj_with_markup(ith_jj_value v, bool markup)
{
    v.markup = markup;
    return v;
}
/* A literal with static storage. */
ith_jj_value ith_jj_cstr(const char *s);
ith_jj_value ith_jj_str_copy(ith_jj_interp *in, const char *s, int64_t len);
ith_jj_value ith_jj_undefined(ith_jj_interp *in, const char *fmt, ...) ITH_PRINTF(2, 3);
ith_jj_value ith_jj_list_new(ith_jj_interp *in, int64_t cap, ith_jj_flavor flavor);
ith_jj_value ith_jj_dict_new(ith_jj_interp *in);
void ith_jj_dict_set(ith_jj_interp *in, ith_jj_dict *dict, ith_jj_value key, ith_jj_value value);
/* NULL when absent. */
ith_jj_value *ith_jj_dict_get(ith_jj_interp *in, const ith_jj_dict *dict, ith_jj_value key);
ith_jj_value *ith_jj_dict_get_text(ith_jj_interp *in, const ith_jj_dict *dict, const char *key);
ith_jj_value ith_jj_from_json(ith_jj_interp *in, const json_t *json);

bool ith_jj_truth(ith_jj_value v);
bool ith_jj_is_number(ith_jj_value v); /* bool, int or float, as in Python */
double ith_jj_as_double(ith_jj_value v);
bool ith_jj_equal(ith_jj_interp *in, ith_jj_value a, ith_jj_value b);
/* <0, 0, >0; fails for types without an order. */
int ith_jj_order(ith_jj_interp *in, ith_jj_value a, ith_jj_value b, const char *op);
bool ith_jj_contains(ith_jj_interp *in, ith_jj_value container, ith_jj_value item);
const char *ith_jj_type_name(ith_jj_value v); /* as Python's */
/* str(v) and repr(v), to the output. */
void ith_jj_emit_str(ith_jj_interp *in, ith_jj_value v);
void ith_jj_emit_repr(ith_jj_interp *in, ith_jj_value v);
ith_jj_value ith_jj_to_str(ith_jj_interp *in, ith_jj_value v);
void ith_jj_emit_json(ith_jj_interp *in, ith_jj_value v, ith_jj_value indent,
                      ith_jj_value separators, bool ascii, bool sort_keys);
void ith_jj_emit_double(ith_jj_interp *in, double f, bool json);
/* A list (borrowed where it is one) of what iterating gives; a generator is used up. */
ith_jj_list ith_jj_iterate(ith_jj_interp *in, ith_jj_value v);
ith_jj_value ith_jj_sequence_slice(ith_jj_interp *in, ith_jj_value v, ith_jj_value start,
                                   ith_jj_value stop, ith_jj_value step);

/* Unicode text (jinja_text.c) */
bool ith_jj_is_space(uint32_t c);
/* Code point at p (valid UTF-8, p < end), moving p on. */
uint32_t ith_jj_next_char(const char **p, const char *end);
int64_t ith_jj_count_chars(const char *s, int64_t len);
/* Byte offset of code point n; len when beyond. */
int64_t ith_jj_char_offset(const char *s, int64_t len, int64_t n);
/* chars.s NULL: whitespace. */
ith_jj_text ith_jj_strip(ith_jj_text t, ith_jj_text chars, bool left, bool right);
typedef enum { JJ_UPPER, JJ_LOWER, JJ_TITLE_WORDS, JJ_CAPITALIZE, JJ_SWAPCASE } ith_jj_case;
void ith_jj_emit_case(ith_jj_interp *in, ith_jj_text t, ith_jj_case mode);
bool ith_jj_is_printable(uint32_t c);
typedef enum {
    JJ_ALPHA,
    JJ_DIGIT,
    JJ_DECIMAL,
    JJ_NUMERIC,
    JJ_ALNUM,
    JJ_SPACE,
    JJ_IS_LOWER,
    JJ_IS_UPPER
} ith_jj_class;
bool ith_jj_all_chars(ith_jj_text t, ith_jj_class cls);
/* End of the line that starts at p, and the start of the next (Python's splitlines). */
const char *ith_jj_line_end(const char *p, const char *end, const char **next);
/* Position of needle at or after `from`, or -1. */
int64_t ith_jj_find(ith_jj_text hay, ith_jj_text needle, int64_t from);
int64_t ith_jj_rfind(ith_jj_text hay, ith_jj_text needle);
void ith_jj_emit_replaced(ith_jj_interp *in, ith_jj_text t, ith_jj_text old, ith_jj_text with,
                          int64_t max_count);
void ith_jj_emit_escaped(ith_jj_interp *in, ith_jj_text t);
/* Python's "%" formatting and str.format. */
ith_jj_value ith_jj_percent_format(ith_jj_interp *in, ith_jj_value format, ith_jj_value args);
ith_jj_value ith_jj_brace_format(ith_jj_interp *in, ith_jj_value format, const ith_jj_args *args);

/* Operators (jinja_ops.c) */
ith_jj_value ith_jj_binary(ith_jj_interp *in, ith_jj_op op, ith_jj_value a, ith_jj_value b);
ith_jj_value ith_jj_concat(ith_jj_interp *in, ith_jj_value a, ith_jj_value b);
bool ith_jj_compare(ith_jj_interp *in, ith_jj_cmp cmp, ith_jj_value a, ith_jj_value b);
/* Python's "unsupported operand" failures for undefined values: fails when v is undefined. */
void ith_jj_refuse_undefined(ith_jj_interp *in, ith_jj_value v);

/* Filters, tests, methods, globals: NULL when unknown. */
typedef ith_jj_value (*ith_jj_filter_fn)(ith_jj_interp *in, ith_jj_value v,
                                         const ith_jj_args *args);
typedef struct {
    const char *name;
    ith_jj_filter_fn fn;
} ith_jj_named_fn;
ith_jj_filter_fn ith_jj_find_named(const ith_jj_named_fn *table, const char *name);
ith_jj_filter_fn ith_jj_find_filter(const char *name);
ith_jj_filter_fn ith_jj_find_test(const char *name);
ith_jj_method_fn ith_jj_find_method(ith_jj_value self, const char *name);
const ith_jj_builtin *ith_jj_find_global(const char *name);
/* True when the sandbox refuses this method because it would change the value. */
bool ith_jj_is_mutator(ith_jj_value self, const char *name);

/* Binds arguments to parameter names (NULL-terminated list) as Python does; what is missing stays
 * undefined and given[i] false. Fails on surplus or unknown ones, naming `what`. */
#define JJ_MAX_PARAMS 8
typedef struct {
    ith_jj_value v[JJ_MAX_PARAMS];
    bool given[JJ_MAX_PARAMS];
} ith_jj_bound;
ith_jj_bound ith_jj_bind(ith_jj_interp *in, const char *what, const ith_jj_args *args,
                         const char *const *params, int64_t num_required);
void ith_jj_no_arguments(ith_jj_interp *in, const char *what, const ith_jj_args *args);
int64_t ith_jj_want_int(ith_jj_interp *in, const char *what, ith_jj_value v);
ith_jj_text ith_jj_want_str(ith_jj_interp *in, const char *what, ith_jj_value v);

#endif
