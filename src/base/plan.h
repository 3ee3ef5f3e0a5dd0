/* plan.h - planned memory: count, commit, use.
 *
 * Each class of memory is one stack of bytes on one device. A plan starts COUNTING: pushes hand out
 * addresses that are never touched and record the peak, with the names alive at it. Commit
 * allocates exactly the peak of each class, once, and the same code runs again for real. In use
 * there is no allocation: a push moves a pointer, and going past the planned peak is an error that
 * names the buffer.
 *
 * Invariants:
 *  1. The same sequence of pushes and releases gives the same offsets while counting and in use.
 *  2. Planned bytes = high-water mark when the walk is the same. Every block is aligned to 256
 *     bytes. */
#ifndef ITH_BASE_PLAN_H
#define ITH_BASE_PLAN_H

#include "base/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ITH_MEM_WEIGHTS,
    ITH_MEM_GRADS,
    ITH_MEM_OPTIMIZER,
    ITH_MEM_ACTIVATIONS,
    ITH_MEM_WORKSPACE,
    ITH_MEM_COMM,
    ITH_MEM_HOST,
    ITH_MEM_CLASSES
} ith_mem_class;

const char *ith_mem_class_name(ith_mem_class c);

typedef struct ith_plan ith_plan;

/* Classes live on `device`, ITH_MEM_HOST on the CPU. Starts counting. */
ith_status ith_plan_create(ith_plan **out, ith_device *device, ith_error *err);
void ith_plan_destroy(ith_plan *plan);
bool ith_plan_counting(const ith_plan *plan);
/* name must outlive the plan (a literal, or a string the model owns). */
ith_status ith_plan_push(ith_plan *plan, ith_mem_class c, const char *name, int64_t bytes,
                         void **out, ith_error *err);
/* Stack discipline per class. */
int64_t ith_plan_mark(const ith_plan *plan, ith_mem_class c);
void ith_plan_release(ith_plan *plan, ith_mem_class c, int64_t mark);
/* Ends counting: all classes must be released to what stays, which is kept for use at the same
 * offsets: call with everything released. */
ith_status ith_plan_commit(ith_plan *plan, ith_error *err);
/* Forgets what was counted (counting only, everything released): for another try. */
void ith_plan_reset(ith_plan *plan);
int64_t ith_plan_peak(const ith_plan *plan, ith_mem_class c); /* planned bytes */
int64_t ith_plan_high(const ith_plan *plan, ith_mem_class c); /* high-water mark since commit */
int64_t ith_plan_total(const ith_plan *plan);                 /* all classes on the device */
/* Names alive at the peak, largest first, same names summed: for the memory table. Returns how many
 * there are; fills at most max. Call before commit or after. */
typedef struct {
    const char *name;
    int64_t bytes, count;
} ith_plan_row;
int64_t ith_plan_rows(const ith_plan *plan, ith_mem_class c, ith_plan_row *rows, int64_t max);

#ifdef __cplusplus
}
#endif
#endif
