/* Launches the vector_add of `fkjit compile --output` through the driver alone, as a program
   without Python would: header and image are what the command wrote.

   cc -DHEADER='"NAME.h"' -DNAME=NAME launch.c -ldl && ./a.out FOLDER */
#include HEADER
#include <dlfcn.h>
#include <stdio.h>

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define OF(word) JOIN(NAME, word)

enum { COUNT = 1 << 20 };
typedef void* Handle;
static float a[COUNT], b[COUNT], out[COUNT];

#define DRIVER(name, ...)                                                   \
  do {                                                                      \
    int (*call)() = (int (*)())dlsym(driver, name);                         \
    int status = call ? call(__VA_ARGS__) : -1;                             \
    if (status) return fprintf(stderr, "%s: status %d\n", name, status), 1; \
  } while (0)

int main(int count, char** words) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver || count != 2) return fprintf(stderr, "no driver, or no folder\n"), 2;
  int device;
  Handle context, module, function;
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", words[1], OF(IMAGE));
  DRIVER("cuInit", 0u);
  DRIVER("cuDeviceGet", &device, 0);
  DRIVER("cuDevicePrimaryCtxRetain", &context, device);
  DRIVER("cuCtxSetCurrent", context);
  DRIVER("cuModuleLoad", &module, path);
  DRIVER("cuModuleGetFunction", &function, module, OF(ENTRY));

  for (int i = 0; i < COUNT; ++i) a[i] = i, b[i] = 2.0f * i;
  OF(arguments)
  arguments = {.a_column = 1,
               .b_column = 1,
               .out_column = 1,
               .rows = 1,
               .rows_1 = 1,
               .rows_2 = 1,
               .columns = COUNT};
  DRIVER("cuMemAlloc_v2", &arguments.a, sizeof a);
  DRIVER("cuMemAlloc_v2", &arguments.b, sizeof b);
  DRIVER("cuMemAlloc_v2", &arguments.out, sizeof out);
  DRIVER("cuMemcpyHtoD_v2", arguments.a, (void*)a, sizeof a);
  DRIVER("cuMemcpyHtoD_v2", arguments.b, (void*)b, sizeof b);
  void* params[OF(ARGUMENTS)];
  OF(params)(&arguments, params);
  const unsigned accesses = COUNT / 4, threads = OF(BLOCK_X);  // of 16 bytes
  const unsigned blocks = (accesses + threads - 1) / threads;
  arguments.pieces = blocks;
  while (1u << arguments.lanes_log2 < threads) ++arguments.lanes_log2;
  DRIVER("cuLaunchKernel", function, blocks, 1u, 1u, OF(BLOCK_X), OF(BLOCK_Y), OF(BLOCK_Z),
         (unsigned)OF(SHARED), (Handle)0, params, (void**)0);
  DRIVER("cuMemcpyDtoH_v2", (void*)out, arguments.out, sizeof out);
  for (int i = 0; i < COUNT; ++i)
    if (out[i] != 3.0f * i) return fprintf(stderr, "out[%d] = %g\n", i, out[i]), 3;
  return printf("%d right\n", COUNT), 0;
}
