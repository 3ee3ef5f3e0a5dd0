/* jinja_eval.c - compile and render: scopes, statements, expressions, limits.
 *
 * Invariants:
 * 1. All output goes to one buffer. Text that becomes a value (a macro's result, {% set %} blocks,
 *    str()) is made at the buffer's end and cut off again, so captures nest without memory of their
 *    own.
 * 2. Nothing of the context is written; values that outlive a statement lie in the arena.
 * 3. A scope sees its parents but writes only to itself, as Jinja's frames do: what a for body or a
 *    macro sets is gone after it, what an if sets stays. */
#include "tokenizer/jinja_internal.h"

#include "base/checked.h"
#include "base/utf8.h"

#include <stdio.h>
#include <string.h>

typedef enum { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE } flow;

static flow exec(ith_jj_interp *in, const ith_jj_node *node);

/* ---- failure and limits ---------------------------------------------------------------------- */

static void note_failure(ith_jj_interp *in, ith_status status, const char *fmt, va_list args)
{
    char text[1024];
    vsnprintf(text, sizeof text, fmt, args);
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20)
            *p = ' '; /* one line */
    in->status = ith_fail(in->err, status, "%s:%d: %s", in->jinja->name, (int)in->line, text);
}

void ith_jj_fail(ith_jj_interp *in, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    note_failure(in, ITH_ERR_FORMAT, fmt, args);
    va_end(args);
    longjmp(in->jump, 1);
}

void ith_jj_fail_as(ith_jj_interp *in, ith_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    note_failure(in, status, fmt, args);
    va_end(args);
    longjmp(in->jump, 1);
}

void *ith_jj_alloc(ith_jj_interp *in, int64_t bytes)
{
    void *p = ith_arena_alloc(&in->arena, bytes);
    if (!p)
        ith_jj_fail_as(in, ITH_ERR_MEMORY,
                       "memory: out of it, or more than the limit of %lld bytes",
                       (long long)in->arena.max_bytes);
    return p;
}

void ith_jj_step(ith_jj_interp *in, int64_t n)
{
    in->steps += n;
    if (in->steps > in->max_steps)
        ith_jj_fail_as(in, ITH_ERR_RUN, "steps: the template takes more than its limit of %lld",
                       (long long)in->max_steps);
}

void ith_jj_enter(ith_jj_interp *in)
{
    if (++in->depth > JJ_MAX_DEPTH)
        ith_jj_fail_as(in, ITH_ERR_RUN, "depth: more than %d levels of calls and values",
                       JJ_MAX_DEPTH);
}

/* ---- output ---------------------------------------------------------------------------------- */

void ith_jj_emit(ith_jj_interp *in, const char *s, int64_t len)
{
    if (len == 0)
        return;
    if (len > in->max_output - (in->out->len - in->out_base))
        ith_jj_fail_as(in, ITH_ERR_MEMORY, "output: longer than its limit of %lld bytes",
                       (long long)in->max_output);
    ith_buf_append(in->out, s, len);
    if (in->out->failed)
        ith_jj_fail_as(in, ITH_ERR_MEMORY, "output: out of memory at %lld bytes",
                       (long long)in->out->len);
    ith_jj_step_bytes(in, len);
}

void ith_jj_emit_text(ith_jj_interp *in, const char *s)
{
    ith_jj_emit(in, s, (int64_t)strlen(s));
}

int64_t ith_jj_capture_begin(ith_jj_interp *in)
{
    in->capture_depth++;
    return in->out->len;
}

ith_jj_value ith_jj_capture_end(ith_jj_interp *in, int64_t begin)
{
    int64_t len = in->out->len - begin;
    ith_jj_value text = ith_jj_str_copy(in, len ? in->out->data + begin : "", len);
    in->out->len = begin;
    if (in->out->data)
        in->out->data[begin] = '\0';
    in->capture_depth--;
    return text;
}

/* ---- scopes ---------------------------------------------------------------------------------- */

static ith_jj_scope *push_scope(ith_jj_interp *in, ith_jj_scope *parent)
{
    ith_jj_scope *outer = in->scope;
    ith_jj_scope *scope = ith_jj_alloc(in, sizeof *scope);
    scope->parent = parent;
    in->scope = scope;
    return outer;
}

static ith_jj_value *scope_find(ith_jj_interp *in, ith_jj_scope *scope, const char *name)
{
    for (int64_t i = 0; i < scope->count; i++)
        if (scope->vars[i].name == name) {
            ith_jj_step(in, i / 8);
            return &scope->vars[i].value;
        }
    ith_jj_step(in, scope->count / 8);
    return NULL;
}

static void bind(ith_jj_interp *in, const char *name, ith_jj_value value)
{
    ith_jj_scope *scope = in->scope;
    ith_jj_value *found = scope_find(in, scope, name);
    if (found) {
        *found = value;
        return;
    }
    if (scope->count == scope->cap) {
        int64_t cap = scope->cap ? scope->cap * 2 : 8;
        ith_jj_binding *grown = ith_jj_alloc(in, ith_mul_bytes(cap, sizeof *grown));
        if (scope->count)
            memcpy(grown, scope->vars, (size_t)scope->count * sizeof *grown);
        scope->vars = grown;
        scope->cap = cap;
    }
    scope->vars[scope->count++] = (ith_jj_binding){name, value};
}

static ith_jj_value lookup(ith_jj_interp *in, const char *name)
{
    for (ith_jj_scope *scope = in->scope; scope; scope = scope->parent) {
        ith_jj_value *found = scope_find(in, scope, name);
        if (found)
            return *found;
    }
    const ith_jj_builtin *global = ith_jj_find_global(name);
    if (global)
        return (ith_jj_value){.kind = JJ_BUILTIN, .u.builtin = global};
    return ith_jj_undefined(in, "'%.100s' is undefined", name);
}

static void unpack(ith_jj_interp *in, const ith_jj_node *target, ith_jj_value value)
{
    ith_jj_list items = ith_jj_iterate(in, value);
    if (items.count != target->num_kids)
        ith_jj_fail(in, "assignment: %lld values for %lld names", (long long)items.count,
                    (long long)target->num_kids);
    for (int64_t i = 0; i < items.count; i++) {
        const ith_jj_node *kid = target->kids[i];
        if (kid->op == JJ_TUPLE_LITERAL)
            unpack(in, kid, items.items[i]);
        else if (kid->op == JJ_NAME)
            bind(in, kid->text.s, items.items[i]);
        else
            ith_jj_fail(in, "assignment: a namespace attribute cannot be part of a tuple here");
    }
}

static void assign(ith_jj_interp *in, const ith_jj_node *target, ith_jj_value value)
{
    if (target->op == JJ_NAME) {
        bind(in, target->text.s, value);
    } else if (target->op == JJ_TUPLE_LITERAL) {
        unpack(in, target, value);
    } else {
        ith_jj_value ns = lookup(in, target->a->text.s);
        if (ns.kind != JJ_NAMESPACE)
            ith_jj_fail(in, "set: '%s' is not a namespace but %s, its attribute '%s' cannot be set",
                        target->a->text.s, ith_jj_type_name(ns), target->text.s);
        if (target->text.s[0] == '_')
            ith_jj_fail(in, "set: attribute '%s' of a namespace may not begin with '_'",
                        target->text.s);
        ith_jj_dict_set(in, ns.u.dict, ith_jj_cstr(target->text.s), value);
    }
}

/* ---- calls ----------------------------------------------------------------------------------- */

static ith_jj_args eval_args(ith_jj_interp *in, const ith_jj_call_args *call,
                             const char *extra_name, ith_jj_value extra)
{
    ith_jj_list star = {0};
    const ith_jj_dict *kw = NULL;
    if (call->star)
        star = ith_jj_iterate(in, ith_jj_eval(in, call->star));
    if (call->star_star) {
        ith_jj_value v = ith_jj_eval(in, call->star_star);
        if (v.kind != JJ_DICT)
            ith_jj_fail(in, "call: the argument after ** must be a mapping, not %s",
                        ith_jj_type_name(v));
        kw = v.u.dict;
    }
    int64_t num_kw = call->num_kw + (kw ? kw->count : 0) + (extra_name != NULL);
    ith_jj_args args = {.num_pos = call->num_pos + star.count};
    args.values = ith_jj_alloc(in, ith_mul_bytes(args.num_pos + num_kw, sizeof *args.values));
    args.names = ith_jj_alloc(in, ith_mul_bytes(num_kw, sizeof *args.names));
    for (int64_t i = 0; i < call->num_pos; i++)
        args.values[i] = ith_jj_eval(in, call->values[i]);
    for (int64_t i = 0; i < star.count; i++)
        args.values[call->num_pos + i] = star.items[i];
    for (int64_t i = 0; i < call->num_kw; i++) {
        args.names[args.num_kw] = call->names[i];
        args.values[args.num_pos + args.num_kw++] =
            ith_jj_eval(in, call->values[call->num_pos + i]);
    }
    for (int64_t i = 0; kw && i < kw->count; i++) {
        ith_jj_text key = ith_jj_want_str(in, "call", kw->keys[i]);
        args.names[args.num_kw] = ith_jj_str_copy(in, key.s, key.len).u.s;
        args.values[args.num_pos + args.num_kw++] = kw->values[i];
    }
    if (extra_name) {
        args.names[args.num_kw] = extra_name;
        args.values[args.num_pos + args.num_kw++] = extra;
    }
    return args;
}

/* Index of the keyword, or -1. */
static int64_t find_keyword(const ith_jj_args *args, const char *name)
{
    for (int64_t i = 0; i < args->num_kw; i++)
        if (strcmp(args->names[i], name) == 0)
            return i;
    return -1;
}

static void bind_rest(ith_jj_interp *in, const ith_jj_macro_def *def, const ith_jj_args *args)
{
    const ith_jinja *jinja = in->jinja;
    ith_jj_value rest = ith_jj_list_new(in, args->num_pos, JJ_SEQ_TUPLE), kw = ith_jj_dict_new(in);
    for (int64_t i = def->num_params; i < args->num_pos; i++)
        rest.u.list->items[rest.u.list->count++] = args->values[i];
    if (rest.u.list->count > 0 && !def->uses_varargs)
        ith_jj_fail(in, "macro '%s': takes not more than %lld argument(s)", def->name,
                    (long long)def->num_params);
    for (int64_t i = 0; i < args->num_kw; i++) {
        ith_jj_value v = args->values[args->num_pos + i];
        bool known = false;
        for (int64_t p = 0; p < def->num_params; p++)
            if (strcmp(def->params[p], args->names[i]) == 0) {
                if (p < args->num_pos)
                    ith_jj_fail(in, "macro '%s': argument '%s' given twice", def->name,
                                args->names[i]);
                known = true;
            }
        if (known)
            continue;
        if (strcmp(args->names[i], "caller") == 0 && def->uses_caller)
            bind(in, jinja->sym_caller, v);
        else if (def->uses_kwargs)
            ith_jj_dict_set(in, kw.u.dict, ith_jj_cstr(args->names[i]), v);
        else
            ith_jj_fail(in, "macro '%s': takes no keyword argument '%s'", def->name,
                        args->names[i]);
    }
    if (def->uses_varargs)
        bind(in, jinja->sym_varargs, rest);
    if (def->uses_kwargs)
        bind(in, jinja->sym_kwargs, kw);
}

static ith_jj_value call_macro(ith_jj_interp *in, const ith_jj_macro *macro,
                               const ith_jj_args *args)
{
    const ith_jj_macro_def *def = macro->def;
    ith_jj_enter(in);
    ith_jj_scope *outer = push_scope(in, macro->scope);
    for (int64_t p = 0; p < def->num_params; p++) {
        int64_t k = find_keyword(args, def->params[p]);
        if (p < args->num_pos)
            bind(in, def->params[p], args->values[p]);
        else if (k >= 0)
            bind(in, def->params[p], args->values[args->num_pos + k]);
        else if (def->defaults[p])
            bind(in, def->params[p], ith_jj_eval(in, def->defaults[p]));
        else
            bind(in, def->params[p],
                 ith_jj_undefined(in, "parameter '%.100s' was not provided", def->params[p]));
    }
    bind_rest(in, def, args);
    int64_t begin = ith_jj_capture_begin(in);
    exec(in, def->body);
    ith_jj_value text = ith_jj_capture_end(in, begin);
    in->scope = outer;
    ith_jj_leave(in);
    return text;
}

ith_jj_value ith_jj_call(ith_jj_interp *in, ith_jj_value callee, const ith_jj_args *args)
{
    ith_jj_step(in, 1 + args->num_pos + args->num_kw);
    switch (callee.kind) {
    case JJ_MACRO:
        return call_macro(in, callee.u.macro, args);
    case JJ_BUILTIN:
        return callee.u.builtin->call(in, args);
    case JJ_METHOD:
        return callee.u.method->call(in, callee.u.method->self, args);
    case JJ_JOINER:
        return callee.u.list->pos++ ? callee.u.list->items[0] : ith_jj_cstr("");
    case JJ_UNDEFINED:
        ith_jj_refuse_undefined(in, callee);
        break;
    case JJ_LOOP:
        ith_jj_fail(in, "loop: recursive loops are not supported");
    default:
        break;
    }
    ith_jj_fail(in, "call: '%s' object is not callable", ith_jj_type_name(callee));
}

/* ---- attributes and items -------------------------------------------------------------------- */

static ith_jj_value loop_attr(ith_jj_interp *in, const ith_jj_loop *loop, const char *name,
                              bool *found)
{
    int64_t i = loop->index0, n = loop->length;
    const struct {
        const char *name;
        ith_jj_value value;
    } rows[] = {
        {"index0", ith_jj_int(i)},
        {"index", ith_jj_int(i + 1)},
        {"first", ith_jj_bool(i == 0)},
        {"last", ith_jj_bool(i + 1 == n)},
        {"length", ith_jj_int(n)},
        {"revindex", ith_jj_int(n - i)},
        {"revindex0", ith_jj_int(n - i - 1)},
        {"depth", ith_jj_int(1)},
        {"depth0", ith_jj_int(0)},
    };
    *found = true;
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
        if (strcmp(rows[k].name, name) == 0)
            return rows[k].value;
    if (strcmp(name, "previtem") == 0)
        return i > 0 ? loop->items[i - 1] : ith_jj_undefined(in, "there is no previous item");
    if (strcmp(name, "nextitem") == 0)
        return i + 1 < n ? loop->items[i + 1] : ith_jj_undefined(in, "there is no next item");
    *found = false;
    return ith_jj_none();
}

static ith_jj_value method_value(ith_jj_interp *in, ith_jj_value obj, const char *name,
                                 ith_jj_method_fn call)
{
    ith_jj_method *method = ith_jj_alloc(in, sizeof *method);
    *method = (ith_jj_method){name, call, obj};
    return (ith_jj_value){.kind = JJ_METHOD, .u.method = method};
}

/* What Python's getattr finds on the object itself. */
static bool own_attr(ith_jj_interp *in, ith_jj_value obj, const char *name, ith_jj_value *out)
{
    bool found = false;
    if (obj.kind == JJ_LOOP)
        *out = loop_attr(in, obj.u.loop, name, &found);
    if (found)
        return true;
    if (obj.kind == JJ_NAMESPACE) {
        ith_jj_value *v = ith_jj_dict_get_text(in, obj.u.dict, name);
        if (v)
            *out = *v;
        return v != NULL;
    }
    if (obj.kind == JJ_MACRO && strcmp(name, "name") == 0) {
        *out = ith_jj_cstr(obj.u.macro->def->name);
        return true;
    }
    if (obj.kind == JJ_CYCLER && strcmp(name, "current") == 0) {
        *out = obj.u.cycle->items[obj.u.cycle->pos];
        return true;
    }
    if (ith_jj_is_mutator(obj, name))
        ith_jj_fail(in, "attribute '%s' of '%s': not allowed, templates cannot change values", name,
                    ith_jj_type_name(obj));
    ith_jj_method_fn call = ith_jj_find_method(obj, name);
    if (call)
        *out = method_value(in, obj, name, call);
    return call != NULL;
}

static ith_jj_value no_attr(ith_jj_interp *in, ith_jj_value obj, const char *name)
{
    return ith_jj_undefined(in, "'%s object' has no attribute '%.100s'", ith_jj_type_name(obj),
                            name);
}

ith_jj_value ith_jj_getattr(ith_jj_interp *in, ith_jj_value obj, const char *name)
{
    ith_jj_value v;
    ith_jj_refuse_undefined(in, obj);
    if (own_attr(in, obj, name, &v))
        return v;
    if (obj.kind == JJ_DICT) {
        ith_jj_value *item = ith_jj_dict_get_text(in, obj.u.dict, name);
        if (item)
            return *item;
    }
    return no_attr(in, obj, name);
}

static ith_jj_value text_item(ith_jj_interp *in, ith_jj_value obj, int64_t i)
{
    int64_t n = i < 0 || obj.len > 64 ? ith_jj_count_chars(obj.u.s, obj.len) : obj.len;
    ith_jj_step_bytes(in, obj.len);
    if (i < 0)
        i += n;
    int64_t begin = i < 0 ? obj.len : ith_jj_char_offset(obj.u.s, obj.len, i);
    if (begin >= obj.len)
        return ith_jj_undefined(in, "str object has no element %lld", (long long)i);
    int64_t len = ith_jj_char_offset(obj.u.s + begin, obj.len - begin, 1);
    return ith_jj_with_markup(ith_jj_str(obj.u.s + begin, len), obj.markup);
}

ith_jj_value ith_jj_getitem(ith_jj_interp *in, ith_jj_value obj, ith_jj_value key)
{
    ith_jj_refuse_undefined(in, obj);
    if (obj.kind == JJ_DICT && (key.kind == JJ_STR || ith_jj_is_number(key) ||
                                key.kind == JJ_NONE || key.kind == JJ_LIST)) {
        bool hashable = key.kind != JJ_LIST || key.u.list->flavor == JJ_SEQ_TUPLE;
        ith_jj_value *item = hashable ? ith_jj_dict_get(in, obj.u.dict, key) : NULL;
        if (item)
            return *item;
    }
    if (key.kind == JJ_INT || key.kind == JJ_BOOL) {
        int64_t i = key.kind == JJ_BOOL ? key.u.b : key.u.i;
        if (obj.kind == JJ_STR)
            return text_item(in, obj, i);
        if (obj.kind == JJ_LIST && obj.u.list->flavor <= JJ_SEQ_RANGE) {
            int64_t at = i < 0 ? i + obj.u.list->count : i;
            if (at >= 0 && at < obj.u.list->count)
                return obj.u.list->items[at];
        }
        return ith_jj_undefined(in, "%s object has no element %lld", ith_jj_type_name(obj),
                                (long long)i);
    }
    if (key.kind == JJ_STR) {
        ith_jj_value name = ith_jj_str_copy(in, key.u.s, key.len), v;
        if (own_attr(in, obj, name.u.s, &v))
            return v;
        return no_attr(in, obj, name.u.s);
    }
    return ith_jj_undefined(in, "%s object has no element of type %s", ith_jj_type_name(obj),
                            ith_jj_type_name(key));
}

/* ---- expressions ----------------------------------------------------------------------------- */

static ith_jj_value eval_sequence(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value v = ith_jj_list_new(in, node->num_kids,
                                     node->op == JJ_LIST_LITERAL ? JJ_SEQ_LIST : JJ_SEQ_TUPLE);
    for (int64_t i = 0; i < node->num_kids; i++)
        v.u.list->items[i] = ith_jj_eval(in, node->kids[i]);
    v.u.list->count = node->num_kids;
    return v;
}

static ith_jj_value eval_dict(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value v = ith_jj_dict_new(in);
    for (int64_t i = 0; i < node->num_kids; i += 2) {
        ith_jj_value key = ith_jj_eval(in, node->kids[i]);
        ith_jj_dict_set(in, v.u.dict, key, ith_jj_eval(in, node->kids[i + 1]));
    }
    return v;
}

static ith_jj_value eval_slice(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value obj = ith_jj_eval(in, node->a), parts[3];
    for (int i = 0; i < 3; i++)
        parts[i] = node->kids[i] ? ith_jj_eval(in, node->kids[i]) : ith_jj_none();
    return ith_jj_sequence_slice(in, obj, parts[0], parts[1], parts[2]);
}

/* Jinja's ~ is str() of each, joined without escapes. */
static ith_jj_value eval_concat(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value v = ith_jj_with_markup(ith_jj_to_str(in, ith_jj_eval(in, node->kids[0])), false);
    for (int64_t i = 1; i < node->num_kids; i++)
        v = ith_jj_concat(
            in, v, ith_jj_with_markup(ith_jj_to_str(in, ith_jj_eval(in, node->kids[i])), false));
    return v;
}

static ith_jj_value eval_compare(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value left = ith_jj_eval(in, node->a);
    for (int64_t i = 0; i < node->num_kids; i++) {
        ith_jj_value right = ith_jj_eval(in, node->kids[i]->a);
        if (!ith_jj_compare(in, node->kids[i]->cmp, left, right))
            return ith_jj_bool(false);
        left = right;
    }
    return ith_jj_bool(true);
}

static ith_jj_value eval_negation(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value v = ith_jj_eval(in, node->a);
    ith_jj_refuse_undefined(in, v);
    if (!ith_jj_is_number(v))
        ith_jj_fail(in, "sign: bad operand type '%s'", ith_jj_type_name(v));
    if (v.kind == JJ_BOOL)
        v = ith_jj_int(v.u.b);
    if (node->op == JJ_POS)
        return v;
    if (v.kind == JJ_FLOAT)
        return ith_jj_float(-v.u.f);
    return ith_jj_binary(in, JJ_SUB, ith_jj_int(0), v);
}

static ith_jj_value eval_filter(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value v = node->a ? ith_jj_eval(in, node->a) : in->block_input;
    ith_jj_args args = eval_args(in, node->args, NULL, ith_jj_none());
    ith_jj_filter_fn fn =
        node->op == JJ_TEST ? ith_jj_find_test(node->text.s) : ith_jj_find_filter(node->text.s);
    ITH_ASSERT(fn);
    /* cppcheck-suppress returnDanglingLifetime ; filters keep values, never the list */
    return fn(in, v, &args);
}

static ith_jj_value eval_call(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value callee = ith_jj_eval(in, node->a);
    ith_jj_args args = eval_args(in, node->args, NULL, ith_jj_none());
    return ith_jj_call(in, callee, &args);
}

static ith_jj_value eval_cond(ith_jj_interp *in, const ith_jj_node *node)
{
    if (ith_jj_truth(ith_jj_eval(in, node->a)))
        return ith_jj_eval(in, node->b);
    if (node->c)
        return ith_jj_eval(in, node->c);
    return ith_jj_undefined(in,
                            "the inline if-expression evaluated to false and no else section was "
                            "defined");
}

static ith_jj_value eval_item(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value obj = ith_jj_eval(in, node->a);
    return ith_jj_getitem(in, obj, ith_jj_eval(in, node->b));
}

static ith_jj_value eval_logic(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value left = ith_jj_eval(in, node->a);
    return ith_jj_truth(left) == (node->op == JJ_AND) ? ith_jj_eval(in, node->b) : left;
}

static ith_jj_value eval_binary(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_value left = ith_jj_eval(in, node->a);
    return ith_jj_binary(in, node->op, left, ith_jj_eval(in, node->b));
}

static ith_jj_value eval_op(ith_jj_interp *in, const ith_jj_node *node)
{
    switch (node->op) {
    case JJ_CONST:
        return node->value;
    case JJ_NAME:
        return lookup(in, node->text.s);
    case JJ_LIST_LITERAL:
    case JJ_TUPLE_LITERAL:
        return eval_sequence(in, node);
    case JJ_DICT_LITERAL:
        return eval_dict(in, node);
    case JJ_ATTR:
        return ith_jj_getattr(in, ith_jj_eval(in, node->a), node->text.s);
    case JJ_ITEM:
        return eval_item(in, node);
    case JJ_SLICE:
        return eval_slice(in, node);
    case JJ_CALL:
        return eval_call(in, node);
    case JJ_FILTER:
    case JJ_TEST:
        return eval_filter(in, node);
    case JJ_NOT:
        return ith_jj_bool(!ith_jj_truth(ith_jj_eval(in, node->a)));
    case JJ_NEG:
    case JJ_POS:
        return eval_negation(in, node);
    case JJ_AND:
    case JJ_OR:
        return eval_logic(in, node);
    case JJ_CONCAT:
        return eval_concat(in, node);
    case JJ_COMPARE:
        return eval_compare(in, node);
    case JJ_COND:
        return eval_cond(in, node);
    default:
        return eval_binary(in, node);
    }
}

ith_jj_value ith_jj_eval(ith_jj_interp *in, const ith_jj_node *node)
{
    int32_t outer_line = in->line;
    ith_jj_enter(in);
    ith_jj_step(in, 1);
    in->line = node->line;
    ith_jj_value v = eval_op(in, node);
    in->line = outer_line;
    ith_jj_leave(in);
    return v;
}

/* ---- tracing --------------------------------------------------------------------------------- */

static void add_span(ith_jj_interp *in, ith_jinja_span **spans, int64_t *count, int64_t *cap,
                     int64_t begin, int64_t message)
{
    void *grown = *spans;
    if (ith_grow(&grown, cap, *count + 1, sizeof **spans, "template spans", in->err) != ITH_OK) {
        in->status = ITH_ERR_MEMORY;
        longjmp(in->jump, 1);
    }
    *spans = grown;
    (*spans)[(*count)++] =
        (ith_jinja_span){begin - in->out_base, in->out->len - in->out_base, message};
}

/* One pass of a loop over a tracked item has printed from `begin` on. */
static void trace_item(ith_jj_interp *in, int64_t begin, int64_t message)
{
    ith_jinja_trace *t = in->trace;
    if (in->out->len > begin)
        add_span(in, &t->items, &t->num_items, &t->cap_items, begin, message);
}

void ith_jinja_trace_deinit(ith_jinja_trace *trace)
{
    ith_free(trace->generation);
    ith_free(trace->items);
    memset(trace, 0, sizeof *trace);
}

/* ---- statements ------------------------------------------------------------------------------ */

static flow exec_block(ith_jj_interp *in, const ith_jj_node *node)
{
    for (int64_t i = 0; i < node->num_kids; i++) {
        flow f = exec(in, node->kids[i]);
        if (f != FLOW_NEXT)
            return f;
    }
    return FLOW_NEXT;
}

static flow exec_if(ith_jj_interp *in, const ith_jj_node *node)
{
    for (; node && node->op == JJ_IF; node = node->c)
        if (ith_jj_truth(ith_jj_eval(in, node->a)))
            return exec(in, node->b);
    return node ? exec(in, node) : FLOW_NEXT;
}

static void bind_target(ith_jj_interp *in, const ith_jj_node *target, ith_jj_value item)
{
    if (target->op == JJ_NAME)
        bind(in, target->text.s, item);
    else
        unpack(in, target, item);
}

/* Items for which the loop's condition holds. The condition sees the outer loop, as in Jinja. */
static ith_jj_list filter_items(ith_jj_interp *in, const ith_jj_node *node, ith_jj_list items)
{
    ith_jj_list kept = {.items =
                            ith_jj_alloc(in, ith_mul_bytes(items.count, sizeof(ith_jj_value)))};
    for (int64_t i = 0; i < items.count; i++) {
        ith_jj_scope *outer = push_scope(in, in->scope);
        bind_target(in, node->a, items.items[i]);
        if (ith_jj_truth(ith_jj_eval(in, node->c)))
            kept.items[kept.count++] = items.items[i];
        in->scope = outer;
    }
    return kept;
}

static flow exec_pass(ith_jj_interp *in, const ith_jj_node *node, ith_jj_value loop_value,
                      ith_jj_value item)
{
    int64_t begin = in->out->len;
    bool traced = in->trace && item.message && !in->in_item && in->capture_depth == 0;
    in->in_item |= traced;
    in->scope->count = 0; /* what the last pass set is gone */
    bind(in, in->jinja->sym_loop, loop_value);
    bind_target(in, node->a, item);
    flow f = exec(in, node->kids[0]);
    if (traced) {
        in->in_item = false;
        trace_item(in, begin, item.message - 1);
    }
    return f;
}

static flow exec_for(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_list items = ith_jj_iterate(in, ith_jj_eval(in, node->b));
    if (node->c)
        items = filter_items(in, node, items);
    if (items.count == 0) {
        if (node->num_kids < 2)
            return FLOW_NEXT;
        ith_jj_scope *outer = push_scope(in, in->scope);
        flow f = exec(in, node->kids[1]);
        in->scope = outer;
        return f;
    }
    ith_jj_loop *loop = ith_jj_alloc(in, sizeof *loop);
    *loop = (ith_jj_loop){.items = items.items, .length = items.count};
    ith_jj_scope *outer = push_scope(in, in->scope);
    for (int64_t i = 0; i < items.count; i++) {
        loop->index0 = i;
        ith_jj_step(in, 1);
        if (exec_pass(in, node, (ith_jj_value){.kind = JJ_LOOP, .u.loop = loop}, items.items[i]) ==
            FLOW_BREAK)
            break;
    }
    in->scope = outer;
    return FLOW_NEXT;
}

/* Runs body in a scope of its own and gives what it printed. */
static ith_jj_value capture_body(ith_jj_interp *in, const ith_jj_node *body)
{
    ith_jj_scope *outer = push_scope(in, in->scope);
    int64_t begin = ith_jj_capture_begin(in);
    exec(in, body);
    in->scope = outer;
    return ith_jj_capture_end(in, begin);
}

/* filter NULL: the text as it is. */
static ith_jj_value apply_block_filter(ith_jj_interp *in, const ith_jj_node *filter,
                                       ith_jj_value text)
{
    if (!filter)
        return text;
    ith_jj_value outer = in->block_input;
    in->block_input = text;
    text = ith_jj_eval(in, filter);
    in->block_input = outer;
    return text;
}

static void exec_macro_def(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_macro *macro = ith_jj_alloc(in, sizeof *macro);
    *macro = (ith_jj_macro){node->macro, in->scope};
    bind(in, node->text.s, (ith_jj_value){.kind = JJ_MACRO, .u.macro = macro});
}

static void exec_call_block(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_macro *caller = ith_jj_alloc(in, sizeof *caller);
    *caller = (ith_jj_macro){node->macro, in->scope};
    ith_jj_value callee = ith_jj_eval(in, node->a->a);
    ith_jj_args args =
        eval_args(in, node->a->args, "caller", (ith_jj_value){.kind = JJ_MACRO, .u.macro = caller});
    ith_jj_emit_str(in, ith_jj_call(in, callee, &args));
}

static flow exec_with(ith_jj_interp *in, const ith_jj_node *node)
{
    int64_t n = node->num_kids / 2;
    ith_jj_value *values = ith_jj_alloc(in, ith_mul_bytes(n, sizeof *values));
    for (int64_t i = 0; i < n; i++)
        values[i] = ith_jj_eval(in, node->kids[2 * i + 1]);
    ith_jj_scope *outer = push_scope(in, in->scope);
    for (int64_t i = 0; i < n; i++)
        bind_target(in, node->kids[2 * i], values[i]);
    flow f = exec(in, node->b);
    in->scope = outer;
    return f;
}

/* The tracked item this scope is a pass of, or -1. */
static int64_t current_message(const ith_jj_interp *in)
{
    for (const ith_jj_scope *scope = in->scope; scope; scope = scope->parent) {
        if (scope->count == 0 || scope->vars[0].value.kind != JJ_LOOP)
            continue;
        const ith_jj_loop *loop = scope->vars[0].value.u.loop;
        if (loop->items[loop->index0].message)
            return loop->items[loop->index0].message - 1;
    }
    return -1;
}

static void exec_generation(ith_jj_interp *in, const ith_jj_node *node)
{
    int64_t begin = in->out->len, message = current_message(in);
    ith_jj_scope *outer = push_scope(in, in->scope);
    exec(in, node->b);
    in->scope = outer;
    ith_jinja_trace *t = in->trace;
    if (t && in->capture_depth == 0)
        add_span(in, &t->generation, &t->num_generation, &t->cap_generation, begin, message);
}

static flow exec_op(ith_jj_interp *in, const ith_jj_node *node)
{
    switch (node->op) {
    case JJ_BLOCK:
        return exec_block(in, node);
    case JJ_TEXT:
        ith_jj_emit(in, node->text.s, node->text.len);
        break;
    case JJ_PRINT:
        ith_jj_emit_str(in, ith_jj_eval(in, node->a));
        break;
    case JJ_IF:
        return exec_if(in, node);
    case JJ_FOR:
        return exec_for(in, node);
    case JJ_SET:
        assign(in, node->a, ith_jj_eval(in, node->b));
        break;
    case JJ_SET_BLOCK:
        assign(in, node->a, apply_block_filter(in, node->c, capture_body(in, node->b)));
        break;
    case JJ_MACRO_DEF:
        exec_macro_def(in, node);
        break;
    case JJ_CALL_BLOCK:
        exec_call_block(in, node);
        break;
    case JJ_FILTER_BLOCK:
        ith_jj_emit_str(in, apply_block_filter(in, node->c, capture_body(in, node->b)));
        break;
    case JJ_WITH:
        return exec_with(in, node);
    case JJ_GENERATION:
        exec_generation(in, node);
        break;
    case JJ_BREAK:
        return FLOW_BREAK;
    case JJ_CONTINUE:
        return FLOW_CONTINUE;
    default:
        ITH_ASSERT(node->op > JJ_NS_TARGET); /* a statement */
    }
    return FLOW_NEXT;
}

static flow exec(ith_jj_interp *in, const ith_jj_node *node)
{
    ith_jj_enter(in);
    ith_jj_step(in, 1);
    in->line = node->line;
    flow f = exec_op(in, node);
    ith_jj_leave(in);
    return f;
}

/* ---- entry points ---------------------------------------------------------------------------- */

/* Line breaks become \n, one at the very end goes. */
static ith_status normalize_source(ith_jj_compiler *c, const char *text, int64_t len)
{
    const char *name = c->jinja->name;
    if (len > JJ_MAX_TEMPLATE_BYTES)
        return ith_fail(c->err, ITH_ERR_FORMAT, "%s: %lld bytes, a template has at most %lld", name,
                        (long long)len, (long long)JJ_MAX_TEMPLATE_BYTES);
    char *src = ith_arena_alloc(&c->jinja->arena, len + 1), *to = src;
    if (!src)
        return ith_fail(c->err, ITH_ERR_MEMORY, "%s: out of memory", name);
    int line = 1;
    for (const char *p = text, *end = text + len; p < end;) {
        uint32_t code = 0;
        int n = ith_utf8_decode(p, end, &code);
        if (n == 0)
            return ith_fail(c->err, ITH_ERR_FORMAT, "%s:%d: byte 0x%02x is not UTF-8", name, line,
                            (unsigned char)*p);
        line += code == '\n';
        if (code == '\r') {
            *to++ = '\n';
            p += p + 1 < end && p[1] == '\n' ? 2 : 1;
            continue;
        }
        memcpy(to, p, (size_t)n);
        to += n;
        p += n;
    }
    if (to > src && to[-1] == '\n')
        to--;
    c->src = src;
    c->end = to;
    return ITH_OK;
}

/* The function that calls setjmp has no locals of its own: nothing there can be clobbered. */
static void run_compiler(ith_jj_compiler *c)
{
    if (setjmp(c->jump) != 0)
        return;
    c->jinja->sym_loop = ith_jj_intern(c, "loop", 4);
    c->jinja->sym_caller = ith_jj_intern(c, "caller", 6);
    c->jinja->sym_varargs = ith_jj_intern(c, "varargs", 7);
    c->jinja->sym_kwargs = ith_jj_intern(c, "kwargs", 6);
    ith_jj_tokenize(c);
    ith_jj_parse(c);
}

ith_status ith_jinja_compile(ith_jinja **out, const char *text, int64_t len, const char *name,
                             ith_error *err)
{
    void *mem = NULL;
    ITH_TRY(ith_alloc_zero(&mem, 1, sizeof(ith_jinja), "a template", err));
    ith_jinja *jinja = mem;
    ith_arena_init(&jinja->arena, (int64_t)1 << 30);
    jinja->name = ith_arena_strndup(&jinja->arena, name, (int64_t)strlen(name));
    ith_jj_compiler c = {.jinja = jinja, .err = err};
    c.status = jinja->name ? normalize_source(&c, text, len)
                           : ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", name);
    if (c.status == ITH_OK)
        run_compiler(&c);
    if (c.status == ITH_OK)
        *out = jinja;
    else
        ith_jinja_free(jinja);
    return c.status;
}

void ith_jinja_free(ith_jinja *jinja)
{
    if (jinja) {
        ith_arena_deinit(&jinja->arena);
        ith_free(jinja);
    }
}

bool ith_jinja_uses(const ith_jinja *jinja, const char *name)
{
    const ith_jj_name *found = ith_jj_find_name(jinja, name, (int64_t)strlen(name));
    return found && found->is_variable;
}

bool ith_jinja_has_generation(const ith_jinja *jinja)
{
    return jinja->has_generation;
}

/* A rough size of the context in bytes, which the default limits grow with. */
static int64_t json_bytes(const json_t *json, int depth)
{
    int64_t total = 32;
    if (depth > JJ_MAX_DEPTH)
        return total;
    if (json_is_string(json))
        return total + (int64_t)json_string_length(json);
    for (size_t i = 0; json_is_array(json) && i < json_array_size(json); i++)
        total += json_bytes(json_array_get(json, i), depth + 1);
    if (json_is_object(json)) {
        union {
            const json_t *c;
            json_t *m;
        } obj = {.c = json};
        const char *key;
        json_t *member;
        json_object_foreach(obj.m, key, member) total +=
            (int64_t)strlen(key) + json_bytes(member, depth + 1);
    }
    return total;
}

static void bind_context(ith_jj_interp *in, const json_t *context, const char *track)
{
    const char *key;
    json_t *member;
    union {
        const json_t *c;
        json_t *m;
    } obj = {.c = context};
    json_object_foreach(obj.m, key, member)
    {
        const ith_jj_name *name = ith_jj_find_name(in->jinja, key, (int64_t)strlen(key));
        if (!name)
            continue;
        ith_jj_value v = ith_jj_from_json(in, member);
        if (track && strcmp(track, key) == 0 && v.kind == JJ_LIST && v.u.list->count < INT32_MAX)
            for (int64_t i = 0; i < v.u.list->count; i++)
                v.u.list->items[i].message = (int32_t)i + 1;
        bind(in, name->text, v);
    }
}

static void set_limits(ith_jj_interp *in, const ith_jinja_options *o, int64_t context_bytes)
{
    const int64_t mib = (int64_t)1 << 20;
    in->max_steps = o->max_steps ? o->max_steps : 100 * 1000 * 1000 + 64 * context_bytes;
    in->max_output = o->max_output_bytes ? o->max_output_bytes : 64 * mib + 4 * context_bytes;
    ith_arena_init(&in->arena,
                   o->max_memory_bytes ? o->max_memory_bytes : 256 * mib + 16 * context_bytes);
}

static void run(ith_jj_interp *in, const json_t *context, const char *track)
{
    if (setjmp(in->jump) != 0)
        return;
    push_scope(in, NULL);
    bind_context(in, context, track);
    push_scope(in, in->scope); /* the template's own names */
    exec(in, in->jinja->root);
}

ith_status ith_jinja_render(const ith_jinja *jinja, const json_t *context,
                            const ith_jinja_options *options, ith_buf *out, ith_error *err)
{
    static const ith_jinja_options defaults;
    const ith_jinja_options *o = options ? options : &defaults;
    ith_buf_append(out, "", 0);
    ITH_TRY(ith_buf_check(out, jinja->name, err));
    ith_jj_interp in = {.jinja = jinja, .out = out, .out_base = out->len, .err = err};
    in.trace = o->trace;
    in.now = o->now;
    set_limits(&in, o, json_bytes(context, 0));
    run(&in, context, o->track);
    if (in.status != ITH_OK) {
        out->failed = ITH_OK;
        out->len = in.out_base;
        if (out->data)
            out->data[out->len] = '\0';
    }
    ith_arena_deinit(&in.arena);
    if (o->steps)
        *o->steps = in.steps;
    return in.status;
}
