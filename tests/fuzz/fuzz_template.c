/* links: ith_tokenizer */
/* fuzz_template.c - any bytes as a chat template: compiled and rendered within small limits. The
 * first byte picks the context; bit 7 also traces. What renders must be valid UTF-8. */
#include "tokenizer/jinja.h"

#include "base/utf8.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const contexts[] = {
    "{}",
    ("{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", "
     "\"content\": \"\\u00e9<think>x</think>\", \"tool_calls\": [{\"function\": {\"name\": \"f\", "
     "\"arguments\": {\"a\": 1.5, \"b\": [null, true]}}}]}, {\"role\": \"tool\", \"content\": "
     "[{\"type\": \"text\", \"text\": \"t\"}]}], \"tools\": [{\"name\": \"f\"}], "
     "\"add_generation_prompt\": true}"),
    ("{\"messages\": [], \"a\": \"text \\ud83d\\ude00\\u0000\", \"b\": [3, 1, 2], \"c\": {\"k\": "
     "{\"k\": 9223372036854775807}}, \"x\": -1, \"y\": 0.1, \"n\": null, \"s\": \" s \"}"),
    "{\"messages\": \"not a list\", \"tools\": {}, \"enable_thinking\": false}",
};

static void check_utf8(const ith_buf *out)
{
    for (const char *p = out->data, *end = p + out->len; p < end;) {
        uint32_t c;
        int n = ith_utf8_decode(p, end, &c);
        ITH_ASSERT(n > 0);
        p += n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    ith_error err = {0};
    ith_jinja *jinja = NULL;
    const char *text = (const char *)data + 1;
    if (ith_jinja_compile(&jinja, text, (int64_t)size - 1, "fuzz", &err) != ITH_OK) {
        ITH_ASSERT(err.status != ITH_OK && err.text[0] && !strchr(err.text, '\n'));
        return 0;
    }
    const char *chosen = contexts[data[0] % (sizeof contexts / sizeof contexts[0])];
    json_t *context = NULL;
    ITH_ASSERT(ith_json_parse(&context, chosen, (int64_t)strlen(chosen), "context", &err) ==
               ITH_OK);
    ith_buf out = {0};
    ith_jinja_trace trace = {0};
    ith_jinja_options o = {.max_steps = 200000, .max_memory_bytes = 1 << 22, .now = 1};
    o.max_output_bytes = 1 << 18;
    o.track = "messages";
    o.trace = data[0] & 0x80 ? &trace : NULL;
    if (ith_jinja_render(jinja, context, &o, &out, &err) == ITH_OK)
        check_utf8(&out);
    else
        ITH_ASSERT(err.text[0] && !strchr(err.text, '\n') && out.len == 0);
    ith_jinja_trace_deinit(&trace);
    ith_buf_deinit(&out);
    json_decref(context);
    ith_jinja_free(jinja);
    return 0;
}
