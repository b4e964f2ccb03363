/* The physical limit of lookups and steps: loops over records whose addresses are known, with nothing else in them.
 *
 * A record is a row's weights followed by its optimizer's state, `stride` floats in all. Weights are float32, or
 * bfloat16 and then two in a float's place; state is float32. `index` holds record numbers, 64 bits each. All loops cut
 * their batch into contiguous chunks, one a thread.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE_BYTES = 64, FLOATS_PER_LINE = LINE_BYTES / sizeof(float) };

/* Lines are asked for into the second cache a good way ahead, and into the first shortly before their use: a core has
 * two dozen requests of its first cache under way, and more of its second. */
enum { LINES_FAR = 128, LINES_NEAR = 16, MOST_ROWS_AHEAD = 64 };

/* Below that many rows a thread, waking another one costs more than it brings. */
enum { LEAST_ROWS_A_THREAD = 1024 };

/* ---- Threads: those of torch's OpenMP team, so that the yardstick's threads wake and wait as everyone's do. ---- */

typedef void (*chunk_fn)(const void *job, size_t start, size_t end);

static size_t chunk_start(size_t rows, int chunks, int chunk) { return rows * (size_t)chunk / (size_t)chunks; }

static int threads_worth_it(size_t rows, int threads) {
    size_t worth = rows / LEAST_ROWS_A_THREAD;
    if ((size_t)threads > worth) threads = (int)worth;
    return threads < 1 ? 1 : threads;
}

static void over_threads(chunk_fn run, const void *job, size_t rows, int threads) {
    threads = threads_worth_it(rows, threads);
    if (threads == 1) {
        run(job, 0, rows);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int chunk = 0; chunk < threads; chunk++)
        run(job, chunk_start(rows, threads, chunk), chunk_start(rows, threads, chunk + 1));
}

/* ---- Loops ---- */

#define INLINE static inline __attribute__((always_inline))

/* Calls `loop` with a dim that the compiler knows, where it is one of the benches'. */
#define WITH_DIM(loop, dim, ...)                                                                                       \
    switch (dim) {                                                                                                     \
        case 8: loop(__VA_ARGS__, 8); break;                                                                           \
        case 12: loop(__VA_ARGS__, 12); break;                                                                         \
        case 16: loop(__VA_ARGS__, 16); break;                                                                         \
        case 24: loop(__VA_ARGS__, 24); break;                                                                         \
        case 48: loop(__VA_ARGS__, 48); break;                                                                         \
        case 64: loop(__VA_ARGS__, 64); break;                                                                         \
        case 100: loop(__VA_ARGS__, 100); break;                                                                       \
        case 128: loop(__VA_ARGS__, 128); break;                                                                       \
        default: loop(__VA_ARGS__, dim);                                                                               \
    }

/* How many rows of `floats` ahead are `lines` lines ahead. */
INLINE size_t rows_ahead(size_t lines, size_t floats) {
    size_t rows = lines / ((floats + FLOATS_PER_LINE - 1) / FLOATS_PER_LINE);
    return rows < 1 ? 1 : rows > MOST_ROWS_AHEAD ? MOST_ROWS_AHEAD : rows;
}

INLINE void prefetch_far(const float *floats, size_t count) {
    for (size_t at = 0; at < count; at += FLOATS_PER_LINE) __builtin_prefetch(floats + at, 0, 2);
}

INLINE void prefetch_near(const float *floats, size_t count) {
    for (size_t at = 0; at < count; at += FLOATS_PER_LINE) __builtin_prefetch(floats + at, 0, 3);
}

/* Asks for the rows of `floats` floats, `stride` apart, that come behind place `at` of an index. */
INLINE void prefetch_rows(const float *rows, size_t stride, size_t floats, const int64_t *index, size_t count,
                          size_t at) {
    const size_t far = at + rows_ahead(LINES_FAR, floats), near = at + rows_ahead(LINES_NEAR, floats);
    if (far < count) prefetch_far(rows + (size_t)index[far] * stride, floats);
    if (near < count) prefetch_near(rows + (size_t)index[near] * stride, floats);
}

struct gather {
    const float *records;
    size_t stride, dim;
    const int64_t *index;
    size_t indices;
    const int64_t *offsets; /* of bags */
    float *out;
};

INLINE void prefetch_row(const struct gather *job, size_t at, size_t floats) {
    prefetch_rows(job->records, job->stride, floats, job->index, job->indices, at);
}

INLINE void gather_loop(const struct gather *job, size_t start, size_t end, size_t dim) {
    for (size_t at = start; at < end; at++) {
        prefetch_row(job, at, dim);
        memcpy(job->out + at * dim, job->records + (size_t)job->index[at] * job->stride, dim * sizeof(float));
    }
}

static void gather_chunk(const void *argument, size_t start, size_t end) {
    const struct gather *job = argument;
    WITH_DIM(gather_loop, job->dim, job, start, end)
}

/* y1: out[i, :] = weights of record index[i]. */
void yardstick_gather(const float *records, size_t stride, size_t dim, const int64_t *index, size_t count, float *out,
                      int threads) {
    struct gather job = {records, stride, dim, index, count, NULL, out};
    over_threads(gather_chunk, &job, count, threads);
}

/* Columns that are summed in registers. */
enum { COLUMNS_TOGETHER = 128 };

INLINE void pool_columns(const struct gather *job, size_t bag, size_t first, size_t count, size_t dim) {
    float sum[COLUMNS_TOGETHER] = {0};
    for (size_t at = (size_t)job->offsets[bag]; at < (size_t)job->offsets[bag + 1]; at++) {
        if (first == 0) prefetch_row(job, at, dim);
        const float *restrict row = job->records + (size_t)job->index[at] * job->stride + first;
        for (size_t column = 0; column < count; column++) sum[column] += row[column];
    }
    memcpy(job->out + bag * dim + first, sum, count * sizeof(float));
}

INLINE void pool_loop(const struct gather *job, size_t start, size_t end, size_t dim) {
    for (size_t bag = start; bag < end; bag++)
        for (size_t first = 0; first < dim; first += COLUMNS_TOGETHER)
            pool_columns(job, bag, first, dim - first < COLUMNS_TOGETHER ? dim - first : COLUMNS_TOGETHER, dim);
}

static void pool_chunk(const void *argument, size_t start, size_t end) {
    const struct gather *job = argument;
    WITH_DIM(pool_loop, job->dim, job, start, end)
}

/* y1 of bags: out[b, :] = sum of the weights of the records index[offsets[b] .. offsets[b + 1]]. */
void yardstick_pool(const float *records, size_t stride, size_t dim, const int64_t *index, size_t count,
                    const int64_t *offsets, size_t bags, float *out, int threads) {
    struct gather job = {records, stride, dim, index, count, offsets, out};
    over_threads(pool_chunk, &job, bags, threads);
}

/* ---- Rows of bfloat16: the upper halves of floats ---- */

INLINE size_t bfloat16_words(size_t dim) { return (dim + 1) / 2; }

INLINE float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds up or down with the probability that makes the expected value exact, as a step of 16-bit rows must. */
INLINE uint16_t rounded(float value, uint32_t seed, uint32_t column) {
    uint32_t bits, noise = seed ^ column * 0x9E3779B9u;
    memcpy(&bits, &value, sizeof bits);
    noise = (noise ^ noise >> 16) * 0x7FEB352Du;
    noise = (noise ^ noise >> 15) * 0x846CA68Bu;
    return (uint16_t)((bits + (noise >> 16)) >> 16);
}

INLINE void widen_loop(const struct gather *job, size_t start, size_t end, size_t dim) {
    for (size_t at = start; at < end; at++) {
        prefetch_row(job, at, bfloat16_words(dim));
        const uint16_t *restrict row = (const uint16_t *)(job->records + (size_t)job->index[at] * job->stride);
        float *restrict out = job->out + at * dim;
        for (size_t column = 0; column < dim; column++) out[column] = widened(row[column]);
    }
}

static void widen_chunk(const void *argument, size_t start, size_t end) {
    const struct gather *job = argument;
    WITH_DIM(widen_loop, job->dim, job, start, end)
}

/* y1 of bfloat16: out[i, :] = weights of record index[i] as float32. */
void yardstick_widen(const float *records, size_t stride, size_t dim, const int64_t *index, size_t count, float *out,
                     int threads) {
    struct gather job = {records, stride, dim, index, count, NULL, out};
    over_threads(widen_chunk, &job, count, threads);
}

/* ---- Sums of gradients ---- */

struct sum {
    const float *grads;
    size_t dim;
    const int64_t *order, *starts;
    size_t rows;
    float *sums;
};

/* Returns the first row whose gradients begin at or behind a place of `order`. */
static size_t row_from(const struct sum *job, size_t place) {
    size_t low = 0, high = job->rows;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((size_t)job->starts[middle] < place) low = middle + 1;
        else high = middle;
    }
    return low;
}

INLINE void sum_loop(const struct sum *job, size_t start, size_t end, size_t dim) {
    const size_t places = (size_t)job->starts[job->rows];
    for (size_t row = start; row < end; row++) {
        float *restrict sum = job->sums + row * dim;
        const size_t first = (size_t)job->starts[row], behind = (size_t)job->starts[row + 1];
        for (size_t at = first; at < behind; at++) {
            prefetch_rows(job->grads, dim, dim, job->order, places, at);
            const float *restrict grad = job->grads + (size_t)job->order[at] * dim;
            const int is_one = at == first;
            for (size_t column = 0; column < dim; column++) sum[column] = (is_one ? 0.0f : sum[column]) + grad[column];
        }
    }
}

/* A chunk of `order` has the rows that begin in it. */
static void sum_chunk(const void *argument, size_t start, size_t end) {
    const struct sum *job = argument;
    size_t first = row_from(job, start), behind = row_from(job, end);
    WITH_DIM(sum_loop, job->dim, job, first, behind)
}

/* y3: sums[r, :] = grads[order[starts[r]], :] + ... + grads[order[starts[r + 1] - 1], :], one after the other. */
void yardstick_sum(const float *grads, size_t dim, const int64_t *order, const int64_t *starts, size_t rows,
                   float *sums, int threads) {
    struct sum job = {grads, dim, order, starts, rows, sums};
    over_threads(sum_chunk, &job, (size_t)starts[rows], threads);
}

/* ---- Steps ---- */

/* The numbers of a rule: AdaGrad takes lr and eps, SGD lr alone. Adam takes lr with the bias corrected, eps, and the
 * weights of the moments, 1 - beta. FTRL takes 1 / alpha, beta, l1 and l2. */
struct rule {
    float lr, eps, first, second;
    float inverse_alpha, beta, l1, l2;
};

struct update {
    float *records;
    size_t stride, dim;
    const int64_t *index;
    size_t count;
    const float *grads;
    struct rule rule;
};

/* Defines the loop of a rule over records, whose step on a row is the function NAME_row. */
#define UPDATE_LOOP(NAME)                                                                                              \
    INLINE void NAME##_loop(const struct update *job, size_t start, size_t end, size_t dim) {                          \
        const struct rule rule = job->rule;                                                                            \
        for (size_t at = start; at < end; at++) {                                                                      \
            prefetch_rows(job->records, job->stride, job->stride, job->index, job->count, at);                         \
            const size_t number = (size_t)job->index[at];                                                              \
            NAME##_row(rule, number, job->records + number * job->stride, job->grads + at * dim, dim);                 \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME##_chunk(const void *argument, size_t start, size_t end) {                                         \
        const struct update *job = argument;                                                                           \
        WITH_DIM(NAME##_loop, job->dim, job, start, end)                                                               \
    }

INLINE void sgd_row(struct rule rule, size_t number, float *record, const float *restrict grad, size_t dim) {
    (void)number;
    float *restrict weights = record;
    for (size_t column = 0; column < dim; column++) weights[column] -= rule.lr * grad[column];
}

INLINE void adagrad_row(struct rule rule, size_t number, float *record, const float *restrict grad, size_t dim) {
    (void)number;
    float *restrict weights = record, *restrict sums = record + dim;
    for (size_t column = 0; column < dim; column++) {
        const float g = grad[column], sum = sums[column] + g * g;
        sums[column] = sum;
        weights[column] -= rule.lr * g / sqrtf(sum + rule.eps);
    }
}

INLINE void adam_row(struct rule rule, size_t number, float *record, const float *restrict grad, size_t dim) {
    (void)number;
    float *restrict weights = record, *restrict means = record + dim, *restrict squares = record + 2 * dim;
    for (size_t column = 0; column < dim; column++) {
        const float g = grad[column];
        const float mean = means[column] + rule.first * (g - means[column]);
        const float square = squares[column] + rule.second * (g * g - squares[column]);
        means[column] = mean;
        squares[column] = square;
        weights[column] -= rule.lr * mean / (sqrtf(square) + rule.eps);
    }
}

INLINE void ftrl_row(struct rule rule, size_t number, float *record, const float *restrict grad, size_t dim) {
    (void)number;
    float *restrict weights = record, *restrict squares = record + dim, *restrict zs = record + 2 * dim;
    for (size_t column = 0; column < dim; column++) {
        const float g = grad[column], n = squares[column] + g * g, root = sqrtf(n);
        const float z = zs[column] + (g - (root - sqrtf(squares[column])) * rule.inverse_alpha * weights[column]);
        const float solved = (copysignf(rule.l1, z) - z) / ((rule.beta + root) * rule.inverse_alpha + rule.l2);
        squares[column] = n;
        zs[column] = z;
        weights[column] = fabsf(z) <= rule.l1 ? 0.0f : solved;
    }
}

INLINE void bfloat16_row(struct rule rule, size_t number, float *record, const float *restrict grad, size_t dim) {
    uint16_t *restrict weights = (uint16_t *)record;
    float *restrict sums = record + bfloat16_words(dim);
    for (size_t column = 0; column < dim; column++) {
        const float g = grad[column], sum = sums[column] + g * g;
        sums[column] = sum;
        const float weight = widened(weights[column]) - rule.lr * g / sqrtf(sum + rule.eps);
        weights[column] = rounded(weight, (uint32_t)number, (uint32_t)column);
    }
}

UPDATE_LOOP(sgd)
UPDATE_LOOP(adagrad)
UPDATE_LOOP(adam)
UPDATE_LOOP(ftrl)
UPDATE_LOOP(bfloat16)

/* By the numbers that yardstick.py gives the rules. */
static const chunk_fn RULES[] = {sgd_chunk, adagrad_chunk, adam_chunk, ftrl_chunk, bfloat16_chunk};

/* y2: steps in place on the records index[i], which are distinct, from the gradient rows grads[i, :]. */
void yardstick_update(float *records, size_t stride, size_t dim, const int64_t *index, size_t count,
                      const float *grads, int kind, const struct rule *rule, int threads) {
    struct update job = {records, stride, dim, index, count, grads, *rule};
    over_threads(RULES[kind], &job, count, threads);
}

/* ---- Records on a disk ---- */

enum { MOST_RECORD_BYTES = 1 << 16 };

struct transfer {
    int fd;
    size_t bytes;
    const int64_t *index;
    int writes;
    int *failed;
};

static void transfer_chunk(const void *argument, size_t start, size_t end) {
    const struct transfer *job = argument;
    static _Thread_local char record[MOST_RECORD_BYTES];
    for (size_t i = start; i < end; i++) {
        off_t at = (off_t)((size_t)job->index[i] * job->bytes);
        ssize_t done = job->writes ? pwrite(job->fd, record, job->bytes, at) : pread(job->fd, record, job->bytes, at);
        if (done != (ssize_t)job->bytes) __atomic_store_n(job->failed, 1, __ATOMIC_RELAXED);
    }
}

/* Writes, or else reads, a record of at most 64 KiB of a file for each index. Returns 0 where one failed. */
int yardstick_transfer(int fd, size_t bytes, const int64_t *index, size_t count, int writes, int threads) {
    int failed = bytes > MOST_RECORD_BYTES;
    struct transfer job = {fd, bytes, index, writes, &failed};
    if (!failed && count > 0) over_threads(transfer_chunk, &job, count, threads);
    return !failed;
}

/* ---- A connection ---- */

static int send_all(int fd, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t sent = send(fd, bytes, count, MSG_NOSIGNAL);
        if (sent <= 0) return 0;
        bytes += sent, count -= (size_t)sent;
    }
    return 1;
}

static int receive_all(int fd, char *bytes, size_t count) {
    while (count > 0) {
        ssize_t received = recv(fd, bytes, count, 0);
        if (received <= 0) return 0;
        bytes += received, count -= (size_t)received;
    }
    return 1;
}

/* Answers round trips with bytes of `memory`, which has `capacity` of them, until the peer ends. */
void yardstick_answer(int fd, char *memory, size_t capacity) {
    uint64_t sizes[2];
    while (receive_all(fd, (char *)sizes, sizeof sizes) && sizes[0] <= capacity && sizes[1] <= capacity) {
        if (!receive_all(fd, memory, sizes[0]) || !send_all(fd, memory, sizes[1])) return;
    }
}

/* Sends a request and waits for its answer. Returns 0 where the connection failed. */
int yardstick_round_trip(int fd, const char *request, size_t request_bytes, char *answer, size_t answer_bytes) {
    uint64_t sizes[2] = {request_bytes, answer_bytes};
    return send_all(fd, (const char *)sizes, sizeof sizes) && send_all(fd, request, request_bytes) &&
           receive_all(fd, answer, answer_bytes);
}

/* ---- The state of the caches ---- */

/* Puts memory out of all caches. Returns 0 where the machine has no instruction for it. */
int yardstick_flush(const void *memory, size_t bytes) {
#if defined(__x86_64__)
    for (size_t at = 0; at < bytes; at += LINE_BYTES) {
#if defined(__CLFLUSHOPT__)
        _mm_clflushopt((void *)((const char *)memory + at));
#else
        _mm_clflush((const char *)memory + at);
#endif
    }
    _mm_mfence();
    return 1;
#else
    (void)memory, (void)bytes;
    return 0;
#endif
}
