/* device.h - where memory lives and how it moves. The CPU is always there; a plug-in registers
 * others.
 *
 * Copies and fills are queued on the device's main queue in program order with the operators;
 * `sync` waits for it. Host buffers of upload and download may be reused after the next sync. On
 * the CPU everything is immediate. */
#ifndef ITH_BASE_DEVICE_H
#define ITH_BASE_DEVICE_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_device ith_device;
typedef struct ith_device_links ith_device_links;

/* Block j of `send` goes to rank j; block j of `recv` comes from rank j. Offsets and sizes in
 * bytes. Both sides of a pair name the same size; an empty block sends nothing. */
typedef struct {
    const void *send;
    const int64_t *send_at, *send_bytes; /* [size] */
    void *recv;
    const int64_t *recv_at, *recv_bytes; /* [size] */
} ith_exchange;

/* `rows` rows of `bytes` each, `stride` bytes apart. */
typedef struct {
    void *at;
    int64_t stride, bytes, rows;
} ith_strided;
#define ITH_MAX_PIECES 5 /* of a block that is rows */

/* Queues beside the main one: copies to and from the host; exchanges of groups opened `beside`;
 * updates of weights. */
typedef enum { ITH_QUEUE_COPIES, ITH_QUEUE_LINKS, ITH_QUEUE_UPDATES, ITH_QUEUES } ith_queue;

struct ith_device {
    const char *name; /* "cpu", "cuda:0" */
    void *state;
    /* Optional (NULL): what the calling thread does next is for this device. A process may have
     * several, and threads that did not open it; called before every operator, and by the functions
     * below themselves. */
    void (*use)(ith_device *d);
    /* Memory aligned to 256 bytes, not zeroed. */
    ith_status (*alloc)(ith_device *d, int64_t bytes, void **out, ith_error *err);
    void (*free)(ith_device *d, void *ptr);
    ith_status (*upload)(ith_device *d, void *dst, const void *src, int64_t bytes, ith_error *err);
    ith_status (*download)(ith_device *d, void *dst, const void *src, int64_t bytes,
                           ith_error *err);
    ith_status (*copy)(ith_device *d, void *dst, const void *src, int64_t bytes, ith_error *err);
    ith_status (*fill)(ith_device *d, void *dst, int byte, int64_t bytes, ith_error *err);
    /* Optional (NULL): rows of `bytes` each, strides in bytes. */
    ith_status (*copy_rows)(ith_device *d, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int64_t bytes, int64_t rows, ith_error *err);
    ith_status (*sync)(ith_device *d, ith_error *err);
    /* Free and total bytes. */
    ith_status (*memory)(ith_device *d, int64_t *free_bytes, int64_t *total_bytes, ith_error *err);
    /* Optional (NULL: plain memory): host memory that copies fast and without waiting. */
    ith_status (*alloc_host)(ith_device *d, int64_t bytes, void **out, ith_error *err);
    void (*free_host)(ith_device *d, void *ptr);
    /* Optional, all or none: other queues beside the main one. fork: the queue goes on behind what
     * the main one has now. note: marks what the queue has now. await: the main queue goes on
     * behind the mark; one that was never noted is no wait. copy_beside: to or from pinned host
     * memory, on ITH_QUEUE_COPIES. enter: all else that is queued until leave goes to the queue and
     * not to the main one; fork and await still mean the main one. */
    ith_status (*fork)(ith_device *d, ith_queue queue, ith_error *err);
    ith_status (*note)(ith_device *d, ith_queue queue, int mark, ith_error *err);
    ith_status (*await)(ith_device *d, ith_queue queue, int mark, ith_error *err);
    ith_status (*copy_beside)(ith_device *d, void *dst, const void *src, int64_t bytes,
                              bool to_host, ith_error *err);
    void (*enter)(ith_device *d, ith_queue queue);
    void (*leave)(ith_device *d);
    /* With enter: as many tokens go forward through a matrix in the time in which it is updated by
     * few of the device's processors (kernels/ctx.h). */
    int64_t update_tokens;
    /* Optional (NULL): records stamp idx in the order of the queue; milliseconds between two
     * stamps, for which it waits. */
    ith_status (*stamp)(ith_device *d, int64_t idx, ith_error *err);
    ith_status (*elapsed)(ith_device *d, int64_t from, int64_t to, double *ms, ith_error *err);
    /* Optional (NULL): this device works alone. */
    const ith_device_links *links;
};

#define ITH_DEVICE_UUID_BYTES 16
#define ITH_DEVICE_GROUP_ID_BYTES 128

/* One way for the devices of a group to reach each other: what comm/comm_device.c stands on. A
 * group is opened by all its ranks, each with its own device. */
typedef struct {
    const char *name; /* "peer", "nccl" */
    /* Called by one rank, which tells the others. */
    ith_status (*new_group)(ith_device *d, char id[ITH_DEVICE_GROUP_ID_BYTES], ith_error *err);
    /* Waits for all ranks. beside: exchanges of the group go to ITH_QUEUE_LINKS. lost(arg, why) is
     * called once, from another thread, when a rank does not answer for timeout_s seconds (0:
     * never) or a connection broke: then nothing that is queued will end. */
    ith_status (*open_group)(ith_device *d, const char id[ITH_DEVICE_GROUP_ID_BYTES], int64_t rank,
                             int64_t size, bool beside, double timeout_s,
                             void (*lost)(void *, const char *), void *arg, void **group,
                             ith_error *err);
    void (*close_group)(ith_device *d, void *group);
    /* Queued, the own block included. Called by every rank of the group. */
    ith_status (*exchange)(ith_device *d, void *group, const ith_exchange *x, ith_error *err);
    /* Optional (NULL): every block is `pieces` pieces of rows, which lie anywhere. Piece p for rank
     * j is send[j * pieces + p], and lands in recv[me * pieces + p] of rank j, of as many bytes and
     * rows. */
    ith_status (*exchange_rows)(ith_device *d, void *group, const ith_strided *send,
                                const ith_strided *recv, int64_t pieces, ith_error *err);
    /* Device bytes that a group takes beside the plan, for plans made without a device. */
    int64_t overhead_bytes;
} ith_device_way;

struct ith_device_links {
    /* In order of preference; the last works wherever one does, the others refuse, on every rank
     * and within seconds, where they do not work. */
    const ith_device_way *ways[2];
    /* What tells this device from all others. */
    ith_status (*identify)(ith_device *d, unsigned char uuid[ITH_DEVICE_UUID_BYTES],
                           ith_error *err);
    /* to[i] = sum over r of part r's element i, in the order of r, in double and rounded once;
     * parts[r * stride + i], but own[i] for r == the own rank. add: to[i] += it, F32 only. F32 or
     * (wide) F64; queued as the group's exchanges. to may be own. */
    ith_status (*add_parts)(ith_device *d, void *group, void *to, bool add, const void *own,
                            const void *parts, int64_t stride, int64_t n, bool wide,
                            ith_error *err);
};

/* The host itself; never destroyed. */
ith_device *ith_device_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
