/* golden.h - the parts of golden_check: what a run is asked, the references and the batches they
 * make (golden_reference.c), what bf16 is compared with (golden_truth.c), training and decoding
 * against them (golden_train.c, golden_decode.c), errors beside their bounds (golden_results.c). */
#ifndef ITH_TESTS_GOLDEN_GOLDEN_H
#define ITH_TESTS_GOLDEN_GOLDEN_H

#include "base/json.h"
#include "checkpoint/safetensors.h"
#include "kernels/session.h"
#include "train/step.h"

#define GREEDY_CAPACITY 512

/* In bfloat16 a float32 run of the reference leaves its values and its choices of experts to those
 * that follow. */
typedef enum { RUN_ALONE, RUN_LEADS, RUN_FOLLOWS } run_kind;

typedef struct {
    ith_use_device device;
    ith_dtype dtype;
    int threads, keep;
    int64_t chunk, cp;
    int64_t ulysses; /* 0: cp */
    int zero;        /* zero_stage */
    bool reference;  /* plain operators: the yardstick of bf16 */
    run_kind kind;
    int64_t draws, draw; /* of bf16: 0 is the directory's own weights */
    ith_mesh *mesh;
} options;

typedef struct {
    const char *dir;
    ith_hf_config config;
    ith_st_reader *weights, *ref;
    json_t *json;
} golden;

/* Results by name: error and bound. In the yardstick run the errors are only recorded. */
typedef struct {
    char name[160];
    double error, bound;
} result;

typedef struct {
    result *rows;
    int64_t count, cap;
} results;

/* What a row of the batch sees; all zero: causal. */
typedef struct {
    int64_t block;
    bool bidirectional;
} mask_kind;

/* A check that cannot go on ends the program, with the text of golden_err. */
extern ith_error golden_err;
void die_on(ith_status status);

/* ---- golden_results.c ---- */

void record(results *r, double error, double bound, const char *fmt, ...) ITH_PRINTF(4, 5);
/* Each error becomes the largest of all ranks. */
void merge(const options *o, results *r);
/* Adds the squares of a draw's errors; end: the root of their mean. */
void add_draw(results *sums, const results *draw);
void end_draws(results *sums, int64_t draws);
/* Prints the rows that fail, and the worst of each kind (first word of the name); returns the
 * number of failures. yardstick: of bf16, else NULL. */
int64_t report(const golden *g, const results *r, const results *yardstick);

/* ---- golden_reference.c: what is returned is the caller's to free ---- */

const ith_st_entry *entry_of(const golden *g, const char *name);
double number(const json_t *json, const char *key);
/* Elements of an I64 or I32 entry, and of a list, as int32. */
int32_t *ints(const ith_st_entry *e);
int32_t *json_ints(const json_t *list, int64_t *count);
/* Packed documents with labels of the Hugging Face kind (label of a row is its own id) as a
 * micro-batch. */
ith_micro_batch batch_of(const int32_t *ids, const int32_t *labels, const int32_t *cu,
                         int64_t docs);
/* The documents of this rank's dp group, and where each of its tokens is in the whole batch. */
ith_micro_batch deal(const ith_micro_batch *all, const ith_mesh *mesh, int32_t **origin);
/* Images of the documents of b, which are those of `all` that this rank's dp group has, with our
 * own positions. */
void add_media(const golden *g, const ith_micro_batch *all, const ith_mesh *mesh,
               ith_micro_batch *b);
void free_batch(ith_micro_batch *b);
ith_vision_limits vision_limits(const ith_micro_batch *batch);

/* ---- golden_truth.c ---- */

/* Contents of a device tensor as f32. */
float *floats(ith_ctx *ctx, ith_tensor t);
/* |a - ref| / |ref| */
double rel_norm(const float *a, const char *ref, ith_dtype dtype, int64_t n);
/* What the float32 run of this draw gave where this one gives `got`: runs ask in the same order. */
const float *true_values(const options *o, const float *got, int64_t n);
/* The number of the files, or of the float32 run when those are of other weights. */
double true_number(const options *o, bool other_weights, double got, double in_file);
/* A run that leads records which experts its routers choose; those that follow take the same. */
void hook_routes(const options *o, ith_ctx *ctx);
void record_scores(const options *o, const char *what, results *r);
/* Those that follow begin anew. */
void rewind_truth(void);
void free_truth(void);

/* ---- golden_train.c ---- */

/* Loss, logits and every gradient of one batch; loss NAN: the logits alone. */
void check_batch(const golden *g, const options *o, const ith_micro_batch *batch, mask_kind mask,
                 const char *what, const ith_st_entry *logits, double loss, const char *grads,
                 results *r);
/* Three steps. */
void check_adamw(const golden *g, const options *o, const ith_micro_batch *batch, mask_kind mask,
                 results *r);

/* ---- golden_decode.c: in float32 ---- */

/* Greedy decoding with the cache: token for token. Rounding to bf16 may choose others. With media
 * the prompt holds all those of the one document. */
void check_greedy(const golden *g, const options *o, const ith_micro_batch *one, results *r);
/* Decoding runs of decode.json: tokens and numbers of forwards equal, confidences near. */
void check_decode(const golden *g, const options *o, results *r);

#endif
