/* jinja_parse.c - tokens to a syntax tree, in the shape of Jinja2's own parser, so that precedence
 * and oddities ("-x|abs" filters the negated x) are the same. */
#include "tokenizer/jinja_internal.h"

#include <stdio.h>
#include <string.h>

void *ith_jj_compiler_alloc(ith_jj_compiler *c, int64_t bytes)
{
    void *p = ith_arena_alloc(&c->jinja->arena, bytes);
    if (!p) {
        c->status = ith_fail(c->err, ITH_ERR_MEMORY, "%s: out of memory", c->jinja->name);
        longjmp(c->jump, 1);
    }
    return p;
}

void ith_jj_syntax_fail(ith_jj_compiler *c, int32_t line, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    c->status = ith_fail(c->err, ITH_ERR_FORMAT, "%s:%d: %s", c->jinja->name, (int)line, text);
    longjmp(c->jump, 1);
}

static uint32_t name_bucket(const char *s, int64_t len)
{
    uint32_t h = 2166136261u;
    for (int64_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)s[i]) * 16777619u;
    return h % JJ_NAME_BUCKETS;
}

ith_jj_name *ith_jj_find_name(const ith_jinja *jinja, const char *s, int64_t len)
{
    for (ith_jj_name *n = jinja->names[name_bucket(s, len)]; n; n = n->next)
        if ((int64_t)strlen(n->text) == len && memcmp(n->text, s, (size_t)len) == 0)
            return n;
    return NULL;
}

const char *ith_jj_intern(ith_jj_compiler *c, const char *s, int64_t len)
{
    ith_jj_name *found = ith_jj_find_name(c->jinja, s, len);
    if (found)
        return found->text;
    ith_jj_name **head = &c->jinja->names[name_bucket(s, len)];
    ith_jj_name *name = ith_jj_compiler_alloc(c, (int64_t)sizeof *name + len + 1);
    memcpy(name->text, s, (size_t)len);
    name->next = *head;
    *head = name;
    c->jinja->num_names++;
    return name->text;
}

/* ---- token stream ---------------------------------------------------------------------------- */

static ith_jj_token *cur(ith_jj_compiler *c)
{
    return &c->tokens[c->pos];
}

static ith_jj_token *peek(ith_jj_compiler *c)
{
    return &c->tokens[c->pos + (cur(c)->type != JJ_TOK_EOF)];
}

static ith_jj_token *next(ith_jj_compiler *c)
{
    ith_jj_token *token = cur(c);
    if (token->type != JJ_TOK_EOF)
        c->pos++;
    return token;
}

static bool token_is(const ith_jj_token *token, ith_jj_token_type type, const char *text)
{
    return token->type == type && (int64_t)strlen(text) == token->text.len &&
           memcmp(token->text.s, text, (size_t)token->text.len) == 0;
}

static bool at_op(ith_jj_compiler *c, const char *op)
{
    return token_is(cur(c), JJ_TOK_OP, op);
}

static bool at_word(ith_jj_compiler *c, const char *word)
{
    return token_is(cur(c), JJ_TOK_NAME, word);
}

static bool skip_op(ith_jj_compiler *c, const char *op)
{
    bool yes = at_op(c, op);
    c->pos += yes;
    return yes;
}

static bool skip_word(ith_jj_compiler *c, const char *word)
{
    bool yes = at_word(c, word);
    c->pos += yes;
    return yes;
}

static const char *describe(const ith_jj_token *token, char buf[80])
{
    static const char *const names[] = {
        [JJ_TOK_EOF] = "the end of the template",
        [JJ_TOK_TEXT] = "template text",
        [JJ_TOK_VAR_BEGIN] = "'{{'",
        [JJ_TOK_VAR_END] = "'}}'",
        [JJ_TOK_BLOCK_BEGIN] = "'{%'",
        [JJ_TOK_BLOCK_END] = "'%}'",
        [JJ_TOK_STRING] = "a string",
        [JJ_TOK_INT] = "a number",
        [JJ_TOK_FLOAT] = "a number",
    };
    if (token->type != JJ_TOK_NAME && token->type != JJ_TOK_OP)
        return names[token->type];
    int len = token->text.len > 60 ? 60 : (int)token->text.len;
    snprintf(buf, 80, "'%.*s'", len, token->text.s);
    return buf;
}

static _Noreturn void unexpected(ith_jj_compiler *c, const char *construct, const char *wanted)
{
    char buf[80];
    ith_jj_syntax_fail(c, cur(c)->line, "%s: %s found, %s expected", construct,
                       describe(cur(c), buf), wanted);
}

static void expect_op(ith_jj_compiler *c, const char *op, const char *construct)
{
    if (!skip_op(c, op)) {
        char wanted[8];
        snprintf(wanted, sizeof wanted, "'%s'", op);
        unexpected(c, construct, wanted);
    }
}

static const char *expect_name(ith_jj_compiler *c, const char *construct)
{
    if (cur(c)->type != JJ_TOK_NAME)
        unexpected(c, construct, "a name");
    return next(c)->text.s;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static ith_jj_node *new_node(ith_jj_compiler *c, ith_jj_op op, int32_t line)
{
    ith_jj_node *node = ith_jj_compiler_alloc(c, sizeof *node);
    node->op = op;
    node->line = line;
    return node;
}

static ith_jj_node *new_binary(ith_jj_compiler *c, ith_jj_op op, int32_t line, ith_jj_node *a,
                               ith_jj_node *b)
{
    ith_jj_node *node = new_node(c, op, line);
    node->a = a;
    node->b = b;
    return node;
}

/* Arena array of pointers that doubles; *cap is implied by the count. */
static void push(ith_jj_compiler *c, ith_jj_node ***list, int64_t *count, ith_jj_node *node)
{
    int64_t n = *count;
    if (n == 0 || (n >= 4 && (n & (n - 1)) == 0)) {
        ith_jj_node **grown =
            ith_jj_compiler_alloc(c, (n ? n * 2 : 4) * (int64_t)sizeof(ith_jj_node *));
        if (n)
            memcpy(grown, *list, (size_t)n * sizeof *grown);
        *list = grown;
    }
    (*list)[(*count)++] = node;
}

static void add_kid(ith_jj_compiler *c, ith_jj_node *node, ith_jj_node *kid)
{
    push(c, &node->kids, &node->num_kids, kid);
}

static void enter(ith_jj_compiler *c)
{
    if (++c->depth > JJ_MAX_NESTING)
        ith_jj_syntax_fail(c, cur(c)->line, "nesting: more than %d levels", JJ_MAX_NESTING);
}

static void leave(ith_jj_compiler *c)
{
    c->depth--;
}

/* ---- expressions ----------------------------------------------------------------------------- */

static ith_jj_node *parse_expression(ith_jj_compiler *c);
static ith_jj_node *parse_or(ith_jj_compiler *c);
static ith_jj_node *parse_unary(ith_jj_compiler *c, bool with_filter);
static ith_jj_node *parse_postfix(ith_jj_compiler *c, ith_jj_node *node);

typedef enum { TUPLE_FULL, TUPLE_NO_COND, TUPLE_TARGET, TUPLE_NS_TARGET } tuple_mode;

static ith_jj_node *parse_primary(ith_jj_compiler *c, bool with_namespace);

static bool tuple_ends(ith_jj_compiler *c, const char *end_word)
{
    ith_jj_token_type type = cur(c)->type;
    return type == JJ_TOK_VAR_END || type == JJ_TOK_BLOCK_END || at_op(c, ")") ||
           (end_word && at_word(c, end_word));
}

/* One expression, or a tuple of those separated by commas. */
static ith_jj_node *parse_tuple(ith_jj_compiler *c, tuple_mode mode, const char *end_word,
                                bool in_parens)
{
    ith_jj_node *tuple = new_node(c, JJ_TUPLE_LITERAL, cur(c)->line);
    bool is_tuple = false;
    for (;;) {
        if (tuple->num_kids > 0 && !is_tuple)
            break;
        if (tuple_ends(c, end_word))
            break;
        ith_jj_node *kid = mode == TUPLE_FULL      ? parse_expression(c)
                           : mode == TUPLE_NO_COND ? parse_or(c)
                                                   : parse_primary(c, mode == TUPLE_NS_TARGET);
        add_kid(c, tuple, kid);
        if (!skip_op(c, ","))
            break;
        is_tuple = true;
    }
    if (is_tuple || (in_parens && tuple->num_kids == 0))
        return tuple;
    if (tuple->num_kids == 0)
        unexpected(c, "expression", "an expression");
    return tuple->kids[0];
}

static ith_jj_node *parse_list(ith_jj_compiler *c)
{
    ith_jj_node *node = new_node(c, JJ_LIST_LITERAL, next(c)->line);
    while (!at_op(c, "]")) {
        if (node->num_kids > 0)
            expect_op(c, ",", "list");
        if (at_op(c, "]"))
            break;
        add_kid(c, node, parse_expression(c));
    }
    c->pos++;
    return node;
}

static ith_jj_node *parse_dict(ith_jj_compiler *c)
{
    ith_jj_node *node = new_node(c, JJ_DICT_LITERAL, next(c)->line);
    while (!at_op(c, "}")) {
        if (node->num_kids > 0)
            expect_op(c, ",", "dict");
        if (at_op(c, "}"))
            break;
        add_kid(c, node, parse_expression(c));
        expect_op(c, ":", "dict");
        add_kid(c, node, parse_expression(c));
    }
    c->pos++;
    return node;
}

static ith_jj_node *constant(ith_jj_compiler *c, int32_t line, ith_jj_value value)
{
    ith_jj_node *node = new_node(c, JJ_CONST, line);
    node->value = value;
    return node;
}

static ith_jj_node *parse_name(ith_jj_compiler *c, bool with_namespace)
{
    ith_jj_token *token = next(c);
    const char *name = token->text.s;
    if (!strcmp(name, "true") || !strcmp(name, "True"))
        return constant(c, token->line, ith_jj_bool(true));
    if (!strcmp(name, "false") || !strcmp(name, "False"))
        return constant(c, token->line, ith_jj_bool(false));
    if (!strcmp(name, "none") || !strcmp(name, "None"))
        return constant(c, token->line, ith_jj_none());
    ith_jj_node *node = new_node(c, JJ_NAME, token->line);
    node->text = token->text;
    ith_jj_find_name(c->jinja, name, token->text.len)->is_variable = true;
    if (with_namespace && skip_op(c, ".")) {
        ith_jj_node *target = new_binary(c, JJ_NS_TARGET, token->line, node, NULL);
        target->text.s = expect_name(c, "set");
        return target;
    }
    if (c->macro) {
        c->macro->uses_varargs |= name == c->jinja->sym_varargs;
        c->macro->uses_kwargs |= name == c->jinja->sym_kwargs;
        c->macro->uses_caller |= name == c->jinja->sym_caller;
    }
    return node;
}

static ith_jj_node *parse_strings(ith_jj_compiler *c)
{
    int32_t line = cur(c)->line;
    ith_jj_text text = next(c)->text;
    while (cur(c)->type == JJ_TOK_STRING) {
        ith_jj_text more = next(c)->text;
        char *joined = ith_jj_compiler_alloc(c, text.len + more.len + 1);
        memcpy(joined, text.s, (size_t)text.len);
        memcpy(joined + text.len, more.s, (size_t)more.len);
        text = (ith_jj_text){joined, text.len + more.len};
    }
    return constant(c, line, ith_jj_str(text.s, text.len));
}

static ith_jj_node *parse_primary(ith_jj_compiler *c, bool with_namespace)
{
    ith_jj_token *token = cur(c);
    enter(c);
    ith_jj_node *node = NULL;
    if (token->type == JJ_TOK_NAME) {
        node = parse_name(c, with_namespace);
    } else if (token->type == JJ_TOK_STRING) {
        node = parse_strings(c);
    } else if (token->type == JJ_TOK_INT) {
        node = constant(c, next(c)->line, ith_jj_int(token->i));
    } else if (token->type == JJ_TOK_FLOAT) {
        node = constant(c, next(c)->line, ith_jj_float(token->f));
    } else if (skip_op(c, "(")) {
        node = parse_tuple(c, TUPLE_FULL, NULL, true);
        expect_op(c, ")", "expression");
    } else if (at_op(c, "[")) {
        node = parse_list(c);
    } else if (at_op(c, "{")) {
        node = parse_dict(c);
    } else {
        unexpected(c, "expression", "a value");
    }
    leave(c);
    return node;
}

/* Inside [ ]: an expression, or start:stop:step. */
static ith_jj_node *parse_subscribed(ith_jj_compiler *c, ith_jj_node *obj, int32_t line)
{
    ith_jj_node *parts[3] = {NULL, NULL, NULL};
    if (!at_op(c, ":"))
        parts[0] = parse_expression(c);
    if (!at_op(c, ":"))
        return new_binary(c, JJ_ITEM, line, obj, parts[0]);
    ith_jj_node *slice = new_binary(c, JJ_SLICE, line, obj, NULL);
    for (int i = 1; i < 3 && skip_op(c, ":"); i++)
        if (!at_op(c, ":") && !at_op(c, "]") && !at_op(c, ","))
            parts[i] = parse_expression(c);
    for (int i = 0; i < 3; i++)
        add_kid(c, slice, parts[i]);
    return slice;
}

static ith_jj_node *parse_subscript(ith_jj_compiler *c, ith_jj_node *obj)
{
    ith_jj_token *token = next(c);
    if (token->text.s[0] == '.') {
        if (cur(c)->type == JJ_TOK_INT) {
            ith_jj_node *key = constant(c, token->line, ith_jj_int(next(c)->i));
            return new_binary(c, JJ_ITEM, token->line, obj, key);
        }
        ith_jj_node *node = new_binary(c, JJ_ATTR, token->line, obj, NULL);
        node->text.s = expect_name(c, "attribute");
        node->text.len = (int64_t)strlen(node->text.s);
        return node;
    }
    ith_jj_node *node = parse_subscribed(c, obj, token->line);
    if (at_op(c, ",")) {
        if (node->op == JJ_SLICE)
            ith_jj_syntax_fail(c, token->line, "subscript: several slices are not supported");
        ith_jj_node *tuple = new_node(c, JJ_TUPLE_LITERAL, token->line);
        add_kid(c, tuple, node->b);
        while (skip_op(c, ","))
            add_kid(c, tuple, parse_expression(c));
        node->b = tuple;
    }
    expect_op(c, "]", "subscript");
    return node;
}

static ith_jj_call_args *parse_call_args(ith_jj_compiler *c)
{
    ith_jj_call_args *args = ith_jj_compiler_alloc(c, sizeof *args);
    int32_t line = cur(c)->line;
    int64_t count = 0;
    const char *names[64];
    expect_op(c, "(", "call");
    while (!at_op(c, ")")) {
        if (count > 0 || args->star || args->star_star) {
            expect_op(c, ",", "call");
            if (at_op(c, ")"))
                break;
        }
        bool is_kw = cur(c)->type == JJ_TOK_NAME && token_is(peek(c), JJ_TOK_OP, "=");
        if (args->star_star || (!is_kw && !at_op(c, "**") && (args->star || args->num_kw > 0)))
            ith_jj_syntax_fail(c, line, "call: positional argument after a keyword argument");
        if (skip_op(c, "*")) {
            args->star = parse_expression(c);
            continue;
        }
        if (skip_op(c, "**")) {
            args->star_star = parse_expression(c);
            continue;
        }
        if (is_kw) {
            if (args->num_kw == 64)
                ith_jj_syntax_fail(c, line, "call: more than 64 keyword arguments");
            names[args->num_kw++] = next(c)->text.s;
            c->pos++;
        }
        push(c, &args->values, &count, parse_expression(c));
    }
    c->pos++;
    args->num_pos = count - args->num_kw;
    args->names = ith_jj_compiler_alloc(c, args->num_kw * (int64_t)sizeof *names);
    if (args->num_kw)
        memcpy(args->names, names, (size_t)args->num_kw * sizeof *names);
    return args;
}

static ith_jj_node *parse_call(ith_jj_compiler *c, ith_jj_node *callee)
{
    ith_jj_node *node = new_binary(c, JJ_CALL, cur(c)->line, callee, NULL);
    node->args = parse_call_args(c);
    return node;
}

/* Names of filters and tests may be dotted. */
static const char *parse_dotted(ith_jj_compiler *c, const char *construct)
{
    const char *name = expect_name(c, construct);
    while (skip_op(c, ".")) {
        char joined[256];
        snprintf(joined, sizeof joined, "%s.%s", name, expect_name(c, construct));
        name = ith_jj_intern(c, joined, (int64_t)strlen(joined));
    }
    return name;
}

/* After "|". */
static ith_jj_node *parse_filter_one(ith_jj_compiler *c, ith_jj_node *value)
{
    ith_jj_node *node = new_binary(c, JJ_FILTER, cur(c)->line, value, NULL);
    node->text.s = parse_dotted(c, "filter");
    if (!ith_jj_find_filter(node->text.s))
        ith_jj_syntax_fail(c, node->line, "filter '%s': unknown, or not supported here",
                           node->text.s);
    node->args = at_op(c, "(") ? parse_call_args(c) : ith_jj_compiler_alloc(c, sizeof *node->args);
    return node;
}

static bool starts_test_argument(ith_jj_compiler *c)
{
    ith_jj_token_type type = cur(c)->type;
    if (type == JJ_TOK_NAME)
        return !at_word(c, "else") && !at_word(c, "or") && !at_word(c, "and");
    return type == JJ_TOK_STRING || type == JJ_TOK_INT || type == JJ_TOK_FLOAT || at_op(c, "[") ||
           at_op(c, "{");
}

/* After "is". */
static ith_jj_node *parse_test(ith_jj_compiler *c, ith_jj_node *value)
{
    int32_t line = cur(c)->line;
    bool negated = skip_word(c, "not");
    ith_jj_node *node = new_binary(c, JJ_TEST, line, value, NULL);
    node->text.s = parse_dotted(c, "test");
    if (!ith_jj_find_test(node->text.s))
        ith_jj_syntax_fail(c, line, "test '%s': unknown, or not supported here", node->text.s);
    if (at_op(c, "(")) {
        node->args = parse_call_args(c);
    } else {
        node->args = ith_jj_compiler_alloc(c, sizeof *node->args);
        if (starts_test_argument(c)) {
            if (at_word(c, "is"))
                ith_jj_syntax_fail(c, cur(c)->line, "test '%s': tests cannot be chained with 'is'",
                                   node->text.s);
            ith_jj_node *arg = parse_postfix(c, parse_primary(c, false));
            push(c, &node->args->values, &node->args->num_pos, arg);
        }
    }
    return negated ? new_binary(c, JJ_NOT, line, node, NULL) : node;
}

/* A chain of postfixes makes the tree deep without recursion here, but evaluation recurses. */
static void check_chain(ith_jj_compiler *c, int *length)
{
    if (++*length > JJ_MAX_NESTING)
        ith_jj_syntax_fail(c, cur(c)->line, "expression: a chain of more than %d operations",
                           JJ_MAX_NESTING);
}

static ith_jj_node *parse_postfix(ith_jj_compiler *c, ith_jj_node *node)
{
    int length = 0;
    for (;; check_chain(c, &length)) {
        if (at_op(c, ".") || at_op(c, "["))
            node = parse_subscript(c, node);
        else if (at_op(c, "("))
            node = parse_call(c, node);
        else
            return node;
    }
}

static ith_jj_node *parse_filter_chain(ith_jj_compiler *c, ith_jj_node *node)
{
    int length = 0;
    for (;; check_chain(c, &length)) {
        if (skip_op(c, "|"))
            node = parse_filter_one(c, node);
        else if (skip_word(c, "is"))
            node = parse_test(c, node);
        else if (at_op(c, "("))
            node = parse_call(c, node);
        else
            return node;
    }
}

static ith_jj_node *parse_unary(ith_jj_compiler *c, bool with_filter)
{
    int32_t line = cur(c)->line;
    enter(c);
    ith_jj_node *node = NULL;
    if (skip_op(c, "-"))
        node = new_binary(c, JJ_NEG, line, parse_unary(c, false), NULL);
    else if (skip_op(c, "+"))
        node = new_binary(c, JJ_POS, line, parse_unary(c, false), NULL);
    else
        node = parse_primary(c, false);
    node = parse_postfix(c, node);
    if (with_filter)
        node = parse_filter_chain(c, node);
    leave(c);
    return node;
}

typedef struct {
    const char *text;
    ith_jj_op op;
} operator_row;

/* Left-associative levels, loosest first; ~ is handled between the two. */
static const operator_row math_operators[3][5] = {
    {{"+", JJ_ADD}, {"-", JJ_SUB}},
    {{"*", JJ_MUL}, {"/", JJ_DIV}, {"//", JJ_FLOORDIV}, {"%", JJ_MOD}},
    {{"**", JJ_POW}},
};

static ith_jj_op match_operator(ith_jj_compiler *c, int level)
{
    for (const operator_row *row = math_operators[level]; row->text; row++)
        if (skip_op(c, row->text))
            return row->op;
    return JJ_CONST;
}

static ith_jj_node *parse_concat(ith_jj_compiler *c);

static ith_jj_node *parse_math(ith_jj_compiler *c, int level)
{
    ith_jj_node *left = level == 0   ? parse_concat(c)
                        : level == 1 ? parse_math(c, 2)
                                     : parse_unary(c, true);
    int length = 0;
    for (;; check_chain(c, &length)) {
        int32_t line = cur(c)->line;
        ith_jj_op op = match_operator(c, level);
        if (op == JJ_CONST)
            return left;
        ith_jj_node *right = level == 0   ? parse_concat(c)
                             : level == 1 ? parse_math(c, 2)
                                          : parse_unary(c, true);
        left = new_binary(c, op, line, left, right);
    }
}

static ith_jj_node *parse_concat(ith_jj_compiler *c)
{
    int32_t line = cur(c)->line;
    ith_jj_node *first = parse_math(c, 1);
    if (!at_op(c, "~"))
        return first;
    ith_jj_node *node = new_node(c, JJ_CONCAT, line);
    add_kid(c, node, first);
    while (skip_op(c, "~"))
        add_kid(c, node, parse_math(c, 1));
    return node;
}

static bool match_comparison(ith_jj_compiler *c, ith_jj_cmp *cmp)
{
    static const char *const ops[] = {"==", "!=", "<", "<=", ">", ">="};
    for (int i = 0; i < 6; i++)
        if (skip_op(c, ops[i])) {
            *cmp = (ith_jj_cmp)(JJ_EQ + i);
            return true;
        }
    if (skip_word(c, "in")) {
        *cmp = JJ_IN;
        return true;
    }
    if (at_word(c, "not") && token_is(peek(c), JJ_TOK_NAME, "in")) {
        c->pos += 2;
        *cmp = JJ_NOT_IN;
        return true;
    }
    return false;
}

static ith_jj_node *parse_compare(ith_jj_compiler *c)
{
    int32_t line = cur(c)->line;
    ith_jj_node *first = parse_math(c, 0), *node = NULL;
    ith_jj_cmp cmp;
    while (match_comparison(c, &cmp)) {
        if (!node)
            node = new_binary(c, JJ_COMPARE, line, first, NULL);
        ith_jj_node *operand = new_node(c, JJ_OPERAND, cur(c)->line);
        operand->cmp = cmp;
        operand->a = parse_math(c, 0);
        add_kid(c, node, operand);
    }
    return node ? node : first;
}

static ith_jj_node *parse_not(ith_jj_compiler *c)
{
    int32_t line = cur(c)->line;
    if (!skip_word(c, "not"))
        return parse_compare(c);
    enter(c);
    ith_jj_node *node = new_binary(c, JJ_NOT, line, parse_not(c), NULL);
    leave(c);
    return node;
}

static ith_jj_node *parse_and(ith_jj_compiler *c)
{
    ith_jj_node *left = parse_not(c);
    int length = 0;
    for (; at_word(c, "and"); check_chain(c, &length)) {
        int32_t line = next(c)->line;
        left = new_binary(c, JJ_AND, line, left, parse_not(c));
    }
    return left;
}

static ith_jj_node *parse_or(ith_jj_compiler *c)
{
    ith_jj_node *left = parse_and(c);
    int length = 0;
    for (; at_word(c, "or"); check_chain(c, &length)) {
        int32_t line = next(c)->line;
        left = new_binary(c, JJ_OR, line, left, parse_and(c));
    }
    return left;
}

static ith_jj_node *parse_expression(ith_jj_compiler *c)
{
    enter(c);
    int32_t line = cur(c)->line;
    ith_jj_node *node = parse_or(c);
    int length = 0;
    for (; skip_word(c, "if"); check_chain(c, &length)) {
        ith_jj_node *test = parse_or(c);
        ith_jj_node *cond = new_binary(c, JJ_COND, line, test, node);
        if (skip_word(c, "else"))
            cond->c = parse_expression(c);
        node = cond;
    }
    leave(c);
    return node;
}

/* ---- statements ------------------------------------------------------------------------------ */

static ith_jj_node *parse_body(ith_jj_compiler *c, const char *const *ends, const char *construct,
                               int32_t line);

static void end_tag(ith_jj_compiler *c, const char *construct)
{
    if (cur(c)->type != JJ_TOK_BLOCK_END)
        unexpected(c, construct, "'%}'");
    c->pos++;
}

/* Body up to and with {% end %}. */
static ith_jj_node *parse_until(ith_jj_compiler *c, const char *end, const char *construct,
                                int32_t line)
{
    const char *const ends[] = {end, NULL};
    end_tag(c, construct);
    ith_jj_node *body = parse_body(c, ends, construct, line);
    c->pos++;
    return body;
}

static void check_target(ith_jj_compiler *c, const ith_jj_node *target)
{
    if (target->op == JJ_NAME || target->op == JJ_NS_TARGET)
        return;
    if (target->op != JJ_TUPLE_LITERAL)
        ith_jj_syntax_fail(c, target->line,
                           "set: only names, namespace attributes and tuples of those "
                           "can be assigned to");
    for (int64_t i = 0; i < target->num_kids; i++)
        check_target(c, target->kids[i]);
}

static ith_jj_node *parse_if(ith_jj_compiler *c, int32_t line)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    ith_jj_node *first = NULL, **at = &first;
    for (;;) {
        ith_jj_node *node = new_node(c, JJ_IF, line);
        *at = node;
        at = &node->c;
        node->a = parse_tuple(c, TUPLE_NO_COND, NULL, false);
        end_tag(c, "if");
        node->b = parse_body(c, ends, "if", line);
        if (skip_word(c, "elif"))
            continue;
        if (skip_word(c, "else"))
            *at = parse_until(c, "endif", "if", line);
        else
            c->pos++;
        return first;
    }
}

static ith_jj_node *parse_for(ith_jj_compiler *c, int32_t line)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    ith_jj_node *node = new_node(c, JJ_FOR, line);
    node->a = parse_tuple(c, TUPLE_TARGET, "in", false);
    check_target(c, node->a);
    if (!skip_word(c, "in"))
        unexpected(c, "for", "'in'");
    node->b = parse_tuple(c, TUPLE_NO_COND, "recursive", false);
    if (skip_word(c, "if"))
        node->c = parse_expression(c);
    if (at_word(c, "recursive"))
        ith_jj_syntax_fail(c, line, "for: recursive loops are not supported");
    end_tag(c, "for");
    c->loop_depth++;
    add_kid(c, node, parse_body(c, ends, "for", line));
    c->loop_depth--;
    if (skip_word(c, "else"))
        add_kid(c, node, parse_until(c, "endfor", "for", line));
    else
        c->pos++;
    return node;
}

static ith_jj_node *parse_set(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *target = parse_tuple(c, TUPLE_NS_TARGET, NULL, false);
    check_target(c, target);
    if (skip_op(c, "="))
        return new_binary(c, JJ_SET, line, target, parse_tuple(c, TUPLE_FULL, NULL, false));
    ith_jj_node *node = new_binary(c, JJ_SET_BLOCK, line, target, NULL);
    while (skip_op(c, "|"))
        node->c = parse_filter_one(c, node->c);
    node->b = parse_until(c, "endset", "set", line);
    return node;
}

static void parse_params(ith_jj_compiler *c, ith_jj_macro_def *def)
{
    int64_t count = 0;
    ith_jj_node **names = NULL;
    expect_op(c, "(", "macro");
    while (!at_op(c, ")")) {
        if (count > 0)
            expect_op(c, ",", "macro");
        ith_jj_node *param = new_node(c, JJ_NAME, cur(c)->line);
        param->text.s = expect_name(c, "macro");
        if (skip_op(c, "="))
            param->b = parse_expression(c);
        else if (count > 0 && names[count - 1]->b)
            ith_jj_syntax_fail(c, param->line,
                               "macro: parameter '%s' without a default after one with",
                               param->text.s);
        push(c, &names, &count, param);
    }
    c->pos++;
    def->num_params = count;
    def->params = ith_jj_compiler_alloc(c, count * (int64_t)sizeof(char *));
    def->defaults = ith_jj_compiler_alloc(c, count * (int64_t)sizeof(ith_jj_node *));
    for (int64_t i = 0; i < count; i++) {
        def->params[i] = names[i]->text.s;
        def->defaults[i] = names[i]->b;
    }
}

/* The body of a macro or caller: loops outside are out of reach for break and continue. */
static void parse_macro_body(ith_jj_compiler *c, ith_jj_macro_def *def, const char *end,
                             const char *construct, int32_t line)
{
    ith_jj_macro_def *outer = c->macro;
    int outer_loops = c->loop_depth;
    c->macro = def;
    c->loop_depth = 0;
    def->body = parse_until(c, end, construct, line);
    c->macro = outer;
    c->loop_depth = outer_loops;
    /* A use in an inner body reaches this one too. */
    if (outer && !strcmp(end, "endcall"))
        outer->uses_caller |= def->uses_caller;
}

static ith_jj_node *parse_macro(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *node = new_node(c, JJ_MACRO_DEF, line);
    node->macro = ith_jj_compiler_alloc(c, sizeof *node->macro);
    node->macro->name = node->text.s = expect_name(c, "macro");
    parse_params(c, node->macro);
    parse_macro_body(c, node->macro, "endmacro", "macro", line);
    return node;
}

static ith_jj_node *parse_call_block(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *node = new_node(c, JJ_CALL_BLOCK, line);
    node->macro = ith_jj_compiler_alloc(c, sizeof *node->macro);
    node->macro->name = "caller";
    if (at_op(c, "("))
        parse_params(c, node->macro);
    node->a = parse_expression(c);
    if (node->a->op != JJ_CALL)
        ith_jj_syntax_fail(c, line, "call: a call is expected, as in {%% call f() %%}");
    parse_macro_body(c, node->macro, "endcall", "call", line);
    return node;
}

static ith_jj_node *parse_filter_block(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *node = new_node(c, JJ_FILTER_BLOCK, line);
    do
        node->c = parse_filter_one(c, node->c);
    while (skip_op(c, "|"));
    node->b = parse_until(c, "endfilter", "filter", line);
    return node;
}

static ith_jj_node *parse_with(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *node = new_node(c, JJ_WITH, line);
    while (cur(c)->type != JJ_TOK_BLOCK_END) {
        if (node->num_kids > 0)
            expect_op(c, ",", "with");
        ith_jj_node *target = parse_primary(c, false);
        check_target(c, target);
        add_kid(c, node, target);
        expect_op(c, "=", "with");
        add_kid(c, node, parse_expression(c));
    }
    node->b = parse_until(c, "endwith", "with", line);
    return node;
}

static ith_jj_node *parse_generation(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *node = new_node(c, JJ_GENERATION, line);
    int outer_loops = c->loop_depth;
    c->loop_depth = 0;
    c->jinja->has_generation = true;
    node->b = parse_until(c, "endgeneration", "generation", line);
    c->loop_depth = outer_loops;
    return node;
}

static ith_jj_node *parse_jump(ith_jj_compiler *c, int32_t line, ith_jj_op op, const char *name)
{
    if (c->loop_depth == 0)
        ith_jj_syntax_fail(c, line, "%s: not inside a for loop", name);
    return new_node(c, op, line);
}

static ith_jj_node *parse_break(ith_jj_compiler *c, int32_t line)
{
    return parse_jump(c, line, JJ_BREAK, "break");
}

static ith_jj_node *parse_continue(ith_jj_compiler *c, int32_t line)
{
    return parse_jump(c, line, JJ_CONTINUE, "continue");
}

static ith_jj_node *parse_print(ith_jj_compiler *c, int32_t line)
{
    ith_jj_node *block = new_node(c, JJ_BLOCK, line);
    while (cur(c)->type != JJ_TOK_BLOCK_END) {
        if (block->num_kids > 0)
            expect_op(c, ",", "print");
        add_kid(c, block, new_binary(c, JJ_PRINT, line, parse_expression(c), NULL));
    }
    return block;
}

static const struct {
    const char *name;
    ith_jj_node *(*parse)(ith_jj_compiler *c, int32_t line); /* NULL: refused */

} statements[] = {
    {"if", parse_if},           {"for", parse_for},
    {"set", parse_set},         {"macro", parse_macro},
    {"call", parse_call_block}, {"filter", parse_filter_block},
    {"with", parse_with},       {"generation", parse_generation},
    {"break", parse_break},     {"continue", parse_continue},
    {"print", parse_print},     {"include", NULL},
    {"import", NULL},           {"from", NULL},
    {"extends", NULL},          {"block", NULL},
    {"autoescape", NULL},
};

static ith_jj_node *parse_statement(ith_jj_compiler *c, const char *construct, int32_t outer_line)
{
    char buf[80];
    ith_jj_token *token = cur(c);
    if (token->type != JJ_TOK_NAME)
        unexpected(c, "tag", "a tag name");
    for (size_t i = 0; i < sizeof statements / sizeof statements[0]; i++) {
        if (strcmp(token->text.s, statements[i].name) != 0)
            continue;
        if (!statements[i].parse)
            ith_jj_syntax_fail(c, token->line, "%s: not supported, a chat template stands alone",
                               statements[i].name);
        c->pos++;
        return statements[i].parse(c, token->line);
    }
    if (construct)
        ith_jj_syntax_fail(c, token->line,
                           "tag %s: unknown, or out of place in the '%s' of line %d",
                           describe(token, buf), construct, (int)outer_line);
    ith_jj_syntax_fail(c, token->line, "tag %s: unknown, or out of place", describe(token, buf));
}

static bool at_any_word(ith_jj_compiler *c, const char *const *words)
{
    for (; words && *words; words++)
        if (at_word(c, *words))
            return true;
    return false;
}

/* Statements up to one of the tags `ends` (left at its name), or the end when ends is NULL. */
static ith_jj_node *parse_body(ith_jj_compiler *c, const char *const *ends, const char *construct,
                               int32_t line)
{
    ith_jj_node *body = new_node(c, JJ_BLOCK, line);
    enter(c);
    for (;;) {
        ith_jj_token *token = next(c);
        if (token->type == JJ_TOK_TEXT) {
            ith_jj_node *text = new_node(c, JJ_TEXT, token->line);
            text->text = token->text;
            add_kid(c, body, text);
        } else if (token->type == JJ_TOK_VAR_BEGIN) {
            ith_jj_node *value = parse_tuple(c, TUPLE_FULL, NULL, false);
            add_kid(c, body, new_binary(c, JJ_PRINT, token->line, value, NULL));
            if (cur(c)->type != JJ_TOK_VAR_END)
                unexpected(c, "expression", "'}}'");
            c->pos++;
        } else if (token->type == JJ_TOK_BLOCK_BEGIN) {
            if (at_any_word(c, ends))
                break;
            add_kid(c, body, parse_statement(c, construct, line));
            end_tag(c, "tag");
        } else {
            if (construct)
                ith_jj_syntax_fail(c, line, "%s: no end tag", construct);
            break;
        }
    }
    leave(c);
    return body;
}

void ith_jj_parse(ith_jj_compiler *c)
{
    c->jinja->root = parse_body(c, NULL, NULL, 1);
}
