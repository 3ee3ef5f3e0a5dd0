/* tables.c - text that several commands print. */
#include "cli/tables.h"

#include <math.h>
#include <stdio.h>

const char *ith_format_bytes(int64_t bytes, char *out, size_t size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 1000.0 && unit < 4) {
        value /= 1024.0;
        unit++;
    }
    snprintf(out, size, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
    return out;
}

void ith_format_time(double seconds, char *out, size_t size)
{
    int64_t s = isfinite(seconds) && seconds > 0 ? (int64_t)(seconds + 0.5) : 0;
    if (s >= 3600)
        snprintf(out, size, "%lld:%02lld:%02lld", (long long)(s / 3600), (long long)(s / 60 % 60),
                 (long long)(s % 60));
    else
        snprintf(out, size, "%lld:%02lld", (long long)(s / 60), (long long)(s % 60));
}

void ith_format_row(const ith_report_row *row, char *out, size_t size)
{
    char bytes[32], left[32], mfu[32] = "";
    ith_format_bytes(row->peak_bytes, bytes, sizeof bytes);
    if (row->is_eval) {
        snprintf(out, size, "step %lld  eval loss %.4f  (%lld labels, %.1f s)",
                 (long long)row->step, row->loss, (long long)row->labels, row->step_ms / 1e3);
        return;
    }
    ith_format_time((double)(row->total_steps - row->step) * row->step_ms / 1e3, left, sizeof left);
    if (isfinite(row->mfu))
        snprintf(mfu, sizeof mfu, "  mfu %.0f%%", row->mfu * 100);
    snprintf(out, size, "step %lld/%lld  loss %.4f  grad %.3f  lr %.2e  %.0f tok/s  eta %s%s  %s",
             (long long)row->step, (long long)row->total_steps, row->loss, row->grad_norm,
             row->learning_rate, row->tokens_per_s, left, mfu, bytes);
}

#define MAX_ROWS 12

void ith_memory_table(const ith_trainer *t, ith_buf *out)
{
    const ith_plan *plan = t->session.ctx.plan;
    const ith_step *s = t->step;
    char bytes[32];
    static const char *const what[] = {"all activations", "attention", "their input",
                                       "their input on the host"};
    int64_t layers = t->hf.num_hidden_layers;
    int64_t kept[] = {s->layers_keep_all, s->layers_keep_attention, s->layers_keep_input,
                      layers - s->layers_keep_all - s->layers_keep_attention -
                          s->layers_keep_input};
    ith_buf_printf(out, "memory on %s: %s planned\n", t->session.ctx.device->name,
                   ith_format_bytes(ith_plan_total(plan), bytes, sizeof bytes));
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        ith_plan_row rows[MAX_ROWS];
        int64_t peak = ith_plan_peak(plan, (ith_mem_class)c),
                n = ith_plan_rows(plan, (ith_mem_class)c, rows, MAX_ROWS);
        if (!peak)
            continue;
        ith_buf_printf(out, "  %-12s %12s\n", ith_mem_class_name((ith_mem_class)c),
                       ith_format_bytes(peak, bytes, sizeof bytes));
        for (int64_t i = 0; i < n && i < MAX_ROWS; i++)
            if (rows[i].bytes >= peak / 100)
                ith_buf_printf(out, "    %-28s %12s  x%lld\n", rows[i].name,
                               ith_format_bytes(rows[i].bytes, bytes, sizeof bytes),
                               (long long)rows[i].count);
    }
    if (t->links_bytes > 0)
        ith_buf_printf(out, "  beside the plan  %7s for exchanges between GPUs\n",
                       ith_format_bytes(t->links_bytes, bytes, sizeof bytes));
    ith_buf_printf(out, "  micro-batch of at most %lld tokens in %lld document%s",
                   (long long)s->config.max_tokens, (long long)s->config.max_docs,
                   s->config.max_docs == 1 ? "" : "s");
    if (s->config.vision.max_patches)
        ith_buf_printf(out, " with %lld patches of images and videos",
                       (long long)s->config.vision.max_patches);
    ith_buf_printf(out, "; of %lld layers", (long long)layers);
    for (int i = 0, n = 0; i < 4; i++)
        if (kept[i])
            ith_buf_printf(out, "%s %lld keep %s", n++ ? "," : "", (long long)kept[i], what[i]);
    ith_buf_printf(out, "; head in chunks of %lld rows", (long long)s->config.chunk_rows);
}
