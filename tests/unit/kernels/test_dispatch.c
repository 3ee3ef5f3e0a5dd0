/* test_dispatch.c - what the dispatcher does around an operator. */
#include "testing.h"

#include "kernels/backend.h"
#include "kernels/ops.h"

static ith_error err;
static const ith_device *current; /* what CUDA calls the current device */

static void use(ith_device *d)
{
    current = d;
}

static ith_status must_be_current(ith_ctx *ctx, ith_tensor y, ith_tensor ids, ith_tensor w)
{
    (void)y, (void)ids, (void)w;
    assert_ptr_equal(current, ctx->device);
    return ITH_OK;
}

/* Goal: of two devices in one process each gets its own operators. Method: devices that note which
 * one was chosen last, used in turn. */
static void test_operator_two_devices_each_is_chosen(void **state)
{
    (void)state;
    ith_backend table = *ith_backend_ref();
    ith_device devices[2] = {*ith_device_cpu(), *ith_device_cpu()};
    ith_ctx ctx[2];
    float y[2] = {0}, w[2] = {1, 2};
    int32_t id = 0;
    table.embedding_forward.run = must_be_current;
    for (int i = 0; i < 2; i++) {
        devices[i].use = use;
        ctx[i] = ith_ctx_host(&table, NULL, &err);
        ctx[i].device = &devices[i];
    }
    for (int i = 0; i < 4; i++)
        assert_ok(ith_embedding_forward(&ctx[i % 2], ith_tensor_2d(y, ITH_F32, 1, 2),
                                        ith_tensor_1d(&id, ITH_I32, 1),
                                        ith_tensor_2d(w, ITH_F32, 1, 2)),
                  err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_operator_two_devices_each_is_chosen)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
