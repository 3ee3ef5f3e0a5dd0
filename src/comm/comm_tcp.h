/* comm_tcp.h - a world over plain sockets, for ranks that a launcher started without MPI. */
#ifndef ITH_COMM_COMM_TCP_H
#define ITH_COMM_COMM_TCP_H

#include "comm/comm.h"

/* Rank `rank` of `size`; rank 0 listens at address:port, the others call it there (and try again
 * for five minutes, or ITH_MEETING_TIMEOUT). Buffers go through the kernel: for CPUs, and for what
 * GPUs agree on. */
ith_status ith_comm_open_tcp(ith_comm **out, int64_t rank, int64_t size, const char *address,
                             const char *port, ith_error *err);

#endif
