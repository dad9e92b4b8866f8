// samebits::df11_decode: a unit of a DFloat11 checkpoint to BF16, all its matrices behind each other.
//
//   block of threads: builds a table of several symbols a look-up in shared memory, then stream block after stream block (4096 bytes):
//   1. load      16 bytes a thread and where its first code starts, while the stream block before is decoded
//   2. decode    the codes that start in these bytes, into a slot of shared memory
//   3. scan      the numbers of codes over the threads, so that each knows where its symbols go
//   4. compact   the slots: symbol behind symbol
//   5. store     exponents with signs and mantissas, 16 bytes of output a thread
//
// Whatever the unit holds, a look-up moves on by at least one bit, and from 4 to 128 codes start in a thread's bytes: slots have room for
// these. Positions are clamped to the weights and codes, reads of the stream to its bytes, tables to shared memory.
#include "common.cuh"

constexpr int kWords = 4;                      // of the stream to a thread
constexpr int kThreads = 1024 / kWords;
constexpr int kBlocksPerProcessor = 4;         // as many as shared memory has room for on Hopper
constexpr int kBlockBytes = 4096;
constexpr u32 kGapWords = 80;                  // to a stream block
constexpr u32 kGapBits = 5 * kWords / 2;       // to a thread
constexpr u32 kBlockCodes = 8 * kBlockBytes;   // at most, of a bit each
constexpr u32 kSlotWords = 19 * kWords / 4;    // of four symbols; a slot that needs more reaches into the compact symbols, which are then not made
constexpr u32 kSlotStep = 4 * kThreads;        // bytes from a word of a slot to the next
constexpr u32 kCompact = kSlotWords * kThreads;
constexpr u32 kCompactCodes = 16384;
constexpr int kEntries = 256;
constexpr int kTables = 17;
constexpr u32 kFirstPointer = 240;
constexpr int kWidth = 10;                     // bits of a look-up
constexpr int kBatch = 6;                      // times 8 weights that a thread stores at once

// Where a walk over codes is, and (as a difference) what a look-up moves it on by:
//   5..0     63 - the bit at hand, counted from the present word of the stream: below 32, the walk is behind that word
//   19..11   symbols
//   31..20   of a look-up: where its first, second, third symbol ends, if another follows (else 15); of a walk: anything
constexpr u32 kSymbol = 1 << 11;
constexpr int kEnds = 20;
constexpr u32 kOnly = 0xfffu << kEnds;          // of a look-up: it has one symbol
constexpr u32 kLong = -32u;                    // the first code is longer than a look-up: this ends the word's loop

// The bits of the stream that a walk sees lie so far behind their places in its words that a look-up's address is a shift and a mask.
constexpr int kLead = 30 - kWidth;
constexpr u32 kAddress = ((1 << kWidth) - 1) << 3;

// Filled by kernels/structures.py; fields and order as there.
struct Unit {
    const u8* stream;
    const u8* rest;          // sign << 7 | mantissa
    const u32* positions;
    const u32* gaps;
    const u32* tables;       // bytes; the last one has the code lengths
    u16* output;
    u32* malformed;          // set to 1 where gaps or positions contradict the stream
    i64 words;
    u32 stream_bytes;
    int position_count, table_count;   // without the lengths
};

struct Shared {
    Vec2 look_ups[1 << kWidth];   // up to four symbols, and the step
    u8 tables[kTables + 1][kEntries];
    u32 symbol_words[kCompact + kCompactCodes / 4 + 4];   // [slot word][thread], then the compact symbols
    u32 warp_codes[kThreads / kLanes];
    u32 warp_symbols[kThreads / kLanes];                  // the last four symbols of each warp
};

// What a thread takes of a stream block, as it comes from memory: nothing waits for it before the block's turn.
struct Raw {
    u32 first, behind;       // words of the stream block
    u32 words[kWords + 1];   // the last one belongs to the thread behind
    u32 gaps[2];
};

// The same, ready to decode.
struct Piece {
    u32 words[kWords + 2];   // first bit highest, moved by kLead
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

// Tables that the unit does not have are empty. The bits behind a look-up's are taken as 1: a code that does not end within it then is
// one too long. Zeros could lead to where the end symbol's code would be; the tables have no entry for it, but what stands in front of
// it, which may be a shorter code.
__device__ __forceinline__ void build_table(Shared& shared, const Unit& unit) {
    constexpr int kRow = kEntries / 4;
    u32* rows = reinterpret_cast<u32*>(shared.tables);
#pragma unroll
    for (int i = threadIdx.x; i < (kTables + 1) * kRow; i += kThreads) {
        const int table = i / kRow, source = table == kTables ? i - (kTables - unit.table_count) * kRow : i;
        rows[i] = table == kTables || table < unit.table_count ? unit.tables[source] : 0;
    }
    __syncthreads();
    u32* first = shared.symbol_words;   // of each look-up, as decode_one gives it
    for (u32 index = threadIdx.x; index < 1 << kWidth; index += kThreads) first[index] = decode_one(shared, ~(~index << (32 - kWidth)));
    __syncthreads();
    for (u32 index = threadIdx.x; index < 1 << kWidth; index += kThreads) {
        u32 symbols = 0, count = 0, used = 0, ends = kOnly;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 code = first[~(~index << used) & ((1 << kWidth) - 1)], length = code >> 8;
            if (used + length > kWidth) break;
            if (i > 0) ends ^= (15 ^ used) << (kEnds + 4 * i - 4);
            symbols |= (code & 255) << 8 * i;
            used += length;
            count = i + 1;
        }
        shared.look_ups[index] = {symbols, count ? ends + count * kSymbol - used : kLong};
    }
    __syncthreads();
}

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// The same value, of which the compiler does not know where it is from: it stays in a register.
__device__ __forceinline__ u32 opaque(u32 value) {
    asm volatile("mov.u32 %0, %0;" : "+r"(value));
    return value;
}

// A thread's slot, filled from the front.
struct Slot {
    u32 target;      // shared address of the next word
    u32 left = 0;    // symbols that do not make up a word yet

    __device__ __forceinline__ void put(u32 symbols, u32 state, u32 step) {
        const u64 moved = u64(symbols) * __funnelshift_l(0, 1, state / (kSymbol / 8));   // by 8 bits a symbol, modulo 32
        store_if(((state + step) ^ state) & 4 * kSymbol, u32(moved) + left, u32(moved >> 32));
    }
    // Stores `word` and moves on, with `more` left, if `condition` is not 0; else `word` is left. In assembly, because the compiler branches.
    __device__ __forceinline__ void store_if(u32 condition, u32 word, u32 more) {
        asm volatile("{ .reg .pred whole;\n"
                     "  setp.ne.u32 whole, %4, 0;\n"
                     "  @whole st.shared.u32 [%1], %2;\n"
                     "  @whole add.u32 %1, %1, %5;\n"
                     "  selp.u32 %0, %3, %2, whole; }"
                     : "=r"(left), "+r"(target)
                     : "r"(word), "r"(more), "r"(condition), "n"(kSlotStep) : "memory");
    }
};

// Decodes the codes that start in a piece. Returns their number, and how far behind the piece the last one ends.
__device__ __forceinline__ u32 decode_piece(const Shared& shared, u32 table, const Piece& piece, Slot slot, u32& end) {
    u32 state = 63 - piece.gap;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
        const u32 high = piece.words[k], low = piece.words[k + 1];
        u32 step = kLong;
        while (state & 32) {   // at least once in the last word: a code has at most 32 bits
            do {
                const Vec2 look_up = load_shared_vec2(table + (__funnelshift_r(low, high, state) & kAddress));
                step = look_up.y;
                slot.put(look_up.x, state, step);
                state += step;
            } while (state & 32);
            if (step != kLong) break;
            state -= kLong;
            const u32 bit = kLead + (~state & 31);
            const u32 code = decode_one(shared, bit < 32 ? __funnelshift_l(low, high, bit) : __funnelshift_l(piece.words[k + 2], low, bit));
            step = kOnly + kSymbol - (code >> 8);
            slot.put(code & 255, state, step);
            state += step;
        }
        if (k == kWords - 1) {   // without those of the last look-up that start behind the piece
            state -= step;
            const u32 room = (state & 31) + 1, ends = step >> kEnds;
            const u32 kept = 1 + ((ends & 15) < room) + ((ends >> 4 & 15) < room) + (ends >> 8 < room);
            const u32 end_kept = kept < 4 ? ends >> (4 * kept - 4) & 15 : 15;   // 15: all of them
            state += end_kept == 15 ? step : kept * kSymbol - end_kept;
        }
        state += 32;
    }
    store_shared(slot.target, slot.left);
    end = 63 - (state & 63);
    return state / kSymbol & 511;
}

__device__ __forceinline__ u32 swapped(u32 word) { return __byte_perm(word, 0, 0x0123); }

__device__ __forceinline__ Raw load_raw(const Unit& unit, int block) {
    Raw raw;
    raw.first = unit.positions[min(block, unit.position_count - 1)];
    raw.behind = unit.positions[min(block + 1, unit.position_count - 1)];
    const u32 index = block * kThreads + threadIdx.x, offset = index * (4 * kWords);
    if (offset + 4 * kWords + 4 <= unit.stream_bytes) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const Vec4 four = load_once(unit.stream + offset + 4 * i);
            raw.words[i] = four.x;
            raw.words[i + 1] = four.y;
            raw.words[i + 2] = four.z;
            raw.words[i + 3] = four.w;
        }
        raw.words[kWords] = load_once_u32(unit.stream + offset + 4 * kWords);
    } else {
#pragma unroll
        for (int i = 0; i <= kWords; ++i) {
            raw.words[i] = 0;
#pragma unroll 1
            for (int j = 0; j < 4; ++j)
                if (offset + 4 * i + j < unit.stream_bytes) raw.words[i] |= u32(unit.stream[offset + 4 * i + j]) << 8 * j;
        }
    }
    const u32 last = (unit.stream_bytes + kBlockBytes - 1) / kBlockBytes * kGapWords - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) raw.gaps[i] = unit.gaps[min(index * kGapBits / 32 + i, last)];
    return raw;
}

__device__ __forceinline__ Piece prepare(const Raw& raw) {
    Piece piece;
    u32 before = 0;
#pragma unroll
    for (int i = 0; i <= kWords; ++i) {
        const u32 word = swapped(raw.words[i]);
        piece.words[i] = __funnelshift_r(word, before, kLead);
        before = word;
    }
    piece.words[kWords + 1] = before << (32 - kLead);
    // A stream block has a whole number of gap words: its number does not matter here.
    const u32 gaps = __funnelshift_l(swapped(raw.gaps[1]), swapped(raw.gaps[0]), threadIdx.x * kGapBits);
    piece.gap = gaps >> 27;
    piece.next_gap = gaps << kGapBits >> 27;
    return piece;
}

// The bits of `inside` where `mask` has them, else those of `outside`.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 inside, u32 outside) { return ((inside ^ outside) & mask) ^ outside; }

// Four neighbouring words.
__device__ __forceinline__ Vec2 join(u32 rest, u32 exponents) {
    const u32 low = select_bits(kSignMask, exponents << 7, rest), high = select_bits(kSignMask, rest, exponents >> 1);
    return {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
}

__device__ __forceinline__ void store_single(const Unit& unit, u32 index, u32 exponent) {
    const u32 byte = unit.rest[index];
    unit.output[index] = u16((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f));
}

__device__ __forceinline__ u32 shared_byte(u32 address) {
    u32 byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address));
    return byte;
}

// Where a thread's symbols go.
struct Place {
    u32 before, codes;   // codes of the threads in front of it, and of all
    u32 symbols;         // the last four in front of its own
    bool spills;         // a slot reaches into the compact symbols
};

__device__ __forceinline__ Place scan(Shared& shared, u32 slot, u32 count) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 tail = slot + count / 4 * kSlotStep;
    const u32 last = __funnelshift_r(load_shared(tail - kSlotStep), load_shared(tail), 8 * count);
    int warp_codes;
    Place place;
    place.symbols = __shfl_up_sync(kFull, last, 1);
    place.before = sum_before(count, lane, warp_codes);
    place.codes = 0;
    if (lane == kLanes - 1) {
        shared.warp_codes[warp] = warp_codes;
        shared.warp_symbols[warp] = last;
    }
    place.spills = __syncthreads_or(count > 4 * kSlotWords);
    if (lane == 0) place.symbols = warp > 0 ? shared.warp_symbols[warp - 1] : 0;
#pragma unroll
    for (int i = 0; i < kThreads / kLanes; ++i) {
        if (i < warp) place.before += shared.warp_codes[i];
        place.codes += shared.warp_codes[i];
    }
    return place;
}

// Moves a slot's symbols to the shared address `target`, and those in front of them in the same word. A word is stored by the thread
// with its last symbol, so that each is stored once; the last thread also stores its last word if that is not whole.
__device__ __forceinline__ void compact_slot(u32 slot, u32 count, u32 symbols, u32 target) {
    const int words = (target % 4 + count) / 4 + (threadIdx.x == kThreads - 1);
    const u32 shift = 8 * target;   // modulo 32
    target &= ~3u;
#pragma unroll 1
    for (int i = 0; i < words; i += 4) {
        u32 next[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) next[j] = load_shared(slot + (i + j) * kSlotStep);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (i + j < words) store_shared(target + 4 * (i + j), __funnelshift_l(symbols, next[j], shift));
            symbols = next[j];
        }
    }
}

// Groups of 8 neighbouring words that a thread stores, kThreads groups apart, kBatch at a time.
struct Groups {
    const u8* source;
    u16* target;
    u32 exponents;   // shared address
    int left;        // groups of all threads from the present one on
    Vec2 rest[kBatch];

    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (left > i * kThreads) rest[i] = load_once_vec2(source + i * kThreads * 8);
    }
    __device__ __forceinline__ void store_all() {
        while (left > 0) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (left > i * kThreads) {
                    const Vec2 eight = load_shared_vec2(exponents + i * kThreads * 8);
                    const Vec2 front = join(rest[i].x, eight.x), back = join(rest[i].y, eight.y);
                    store_once(target + i * kThreads * 8, {front.x, front.y, back.x, back.y});
                }
            }
            left -= kBatch * kThreads;
            source += kBatch * kThreads * 8;
            target += kBatch * kThreads * 8;
            exponents += kBatch * kThreads * 8;
            load();
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) decode_df11(const Unit unit) {
    extern __shared__ Vec4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int thread = threadIdx.x, blocks = (unit.stream_bytes + kBlockBytes - 1) / kBlockBytes;
    const u32 table = opaque(shared_address(shared.look_ups)), slot = shared_address(shared.symbol_words + thread);
    let_kernel_behind_start();
    Raw raw = load_raw(unit, blockIdx.x);
    build_table(shared, unit);
    await_kernel_before();

    for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
        const u32 first = u32(min(i64(raw.first), unit.words)), behind = u32(min(i64(raw.behind), unit.words));
        const Piece piece = prepare(raw);
        if (128 * thread < min(behind - first, kBlockCodes)) prefetch(unit.rest + min(i64(first) + 128 * thread, unit.words - 1));
        u32 end;
        const u32 count = decode_piece(shared, table, piece, Slot{slot}, end);
        const u32 offset = (u32(block) * kThreads + thread) * (4 * kWords);
        if (offset + 8 * kWords <= unit.stream_bytes && end != piece.next_gap) *unit.malformed = 1;
        if (block + int(gridDim.x) < blocks) raw = load_raw(unit, block + gridDim.x);

        const Place place = scan(shared, slot, count);
        // Behind the last weight, the stream holds up to seven bits that may look like codes.
        const u32 expected = behind - first;
        if (thread == 0 && (block + 1 < blocks ? place.codes != expected : place.codes < expected)) *unit.malformed = 1;
        const u32 total = behind > first ? min(expected, place.codes) : 0, stop = first + total;

        if (place.spills || place.codes > kCompactCodes) {   // codes of less than two bits: slow
            for (u32 i = 0; i < count && place.before + i < total; ++i)
                store_single(unit, first + place.before + i, shared_byte(slot + i / 4 * kSlotStep + i % 4));
        } else {
            // Where the first symbol goes: so that the exponents of 8 words at a multiple of 8 lie together.
            const u32 compact = shared_address(shared.symbol_words + kCompact) + first % 8;
            const u32 group = first / 8 + (first % 8 > 0) + thread;
            Groups groups{unit.rest + u64(group) * 8, unit.output + u64(group) * 8, compact + (8 * group - first), int(stop / 8) - int(group)};
            groups.load();
            compact_slot(slot, count, place.symbols, compact + place.before);
            __syncthreads();
            groups.store_all();
            // What is left in front and behind: fewer than 8 words each.
            const u32 head = min(first + (-first & 7), stop), rear = max(stop & ~7u, head);
            const u32 single = thread < 8 ? first + thread : rear + (thread - 8);
            if (thread < 16 && single < (thread < 8 ? head : stop)) store_single(unit, single, shared_byte(compact + (single - first)));
        }
        __syncthreads();   // before a slot reaches into the compact symbols
    }
}
