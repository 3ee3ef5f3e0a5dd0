/* convert_tokenid.c - rows of token ids: dFactory's tokenid, and trajectories of our own decoder.
 */
#include "data/convert_internal.h"

#include <inttypes.h>

/* Drops the row unless `list` is an array of integers in [0, INT32_MAX]. */
static ith_status want_integers(conversion *c, const json_t *list, const char *field)
{
    if (!json_is_array(list))
        return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected a list of integers", field,
                         ith_json_type_name(list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (!json_is_integer(item))
            return conv_drop(c, ITH_DROP_TYPE, "%s[%zu]: found %s, expected an integer", field, i,
                             ith_json_type_name(item));
        json_int_t value = json_integer_value(item);
        if (value < 0 || value > INT32_MAX)
            return conv_drop(c, ITH_DROP_TYPE, "%s[%zu]: found %lld, expected 0 to %d", field, i,
                             (long long)value, INT32_MAX);
    }
    return ITH_OK;
}

ith_status conv_tokenid(conversion *c)
{
    json_t *ids = conv_get(c->row, "input_ids"), *prompt = conv_get(c->row, "prompt_lengths"),
           *steps = conv_get(c->row, "reveal_steps");
    ITH_TRY(want_integers(c, ids, "input_ids"));
    int64_t n = (int64_t)json_array_size(ids);
    if (!json_is_integer(prompt))
        return conv_drop(c, ITH_DROP_TYPE, "prompt_lengths: found %s, expected an integer",
                         ith_json_type_name(prompt));
    int64_t length = json_integer_value(prompt);
    if (length < 0 || length >= n)
        return conv_drop(c, ITH_DROP_TYPE,
                         "prompt_lengths: found %" PRId64 ", expected less than the %" PRId64
                         " input_ids",
                         length, n);
    if (steps) {
        ITH_TRY(want_integers(c, steps, "reveal_steps"));
        if ((int64_t)json_array_size(steps) != n - length)
            return conv_drop(c, ITH_DROP_TYPE,
                             "reveal_steps: found %zu, expected one for each of the %" PRId64
                             " ids after the prompt",
                             json_array_size(steps), n - length);
    }
    c->out->input_ids = json_incref(ids);
    c->out->prompt_length = length;
    c->out->reveal_steps = json_incref(steps);
    return ITH_OK;
}
