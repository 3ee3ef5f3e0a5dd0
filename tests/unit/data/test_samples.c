/* Tokenized samples: labels and weights, cuts, drops, the cache and what it is keyed by. The
 * tokenizer is learned from a text below; extra tests use a real one where it is present. */
#include "testing.h"

#include <limits.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/hash.h"
#include "data/batching.h"
#include "data/noise.h"
#include "data/samples.h"

static ith_error err;
static char root[1024], model_dir[1100];
static ith_tokenizer *tokenizer;
static ith_chat *chat;

static const char chatml[] =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

static const char *at(const char *name)
{
    static char path[2048];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static const char *put(const char *name, const char *text)
{
    assert_ok(ith_write_file(at(name), text, (int64_t)strlen(text), &err), err);
    return at(name);
}

static ith_samples_options options_of(const char *path)
{
    return (ith_samples_options){
        .path = path, .cutoff_len = 1000, .tokenizer = tokenizer, .chat = chat};
}

static ith_samples *open_samples(ith_samples_options o)
{
    ith_samples *s = NULL;
    assert_ok(ith_samples_open(&s, &o, &err), err);
    return s;
}

/* The text of ids [begin, end) of a sample. */
static const char *text_of(const ith_sample *sample, int64_t begin, int64_t end)
{
    static ith_buf text;
    ith_buf_clear(&text);
    ith_buf_puts(&text, "");
    assert_ok(ith_tokenizer_decode(tokenizer, sample->ids + begin, end - begin, false, &text, &err),
              err);
    return text.data;
}

static void assert_run(const ith_samples *s, int64_t entry, int64_t run, const char *trained,
                       double weight)
{
    ith_sample sample = ith_samples_get(s, entry);
    assert_true(run < sample.num_runs);
    assert_string_equal(text_of(&sample, sample.runs[run].begin, sample.runs[run].end), trained);
    assert_float_equal(sample.runs[run].weight, weight, 0);
}

#define USER(text) "{\"role\":\"user\",\"content\":\"" text "\"}"
#define BOT(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"
#define BOT_W(text, weight)                                                                        \
    "{\"role\":\"assistant\",\"content\":\"" text "\",\"loss_weight\":" weight "}"

/* The answer is trained, not the same words in the question (cases S27), and its end token, whose
 * id may also be that of padding (cases S17). */
static void test_answer_is_trained_to_its_end(void **state)
{
    (void)state;
    put("a.jsonl", "{\"messages\":[" USER("yes") "," BOT("yes") "]}\n");
    ith_samples *s = open_samples(options_of(at("a.jsonl")));
    ith_sample sample = ith_samples_get(s, 0);
    assert_int_equal(ith_samples_count(s), 1);
    assert_int_equal(sample.num_runs, 1);
    assert_string_equal(text_of(&sample, 0, sample.num_tokens),
                        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n");
    assert_run(s, 0, 0, "yes<|im_end|>\n", 1);
    assert_int_equal(sample.num_labels, sample.runs[0].end - sample.runs[0].begin);
    assert_float_equal(sample.weight_sum, sample.num_labels, 0);
    ith_samples_close(s);
}

/* Weights of messages weigh; a turn of weight 0 is not trained (cases S28). */
static void test_message_weights_reach_the_tokens(void **state)
{
    (void)state;
    put("w.jsonl", "{\"messages\":[" USER("q") "," BOT_W("first", "0.0") "," USER("r") "," BOT_W(
                       "second", "0.25") "," USER("s") "," BOT_W("third", "2") "]}\n");
    ith_samples *s = open_samples(options_of(at("w.jsonl")));
    assert_int_equal(ith_samples_count(s), 2);
    assert_run(s, 0, 0, "second<|im_end|>\n", 0.25);
    assert_run(s, 1, 0, "third<|im_end|>\n", 2);
    assert_int_equal(ith_samples_get(s, 0).cut, 4);
    assert_int_equal(ith_samples_get(s, 1).cut, 6);
    ith_samples_close(s);
    ith_samples_options o = options_of(at("w.jsonl"));
    o.all_turns = true;
    s = open_samples(o);
    assert_int_equal(ith_samples_count(s), 1);
    assert_int_equal(ith_samples_get(s, 0).num_runs, 2);
    assert_run(s, 0, 0, "second<|im_end|>\n", 0.25);
    assert_run(s, 0, 1, "third<|im_end|>\n", 2);
    ith_samples_close(s);
}

/* null fields give the ids of absent ones (cases S06). */
static void test_null_fields_change_nothing(void **state)
{
    (void)state;
    put("n.jsonl",
        "{\"messages\":[" USER("q") "," BOT(
            "hi") "]}\n"
                  "{\"messages\":[" USER(
                      "q") ",{\"role\":\"assistant\",\"content\":\"hi\","
                           "\"tool_calls\":null,\"reasoning_content\":null}],\"tools\":null}\n");
    ith_samples *s = open_samples(options_of(at("n.jsonl")));
    ith_sample a = ith_samples_get(s, 0), b = ith_samples_get(s, 1);
    assert_int_equal(a.num_tokens, b.num_tokens);
    assert_memory_equal(a.ids, b.ids, (size_t)a.num_tokens * 4);
    ith_samples_close(s);
}

static const char trajectories[] =
    "{\"input_ids\":[20,21,22,23,24,25],\"prompt_lengths\":2,\"reveal_steps\":[1,2,0,1]}\n"
    "{\"input_ids\":[30,31,32],\"prompt_lengths\":1}\n"
    "{\"input_ids\":[30,31,32],\"prompt_lengths\":3}\n"
    "{\"input_ids\":[40,41,42],\"prompt_lengths\":0,\"reveal_steps\":[9,0,400]}\n";

/* Rows of ids: from the prompt on they are trained, a cut cuts the steps, too, and a step is never
 * taken for an id. */
static void test_rows_of_ids_keep_their_steps(void **state)
{
    (void)state;
    put("t.jsonl", trajectories);
    ith_samples_options o = options_of(at("t.jsonl"));
    ith_samples *s = open_samples(o);
    assert_int_equal(ith_samples_count(s), 3);
    assert_int_equal(ith_samples_num_trajectories(s), 2);
    assert_int_equal(ith_samples_max_id(s), 42);
    assert_int_equal(ith_samples_drops(s)->rows[ITH_DROP_TYPE].count, 1);
    ith_sample a = ith_samples_get(s, 0), b = ith_samples_get(s, 1), c = ith_samples_get(s, 2);
    assert_memory_equal(a.ids, ((int32_t[]){20, 21, 22, 23, 24, 25}), 24);
    assert_memory_equal(a.steps, ((int32_t[]){-1, -1, 1, 2, 0, 1}), 24);
    assert_int_equal(a.runs[0].begin, 2);
    assert_int_equal(a.runs[0].end, 6);
    assert_null(b.steps);
    assert_int_equal(b.ids[0], 30);
    assert_int_equal(b.num_labels, 2);
    assert_memory_equal(c.ids, ((int32_t[]){40, 41, 42}), 12);
    assert_memory_equal(c.steps, ((int32_t[]){9, 0, 400}), 12);
    o.cutoff_len = 4;
    ith_samples *cut = open_samples(o);
    a = ith_samples_get(cut, 0);
    assert_int_equal(a.num_tokens, 4);
    assert_memory_equal(a.ids, ((int32_t[]){20, 21, 22, 23}), 16);
    assert_memory_equal(a.steps, ((int32_t[]){-1, -1, 1, 2}), 16);
    ith_samples_close(cut);
    ith_samples_close(s);
}

/* The noise of a trajectory of three steps is one of the six pairs of its states: all of them come
 * in the long run, and nothing else; padding, complement and 1/t do not touch it. */
static void test_noise_of_a_trajectory_is_a_pair_of_its_states(void **state)
{
    (void)state;
    put("t.jsonl", "{\"input_ids\":[20,21,22,23,24,25],\"prompt_lengths\":2,"
                   "\"reveal_steps\":[1,2,0,1]}\n");
    ith_samples *s = open_samples(options_of(at("t.jsonl")));
    ith_batcher_options bo = {.strategy = ITH_BATCHING_NORMAL,
                              .micro_batch_size = 1,
                              .cutoff_len = 8,
                              .grad_accum = 1,
                              .dp_size = 1,
                              .num_epochs = 1};
    ith_batcher *batcher = NULL;
    ith_noiser *n = NULL;
    ith_batch_step step;
    ith_micro_batch clean, b;
    assert_ok(ith_batcher_create(&batcher, s, &bo, &err), err);
    assert_true(ith_batcher_next(batcher, &step));
    assert_ok(ith_batcher_fill(batcher, 0, &clean, &err), err);
    ith_noise_options o = {.blocks = true,
                           .block_size = 4,
                           .mask_id = 5,
                           .end_id = 2,
                           .padding = ITH_PAD_BLOCK,
                           .weight = ITH_WEIGHT_INVERSE,
                           .complementary = true,
                           .same_token = true,
                           .keep_all = true,
                           .seed = 3};
    ith_batch_limits limits = ith_batcher_limits(batcher);
    assert_ok(ith_noiser_create(&n, &o, &limits, &err), err);
    int seen[4][4] = {{0}}, total = 0;
    for (int64_t epoch = 0; epoch < 600; epoch++) {
        static const int32_t steps[] = {-1, -1, 1, 2, 0, 1};
        assert_ok(ith_noiser_apply(n, s, &clean, epoch, 1, &b, &err), err);
        assert_int_equal(b.num_docs, 1);    /* no complement */
        assert_int_equal(b.num_tokens, 12); /* no padding */
        int from = 3, to = 0;
        for (int i = 2; i < 6; i++) {
            from = b.ids[i] == 5 && steps[i] < from ? steps[i] : from;
            to = b.labels[i] >= 0 && steps[i] >= to ? steps[i] + 1 : to;
        }
        for (int i = 0; i < 6; i++) {
            assert_int_equal(b.ids[i], steps[i] >= from ? 5 : 20 + i);
            assert_int_equal(b.labels[i], steps[i] >= from && steps[i] < to ? 20 + i : -100);
            assert_int_equal(b.ids[6 + i], 20 + i);
        }
        assert_float_equal(b.weight_sum, (double)b.num_labels, 0);
        seen[from][to]++;
        total++;
    }
    for (int i = 0; i < 3; i++)
        for (int j = i + 1; j < 4; j++)
            if (seen[i][j] < total / 6 * 3 / 4)
                fail_msg("states %d and %d came %d times of %d", i, j, seen[i][j], total);
    ith_noiser_destroy(n);
    ith_batcher_destroy(batcher);
    ith_samples_close(s);
}

/* A token that is the mask in the data counts as masked, and its sample is marked for it: also for
 * a rank that has none of the rows. */
static void test_masks_of_the_data_are_known(void **state)
{
    (void)state;
    static const int32_t mask = 5;
    put("m.jsonl", "{\"input_ids\":[20,21,22,5,24,25],\"prompt_lengths\":2}\n"
                   "{\"input_ids\":[20,21,22,23,24,25],\"prompt_lengths\":2}\n");
    ith_samples_options so = options_of(at("m.jsonl"));
    ith_samples *plain = open_samples(so);
    so.mask_id = &mask;
    ith_samples *s = open_samples(so);
    assert_string_not_equal(ith_samples_key(plain), ith_samples_key(s));
    assert_true(ith_samples_get(s, 0).has_mask);
    assert_false(ith_samples_get(s, 1).has_mask);
    assert_false(ith_samples_get(plain, 0).has_mask);
    ith_noise_options o = {.blocks = true, .block_size = 2, .mask_id = 5, .same_token = true};
    ith_batch_limits limits = {.max_tokens = 12, .max_docs = 2, .max_doc_tokens = 6};
    ith_noiser *n = NULL;
    ith_micro_batch b;
    int64_t both[] = {0, 1};
    ith_micro_batch clean = {.num_docs = 2, .sample = both};
    assert_ok(ith_noiser_create(&n, &o, &limits, &err), err);
    assert_ok(ith_noiser_apply(n, s, &clean, 0, 1, &b, &err), err);
    assert_int_equal(b.num_docs, 1); /* nothing else is drawn */
    assert_int_equal(b.num_labels, 1);
    assert_int_equal(b.num_tokens, 4);
    assert_memory_equal(b.ids, ((int32_t[]){22, 5, 20, 21}), 16);
    assert_float_equal(ith_noiser_weight(n, s, &clean, 0, 1), 1, 0);
    ith_noiser_destroy(n);
    ith_samples_close(plain);
    ith_samples_close(s);
}

/* Prompts longer than the limit leave nothing to train on: all dropped is an error that counts
 * (cases S29); some dropped is counted, with the first place. */
static void test_samples_without_trainable_tokens_are_counted(void **state)
{
    (void)state;
    ith_buf text = {0};
    for (int i = 0; i < 8; i++) {
        ith_buf_puts(&text, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
        for (int k = 0; k < 60; k++)
            ith_buf_printf(&text, "word%d ", k);
        ith_buf_puts(&text, "\"},{\"role\":\"assistant\",\"content\":\"ok\"}]}\n");
    }
    ith_samples *s = NULL;
    ith_samples_options o = options_of(put("long.jsonl", text.data));
    o.cutoff_len = 64;
    assert_fails(ith_samples_open(&s, &o, &err), err, ITH_ERR_FORMAT,
                 "no sample is left: 8 of 8 samples dropped: no trainable token within cutoff_len");
    assert_null(s);
    ith_buf_puts(&text, "{\"messages\":[" USER("q") "," BOT("a") "]}\n");
    put("long.jsonl", text.data);
    s = open_samples(o);
    assert_int_equal(ith_samples_count(s), 1);
    ith_buf_clear(&text);
    ith_samples_drop_report(s, &text);
    assert_non_null(strstr(text.data, "8 of 9 samples dropped: no trainable token within"));
    assert_non_null(strstr(text.data, "long.jsonl: row 1 (line 1): "));
    ith_samples_close(s);
    ith_buf_deinit(&text);
}

/* The head is kept, the loss is told. */
static void test_long_samples_keep_their_head(void **state)
{
    (void)state;
    put("cut.jsonl", "{\"messages\":[" USER("q") "," BOT(
                         "one two three four five six seven eight nine ten") "]}\n");
    ith_samples *s = open_samples(options_of(at("cut.jsonl")));
    ith_sample whole = ith_samples_get(s, 0);
    assert_int_equal(ith_samples_num_truncated(s, NULL), 0);
    ith_samples_options o = options_of(at("cut.jsonl"));
    o.cutoff_len = whole.num_tokens - 5;
    ith_samples *t = open_samples(o);
    ith_sample cut = ith_samples_get(t, 0);
    int64_t lost = 0;
    assert_int_equal(cut.num_tokens, whole.num_tokens - 5);
    assert_int_equal(cut.full_tokens, whole.num_tokens);
    assert_memory_equal(cut.ids, whole.ids, (size_t)cut.num_tokens * 4);
    assert_int_equal(cut.num_labels, whole.num_labels - 5);
    assert_int_equal(ith_samples_num_truncated(t, &lost), 1);
    assert_int_equal(lost, 5);
    ith_samples_close(t);
    /* Or it is split: all trained tokens but the first of each later part remain targets. */
    o.split_long = true;
    o.cutoff_len = (whole.num_tokens + 1) / 2;
    t = open_samples(o);
    assert_int_equal(ith_samples_count(t), 2);
    ith_sample a = ith_samples_get(t, 0), b = ith_samples_get(t, 1);
    assert_int_equal(a.num_tokens + b.num_tokens, whole.num_tokens);
    assert_memory_equal(b.ids, whole.ids + a.num_tokens, (size_t)b.num_tokens * 4);
    assert_int_equal(a.num_labels + b.num_labels, whole.num_labels - 1);
    assert_int_equal(ith_samples_num_truncated(t, NULL), 0);
    ith_samples_close(t);
    ith_samples_close(s);
}

/* One row that the template refuses does not end the run: it is counted with the reason. */
static void test_rows_that_cannot_be_rendered_are_counted(void **state)
{
    (void)state;
    put("r.jsonl",
        "{\"messages\":[" USER("q") "," BOT(
            "a") "]}\n"
                 "{\"messages\":[" USER("q") ",{\"role\":\"assistant\",\"content\":[{\"type\":"
                                             "\"tool_call\",\"value\":\"not json\"}]}]}\n"
                                             "{\"messages\":[" USER("q") "," BOT("b") "]}\n");
    ith_samples *s = open_samples(options_of(at("r.jsonl")));
    const ith_drop_row *drop = &ith_samples_drops(s)->rows[ITH_DROP_RENDER];
    assert_int_equal(ith_samples_count(s), 2);
    assert_int_equal(drop->count, 1);
    assert_int_equal(drop->row, 1);
    assert_true(strlen(drop->detail) > 0);
    assert_int_equal(ith_samples_get(s, 1).row, 2);
    ith_samples_close(s);
}

/* A sample drawn twice is stored once. */
static void test_drawn_twice_is_stored_once(void **state)
{
    (void)state;
    put("d.jsonl",
        "{\"messages\":[" USER("q") "," BOT("a") "]}\n"
                                                 "{\"messages\":[" USER("q") "," BOT("b") "," USER(
                                                     "r") "," BOT("c") "]}\n");
    put("d.yaml", "mine: {path: d.jsonl, weight: 2}\n");
    ith_samples *s = open_samples(options_of(at("d.yaml")));
    assert_int_equal(ith_samples_count(s), 6);
    assert_int_equal(ith_samples_num_stored(s), 3);
    assert_ptr_equal(ith_samples_get(s, 0).ids, ith_samples_get(s, 1).ids);
    assert_string_equal(ith_samples_part_name(s, ith_samples_get(s, 0).part), "mine");
    ith_samples_close(s);
}

/* ---- cache ---------------------------------------------------------------------------------- */

static int64_t files_in(const char *dir)
{
    ith_names names = {0};
    assert_ok(ith_list_dir(dir, &names, &err), err);
    int64_t count = names.count;
    ith_names_free(&names);
    return count;
}

static void assert_same_samples(const ith_samples *a, const ith_samples *b)
{
    assert_int_equal(ith_samples_count(a), ith_samples_count(b));
    assert_int_equal(ith_samples_num_tokens(a), ith_samples_num_tokens(b));
    assert_int_equal(ith_samples_num_labels(a), ith_samples_num_labels(b));
    assert_int_equal(ith_samples_max_id(a), ith_samples_max_id(b));
    for (int64_t i = 0; i < ith_samples_count(a); i++) {
        ith_sample x = ith_samples_get(a, i), y = ith_samples_get(b, i);
        assert_int_equal(x.num_tokens, y.num_tokens);
        assert_int_equal(x.num_runs, y.num_runs);
        assert_memory_equal(x.ids, y.ids, (size_t)x.num_tokens * 4);
        assert_memory_equal(x.runs, y.runs, (size_t)x.num_runs * sizeof *x.runs);
        assert_true((x.steps != NULL) == (y.steps != NULL));
        if (x.steps)
            assert_memory_equal(x.steps, y.steps, (size_t)x.num_tokens * 4);
        assert_int_equal(x.row, y.row);
        assert_int_equal(x.cut, y.cut);
    }
    ith_buf p = {0}, q = {0};
    ith_samples_drop_report(a, &p);
    ith_samples_drop_report(b, &q);
    assert_int_equal(p.len, q.len);
    if (p.len)
        assert_string_equal(p.data, q.data);
    ith_buf_deinit(&p);
    ith_buf_deinit(&q);
}

static const char cached_rows[] = "{\"messages\":[" USER("q") "," BOT(
    "a") "]}\n"
         "{\"messages\":[" USER("q") "]}\n"
                                     "{\"messages\":[" USER("q") "," BOT("b") "," USER("r") "," BOT(
                                         "c c") "]}\n";

/* What was made is mapped the next time, and is what memory held. */
static void check_cache(const char *rows, const char *name)
{
    put("c.jsonl", rows);
    char dir[1200];
    snprintf(dir, sizeof dir, "%s/%s/deep", root, name);
    ith_samples_options o = options_of(at("c.jsonl"));
    ith_samples *memory = open_samples(o);
    o.cache_dir = dir;
    ith_samples *made = open_samples(o), *mapped = open_samples(o);
    assert_false(ith_samples_from_cache(made));
    assert_true(ith_samples_from_cache(mapped));
    assert_int_equal(files_in(dir), 1);
    assert_same_samples(memory, made);
    assert_same_samples(memory, mapped);
    assert_string_equal(ith_samples_key(made), ith_samples_key(mapped));
    /* Who knows what the data is reads none of it. */
    put("c.jsonl", "damaged");
    o.identity = ith_samples_identity(made);
    ith_samples *told = open_samples(o);
    assert_true(ith_samples_from_cache(told));
    assert_same_samples(memory, told);
    ith_samples_close(told);
    ith_samples_close(memory);
    ith_samples_close(made);
    ith_samples_close(mapped);
}

static void test_cache_gives_back_what_was_made(void **state)
{
    (void)state;
    check_cache(cached_rows, "cache1");
    check_cache(trajectories, "cache1t");
}

/* Anything that changes ids, labels or the choice of samples makes another key (cases S09). */
static void test_cache_key_follows_everything_that_matters(void **state)
{
    (void)state;
    put("k.jsonl", cached_rows);
    char dir[1200], path[2048], other_dir[1200];
    snprintf(dir, sizeof dir, "%s/cache2", root);
    snprintf(path, sizeof path, "%s", at("k.jsonl"));
    snprintf(other_dir, sizeof other_dir, "%s/other-model", root);
    const char *const special[] = {"<|im_end|>", "<|im_start|>", "<|endoftext|>"};
    assert_ok(ith_make_dirs(other_dir, &err), err);
    assert_ok(ith_bpe_train("another text, another text", 26, 300, special, 3, other_dir, &err),
              err);
    ith_tokenizer *other_tokenizer = NULL;
    ith_chat *other_chat = NULL;
    assert_ok(ith_tokenizer_open(&other_tokenizer, other_dir, &err), err);
    assert_ok(ith_chat_open(&other_chat, other_dir,
                            "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}"
                            "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
                            tokenizer, &err),
              err);
    ith_samples_options base = options_of(path);
    base.cache_dir = dir;
    ith_samples_options variants[7];
    for (int i = 0; i < 7; i++)
        variants[i] = base;
    variants[1].chat = other_chat;
    variants[2].tokenizer = other_tokenizer;
    variants[3].cutoff_len = 999;
    variants[4].all_turns = true;
    variants[5].seed = 1;
    variants[6].split_long = true;
    for (int i = 0; i < 7; i++) {
        ith_samples *s = open_samples(variants[i]);
        if (ith_samples_from_cache(s) || files_in(dir) != i + 1)
            fail_msg("variant %d was taken from the cache, %lld files", i,
                     (long long)files_in(dir));
        ith_samples_close(s);
    }
    /* Content, not time. */
    put("k.jsonl", cached_rows);
    ith_samples *s = open_samples(base);
    assert_true(ith_samples_from_cache(s));
    ith_samples_close(s);
    ith_buf text = {0};
    ith_buf_printf(&text, "%s{\"messages\":[" USER("q") "," BOT("new") "]}\n", cached_rows);
    put("k.jsonl", text.data);
    s = open_samples(base);
    assert_false(ith_samples_from_cache(s));
    assert_int_equal(ith_samples_count(s), 4);
    ith_samples_close(s);
    ith_buf_deinit(&text);
    ith_chat_close(other_chat);
    ith_tokenizer_close(other_tokenizer);
}

/* A file that was cut off, or changed in any of its parts, is made anew or refused when read. */
static void test_damaged_cache_is_made_anew(void **state)
{
    (void)state;
    put("x.jsonl", cached_rows);
    char dir[1200], file[1400];
    snprintf(dir, sizeof dir, "%s/cache3", root);
    ith_samples_options o = options_of(at("x.jsonl"));
    ith_samples *memory = open_samples(o);
    o.cache_dir = dir;
    ith_samples_close(open_samples(o));
    ith_names names = {0};
    assert_ok(ith_list_dir(dir, &names, &err), err);
    snprintf(file, sizeof file, "%s/%s", dir, names.names[0]);
    ith_names_free(&names);
    ith_buf good = {0}, bad = {0};
    assert_ok(ith_read_file(file, 0, &good, &err), err);
    int64_t ids_end = 64 + ith_samples_num_tokens(memory) * 4;
    for (int64_t at_byte = 0; at_byte < good.len; at_byte += 3) {
        if (at_byte >= 8 && at_byte < ids_end) /* header zeros, ids */
            continue;
        ith_buf_clear(&bad);
        ith_buf_append(&bad, good.data, good.len);
        bad.data[at_byte] = (char)(bad.data[at_byte] ^ 0x20);
        assert_ok(ith_write_file(file, bad.data, bad.len, &err), err);
        ith_samples *s = open_samples(o);
        bool padding = at_byte >= ids_end && at_byte < (ids_end + 7) / 8 * 8;
        if (ith_samples_from_cache(s) && !padding)
            fail_msg("byte %lld of %lld changed, and nobody noticed", (long long)at_byte,
                     (long long)good.len);
        assert_same_samples(memory, s);
        ith_samples_close(s);
    }
    for (int64_t len = 0; len < good.len; len += 31) {
        assert_ok(ith_write_file(file, good.data, len, &err), err);
        ith_samples *s = open_samples(o);
        assert_false(ith_samples_from_cache(s));
        ith_samples_close(s);
    }
    /* Ids are looked at when they are used. */
    ith_buf_clear(&bad);
    ith_buf_append(&bad, good.data, good.len);
    bad.data[64 + 3] = 0x70;
    assert_ok(ith_write_file(file, bad.data, bad.len, &err), err);
    ith_samples *s = open_samples(o);
    ith_batcher *b = NULL;
    ith_batcher_options bo = {
        .micro_batch_size = 1, .cutoff_len = 1000, .grad_accum = 1, .dp_size = 1, .num_epochs = 1};
    assert_ok(ith_batcher_create(&b, s, &bo, &err), err);
    ith_batch_step step;
    ith_micro_batch mb;
    assert_true(ith_batcher_next(b, &step));
    assert_fails(ith_batcher_fill(b, 0, &mb, &err), err, ITH_ERR_FORMAT, "cache of tokenized data");
    ith_batcher_destroy(b);
    ith_samples_close(s);
    ith_samples_close(memory);
    ith_buf_deinit(&good);
    ith_buf_deinit(&bad);
}

/* Many rows, some of them bad. */
static void write_many(const char *path, int count)
{
    ith_buf text = {0};
    for (int i = 0; i < count; i++) {
        if (i % 11 == 5)
            ith_buf_puts(&text, "{\"messages\":[" USER("q") "]}\n");
        else if (i % 13 == 7)
            ith_buf_puts(&text, "{\"messages\":[" USER(
                                    "q") ",{\"role\":\"assistant\",\"content\":"
                                         "[{\"type\":\"tool_call\",\"value\":\"7\"}]}]}\n");
        else
            ith_buf_printf(&text,
                           "{\"messages\":[" USER("count %d") "," BOT("%d and %d") "," USER(
                               "more") "," BOT("%d") "]}\n",
                           i, i + 1, i + 2, i * 3);
    }
    assert_ok(ith_write_file(path, text.data, text.len, &err), err);
    ith_buf_deinit(&text);
}

/* The cache file has the same bytes for any number of threads. */
static void test_result_does_not_depend_on_threads(void **state)
{
    (void)state;
    char path[2048], digest[3][65];
    snprintf(path, sizeof path, "%s", at("t.jsonl"));
    write_many(path, 1500);
    for (int i = 0; i < 3; i++) {
        char dir[1200], file[1400];
        ith_pool *pool = NULL;
        snprintf(dir, sizeof dir, "%s/cache-t%d", root, i);
        assert_ok(ith_pool_create(&pool, i + 1, &err), err);
        ith_samples_options o = options_of(path);
        o.cache_dir = dir;
        o.pool = pool;
        ith_samples_close(open_samples(o));
        ith_pool_destroy(pool);
        ith_names names = {0};
        assert_ok(ith_list_dir(dir, &names, &err), err);
        snprintf(file, sizeof file, "%s/%s", dir, names.names[0]);
        ith_names_free(&names);
        ith_buf bytes = {0};
        ith_sha256 h;
        assert_ok(ith_read_file(file, 0, &bytes, &err), err);
        ith_sha256_init(&h);
        ith_sha256_update(&h, bytes.data, bytes.len);
        ith_sha256_hex(&h, digest[i]);
        ith_buf_deinit(&bytes);
        assert_string_equal(digest[i], digest[0]);
    }
}

/* A conversation is on one side only; the split is the seed's. */
static void test_split_keeps_conversations_together(void **state)
{
    (void)state;
    char path[2048];
    snprintf(path, sizeof path, "%s", at("s.jsonl"));
    write_many(path, 200);
    ith_samples *s = open_samples(options_of(path));
    int64_t *train = NULL, *eval = NULL, num_train = 0, num_eval = 0;
    bool in_eval[200] = {false};
    assert_ok(ith_samples_split(s, 0.1, 3, &train, &num_train, &eval, &num_eval, &err), err);
    assert_int_equal(num_train + num_eval, ith_samples_count(s));
    int64_t conversations = 0;
    for (int64_t i = 0; i < num_eval; i++) {
        int64_t row = ith_samples_get(s, eval[i]).row;
        conversations += !in_eval[row];
        in_eval[row] = true;
        assert_true(i == 0 || eval[i] > eval[i - 1]);
    }
    assert_in_range(conversations, 15, 18); /* a tenth of those that are left */
    for (int64_t i = 0; i < num_train; i++)
        assert_false(in_eval[ith_samples_get(s, train[i]).row]);
    ith_free(train);
    ith_free(eval);
    ith_samples_close(s);
    put("one.jsonl", "{\"messages\":[" USER("q") "," BOT("a") "]}\n");
    s = open_samples(options_of(at("one.jsonl")));
    assert_fails(ith_samples_split(s, 0.5, 3, &train, &num_train, &eval, &num_eval, &err), err,
                 ITH_ERR_USAGE, "of 1 conversation leaves none");
    ith_samples_close(s);
}

/* The n-th failing allocation, read or write: one message, no leak, and no half cache that would be
 * taken for a whole one. */
static void test_faults_leave_no_half_cache(void **state)
{
    (void)state;
    put("f.jsonl", cached_rows);
    char dir[1200], path[2048];
    snprintf(dir, sizeof dir, "%s/cache-f", root);
    snprintf(path, sizeof path, "%s", at("f.jsonl"));
    ith_samples_options o = options_of(path);
    ith_samples *memory = open_samples(o);
    o.cache_dir = dir;
    for (int kind = ITH_FAULT_ALLOC; kind < ITH_FAULT_FAILURES; kind++) {
        int64_t failures = 0;
        for (int64_t n = 1;; n++) {
            ith_samples *s = NULL;
            assert_ok(ith_remove_tree(dir, &err), err);
            ith_error_clear(&err);
            ith_fault_set((ith_fault_kind)kind, n);
            ith_status status = ith_samples_open(&s, &o, &err);
            bool hit = ith_fault_count((ith_fault_kind)kind) >= n;
            ith_fault_set((ith_fault_kind)kind, 0);
            if (status == ITH_OK) {
                if (hit && ith_samples_count(s) != ith_samples_count(memory))
                    fail_msg("fault %lld of kind %d: %lld samples", (long long)n, kind,
                             (long long)ith_samples_count(s));
                ith_samples_close(s);
            } else {
                failures++;
                assert_null(s);
                assert_true(err.text[0] != '\0' && !strchr(err.text, '\n'));
                s = open_samples(o);
                assert_same_samples(memory, s);
                ith_samples_close(s);
            }
            if (!hit)
                break;
        }
        assert_true(failures > 0);
    }
    ith_samples_close(memory);
}

/* Bytes of private memory this process has; the stacks of threads that ended are in it. */
static int64_t data_bytes(void)
{
    ith_buf text = {0};
    assert_ok(ith_read_file("/proc/self/status", 0, &text, &err), err);
    const char *at_data = strstr(text.data, "VmData:");
    int64_t kib = at_data ? strtoll(at_data + 7, NULL, 10) : 0;
    ith_buf_deinit(&text);
    return kib * 1024;
}

/* A file larger than the memory the process may have: a child that may take 32 MB more reads 48 MB
 * of rows through the cache. */
static void test_file_larger_than_memory(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* shadow memory counts against the limit */
#endif
    char path[2048], dir[1200];
    snprintf(path, sizeof path, "%s", at("big.jsonl"));
    snprintf(dir, sizeof dir, "%s/cache-big", root);
    ith_writer w;
    ith_buf row = {0};
    ith_buf_puts(&row, "{\"messages\":[" USER("q") ",{\"role\":\"assistant\",\"content\":\"");
    for (int k = 0; k < 2000; k++)
        ith_buf_printf(&row, "one two three %d ", k);
    ith_buf_puts(&row, "\"}]}\n");
    int64_t rows = ((int64_t)48 << 20) / row.len;
    assert_ok(ith_writer_open(&w, path, &err), err);
    for (int64_t i = 0; i < rows; i++)
        assert_ok(ith_writer_write(&w, row.data, row.len, &err), err);
    assert_ok(ith_writer_commit(&w, &err), err);
    ith_buf_deinit(&row);
    pid_t child = fork();
    if (child == 0) {
        rlim_t most = (rlim_t)(data_bytes() + ((int64_t)32 << 20));
        struct rlimit limit = {most, most};
        setrlimit(RLIMIT_DATA, &limit);
        ith_samples_options o = options_of(path);
        ith_samples *s = NULL;
        o.cache_dir = dir;
        o.cutoff_len = 100000;
        ith_status status = ith_samples_open(&s, &o, &err);
        if (status != ITH_OK)
            fprintf(stderr, "%s\n", err.text);
        _exit(status == ITH_OK && ith_samples_count(s) == rows ? 0 : 1);
    }
    int result = 1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_int_equal(result, 0);
    int64_t size = 0;
    ith_names names = {0};
    assert_ok(ith_list_dir(dir, &names, &err), err);
    char file[1400];
    snprintf(file, sizeof file, "%s/%s", dir, names.names[0]);
    ith_names_free(&names);
    assert_ok(ith_file_stat(file, &size, NULL, &err), err);
    assert_true(size > (int64_t)40 << 20);
}

/* ---- extra: real files ----------------------------------------------------------------------- */

/* Opens a shared data set with the shared tokenizer and its template. */
static ith_samples *open_shared(const char *name, ith_tokenizer **t, ith_chat **c,
                                ith_samples_options o)
{
    char dir[4096], path[4096];
    snprintf(dir, sizeof dir, "%s", shared_path("data/qwen3-tokenizer"));
    snprintf(path, sizeof path, "%s", name[0] == '/' ? name : shared_path(name));
    if (!*t) {
        assert_ok(ith_tokenizer_open(t, dir, &err), err);
        assert_ok(ith_chat_open(c, dir, NULL, *t, &err), err);
    }
    o.path = path;
    o.tokenizer = *t;
    o.chat = *c;
    return open_samples(o);
}

/* All ids of a rendered data set, as the digest of little-endian 32-bit numbers that an independent
 * implementation gave. */
static void test_shared_alpaca_digest(void **state)
{
    (void)state;
    ith_tokenizer *t = NULL;
    ith_chat *c = NULL;
    char info[5000], path[2048], digest[65];
    snprintf(info, sizeof info, "a: {path: %s, converter: alpaca, separator: \"\\n\"}\n",
             shared_path("data/llamafactory/alpaca_en_demo.json"));
    snprintf(path, sizeof path, "%s", put("alpaca.yaml", info));
    char absolute[PATH_MAX];
    assert_non_null(realpath(path, absolute));
    ith_samples *s = open_shared(absolute, &t, &c, (ith_samples_options){.cutoff_len = 100000});
    assert_int_equal(ith_samples_count(s), 999);
    assert_int_equal(ith_samples_num_tokens(s), 177215);
    ith_sample first = ith_samples_get(s, 0);
    const int32_t head[] = {151644, 872, 198, 74785, 264, 1882, 315, 3259, 1884, 20352, 13, 151645};
    assert_int_equal(first.num_tokens, 408);
    assert_memory_equal(first.ids, head, sizeof head);
    ith_sha256 h;
    ith_sha256_init(&h);
    for (int64_t i = 0; i < 999; i++) {
        ith_sample sample = ith_samples_get(s, i);
        ith_sha256_update(&h, sample.ids, sample.num_tokens * 4);
    }
    ith_sha256_hex(&h, digest);
    assert_memory_equal(digest, "3d2a605c3c8c494783556c842c43f80d", 32);
    ith_samples_close(s);
    ith_chat_close(c);
    ith_tokenizer_close(t);
}

/* Every file that fine-tuning can use makes samples without a drop. */
static void test_shared_files_make_samples(void **state)
{
    (void)state;
    static const char *const names[] = {
        "alpaca_en_demo.json", "alpaca_zh_demo.json",           "identity.json",
        "v1_sft_demo.jsonl",   "reason_tool_use_demo_50.jsonl", "glaive_toolcall_en_demo.json",
        "v1_sft_demo.yaml"};
    ith_tokenizer *t = NULL;
    ith_chat *c = NULL;
    ith_pool *pool = NULL;
    assert_ok(ith_pool_create(&pool, 2, &err), err);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        for (int all = 0; all < 2; all++) {
            char name[200];
            snprintf(name, sizeof name, "data/llamafactory/%s", names[i]);
            ith_samples *s = open_shared(
                name, &t, &c,
                (ith_samples_options){.cutoff_len = 100000, .pool = pool, .all_turns = all});
            ith_buf report = {0};
            ith_samples_drop_report(s, &report);
            if (report.len)
                fail_msg("%s: %s", names[i], report.data);
            print_message("%s, %s: %lld samples, %lld tokens, %lld trained\n", names[i],
                          all ? "all turns" : "last turn", (long long)ith_samples_count(s),
                          (long long)ith_samples_num_tokens(s),
                          (long long)ith_samples_num_labels(s));
            ith_buf_deinit(&report);
            ith_samples_close(s);
        }
    }
    ith_pool_destroy(pool);
    ith_chat_close(c);
    ith_tokenizer_close(t);
}

static int setup(void **state)
{
    (void)state;
    static const char text[] = "user assistant system word one two three four five six seven eight "
                               "nine ten yes no ok and more count 0123456789 word word one one two "
                               "two three three";
    const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    snprintf(root, sizeof root, "%s", temp_dir("samples"));
    snprintf(model_dir, sizeof model_dir, "%s/model", root);
    if (ith_make_dirs(model_dir, &err) != ITH_OK ||
        ith_bpe_train(text, (int64_t)strlen(text), 320, special, 3, model_dir, &err) != ITH_OK ||
        ith_tokenizer_open(&tokenizer, model_dir, &err) != ITH_OK ||
        ith_chat_open(&chat, model_dir, chatml, tokenizer, &err) != ITH_OK) {
        print_error("%s\n", err.text);
        return 1;
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ith_chat_close(chat);
    ith_tokenizer_close(tokenizer);
    return ith_remove_tree(root, &err) == ITH_OK ? 0 : 1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_masks_of_the_data_are_known),
        cmocka_unit_test(test_answer_is_trained_to_its_end),
        cmocka_unit_test(test_message_weights_reach_the_tokens),
        cmocka_unit_test(test_null_fields_change_nothing),
        cmocka_unit_test(test_rows_of_ids_keep_their_steps),
        cmocka_unit_test(test_noise_of_a_trajectory_is_a_pair_of_its_states),
        cmocka_unit_test(test_samples_without_trainable_tokens_are_counted),
        cmocka_unit_test(test_long_samples_keep_their_head),
        cmocka_unit_test(test_rows_that_cannot_be_rendered_are_counted),
        cmocka_unit_test(test_drawn_twice_is_stored_once),
        cmocka_unit_test(test_cache_gives_back_what_was_made),
        cmocka_unit_test(test_cache_key_follows_everything_that_matters),
        cmocka_unit_test(test_damaged_cache_is_made_anew),
        cmocka_unit_test(test_result_does_not_depend_on_threads),
        cmocka_unit_test(test_split_keeps_conversations_together),
        cmocka_unit_test(test_faults_leave_no_half_cache),
        cmocka_unit_test(test_file_larger_than_memory),
        cmocka_unit_test(test_shared_alpaca_digest),
        cmocka_unit_test(test_shared_files_make_samples),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
