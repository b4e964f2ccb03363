/* The physical limit of lookups and steps: loops over records whose addresses are known, with nothing else in them.
 *
 * A record is a row's weights followed by its optimizer's state, `stride` floats in all. `index` holds record numbers,
 * 64 bits each. All loops cut their batch into contiguous chunks, one a thread.
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

enum { LINE_BYTES = 64, GATHER_AHEAD = 16, UPDATE_AHEAD = 8 };

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
        case 16: loop(__VA_ARGS__, 16); break;                                                                         \
        case 64: loop(__VA_ARGS__, 64); break;                                                                         \
        case 128: loop(__VA_ARGS__, 128); break;                                                                       \
        default: loop(__VA_ARGS__, dim);                                                                               \
    }

INLINE void prefetch_floats(const float *floats, size_t count) {
    for (size_t at = 0; at < count; at += LINE_BYTES / sizeof(float)) __builtin_prefetch(floats + at);
}

struct gather {
    const float *records;
    size_t stride, dim, bag;
    const int64_t *index;
    size_t indices;
    float *out;
};

INLINE void prefetch_row(const struct gather *job, size_t at, size_t dim) {
    if (at < job->indices) prefetch_floats(job->records + (size_t)job->index[at] * job->stride, dim);
}

INLINE void gather_loop(const struct gather *job, size_t start, size_t end, size_t dim) {
    for (size_t at = start; at < end; at++) {
        prefetch_row(job, at + GATHER_AHEAD, dim);
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
    struct gather job = {records, stride, dim, 1, index, count, out};
    over_threads(gather_chunk, &job, count, threads);
}

INLINE void pool_loop(const struct gather *job, size_t start, size_t end, size_t dim) {
    for (size_t bag = start; bag < end; bag++) {
        float *restrict sum = job->out + bag * dim;
        for (size_t at = bag * job->bag; at < (bag + 1) * job->bag; at++) {
            prefetch_row(job, at + GATHER_AHEAD, dim);
            const float *restrict row = job->records + (size_t)job->index[at] * job->stride;
            int is_first = at == bag * job->bag;
            for (size_t column = 0; column < dim; column++) sum[column] = (is_first ? 0.0f : sum[column]) + row[column];
        }
    }
}

static void pool_chunk(const void *argument, size_t start, size_t end) {
    const struct gather *job = argument;
    WITH_DIM(pool_loop, job->dim, job, start, end)
}

/* y1 of bags: out[b, :] = sum of the weights of the records index[b * bag .. (b + 1) * bag]. */
void yardstick_pool(const float *records, size_t stride, size_t dim, const int64_t *index, size_t bags, size_t bag,
                    float *out, int threads) {
    struct gather job = {records, stride, dim, bag, index, bags * bag, out};
    over_threads(pool_chunk, &job, bags, threads);
}

struct update {
    float *records;
    size_t stride, dim;
    const int64_t *index;
    size_t count;
    const float *grads;
    float lr, eps;
};

INLINE void prefetch_record(const struct update *job, size_t at) {
    if (at < job->count) prefetch_floats(job->records + (size_t)job->index[at] * job->stride, job->stride);
}

INLINE void adagrad_loop(const struct update *job, size_t start, size_t end, size_t dim) {
    const float lr = job->lr, eps = job->eps;
    for (size_t at = start; at < end; at++) {
        prefetch_record(job, at + UPDATE_AHEAD);
        float *restrict weights = job->records + (size_t)job->index[at] * job->stride;
        float *restrict sums = weights + dim;
        const float *restrict grad = job->grads + at * dim;
        for (size_t column = 0; column < dim; column++) {
            const float g = grad[column], sum = sums[column] + g * g;
            sums[column] = sum;
            weights[column] -= lr * g / sqrtf(sum + eps);
        }
    }
}

static void adagrad_chunk(const void *argument, size_t start, size_t end) {
    const struct update *job = argument;
    WITH_DIM(adagrad_loop, job->dim, job, start, end)
}

/* y2: AdaGrad in place on the records index[i], which are distinct, from the gradient rows grads[i, :]. */
void yardstick_adagrad(float *records, size_t stride, size_t dim, const int64_t *index, size_t count,
                       const float *grads, float lr, float eps, int threads) {
    struct update job = {records, stride, dim, index, count, grads, lr, eps};
    over_threads(adagrad_chunk, &job, count, threads);
}

INLINE void sgd_loop(const struct update *job, size_t start, size_t end, size_t dim) {
    const float lr = job->lr;
    for (size_t at = start; at < end; at++) {
        prefetch_record(job, at + UPDATE_AHEAD);
        float *restrict weights = job->records + (size_t)job->index[at] * job->stride;
        const float *restrict grad = job->grads + at * dim;
        for (size_t column = 0; column < dim; column++) weights[column] -= lr * grad[column];
    }
}

static void sgd_chunk(const void *argument, size_t start, size_t end) {
    const struct update *job = argument;
    WITH_DIM(sgd_loop, job->dim, job, start, end)
}

/* y2 without state: SGD in place on the records index[i], which are distinct. */
void yardstick_sgd(float *records, size_t stride, size_t dim, const int64_t *index, size_t count, const float *grads,
                   float lr, int threads) {
    struct update job = {records, stride, dim, index, count, grads, lr, 0.0f};
    over_threads(sgd_chunk, &job, count, threads);
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
