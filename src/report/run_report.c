/* run_report.c - the files a run leaves. Invariant: the log on disk is the rows in memory, line by
 * line, at any moment. */
#include "report/run_report.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "report/loss_curve.h"
#include "report/tfevents.h"

struct ith_run_report {
    char *dir, *log_path;
    ith_report_row *rows;
    int64_t count, cap;
    FILE *log;
    ith_tfevents *events; /* NULL: not asked for */
};

/* A number JSON can hold: non-finite values become null. */
static void put_number(ith_buf *b, const char *key, double value)
{
    if (isfinite(value))
        ith_buf_printf(b, ", \"%s\": %.10g", key, value);
    else
        ith_buf_printf(b, ", \"%s\": null", key);
}

static void put_row(ith_buf *b, const ith_report_row *r)
{
    ith_buf_printf(b, "{\"epoch\": %.6g, \"step\": %lld", r->epoch, (long long)r->step);
    if (r->total_steps > 0)
        ith_buf_printf(b, ", \"total_steps\": %lld", (long long)r->total_steps);
    put_number(b, r->is_eval ? "eval_loss" : "loss", r->loss);
    if (r->aux_loss != 0)
        put_number(b, "aux_loss", r->aux_loss);
    if (!r->is_eval) {
        put_number(b, "grad_norm", r->grad_norm);
        put_number(b, "learning_rate", r->learning_rate);
        put_number(b, "mfu", r->mfu);
    }
    put_number(b, r->is_eval ? "eval_tokens_per_second" : "tokens_per_second", r->tokens_per_s);
    put_number(b, "step_ms", r->step_ms);
    ith_buf_printf(b, ", \"tokens\": %lld, \"labels\": %lld, \"peak_bytes\": %lld",
                   (long long)r->tokens, (long long)r->labels, (long long)r->peak_bytes);
    put_number(b, "elapsed_s", r->elapsed_s);
    ith_buf_printf(b, ", \"skipped_steps\": %lld}", (long long)r->skipped);
}

static double number_of(const json_t *row, const char *key)
{
    const json_t *v = json_object_get(row, key);
    return json_is_number(v) ? json_number_value(v) : (double)NAN;
}

static ith_report_row row_of(const json_t *j)
{
    bool is_eval = json_object_get(j, "eval_loss") != NULL;
    return (ith_report_row){
        .step = json_integer_value(json_object_get(j, "step")),
        .total_steps = json_integer_value(json_object_get(j, "total_steps")),
        .epoch = number_of(j, "epoch"),
        .is_eval = is_eval,
        .loss = number_of(j, is_eval ? "eval_loss" : "loss"),
        .aux_loss = json_is_number(json_object_get(j, "aux_loss")) ? number_of(j, "aux_loss") : 0,
        .grad_norm = number_of(j, "grad_norm"),
        .learning_rate = number_of(j, "learning_rate"),
        .tokens_per_s = number_of(j, is_eval ? "eval_tokens_per_second" : "tokens_per_second"),
        .mfu = number_of(j, "mfu"),
        .step_ms = number_of(j, "step_ms"),
        .tokens = json_integer_value(json_object_get(j, "tokens")),
        .labels = json_integer_value(json_object_get(j, "labels")),
        .peak_bytes = json_integer_value(json_object_get(j, "peak_bytes")),
        .elapsed_s = number_of(j, "elapsed_s"),
        .skipped = json_integer_value(json_object_get(j, "skipped_steps"))};
}

static ith_status keep_row(ith_run_report *r, const ith_report_row *row, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&r->rows, &r->cap, r->count + 1, sizeof *r->rows, "log rows", err));
    r->rows[r->count++] = *row;
    return ITH_OK;
}

/* Rows of an earlier part of the run, up to `step`. A torn last line (a kill while writing) is left
 * out. */
static ith_status read_old_rows(ith_run_report *r, int64_t step, ith_error *err)
{
    ith_buf text = {0};
    if (!ith_path_exists(r->log_path))
        return ITH_OK;
    ith_status status = ith_read_file(r->log_path, 0, &text, err);
    for (char *line = text.data; status == ITH_OK && line && *line;) {
        size_t len = strcspn(line, "\n");
        json_t *j = NULL;
        ith_error why = {0};
        ith_status parsed = line[len] == '\n' && len
                                ? ith_json_parse(&j, line, (int64_t)len, r->log_path, &why)
                                : ITH_ERR_FORMAT;
        if (parsed == ITH_ERR_MEMORY)
            status = ith_fail(err, parsed, "%s", why.text);
        ith_report_row row = row_of(j);
        if (parsed == ITH_OK && row.step <= step)
            status = keep_row(r, &row, err);
        json_decref(j);
        line += len + (line[len] == '\n');
    }
    ith_buf_deinit(&text);
    return status;
}

static ith_status rewrite_log(ith_run_report *r, ith_error *err)
{
    ith_buf text = {0};
    for (int64_t i = 0; i < r->count; i++) {
        put_row(&text, &r->rows[i]);
        ith_buf_putc(&text, '\n');
    }
    ith_status status = ith_buf_check(&text, r->log_path, err);
    if (status == ITH_OK)
        status = ith_write_file(r->log_path, text.data ? text.data : "", text.len, err);
    ith_buf_deinit(&text);
    return status;
}

static ith_status join(const char *dir, const char *name, char **out, ith_error *err)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    ITH_TRY(ith_buf_check(&path, dir, err));
    *out = path.data;
    return ITH_OK;
}

static ith_status open_events(ith_run_report *r, ith_error *err)
{
    char *runs = NULL;
    ITH_TRY(join(r->dir, "runs", &runs, err));
    ith_status status = ith_tfevents_open(&r->events, runs, err);
    ith_free(runs);
    return status;
}

static void destroy(ith_run_report *r)
{
    if (r->log)
        fclose(r->log);
    ith_tfevents_close(r->events);
    ith_free(r->dir);
    ith_free(r->log_path);
    ith_free(r->rows);
    ith_free(r);
}

ith_status ith_run_report_open(ith_run_report **out, const char *output_dir, int64_t resume_step,
                               bool tensorboard, ith_error *err)
{
    ith_run_report *r = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&r, 1, sizeof *r, "report", err));
    ITH_TRY_OUT(join(output_dir, "", &r->dir, err));
    ITH_TRY_OUT(join(output_dir, "trainer_log.jsonl", &r->log_path, err));
    if (resume_step > 0)
        ITH_TRY_OUT(read_old_rows(r, resume_step, err));
    ITH_TRY_OUT(rewrite_log(r, err));
    r->log = ith_fault_hit(ITH_FAULT_WRITE) ? NULL : fopen(r->log_path, "ab");
    if (!r->log) {
        status = ith_fail(err, ITH_ERR_IO, "%s: cannot open: %s", r->log_path, strerror(errno));
        goto out;
    }
    if (tensorboard)
        ITH_TRY_OUT(open_events(r, err));
    *out = r;
    return ITH_OK;
out:
    destroy(r);
    return status;
}

static ith_status add_events(ith_run_report *r, const ith_report_row *row, ith_error *err)
{
    if (!r->events)
        return ITH_OK;
    if (row->is_eval)
        return ith_tfevents_scalar(r->events, "eval/loss", row->step, row->loss, err);
    const struct {
        const char *tag;
        double value;
    } scalars[] = {{"train/loss", row->loss},
                   {"train/grad_norm", row->grad_norm},
                   {"train/learning_rate", row->learning_rate},
                   {"train/epoch", row->epoch},
                   {"speed/tokens_per_second", row->tokens_per_s},
                   {"speed/mfu", row->mfu}};
    for (size_t i = 0; i < sizeof scalars / sizeof *scalars; i++)
        ITH_TRY(ith_tfevents_scalar(r->events, scalars[i].tag, row->step, scalars[i].value, err));
    return ITH_OK;
}

ith_status ith_run_report_add(ith_run_report *report, const ith_report_row *row, ith_error *err)
{
    ith_buf line = {0};
    put_row(&line, row);
    ith_buf_putc(&line, '\n');
    ith_status status = ith_buf_check(&line, report->log_path, err);
    if (status == ITH_OK &&
        (ith_fault_hit(ITH_FAULT_WRITE) ||
         fwrite(line.data, 1, (size_t)line.len, report->log) != (size_t)line.len ||
         fflush(report->log) != 0))
        status =
            ith_fail(err, ITH_ERR_IO, "%s: cannot write: %s", report->log_path, strerror(errno));
    ith_buf_deinit(&line);
    if (status == ITH_OK)
        status = keep_row(report, row, err);
    return status == ITH_OK ? add_events(report, row, err) : status;
}

/* The keys transformers writes that have a meaning here. */
static void put_state(ith_buf *b, const ith_run_report *r)
{
    const ith_report_row *last = r->count ? &r->rows[r->count - 1] : NULL;
    double best = (double)NAN;
    for (int64_t i = 0; i < r->count; i++)
        if (r->rows[i].is_eval && !(r->rows[i].loss >= best))
            best = r->rows[i].loss;
    ith_buf_printf(b, "{\n  \"global_step\": %lld,\n  \"max_steps\": %lld,\n  \"epoch\": %.6g",
                   (long long)(last ? last->step : 0), (long long)(last ? last->total_steps : 0),
                   last ? last->epoch : 0.0);
    if (isfinite(best))
        ith_buf_printf(b, ",\n  \"best_metric\": %.10g", best);
    ith_buf_puts(b, ",\n  \"log_history\": [");
    for (int64_t i = 0; i < r->count; i++) {
        ith_buf_puts(b, i ? ",\n    " : "\n    ");
        put_row(b, &r->rows[i]);
    }
    ith_buf_puts(b, "\n  ]\n}\n");
}

static ith_status write_named(const ith_run_report *r, const char *name, ith_buf *text,
                              ith_error *err)
{
    char *path = NULL;
    ith_status status = ith_buf_check(text, name, err);
    if (status == ITH_OK)
        status = join(r->dir, name, &path, err);
    if (status == ITH_OK)
        status = ith_write_file(path, text->data, text->len, err);
    ith_free(path);
    ith_buf_clear(text);
    return status;
}

ith_status ith_run_report_write(ith_run_report *report, ith_error *err)
{
    ith_buf text = {0};
    put_state(&text, report);
    ith_status status = write_named(report, "trainer_state.json", &text, err);
    if (status == ITH_OK) {
        ith_loss_curve_svg(report->rows, report->count, "Training loss", &text);
        status = write_named(report, "loss_curve.svg", &text, err);
    }
    ith_buf_deinit(&text);
    return status;
}

ith_status ith_run_report_close(ith_run_report *report, ith_error *err)
{
    if (!report)
        return ITH_OK;
    ith_status status = ith_run_report_write(report, err);
    destroy(report);
    return status;
}
