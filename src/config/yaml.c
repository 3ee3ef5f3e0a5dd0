/* yaml.c - libyaml events to a tree; aliases, merge keys, duplicates, limits.
 *
 * Invariants:
 *  1. No recursion: open collections are frames on a stack of ITH_YAML_MAX_DEPTH.
 *  2. `budget` pays for every node and every pair a merge key copies, and expanded_nodes is
 *     checked while a collection grows, so time and memory are linear in the input plus
 *     ITH_YAML_MAX_NODES. */
#include "config/yaml.h"

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"
#include "config/yaml_internal.h"

#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define MAX_ANCHORS 256
#define MAX_ARENA_BYTES ((int64_t)1 << 30)

typedef struct {
    ith_yaml_node *node;            /* the collection being filled */
    const ith_yaml_node **children; /* of a map: key, value, key, value ... */
    int64_t count, cap;
} frame;

typedef struct {
    char *name;
    const ith_yaml_node *node;
} anchor;

typedef struct {
    ith_yaml *out;
    const char *file;
    const ith_yaml_node *at; /* fixed position, or NULL */
    ith_error *err;
    frame stack[ITH_YAML_MAX_DEPTH];
    int depth;
    anchor anchors[MAX_ANCHORS];
    int num_anchors;
    int64_t budget; /* nodes and copied pairs still allowed */
} builder;

static ith_status out_of_memory(builder *b)
{
    return ith_fail(b->err, ITH_ERR_MEMORY, "%s: out of memory while reading YAML", b->file);
}

static ith_status fail_at(builder *b, yaml_mark_t mark, const char *text)
{
    if (b->at)
        return ith_yaml_fail(b->at, b->err, "%s", text);
    return ith_fail(b->err, ITH_ERR_USAGE, "%s:%zu:%zu: %s", b->file, mark.line + 1,
                    mark.column + 1, text);
}

static ith_status spend(builder *b, int64_t nodes, yaml_mark_t mark)
{
    b->budget -= nodes;
    if (b->budget < 0)
        return fail_at(b, mark, "too large: more than 1000000 values");
    return ITH_OK;
}

static ith_status new_node(builder *b, ith_yaml_kind kind, yaml_mark_t mark, ith_yaml_node **out)
{
    ITH_TRY(spend(b, 1, mark));
    ith_yaml_node *node = ith_arena_alloc(&b->out->arena, (int64_t)sizeof *node);
    if (!node)
        return out_of_memory(b);
    node->kind = kind;
    node->file = b->at ? b->at->file : b->file;
    node->line = b->at ? b->at->line : (int)ith_min_i64((int64_t)mark.line + 1, INT32_MAX);
    node->column = b->at ? b->at->column : (int)ith_min_i64((int64_t)mark.column + 1, INT32_MAX);
    node->expanded_nodes = 1;
    node->height = 1;
    node->text = "";
    *out = node;
    return ITH_OK;
}

/* Tags of the core schema overrule the implicit type; any other tag asks for a foreign object. */
static ith_status apply_tag(builder *b, ith_yaml_node *node, const char *tag, yaml_mark_t mark)
{
    static const char *const names[] = {"null", "bool", "int", "float", "str"};
    static const char prefix[] = "tag:yaml.org,2002:";
    const char *name = strncmp(tag, prefix, sizeof prefix - 1) == 0 ? tag + sizeof prefix - 1 : "?";
    if (strcmp(tag, "!") == 0)
        name = "str";
    if (node->kind != ITH_YAML_SCALAR) {
        if (strcmp(name, node->kind == ITH_YAML_MAP ? "map" : "seq") == 0)
            return ITH_OK;
        return fail_at(b, mark, "found a YAML tag that is not supported (remove it)");
    }
    for (int type = 0; type < 5; type++) {
        if (strcmp(name, names[type]) != 0)
            continue;
        node->quoted = type == ITH_YAML_STR;
        if (type == ITH_YAML_STR) {
            node->type = ITH_YAML_STR;
            return ITH_OK;
        }
        ith_yaml_resolve_plain(node);
        double value = 0;
        if (type == ITH_YAML_FLOAT && (ith_yaml_parse_float(node->text, &value))) {
            node->type = ITH_YAML_FLOAT;
            node->float_value = value;
        }
        if ((int)node->type != type)
            return fail_at(b, mark, "the value does not fit its YAML tag");
        return ITH_OK;
    }
    return fail_at(b, mark, "found a YAML tag that is not supported (remove it)");
}

static ith_status set_anchor(builder *b, const yaml_char_t *name, const ith_yaml_node *node,
                             yaml_mark_t mark)
{
    if (!name)
        return ITH_OK;
    if (b->num_anchors == MAX_ANCHORS)
        return fail_at(b, mark, "too many anchors (at most 256)");
    const char *text = (const char *)name;
    char *copy = ith_arena_strndup(&b->out->arena, text, (int64_t)strlen(text));
    if (!copy)
        return out_of_memory(b);
    b->anchors[b->num_anchors++] = (anchor){copy, node};
    return ITH_OK;
}

static bool is_merge_key(const ith_yaml_node *key)
{
    return !key->quoted && strcmp(key->text, "<<") == 0;
}

/* A finished node goes to the open collection, or becomes the root. */
static ith_status add_child(builder *b, const ith_yaml_node *node, yaml_mark_t mark)
{
    if (b->depth == 0) {
        b->out->root = node;
        return ITH_OK;
    }
    frame *top = &b->stack[b->depth - 1];
    if (top->node->kind == ITH_YAML_MAP && top->count % 2 == 0 && node->kind != ITH_YAML_SCALAR)
        return ith_yaml_fail(node, b->err, "found a list or map as a key (keys are words)");
    void *children = top->children;
    ith_status status = ith_grow(&children, &top->cap, top->count + 1,
                                 (int64_t)sizeof *top->children, "YAML nodes", b->err);
    top->children = children;
    ITH_TRY(status);
    top->children[top->count++] = node;
    top->node->expanded_nodes += node->expanded_nodes;
    if (node->height >= top->node->height)
        top->node->height = node->height + 1;
    if (top->node->expanded_nodes > ITH_YAML_MAX_NODES)
        return fail_at(b, mark, "aliases expand to more than 1000000 values");
    if (top->node->height + b->depth - 1 > ITH_YAML_MAX_DEPTH)
        return fail_at(b, mark, "nested too deeply (at most 64 levels)");
    return ITH_OK;
}

/* ---- maps: duplicates and merge keys ---- */

typedef struct {
    ith_yaml_pair pair;
    int64_t rank;  /* 0: written in the map itself; then the merged maps, nearest first */
    int64_t order; /* position in the result */
} ranked_pair;

static int by_key_then_rank(const void *a, const void *b)
{
    const ranked_pair *x = a, *y = b;
    int order = strcmp(x->pair.key->text, y->pair.key->text);
    if (order)
        return order;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

static int by_order(const void *a, const void *b)
{
    const ranked_pair *x = a, *y = b;
    return x->order < y->order ? -1 : x->order > y->order;
}

/* Number of pairs a merge value brings, or an error. */
static ith_status count_merged(builder *b, const ith_yaml_node *value, yaml_mark_t mark,
                               int64_t *out)
{
    if (value->kind == ITH_YAML_MAP) {
        *out += value->count;
        return spend(b, value->count, mark);
    }
    if (value->kind != ITH_YAML_SEQ)
        return ith_yaml_fail(value, b->err, "<<: found a value (use a map or a list of maps)");
    for (int64_t i = 0; i < value->count; i++) {
        if (value->items[i]->kind != ITH_YAML_MAP)
            return ith_yaml_fail(value->items[i], b->err, "<<: found a value (use maps)");
        ITH_TRY(spend(b, value->items[i]->count, mark));
        *out += value->items[i]->count;
    }
    return ITH_OK;
}

static int64_t append_pairs(ranked_pair *all, int64_t count, const ith_yaml_node *map, int64_t rank)
{
    for (int64_t i = 0; i < map->count; i++, count++)
        all[count] = (ranked_pair){map->pairs[i], rank, count};
    return count;
}

/* Merged pairs first, then the map's own (PyYAML's order). */
static int64_t gather_pairs(const frame *top, ranked_pair *all)
{
    int64_t count = 0;
    for (int64_t i = 0; i < top->count; i += 2) {
        const ith_yaml_node *value = top->children[i + 1];
        if (!is_merge_key(top->children[i]))
            continue;
        if (value->kind == ITH_YAML_MAP)
            count = append_pairs(all, count, value, 1);
        for (int64_t k = 0; value->kind == ITH_YAML_SEQ && k < value->count; k++)
            count = append_pairs(all, count, value->items[k], k + 1);
    }
    for (int64_t i = 0; i < top->count; i += 2) {
        if (is_merge_key(top->children[i]))
            continue;
        all[count] = (ranked_pair){{top->children[i], top->children[i + 1]}, 0, count};
        count++;
    }
    return count;
}

/* Of equal keys the lowest rank stays; two of rank 0 are a mistake. */
static ith_status drop_overridden(builder *b, ranked_pair *all, int64_t *count)
{
    qsort(all, (size_t)*count, sizeof *all, by_key_then_rank);
    int64_t kept = 0;
    for (int64_t i = 0; i < *count; i++) {
        const ranked_pair *last = kept ? &all[kept - 1] : NULL;
        if (last && strcmp(last->pair.key->text, all[i].pair.key->text) == 0) {
            if (all[i].rank == 0)
                return ith_yaml_fail(all[i].pair.key, b->err, "%s: given twice (first at line %d)",
                                     all[i].pair.key->text, last->pair.key->line);
            continue;
        }
        all[kept++] = all[i];
    }
    qsort(all, (size_t)kept, sizeof *all, by_order);
    *count = kept;
    return ITH_OK;
}

static ith_status finish_map(builder *b, frame *top, yaml_mark_t mark)
{
    int64_t room = top->count / 2, num_merge = 0;
    for (int64_t i = 0; i < top->count; i += 2)
        if (is_merge_key(top->children[i])) {
            if (++num_merge > 1)
                return ith_yaml_fail(top->children[i], b->err, "<<: given twice (use a list)");
            ITH_TRY(count_merged(b, top->children[i + 1], mark, &room));
        }
    ranked_pair *all = NULL;
    ITH_TRY(ith_alloc_zero((void **)&all, room, (int64_t)sizeof *all, "YAML map", b->err));
    int64_t count = gather_pairs(top, all);
    ith_status status = drop_overridden(b, all, &count);
    ith_yaml_pair *pairs = NULL;
    if (status == ITH_OK) {
        pairs = ith_arena_alloc(&b->out->arena, count * (int64_t)sizeof *pairs);
        status = pairs ? ITH_OK : out_of_memory(b);
    }
    for (int64_t i = 0; status == ITH_OK && i < count; i++)
        pairs[i] = all[i].pair;
    ith_free(all);
    top->node->pairs = pairs;
    top->node->count = count;
    return status;
}

static ith_status finish_seq(builder *b, frame *top)
{
    int64_t bytes = top->count * (int64_t)sizeof *top->children;
    const ith_yaml_node **items = ith_arena_alloc(&b->out->arena, bytes);
    if (!items)
        return out_of_memory(b);
    if (bytes)
        memcpy(items, top->children, (size_t)bytes);
    top->node->items = items;
    top->node->count = top->count;
    return ITH_OK;
}

/* ---- events ---- */

static ith_status on_scalar(builder *b, const yaml_event_t *event)
{
    ith_yaml_node *node = NULL;
    ITH_TRY(new_node(b, ITH_YAML_SCALAR, event->start_mark, &node));
    node->len = (int64_t)event->data.scalar.length;
    node->text =
        ith_arena_strndup(&b->out->arena, (const char *)event->data.scalar.value, node->len);
    if (!node->text)
        return out_of_memory(b);
    node->type = ITH_YAML_STR;
    node->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
    if (event->data.scalar.tag)
        ITH_TRY(apply_tag(b, node, (const char *)event->data.scalar.tag, event->start_mark));
    else if (!node->quoted)
        ith_yaml_resolve_plain(node);
    ITH_TRY(set_anchor(b, event->data.scalar.anchor, node, event->start_mark));
    return add_child(b, node, event->start_mark);
}

static ith_status on_start(builder *b, ith_yaml_kind kind, const yaml_event_t *event,
                           const yaml_char_t *tag)
{
    if (b->depth == ITH_YAML_MAX_DEPTH)
        return fail_at(b, event->start_mark, "nested too deeply (at most 64 levels)");
    ith_yaml_node *node = NULL;
    ITH_TRY(new_node(b, kind, event->start_mark, &node));
    if (tag)
        ITH_TRY(apply_tag(b, node, (const char *)tag, event->start_mark));
    b->stack[b->depth++] = (frame){.node = node};
    return ITH_OK;
}

/* The anchor's name arrives at the start, the node is complete only at the end; an alias in between
 * would make a loop, so it is set here under the name kept in node->text. */
static ith_status on_end(builder *b, const yaml_event_t *event)
{
    frame *top = &b->stack[b->depth - 1];
    ith_yaml_node *node = top->node;
    ITH_TRY(node->kind == ITH_YAML_MAP ? finish_map(b, top, event->start_mark)
                                       : finish_seq(b, top));
    ith_free(top->children);
    top->children = NULL;
    b->depth--;
    if (node->text[0])
        ITH_TRY(set_anchor(b, (const yaml_char_t *)node->text, node, event->start_mark));
    node->text = "";
    return add_child(b, node, event->start_mark);
}

static ith_status keep_anchor_name(builder *b, const yaml_char_t *name)
{
    if (!name)
        return ITH_OK;
    ith_yaml_node *node = b->stack[b->depth - 1].node;
    node->text =
        ith_arena_strndup(&b->out->arena, (const char *)name, (int64_t)strlen((const char *)name));
    return node->text ? ITH_OK : out_of_memory(b);
}

static ith_status on_alias(builder *b, const yaml_event_t *event)
{
    const char *name = (const char *)event->data.alias.anchor;
    for (int i = b->num_anchors - 1; i >= 0; i--)
        if (strcmp(b->anchors[i].name, name) == 0)
            return add_child(b, b->anchors[i].node, event->start_mark);
    char text[128];
    snprintf(text, sizeof text, "alias *%.80s has no anchor before it", name);
    return fail_at(b, event->start_mark, text);
}

static ith_status on_event(builder *b, const yaml_event_t *event)
{
    switch (event->type) {
    case YAML_SCALAR_EVENT:
        return on_scalar(b, event);
    case YAML_ALIAS_EVENT:
        return on_alias(b, event);
    case YAML_MAPPING_START_EVENT:
        ITH_TRY(on_start(b, ITH_YAML_MAP, event, event->data.mapping_start.tag));
        return keep_anchor_name(b, event->data.mapping_start.anchor);
    case YAML_SEQUENCE_START_EVENT:
        ITH_TRY(on_start(b, ITH_YAML_SEQ, event, event->data.sequence_start.tag));
        return keep_anchor_name(b, event->data.sequence_start.anchor);
    case YAML_MAPPING_END_EVENT:
    case YAML_SEQUENCE_END_EVENT:
        return on_end(b, event);
    case YAML_DOCUMENT_START_EVENT:
        if (b->out->root)
            return fail_at(b, event->start_mark, "found a second YAML document (keep one)");
        return ITH_OK;
    default:
        return ITH_OK;
    }
}

static bool indented_by_tab(const yaml_parser_t *parser, size_t line)
{
    const unsigned char *p = parser->input.string.start, *end = parser->input.string.end;
    for (; line > 0 && p < end; p++)
        line -= *p == '\n';
    while (p < end && *p == ' ')
        p++;
    return p < end && *p == '\t';
}

static ith_status fail_syntax(builder *b, const yaml_parser_t *parser)
{
    const char *problem = parser->problem ? parser->problem : "not YAML";
    if (parser->error == YAML_MEMORY_ERROR)
        return out_of_memory(b);
    if (parser->error == YAML_READER_ERROR)
        return ith_fail(b->err, ITH_ERR_USAGE, "%s: byte %zu: %s (YAML and JSON are UTF-8 text)",
                        b->file, parser->problem_offset, problem);
    char text[256];
    if (indented_by_tab(parser, parser->problem_mark.line))
        return fail_at(b, (yaml_mark_t){.line = parser->problem_mark.line},
                       "not YAML: found a tab at the begin of the line (indent by spaces)");
    if (parser->context && strcmp(problem, "could not find expected ':'") == 0)
        return fail_at(b, parser->context_mark,
                       "not YAML: found text without a colon and a space (key: value)");
    if (parser->context)
        snprintf(text, sizeof text, "not YAML: %s, %s (line %zu)", problem, parser->context,
                 parser->context_mark.line + 1);
    else
        snprintf(text, sizeof text, "not YAML: %s", problem);
    return fail_at(b, parser->problem_mark, text);
}

static ith_status read_events(builder *b, yaml_parser_t *parser)
{
    for (bool done = false; !done;) {
        yaml_event_t event;
        if (!yaml_parser_parse(parser, &event))
            return fail_syntax(b, parser);
        done = event.type == YAML_STREAM_END_EVENT;
        ith_status status = on_event(b, &event);
        yaml_event_delete(&event);
        ITH_TRY(status);
    }
    if (!b->out->root) {
        ith_yaml_node *empty = NULL;
        ITH_TRY(new_node(b, ITH_YAML_SCALAR, (yaml_mark_t){0}, &empty));
        b->out->root = empty;
    }
    return ITH_OK;
}

ith_status ith_yaml_parse_at(ith_yaml *out, const char *text, int64_t len, const char *name,
                             const ith_yaml_node *at, ith_error *err)
{
    if (len > ITH_YAML_MAX_BYTES)
        return ith_fail(err, ITH_ERR_USAGE, "%s: %lld bytes of YAML (at most %lld)", name,
                        (long long)len, (long long)ITH_YAML_MAX_BYTES);
    ith_yaml yaml = {0};
    ith_arena_init(&yaml.arena, MAX_ARENA_BYTES);
    builder *b = NULL;
    ITH_TRY(ith_alloc_zero((void **)&b, 1, (int64_t)sizeof *b, "YAML reader", err));
    *b = (builder){.out = &yaml, .at = at, .err = err, .budget = ITH_YAML_MAX_NODES};
    b->file = ith_arena_strndup(&yaml.arena, name, (int64_t)strlen(name));
    yaml_parser_t parser;
    ith_status status = ITH_OK;
    if (!b->file || !yaml_parser_initialize(&parser)) {
        b->file = name;
        status = out_of_memory(b);
    } else {
        yaml_parser_set_input_string(&parser, (const unsigned char *)(text ? text : ""),
                                     (size_t)len);
        status = read_events(b, &parser);
        yaml_parser_delete(&parser);
    }
    for (int i = 0; i < b->depth; i++)
        ith_free(b->stack[i].children);
    ith_free(b);
    if (status == ITH_OK)
        *out = yaml;
    else
        ith_arena_deinit(&yaml.arena);
    return status;
}

static bool has_suffix(const char *name, const char *suffix)
{
    /* cppcheck-suppress ctunullpointer ; give_keys has no name only where it has a place */
    size_t len = strlen(name), suffix_len = strlen(suffix);
    return len >= suffix_len && strcmp(name + len - suffix_len, suffix) == 0;
}

static unsigned hex4(const char *p)
{
    char digits[5] = {p[0], p[1], p[2], p[3], '\0'};
    return (unsigned)strtoul(digits, NULL, 16);
}

/* Valid JSON to YAML with the same positions as nearly as possible: tabs become spaces, and a
 * surrogate pair (12 bytes) becomes one \U escape (10 bytes). */
static void json_to_yaml(const char *text, int64_t len, ith_buf *out)
{
    for (int64_t i = 0; i < len;) {
        if (text[i] == '\\' && i + 12 <= len && text[i + 1] == 'u' && text[i + 6] == '\\' &&
            hex4(text + i + 2) >= 0xd800 && hex4(text + i + 2) < 0xdc00) {
            unsigned code =
                0x10000 + ((hex4(text + i + 2) - 0xd800) << 10) + (hex4(text + i + 8) - 0xdc00);
            ith_buf_printf(out, "\\U%08x", code);
            i += 12;
        } else if (text[i] == '\\' && i + 1 < len) {
            ith_buf_append(out, text + i, 2);
            i += 2;
        } else {
            char c = text[i];
            ith_buf_putc(out, c == '\t' ? (char)' ' : c);
            i++;
        }
    }
}

ith_status ith_yaml_parse(ith_yaml *out, const char *text, int64_t len, const char *name,
                          ith_error *err)
{
    if (!has_suffix(name, ".json"))
        return ith_yaml_parse_at(out, text, len, name, NULL, err);
    json_t *json = NULL;
    ith_status status = ith_json_parse(&json, text, len, name, err);
    if (status == ITH_ERR_FORMAT) { /* the user's own file: a wrong request */
        status = ITH_ERR_USAGE;
        if (err)
            err->status = status;
    }
    ITH_TRY(status);
    json_decref(json);
    ith_buf yaml = {0};
    json_to_yaml(text, len, &yaml);
    status = ith_buf_check(&yaml, name, err);
    if (status == ITH_OK)
        status = ith_yaml_parse_at(out, yaml.data, yaml.len, name, NULL, err);
    ith_buf_deinit(&yaml);
    return status;
}

ith_status ith_yaml_load(ith_yaml *out, const char *path, ith_error *err)
{
    ith_buf text = {0};
    ith_status status = ith_read_file(path, ITH_YAML_MAX_BYTES, &text, err);
    if (status == ITH_OK)
        status = ith_yaml_parse(out, text.data, text.len, path, err);
    ith_buf_deinit(&text);
    return status;
}

void ith_yaml_deinit(ith_yaml *yaml)
{
    ith_arena_deinit(&yaml->arena);
    yaml->root = NULL;
}
