// Attention over short texts, forward and backward: a block has one head of one row of the batch.
//
// All keys of a short text fit on the processor, so they are read once. A warp has 16 queries on the
// way forward, and scores of 32 keys at a time, which leaves registers for three blocks on a
// processor. On the way back it has 16 keys, and the gradients of scores are written down once, for
// those of the queries. (Twice as many keys a warp read less from shared memory, and were slower: the
// warps were too few.) Matrices lie in shared memory with 8 values behind each row, so that the rows
// of a piece lie in different banks.
//
// Which scores are seen (by the mask, or the causal order) and which were kept by dropout is
// written as bits: four words for each query, of which the t-th has, for each 8 keys, the bits of
// the two at 2t.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define MOST 128  // queries and keys
#define TILES (MOST / 8)
#define SPAN 32  // keys that a warp has scores of at once
#define ALL 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

enum { HAS_MASK = 1, IS_CAUSAL = 2, DROPS = 4 };

// Where a tensor's rows of one head lie: steps from one row of the batch, head and place to the next.
struct Steps {
  int batch, head, place;
  __device__ i64 at(int b, int h) const { return (i64)b * batch + (i64)h * head; }
};

__device__ inline u32 pair(float first, float second) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

__device__ inline float low(u32 both) { return __uint_as_float(both << 16); }
__device__ inline float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }

__device__ inline u32 place_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// Four 8 x 8 pieces, one row of one piece from each thread; turned, if asked for.
template <bool TURNED>
__device__ inline void read4(u32 (&to)[4], const u16* from) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place_of(from)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place_of(from)) : "memory");
}

// sums (16 x 8) += left (16 x 16) * right (16 x 8)
__device__ inline void multiply(float (&sums)[4], const u32 (&left)[4], u32 right0, u32 right1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

__device__ inline float power_of_2(float x) {
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}

// Begin to copy rows into shared memory; those behind the last become zeros.
template <int WIDTH>
__device__ inline void fetch(u16* to, const u16* from, int step, int rows, int padded) {
  const int parts = WIDTH / 8;
  for (int i = threadIdx.x; i < padded * parts; i += blockDim.x) {
    int row = i / parts, column = i % parts * 8;
    const u16* at = from + (i64)min(row, rows - 1) * step + column;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(place_of(to + row * (WIDTH + 8) + column)), "l"(at), "r"(row < rows ? 16 : 0)
                 : "memory");
  }
}

__device__ inline void arrive() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
}

// Read 16 rows for the left side of multiplications, straight from global memory.
template <int WIDTH>
__device__ inline void read_left(u32 (&to)[WIDTH / 16][4], const u16* from, int step, int first,
                                 int rows) {
  int lane = threadIdx.x % 32, row = first + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int at = row + i % 2 * 8;
      const u16* place = from + (i64)at * step + column + 16 * k + i / 2 * 8;
      to[k][i] = at < rows ? *(const u32*)place : 0;
    }
}

// Random numbers by Philox 4x32 with seven rounds.
__device__ inline uint4 random4(uint4 count, uint2 key) {
#pragma unroll
  for (int i = 0; i < 7; i++) {
    u32 a = __umulhi(0xD2511F53u, count.x), b = 0xD2511F53u * count.x;
    u32 c = __umulhi(0xCD9E8D57u, count.z), d = 0xCD9E8D57u * count.z;
    count = make_uint4(c ^ count.y ^ key.x, d, a ^ count.w ^ key.y, b);
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return count;
}

// Turn a mask to words, once for all heads and layers that share it: a warp has a line of it, and a
// thread 4 keys.
extern "C" __global__ void step_pack(const u8* mask, u32* words, int heads, int queries, int keys,
                                     int mb, int mh, int mp, int lines) {
  int line = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, key = 4 * lane;
  if (line >= lines) return;
  int query = line % queries, h = line / queries % heads, b = line / queries / heads;
  const u8* from = mask + (i64)b * mb + (i64)h * mh + (i64)query * mp + key;
  u32 found[4];
#pragma unroll
  for (int i = 0; i < 4; i++) found[i] = __ballot_sync(ALL, key + i < keys && from[i]);
  if (lane >= 4) return;
  u32 even = lane % 2 ? found[2] : found[0], odd = lane % 2 ? found[3] : found[1];
  words[4 * line + lane] =
      (even >> (lane / 2) & 0x55555555u) | (odd >> (lane / 2) & 0x55555555u) << 1;
}

// Of the keys from `first` on, 8 apart, the bits of those up to `last`; two each.
__device__ inline u32 up_to(int first, int last) {
  int far = last - first, whole = far / 8;
  if (far < 0) return 0;
  if (whole >= TILES) return ALL;
  return ((1u << (2 * whole)) - 1) | (far % 8 > 0 ? 3u : 1u) << (2 * whole);
}

__device__ inline float of_four(float value, bool is_sum) {
#pragma unroll
  for (int far = 1; far < 4; far *= 2) {
    float other = __shfl_xor_sync(ALL, value, far);
    value = is_sum ? value + other : fmaxf(value, other);
  }
  return value;
}

template <int WIDTH>
__device__ void attend(const u16* query, const u16* key, const u16* value, const u32* seen,
                       const uint2* draw, u16* result, float* logs, u32* kept, int heads,
                       int queries, int keys, Steps of_query, Steps of_key, Steps of_value,
                       Steps of_seen, int flags, int dropped, float factor) {
  const int row_step = WIDTH + 8;
  __shared__ __align__(16) u16 own_keys[MOST * row_step], own_values[MOST * row_step];
  int b = blockIdx.x / heads, h = blockIdx.x % heads;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  int padded = (keys + 15) / 16 * 16;
  fetch<WIDTH>(own_keys, key + of_key.at(b, h), of_key.place, keys, padded);
  fetch<WIDTH>(own_values, value + of_value.at(b, h), of_value.place, keys, padded);
  u32 left[WIDTH / 16][4];
  read_left<WIDTH>(left, query + of_query.at(b, h), of_query.place, 16 * warp, queries);
  if (factor < 0) {  // the largest score must have the largest share
    factor = -factor;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) left[k][i] ^= 0x80008000u;
  }
  int rows[2] = {16 * warp + lane / 4, 16 * warp + lane / 4 + 8};
  u32 sees[2], keeps[2] = {ALL, ALL};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sees[r] = up_to(column, flags & IS_CAUSAL ? min(rows[r], keys - 1) : keys - 1);
    i64 line = of_seen.at(b, h) + (i64)min(rows[r], queries - 1) * of_seen.place;
    if (flags & HAS_MASK) sees[r] &= seen[line + lane % 4];
  }
  arrive();

  uint2 own_draw = flags & DROPS ? *draw : make_uint2(0, 0);
  u32 limit = (u32)dropped << 16;  // of 16 random bits, the upper ones of a word
  if (flags & DROPS) keeps[0] = keeps[1] = 0;
  float made[WIDTH / 8][4] = {}, tops[2] = {-INFINITE, -INFINITE}, sums[2] = {0, 0};
#pragma unroll 1
  for (int begin = 0; begin < padded; begin += SPAN) {
    float scores[SPAN / 8][4];
#pragma unroll
    for (int n = 0; n < SPAN / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = 0;
      if (begin + 8 * n < padded) {
        const u16* from = own_keys + (begin + 8 * n + lane % 8) * row_step + lane / 8 * 8;
#pragma unroll
        for (int part = 0; part < WIDTH / 32; part++) {
          u32 right[4];
          read4<false>(right, from + 32 * part);
          multiply(scores[n], left[2 * part], right[0], right[1]);
          multiply(scores[n], left[2 * part + 1], right[2], right[3]);
        }
      }
    }

    u32 own_sees[2] = {sees[0] >> (begin / 4), sees[1] >> (begin / 4)};
    float before[2] = {tops[0], tops[1]};
#pragma unroll
    for (int n = 0; n < SPAN / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (!(own_sees[i / 2] >> (2 * n + i % 2) & 1)) scores[n][i] = -INFINITE;
        tops[i / 2] = fmaxf(tops[i / 2], scores[n][i]);
      }
    float level[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      tops[r] = of_four(tops[r], false);
      level[r] = tops[r] == -INFINITE ? 0 : tops[r] * factor;  // it has seen nothing yet
      float again = power_of_2(before[r] * factor - level[r]);
      sums[r] *= again;
#pragma unroll
      for (int i = 0; i < WIDTH / 8; i++) {
        made[i][2 * r] *= again;
        made[i][2 * r + 1] *= again;
      }
    }
#pragma unroll
    for (int n = 0; n < SPAN / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[n][i] = power_of_2(scores[n][i] * factor - level[i / 2]);
        sums[i / 2] += scores[n][i];
      }

    if (flags & DROPS) {
      u32 own_keeps[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < SPAN / 8; n += 2) {
        if (begin + 8 * n < padded) {
          uint4 four = random4(make_uint4(begin / 8 + n, threadIdx.x, blockIdx.x, 0), own_draw);
          u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int i = 0; i < 8; i++) {
            u32 number = i % 2 ? words[i / 2] : words[i / 2] << 16;
            if (number < limit) scores[n + i / 4][i % 4] = 0;
            else own_keeps[i / 2 % 2] |= 1u << (2 * (n + i / 4) + i % 2);
          }
        }
      }
      keeps[0] |= own_keeps[0] << (begin / 4);
      keeps[1] |= own_keeps[1] << (begin / 4);
    }

#pragma unroll
    for (int k = 0; k < SPAN / 16; k++) {
      if (begin + 16 * k < padded) {
        u32 some[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          some[i] = pair(scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
        const u16* from = own_values + (begin + 16 * k + lane % 16) * row_step + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i += 2) {
          u32 right[4];
          read4<true>(right, from + 8 * i);
          multiply(made[i], some, right[0], right[1]);
          multiply(made[i + 1], some, right[2], right[3]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) sums[r] = of_four(sums[r], true);

  float kept_scale = flags & DROPS ? 65536.0f / (65536 - dropped) : 1.0f;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (rows[r] >= queries) continue;
    i64 line = (i64)blockIdx.x * queries + rows[r];
    float scale = sums[r] > 0 ? kept_scale / sums[r] : 0;
    u16* to = result + (((i64)b * queries + rows[r]) * heads + h) * WIDTH + column;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++)
      *(u32*)(to + 8 * i) = pair(made[i][2 * r] * scale, made[i][2 * r + 1] * scale);
    if (flags & DROPS) kept[4 * line + lane % 4] = keeps[r];
    if (lane % 4 == 0) logs[line] = sums[r] > 0 ? tops[r] * factor + log2f(sums[r]) : INFINITE;
  }
}

__device__ inline float product(u32 a, u32 b) { return low(a) * low(b) + high(a) * high(b); }

// Fetch the gradients that came, and find for each query the sum of theirs times the results.
template <int WIDTH>
__device__ inline void weigh(u16* to, float* weights, const u16* __restrict__ sent, int step,
                             const u16* __restrict__ result, int result_step, int rows, int padded) {
  const int parts = WIDTH / 8, at_once = 4;
  for (int begin = threadIdx.x; begin < padded * parts; begin += at_once * blockDim.x) {
    uint4 g[at_once], v[at_once];
#pragma unroll
    for (int k = 0; k < at_once; k++) {
      int i = begin + k * blockDim.x, row = i / parts, column = i % parts * 8;
      g[k] = v[k] = make_uint4(0, 0, 0, 0);
      if (row < rows) {
        g[k] = *(const uint4*)(sent + (i64)row * step + column);
        v[k] = *(const uint4*)(result + (i64)row * result_step + column);
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; k++) {
      int i = begin + k * blockDim.x, row = i / parts, column = i % parts * 8;
      if (row >= padded) break;  // all of a warp: 16 rows are 2 or 4 warps
      *(uint4*)(to + row * (WIDTH + 8) + column) = g[k];
      float sum = product(g[k].x, v[k].x) + product(g[k].y, v[k].y) + product(g[k].z, v[k].z) +
                  product(g[k].w, v[k].w);
#pragma unroll
      for (int far = parts / 2; far > 0; far /= 2) sum += __shfl_xor_sync(ALL, sum, far);
      if (i % parts == 0) weights[row] = sum;
    }
  }
}

// Write 16 rows of a gradient.
template <int WIDTH>
__device__ inline void write_rows(u16* to, int step, int first, int rows,
                                  const float (&made)[WIDTH / 8][4], float scale) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int row = first + lane / 4 + 8 * r;
    if (row >= rows) continue;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++)
      *(u32*)(to + (i64)row * step + 8 * i + lane % 4 * 2) =
          pair(made[i][2 * r] * scale, made[i][2 * r + 1] * scale);
  }
}

template <int WIDTH>
__device__ void attend_backward(const u16* query, const u16* key, const u16* value,
                                const u32* seen, const u16* result, const float* logs,
                                const u32* kept, const u16* sent, u16* to_query, u16* to_key,
                                u16* to_value, int heads, int queries, int keys, Steps of_query,
                                Steps of_key, Steps of_value, Steps of_seen, Steps of_sent,
                                Steps of_made_query, Steps of_made_key, int flags, int dropped,
                                float factor) {
  const int row_step = WIDTH + 8;
  extern __shared__ __align__(16) u16 shared[];
  int b = blockIdx.x / heads, h = blockIdx.x % heads;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 2;
  int all_queries = (queries + 15) / 16 * 16, all_keys = (keys + 15) / 16 * 16;
  int score_step = all_queries + 8;
  u16* own_queries = shared;
  u16* own_sent = own_queries + all_queries * row_step;
  u16* own_keys = own_sent + all_queries * row_step;
  u16* own_scores = own_keys + all_keys * row_step;  // their gradients, a row for each key
  float* own_logs = (float*)(own_scores + all_keys * score_step);
  float* weights = own_logs + all_queries;
  u32* own_seen = (u32*)(weights + all_queries);
  u32* own_kept = own_seen + 4 * all_queries;

  fetch<WIDTH>(own_queries, query + of_query.at(b, h), of_query.place, queries, all_queries);
  fetch<WIDTH>(own_keys, key + of_key.at(b, h), of_key.place, keys, all_keys);
  u32 values[WIDTH / 16][4];
  read_left<WIDTH>(values, value + of_value.at(b, h), of_value.place, 16 * warp, keys);
  weigh<WIDTH>(own_sent, weights, sent + of_sent.at(b, h), of_sent.place,
               result + ((i64)b * queries * heads + h) * WIDTH, heads * WIDTH, queries, all_queries);
  i64 first = (i64)blockIdx.x * queries;
  for (int i = threadIdx.x; i < all_queries; i += blockDim.x)
    own_logs[i] = i < queries ? logs[first + i] : INFINITE;
  for (int i = threadIdx.x; i < 4 * all_queries; i += blockDim.x) {
    int row = min(i / 4, queries - 1);
    own_seen[i] = up_to(i % 4 * 2, flags & IS_CAUSAL ? min(row, keys - 1) : keys - 1);
    if (flags & HAS_MASK) own_seen[i] &= seen[of_seen.at(b, h) + (i64)row * of_seen.place + i % 4];
    own_kept[i] = flags & DROPS ? kept[4 * (first + row) + i % 4] : ALL;
  }
  arrive();

  float kept_scale = flags & DROPS ? 65536.0f / (65536 - dropped) : 1.0f;
  float unit = factor * 0.6931471805599453f;  // the factor has turned scores to powers of 2
  if (16 * warp < all_keys) {
    float of_keys[WIDTH / 8][4] = {}, of_values[WIDTH / 8][4] = {};
    int row = 16 * warp + lane / 4, word = lane / 8, bit = 4 * warp + lane / 4 % 2;
    const u16* left = own_keys + (16 * warp + lane % 16) * row_step + lane / 16 * 8;
#pragma unroll 1
    for (int begin = 0; begin < all_queries; begin += 16) {
      float score[2][4] = {}, slope[2][4] = {};  // of 8 queries each
#pragma unroll
      for (int part = 0; part < WIDTH / 32; part++) {
        u32 right[2][4];
        int from = (begin + lane % 8) * row_step + 32 * part + lane / 8 * 8;
#pragma unroll
        for (int half = 0; half < 2; half++)
          read4<false>(right[half], own_queries + from + 8 * half * row_step);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          u32 some[4];
          read4<false>(some, left + 32 * part + 16 * k);
#pragma unroll
          for (int half = 0; half < 2; half++)
            multiply(score[half], some, right[half][2 * k], right[half][2 * k + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
          read4<false>(right[half], own_sent + from + 8 * half * row_step);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            multiply(slope[half], values[2 * part + k], right[half][2 * k], right[half][2 * k + 1]);
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          int at = begin + 8 * half + column + j;
          u32 sees = own_seen[4 * at + word] >> bit, keeps = own_kept[4 * at + word] >> bit;
          float log = own_logs[at], weight = weights[at];
#pragma unroll
          for (int r = 0; r < 2; r++) {
            int i = 2 * r + j;
            float full = sees >> (2 * r) & 1 ? power_of_2(score[half][i] * factor - log) : 0;
            float scale = keeps >> (2 * r) & 1 ? kept_scale : 0;
            score[half][i] = full * scale;
            slope[half][i] = full * (slope[half][i] * scale - weight);
          }
        }
      u32 shares[4], slopes[4];  // turned, as they come
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int half = i / 2, r = i % 2;
        shares[i] = pair(score[half][2 * r], score[half][2 * r + 1]);
        slopes[i] = pair(slope[half][2 * r], slope[half][2 * r + 1]);
      }
#pragma unroll
      for (int i = 0; i < WIDTH / 8; i += 2) {
        u32 right[4];
        int from = (begin + lane % 16) * row_step + 8 * (i + lane / 16);
        read4<true>(right, own_sent + from);
        multiply(of_values[i], shares, right[0], right[1]);
        multiply(of_values[i + 1], shares, right[2], right[3]);
        read4<true>(right, own_queries + from);
        multiply(of_keys[i], slopes, right[0], right[1]);
        multiply(of_keys[i + 1], slopes, right[2], right[3]);
      }
      // Last, as no read of shared memory is begun before a write that stands before it.
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u16* to = own_scores + (row + i % 2 * 8) * score_step + begin + i / 2 * 8 + column;
        *(u32*)to = slopes[i];
      }
    }
    i64 to = of_made_key.at(b, h);
    write_rows<WIDTH>(to_value + to, of_made_key.place, 16 * warp, keys, of_values, 1);
    write_rows<WIDTH>(to_key + to, of_made_key.place, 16 * warp, keys, of_keys, unit);
  }
  __syncthreads();

  for (int begin = 16 * warp; begin < all_queries; begin += blockDim.x / 2) {
    float made[WIDTH / 8][4] = {};
    for (int k = 0; k < all_keys; k += 16) {
      u32 left[4];
      int line = k + lane % 8 + lane / 16 * 8, across = begin + lane / 8 % 2 * 8;
      read4<true>(left, own_scores + line * score_step + across);
#pragma unroll
      for (int i = 0; i < WIDTH / 8; i += 2) {
        u32 right[4];
        read4<true>(right, own_keys + (k + lane % 16) * row_step + 8 * (i + lane / 16));
        multiply(made[i], left, right[0], right[1]);
        multiply(made[i + 1], left, right[2], right[3]);
      }
    }
    write_rows<WIDTH>(to_query + of_made_query.at(b, h), of_made_query.place, begin, queries, made,
                      unit);
  }
}

#define FORWARD(WIDTH)                                                                            \
  extern "C" __global__ void __launch_bounds__(2 * MOST, 3) step_attend_##WIDTH(                  \
      const u16* query, const u16* key, const u16* value, const u32* seen, const uint2* draw,     \
      u16* result, float* logs, u32* kept, int heads, int queries, int keys, int qb, int qh,      \
      int qp, int kb, int kh, int kp, int vb, int vh, int vp, int sb, int sh, int sp, int flags,  \
      int dropped, double factor) {                                                               \
    attend<WIDTH>(query, key, value, seen, draw, result, logs, kept, heads, queries, keys,        \
                  Steps{qb, qh, qp}, Steps{kb, kh, kp}, Steps{vb, vh, vp}, Steps{sb, sh, sp},     \
                  flags, dropped, (float)factor);                                                 \
  }

#define BACKWARD(WIDTH)                                                                           \
  extern "C" __global__ void __launch_bounds__(2 * MOST, 2) step_attend_backward_##WIDTH(         \
      const u16* query, const u16* key, const u16* value, const u32* seen, const u16* result,     \
      const float* logs, const u32* kept, const u16* sent, u16* to_query, u16* to_key,            \
      u16* to_value, int heads, int queries, int keys, int qb, int qh, int qp, int kb, int kh,    \
      int kp, int vb, int vh, int vp, int sb, int sh, int sp, int gb, int gh, int gp, int tqb,    \
      int tqh, int tqp, int tkb, int tkh, int tkp, int flags, int dropped, double factor) {       \
    attend_backward<WIDTH>(                                                                       \
        query, key, value, seen, result, logs, kept, sent, to_query, to_key, to_value, heads,     \
        queries, keys, Steps{qb, qh, qp}, Steps{kb, kh, kp}, Steps{vb, vh, vp},                   \
        Steps{sb, sh, sp}, Steps{gb, gh, gp}, Steps{tqb, tqh, tqp}, Steps{tkb, tkh, tkp}, flags,  \
        dropped, (float)factor);                                                                  \
  }

FORWARD(32)
FORWARD(64)
BACKWARD(32)
BACKWARD(64)
