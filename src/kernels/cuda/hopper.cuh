/* hopper.cuh - what kernels of compute capability 9.0a share: mbarriers, bulk tensor copies (TMA)
 * and wgmma, each the instruction of its name.
 *
 * Shared tiles are pieces of 64 rows of 128 bytes, 1024-byte aligned, as a tensor map with the
 * 128-byte swizzle writes them (ith_cuda_tensor_map). A row holds 64 bf16 along the operand's
 * contiguous index. An operand is k-major when that index is the inner one of the product. */
#ifndef ITH_KERNELS_CUDA_HOPPER_CUH
#define ITH_KERNELS_CUDA_HOPPER_CUH

#include "kernels/cuda/common.cuh"

#include <cuda.h>

enum { PIECE = 64, PIECE_BYTES = PIECE * 128 };

__device__ __forceinline__ uint32_t shared_at(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarriers: addresses in shared memory ---- */

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

/* Visible to the copy engine and to the other blocks of the cluster. */
__device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* At the same barrier of block `rank` of the cluster. */
__device__ __forceinline__ void barrier_arrive_at(uint32_t bar, uint32_t rank)
{
    asm volatile("{\n"
                 ".reg .b32 at;\n"
                 "mapa.shared::cluster.u32 at, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [at];\n"
                 "}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
}

/* Until the phase of this parity is over. */
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* The same, for what other blocks of the cluster wrote before they arrived. */
__device__ __forceinline__ void barrier_wait_cluster(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* Writes to shared memory of block `rank` of the cluster, then arrives at its barrier. */
__device__ __forceinline__ void store_arrive_at(uint32_t to, int32_t value, uint32_t bar,
                                                uint32_t rank)
{
    asm volatile("{\n"
                 ".reg .b32 at, there;\n"
                 "mapa.shared::cluster.u32 at, %0, %3;\n"
                 "mapa.shared::cluster.u32 there, %2, %3;\n"
                 "st.shared::cluster.b32 [at], %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(to),
                 "r"(value), "r"(bar), "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
}

/* ---- bulk copies ---- */

/* The box of `map` at (x, y, z) to `to`; its bytes count on `bar`. With `blocks` not 0, to the same
 * place and barrier of each block of the cluster whose bit is set. */
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t bar, int x,
                                         int y, int z, uint16_t blocks)
{
    if (blocks)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                     "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(blocks)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                     "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
                     : "memory");
}

/* `bytes` (a multiple of 16) in a row from memory; they count on `bar`. */
__device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, uint32_t bytes,
                                           uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}

__device__ __forceinline__ void store_bytes(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

/* The box of `map` at (x, y, z) will be wanted in the L2 cache. */
__device__ __forceinline__ void prefetch_box(const CUtensorMap *map, int x, int y, int z)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Adds f32 values of shared memory to those in memory, in no fixed order. */
__device__ __forceinline__ void add_bytes(float *to, uint32_t from, uint32_t bytes)
{
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}

/* The box of shared memory at `from` to (x, y, z) of `map`, as far as it lies inside. */
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t from, int x, int y,
                                          int z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group"
                 " [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* The same, f32 added to what lies there. */
__device__ __forceinline__ void add_box(const CUtensorMap *map, uint32_t from, int x, int y, int z)
{
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void stores_end()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until the shared memory of this thread's stores was read, but for the LEFT last groups. */
template <int LEFT = 0> __device__ __forceinline__ void stores_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void stores_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Shared memory written by this thread will be read by the copy engine or wgmma. */
__device__ __forceinline__ void written_for_engines()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Barrier `id` (1 to 15) of THREADS threads. */
template <int THREADS> __device__ __forceinline__ void join_threads(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Arrives there without waiting. */
template <int THREADS> __device__ __forceinline__ void signal_threads(int id)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* ---- registers ---- */

/* 2^x within two units in the last place, far below the rounding of weights to bf16. */
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* As a pair of bf16, lo in the lower half. */
__device__ __forceinline__ uint32_t two(float lo, float hi)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&x);
}

__device__ __forceinline__ float2 both(uint32_t x)
{
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&x));
}

/* ---- squares of 8 x 8 bf16: lane l has 2 (l%4) and the next of row l/4 ----
 * Four at a time; lanes 8i to 8i + 7 give where the rows of square i lie in shared memory. TURN: as
 * their transposes. */

template <bool TURN = false>
__device__ __forceinline__ void load_squares(uint32_t (&x)[4], uint32_t at)
{
    if constexpr (TURN)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
}

template <bool TURN = false>
__device__ __forceinline__ void store_squares(uint32_t at, const uint32_t (&x)[4])
{
    if constexpr (TURN)
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
            "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
            : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
}

/* ---- wgmma ---- */

/* How wgmma finds an operand at `at`. k-major: rows are the outer index, 8 of them make 1024 bytes.
 * Otherwise rows are the inner index, and the next 64 of the outer one are a piece further. */
template <bool K_MAJOR> __device__ __forceinline__ uint64_t operand_at(uint32_t at)
{
    uint64_t next = K_MAJOR ? 1 : PIECE_BYTES >> 4;
    return (uint64_t)(at >> 4 & 0x3fff) | next << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* What to add to an operand for the next 16 of the inner index. */
template <bool K_MAJOR> constexpr uint64_t NEXT_16 = K_MAJOR ? 32 >> 4 : 2048 >> 4;

__device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* After a wait for all: keeps the compiler from reading results earlier. */
template <int N> __device__ __forceinline__ void wgmma_results(float (&c)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(c[i])::"memory");
}

/* c [64,256] += a b over 16 of the inner index; thread t of the warpgroup has columns
 * 8j + 2(t%4) + {0, 1} of rows 16(t/32) + t%32/4 + {0, 8} in c[4j .. 4j+3]. */
template <bool A_K_MAJOR, bool B_K_MAJOR>
__device__ __forceinline__ void wgmma_64x256(float (&c)[128], uint64_t a, uint64_t b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
        "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        "%58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
        "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "
        "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
        "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "
        "%124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, %130, %131;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
          "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
          "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
          "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
          "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
          "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
          "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
          "+f"(c[63]), "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]),
          "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]),
          "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]),
          "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]),
          "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]), "+f"(c[97]),
          "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]),
          "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]),
          "+f"(c[110]), "+f"(c[111]), "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]),
          "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]), "+f"(c[121]),
          "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
        : "l"(a), "l"(b), "n"(A_K_MAJOR ? 0 : 1), "n"(B_K_MAJOR ? 0 : 1));
}

/* A block of warpgroups shares 512 registers a thread of each: one gives some up, others take them.
 */
template <int REGISTERS> __device__ __forceinline__ void registers_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* The same in four rows for each 8 columns: c[j] holds those of columns 8j to 8j + 7. The left
 * operand lies in shared memory or is given as fragments: a[0], a[1] elements 2(t%4) + {0, 1} of
 * rows 16(t/32) + t%32/4 + {0, 8}, a[2], a[3] those 8 further. With `add` false c is overwritten.
 */
#define WGMMA_C4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define WGMMA_C16(j) WGMMA_C4(j), WGMMA_C4(j + 1), WGMMA_C4(j + 2), WGMMA_C4(j + 3)
#define WGMMA_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_32 WGMMA_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_64                                                                                   \
    WGMMA_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"   \
             "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define WGMMA_128                                                                                  \
    WGMMA_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"   \
             "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,"     \
             "%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,"    \
             "%119,%120,%121,%122,%123,%124,%125,%126,%127"

template <bool A_K_MAJOR, bool B_K_MAJOR>
__device__ __forceinline__ void wgmma(float (&c)[4][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; "
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" WGMMA_16
                 "}, %16, %17, p, 1, 1, %19, %20;}"
                 : WGMMA_C16(0)
                 : "l"(a), "l"(b), "r"((int)add), "n"(A_K_MAJOR ? 0 : 1), "n"(B_K_MAJOR ? 0 : 1));
}

template <bool A_K_MAJOR, bool B_K_MAJOR>
__device__ __forceinline__ void wgmma(float (&c)[8][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_32
                 "}, %32, %33, p, 1, 1, %35, %36;}"
                 : WGMMA_C16(0), WGMMA_C16(4)
                 : "l"(a), "l"(b), "r"((int)add), "n"(A_K_MAJOR ? 0 : 1), "n"(B_K_MAJOR ? 0 : 1));
}

template <bool B_K_MAJOR>
__device__ __forceinline__ void wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b,
                                      bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_32
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;}"
                 : WGMMA_C16(0), WGMMA_C16(4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add),
                   "n"(B_K_MAJOR ? 0 : 1));
}

template <bool B_K_MAJOR>
__device__ __forceinline__ void wgmma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b,
                                      bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_64
                 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;}"
                 : WGMMA_C16(0), WGMMA_C16(4), WGMMA_C16(8), WGMMA_C16(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add),
                   "n"(B_K_MAJOR ? 0 : 1));
}

template <bool A_K_MAJOR, bool B_K_MAJOR>
__device__ __forceinline__ void wgmma(float (&c)[16][4], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_64
                 "}, %64, %65, p, 1, 1, %67, %68;}"
                 : WGMMA_C16(0), WGMMA_C16(4), WGMMA_C16(8), WGMMA_C16(12)
                 : "l"(a), "l"(b), "r"((int)add), "n"(A_K_MAJOR ? 0 : 1), "n"(B_K_MAJOR ? 0 : 1));
}

template <bool B_K_MAJOR>
__device__ __forceinline__ void wgmma(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b,
                                      bool add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_128
                 "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134;}"
                 : WGMMA_C16(0), WGMMA_C16(4), WGMMA_C16(8), WGMMA_C16(12), WGMMA_C16(16),
                   WGMMA_C16(20), WGMMA_C16(24), WGMMA_C16(28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add),
                   "n"(B_K_MAJOR ? 0 : 1));
}

template <int N> __device__ __forceinline__ void wgmma_results(float (&c)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
        wgmma_results(c[j]);
}

#undef WGMMA_C4
#undef WGMMA_C16
#undef WGMMA_16
#undef WGMMA_32
#undef WGMMA_64
#undef WGMMA_128

#endif
