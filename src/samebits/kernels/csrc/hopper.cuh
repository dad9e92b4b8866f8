// Hopper's barriers in shared memory and its asynchronous matrix product (wgmma), which needs the target sm_90a.
#pragma once
#include "common.cuh"

// A barrier's phases are numbered from 0. The phase before the first counts as complete.
__device__ __forceinline__ void open_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier, u32 arrivals = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Until the phase of this parity is complete.
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "  @!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// The same of two barriers.
__device__ __forceinline__ void await_both(u32 barrier, u32 parity, u32 other, u32 other_parity) {
    asm volatile("{ .reg .pred done, other_done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "  mbarrier.try_wait.parity.shared::cta.b64 other_done, [%2], %3;\n"
                 "  and.pred done, done, other_done;\n"
                 "  @!done bra again; }" ::"r"(barrier), "r"(parity), "r"(other), "r"(other_parity) : "memory");
}

// Whether it is.
__device__ __forceinline__ bool test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred done;\n"
                 "  mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "  selp.u32 %0, 1, 0, done; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// For copies that arrive at a barrier, which this thread has just opened.
__device__ __forceinline__ void show_barrier() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// More bytes for the phase at hand, and an arrival.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// An arrival of this thread when all copies that it has started asynchronously are there.
__device__ __forceinline__ void copies_arrive(u32 barrier) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory"); }

// Starts a copy of whole 16-byte units and arrives at the barrier, whose phase then waits for the copy too.
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
    expect(barrier, bytes);
    if (bytes)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global), "r"(bytes),
                     "r"(barrier) : "memory");
}

// Arrives at the barrier of that place in the shared memory of a block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
    asm volatile("{ .reg .u32 there;\n"
                 "  mapa.shared::cluster.u32 there, %0, %1;\n"
                 "  mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(block) : "memory");
}

// Starts a copy of whole 16-byte units to the same place in several blocks of a cluster, for which those of their barriers wait that expect it.
__device__ __forceinline__ void copy_bulk_to(u32 shared, const void* global, u32 bytes, u32 barrier, u16 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}

// Starts a copy of whole 16-byte units from shared memory to the same place in that of another block of the cluster, for which the latter's barrier waits.
__device__ __forceinline__ void copy_to_block(u32 block, u32 shared, u32 bytes, u32 barrier) {
    asm volatile("{ .reg .u32 there, barrier_there;\n"
                 "  mapa.shared::cluster.u32 there, %0, %3;\n"
                 "  mapa.shared::cluster.u32 barrier_there, %2, %3;\n"
                 "  cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%0], %1, [barrier_there]; }" ::"r"(shared), "r"(bytes),
                 "r"(barrier), "r"(block) : "memory");
}

// Starts a copy of a box of a two-dimensional tensor, whose map is in global memory, to which a barrier waits.
__device__ __forceinline__ void copy_box(u32 shared, const void* map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared), "l"(map),
                 "r"(x), "r"(y), "r"(barrier) : "memory");
}

constexpr int kMapBytes = 128;   // of a tensor map

// Makes of a tensor map in shared memory, as the host has it for any address, the one for this address, and leaves it in global memory, aligned to 64
// bytes as both are; by a warp, whose first lane may then use it.
__device__ __forceinline__ void place_map(void* map, u32 shared, const void* address, int lane) {
    if (lane == 0)
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(shared), "l"(address) : "memory");
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;\n"
                 "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map), "r"(shared) : "memory");
}

constexpr int kCluster = 2;      // blocks of a cluster: linear_relay.cuh, linear_clusters.cuh

__device__ __forceinline__ u32 block_of_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Until all threads of the cluster are here, and what they wrote to shared memory before: others may write there behind.
__device__ __forceinline__ void await_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Before a block ends: until nothing comes from the others of its cluster any longer, nor goes to them.
__device__ __forceinline__ void leave_cluster() {
    __syncwarp();
    await_cluster();
}

// Between what threads did to shared memory and what wgmma and bulk copies do to it.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A place in a ring of `slots`, and the parity of its round.
struct RingPlace {
    int slot;
    u32 parity;

    // by_slots: for `divide`.
    __device__ __forceinline__ static RingPlace of(int index, int slots, u32 by_slots) {
        const int round = divide(index, by_slots);
        return {index - round * slots, u32(round & 1)};
    }
    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

// A matrix in shared memory as wgmma takes it: rows of 64 words (128 bytes), of which eight make an atom of 1024 bytes, aligned to as much; in row r
// of an atom, 16-byte unit u is where u ^ (r & 7) would be. Or rows of 32 words, atoms of 512 bytes, u ^ (r >> 1 & 3). From one atom to the next are
// `stride` bytes.
template <int row_bytes = 128>
__device__ __forceinline__ u64 describe(u32 address, u32 stride) {
    static_assert(row_bytes == 128 || row_bytes == 64);
    return u64(row_bytes == 128 ? 1 : 2) << 62 | u64(stride >> 4) << 32 | u64(1) << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"); }

// Registers of each of a warpgroup's threads from here on, a multiple of eight, fewer or more than before; by whole warpgroups.
template <int count>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }

// Keeps the compiler from moving sums across.
template <int count>
__device__ __forceinline__ void pin(float (&sums)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// What one thread's part of a product is called in the instructions below.
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
#define PLACES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PLACES_16 PLACES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES_24 PLACES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PLACES_32 PLACES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES_40 PLACES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PLACES_48 PLACES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES_56 PLACES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define PLACES_64 PLACES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES_72 PLACES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define PLACES_80 PLACES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define PLACES_88 PLACES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PLACES_96 PLACES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define PLACES_104 PLACES_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define PLACES_112 PLACES_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define PLACES_120 PLACES_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define PLACES_128 PLACES_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(n, places, a, b, ...)                                                                                                 \
    asm volatile("{ .reg .pred add; setp.eq.u32 add, 0, 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" places "}, " a ", " b ", add, 1, 1, 0, 0; }"           \
                 : __VA_ARGS__ : "l"(left), "l"(right))
#define WGMMA_REGISTERS(n, places, a, b, c, ...)                                                                                   \
    asm volatile("{ .reg .pred add; setp.ne.u32 add, " c ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" places "}, {" a "}, " b ", add, 1, 1, 0; }"            \
                 : __VA_ARGS__ : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(add))

// Adds 64 rows of the left matrix times `2 * count` rows of the right one, 16 columns, to the sums. Warp w of the four has rows 16 w to 16 w + 15;
// lane (g, t) sums[4 j + 2 h + i] of row 16 w + 8 h + g and the right matrix's row 8 j + 2 t + i.
template <int count>
__device__ __forceinline__ void multiply_add(float (&d)[count], u64 left, u64 right) {
    static_assert(count == 8 || count == 16 || count == 32 || count == 48 || count == 56 || (count % 8 == 0 && count >= 64 && count <= 128));
    if constexpr (count == 8) WGMMA("16", PLACES_8, "%8", "%9", SUMS_8(0));
    if constexpr (count == 16) WGMMA("32", PLACES_16, "%16", "%17", SUMS_16(0));
    if constexpr (count == 32) WGMMA("64", PLACES_32, "%32", "%33", SUMS_32(0));
    if constexpr (count == 48) WGMMA("96", PLACES_48, "%48", "%49", SUMS_32(0), SUMS_16(32));
    if constexpr (count == 56) WGMMA("112", PLACES_56, "%56", "%57", SUMS_32(0), SUMS_16(32), SUMS_8(48));
    if constexpr (count == 64) WGMMA("128", PLACES_64, "%64", "%65", SUMS_64(0));
    if constexpr (count == 72) WGMMA("144", PLACES_72, "%72", "%73", SUMS_64(0), SUMS_8(64));
    if constexpr (count == 80) WGMMA("160", PLACES_80, "%80", "%81", SUMS_64(0), SUMS_16(64));
    if constexpr (count == 88) WGMMA("176", PLACES_88, "%88", "%89", SUMS_64(0), SUMS_16(64), SUMS_8(80));
    if constexpr (count == 96) WGMMA("192", PLACES_96, "%96", "%97", SUMS_64(0), SUMS_32(64));
    if constexpr (count == 104) WGMMA("208", PLACES_104, "%104", "%105", SUMS_64(0), SUMS_32(64), SUMS_8(96));
    if constexpr (count == 112) WGMMA("224", PLACES_112, "%112", "%113", SUMS_64(0), SUMS_32(64), SUMS_16(96));
    if constexpr (count == 120) WGMMA("240", PLACES_120, "%120", "%121", SUMS_64(0), SUMS_32(64), SUMS_16(96), SUMS_8(112));
    if constexpr (count == 128) WGMMA("256", PLACES_128, "%128", "%129", SUMS_128(0));
}

// The same with the left matrix in registers, which may not change before the product is done: lane (g, t) has of row 16 w + 8 h + g columns 2 t and
// 2 t + 1 in left[h], 2 t + 8 and 2 t + 9 in left[2 + h]. Where `add` is 0, what the sums were does not count.
template <int count>
__device__ __forceinline__ void multiply_add(float (&d)[count], const u32 (&left)[4], u64 right, u32 add) {
    static_assert(count == 32 || count == 48 || count == 64 || count == 96 || count == 128);
    if constexpr (count == 32) WGMMA_REGISTERS("64", PLACES_32, "%32,%33,%34,%35", "%36", "%37", SUMS_32(0));
    if constexpr (count == 48) WGMMA_REGISTERS("96", PLACES_48, "%48,%49,%50,%51", "%52", "%53", SUMS_32(0), SUMS_16(32));
    if constexpr (count == 64) WGMMA_REGISTERS("128", PLACES_64, "%64,%65,%66,%67", "%68", "%69", SUMS_64(0));
    if constexpr (count == 96) WGMMA_REGISTERS("192", PLACES_96, "%96,%97,%98,%99", "%100", "%101", SUMS_64(0), SUMS_32(64));
    if constexpr (count == 128) WGMMA_REGISTERS("256", PLACES_128, "%128,%129,%130,%131", "%132", "%133", SUMS_128(0));
}
