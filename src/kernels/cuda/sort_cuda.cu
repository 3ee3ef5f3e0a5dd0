/* sort_cuda.cu - stable counting sort by a small key, without atomics: the order never varies.
 *
 * Each warp owns CHUNK consecutive elements. 1. It counts its keys. 2. One block turns the counts
 * into first places, bucket-major. 3. Each warp walks its elements again, 32 at a time in order; a
 * lane's place is the bucket's next one plus the number of earlier lanes with the same key. */
#include "kernels/cuda/common.cuh"

enum { CHUNK = 512, MAX_BUCKETS = 1024 };

__device__ __forceinline__ uint32_t key_of(const ith_bucket_sort &p, int64_t i)
{
    return ((uint32_t)p.keys[i] >> p.shift) & p.mask;
}

__global__ void count_keys(ith_bucket_sort p, int32_t *__restrict__ counts)
{
    __shared__ int32_t count[MAX_BUCKETS];
    int lane = (int)threadIdx.x;
    for (int b = lane; b < p.num_buckets; b += 32)
        count[b] = 0;
    __syncwarp();
    int64_t begin = (int64_t)blockIdx.x * CHUNK;
    for (int64_t i = begin + lane; i < begin + CHUNK && i < p.n; i += 32)
        atomicAdd(&count[key_of(p, i)], 1); /* integers: any order gives the same count */
    __syncwarp();
    for (int b = lane; b < p.num_buckets; b += 32)
        counts[blockIdx.x * p.num_buckets + b] = count[b];
}

/* counts[chunk][bucket] -> place of the first such element. One block, a thread per bucket. */
__global__ void place_keys(ith_bucket_sort p, int32_t *__restrict__ counts, int64_t chunks)
{
    __shared__ int32_t begin[MAX_BUCKETS];
    int b = (int)threadIdx.x, buckets = (int)p.num_buckets;
    int32_t total = 0;
    if (b < buckets)
        for (int64_t c = 0; c < chunks; c++)
            total += counts[c * buckets + b];
    begin[b] = total;
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step *= 2) { /* inclusive scan */
        int32_t add = b >= step ? begin[b - step] : 0;
        __syncthreads();
        begin[b] += add;
        __syncthreads();
    }
    int32_t next = b > 0 ? begin[b - 1] : 0;
    if (p.bucket_begin && b < buckets) {
        p.bucket_begin[b] = next;
        if (b == buckets - 1)
            p.bucket_begin[buckets] = begin[b];
    }
    if (b < buckets)
        for (int64_t c = 0; c < chunks; c++) {
            int32_t here = counts[c * buckets + b];
            counts[c * buckets + b] = next;
            next += here;
        }
}

__global__ void move_keys(ith_bucket_sort p, const int32_t *__restrict__ places)
{
    __shared__ int32_t next[MAX_BUCKETS];
    int lane = (int)threadIdx.x;
    for (int b = lane; b < p.num_buckets; b += 32)
        next[b] = places[blockIdx.x * p.num_buckets + b];
    __syncwarp();
    int64_t begin = (int64_t)blockIdx.x * CHUNK;
    for (int64_t at = begin; at < begin + CHUNK && at < p.n; at += 32) {
        int64_t i = at + lane;
        bool live = i < p.n;
        uint32_t key = live ? key_of(p, i) : 0xffffffffu;
        unsigned same = __match_any_sync(0xffffffffu, key);
        int before = __popc(same & ((1u << lane) - 1u));
        int32_t place = live ? next[key] + before : 0;
        __syncwarp();
        if (live && before == 0)
            next[key] += __popc(same);
        __syncwarp();
        if (!live)
            continue;
        if (p.rank)
            p.rank[i] = place;
        if (p.out_key)
            p.out_key[place] = p.keys[i];
        if (p.out_value)
            p.out_value[place] = p.values ? p.values[i] : (int32_t)i;
    }
}

int64_t ith_bucket_sort_workspace_bytes(int64_t n, int64_t num_buckets)
{
    return ith_mul_bytes(ith_max_i64(ith_div_ceil(n, CHUNK), 1) * num_buckets, 4);
}

void ith_bucket_sort_launch(cudaStream_t stream, const ith_bucket_sort *p, void *scratch)
{
    ITH_ASSERT(p->num_buckets >= 1 && p->num_buckets <= MAX_BUCKETS);
    int64_t chunks = ith_max_i64(ith_div_ceil(p->n, CHUNK), 1);
    int32_t *counts = (int32_t *)scratch;
    unsigned threads = (unsigned)ith_round_up(p->num_buckets, 32);
    count_keys<<<(unsigned)chunks, 32, 0, stream>>>(*p, counts);
    place_keys<<<1, threads, 0, stream>>>(*p, counts, chunks);
    move_keys<<<(unsigned)chunks, 32, 0, stream>>>(*p, counts);
}
