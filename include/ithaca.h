/* ithaca.h - libithaca: fine-tuning and text generation inside another program.
 *
 *     cc app.c $(pkg-config --cflags --libs ithaca)
 *
 * Two things: ithaca_train runs a whole configuration file, as `ithaca train` does; ithaca_model is
 * an open model that writes text. Both run on the CPU, or on a CUDA device when the plug-in is
 * installed and finds one.
 *
 * Rules.
 * 1. What can fail returns ithaca_status and, on failure, a text in an ithaca_error that the caller
 *    owns (it may be NULL): one line, or one for each mistake of a configuration. Out-parameters
 *    are untouched on failure.
 * 2. Nothing is printed and no signal handler is installed. Messages for people go to the function
 *    given to ithaca_set_log. (A broken internal invariant writes one line to stderr and aborts.)
 * 3. Text is UTF-8. Strings that are passed in are read during the call only; strings that are
 *    handed to a callback live until it returns.
 * 4. One thread at a time may use one ithaca_model, and callbacks come on the thread that called.
 *    Different models, and a training run, may be used from different threads. ithaca_set_log is
 *    for the whole process: call it before anything else.
 * 5. Structs that have an _init function are filled by it and then changed, so that code goes on
 *    compiling when a later version adds fields. */
#ifndef ITHACA_H
#define ITHACA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0" */
const char *ithaca_version(void);

typedef enum {
    ITHACA_OK = 0,
    ITHACA_FAILED = 1, /* the run failed: files, memory, numbers */
    ITHACA_WRONG = 2,  /* the request was wrong: a key, a value, a missing directory */
    ITHACA_STOPPED = 3 /* a callback asked to stop; what was done until then is saved */
} ithaca_status;

typedef struct {
    char text[2048]; /* where, what was found, what would be right; "" after success */
} ithaca_error;

typedef enum { ITHACA_DEBUG, ITHACA_INFO, ITHACA_WARN, ITHACA_ERROR } ithaca_log_level;
/* log NULL: silence, which is the default. */
void ithaca_set_log(void (*log)(void *arg, ithaca_log_level level, const char *text), void *arg);

/* ---- training ------------------------------------------------------------------------------- */

typedef struct {
    int64_t step, total_steps; /* optimizer steps */
    double epoch;              /* with fraction */
    bool is_eval;              /* of the evaluation set; no gradient, no rate, no mfu then */
    double loss;
    double grad_norm, learning_rate;
    double tokens_per_s;
    double mfu; /* share of the machine's measured matrix rate, 0..1; NaN: unknown */
    int64_t peak_bytes;
    double elapsed_s;
} ithaca_progress;

/* What `poll` may ask for between two steps. */
enum { ITHACA_GO_ON = 0, ITHACA_STOP = 1, ITHACA_SAVE = 2 };

/* All may be NULL. */
typedef struct {
    int (*poll)(void *arg); /* bits of the enum above. STOP saves a checkpoint first. */
    void (*progress)(void *arg, const ithaca_progress *progress); /* each step and evaluation */
    void (*news)(void *arg, const char *line);                    /* "saved ...", "resumed ..." */
    void *arg;
} ithaca_train_hooks;

typedef struct {
    int64_t steps;   /* done in this call */
    int64_t skipped; /* of these, without an update: gradients were not finite */
    double first_loss, last_loss;
    double eval_loss; /* NaN without evaluation */
    double seconds;
} ithaca_train_result;

/* Runs a configuration (docs/config.md; NULL: defaults only) with num_overrides texts "key=value"
 * over it. The model, logs and checkpoints go to its output_dir. hooks and out may be NULL.
 * ITHACA_STOPPED after ITHACA_STOP: go on with the override resume_from_checkpoint=auto; *out is
 * filled then too. */
ithaca_status ithaca_train(const char *config_path, const char *const *overrides, int num_overrides,
                           const ithaca_train_hooks *hooks, ithaca_train_result *out,
                           ithaca_error *err);

/* ---- generation ----------------------------------------------------------------------------- */

typedef struct ithaca_model ithaca_model;

typedef struct {
    const char *device; /* "auto", "cpu" or "cuda" */
    const char *dtype;  /* "auto" (config.json's), "bfloat16" or "float32" */
    int threads;        /* 0: all cores */
    int64_t context;    /* tokens of prompt and answer together; memory is taken for all of it */
} ithaca_model_options;
void ithaca_model_options_init(ithaca_model_options *options);

/* Opens a Hugging Face model directory. options NULL: the defaults. */
ithaca_status ithaca_model_open(ithaca_model **out, const char *dir,
                                const ithaca_model_options *options, ithaca_error *err);
void ithaca_model_close(ithaca_model *model); /* NULL is fine */

typedef struct {
    int64_t max_new_tokens;
    bool do_sample;            /* false: always the likeliest token */
    double temperature;        /* 0: as do_sample false */
    int64_t top_k;             /* 0: off */
    double top_p;              /* 1: off */
    double min_p;              /* 0: off */
    double repetition_penalty; /* 1: off */
    uint64_t seed;             /* the same seed gives the same answer */
    int thinking;              /* enable_thinking of the chat template: 0, 1, -1 unset */
} ithaca_sampling;
/* The model's own defaults (generation_config.json), max_new_tokens 512. */
void ithaca_sampling_init(const ithaca_model *model, ithaca_sampling *sampling);

typedef struct {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} ithaca_message;

/* Gets the answer piece by piece, whole characters only; false ends the answer there. */
typedef bool (*ithaca_text_fn)(void *arg, const char *text, size_t len);

typedef struct {
    int64_t prompt_tokens, new_tokens; /* the stop token is not counted */
    bool stopped; /* by a stop token; false: max_new_tokens, the context, or the callback */
} ithaca_answer;

/* The answer to a conversation, through the model's chat template. sampling NULL: the defaults. out
 * may be NULL. ITHACA_WRONG when the prompt leaves no room in the context. */
ithaca_status ithaca_chat(ithaca_model *model, const ithaca_message *messages, size_t num_messages,
                          const ithaca_sampling *sampling, ithaca_text_fn text, void *arg,
                          ithaca_answer *out, ithaca_error *err);
/* What follows a text, without a template. Special tokens written in it count as such. */
ithaca_status ithaca_complete(ithaca_model *model, const char *prompt,
                              const ithaca_sampling *sampling, ithaca_text_fn text, void *arg,
                              ithaca_answer *out, ithaca_error *err);

#ifdef __cplusplus
}
#endif
#endif
