/* comm.h - a group of ranks and what they do together.
 *
 * A driver (comm_self.c, comm_mpi.c, comm_tcp.c; comm_device.c for memory of devices) only moves
 * bytes between ranks: one exchange in which every rank sends a block to every rank. All
 * collectives are built from it here, once, so every driver gives the same bits. Invariants:
 * 1. A collective is called by every rank of its group, in the same order, or by none.
 * 2. Sums are taken in rank order, f32 in double, rounded once: the result is the same on all ranks
 *    and on every run, and reduce_scatter gives the bits of all_reduce.
 * 3. Sizes are int64_t; a driver cuts what its library cannot take at once.
 * 4. No allocation after open and split: scratch and the block lists belong to the group.
 * Buffers are host memory and may be reused on return; those of a device group are the device's,
 * and everything is queued like its copies. A group of one rank does nothing. */
#ifndef ITH_COMM_COMM_H
#define ITH_COMM_COMM_H

#include "base/device.h"
#include "tensor/dtype.h"

#define ITH_COMM_SCRATCH_BYTES ((int64_t)4 << 20)

typedef struct ith_comm ith_comm;

typedef struct {
    const char *name; /* "self", "mpi", "tcp", "device" */
    /* Moves the blocks, the own one included. */
    ith_status (*exchange)(ith_comm *comm, const ith_exchange *x, ith_error *err);
    /* A new driver state for the ranks of the same color, in the order of their ranks. */
    ith_status (*split)(ith_comm *comm, int64_t color, void **state, int64_t *rank, int64_t *size,
                        ith_error *err);
    void (*close)(ith_comm *comm);
    /* Ends the other ranks of the job, now or at their next exchange; may not return. */
    void (*abort)(ith_comm *comm, int exit_code);
    /* NULL for host memory. to[i] becomes the sum over r in rank order, part r at scratch[r *
     * stride
     * + i], the own one at own[i]; or, add, grows by it. */
    ith_status (*add_parts)(ith_comm *comm, void *to, bool add, const void *own, int64_t stride,
                            int64_t n, ith_dtype dtype, ith_error *err);
    /* NULL: none of its groups takes rows. */
    ith_status (*exchange_rows)(ith_comm *comm, const ith_strided *send, const ith_strided *recv,
                                int64_t pieces, ith_error *err);
    /* Of a world, see ith_comm_last_words. NULL: ranks cannot talk any more, the lowest is first.
     */
    bool (*last_words)(ith_comm *comm, ith_error *err);
} ith_comm_driver;

struct ith_comm {
    const ith_comm_driver *driver;
    void *state;
    int64_t rank, size;
    int64_t local_rank, local_size; /* among the ranks of this machine; world only */
    double timeout_s;               /* of a rank that does not answer */
    bool broken;                    /* an exchange failed: there will be no other */
    /* since open, for reports and tests */
    int64_t bytes_sent; /* to other ranks */
    int64_t exchanges;
    double seconds;
    /* own memory */
    void *scratch;
    int64_t scratch_bytes;
    int64_t *lists;  /* [5 * size + 1] */
    bool takes_rows; /* exchange_rows works */
    int64_t
        sharers; /* ranks of the group with this rank's device, itself included: 1, in tests more */
};

/* All ranks of the job: over MPI when its launcher (mpirun, srun) started several; over sockets
 * when RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set (torchrun); else this process alone.
 * The program starts without MPI; ranks of its launcher without the plug-in are one line. */
ith_status ith_comm_open_world(ith_comm **out, double timeout_s, ith_error *err);
/* Ranks that mpirun starts would find the plug-in and its libraries. */
bool ith_comm_has_mpi(void);
/* True when a launcher started this process as one of several. */
bool ith_comm_is_launched(void);
/* One rank. */
ith_status ith_comm_open_self(ith_comm **out, ith_error *err);
/* Collective: ranks of the same color become a group, in rank order. */
ith_status ith_comm_split(ith_comm *comm, int64_t color, ith_comm **out, ith_error *err);
void ith_comm_close(ith_comm *comm); /* NULL is fine */
/* For a failure between fixed points, where the others cannot be asked: ends the whole job. The
 * caller ends this process, if it is still there. */
void ith_comm_abort(ith_comm *comm, int exit_code);

/* Before it, of a world: err is this rank's failure. The ranks that are still there tell each other
 * theirs, for a few seconds at most; err becomes the one to tell: the first cause before those who
 * only missed a rank, then that of the lowest rank. True on the one rank that tells it. */
bool ith_comm_last_words(ith_comm *world, ith_error *err);

typedef enum { ITH_REDUCE_SUM, ITH_REDUCE_MAX } ith_reduce;

/* Collective: a group of the same ranks for memory of their devices, with exchanges of
 * device->links. It has no scratch, which a reduction needs, until the caller gives it memory of
 * the device: ith_comm_set_scratch. On it only exchange, all_gather_v and sums work. `host` and the
 * device must outlive it. What goes wrong is agreed; a group that breaks, while it is opened or
 * later, ends the job with one line. beside: on the queue beside the main one. */
ith_status ith_comm_open_device(ith_comm **out, ith_comm *host, ith_device *device, bool beside,
                                ith_error *err);
void ith_comm_set_scratch(ith_comm *comm, void *memory, int64_t bytes);
/* For people: "mpi", "self", or how the devices reach each other: "peer", "nccl". */
const char *ith_comm_way(const ith_comm *comm);

ith_status ith_comm_exchange(ith_comm *comm, const ith_exchange *x, ith_error *err);
/* Where comm->takes_rows: an exchange of blocks that are pieces of rows, see ith_device_way. */
ith_status ith_comm_exchange_rows(ith_comm *comm, const ith_strided *send, const ith_strided *recv,
                                  int64_t pieces, ith_error *err);
ith_status ith_comm_barrier(ith_comm *comm, ith_error *err);
ith_status ith_comm_broadcast(ith_comm *comm, void *data, int64_t bytes, int64_t root,
                              ith_error *err);
/* recv: [size] blocks of `bytes`, in rank order; send may be this rank's block of recv. */
ith_status ith_comm_all_gather(ith_comm *comm, void *recv, const void *send, int64_t bytes,
                               ith_error *err);
/* Rank r brings elements [first[r], first[r + 1]) of data, of elem_bytes each, in `own` (NULL: they
 * are in place); afterwards all ranks have all in data. */
ith_status ith_comm_all_gather_v(ith_comm *comm, void *data, const void *own, const int64_t *first,
                                 int64_t elem_bytes, ith_error *err);
/* data: F32, F64 or I64, in place. A NaN anywhere is NaN in the maximum. */
ith_status ith_comm_all_reduce(ith_comm *comm, void *data, int64_t count, ith_dtype dtype,
                               ith_reduce op, ith_error *err);
/* Elements [first[r], first[r + 1]) of rank r become the reduction; the others keep this rank's
 * values. With `into` (F32 sums) data stays, and the reduction is added to into[0 ..] instead. */
ith_status ith_comm_reduce_scatter_v(ith_comm *comm, void *data, const int64_t *first,
                                     ith_dtype dtype, ith_reduce op, float *into, ith_error *err);

/* Fixed point of a run: every rank brings its status. When one failed, all return the failure of
 * the lowest failing rank, with its text behind "rank R: " in err. comm NULL: one rank. */
ith_status ith_comm_agree(ith_comm *comm, ith_status status, ith_error *err);

/* For drivers: the group around their state. */
ith_status ith_comm_wrap(ith_comm **out, const ith_comm_driver *driver, void *state, int64_t rank,
                         int64_t size, double timeout_s, ith_error *err);

extern const ith_comm_driver ith_comm_driver_self;

#endif
