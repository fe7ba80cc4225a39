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

__device__ inline void load4(const void* from, i64 kind, i64 at, float* to) {
  if (kind == FLOAT32) {
    float4 v = *(const float4*)((const float*)from + at);
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  } else {
    ushort4 v = *(const ushort4*)((const u16*)from + at);
    to[0] = widen(v.x); to[1] = widen(v.y); to[2] = widen(v.z); to[3] = widen(v.w);
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

// Adam and AdamW, as torch's fused ones compute them; nothing happens where `skipped` is not 0.
extern "C" __global__ void step_adam(const i64* rows, const int* chunks, const double* groups,
                                const i64* rates, const float* scale, const float* skipped) {
  if (*skipped != 0.0f) return;
  const i64* row = rows + ROW * chunks[2 * blockIdx.x];
  const double* group = groups + GROUP_ROW * row[GROUP];
  __shared__ float shared[3];
  if (threadIdx.x == 0) {
    double step = *(const float*)row[STEP] + 1.0;
    const float* rate = (const float*)rates[row[GROUP]];
    shared[0] = rate ? *rate : (float)group[RATE];
    shared[1] = (float)(shared[0] / (1.0 - pow(group[BETA1], step)));
    shared[2] = (float)sqrt(1.0 - pow(group[BETA2], step));
  }
  __syncthreads();
  float rate = shared[0], size = shared[1], root = shared[2], factor = *scale;
  float toward = (float)(1.0 - group[BETA1]), keep = (float)group[BETA2];
  float fresh = (float)(1.0 - group[BETA2]), epsilon = (float)group[EPSILON];
  float decay = (float)group[DECAY];
  bool decoupled = group[DECOUPLED] != 0.0;
  float* weights = (float*)row[WEIGHT];
  float* means = (float*)row[MEAN];
  float* squared = (float*)row[SQUARE];
  i64 begin = (i64)chunks[2 * blockIdx.x + 1] * CHUNK;
  i64 end = min(begin + CHUNK, row[COUNT]);
  i64 at = begin + 4 * threadIdx.x;
  for (; at < end; at += 4 * THREADS) {
    int many = end - at < 4 ? (int)(end - at) : 4;
    float g[4], w[4], m[4], v[4];
    if (many == 4) {
      load4((const void*)row[GRADIENT], row[KIND], at, g);
      load4(weights, FLOAT32, at, w);
      load4(means, FLOAT32, at, m);
      load4(squared, FLOAT32, at, v);
    } else {
      for (int i = 0; i < many; i++) {
        g[i] = load1((const void*)row[GRADIENT], row[KIND], at + i);
        w[i] = weights[at + i]; m[i] = means[at + i]; v[i] = squared[at + i];
      }
    }
    for (int i = 0; i < many; i++) {
      float gradient = g[i] * factor;
      if (decoupled) w[i] -= rate * decay * w[i];
      else gradient += decay * w[i];
      m[i] += toward * (gradient - m[i]);
      v[i] = keep * v[i] + fresh * gradient * gradient;
      w[i] -= size * m[i] / (sqrtf(v[i]) / root + epsilon);
    }
    if (many == 4) {
      *(float4*)(weights + at) = make_float4(w[0], w[1], w[2], w[3]);
      *(float4*)(means + at) = make_float4(m[0], m[1], m[2], m[3]);
      *(float4*)(squared + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      for (int i = 0; i < many; i++) {
        weights[at + i] = w[i]; means[at + i] = m[i]; squared[at + i] = v[i];
      }
    }
  }
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
    float4 v = *(const float4*)(from + at);
    *(ushort4*)(to + at) = make_ushort4(narrow(v.x), narrow(v.y), narrow(v.z), narrow(v.w));
  }
  for (; at < end; at++) to[at] = narrow(from[at]);
}

// Add up the rows of a bfloat16 matrix, 256 columns a block. Blocks that share columns leave their
// sums in `parts`; the last of them adds these up, in one order, so that the result is always the
// same. `done` counts the blocks, and is 0 again afterwards.
extern "C" __global__ void step_column_sums(const u16* matrix, u16* result, float* parts, u32* done,
                                       int height, int width, int slices) {
  __shared__ float sums[8][256];
  __shared__ bool is_last;
  int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  int column = blockIdx.x * 256 + 8 * lane;
  int per = (height + slices - 1) / slices;
  int begin = blockIdx.y * per, end = min(begin + per, height);
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (column < width) {
    for (int y = begin + line; y < end; y += 8) {
      uint4 v = *(const uint4*)(matrix + (i64)y * width + column);
      u32 words[4] = {v.x, v.y, v.z, v.w};
      for (int i = 0; i < 4; i++) {
        sum[2 * i] += __uint_as_float(words[i] << 16);
        sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
      }
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
  for (int i = 0; i < slices; i++)
    total += ((volatile float*)parts)[((i64)blockIdx.x * slices + i) * 256 + threadIdx.x];
  if (mine < width) result[mine] = narrow(total);
  if (threadIdx.x == 0) done[blockIdx.x] = 0;
}
