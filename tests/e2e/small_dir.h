/* small_dir.h - model directories, data and configs for tests of whole runs. */
#ifndef ITH_TESTS_SMALL_DIR_H
#define ITH_TESTS_SMALL_DIR_H

#include "e2e/small_model.h"

#include "base/log.h"
#include "checkpoint/safetensors.h"
#include "config/config.h"
#include "tokenizer/tokenizer.h"
#include "train/trainer.h"

static inline const char *small_join(const char *dir, const char *name)
{
    static char ring[8][4096];
    static int next;
    char *out = ring[next++ % 8];
    size_t a = strlen(dir), b = strlen(name);
    assert_true(a + b + 2 <= sizeof ring[0]);
    memmove(out, dir, a); /* dir may be a result of ours */
    out[a] = '/';
    memcpy(out + a + 1, name, b + 1);
    return out;
}

/* A fresh folder for the tests of one program, in memory where that is possible (runs sync what
 * they write thousands of times). Only errors are logged. End with small_teardown. */
static inline char *small_setup(const char *name)
{
    ith_error err = {0};
    assert_ok(ith_log_set_levels("error", &err), err);
    char path[256];
    snprintf(path, sizeof path, "/dev/shm/ithaca-%s-XXXXXX", name);
    const char *dir = mkdtemp(path) ? path : temp_dir(name);
    char *copy = ith_strndup(dir, (int64_t)strlen(dir));
    assert_non_null(copy);
    return copy;
}

static inline void small_teardown(char *dir)
{
    ith_error err = {0};
    assert_ok(ith_remove_tree(dir, &err), err);
    ith_free(dir);
}

static inline void small_write(const char *dir, const char *name, const char *text)
{
    ith_error err = {0};
    assert_ok(ith_write_file(small_join(dir, name), text, (int64_t)strlen(text), &err), err);
}

/* How the weights of a directory are stored. */
typedef struct {
    ith_dtype dtype;
    int fused;        /* experts: 0 each its own tensors, 1 fused, 2 fused and swapped */
    bool stored_head; /* a tied model that stores its head as well */
    bool extra;       /* tensors that no model of ours knows: mtp.*, an integer, an F32 one */
    int64_t shard_bytes;
} small_layout;

static const char small_text[] =
    "The red fox crosses the river at dawn. Who crosses the river? The fox. What colour is it? "
    "Red. The grey owl sleeps in the old tower by day and hunts in the fields at night. Seven "
    "ships left the harbour in spring; five came home in autumn, laden with salt and silk. "
    "Numbers: 1 2 3 4 5 6 7 8 9 10 11 12. The baker opens at six, the smith at seven, the "
    "school at eight. Rain falls on the hills, the hills feed the river, the river feeds us.\n";

static inline void small_put_tensor(ith_st_entry *e, const char *name, ith_dtype dtype, int ndim,
                                    const int64_t *shape, const float *values)
{
    *e = (ith_st_entry){.name = name, .dtype = dtype, .ndim = ndim};
    memcpy(e->shape, shape, (size_t)ndim * sizeof *shape);
    int64_t n = ith_st_numel(e);
    void *data = ith_malloc(n * ith_dtype_bytes(dtype));
    assert_non_null(data);
    ith_convert(data, dtype, values, ITH_F32, n);
    e->data = data;
}

/* Value of element k of output tensor `name`, whatever its layout: small_values of its piece. */
static inline int64_t small_tensors(const ith_model *m, const small_layout *how, ith_st_entry *out)
{
    static char names[64][96];
    const ith_hf_config *c = m->config;
    int64_t count = 0, num_names = 0;
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        const char *experts = strstr(p->hf_name, ".mlp.experts.");
        float *v = ith_malloc(p->count * 4);
        assert_non_null(v);
        small_values(m, p, 7, v);
        if (!experts || !how->fused) {
            small_put_tensor(&out[count++], p->hf_name, how->dtype, p->ndim, p->shape, v);
            ith_free(v);
            continue;
        }
        bool down = strstr(experts, ".down_proj.") != NULL, up = strstr(experts, ".up_proj."),
             swap = how->fused == 2;
        int64_t expert = strtoll(experts + 13, NULL, 10), rows = p->shape[0], cols = p->shape[1];
        int64_t all = down ? rows : 2 * rows,
                shape[3] = {c->num_experts, swap ? cols : all, swap ? all : cols};
        char name[96];
        snprintf(name, sizeof name, "%.*s.%s", (int)(experts - p->hf_name) + 12, p->hf_name,
                 down ? "down_proj" : "gate_up_proj");
        int64_t at = -1;
        for (int64_t k = 0; k < count; k++)
            if (strcmp(out[k].name, name) == 0)
                at = k;
        if (at < 0) {
            float *zeros = ith_calloc(c->num_experts * all * cols, 4);
            assert_non_null(zeros);
            at = count++;
            snprintf(names[num_names], sizeof names[0], "%s", name);
            small_put_tensor(&out[at], names[num_names++], how->dtype, 3, shape, zeros);
            ith_free(zeros);
        }
        int64_t size = ith_dtype_bytes(how->dtype), r0 = up ? rows : 0;
        char *data = (char *)(uintptr_t)out[at].data + expert * all * cols * size;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < cols; k++)
                ith_convert(data + (swap ? k * all + r0 + r : (r0 + r) * cols + k) * size,
                            how->dtype, &v[r * cols + k], ITH_F32, 1);
        ith_free(v);
    }
    static const float odd[6] = {0.1f, -2.5f, 3.25f, 1e-8f, 65000.0f, 7.0f};
    if (how->stored_head) {
        const ith_hf_piece *e = &m->pieces[0];
        float *v = ith_malloc(e->count * 4);
        assert_non_null(v);
        small_values(m, e, 7, v);
        small_put_tensor(&out[count++], "lm_head.weight", how->dtype, e->ndim, e->shape, v);
        ith_free(v);
    }
    if (how->extra) {
        small_put_tensor(&out[count++], "mtp.layers.0.eh_proj.weight", how->dtype, 2,
                         (const int64_t[]){2, 3}, odd);
        small_put_tensor(&out[count++], "model.layers.0.A_log", ITH_F32, 1, (const int64_t[]){6},
                         odd);
        out[count] = (ith_st_entry){.name = "counter", .dtype = ITH_I64, .ndim = 0};
        void *data = ith_calloc(1, 8);
        assert_non_null(data);
        memcpy(data, "\1\2\3\4\5\6\7\10", 8);
        out[count++].data = data;
    }
    return count;
}

/* A whole model directory: config.json, weights, tokenizer, chat template, generation config. */
static inline void small_make_model(const char *dir, const small_shape *shape,
                                    const small_layout *how)
{
    static const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    static ith_st_entry tensors[256];
    ith_error err = {0};
    ith_hf_config config;
    ith_model *m = NULL;
    ith_buf text = {0};
    assert_ok(ith_make_dirs(dir, &err), err);
    small_config_text(shape, &text);
    assert_ok(ith_write_file(small_join(dir, "config.json"), text.data, text.len, &err), err);
    assert_ok(ith_hf_config_parse(&config, text.data, text.len, "config.json", &err), err);
    assert_ok(ith_model_create(&m, &config, ITH_F32, 1, &err), err);
    int64_t count = small_tensors(m, how, tensors);
    ith_st_options options = {.max_shard_bytes = how->shard_bytes};
    assert_ok(ith_st_write(dir, tensors, count, &options, &err), err);
    for (int64_t i = 0; i < count; i++)
        ith_free((void *)(uintptr_t)tensors[i].data);
    assert_ok(ith_bpe_train(small_text, (int64_t)sizeof small_text - 1, 300, special, 3, dir, &err),
              err);
    small_write(dir, "chat_template.jinja",
                "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + "
                "'<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "
                "'<|im_start|>assistant\\n' }}{%- endif %}");
    small_write(dir, "generation_config.json", "{\"do_sample\": false}\n");
    ith_model_destroy(m);
    ith_hf_config_deinit(&config);
    ith_buf_deinit(&text);
}

/* `rows` conversations of different lengths, some with two turns and with weights. */
static inline void small_make_data(const char *path, int rows)
{
    ith_buf out = {0};
    ith_error err = {0};
    for (int i = 0; i < rows; i++) {
        int at = (i * 37) % 200, len = 8 + (i * 29) % 90;
        ith_buf_printf(&out, "{\"messages\": [{\"role\": \"user\", \"content\": \"%d: %.*s\"}, ", i,
                       20 + i % 7, small_text + at);
        if (i % 4 == 3)
            ith_buf_printf(&out,
                           "{\"role\": \"assistant\", \"content\": \"no\", \"loss_weight\": 0.5}, "
                           "{\"role\": \"user\", \"content\": \"and?\"}, ");
        ith_buf_printf(&out, "{\"role\": \"assistant\", \"content\": \"%.*s\"}]}\n", len,
                       small_text + at + 20);
    }
    assert_ok(ith_write_file(path, out.data, out.len, &err), err);
    ith_buf_deinit(&out);
}

/* A config out of lines of YAML after the ones every test wants. */
static inline void small_config(ith_config *c, const char *model, const char *data,
                                const char *output, const char *more)
{
    ith_error err = {0};
    ith_buf text = {0};
    ith_buf_printf(&text,
                   "model: %s\ntrain_dataset: %s\noutput_dir: %s\ndevice: cpu\nthreads: 2\n"
                   "train_on: all_turns\ncutoff_len: 96\nreport_to: []\n%s%s",
                   model, data, output,
                   strstr(more, "learning_rate") ? "" : "learning_rate: 1.0e-2\n", more);
    assert_ok(ith_config_parse(c, text.data, text.len, "test.yaml", NULL, 0, &err), err);
    ith_buf_deinit(&text);
}

/* What hooks saw, and what they shall ask for. */
typedef struct {
    ith_report_row rows[512];
    int num_rows;
    int64_t poll_at; /* 1-based call of poll that asks */
    int poll_bits;
    int64_t polls;
    ith_buf news;
    int64_t allocs[512]; /* ith_alloc_count at each poll */
} small_seen;

static inline int small_on_poll(void *arg)
{
    small_seen *s = arg;
    if (s->polls < 512)
        s->allocs[s->polls] = ith_alloc_count();
    return ++s->polls == s->poll_at ? s->poll_bits : 0;
}

static inline void small_on_row(void *arg, const ith_report_row *row)
{
    small_seen *s = arg;
    assert_true(s->num_rows < 512);
    assert_true(row->is_eval || (row->mfu >= 0 && row->mfu <= 1));
    s->rows[s->num_rows++] = *row;
}

static inline void small_on_text(void *arg, const char *text)
{
    small_seen *s = arg;
    ith_buf_puts(&s->news, text);
    ith_buf_putc(&s->news, '\n');
}

/* Opens, runs, closes. */
static inline ith_status small_train(const ith_config *c, small_seen *seen, ith_run_result *out,
                                     ith_error *err)
{
    ith_trainer_hooks hooks = {small_on_poll, small_on_row, NULL, small_on_text, seen};
    ith_trainer t;
    ith_error_clear(err);
    ith_status status = ith_trainer_open(&t, c, false, &hooks, err);
    if (status != ITH_OK)
        return status;
    t.matmul_rate = 1e3; /* not measured: that takes longer than these runs, which beat it */
    status = ith_trainer_run(&t, &hooks, out, err);
    ith_trainer_close(&t);
    return status;
}

/* A run of a model with data into a folder, names below `base`; more than one in turn. */
typedef struct {
    small_seen seen; /* news of the last run, rows of all */
    ith_run_result result;
    ith_error err;
} small_job;

static inline small_job *small_job_create(void)
{
    small_job *j = ith_calloc(1, sizeof *j);
    assert_non_null(j);
    return j;
}

static inline ith_status small_job_run(small_job *j, const char *base, const char *model,
                                       const char *data, const char *out, const char *more)
{
    ith_config c;
    ith_buf_clear(&j->seen.news);
    small_config(&c, small_join(base, model), small_join(base, data), small_join(base, out), more);
    ith_status status = small_train(&c, &j->seen, &j->result, &j->err);
    ith_config_deinit(&c);
    return status;
}

static inline void small_job_destroy(small_job *j)
{
    ith_buf_deinit(&j->seen.news);
    ith_free(j);
}

/* The two files hold the same bytes. */
static inline void assert_same_file(const char *a, const char *b)
{
    ith_error err = {0};
    ith_buf x = {0}, y = {0};
    assert_ok(ith_read_file(a, 0, &x, &err), err);
    assert_ok(ith_read_file(b, 0, &y, &err), err);
    if (x.len != y.len || (x.len && memcmp(x.data, y.data, (size_t)x.len) != 0))
        fail_msg("%s (%lld bytes) and %s (%lld bytes) differ", a, (long long)x.len, b,
                 (long long)y.len);
    ith_buf_deinit(&x);
    ith_buf_deinit(&y);
}

#endif
