// What a kernel of csrc finds on a GPU, for a program on the CPU: see __init__.py.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <utility>
#include <vector>

#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes)

namespace emu {

using Byte = unsigned char;
using Word = unsigned int;
using Long = unsigned long long;

constexpr int kLanes = 32, kStack = 1 << 16, kMostTurns = 1 << 20;   // of warps of a block
constexpr Word kShared = 4096;   // the address of shared memory's first byte
constexpr int kFence = 128;      // bytes behind the last one, which nobody may change
constexpr Byte kFencePost = 0xa5;

struct Dim { Word x; };
struct Copy { Word to; const void* from; int bytes; };
struct Range { Long begin, size; };
enum class Meeting { none, pause, warp, block, shuffle, exchange, ballot, match, any_bits, most, sum, from_below, plus_below, multiply };

struct Lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kStack);
    bool ended;
    Meeting meeting;               // that it waits for
    Word given[6], got, with;      // what it brings there, and takes from there; another lane
    float* sums[4];
    std::deque<std::vector<Copy>> groups;   // that are on their way
    std::vector<Copy> open;        // copies that are not committed
};

static Dim thread, block, block_size, grid;
static Word* shared_memory;
static Word shared_bytes;
static std::vector<Lane> lanes;
static std::vector<Range> allowed;   // of global memory; none: all of it
static ucontext_t scheduler;
static int current;
static Word state;
static char* message;
static int message_bytes;
static std::vector<void*> arguments;

inline bool failed() { return message[0] != 0; }
// Ends the launch; returns only where nobody may.
inline void fail(const char* what) {
    if (!failed()) snprintf(message, message_bytes, "block %u, thread %u: %s", block.x, thread.x, what);
    swapcontext(&lanes[current].context, &scheduler);
}

inline Byte* shared(Word address, Word bytes) {
    if (address < kShared || address - kShared + bytes > shared_bytes) fail("an address outside of shared memory");
    if (address % bytes) fail("an address in shared memory that is not aligned");
    return reinterpret_cast<Byte*>(shared_memory) + (address - kShared);
}
inline Byte* global(const void* pointer, Word bytes) {
    const Long address = reinterpret_cast<Long>(pointer);
    if (address % bytes) fail("an address in global memory that is not aligned");
    if (allowed.empty()) return static_cast<Byte*>(const_cast<void*>(pointer));
    for (const Range& range : allowed)
        if (address >= range.begin && address + bytes <= range.begin + range.size) return const_cast<Byte*>(static_cast<const Byte*>(pointer));
    fail("an address outside of global memory");
    return nullptr;
}
template <int words>
void take(const Byte* from, std::initializer_list<Word*> to) {
    for (Word* word : to) memcpy(word, from, 4), from += 4;
}
template <int words>
void load(Word address, std::initializer_list<Word*> to) { take<words>(shared(address, 4 * words), to); }
template <int words>
void read(const void* pointer, std::initializer_list<Word*> to) { take<words>(global(pointer, 4 * words), to); }
template <int words>
void store(Word address, std::initializer_list<Word> from) { memcpy(shared(address, 4 * words), from.begin(), 4 * words); }
template <int words>
void write(void* pointer, std::initializer_list<Word> from) { memcpy(global(pointer, 4 * words), from.begin(), 4 * words); }
inline Word load_u8(Word address) { return *shared(address, 1); }
inline unsigned short read_u16(const void* pointer) {
    unsigned short word;
    memcpy(&word, global(pointer, 2), 2);
    return word;
}
inline Word add_shared(Word address, Word value) {
    Word before;
    load<1>(address, {&before});
    store<1>(address, {before + value});
    return before;
}
inline void xor_shared(Word address, Word value) {
    Word before;
    load<1>(address, {&before});
    store<1>(address, {before ^ value});
}

inline void copy(Word to, const void* from, int bytes) {
    shared(to, bytes), global(from, bytes);
    lanes[current].open.push_back({to, from, bytes});
}
inline void commit() {
    Lane& lane = lanes[current];
    lane.groups.push_back(std::move(lane.open));
    lane.open.clear();
}
inline void await(int pending) {
    auto& groups = lanes[current].groups;
    for (; int(groups.size()) > pending; groups.pop_front())
        for (const Copy& each : groups.front()) memcpy(shared(each.to, each.bytes), each.from, each.bytes);
}

inline float value_of(Word bf16) {
    float value;
    bf16 <<= 16;
    memcpy(&value, &bf16, 4);
    return value;
}
inline Word bf16(float value) {
    Word word;
    memcpy(&word, &value, 4);
    return std::isnan(value) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
inline Word scaled(Word words, Word by) {
    Word result = 0;
    for (int half = 0; half < 32; half += 16) result |= bf16(value_of(words >> half & 0xffff) * value_of(by >> half & 0xffff)) << half;
    return result;
}

inline Word meet(Meeting meeting) {
    lanes[current].meeting = meeting;
    swapcontext(&lanes[current].context, &scheduler);
    return lanes[current].got;
}
inline Word meet(Meeting meeting, Word given, int with = 0) {
    lanes[current].given[0] = given, lanes[current].with = with;
    return meet(meeting);
}
// Lets other warps go on: who reads a flag may wait for them.
inline void pause() { meet(Meeting::pause); }
inline Word load_flag(Word address) {
    pause();
    Word value;
    load<1>(address, {&value});
    return value;
}
inline int plus_below(int value, int distance) { return meet(Meeting::plus_below, value, distance); }
inline void multiply(std::initializer_list<float*> sums, std::initializer_list<Word> left, std::initializer_list<Word> right) {
    Lane& lane = lanes[current];
    memcpy(lane.sums, sums.begin(), sizeof lane.sums);
    memcpy(lane.given, left.begin(), 16), memcpy(lane.given + 4, right.begin(), 8);
    meet(Meeting::multiply);
}

// mma.m16n8k16, of what a warp's lanes have given.
inline void multiply_all(Lane* warp) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < kLanes; ++lane)
        for (int half = 0; half < 2; ++half) {
            const int g = lane >> 2, column = 2 * (lane & 3) + half;
            auto given = [&](int i) { return value_of(warp[lane].given[i] >> 16 * half & 0xffff); };
            left[g][column] = given(0), left[g + 8][column] = given(1), left[g][column + 8] = given(2), left[g + 8][column + 8] = given(3);
            right[column][g] = given(4), right[column + 8][g] = given(5);
        }
    for (int lane = 0; lane < kLanes; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = (lane >> 2) + 8 * (i >> 1), column = 2 * (lane & 3) + (i & 1);
            double sum = *warp[lane].sums[i];
            for (int k = 0; k < 16; ++k) sum += double(left[row][k]) * right[k][column];
            *warp[lane].sums[i] = float(sum);
        }
}

inline void complete(Lane* warp) {
    const Meeting meeting = warp[0].meeting;
    for (int number = 0; number < kLanes; ++number) warp[number].meeting = Meeting::none;
    if (meeting == Meeting::multiply) multiply_all(warp);
    for (int number = 0; number < kLanes; ++number) {
        Lane& lane = warp[number];
        if (meeting == Meeting::shuffle) lane.got = warp[lane.with % kLanes].given[0];
        if (meeting == Meeting::exchange) lane.got = warp[(number ^ lane.with) % kLanes].given[0];
        if (meeting == Meeting::from_below) lane.got = warp[number >= int(lane.with) ? number - lane.with : number].given[0];
        if (meeting == Meeting::plus_below) lane.got = lane.given[0] + (number >= int(lane.with) ? warp[number - lane.with].given[0] : 0);
        if (meeting < Meeting::ballot || meeting > Meeting::sum) continue;
        lane.got = 0;
        for (int other = 0; other < kLanes; ++other) {
            const Word given = warp[other].given[0];
            if (meeting == Meeting::any_bits) lane.got |= given;
            else if (meeting == Meeting::most) lane.got = given > lane.got ? given : lane.got;
            else if (meeting == Meeting::sum) lane.got += given;
            else if (meeting == Meeting::ballot ? given != 0 : given == lane.given[0]) lane.got |= 1u << other;
        }
    }
}

inline int random_below(int limit) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % limit;
}

template <class... Parameters, size_t... i>
void call(void (*kernel)(Parameters...), std::index_sequence<i...>) { kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[i])...); }
template <class... Parameters>
void call(void (*kernel)(Parameters...)) { call(kernel, std::index_sequence_for<Parameters...>()); }
template <class... Parameters>
constexpr int count_of(void (*)(Parameters...)) { return sizeof...(Parameters); }

static void (*body)();
inline void lane_body() {
    body();
    Lane& lane = lanes[current];
    for (const auto& group : lane.groups)
        if (!group.empty()) fail("a copy is on its way when the block ends");
    if (!lane.open.empty()) fail("a copy that is not committed when the block ends");
    lane.ended = true, lane.meeting = Meeting::none;
    swapcontext(&lane.context, &scheduler);
}

inline void start(Lane& lane) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data(), lane.context.uc_stack.ss_size = lane.stack.size(), lane.context.uc_link = nullptr;
    makecontext(&lane.context, reinterpret_cast<void (*)()>(lane_body), 0);
    lane.ended = false, lane.meeting = Meeting::none;
    lane.groups.clear(), lane.open.clear();
}

// Until its lanes meet, or have ended, or some pause: then false.
inline bool go_on(int warp) {
    const int first = random_below(kLanes);
    bool pauses = false;
    for (int i = 0; i < kLanes && !failed(); ++i) {
        current = kLanes * warp + (first + i) % kLanes;
        Lane& lane = lanes[current];
        if (lane.ended || lane.meeting > Meeting::pause) continue;
        thread.x = current;
        swapcontext(&scheduler, &lane.context);
        pauses |= lane.meeting == Meeting::pause;
    }
    if (pauses) return false;
    for (int i = 1; i < kLanes && !failed(); ++i) {
        const Lane &one = lanes[kLanes * warp], &other = lanes[kLanes * warp + i];
        if (one.meeting != other.meeting || one.ended != other.ended) snprintf(message, message_bytes, "block %u, warp %d: lanes part", block.x, warp);
    }
    return !failed();
}

// Of a block's lanes, which have all met, or have ended.
inline void release() {
    Word any = 0;
    for (const Lane& lane : lanes)
        if (!lane.ended) any |= lane.given[0];
    for (Lane& lane : lanes) lane.got = any, lane.meeting = Meeting::none;
}

inline void run_block(int warps) {
    for (Word i = 0; i < shared_bytes / 4; ++i) shared_memory[i] = 0xdeadbeef ^ i * 2654435761u;
    for (Lane& lane : lanes) start(lane);
    auto leader = [&](int warp) -> Lane& { return lanes[kLanes * warp]; };
    auto each = [&](int warp, auto holds) {
        for (int i = 0; i < kLanes; ++i)
            if (!holds(lanes[kLanes * warp + i])) return false;
        return true;
    };
    auto has_ended = [&](int warp) { return each(warp, [](const Lane& lane) { return lane.ended; }); };
    auto all_wait = [&](int warp) { return each(warp, [](const Lane& lane) { return lane.meeting == Meeting::block; }); };
    for (int turns = 0; !failed(); ++turns) {
        std::vector<int> able, waiting;
        for (int warp = 0; warp < warps; ++warp)
            if (!has_ended(warp)) (all_wait(warp) ? waiting : able).push_back(warp);
        if (able.empty() && waiting.empty()) break;
        if (able.empty()) {
            release();
            continue;
        }
        const int warp = able[random_below(int(able.size()))];
        if (go_on(warp) && !leader(warp).ended && leader(warp).meeting != Meeting::block) complete(&leader(warp));
        if (turns == kMostTurns) snprintf(message, message_bytes, "block %u: it does not end", block.x);
    }
    const Byte* fence = reinterpret_cast<Byte*>(shared_memory) + shared_bytes;
    for (int i = 0; i < kFence && !failed(); ++i)
        if (fence[i] != kFencePost) snprintf(message, message_bytes, "block %u: what is behind shared memory has changed", block.x);
}

inline void run(void (*what)(), int blocks, int threads, int bytes) {
    body = what, grid.x = blocks, block_size.x = threads, shared_bytes = bytes;
    shared_memory = static_cast<Word*>(aligned_alloc(128, (bytes + 127) / 128 * 128 + kFence));
    memset(reinterpret_cast<Byte*>(shared_memory) + bytes, kFencePost, kFence);
    lanes = std::vector<Lane>(threads);
    message[0] = 0;
    for (int i = 0; i < blocks && !failed(); ++i) {
        block.x = i;
        run_block(threads / kLanes);
    }
    free(shared_memory);
    lanes.clear();
}

}   // namespace emu

#define threadIdx emu::thread
#define blockIdx emu::block
#define blockDim emu::block_size
#define gridDim emu::grid

static unsigned __popc(unsigned v) { return __builtin_popcount(v); }
static int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
static int __ffs(unsigned v) { return __builtin_ffs(v); }
static unsigned __brev(unsigned v) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (v >> i & 1) << (31 - i);
    return result;
}
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) >> (by & 31); }
static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return ((unsigned long long)high << 32 | low) << (by & 31) >> 32; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static float __uint_as_float(unsigned v) {
    float value;
    memcpy(&value, &v, 4);
    return value;
}
static unsigned long long __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const emu::Byte*>(pointer) - reinterpret_cast<const emu::Byte*>(emu::shared_memory) + emu::kShared;
}
static void __syncwarp() { emu::meet(emu::Meeting::warp); }
static void __nanosleep(int) { emu::pause(); }
static void __syncthreads() { emu::meet(emu::Meeting::block, 0); }
static bool __syncthreads_or(bool v) { return emu::meet(emu::Meeting::block, v); }
static unsigned __ballot_sync(unsigned, bool v) { return emu::meet(emu::Meeting::ballot, v); }
static bool __any_sync(unsigned, bool v) { return emu::meet(emu::Meeting::ballot, v) != 0; }
static bool __all_sync(unsigned, bool v) { return emu::meet(emu::Meeting::ballot, !v) == 0; }
static unsigned __match_any_sync(unsigned, unsigned v) { return emu::meet(emu::Meeting::match, v); }
static unsigned __reduce_or_sync(unsigned, unsigned v) { return emu::meet(emu::Meeting::any_bits, v); }
// Of numbers of one word or two, whatever they are.
template <class T> static T moved(emu::Meeting meeting, T v, int with) {
    unsigned words[sizeof(T) / 4];
    memcpy(words, &v, sizeof v);
    for (unsigned& word : words) word = emu::meet(meeting, word, with);
    memcpy(&v, words, sizeof v);
    return v;
}
template <class T> static T __shfl_sync(unsigned, T v, int from) { return moved(emu::Meeting::shuffle, v, from); }
template <class T> static T __shfl_xor_sync(unsigned, T v, int with) { return moved(emu::Meeting::exchange, v, with); }
template <class T> static T __shfl_up_sync(unsigned, T v, int by) { return moved(emu::Meeting::from_below, v, by); }
// Of signed numbers as of unsigned ones, in the same order.
constexpr unsigned kSign = 1u << 31;
template <class T> static T __reduce_max_sync(unsigned, T v) {
    const unsigned flip = T(-1) < T(0) ? kSign : 0;
    return T(emu::meet(emu::Meeting::most, unsigned(v) ^ flip) ^ flip);
}
template <class T> static T __reduce_min_sync(unsigned mask, T v) { return T(~unsigned(__reduce_max_sync(mask, T(~unsigned(v))))); }
template <class T> static T __reduce_add_sync(unsigned, T v) { return T(emu::meet(emu::Meeting::sum, unsigned(v))); }
static void __threadfence() {}
struct uint4 { unsigned x, y, z, w; };
template <class T> static T __ldcg(const T* pointer) { return *pointer; }
template <class T> static void __stcg(T* pointer, T v) { *pointer = v; }
template <class T, class U> static T atomicAdd(T* pointer, U v) { return std::exchange(*pointer, T(*pointer + v)); }
template <class T, class U> static T atomicOr(T* pointer, U v) { return std::exchange(*pointer, T(*pointer | v)); }
template <class T> static T atomicExch(T* pointer, int v) { return std::exchange(*pointer, T(v)); }
template <class A, class B> static auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> static auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }

extern "C" void __assertfail(const char* what, const char*, unsigned, const char*, size_t) { emu::fail(what); }

#define EMULATED_KERNEL(kernel)                                                                                     \
    static void kernel_body() { emu::call(kernel); }                                                                \
    extern "C" void run_kernel(void** pointers, int grid, int threads, int shared_bytes, const emu::Range* allowed, int ranges, unsigned seed, \
                               char* message, int message_bytes) {                                                  \
        emu::arguments.assign(pointers, pointers + emu::count_of(kernel));                                          \
        emu::allowed.assign(allowed, allowed + ranges);                                                             \
        emu::message = message, emu::message_bytes = message_bytes, emu::state = seed;                              \
        emu::run(kernel_body, grid, threads, shared_bytes);                                                         \
    }
