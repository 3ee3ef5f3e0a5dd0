/* links: ith_checkpoint */
/* JSON in all its uses here: the parser and its dump, config.json, generation_config.json, and the
 * editor, whose result must parse and hold the value. */
#include "checkpoint/hf_config.h"
#include "checkpoint/json_edit.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_round_trip(const char *text, int64_t len)
{
    json_t *value = NULL, *again = NULL;
    ith_error err = {0};
    ith_buf dump = {0};
    if (ith_json_parse(&value, text, len, "input", &err) == ITH_OK) {
        ITH_ASSERT(ith_json_dump(value, true, &dump, &err) == ITH_OK);
        ITH_ASSERT(ith_json_parse(&again, dump.data, dump.len, "dump", &err) == ITH_OK);
        ITH_ASSERT(json_equal(value, again));
    } else {
        ITH_ASSERT(err.text[0]);
    }
    json_decref(value);
    json_decref(again);
    ith_buf_deinit(&dump);
}

static void check_edit(const char *text, int64_t len)
{
    static const char *const paths[] = {"dtype", "text_config.dtype"};
    for (int i = 0; i < 2; i++) {
        ith_buf buf = {0};
        ith_error err = {0};
        json_t *root = NULL;
        ith_buf_append(&buf, text, len);
        if (ith_json_edit_set(&buf, paths[i], "\"float32\"", &err) == ITH_OK) {
            ITH_ASSERT(ith_json_parse(&root, buf.data, buf.len, "edited", &err) == ITH_OK);
            const json_t *object = i ? json_object_get(root, "text_config") : root;
            const char *value = json_string_value(json_object_get(object, "dtype"));
            ITH_ASSERT(value && strcmp(value, "float32") == 0);
        }
        json_decref(root);
        ith_buf_deinit(&buf);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    int64_t len = (int64_t)size;
    ith_error err = {0};
    ith_hf_config config;
    ith_hf_generation generation;
    check_round_trip(text, len);
    check_edit(text, len);
    if (ith_hf_config_parse(&config, text, len, "config.json", &err) == ITH_OK) {
        ITH_ASSERT(config.num_attention_heads % config.num_key_value_heads == 0);
        ITH_ASSERT(config.head_dim > 0 && config.head_dim % 2 == 0);
        ith_hf_config_deinit(&config);
    }
    ith_hf_generation_parse(&generation, text, len, "generation_config.json", &err);
    return 0;
}
