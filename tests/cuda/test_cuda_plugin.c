/* test_cuda_plugin.c - the plug-in on a machine that may have no GPU: loading, the table, counting,
 * the attention graphs. */
#include "testing.h"

#include "base/plugin.h"
#include "kernels/cuda/cuda_api.h"
#include "kernels/cuda_plugin.h"

#include <dlfcn.h>

static ith_error err;

/* Goal: a missing or wrong file is one clear line. Runs first, before the plug-in is loaded. */
static void test_open_missing_plugin_names_the_file(void **state)
{
    (void)state;
    ith_ctx ctx = {.err = &err};
    setenv("ITH_CUDA_PLUGIN", "/nowhere/libithaca_cuda.so", 1);
    assert_fails(ith_ctx_open_cuda(&ctx, 0, true), err, ITH_ERR_UNSUPPORTED,
                 "plug-in /nowhere/libithaca_cuda.so: ");
    assert_null(strchr(err.text, '\n'));
    void *handle = NULL;
    assert_fails(ith_plugin_open(&handle, "libithaca_absent.so", NULL, &err), err,
                 ITH_ERR_UNSUPPORTED, "libithaca_absent.so is not here (looked for /");
    assert_null(handle);
}

/* Goal: every operator has a CUDA function, but for parts of attention (rings). Method: the entries
 * are pairs of pointers, run first. */
static void test_open_counting_table_is_complete(void **state)
{
    (void)state;
    ith_ctx ctx = {.err = &err};
    setenv("ITH_CUDA_PLUGIN", ITH_TEST_CUDA_PLUGIN, 1);
    assert_ok(ith_ctx_open_cuda(&ctx, 0, true), err);
    assert_string_equal(ctx.backend->name, "cuda");
    assert_string_equal(ctx.device->name, "cuda:0");
    const size_t rings = (offsetof(ith_backend, attention_merge) - sizeof(char *)) / sizeof(void *);
    const void *entries[(sizeof(ith_backend) - sizeof(char *)) / sizeof(void *)];
    memcpy(entries, (const char *)ctx.backend + sizeof(char *), sizeof entries);
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i += 2)
        if (!entries[i] && i != rings)
            fail_msg("entry %zu of the table has no function", i / 2);
    void *memory = NULL;
    assert_fails(ctx.device->alloc(ctx.device, 10, &memory, &err), err, ITH_ERR_UNSUPPORTED,
                 "cuda:0 was opened for counting only (10 bytes wanted)");
    ith_ctx_close_cuda(&ctx);
    assert_null(ctx.state);
}

/* Goal: a step can be counted without a driver, and scratch is what the operators say. */
static void test_counting_attention_counts_workspace(void **state)
{
    (void)state;
    ith_ctx ctx = {.err = &err};
    ith_plan *plan = NULL;
    int32_t cu[] = {0, 300, 1000};
    assert_ok(ith_ctx_open_cuda(&ctx, 0, true), err);
    assert_ok(ith_plan_create(&plan, ctx.device, &err), err);
    ctx.plan = plan;
    ith_tensor qkv, o, lse, docs;
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "qkv", ITH_BF16, 2, 1000, 4096, 1, 1, &qkv),
              err);
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "o", ITH_BF16, 3, 1000, 16, 128, 1, &o), err);
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "lse", ITH_F32, 2, 1000, 16, 1, 1, &lse),
              err);
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "cu", ITH_I32, 1, 3, 1, 1, 1, &docs), err);
    ith_seqs seqs = {.cu_seqlens = docs, .cu_host = cu, .num_docs = 2, .max_len = 700};
    ith_tensor q = ith_split_heads(ith_col_range(qkv, 0, 2048), 16);
    ith_tensor k = ith_split_heads(ith_col_range(qkv, 2048, 3072), 8);
    ith_tensor v = ith_split_heads(ith_col_range(qkv, 3072, 4096), 8);
    assert_ok(ith_attention_forward(&ctx, o, lse, q, k, v, seqs, 0.1f, true), err);
    int64_t forward = ith_plan_peak(plan, ITH_MEM_WORKSPACE);
    assert_ok(ith_attention_backward(&ctx, q, k, v, o, q, k, v, o, lse, seqs, 0.1f, true), err);
    int64_t backward = ith_plan_peak(plan, ITH_MEM_WORKSPACE);
    /* sums of dq, lse and delta, and dk and dv from the two blocks that share a kv head */
    int64_t least = 1000 * 16 * 4 * (128 + 2) + 2 * 1000 * 8 * 128 * 4 * 2;
    if (forward != 0 || backward < least || backward > least + least / 16)
        fail_msg("forward %lld, backward %lld bytes; expected none, and little more than %lld",
                 (long long)forward, (long long)backward, (long long)least);
    ith_plan_destroy(plan);
    ith_ctx_close_cuda(&ctx);
}

/* Scratch of the delta rule for one document of T tokens, 4 key and 8 value heads of 128. */
static int64_t delta_scratch(ith_dtype dtype, int64_t tokens, bool backward)
{
    ith_ctx ctx = {.err = &err};
    ith_plan *plan = NULL;
    assert_ok(ith_ctx_open_cuda(&ctx, 0, true), err);
    assert_ok(ith_plan_create(&plan, ctx.device, &err), err);
    ctx.plan = plan;
    ith_tensor qkv, o, gates, docs, none = ith_tensor_none();
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "qkv", dtype, 2, tokens, 2048, 1, 1, &qkv),
              err);
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "o", dtype, 3, tokens, 8, 128, 1, &o), err);
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "g", ITH_F32, 2, tokens, 8, 1, 1, &gates),
              err);
    assert_ok(ith_ctx_push(&ctx, ITH_MEM_ACTIVATIONS, "cu", ITH_I32, 1, 2, 1, 1, 1, &docs), err);
    ith_seqs seqs = {.cu_seqlens = docs, .num_docs = 1, .max_len = tokens}; /* no borders yet */
    ith_tensor q = ith_split_heads(ith_col_range(qkv, 0, 512), 4);
    ith_tensor k = ith_split_heads(ith_col_range(qkv, 512, 1024), 4);
    ith_tensor v = ith_split_heads(ith_col_range(qkv, 1024, 2048), 8);
    if (backward)
        assert_ok(ith_gated_delta_rule_backward(&ctx, q, k, v, gates, gates, none, o, q, k, v,
                                                gates, gates, none, seqs, 0.1f),
                  err);
    else
        assert_ok(ith_gated_delta_rule_forward(&ctx, o, q, k, v, gates, gates, none, seqs, 0.1f),
                  err);
    int64_t bytes = ith_plan_peak(plan, ITH_MEM_WORKSPACE);
    ith_plan_destroy(plan);
    ith_ctx_close_cuda(&ctx);
    return bytes;
}

/* Goal: scratch of the delta rule is planned without borders of documents and does not grow with
 * their length, but for tables and a state for every 16384 tokens. */
static void test_counting_delta_rule_bounds_workspace(void **state)
{
    (void)state;
    int64_t cells = 256 * 8, tables = 1 << 20, state_bytes = 8 * 128 * 128 * 4;
    int64_t forward = delta_scratch(ITH_BF16, 1 << 14, false);
    int64_t backward = delta_scratch(ITH_BF16, 1 << 14, true);
    if (forward < cells * 2 * 64 * 64 * 2 || backward < forward + cells * 2 * 128 * 128 * 2)
        fail_msg("forward %lld, backward %lld bytes", (long long)forward, (long long)backward);
    assert_true(delta_scratch(ITH_BF16, 1 << 20, false) < forward + tables);
    assert_true(delta_scratch(ITH_BF16, 1 << 20, true) < backward + tables + 64 * state_bytes);
    assert_true(delta_scratch(ITH_F32, 1 << 14, true) > backward + backward / 2);
}

/* Goal: NCCL is found and has all functions that exchanges between GPUs call, or the text says what
 * is missing; a device that only counts names the ways, for the plan. */
static void test_describe_tells_of_nccl(void **state)
{
    (void)state;
    ith_buf text = {0};
    ith_ctx ctx = {.err = &err};
    assert_ok(ith_ctx_open_cuda(&ctx, 0, true), err);
    assert_non_null(ctx.device->links);
    assert_string_equal(ctx.device->links->ways[0]->name, "peer");
    assert_string_equal(ctx.device->links->ways[1]->name, "nccl");
    assert_true(ctx.device->links->ways[1]->overhead_bytes > 0);
    ith_ctx_close_cuda(&ctx);
    ith_error_clear(&err);
    ith_status status = ith_cuda_env_text(&text, &err);
    if (status != ITH_OK && strstr(err.text, "is not here")) {
        ith_buf_deinit(&text);
        print_message("[   SKIP   ] %s\n", err.text);
        skip();
    }
    assert_ok(status, err);
    const char *line = strstr(text.data, "\nNCCL");
    if (!line || (strncmp(line, "\nNCCL 2.", 8) != 0 && !strstr(line, "libnccl.so.2 is not here")))
        fail_msg("NCCL is not told of in:\n%s", text.data);
    ith_buf_deinit(&text);
}

/* Goal: every attention graph we ship finds an engine for an H200 that compiles. */
static void test_attention_graphs_find_engines(void **state)
{
    (void)state;
    ith_status (*check)(ith_buf * out, ith_error * err) = NULL;
    ith_buf lines = {0};
    void *handle = NULL;
    if (!dlopen("libcuda.so.1", RTLD_NOW)) {
        print_message("[   SKIP   ] no driver library here, not even the toolkit's stub\n");
        skip();
    }
    assert_ok(ith_plugin_open(&handle, "", ITH_TEST_CUDA_PLUGIN, &err), err);
    assert_ok(ith_plugin_symbol(handle, "ith_cuda_check_graphs", &check, &err), err);
    ith_error_clear(&err);
    ith_status status = check(&lines, &err);
    if (lines.data)
        print_message("%s", lines.data);
    ith_buf_deinit(&lines);
    if (status != ITH_OK && strstr(err.text, "is not here")) {
        print_message("[   SKIP   ] %s\n", err.text);
        skip();
    }
    if (status != ITH_OK)
        fail_msg("%s", err.text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_missing_plugin_names_the_file),
        cmocka_unit_test(test_open_counting_table_is_complete),
        cmocka_unit_test(test_counting_attention_counts_workspace),
        cmocka_unit_test(test_counting_delta_rule_bounds_workspace),
        cmocka_unit_test(test_describe_tells_of_nccl),
        cmocka_unit_test(test_attention_graphs_find_engines),
    };
    return cmocka_run_group_tests_name("cuda_plugin", tests, NULL, NULL);
}
