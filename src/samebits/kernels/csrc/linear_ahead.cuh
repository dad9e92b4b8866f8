// The fused linear layer where a block has few row groups, so that what takes time is the order of summation: mma after mma, each waiting for
// the one before. Some warps do nothing but that, the others decode for them.
//
//   segment    whole ranges of K behind each other, the same for all row groups; most often there is one. Of several a block has all, or, where x is too
//              large for that, one: then segments are apart, and sums of ranges meet in memory
//   line       a row group in a segment; its decoded upper bytes wait in the line's ring in shared memory, run by run
//
// Each line, or two of them, have a warp that multiplies: two read x once. A segment has one that brings x, run by run, into a ring for all its lines. The
// other warps decode and share the chunks of all lines, chunk after chunk: lines advance together.
//
// Nobody waits for ever. A warp that decodes waits for a line whose ring is full, a line that has what is decoded waits for x, and maybe for the other line
// of its warp, and the warp that brings x waits for the segment's line that is farthest behind. Of all tasks that are not done, take the first: the chunks in
// front are done, of all lines. Where x has a chunk's runs, the task's line has room, or can go on as far as x reaches, which is to the end of its chunk at
// least; the other line's task is done, or the next one, of another warp. Where rings have them, x comes as far as the segment's line that is farthest behind
// goes, so all lines go to the end of the chunks in front, and then the task's line has room for all of its chunk. See linear.cuh.
#pragma once
#include "columns.cuh"
#include "hopper.cuh"

constexpr int kMaxWarps = 20, kMaxTwoWarps = 16;          // where a warp multiplies one line, and where it multiplies two
constexpr int kRunBytes = kRun * 512;                     // of a run in a ring: [stage][lane][step], a quad's upper bytes, or its raw bytes
constexpr int kRawRuns = 3;                               // whose raw bytes are in shared memory or on their way there
template <int octets, int lines>
constexpr int kDepth = octets * lines == 1 ? 2 : 1;       // stages whose operands are in registers or on their way there; more take registers from warps
constexpr int kChunkSigns = kChunkStages / 2 * kSignBytes;   // bytes of a chunk's sign words
constexpr int kColumnBytes = kRun * 128;                  // of a token in a run of x
template <int octets> constexpr int kStageBytesOf = octets / 2 * kLeftStageBytes;   // of a stage of x, of more than eight tokens
constexpr int kManyFlying = 8, kFewFlying = 2;            // runs of x that are on their way
static_assert(kChunkStages % kRun == 0, "a chunk is whole runs");

// Stages of a segment.
struct Segment {
    int begin, end;

    __device__ __forceinline__ Segment(const Geometry& geometry, const Job& job, int number) : begin(number * job.segment_stages) {
        end = min(begin + job.segment_stages, geometry.stages);
    }
    __device__ __forceinline__ int first_run() const { return begin / kRun; }
    __device__ __forceinline__ int first_chunk() const { return begin / kChunkStages; }
    __device__ __forceinline__ int runs() const { return (end - 1) / kRun - first_run() + 1; }
    __device__ __forceinline__ int chunks() const { return (end - 1) / kChunkStages - first_chunk() + 1; }
};

// Where a block's lines keep what is decoded, `places` runs each; how far they are; and where their raw bytes are.
struct Rings {
    u32 upper, flags, raw;        // shared addresses
    int lines, places;

    __device__ __forceinline__ u32 upper_of(int line, int place) const { return upper + (line * places + place) * kRunBytes; }
    // Flags: of a place, how many of the line's runs there were with the one that it holds; of a line, how many runs are not needed any more.
    __device__ __forceinline__ u32 ready(int line, int place) const { return flags + 4 * (line * places + place); }
    __device__ __forceinline__ u32 taken(int line) const { return flags + 4 * (lines * places + line); }
    // Of a segment, how many runs of x have come.
    __device__ __forceinline__ u32 brought(int segment) const { return flags + 4 * (lines * (places + 1) + segment); }
    __device__ __forceinline__ int behind(int place) const { return place + 1 == places ? 0 : place + 1; }
    // Whether a segment's line that is farthest behind still needs one of so many runs; own: lines of the segment.
    __device__ __forceinline__ bool needs(int segment, int own, int runs, int lane) const {
        return __any_sync(kFull, lane < own && int(read_flag(taken(segment * own + min(lane, own - 1)))) < runs);
    }
};

// A chunk's patches (6.4), of which each lane has one at hand. They change what has been decoded to shared memory, all of a run's at once: stage by stage,
// as Opened::mend applies them, they would stand between stages that can be decoded side by side.
struct Patches {
    u32 list, count, own;         // shared address of the lane's, and itself; how many there are

    __device__ __forceinline__ Patches(const Opened& chunk, bool raw, u32 end, int lane) : list(chunk.next_patch + 4 * lane) {
        count = raw ? 0 : uniform(end - chunk.next_patch) >> 2;
        own = at(lane);
    }
    __device__ __forceinline__ u32 at(u32 number) const { return number < count ? load_shared(list + 4 * (number & ~(kLanes - 1))) : kNoPatch; }
    // Those of the run from stage `first` on, whose upper bytes are at a shared address.
    __device__ __forceinline__ void apply(u32 bytes, int first, int lane) const {
        change(own, bytes, first);
        if (count > kLanes)
#pragma unroll 1
            for (u32 number = kLanes; number < count; number += kLanes) change(at(number + lane), bytes, first);
    }
    static __device__ __forceinline__ void change(u32 patch, u32 bytes, int first) {
        const u32 place = (patch >> 7 & 0x600) + (patch >> 5 & 0x1f0) + (patch >> 12 & 12);   // of its quad: stage, lane, step
        if (patch >> 18 == u32(first) / kRun) change_shared(bytes + place, (patch & 127) << (patch >> 4 & 24));
    }
};
static_assert(kRun == 4, "a patch's stage: two bits in the run, and the run's number above");

// What of the weight a block multiplies: every `blocks`-th row group from one on, in all segments, or in one.
template <bool apart>
struct Share {
    const Job& job;
    int place = 0, first_segment = 0;

    __device__ __forceinline__ explicit Share(const Job& job) : job(job) {
        if (!apart) return;
        place = job.block();
        while (place >= job.blocks) place -= job.blocks, ++first_segment;
    }
    // From `job` each time: numbers that are kept take registers.
    __device__ __forceinline__ int block() const { return apart ? place : job.block(); }
    __device__ __forceinline__ int segments() const { return apart ? 1 : job.segments; }
};

// What a warp decodes: chunk `chunk` of a line, both counted in their segment; and segments in their block.
struct Task {
    int chunk, slot, segment;
    bool exists;                  // or there is none behind it either
};

__device__ __forceinline__ int buffer_bytes(const Job& job) { return kChunkSigns + 4 * job.buffer_words; }

// A warp that decodes.
struct Decoder {
    const Geometry& geometry;
    const Packed& packed;
    const Job& job;
    const Rings rings;
    u32 table, buffers;           // shared addresses; buffers: of two chunks' signs and streams
    int block, first_segment, own, step, lane;
    Task task, next;
    StagedPlace staged;           // its streams
    u32 start, stop;              // of the streams of the task whose streams come next

    // Lines are numbered segment by segment, tasks chunk by chunk through all lines. Of this warp's tasks from that of line `number` on, which may
    // be one of a later chunk, the first that there is: segments need not have as many chunks.
    __device__ __forceinline__ Task task_from(int chunk, int number) const {
        for (;; number += step) {
            while (number >= rings.lines) number -= rings.lines, ++chunk;
            int slot = number, segment = 0;
            while (slot >= own) slot -= own, ++segment;
            const bool exists = chunk < segment_of(segment).chunks();
            if (exists || chunk * kChunkStages >= job.segment_stages + kChunkStages) return {chunk, slot, segment, exists};
        }
    }
    __device__ __forceinline__ Segment segment_of(int number) const { return Segment(geometry, job, first_segment + number); }
    __device__ __forceinline__ int line(const Task& task) const { return task.segment * own + task.slot; }
    __device__ __forceinline__ Task behind(const Task& task) const { return task_from(task.chunk, line(task) + step); }

    __device__ __forceinline__ void find_first(int number) {
        task = task_from(0, number);
        find(task);
    }
    __device__ __forceinline__ void bring_first() {
        staged = bring(task, buffers);
        next = behind(task);
        find(next);
    }
    __device__ __forceinline__ int group(const Task& task) const { return task.slot * job.blocks + block; }
    __device__ __forceinline__ int chunk(const Task& task) const { return segment_of(task.segment).first_chunk() + task.chunk; }
    __device__ __forceinline__ void find(const Task& task) {
        if (!task.exists) return;
        const u32* offsets = reinterpret_cast<const u32*>(packed.data + packed.offsets) + size_t(group(task)) * geometry.chunks_per_row_group + chunk(task);
        start = load_u32(offsets);
        stop = load_u32(offsets + 1);
    }
    // Signs and streams to a buffer.
    __device__ __forceinline__ StagedPlace bring(const Task& task, u32 buffer) {
        if (!task.exists) return {};
        const int first = chunk(task) * kChunkStages;
        const u8* slab = packed.data + packed.planes + slab_offset(geometry.stages, group(task), first);
        const int stages = min(kChunkStages, geometry.stages - first);
        const StagedPlace place = stage_streams(packed, buffer + kChunkSigns, start, stop, lane);
#pragma unroll 1
        for (int pair = lane >> 3; 2 * pair < stages; pair += 4)
            copy_async(buffer + pair * kSignBytes + 16 * (lane & 7), slab + pair * kSlabBytes + 16 * (lane & 7));
        return place;
    }
    __device__ __forceinline__ void decode_all() {
        u32 buffer = buffers, other = buffers + buffer_bytes(job);
#pragma unroll 1
        while (task.exists) {
            copy_wait<0>();
            __syncwarp();
            StagedPlace next_staged;
            decode(buffer, [&] {         // once its streams are opened: what comes next
                next_staged = bring(next, other);
                copy_commit();
            });
            task = next, staged = next_staged;
            next = behind(next);
            find(next);
            const u32 used = buffer;
            buffer = other, other = used;
        }
    }
    // The task, from a buffer.
    template <class Meanwhile>
    __device__ __forceinline__ void decode(u32 buffer, const Meanwhile& meanwhile) {
        const u32 byte_mask = ((1u << packed.width) - 1) << 2, common = u32(packed.window >> 4) * 0x10101010u;
        const u32 at = buffer + kChunkSigns + 4 * staged.begin, signs = buffer + 4 * lane;
        const Segment segment = segment_of(task.segment);
        const int first = chunk(task) * kChunkStages, count = min(kChunkStages, geometry.stages - first), end = min(count, segment.end - first);
        const int own_line = line(task);
        Opened chunk;
        chunk.open(at, staged.size, count, lane);
        const bool raw = uniform(chunk.is_raw());
        const Patches patches(chunk, raw, at + 4 * staged.size, lane);
        meanwhile();
        LookUps begun = chunk.begin(table, byte_mask);
        int number = first / kRun - segment.first_run();   // of a run in its segment
        const int entry = max(number, 0);
        int place = entry - divide(entry, job.by_ring) * rings.places;
#pragma unroll 1
        for (int run = 0; run < end; run += kRun, ++number) {
            if (number >= rings.places) wait_until(rings.taken(own_line), number - rings.places + 1);
            const u32 bytes = rings.upper_of(own_line, place), sign = signs + (run >> 1) * kSignBytes;
            const u32 pairs[2] = {load_shared(sign), load_shared(sign + kSignBytes)};
            auto leave = [&](int s, const Vec4& tops) { store_shared(bytes + s * 512 + 16 * lane, with_signs(pairs[s >> 1] << (4 * (s & 1)), tops)); };
#pragma unroll
            for (int s = 0; s < kRun; ++s) {
                Vec4 tops = chunk.go_on(begun, table, byte_mask);
                chunk.complete(tops, common);
                begun = chunk.begin(table, byte_mask);
                leave(s, tops);
            }
            if (raw) {
#pragma unroll
                for (int s = 0; s < kRun; ++s) leave(s, chunk.read_raw(run + s, lane));
            }
            __syncwarp();                // for patches
            patches.apply(bytes, run, lane);
            if (number < 0) continue;    // of the segment before: where the first run will be
            __syncwarp();
            if (lane == 0) set_flag(rings.ready(own_line, place), number + 1);
            place = rings.behind(place);
        }
        __syncwarp();
    }
};

// A warp that brings x of up to eight tokens for a segment, `flying` runs at once: for each run and token kColumnBytes, laid out as by stage_columns.
template <int flying>
__device__ __forceinline__ void bring_x(const Geometry& geometry, const Job& job, const Rings& rings, const Segment& segment, int number, int own, u32 target, int lane) {
    const u32 brought = rings.brought(number);
    auto publish = [&](int runs) {
        __syncwarp();
        if (lane == 0) set_flag(brought, runs);
    };
    // Of a run's 64 quads of a token each lane brings two, two stages apart.
    const int stage = lane >> 4, q = lane >> 2 & 3, t = lane & 3;
    const u32 own_place = stage * 128 + ((q >> 1) << 6) + (t << 4) + ((q & 1) << 3);   // of even tokens
    int source = (segment.first_run() * kRun * 64) + 4 * lane, at = segment.first_run() * kRun + stage, place = 0;   // in x: word, stage
    const int runs = segment.runs();
    await_kernel_before();
#pragma unroll 1
    for (int run = 0; run < runs; ++run) {
        const int before = run - job.x_places + 1;            // runs up to the one in this place
        if (before > 0 && rings.needs(number, own, before, lane)) {
            copy_wait<0>();
            publish(run);
            while (rings.needs(number, own, before, lane)) __nanosleep(40);
        }
        const u16* from = job.x + source;
        u32 to = target + place * job.tokens * kColumnBytes;
        const bool first = at < geometry.stages, second = at + 2 < geometry.stages;
#pragma unroll 4
        for (int token = 0; token < job.tokens; ++token) {
            const u32 there = to + (own_place ^ ((token & 1) << 6));
            if (first) copy_async_8(there, from);
            if (second) copy_async_8(there + 256, from + 128);
            to += kColumnBytes;
            from += geometry.columns;
        }
        copy_commit();
        copy_wait<flying - 1>();
        if (run >= flying - 1) publish(run - flying + 2);
        source += kRun * 64;
        at += kRun;
        place = place + 1 == job.x_places ? 0 : place + 1;
    }
    copy_wait<0>();
    publish(runs);
}

// The same of more than eight, as arrange.cu has written it, by bulk copies that arrive at a barrier for each place of the ring. bytes: of a stage.
template <int bytes>
__device__ __forceinline__ void bring_left(const Geometry& geometry, const Job& job, const Rings& rings, const Segment& segment, int number, int own, u32 target,
                                           u32 full, int lane) {
    const int runs = segment.runs();
    int stage = segment.first_run() * kRun, place = 0;
    fence_async();   // x may come to where the entries were
    await_kernel_before();
#pragma unroll 1
    for (int run = 0; run < runs; ++run, stage += kRun) {
        while (rings.needs(number, own, run - job.x_places + 1, lane)) __nanosleep(40);
        if (lane == 0)
            copy_bulk(target + place * (kRun * bytes), job.x + size_t(stage) * (bytes / 2), min(kRun, geometry.stages - stage) * bytes, full + 8 * place);
        __syncwarp();
        place = place + 1 == job.x_places ? 0 : place + 1;
    }
}

// A lane's part of a segment's x, run by run.
template <int octets>
struct BroughtColumns {
    LeftColumns<octets> columns;
    u32 full;                     // shared address of the places' barriers
    int places;
    RingPlace at_hand{0, 0};

    __device__ __forceinline__ BroughtColumns(const Job& job, u32 ring, u32 full, int lane) : columns(ring, lane), full(full), places(job.x_places) {}
    __device__ __forceinline__ u32 come() const { return ~0u >> 1; }   // await_run knows
    __device__ __forceinline__ void await_run() const { await(full + 8 * at_hand.slot, at_hand.parity); }
    __device__ __forceinline__ void advance() {
        at_hand.advance(places);
        columns.advance(kRun * kStageBytesOf<octets> * (at_hand.slot ? 1 : 1 - places));
    }
    __device__ __forceinline__ void load(Vec4 (&x)[octets], int stage, int half) const { columns.load(x, stage, half); }
};

template <>
struct BroughtColumns<1> {
    u32 halves[2];                // in the first run of the ring
    bool any;                     // as Columns
    u32 brought;                  // the segment's flag
    u32 run_bytes, ring_bytes, run;   // run: bytes from the first run to the one at hand

    __device__ __forceinline__ BroughtColumns(const Job& job, u32 ring, u32 brought, int lane)
        : any(lane >> 2 < job.tokens), brought(brought), run_bytes(job.tokens * kColumnBytes), ring_bytes(job.x_places * run_bytes), run(0) {
        const int token = min(lane >> 2, job.tokens - 1);
        const u32 place = ring + token * kColumnBytes + 16 * (lane & 3);
        halves[0] = place + ((token & 1) << 6);
        halves[1] = place + ((~token & 1) << 6);
    }
    // How many runs have come.
    __device__ __forceinline__ u32 come() const { return read_flag(brought); }
    __device__ __forceinline__ void await_run() const {}
    __device__ __forceinline__ void advance() {
        run += run_bytes;
        if (run == ring_bytes) run = 0;
    }
    __device__ __forceinline__ void load(Vec4 (&x)[1], int stage, int half) const { x[0] = load_shared_vec4_if(any, halves[half] + run + stage * 128); }
};

// The sums of lines that a warp multiplies: of up to eight tokens they are rows of one left matrix, of more they are right matrices of their own.
template <int octets, int lines>
struct LineSums {
    Sums<octets> of[lines];

    __device__ __forceinline__ void multiply(int q, const u32 (&raw)[lines], const u32 (&upper)[lines], const u32 (&scale)[lines], const Vec4 (&x)[octets]) {
#pragma unroll
        for (int i = 0; i < lines; ++i) multiply_quad(of[i], q, raw[i], upper[i], scale[i], x);
    }
    __device__ __forceinline__ Sums<octets> line(int i) const { return of[i]; }
};

template <int lines>
struct LineSums<1, lines> {
    float of[4];

    __device__ __forceinline__ void multiply(int q, const u32 (&raw)[lines], const u32 (&upper)[lines], const u32 (&scale)[lines], const Vec4 (&x)[1]) {
        multiply_rows(of, q, raw, upper, scale, x[0]);
    }
    __device__ __forceinline__ Sums<1> line(int i) const { return {{of[2 * i], of[2 * i + 1]}}; }
};

// A warp that multiplies lines from `line` on, whose row groups are in the block's slots from `slot` on. x_come: the segment's flag, or its barriers.
template <int octets, int lines, bool apart>
__device__ __forceinline__ void multiply_lines(const Geometry& geometry, const Packed& packed, const Job& job, const Rings& rings, int line, int slot, int number,
                                               const Share<apart>& share, u32 x_ring, u32 x_come, float* parts, u32 done, int lane) {
    const Segment segment(geometry, job, share.first_segment + number);
    auto group = [&](int i) { return (slot + i) * job.blocks + share.block(); };
    // Raw bytes come to shared memory by asynchronous copies, run by run, each a group of its own; each lane reads what it has copied itself.
    // Loads to registers would all have to be waited for at once.
    constexpr u32 line_raw = kRawRuns * kRunBytes;
    const u32 raw = rings.raw + line * line_raw + 16 * lane;
    const int runs = segment.runs();
    const u8* from = packed.data + packed.planes + slab_offset(geometry.stages, group(0), segment.first_run() * kRun) + kSignBytes + 16 * lane;
    const size_t line_planes = slab_offset(geometry.stages, job.blocks, 0);
    int raw_place = 0;                               // of the run at hand, in bytes
    auto fetch_run = [&](int number, int place) {
        if (number < runs) {
#pragma unroll
            for (int i = 0; i < lines; ++i)
#pragma unroll
                for (int s = 0; s < kRun; ++s)
                    copy_async(raw + i * line_raw + place + s * 512, from + i * line_planes + (s >> 1) * kSlabBytes + (s & 1) * kStageBytes);
        }
        copy_commit();
        from += kRun / 2 * kSlabBytes;
    };
#pragma unroll
    for (int i = 0; i < kRawRuns; ++i) fetch_run(i, i * kRunBytes);
    auto await_raw = [&] { copy_wait<kRawRuns - 1>(); };
    u32 scale[lines];
#pragma unroll
    for (int i = 0; i < lines; ++i)
        scale[i] = scale_of(packed.has_row_shifts ? reinterpret_cast<const i8*>(packed.data + packed.row_shifts)[group(i) * 8 + (lane >> 2)] : packed.shift);
    BroughtColumns<octets> columns(job, x_ring, x_come, lane);
    const u32 line_upper = rings.upper_of(1, 0) - rings.upper, line_ready = rings.ready(1, 0) - rings.flags;
    u32 upper = rings.upper_of(line, 0) + 16 * lane, ready = rings.ready(line, 0);   // of the first line and place
    keep(upper), keep(ready);

    LineSums<octets, lines> sums = {};
    struct Operands { Vec4 bytes[lines], upper[lines], x[2][octets]; };
    // How many runs there were with the one in that place, in all lines.
    auto read_ready = [&](int place) {
        u32 number = read_flag(ready + 4 * place);
        if (lines == 2) number = min(number, read_flag(ready + line_ready + 4 * place));
        return number;
    };

    int run = 0, place = 0;              // of the segment's runs: the next to read
    auto await_run = [&](u32 flag, u32 x_flag) {
        while (int(min(flag, x_flag)) <= run && run < runs) flag = read_ready(place), x_flag = columns.come();
        if (run < runs) columns.await_run();
        __syncwarp();                    // or the compiler reads what is behind the flags before
    };
    auto release_run = [&] {             // all lanes have asked for what they need of it
        __syncwarp();
        if (lane < lines) set_flag(rings.taken(line + lane), run + 1);
        ++run;
        place = rings.behind(place);
        columns.advance();
    };
    auto read = [&](int s) {
        Operands operands;
#pragma unroll
        for (int i = 0; i < lines; ++i) {
            operands.bytes[i] = load_shared_vec4(raw + i * line_raw + raw_place + s * 512);
            operands.upper[i] = load_shared_vec4(upper + i * line_upper + place * kRunBytes + s * 512);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) columns.load(operands.x[half], s, half);
        return operands;
    };
    // Ranges. What the first run has in front of the segment is a range that nobody asks for.
    const int first_range = divide(segment.begin, job.by_range), skipped = segment.begin % kRun;
    int range = first_range - (skipped > 0), left = skipped;   // stages of the range
    auto begin_range = [&] { left = min((range + 1) * job.stages_per_range, segment.end) - range * job.stages_per_range; };   // none or fewer behind the segment's last
    auto end_range = [&] {
#pragma unroll
        for (int i = 0; i < lines; ++i) {
            Sums<octets> own = sums.line(i);
            const int own_slot = slot + i;
            if constexpr (apart) {
                if (range >= first_range) finish_range(geometry, job, group(i), range, segment.end, lane, own);
            } else if (range >= first_range &&
                       (job.ranges == 1 || join(own, parts + own_slot * job.ranges * 2 * octets * kLanes, done + 4 * own_slot, range, job.ranges, lane))) {
                finish(geometry, job, group(i), lane, own);
            }
        }
        sums = {};
        ++range;
        begin_range();
    };
    if (skipped == 0) begin_range();

    // What a stage needs is asked for some stages ahead. How many matters little, as long as no branch stands between the stages of a run:
    // behind the last run anything is read.
    constexpr int depth = kDepth<octets, lines>;
    Operands ahead[depth];
    await_raw();
    await_run(0, 0);
#pragma unroll
    for (int s = 0; s < depth; ++s) ahead[s] = read(s);
    auto multiply_run = [&](bool ends) {
        const u32 flag = read_ready(rings.behind(place)), x_flag = columns.come();
#pragma unroll
        for (int s = 0; s < kRun; ++s) {
            const Operands now = ahead[s % depth];
            auto step = [&](int q) {
                u32 bytes[lines], upper[lines];
#pragma unroll
                for (int i = 0; i < lines; ++i) bytes[i] = now.bytes[i].word(q), upper[i] = now.upper[i].word(q);
                sums.multiply(q, bytes, upper, scale, now.x[q >> 1]);
            };
            step(0), step(1);
            if (s + depth == kRun) {         // here, where mma is on its way that would be waited for anyway
                release_run();
                const int read_place = raw_place;
                raw_place = raw_place == (kRawRuns - 1) * kRunBytes ? 0 : raw_place + kRunBytes;
                fetch_run(run + kRawRuns - 1, read_place);
                await_raw();
                await_run(flag, x_flag);
            }
            ahead[s % depth] = read((s + depth) % kRun);
            step(2), step(3);
            if (ends && --left == 0) end_range();
        }
    };
#pragma unroll 1
    while (run < runs) {
        if (left > kRun) {               // nothing ends in this run: no branch stands between its stages
            multiply_run(false);
            left -= kRun;
        } else {
            multiply_run(true);
        }
    }
    copy_wait<0>();                      // nothing may be on its way when the block ends
}

// Warps that multiply have so many lines each, or one.
template <int octets, int lines, bool apart = false>
__device__ __forceinline__ void linear(const Geometry& geometry, const Packed& packed, const Job& job) {
    extern __shared__ __align__(128) u32 memory[];
    const int warp = own_warp(), warps = blockDim.x >> 5;
    int lane = threadIdx.x & 31;
    keep(lane);
    const Share<apart> share(job);
    const int block = share.block(), own = job.row_groups_of(block);
    const int all_lines = job.slots * share.segments(), sharers = (job.slots + lines - 1) / lines;   // of blocks that have as many row groups as any; warps of a segment
    const int multipliers = sharers * share.segments(), others = multipliers + share.segments();         // warps
    const int decoders = warps - others;

    // Shared memory: table, its entries and then x, two buffers for each warp that decodes, rings of upper and of raw bytes, where ranges meet, barriers, flags.
    const u32 base = u32(__cvta_generic_to_shared(memory));
    const int buffer_words = job.table_words + job.x_words, ring_words = buffer_words + decoders * 2 * buffer_bytes(job) / 4;
    const int raw_words = ring_words + all_lines * job.ring * kRunBytes / 4, part_words = raw_words + all_lines * kRawRuns * kRunBytes / 4;
    const int barrier_words = part_words + (!apart && job.ranges > 1 ? job.slots * job.ranges * 2 * octets * kLanes : 0);
    const int flag_words = barrier_words + (octets == 1 ? 0 : 2 * share.segments() * job.x_places), ring_flags = all_lines * (job.ring + 1) + share.segments();
    int places = job.ring;
    keep(places);
    const Rings rings{base + 4 * ring_words, base + 4 * flag_words, base + 4 * raw_words, own * share.segments(), places};
    const u32 x_bytes = job.x_places * (octets == 1 ? job.tokens * kColumnBytes : kRun * kStageBytesOf<octets>);   // of a segment
    auto x_ring = [&](int segment) { return base + 4 * job.table_words + segment * x_bytes; };
    auto x_come = [&](int segment) { return octets == 1 ? rings.brought(segment) : base + 4 * barrier_words + 8 * segment * job.x_places; };

    let_kernel_behind_start();
    const u32 own_buffers = base + 4 * buffer_words + max(warp - others, 0) * 2 * buffer_bytes(job);
    Decoder decoder{geometry, packed, job, rings, base, own_buffers, block, share.first_segment, own, decoders, lane};
    const bool decodes = warp >= others;
    if (decodes) decoder.find_first(warp - others);
    const Table<true> table(packed, memory, memory + job.table_words);
    if (decodes) decoder.bring_first();
    copy_commit();
    for (int i = threadIdx.x; i < ring_flags + job.slots; i += blockDim.x) memory[flag_words + i] = 0;
    if (octets > 1 && threadIdx.x == 0) {
        for (int i = 0; i < share.segments() * job.x_places; ++i) open_barrier(x_come(0) + 8 * i, 1);
        show_barrier();
    }
    table.finish();
    if (decodes) return decoder.decode_all();
    if (warp >= multipliers) {
        const int number = warp - multipliers;
        const Segment segment(geometry, job, share.first_segment + number);
        if constexpr (octets > 1)
            bring_left<kStageBytesOf<octets>>(geometry, job, rings, segment, number, own, x_ring(number), x_come(number), lane);
        else if (job.x_places >= 2 * kManyFlying)
            bring_x<kManyFlying>(geometry, job, rings, segment, number, own, x_ring(number), lane);
        else
            bring_x<kFewFlying>(geometry, job, rings, segment, number, own, x_ring(number), lane);
    } else {
        int number = warp, segment = 0;
        while (number >= sharers) number -= sharers, ++segment;
        const int alone = lines == 1 ? own : 2 * sharers - own;   // the first warps, whose schedulers have as many warps as any, have one line
        const int slot = number < alone ? number : 2 * number - alone, line = segment * own + slot;
        const u32 ring = x_ring(segment), come = x_come(segment), done = base + 4 * (flag_words + ring_flags);
        float* parts = reinterpret_cast<float*>(memory + part_words);
        if (number < alone) multiply_lines<octets, 1, apart>(geometry, packed, job, rings, line, slot, segment, share, ring, come, parts, done, lane);
        else if (lines == 2) multiply_lines<octets, lines, apart>(geometry, packed, job, rings, line, slot, segment, share, ring, come, parts, done, lane);
    }
}
