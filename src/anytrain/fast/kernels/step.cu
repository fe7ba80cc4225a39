// What a training step does to all of a model's tensors at once, one launch for each.
//
// A table has one row of 8 numbers for each tensor; `chunks` names, for each block, its tensor and
// which part of it the block works on. Pointers in a row are 16-byte aligned.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

#define CHUNK 16384
#define THREADS 256

enum { WEIGHT, GRADIENT, MEAN, SQUARE, STEP, COUNT, GROUP, KIND, ROW };
enum { BETA1, BETA2, EPSILON, DECAY, DECOUPLED, RATE, GROUP_ROW };
enum { FLOAT32, BFLOAT16 };

__device__ inline float widen(u16 half) { return __uint_as_float(((u32)half) << 16); }

__device__ inline u16 narrow(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;          // not a number
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);     // to nearest, ties to even
}

// Two at once, the first in the lower half: one instruction where the chip has it.
__device__ inline u32 narrow2(float first, float second) {
#if __CUDA_ARCH__ >= 800
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
#else
  return (u32)narrow(first) | ((u32)narrow(second) << 16);
#endif
}

__device__ inline float4 widen4(uint2 v) {
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                     __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}

__device__ inline uint2 narrow4(float4 v) {
  return make_uint2(narrow2(v.x, v.y), narrow2(v.z, v.w));
}

__device__ inline void load4(const void* from, i64 kind, i64 at, float* to) {
  if (kind == FLOAT32) {
    float4 v = *(const float4*)((const float*)from + at);
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  } else {
    float4 v = widen4(*(const uint2*)((const u16*)from + at));
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  }
}

__device__ inline float load1(const void* from, i64 kind, i64 at) {
  return kind == FLOAT32 ? ((const float*)from)[at] : widen(((const u16*)from)[at]);
}

__device__ inline float block_sum(float value) {
  __shared__ float parts[THREADS / 32];
  for (int far = 16; far > 0; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  if (threadIdx.x == 0)
    for (int i = 0; i < THREADS / 32; i++) total += parts[i];
  return total;
}

// The sum of squares of each chunk of the gradients.
extern "C" __global__ void step_squares(const i64* rows, const int* chunks, float* sums) {
  const i64* row = rows + ROW * chunks[2 * blockIdx.x];
  i64 begin = (i64)chunks[2 * blockIdx.x + 1] * CHUNK;
  i64 end = min(begin + CHUNK, row[COUNT]);
  const void* gradient = (const void*)row[GRADIENT];
  float sum = 0;
  i64 at = begin + 4 * threadIdx.x;
  for (; at + 4 <= end; at += 4 * THREADS) {
    float g[4];
    load4(gradient, row[KIND], at, g);
    sum += g[0] * g[0] + g[1] * g[1] + g[2] * g[2] + g[3] * g[3];
  }
  for (; at < end; at++) {
    float g = load1(gradient, row[KIND], at);
    sum += g * g;
  }
  float total = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// The norm, and by how much gradients are to be scaled to keep it within a bound (0: no bound).
extern "C" __global__ void step_norm(const float* sums, int count, double bound, float* result) {
  __shared__ double parts[THREADS];
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) sum += sums[i];
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int far = THREADS / 2; far > 0; far /= 2) {
    if (threadIdx.x < far) parts[threadIdx.x] += parts[threadIdx.x + far];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    float length = (float)sqrt(parts[0]);
    float scale = bound > 0 ? (float)bound / (length + 1e-6f) : 1.0f;
    result[0] = length;
    result[1] = scale < 1.0f ? scale : 1.0f;
  }
}

// What an update needs to know of each tensor: its rate, the size of a step, and the root of the
// second moment's correction.
extern "C" __global__ void step_rates(const i64* rows, int tensors, const double* groups,
                                      const i64* rates, float* found) {
  int tensor = blockIdx.x * THREADS + threadIdx.x;
  if (tensor >= tensors) return;
  const i64* row = rows + ROW * tensor;
  const double* group = groups + GROUP_ROW * row[GROUP];
  const float* pointer = (const float*)rates[row[GROUP]];
  double step = *(const float*)row[STEP] + 1.0;
  float rate = pointer ? *pointer : (float)group[RATE];
  found[4 * tensor] = rate;
  found[4 * tensor + 1] = (float)(rate / (1.0 - pow(group[BETA1], step)));
  found[4 * tensor + 2] = (float)sqrt(1.0 - pow(group[BETA2], step));
}

struct Adam {
  float rate, size, root, factor, toward, keep, fresh, epsilon, decay;
  bool decoupled;
};

__device__ inline void update(float& w, float& m, float& v, float gradient, const Adam& k) {
  gradient *= k.factor;
  if (k.decoupled) w -= k.rate * k.decay * w;
  else gradient += k.decay * w;
  m += k.toward * (gradient - m);
  v = k.keep * v + k.fresh * gradient * gradient;
  w -= k.size * m / (sqrtf(v) / k.root + k.epsilon);
}

// Adam and AdamW, as torch's fused ones compute them; nothing happens where `skipped` is not 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    step_adam(const i64* rows, const int* chunks, const double* groups, const float* found,
              const float* scale, const float* skipped) {
  if (*skipped != 0.0f) return;
  int tensor = chunks[2 * blockIdx.x];
  const i64* row = rows + ROW * tensor;
  const double* group = groups + GROUP_ROW * row[GROUP];
  Adam k;
  k.rate = found[4 * tensor]; k.size = found[4 * tensor + 1]; k.root = found[4 * tensor + 2];
  k.factor = *scale;
  k.toward = (float)(1.0 - group[BETA1]); k.keep = (float)group[BETA2];
  k.fresh = (float)(1.0 - group[BETA2]); k.epsilon = (float)group[EPSILON];
  k.decay = (float)group[DECAY]; k.decoupled = group[DECOUPLED] != 0.0;
  i64 begin = (i64)chunks[2 * blockIdx.x + 1] * CHUNK;
  i64 end = min(begin + CHUNK, row[COUNT]);
  i64 kind = row[KIND];
  const void* gradients = (const void*)row[GRADIENT];
  float* weights = (float*)row[WEIGHT];
  float* means = (float*)row[MEAN];
  float* squared = (float*)row[SQUARE];
  i64 at = begin + 4 * threadIdx.x;
#pragma unroll 2
  for (; at + 4 <= end; at += 4 * THREADS) {
    float g[4];
    load4(gradients, kind, at, g);
    float4 w = *(const float4*)(weights + at);
    float4 m = __ldcs((const float4*)(means + at));
    float4 v = __ldcs((const float4*)(squared + at));
    update(w.x, m.x, v.x, g[0], k);
    update(w.y, m.y, v.y, g[1], k);
    update(w.z, m.z, v.z, g[2], k);
    update(w.w, m.w, v.w, g[3], k);
    *(float4*)(weights + at) = w;
    __stcs((float4*)(means + at), m);
    __stcs((float4*)(squared + at), v);
  }
  for (; at < end; at++) update(weights[at], means[at], squared[at], load1(gradients, kind, at), k);
}

// Count the update of each tensor, unless it was skipped.
extern "C" __global__ void step_count(const i64* rows, int tensors, const float* skipped) {
  int tensor = blockIdx.x * THREADS + threadIdx.x;
  if (tensor < tensors) *(float*)rows[ROW * tensor + STEP] += 1.0f - *skipped;
}

// Round tensors to bfloat16: from WEIGHT to GRADIENT.
extern "C" __global__ void step_halve(const i64* rows, const int* chunks) {
  const i64* row = rows + ROW * chunks[2 * blockIdx.x];
  const float* from = (const float*)row[WEIGHT];
  u16* to = (u16*)row[GRADIENT];
  i64 begin = (i64)chunks[2 * blockIdx.x + 1] * CHUNK;
  i64 end = min(begin + CHUNK, row[COUNT]);
  i64 at = begin + 4 * threadIdx.x;
  for (; at + 4 <= end; at += 4 * THREADS) {
    *(uint2*)(to + at) = narrow4(*(const float4*)(from + at));
  }
  for (; at < end; at++) to[at] = narrow(from[at]);
}

__device__ inline void add8(float* sum, uint4 v) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[2 * i] += __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ inline void widen8(uint4 v, float* to) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ inline uint4 narrow8(const float* v) {
  return make_uint4(narrow2(v[0], v[1]), narrow2(v[2], v[3]), narrow2(v[4], v[5]),
                    narrow2(v[6], v[7]));
}

enum { NO_GELU, TANH_GELU, ERF_GELU };

// By fast exponentials: wrong by two millionths at most, where results are rounded to a hundredth.
template <int FORM>
__device__ inline float gelu_slope(float x) {
  if (FORM == TANH_GELU) {
    const float root = 0.79788456f, cubic = 0.044715f;
    float t = 1 - __fdividef(2, 1 + __expf(2 * root * (x + cubic * x * x * x)));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * root * (1 + 3 * cubic * x * x);
  }
  // The normal distribution beyond x, by Abramowitz and Stegun's formula 7.1.26.
  float e = __expf(-0.5f * x * x), t = __fdividef(1, 1 + 0.3275911f * 0.70710678f * fabsf(x));
  float tail = 1.421413741f + t * (-1.453152027f + t * 1.061405429f);
  tail = 0.5f * t * e * (0.254829592f + t * (-0.284496736f + t * tail));
  return (x < 0 ? tail : 1 - tail) + x * e * 0.39894228f;
}

// The gradient of 8 values that a GELU has read, rounded, from what came to its result.
template <int FORM>
__device__ inline uint4 through_gelu(uint4 read, uint4 sent) {
  float x[8], g[8];
  widen8(read, x);
  widen8(sent, g);
#pragma unroll
  for (int i = 0; i < 8; i++) g[i] *= gelu_slope<FORM>(x[i]);
  return narrow8(g);
}

// Add up the rows of a bfloat16 matrix, 256 columns a block. Blocks that share columns leave their
// sums in `parts`; the last of them adds these up, in one order, so that the result is always the
// same. `done` counts the blocks, and is 0 again afterwards. Behind a GELU, the matrix is what that
// has read, and what is added up, and written to `made`, its gradient.
template <int FORM>
__device__ void column_sums(const u16* __restrict__ matrix, const u16* __restrict__ sent,
                            u16* __restrict__ made, u16* result, float* parts, u32* done,
                            int height, int width, int slices) {
  __shared__ float sums[8][256];
  __shared__ bool is_last;
  int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  int column = blockIdx.x * 256 + 8 * lane;
  int per = (height + slices - 1) / slices;
  int begin = blockIdx.y * per, end = min(begin + per, height);
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (column < width) {
    int y = begin + line;
    for (; y + 24 < end; y += 32) {  // four loads on their way at a time
      uint4 v[4], g[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        i64 at = (i64)(y + 8 * i) * width + column;
        v[i] = *(const uint4*)(matrix + at);
        if (FORM != NO_GELU) g[i] = *(const uint4*)(sent + at);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (FORM != NO_GELU) {
          v[i] = through_gelu<FORM>(v[i], g[i]);
          *(uint4*)(made + (i64)(y + 8 * i) * width + column) = v[i];
        }
        add8(sum, v[i]);
      }
    }
    for (; y < end; y += 8) {
      i64 at = (i64)y * width + column;
      uint4 v = *(const uint4*)(matrix + at);
      if (FORM != NO_GELU) {
        v = through_gelu<FORM>(v, *(const uint4*)(sent + at));
        *(uint4*)(made + at) = v;
      }
      add8(sum, v);
    }
  }
  for (int i = 0; i < 8; i++) sums[line][8 * lane + i] = sum[i];
  __syncthreads();
  float total = 0;
  for (int i = 0; i < 8; i++) total += sums[i][threadIdx.x];
  int mine = blockIdx.x * 256 + threadIdx.x;
  if (slices == 1) {
    if (mine < width) result[mine] = narrow(total);
    return;
  }
  parts[((i64)blockIdx.x * slices + blockIdx.y) * 256 + threadIdx.x] = total;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(done + blockIdx.x, 1u) == (u32)slices - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  total = 0;
  const float* own = parts + (i64)blockIdx.x * slices * 256 + threadIdx.x;
#pragma unroll 8
  for (int i = 0; i < slices; i++) total += __ldcg(own + 256 * i);
  if (mine < width) result[mine] = narrow(total);
  if (threadIdx.x == 0) done[blockIdx.x] = 0;
}

extern "C" __global__ void step_column_sums(const u16* matrix, u16* result, float* parts, u32* done,
                                            int height, int width, int slices) {
  column_sums<NO_GELU>(matrix, matrix, result, result, parts, done, height, width, slices);
}

extern "C" __global__ void step_tanh_gelu_backward(const u16* read, const u16* sent, u16* made,
                                                   u16* sums, float* parts, u32* done, int height,
                                                   int width, int slices) {
  column_sums<TANH_GELU>(read, sent, made, sums, parts, done, height, width, slices);
}

extern "C" __global__ void step_erf_gelu_backward(const u16* read, const u16* sent, u16* made,
                                                  u16* sums, float* parts, u32* done, int height,
                                                  int width, int slices) {
  column_sums<ERF_GELU>(read, sent, made, sums, parts, done, height, width, slices);
}

// -- a gate: SiLU of one tensor times another -------------------------------------------------------
//
// Rows of both lie their own steps apart; a thread has 8 values. What torch rounds on the way, the
// SiLU and its gradient, is rounded here.

__device__ inline float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }

__device__ inline void silu8(const float* x, float* to) {
  float made[8];
#pragma unroll
  for (int i = 0; i < 8; i++) made[i] = x[i] * sigmoid(x[i]);
  widen8(narrow8(made), to);
}

extern "C" __global__ void step_gate(const u16* __restrict__ gate, const u16* __restrict__ up,
                                     u16* __restrict__ made, u32 count, int width, int gate_step,
                                     int up_step) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x, row = at / (width / 8);
  if (at >= count) return;
  int column = at % (width / 8) * 8;
  float x[8], u[8], y[8];
  widen8(*(const uint4*)(gate + (i64)row * gate_step + column), x);
  widen8(*(const uint4*)(up + (i64)row * up_step + column), u);
  silu8(x, y);
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] *= u[i];
  ((uint4*)made)[at] = narrow8(y);
}

extern "C" __global__ void step_gate_backward(const u16* __restrict__ gate,
                                              const u16* __restrict__ up,
                                              const u16* __restrict__ sent,
                                              u16* __restrict__ to_gate, u16* __restrict__ to_up,
                                              u32 count, int width, int gate_step, int up_step,
                                              int made_step) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x, row = at / (width / 8);
  if (at >= count) return;
  int column = at % (width / 8) * 8;
  float x[8], u[8], g[8], y[8];
  widen8(*(const uint4*)(gate + (i64)row * gate_step + column), x);
  widen8(*(const uint4*)(up + (i64)row * up_step + column), u);
  widen8(((const uint4*)sent)[at], g);
  silu8(x, y);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    y[i] *= g[i];
    u[i] *= g[i];
  }
  widen8(narrow8(u), u);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float share = sigmoid(x[i]);
    u[i] *= share * (1 + x[i] * (1 - share));
  }
  i64 place = (i64)row * made_step + column;
  *(uint4*)(to_gate + place) = narrow8(u);
  *(uint4*)(to_up + place) = narrow8(y);
}

// -- rotary positions ------------------------------------------------------------------------------
//
// The values of a row's first half are turned, each together with one of the second half, by cosines
// and sines of its place. A thread has 4 of each half. Rows of x lie where its steps say, those of
// the result in the order of places and then heads.

struct Turn {
  u32 row;
  int begin;
  i64 read, angle;
};

__device__ inline Turn turn(u32 at, int width, int heads, int length, i64 xb, int xh, int xt, i64 cb,
                            int ct) {
  u32 row = at / (width / 8), place = row / heads;
  int begin = at % (width / 8) * 4, h = row % heads, t = place % length, b = place / length;
  return {row, begin, b * xb + (i64)h * xh + (i64)t * xt + begin, b * cb + (i64)t * ct + begin};
}

__device__ inline float4 turned(float4 x, float4 cosine, float4 y, float4 sine, float sign) {
  // As torch rounds it: both products, then the sum.
  return make_float4(__fadd_rn(__fmul_rn(x.x, cosine.x), __fmul_rn(sign * y.x, sine.x)),
                     __fadd_rn(__fmul_rn(x.y, cosine.y), __fmul_rn(sign * y.y, sine.y)),
                     __fadd_rn(__fmul_rn(x.z, cosine.z), __fmul_rn(sign * y.z, sine.z)),
                     __fadd_rn(__fmul_rn(x.w, cosine.w), __fmul_rn(sign * y.w, sine.w)));
}

extern "C" __global__ void step_rotate(const u16* __restrict__ x, const float* __restrict__ cosines,
                                       const float* __restrict__ sines, float* __restrict__ made,
                                       u32 count, int width, int heads, int length, int xb, int xh,
                                       int xt, int cb, int ct) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  Turn own = turn(at, width, heads, length, xb, xh, xt, cb, ct);
  int half = width / 2;
  float4 one = widen4(*(const uint2*)(x + own.read));
  float4 two = widen4(*(const uint2*)(x + own.read + half));
  const float *c = cosines + own.angle, *s = sines + own.angle;
  float* to = made + (i64)own.row * width + own.begin;
  *(float4*)to = turned(one, *(const float4*)c, two, *(const float4*)s, -1);
  *(float4*)(to + half) = turned(two, *(const float4*)(c + half), one, *(const float4*)(s + half), 1);
}

extern "C" __global__ void step_rotate_backward(const float* __restrict__ sent,
                                                const float* __restrict__ cosines,
                                                const float* __restrict__ sines,
                                                u16* __restrict__ made, u32 count, int width,
                                                int heads, int length, int xb, int xh, int xt,
                                                int cb, int ct) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  Turn own = turn(at, width, heads, length, xb, xh, xt, cb, ct);
  int half = width / 2;
  float4 one = *(const float4*)(sent + own.read), two = *(const float4*)(sent + own.read + half);
  const float *c = cosines + own.angle, *s = sines + own.angle;
  u16* to = made + (i64)own.row * width + own.begin;
  *(uint2*)to = narrow4(turned(one, *(const float4*)c, two, *(const float4*)(s + half), 1));
  *(uint2*)(to + half) =
      narrow4(turned(two, *(const float4*)(c + half), one, *(const float4*)s, -1));
}

// -- the loss over many classes ------------------------------------------------------------------
//
// A block has one row of rounded logits, and rows lie `stride` apart. `is_even` says that 8 of them
// can be read at once; columns from `width` on are nobody's.

__device__ inline void merge(float& top, float& sum, float top2, float sum2) {
  float larger = fmaxf(top, top2);
  sum = sum * __expf(top - larger) + sum2 * __expf(top2 - larger);
  top = larger;
}

// Each row's loss, and the logarithm of the sum of its exponentials.
extern "C" __global__ void step_loss_forward(const u16* logits, const i64* targets, float* losses,
                                        float* logs, int width, int stride, int ignored,
                                        int is_even) {
  __shared__ float tops[THREADS / 32], sums[THREADS / 32];
  const u16* row = logits + (i64)blockIdx.x * stride;
  float top = -3e38f, sum = 0;
  int whole = is_even ? width / 8 * 8 : 0;
  for (int at = 8 * threadIdx.x; at < whole; at += 8 * THREADS) {
    float v[8];
    widen8(*(const uint4*)(row + at), v);
    float larger = v[0];
#pragma unroll
    for (int i = 1; i < 8; i++) larger = fmaxf(larger, v[i]);
    if (larger > top) {
      sum *= __expf(top - larger);
      top = larger;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += __expf(v[i] - top);
  }
  for (int at = whole + threadIdx.x; at < width; at += THREADS) {
    float v = widen(row[at]);
    if (v > top) {
      sum *= __expf(top - v);
      top = v;
    }
    sum += __expf(v - top);
  }
  for (int far = 16; far > 0; far /= 2) {
    float top2 = __shfl_xor_sync(0xffffffffu, top, far);
    float sum2 = __shfl_xor_sync(0xffffffffu, sum, far);
    merge(top, sum, top2, sum2);
  }
  if (threadIdx.x % 32 == 0) {
    tops[threadIdx.x / 32] = top;
    sums[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < THREADS / 32; i++) merge(top, sum, tops[i], sums[i]);
  float log_sum = top + logf(sum);
  i64 target = targets[blockIdx.x];
  logs[blockIdx.x] = log_sum;
  if (target == ignored) losses[blockIdx.x] = 0;
  else if (target < 0 || target >= width) losses[blockIdx.x] = __int_as_float(0x7fffffff);  // no class
  else losses[blockIdx.x] = log_sum - widen(row[target]);
}

// The gradient of the logits, rounded; nobody's columns get zeros.
extern "C" __global__ void step_loss_backward(const u16* logits, const i64* targets,
                                         const float* logs, const float* given, u16* result,
                                         int width, int stride, int ignored, int is_even) {
  const u16* row = logits + (i64)blockIdx.x * stride;
  u16* to = result + (i64)blockIdx.x * stride;
  i64 target = targets[blockIdx.x];
  bool is_seen = target != ignored;
  float scale = is_seen ? given[blockIdx.x] : 0, log_sum = logs[blockIdx.x];
  int whole = is_even ? width / 8 * 8 : 0;
  for (int at = 8 * threadIdx.x; at < whole; at += 8 * THREADS) {
    uint4 made = make_uint4(0, 0, 0, 0);
    if (is_seen) {
      float v[8];
      widen8(*(const uint4*)(row + at), v);
#pragma unroll
      for (int i = 0; i < 8; i++)
        v[i] = (__expf(v[i] - log_sum) - (at + i == target ? 1.0f : 0.0f)) * scale;
      made = narrow8(v);
    }
    *(uint4*)(to + at) = made;
  }
  for (int at = whole + threadIdx.x; at < stride; at += THREADS) {
    float value = 0;
    if (is_seen && at < width)
      value = (__expf(widen(row[at]) - log_sum) - (at == target ? 1.0f : 0.0f)) * scale;
    to[at] = narrow(value);
  }
}

// -- embeddings ----------------------------------------------------------------------------------
// The gradient of a table is the sum of its rows' gradients. The rows are sorted by what they have
// looked up, then added up in that order, 32 of them a block; those of one number that lie in several
// blocks are joined afterwards. The order of additions is always the same.

#define SORTED 32

// Sort by counting who comes before: a warp has one number.
extern "C" __global__ void step_sort(const i64* numbers, int* sorted, int* places, int count) {
  int mine = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (mine >= count) return;
  i64 own = numbers[mine];
  int before = 0;
#pragma unroll 4
  for (int i = lane; i < count; i += 32) {
    i64 other = numbers[i];
    before += other < own || (other == own && i < mine);
  }
  for (int far = 16; far > 0; far /= 2) before += __shfl_xor_sync(0xffffffffu, before, far);
  if (lane == 0) {
    sorted[before] = (int)own;
    places[before] = mine;
  }
}

__device__ inline void add_to(float4& to, float4 v) { to.x += v.x; to.y += v.y; to.z += v.z; to.w += v.w; }

// A thread has 4 columns. A block's first sum goes to `parts` if it began in the block before, and
// its last one if it goes on in the next.
extern "C" __global__ void step_add_rows(const int* sorted, const int* places, const float* sent,
                                         float* made, float* parts, int count, int width,
                                         int left_out) {
  const int at_once = 8;
  int begin = blockIdx.x * SORTED, end = min(begin + SORTED, count), column = threadIdx.x;
  if (column >= width) return;
  bool began_before = begin > 0 && sorted[begin - 1] == sorted[begin];
  float4 sum = make_float4(0, 0, 0, 0);
  for (int first = begin; first < end; first += at_once) {
    float4 rows[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++)
      if (first + i < end) rows[i] = ((const float4*)sent)[(i64)places[first + i] * width + column];
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      int at = first + i;
      if (at >= end) break;
      add_to(sum, rows[i]);
      int number = sorted[at];
      bool goes_on = at + 1 < count && sorted[at + 1] == number;
      if (goes_on && at + 1 < end) continue;
      float4* to = (float4*)made + (i64)number * width;
      if (began_before) to = (float4*)parts + (i64)(2 * blockIdx.x) * width;
      else if (goes_on) to = (float4*)parts + (i64)(2 * blockIdx.x + 1) * width;
      if (number != left_out) to[column] = sum;
      began_before = false;
      sum = make_float4(0, 0, 0, 0);
    }
  }
}

// Join the parts of a sum that begins in this block's rows and goes on behind them.
extern "C" __global__ void step_join_rows(const int* sorted, const float* parts, float* made,
                                          int count, int width, int left_out) {
  const int at_once = 8;
  __shared__ int last;
  int begin = blockIdx.x * SORTED, end = begin + SORTED, blocks = (count + SORTED - 1) / SORTED;
  if (end >= count) return;
  int number = sorted[end];
  bool begins = sorted[end - 1] == number && !(begin > 0 && sorted[begin - 1] == number);
  if (!begins || number == left_out) return;
  if (threadIdx.x == 0) last = blocks;
  __syncthreads();
  for (int i = blockIdx.x + 1 + threadIdx.x; i < blocks; i += blockDim.x)
    if (sorted[i * SORTED] != number) {
      atomicMin(&last, i);
      break;
    }
  __syncthreads();
  int column = threadIdx.x;
  if (column >= width) return;
  float4 sum = ((const float4*)parts)[(i64)(2 * blockIdx.x + 1) * width + column];
  for (int first = blockIdx.x + 1; first < last; first += at_once) {
    float4 rows[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++)
      if (first + i < last) rows[i] = ((const float4*)parts)[(i64)(2 * (first + i)) * width + column];
#pragma unroll
    for (int i = 0; i < at_once; i++)
      if (first + i < last) add_to(sum, rows[i]);
  }
  ((float4*)made)[(i64)number * width + column] = sum;
}

// -- layer norm, and RMS norm, which takes no mean and has no bias ---------------------------------
// A row of 128 * PARTS * WARPS values has WARPS warps. The result is written in float32 and in
// bfloat16, for the layers that read it rounded; its gradient comes back in both, of which one may
// be missing.
//
// What is normalized may be the sum of the input and of a layer's rounded result, the addend, that
// may have gone through a dropout. The sum is written, too, as others may read it; backward, the
// gradient that they have sent comes in, and the addend's goes out rounded, through the dropout,
// with the sums of its columns, which are the gradient of that layer's bias.

#define NORM_THREADS 128
#define NORM_WARPS (NORM_THREADS / 32)
#define FOLD_THREADS 512

enum { WHOLE_GIVEN = 1, ROUNDED_GIVEN = 2, SUM_GIVEN = 4, HAS_ADDEND = 8, HAS_MASK = 16 };

// Wait for all threads of a row. Those of a block's other row may have gone already. (A barrier whose
// number is not written out takes all of them, and blocks fewer to a processor.)
template <int WARPS>
__device__ inline void meet(int first_warp) {
  if (WARPS == NORM_WARPS) __syncthreads();
  else if (first_warp == 0) asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
  else asm volatile("bar.sync 2, %0;" ::"n"(32 * WARPS) : "memory");
}

// The sum over all threads of a row.
template <int WARPS>
__device__ inline float row_sum(float value) {
#pragma unroll
  for (int far = 16; far > 0; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far);
  if (WARPS == 1) return value;
  __shared__ float of_warps[NORM_WARPS];
  int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
  if (threadIdx.x % 32 == 0) of_warps[warp] = value;
  meet<WARPS>(first);
  value = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) value += of_warps[first + i];
  meet<WARPS>(first);
  return value;
}

__device__ inline void add4(float4& to, float4 v) { to.x += v.x; to.y += v.y; to.z += v.z; to.w += v.w; }

template <int PARTS, int WARPS, bool IS_CENTERED>
__device__ void norm_forward(const float* __restrict__ inputs, const u16* __restrict__ addend,
                             float* __restrict__ sums, const float* __restrict__ weight,
                             const float* __restrict__ bias, float* __restrict__ result,
                             u16* __restrict__ rounded, float* means, float* scales, int rows,
                             int flags, double epsilon) {
  const int width = 128 * PARTS * WARPS, at_once = NORM_WARPS / WARPS;
  int warp = threadIdx.x / 32, row = blockIdx.x * at_once + warp / WARPS;
  int own = warp % WARPS * 32 * PARTS + threadIdx.x % 32;
  if (row >= rows) return;
  i64 begin = (i64)row * (width / 4) + own;
  float4 x[PARTS];
  float mean = 0, spread = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    x[i] = ((const float4*)inputs)[begin + 32 * i];
    if (flags & HAS_ADDEND) {
      add4(x[i], widen4(((const uint2*)addend)[begin + 32 * i]));
      ((float4*)sums)[begin + 32 * i] = x[i];
    }
    mean += (x[i].x + x[i].y) + (x[i].z + x[i].w);
  }
  mean = IS_CENTERED ? row_sum<WARPS>(mean) / width : 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    if (IS_CENTERED) x[i].x -= mean, x[i].y -= mean, x[i].z -= mean, x[i].w -= mean;
    spread += (x[i].x * x[i].x + x[i].y * x[i].y) + (x[i].z * x[i].z + x[i].w * x[i].w);
  }
  float scale = rsqrtf(row_sum<WARPS>(spread) / width + (float)epsilon);
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    float4 w = ((const float4*)weight)[own + 32 * i];
    float4 y = make_float4(x[i].x * scale * w.x, x[i].y * scale * w.y, x[i].z * scale * w.z,
                           x[i].w * scale * w.w);
    if (IS_CENTERED) add4(y, ((const float4*)bias)[own + 32 * i]);
    ((float4*)result)[begin + 32 * i] = y;
    ((uint2*)rounded)[begin + 32 * i] = narrow4(y);
  }
  if (own == 0) {
    if (IS_CENTERED) means[row] = mean;
    scales[row] = scale;
  }
}

// The gradient of what a dropout has read, from the rounded one of what it has made.
__device__ inline uint2 through_dropout(uint2 sent, uchar4 kept, float scale) {
  float4 v = widen4(sent);
  return narrow4(make_float4(kept.x ? v.x * scale : 0, kept.y ? v.y * scale : 0,
                             kept.z ? v.z * scale : 0, kept.w ? v.w * scale : 0));
}

template <int PARTS, int WARPS, bool IS_CENTERED>
__device__ void norm_backward(const float* __restrict__ inputs, const float* __restrict__ weight,
                              const float* __restrict__ means, const float* __restrict__ scales,
                              const float* __restrict__ whole, const u16* __restrict__ rounded,
                              const float* __restrict__ of_sum,
                              const unsigned char* __restrict__ mask, float* __restrict__ result,
                              u16* __restrict__ of_addend, float* parts, int rows, int flags,
                              double factor) {
  const int width = 128 * PARTS * WARPS, at_once = NORM_WARPS / WARPS, kinds = IS_CENTERED ? 3 : 2;
  __shared__ float4 sums[NORM_WARPS][32 * PARTS];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own = warp % WARPS * 32 * PARTS + lane;
  float4 columns[kinds][PARTS];  // of the weight, the bias if there is one, and the addend
#pragma unroll
  for (int which = 0; which < kinds; which++)
#pragma unroll
    for (int i = 0; i < PARTS; i++) columns[which][i] = make_float4(0, 0, 0, 0);
  for (int row = blockIdx.x * at_once + warp / WARPS; row < rows; row += gridDim.x * at_once) {
    i64 begin = (i64)row * (width / 4) + own;
    float mean = IS_CENTERED ? means[row] : 0, scale = scales[row], first = 0, second = 0;
    float4 x[PARTS], g[PARTS];
    uchar4 kept[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      i64 at = begin + 32 * i;
      g[i] = make_float4(0, 0, 0, 0);
      float4 others = make_float4(0, 0, 0, 0);
      if (flags & WHOLE_GIVEN) g[i] = ((const float4*)whole)[at];
      if (flags & ROUNDED_GIVEN) add4(g[i], widen4(((const uint2*)rounded)[at]));
      if (flags & SUM_GIVEN) others = ((const float4*)of_sum)[at];
      if (flags & HAS_MASK) kept[i] = ((const uchar4*)mask)[at];
      float4 v = ((const float4*)inputs)[at];
      x[i] = make_float4((v.x - mean) * scale, (v.y - mean) * scale, (v.z - mean) * scale,
                         (v.w - mean) * scale);
      if (IS_CENTERED) add4(columns[1][i], g[i]);
      add4(columns[0][i], make_float4(g[i].x * x[i].x, g[i].y * x[i].y, g[i].z * x[i].z,
                                      g[i].w * x[i].w));
      float4 w = ((const float4*)weight)[own + 32 * i];
      g[i].x *= w.x; g[i].y *= w.y; g[i].z *= w.z; g[i].w *= w.w;
      first += (g[i].x + g[i].y) + (g[i].z + g[i].w);
      second += (g[i].x * x[i].x + g[i].y * x[i].y) + (g[i].z * x[i].z + g[i].w * x[i].w);
      g[i] = make_float4(scale * g[i].x + others.x, scale * g[i].y + others.y,
                         scale * g[i].z + others.z, scale * g[i].w + others.w);
    }
    first = IS_CENTERED ? scale * row_sum<WARPS>(first) / width : 0;
    second = scale * row_sum<WARPS>(second) / width;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      i64 at = begin + 32 * i;
      float4 made = make_float4(g[i].x - first - x[i].x * second, g[i].y - first - x[i].y * second,
                                g[i].z - first - x[i].z * second, g[i].w - first - x[i].w * second);
      ((float4*)result)[at] = made;
      if (flags & HAS_ADDEND) {
        uint2 half = narrow4(made);
        if (flags & HAS_MASK) half = through_dropout(half, kept[i], (float)factor);
        ((uint2*)of_addend)[at] = half;
        add4(columns[kinds - 1][i], widen4(half));
      }
    }
  }
  int count = flags & HAS_ADDEND ? kinds : kinds - 1;
  float4* to = (float4*)(parts + (i64)blockIdx.x * count * width);
#pragma unroll
  for (int which = 0; which < kinds; which++) {
    if (which == count) break;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sums[warp][lane + 32 * i] = columns[which][i];
    __syncthreads();
    for (int i = threadIdx.x; i < width / 4; i += NORM_THREADS) {
      int part = i / (32 * PARTS), column = i % (32 * PARTS);
      float4 total = sums[part][column];
#pragma unroll
      for (int other = WARPS; other < NORM_WARPS; other += WARPS)
        add4(total, sums[other + part][column]);
      to[which * (width / 4) + i] = total;
    }
    __syncthreads();
  }
}

#define NORM(KIND, WIDTH, PARTS, WARPS, IS_CENTERED)                                              \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS) step_##KIND##_forward_##WIDTH(       \
      const float* inputs, const u16* addend, float* sums, const float* weight, const float* bias, \
      float* result, u16* rounded, float* means, float* scales, int rows, int flags,              \
      double epsilon) {                                                                           \
    norm_forward<PARTS, WARPS, IS_CENTERED>(inputs, addend, sums, weight, bias, result, rounded,  \
                                            means, scales, rows, flags, epsilon);                 \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS, PARTS > 3 ? 2 : 3)                   \
  step_##KIND##_backward_##WIDTH(                                                                 \
      const float* inputs, const float* weight, const float* means, const float* scales,          \
      const float* whole, const u16* rounded, const float* of_sum, const unsigned char* mask,     \
      float* result, u16* of_addend, float* parts, int rows, int flags, double factor) {          \
    norm_backward<PARTS, WARPS, IS_CENTERED>(inputs, weight, means, scales, whole, rounded,       \
                                             of_sum, mask, result, of_addend, parts, rows, flags, \
                                             factor);                                             \
  }
// NORM(norm, 768, 6, 1, true) and the like are added for the norms that a model has.

// Add up the blocks' parts of a layer norm's gradients, 32 columns a block; what comes behind the
// first `whole` columns is rounded.
extern "C" __global__ void step_fold(const float* parts, float* result, u16* rounded, int height,
                                     int width, int whole) {
  const int lines = FOLD_THREADS / 32;
  __shared__ float sums[lines][32];
  int lane = threadIdx.x % 32, line = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  float sum = 0;
#pragma unroll 8
  for (int y = line; y < height; y += lines) sum += parts[(i64)y * width + column];
  sums[line][lane] = sum;
  __syncthreads();
  if (line == 0) {
    for (int i = 1; i < lines; i++) sum += sums[i][lane];
    if (column < whole) result[column] = sum;
    else rounded[column - whole] = narrow(sum);
  }
}
