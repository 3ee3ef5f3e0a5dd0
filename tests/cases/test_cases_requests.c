/* Requests that are wrong: one line with the place, what was found and what would be right, exit 2
 * for the request and 1 for the run, and nothing half written. */
#include "cases.h"

static int setup(void **state)
{
    (void)state;
    static const char *const keep[][2] = {{"bare", ""},
                                          {"no_tokenizer", "config.json model.safetensors"},
                                          {"no_weights", "config.json tokenizer.json"},
                                          {"pointer", "config.json tokenizer.json"},
                                          {"cut", "config.json tokenizer.json"}};
    ith_error err = {0};
    case_setup("cases_requests");
    for (size_t i = 0; i < sizeof keep / sizeof *keep; i++) {
        char names[200];
        snprintf(names, sizeof names, "%s", keep[i][1]);
        assert_ok(ith_make_dirs(small_join(case_root, keep[i][0]), &err), err);
        for (char *name, *rest = names; (name = strsep(&rest, " ")) && *name;) {
            const char *from = small_join(small_join(case_root, "model"), name);
            const char *to = small_join(small_join(case_root, keep[i][0]), name);
            assert_ok(ith_copy_file(from, to, &err), err);
        }
    }
    small_shape shape = small_dense; /* an embedding of fewer rows than the tokenizer has tokens */
    shape.vocab = 299;
    small_make_model(small_join(case_root, "narrow"), &shape, &(small_layout){.dtype = ITH_BF16});
    case_write("ids.jsonl", "{\"input_ids\":[1,319],\"prompt_lengths\":1}\n{\"input_ids\":[1,320],"
                            "\"prompt_lengths\":1}\n");
    case_write("pointer/model.safetensors",
               "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n");
    case_write("cut/model.safetensors", "\x10\x20");
    case_write("empty.yaml", "");
    case_write("text.txt", small_text);
    case_write("empty.jsonl", "");
    assert_ok(ith_write_file(small_join(case_root, "bytes.yaml"), "\x80\x00\x13", 3, &err), err);
    assert_ok(ith_write_file(small_join(case_root, "bytes.jsonl"), "\x80\x00\x13", 3, &err), err);
    return 0;
}

typedef struct {
    const char *line;
    int code;
    const char *message;
} request;

#define GET(dir)                                                                                   \
    " is not a directory here (download the model first, e.g. with `hf download " dir              \
    " --local-dir DIR`, and give DIR"
#define DOWNLOAD(dir) GET(dir) ")"
#define NO_DIR " is not a directory (give one with config.json, tokenizer and *.safetensors"

static const request requests[] = {
    /* the configuration as a file */
    {"train @/none.yaml", 2, "@/none.yaml: no such file (give a YAML or JSON file)"},
    {"train @/model", 2, "@/model: found a directory (give a YAML or JSON file)"},
    {"train @/bytes.yaml", 2,
     "@/bytes.yaml: byte 0: invalid leading UTF-8 octet (YAML and JSON are UTF-8 text)"},
    {"train @/empty.yaml model=@/model", 2,
     "@/empty.yaml: train_dataset: not given; nothing to train on (give a .jsonl, .json or "
     "data-set "
     ".yaml)"},
    {"train @/c.yaml @/c.yaml", 2, "'@/c.yaml': not key=value"},
    /* the model */
    {"train @/c.yaml model=@/none", 2, "command line: model: @/none" NO_DIR ")"},
    {"train @/c.yaml model=@/data.jsonl", 2, "command line: model: @/data.jsonl" NO_DIR ")"},
    {"train @/c.yaml model=Maker/Model-1B", 2,
     "command line: model: Maker/Model-1B" DOWNLOAD("Maker/Model-1B")},
    {"train @/c.yaml model=@/bare", 2, "@/bare: no config.json (is it a model directory?)"},
    {"train @/c.yaml model=@/no_tokenizer", 2,
     "@/no_tokenizer: no tokenizer (tokenizer.json, or vocab.json with merges.txt)"},
    {"train @/c.yaml model=@/no_weights", 2,
     "@/no_weights: no weights (model.safetensors, or shards with model.safetensors.index.json)"},
    {"train @/c.yaml model=@/pointer", 1,
     "@/pointer/model.safetensors: not a safetensors file (Git LFS pointer: fetch the file itself "
     "with git lfs pull)"},
    {"train @/c.yaml model=@/cut", 1,
     "@/cut/model.safetensors: 2 bytes are too few for a safetensors file (truncated?)"},
    {"train @/c.yaml model=@/narrow", 1,
     "@/narrow: the tokenizer has ids up to 299, vocab_size of config.json is 299"},
    {"train @/c.yaml train_dataset=@/ids.jsonl", 1,
     "@/ids.jsonl: token id 320, vocab_size of config.json is 320"},
    {"data @/c.yaml model=@/none", 2, "command line: model: @/none" NO_DIR ")"},
    {"plan -n 16 model=@/none", 2,
     "command line: model: @/none" NO_DIR ", or --size with a published shape)"},
    {"plan --longest", 2,
     "command line: model: not given; Qwen/Qwen3-4B-Instruct-2507" GET(
         "Qwen/Qwen3-4B-Instruct-2507") ", or --size with a published shape)"},
    {"generate @/none --prompt x", 2, "@/none: no such directory (give a model directory)"},
    {"generate @/c.yaml --prompt x", 2, "@/c.yaml: found a file (give a model directory)"},
    {"tokenize @/none x", 2, "@/none: no such directory (give a model directory)"},
    {"render @/none @/data.jsonl", 2, "@/none: no such directory (give a model directory)"},
    {"export @/none @/copy", 2, "@/none: no such directory (give a model directory)"},
    {"export @/no_weights @/copy", 2,
     "@/no_weights: no weights (model.safetensors, or shards with model.safetensors.index.json)"},
    {"export @/model @/model/../model", 2,
     "@/model/../model is the directory the model was read from: write to another one"},
    {"export @/model @/data.jsonl", 1, "@/data.jsonl: is there, and is no directory"},
    /* the data */
    {"train @/c.yaml train_dataset=@/none.jsonl", 2,
     "@/none.jsonl: no such file or folder; data sets are not fetched from a hub: download it "
     "first "
     "and give its path"},
    {"train @/c.yaml train_dataset=@/empty.jsonl", 1, "@/empty.jsonl: no row in it"},
    {"train @/c.yaml train_dataset=@/bytes.jsonl", 1,
     "@/bytes.jsonl:1:2: row 1: a NUL byte is not JSON"},
    {"train @/c.yaml train_dataset=@/bare", 2, "@/bare: the folder is empty"},
    /* the output */
    {"train @/c.yaml output_dir=@/model/", 2,
     "command line: output_dir: found @/model/, the directory of the model (give another one)"},
    {"train @/c.yaml output_dir=@/data.jsonl", 2,
     "command line: output_dir: found @/data.jsonl, which is no directory"},
    {"train @/c.yaml output_dir=@/data.jsonl/x/y", 2,
     "command line: output_dir: found @/data.jsonl/x/y, cannot write in @/data.jsonl (Permission "
     "denied)"},
    {"train @/c.yaml custom_chat_template=@/none.jinja", 2,
     "chat template: found @/none.jinja, no such file (give a file, or Jinja text)"},
    {"train @/c.yaml resume_from_checkpoint=@/none", 2,
     "command line: resume_from_checkpoint: found @/none, which is no directory (give a "
     "checkpoint, "
     "or auto)"},
    /* numbers */
    {"train @/c.yaml cutoff_len=1", 2,
     "command line: cutoff_len: found 1 (use an integer from 2 to 2147483646)"},
    {"train @/c.yaml cutoff_len=99999999999999999999", 2,
     "command line: cutoff_len: found 99999999999999999999 (use an integer from 2 to 2147483646)"},
    {"train @/c.yaml micro_batch_size=-3", 2,
     "command line: micro_batch_size: found -3 (use an integer from 1 to 2147483647)"},
    {"train @/c.yaml micro_batch_size=2000000000", 2,
     "cutoff_len 256 x micro_batch_size 2000000000 is more than 2^31 tokens in one micro-batch"},
    {"train @/c.yaml num_train_epochs=2000000", 2,
     "command line: num_train_epochs: found 2000000 (use an integer from 1 to 1000000)"},
    {"train @/c.yaml learning_rate=.inf", 2,
     "command line: learning_rate: found .inf (use a number >= 0)"},
    {"train @/c.yaml learning_rate=1e-5x", 2,
     "command line: learning_rate: found text '1e-5x' (use a number >= 0)"},
    {"train @/c.yaml max_steps=0", 2,
     "command line: max_steps: found 0 (use 1 or more, -1 or null)"},
    {"train @/c.yaml chunk_loss_size=0", 2,
     "command line: chunk_loss_size: found 0 (use an integer >= 1, or null)"},
    {"train @/c.yaml chunk_loss_size=-1", 2,
     "command line: chunk_loss_size: found -1 (use an integer >= 1, or null)"},
    {"train @/c.yaml lerning_rate=1", 2,
     "command line: lerning_rate: unknown key (did you mean learning_rate?)"},
    /* a new model directory */
    {"init @/new --learn @/text.txt hidden_sise=8", 2,
     "init: hidden_sise: unknown key (did you mean hidden_size?)"},
    {"init @/new --learn @/text.txt hidden_size", 2, "init: hidden_size is not key=value"},
    {"init @/new --learn @/text.txt --vocab-size 300 vocab_size=100", 2,
     "init: vocab_size: found 100, the tokenizer has 300 tokens"},
    {"init @/new --learn @/text.txt num_hidden_layers=-3", 1,
     "config.json: num_hidden_layers: -3 is outside 1 .. 1024"},
    {"init @/new --learn @/none.txt", 1, "@/none.txt: cannot open: No such file or directory"},
    {"init @/new --tokenizer @/none", 2, "@/none: no such directory (give a model directory)"},
    {"init @/new", 2,
     "init: give either --tokenizer DIR (copied) or --learn TEXT_FILE (a new one is learned)"},
    {"init @/model --learn @/text.txt", 2, "init: @/model is not empty (--force writes into it)"},
    {"init @/text.txt --learn @/text.txt", 1, "@/text.txt: is there, and is no directory"},
    /* other commands */
    {"tokenize @/model --decode 5~x~7", 2, "tokenize: found 'x', expected token ids"},
    {"tokenize @/model --decode -- -1", 2, "tokenize: found '-1', expected token ids"},
    {"tokenize @/model --decode 5000", 2, "tokenize: id 5000 is not below 300"},
    {"render @/model @/empty.jsonl", 1, "@/empty.jsonl: empty, expected JSON"},
    {"generate @/model @/empty.jsonl", 1, "@/empty.jsonl: no prompt in it"},
    {"generate @/model", 2, "generate: give either a file of prompts or --prompt TEXT"},
    {"generate @/model --prompt x --max-new-tokens 0", 2,
     "generate: --max-new-tokens: found '0' (use an integer from 1 to 1000000000)"},
};

static void test_wrong_requests_are_exact_lines(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++)
        case_expect(requests[i].line, requests[i].code, requests[i].message);
    assert_false(ith_path_exists(small_join(case_root, "out")));
    assert_false(ith_path_exists(small_join(case_root, "copy")));
    assert_false(ith_path_exists(small_join(case_root, "new")));
    assert_true(ith_path_exists(small_join(case_root, "text.txt")));
}

/* Paths are bytes: blanks, other alphabets, links. */
static void test_paths_of_any_kind(void **state)
{
    (void)state;
    ith_error err = {0};
    static const char dir[] = "\xce\xb9\xce\xb8\xce\xac\xce\xba\xce\xb7 \xe5\xb2\x9b";
    char to[4300];
    snprintf(to, sizeof to, "%s/%s", case_root, dir);
    assert_ok(ith_make_dirs(to, &err), err);
    snprintf(to, sizeof to, "%s/%s/link", case_root, dir);
    assert_int_equal(symlink("../model", to), 0);
    snprintf(to, sizeof to, "%s/%s/c link.yaml", case_root, dir);
    assert_int_equal(symlink("../c.yaml", to), 0);
    char *config = case_text("@/"), words[3][4400];
    snprintf(words[0], sizeof words[0], "%s%s/c link.yaml", config, dir);
    snprintf(words[1], sizeof words[1], "model=%s%s/link", config, dir);
    snprintf(words[2], sizeof words[2], "output_dir=%s%s/out", config, dir);
    const char *const args[] = {"train", words[0], words[1], words[2], NULL};
    program_run run = run_program(args, NULL);
    if (run.code != 0)
        fail_msg("exit %d: %s", run.code, run.err.data);
    snprintf(to, sizeof to, "%s/%s/out/model.safetensors", case_root, dir);
    assert_true(ith_path_exists(to));
    program_run_deinit(&run);
    ith_free(config);
}

/* A small rate is told as it is, not as 0.0000. */
static void test_small_rate_is_shown(void **state)
{
    (void)state;
    case_expect("train @/c.yaml learning_rate=2.5e-7 output_dir=@/slow", 0, "  lr 2.50e-07  ");
}

/* A batch larger than the data, and one row of data, are no mistakes. */
static void test_small_data_still_makes_steps(void **state)
{
    (void)state;
    case_expect("train @/c.yaml micro_batch_size=1000 output_dir=@/large", 0, "2 steps, loss ");
    case_write("one.jsonl", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":"
                            "\"assistant\",\"content\":\"b\"}]}");
    case_expect("train @/c.yaml train_dataset=@/one.jsonl output_dir=@/one", 0, "2 steps, loss ");
    case_expect("train @/c.yaml train_dataset=@/one.jsonl num_train_epochs=1 max_steps=null "
                "global_batch_size=8 output_dir=@/partial",
                0, "1 step, loss ");
}

/* The log says whose template made the samples. */
static void test_the_template_in_use_is_told(void **state)
{
    (void)state;
    case_expect("train @/c.yaml output_dir=@/own", 0, "chat template: @/model/chat_template.jinja");
    case_expect("train @/c.yaml output_dir=@/custom "
                "custom_chat_template=\"{%~for~m~in~messages~%}{{~m.role~}}:{{~m.content~}};"
                "{%~endfor~%}{%~if~add_generation_prompt~%}assistant:{%~endif~%}\"",
                0, "chat template: custom_chat_template");
}

/* The log says which kernels compute (cases S112): a run on slow ones is not a riddle. */
static void test_the_kernels_in_use_are_told(void **state)
{
    (void)state;
    char expected[200];
    snprintf(expected, sizeof expected, "kernels: cpu %s, 2 threads", ith_backend_cpu_name());
    case_expect("train @/c.yaml output_dir=@/told", 0, expected);
}

/* Checkpoints that another run left are told: auto would take them. */
static void test_checkpoints_of_an_earlier_run_are_told(void **state)
{
    (void)state;
    case_expect("train @/c.yaml output_dir=@/twice save_steps=2", 0, "2 steps, loss ");
    case_expect("train @/c.yaml output_dir=@/twice", 0,
                "@/twice/checkpoint-2 is of an earlier run; this one begins anew beside it");
    program_run run =
        case_run("train @/c.yaml output_dir=@/twice max_steps=3 resume_from_checkpoint=auto");
    if (run.code != 0 || case_count(&run.err, "earlier run") != 0)
        fail_msg("exit %d: %s", run.code, run.err.data);
    program_run_deinit(&run);
}

/* Batches of prompts of different lengths, the last one smaller: memory planned for the longest
 * serves all of them. */
static void test_prompts_of_different_lengths_in_batches(void **state)
{
    (void)state;
    ith_buf text = {0};
    for (int i = 0; i < 21; i++)
        ith_buf_printf(&text, "%.*s\n", 1 + i * 37 % 150, small_text);
    case_write("prompts.txt", text.data);
    ith_buf_deinit(&text);
    program_run run = case_run("generate @/model @/prompts.txt --max-new-tokens 3 --threads 2");
    if (run.code != 0 || case_count(&run.out, "\"finish_reason\"") != 21)
        fail_msg("exit %d, %d answers: %s", run.code, case_count(&run.out, "\"finish_reason\""),
                 run.err.data);
    program_run_deinit(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_requests_are_exact_lines),
        cmocka_unit_test(test_paths_of_any_kind),
        cmocka_unit_test(test_small_rate_is_shown),
        cmocka_unit_test(test_small_data_still_makes_steps),
        cmocka_unit_test(test_the_template_in_use_is_told),
        cmocka_unit_test(test_the_kernels_in_use_are_told),
        cmocka_unit_test(test_checkpoints_of_an_earlier_run_are_told),
        cmocka_unit_test(test_prompts_of_different_lengths_in_batches),
    };
    return cmocka_run_group_tests(tests, setup, case_teardown);
}
