/* terminal.h - what people see: log lines and errors on stderr, in colour on a terminal. */
#ifndef ITH_CLI_TERMINAL_H
#define ITH_CLI_TERMINAL_H

#include "base/status.h"

/* Installs the log sink and the assertion hook. */
void ith_terminal_init(void);
/* Colours are wanted on this stream (1 stdout, 2 stderr): a terminal, NO_COLOR unset, TERM not
 * dumb. */
bool ith_terminal_colours(int fd);
/* Columns of the terminal on this stream. */
int ith_terminal_columns(int fd, int when_unknown);
/* "error: TEXT", a line for each line of the text. */
void ith_terminal_error(const ith_error *err);

#endif
