/* yaml_internal.h - shared by the YAML files of this folder. */
#ifndef ITH_CONFIG_YAML_INTERNAL_H
#define ITH_CONFIG_YAML_INTERNAL_H

#include "config/yaml.h"

/* Types a plain scalar (node->text, node->len) by PyYAML's YAML 1.1 rules; fills type and value. */
void ith_yaml_resolve_plain(ith_yaml_node *node);
/* A finite number written in any usual way; text is NUL-terminated. */
bool ith_yaml_parse_float(const char *text, double *out);
/* Like ith_yaml_parse, but every node stands at the position of `at` (may be NULL): for values that
 * are not in the file as YAML (a JSON text in quotes, key=value arguments). */
ith_status ith_yaml_parse_at(ith_yaml *out, const char *text, int64_t len, const char *name,
                             const ith_yaml_node *at, ith_error *err);

#endif
