/* api_internal.h - what the files behind include/ithaca.h share. */
#ifndef ITH_API_API_INTERNAL_H
#define ITH_API_API_INTERNAL_H

#include <ithaca.h>

#include "base/status.h"

/* The public status of an internal one; the text of `from` goes to `to`, which may be NULL. */
ithaca_status ith_api_status(ith_status status, const ith_error *from, ithaca_error *to);

#endif
