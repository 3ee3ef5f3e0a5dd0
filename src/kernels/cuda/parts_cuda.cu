/* parts_cuda.cu - the sum over ranks of what an exchange brought. Bytes: (ranks + 1, or + 2 to add)
 * elements read and written per result. */
#include "kernels/cuda/cuda_internal.h"

#define THREADS 512
#define BLOCKS (8 * ITH_CUDA_SMS)

/* to[i] (+)= sum over r in order of part r: parts[r * stride + i], the own one own[i]. */
template <typename T>
__global__ void add_parts(T *to, const T *own, const T *__restrict__ parts, int64_t stride,
                          int64_t n, int rank, int size, bool add)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        double sum = 0;
        for (int r = 0; r < size; r++)
            sum += (double)(r == rank ? own[i] : parts[r * stride + i]);
        to[i] = add ? to[i] + (T)sum : (T)sum;
    }
}

/* Four f32 at once: everything is a multiple of 16 bytes. */
__global__ void add_parts4(float4 *to, const float4 *own, const float4 *__restrict__ parts,
                           int64_t stride, int64_t n, int rank, int size, bool add)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        float4 mine = own[i], old = add ? to[i] : make_float4(0, 0, 0, 0);
        double sum[4] = {0, 0, 0, 0};
        for (int r = 0; r < size; r++) {
            float4 x = r == rank ? mine : parts[r * stride + i];
            sum[0] += (double)x.x;
            sum[1] += (double)x.y;
            sum[2] += (double)x.z;
            sum[3] += (double)x.w;
        }
        to[i] = make_float4(old.x + (float)sum[0], old.y + (float)sum[1], old.z + (float)sum[2],
                            old.w + (float)sum[3]);
    }
}

template <typename T>
static void launch(cudaStream_t stream, unsigned grid, const ith_cuda_parts *p)
{
    add_parts<T><<<grid, THREADS, 0, stream>>>((T *)p->to, (const T *)p->own, (const T *)p->parts,
                                               p->stride, p->n, p->rank, p->size, p->add);
}

void ith_cuda_add_parts(cudaStream_t stream, const ith_cuda_parts *p)
{
    uintptr_t places = (uintptr_t)p->to | (uintptr_t)p->own | (uintptr_t)p->parts;
    bool fours = !p->wide && places % 16 == 0 && (p->n | p->stride) % 4 == 0;
    int64_t items = fours ? p->n / 4 : p->n, blocks = (items + THREADS - 1) / THREADS;
    unsigned grid = (unsigned)(blocks < BLOCKS ? blocks : BLOCKS);
    if (p->wide)
        launch<double>(stream, grid, p);
    else if (fours)
        add_parts4<<<grid, THREADS, 0, stream>>>((float4 *)p->to, (const float4 *)p->own,
                                                 (const float4 *)p->parts, p->stride / 4, items,
                                                 p->rank, p->size, p->add);
    else
        launch<float>(stream, grid, p);
}
