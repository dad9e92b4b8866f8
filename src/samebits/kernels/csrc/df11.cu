// samebits::df11_decode: a unit of a DFloat11 checkpoint to BF16, all its matrices behind each other.
//
//   block of threads: builds a table of several symbols a look-up in shared memory, then stream block after stream block (4096 bytes):
//   1. load      16 bytes a thread and where its first code starts, while the stream block before is stored
//   2. count     the codes that start in these bytes; a scan over the threads gives each its place
//   3. decode    the same codes into a buffer of exponents in shared memory
//   4. store     exponents with signs and mantissas, 16 bytes of output a thread
//
// Whatever the unit holds, look-ups move on by a bit at least, so at most 128 codes start in a thread's bytes: nothing is written
// beyond the buffer. Positions are clamped to the weights, reads of the stream to its bytes, tables to shared memory.
#include "common.cuh"

constexpr int kWords = 4;                      // of the stream to a thread
constexpr int kThreads = 1024 / kWords;
constexpr int kBlocksPerProcessor = 4;         // as many as shared memory has room for on Hopper
constexpr int kBlockBytes = 4096;
constexpr u32 kGapWords = 80;                  // to a stream block
constexpr u32 kBlockCodes = 8 * kBlockBytes;   // at most, of a bit each
constexpr int kEntries = 256;
constexpr int kTables = 17;
constexpr u32 kFirstPointer = 240;
constexpr int kWidth = 11;                     // bits of a look-up
constexpr int kBatch = 3;                      // times 8 weights that a thread stores at once

// Where a walk over codes is, and (as a difference) what a look-up moves it on by:
//   5..0     63 - the bit at hand, counted from the present word of the stream: below 32, the walk is behind that word
//   19..11   symbols
//   31..20   of a look-up: where its first, second, third symbol ends, if another follows (else 15); of a walk: anything
constexpr u32 kSymbol = 1 << 11;
constexpr int kEnds = 20;
constexpr u32 kOnly = 0xfffu << kEnds;          // of a look-up: it has one symbol
constexpr u32 kLong = -32u;                    // the first code is longer than a look-up: this ends the word's loop

// The bits of the stream that a walk sees lie so far behind their places in its words that a look-up's address is a shift and a mask.
constexpr int kLead = 31 - kWidth;
constexpr u32 kAddress = ((1 << kWidth) - 1) << 2;
constexpr u32 kSteps = 4 << kWidth;            // from a look-up's symbols to its step

// Filled by kernels/structures.py; fields and order as there.
struct Unit {
    const u8* stream;
    const u8* rest;          // sign << 7 | mantissa
    const u32* positions;
    const u32* gaps;
    const u8* tables;        // the last one has the code lengths
    u16* output;
    u32* malformed;          // set to 1 where gaps or positions contradict the stream
    i64 words;
    u32 stream_bytes;
    int position_count, table_count;   // without the lengths
};

struct Shared {
    u32 symbols[1 << kWidth];   // up to four
    u32 steps[1 << kWidth];
    u8 tables[kTables + 1][kEntries];
    u32 exponents[kBlockCodes / 4 + 4];
    int warp_codes[kThreads / kLanes];
};

// What a thread takes of a stream block.
struct Piece {
    u32 words[kWords + 2];   // first bit highest, moved by kLead; it ends with the first word of the thread behind
    u32 gap, next_gap;       // where the first code starts: its own, and that of the thread behind
};

// The first code of a window, table by table: its symbol in bits 7..0, its length behind. Rare, and so not inlined.
__device__ __noinline__ u32 decode_one(const Shared& shared, u32 window) {
    u32 entry = shared.tables[0][window >> 24];
#pragma unroll 1
    for (int level = 1; level < 4 && entry >= kFirstPointer; ++level) {
        window <<= 8;
        entry = shared.tables[kEntries - entry][window >> 24];
    }
    return entry | min(max(u32(shared.tables[kTables][entry]), 1u), 32u) << 8;
}

// The bits behind a look-up's are set to 1: a code that does not end within it is then seen as one too long. Zeros could lead to where
// the end symbol's code would be; the tables have no entry for it, but what stands in front of it, which may be a shorter code.
__device__ void build_table(Shared& shared, const Unit& unit) {
    for (int i = threadIdx.x; i < (kTables + 1) * kEntries; i += kThreads) {
        const int table = i / kEntries, source = table == kTables ? unit.table_count : table;
        const bool given = table == kTables || table < unit.table_count;
        shared.tables[table][i % kEntries] = given ? unit.tables[source * kEntries + i % kEntries] : 0;
    }
    __syncthreads();
    for (u32 index = threadIdx.x; index < 1 << kWidth; index += kThreads) {
        u32 symbols = 0, count = 0, used = 0, ends = 0;
        while (count < 4) {
            const u32 code = decode_one(shared, ~(~index << (32 - kWidth) << used)), length = code >> 8;
            if (used + length > kWidth) break;
            if (count > 0) ends |= used << (4 * count - 4);
            symbols |= (code & 255) << 8 * count++;
            used += length;
        }
        for (u32 end = max(count, 1u); end < 4; ++end) ends |= 15 << (4 * end - 4);
        shared.symbols[index] = symbols;
        shared.steps[index] = count ? (ends << kEnds) + count * kSymbol - used : kLong;
    }
    __syncthreads();
}

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// The same value, of which the compiler does not know where it is from: it stays in a register.
__device__ __forceinline__ u32 opaque(u32 value) {
    asm volatile("mov.u32 %0, %0;" : "+r"(value));
    return value;
}

// Stores the low half of `bytes` and moves on, if `condition` is not 0; returns what is left. In assembly, because the compiler branches.
__device__ __forceinline__ u32 store_if(u32 condition, u32& target, u64 bytes) {
    u32 left;
    asm volatile("{ .reg .pred whole;\n"
                 "  setp.ne.u32 whole, %4, 0;\n"
                 "  @whole st.shared.u32 [%1], %2;\n"
                 "  @whole add.u32 %1, %1, 4;\n"
                 "  selp.u32 %0, %3, %2, whole; }"
                 : "=r"(left), "+r"(target) : "r"(u32(bytes)), "r"(u32(bytes >> 32)), "r"(condition) : "memory");
    return left;
}

__device__ __forceinline__ void or_shared(u32 address, u32 bits) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

// Puts symbols together to words of the buffer. A word is stored by the thread with its last symbol, with zeros where the symbols of
// others belong; the symbols behind a thread's last whole word are left.
struct Writer {
    u32 target;   // shared address
    u32 left;

    __device__ __forceinline__ void put(u32 symbols, u32 state, u32 step) {
        const u64 bytes = u64(symbols) * __funnelshift_l(0, 1, state / (kSymbol / 8)) + left;   // by 8 bits a symbol, modulo 32
        left = store_if(((state + step) ^ state) & 4 * kSymbol, target, bytes);
    }
};

// The last look-up of a piece, without what it says of codes that start behind it.
struct Last {
    u32 place;   // bits 5..0 of the walk in front of it
    u32 step;
    u32 mask;    // of the symbols; 0: a long code
};

// A walk over the codes that start in a piece.
struct Walk {
    const Shared& shared;
    const u32 table;   // shared address
    const Piece& piece;
    u32 state;

    __device__ __forceinline__ u32 address(int k) const {
        return table + (__funnelshift_r(piece.words[k + 1], piece.words[k], state) & kAddress);
    }
    __device__ __forceinline__ u32 long_code(int k) const {
        const u32 bit = kLead + (~state & 31);
        return decode_one(shared, bit < 32 ? __funnelshift_l(piece.words[k + 1], piece.words[k], bit)
                                           : __funnelshift_l(piece.words[k + 2], piece.words[k + 1], bit));
    }

    // Only moves. A code has at most 32 bits: so one at least starts in the last word.
    __device__ __forceinline__ Last count() {
        Last last;
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
            u32 step = kLong;
            bool is_long = false;
            while (state & 32) {
                do {
                    step = load_shared(address(k) + kSteps);
                    state += step;
                } while (state & 32);
                is_long = step == kLong;
                if (!is_long) break;
                state -= kLong;
                step = kOnly + kSymbol - (long_code(k) >> 8);
                state += step;
            }
            if (k == kWords - 1) {
                state -= step;
                const u32 room = (state & 31) + 1, ends = step >> kEnds;
                const u32 kept = 1 + ((ends & 15) < room) + ((ends >> 4 & 15) < room) + (ends >> 8 < room);
                const u32 end = kept < 4 ? ends >> (4 * kept - 4) & 15 : 15;   // 15: all of them
                last = {state & 63, end == 15 ? step : kept * kSymbol - end, end == 15 ? kFull : (1u << 8 * kept) - 1};
                if (is_long) last.mask = 0;
                state += last.step;
            }
            state += 32;
        }
        return last;
    }

    // The same once more.
    __device__ __forceinline__ void write(Writer& writer, const Last& last) {
        auto put = [&](u32 symbols, u32 step) {
            writer.put(symbols, state, step);
            state += step;
        };
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
            auto is_inside = [&] { return k < kWords - 1 ? (state & 32) != 0 : (state & 63) > last.place; };
            while (is_inside()) {
                u32 step;
                do {
                    const u32 at = address(k);
                    step = load_shared(at + kSteps);
                    put(load_shared(at), step);
                } while (is_inside());
                if (step != kLong) break;
                state -= kLong;
                const u32 code = long_code(k);
                put(code & 255, kSymbol - (code >> 8));
            }
            if (k == kWords - 1) put(last.mask ? load_shared(address(k)) & last.mask : long_code(k) & 255, last.step);
            state += 32;
        }
    }
};

__device__ __forceinline__ Piece load_piece(const Unit& unit, int block) {
    Piece piece;
    u32 words[kWords + 1];
    const u32 index = block * kThreads + threadIdx.x, offset = index * (4 * kWords);
    if (offset + 4 * kWords + 4 <= unit.stream_bytes) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const Vec4 four = load_once(unit.stream + offset + 4 * i);
            words[i] = four.x;
            words[i + 1] = four.y;
            words[i + 2] = four.z;
            words[i + 3] = four.w;
        }
        words[kWords] = load_once_u32(unit.stream + offset + 4 * kWords);
    } else {
#pragma unroll
        for (int i = 0; i <= kWords; ++i) {
            words[i] = 0;
#pragma unroll 1
            for (int j = 0; j < 4; ++j)
                if (offset + 4 * i + j < unit.stream_bytes) words[i] |= u32(unit.stream[offset + 4 * i + j]) << 8 * j;
        }
    }
    u32 before = 0;
#pragma unroll
    for (int i = 0; i <= kWords; ++i) {
        const u32 word = __byte_perm(words[i], 0, 0x0123);
        piece.words[i] = __funnelshift_r(word, before, kLead);
        before = word;
    }
    piece.words[kWords + 1] = before << (32 - kLead);
    const u32 bit = index * (5 * kWords / 2), last = (unit.stream_bytes + kBlockBytes - 1) / kBlockBytes * kGapWords - 1;
    const u32 high = __byte_perm(unit.gaps[min(bit >> 5, last)], 0, 0x0123), low = __byte_perm(unit.gaps[min((bit >> 5) + 1, last)], 0, 0x0123);
    const u32 gaps = __funnelshift_l(low, high, bit);
    piece.gap = gaps >> 27;
    piece.next_gap = gaps << 5 * kWords / 2 >> 27;
    return piece;
}

// The place of the first word whose code starts in a stream block.
__device__ __forceinline__ u32 position(const Unit& unit, int block) {
    return u32(min(i64(unit.positions[min(block, unit.position_count - 1)]), unit.words));
}

// The bits of `inside` where `mask` has them, else those of `outside`.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 inside, u32 outside) { return ((inside ^ outside) & mask) ^ outside; }

// Four neighbouring words.
__device__ __forceinline__ Vec2 join(u32 rest, u32 exponents) {
    const u32 low = select_bits(kSignMask, exponents << 7, rest), high = select_bits(kSignMask, rest, exponents >> 1);
    return {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) decode_df11(const Unit unit) {
    extern __shared__ Vec4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int blocks = (unit.stream_bytes + kBlockBytes - 1) / kBlockBytes;
    const u32 table = opaque(shared_address(shared.symbols));
    let_kernel_behind_start();
    Piece piece = load_piece(unit, blockIdx.x);
    build_table(shared, unit);
    await_kernel_before();

    for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
        const u32 first = position(unit, block), behind = position(unit, block + 1);
        const u32 total = behind > first ? min(behind - first, kBlockCodes) : 0, end = first + total;
        const u32 lead = first & 7;   // so that 8 words of the output lie together in the buffer
        Walk counting{shared, table, piece, 63 - piece.gap};
        const Last last = counting.count();
        const u32 counted = counting.state;
        if (128 * thread < total) prefetch(unit.rest + first + 128 * thread);
        const u32 offset = (u32(block) * kThreads + thread) * (4 * kWords);
        if (offset + 8 * kWords <= unit.stream_bytes && (counted & 63) != 63 - piece.next_gap) *unit.malformed = 1;
        int warp_codes;
        u32 before = sum_before(counted / kSymbol & 511, lane, warp_codes), codes = 0;
        if (lane == 0) shared.warp_codes[warp] = warp_codes;
        __syncthreads();   // and the buffer's last words are stored
#pragma unroll
        for (int i = 0; i < kThreads / kLanes; ++i) {
            if (i < warp) before += shared.warp_codes[i];
            codes += shared.warp_codes[i];
        }
        // Behind the last weight, the stream holds up to seven bits that may look like codes.
        if (thread == 0 && (block + 1 < blocks ? codes != behind - first : codes < behind - first)) *unit.malformed = 1;

        const u32 place = lead + before;
        Writer writer{shared_address(shared.exponents + (place >> 2)), 0};
        Walk writing{shared, table, piece, (place & 3) * kSymbol + 63 - piece.gap};
        writing.write(writer, last);
        if (thread == 0) shared.exponents[(lead + codes) >> 2] = 0;   // no one stores the last word unless it is whole
        if (block + int(gridDim.x) < blocks) piece = load_piece(unit, block + gridDim.x);

        const u32 stop = end >> 3, group = (first >> 3) + (lead > 0) + thread;
        int left = int(stop) - int(group);
        const u8* source = unit.rest + u64(group) * 8;
        u16* target = unit.output + u64(group) * 8;
        u32 exponents = shared_address(shared.exponents) + lead + (8 * group - first);
        Vec2 rest[kBatch];
        auto load_batch = [&] {
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (left > i * kThreads) rest[i] = load_once_vec2(source + i * kThreads * 8);
        };
        load_batch();
        __syncthreads();
        if (writing.state & 3 * kSymbol) or_shared(writer.target, writer.left);
        __syncthreads();
        while (left > 0) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
                if (left > i * kThreads) {
                    const Vec2 eight = load_shared_vec2(exponents + i * kThreads * 8);
                    const Vec2 front = join(rest[i].x, eight.x), back = join(rest[i].y, eight.y);
                    store_once(target + i * kThreads * 8, {front.x, front.y, back.x, back.y});
                }
            left -= kBatch * kThreads;
            source += kBatch * kThreads * 8;
            target += kBatch * kThreads * 8;
            exponents += kBatch * kThreads * 8;
            load_batch();
        }
        // What is left in front and behind: fewer than 8 words each.
        const u32 head = min(first + (-first & 7), end), tail = max(stop * 8, head);
        const u32 single = thread < 8 ? first + thread : tail + (thread - 8);
        if (thread < 16 && single < (thread < 8 ? head : end)) {
            const u32 byte = unit.rest[single], exponent = reinterpret_cast<const u8*>(shared.exponents)[lead + (single - first)];
            unit.output[single] = u16((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f));
        }
    }
}
