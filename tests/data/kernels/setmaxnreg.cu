// ptxas ignores setmaxnreg in a kernel whose block size it is not told, and says so in passing.
extern "C" __global__ void setmaxnreg(float* y) {  // [N]
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    y[threadIdx.x] = 1.f;
}
