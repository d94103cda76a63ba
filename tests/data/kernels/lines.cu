// A kernel whose every line is known: the tests plant an error at one of them with `bad`.
#include "beside.cuh"
#include "prelude.cuh"

/*# Dropped by the renderer,
    two lines of it. #*/
constexpr int BLOCK = ${block};
${bad if at == 8 else ""}
extern "C" __global__ void lines(const fp16* __restrict__ x,  // [N]
                                 fp32* __restrict__ y,        // [N]
//% if scaled
                                 float scale,
//% endif
                                 int n) {
    const int i = blockIdx.x * BLOCK + threadIdx.x;
    ${bad if at == 16 else ""}
//% if scaled
    float value = __half2float(x[i]) * scale;
    ${bad if at == 19 else ""}
//% else
    float value = twice(__half2float(x[i]));
    ${bad if at == 22 else ""}
//% endif
    ${bad if at == 24 else ""}
//% for step in range(3)
    value += ${step} * 0.5f;
    ${bad if at == 27 and step == 2 else ""}
//% endfor
    //% set tail = 30
    ${bad if at == tail else ""}
    asm volatile("{ .reg .b32 t; mov.b32 t, %0; }" ::"r"(n));  // 100 //% not a statement
    if (i < n) y[i] = value;
}
