/* config_dialect.h - files written for other programs, as tables: each of their keys, and what it
 * means in our keys. config.c reads such files with them. */
#ifndef ITH_CONFIG_CONFIG_DIALECT_H
#define ITH_CONFIG_CONFIG_DIALECT_H

#include <stdbool.h>

#define ITH_MAX_DIALECT_KEYS 240

/* A value that is accepted, and our keys that it stands for, as YAML; NULL: it changes nothing. */
typedef struct {
    const char *value, *keys;
} ith_dialect_choice;

typedef struct {
    const char *name; /* "train.lr" */
    const char *to;   /* our key; NULL: none */
    const char *note; /* alone: why it changes nothing; with choices: why not another value */
    ith_dialect_choice choices[7]; /* up to the first without value */
    const char *null_if;           /* a value that means null */
    const char *skip_if;           /* a value that changes nothing */
    bool late;                     /* read behind all others of the file */
    bool whole;                    /* 3.0 is 3 */
    bool is_lr_min;                /* an absolute rate: becomes lr_scheduler_config.min_lr_ratio */
} ith_dialect_key;

typedef struct {
    const char *name; /* "TRL" */
    const ith_dialect_key *keys;
    int num_keys;
    const char *defaults; /* our keys, as YAML, where theirs differ from ours */
    const char *differs;  /* told of every file: what no key can say; NULL: nothing */
} ith_dialect;

extern const ith_dialect ith_dialect_dfactory; /* sections model: data: train: */
extern const ith_dialect ith_dialect_trl;      /* flat, with accelerate's parallelism_config_* */

#define ITH_DFACTORY_LR_MIN 1e-7 /* when the file has no lr_min */

#endif
