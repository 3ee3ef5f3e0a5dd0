/* Tokenizer: files in, ids and text out. The vocabularies are learned inside the test; vectors of a
 * published vocabulary run where it is at hand. */
#include "testing.h"

#include "base/pool.h"
#include "tokenizer/tokenizer.h"

static const char training_text[] =
    "The lighthouse keeper counts the ships that pass the harbour every evening. He writes the "
    "count into a book: 12 ships on Monday, 7 on Tuesday, 31 on Friday.\n\n\"Why do you count "
    "them?\" asks the child. \"Because they'll count on me,\" says the keeper.\n\tint main(void)\n"
    "{\n    return 0;\n}\nCaf\xc3\xa9s and cr\xc3\xaapes, na\xc3\xafve fianc\xc3\xa9"
    "es. \xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xbd\xa0\xe5\xa5\xbd the the the "
    "keeper keeper ships ships harbour harbour\n";
static const char *const special_tokens[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>",
                                             "<think>", "</think>"};

/* Learns the test vocabulary into a fresh directory. */
static const char *train(const char *name, int64_t vocab_size)
{
    ith_error err = {0};
    const char *dir = temp_dir(name);
    assert_ok(ith_bpe_train(training_text, (int64_t)strlen(training_text), vocab_size,
                            special_tokens, 5, dir, &err),
              err);
    return dir;
}

static ith_tokenizer *open_ok(const char *dir)
{
    ith_error err = {0};
    ith_tokenizer *t = NULL;
    assert_ok(ith_tokenizer_open(&t, dir, &err), err);
    return t;
}

static ith_ids encode(const ith_tokenizer *t, const char *text)
{
    ith_error err = {0};
    ith_ids ids = {0};
    assert_ok(ith_tokenizer_encode(t, text, (int64_t)strlen(text), &ids, &err), err);
    return ids;
}

static void assert_ids(const ith_tokenizer *t, const char *text, const int32_t *want, int64_t n)
{
    ith_ids got = encode(t, text);
    ith_buf seen = {0};
    for (int64_t i = 0; i < got.count; i++)
        ith_buf_printf(&seen, "%d ", got.ids[i]);
    if (got.count != n || memcmp(got.ids, want, (size_t)n * 4) != 0)
        fail_msg("'%s': got %s(%ld ids), expected %ld ids from %d", text, seen.data,
                 (long)got.count, (long)n, n ? want[0] : -1);
    ith_buf_deinit(&seen);
    ith_ids_free(&got);
}
#define ASSERT_IDS(t, text, ...)                                                                   \
    assert_ids(t, text, (const int32_t[]){__VA_ARGS__},                                            \
               (int64_t)(sizeof((const int32_t[]){__VA_ARGS__}) / 4))

static void assert_decodes(const ith_tokenizer *t, const ith_ids *ids, bool skip, const char *want)
{
    ith_error err = {0};
    ith_buf out = {0};
    assert_ok(ith_tokenizer_decode(t, ids->ids, ids->count, skip, &out, &err), err);
    assert_string_equal(out.data ? out.data : "", want);
    ith_buf_deinit(&out);
}

static void write_text(const char *dir, const char *name, const char *text)
{
    ith_error err = {0};
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    assert_ok(ith_write_file(path.data, text, (int64_t)strlen(text), &err), err);
    ith_buf_deinit(&path);
}

static ith_buf read_text(const char *dir, const char *name)
{
    ith_error err = {0};
    ith_buf path = {0}, text = {0};
    ith_path_join(&path, dir, name);
    assert_ok(ith_read_file(path.data, 0, &text, &err), err);
    ith_buf_deinit(&path);
    return text;
}

/* text with the first `from` replaced by `to`. */
static ith_buf replaced(const char *text, const char *from, const char *to)
{
    ith_buf out = {0};
    const char *at = strstr(text, from);
    if (!at)
        fail_msg("'%s' is not in the file", from);
    ith_buf_append(&out, text, at - text);
    ith_buf_puts(&out, to);
    ith_buf_puts(&out, at + strlen(from));
    return out;
}

/* --- learning -------------------------------------------------------------------------------- */

static void test_train_same_text_same_bytes(void **state)
{
    (void)state;
    char first[4096];
    snprintf(first, sizeof first, "%s", train("train-a", 400));
    const char *second = train("train-b", 400);
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    for (int i = 0; i < 2; i++) {
        ith_buf a = read_text(first, names[i]), b = read_text(second, names[i]);
        assert_string_equal(a.data, b.data);
        ith_buf_deinit(&a);
        ith_buf_deinit(&b);
    }
}

static void test_train_sizes_and_named_tokens(void **state)
{
    (void)state;
    ith_tokenizer *t = open_ok(train("train-size", 290));
    assert_int_equal(ith_tokenizer_size(t), 290);
    assert_int_equal(ith_tokenizer_num_added(t), 5);
    assert_int_equal(ith_tokenizer_find(t, "<|endoftext|>"), 285);
    assert_int_equal(ith_tokenizer_eos(t), 287);
    assert_int_equal(ith_tokenizer_pad(t), 285);
    assert_int_equal(ith_tokenizer_find(t, "!"), 0);
    assert_int_equal(ith_tokenizer_find(t, "\xc4\xa0"), 220); /* the space, as in GPT-2 */
    assert_int_equal(ith_tokenizer_find(t, "nothing like it"), -1);
    ith_ids ids = encode(t, " the keeper");
    assert_true(ids.count <= 3);
    ith_ids_free(&ids);
    ith_tokenizer_close(t);
}

/* When no pair occurs twice, learning stops early and the files say so. */
static void test_train_short_text_stops_early(void **state)
{
    (void)state;
    ith_error err = {0};
    const char *dir = temp_dir("train-short");
    assert_ok(ith_bpe_train("abab", 4, 1000, NULL, 0, dir, &err), err);
    ith_tokenizer *t = open_ok(dir);
    assert_int_equal(ith_tokenizer_size(t), 257);
    ASSERT_IDS(t, "abab", 256, 256);
    assert_int_equal(ith_tokenizer_eos(t), -1);
    ith_tokenizer_close(t);
}

static void test_train_wrong_requests_are_named(void **state)
{
    (void)state;
    ith_error err = {0};
    static const char *const twice[] = {"<x>", "<x>"}, *const empty[] = {""}, *const byte[] = {"a"};
    assert_fails(ith_bpe_train("a", 1, 255, NULL, 0, "x", &err), err, ITH_ERR_USAGE, "vocab_size");
    assert_fails(ith_bpe_train("a", 1, 300, twice, 2, "x", &err), err, ITH_ERR_USAGE, "twice");
    assert_fails(ith_bpe_train("a", 1, 300, empty, 1, "x", &err), err, ITH_ERR_USAGE, "empty");
    assert_fails(ith_bpe_train("a", 1, 300, byte, 1, "x", &err), err, ITH_ERR_USAGE, "'a'");
    assert_fails(ith_bpe_train("a\xff", 2, 300, NULL, 0, "x", &err), err, ITH_ERR_FORMAT, "byte 1");
}

/* --- encoding and decoding ------------------------------------------------------------------- */

static void test_encode_decode_round_trip(void **state)
{
    (void)state;
    ith_tokenizer *t = open_ok(train("round", 420));
    static const char *const texts[] = {
        "",
        "a",
        " ",
        training_text,
        "\r\n\r\n \t x",
        "\xf0\x9f\x98\x80 unseen \xe0\xb8\x81\xe0\xb8\xb3\xe0\xb8\xa5\xe0\xb8\xb1\xe0\xb8\x87",
        "1234567890 ships, I'LL count",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        ith_ids ids = encode(t, texts[i]);
        assert_decodes(t, &ids, false, texts[i]);
        ith_ids_free(&ids);
    }
    ith_tokenizer_close(t);
}

static void test_encode_keeps_what_out_holds(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = open_ok(train("append", 300));
    ith_ids ids = {0};
    assert_ok(ith_ids_push(&ids, 42, &err), err);
    assert_ok(ith_tokenizer_encode(t, "a", 1, &ids, &err), err);
    assert_int_equal(ids.count, 2);
    assert_int_equal(ids.ids[0], 42);
    assert_fails(ith_tokenizer_encode(t, "abc \xff", 5, &ids, &err), err, ITH_ERR_FORMAT, "byte 4");
    assert_int_equal(ids.count, 2);
    ith_ids_free(&ids);
    ith_tokenizer_close(t);
}

/* NUL is a byte like others, in the text and in the count. */
static void test_encode_nul_byte(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = open_ok(train("nul", 300));
    ith_ids ids = {0};
    ith_buf out = {0};
    assert_ok(ith_tokenizer_encode(t, "a\0b", 3, &ids, &err), err);
    assert_int_equal(ids.count, 3);
    assert_ok(ith_tokenizer_decode(t, ids.ids, ids.count, false, &out, &err), err);
    assert_int_equal(out.len, 3);
    assert_memory_equal(out.data, "a\0b", 3);
    ith_buf_deinit(&out);
    ith_ids_free(&ids);
    ith_tokenizer_close(t);
}

static void test_special_tokens_in_text(void **state)
{
    (void)state;
    ith_tokenizer *t = open_ok(train("special", 261));
    ASSERT_IDS(t, "<|im_start|>", 257);
    ASSERT_IDS(t, "<|im_end|><think></think>", 258, 259, 260);
    ith_ids ids = encode(t, "<|im_end|><think>a<|im_end"); /* the last is no token */
    assert_int_equal(ids.count, 3 + 8);
    assert_decodes(t, &ids, true, "<think>a<|im_end");
    assert_decodes(t, &ids, false, "<|im_end|><think>a<|im_end");
    ith_ids_free(&ids);
    bool added = false, special = true;
    const char *bytes = NULL;
    int64_t len = 0;
    assert_int_equal(ith_tokenizer_token(t, 259, &bytes, &len, &added, &special), ITH_OK);
    assert_true(added && !special);
    assert_int_equal(len, 7);
    assert_memory_equal(bytes, "<think>", 7);
    assert_int_equal(ith_tokenizer_token(t, 261, NULL, NULL, NULL, NULL), ITH_ERR_USAGE);
    assert_int_equal(ith_tokenizer_token(t, -1, NULL, NULL, NULL, NULL), ITH_ERR_USAGE);
    ith_tokenizer_close(t);
}

/* Ranges tile the text; a part of a character has the range of the whole; what NFC composes has the
 * range of all it was composed from. */
static void test_offsets(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = open_ok(train("offsets", 261));         /* bytes only: no merges */
    const char *text = "e\xcc\x81z<|im_end|>\xf0\x9f\x98\x80"; /* e + acute, z, token, emoji */
    ith_ids ids = {0}, begins = {0}, ends = {0};
    assert_ok(
        ith_tokenizer_encode_offsets(t, text, (int64_t)strlen(text), &ids, &begins, &ends, &err),
        err);
    static const int32_t want[][2] = {{0, 3},   {0, 3},   {3, 4},   {4, 14},
                                      {14, 18}, {14, 18}, {14, 18}, {14, 18}};
    assert_int_equal(ids.count, 8);
    assert_int_equal(begins.count, 8);
    assert_int_equal(ends.count, 8);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(begins.ids[i], want[i][0]);
        assert_int_equal(ends.ids[i], want[i][1]);
    }
    ith_ids_free(&ids);
    ith_ids_free(&begins);
    ith_ids_free(&ends);
    ith_tokenizer_close(t);
}

static void test_decode_replaces_maximal_subparts(void **state)
{
    (void)state;
    ith_tokenizer *t = open_ok(train("replace", 261));
    int32_t byte[256];
    for (int32_t id = 0; id < 256; id++) {
        const char *bytes = NULL;
        assert_int_equal(ith_tokenizer_token(t, id, &bytes, NULL, NULL, NULL), ITH_OK);
        byte[(unsigned char)*bytes] = id;
    }
#define R "\xef\xbf\xbd"
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"\x80", R},
        {"\xc3", R},
        {"\xe4\xbd", R}, /* one incomplete character */
        {"\xe4\xbd"
         "A",
         R "A"},
        {"\xe0\x80\x80", R R R}, /* overlong */
        {"\xed\xa0\x80", R R R}, /* surrogate */
        {"\xf0\x9f\x98"
         "\xc3\xa9",
         R "\xc3\xa9"},
        {"\xf4\x90\x80\x80", R R R R},
        {"\xe4\xbd\xa0\xff", "\xe4\xbd\xa0" R},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_error err = {0};
        ith_ids ids = {0};
        for (const char *p = cases[i].in; *p; p++)
            assert_ok(ith_ids_push(&ids, byte[(unsigned char)*p], &err), err);
        assert_decodes(t, &ids, false, cases[i].out);
        ith_ids_free(&ids);
    }
    ith_tokenizer_close(t);
}

static void test_decode_ids_without_token(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = open_ok(train("padding-rows", 261));
    ith_buf out = {0};
    static const int32_t ids[] = {64, 5000, 65}, negative[] = {-1};
    assert_ok(ith_tokenizer_decode(t, ids, 3, false, &out, &err), err);
    assert_string_equal(out.data, "ab");
    assert_fails(ith_tokenizer_decode(t, negative, 1, false, &out, &err), err, ITH_ERR_USAGE, "-1");
    ith_buf_deinit(&out);
    ith_tokenizer_close(t);
}

/* The pieces of a stream, joined, equal the whole decode, and each piece is valid UTF-8. */
static void test_stream_equals_decode(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = open_ok(train("stream", 300));
    uint32_t seed = 7;
    for (int round = 0; round < 500; round++) {
        ith_ids ids = {0};
        for (int i = 0; i < 40; i++) {
            seed = seed * 1664525u + 1013904223u;
            assert_ok(ith_ids_push(&ids, (int32_t)(seed >> 8) % 310, &err), err);
        }
        ith_buf whole = {0}, joined = {0};
        ith_token_stream s;
        ith_token_stream_init(&s, t, round % 2 == 0);
        for (int i = 0; i < 40; i++) {
            int64_t before = joined.len;
            assert_ok(ith_token_stream_push(&s, ids.ids[i], &joined, &err), err);
            ith_ids again = {0};
            assert_ok(ith_tokenizer_encode(t, joined.data ? joined.data + before : "",
                                           joined.len - before, &again, &err),
                      err);
            ith_ids_free(&again);
        }
        assert_ok(ith_token_stream_flush(&s, &joined, &err), err);
        assert_ok(ith_tokenizer_decode(t, ids.ids, 40, round % 2 == 0, &whole, &err), err);
        assert_string_equal(joined.data, whole.data);
        ith_buf_deinit(&whole);
        ith_buf_deinit(&joined);
        ith_ids_free(&ids);
    }
    ith_tokenizer_close(t);
}

typedef struct {
    const ith_tokenizer *t;
    const ith_ids *want;
    int wrong[64];
} thread_work;

static void encode_piece(void *arg, int64_t begin, int64_t end, int thread)
{
    thread_work *work = arg;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        ith_ids got = {0};
        ith_status status = ith_tokenizer_encode(work->t, training_text,
                                                 (int64_t)strlen(training_text), &got, NULL);
        work->wrong[i] = status != ITH_OK || got.count != work->want->count ||
                         memcmp(got.ids, work->want->ids, (size_t)got.count * 4) != 0;
        ith_ids_free(&got);
    }
}

static void test_threads_share_a_tokenizer(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = open_ok(train("threads", 380));
    ith_ids want = encode(t, training_text);
    ith_pool *pool = NULL;
    assert_ok(ith_pool_create(&pool, 4, &err), err);
    thread_work work = {.t = t, .want = &want};
    ith_pool_for(pool, 64, 1, encode_piece, &work);
    for (int i = 0; i < 64; i++)
        assert_int_equal(work.wrong[i], 0);
    ith_pool_destroy(pool);
    ith_ids_free(&want);
    ith_tokenizer_close(t);
}

/* --- files ----------------------------------------------------------------------------------- */

/* One replacement in a good tokenizer.json; the error names it, or (NULL) it loads. */
static void test_open_json_variants(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to, *error;
    } cases[] = {
        {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", "use BPE"},
        {"\"type\": \"NFC\"", "\"type\": \"Lowercase\"", "normalizer"},
        {"{\"type\": \"NFC\"}", "null", NULL},
        {"{\"type\": \"NFC\"}", "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}",
         NULL},
        {"\"byte_fallback\": false", "\"byte_fallback\": true", "byte_fallback"},
        {"\"dropout\": null", "\"dropout\": 0.1", "dropout"},
        {"\"end_of_word_suffix\": \"\"", "\"end_of_word_suffix\": \"</w>\"", "end_of_word_suffix"},
        {"\"behavior\": \"Isolated\"", "\"behavior\": \"Contiguous\"", "behavior"},
        {"\"behavior\": \"Isolated\", \"invert\": false",
         "\"behavior\": \"Removed\", \"invert\": true", NULL},
        {"\"type\": \"Sequence\"", "\"type\": \"Metaspace\"", "pre_tokenizer"},
        {"\"add_prefix_space\": false", "\"add_prefix_space\": true", "add_prefix_space"},
        {"\"type\": \"ByteLevel\"", "\"type\": \"Whitespace\"", "pre_tokenizer"},
        {"\"decoder\": {\"type\": \"ByteLevel\"", "\"decoder\": {\"type\": \"Fuse\"", "decoder"},
        {"\"Regex\": \"", "\"Regex\": \"[a&&b]|", "set intersection"},
        {"\"Regex\": \"", "\"Regex\": \"(|", "split pattern"},
        {"\"!\": 0", "\"!\": 1", "belongs to another token"},
        {"\"!\": 0", "\"!\": -1", "a token id"},
        {"\"!\": 0", "\"!\": 99999999", "99999999"},
        {"\"!\": 0", "\"!\": 0.5", "',' or '}'"},
        {"\"!\": 0", "\"%\": 0", "twice"},
        {"\"!\": 0", "\"\\u0021\": 0", NULL},
        {"\"!\": 0", "\"\\ud800\": 0", "escape"},
        {"\"!\": 0", "\"\xff\": 0", "UTF-8"},
        {"\"!\": 0", "\"!\" 0", "':'"},
        {"\"vocab\"", "\"words\"", "vocab"},
        {"\"merges\"", "\"vocab\"", "vocab"},
        {"\"merges\": [", "\"merges\": [\"t\",", "one space"},
        {"\"merges\": [", "\"merges\": [\"t \xe2\x82\xac\",", "right part"},
        {"\"merges\": [", "\"merges\": [[\"t\"],", "','"},
        {"\"merges\": [", "\"merges\": [\"q z\",", "joined token"},
        {"\"id\": 285", "\"id\": \"285\"", "an integer"},
        {"\"id\": 285", "\"id\": 10", "vocabulary"},
        {"\"id\": 285", "\"id\": 286", "286"},
        {"\"content\": \"<think>\"", "\"content\": \"\"", "content"},
        {"\"content\": \"<think>\"", "\"content\": \"a\"", "vocabulary"},
        {"\"version\": \"1.0\"", "\"version\": 1.0.0", "tokenizer.json:2:"},
        {"\"merges\": [", "\"x\": 1.0.0, \"merges\": [", "tokenizer.json:304:9: "},
        {"\"vocab\": {", "\"vocab\": null, \"words\": {", "an object of tokens"},
        {"\"model\"", "\"model\": 3, \"other\"", "model"},
    };
    ith_buf good = {0};
    const char *dir = train("variants", 290);
    good = read_text(dir, "tokenizer.json");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_error err = {0};
        ith_buf text = replaced(good.data, cases[i].from, cases[i].to);
        write_text(dir, "tokenizer.json", text.data);
        write_text(dir, "tokenizer_config.json", "{}");
        ith_tokenizer *t = NULL;
        ith_status status = ith_tokenizer_open(&t, dir, &err);
        if (cases[i].error ? status == ITH_OK || !strstr(err.text, cases[i].error) ||
                                 !strstr(err.text, "tokenizer.json")
                           : status != ITH_OK)
            fail_msg("%s -> %s: status %d, '%s'; expected '%s'", cases[i].from, cases[i].to,
                     (int)status, err.text, cases[i].error ? cases[i].error : "success");
        if (status == ITH_OK)
            ith_tokenizer_close(t);
        ith_buf_deinit(&text);
    }
    ith_buf_deinit(&good);
}

/* A file cut anywhere is refused, never accepted or crashed on. */
static void test_open_cut_file(void **state)
{
    (void)state;
    const char *dir = train("cut", 262);
    ith_buf good = read_text(dir, "tokenizer.json");
    for (int64_t len = 0; len + 2 < good.len; len += 1 + len / 50) {
        ith_error err = {0};
        char saved = good.data[len];
        good.data[len] = '\0';
        write_text(dir, "tokenizer.json", good.data);
        good.data[len] = saved;
        ith_tokenizer *t = NULL;
        if (ith_tokenizer_open(&t, dir, &err) == ITH_OK)
            fail_msg("accepted after %ld of %ld bytes", (long)len, (long)good.len);
        assert_non_null(strstr(err.text, "tokenizer.json"));
    }
    ith_buf_deinit(&good);
}

static void test_open_config_variants(void **state)
{
    (void)state;
    static const struct {
        const char *config, *error;
        int32_t eos, pad;
    } cases[] = {
        {"{}", NULL, -1, -1},
        {"{\"eos_token\": null, \"pad_token\": \"<think>\"}", NULL, -1, 259},
        {"{\"eos_token\": {\"content\": \"<|im_end|>\", \"special\": true}}", NULL, 258, -1},
        {"{\"eos_token\": \"<gone>\"}", "eos_token: '<gone>'", 0, 0},
        {"{\"eos_token\": 3}", "eos_token", 0, 0},
        {"{\"split_special_tokens\": true}", "split_special_tokens", 0, 0},
        {"{\"model_max_length\": 1000000000000000019884624838656}", NULL, -1, -1},
        {"{\"added_tokens_decoder\": {\"300\": {\"content\": \"<new>\", \"special\": true}},"
         "\"eos_token\": \"<new>\"}",
         NULL, 300, -1},
        {"{\"added_tokens_decoder\": {\"258\": {\"content\": \"<new>\"}}}", "258", 0, 0},
        {"{\"added_tokens_decoder\": {\"x\": {\"content\": \"<new>\"}}}", "'x'", 0, 0},
        {"[1]", "an object", 0, 0},
        {"{", "tokenizer_config.json:1:", 0, 0},
    };
    const char *dir = train("config", 261);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_error err = {0};
        write_text(dir, "tokenizer_config.json", cases[i].config);
        ith_tokenizer *t = NULL;
        if (cases[i].error) {
            assert_fails(ith_tokenizer_open(&t, dir, &err), err, err.status, cases[i].error);
            assert_non_null(strstr(err.text, "tokenizer_config.json"));
            continue;
        }
        assert_ok(ith_tokenizer_open(&t, dir, &err), err);
        assert_int_equal(ith_tokenizer_eos(t), cases[i].eos);
        assert_int_equal(ith_tokenizer_pad(t), cases[i].pad);
        ith_tokenizer_close(t);
    }
}

/* Flags of added tokens: white space taken, whole words only, matched after NFC, longest first. */
static void test_added_token_flags(void **state)
{
    (void)state;
    const char *dir = train("flags", 261);
    write_text(dir, "tokenizer_config.json",
               "{\"added_tokens_decoder\": {"
               "\"300\": {\"content\": \"<l>\", \"lstrip\": true, \"normalized\": false},"
               "\"301\": {\"content\": \"<r>\", \"rstrip\": true, \"normalized\": false},"
               "\"302\": {\"content\": \"word\", \"single_word\": true, \"normalized\": false},"
               "\"303\": {\"content\": \"e\\u0301!\", \"normalized\": true},"
               "\"304\": {\"content\": \"<a\", \"normalized\": false},"
               "\"305\": {\"content\": \"<a>b\", \"normalized\": false}}}");
    ith_tokenizer *t = open_ok(dir);
    ASSERT_IDS(t, "a \t<l>b", 64, 300, 65);
    ASSERT_IDS(t,
               "a<r> \n\xe3\x80\x80"
               "b",
               64, 301, 65);
    ASSERT_IDS(t, "word", 302);
    ASSERT_IDS(t, "word.", 302, 13);
    ith_ids ids = encode(t, "sword words word_ \xc3\xa9word");
    for (int64_t i = 0; i < ids.count; i++)
        assert_true(ids.ids[i] != 302);
    ith_ids_free(&ids);
    ASSERT_IDS(t, "\xc3\xa9!", 303);
    ASSERT_IDS(t, "e\xcc\x81!", 303);
    ASSERT_IDS(t, "<a>b<a>", 305, 304, 29);
    ith_tokenizer_close(t);
}

static void test_ignore_merges_takes_whole_words(void **state)
{
    (void)state;
    const char *dir = train("ignore", 261);
    ith_buf good = read_text(dir, "tokenizer.json");
    ith_buf more = replaced(good.data, "\"!\": 0", "\"!\": 0, \"xyz\": 400");
    write_text(dir, "tokenizer.json", more.data);
    ith_tokenizer *t = open_ok(dir);
    ASSERT_IDS(t, "xyz", 87, 88, 89); /* no merge leads to it */
    ith_tokenizer_close(t);
    ith_buf ignoring = replaced(more.data, "\"ignore_merges\": false", "\"ignore_merges\": true");
    write_text(dir, "tokenizer.json", ignoring.data);
    t = open_ok(dir);
    ASSERT_IDS(t, "xyz", 400);
    ASSERT_IDS(t, "xyzx", 87, 88, 89, 87);
    ith_tokenizer_close(t);
    ith_buf_deinit(&good);
    ith_buf_deinit(&more);
    ith_buf_deinit(&ignoring);
}

/* vocab.json + merges.txt, with and without CRLF and header, and merges as pairs or strings. */
static void test_vocab_and_merges_files(void **state)
{
    (void)state;
    char from[4096];
    snprintf(from, sizeof from, "%s", train("to-split", 300));
    ith_tokenizer *whole = open_ok(from);
    ith_buf json = read_text(from, "tokenizer.json"), vocab = {0}, merges = {0};
    const char *v = strstr(json.data, "\"vocab\": ") + 9, *m = strstr(v, "\"merges\": ");
    ith_buf_append(&vocab, v, m - v - 2);
    ith_buf_puts(&merges, "#version: 0.2\r\n");
    for (const char *p = m; (p = strstr(p, "[\"")) != NULL;) { /* ["a", "b"] -> a b */
        const char *mid = strstr(p, "\", \""), *end = strstr(mid, "\"]");
        ith_buf_append(&merges, p + 2, mid - p - 2);
        ith_buf_putc(&merges, ' ');
        ith_buf_append(&merges, mid + 4, end - mid - 4);
        ith_buf_puts(&merges, "\r\n");
        p = end;
    }
    const char *dir = temp_dir("vocab-merges");
    write_text(dir, "vocab.json", vocab.data);
    write_text(dir, "merges.txt", merges.data);
    ith_error err = {0};
    ith_tokenizer *t = NULL;
    assert_fails(ith_tokenizer_open(&t, dir, &err), err, ITH_ERR_UNSUPPORTED, "tokenizer_class");
    write_text(dir, "tokenizer_config.json",
               "{\"tokenizer_class\": \"Qwen2TokenizerFast\", \"eos_token\": \"<|im_end|>\"}");
    write_text(dir, "added_tokens.json", "{\"<|im_end|>\": 297, \"<think>\": 298}");
    t = open_ok(dir);
    assert_int_equal(ith_tokenizer_eos(t), 297);
    ith_ids a = encode(whole, training_text), b = encode(t, training_text);
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.ids, b.ids, (size_t)a.count * 4);
    bool special = false;
    ith_tokenizer_added(t, 0, NULL, NULL, &special);
    assert_true(special);
    ith_tokenizer_added(t, 1, NULL, NULL, &special);
    assert_false(special);
    ith_tokenizer_close(t);
    write_text(dir, "merges.txt", "t h\nbroken\n");
    assert_fails(ith_tokenizer_open(&t, dir, &err), err, ITH_ERR_FORMAT, "merges.txt:2");
    ith_ids_free(&a);
    ith_ids_free(&b);
    ith_buf_deinit(&json);
    ith_buf_deinit(&vocab);
    ith_buf_deinit(&merges);
    ith_tokenizer_close(whole);
}

static void test_open_empty_directory(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_tokenizer *t = NULL;
    assert_fails(ith_tokenizer_open(&t, temp_dir("empty"), &err), err, ITH_ERR_IO,
                 "no tokenizer here");
}

/* What decides ids decides the hash; what does not (eos) leaves it. */
static void test_hash_follows_ids(void **state)
{
    (void)state;
    char hash[3][65];
    const char *dir = train("hash", 300);
    for (int i = 0; i < 3; i++) {
        if (i == 1)
            write_text(dir, "tokenizer_config.json", "{}");
        if (i == 2)
            write_text(dir, "tokenizer_config.json",
                       "{\"added_tokens_decoder\": {\"300\": {\"content\": \"<new>\"}}}");
        ith_tokenizer *t = open_ok(dir);
        snprintf(hash[i], sizeof hash[i], "%s", ith_tokenizer_hash(t));
        assert_int_equal(strlen(hash[i]), 64);
        ith_tokenizer_close(t);
    }
    assert_string_equal(hash[0], hash[1]);
    assert_string_not_equal(hash[1], hash[2]);
}

/* --- failures -------------------------------------------------------------------------------- */

/* Every allocation and read of open + encode fails once; each time one message and no leak. */
static void test_every_allocation_failing(void **state)
{
    (void)state;
    char dir[4096];
    snprintf(dir, sizeof dir, "%s", train("fail", 280));
    for (int kind = ITH_FAULT_ALLOC; kind <= ITH_FAULT_READ; kind++) {
        bool done = false;
        for (int64_t n = 1; !done; n++) {
            ith_error err = {0};
            ith_tokenizer *t = NULL;
            ith_ids ids = {0};
            ith_fault_set((ith_fault_kind)kind, n);
            ith_status status = ith_tokenizer_open(&t, dir, &err);
            if (status == ITH_OK)
                status = ith_tokenizer_encode(t, "the keeper e\xcc\x81 \xcc\x81", 16, &ids, &err);
            done = ith_fault_count((ith_fault_kind)kind) < n;
            ith_fault_set((ith_fault_kind)kind, 0);
            if (status == ITH_OK ? !done : err.text[0] == '\0')
                fail_msg("kind %d, n %ld: status %d, '%s'", kind, (long)n, (int)status, err.text);
            ith_ids_free(&ids);
            ith_tokenizer_close(t);
        }
    }
}

static void test_every_allocation_failing_in_training(void **state)
{
    (void)state;
    const char *dir = temp_dir("fail-train");
    bool done = false;
    for (int64_t n = 1; !done; n += 1 + n / 20) {
        ith_error err = {0};
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status = ith_bpe_train(training_text, (int64_t)strlen(training_text), 280,
                                          special_tokens, 5, dir, &err);
        done = ith_fault_count(ITH_FAULT_ALLOC) < n;
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        if (status == ITH_OK ? !done : err.status != ITH_ERR_MEMORY)
            fail_msg("n %ld: status %d, '%s'", (long)n, (int)status, err.text);
    }
}

/* --- a published vocabulary ------------------------------------------------------------------ */

/* Four people joined by U+200D. */
#define FAMILY                                                                                     \
    "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7\xe2\x80\x8d"         \
    "\xf0\x9f\x91\xa6"

static void test_published_vocabulary(void **state)
{
    (void)state;
    ith_tokenizer *t = open_ok(shared_path("data/qwen3-tokenizer"));
    assert_int_equal(ith_tokenizer_size(t), 151669);
    assert_int_equal(ith_tokenizer_eos(t), 151645);
    assert_int_equal(ith_tokenizer_pad(t), 151643);
    ASSERT_IDS(t, "->", 405);
    ASSERT_IDS(t, "(x):\n", 2075, 982);
    ASSERT_IDS(t, "1234567890", 16, 17, 18, 19, 20, 21, 22, 23, 24, 15);
    ASSERT_IDS(t, "\xe0\xb8\x81\xe0\xb8\xb3\xe0\xb8\xa5\xe0\xb8\xb1\xe0\xb8\x87", 124660, 31782,
               123874);
    ASSERT_IDS(t, "\xd7\xaa\xd6\xbc\xd7\x95\xd6\xb9\xd7\xa8\xd6\xb8\xd7\x94", 54514, 146, 120,
               31693, 146, 117, 50226, 146, 116, 45971);
    ASSERT_IDS(t, "<|im_start|>user\nhi<|im_end|>\n", 151644, 872, 198, 6023, 151645, 198);
    ASSERT_IDS(t, "<|endoftext|", 27, 91, 8691, 723, 427, 91);
    ASSERT_IDS(t, "e\xcc\x81", 963);
    ASSERT_IDS(t, "cafe\xcc\x81", 924, 58858);
    ASSERT_IDS(t, "\xe2\x84\xaa", 42);
    ASSERT_IDS(t, "\xe1\x84\x80\xe1\x85\xa1", 19969);
    ASSERT_IDS(t, "<|im_start|>assistant\n\nHi<|im_end|>\n", 151644, 77091, 271, 13048, 151645,
               198);
    ASSERT_IDS(t, "Hello world", 9707, 1879);
    ASSERT_IDS(t, "I'M don'T we'LL", 40, 27603, 1513, 17323, 582, 6, 4086);
    ASSERT_IDS(t, "\r\n\r\n", 871);
    ASSERT_IDS(t, "<think>\n\n</think>\n\n", 151667, 271, 151668, 271);
    ASSERT_IDS(t, "https://a.b/c?d=1&e=2", 2428, 1110, 64, 948, 2899, 30, 67, 28, 16, 68070, 28,
               17);
    ASSERT_IDS(t, "\xef\xac\x81", 144300);
    ASSERT_IDS(t,
               "a\xe2\x80\xa8"
               "b",
               64, 378, 101, 65);
    ASSERT_IDS(t,
               "\xef\xbb\xbf"
               "abc",
               3225, 13683);
    ASSERT_IDS(t, "=====\n\n", 46725, 271);
    ASSERT_IDS(t, "\xc2\xbd \xc2\xb2 \xe2\x85\xb7", 26062, 220, 29456, 220, 70467, 115);
    ASSERT_IDS(t, "\xd9\xa3\xd9\xa4\xd9\xa5", 149, 96, 149, 97, 149, 98);
    ASSERT_IDS(t, FAMILY, 145233, 378, 235, 145233, 378, 235, 145665, 378, 235, 145988);
    ASSERT_IDS(t,
               "Hello world! Caf\xc3\xa9 d\xc3\xa9j\xc3\xa0 vu \xe2\x80\x94 123 \xf0\x9f\x98\x8a",
               9707, 1879, 0, 65671, 45839, 32514, 1959, 220, 16, 17, 18, 26525, 232);
    ASSERT_IDS(t, "\xe4\xbd\xa0\xe5\xa5\xbd\xef\xbc\x8c\xe4\xb8\x96\xe7\x95\x8c\xef\xbc\x81",
               108386, 3837, 99489, 6313);
    ith_tokenizer_close(t);
}

/* The same vocabulary under the rule that counts marks as parts of words: the file's pattern
 * decides, not the vocabulary. */
static void test_published_vocabulary_with_marks_in_words(void **state)
{
    (void)state;
    ith_buf json = read_text(shared_path("data/qwen3-tokenizer"), "tokenizer.json");
    ith_buf half = replaced(json.data, "?\\\\p{L}+|", "?[\\\\p{L}\\\\p{M}]+|");
    ith_buf whole =
        replaced(half.data, "[^\\\\s\\\\p{L}\\\\p{N}]+", "[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]+");
    const char *dir = temp_dir("marks");
    write_text(dir, "tokenizer.json", whole.data);
    ith_tokenizer *t = open_ok(dir);
    ASSERT_IDS(t, "\xe0\xb8\x81\xe0\xb8\xb3\xe0\xb8\xa5\xe0\xb8\xb1\xe0\xb8\x87", 126361);
    ASSERT_IDS(t, "\xd7\xaa\xd6\xbc\xd7\x95\xd6\xb9\xd7\xa8\xd6\xb8\xd7\x94", 54514, 146, 120,
               134071, 50226, 146, 116, 45971);
    ith_tokenizer_close(t);
    ith_buf_deinit(&json);
    ith_buf_deinit(&half);
    ith_buf_deinit(&whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train_same_text_same_bytes),
        cmocka_unit_test(test_train_sizes_and_named_tokens),
        cmocka_unit_test(test_train_short_text_stops_early),
        cmocka_unit_test(test_train_wrong_requests_are_named),
        cmocka_unit_test(test_encode_decode_round_trip),
        cmocka_unit_test(test_encode_keeps_what_out_holds),
        cmocka_unit_test(test_encode_nul_byte),
        cmocka_unit_test(test_special_tokens_in_text),
        cmocka_unit_test(test_offsets),
        cmocka_unit_test(test_decode_replaces_maximal_subparts),
        cmocka_unit_test(test_decode_ids_without_token),
        cmocka_unit_test(test_stream_equals_decode),
        cmocka_unit_test(test_threads_share_a_tokenizer),
        cmocka_unit_test(test_open_json_variants),
        cmocka_unit_test(test_open_cut_file),
        cmocka_unit_test(test_open_config_variants),
        cmocka_unit_test(test_added_token_flags),
        cmocka_unit_test(test_ignore_merges_takes_whole_words),
        cmocka_unit_test(test_vocab_and_merges_files),
        cmocka_unit_test(test_open_empty_directory),
        cmocka_unit_test(test_hash_follows_ids),
        cmocka_unit_test(test_every_allocation_failing),
        cmocka_unit_test(test_every_allocation_failing_in_training),
        cmocka_unit_test(test_published_vocabulary),
        cmocka_unit_test(test_published_vocabulary_with_marks_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
