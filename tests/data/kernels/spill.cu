// More live values than registers: ${count} of them in a block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* __restrict__ x,  // [N]
                                                            float* __restrict__ y) {      // [N]
    __shared__ float staged[256];
    float values[${count}];
#pragma unroll
    for (int i = 0; i < ${count}; ++i) values[i] = x[i * 1024 + threadIdx.x];
    staged[threadIdx.x % 256] = values[0];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ${count}; ++i)
        y[i * 1024 + threadIdx.x] = values[i] * values[(i * 7 + 3) % ${count}] + staged[i];
}
