// How a warp walks a row group, one of mma's matrices (columns.cuh): it decodes the stage behind while it multiplies the one at hand. See linear_chains.cuh and
// linear_rounds.cuh, which say what a warp walks, where x is, and what becomes of sums.
//
//   chain      a row group's range of K, which one accumulator goes through stage by stage
//   piece      what a chunk has of a walk, most often all of it, sometimes the end of a chain and the beginning of the next
#pragma once
#include "columns.cuh"

constexpr int kRing = 4;                        // slabs: of the one at hand and those on their way
constexpr int kTurn = 2 * kRing, kShort = kRing;   // stages of the loop's body, and of a short turn, in which a chunk ends
constexpr int kListed = 16;                     // pieces in a warp's list
static_assert(kChunkStages == 2 * kTurn, "a chunk has two turns");

// A piece in its warp's list, in shared memory.
struct alignas(16) Piece {
    Vec2 streams;      // where they start and stop, as the offsets say
    u32 place;         // of its row group among the block's, times 2^16; of its chunk
    u32 stages;        // a bit for each stage of the chunk that belongs to it; and above
};
constexpr u32 kStagesMask = (1u << kChunkStages) - 1, kTurnMask = (1u << kTurn) - 1;
constexpr u32 kBegins = 1u << 16, kEnds = 1u << 17;    // what its warp has of the chain, with its first stage and behind its last
constexpr u32 kOpens = 1u << 18, kCloses = 1u << 19;   // the chain itself, there
constexpr int kBorderBit = 20;                         // four bits: in front of which stage a chain ends and the next begins, 0 if none does
constexpr int kRangeBit = 24;                          // from here on the number of its first stage's range
// Behind the pieces of a list: the shifts of their rows; of the staged piece where its streams are, and how many words.
constexpr u32 kShifts = kListed * sizeof(Piece), kStaged = kShifts + 8 * kListed, kListBytes = kStaged + 16;
static_assert(kListBytes == 400, "linear/walk.py: _LIST_WORDS");

// A piece: in which of the block's row groups it is, of which chunk it has stages [begin, end), and whether it is the first or the last of those of a
// walk that lie behind each other.
__device__ __forceinline__ Vec2 describe_piece(const Geometry& geometry, const Job& job, int slot, int chunk, int begin, int end, bool first, bool last) {
    const int passed = chunk * kChunkStages, left = geometry.stages - passed;
    const int range = divide(passed + begin, job.by_range), opening = range * job.stages_per_range - passed, closing = opening + job.stages_per_range;
    const int border = closing < end ? closing : 0;
    u32 stages = (1u << end) - (1u << begin);
    if (begin == opening) stages |= kOpens | kBegins;
    if (first) stages |= kBegins;
    if (min(border ? border + job.stages_per_range : closing, left) == end) stages |= kCloses | kEnds;
    if (last) stages |= kEnds;
    return {u32(slot << 16 | chunk), stages | u32(border) << kBorderBit | u32(range) << kRangeBit};
}

// A warp's slabs in shared memory and on their way there, by asynchronous copies, of which each lane reads what it has copied itself: loads to
// registers would have to be waited for all at once.
struct Ring {
    u32 signs, bytes;                  // shared addresses of the lane's
    const u8 *sign_source, *source;    // of those behind the ring

    __device__ __forceinline__ Ring(u32 slabs, int lane) : signs(slabs + 4 * lane), bytes(slabs + kSignBytes + 16 * lane) {}
    __device__ __forceinline__ void point_to(const u8* slab, int lane) {
        sign_source = slab + 4 * lane;
        source = slab + kSignBytes + 16 * lane;
        asm("" : "+l"(sign_source), "+l"(source));    // or each copy's address is worked out anew
    }
    // The slab at a place; in the order of places, each a group of copies of its own.
    __device__ __forceinline__ void fetch(int place) const {
        copy_async_4(signs + place * kSlabBytes, sign_source + place * kSlabBytes);
        copy_async(bytes + place * kSlabBytes, source + place * kSlabBytes);
        copy_async(bytes + place * kSlabBytes + kStageBytes, source + place * kSlabBytes + kStageBytes);
    }
    __device__ __forceinline__ void go_on() { sign_source += kRing * kSlabBytes, source += kRing * kSlabBytes; }
    __device__ __forceinline__ void await_next() const { copy_wait<kRing - 1>(); }
    __device__ __forceinline__ Vec4 stage_bytes(int stage) const { return load_shared_vec4(bytes + (stage >> 1) * kSlabBytes + (stage & 1) * kStageBytes); }
    __device__ __forceinline__ u32 pair_signs(int stage) const { return load_shared(signs + (stage >> 1) * kSlabBytes); }
};

// Where chains end and begin inside pieces. Between turns: also all chains begin and end there. Inside turns: with x in shared memory one body then serves all
// turns: two, one of them rarely used, take longer to fetch than to select, and what a turn reads behind x's end no sum keeps.
enum Borders { kNowhere, kBetweenTurns, kInsideTurns };

// Shared memory of a block whose warps walk: table, its entries and then x, for each warp two staging buffers and a ring of slabs, and its list.
struct WalkMemory {
    u32* words;
    int behind;                       // which of them comes behind all lists
    u32 x, buffers, list;             // shared addresses; buffers, list: of this warp
};

__device__ __forceinline__ WalkMemory walk_memory(const Job& job, u32* words, int warp, int warps) {
    const int warp_words = 2 * job.buffer_words + kRing * kSlabBytes / 4, buffer_words = job.table_words + job.x_words, list_words = buffer_words + warps * warp_words;
    const u32 base = u32(__cvta_generic_to_shared(words));
    return {words, list_words + warps * kListBytes / 4, base + 4 * job.table_words, base + 4 * (buffer_words + warp * warp_words),
            base + 4 * list_words + warp * kListBytes};
}

// A whole walk of a warp, whose Way says
//   copies_table             whether that is on its way already
//   has_short_turns          whether chunks end with turns of kShort stages where that is enough; a walk's first chunk has more than that many
//   count, at, group_of      what its pieces are, and which row group a place is of
//   fetch_x                  starts copies of x, where that is each warp's work
//   await_turn, end_turn     around each turn that multiplies, while columns has its x; skip_turn for one that does not
//   begin                    gives the sums that a piece begins with
//   close, hand_on           takes those of a whole range, or of one that another warp goes on with
//   pass                     what is left to do for the others, behind the last piece
template <class Way, int octets, Borders borders>
__device__ __forceinline__ void walk(const Geometry& geometry, const Packed& packed, const Job& job, const WalkMemory& at, Way& way, int lane) {
    constexpr int kSums = 2 * octets;
    const int pieces = way.count();
    const u32 base = u32(__cvta_generic_to_shared(at.words)), buffers = at.buffers, list = at.list, both_buffers = 2 * buffers + 4 * job.buffer_words;

    auto listed = [&](int index) { return list + index % kListed * u32(sizeof(Piece)); };
    // The walk's pieces from `index` on, at most `count` of them, to the list.
    auto list_pieces = [&](int index, int count) {
        index += lane;
        if (lane >= count || index >= pieces) return;
        const Vec2 piece = way.at(index);
        const u32 group = way.group_of(piece.x), target = listed(index);
        const u8* offset = packed.data + packed.offsets + 4 * (u64(group) * u32(geometry.chunks_per_row_group) + (piece.x & 0xffff));
        copy_async_4(target, offset);
        copy_async_4(target + 4, offset + 4);
        store_shared(target + 8, piece);
        if (packed.has_row_shifts) copy_async_8(list + kShifts + index % kListed * 8, packed.data + packed.row_shifts + 8 * group);
    };
    // Piece `index` to a buffer; its offsets are there.
    auto stage_piece = [&](int index, u32 buffer) {
        const Vec2 streams = load_shared_vec2(listed(index));
        const StagedPlace at = stage_streams(packed, buffer, streams.x, streams.y, lane);
        store_shared(list + kStaged, Vec2{buffer + 4 * at.begin, u32(at.size)});
        if (index > 2 && index % (kListed / 2) == 2) list_pieces(index - 2 + kListed / 2, kListed / 2);   // those two in front are at hand still
    };
    auto slab_of = [&](u32 place) {
        const u32 group_bytes = u32(geometry.stages >> 1) * kSlabBytes + (geometry.stages & 1) * (kSignBytes + kStageBytes);
        return packed.data + packed.planes + u64(way.group_of(place)) * group_bytes + u64(place & 0xffff) * (kChunkStages / 2 * kSlabBytes);
    };
    auto is_short = [](u32 stages) { return stages >> kShort == 0; };   // of those from a turn's first one on
    // A piece's first turn may count for nothing, where a walk, or a part of it, begins in the chunk's second half. Then it is looked up alone, and its slabs are not brought.
    auto has_idle_turn = [](u32 stages) { return (stages & kTurnMask) == 0; };
    auto first_slab = [&](const Vec2& piece) { return slab_of(piece.x) + (has_idle_turn(piece.y) ? kRing * kSlabBytes : 0); };
    auto stages_of = [&](u32 place) { return min(kChunkStages, geometry.stages - int(place & 0xffff) * kChunkStages); };

    // What decoding needs first comes first from memory.
    let_kernel_behind_start();
    list_pieces(0, kListed);
    copy_commit();
    __syncwarp();
    Vec2 piece = load_shared_vec2(listed(0) + 8);
    Ring ring(buffers + 8 * job.buffer_words, lane);
    if (pieces > 0) {                   // while the offsets of its streams are on their way
        ring.point_to(first_slab(piece), lane);
        ring.fetch(0);
        copy_commit();
    }
    const Table<true> table(packed, at.words, at.words + job.table_words, !Way::copies_table);
    copy_commit();
    auto fetch_x = [&] {                // to where the table's entries were
        table.build();
        way.fetch_x();
        copy_commit();
    };
    way.clear_flags();
    if (pieces == 0) {
        fetch_x();
        copy_wait<0>();
        __syncthreads();
        way.pass();
        return;
    }
    copy_wait<2>();                     // the list
    __syncwarp();
    stage_piece(0, buffers);
    copy_commit();
    fetch_x();                          // the other slabs would keep the streams waiting
#pragma unroll
    for (int i = 1; i < kRing; ++i) {
        ring.fetch(i);
        copy_commit();
    }
    ring.go_on();

    const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
    Opened chunk;
    // The staged piece, which is at `place`, goes to the streams; piece `behind` is staged where the one was that is at hand.
    auto open_staged = [&](u32 place, int behind) {
        __syncwarp();                   // its streams are older than the slabs that have been waited for
        const Vec2 staged = load_shared_vec2(list + kStaged);
        const int stages = stages_of(place);
        chunk.open(staged.x, staged.y, stages, lane);
        if (behind < pieces) stage_piece(behind, both_buffers - (staged.x & ~15u));
    };
    Sums<octets> sums = {};
    u32 scale = kNoShift;

    // Look-ups and multiplications take turns: each waits for what it depends on, and nothing waits for the other. While a stage is multiplied,
    // the one behind is decoded; its second look-ups, and all its loads, stand in front of the first multiplications, and the first look-ups of the
    // stage behind that in front of the last. Patches come last of all: they are a branch, in front of which the compiler has mma waited for.
    Vec4 upper[2];                      // of the stage at hand and the one behind: all but the signs
    LookUps begun;
    struct { Vec4 bytes; u32 signs; Vec4 x[octets]; } at_hand;   // signs: of two stages
    auto step = [&](int q, u32 raw, u32 top, u32 signs, const Vec4 (&x)[octets]) {
        multiply_quad(sums, q & 3, raw, and_or(signs << q, kSignMask, top), scale, x);
    };

    // The first piece's first stage.
    copy_wait<kRing>();                 // the streams
    open_staged(piece.x, 1);
    copy_commit();                      // a group of its own: a first piece of one turn has the second opened before the loop's are waited for
    copy_wait<kRing>();                 // its own part of table and x, and the first slab
    __syncthreads();
    begun = chunk.begin(base, byte_mask);
    upper[0] = chunk.go_on(begun, base, byte_mask);
    chunk.complete(upper[0], common);
    chunk.mend(upper[0], 0, lane);
    begun = chunk.begin(base, byte_mask);
    at_hand.bytes = ring.stage_bytes(0), at_hand.signs = ring.pair_signs(0);

    for (int index = 0;; ++index) {
        const bool more = index + 1 < pieces;
        if (piece.y & kBegins) {
            scale = scale_of(packed.has_row_shifts ? i8(load_shared_u8(list + kShifts + index % kListed * 8 + (lane >> 2))) : packed.shift);
            way.begin(piece, sums);
        }
        const Vec2 behind = load_shared_vec2(listed(index + 1) + 8);   // anything, if there is none
        u32 active = piece.y & kStagesMask;
        u32 opening = 0, closing = 0, range = piece.y >> kRangeBit;   // a bit for each stage of the chunk that is a chain's first, or its last
        if (borders != kNowhere) {
            const u32 border = 1u << (piece.y >> kBorderBit & (kChunkStages - 1)) & ~1u, first = active & (0 - active);
            opening = border | (piece.y & kOpens ? first : 0);
            closing = (border | (piece.y & kCloses ? active + first : 0)) >> 1;
        }
        bool last;
        do {
            last = active >> kTurn == 0;
            if (last) ring.point_to(first_slab(behind), lane);
            if (borders == kBetweenTurns && (opening & 1)) sums = {};
            Sums<octets> ended;
            const u32 active_behind = last ? behind.y & kTurnMask : active >> kTurn;
            const int slabs_behind = Way::has_short_turns && is_short(active_behind) ? kShort / 2 : kRing;   // of the next turn
            auto turn = [&](int length, bool whole) {
                if (whole || (active & 1)) way.columns.load(at_hand.x, 0, 0);
#pragma unroll
                for (int stage = 0; stage < length; ++stage) {
                    const int stage_behind = (stage + 1) % length;
                    const bool any = whole || (active >> stage & 1);
                    const auto now = at_hand;
                    const int half = 4 * (stage & 1);
                    Vec4 x[octets];
                    if (any) way.columns.load(x, stage, 1);
                    const Vec4 tops = upper[stage & 1];
                    Vec4& next = upper[(stage + 1) & 1];
                    next = chunk.go_on(begun, base, byte_mask);
                    if (stage % 2 == 1) {
                        ring.await_next();
                        at_hand.signs = ring.pair_signs(stage_behind);
                    }
                    at_hand.bytes = ring.stage_bytes(stage_behind);
                    if (stage + 1 < length && (whole || (active >> (stage + 1) & 1))) way.columns.load(at_hand.x, stage + 1, 0);
                    if (borders == kInsideTurns) {   // by selection: branches would keep loads from moving
#pragma unroll
                        for (int i = 0; i < kSums; ++i) {
                            float& sum = sums.of[i];
                            sum = opening >> stage & 1 ? 0.0f : sum;
                        }
                    }
                    if (any) {
                        step(half, now.bytes.x, tops.x, now.signs, now.x);
                        step(half + 1, now.bytes.y, tops.y, now.signs, now.x);
                    }
                    chunk.complete(next, common);
                    if (stage == length - 2) {      // the streams may go on with another chunk
                        if (length < kTurn) copy_wait<1>();   // which may have been staged a short turn ago
                        chunk.mend(next, stage + 1, lane);
                        if (last && more) open_staged(behind.x, index + 2);
                        else chunk.pass(kTurn);
                    }
                    begun = chunk.begin(base, byte_mask);
                    if (any) {
                        step(half + 2, now.bytes.z, tops.z, now.signs, x);
                        step(half + 3, now.bytes.w, tops.w, now.signs, x);
                    }
                    if (stage % 2 == 0) {            // what is copied is waited for: nothing may be on its way when the block ends
                        if ((!last || more) && stage >> 1 < slabs_behind) ring.fetch(stage >> 1);
                        copy_commit();               // with what was staged
                        if (length < kTurn && stage == length - 2)   // those of the second half, in whose places nothing is
#pragma unroll
                            for (int i = length / 2; i < kRing; ++i) {
                                if (more && i < slabs_behind) ring.fetch(i);
                                copy_commit();
                            }
                    }
                    if (stage != length - 2) chunk.mend(next, stage_behind, lane);
                    if (borders == kInsideTurns)
#pragma unroll
                        for (int i = 0; i < kSums; ++i) {
                            float& sum = ended.of[i];
                            sum = closing >> stage & 1 ? sums.of[i] : sum;
                        }
                }
            };
            if (has_idle_turn(active)) {
#pragma unroll 1
                for (int stage = 1; stage <= kTurn; ++stage) {
                    if (stage == kTurn) chunk.pass(kTurn);
                    upper[0] = chunk.go_on(begun, base, byte_mask);
                    chunk.complete(upper[0], common);
                    begun = chunk.begin(base, byte_mask);
                    chunk.mend(upper[0], stage % kTurn, lane);
                }
                way.skip_turn();
            } else {
                way.await_turn();
                if ((borders != kNowhere && Way::has_all_of_x) || (active & kTurnMask) == kTurnMask) turn(kTurn, true);
                else if (Way::has_short_turns && is_short(active)) turn(kShort, false);
                else turn(kTurn, false);
                ring.go_on();
                way.end_turn();
            }
            active >>= kTurn;
            if (borders != kNowhere && closing & kTurnMask) {
                if (borders == kBetweenTurns) ended = sums;
                way.close(ended, piece.x >> 16, range++);
            }
            opening >>= kTurn;
            closing >>= kTurn;
        } while (!last);
        if (piece.y & kEnds) {
            if (!(piece.y & kCloses)) way.hand_on(sums);
            else if (borders == kNowhere) way.close(sums, piece.x >> 16, range);
        }
        if (!more) break;
        piece = behind;
    }
    way.pass();
}
