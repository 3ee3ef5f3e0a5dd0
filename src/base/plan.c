/* plan.c - planned memory. The address of a counting push is its offset from a base that is never
 * mapped. */
#include "base/plan.h"

#include "base/checked.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 256
#define FAKE_BASE ((uintptr_t)1 << 60)

typedef struct {
    const char *name;
    int64_t bytes, end;
} live_block;

typedef struct {
    char *base;
    int64_t used, peak, high;
    live_block *live; /* counting only */
    int64_t num_live, cap_live;
    live_block *at_peak;
    int64_t num_peak, cap_peak;
    bool peak_open; /* at_peak is behind: used grew past it and nothing was released since */
} mem_class;

struct ith_plan {
    ith_device *device;
    bool counting;
    mem_class classes[ITH_MEM_CLASSES];
};

const char *ith_mem_class_name(ith_mem_class c)
{
    static const char *const names[] = {"weights",   "gradients", "optimizer", "activations",
                                        "workspace", "exchange",  "host"};
    return names[c];
}

ith_status ith_plan_create(ith_plan **out, ith_device *device, ith_error *err)
{
    ith_plan *plan = NULL;
    ITH_TRY(ith_alloc_zero((void **)&plan, 1, sizeof *plan, "memory plan", err));
    plan->device = device;
    plan->counting = true;
    for (int c = 0; c < ITH_MEM_CLASSES; c++) /* far apart, so that no two blocks look alike */
        plan->classes[c].base = (char *)(FAKE_BASE + ((uintptr_t)c << 52));
    *out = plan;
    return ITH_OK;
}

static ith_status class_alloc(ith_plan *plan, int c, int64_t bytes, void **out, ith_error *err)
{
    ith_device *d = plan->device;
    if (c == ITH_MEM_HOST && d->alloc_host)
        return d->alloc_host(d, bytes, out, err);
    d = c == ITH_MEM_HOST ? ith_device_cpu() : d;
    return d->alloc(d, bytes, out, err);
}

static void class_free(ith_plan *plan, int c, void *ptr)
{
    ith_device *d = plan->device;
    if (c == ITH_MEM_HOST && d->free_host) {
        d->free_host(d, ptr);
        return;
    }
    d = c == ITH_MEM_HOST ? ith_device_cpu() : d;
    d->free(d, ptr);
}

void ith_plan_destroy(ith_plan *plan)
{
    if (!plan)
        return;
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        if (!plan->counting && plan->classes[c].base)
            class_free(plan, c, plan->classes[c].base);
        ith_free(plan->classes[c].live);
        ith_free(plan->classes[c].at_peak);
    }
    ith_free(plan);
}

bool ith_plan_counting(const ith_plan *plan)
{
    return plan->counting;
}

/* Copies the live list once the stack is about to shrink below a new peak. */
static ith_status close_peak(mem_class *m, ith_error *err)
{
    if (!m->peak_open)
        return ITH_OK;
    ITH_TRY(ith_grow((void **)&m->at_peak, &m->cap_peak, m->num_live, sizeof *m->live, "plan rows",
                     err));
    memcpy(m->at_peak, m->live, (size_t)m->num_live * sizeof *m->live);
    m->num_peak = m->num_live;
    m->peak_open = false;
    return ITH_OK;
}

ith_status ith_plan_push(ith_plan *plan, ith_mem_class c, const char *name, int64_t bytes,
                         void **out, ith_error *err)
{
    ITH_ASSERT(bytes >= 0);
    mem_class *m = &plan->classes[c];
    int64_t rounded = ith_round_up(bytes, ALIGNMENT);
    if (plan->counting) {
        ITH_TRY(ith_grow((void **)&m->live, &m->cap_live, m->num_live + 1, sizeof *m->live,
                         "plan rows", err));
        m->live[m->num_live++] = (live_block){name, rounded, m->used + rounded};
        if (m->used + rounded > m->peak) {
            m->peak = m->used + rounded;
            m->peak_open = true;
        }
    } else if (rounded > m->peak - m->used) {
        return ith_fail(err, ITH_ERR_MEMORY,
                        "%s needs %lld bytes of %s, %lld of the planned %lld are left", name,
                        (long long)rounded, ith_mem_class_name(c), (long long)(m->peak - m->used),
                        (long long)m->peak);
    }
    *out = m->base + m->used;
    m->used += rounded;
    m->high = ith_max_i64(m->high, m->used);
    return ITH_OK;
}

int64_t ith_plan_mark(const ith_plan *plan, ith_mem_class c)
{
    return plan->classes[c].used;
}

void ith_plan_release(ith_plan *plan, ith_mem_class c, int64_t mark)
{
    mem_class *m = &plan->classes[c];
    ITH_ASSERT(mark >= 0 && mark <= m->used);
    if (plan->counting) {
        (void)close_peak(
            m, NULL); /* rows are for people: without memory for them the numbers still hold */
        while (m->num_live && m->live[m->num_live - 1].end > mark)
            m->num_live--;
    }
    m->used = mark;
}

ith_status ith_plan_commit(ith_plan *plan, ith_error *err)
{
    ITH_ASSERT(plan->counting);
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        ITH_ASSERT(plan->classes[c].used == 0);
        plan->classes[c].base = NULL;
    }
    plan->counting = false;
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        mem_class *m = &plan->classes[c];
        m->high = 0;
        if (m->peak)
            ITH_WRAP(class_alloc(plan, c, m->peak, (void **)&m->base, err), err, "%s",
                     ith_mem_class_name((ith_mem_class)c));
    }
    return ITH_OK;
}

void ith_plan_reset(ith_plan *plan)
{
    ITH_ASSERT(plan->counting);
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        mem_class *m = &plan->classes[c];
        ITH_ASSERT(m->used == 0);
        m->peak = m->high = m->num_live = m->num_peak = 0;
        m->peak_open = false;
    }
}

int64_t ith_plan_peak(const ith_plan *plan, ith_mem_class c)
{
    return plan->classes[c].peak;
}

int64_t ith_plan_high(const ith_plan *plan, ith_mem_class c)
{
    return plan->classes[c].high;
}

int64_t ith_plan_total(const ith_plan *plan)
{
    int64_t total = 0;
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        total += c == ITH_MEM_HOST ? 0 : plan->classes[c].peak;
    return total;
}

static int by_bytes(const void *a, const void *b)
{
    const ith_plan_row *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return strcmp(x->name, y->name);
}

int64_t ith_plan_rows(const ith_plan *plan, ith_mem_class c, ith_plan_row *rows, int64_t max)
{
    const mem_class *m = &plan->classes[c];
    const live_block *blocks = m->peak_open ? m->live : m->at_peak;
    int64_t num_blocks = m->peak_open ? m->num_live : m->num_peak, num = 0;
    for (int64_t i = 0; i < num_blocks; i++) {
        int64_t r = 0;
        while (r < num && r < max && strcmp(rows[r].name, blocks[i].name) != 0)
            r++;
        if (r == num || r == max) {
            if (r < max)
                rows[r] = (ith_plan_row){blocks[i].name, 0, 0};
            num++;
        }
        if (r < max) {
            rows[r].bytes += blocks[i].bytes;
            rows[r].count++;
        }
    }
    if (max > 0)
        qsort(rows, (size_t)ith_min_i64(num, max), sizeof *rows, by_bytes);
    return num;
}
