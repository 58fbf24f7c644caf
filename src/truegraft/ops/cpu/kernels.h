// Row kernels over the element type T; included once for each dtype by kernels.c.
//
// Each works on rows begin … end-1 of a step, so that a caller may divide the rows among threads.
// Shapes are those of ops/interface.py, dense and row-major.

// Σ a[i] b[i]: lane j takes the indices ≡ j (mod 16), also those of the last, partial vector.
static inline float NAME(dot)(const T *a, const T *b, int64_t n) {
  lanes_t lanes = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) lanes += LOAD_LANES(a + i) * LOAD_LANES(b + i);
  for (int j = 0; i + j < n; j++) lanes[j] += LOAD(a[i + j]) * LOAD(b[i + j]);
  return add_lanes(lanes);
}

// r = round(x + residual), y = round(r / sqrt(mean(r²) + eps) · weight). residual may be NULL.
void NAME(add_norm)(int64_t begin, int64_t end, const T *x, const T *residual, const T *weight,
                    T *y, T *r, int64_t n, float eps) {
  for (int64_t row = begin; row < end; row++) {
    const T *xs = x + row * n;
    T *ys = y + row * n, *rs = r + row * n;
    for (int64_t i = 0; i < n; i++)
      rs[i] = residual ? STORE(LOAD(xs[i]) + LOAD(residual[row * n + i])) : xs[i];
    float root = sqrtf(NAME(dot)(rs, rs, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
      ys[i] = STORE(LOAD(rs[i]) / root * LOAD(weight[i]));
  }
}

// y = round(g / (1 + e^-g) · u), x = [g | u].
void NAME(silu_mul)(int64_t begin, int64_t end, const T *x, T *y, int64_t n) {
  for (int64_t row = begin; row < end; row++) {
    const T *g = x + row * 2 * n, *u = g + n;
    for (int64_t i = 0; i < n; i++)
      y[row * n + i] = STORE(LOAD(g[i]) / (1.0f + exp_(-LOAD(g[i]))) * LOAD(u[i]));
  }
}

static inline void NAME(norm_rotate)(const T *head, const T *weight, const float *cos,
                                     const float *sin, T *out, int64_t dim, float eps) {
  float x[MAX_DIM];
  for (int64_t i = 0; i < dim; i++) x[i] = LOAD(head[i]);
  if (weight) {
    float root = sqrtf(NAME(dot)(head, head, dim) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i++) x[i] = LOAD(STORE(x[i] / root * LOAD(weight[i])));
  }
  int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    out[i] = STORE(x[i] * cos[i] - x[half + i] * sin[i]);
    out[half + i] = STORE(x[half + i] * cos[i] + x[i] * sin[i]);
  }
}

// Norm (where q_norm is given) and rotate q and k; write k and v to the cache. Rows from
// num_tokens on are padding and written nowhere.
void NAME(rope_write)(int64_t begin, int64_t end, const T *qkv, const float *cos, const float *sin,
                      const T *q_norm, const T *k_norm, float eps, T *q, T *k_cache, T *v_cache,
                      const int64_t *kv_block, const int64_t *kv_offset, int64_t num_tokens,
                      int64_t heads, int64_t kv_heads, int64_t dim) {
  for (int64_t row = begin; row < end; row++) {
    const T *in = qkv + row * (heads + 2 * kv_heads) * dim;
    const float *c = cos + row * (dim / 2), *s = sin + row * (dim / 2);
    for (int64_t h = 0; h < heads; h++)
      NAME(norm_rotate)(in + h * dim, q_norm, c, s, q + (row * heads + h) * dim, dim, eps);
    if (row >= num_tokens) continue;
    for (int64_t g = 0; g < kv_heads; g++) {
      int64_t place = ((kv_block[row] * kv_heads + g) * BLOCK + kv_offset[row]) * dim;
      NAME(norm_rotate)(in + (heads + g) * dim, k_norm, c, s, k_cache + place, dim, eps);
      memcpy(v_cache + place, in + (heads + kv_heads + g) * dim, dim * sizeof(T));
    }
  }
}

// One row's running softmax over one split, per query head of a group. dim is a multiple of LANES.
typedef struct {
  float top[MAX_GROUP], total[MAX_GROUP];
  lanes_t acc[MAX_GROUP][MAX_DIM / LANES];
} NAME(State);

static inline void NAME(reset)(NAME(State) * s, int64_t group, int64_t dim) {
  for (int64_t h = 0; h < group; h++) {
    s->top[h] = -INFINITY;
    s->total[h] = 0;
    for (int64_t i = 0; i < dim / LANES; i++) s->acc[h][i] = (lanes_t){0};
  }
}

// Add keys low … high-1 of one tile. keys, values: the tile's block of one kv head.
static inline __attribute__((always_inline)) void NAME(add_tile)(
    NAME(State) * s, const lanes_t *q, const T *keys, const T *values, int64_t low, int64_t high,
    int64_t group, int64_t dim) {
  int64_t width = dim / LANES;
  float weights[MAX_GROUP][BLOCK];
  for (int64_t h = 0; h < group; h++)
    for (int64_t key = 0; key < BLOCK; key++) weights[h][key] = -INFINITY;
  for (int64_t key = low; key < high; key++)
    for (int64_t h = 0; h < group; h++) {
      lanes_t lanes = {0};
      for (int64_t i = 0; i < width; i++)
        lanes += q[h * width + i] * LOAD_LANES(keys + key * dim + i * LANES);
      weights[h][key] = add_lanes(lanes);
    }
  for (int64_t h = 0; h < group; h++) {
    float top = s->top[h], *w = weights[h];
    for (int64_t key = low; key < high; key++) top = w[key] > top || w[key] != w[key] ? w[key] : top;
    float keep = s->top[h] == -INFINITY ? 0.0f : exp_(s->top[h] - top);
    for (int64_t key = 0; key < BLOCK; key++) w[key] = exp_(w[key] - top);  // 0 for -infinity
    lanes_t sum = load_float(w);
    for (int64_t key = LANES; key < BLOCK; key += LANES) sum += load_float(w + key);
    s->top[h] = top;
    s->total[h] = s->total[h] * keep + add_lanes(sum);
    lanes_t acc[MAX_DIM / LANES];
    for (int64_t i = 0; i < width; i++) acc[i] = s->acc[h][i] * keep;
    for (int64_t key = low; key < high; key++)
      for (int64_t i = 0; i < width; i++)
        acc[i] += w[key] * LOAD_LANES(values + key * dim + i * LANES);
    for (int64_t i = 0; i < width; i++) s->acc[h][i] = acc[i];
  }
}

// Fold a split into what the splits before it gave. The first is taken as it is.
static inline void NAME(fold)(NAME(State) * all, const NAME(State) * part, int64_t group,
                              int64_t dim) {
  for (int64_t h = 0; h < group; h++) {
    int first = all->top[h] == -INFINITY;
    float top = all->top[h] > part->top[h] ? all->top[h] : part->top[h];
    float a = first ? 0.0f : exp_(all->top[h] - top), b = first ? 1.0f : exp_(part->top[h] - top);
    all->top[h] = first ? part->top[h] : top;
    all->total[h] = all->total[h] * a + part->total[h] * b;
    for (int64_t i = 0; i < dim / LANES; i++)
      all->acc[h][i] = all->acc[h][i] * a + part->acc[h][i] * b;
  }
}

static inline __attribute__((always_inline)) void NAME(attend_row)(
    const lanes_t *q, const T *k_cache, const T *v_cache, const int32_t *table, int64_t head,
    int64_t kv_heads, int64_t first, int64_t position, int64_t group, int64_t dim,
    NAME(State) * all) {
  NAME(State) part;
  NAME(reset)(all, group, dim);
  for (int64_t split = first / SPLIT; split * SPLIT <= position; split++) {
    NAME(reset)(&part, group, dim);
    for (int64_t tile = split * (SPLIT / BLOCK); tile < (split + 1) * (SPLIT / BLOCK); tile++) {
      int64_t low = first - tile * BLOCK, high = position + 1 - tile * BLOCK;
      low = low < 0 ? 0 : low;
      high = high > BLOCK ? BLOCK : high;
      if (low >= high) continue;
      int64_t place = ((int64_t)table[tile] * kv_heads + head) * BLOCK * dim;
      NAME(add_tile)(&part, q, k_cache + place, v_cache + place, low, high, group, dim);
    }
    NAME(fold)(all, &part, group, dim);
  }
}

// Attention over the keys at or before each row's position, window keys at most.
// table_row: each row's row of tables [·, max_blocks]; rows from num_tokens on give zeros.
void NAME(attention)(int64_t begin, int64_t end, const T *q, const T *k_cache, const T *v_cache,
                     const int64_t *positions, const int64_t *table_row, const int32_t *tables,
                     int64_t max_blocks, int64_t num_tokens, int64_t window, float scale, T *out,
                     int64_t heads, int64_t kv_heads, int64_t dim) {
  int64_t group = heads / kv_heads;
  lanes_t query[MAX_GROUP * MAX_DIM / LANES];
  NAME(State) state;
  for (int64_t row = begin; row < end; row++) {
    if (row >= num_tokens) {
      memset(out + row * heads * dim, 0, heads * dim * sizeof(T));
      continue;
    }
    int64_t position = positions[row], first = position + 1 - window;
    const int32_t *table = tables + table_row[row] * max_blocks;
    first = first < 0 ? 0 : first;
    for (int64_t g = 0; g < kv_heads; g++) {
      const T *qs = q + (row * heads + g * group) * dim;
      for (int64_t i = 0; i < group * dim / LANES; i++)
        query[i] = LOAD_LANES(qs + i * LANES) * scale;
#define ATTEND(DIM)                                                                       \
  NAME(attend_row)(query, k_cache, v_cache, table, g, kv_heads, first, position, group, DIM, \
                   &state)
      if (dim == 64)
        ATTEND(64);
      else if (dim == 128)
        ATTEND(128);
      else
        ATTEND(dim);
#undef ATTEND
      T *o = out + (row * heads + g * group) * dim;
      for (int64_t h = 0; h < group; h++)
        for (int64_t i = 0; i < dim; i++)
          o[h * dim + i] = STORE(state.acc[h][i / LANES][i % LANES] / state.total[h]);
    }
  }
}

// s[r] = round(scale · x a[r]) for `rank` rows of a page of A.
static inline void NAME(shrink)(const T *x, const float *a, float scale, int64_t rank, int64_t k,
                                float *s) {
  lanes_t lanes[PAGE_RANK] = {{0}};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {  // x is converted once for all ranks
    lanes_t part = LOAD_LANES(x + i);
    for (int64_t r = 0; r < rank; r++) lanes[r] += part * load_float(a + r * k + i);
  }
  for (int j = 0; i + j < k; j++)
    for (int64_t r = 0; r < rank; r++) lanes[r][j] += LOAD(x[i + j]) * a[r * k + i + j];
  for (int64_t r = 0; r < rank; r++) s[r] = LOAD(STORE(scale * add_lanes(lanes[r])));
}

// y[j] += Σ_r s[r] b[r, j] over `width` columns, at most STRIP: they stay in registers.
static inline __attribute__((always_inline)) void NAME(expand)(const float *s, const float *b,
                                                               float *y,
                                                               int64_t rank, int64_t stride,
                                                               int64_t width) {
  float delta[STRIP] = {0};
  for (int64_t r = 0; r < rank; r++)
    for (int64_t j = 0; j < width; j++) delta[j] += s[r] * b[r * stride + j];
  for (int64_t j = 0; j < width; j++) y[j] += delta[j];
}

// y[:, offset : offset + n] += Σ_o round(scale · x A_oᵀ) B_o for rows that have a slot.
// y: [rows, stride], a: [pages, 16, k], b: [pages, 16, n], all float32; page_of: [slots, ordinals];
// rank, scale: [slots]. Ranks past a slot's own are zero and passed over.
void NAME(lora)(int64_t begin, int64_t end, const T *x, float *y, const float *a, const float *b,
                const int32_t *page_of, const int32_t *rank, const float *scale,
                const int32_t *slots, int64_t ordinals, int64_t k, int64_t n, int64_t offset,
                int64_t stride) {
  for (int64_t row = begin; row < end; row++) {
    int32_t slot = slots[row];
    if (slot < 0) continue;
    float *ys = y + row * stride + offset;
    for (int64_t o = 0; o < ordinals && page_of[slot * ordinals + o] >= 0; o++) {
      int64_t page = page_of[slot * ordinals + o], left = rank[slot] - o * PAGE_RANK;
      int64_t ranks = left < PAGE_RANK ? left : PAGE_RANK;
      const float *bs = b + page * PAGE_RANK * n;
      float s[PAGE_RANK];
      NAME(shrink)(x + row * k, a + page * PAGE_RANK * k, scale[slot], ranks, k, s);
      int64_t i = 0;
      for (; i + STRIP <= n; i += STRIP) NAME(expand)(s, bs + i, ys + i, ranks, n, STRIP);
      if (i < n) NAME(expand)(s, bs + i, ys + i, ranks, n, n - i);
    }
  }
}
