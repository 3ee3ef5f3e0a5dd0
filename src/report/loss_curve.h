/* loss_curve.h - the loss curve of a run as an SVG picture. */
#ifndef ITH_REPORT_LOSS_CURVE_H
#define ITH_REPORT_LOSS_CURVE_H

#include "report/run_report.h"

/* Appends an SVG: loss of every row, its running mean, evaluation loss as points, learning rate
 * below. Rows with a non-finite loss are left out and counted in the caption. Any number of rows;
 * long runs are thinned to the width. */
void ith_loss_curve_svg(const ith_report_row *rows, int64_t count, const char *title, ith_buf *out);

#endif
