/* links: ith_data */
/* fuzz_jsonl.c - rows of foreign files, and their conversion.
 * The first byte says whether the rest is a .jsonl file. Every row that parses goes through every
 * converter; what comes out must be canonical. */
#include "data/convert.h"
#include "data/json_rows.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_messages(const json_t *messages)
{
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *message = json_array_get(messages, i);
        const json_t *content = json_object_get(message, "content");
        ITH_ASSERT(json_is_string(json_object_get(message, "role")) && json_is_array(content));
        ITH_ASSERT(ith_message_weight(message) >= 0);
        for (size_t k = 0; k < json_array_size(content); k++) {
            const json_t *block = json_array_get(content, k);
            ITH_ASSERT(json_is_string(json_object_get(block, "type")));
            ITH_ASSERT(json_is_string(json_object_get(block, "value")));
        }
    }
}

static void convert_all(const json_t *row)
{
    for (int k = ITH_CONVERTER_CANONICAL; k < ITH_CONVERTER_COUNT; k++) {
        ith_converted out;
        ith_error err = {0};
        ith_convert_options options = {.separator = "\n"};
        ith_converter found;
        if (ith_convert_detect(row, (ith_converter)k, &found, &err) != ITH_OK)
            ITH_ASSERT(err.text[0] && strlen(err.text) < sizeof err.text);
        ith_error_clear(&err);
        ith_status status = ith_convert_row((ith_converter)k, row, &options, &out, &err);
        ITH_ASSERT(status == ITH_OK || err.text[0]);
        if (status == ITH_OK) {
            ITH_ASSERT(out.drop == ITH_DROP_NONE || (!out.messages && out.detail[0]));
            check_messages(out.messages);
            check_messages(out.chosen);
            ith_converted_deinit(&out);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    ith_rows *rows = NULL;
    ith_error err = {0};
    const char *text = (const char *)data + 1;
    if (ith_rows_open_text(&rows, text, (int64_t)size - 1, "fuzz", data[0] & 1, &err) != ITH_OK) {
        ITH_ASSERT(err.text[0] && !rows);
        return 0;
    }
    int64_t behind = 0;
    for (int64_t i = 0; i < ith_rows_count(rows); i++) {
        int64_t len = 0;
        const char *row_text = ith_rows_text(rows, i, &len);
        ITH_ASSERT(len > 0 && row_text - text >= behind &&
                   row_text - text + len <= (int64_t)size - 1);
        behind = row_text - text + len;
        json_t *row = NULL;
        ith_error_clear(&err);
        if (ith_rows_parse(rows, i, &row, &err) == ITH_OK)
            convert_all(row);
        else
            ITH_ASSERT(strncmp(err.text, "fuzz:", 5) == 0);
        json_decref(row);
    }
    ith_rows_close(rows);
    return 0;
}
