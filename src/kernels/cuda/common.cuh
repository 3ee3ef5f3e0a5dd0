/* common.cuh - device helpers: types, 16-byte vectors, sums in a fixed order. */
#ifndef ITH_KERNELS_CUDA_COMMON_CUH
#define ITH_KERNELS_CUDA_COMMON_CUH

#include "kernels/cuda/cuda_internal.h"

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float to_f32(float x)
{
    return x;
}

__device__ __forceinline__ float to_f32(bf16 x)
{
    return __bfloat162float(x);
}

template <typename T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* x rounded to T, as f32. */
template <typename T> __device__ __forceinline__ float round_to(float x)
{
    return to_f32(from_f32<T>(x));
}

/* N elements read or written at once. */
template <typename T, int N> struct alignas(sizeof(T) * N) vec {
    T v[N];
};

/* Elements in 16 bytes. */
template <typename T> constexpr int WIDE = 16 / (int)sizeof(T);

template <typename T, int N>
__device__ __forceinline__ void load_f32(float (&out)[N], const T *__restrict__ src)
{
    vec<T, N> x = *reinterpret_cast<const vec<T, N> *>(src);
#pragma unroll
    for (int i = 0; i < N; i++)
        out[i] = to_f32(x.v[i]);
}

/* The same for memory that the kernel also writes. */
template <typename T, int N> __device__ __forceinline__ void load_any(float (&out)[N], const T *src)
{
    vec<T, N> x = *reinterpret_cast<const vec<T, N> *>(src);
#pragma unroll
    for (int i = 0; i < N; i++)
        out[i] = to_f32(x.v[i]);
}

/* f32 to T, nearest even: bf16 two at a time, which is one instruction. */
template <typename T, int N> __device__ __forceinline__ vec<T, N> pack(const float (&in)[N])
{
    vec<T, N> x;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            *reinterpret_cast<__nv_bfloat162 *>(&x.v[i]) = __floats2bfloat162_rn(in[i], in[i + 1]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            x.v[i] = from_f32<T>(in[i]);
    }
    return x;
}

template <typename T, int N> __device__ __forceinline__ void store_f32(T *dst, const float (&in)[N])
{
    *reinterpret_cast<vec<T, N> *>(dst) = pack<T, N>(in);
}

/* All of v rounded to T. */
template <typename T, int N> __device__ __forceinline__ void round_all(float (&v)[N])
{
    vec<T, N> x = pack<T, N>(v);
#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] = to_f32(x.v[i]);
}

/* Copies from memory to shared memory behind the thread's back, in groups: copies_end closes one.
 * A thread sees what it copied itself once the group is waited for. Odd sizes are copied at once.
 */
template <typename V> __device__ __forceinline__ void copy_ahead(V *to, const void *from)
{
    constexpr int BYTES = (int)sizeof(V);
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else if constexpr (BYTES == 8 || BYTES == 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES)
                     : "memory");
    else
        *to = *(const V *)from;
}

__device__ __forceinline__ void copies_end()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* But for the LEFT last groups. */
template <int LEFT = 0> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* Butterfly sum over groups of `width` lanes (a power of two): every lane gets the same bits. */
template <typename S> __device__ __forceinline__ S group_sum(S x, int width)
{
    for (int o = width / 2; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

/* Sum over a block of THREADS threads in a fixed order; all threads get it. */
template <int THREADS, typename S> __device__ __forceinline__ S block_sum(S x)
{
    if (THREADS == 32)
        return group_sum(x, 32);
    __shared__ S part[32];
    x = group_sum(x, 32);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = x;
    __syncthreads();
    S total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++)
        total += part[i];
    __syncthreads();
    return total;
}

static inline bool is_absent(ith_tensor t)
{
    return t.ndim == 0;
}

/* Rows of t start at multiples of `elements` elements in memory aligned so. */
static inline bool rows_aligned(ith_tensor t, int64_t elements)
{
    if (is_absent(t))
        return true;
    bool ok = (uintptr_t)t.data % (size_t)(elements * ith_dtype_bytes(t.dtype)) == 0;
    for (int i = 0; i < t.ndim - 1; i++)
        ok = ok && (t.shape[i] <= 1 || t.stride[i] % elements == 0);
    return ok && t.shape[t.ndim - 1] % elements == 0;
}

static inline unsigned grid_of(int64_t n, int64_t per_block, int64_t most)
{
    int64_t blocks = ith_div_ceil(n, per_block);
    return (unsigned)(blocks > most ? most : (blocks > 0 ? blocks : 1));
}

/* Calls KERNEL<T>... for the two activation types. */
#define ITH_BY_TYPE(dtype, ...)                                                                    \
    do {                                                                                           \
        if ((dtype) == ITH_BF16) {                                                                 \
            typedef bf16 T;                                                                        \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            typedef float T;                                                                       \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

/* LAUNCH(N) for either type: 16 bytes of elements at a time where `wide`, else one. */
#define ITH_BY_WIDTH(dtype, wide, LAUNCH)                                                          \
    ITH_BY_TYPE(dtype, {                                                                           \
        if (wide)                                                                                  \
            LAUNCH(WIDE<T>);                                                                       \
        else                                                                                       \
            LAUNCH(1);                                                                             \
    })

#endif
