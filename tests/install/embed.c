/* embed.c - a program that embeds libithaca, built against the installed tree by test_install.sh:
 * it trains a few steps, opens the result and lets it answer. */
#include <ithaca.h>

#include <stdio.h>
#include <string.h>

static int fail(const char *what, const char *found)
{
    fprintf(stderr, "FAILED: %s: %s\n", what, found);
    return 1;
}

static void on_progress(void *arg, const ithaca_progress *p)
{
    int64_t *steps = arg;
    if (!p->is_eval)
        *steps = p->step;
}

typedef struct {
    char text[4096];
    size_t len;
} answer_text;

static bool on_text(void *arg, const char *text, size_t len)
{
    answer_text *a = arg;
    if (a->len + len >= sizeof a->text)
        return false;
    memcpy(a->text + a->len, text, len);
    a->len += len;
    a->text[a->len] = '\0';
    return true;
}

static int train(const char *model, const char *data, const char *out)
{
    char keys[3][1024];
    snprintf(keys[0], sizeof keys[0], "model=%s", model);
    snprintf(keys[1], sizeof keys[1], "train_dataset=%s", data);
    snprintf(keys[2], sizeof keys[2], "output_dir=%s", out);
    const char *overrides[] = {keys[0],       keys[1],          keys[2],
                               "max_steps=3", "cutoff_len=128", "device=cpu"};
    int64_t steps = 0;
    ithaca_train_hooks hooks = {NULL, on_progress, NULL, &steps};
    ithaca_train_result result;
    ithaca_error err;
    if (ithaca_train(NULL, overrides, 6, &hooks, &result, &err) != ITHACA_OK)
        return fail("ithaca_train", err.text);
    printf("%lld steps, loss %.4f to %.4f\n", (long long)result.steps, result.first_loss,
           result.last_loss);
    return result.steps == 3 && steps == 3 ? 0 : fail("steps", "3 were asked for");
}

static int talk(const char *dir)
{
    ithaca_model *model = NULL;
    ithaca_error err;
    ithaca_sampling sampling;
    ithaca_answer got;
    answer_text text = {"", 0};
    ithaca_message question = {"user", "What is ithaca?"};
    if (ithaca_model_open(&model, dir, NULL, &err) != ITHACA_OK)
        return fail("ithaca_model_open", err.text);
    ithaca_sampling_init(model, &sampling);
    sampling.max_new_tokens = 8;
    ithaca_status status = ithaca_chat(model, &question, 1, &sampling, on_text, &text, &got, &err);
    ithaca_model_close(model);
    if (status != ITHACA_OK)
        return fail("ithaca_chat", err.text);
    printf("%lld tokens in, %lld out: %s\n", (long long)got.prompt_tokens,
           (long long)got.new_tokens, text.text);
    return got.new_tokens > 0 && got.new_tokens <= 8 ? 0 : fail("tokens", "1 to 8 were asked for");
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return fail("use", "embed MODEL DATA OUTPUT VERSION");
    if (strcmp(ithaca_version(), argv[4]) != 0)
        return fail("version", ithaca_version());
    return train(argv[1], argv[2], argv[3]) || talk(argv[3]);
}
