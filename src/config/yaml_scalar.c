/* yaml_scalar.c - what a plain scalar means, by the implicit resolvers of PyYAML's SafeLoader. */
#include "config/yaml_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Longer plain scalars are text: no number needs more. */
#define MAX_NUMBER_BYTES 300

static bool is_one_of(const char *text, const char *const *words, size_t num_words)
{
    for (size_t i = 0; i < num_words; i++)
        if (strcmp(text, words[i]) == 0)
            return true;
    return false;
}
#define IS_ONE_OF(text, words) is_one_of((text), (words), sizeof(words) / sizeof *(words))

static const char *const null_words[] = {"", "~", "null", "Null", "NULL"};
static const char *const true_words[] = {"yes",  "Yes", "YES", "true", "True",
                                         "TRUE", "on",  "On",  "ON"};
static const char *const false_words[] = {"no",    "No",  "NO",  "false", "False",
                                          "FALSE", "off", "Off", "OFF"};
static const char *const inf_words[] = {".inf", ".Inf", ".INF"};
static const char *const nan_words[] = {".nan", ".NaN", ".NAN"};

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* One digit in `base`, or -1. */
static int digit_value(char c, int base)
{
    int value = is_digit(c)              ? c - '0'
                : (c >= 'a' && c <= 'f') ? c - 'a' + 10
                : (c >= 'A' && c <= 'F') ? c - 'A' + 10
                                         : -1;
    return value < base ? value : -1;
}

/* Digits and underscores to the end of the text, at least one digit. The value is kept as a double
 * too, for integers beyond 64 bits. */
static bool scan_digits(const char *p, int base, uint64_t *out, double *approx, bool *overflow)
{
    uint64_t value = 0;
    double wide = 0;
    int num_digits = 0;
    for (; *p; p++) {
        if (*p == '_')
            continue;
        int digit = digit_value(*p, base);
        if (digit < 0)
            return false;
        num_digits++;
        wide = wide * base + digit;
        if (__builtin_mul_overflow(value, (uint64_t)base, &value) ||
            __builtin_add_overflow(value, (uint64_t)digit, &value))
            *overflow = true;
    }
    *out = value;
    *approx = wide;
    return num_digits > 0;
}

/* 1:30:00 -> 5400 (base 60). `p` starts with a digit; *fraction_at gets the rest after the last
 * group, "" or ".5". */
static bool scan_sexagesimal(const char *p, double *out, const char **fraction_at)
{
    double value = 0;
    int num_groups = 0;
    for (;; num_groups++) {
        double group = 0;
        int num_digits = 0;
        for (; is_digit(*p) || (num_groups == 0 && *p == '_'); p++) {
            if (*p == '_')
                continue;
            group = group * 10 + (*p - '0');
            num_digits++;
        }
        if (num_digits == 0 || (num_groups > 0 && (num_digits > 2 || group >= 60)))
            return false;
        value = value * 60 + group;
        if (*p != ':')
            break;
        p++;
    }
    *out = value;
    *fraction_at = p;
    return num_groups > 0;
}

/* strtod on a copy without underscores. */
static bool to_double(const char *text, double *out)
{
    char digits[MAX_NUMBER_BYTES + 1];
    size_t len = 0;
    for (const char *p = text; *p && len < MAX_NUMBER_BYTES; p++)
        if (*p != '_')
            digits[len++] = *p;
    digits[len] = '\0';
    char *end = NULL;
    *out = strtod(digits, &end);
    return len > 0 && *end == '\0';
}

static bool resolve_int(ith_yaml_node *node)
{
    const char *p = node->text;
    bool negative = *p == '-', overflow = false;
    if (*p == '-' || *p == '+')
        p++;
    if (!is_digit(*p))
        return false;
    uint64_t value = 0;
    double approx = 0;
    const char *rest = NULL;
    bool ok = false;
    if (p[0] == '0' && p[1] == 'b')
        ok = scan_digits(p + 2, 2, &value, &approx, &overflow);
    else if (p[0] == '0' && p[1] == 'x')
        ok = scan_digits(p + 2, 16, &value, &approx, &overflow);
    else if (p[0] == '0' && p[1])
        ok = scan_digits(p, 8, &value, &approx, &overflow);
    else
        ok = scan_digits(p, 10, &value, &approx, &overflow);
    if (!ok && p[0] != '0' && scan_sexagesimal(p, &approx, &rest) && *rest == '\0') {
        ok = true;
        overflow = approx >= 0x1p53; /* beyond it a double is no exact count */
        value = overflow ? 0 : (uint64_t)approx;
    }
    if (!ok)
        return false;
    if (value > (uint64_t)INT64_MAX)
        overflow = true;
    if (overflow && !strpbrk(p, ":bx")) /* rounded once, not digit by digit */
        to_double(p, &approx);
    node->float_value = negative ? -approx : approx;
    if (overflow) {
        node->type = ITH_YAML_FLOAT;
    } else {
        node->type = ITH_YAML_INT;
        node->int_value = negative ? -(int64_t)value : (int64_t)value;
        node->float_value = (double)node->int_value;
    }
    return true;
}

static const char *skip_digits(const char *p)
{
    while (is_digit(*p) || *p == '_')
        p++;
    return p;
}

/* [-+]?DIGITS.[DIGITS][e(+|-)DIGITS] or .DIGITS[e(+|-)DIGITS]: PyYAML wants the point, and a sign
 * after the e. */
static bool is_yaml_float(const char *p)
{
    bool signed_text = *p == '-' || *p == '+';
    p += signed_text;
    if (is_digit(*p)) {
        p = skip_digits(p);
        if (*p++ != '.')
            return false;
    } else if (signed_text || *p++ != '.' || !is_digit(*p)) {
        return false;
    }
    p = skip_digits(p);
    if (*p == 'e' || *p == 'E') {
        p++;
        if ((*p != '-' && *p != '+') || !is_digit(p[1]))
            return false;
        for (p++; is_digit(*p);)
            p++;
    }
    return *p == '\0';
}

static bool resolve_float(ith_yaml_node *node)
{
    const char *text = node->text, *unsigned_text = text + (*text == '-' || *text == '+');
    const char *rest = NULL;
    double value = 0, fraction = 0;
    if (is_yaml_float(text)) {
        if (!to_double(text, &value))
            return false;
    } else if (IS_ONE_OF(unsigned_text, inf_words)) {
        value = *text == '-' ? -(double)INFINITY : (double)INFINITY;
    } else if (IS_ONE_OF(text, nan_words)) {
        value = (double)NAN;
    } else if (is_digit(*unsigned_text) && scan_sexagesimal(unsigned_text, &value, &rest) &&
               *rest == '.' && *skip_digits(rest + 1) == '\0') {
        if (rest[1] && !to_double(rest, &fraction))
            return false;
        value = *text == '-' ? -(value + fraction) : value + fraction;
    } else {
        return false;
    }
    node->type = ITH_YAML_FLOAT;
    node->float_value = value;
    return true;
}

void ith_yaml_resolve_plain(ith_yaml_node *node)
{
    node->type = ITH_YAML_STR;
    if ((int64_t)strlen(node->text) != node->len || node->len > MAX_NUMBER_BYTES)
        return;
    if (IS_ONE_OF(node->text, null_words)) {
        node->type = ITH_YAML_NULL;
    } else if (IS_ONE_OF(node->text, true_words) || IS_ONE_OF(node->text, false_words)) {
        node->type = ITH_YAML_BOOL;
        node->bool_value = IS_ONE_OF(node->text, true_words);
    } else if (!resolve_int(node)) {
        resolve_float(node);
    }
}

bool ith_yaml_parse_float(const char *text, double *out)
{
    double value = 0;
    if (strlen(text) > MAX_NUMBER_BYTES || text[strspn(text, "0123456789+-._eE")] != '\0' ||
        !to_double(text, &value) || !isfinite(value))
        return false;
    *out = value;
    return true;
}
