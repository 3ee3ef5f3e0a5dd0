/* loss_curve.c - draws the loss curve. Layout: one panel for loss, a flat one below for the
 * learning rate. */
#include "report/loss_curve.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"

#define WIDTH 860
#define MARGIN 84 /* left of the panels, where tick labels are no longer than usual */
#define RIGHT 28  /* half of the last step's digits */
#define DIGIT 7.4 /* pixels, of common sans-serif fonts at 12 px, rounded up */
#define TOP 48
#define LOSS_HEIGHT 300
#define GAP 34
#define RATE_HEIGHT 76
#define LOSS_TICKS 6
#define RATE_TICKS 3
#define LIGHT_LINE "stroke='#9bb8d8' stroke-width='1.2'"
#define STRONG_LINE "stroke='#1f5fa8' stroke-width='2.2'"

typedef struct {
    double x0, x1, y0, y1;           /* data range */
    double left, right, top, bottom; /* pixels */
} panel;

static double px(const panel *p, double x)
{
    return p->left + (p->x1 > p->x0 ? (x - p->x0) / (p->x1 - p->x0) : 0.5) * (p->right - p->left);
}

static double py(const panel *p, double y)
{
    return p->bottom - (p->y1 > p->y0 ? (y - p->y0) / (p->y1 - p->y0) : 0.5) * (p->bottom - p->top);
}

/* A round step that gives about n ticks over `range`. */
static double tick_step(double range, int n)
{
    double raw = range / n, power = pow(10.0, floor(log10(raw))), m = raw / power;
    return power * (m < 1.5 ? 1 : (m < 3.5 ? 2 : (m < 7.5 ? 5 : 10)));
}

/* Digits that tell two ticks apart. */
static int tick_digits(const panel *p, double step)
{
    double top = fmax(fabs(p->y0), fabs(p->y1));
    return (int)fmin(fmax(floor(log10(top)) - floor(log10(step)) + 1, 4.0), 9.0);
}

/* Ticks of the y axis: text of the i-th, false behind the last. */
static bool tick(const panel *p, int ticks, int i, double *y, char *text, size_t size)
{
    double step = tick_step(p->y1 - p->y0, ticks);
    *y = (ceil(p->y0 / step) + i) * step;
    if (!(p->y1 > p->y0) || *y > p->y1 + step * 1e-9)
        return false;
    snprintf(text, size, "%.*g", tick_digits(p, step), fabs(*y) < step * 1e-6 ? 0.0 : *y);
    return true;
}

/* Room for the longest label of a tick beside the name of the axis. */
static double left_margin(const panel *p, int ticks)
{
    char text[32];
    double y, room = MARGIN;
    for (int i = 0; tick(p, ticks, i, &y, text, sizeof text); i++)
        room = fmax(room, 34 + DIGIT * (double)strlen(text));
    return room;
}

static void axes(ith_buf *out, const panel *p, int ticks, const char *label)
{
    ith_buf_printf(
        out,
        "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='#fafafa' stroke='#cccccc'/>\n",
        p->left, p->top, p->right - p->left, p->bottom - p->top);
    char text[32];
    double y;
    for (int i = 0; tick(p, ticks, i, &y, text, sizeof text); i++) {
        double at = py(p, y);
        ith_buf_printf(out, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#e4e4e4'/>",
                       p->left, at, p->right, at);
        ith_buf_printf(out, "<text x='%.1f' y='%.1f' text-anchor='end'>%s</text>\n", p->left - 6,
                       at + 4, text);
    }
    ith_buf_printf(
        out,
        "<text x='14' y='%.1f' transform='rotate(-90 14 %.1f)' text-anchor='middle'>%s</text>\n",
        (p->top + p->bottom) / 2, (p->top + p->bottom) / 2, label);
}

static void step_ticks(ith_buf *out, const panel *p)
{
    double step = fmax(1.0, tick_step(fmax(p->x1 - p->x0, 1.0), 8));
    for (double x = ceil(p->x0 / step) * step; x <= p->x1 + step * 1e-9; x += step)
        ith_buf_printf(out, "<text x='%.1f' y='%.1f' text-anchor='middle'>%.0f</text>\n", px(p, x),
                       p->bottom + 16, x);
    ith_buf_printf(out, "<text x='%.1f' y='%.1f' text-anchor='middle'>optimizer step</text>\n",
                   (p->left + p->right) / 2, p->bottom + 32);
}

typedef double (*row_value)(const ith_report_row *rows, int64_t i, double *state);

static double value_loss(const ith_report_row *rows, int64_t i, double *state)
{
    (void)state;
    return rows[i].loss;
}

/* Exponential mean; state holds its weight of a new row and the mean so far. */
static double value_mean(const ith_report_row *rows, int64_t i, double *state)
{
    state[1] = isnan(state[1]) ? rows[i].loss : state[1] + (rows[i].loss - state[1]) * state[0];
    return state[1];
}

/* Rows that the mean spans: a fiftieth of the curve, so that it stays beside the loss it smooths;
 * 1: too few rows for a mean. */
static double mean_span(int64_t rows)
{
    double span = floor((double)rows / 50.0);
    return span < 2.0 ? 1.0 : fmin(span, 200.0);
}

static double value_rate(const ith_report_row *rows, int64_t i, double *state)
{
    (void)state;
    return rows[i].learning_rate;
}

/* A line through the training rows, at most a few points a pixel. */
static void polyline(ith_buf *out, const panel *p, const ith_report_row *rows, int64_t count,
                     row_value value, const char *style)
{
    int64_t every = ith_max_i64(1, count / (4 * (int64_t)(p->right - p->left)));
    double state[2] = {2.0 / (mean_span(count) + 1.0), (double)NAN};
    int64_t points = 0;
    double x = 0, y = 0;
    for (int64_t i = 0, drawable = 0; i < count; i++) {
        if (rows[i].is_eval || !isfinite(rows[i].loss))
            continue;
        double now = value(rows, i, state);
        if (drawable++ % every != 0 && i + 1 < count)
            continue;
        x = px(p, (double)rows[i].step);
        y = py(p, now);
        ith_buf_printf(out, "%s%.1f,%.1f", points++ ? " " : "<polyline points='", x, y);
    }
    if (points)
        ith_buf_printf(out, "' fill='none' %s/>\n", style);
    if (points == 1) /* which no line shows */
        ith_buf_printf(out, "<circle cx='%.1f' cy='%.1f' r='2' fill='none' %s/>\n", x, y, style);
}

static void ranges(const ith_report_row *rows, int64_t count, panel *loss, panel *rate,
                   int64_t *bad)
{
    double lo = (double)INFINITY, hi = -(double)INFINITY, first = (double)INFINITY,
           last = -(double)INFINITY, rate_hi = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(rows[i].loss)) {
            (*bad)++;
            continue;
        }
        lo = fmin(lo, rows[i].loss);
        hi = fmax(hi, rows[i].loss);
        first = fmin(first, (double)rows[i].step);
        last = fmax(last, (double)rows[i].step);
        rate_hi = fmax(rate_hi, rows[i].is_eval ? 0.0 : rows[i].learning_rate);
    }
    if (!(lo <= hi)) {
        lo = 0;
        hi = 1;
        first = 0;
        last = 1;
    }
    double margin = fmax((hi - lo) * 0.05, fabs(hi) * 1e-3 + 1e-12);
    *loss = (panel){first,
                    last,
                    lo - margin < 0 && lo >= 0 ? 0 : lo - margin,
                    hi + margin,
                    MARGIN,
                    WIDTH - RIGHT,
                    TOP,
                    TOP + LOSS_HEIGHT};
    double top = TOP + LOSS_HEIGHT + GAP;
    *rate = (panel){first,  last,          0,   rate_hi > 0 ? rate_hi * 1.08 : 1,
                    MARGIN, WIDTH - RIGHT, top, top + RATE_HEIGHT};
}

static void put_escaped(ith_buf *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '<')
            ith_buf_puts(out, "&lt;");
        else if (*text == '&')
            ith_buf_puts(out, "&amp;");
        else if ((unsigned char)*text >= 0x20)
            ith_buf_putc(out, *text);
    }
}

/* Right-aligned above the panel, where no curve runs; widths are those of common sans-serif fonts
 * at 12 px, with some air. */
static void legend(ith_buf *out, const panel *p, bool has_mean, bool has_eval)
{
    double y = p->top - 10, x = p->right - 62 - (has_mean ? 118 : 0) - (has_eval ? 86 : 0);
    ith_buf_printf(out,
                   "<line x1='%.0f' y1='%.0f' x2='%.0f' y2='%.0f' %s/><text x='%.0f' "
                   "y='%.0f'>loss</text>\n",
                   x, y - 4, x + 18, y - 4, has_mean ? LIGHT_LINE : STRONG_LINE, x + 23, y);
    x += 62;
    if (has_mean) {
        ith_buf_printf(out,
                       "<line x1='%.0f' y1='%.0f' x2='%.0f' y2='%.0f' %s/><text x='%.0f' "
                       "y='%.0f'>running mean</text>\n",
                       x, y - 4, x + 18, y - 4, STRONG_LINE, x + 23, y);
        x += 118;
    }
    if (has_eval)
        ith_buf_printf(out,
                       "<circle cx='%.0f' cy='%.0f' r='4' fill='#d1622b'/><text x='%.0f' "
                       "y='%.0f'>evaluation</text>\n",
                       x + 4, y - 4, x + 13, y);
}

void ith_loss_curve_svg(const ith_report_row *rows, int64_t count, const char *title, ith_buf *out)
{
    panel loss, rate;
    int64_t bad = 0;
    bool has_eval = false, has_mean = mean_span(count) > 1.0;
    ranges(rows, count, &loss, &rate, &bad);
    loss.left = rate.left = fmax(left_margin(&loss, LOSS_TICKS), left_margin(&rate, RATE_TICKS));
    double height = rate.bottom + 48;
    ith_buf_printf(
        out,
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %.0f' width='%d' height='%.0f' ",
        WIDTH, height, WIDTH, height);
    ith_buf_puts(out, "font-family='sans-serif' font-size='12' fill='#333333'>\n<rect width='100%' "
                      "height='100%' fill='white'/>\n");
    ith_buf_printf(out, "<text x='%.1f' y='26' font-size='16' font-weight='bold'>", loss.left);
    put_escaped(out, title);
    ith_buf_puts(out, "</text>\n");
    axes(out, &loss, LOSS_TICKS, "loss");
    axes(out, &rate, RATE_TICKS, "learning rate");
    step_ticks(out, &rate);
    polyline(out, &loss, rows, count, value_loss, has_mean ? LIGHT_LINE : STRONG_LINE);
    if (has_mean)
        polyline(out, &loss, rows, count, value_mean, STRONG_LINE);
    polyline(out, &rate, rows, count, value_rate, "stroke='#6a9a4a' stroke-width='1.6'");
    double drawn = -(double)INFINITY;
    for (int64_t i = 0; i < count; i++) {
        double x = px(&loss, (double)rows[i].step);
        /* points closer than 2 px hide each other; the last is always there */
        if (!rows[i].is_eval || !isfinite(rows[i].loss) || (x - drawn < 2 && i + 2 < count))
            continue;
        ith_buf_printf(out, "<circle cx='%.1f' cy='%.1f' r='4' fill='#d1622b'/>\n", x,
                       py(&loss, rows[i].loss));
        has_eval = true;
        drawn = x;
    }
    legend(out, &loss, has_mean, has_eval);
    if (bad)
        ith_buf_printf(
            out,
            "<text x='%.1f' y='42' fill='#b03020'>%lld rows without a finite loss are not "
            "drawn</text>\n",
            loss.left, (long long)bad);
    ith_buf_puts(out, "</svg>\n");
}
