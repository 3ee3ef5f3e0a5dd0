/* config_load.h - a configuration while it is read: config.c says which node each key has,
 * config_values.c what the nodes say. */
#ifndef ITH_CONFIG_CONFIG_LOAD_H
#define ITH_CONFIG_CONFIG_LOAD_H

#include "config/config_dialect.h"
#include "config/config_internal.h"

typedef struct {
    ith_config config;
    struct ith_config_origin *origin;
    config_problems problems;
    ith_error *err;
    const ith_dialect *dialect;  /* NULL: our own */
    const ith_yaml_node *lr_min; /* of a dFactory file; NULL: not given */
} config_loader;

/* Every row from what it was given, or its default; the names of plugins first, which decide whose
 * keys apply. */
ith_status ith_config_read_rows(config_loader *l);
/* text as the config keeps it. */
ith_status ith_config_copy_text(config_loader *l, const char *text, size_t len, const char **out);

#endif
