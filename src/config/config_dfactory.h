/* config_dfactory.h - the dFactory/VeOmni dialect as a table: config.c reads such files with it. */
#ifndef ITH_CONFIG_CONFIG_DFACTORY_H
#define ITH_CONFIG_CONFIG_DFACTORY_H

#include <stdbool.h>

typedef struct {
    const char *name;     /* "train.lr" */
    const char *to;       /* our key; NULL: none */
    const char *note;     /* without `to`: why it changes nothing; with `only`: why not another */
    const char *only;     /* the one value that is accepted: a word or a number */
    const char *yes, *no; /* what true and false become */
    bool empty_is_null, zero_is_null;
    bool is_lr_min; /* an absolute rate: becomes lr_scheduler_config.min_lr_ratio */
} dfactory_key;

/* NULL: unknown. */
const dfactory_key *ith_dfactory_find(const char *name);
/* All names, for the nearest one; returns how many. */
int ith_dfactory_names(const char **out, int max);
/* Our keys with dFactory's defaults, as YAML. */
extern const char ith_dfactory_defaults[];

#define ITH_DFACTORY_LR_MIN 1e-7 /* when the file has no lr_min */

#endif
