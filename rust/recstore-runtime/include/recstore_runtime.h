/* Runs bundles of recstore-ops without Python. Link with recstore_runtime, and with the libtorch that it was built
 * against.
 *
 * A function that fails returns NULL, and recstore_last_error says why. Any number of threads may run one bundle.
 */
#ifndef RECSTORE_RUNTIME_H
#define RECSTORE_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct recstore_bundle recstore_bundle;
typedef struct recstore_outputs recstore_outputs;

/* The type of a tensor's elements. */
typedef enum recstore_dtype {
  RECSTORE_FLOAT32 = 0,
  RECSTORE_FLOAT64 = 1,
  RECSTORE_FLOAT16 = 2,
  RECSTORE_BFLOAT16 = 3,
  RECSTORE_INT64 = 4,
  RECSTORE_INT32 = 5,
  RECSTORE_INT16 = 6,
  RECSTORE_INT8 = 7,
  RECSTORE_UINT8 = 8,
  RECSTORE_BOOL = 9
} recstore_dtype;

/* A tensor, or the description of one. Its elements lie one behind the other, the last dimension's side by side. */
typedef struct recstore_tensor {
  const char* name;     /* not read of inputs */
  int dtype;            /* a recstore_dtype; -1 if there is no such tensor */
  size_t rank;          /* how many dimensions */
  const int64_t* shape; /* their sizes; -1 in a description: it varies */
  const void* data;     /* NULL in a description */
  size_t bytes;         /* of data */
} recstore_tensor;

/* Opens the bundle of a directory. memory is "mapped": processes of a machine share the pages of its tables; or
 * "copied": lookups are faster, and all is read and checked now. Returns NULL on failure. */
recstore_bundle* recstore_bundle_open(const char* directory, const char* memory);

/* The same of a bundle whose program may call further operators than those of the list: exact names, such as
 * "mine::op.default", of operators that were registered in this process. */
recstore_bundle* recstore_bundle_open_with(
    const char* directory, const char* memory, const char* const* operators, size_t num_operators);

/* Closes a bundle that nobody uses any more; NULL is ignored. */
void recstore_bundle_close(recstore_bundle* bundle);

/* What a bundle takes and gives. Names and shapes live as long as the bundle. */
size_t recstore_bundle_num_inputs(const recstore_bundle* bundle);
size_t recstore_bundle_num_outputs(const recstore_bundle* bundle);
recstore_tensor recstore_bundle_input(const recstore_bundle* bundle, size_t place);
recstore_tensor recstore_bundle_output(const recstore_bundle* bundle, size_t place);

/* Returns the outputs for inputs in the order of the bundle, NULL on failure. Inputs are not kept. */
recstore_outputs* recstore_bundle_run(
    const recstore_bundle* bundle, const recstore_tensor* inputs, size_t num_inputs);

/* An output, in the order of the bundle. It lives until its outputs are freed, and shares no memory with inputs. */
recstore_tensor recstore_outputs_get(const recstore_outputs* outputs, size_t place);

/* Frees outputs; NULL is ignored. */
void recstore_outputs_free(recstore_outputs* outputs);

/* Why the last call of this thread failed, in English. It lives until the next one fails. */
const char* recstore_last_error(void);

/* How many threads libtorch's loops run on, in every bundle of the process. */
void recstore_set_num_threads(size_t threads);

#ifdef __cplusplus
}
#endif

#endif
