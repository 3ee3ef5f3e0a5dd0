/* twin.h - a device that is the host in disguise: its memory is the host's, its links are exchanges
 * of a host group. For tests of what stands on the links of devices: exchanges of groups opened
 * `beside` happen as late as they may, when they are awaited or the device is; who reads too early,
 * or overwrites what is on its way, gets other numbers. */
#ifndef ITH_TESTS_DIST_TWIN_H
#define ITH_TESTS_DIST_TWIN_H

#include "testing.h"

#include "comm/comm.h"

/* same_everywhere: all ranks have the same one. The first of its ways refuses on rank 0; the
 * second, "twin", works. */
ith_device twin_device(ith_comm *ranks, bool same_everywhere);

#endif
